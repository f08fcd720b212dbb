"""Is the bounce good for anything? Attention held from its entropy's minimum on, beside the free run.

The slides say that in one layer the bounce only slows training, and that in several layers it is what lets them build
a hierarchy. Where attention is held, the first says that the loss ends lower, the second that it ends higher. Holding
W_Q and W_K leaves attention to embeddings and lower layers; so in another arm its weights themselves are held.
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
from joma.report.figure import COLOURS, band, canvas, letters, marker
from joma.studies.text import language_training
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, above, at_most, below, select
from joma.train.optimiser import Schedule

ARMS = {
    "free": "free",
    "held": "W_Q, W_K held from each layer's minimum",
    "steady": "attention weights held from the minimum",
    "frozen": "W_Q, W_K held from the start",
}
PLACES = {arm: place for place, arm in enumerate(ARMS)}  # of their colours
KEPT = ("loss", "valid_loss", "entropy", "diverged")
LEVEL = 0.95  # of the one-sided bounds over seeds


@dataclass(frozen=True)
class Config(language_training.Setting):
    """The setting, and what is compared in it."""

    depths: tuple[int, ...] = (1, 2, 5)
    """Numbers of layers."""
    arms: tuple[str, ...] = ("held", "steady", "frozen")
    """What is held, beside the free run: names of `ARMS`."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train each depth freely, then again from the same start with attention held from its minimum on.

    The free run is one that is held after its last step: with the same patterns in every arm, sums are taken in the
    same order, and on the CPU the arms agree in every bit until they must differ.
    """
    depths = [whole("depths", depth) for depth in distinct("depths", config.depths)]
    if "free" in config.arms:
        raise InputError("arms", "what is held beside the free run", config.arms, "leave `free` out: it is always run")
    for arm in distinct("arms", config.arms, least=0):
        choice("arms", arm, ARMS)
    text, parts = language_training.read_text(config, context), []
    for depth in depths:
        never = np.full((len(context.seeds), depth), config.steps)
        free = _trained(config, context, text, "free", never)
        hold, turn = minima(free.entropy), minima(free.entropy.mean("layer").expand_dims(layer=1))[:, 0]
        holds = {"held": hold, "steady": never, "frozen": 0 * never}
        arms = {"free": free}
        for arm in config.arms:
            arms[arm] = _trained(config, context, text, arm, holds[arm], turn=turn if arm == "steady" else None)
        joined = xr.concat(list(arms.values()), xr.Variable("arm", list(arms)))
        joined = joined.assign(hold=(("seed", "layer"), hold), turn=(("seed",), turn))
        parts.append(joined.assign_coords(layer=range(depth)))
    return xr.concat(parts, xr.Variable("depth", depths), join="outer").transpose("seed", "depth", ...)


def minima(entropy: xr.DataArray) -> Int[np.ndarray, "seed layer"]:
    """The recorded step at which each layer's entropy, mean over its heads, is least; the earliest of equals."""
    curve = entropy.mean("head").transpose("seed", "layer", "step")
    return entropy.step.values[curve.fillna(np.inf).argmin("step").values]


def schedules(hold: Int[np.ndarray, "seed layer"], device: str) -> dict[str, Schedule]:
    """Factors of the rate that hold W_Q and W_K of each layer, for each seed, once it was updated `hold` times.

    >>> factor = schedules(np.array([[3], [5]]), "cpu")["layers.0.attention.[qk]*"]
    >>> factor(torch.tensor(3))
    tensor([0., 1.], dtype=torch.float64)
    """
    until = torch.as_tensor(hold, device=device)
    return {f"layers.{layer}.attention.[qk]*": partial(_going, own) for layer, own in enumerate(until.unbind(1))}


def _going(until: Int[Tensor, " seed"], step: Tensor) -> Tensor:
    return (step < until).double()


def _trained(
    config: Config,
    context: Context,
    text: language_training.Text,
    arm: str,
    hold: Int[np.ndarray, "seed layer"],
    *,
    turn: Int[np.ndarray, " seed"] | None = None,
) -> xr.Dataset:
    """Train one arm: W_Q and W_K held from `hold` on, attention's weights from `turn` on."""
    depth = hold.shape[1]
    found = language_training.train(
        config,
        context,
        text,
        layers=depth,
        label=f"bounce, {depth} layers, {arm}",
        schedules=schedules(hold, context.device),
        hold=turn,
    )
    return found[[*KEPT]]


def loss_gap(run: xr.Dataset, depth: int, arm: str = "held") -> xr.DataArray:
    """Validation loss at the end, an arm's less the free run's from the same start, per seed."""
    end = select(run, depth=depth).valid_loss.isel(step=-1)
    return select(end, arm=arm) - end.sel(arm="free")


def gap_bound(run: xr.Dataset, depth: int, arm: str, side: int) -> float:
    """The bound of an arm's gap; `NotInRun` where nothing was held, every minimum being at the last step."""
    gap = loss_gap(run, depth, arm)
    if bool((_held_from(select(run, depth=depth), depth, arm) >= run.step[-1]).all()):
        raise NotInRun
    return bound(gap, side)


def _held_from(own: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """The step from which each layer of an arm is held [seed, layer]; for the free run that of the arm `held`."""
    hold = own.hold.isel(layer=slice(depth)).astype(int)
    return {"steady": xr.zeros_like(hold) + own.turn.astype(int), "frozen": 0 * hold}.get(arm, hold)


def bound(values: xr.DataArray, side: int) -> float:
    """Student's one-sided bound on the mean over seeds, of level `LEVEL`; NaN for a single seed, or with a lost one.

    >>> bound(xr.DataArray([1.0, 2.0, 3.0], dims="seed"), -1).round(3)
    np.float64(0.314)
    """
    count = values.sizes["seed"]
    if count < 2:
        return np.nan
    error = values.std("seed", ddof=1, skipna=False) / np.sqrt(count)
    return np.float64(values.mean("seed", skipna=False) + side * student.ppf(LEVEL, count - 1) * error)


def recovery(run: xr.Dataset, depth: int, arm: str) -> xr.DataArray:
    """Entropy at the end less entropy at the minimum, from where it is held, mean over layers, per seed.

    For the free run and the arm that was never free that is each layer's minimum in the free run.
    """
    own = select(run, depth=depth).isel(layer=slice(depth))
    curve = select(own.entropy, arm=arm).mean("head")
    then = curve.sel(step=_held_from(own, depth, "steady" if arm == "steady" else "held"))
    return (curve.isel(step=-1) - then).mean("layer")


def _claims(depth: int, presets: tuple[str, ...]) -> tuple[Claim, ...]:
    layers = "1 layer" if depth == 1 else f"{depth} layers"
    if depth == 1:
        said, ends = "In 1 layer the bounce only slows training", "a lower"
        expected, side = below(0.0), 1
    else:
        said, ends = f"In {layers} the bounce lets a hierarchy be built", "a higher"
        expected, side = above(0.0), -1
    paired = f"ends at {ends} loss (difference of paired runs, {LEVEL:.0%} bound over seeds)"
    held = {"held": ("loss", "with W_Q and W_K held at each layer's minimum"),
            "steady": ("steady", "with attention's weights themselves held at the minimum")}  # fmt: skip
    return (
        Claim(f"bounce-{depth}",
              f"The free run of {layers} falls and bounces back: how often noise alone rises as clearly, 1 unless "
              f"entropy, mean over layers, falls by {language_training.LEAST:.0%} of its start and comes back from there.",
              lambda run: language_training.chance(select(run.entropy, depth=depth, arm="free")), at_most(0.05), presets=presets),
        *(Claim(f"{name}-{depth}", f"{said}: {how}, the model {paired}.",
                lambda run, arm=arm: gap_bound(run, depth, arm, side), expected, presets=presets, seeds=2)
          for arm, (name, how) in held.items()),
        Claim(f"prevented-{depth}",
              f"Holding W_Q and W_K of {layers} prevents most of the recovery of entropy: what is left of it.",
              lambda run: recovery(run, depth, "held").mean() / recovery(run, depth, "free").mean(),
              at_most(0.5), presets=presets),
    )  # fmt: skip


CLAIMS = (
    *_claims(1, ("quick", "paper")),
    *_claims(2, ("quick", "paper")),
    *_claims(5, ("paper",)),
)


def draw_arms(run: xr.Dataset) -> Figure:
    """Draw for every depth entropy and validation loss of each arm, and the loss less the free run's."""
    figure, axes = canvas(3, run.sizes["depth"], width=3.5, height=2.2, sharex=True, sharey="row")
    for column, depth in zip(axes.T, run.depth.values.tolist(), strict=True):
        own = run.sel(depth=depth)
        for arm in run.arm.values.tolist():
            curves, place = own.sel(arm=arm), PLACES[arm]
            band(column[0], run.step, curves.entropy.mean(["layer", "head"]), place, ARMS[arm])
            band(column[1], run.step, curves.valid_loss, place)
            if arm != "free":
                band(column[2], run.step, curves.valid_loss - own.valid_loss.sel(arm="free"), place)
        for row, arm in enumerate(arm for arm in ("held", "steady") if arm in run.arm.values):
            for step in np.unique(_held_from(own, depth, arm)):
                low, high = 0.06 * row, 0.06 * (row + 1)
                column[0].axvline(step, low, high, color=COLOURS[PLACES[arm]], linewidth=1.5)
        column[0].set_title("1 layer" if depth == 1 else f"{depth} layers")
        column[2].axhline(0.0, color="0.3", linewidth=0.8)
        column[2].set_xlabel("step")
        column[2].xaxis.set_major_locator(MaxNLocator(4))
    labels = ("entropy (nats)", "validation loss", "loss − free run's")
    for panel, label in zip(axes[:, 0], labels, strict=True):
        panel.set_ylabel(label)
    if np.isfinite(_late(run)):  # NaN where every seed was lost
        axes[1, 0].set_ylim(top=_late(run))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    letters(axes)
    return figure


def _late(run: xr.Dataset) -> float:
    """The greatest validation loss once a tenth of training is over: the first fall is the same in every arm."""
    return float(run.valid_loss.where(run.step >= 0.1 * run.step[-1]).max()) + 0.05


def draw_gaps(run: xr.Dataset) -> Figure:
    """Draw the loss at the end less the free run's, each seed, with bounds over seeds; and what entropy recovers."""
    figure, axes = canvas(1, 2, width=3.7, height=2.8)
    others = [arm for arm in run.arm.values.tolist() if arm != "free"]
    places = np.arange(run.sizes["depth"])
    for index, arm in enumerate(others, start=1):
        gaps = [loss_gap(run, depth, arm) for depth in run.depth.values.tolist()]
        at = places + 0.16 * (index - (1 + len(others)) / 2)
        axes[0, 0].plot(at, gaps, **marker(PLACES[arm]))
        axes[0, 0].vlines(at, [bound(gap, -1) for gap in gaps], [bound(gap, 1) for gap in gaps], color="0.6", zorder=0)
    for index, arm in enumerate(run.arm.values.tolist()):
        rises = [recovery(run, depth, arm) for depth in run.depth.values.tolist()]
        at = places + 0.16 * (index - (run.sizes["arm"] - 1) / 2)
        lines = axes[0, 1].plot(at, rises, **marker(PLACES[arm]))
        lines[0].set_label(ARMS[arm])
    axes[0, 0].set(ylabel="loss − free run's", title="Loss")
    axes[0, 1].set(ylabel="entropy regained (nats)", title="Recovery")
    for panel in axes[0]:
        panel.axhline(0.0, color="0.3", linewidth=0.8)
        panel.set_xticks(places, run.depth.values)
        panel.set(xlabel="layers", xlim=(-0.5, len(places) - 0.5))
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    letters(axes)
    return figure


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
                **language_training.small(steps=440),
                depths=(1, 2),
                arms=("held", "steady"),
            ),
            seeds=3,
            seconds=65,
        ),
        # On a GPU; the seconds on 2 cores are an estimate from the operations of a step.
        "paper": Preset(Config(**language_training.wikitext(every=500)), seeds=3, seconds=1_000_000),
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
