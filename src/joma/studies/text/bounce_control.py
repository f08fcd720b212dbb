"""Is the bounce good for anything? Attention frozen or clamped at its entropy's minimum, compared with the free run.

The slides say that in one layer the bounce only slows training, and that in several layers it is what lets them build
a hierarchy. With frozen attention, the first says that the loss ends lower, the second that it ends higher. Freezing
W_Q and W_K leaves attention to embeddings and lower layers; so in another arm the attention weights themselves are
frozen. That takes away all else that attention would learn, too; so in a third arm a temperature for each layer clamps
entropy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from joma.arguments import InputError, choice, distinct, whole
from joma.drawing import COLOURS, band, canvas, letters, marker
from joma.studies.text import language_training
from joma.studies.text.entropy_bounce import P_VALUE, SIGNIFICANCE, bounce_p_value
from joma.studies.text.language_training import QUICK_RATE, Freezing, LayeredSetting, TextColumns, Variant
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, above, at_most, below, mean_interval, select
from joma.train.optimiser import Schedule

ARMS = {
    "free": "free",
    "held": "W_Q, W_K frozen from each layer's minimum",
    "steady": "attention weights frozen from the minimum",
    "frozen": "W_Q, W_K frozen from the start",
    "clamped": "entropy clamped from each layer's minimum",
}
CONTROLS = {  # the claims' names, and what they are about
    "held": ("loss", "W_Q and W_K are frozen"),
    "steady": ("steady", "the attention weights are frozen"),
    "clamped": ("clamped", "entropy is clamped"),
}
COLOUR_INDEX = {arm: index for index, arm in enumerate(ARMS)}
STORED = ("loss", "valid_loss", "entropy", "diverged")


@dataclass(frozen=True)
class Config(LayeredSetting):
    """The setting of text, the model and its training, and what is compared."""

    activation: str = "relu"
    rate: float = 1e-4
    depths: tuple[int, ...] = (1, 2, 5)
    """Numbers of layers."""
    arms: tuple[str, ...] = ("held", "steady", "frozen", "clamped")
    """What is frozen or clamped, beside the free run: names of `ARMS`."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train all depths freely, then again from the same start with attention frozen from its minimum on.

    In the free run W_Q and W_K are frozen after its last step. So the schedules of every arm have the same patterns
    and sums are taken in the same order: on the CPU the arms agree in every bit until they must differ.
    """
    depths = [whole("depths", depth) for depth in distinct("depths", config.depths)]
    if "free" in config.arms:
        raise InputError("arms", "what is frozen beside the free run", config.arms, "leave `free` out: it always runs")
    for arm in distinct("arms", config.arms, least=0):
        choice("arms", arm, ARMS)
    text = language_training.read_text(config, context)
    never = {depth: np.full((len(context.seeds), depth), config.steps) for depth in depths}
    untouched = {("free", depth): Freezing(freeze_schedules(never[depth], context.device)) for depth in depths}
    trajectories = _train_arms(config, context, text, untouched)
    frozen = {
        (arm, depth): freezing
        for depth in depths
        for arm, freezing in _freezings(config.arms, trajectories["free", depth], never[depth], context).items()
    }
    trajectories |= _train_arms(config, context, text, frozen)
    parts = [_join_arms({arm: trajectories[arm, depth] for arm in ("free", *config.arms)}) for depth in depths]
    return xr.concat(parts, xr.Variable("depth", depths), join="outer").transpose("seed", "depth", ...)


def _freezings(
    arms: Sequence[str], free: xr.Dataset, never: Int[np.ndarray, "seed layer"], context: Context
) -> dict[str, Freezing]:
    """Return what each arm of one depth freezes, from the minima of entropy in the free run."""
    hold, turn = _minima(free)
    schedules = {"held": hold, "frozen": 0 * never}
    return {
        arm: Freezing(
            freeze_schedules(schedules.get(arm, never), context.device),
            attention_steps=turn if arm == "steady" else None,
            entropy_steps=hold if arm == "clamped" else None,
        )
        for arm in arms
    }


def _minima(free: xr.Dataset) -> tuple[Int[np.ndarray, "seed layer"], Int[np.ndarray, " seed"]]:
    """Return the steps of the least entropy of each layer, and of the mean over layers."""
    turn = minimum_steps(free.entropy.mean("layer").expand_dims(layer=1))[:, 0]
    return minimum_steps(free.entropy), turn


def _join_arms(arms: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Join the arms of one depth, with the steps `hold` [seed, layer] and `turn` [seed] from which they are frozen."""
    hold, turn = _minima(arms["free"])
    joined = xr.concat(list(arms.values()), xr.Variable("arm", list(arms)))
    joined = joined.assign(hold=(("seed", "layer"), hold), turn=(("seed",), turn))
    return joined.assign_coords(layer=range(joined.sizes["layer"]))


def minimum_steps(entropy: xr.DataArray) -> Int[np.ndarray, "seed layer"]:
    """Return the recorded step of each layer's least entropy, mean over heads; the first of several equal minima."""
    curve = entropy.mean("head").transpose("seed", "layer", "step")
    return entropy.step.values[curve.fillna(np.inf).argmin("step").values]


def freeze_schedules(freeze_steps: Int[np.ndarray, "seed layer"], device: str) -> dict[str, Schedule]:
    """Return factors of the learning rate that freeze W_Q and W_K of each layer and seed after so many updates.

    >>> factor = freeze_schedules(np.array([[3], [5]]), "cpu")["layers.0.attention.[qk]*"]
    >>> factor(torch.tensor(3))
    tensor([0., 1.], dtype=torch.float64)
    """
    by_layer = torch.as_tensor(freeze_steps, device=device).unbind(1)
    return {f"layers.{layer}.attention.[qk]*": partial(is_before, steps) for layer, steps in enumerate(by_layer)}


def is_before(freeze_steps: Int[Tensor, " model"], step: Tensor) -> Tensor:
    """Return the factor of each model's learning rate: 1 before the step from which it is frozen, then 0."""
    return (step < freeze_steps).double()


def _train_arms(
    config: Config, context: Context, text: TextColumns, freezings: Mapping[tuple[str, int], Freezing]
) -> dict[tuple[str, int], xr.Dataset]:
    """Train arms, given by name and depth with what they freeze; on CUDA side by side."""
    labels = {(arm, depth): f"bounce, {depth} layers, {arm}" for arm, depth in freezings}
    trajectories = language_training.train_variants(
        config,
        context,
        text,
        {label: Variant(depth, config.activation, config.alike) for (_, depth), label in labels.items()},
        rate=config.rate,
        freezings={labels[key]: freezing for key, freezing in freezings.items()},
    )
    return {key: trajectory[[*STORED]] for key, trajectory in zip(freezings, trajectories, strict=True)}


def loss_gap(run: xr.Dataset, depth: int, arm: str = "held") -> xr.DataArray:
    """Return the final validation loss of an arm less that of the free run from the same start, per seed."""
    final_loss = select(run, depth=depth).valid_loss.isel(step=-1)
    return select(final_loss, arm=arm) - final_loss.sel(arm="free")


def frozen_gap(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Return the loss gap of an arm, per seed; `NotInRun` if every minimum is at the last step: nothing was frozen."""
    gap = loss_gap(run, depth, arm)
    if bool((_frozen_from(select(run, depth=depth), depth, arm) >= run.step[-1]).all()):
        raise NotInRun("minimum of entropy before its last step")
    return gap


def _frozen_from(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Return the step from which each layer of an arm is frozen [seed, layer]; for the free run that of `held`."""
    hold = run.hold.isel(layer=slice(depth)).astype(int)
    return {"steady": xr.zeros_like(hold) + run.turn.astype(int), "frozen": 0 * hold}.get(arm, hold)


def recovery(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Return `layer_recovery`, mean over layers, per seed."""
    return layer_recovery(run, depth, arm).mean("layer")


def layer_recovery(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Return the final entropy of each layer less that at the minimum, from which an arm is frozen [seed, layer].

    For the free run and the arm that is frozen from the start it is each layer's minimum in the free run.
    """
    run = select(run, depth=depth).isel(layer=slice(depth))
    curve = select(run.entropy, arm=arm).mean("head")
    at_minimum = curve.sel(step=_frozen_from(run, depth, "steady" if arm == "steady" else "held"))
    return curve.isel(step=-1) - at_minimum


def recovery_left(run: xr.Dataset, depth: int, arm: str) -> float:
    """Return how far entropy moves from its minimum in an arm, over the recovery of the free run; means over seeds.

    NaN if a seed diverged in either.
    """
    moved = abs(layer_recovery(run, depth, arm)).mean(skipna=False)
    return float(moved / recovery(run, depth, "free").mean(skipna=False))


def _recovery_checks(depth: int, layers: str, presets: tuple[str, ...]) -> tuple[Claim, ...]:
    """Return whether what is meant to prevent the recovery of entropy does."""
    return tuple(
        Claim(
            f"{name}-{depth}",
            f"With {layers} {means} most of the recovery of entropy.",
            partial(recovery_left, depth=depth, arm=arm),
            at_most(0.5),
            kind="check",
            quantity="|final entropy − that at the minimum| over the recovery of the free run, means over seeds "
            "and layers",
            presets=presets,
        )
        for arm, name, means in (
            ("held", "prevented", "frozen W_Q and W_K prevent"),
            ("clamped", "clamp", "the temperature prevents"),
        )
    )


def _claims(depth: int, presets: tuple[str, ...]) -> tuple[Claim, ...]:
    layers = "1 layer" if depth == 1 else f"{depth} layers"
    ends, expected = ("lower", below(0.0)) if depth == 1 else ("higher", above(0.0))
    return (
        Claim(
            f"bounce-{depth}",
            f"With {layers} attention, free to train, turns sparse, then dense again.",
            lambda run: bounce_p_value(select(run.entropy, depth=depth, arm="free")),
            at_most(SIGNIFICANCE),
            kind="reading",
            quantity=f"{P_VALUE}; mean over layers, each seed",
            presets=presets,
        ),
        *(
            Claim(
                f"{name}-{depth}",
                f"With {layers} the loss ends {ends} if {condition} at the minimum of entropy.",
                partial(frozen_gap, depth=depth, arm=arm),
                expected,
                kind="control",
                quantity="final validation loss less the free run's from the same start, in nats, interval over seeds",
                across="interval",
                presets=presets,
            )
            for arm, (name, condition) in CONTROLS.items()
        ),
        *_recovery_checks(depth, layers, presets),
    )


def outcome(run: xr.Dataset) -> str:
    """Return what came out: the mean loss gap of each arm by depth, with an interval over seeds for clamped entropy."""
    depths = run.depth.values.tolist()
    arms = {
        "clamped": "entropy clamped",
        "steady": "attention weights frozen",
        "held": "W_Q and W_K frozen",
        "frozen": "W_Q and W_K never trained",
    }
    parts = [
        f"{', '.join(_mean_gap(run, depth, arm) for depth in depths)} nats with {label}"
        for arm, label in arms.items()
        if arm in run.arm
    ]
    if not parts:
        raise NotInRun("arm but the free one")
    listed = ", ".join(map(str, depths))
    layers = f"{listed} layer{'s' * (depths != [1])}"
    brackets = " In brackets: 95 % intervals over seeds." if "clamped" in run.arm and run.sizes["seed"] > 1 else ""
    return f"With {layers} the final loss differs from the free run's by {'; by '.join(parts)}.{brackets}"


def _mean_gap(run: xr.Dataset, depth: int, arm: str) -> str:
    gap = loss_gap(run, depth, arm)
    if arm != "clamped" or gap.size < 2:
        return f"{float(gap.mean()):+z.3f}"
    low, high = mean_interval(gap.values)
    return f"{float(gap.mean()):+z.4f} ({low:+z.4f} to {high:+z.4f})"


CLAIMS = (
    *_claims(1, ("quick", "paper")),
    *_claims(2, ("quick", "paper")),
    *_claims(5, ("paper",)),
)


def draw_arms(run: xr.Dataset) -> Figure:
    """Draw for every depth entropy and validation loss of each arm, and the loss less the free run's."""
    figure, axes = canvas(3, run.sizes["depth"], width=3.5, height=2.2, sharex=True, sharey="row")
    for panels, depth in zip(axes.T, run.depth.values.tolist(), strict=True):
        _draw_depth(panels, run.sel(depth=depth), depth)
    labels = ("entropy (nats)", "validation loss", "loss − free run's")
    for panel, label in zip(axes[:, 0], labels, strict=True):
        panel.set_ylabel(label)
    top = _largest_late_loss(run) + 0.05
    if np.isfinite(top):  # NaN where every seed diverged
        axes[1, 0].set_ylim(top=top)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    letters(axes)
    return figure


def _draw_depth(panels: np.ndarray, run: xr.Dataset, depth: int) -> None:
    """Draw the arms of one depth in three panels: entropy, loss, and the loss less the free run's."""
    entropy, loss, gap = panels
    arms = run.arm.values.tolist()
    for arm in arms:
        curves, index = run.sel(arm=arm), COLOUR_INDEX[arm]
        band(entropy, run.step, curves.entropy.mean(["layer", "head"]), index, ARMS[arm])
        band(loss, run.step, curves.valid_loss, index)
        if arm != "free":
            band(gap, run.step, curves.valid_loss - run.valid_loss.sel(arm="free"), index)
    for row, arm in enumerate(arm for arm in ("held", "steady", "clamped") if arm in arms):
        for step in np.unique(_frozen_from(run, depth, arm)):
            low, high = 0.06 * row, 0.06 * (row + 1)
            entropy.axvline(step, low, high, color=COLOURS[COLOUR_INDEX[arm]], linewidth=1.5)
    layers = "1 layer" if depth == 1 else f"{depth} layers"
    for panel, title in zip(panels, ("Entropy", "Validation loss", "Loss minus that of the free run"), strict=True):
        panel.set_title(f"{title}, {layers}")
    gap.axhline(0.0, color="0.3", linewidth=0.8)
    gap.set_xlabel("step")
    gap.xaxis.set_major_locator(MaxNLocator(4))


def _largest_late_loss(run: xr.Dataset) -> float:
    """Return the largest validation loss after a tenth of training: the first fall is the same in every arm."""
    return float(run.valid_loss.where(run.step >= 0.1 * run.step[-1]).max())


def draw_gaps(run: xr.Dataset) -> Figure:
    """Draw each seed's final loss less the free run's, with bounds over seeds; and what entropy recovers."""
    figure, axes = canvas(1, 2, width=3.7, height=2.8)
    depths, arms = run.depth.values.tolist(), run.arm.values.tolist()
    frozen_arms = [arm for arm in arms if arm != "free"]
    for arm, x in zip(frozen_arms, _columns(len(depths), len(frozen_arms)), strict=True):
        gaps = [loss_gap(run, depth, arm) for depth in depths]
        axes[0, 0].plot(x, gaps, **marker(COLOUR_INDEX[arm]))
        low, high = np.transpose([mean_interval(gap.values) for gap in gaps])
        axes[0, 0].vlines(x, low, high, color="0.6", zorder=0)
    for arm, x in zip(arms, _columns(len(depths), len(arms)), strict=True):
        recoveries = [recovery(run, depth, arm) for depth in depths]
        lines = axes[0, 1].plot(x, recoveries, **marker(COLOUR_INDEX[arm]))
        lines[0].set_label(ARMS[arm])
    axes[0, 0].set(ylabel="loss − free run's", title="What each change costs at the end")
    axes[0, 1].set(ylabel="entropy regained (nats)", title="How far entropy recovers")
    for panel in axes[0]:
        panel.axhline(0.0, color="0.3", linewidth=0.8)
        panel.set_xticks(range(len(depths)), depths)
        panel.set(xlabel="layers", xlim=(-0.5, len(depths) - 0.5))
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    letters(axes)
    return figure


def _columns(depths: int, arms: int) -> list[np.ndarray]:
    """Return for each arm its x at every depth: arms side by side, centred at the depth's number."""
    return [np.arange(depths) + 0.16 * (index - (arms - 1) / 2) for index in range(arms)]


STUDY = Study(
    name="bounce-control",
    title="What is the bounce of attention good for?",
    source="JoMA, slides (arXiv 2310.00535); our control",
    statement=(
        "In one layer the bounce of attention only slows training; in several layers it is what lets them build a "
        "hierarchy (JoMA, slides of arXiv 2310.00535). We infer that a training without "
        "the bounce ends at a lower loss with one layer, and at a higher loss with several."
    ),
    about=(
        "We train each model several times from the same start, on the same text, with the same dropout: freely; with "
        "W_Q and W_K of each layer frozen from its minimum of entropy on; with the attention weights themselves frozen "
        "from the minimum of their mean entropy on; and with the entropy of each layer clamped at its minimum. Until "
        "then all of these are the same run. We compare the final losses seed by seed. With frozen W_Q and W_K "
        "embeddings and lower layers still move attention; frozen weights stop all that attention would learn. Only "
        "the clamp removes the bounce and nothing else: a temperature for each layer, set by a controller before every "
        "step, keeps entropy at its target, and attention is free otherwise."
    ),
    version=3,
    presets={
        "quick": Preset(
            Config(
                **language_training.quick_fields(steps=440),
                rate=QUICK_RATE,
                depths=(1, 2),
                arms=("steady", "clamped"),
            ),
            seeds=3,
            seconds=65,
        ),
        # On a GPU; the seconds on 2 cores are an estimate from the operations of a step. A third of the paper's steps:
        # minima come before step 5,000, and there are five arms to train.
        "paper": Preset(Config(**language_training.paper_fields(steps=20_000, every=500)), seeds=3, seconds=400_000),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    exact_shards=False,
    inputs=language_training.inputs,
    figures={
        "arms": Drawing(
            draw_arms,
            "Entropy, mean over layers, validation loss, and the loss less that of the free run from the same start, "
            "one column for each depth. Lines: mean over seeds. Bands: range over seeds. Ticks on the axis of entropy: "
            "the steps from which an arm is frozen or clamped. The loss of the first steps is cut off.",
        ),
        "gaps": Drawing(
            draw_gaps,
            "(a) Final validation loss less that of the free run from the same start, one point for each seed; grey: "
            "95 % interval of the mean over seeds. (b) Final entropy less that at the minimum, mean over layers.",
        ),
    },
)
