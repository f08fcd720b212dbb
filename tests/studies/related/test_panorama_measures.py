"""What `panorama` measures, on curves whose answer is known."""

from itertools import combinations

import numpy as np
import pytest
import xarray as xr
from scipy.stats import mannwhitneyu

from joma.studies.common_axes import NAMES, STEP
from joma.studies.related import panorama_measures as measures
from joma.studies.related.panorama_curves import stack
from joma.studies.related.panorama_sources import SOURCES
from joma.study import NotInRun

STEPS = [0, 1, 2, 10, 30]
BACK, DOWN, FLAT = [1.0, 0.95, 0.5, 0.6, 0.9], [1.0, 0.95, 0.5, 0.4, 0.3], [1.0, 1.0, 0.99, 0.99, 1.0]


def curve(entropy, sink=None, rank=None, steps=STEPS):
    entropy = np.atleast_2d(entropy)
    sink = 1 - entropy / 2 if sink is None else np.broadcast_to(sink, entropy.shape)
    rank = 4 * entropy if rank is None else np.broadcast_to(rank, entropy.shape)
    values = zip(NAMES, (entropy, sink, rank), strict=True)
    return xr.Dataset({name: (("seed", STEP), array) for name, array in values}, {STEP: steps})


def stored(**curves):
    return stack({name.replace("_", "-"): part for name, part in curves.items()}, "stored", member="member")


def trained(**curves):
    curves = {name.replace("_", "-"): part.assign_coords(seed=[0]) for name, part in curves.items()}
    return stack(curves, "trained", member="seed")


@pytest.fixture
def run():
    parts = stored(polarise=curve(DOWN), sparse_dense=curve(BACK), wikitext=curve(BACK, sink=np.nan))
    return xr.merge([parts, trained(block_gelu=curve(DOWN), overlap=curve(BACK), scan_snap=curve(FLAT))])


def verdicts(run):
    return {claim.name: claim.judge(run, "quick")["verdict"] for claim in measures.CLAIMS}


def test_curves_are_in_the_order_of_their_declaration(run):
    assert list(measures.curves(run)) == [name for name in SOURCES if name in measures.curves(run)]
    assert len(measures.curves(run)) == 6


def test_onset_does_not_depend_on_how_long_one_trains():
    assert measures.onset(curve(BACK)) == measures.onset(curve(BACK[:3], steps=STEPS[:3])) == 1
    assert np.isnan(measures.onset(curve(FLAT)))


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [(DOWN, True), (FLAT, False), ([0.9, 0.95, 0.5, 0.4, 0.3], False), ([0.9] * 4 + [0.5], True)],
)
def test_which_entropies_fall_first(entropy, expected):
    assert bool(measures.falls_first(curve(entropy)).item()) is expected


def test_the_share_regained_is_that_of_the_ladder():
    assert float(measures.regained(curve(BACK)).item()) == pytest.approx(0.4 / 0.5)
    assert float(measures.regained(curve(FLAT)).item()) == 0.0
    assert measures.comes_back(curve(BACK))
    assert not measures.comes_back(curve(DOWN))


def test_a_source_is_judged_if_it_falls_and_was_trained_long_enough():
    assert measures.is_judged(curve(DOWN))
    assert not measures.is_judged(curve(FLAT))
    assert not measures.is_judged(curve(DOWN, steps=[0, 4, 5, 10, 30]))


def test_the_sink_is_measured_by_what_it_could_gain():
    rising = curve(DOWN, sink=[0.2, 0.3, 0.4, 0.5, 0.6])
    assert measures.sink_growth(rising) == pytest.approx(0.5)
    assert measures.sink_correlation(rising) == pytest.approx(-1.0)


def test_a_map_of_zeros_has_no_rank():
    zero = curve(DOWN, rank=[np.nan, 2.0, 1.0, 2.0, 4.0])
    assert measures.ranks(zero).sizes[STEP] == 4
    assert float(measures.rank_regained(zero).item()) == pytest.approx(2.0)


def test_the_p_value_is_exact():
    generator = np.random.default_rng(0)
    values, labels = generator.normal(size=9), np.array([True] * 4 + [False] * 5)
    expected = mannwhitneyu(values[labels], values[~labels], alternative="greater", method="exact").pvalue
    assert measures.label_p_value(values, labels) == pytest.approx(expected)
    shares = [measures.label_p_value(values, np.isin(range(9), deal)) for deal in combinations(range(9), 4)]
    assert np.mean(np.array(shares) <= 0.05) <= 0.05


def test_models_of_one_family_count_once():
    rising, flat = [0.2, 0.3, 0.4, 0.5, 0.6], [0.2] * 5
    alone = {"scan_snap": curve(DOWN, sink=rising), "text": curve(BACK, sink=flat), "overlap": curve(BACK, sink=flat)}
    pairs = {
        **alone, "block": curve(DOWN, sink=rising), "block_gelu": curve(DOWN, sink=rising),
        "overlap_gelu": curve(BACK, sink=flat),
    }  # fmt: skip
    one_block = {name: part for name, part in pairs.items() if name not in ("block_gelu", "overlap_gelu")}
    expected = measures.sink_p_value(trained(**one_block))
    assert expected == pytest.approx(1 / 6)
    assert measures.sink_p_value(trained(**pairs)) == pytest.approx(expected)  # of six models by themselves it is 1/20


def test_members_of_a_family_with_different_labels_count_apart():
    values, labels = {"text": 0.5, "entropy-floor": 0.1, "addition": 0.2}, {"text": True, "entropy-floor": False}
    assert measures.by_family(values, {**labels, "addition": False}) == ([0.5, 0.1, 0.2], [True, False, False])


def test_worlds_of_the_ladder_are_no_evidence_for_its_rule():
    world = trained(overlap=curve(BACK), overlap_gelu=curve(BACK))
    assert verdicts(world)["dense-minimum"] == "not tested"
    assert verdicts(xr.merge([world, stored(sparse_dense=curve(BACK))]))["dense-minimum"] == "holds"


def test_verdicts_where_the_rule_is_true(run):
    judged = verdicts(run.drop_sel(trained_source="scan-snap"))
    true = ("falls-first", "no-minimum", "dense-minimum", "rule-better", "rank-falls", "sink-mirrors")
    assert {judged[name] for name in true} == {"holds"}
    assert judged["activation"] == "does not hold"


def test_a_source_that_never_moves_neither_falls_first_nor_loses_rank(run):
    judged = verdicts(run)
    assert judged["falls-first"] == judged["rank-falls"] == "does not hold"


def test_verdicts_where_the_activation_is_true():
    run = stored(polarise=curve(DOWN), sparse_dense=curve(DOWN), wikitext=curve(BACK), markov_unigram=curve(BACK))
    labels = verdicts(run)
    assert labels["dense-minimum"] == "does not hold"
    assert labels["rule-better"] == "does not hold"
    run = stored(polarise=curve(DOWN), wikitext=curve(BACK), markov_unigram=curve(BACK))
    assert verdicts(run)["activation"] == "holds"


def test_claims_without_their_sources_are_not_tested():
    labels = verdicts(trained(text=curve(BACK)))
    for name in ("no-minimum", "dense-minimum", "rule-better", "sink-no-minimum", "rank-follows"):
        assert labels[name] == "not tested"


def test_worlds_of_the_ladder_do_not_count_in_the_contest():
    with pytest.raises(NotInRun):
        measures.minimum_lead(trained(overlap=curve(BACK)))
