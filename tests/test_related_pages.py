"""What the pages under `docs/related` say of stored runs is what these say, as `test_deviations` has it."""

import numpy as np
import pytest

from joma.studies.related import (
    even_pairs_measures,
    icl_regression_measures,
    induction_measures,
    max_margin_measures,
    panorama_measures,
)
from joma.studies.related.panorama_sources import SOURCES
from test_deviations import Stored, listed, span
from test_docs import ROOT

MOVABLE = 1 + panorama_measures.CAN_CHANGE  # a stable rank above this is not that of a single column or row


def entropy_floor():
    stored = Stored("entropy-floor")
    run = stored.run
    above = run.matrix_lowest.min("seed") - run.identity
    (missed,) = np.argwhere(above.values > 1e-6)
    size, norm = int(run.matrix_size[missed[0]]), float(run.spectral_norm[missed[1]])
    yield f"of the {above.size} pairs of sizes and norms of the preset `paper` that is one, {size} keys at"
    yield f"{size} keys at $\\sigma = {norm:g}$"
    yield f"converges to a mean entropy {float(above.max()):.3f} nats above"
    entropy = run.entropy.sel(arm="plain").isel(rate=-1).mean(("seed", "layer"))
    assert 50 < int(entropy.idxmin("step")) <= 60
    yield "entropy collapses within 60 steps"
    assert float(run.weight_floor.max()) < 0.03 < float(run.floor.mean())
    yield "the floor that it gives is nearly 0 throughout"
    start = run.logit_norm.isel(step=0).mean(("seed", "layer", "rate"))
    assert 0.4 < float(start[1] / start[0]) < 0.6
    yield "the logits of σReparam start at about half the norm"
    yield f"σReparam's is lower by {stored.mean('reparam-loss')} nats"


def even_pairs():
    run = Stored("even-pairs").run
    assert run.max_length.values.tolist() == [4, 6, 8, 12]
    before = int(np.argmax(run.time.values >= run.time.values[-1] / even_pairs_measures.POLARISED))
    doubled = (run.flow_u_norm.isel(time=-1) / run.flow_u_norm.isel(time=before)).values ** 2
    yield f"(factors {listed(doubled[:3])}) and not up to length 12 ({doubled[3]:.2f})"
    growth = late_slope(run.flow_u_norm) / run.flow_svm_norm
    yield f"$\\|u\\|$ grows at {listed(growth.values)} of the rate"
    yield f"the cosine of $u$ with $\\hat u$ is {listed(run.flow_cosine.values, 3)}"
    yield f"has correlations of {listed(run.theorem_1_correlation.values)} with the logits"
    yield f"but is off by {listed(run.theorem_1_error.values, 1)} times their change"
    attention = late_slope(run.flow_w_norm)
    yield f"$\\|W\\|$ goes on growing by {span(attention, 1)} for each unit"
    up_to_6 = float(growth.sel(max_length=6))
    yield f"{up_to_6:.2f} of that rate at the times $3 \\cdot 10^3$"
    yield f"$t^{{{float(late_slope(np.log(run.flow_loss)).sel(max_length=6)):.2f}}}$, and $\\|W\\|$ grows"
    yield f"{float(attention.sel(max_length=6)):.2f} for each unit of $\\ln t$ (flows"


def late_slope(values):
    return even_pairs_measures.late_slope(values, "time")


def icl_autoregression():
    stored = Stored("icl-autoregression")
    run = stored.run
    product = run["product"].isel(part=0) + 1j * run["product"].isel(part=1)
    arms = [arm for arm in run.arm.values if arm.startswith("unitary")]
    relative = (product * (run.length + run.sizes["row"] - 2)).sel(arm=arms)
    away = 100 * abs(relative - 1).max(("seed", "row"))
    yield f"up to {float(away[0]):.1f} % away after 4,000 steps"
    yield f"all of these at $T = 4$ (at most {float(away[1:].max()):.1f} % for longer contexts)"
    mean = 100 * abs(relative.real.mean(("seed", "row")) - 1).max()
    yield f"their mean is within {float(mean):.2f} %"
    assert stored.measured["loss"]["max"] < 0.0002
    yield "is above the formula by less than 0.0002"
    off = np.array(stored.measured["non-commuting-diagonal"]["values"])
    assert (off.size, int((off > 0.02).sum())) == (10, 5)
    yield f"in five of ten seeds, by entries of up to {off.max():.3f}"
    assert (len(arms), run.sizes["seed"], run.attrs["device"]) == (5, 10, "cpu")
    yield "with all five lengths and ten seeds"
    yield f"On a CPU it took {float(run.attrs['wall_time_s']) / 60:.0f} minutes"


def icl_regression():
    run = Stored("icl-regression").run
    yield f"For the ten eigenvalues of the preset paper the rate is {float(run.escape_rate):.3f}"
    excess, behind = (measure(run) for measure in (whole_excess, icl_regression_measures.is_behind))
    yield f"There {int(behind.sum())} of {behind.size} seeds rest near $L_1$"
    late, others = excess.where(behind, drop=True), excess.where(~behind, drop=True)
    assert float(late.min()) == pytest.approx(0.5, abs=0.05)
    assert float(late.max()) == pytest.approx(0.7, abs=0.05)
    assert float(others.max()) <= 1 / 8
    yield "half to seven tenths of the way up from the optimum to $L_1$, the others' at most an eighth"
    unit = float(run.plateau_loss[1] - run.plateau_loss[-1])
    several = run.whole_loss.sel(whole_blocks="whole", whole_heads=[2, 8]).isel(whole_step=-1)
    assert float((several - run.one_step_loss).max() / unit) < 0.5
    two = run.softmax_loss.sel(softmax_heads=2).isel(softmax_step=-1).mean() - run.one_less_loss
    yield f"two heads end {float(two):.3f} above that level, two heights of the last step"
    assert Stored("icl-regression").mean("softmax-two", 0) == "2"


def whole_excess(run):
    return icl_regression_measures.whole_excess(run, "whole")


def induction_phases():
    stored = Stored("induction-phases")
    run = stored.run
    chain, doubly = (
        induction_measures.half_step(induction_measures.full_arm(run, arm)).values
        for arm in (None, "doubly stochastic")
    )
    later = (doubly / chain)[doubly > chain]
    assert (later.size, int((doubly == chain).sum()), int(np.isnan(doubly).sum())) == (8, 1, 1)
    yield f"in eight seeds, by factors of {span(later, 1)}, at the same step in one, and not at all in one"
    loss = induction_measures.full_arm(run, "doubly stochastic")
    below = int((loss.full_loss.isel(full_step=-1) < loss.full_bayes_loss).sum())
    assert below == 5
    yield "five of ten seeds end below it"
    plateau = stored.measured["plateau"]
    yield f"for {plateau['min']:.0f} to {plateau['max']:.0f} steps, less than the 300"
    yield f"is closed after {round(chain.min(), -1):.0f} to {round(chain.max(), -1):.0f} steps"
    share = stored.measured["one-layer"]
    yield f"One layer closes {100 * share['min']:.0f} to {100 * share['max']:.0f} % of the gap"
    weight = float(run.minimal_lag_weight.sel(world="chain", lag=1).mean())
    yield f"({weight:.2f} at step {int(run.step[-1])};"


def max_margin():
    stored = Stored("max-margin")
    values = {name: np.array(claim["values"], dtype=float) for name, claim in stored.measured.items()}
    short = int((values["nuclear"] < 0.96).sum())
    behind = {name: int((values[name] <= 0).sum()) for name in ("nuclear-above-w", "nuclear-late")}
    assert behind == {"nuclear-above-w": 5, "nuclear-late": 1}
    assert values["nuclear-rises"].min() > 0
    yield f"{short} of 50 seeds are below 96 % of the largest nuclear margin"
    yield "and five have less of it than $W$. All gain it later, as derived above, but one still has less"
    lost = (1 - stored.run.selects_best.sel(scores="equal")).sum("seed")
    zero, random = (int(lost.sel(start=start)) for start in ("zero", "random"))
    yield f"this happens in {zero} of 50 seeds from zero and in {random} of 50 from a random start"
    best = 100 * float(max_margin_measures.global_share(stored.run).mean())
    yield f"depends on the sizes: {best:.0f} % with 20 sequences of 10 tokens"
    unsettled = 100 * float(1 - max_margin_measures.converged(stored.run).mean())
    yield f"{unsettled:.0f} % of the paths with free scores have not settled"
    misses = [int((values["direction"] > 0.03).sum()), int((values["trained-direction"] < 0.998).sum())]
    assert misses == [1, 1]
    yield f"fails in one of 50 seeds; so does `trained-direction`, in one of {values['trained-direction'].size}"


def panorama():
    run = Stored("panorama").run
    curves, judged = panorama_measures.curves(run), panorama_measures.judged(run)
    back = {name: panorama_measures.regained(curve) for name, curve in curves.items()}
    yield f"regain {span(back['addition'])} of their fall in every seed"
    yield f"the small model on the embedded text by {span(back['text'])} of its fall"
    yield f"WikiText-2 by {span(back['wikitext'])} with ReLU and by {span(back['wikitext-linear'])} with linear units"
    yield f"two layers on bytes, stays ({span(back['entropy-floor'])})"
    yield f"and, by {float(back['induction-phases'].mean()):.2f} only, the in-context Markov chain"
    yield f"Theorem 4 comes back by {float(back['sparse-dense'].mean()):.2f} of its fall"
    assert int((back["overlap"] == 0).sum()) == 2
    yield "two of eight seeds with linear units fall by less than 0.02 and count as 0"
    wrong = [name for name in judged if panorama_measures.comes_back(judged[name]) != SOURCES[name].units_predict]
    assert (len(wrong), len(judged)) == (5, 14)
    yield "The activation fails in five of 14 models"
    growth = {name: panorama_measures.sink_growth(curve) for name, curve in panorama_measures.with_sink(run).items()}
    p_values = without_one_family(growth, {name: SOURCES[name].minimum == "none" for name in growth})
    yield f"$p = {panorama_measures.sink_p_value(run):.2f}$ (`sink-no-minimum`)"
    yield f"(`sink-no-minimum`), and {span(p_values)} without one family"
    movable = {name: curve for name, curve in judged.items() if float(curve.axes_rank.max()) > MOVABLE}
    ranks = {name: float(panorama_measures.rank_regained(curve).mean("seed")) for name, curve in movable.items()}
    returns = {name: panorama_measures.comes_back(curve) for name, curve in movable.items()}
    assert without_one_family(ranks, returns).min() > 0.4
    yield "(`rank-follows`, $p > 0.4$ whichever family is left out)"


def without_one_family(values, labels):
    """Return the p-values of `label_p_value` with each family left out in turn."""
    families = {name: SOURCES[name].family or name for name in values}
    other_families = [
        [name for name in values if families[name] != family] for family in sorted(set(families.values()))
    ]
    parts = [
        ({name: values[name] for name in names}, {name: labels[name] for name in names}) for names in other_families
    ]
    return np.array([panorama_measures.label_p_value(*panorama_measures.by_family(*part)) for part in parts])


def polarise():
    stored = Stored("polarise")
    share = (stored.run.law / stored.run.error).isel(time=-1)
    twenty, more = (span(share.sel(tokens=tokens)) for tokens in (20, 64))
    yield f"it is {twenty} times the losers' weight for 20 tokens, but {more} times for 64"
    distance = abs(stored.run.final_entropy - stored.run.predicted_entropy).max("target")
    assert int((distance > 0.01).sum()) == 1
    yield f"one of {distance.size} seeds is {float(distance.max()):.3f} nats away"
    assert stored.measured["inherent"]["min"] > 0.999
    yield "ends at more than 99.9 % of the largest entropy"
    yield f"the solvers agree to {stored.measured['one-orbit']['max']:.0e}".replace("e-0", "e-")


def rank_collapse():
    stored = Stored("rank-collapse")
    run = stored.run
    zero = int(np.isinf(run.log10_rms.sel(arm="strong MLP")).any("layer").sum())
    yield f"(in {zero} of {run.sizes['seed']} stacks at 256 dimensions)"
    share = (10 ** run.log10_relative.sel(arm="skip")).median("seed")
    yield f"falls from {float(share[0]):.3f} to {float(share[-1]):.2f} (median)"
    assert 0.3 < stored.measured["large-scores"]["mean"] < 0.37
    yield "about a third of the stacks has a residual above 0.1 after eight layers"
    least = float(run.log10_scored.sel(score_scale=16.0).min())
    yield f"the others range down to 1e{least:.0f}"
    yield f"is at most {stored.measured['bound']['max']:.0e} of it with 256 dimensions".replace("e-0", "e-")


PAGES = (
    entropy_floor,
    even_pairs,
    icl_autoregression,
    icl_regression,
    induction_phases,
    max_margin,
    panorama,
    polarise,
    rank_collapse,
)


@pytest.mark.parametrize("sentences", PAGES, ids=lambda function: function.__name__)
def test_the_numbers_of_stored_runs_are_those_of_the_page(sentences):
    page = ROOT / "docs" / "related" / f"{sentences.__name__.replace('_', '-')}.md"
    text = " ".join(page.read_text(encoding="utf-8").split()).replace("−", "-")
    missing = [sentence for sentence in sentences() if sentence not in text]
    assert missing == []
