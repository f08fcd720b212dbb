"""The study of Theorem 5: its verdicts, that each claim can fail, and what is drawn without computing again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from drawn import legend, series, title
from joma.arguments import InputError
from joma.data.trees import HBLT
from joma.studies.theorems import cooccurrence as study
from joma.study import Context
from joma.theory import hierarchy

SMALL = study.Config(samples=20_000, trees=3)


@pytest.fixture(scope="module")
def run() -> xr.Dataset:
    return study.run(SMALL, Context((0, 1, 2)))


def verdicts(run: xr.Dataset) -> dict[str, str]:
    return {claim.name: claim.judge(run, "quick")["verdict"] for claim in study.CLAIMS}


def test_every_claim_is_decided_and_only_the_unconditional_limit_fails(run):
    others = verdicts(run)
    assert others.pop("slides-any") == "does not hold"
    assert set(others.values()) == {"holds"}


def test_the_unconditional_limit_fails_by_the_distance_between_the_limits(run):
    # Largest at c = 4, height 3 of depth 4: |1 − 3/7 − (1 − 3/4)|; at c = 0 it is 1/4.
    assert study.slides_distance(run).max() == pytest.approx(3 / 4 - 3 / 7, abs=1e-7)
    assert study.slides_distance(run).sel(fine_c=0.0) == pytest.approx(1 / 4, abs=1e-7)


@pytest.mark.parametrize(
    ("claim", "spoil"),
    [
        ("enumeration", lambda run: run.assign(error=run.error + 2e-12)),
        ("sampled", lambda run: run.assign(frequency=run.frequency + 0.02)),
        ("chance", lambda run: run.assign(occurrences=2 * run.occurrences)),
        ("chance", lambda run: run.assign(occurrences=run.occurrences / 2)),
        ("order", lambda run: run.assign(compared_frequency=1 - run.compared_frequency)),
        ("reversal", lambda run: run.assign(compared_frequency=1 - run.compared_frequency)),
        ("limit", lambda run: run.assign(reached=run.reached + 1e-5)),
        ("slides", lambda run: run.assign(reached=run.reached + 1e-5)),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(run, claim, spoil):
    assert verdicts(spoil(run))[claim] == "does not hold"


def test_the_outcome_states_the_run(run):
    sentence = study.outcome(run)
    siblings = run.compared_frequency.sel(bias="equal").where(run.common_height == 1).mean(study.PAIR).mean("seed")
    assert f"its sibling occurs in {100 * float(siblings):.0f} %" in sentence
    reversed_run = run.assign(compared_frequency=1 - run.compared_frequency)
    assert f"its sibling occurs in {100 * (1 - float(siblings)):.0f} %" in study.outcome(reversed_run)


@pytest.mark.parametrize("bias", study.BIASES)
def test_the_study_trees_closed_form_is_their_enumeration(run, bias):
    tree = HBLT(study.SHAPE, study.P0, study.BIASES[bias], SMALL.rho)
    exact = hierarchy.enumerate_cooccurrence(tree.parents, tree.p0, tree.p_child, tree.rho)
    np.testing.assert_allclose(run.compared.sel(bias=bias), exact, rtol=1e-12)


def test_followed_tokens_companions_are_the_theorems_values(run):
    # ρ = 0.9, L = 4, one class in effect: the branches are independent, so the root-joined value is P[l] itself.
    k, rare, common = 0.9**3, 0.9, -0.9
    expected = [(1 + 0.9 ** (2 * h) - 2 * k * rare) / (2 * (1 - k * rare)) for h in (1, 2, 3)] + [(1 - k * common) / 2]
    predicted = study.companions(run, run.compared.sel(bias="unequal"))
    np.testing.assert_allclose(predicted, expected, rtol=1e-12)
    assert study.reversal(run).mean() == pytest.approx(expected[3] - expected[0], abs=0.02)


def test_approach_is_sampled_where_the_line_says(run):
    exact = hierarchy.cooccurrence([1, 2, 3], 4, run.gap.values[:, None], 0.0, complement=True)
    np.testing.assert_allclose(run.approach_frequency.sel(c=0.0).mean("seed"), exact, atol=0.04)
    line = run.approach.sel(c=1.0, height=1).interp(fine_gap=0.1)
    assert float(line) == pytest.approx(float(hierarchy.cooccurrence(1, 4, 0.9, 0.9)), abs=1e-4)


def test_pooling_is_counting_all_seeds_together(run):
    hits = (run.frequency * run.occurrences).sum("seed").values
    trials = run.occurrences.sum("seed").values[:, None, :]
    chance = run.closed.values
    different = ~np.eye(8, dtype=bool)
    z = ((hits - trials * chance)[:, different]) / np.sqrt((trials * chance * (1 - chance))[:, different])
    pooled = study.scores(run, pooled=True)
    np.testing.assert_allclose(np.sort(pooled.values.ravel()), np.sort(z.ravel()), rtol=1e-9)
    assert pooled.shape == (1, 7 * 8 * 7)


def test_a_seed_does_not_depend_on_its_neighbours(run):
    alone = study.run(SMALL, Context((2,)))
    xr.testing.assert_identical(alone.isel(seed=0), run.sel(seed=2))


@pytest.fixture
def panels(run, monkeypatch):
    """Draw a figure by name and return its panels; it may not sample or compute a closed form."""

    def refuse(*_args, **_options):
        raise AssertionError("recomputed")

    monkeypatch.setattr(HBLT, "sample", refuse)
    for name in ("cooccurrence", "cooccurrence_matrix", "enumerate_cooccurrence", "cooccurrence_limit"):
        monkeypatch.setattr(hierarchy, name, refuse)
    return lambda name: [axes for axes in study.STUDY.figures[name].draw(run).axes if axes.get_label() != "<colorbar>"]


def test_agreement_is_drawn_by_height_tree_and_quantile(run, panels):
    heights, trees, quantiles = panels("agreement")
    assert legend(heights) == ["height 1", "height 2", "height 3", "the root"]
    siblings = run.frequency.where(run.common_height == 1).mean(study.PAIR)
    np.testing.assert_allclose(series(heights)["height 1"][:, 1], siblings.mean("seed"))
    assert legend(trees) == ["allowed", "a random tree"]
    assert trees.get_yscale() == "log"
    assert len(series(trees)["a random tree"]) == SMALL.trees * run.sizes["seed"]
    np.testing.assert_array_equal(series(quantiles)["normal distribution"], [[-3, -3], [3, 3]])
    assert abs(series(quantiles)["pairs"][5:-5] @ [1, -1]).max() < 0.5  # chance alone: on the diagonal


def test_limits_are_drawn_over_the_gap_and_over_c(panels):
    approach, limits = panels("limits")
    assert legend(approach) == ["c = 0", "c = 1", "c = 4"]
    assert approach.get_xscale() == "log"
    assert title(approach) == "(a)  The limit depends on c (height 2, depth 4)"
    assert legend(limits) == ["height 1", "height 2", "height 3"]
    at_c_1 = {label: points[points[:, 0] == 1.0, 1].item() for label, points in series(limits).items()}
    assert list(at_c_1.values()) == pytest.approx([3 / 4, 2 / 4, 1 / 4], abs=1e-6)  # 1 − H/L


def test_order_is_drawn_as_two_matrices_and_the_companions_of_one_token(run, panels):
    closed, sampled, companions = panels("order")
    np.testing.assert_array_equal(closed.images[0].get_array(), run.compared.sel(bias="equal"))
    np.testing.assert_array_equal(sampled.images[0].get_array(), run.compared_frequency.sel(bias="equal").isel(seed=0))
    assert closed.images[0].get_clim() == sampled.images[0].get_clim() == (0, 1)
    assert legend(companions) == ["equal $ρ_0$", "unequal $ρ_0$"]
    equal, unequal = (series(companions)[f"{bias} $ρ_0$"][:, 1] for bias in study.BIASES)
    assert (np.diff(equal) < 0).all()
    assert unequal[-1] - unequal[0] == pytest.approx(float(study.reversal(run).mean()))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"samples": 10}, "`samples`"),
        ({"trees": 0}, "`trees`"),
        ({"rho": 1.5}, "`rho`"),
        ({"rhos": (0.5, np.nan)}, "`rhos`"),
        ({"rhos": ()}, "`rhos`"),
        ({"c": (-1.0,)}, "`c`"),
        ({"c": (10.0,)}, "`c`"),
        ({"gaps": (0.0,)}, "`gaps`"),
        ({"c": (1.0, 1.0)}, "`c`"),
    ],
)
def test_a_bad_config_is_refused_by_name(change, name):
    with pytest.raises(InputError, match=name):
        study.run(replace(SMALL, **change), Context((0,)))
