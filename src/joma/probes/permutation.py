"""How much a model's prediction depends on the order of its earlier tokens.

`permutation_gap` works on any callable from tokens to logits. All arithmetic on its outputs is in float64.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from joma import memory
from joma.arguments import InputError, described, whole
from joma.arguments import sequence as sequence_of
from joma.noise import check_generator
from joma.probes.states import nan_where
from joma.tensors import as_tensor

MAX_ENUMERATED = 6  # earlier tokens up to which all permutations are tried, at most 720
MAX_LOGITS = 2**24  # computed in one call of the model, unless a single sequence has more
# Rounding errors in units of a dtype's epsilon: of the type that sums are accumulated in, and of the stored type.
SUM_ROUNDINGS, STORE_ROUNDINGS = 64, 1
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Model = Callable[[Tensor], Any]


@dataclass(frozen=True)
class PermutationGap:
    """How far permutations of the earlier tokens move the last position's output.

    Attributes:
        largest, mean: change of the output over sequences and permutations, relative to `spread`. Where all
            permutations are tried, the identity is one of them: the mean is the expected change by a random one.
        spread: how far the output moves when the earlier tokens are replaced by random ones.
        permutations: how many were tried for each sequence: all of them, or a sample.
    """

    largest: Float[Tensor, "*seed"]
    mean: Float[Tensor, "*seed"]
    spread: Float[Tensor, "*seed"]
    permutations: int


def permutation_gap(
    model: Model,
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
    therefore means that the order of the earlier tokens matters as much as which tokens they are; the contribution of
    the last token to the output cancels. If other earlier tokens change y by no more than rounding, the gap is 0;
    rounding is 1e-14 of |y| in float64, 1e-5 in float32, 0.001 in float16 and 0.008 in bfloat16. Without positional
    encoding and with a full mask the gap is 0 up to rounding (arXiv 2402.05969): about 1e-15 in float64, 1e-6 in
    float32, 1e-3 in float16, 1e-2 in bfloat16. Rounding grows with the number of terms that attention sums, and with
    the ratio of |y| to `spread`.

    Where a seed's output holds NaN or an infinity its results are NaN, and those of the other seeds are not. A model
    without a seed axis that returns such logits raises an error.

    With up to 6 earlier tokens all permutations are tried, with more `samples` random ones for each sequence.

    Args:
        model: a callable from whole numbers [sample, position] to logits [*seed, sample, position, output], or to an
            object with such `.logits`; Hugging Face models and `joma.models.Decoder` qualify. It must be deterministic:
            a module in training mode with dropout raises an error.
        tokens: [sample, position] or [position], at least 2 positions; or a tokenizer's output, without padding.
        samples: number of random permutations where not all are tried.
        inputs: number of random sequences r for each s.
        vocabulary: number of tokens; if not given it is read from the model, or else taken as the number of outputs.
        generator: on the CPU, draws the permutations and random sequences; if not given, a new one with seed 0.

    Returns:
        `PermutationGap`, whose tensors have the leading axes of the model's output, or none.

    >>> table = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> def bag(tokens):
    ...     return table[tokens].cumsum(dim=1)
    >>> def fading(tokens):
    ...     return (table[tokens] * torch.arange(1, 5)[:, None]).cumsum(dim=1)
    >>> bool(permutation_gap(bag, [[1, 2, 3, 4]]).largest < 1e-14), permutation_gap(fading, [[1, 2, 3, 4]]).largest
    (True, tensor(0.8593, dtype=torch.float64))
    """
    samples, inputs = whole("samples", samples), whole("inputs", inputs, low=2)
    if not callable(model):
        raise InputError("model", "a callable from tokens to logits", described(model), "pass a module or a function")
    _check_dropout(model)
    sequences = _sequences(tokens).to(_device(model))
    for name, count in {"samples": samples, "inputs": inputs}.items():
        memory.check(name, 16 * count * sequences.numel(), "give a smaller number")
    vocabulary_size = _vocabulary(model) if vocabulary is None else whole("vocabulary", vocabulary)
    _check_range(sequences, vocabulary_size)
    generator = check_generator(generator)
    with torch.no_grad():
        output = _deterministic_output(model, sequences[:1])
        batch = max(1, MAX_LOGITS // (output.numel() * sequences.shape[1]))
        orders = _orders(sequences.shape[1] - 1, len(sequences), samples, generator).to(sequences.device)
        change = _changes(model, sequences, orders, batch)
        size = (len(sequences), inputs, orders.shape[-1])
        earlier = torch.randint(vocabulary_size or output.shape[-1], size, generator=generator).to(sequences.device)
        spread, floor = _spread(model, sequences, earlier, batch).unbind(-1)
    relative = torch.where(spread[..., None] <= floor[..., None], 0.0, change / spread[..., None])
    diverged = change.isnan().any(dim=-1) | spread.isnan()
    largest, mean = (nan_where(diverged, values) for values in (relative.amax(dim=-1), relative.mean(dim=-1)))
    return PermutationGap(largest, mean, nan_where(diverged, spread), orders.shape[1])


def moved_predictions(
    model: Model, tokens: Any, order: Any, *, inputs: int = 32, generator: torch.Generator | None = None
) -> Float[Tensor, "*seed position"]:
    """Return how far the prediction at each token moves when one sequence is rearranged by hand.

        moved(i) = ‖y'(i) − y(π(i))‖ / spread

    The rearranged sequence has token s_π(i) at position i; y' and y are the outputs of both sequences, compared at the
    same token. `spread` is that of `permutation_gap`, so that at a last token that stays in its place this is one of
    the changes that it maximises over.

    Args:
        model: as in `permutation_gap`.
        tokens: one sequence, [position].
        order: π, the former position of each token of the rearranged sequence, from 0 on.
        inputs, generator: as in `permutation_gap`.

    Returns:
        The changes by position in the rearranged sequence, after the leading axes of the model's output.

    >>> table = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> def bag(tokens):
    ...     return table[tokens].cumsum(dim=1)
    >>> moved_predictions(bag, [1, 2, 3, 4], order=[1, 0, 2, 3]).round(decimals=3)
    tensor([0.7460, 0.7570, 0.0000, 0.0000], dtype=torch.float64)
    """
    sequence = _sequences(tokens)
    if len(sequence) != 1:
        raise InputError("tokens", "one sequence", f"{len(sequence)} of them", "call it for each of them")
    permutation = torch.as_tensor(_permutation(order, sequence.shape[1]))
    spread = permutation_gap(model, sequence, samples=1, inputs=inputs, generator=generator).spread
    with torch.no_grad():
        both = torch.cat([sequence, sequence[:, permutation]]).to(_device(model))
        output = model(both)
    before, after = getattr(output, "logits", output).double().unbind(dim=-3)
    moved = (after - before[..., permutation, :]).norm(dim=-1)
    return torch.where(moved == 0, 0.0, moved / spread[..., None])  # a model that ignores its context has spread 0


def _permutation(order: Any, length: int) -> list[int]:
    expected, remedy = f"the numbers 0 to {length - 1} in some order", "give each position once"
    positions = [whole("order", position, low=0) for position in sequence_of("order", order, expected)]
    if sorted(positions) != list(range(length)):
        raise InputError("order", expected, positions, remedy)
    return positions


def _sequences(tokens: Any) -> Int[Tensor, "sample position"]:
    """Return the tokens, or the `input_ids` of a tokenizer's output, checked to be sequences of one length."""
    expected, remedy = "whole numbers [sample, position]", "give a tokenizer's numbers, in rows of one length"
    encoding = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
    if "input_ids" not in encoding:
        raise InputError("tokens", expected, f"a {type(tokens).__name__} without `input_ids`", remedy)
    sequences = as_tensor("tokens", encoding["input_ids"], expected=expected, remedy=remedy)
    sequences = sequences[None] if sequences.ndim == 1 else sequences
    shape = tuple(sequences.shape)
    if sequences.ndim == 2 and (shape[0] < 1 or shape[1] < 2):
        remedy = "give longer sequences, as there is nothing to permute before the last token"
        raise InputError("tokens", "sequences of at least 2 tokens", f"shape {shape}", remedy)
    if sequences.ndim != 2 or sequences.is_floating_point() or sequences.is_complex() or sequences.dtype == torch.bool:
        raise InputError("tokens", expected, f"{sequences.dtype} of shape {shape}", "give token numbers")
    mask = encoding.get("attention_mask")
    if mask is not None and not as_tensor("tokens", mask, expected=expected, remedy=remedy).all():
        raise InputError("tokens", "without padding", "an attention mask with zeros", "give sequences of one length")
    return sequences.long()


def _check_dropout(model: Any) -> None:
    """Raise `InputError` for a module in training mode with dropout: two calls might agree by chance."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if module.training and (rate := _dropout_rate(module)):
            got = f"dropout of {rate:g} in training mode in {name or 'it'} ({type(module).__name__})"
            raise InputError("model", "deterministic", got, "turn dropout off with `model.eval()`")


def _dropout_rate(module: nn.Module) -> float:
    """Return the dropout rate of a module itself, without its children; 0 if its attributes show none.

    A rate comes from a dropout module of torch, from an attribute with "drop" in its name, as in modules that call
    `F.dropout`, or from `layerdrop` in a Hugging Face config. Other rates of a config may belong to absent parts.
    """
    attributes = {"drop": float(module.p)} if isinstance(module, DROPOUTS) else dict(vars(module))
    config = vars(module.config) if hasattr(getattr(module, "config", None), "__dict__") else {}
    attributes |= {name: value for name, value in config.items() if name.endswith("layerdrop")}
    rates = (
        value for name, value in attributes.items() if "drop" in name and isinstance(value, float) and 0 < value <= 1
    )
    return next(rates, 0.0)


def _device(model: Any) -> torch.device:
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _vocabulary(model: Any) -> int | None:
    """Return the number of tokens of a model: the rows of its embedding, or what its config states; else None."""
    embeddings = getattr(model, "get_input_embeddings", None)
    weight = getattr(embeddings(), "weight", None) if callable(embeddings) else None
    if weight is not None:
        return len(weight)
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None) or getattr(config, "vocabulary", None)
    return size if isinstance(size, int) else None


def _check_range(sequences: Int[Tensor, "sample position"], vocabulary: int | None) -> None:
    low, high = (int(bound) for bound in torch.aminmax(sequences))
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        expected = "at least 0" if vocabulary is None else f"in the model's vocabulary, 0 to {vocabulary - 1}"
        raise InputError("tokens", expected, f"{low} to {high}", "use the model's own tokenizer")


def _last_output(model: Model, sequences: Int[Tensor, "sample position"]) -> Float[Tensor, "*seed sample out"]:
    """Return the output at the last position, NaN for diverged seeds; raise `InputError` if it cannot be used."""
    try:
        output = model(sequences)
    except IndexError as cause:
        raise _lookup_error(model, sequences, cause) from None
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        remedy = "wrap it in a function that returns the logits"
        raise InputError("model", "a callable from tokens to logits", f"a {type(logits).__name__}", remedy)
    samples, length = sequences.shape
    if logits.ndim < 3 or logits.shape[-3:-1] != sequences.shape:
        expected = f"logits [{samples}, {length}, vocabulary] for {samples} sequences"
        got = f"shape {tuple(logits.shape)}, which has no such position axis"
        remedy = "pass a model with an output at every position, not a classifier of whole sequences"
        raise InputError("model", expected, got, remedy, must="return")
    if not logits.is_floating_point():
        remedy = "return logits, not tokens, or convert them with `.float()`"
        raise InputError("model", "logits of a floating-point type", logits.dtype, remedy, must="return")
    last = logits[..., -1, :]
    diverged = ~last.isfinite().flatten(-2).all(dim=-1)
    if not diverged.any():
        return last
    if logits.ndim == 3:
        remedy = "check its weights and dtype"
        raise InputError("model", "finite logits", "NaN or infinity", remedy, must="return")
    return nan_where(diverged, last)


def _lookup_error(model: Model, sequences: Int[Tensor, "sample position"], cause: IndexError) -> InputError:
    """Return the error for an index out of range: the length, if the model accepts each token alone, or the tokens."""

    def accepts(part: Int[Tensor, "sample position"]) -> bool:
        try:
            model(part)
        except Exception:  # after any other failure the length need not be the reason
            return False
        return True

    length = sequences.shape[1]
    if accepts(sequences.unique()[:, None]):
        fails = bisect.bisect_left(range(length), True, lo=2, key=lambda n: not accepts(sequences[:, :n]))
        expected = f"no longer than the {fails - 1} positions that the model accepts"
        return InputError("tokens", expected, f"{length} ({cause})", "give shorter sequences")
    low, high = (int(bound) for bound in torch.aminmax(sequences))
    remedy = "use the model's own tokens, and give their number as `vocabulary`"
    return InputError("tokens", "in the model's vocabulary", f"{low} to {high} ({cause})", remedy)


def _rounding(dtype: torch.dtype) -> float:
    """Return the fraction of an output's size below which a difference counts as rounding.

    float64 and float32 are summed as they are, and the error grows with the width. Narrower types are summed in float32
    and rounded where they are stored: decoders of 1 to 24 layers have errors of 0.2 to 1.7 of their epsilon. A much
    higher floor would hide what these types do resolve.
    """
    eps = torch.finfo(dtype).eps
    return max(STORE_ROUNDINGS * eps, SUM_ROUNDINGS * min(eps, torch.finfo(torch.float32).eps))


def _deterministic_output(model: Model, sequence: Int[Tensor, "1 position"]) -> Float[Tensor, "*seed 1 out"]:
    """Return the last output for one sequence, checked to be the same in a second call."""
    first, second = _last_output(model, sequence), _last_output(model, sequence)
    difference = (first.double() - second.double()).abs().amax(dim=-1)
    if (difference > _rounding(first.dtype) * first.double().abs().amax(dim=-1)).any():
        got = f"outputs that differ by {float(difference.nan_to_num().max()):.3g} on the same tokens"
        raise InputError("model", "deterministic", got, "turn dropout off with `model.eval()`")
    return first


def _orders(
    earlier: int, sequences: int, samples: int, generator: torch.Generator
) -> Int[Tensor, "sequence permutation earlier"]:
    """Return all permutations for every sequence, or `samples` random ones for each."""
    if earlier <= MAX_ENUMERATED:
        return torch.tensor(list(itertools.permutations(range(earlier)))).expand(sequences, -1, -1)
    return torch.rand(sequences, samples, earlier, generator=generator, dtype=torch.float64).argsort(dim=-1)


def _changes(
    model: Model,
    sequences: Int[Tensor, "sequence position"],
    orders: Int[Tensor, "sequence permutation earlier"],
    batch: int,
) -> Float[Tensor, "*seed change"]:
    """Return ‖y(π s) − y(s)‖ for every sequence and permutation, at most `batch` sequences in one call."""
    base = torch.cat([_last_output(model, part).double() for part in sequences.split(batch)], dim=-2)
    indices = torch.arange(len(sequences), device=sequences.device).repeat_interleave(orders.shape[1])
    changes = []
    for index, order in zip(indices.split(batch), orders.flatten(0, 1).split(batch), strict=True):
        permuted = torch.cat([sequences[index, :-1].gather(1, order), sequences[index, -1:]], dim=1)
        changes.append((_last_output(model, permuted).double() - base[..., index, :]).norm(dim=-1))
    return torch.cat(changes, dim=-1)


def _spread(
    model: Model,
    sequences: Int[Tensor, "sequence position"],
    earlier: Int[Tensor, "sequence input earlier"],
    batch: int,
) -> Float[Tensor, "*seed 2"]:
    """Return the spread of y over random earlier tokens, and how much of it could be rounding."""
    squares = []
    for sequence, prefixes in zip(sequences, earlier, strict=True):
        mixed = torch.cat([prefixes, sequence[-1:].expand(len(prefixes), 1)], dim=1)
        last = torch.cat([_last_output(model, part) for part in mixed.split(batch)], dim=-2)
        y = last.double()
        square = (y - y.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)
        rounding = _rounding(last.dtype) ** 2 * y.square().sum(dim=-1).mean(dim=-1)
        squares.append(torch.stack([square, rounding], dim=-1))
    return torch.stack(squares).mean(dim=0).sqrt()
