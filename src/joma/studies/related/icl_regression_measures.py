"""What `icl-regression` measures on its run, and its claims."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.studies.related.icl_regression_flows import FLOW_ERROR
from joma.study import Claim, NotInRun, above, at_least, at_most, below, near, select

# A plateau is seen if the loss comes this near to it, and is this flat in ln t there, as shares of the smallest step
# from one plateau to the next. With the four eigenvalues of the quick preset these are 0.010 and 0.021.
NEAR, FLAT = 1 / 7, 2 / 7
ABRUPT = (1e-3, 1e-5)  # sizes of the starts whose falls are compared


def steps(run: xr.Dataset) -> np.ndarray:
    """Return the heights of the steps from one plateau to the next."""
    return -np.diff(run.plateau_loss.values)


def seen(run: xr.Dataset, form: str) -> xr.DataArray:
    """Return the share of inner plateaus at which the loss waits, per seed."""
    smallest, visits = steps(run).min(), select(run[["visit_distance", "visit_slope"]], form=form)
    waits = (visits.visit_distance < NEAR * smallest) & (visits.visit_slope < FLAT * smallest)
    return waits.mean("inner_plateau")


def in_order(run: xr.Dataset) -> xr.DataArray:
    """Return 1 where both full-rank forms learn the directions in the order of their variance, else 0, per seed."""
    times = run.learnt_time.sel(form=["rank one", "full rank"])
    ordered = (times.diff("direction") > 0).all(("form", "direction"))
    return (ordered & np.isfinite(times).all(("form", "direction"))).astype(float)


def drop_slope(run: xr.Dataset) -> float:
    """Return d t_½ / d ln(1/s) times the growth rate, between the two smallest starts along Λ²."""
    times = run.drop_time.sel(share=0.5)[-2:]
    return float(times.diff("drop_scale")[0] / -np.diff(np.log(times.drop_scale))[0] * run.growth_rate)


def relative_width(run: xr.Dataset) -> xr.DataArray:
    """Return (t_90 − t_10) / t_50 of the fall from each start along Λ²."""
    return (run.drop_time.sel(share=0.9) - run.drop_time.sel(share=0.1)) / run.drop_time.sel(share=0.5)


def abruptness(run: xr.Dataset) -> float:
    """Return the relative width of the fall from a small start less that from a larger one."""
    widths = relative_width(run)
    larger, smaller = (float(select(widths, drop_scale=scale)) for scale in ABRUPT)
    return smaller - larger


def half_time_error(run: xr.Dataset) -> float:
    """Return the largest relative error of an aligned head's half time."""
    return float(abs(run.half_time / run.half_time_predicted - 1).max(skipna=False))


def low_rank_excess(run: xr.Dataset) -> xr.DataArray:
    """Return the final loss of a head of low rank less the plateau of that rank, per seed."""
    rank = int(run.low_rank)
    return run.separate_end.sel(form="low rank") - run.plateau_loss.sel(plateau=rank)


def standard_errors(run: xr.Dataset, name: str) -> xr.DataArray:
    """Return the distance of a sampled risk from the exact one in standard errors, per seed."""
    return abs(run[f"{name}_sampled"] - run[f"{name}_exact"]) / run[f"{name}_error"]


def whole_excess(run: xr.Dataset, blocks: str) -> xr.DataArray:
    """Return the final loss of one layer trained by SGD above that of the best step, per seed, one head.

    Both are on the same prompts. The unit is the distance of the first plateau from the optimum.
    """
    loss = select(run.whole_loss, whole_blocks=blocks).isel(whole_heads=0, whole_step=-1)
    return (loss - run.one_step_loss) / float(run.plateau_loss[1] - run.plateau_loss[-1])


def is_behind(run: xr.Dataset) -> xr.DataArray:
    """Return the seeds that end nearer to the first plateau than to the optimum, from random whole matrices."""
    return whole_excess(run, "whole") > 0.5


def is_waiting(run: xr.Dataset) -> xr.DataArray:
    """Return the seeds that end at the first plateau, nearer to it than to any other, from random whole matrices."""
    plateaus = (run.plateau_loss - run.plateau_loss[-1]) / float(run.plateau_loss[1] - run.plateau_loss[-1])
    excess = whole_excess(run, "whole").fillna(-np.inf)  # a diverged seed waits nowhere
    return abs(excess - plateaus).argmin("plateau") == 1


def rank_one_share(run: xr.Dataset, chosen: xr.DataArray) -> xr.DataArray:
    """Return the share of the rank-one product in what the chosen seeds have learnt."""
    if not bool(chosen.any()):
        raise NotInRun("such seed")
    return run.rank_one_share.isel(whole_heads=0).where(chosen, drop=True)


def layer_excess(run: xr.Dataset) -> xr.DataArray:
    """Return what trained layers lose to the best steps, as a share of what the last step gains; the most, per seed.

    It is NaN if the training of any number of layers diverged.
    """
    excess = (run.descent_loss - run.best_loss) / (run.previous_loss - run.best_loss)
    return excess.max("layers", skipna=False)


def transform_gain(run: xr.Dataset) -> xr.DataArray:
    """Return the share of the best steps' loss that layers save which transform x as well, least over L ≥ 2."""
    several = run.isel(layers=run.layers.values > 1)
    if not several.sizes["layers"]:
        raise NotInRun("model of several layers")
    loss = several.layer_loss.sel(layer_blocks="transform").isel(layer_step=-1)
    return (1 - loss / several.best_probe_loss).min("layers", skipna=False)


def noisy_excess(run: xr.Dataset) -> xr.DataArray:
    """Return the risk after training on noisy labels above the least, over that of the optimum for clean labels."""
    if "noisy_loss" not in run:
        raise NotInRun("model that is trained on noisy labels")
    return (run.noisy_loss - run.noisy_least_loss) / (run.noisy_clean_loss - run.noisy_least_loss)


def softmax_excess(run: xr.Dataset, heads: int) -> xr.DataArray:
    """Return the final loss of softmax attention less that of the best linear step on the same prompts, per seed."""
    return select(run.softmax_loss, softmax_heads=heads).isel(softmax_step=-1) - run.one_step_loss


def two_heads_excess(run: xr.Dataset) -> xr.DataArray:
    """Return the excess of two softmax heads, less that of linear attention with one example less, per seed."""
    return softmax_excess(run, 2) - (run.one_less_loss - run.plateau_loss[-1])


FLOW_CLAIMS = (
    Claim(
        "optimum",
        "With merged keys and queries gradient flow ends at one step of preconditioned gradient descent.",
        lambda run: run.merged_excess.max("merged_heads"),
        at_most(1e-4),
        kind="control",
        quantity="final loss less the closed form of the least loss, larger of the numbers of heads",
    ),
    Claim(
        "logistic",
        "For white inputs and an isotropic start the merged flow is a logistic curve.",
        lambda run: float(run.logistic_error),
        at_most(1e-8),
        kind="theorem",
        quantity="largest distance of the integrated flow from the closed form",
    ),
    Claim(
        "drop-law",
        "A merged start that is smaller by a factor of e falls 1/‖Λ²‖ later.",
        drop_slope,
        near(1.0, 0.01),
        kind="control",
        quantity="change of the half time per change of ln(1/s), times ‖Λ²‖, between the two smallest starts along Λ²",
    ),
    Claim(
        "abrupt",
        "The loss of merged keys and queries falls more abruptly from a smaller start.",
        abruptness,
        below(0.0),
        kind="reading",
        quantity="(t_90 − t_10)/t_50 of the fall from a start of 1e-5 less that from 1e-3",
    ),
    Claim(
        "stairs",
        "With heads of rank one the loss waits at the plateaus.",
        lambda run: seen(run, "rank one"),
        at_least(0.9),
        kind="reading",
        quantity="share of the plateaus between the first and the last that are seen: the loss comes within 1/7 of the "
        "smallest step, and its slope in ln t is below 2/7 of it",
        across="mean",
    ),
    Claim(
        "order",
        "Directions are learnt in the order of their variance.",
        in_order,
        at_least(1.0),
        kind="reading",
        quantity="1 if the half times of G_ii/γ_i increase, for heads of rank one and one head of full rank, else 0",
    ),
    Claim(
        "rank-needed",
        "One head of full rank passes plateaus at which heads of rank one wait.",
        lambda run: seen(run, "rank one") - seen(run, "full rank"),
        above(0.0),
        kind="control",
        quantity="share of the plateaus seen with heads of rank one less that with one head of full rank",
        across="interval",
    ),
    Claim(
        "low-rank",
        "A head of rank R ends at the plateau of R learnt directions.",
        lambda run: abs(low_rank_excess(run)),
        at_most(1e-8),
        kind="control",
        quantity="final loss less that plateau, in size",
    ),
    Claim(
        "half-times",
        "A head that is aligned with a direction learns it by the closed form.",
        half_time_error,
        at_most(FLOW_ERROR),
        kind="theorem",
        quantity="largest relative error of the integrated flow's half time; the bound is 1,000 times the integrator's "
        "relative tolerance",
    ),
    Claim(
        "conserved",
        "The flows conserve u² − ‖U‖², or u² − ‖K‖² and ‖K‖² − ‖Q‖², in every head.",
        lambda run: np.maximum(run.merged_drift.max("merged_heads"), run.separate_drift.max("form")),
        at_most(FLOW_ERROR),
        kind="check",
        quantity="largest change along the integrated flows; the bound is 1,000 times the integrator's relative "
        "tolerance",
    ),
    Claim(
        "shift",
        "On prompts twice as long the trained optimum has the risk of the closed form.",
        lambda run: standard_errors(run, "shift"),
        at_most(4.0),
        kind="theorem",
        quantity="sampled risk less exact, in standard errors, in size",
    ),
    Claim(
        "shift-long",
        "On prompts 32 times as long the trained optimum has the risk of the closed form.",
        lambda run: standard_errors(run, "long"),
        at_most(4.0),
        kind="theorem",
        quantity="sampled risk less exact, in standard errors, in size",
    ),
    Claim(
        "not-consistent",
        "Longer prompts do not bring the trained optimum to the best answer.",
        lambda run: run.long_sampled - run.long_least,
        above(0.0),
        kind="theorem",
        quantity="sampled risk on prompts 32 times as long less the least loss at that length",
        across="interval",
    ),
    Claim(
        "noise",
        "Noise of variance σ² in the labels acts as σ² more of the total variance of x.",
        lambda run: standard_errors(run, "noise"),
        at_most(4.0),
        kind="theorem",
        quantity="sampled risk of the optimum for noisy labels less the closed form, in standard errors, in size",
    ),
)
WHOLE_EXCESS = (
    "final loss above the best step on the same prompts, over the distance of the first plateau from the optimum"
)
RANK_ONE = "share of the rank-one product in the sum of norms with that of the theory's blocks"
TRAINED_CLAIMS = (
    Claim(
        "zero-blocks",
        "SGD on sampled prompts reaches the optimum if the other blocks of the matrices are zero.",
        lambda run: whole_excess(run, "descent"),
        at_most(0.5),
        kind="control",
        quantity=f"{WHOLE_EXCESS}, other blocks zero",
    ),
    Claim(
        "whole-start",
        "SGD on sampled prompts reaches the optimum from random whole matrices too.",
        lambda run: whole_excess(run, "whole"),
        at_most(0.5),
        kind="control",
        quantity=f"{WHOLE_EXCESS}, all blocks random",
    ),
    Claim(
        "saddle",
        "Whole matrices that wait at the first plateau have learnt it by the rank-one product of the other blocks.",
        lambda run: rank_one_share(run, is_waiting(run)),
        at_least(0.9),
        kind="control",
        quantity=f"{RANK_ONE}, seeds whose final loss is nearer to the first plateau than to any other",
    ),
    Claim(
        "saddle-behind",
        "Whole matrices nearer to the first plateau than to the optimum have learnt its rank-one product only.",
        lambda run: rank_one_share(run, is_behind(run)),
        at_least(0.9),
        kind="control",
        quantity=f"{RANK_ONE}, these seeds; those that have left the plateau have learnt more by the theory's blocks",
    ),
    Claim(
        "layers",
        "L layers of linear attention, trained as descent, learn the best L steps of preconditioned gradient descent.",
        layer_excess,
        at_most(0.1),
        kind="reading",
        quantity="loss of the trained steps less that of the best, over what the last step gains; largest over L",
    ),
    Claim(
        "transform",
        "Several layers that transform x as well do better than the best steps of preconditioned gradient descent.",
        transform_gain,
        above(0.0),
        kind="control",
        quantity="share of the best steps' loss that is saved on the same prompts; least over L ≥ 2",
        across="interval",
    ),
    Claim(
        "noise-trained",
        "Trained on noisy labels, linear attention learns the best step for these, not that for clean ones.",
        noisy_excess,
        at_most(0.5),
        kind="control",
        quantity="exact risk of the trained step on noisy prompts above the least, over what the optimum for clean "
        "labels loses there",
    ),
    Claim(
        "softmax-one",
        "One head of softmax attention stays above the optimum of linear attention.",
        lambda run: softmax_excess(run, 1),
        above(0.0),
        kind="control",
        quantity="final loss less that of the best linear step on the same prompts",
        across="interval",
    ),
    Claim(
        "softmax-two",
        "Two heads of softmax attention reach what linear attention reaches with one example less.",
        lambda run: two_heads_excess(run) / steps(run)[-1],
        at_most(0.5),
        kind="control",
        quantity="final loss above that of linear attention with N − 1 examples, over the height of the last step",
        across="mean",
    ),
)
CLAIMS = (*FLOW_CLAIMS, *TRAINED_CLAIMS)
