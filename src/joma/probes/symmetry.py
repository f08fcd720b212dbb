"""Who tells a Transformer the order of its tokens: what a permutation changes, and where positions can be read off.

`permutation_gap` asks any callable from tokens to logits. The other probes see hidden states alone: how well a linear
readout finds the position, whether what stands above a location stays similar to it from layer to layer, and whether
neighbours are more alike than others. Any leading axes, such as seed and layer, are kept. All arithmetic is in float64.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor, nn

from joma.arguments import InputError, scalar, whole
from joma.tensors import as_tensor

ENUMERATED = 6  # up to so many earlier tokens all permutations are tried, at most 720
ELEMENTS = 2**24  # of logits asked for at once, unless one sequence has more
SUMMED, STORED = 64, 1  # roundings, in units of a dtype's epsilon: of what sums are taken in, of what is kept
TIE = 1e-9  # cosines that differ by less are alike
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class PermutationGap:
    """How far permutations of the earlier tokens move the last position's output.

    Attributes:
        largest, mean: over sequences and permutations, each relative to `spread`. The identity, which changes nothing,
            is one of all permutations, so that the mean is what a random permutation is expected to change.
        spread: how far the output moves when the earlier tokens are others.
        permutations: how many were tried for each sequence; all there are, or a sample.
    """

    largest: Float[Tensor, "*seed"]
    mean: Float[Tensor, "*seed"]
    spread: Float[Tensor, "*seed"]
    permutations: int


def permutation_gap(
    model: Callable[[Tensor], Any],
    tokens: Any,
    *,
    samples: int = 100,
    inputs: int = 32,
    vocabulary: int | None = None,
    generator: torch.Generator | None = None,
) -> PermutationGap:
    """Return how much the prediction at the last position depends on the order of the tokens before it.

        gap(s, π) = ‖y(π s) − y(s)‖ / spread,    spread² = mean over s and r of ‖y(r) − mean_r y(r)‖²

    y is the output at the last position, s one of the sequences, π a permutation of all its tokens but the last, and r
    sequences that end in the same token as s and have random tokens before it, uniform over the vocabulary. A gap of 1
    therefore says that the order of the earlier tokens matters as much as which they are; the last token's own share
    of the output cancels. Where other earlier tokens do not change y by more than rounding, the gap is 0: by a share of
    |y| of 1e-14 in float64, 1e-5 in float32, 0.001 in float16 and 0.008 in bfloat16. Without positional encoding and
    with a full mask the gap is 0 up to rounding (arXiv 2402.05969): about 1e-15 in float64, 1e-6 in float32, 1e-3 in
    float16, 1e-2 in bfloat16; the wider the sum that attention takes or the smaller `spread` against y, the more.

    All permutations are tried up to 6 earlier tokens, beyond that `samples` random ones for each sequence.

    Args:
        model: a callable from whole numbers [sample, position] to logits [*seed, sample, position, output], or to an
            object with such `.logits`. Hugging Face models and `joma.models.Decoder` are such callables. It must be
            deterministic: a module in training mode is refused if it has dropout.
        tokens: [sample, position] or [position], at least 2 positions; or a tokenizer's answer, without padding.
        samples: number of random permutations where not all are tried.
        inputs: number of random sequences r for each s.
        vocabulary: number of tokens; if not given it is looked up in the model, or else it is the number of outputs.
        generator: on the CPU, of the permutations and random sequences; if not given, a new one of seed 0.

    Returns:
        `PermutationGap`, without axes or with the model's leading ones.

    >>> table = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> def bag(tokens):
    ...     return table[tokens].cumsum(dim=1)
    >>> def fading(tokens):
    ...     return (table[tokens] * torch.arange(1, 5)[:, None]).cumsum(dim=1)
    >>> bool(permutation_gap(bag, [[1, 2, 3, 4]]).largest < 1e-14), permutation_gap(fading, [[1, 2, 3, 4]]).largest
    (True, tensor(0.8593, dtype=torch.float64))
    """
    samples, inputs = whole("samples", samples), whole("inputs", inputs, low=2)
    _check_model(model)
    given = _sequences(tokens).to(_device(model))
    known = _vocabulary(model) if vocabulary is None else whole("vocabulary", vocabulary)
    _check_range(given, known)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    with torch.no_grad():
        first = _steady(model, given[:1])
        batch = max(1, ELEMENTS // (first.numel() * given.shape[1]))
        orders = _orders(given.shape[1] - 1, len(given), samples, generator).to(given.device)
        change = _changes(model, given, orders, batch)
        stray = torch.randint(known or first.shape[-1], (len(given), inputs, orders.shape[-1]), generator=generator)
        spread, floor = _spread(model, given, stray.to(given.device), batch).unbind(-1)
    relative = torch.where(spread[..., None] > floor[..., None], change / spread[..., None], 0.0)
    return PermutationGap(relative.amax(dim=-1), relative.mean(dim=-1), spread, orders.shape[1])


def _sequences(tokens: Any) -> Int[Tensor, "sample position"]:
    """Return tokens, or the `input_ids` of a tokenizer's answer, checked to be sequences of one length."""
    expected, remedy = "whole numbers [sample, position]", "give a tokenizer's numbers, in rows of one length"
    answer = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
    if "input_ids" not in answer:
        raise InputError("tokens", expected, f"a {type(tokens).__name__} without `input_ids`", remedy)
    given = as_tensor("tokens", answer["input_ids"], expected=expected, remedy=remedy)
    given = given[None] if given.ndim == 1 else given
    if given.ndim == 2 and (given.shape[0] < 1 or given.shape[1] < 2):
        remedy = "give longer sequences, as there is nothing to permute before the last token"
        raise InputError("tokens", "sequences of at least 2 tokens", f"shape {tuple(given.shape)}", remedy)
    if given.ndim != 2 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise InputError("tokens", expected, f"{given.dtype} of shape {tuple(given.shape)}", "give token numbers")
    mask = answer.get("attention_mask")
    if mask is not None and not as_tensor("tokens", mask, expected=expected, remedy=remedy).all():
        raise InputError("tokens", "without padding", "an attention mask with zeros", "give sequences of one length")
    return given.long()


def _check_model(model: Any) -> None:
    """Refuse a module in training mode that says it drops something; asking it twice might not show that."""
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if part.training and (rate := _drops(part)):
            got = f"dropout of {rate:g} in training mode in {name or 'it'} ({type(part).__name__})"
            raise InputError("model", "deterministic", got, "turn dropout off with `model.eval()`")


def _drops(part: nn.Module) -> float:
    """Return the rate at which a module itself drops something in training, as far as it says: 0 if it does not.

    Rates are those of torch's dropout, attributes with "drop" in their names, as of modules that call `F.dropout`, and
    the layer drop of a Hugging Face config. Its other rates may be of parts that the model does not have.
    """
    said = {"drop": float(part.p)} if isinstance(part, DROPOUTS) else dict(vars(part))
    config = vars(part.config) if hasattr(getattr(part, "config", None), "__dict__") else {}
    said |= {name: value for name, value in config.items() if name.endswith("layerdrop")}
    rates = (value for name, value in said.items() if "drop" in name and isinstance(value, float) and 0 < value <= 1)
    return next(rates, 0.0)


def _device(model: Any) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def _vocabulary(model: Any) -> int | None:
    """Return the number of tokens that a model says it knows: its embedding's rows, or its config's word."""
    embeddings = getattr(model, "get_input_embeddings", None)
    weight = getattr(embeddings(), "weight", None) if callable(embeddings) else None
    if weight is not None:
        return len(weight)
    config = getattr(model, "config", None)
    said = getattr(config, "vocab_size", None) or getattr(config, "vocabulary", None)
    return said if isinstance(said, int) else None


def _check_range(given: Int[Tensor, "sample position"], known: int | None) -> None:
    low, high = (int(bound) for bound in torch.aminmax(given))
    if low < 0 or (known is not None and high >= known):
        expected = "at least 0" if known is None else f"in the model's vocabulary, 0 to {known - 1}"
        raise InputError("tokens", expected, f"{low} to {high}", "use the model's own tokenizer")


def _last(model: Callable[[Tensor], Any], given: Int[Tensor, "sample position"]) -> Float[Tensor, "*seed sample out"]:
    """Return the output at the last position, or say what is wrong with the model's answer."""
    try:
        answer = model(given)
    except IndexError as cause:
        raise _out_of_range(model, given, cause) from None
    logits = getattr(answer, "logits", answer)
    if not isinstance(logits, Tensor):
        remedy = "wrap it in a function that returns the logits"
        raise InputError("model", "a callable from tokens to logits", f"a {type(logits).__name__}", remedy)
    if logits.ndim < 3 or logits.shape[-3:-1] != given.shape:
        expected = f"returning logits [{len(given)}, {given.shape[1]}, vocabulary] for {len(given)} sequences"
        remedy = "pass a model with an output at every position, not a classifier of whole sequences"
        raise InputError("model", expected, f"shape {tuple(logits.shape)}, which has no such position axis", remedy)
    if not logits.is_floating_point():
        remedy = "return logits, not tokens, or convert them with `.float()`"
        raise InputError("model", "returning logits of a floating-point type", logits.dtype, remedy)
    last = logits[..., -1, :]
    if not last.isfinite().all():
        raise InputError("model", "returning finite logits", "NaN or infinity", "check its weights and dtype")
    return last


def _out_of_range(
    model: Callable[[Tensor], Any], given: Int[Tensor, "sample position"], cause: IndexError
) -> InputError:
    """Say what a model cannot look up: the length, if it knows every token by itself, or else the tokens."""

    def takes(part: Int[Tensor, "sample position"]) -> bool:
        try:
            model(part)
        except Exception:  # whatever it is, the length is then not shown to be the reason
            return False
        return True

    length = given.shape[1]
    if takes(given.unique()[:, None]):
        fails = bisect.bisect_left(range(length), True, lo=2, key=lambda n: not takes(given[:, :n]))
        expected = f"no longer than the model takes, {fails - 1} positions"
        return InputError("tokens", expected, f"{length} ({cause})", "give shorter sequences")
    low, high = (int(bound) for bound in torch.aminmax(given))
    remedy = "use the model's own tokens, and give their number as `vocabulary`"
    return InputError("tokens", "in the model's vocabulary", f"{low} to {high} ({cause})", remedy)


def _rounding(dtype: torch.dtype) -> float:
    """Return the share of an output's size below which a difference counts as rounding.

    float64 and float32 are summed as they are, and the error grows with the width. Narrower types are summed in float32
    and rounded where they are stored: decoders of 1 to 24 layers have errors of 0.2 to 1.7 of their epsilon. A much
    higher floor would hide what these types do resolve.
    """
    eps = torch.finfo(dtype).eps
    return max(STORED * eps, SUMMED * min(eps, torch.finfo(torch.float32).eps))


def _steady(model: Callable[[Tensor], Any], given: Int[Tensor, "1 position"]) -> Float[Tensor, "*seed 1 out"]:
    """Return the output for one sequence, checked to be the same when asked again."""
    first, again = _last(model, given), _last(model, given)
    off = (first.double() - again.double()).abs().amax(dim=-1)
    if (off > _rounding(first.dtype) * first.double().abs().amax(dim=-1)).any():
        remedy, got = "turn dropout off with `model.eval()`", f"outputs that differ by {float(off.max()):.3g}"
        raise InputError("model", "deterministic", f"{got} on the same tokens", remedy)
    return first


def _orders(
    earlier: int, count: int, samples: int, generator: torch.Generator
) -> Int[Tensor, "sequence permutation earlier"]:
    """Return all permutations for every sequence, or `samples` random ones for each."""
    if earlier <= ENUMERATED:
        return torch.tensor(list(itertools.permutations(range(earlier)))).expand(count, -1, -1)
    return torch.rand(count, samples, earlier, generator=generator, dtype=torch.float64).argsort(dim=-1)


def _changes(
    model: Callable[[Tensor], Any],
    given: Int[Tensor, "sequence position"],
    orders: Int[Tensor, "sequence permutation earlier"],
    batch: int,
) -> Float[Tensor, "*seed change"]:
    """Return ‖y(π s) − y(s)‖ for every sequence and permutation; no more than `batch` sequences are asked at once."""
    base = torch.cat([_last(model, part).double() for part in given.split(batch)], dim=-2)
    owner = torch.arange(len(given), device=given.device).repeat_interleave(orders.shape[1])
    found = []
    for own, order in zip(owner.split(batch), orders.flatten(0, 1).split(batch), strict=True):
        shuffled = torch.cat([given[own, :-1].gather(1, order), given[own, -1:]], dim=1)
        found.append((_last(model, shuffled).double() - base[..., own, :]).norm(dim=-1))
    return torch.cat(found, dim=-1)


def _spread(
    model: Callable[[Tensor], Any],
    given: Int[Tensor, "sequence position"],
    stray: Int[Tensor, "sequence input earlier"],
    batch: int,
) -> Float[Tensor, "*seed 2"]:
    """Return the spread of y over random earlier tokens, and how much of it could be rounding."""
    found = []
    for own, earlier in zip(given, stray, strict=True):
        mixed = torch.cat([earlier, own[-1:].expand(len(earlier), 1)], dim=1)
        last = torch.cat([_last(model, part) for part in mixed.split(batch)], dim=-2)
        y = last.double()
        square = (y - y.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)
        rounding = _rounding(last.dtype) ** 2 * y.square().sum(dim=-1).mean(dim=-1)
        found.append(torch.stack([square, rounding], dim=-1))
    return torch.stack(found).mean(dim=0).sqrt()


@dataclass(frozen=True)
class PositionReadout:
    """How well a linear readout finds the position of a hidden state.

    Attributes:
        accuracy: share of states whose position is found, over states that the readout was not fitted to.
        spread: standard deviation of the accuracy over the folds.
        by_position: the accuracy for each true position.
        chance: 1 over the number of positions.
    """

    accuracy: Float[Tensor, "*lead"]
    spread: Float[Tensor, "*lead"]
    by_position: Float[Tensor, "*lead position"]
    chance: float


def position_decodability(states: ArrayLike | Tensor, *, folds: int = 5, ridge: float = 1e-3) -> PositionReadout:
    """Return how well positions are read off hidden states by a linear readout, cross-validated.

        position(x) = argmax_p  m_pᵀ S⁻¹ x − ½ m_pᵀ S⁻¹ m_p,    S = within + ridge · (tr total / width) · I

    m_p is the mean state at position p, `within` the covariance about these means, `total` that about the mean of all:
    the linear discriminant, in closed form. (Regression on one-hot positions, as simple, is masked: where the means
    lie along a line, as they may for positions, it never answers with one in the middle.) Samples are dealt to folds
    in turn; the readout is fitted to the others, and asked about a fold's states, so that no sequence is in both.
    Shifts, rotations and scales of the states change nothing.

    What a token itself tells about its position is part of the accuracy: compare with the states before layer 1.

    Args:
        states: [*lead, sample, position, width], such as `Decoder.activations(...)["residual"]`, stacked over layers.
        folds: at least 2, at most the number of samples.
        ridge: above 0.

    Returns:
        `PositionReadout`, each of shape [*lead].

    >>> generator = torch.Generator().manual_seed(0)
    >>> noise = torch.randn(2, 40, 6, 8, generator=generator)
    >>> noise[1] += 3 * torch.arange(6.0)[:, None] / 8**0.5
    >>> position_decodability(noise).accuracy.round(decimals=1)
    tensor([0.2000, 0.9000], dtype=torch.float64)
    """
    x = _states(states, axes=3).double()
    count, positions, _ = x.shape[-3:]
    folds = whole("folds", folds, low=2, high=count)
    ridge = scalar("ridge", ridge, low=1e-12)
    dealt = torch.arange(count, device=x.device) % folds
    truth = torch.arange(positions, device=x.device)
    right = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    for fold in range(folds):
        found = _discriminant(x[..., dealt != fold, :, :], x[..., dealt == fold, :, :], ridge).argmax(dim=-1)
        right[..., dealt == fold, :] = found == truth
    of_fold = torch.stack([right[..., dealt == fold, :].double().mean(dim=(-1, -2)) for fold in range(folds)], dim=-1)
    by_position = right.double().mean(dim=-2)
    return PositionReadout(by_position.mean(dim=-1), of_fold.std(dim=-1), by_position, 1 / positions)


def _discriminant(
    fitted: Float[Tensor, "*lead sample position width"],
    asked: Float[Tensor, "*lead other position width"],
    ridge: float,
) -> Float[Tensor, "*lead other position score"]:
    """Return the score of every position for every asked state."""
    shift = fitted.mean(dim=(-2, -3), keepdim=True)
    fitted, asked = fitted - shift, asked - shift
    means = fitted.mean(dim=-3)
    rest = (fitted - means[..., None, :, :]).flatten(-3, -2)
    within = rest.mT @ rest / rest.shape[-2]
    level = fitted.square().mean(dim=(-1, -2, -3))  # the trace of the total covariance over the width
    level = torch.where(level > 0, ridge * level, 1.0)[..., None]
    within.diagonal(dim1=-2, dim2=-1).add_(level)
    direction = torch.cholesky_solve(means.mT, torch.linalg.cholesky(within))
    offset = (means.mT * direction).sum(dim=-2) / 2
    return (asked.flatten(-3, -2) @ direction).unflatten(-2, asked.shape[-3:-1]) - offset[..., None, None, :]


@dataclass(frozen=True)
class SliceSimilarity:
    """How similar what stands at location i of layer a is to what stands at location j of layer b, at [a, b, i, j].

    Attributes:
        cka: linear centred kernel alignment, 0 to 1; blind to rotations of the units.
        correlation: mean over units of a unit's correlation with the same unit, −1 to 1.
    """

    cka: Float[Tensor, "*seed layer layer position position"]
    correlation: Float[Tensor, "*seed layer layer position position"]


def slice_similarity(
    states: ArrayLike | Tensor, *, debiased: bool = False, tolerance: float = 1e-5, block: int = 64
) -> SliceSimilarity:
    """Return the similarity of every pair of layers and locations, over samples.

        CKA(X, Y) = ⟨K_X, K_Y⟩ / (‖K_X‖ ‖K_Y‖),  K_X = X Xᵀ,     correlation = mean over units k of corr(X_k, Y_k)

    X and Y [sample, width] are the states of two locations with their means over samples taken off. As ⟨K_X, K_Y⟩ =
    ‖Xᵀ Y‖², this is the same as by cross-covariances, but all pairs are then one matrix product, taken over a few rows
    of K at a time.

    Plain CKA of unrelated X and Y is far above 0 unless there are many more samples than units; `debiased` replaces
    each product by Song et al.'s unbiased estimate (of the independence criterion), which may then be negative. The
    study `addition` debiases.

    A unit that does not vary at a location is left out there; a location where no unit varies, such as that of a fixed
    token before layer 1, has similarity NaN.

    Args:
        states: [*seed, layer, sample, position, width], e.g. `torch.stack(model.activations(...)["residual"], dim=-4)`.
        debiased: whether to remove the bias of few samples from CKA.
        tolerance: a unit whose range over samples is at most this share of its largest magnitude does not vary.
        block: rows of K held at once.

    Returns:
        `SliceSimilarity`, each [*seed, layer, layer, position, position].

    >>> states = torch.randn(1, 50, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> found = slice_similarity(torch.cat([states, -2 * states]))
    >>> torch.stack([found.cka[0, 1].diagonal(), found.correlation[0, 1].diagonal()]).round(decimals=9)
    tensor([[ 1.,  1.,  1.],
            [-1., -1., -1.]], dtype=torch.float64)
    """
    given, share = _states(states, axes=4), scalar("tolerance", tolerance, low=0.0, high=1.0)
    layers, count = given.shape[-4], given.shape[-3]
    if count < (least := 4 if debiased else 2):
        raise InputError("states", f"of at least {least} samples", count, "give more sequences")
    x = given.double().transpose(-3, -2).flatten(-4, -3)
    varies = (x.amax(dim=-2) - x.amin(dim=-2)) > share * x.abs().amax(dim=-2)
    x = (x - x.mean(dim=-2, keepdim=True)) * varies[..., None, :]
    cka, correlation = _alignment(x, whole("block", block), debiased), _correlation(x, varies)
    still = ~varies.any(dim=-1)
    still = still[..., :, None] | still[..., None, :]
    found = (values.masked_fill(still, torch.nan) for values in (cka, correlation))
    split = (values.unflatten(-1, (layers, -1)).unflatten(-3, (layers, -1)) for values in found)
    return SliceSimilarity(*(values.transpose(-3, -2) for values in split))


def _alignment(
    x: Float[Tensor, "*seed slice sample width"], block: int, debiased: bool
) -> Float[Tensor, "*seed slice slice"]:
    """Return CKA of every pair of slices; debiased, by Song et al.'s estimate of each product."""
    slices, count = x.shape[-3:-1]
    product = x.new_zeros(*x.shape[:-3], slices, slices)
    rows = []
    for start in range(0, count, block):
        gram = x[..., start : start + block, :] @ x.mT
        if debiased:
            gram.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
            rows.append(gram.sum(dim=-1))
        flat = gram.flatten(-2)
        product += flat @ flat.mT
    if debiased:
        sums = torch.cat(rows, dim=-1)
        total = sums.sum(dim=-1)
        product += total[..., :, None] * total[..., None, :] / ((count - 1) * (count - 2))
        product -= 2 / (count - 2) * sums @ sums.mT
    size = product.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return (product / (size[..., :, None] * size[..., None, :])).clamp(-1, 1)


def _correlation(
    x: Float[Tensor, "*seed slice sample width"], varies: Bool[Tensor, "*seed slice width"]
) -> Float[Tensor, "*seed slice slice"]:
    """Return the mean over the units that vary in both slices of the unit's correlation."""
    size = x.norm(dim=-2, keepdim=True)
    unit = (x / torch.where(size > 0, size, 1.0)).flatten(-2)
    both = varies.double() @ varies.double().mT
    return ((unit @ unit.mT) / both).clamp(-1, 1)


@dataclass(frozen=True)
class OwnLocation:
    """How much of each vertical slice stays at its own location, at [a, b] for layers a and b.

    Attributes:
        share: of locations of layer a, those to which no other location of layer b is as similar as the same one.
        margin: similarity to the same location less that to the most similar other one, mean over locations.
    """

    share: Float[Tensor, "*seed layer layer"]
    margin: Float[Tensor, "*seed layer layer"]


def own_location(similarity: ArrayLike | Tensor) -> OwnLocation:
    """Return how often, and by how much, a location is most similar to itself at another layer.

        margin_i = S[a, b, i, i] − max_{j ≠ i} S[a, b, i, j],    share = mean over i of 1(margin_i > 0)

    By chance the share is 1 over the number of locations. Locations without a similarity (NaN) are left out.

    Args:
        similarity: [*seed, layer, layer, position, position], of `slice_similarity`; at least 2 positions.

    Returns:
        `OwnLocation`, each [*seed, layer, layer]; NaN where no location is left.

    >>> own_location(torch.tensor([[[[0.9, 0.2], [0.5, 0.4]]]])).share
    tensor([[0.5000]])
    """
    given = _floating("similarity", similarity, "pass what `slice_similarity` returns")
    if given.ndim < 4 or given.shape[-1] != given.shape[-2] or given.shape[-1] < 2:
        got = f"shape {tuple(given.shape)}"
        raise InputError("similarity", "[*seed, layer, layer, position, position]", got, "give at least 2 positions")
    own = given.diagonal(dim1=-2, dim2=-1)
    same = torch.eye(given.shape[-1], dtype=torch.bool, device=given.device)
    others = given.masked_fill(same, -torch.inf)
    margin = own - others.masked_fill(others.isnan(), -torch.inf).amax(dim=-1)
    margin = margin.masked_fill(margin.isinf(), torch.nan)  # a location without another to compare with
    above = (margin > 0).to(given.dtype).masked_fill(margin.isnan(), torch.nan)
    return OwnLocation(above.nanmean(dim=-1), margin.nanmean(dim=-1))


@dataclass(frozen=True)
class Adjacency:
    """Whether neighbouring hidden vectors are more similar than others.

    Attributes:
        score: how often a neighbour is more similar than a position further away; ½ by chance.
        null: the same after each of several random orders of the positions.
        cosine: mean cosine of states at distance 1, 2, ....
    """

    score: Float[Tensor, "*lead"]
    null: Float[Tensor, "*lead null"]
    cosine: Float[Tensor, "*lead distance"]


def adjacency(states: ArrayLike | Tensor, *, nulls: int = 100, generator: torch.Generator | None = None) -> Adjacency:
    """Return how much more similar hidden vectors of neighbouring positions are than others, after arXiv 2501.00073.

        score = P[cos(h_i, h_j) > cos(h_i, h_k)] + ½ P[equal],    |i − j| = 1 < |i − k|

    over samples and all such i, j, k. In a causal model without positional encoding neighbours average over nearly the
    same tokens. Its score is therefore above ½ from the first layer on, even with random weights, where embeddings are
    small beside what attention adds, as with GPT-2's; it is near ½ where they are not (`docs/deviations.md`, 23). For
    the null the positions are put in random orders, each for all samples at once, so that what is left is the luck of
    a fixed order; its mean is ½.

    Args:
        states: [*lead, sample, position, width], at least 3 positions.
        nulls: number of random orders.
        generator: on the CPU, of the random orders; if not given, a new one of seed 0.

    Returns:
        `Adjacency`: score [*lead], null [*lead, null], cosine [*lead, distance].

    >>> walk = torch.randn(20, 12, 30, generator=torch.Generator().manual_seed(0)).cumsum(dim=-2)
    >>> found = adjacency(walk)
    >>> bool(found.score > 0.9), bool(found.score > found.null.max())
    (True, True)
    """
    x = torch.nn.functional.normalize(_states(states, axes=3, positions=3).double(), dim=-1)
    nulls = whole("nulls", nulls)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    cosine, positions = x @ x.mT, x.shape[-2]
    null = []
    for _ in range(nulls):
        order = torch.randperm(positions, generator=generator).to(x.device)
        null.append(_neighbours(cosine[..., order[:, None], order]))
    means = cosine.mean(dim=-3)
    by_distance = [means.diagonal(offset=d, dim1=-2, dim2=-1).mean(dim=-1) for d in range(1, positions)]
    return Adjacency(_neighbours(cosine), torch.stack(null, dim=-1), torch.stack(by_distance, dim=-1))


def _neighbours(cosine: Float[Tensor, "*lead sample position position"]) -> Float[Tensor, "*lead"]:
    """Return how often a neighbour is more similar than a position further away, ties as halves."""
    place = torch.arange(cosine.shape[-1], device=cosine.device)
    far = (place[:, None] - place).abs() > 1
    wins = cosine.new_zeros(cosine.shape[:-3])
    near = cosine.diagonal(offset=1, dim1=-2, dim2=-1)[..., None]
    for anchors in (slice(None, -1), slice(1, None)):  # the neighbour on the right, then that on the left
        ahead = near - cosine[..., anchors, :]
        points = (ahead > TIE).double() + (ahead.abs() <= TIE).double() / 2
        wins += (points * far[anchors]).sum(dim=(-1, -2)).mean(dim=-1)
    return wins / (far[:-1].sum() + far[1:].sum())


def _states(states: ArrayLike | Tensor, *, axes: int, positions: int = 2) -> Tensor:
    """Return hidden states without their graph, checked to have the axes that a probe needs."""
    names = ["layer", "sample", "position", "width"][-axes:]
    given = _floating("states", states, "pass activations")
    if given.ndim < axes or math.prod(given.shape) == 0 or given.shape[-2] < positions:
        expected = f"[*lead, {', '.join(names)}], non-empty, with at least {positions} positions"
        raise InputError("states", expected, f"shape {tuple(given.shape)}", "give each position's hidden vector")
    if not given.isfinite().all():
        raise InputError("states", "finite", "NaN or infinity", "leave out the seeds that diverged")
    return given.detach()


def _floating(name: str, value: Any, remedy: str) -> Tensor:
    expected = "numbers of a floating-point type"
    given = as_tensor(name, value, expected=expected, remedy=remedy)
    if not given.is_floating_point():
        raise InputError(name, expected, given.dtype, f"{remedy}, or convert whole numbers to float")
    return given
