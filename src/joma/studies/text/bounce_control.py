"""Is the bounce good for anything? Attention frozen from its entropy's minimum on, compared with the free run.

The slides say that in one layer the bounce only slows training, and that in several layers it is what lets them build
a hierarchy. With frozen attention, the first says that the loss ends lower, the second that it ends higher. Freezing
W_Q and W_K leaves attention to embeddings and lower layers; so in another arm the attention weights themselves are
frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student
from torch import Tensor

from joma.arguments import InputError, choice, distinct, whole
from joma.drawing import COLOURS, band, canvas, letters, marker
from joma.studies.text import language_training
from joma.studies.text.entropy_bounce import MIN_BOUNCE, bounce_p_value
from joma.studies.text.language_training import QUICK_RATE, Freezing, LayeredSetting, TextColumns, Variant
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, above, at_most, below, select
from joma.train.optimiser import Schedule

ARMS = {
    "free": "free",
    "held": "W_Q, W_K held from each layer's minimum",
    "steady": "attention weights held from the minimum",
    "frozen": "W_Q, W_K held from the start",
}
COLOUR_INDEX = {arm: index for index, arm in enumerate(ARMS)}
STORED = ("loss", "valid_loss", "entropy", "diverged")
CONFIDENCE = 0.95  # of the one-sided bounds over seeds


@dataclass(frozen=True)
class Config(LayeredSetting):
    """The setting of text, the model and its training, and what is compared."""

    activation: str = "relu"
    rate: float = 1e-4
    depths: tuple[int, ...] = (1, 2, 5)
    """Numbers of layers."""
    arms: tuple[str, ...] = ("held", "steady", "frozen")
    """What is frozen, beside the free run: names of `ARMS`."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train each depth freely, then again from the same start with attention frozen from its minimum on.

    In the free run W_Q and W_K are frozen after its last step. So the schedules of every arm have the same patterns
    and sums are taken in the same order: on the CPU the arms agree in every bit until they must differ.
    """
    depths = [whole("depths", depth) for depth in distinct("depths", config.depths)]
    if "free" in config.arms:
        raise InputError("arms", "what is frozen beside the free run", config.arms, "leave `free` out: it always runs")
    for arm in distinct("arms", config.arms, least=0):
        choice("arms", arm, ARMS)
    text = language_training.read_text(config, context)
    parts = [_train_depth(config, context, text, depth) for depth in depths]
    return xr.concat(parts, xr.Variable("depth", depths), join="outer").transpose("seed", "depth", ...)


def _train_depth(config: Config, context: Context, text: TextColumns, depth: int) -> xr.Dataset:
    """Train all arms of one depth, with the steps `hold` [seed, layer] and `turn` [seed] from which they are frozen."""
    never = np.full((len(context.seeds), depth), config.steps)
    free = _train_arm(config, context, text, "free", never)
    hold = minimum_steps(free.entropy)
    turn = minimum_steps(free.entropy.mean("layer").expand_dims(layer=1))[:, 0]
    freeze_steps = {"held": hold, "steady": never, "frozen": 0 * never}
    arms = {"free": free}
    for arm in config.arms:
        attention_steps = turn if arm == "steady" else None
        arms[arm] = _train_arm(config, context, text, arm, freeze_steps[arm], attention_steps=attention_steps)
    joined = xr.concat(list(arms.values()), xr.Variable("arm", list(arms)))
    joined = joined.assign(hold=(("seed", "layer"), hold), turn=(("seed",), turn))
    return joined.assign_coords(layer=range(depth))


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
    return {f"layers.{layer}.attention.[qk]*": partial(_is_before, steps) for layer, steps in enumerate(by_layer)}


def _is_before(freeze_steps: Int[Tensor, " seed"], step: Tensor) -> Tensor:
    return (step < freeze_steps).double()


def _train_arm(
    config: Config,
    context: Context,
    text: TextColumns,
    arm: str,
    freeze_steps: Int[np.ndarray, "seed layer"],
    *,
    attention_steps: Int[np.ndarray, " seed"] | None = None,
) -> xr.Dataset:
    """Train one arm: W_Q and W_K frozen from `freeze_steps` on, attention weights from `attention_steps` on."""
    depth = freeze_steps.shape[1]
    trajectory = language_training.train(
        config,
        context,
        text,
        Variant(depth, config.activation, config.alike),
        rate=config.rate,
        label=f"bounce, {depth} layers, {arm}",
        freezing=Freezing(freeze_schedules(freeze_steps, context.device), attention_steps),
    )
    return trajectory[[*STORED]]


def loss_gap(run: xr.Dataset, depth: int, arm: str = "held") -> xr.DataArray:
    """Return the final validation loss of an arm less that of the free run from the same start, per seed."""
    final_loss = select(run, depth=depth).valid_loss.isel(step=-1)
    return select(final_loss, arm=arm) - final_loss.sel(arm="free")


def gap_bound(run: xr.Dataset, depth: int, arm: str, side: int) -> float:
    """Return the bound of an arm's loss gap; `NotInRun` if every minimum is at the last step: nothing was frozen."""
    gap = loss_gap(run, depth, arm)
    if bool((_frozen_from(select(run, depth=depth), depth, arm) >= run.step[-1]).all()):
        raise NotInRun
    return bound(gap, side)


def _frozen_from(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Return the step from which each layer of an arm is frozen [seed, layer]; for the free run that of `held`."""
    hold = run.hold.isel(layer=slice(depth)).astype(int)
    return {"steady": xr.zeros_like(hold) + run.turn.astype(int), "frozen": 0 * hold}.get(arm, hold)


def bound(values: xr.DataArray, side: int) -> float:
    """Return Student's one-sided bound on the mean over seeds, of level `CONFIDENCE`: above for side 1, below for −1.

    NaN for a single seed, or if a seed diverged.

    >>> bound(xr.DataArray([1.0, 2.0, 3.0], dims="seed"), -1).round(3)
    np.float64(0.314)
    """
    count = values.sizes["seed"]
    if count < 2:
        return np.nan
    error = values.std("seed", ddof=1, skipna=False) / np.sqrt(count)
    return np.float64(values.mean("seed", skipna=False) + side * student.ppf(CONFIDENCE, count - 1) * error)


def recovery(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Return the final entropy less that at the minimum, from which an arm is frozen, mean over layers, per seed.

    For the free run and the arm that is frozen from the start it is each layer's minimum in the free run.
    """
    run = select(run, depth=depth).isel(layer=slice(depth))
    curve = select(run.entropy, arm=arm).mean("head")
    at_minimum = curve.sel(step=_frozen_from(run, depth, "steady" if arm == "steady" else "held"))
    return (curve.isel(step=-1) - at_minimum).mean("layer")


def _claims(depth: int, presets: tuple[str, ...]) -> tuple[Claim, ...]:
    layers = "1 layer" if depth == 1 else f"{depth} layers"
    if depth == 1:
        statement, ends = "In 1 layer the bounce only slows training", "a lower"
        expected, side = below(0.0), 1
    else:
        statement, ends = f"In {layers} the bounce lets a hierarchy be built", "a higher"
        expected, side = above(0.0), -1
    paired = f"ends at {ends} loss (difference of paired runs, {CONFIDENCE:.0%} bound over seeds)"
    conditions = {
        "held": ("loss", "with W_Q and W_K held at each layer's minimum"),
        "steady": ("steady", "with attention's weights themselves held at the minimum"),
    }
    return (
        Claim(
            f"bounce-{depth}",
            f"The free run of {layers} falls and bounces back: how often noise alone rises as clearly, 1 unless "
            f"entropy, mean over layers, falls by {MIN_BOUNCE:.0%} of its start and comes back from there.",
            lambda run: bounce_p_value(select(run.entropy, depth=depth, arm="free")),
            at_most(0.05),
            presets=presets,
        ),
        *(
            Claim(
                f"{name}-{depth}",
                f"{statement}: {condition}, the model {paired}.",
                partial(gap_bound, depth=depth, arm=arm, side=side),
                expected,
                presets=presets,
                seeds=2,
            )
            for arm, (name, condition) in conditions.items()
        ),
        Claim(
            f"prevented-{depth}",
            f"Holding W_Q and W_K of {layers} prevents most of the recovery of entropy: what is left of it.",
            lambda run: recovery(run, depth, "held").mean() / recovery(run, depth, "free").mean(),
            at_most(0.5),
            presets=presets,
        ),
    )


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
    for row, arm in enumerate(arm for arm in ("held", "steady") if arm in arms):
        for step in np.unique(_frozen_from(run, depth, arm)):
            low, high = 0.06 * row, 0.06 * (row + 1)
            entropy.axvline(step, low, high, color=COLOURS[COLOUR_INDEX[arm]], linewidth=1.5)
    entropy.set_title("1 layer" if depth == 1 else f"{depth} layers")
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
        axes[0, 0].vlines(x, [bound(gap, -1) for gap in gaps], [bound(gap, 1) for gap in gaps], color="0.6", zorder=0)
    for arm, x in zip(arms, _columns(len(depths), len(arms)), strict=True):
        recoveries = [recovery(run, depth, arm) for depth in depths]
        lines = axes[0, 1].plot(x, recoveries, **marker(COLOUR_INDEX[arm]))
        lines[0].set_label(ARMS[arm])
    axes[0, 0].set(ylabel="loss − free run's", title="Loss")
    axes[0, 1].set(ylabel="entropy regained (nats)", title="Recovery")
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
    title="What the bounce of attention is good for: training with attention held at its minimum",
    source="JoMA, slides (arXiv 2310.00535)",
    about=(
        "Each model is trained several times from the same start, on the same text and with the same dropout: freely; "
        "with W_Q and W_K of each layer held from the recorded step on at which that layer's entropy was least in the "
        "free run of the same seed; and with attention's weights held from the step on at which entropy's mean over "
        "layers was least. Until then these are the same. What is compared are paired differences, seed by seed, with "
        "Student's one-sided bounds on their mean. Where W_Q and W_K alone are held, embeddings and what lower layers "
        "write still move attention, and its entropy can recover by them; the claims `prevented` say how much of it "
        "does. Where the weights are held, queries and keys come from a copy of the model that stands still and reads "
        "the same text. Held parameters are left out of the gradient's norm when it is clipped. The minimum is the "
        "least of the recorded points, noise included; where it is near the end, holding changes little. At the preset "
        "paper the arm `frozen`, W_Q and W_K held from the start, shows what training attention is worth at all."
    ),
    version=2,
    presets={
        "quick": Preset(
            Config(
                **language_training.quick_fields(steps=440),
                rate=QUICK_RATE,
                depths=(1, 2),
                arms=("held", "steady"),
            ),
            seeds=3,
            seconds=65,
        ),
        # On a GPU; the seconds on 2 cores are an estimate from the operations of a step.
        "paper": Preset(Config(**language_training.paper_fields(every=500)), seeds=3, seconds=1_000_000),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    inputs=language_training.inputs,
    figures={
        "arms": Drawing(
            draw_arms,
            "Entropy (mean over layers), validation loss, and the loss less that of the free run from the same start, "
            "by layers. Lines: mean over seeds; bands from the least to the greatest. Ticks on the axis of entropy, in "
            "the arm's colour: the steps from which its layers are held, all seeds. The loss is cut off above.",
        ),
        "gaps": Drawing(
            draw_gaps,
            "(a) Validation loss at the end less that of the free run from the same start, each seed a point; grey: "
            "one-sided 95 % bounds on the mean over seeds, above and below. (b) Entropy at the end less entropy at "
            "the minimum, from which it is held, mean over layers.",
        ),
    },
)
