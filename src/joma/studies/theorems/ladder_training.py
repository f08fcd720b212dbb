"""The trained ladder: from JoMA's block to a one-layer language model, one premise at a time.

Attention bounces if its entropy falls visibly and regains a tenth of its fall by the end of training. An arm that was
trained for less than ten times as long as its loss takes to fall does not count among those that bounce or do not. One
that has not bounced and was trained as briefly, or whose entropy is least at the end, is still falling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xarray as xr
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, choice, positive, whole
from joma.models.one_layer import OneLayer
from joma.models.one_layer_config import OneLayerConfig
from joma.studies import entropy_return
from joma.studies.entropy_return import fall, recovery
from joma.studies.theorems.ladder_arms import ARMS, Arm
from joma.studies.theorems.ladder_optimum import optimum
from joma.studies.theorems.ladder_task import DTYPE, Task, TrainedLadderConfig, model_config
from joma.study import Arms, Claim, Context, NotInRun, above, at_least, at_most, select
from joma.train import Optimiser, Record

RECORDS = 150
STEP = "trained_step"
VISIBLE_FALL = 0.02  # of the entropy, as a share of its largest value
BOUNCE = 0.1  # the share of its fall that entropy must regain
FALLEN, PATIENCE = 0.9, 10  # the loss has fallen by this share at some step; an arm is trained this many times as long
END = 0.9  # entropy that is least after this share of the steps is still falling
TESTED = 0.5  # the share of a rung's arms that must have been trained long enough
# Largest norm of the gradient at which a search has reached the optimum. A gradient g of the logits of a row leaves
# them about g/κ from their optimum, κ being the curvature, and the row's entropy about g/(2κ); over 20 rows this adds
# up to at most √20 |g|/(2κ). With a flat κ = 0.01 it reaches a visible 0.02 at |g| = 1e-4.
MAX_GRADIENT = 1e-4


def train(config: TrainedLadderConfig, context: Context) -> xr.Dataset:
    """Train every arm at every learning rate; arms whose models have the same parts are trained as one model.

    Returns:
        Over `seed`, `trained_step`, `arm` and `rate` (the factor of the arm's learning rate): `trained_entropy`, the
        mean entropy of attention's rows as a share of its largest possible value, and `trained_loss`, both on the
        probe, and `trained_spread`, the standard deviation of the attention logits over tokens. With `trained_optimum`
        also what `ladder_optimum.optimum` returns.
    """
    _check(config)
    groups: dict[tuple[OneLayerConfig, str, int], list[str]] = {}
    for name in config.trained_arms:
        arm = ARMS[name]
        groups.setdefault((model_config(config, arm), arm.optimiser, arm.repeated), []).append(name)
    parts = [_train_group(config, context, names) for names in groups.values()]
    trained = xr.concat(parts, dim="arm").sel(arm=list(config.trained_arms)).transpose("seed", ...)
    return xr.merge([trained, optimum(config, context)]) if config.trained_optimum else trained


def _check(config: TrainedLadderConfig) -> None:
    for name in config.trained_arms:
        choice("trained_arms", name, ARMS)
    if len({*config.trained_arms}) < len(config.trained_arms) or not config.trained_arms:
        raise InputError("trained_arms", "one or more different names", config.trained_arms, "name each arm once")
    positive("trained_rates", config.trained_rates, ndim=1)
    if len({*config.trained_rates}) < len(config.trained_rates) or not config.trained_rates:
        raise InputError("trained_rates", "one or more different factors", config.trained_rates, "give each once")
    whole("trained_length", config.trained_length, low=3)


def _train_group(config: TrainedLadderConfig, context: Context, names: Sequence[str]) -> xr.Dataset:
    """Train arms of the same parts as one model, whose leading axis is arm, rate, seed."""
    steps, factors = whole("trained_steps", config.trained_steps), list(config.trained_rates)
    rungs = [ArmAtRate(ARMS[name], factor) for name in names for factor in factors]
    arms, task = Arms("arm", range(len(rungs))), Task(config, context, [rung.arm for rung in rungs])
    model = OneLayer(task.model_config, generators=context.generators("ladder, weights", arms), dtype=DTYPE)
    trajectory = context.fit(
        model,
        task.loss,
        optimiser=Optimiser(
            rungs[0].arm.optimiser,
            context.per_model([rung.rate for rung in rungs]),
            schedules=_schedules(context, rungs, task.model_config.logits),
        ),
        steps=steps,
        record=Record(task.measure, at=schedule.logarithmic(RECORDS, steps), gradients=False),
        arms=arms,
        label=f"ladder, {', '.join(names)}",
    )
    by_name = {
        name: trajectory.isel(arm=slice(first, first + len(factors))).rename(arm="rate").assign_coords(rate=factors)
        for name, first in zip(names, range(0, len(rungs), len(factors)), strict=True)
    }
    joined = xr.concat(list(by_name.values()), dim=xr.IndexVariable("arm", list(names)))
    measures = {"entropy": "trained_entropy", "probe_loss": "trained_loss", "spread": "trained_spread"}
    return joined[list(measures)].rename({**measures, "step": "trained_step"})


@dataclass(frozen=True)
class ArmAtRate:
    """An arm at one of its learning rates."""

    arm: Arm
    factor: float

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.arm.rate * self.factor

    @property
    def last_step(self) -> float:
        """The step after which w is frozen: the same time of training at every learning rate."""
        return float("inf") if self.arm.frozen_at is None else self.arm.frozen_at / self.factor


def _schedules(context: Context, rungs: Sequence[ArmAtRate], logits: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the factors of the learning rate of attention's logits, and of w, which some arms freeze."""
    speed = torch.tensor(context.per_model([rung.arm.speed for rung in rungs]), device=context.device)
    last_step = torch.tensor(context.per_model([rung.last_step for rung in rungs]), device=context.device)
    schedules: dict[str, Callable[[Tensor], Tensor]] = {}
    if any(rung.arm.speed != 1.0 for rung in rungs):
        schedules["z" if logits == "free" else "W_[QK]"] = lambda _: speed
    if any(rung.arm.frozen_at is not None for rung in rungs):
        schedules["w"] = lambda step: (step < last_step).to(speed.dtype)
    return schedules


def judged_rate(run: xr.Dataset, arm: str) -> float:
    """Return the rate at which an arm is judged: that of the lowest loss at the end, in the mean over seeds."""
    loss = select(run.trained_loss, arm=arm).isel(trained_step=-1).mean("seed", skipna=False)  # NaN if a seed diverged
    if loss.isnull().all():
        raise NotInRun(f"arm {arm} in which no seed diverged")
    return float(loss.idxmin("rate"))


def judged_trajectory(run: xr.Dataset, arm: str) -> xr.Dataset:
    """Return the trajectory of an arm over `seed` and `trained_step` at the rate at which it is judged."""
    return run[["trained_entropy", "trained_loss"]].sel(arm=arm, rate=judged_rate(run, arm), drop=True)


def share_regained(entropy: xr.DataArray) -> xr.DataArray:
    """Return the share of its fall that the entropy has regained at the end; 0 where it does not fall visibly."""
    return entropy_return.share_regained(entropy, STEP, visible=VISIBLE_FALL)


def bounced(trajectory: xr.Dataset) -> xr.DataArray:
    """Return whether the entropy of each seed falls visibly and regains a tenth of its fall."""
    return share_regained(trajectory.trained_entropy) >= BOUNCE


def still_falling(trajectory: xr.Dataset) -> xr.DataArray:
    """Return the seeds that have not bounced, but cannot be said not to bounce: they were trained too briefly."""
    steps, entropy = trajectory.trained_step, trajectory.trained_entropy
    step_of_least = steps.isel(trained_step=entropy.argmin("trained_step", skipna=False))
    return ~bounced(trajectory) & ((step_of_least > END * steps[-1]) | ~long_enough(trajectory))


def long_enough(trajectory: xr.Dataset) -> xr.DataArray:
    """Return whether each seed was trained for ten times as many steps as its loss needs for 90 % of its fall."""
    return PATIENCE * step_of_fall(trajectory) <= trajectory.trained_step[-1]


def step_of_fall(trajectory: xr.Dataset) -> xr.DataArray:
    """Return the first recorded step at which the loss has made 90 % of its fall; NaN where it never falls."""
    loss = trajectory.trained_loss
    fallen = loss.isel(trained_step=0) - loss
    largest = fallen.max("trained_step")
    return trajectory.trained_step.where((fallen >= FALLEN * largest) & (largest > 0)).min("trained_step")


def _require(flags: xr.DataArray, arm: str, condition: str) -> None:
    """Raise `NotInRun` unless all seeds of an arm meet a condition."""
    if not bool(flags.all()):
        raise NotInRun(f"arm {arm} {condition}")


def settled_share(arm: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the share of its fall that an arm regains, if none of its seeds is still falling."""

    def measure(run: xr.Dataset) -> xr.DataArray:
        trajectory = judged_trajectory(run, arm)
        _require(~still_falling(trajectory), arm, "that was trained until its entropy stopped falling")
        return share_regained(trajectory.trained_entropy)

    return measure


def fallen_share(arm: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the share of its fall that an arm regains, if it falls visibly; it may fall without bound."""

    def measure(run: xr.Dataset) -> xr.DataArray:
        entropy = judged_trajectory(run, arm).trained_entropy
        _require(fall(entropy, STEP) >= VISIBLE_FALL, arm, "that was trained until its entropy fell visibly")
        return share_regained(entropy)

    return measure


def switched_arms(rung: str) -> list[str]:
    """Return the arms of a rung whose loss has a finite optimum; those of which it has none are claims of their own."""
    return [name for name, arm in ARMS.items() if arm.rung == rung and arm.world == "overlap" and not arm.constant]


def share_bounced(rung: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the share of the arms of a rung that bounce, of those that were trained long enough."""
    names = switched_arms(rung)

    def measure(run: xr.Dataset) -> xr.DataArray:
        trajectories = xr.concat([judged_trajectory(run, name) for name in names], dim="arm")
        tested = long_enough(trajectories)
        if bool((tested.mean("arm") < TESTED).any()):
            fewest = int(tested.sum("arm").min())
            raise NotInRun(f"{rung} arms of which half were trained long enough, but in some seed {fewest}")
        return bounced(trajectories).where(tested).mean("arm")

    return measure


def product_excess(run: xr.Dataset) -> xr.DataArray:
    """Return what product logits with one query regain of the entropy, less what free ones do at the same rate."""
    same_rate = run[["trained_entropy", "trained_loss"]].sel(rate=judged_rate(run, "base"), drop=True)
    free, product = same_rate.sel(arm="base", drop=True), select(same_rate, arm="product")
    for arm, trajectory in {"base": free, "product": product}.items():
        _require(~still_falling(trajectory), arm, "that was trained until its entropy stopped falling")
    return recovery(product.trained_entropy, STEP) - recovery(free.trained_entropy, STEP)


def at_own_rate(run: xr.Dataset, arm: str) -> xr.Dataset:
    """Return the trajectory of an arm at its own learning rate: arms that differ in speed are compared there."""
    return select(run[["trained_entropy", "trained_loss"]], arm=arm, rate=1.0)


def settled_entropy(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Return the entropy of an arm at its own learning rate, if it was trained long enough."""
    trajectory = at_own_rate(run, arm)
    _require(long_enough(trajectory), arm, "that was trained for ten times as long as its loss falls")
    return trajectory.trained_entropy


def share_gained(fast: str, slow: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the share of its fall that one arm regains, less that of another."""
    return lambda run: share_regained(settled_entropy(run, fast)) - share_regained(settled_entropy(run, slow))


def growth_ratio(run: xr.Dataset) -> xr.DataArray:
    """Return how much the spread of product logits has grown, over that of free ones, when the loss has fallen.

    Growth, and not the spread: product logits start with a larger one. The loss is that of the free ones.
    """
    step = step_of_fall(at_own_rate(run, "all-free"))
    _require(step.notnull(), "all-free", "whose loss falls")
    spreads = [select(run.trained_spread, arm=arm, rate=1.0) for arm in ("all-product", "all-free")]
    product, free = (spread.sel(trained_step=step) - spread.isel(trained_step=0) for spread in spreads)
    return product / free


def optimal_entropy(run: xr.Dataset, logits: str) -> xr.DataArray:
    """Return the entropy of attention at the optimum with all positions."""
    if "trained_optimum_entropy" not in run:
        raise NotInRun("optimum; give `trained_optimum` some sequences")
    solution = run.sel(logits=logits, drop=True)
    if "trained_optimum_gradient" in run and not bool((solution.trained_optimum_gradient <= MAX_GRADIENT).all()):
        raise NotInRun(f"optimum with {logits} logits at which the gradient of every seed is below {MAX_GRADIENT:g}")
    return solution.trained_optimum_entropy


def below_optimum(arm: str, logits: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the optimum's entropy less the least entropy of an arm on its way."""
    return lambda run: optimal_entropy(run, logits) - settled_entropy(run, arm).min(STEP, skipna=False)


def below_approached_optimum(run: xr.Dataset) -> xr.DataArray:
    """Return the optimum's entropy less the least of free logits, if these fall visibly and approach the optimum.

    They approach it if less than half of their distance from it at the start is left at the end.
    """
    entropy, target = settled_entropy(run, "all-free"), optimal_entropy(run, "free")
    _require(fall(entropy, STEP) >= VISIBLE_FALL, "all-free", "whose entropy fell visibly")
    start, end = (abs(entropy.isel(trained_step=index, drop=True) - target) for index in (0, -1))
    _require(end < start / 2, "all-free", "that ended nearer to its optimum than half of the distance at the start")
    return target - entropy.min(STEP, skipna=False)


def difference_of_optima(run: xr.Dataset) -> xr.DataArray:
    """Return the distance between the entropies at the optimum with free and with product logits."""
    return abs(optimal_entropy(run, "free") - optimal_entropy(run, "product"))


def sparser_on_early_weights(run: xr.Dataset) -> xr.DataArray:
    """Return the optimum's entropy less that at which attention ends where the weights were frozen early."""
    return optimal_entropy(run, "free") - settled_entropy(run, "all-frozen").isel(trained_step=-1)


SHARE = "share of its fall that the entropy of attention regains by the end of training"
NOTE = "at the rate of the lowest loss"
LADDER_CLAIMS = (
    Claim(
        "base",
        "The block that is trained on overlapping classes turns dense again, with linear units.",
        settled_share("base"),
        at_least(BOUNCE),
        kind="control",
        quantity=f"{SHARE}, {NOTE}",
    ),
    Claim(
        "product",
        "With products of queries and keys as logits, the trained block regains more entropy than with free logits.",
        product_excess,
        above(0.0),
        kind="control",
        quantity="entropy at the end less its minimum, as a share of ln n: product less free logits, at one rate; the "
        "initial logits differ too",
    ),
    *(
        Claim(
            f"trained-{arm}",
            f"The trained block does not turn dense again {condition}.",
            fallen_share(arm),
            at_most(BOUNCE),
            kind="control",
            quantity=f"{SHARE}, {NOTE}",
        )
        for arm, condition in {
            "separable": "on separable classes",
            "separable-adam": "on separable classes with Adam",
            "separable-mlp": "on separable classes with ReLU units and a head",
            "separable-repeated": "on separable classes and a batch that every step reads again",
            "constant": "under a constant gradient",
            "constant-relu": "under a constant gradient with ReLU units",
        }.items()
    ),
    Claim(
        "trained-repeated",
        "The trained block turns dense again on a batch that every step reads again.",
        settled_share("repeated"),
        at_least(BOUNCE),
        kind="control",
        quantity=f"{SHARE}, {NOTE}",
    ),
    Claim(
        "top",
        "The attention of a one-layer language model turns sparse, then dense again.",
        settled_share("top"),
        at_least(BOUNCE),
        kind="control",
        quantity=f"{SHARE}, {NOTE}",
    ),
    Claim(
        "top-linear",
        "The attention of a one-layer language model with linear units turns sparse, then dense again.",
        settled_share("top-linear"),
        at_least(BOUNCE),
        kind="control",
        quantity=f"{SHARE}, {NOTE}",
        across="mean",
    ),
    *(
        Claim(
            rung,
            statement,
            share_bounced(rung),
            above(0.5),
            kind="control",
            quantity=f"share of {len(switched_arms(rung))} arms that regain a tenth of their fall, {NOTE}; arms that "
            "were trained for less than ten times as long as their loss falls are left out",
            across="interval",
            seeds=8,
        )
        for rung, statement in {
            "one-in": "Most single steps from the block towards a language model leave the bounce as it is.",
            "one-out": "Most single steps from the language model back towards the block leave the bounce as it is.",
        }.items()
    ),
)
# Why product logits bounce at all positions and free ones do not: both express the same functions, whose optimum has
# sparse attention. The two arms of `speed-free` start from the same logits, and so do those of `speed-product`. Product
# logits start larger than free ones, so that the arms of `overshoot` and `no-overshoot` differ in that too.
# While weights are small the loss is nearly linear in attention, and the best attention for them is sparser than at the
# optimum. Fast logits follow it below the optimum's entropy and come back as the weights grow; slow ones arrive late,
# and from above. Products of queries and keys are fast: their gradients grow with queries and keys themselves.
BEYOND = "the optimum's entropy less {}, as a share of ln n; by Newton's method on exact targets, to a gradient of 1e-4"
SPEED_CLAIMS = (
    Claim(
        "speed-free",
        "At all positions, free logits that learn ten times faster regain more of their fall.",
        share_gained("all-free-fast", "all-free"),
        above(0.0),
        kind="control",
        quantity=f"{SHARE}: ten times the learning rate for the logits, less the same rate for all",
        across="interval",
    ),
    Claim(
        "speed-product",
        "At all positions, product logits that learn ten times slower regain less of their fall.",
        share_gained("all-product", "all-product-slow"),
        above(0.0),
        kind="control",
        quantity=f"{SHARE}: the same learning rate for all, less a tenth of it for the logits",
        across="interval",
    ),
    Claim(
        "product-speed",
        "At all positions and the same learning rate, product logits grow faster than free ones.",
        growth_ratio,
        above(1.0),
        kind="control",
        quantity="growth of the logits' standard deviation over tokens, product over free, until 90 % of the loss's "
        "fall; product logits also start larger",
        across="interval",
    ),
    Claim(
        "same-optimum",
        "Newton's method reaches the same optimum with free and product logits.",
        difference_of_optima,
        at_most(VISIBLE_FALL),
        kind="check",
        quantity="difference of the entropies at the two optima, at all positions: products have full rank, so that "
        "both can express the same functions; a fall of 0.02 counts as visible",
        across="mean",
    ),
    Claim(
        "overshoot",
        "At all positions, product logits fall below the entropy of their optimum before they come back.",
        below_optimum("all-product", "product"),
        above(0.0),
        kind="control",
        quantity=BEYOND.format("the least on the way"),
        across="interval",
    ),
    Claim(
        "no-overshoot",
        "At all positions, free logits approach the entropy of their optimum from above.",
        below_approached_optimum,
        at_most(0.0),
        kind="control",
        quantity=BEYOND.format("the least on the way"),
        across="interval",
    ),
    Claim(
        "early-weights",
        "Attention that is trained on weights frozen early turns sparser than at the optimum.",
        sparser_on_early_weights,
        above(0.0),
        kind="control",
        quantity=BEYOND.format("that at the end, with w frozen after 100 steps"),
        across="interval",
    ),
)
CLAIMS = (*LADDER_CLAIMS, *SPEED_CLAIMS)


def outcome(run: xr.Dataset) -> str:
    """Return what came out of the trained arms: how many bounce, and what speed does at all positions."""
    arms = run.arm.values.tolist()
    counts = [_seeds_that_bounce(run, arm) for arm in arms]
    every, none = counts.count(run.sizes["seed"]), counts.count(0)
    tested = sum(_trained_long_enough(run, arm) for arm in arms)
    sentence = (
        f"Of {len(counts)} models between this block and a language model, with one or two things changed, {every} "
        f"turn dense again in every seed and {none} in none; {tested} were trained for ten times as long as their loss "
        "falls, in every seed."
    )
    names = ("all-free", "all-free-fast", "all-product", "all-product-slow")
    if not {*names} <= {*arms} or 1.0 not in run.rate:
        return sentence
    shares = [f"{100 * float(share_regained(at_own_rate(run, arm).trained_entropy).mean()):.0f} %" for arm in names]
    return (
        f"{sentence} If every position predicts, attention logits that are parameters themselves regain {shares[0]} of "
        f"their fall, and {shares[1]} if they learn ten times faster; logits q·k regain {shares[2]}, and {shares[3]} "
        "if they learn ten times slower."
    )


def _seeds_that_bounce(run: xr.Dataset, arm: str) -> int:
    try:
        return int(bounced(judged_trajectory(run, arm)).sum())
    except NotInRun:  # it diverged at every rate
        return 0


def _trained_long_enough(run: xr.Dataset, arm: str) -> bool:
    try:
        return bool(long_enough(judged_trajectory(run, arm)).all())
    except NotInRun:
        return False
