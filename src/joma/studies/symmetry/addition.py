"""Breaking Symmetry on a task that needs order: addition, by positional encoding, mask and residual connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma import schedule
from joma.arguments import whole
from joma.data.addition import ceiling
from joma.models.transformer import Decoder
from joma.probes.position import position_decodability
from joma.probes.slices import own_location, slice_similarity
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.addition_arms import BASELINE, ENCODED, group_arms, select_arms
from joma.studies.symmetry.addition_figures import draw_accuracy, draw_own, draw_positions, draw_slices
from joma.studies.symmetry.addition_measures import (
    above_ceiling,
    ceiling_at,
    final_accuracy,
    own_share,
    own_share_drop,
    reached_by_four_in_five,
    readout_gain,
    sampling_error,
    slowdown,
    slowdown_in_one_layer,
    steps_to,
)
from joma.studies.symmetry.addition_training import FOLDS, AdditionSetting
from joma.studies.symmetry.levels import hidden_states
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, near, select
from joma.train import Record

KINDS = ("cka", "correlation")
SLICES = ("own", "self_similarity", "similarity")
DIMS: dict[str, Sequence[str]] = {
    "accuracy": (),
    "decodability": ("level",),
    "own": ("kind", "level", "higher"),
    "self_similarity": ("kind", "level", "higher"),
    "similarity": ("kind", "location", "other"),
}
MODELS_AT_ONCE = 8  # whose slices are compared at once: all pairs of slices in float64 take memory
LEARNT = 0.99  # exact match
STANDARD_ERRORS = 3  # by which the share of the test pairs may be off
MIN_SLOWDOWN, NOTABLE_DIFFERENCE, MIN_READOUT_GAIN = 0.05, 0.05, 0.2  # differences that count; the choice is ours
MIN_OWN_SHARE = 0.9  # of locations that must be most similar to themselves; ours as well


@dataclass(frozen=True)
class Config(AdditionSetting):
    """The setting, the arms, when to record, and the number of pairs for each measure."""

    every: int = 250
    """Steps from one record to the next; a few more records come before the first of these."""
    arms: tuple[str, ...] | None = None
    """Names such as "none full", "rotary causal", "attention 0", "mlp all"; None for all of them."""
    asked: int = 10_000
    """Test pairs on which exact match is measured at the end."""
    glance: int = 2_000
    """Number of these on which exact match is measured before the end."""
    probed: int = 256
    """Number of these whose hidden states are probed."""
    together: int = 60
    """Models, arms times seeds, that train as one; at the sizes above, half a GiB of GPU memory each."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train all arms, those of one kind as one model."""
    check_config(config)
    pairs = addition_training.split_pairs(config, context)
    test_pairs = pairs.test[: config.asked]
    tokens = addition_training.encode_pairs(config, test_pairs)
    record = Record(
        partial(_measure, tokens=tokens, config=config), at=record_steps(config), dims=DIMS, gradients=False
    )
    trajectories = []
    max_arms = max(1, config.together // len(context.seeds))
    for group in group_arms(select_arms(config.arms, config.layers), max_arms):
        label = f"addition, {next(iter(group))}" + (f" to {next(reversed(group))}" if len(group) > 1 else "")
        trajectories.append(addition_training.train(config, context, pairs.train, group, label=label, record=record))
    limits = ceiling(config.digits, reverse=config.reverse)
    constants = {
        "ceiling": limits.exact,
        "greedy": limits.greedy,
        "chance": 1 / (tokens.shape[1] - 1),
        "error": STANDARD_ERRORS * sampling_error(limits.exact, test_pairs),
    }
    trajectory = xr.concat(trajectories, dim="arm").assign(constants)
    trajectory["steps_to_99"] = steps_to(trajectory.accuracy, LEARNT)
    return trajectory.assign_coords(kind=list(KINDS))


def check_config(config: Config) -> None:
    """Raise `InputError`, naming the field, if a config cannot be run."""
    addition_training.check_setting(config)
    for name, low in {"every": 1, "asked": FOLDS, "glance": 1, "probed": FOLDS, "together": 1}.items():
        whole(name, getattr(config, name), low=low)
    for arm in select_arms(config.arms, config.layers).values():
        addition_training.decoder_config(config, arm)


def record_steps(config: Config) -> list[int]:
    """Return the steps at which to record: every `every` steps, and a few logarithmic ones before the first of them."""
    early = schedule.logarithmic(5, min(config.every, config.steps))
    return sorted({*early, *schedule.every(config.every, config.steps)})


def _measure(model: Decoder, step: int, *, tokens: Int[Tensor, "pair position"], config: Config) -> dict[str, Tensor]:
    test_tokens = tokens if step == config.steps else tokens[: config.glance]
    states = hidden_states(model, tokens[: config.probed, :-1])
    slices = zip(*map(_slices, states.split(MODELS_AT_ONCE)), strict=True)
    return {
        "accuracy": addition_training.exact_match(model, test_tokens, config.digits),
        "decodability": position_decodability(states, folds=FOLDS).accuracy,
        **{name: torch.cat(values).float() for name, values in zip(SLICES, slices, strict=True)},
    }


def _slices(
    states: Float[Tensor, "seed level sample position width"],
) -> tuple[
    Float[Tensor, "seed kind level higher"],
    Float[Tensor, "seed kind level higher"],
    Float[Tensor, "seed kind location other"],
]:
    """Return the measures that `SLICES` names, by debiased CKA and by correlation.

    For each pair of levels the share of locations most similar to themselves and the similarity of a location to
    itself, mean over locations; and the similarity of each pair of locations, mean over pairs of levels a < b.
    """
    similarity = slice_similarity(states, debiased=True)
    by_kind = torch.stack([similarity.cka, similarity.correlation], dim=1)
    low, high = torch.triu_indices(states.shape[1], states.shape[1], offset=1, device=states.device)
    self_similarity = by_kind.diagonal(dim1=-2, dim2=-1).nanmean(dim=-1)
    return own_location(by_kind).share, self_similarity, by_kind[:, :, low, high].nanmean(dim=2)


def _slowdown_claim(part: str, words: str) -> Claim:
    return Claim(
        f"{part}-residuals",
        f"Removing the residual connections around {words} in all layers slows or stops learning (exact match, mean "
        "over the steps of training: with all of them less without these; the threshold is ours).",
        partial(slowdown, part=part),
        at_least(MIN_SLOWDOWN),
    )


def _pilot_claim(name: str, arm: str, words: str, share: float, tolerance: float) -> Claim:
    return Claim(
        f"pilot-{name}",
        f"Our pilot of one seed, exact match on 10,000 unseen pairs, {words}.",
        partial(final_accuracy, arm=arm),
        near(share, tolerance),
        across="mean",
        presets=("paper",),
    )


_SHARE = "share of locations, mean over pairs of levels, at the end"

CLAIMS = (
    Claim(
        "ceiling-2",
        "What a permutation-invariant predictor can reach at two digits, by enumeration.",
        partial(ceiling_at, digits=2),
        near(0.285, 5e-5),
    ),
    Claim(
        "ceiling-3",
        "What a permutation-invariant predictor can reach at three digits, by enumeration.",
        partial(ceiling_at, digits=3),
        near(0.0532, 5e-5),
    ),
    Claim(
        "causal",
        "Without encoding, the causal mask alone lets a model learn order: exact match on unseen pairs less the "
        f"ceiling without order and {STANDARD_ERRORS} standard errors.",
        partial(above_ceiling, arm=BASELINE),
        at_least(0.0),
    ),
    Claim(
        "causal-learns",
        "Without encoding, the causal mask alone lets a model learn the task: exact match that four of five seeds "
        "reach.",
        lambda run: reached_by_four_in_five(final_accuracy(run, BASELINE)),
        at_least(LEARNT),
        presets=("paper",),
    ),
    Claim(
        "full",
        "Without encoding and with a full mask a model cannot learn order: exact match on unseen pairs less the "
        f"ceiling and {STANDARD_ERRORS} standard errors.",
        partial(above_ceiling, arm="none full"),
        at_most(0.0),
    ),
    Claim(
        "full-encoded",
        "With a full mask any encoding will do instead: exact match, the least of learned, sinusoidal and rotary, that "
        "four of five seeds reach.",
        lambda run: min(reached_by_four_in_five(final_accuracy(run, f"{positions} full")) for positions in ENCODED),
        at_least(LEARNT),
        presets=("paper",),
    ),
    Claim(
        "positions-causal",
        "Under a causal mask hidden states come to know their position: accuracy of a linear readout, the best layer's "
        "less the embeddings' (the threshold is ours).",
        partial(readout_gain, arm=BASELINE),
        at_least(MIN_READOUT_GAIN),
    ),
    Claim(
        "positions-full",
        "Under a full mask, without encoding, hidden states know no more of their position than their token does: "
        "accuracy of a linear readout, the best layer's less the embeddings'.",
        partial(readout_gain, arm="none full"),
        at_most(NOTABLE_DIFFERENCE),
    ),
    _slowdown_claim("attention", "attention"),
    _slowdown_claim("mlp", "the MLPs"),
    _slowdown_claim("both", "attention and the MLPs"),
    Claim(
        "one-layer-residuals",
        "Removing residual connections in one layer alone slows learning (exact match, mean over the steps of "
        "training: with all of them less the mean over the arms without those around attention, the MLP or both of a "
        "layer; the threshold is ours).",
        slowdown_in_one_layer,
        at_least(MIN_SLOWDOWN),
        presets=("paper",),
    ),
    Claim(
        "slices",
        "With residuals each vertical slice is most similar to itself from layer to layer, by unit-wise correlation "
        f"({_SHARE}; the threshold is ours).",
        lambda run: own_share(run, BASELINE, "correlation").isel(step=-1),
        at_least(MIN_OWN_SHARE),
    ),
    Claim(
        "slices-without",
        "Without residuals vertical slices are less often most similar to themselves, by unit-wise correlation "
        "(share with all of them less the greatest without; the threshold is ours).",
        partial(own_share_drop, kind="correlation"),
        at_least(NOTABLE_DIFFERENCE),
    ),
    Claim(
        "slices-cka",
        "With residuals each vertical slice is most similar to itself by debiased CKA too, which does not mind if a "
        "layer turns the units about (share of locations).",
        lambda run: own_share(run, BASELINE, "cka").isel(step=-1),
        at_least(MIN_OWN_SHARE),
    ),
    Claim(
        "slices-without-cka",
        "Without residuals vertical slices are less often most similar to themselves by debiased CKA too: the units "
        "of two layers have nothing to do with each other then, so that correlation must fall; that slices move is "
        "more than that (share with all of them less the greatest without).",
        partial(own_share_drop, kind="cka"),
        at_least(NOTABLE_DIFFERENCE),
    ),
    _pilot_claim("causal", BASELINE, "no encoding and a causal mask: 0.9999", 0.9999, 0.005),
    _pilot_claim("learned", "learned causal", "a learned encoding and a causal mask: 1.0000", 1.0, 0.005),
    Claim(
        "pilot-learned-soon",
        "Our pilot of one seed, a learned encoding and a causal mask: 99 % by step 1,500 (the first recorded step at "
        "it).",
        lambda run: select(run.steps_to_99.fillna(np.inf), arm="learned causal"),
        at_most(1500),
        presets=("paper",),
    ),
    _pilot_claim("attention", "attention all", "no residuals around attention: 0.001", 0.001, 0.01),
    _pilot_claim("mlp", "mlp all", "no residuals around the MLPs: 0.02", 0.02, 0.03),
    _pilot_claim("first", "attention 0", "none around layer 0's attention alone: 0.999", 0.999, 0.005),
)


_QUICK = Config(
    digits=2, layers=2, heads=2, width=32, batch=64, steps=850, rate=1e-2, warm_up=50, every=100,
    arms=(BASELINE, "none full", "attention all", "mlp all"), glance=400, probed=128,
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
