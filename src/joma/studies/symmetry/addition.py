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
    least_above_ceiling,
    own_share,
    own_share_above_chance,
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
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most, mean_interval, near, select
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
MAX_FULL_GAIN, MIN_CAUSAL_GAIN, MIN_OWN_SHARE = 0.05, 0.2, 0.9  # constants of our own, of checks only


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


def outcome(run: xr.Dataset) -> str:
    """Return what came out: how many sums are right with and without order, and what residual connections change."""
    final = run.accuracy.isel(step=-1)  # NaN for a diverged seed, of which the sentence must not speak as of 0 %
    causal, full = (100 * float(select(final, arm=arm).mean(skipna=False)) for arm in (BASELINE, "none full"))
    correlation, cka = (np.asarray(own_share_drop(run, kind)) for kind in ("correlation", "cka"))
    low, high = mean_interval(cka)
    decided = low > 0 or high < 0
    interval = f" (95 % interval {low:+.2f} to {high:+.2f})" if cka.size > 1 else ""
    return (
        f"Without encoding, {causal:.0f} % of unseen sums are right under a causal mask and {full:.0f} % under a full "
        f"one; without order at most {100 * float(run.ceiling):.1f} % are possible. With residual connections the "
        f"share of locations that stay most similar to themselves changes by {correlation.mean():+.2f} if measured by "
        f"correlation, and by {cka.mean():+.2f}{interval} if measured by CKA"
        f"{'.' if decided else ': no definitive evidence.'}"
    )


def _slowdown_claim(part: str, words: str) -> Claim:
    return Claim(
        f"{part}-residuals",
        f"Without residual connections around {words}, addition is learnt more slowly or not at all.",
        partial(slowdown, part=part),
        above(0.0),
        kind="reading",
        quantity="exact match, mean over the steps of training: with all residual connections less without these",
        across="interval",
    )


def _pilot_claim(name: str, arm: str, words: str, share: float, tolerance: float) -> Claim:
    return Claim(
        f"pilot-{name}",
        f"Exact match agrees with our pilot of one seed: {words}.",
        partial(final_accuracy, arm=arm),
        near(share, tolerance),
        kind="check",
        quantity="exact match on 10,000 unseen pairs at the end, mean over seeds",
        across="mean",
        presets=("paper",),
    )


_ABOVE = "exact match on unseen pairs, less the most that is possible without order"
_GAIN = "accuracy of a linear readout of the position at the end, the best layer's less the embeddings'"
_SHARE = "share of locations that are most similar to themselves at a higher level, mean over pairs of levels"
_LESS = f"{_SHARE}: with residual connections less the largest share without them around attention, MLPs or both"

CLAIMS = (
    Claim(
        "full",
        "Without encoding or causal mask, no model gets more sums right than is possible without order.",
        partial(above_ceiling, arm="none full"),
        at_most(0.0),
        kind="theorem",
        quantity=f"{_ABOVE} and {STANDARD_ERRORS} standard errors of the test pairs",
    ),
    Claim(
        "causal",
        "Without encoding, the causal mask alone lets a model learn the order of digits.",
        partial(above_ceiling, arm=BASELINE),
        at_least(0.0),
        kind="reading",
        quantity=f"{_ABOVE} and {STANDARD_ERRORS} standard errors of the test pairs",
    ),
    Claim(
        "full-encoded",
        "With a full mask, any positional encoding lets a model learn the order of digits instead.",
        least_above_ceiling,
        at_least(0.0),
        kind="reading",
        quantity=f"{_ABOVE} and {STANDARD_ERRORS} standard errors; the least of learned, sinusoidal and rotary",
        presets=("paper",),
    ),
    _slowdown_claim("attention", "attention"),
    _slowdown_claim("mlp", "the MLPs"),
    _slowdown_claim("both", "attention and the MLPs"),
    Claim(
        "one-layer-residuals",
        "Without the residual connections of one layer alone, addition is learnt more slowly.",
        slowdown_in_one_layer,
        above(0.0),
        kind="reading",
        quantity=(
            "exact match, mean over the steps of training: with all residual connections less the mean over the arms "
            "without those around attention, the MLP or both of one layer"
        ),
        across="interval",
        presets=("paper",),
    ),
    Claim(
        "slices",
        "From layer to layer a location is most similar to itself more often than by chance, by correlation.",
        partial(own_share_above_chance, kind="correlation"),
        above(0.0),
        kind="reading",
        quantity=f"{_SHARE}, less chance; units are compared one by one",
        across="interval",
    ),
    Claim(
        "slices-without",
        "Residual connections keep a location similar to itself, by correlation.",
        partial(own_share_drop, kind="correlation"),
        above(0.0),
        kind="reading",
        quantity=f"{_LESS}; without residual connections two layers have no units in common, so that it must fall",
        across="interval",
    ),
    Claim(
        "slices-cka",
        "From layer to layer a location is most similar to itself more often than by chance, by CKA.",
        partial(own_share_above_chance, kind="cka"),
        above(0.0),
        kind="control",
        quantity=f"{_SHARE}, less chance; debiased CKA does not depend on the choice of units",
        across="interval",
    ),
    Claim(
        "slices-without-cka",
        "Residual connections keep a location similar to itself, by CKA.",
        partial(own_share_drop, kind="cka"),
        above(0.0),
        kind="control",
        quantity=f"{_LESS}; the paper's second version found no definitive evidence of it",
        across="interval",
    ),
    Claim(
        "positions",
        "Positions can be read from hidden states better under a causal mask than under a full one.",
        lambda run: readout_gain(run, BASELINE) - readout_gain(run, "none full"),
        above(0.0),
        kind="control",
        quantity=f"{_GAIN}: causal less full mask, both without encoding",
        across="interval",
    ),
    Claim(
        "positions-causal",
        "Under a causal mask the readout of positions gains 0.2 over the embeddings.",
        partial(readout_gain, arm=BASELINE),
        at_least(MIN_CAUSAL_GAIN),
        kind="check",
        quantity=f"{_GAIN}; the threshold is ours",
    ),
    Claim(
        "positions-full",
        "Under a full mask the readout of positions gains no more than 0.05 over the embeddings.",
        partial(readout_gain, arm="none full"),
        at_most(MAX_FULL_GAIN),
        kind="check",
        quantity=f"{_GAIN}; the threshold is ours",
    ),
    Claim(
        "nine-in-ten",
        "With residual connections nine in ten locations are most similar to themselves, by correlation.",
        lambda run: own_share(run, BASELINE, "correlation").isel(step=-1),
        at_least(MIN_OWN_SHARE),
        kind="check",
        quantity=f"{_SHARE}; the threshold is ours",
    ),
    Claim(
        "nine-in-ten-cka",
        "With residual connections nine in ten locations are most similar to themselves, by CKA.",
        lambda run: own_share(run, BASELINE, "cka").isel(step=-1),
        at_least(MIN_OWN_SHARE),
        kind="check",
        quantity=f"{_SHARE}; the threshold is ours",
    ),
    Claim(
        "ceiling-2",
        "Without order, at most 28.5 % of sums of two digits can be right.",
        partial(ceiling_at, digits=2),
        near(0.285, 5e-5),
        kind="check",
        quantity="the most that is possible without order, by enumeration, against the number we published",
    ),
    Claim(
        "ceiling-3",
        "Without order, at most 5.32 % of sums of three digits can be right.",
        partial(ceiling_at, digits=3),
        near(0.0532, 5e-5),
        kind="check",
        quantity="the most that is possible without order, by enumeration, against the number we published",
    ),
    Claim(
        "causal-learns",
        "Without encoding, the causal mask alone lets four of five seeds reach 99 %.",
        lambda run: reached_by_four_in_five(final_accuracy(run, BASELINE)),
        at_least(LEARNT),
        kind="check",
        quantity="exact match on unseen pairs that four of five seeds reach; the threshold is ours",
        presets=("paper",),
    ),
    Claim(
        "full-encoded-learns",
        "With a full mask and any encoding, four of five seeds reach 99 %.",
        lambda run: min(reached_by_four_in_five(final_accuracy(run, f"{positions} full")) for positions in ENCODED),
        at_least(LEARNT),
        kind="check",
        quantity="exact match on unseen pairs that four of five seeds reach, the least of three encodings",
        presets=("paper",),
    ),
    _pilot_claim("causal", BASELINE, "0.9999 without encoding under a causal mask", 0.9999, 0.005),
    _pilot_claim("learned", "learned causal", "1.0000 with a learned encoding and a causal mask", 1.0, 0.005),
    Claim(
        "pilot-learned-soon",
        "With a learned encoding and a causal mask 99 % are reached by step 1,500, as in our pilot.",
        lambda run: select(run.steps_to_99.fillna(np.inf), arm="learned causal"),
        at_most(1500),
        kind="check",
        quantity="first recorded step at which exact match reaches 0.99",
        presets=("paper",),
    ),
    _pilot_claim("attention", "attention all", "0.001 without residuals around attention", 0.001, 0.01),
    _pilot_claim("mlp", "mlp all", "0.02 without residuals around the MLPs", 0.02, 0.03),
    _pilot_claim("first", "attention 0", "0.999 without those around layer 0's attention", 0.999, 0.005),
)


_QUICK = Config(
    digits=2, layers=2, heads=2, width=32, batch=64, steps=850, rate=1e-2, warm_up=50, every=100,
    arms=(BASELINE, "none full", "attention all", "mlp all"), glance=400, probed=128,
)  # fmt: skip

STUDY = Study(
    name="addition",
    title="A causal mask alone lets a model learn the order of digits",
    source="Breaking Symmetry When Training Transformers (arXiv 2402.05969v2)",
    statement=(
        "Transformers can learn tasks that need the order of tokens without positional encodings, and the causal mask "
        "must be what makes this possible (Zuo and Guerzhoy, arXiv 2402.05969). The authors suppose that residual "
        "connections let each vertical slice of the network stand for one location. Their first version reports "
        "evidence for this; the second says that they did not find definitive evidence."
    ),
    about=(
        "Decoders learn sums such as 123+456=0579 and are tested on pairs that were never trained on in either order. "
        "The arms differ in encoding and mask, and in which residual connections are removed; all start from the same "
        "weights and see the same batches. The most that can be right without knowing the order is enumerated. "
        "Locations at two levels are compared by the correlation of each unit, and by debiased CKA, which does not "
        "depend on the choice of units. The quick preset has two digits, two layers and four arms, and stops before "
        "any arm has learnt the task."
    ),
    version=2,
    presets={
        "quick": Preset(_QUICK, seeds=3, seconds=58),
        "paper": Preset(Config(), seeds=5, seconds=2_000_000),  # an estimate; 15 minutes on one H200
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    figures={
        "accuracy": Drawing(
            draw_accuracy,
            "Lines: mean over seeds. Bands: smallest to largest seed. Grey: the most that is possible without order. "
            "(a, b) By positional encoding. (c) No encoding, causal mask, residual connections removed in all layers. "
            "Where they were removed in one layer alone, a further panel has the mean over the steps of training.",
        ),
        "slices": Drawing(
            draw_slices,
            "How similar a location (row) at one level is to a location (column) at a higher level; mean over pairs of "
            "levels and seeds. Left: by correlation of the same unit. Right: by debiased CKA. a and b are digits of "
            "the summands, c of the sum, in the order in which they are read.",
        ),
        "positions": Drawing(
            draw_positions,
            "How often a linear readout finds the position of a hidden state. Lines: mean over seeds. Bands: smallest "
            "to largest seed. The embeddings' line is what the token alone says: + and = have one position each.",
        ),
        "own": Drawing(
            draw_own,
            "Share of locations that no other location at a higher level resembles more than the same location does; "
            "mean over pairs of levels. Lines: mean over seeds. Bands: smallest to largest seed. No encoding, causal "
            "mask. (a) By correlation of the same unit. (b) By debiased CKA.",
        ),
    },
    threads=1,
    exact_shards=False,
)
