"""Breaking Symmetry on a task: addition, which cannot be done without order, by who tells the model the order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma.arguments import whole
from joma.data.addition import ceiling
from joma.models.transformer import CHOICES, Decoder
from joma.probes.position import position_decodability
from joma.probes.slices import own_location, slice_similarity
from joma.report.figure import band, canvas, letters, measured
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.addition_training import BASE, EVERY, FOLDS, REMOVED
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, at_least, at_most, near, select

KINDS = ("cka", "correlation")
SLICES = ("own", "self_similarity", "similarity")
DIMS: dict[str, Sequence[str]] = {
    "accuracy": (),
    "decodability": ("level",),
    "own": ("kind", "level", "higher"),
    "self_similarity": ("kind", "level", "higher"),
    "similarity": ("kind", "location", "other"),
}
MODELS = 8  # whose slices are compared at once: all pairs of slices in float64 take memory
ENCODED = tuple(name for name in CHOICES["positions"] if name != "none")
NAMES = {"cka": "CKA", "correlation": "correlation"}
LEARNT = 0.99
ERRORS = 3  # standard errors that a share of the unseen pairs may be off
SLOWER, LESS, READ = 0.05, 0.05, 0.2  # differences that count; the choice is ours
SAME = 0.9  # share of locations that must be most similar to themselves; ours as well


@dataclass(frozen=True)
class Config(addition_training.Setting):
    """The setting, the arms, and what is measured on how many pairs."""

    arms: tuple[str, ...] | None = None
    """Names such as "none full", "rotary causal", "attention 0", "mlp all"; None for all there are."""
    asked: int = 10_000
    """Unseen pairs that are asked at the end."""
    glance: int = 2_000
    """Of these, how many are asked on the way."""
    probed: int = 256
    """Of these, how many the hidden states are read of."""
    together: int = 60
    """Models, arms times seeds, that train as one; at the sizes above, half a GiB of GPU memory each."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train all arms, those of one kind as one model."""
    check(config)
    pairs = addition_training.pairs(config, context)
    asked = pairs.test[: config.asked]
    tokens = addition_training.written(config, asked)
    record = partial(_record, tokens=tokens, config=config)
    found = []
    most = max(1, config.together // len(context.seeds))
    for group in groups(addition_training.pick(config.arms, config.layers), most):
        label = f"addition, {next(iter(group))}" + (f" to {next(reversed(group))}" if len(group) > 1 else "")
        found.append(
            addition_training.train(config, context, pairs.train, group, label=label, record=record, dims=DIMS)
        )
    limits = ceiling(config.digits, reverse=config.reverse)
    alone = {
        "ceiling": limits.exact,
        "greedy": limits.greedy,
        "chance": 1 / (tokens.shape[1] - 1),
        "error": ERRORS * sampling_error(limits.exact, asked),
    }
    made = xr.concat(found, dim="arm").assign(alone)
    made["steps_to_99"] = steps_to(made.accuracy, LEARNT)
    return made.assign_coords(kind=list(KINDS))


def check(config: Config) -> None:
    """Refuse a config that cannot be run, by the name of the key that is wrong."""
    addition_training.check(config)
    for name, low in {"asked": FOLDS, "glance": 1, "probed": FOLDS, "together": 1}.items():
        whole(name, getattr(config, name), low=low)
    for arm in addition_training.pick(config.arms, config.layers).values():
        addition_training.decoder(config, arm)


def groups(chosen: Mapping[str, addition_training.Arm], most: int) -> Iterator[dict[str, addition_training.Arm]]:
    """Yield the arms that can train as one model, of one kind: at most so many, and evenly dealt.

    >>> [list(group) for group in groups(addition_training.pick(["none full", "none causal", "mlp 0", "mlp all"], 1), 2)]
    [['none causal', 'mlp 0'], ['mlp all'], ['none full']]
    """
    kinds: dict[tuple[bool, str], dict[str, addition_training.Arm]] = {}
    for name, arm in chosen.items():
        kinds.setdefault(arm.kind, {})[name] = arm
    for members in kinds.values():
        for names in np.array_split(list(members), -(-len(members) // most)):
            yield {str(name): members[str(name)] for name in names}


def sampling_error(share: float, pairs: Int[Tensor, "pair 2"]) -> float:
    """The standard error of a share of these pairs, a + b and b + a counted as one: a model may treat them alike."""
    alone = len(pairs.sort(dim=1).values.unique(dim=0))
    return float(np.sqrt(share * (1 - share) / alone))


def steps_to(accuracy: xr.DataArray, level: float) -> xr.DataArray:
    """The first recorded step at which the accuracy reaches the level; NaN if there is none."""
    return accuracy.step.where(accuracy >= level).min("step")


def _record(model: Decoder, step: int, *, tokens: Int[Tensor, "pair position"], config: Config) -> dict[str, Tensor]:
    shown = tokens if step == config.steps else tokens[: config.glance]
    states = addition_training.levels(model, tokens[: config.probed, :-1])
    slices = zip(*map(_slices, states.split(MODELS)), strict=True)
    return {
        "accuracy": addition_training.exact_match(model, shown, config.digits),
        "decodability": position_decodability(states, folds=FOLDS).accuracy,
        **{name: torch.cat(own).float() for name, own in zip(SLICES, slices, strict=True)},
    }


def _slices(
    states: Float[Tensor, "seed level sample position width"],
) -> tuple[
    Float[Tensor, "seed kind level higher"],
    Float[Tensor, "seed kind level higher"],
    Float[Tensor, "seed kind location other"],
]:
    """Return what `SLICES` names, by debiased CKA and by correlation.

    For each pair of levels the share of locations most similar to themselves and how similar a location is to itself,
    mean over locations; and the similarity of each two locations, mean over pairs of levels a < b.
    """
    found = slice_similarity(states, debiased=True)
    both = torch.stack([found.cka, found.correlation], dim=1)
    low, high = torch.triu_indices(states.shape[1], states.shape[1], offset=1, device=states.device)
    same = both.diagonal(dim1=-2, dim2=-1).nanmean(dim=-1)
    return own_location(both).share, same, both[:, :, low, high].nanmean(dim=2)


def final(run: xr.Dataset, name: str) -> xr.DataArray:
    """The accuracy of an arm at the end, on all pairs asked, per seed."""
    return _accuracy(run, name).isel(step=-1)


def _accuracy(run: xr.Dataset, name: str) -> xr.DataArray:
    """The accuracy of an arm; a seed that was lost knows nothing."""
    return select(run.accuracy.fillna(0.0), arm=name)


def beyond(run: xr.Dataset, name: str) -> xr.DataArray:
    """The accuracy of an arm at the end, less the ceiling without order and what the choice of pairs may do."""
    return final(run, name) - run.ceiling - run.error


def progress(run: xr.Dataset, name: str) -> xr.DataArray:
    """The accuracy of an arm, mean over the steps of training: 0 if nothing is learnt, near 1 if all is at once."""
    return _accuracy(run, name).integrate("step") / (run.step[-1] - run.step[0])


def slower(run: xr.Dataset, part: str) -> xr.DataArray:
    """How much more is learnt on the way with all residuals than without those around a part in all layers."""
    return progress(run, BASE) - progress(run, f"{part} {EVERY}")


def slower_in_one(run: xr.Dataset) -> xr.DataArray:
    """How much more is learnt on the way with all residuals than without some of one layer, mean over such arms."""
    names = [f"{part} {layer}" for part in REMOVED for layer in range(run.sizes["level"] - 1)]
    return progress(run, BASE) - xr.concat([progress(run, name) for name in names], "arm").mean("arm", skipna=False)


def own_share(run: xr.Dataset, name: str, kind: str) -> xr.DataArray:
    """The share of locations that are most similar to themselves, mean over pairs of levels a < b, by step."""
    upper = xr.DataArray(np.triu(np.ones((run.sizes["level"],) * 2, bool), 1), dims=("level", "higher"))
    return select(run.own, arm=name).sel(kind=kind).where(upper).mean(("level", "higher"))


def removed(run: xr.Dataset) -> list[str]:
    """The arms of this run without residuals in all layers."""
    return [name for name in (f"{part} {EVERY}" for part in REMOVED) if name in run.arm.values]


def keeps_place(run: xr.Dataset, kind: str) -> xr.DataArray:
    """How much larger that share is at the end with residuals than without in all layers, least over what is removed.

    A seed without any is NaN. `NotInRun` where no such arm was trained.
    """
    names = removed(run) or [f"both {EVERY}"]
    most = xr.concat([own_share(run, name, kind) for name in names], "arm").max("arm", skipna=False)
    return (own_share(run, BASE, kind) - most).isel(step=-1)


def gained(run: xr.Dataset, name: str) -> xr.DataArray:
    """How much better positions are read off the best layer than off the embeddings, at the end."""
    read = select(run.decodability, arm=name).isel(step=-1)
    return read.isel(level=slice(1, None)).max("level", skipna=False) - read.isel(level=0)


def digits_of(run: xr.Dataset) -> int:
    """The digits of the summands: locations are theirs, + and =, and all digits of the sum but the last."""
    return (run.sizes["location"] - 2) // 3


def four_in_five(values: xr.DataArray) -> float:
    """What four of five seeds reach."""
    return float(np.sort(values)[len(values) // 5])


def _ceiling(run: xr.Dataset, digits: int) -> xr.DataArray:
    if digits_of(run) != digits:
        raise NotInRun(f"{digits} digits")
    return run.ceiling


def _slower(part: str, words: str) -> Claim:
    return Claim(
        f"{part}-residuals",
        f"Removing the residual connections around {words} in all layers slows or stops learning (exact match, mean "
        "over the steps of training: with all of them less without these; the threshold is ours).",
        partial(slower, part=part),
        at_least(SLOWER),
    )


def _pilot(name: str, arm: str, words: str, share: float, tolerance: float) -> Claim:
    return Claim(
        f"pilot-{name}",
        f"Our pilot of one seed, exact match on 10,000 unseen pairs, {words}.",
        partial(final, name=arm),
        near(share, tolerance),
        across="mean",
        presets=("paper",),
    )


_SHARE = "share of locations, mean over pairs of levels, at the end"

CLAIMS = (
    Claim(
        "ceiling-2",
        "What a permutation-invariant predictor can reach at two digits, by enumeration.",
        partial(_ceiling, digits=2),
        near(0.285, 5e-5),
    ),
    Claim(
        "ceiling-3",
        "What a permutation-invariant predictor can reach at three digits, by enumeration.",
        partial(_ceiling, digits=3),
        near(0.0532, 5e-5),
    ),
    Claim(
        "causal",
        "Without encoding, the causal mask alone lets a model learn order: exact match on unseen pairs less the "
        f"ceiling without order and {ERRORS} standard errors.",
        partial(beyond, name=BASE),
        at_least(0.0),
    ),
    Claim(
        "causal-learns",
        "Without encoding, the causal mask alone lets a model learn the task: exact match that four of five seeds "
        "reach.",
        lambda run: four_in_five(final(run, BASE)),
        at_least(LEARNT),
        presets=("paper",),
    ),
    Claim(
        "full",
        "Without encoding and with a full mask a model cannot learn order: exact match on unseen pairs less the "
        f"ceiling and {ERRORS} standard errors.",
        partial(beyond, name="none full"),
        at_most(0.0),
    ),
    Claim(
        "full-encoded",
        "With a full mask any encoding will do instead: exact match, the least of learned, sinusoidal and rotary, that "
        "four of five seeds reach.",
        lambda run: min(four_in_five(final(run, f"{name} full")) for name in ENCODED),
        at_least(LEARNT),
        presets=("paper",),
    ),
    Claim(
        "positions-causal",
        "Under a causal mask hidden states come to know their position: accuracy of a linear readout, the best layer's "
        "less the embeddings' (the threshold is ours).",
        partial(gained, name=BASE),
        at_least(READ),
    ),
    Claim(
        "positions-full",
        "Under a full mask, without encoding, hidden states know no more of their position than their token does: "
        "accuracy of a linear readout, the best layer's less the embeddings'.",
        partial(gained, name="none full"),
        at_most(LESS),
    ),
    _slower("attention", "attention"),
    _slower("mlp", "the MLPs"),
    _slower("both", "attention and the MLPs"),
    Claim(
        "one-layer-residuals",
        "Removing residual connections in one layer alone slows learning (exact match, mean over the steps of "
        "training: with all of them less the mean over the arms without those around attention, the MLP or both of a "
        "layer; the threshold is ours).",
        slower_in_one,
        at_least(SLOWER),
        presets=("paper",),
    ),
    Claim(
        "slices",
        "With residuals each vertical slice is most similar to itself from layer to layer, by unit-wise correlation "
        f"({_SHARE}; the threshold is ours).",
        lambda run: own_share(run, BASE, "correlation").isel(step=-1),
        at_least(SAME),
    ),
    Claim(
        "slices-without",
        "Without residuals vertical slices are less often most similar to themselves, by unit-wise correlation "
        "(share with all of them less the greatest without; the threshold is ours).",
        partial(keeps_place, kind="correlation"),
        at_least(LESS),
    ),
    Claim(
        "slices-cka",
        "With residuals each vertical slice is most similar to itself by debiased CKA too, which does not mind if a "
        "layer turns the units about (share of locations).",
        lambda run: own_share(run, BASE, "cka").isel(step=-1),
        at_least(SAME),
    ),
    Claim(
        "slices-without-cka",
        "Without residuals vertical slices are less often most similar to themselves by debiased CKA too: the units "
        "of two layers have nothing to do with each other then, so that correlation must fall; that slices move is "
        "more than that (share with all of them less the greatest without).",
        partial(keeps_place, kind="cka"),
        at_least(LESS),
    ),
    _pilot("causal", BASE, "no encoding and a causal mask: 0.9999", 0.9999, 0.005),
    _pilot("learned", "learned causal", "a learned encoding and a causal mask: 1.0000", 1.0, 0.005),
    Claim(
        "pilot-learned-soon",
        "Our pilot of one seed, a learned encoding and a causal mask: 99 % by step 1,500 (the first recorded step at "
        "it).",
        lambda run: select(run.steps_to_99.fillna(np.inf), arm="learned causal"),
        at_most(1500),
        presets=("paper",),
    ),
    _pilot("attention", "attention all", "no residuals around attention: 0.001", 0.001, 0.01),
    _pilot("mlp", "mlp all", "no residuals around the MLPs: 0.02", 0.02, 0.03),
    _pilot("first", "attention 0", "none around layer 0's attention alone: 0.999", 0.999, 0.005),
)


def draw_accuracy(run: xr.Dataset) -> Figure:
    """Draw exact match over training by encoding and mask, and by which residual connections are removed."""
    single = [name for name in run.arm.values if name.split()[1].isdigit()]
    figure, axes = canvas(1, 4 if single else 3, width=3.0, height=3.4, sharey=True)
    titles = ("causal mask", "full mask", "causal, no residuals")
    curves = [[f"{name} {mask}" for name in CHOICES["positions"]] for mask in ("causal", "full")]
    for panel, title, names in zip(axes[0], titles, [*curves, [BASE, *removed(run)]], strict=False):
        for place, name in enumerate(names):
            if name in run.arm.values:  # colours stay with the names, whichever are there
                band(panel, run.step, _accuracy(run, name), place, _part(name))
        _limit(panel, run)
        panel.set(xlabel="step", title=title)
        _legend(panel, "encoding" if panel is not axes[0, 2] else "residuals removed from")
    axes[0, 0].set(ylabel="exact match on unseen pairs", ylim=(-0.03, 1.03))
    if single:
        _draw_single(axes[0, 3], run, single)
    letters(axes)
    return figure


def _there(run: xr.Dataset, *names: str) -> list[str]:
    """Those of the arms that the run has; if it has none of them, its first few."""
    return [name for name in names if name in run.arm.values] or [str(name) for name in run.arm.values[:4]]


def _part(name: str) -> str:
    """The first word of an arm's name: the encoding, or what has no residual connections."""
    first = name.partition(" ")[0]
    return {"mlp": "MLP"}.get(first, first)


def _label(name: str, gap: str) -> str:
    """An arm in words: its encoding and mask, or what has no residuals."""
    first, _, second = name.partition(" ")
    where = "" if second == EVERY else f" {second}"
    return f"{first}, {second}" if second in CHOICES["mask"] else f"no residuals:{gap}{_part(first)}{where}"


def _limit(panel: Axes, run: xr.Dataset) -> None:
    panel.axhline(float(run.ceiling), color="grey", linewidth=0.9, label=f"ceiling, {float(run.ceiling):.3g}")


def _legend(panel: Axes, title: str) -> None:
    """Put the legend below the panel, where no curve is."""
    panel.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _draw_single(panel: Axes, run: xr.Dataset, names: Sequence[str]) -> None:
    """Draw exact match, mean over training, against the one layer whose residuals are removed."""
    for place, part in enumerate(REMOVED, start=1):
        there = sorted(int(name.split()[1]) for name in names if name.startswith(part))
        if there:
            on_the_way = xr.concat([progress(run, f"{part} {layer}") for layer in there], "layer")
            shown = on_the_way.transpose("layer", "seed")
            measured(panel, np.array(there) + 0.12 * (place - 2), shown, place, _part(part), linestyle="-")
    if BASE in run.arm.values:
        panel.axhline(float(progress(run, BASE).mean()), color="black", label="none")
    panel.set(xlabel="layer", title="none in one layer, on the way")
    _legend(panel, "residuals removed from")


def draw_slices(run: xr.Dataset) -> Figure:
    """Draw the similarity of locations at different levels: a row for each arm, a column for each kind and moment."""
    arms = _there(run, BASE, *removed(run), "none full")
    steps = run.step.values[np.unique([0, run.sizes["step"] // 2, run.sizes["step"] - 1])]
    columns = [(kind, step) for kind in ("correlation", "cka") for step in steps]
    figure, axes = canvas(len(arms), len(columns), width=1.5, height=1.5)
    image = None
    for row, name in zip(axes, arms, strict=True):
        for panel, (kind, step) in zip(row, columns, strict=True):
            shown = select(run.similarity, arm=name).sel(kind=kind, step=step).mean("seed")
            image = panel.imshow(shown, cmap="cividis", vmin=0, vmax=1)
            _mark_places(panel, digits_of(run))
        row[0].set_ylabel(_label(name, "\n"))
    for panel, (kind, step) in zip(axes[0], columns, strict=True):
        panel.set_title(f"{NAMES[kind]},\nstep {step}")
    figure.colorbar(image, ax=axes, label="similarity, mean over pairs of levels", shrink=0.8, pad=0.01)
    return figure


def _mark_places(panel: Axes, digits: int) -> None:
    """Label locations by what stands there: digits a and b of the summands, c of the sum, of which the last is told.

    In whichever order the sum is written: its digits are those read before the last.
    """
    marks = [*"a" * digits, "+", *"b" * digits, "=", *"c" * digits]
    panel.set_xticks(range(len(marks)), marks, fontsize=5.5)
    panel.set_yticks(range(len(marks)), marks, fontsize=5.5)
    panel.tick_params(length=0, pad=1)
    panel.grid(visible=False)


def draw_positions(run: xr.Dataset) -> Figure:
    """Draw how well positions are read off each level over training."""
    arms = _there(run, BASE, "none full", "learned causal", *removed(run))[:4]
    figure, axes = canvas(1, len(arms), width=2.7, height=2.7, sharey=True)
    for panel, name in zip(axes[0], arms, strict=True):
        for level in range(run.sizes["level"]):
            label = "embeddings" if level == 0 else f"layer {level - 1}"
            band(panel, run.step + 1, select(run.decodability, arm=name).isel(level=level), level, label)
        panel.axhline(float(run.chance), color="grey", linewidth=0.9, label="chance")
        panel.set(xscale="log", xlabel="step + 1", title=_label(name, " "))
    axes[0, 0].set(ylabel="position read off", ylim=(0, 1.03))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=run.sizes["level"] + 1)
    letters(axes)
    return figure


def draw_own(run: xr.Dataset) -> Figure:
    """Draw the share of locations that are most similar to themselves over training."""
    figure, axes = canvas(1, 2, width=3.3, height=2.7, sharey=True)
    for panel, kind in zip(axes[0], ("correlation", "cka"), strict=True):
        for place, name in enumerate(_there(run, BASE, *removed(run))):
            label = "all residuals" if name == BASE else _label(name, " ")
            band(panel, run.step + 1, own_share(run, name, kind), place, label)
        panel.axhline(1 / run.sizes["location"], color="grey", linewidth=0.9, label="chance")
        panel.set(xscale="log", xlabel="step + 1", title=NAMES[kind])
    axes[0, 0].set(ylabel="locations most similar to themselves", ylim=(0, 1.03))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    letters(axes)
    return figure


_QUICK = Config(
    digits=2, layers=2, heads=2, width=32, batch=64, steps=850, rate=1e-2, warm_up=50, every=100,
    arms=(BASE, "none full", "attention all", "mlp all"), glance=400, probed=128,
)  # fmt: skip

STUDY = Study(
    name="addition",
    title="Addition, by who tells the model the order of its digits",
    source="Breaking Symmetry When Training Transformers (arXiv 2402.05969)",
    about=(
        "Decoders learn sums such as 123+456=0579, digit by digit, from pairs drawn at random, and are asked about "
        "pairs of which neither order was ever trained on. Arms: four positional encodings x two masks; and, for the "
        "model without encoding under a causal mask, the residual connections around attention, the MLP or both "
        "removed, in one layer or in all. In every arm a seed has the same first weights and the same batches. Loss "
        "and exact match are over the digits of the sum, which `reverse` writes from the last one on. Under a full "
        "mask every prefix is an example of its own and only its last position predicts, so that no digit is seen "
        "before it is told. What a model can reach that knows no order is enumerated and drawn as a line. Levels are "
        "the embeddings and what leaves each layer. The quick preset has two digits, two layers and four arms, and "
        "stops before any arm is done; what it says of residual connections is said of two layers."
    ),
    version=2,
    presets={
        "quick": Preset(_QUICK, seeds=3, seconds=58),
        "paper": Preset(Config(), seeds=5, seconds=2_000_000),  # an estimate; 15 minutes on one H200
    },
    run=run,
    claims=CLAIMS,
    figures={
        "accuracy": Drawing(
            draw_accuracy,
            "Exact match on unseen pairs over training, mean and range over seeds; grey, the most that any predictor "
            "can reach that knows no order. (a) Causal and (b) full mask, by positional encoding; (c) no encoding, "
            "causal mask, residual connections around attention, the MLP or both removed in all layers; (d) if there "
            "are such arms, removed in one layer alone: the mean over the steps of training, black with all of them.",
        ),
        "slices": Drawing(
            draw_slices,
            "How similar what stands at a location (rows) at one level is to what stands at another location (columns) "
            "at a higher one, mean over pairs of levels and seeds: left, by correlation of the same unit, mean over "
            "units; right, by debiased CKA. a and b are digits of the summands, c of the sum, as they are read.",
        ),
        "positions": Drawing(
            draw_positions,
            "Accuracy of a linear readout of the position from hidden states, over training, mean and range over "
            "seeds. What the token alone tells is the embeddings' line; + and = stand at one position each.",
        ),
        "own": Drawing(
            draw_own,
            "Share of locations to which, at a higher level, no other location is as similar as the same one, mean "
            "over pairs of levels; mean and range over seeds. No encoding, causal mask. (a) By correlation of the same "
            "unit, (b) by debiased CKA, which does not mind if a layer turns the units about.",
        ),
    },
    threads=1,
)
