"""Classes of sequences over distinct and common tokens, and finite contexts drawn from them.

A class is a distribution over tokens. Distinct tokens come first; their frequencies tell classes apart. Common tokens
follow; they occur in every class and say little about it. The seed is the leading axis of every random tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from joma import memory, noise
from joma.arguments import InputError, choice, flag, scalar, whole
from joma.noise import check_generators
from joma.tensors import as_floating

_STREAM = 0  # the site of the noise that contexts are drawn with
_SURELY_FREE = 2**28  # bytes; to read how much memory is free takes longer than to draw a small batch
WIDTH = 30.0  # twice the variance of the bumps of `gaussian`, in tokens squared


@dataclass(frozen=True)
class TokenClasses:
    """P[token | class] for each seed, the number of each class, and which tokens are distinct."""

    frequency: Float[Tensor, "seed label token"]
    label: Int[Tensor, " label"]
    distinct: Bool[Tensor, " token"]


@dataclass(frozen=True)
class SequenceClasses:
    """P[token | class] for each seed, the query token of each class, and which tokens occur in that class alone."""

    frequency: Float[Tensor, "seed label token"]
    query: Int[Tensor, " label"]
    distinct: Bool[Tensor, "label token"]


@dataclass(frozen=True)
class Contexts:
    """Finite sequences of tokens, the frequency of each token in them, and the class that each was drawn from."""

    token: Int[Tensor, "seed sample position"]
    frequency: Float[Tensor, "seed sample token"]
    label: Int[Tensor, "seed sample"]


def _gaussian(uniform: Float[Tensor, "seed token label"], distinct: int) -> Tensor:
    classes = uniform.shape[-1]
    token = torch.arange(distinct, dtype=uniform.dtype)[:, None]
    centre = distinct * torch.arange(classes, dtype=uniform.dtype) / classes
    bumps = torch.exp(-((token - centre) ** 2) / WIDTH)
    return torch.cat([bumps.expand(len(uniform), -1, -1), uniform[:, distinct:]], dim=1)


def _random(uniform: Float[Tensor, "seed token label"], distinct: int) -> Tensor:  # noqa: ARG001  (as `_gaussian`)
    return uniform


KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {"gaussian": _gaussian, "random": _random}


def token_classes(
    kind: str,
    *,
    generators: Sequence[torch.Generator],
    classes: int = 20,
    distinct: int = 10,
    common: int = 10,
    dtype: torch.dtype = torch.float64,
) -> TokenClasses:
    """Return the token frequencies of every class, in the setting of JoMA's Figure 2.

    Before each class is normalised to sum to one, a common token's weight is uniform in [0, ½], and distinct token l
    of class i has

        gaussian: exp(−(l − M_d i/K)²/30)        random: uniform in [0, ½] as well

    with K classes and M_d distinct tokens. The same generators give the same weights of common tokens in both kinds.

    Args:
        kind: a name of `KINDS`.
        generators: one for each seed; each draws (M_d + M_c) × K numbers.
        classes, distinct, common: how many of each; `distinct` or `common` may be 0, not both.

    Returns:
        `TokenClasses` with `frequency` [seed, label, token].

    >>> data = token_classes("gaussian", generators=[torch.Generator().manual_seed(0)], classes=4, common=3)
    >>> data.frequency.shape, int(data.frequency[0, 2].argmax())
    (torch.Size([1, 4, 13]), 5)
    """
    weights_of, classes = choice("kind", kind, KINDS), whole("classes", classes)
    distinct, common = whole("distinct", distinct, low=0), whole("common", common, low=0)
    if distinct + common == 0:
        raise InputError("distinct + common", "at least 1", 0, "give the classes some tokens")
    shape = (distinct + common, classes)
    memory.check("classes", 32 * math.prod(shape), "give fewer classes or tokens")
    uniform = torch.stack(
        [torch.rand(shape, generator=stream, dtype=dtype) / 2 for stream in check_generators(generators)]
    )
    weight = weights_of(uniform, distinct).mT
    return TokenClasses(
        frequency=(weight / weight.sum(dim=-1, keepdim=True)).contiguous(),
        label=torch.arange(classes),
        distinct=torch.arange(distinct + common) < distinct,
    )


def sequence_classes(
    *,
    generators: Sequence[torch.Generator],
    queries: int = 2,
    classes: int = 4,
    distinct: int = 5,
    common: int = 5,
    share: float = 0.5,
    variation: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> SequenceClasses:
    """Return classes of sequences in the setting of Scan and Snap: the next token n fixes the query token ψ(n).

    Each class has `distinct` tokens that occur in no other class, and all classes share the `common` tokens. With u, r
    uniform in [0, 1] and independent,

        distinct token l of class n:  P[l | n] ∝ u_ln                                     summing to 1 − share
        common token l:               P[l | n] ∝ u_l (1 + variation · (2 r_ln − 1))       summing to share

    Args:
        generators: one for each seed.
        queries, classes: number of query tokens, and of classes of each query token.
        distinct, common: number of tokens that belong to one class, and of those that all classes share.
        share: part of a sequence that consists of common tokens, in [0, 1].
        variation: how much the frequency of a common token differs between classes, in [0, 1]; with 0 it says nothing
            about the class.

    Returns:
        `SequenceClasses` over queries · classes labels. Token n · distinct is the first of class n; the common tokens
        are last.

    >>> data = sequence_classes(generators=[torch.Generator().manual_seed(0)], queries=2, classes=3, distinct=4)
    >>> data.frequency.shape, data.query.tolist()
    (torch.Size([1, 6, 29]), [0, 0, 0, 1, 1, 1])
    """
    queries, classes = whole("queries", queries), whole("classes", classes)
    distinct, common = whole("distinct", distinct), whole("common", common)
    share = scalar("share", share, low=0.0, high=1.0)
    variation = scalar("variation", variation, low=0.0, high=1.0)
    labels = queries * classes
    memory.check("classes", 32 * labels * (labels * distinct + common), "give fewer classes or tokens")
    frequencies = []
    for generator in check_generators(generators):
        distinct_weight = torch.rand(labels, distinct, generator=generator, dtype=dtype)
        level = torch.rand(common, generator=generator, dtype=dtype)
        deviation = torch.rand(labels, common, generator=generator, dtype=dtype)
        common_weight = level * (1 + variation * (2 * deviation - 1))
        distinct_part = (1 - share) * distinct_weight / distinct_weight.sum(dim=-1, keepdim=True)
        common_part = share * common_weight / common_weight.sum(dim=-1, keepdim=True)
        frequencies.append(torch.cat([torch.block_diag(*distinct_part.split(1)), common_part], dim=-1))
    token = torch.arange(labels * distinct + common)
    return SequenceClasses(
        frequency=torch.stack(frequencies),
        query=torch.arange(labels) // classes,
        distinct=(token // distinct == torch.arange(labels)[:, None]) & (token < labels * distinct),
    )


def log_normal_classes(
    *,
    generators: Sequence[torch.Generator],
    classes: int = 8,
    distinct: int = 10,
    common: int = 10,
    scale: float = 1.5,
    separable: bool = False,
    dtype: torch.dtype = torch.float64,
) -> TokenClasses:
    """Return classes whose tokens have log-normal weights; common tokens have the same weight in every class.

        distinct token l of class c:  P[l | c] ∝ exp(scale · N_lc)        common token l:  P[l | c] ∝ exp(scale · N_l)

    N are independent standard normals. With `separable` distinct token l occurs in class l mod K alone, so that a
    single one gives the class away. The same generators give the same normals with and without it.

    Args:
        generators: one for each seed.
        classes, distinct, common: number of classes K, and of tokens of each kind.
        scale: standard deviation of the logarithm of a weight.
        separable: whether each distinct token belongs to one class. A class then needs one: `distinct` ≥ `classes`.

    >>> data = log_normal_classes(generators=[torch.Generator().manual_seed(0)], classes=2, distinct=3, separable=True)
    >>> (data.frequency[0, :, :3] > 0).int().tolist()
    [[1, 0, 1], [0, 1, 0]]
    """
    classes, scale, separable = whole("classes", classes), scalar("scale", scale, low=0.0), flag("separable", separable)
    distinct, common = whole("distinct", distinct, low=int(separable) * classes), whole("common", common, low=0)
    if distinct + common == 0:
        raise InputError("distinct + common", "at least 1", 0, "give the classes some tokens")
    memory.check("classes", 32 * classes * (distinct + common), "give fewer classes or tokens")
    logits = []
    for generator in check_generators(generators):
        of_class = torch.randn(classes, distinct, generator=generator, dtype=dtype)
        shared = torch.randn(common, generator=generator, dtype=dtype)
        logits.append(torch.cat([of_class, shared.expand(classes, common)], dim=-1))
    logit, token = scale * torch.stack(logits), torch.arange(distinct + common)
    if not bool(logit.isfinite().all()):
        raise InputError("scale", f"such that weights are finite in {dtype}", scale, "give a smaller scale")
    absent = (token % classes != torch.arange(classes)[:, None]) & (token < distinct)
    return TokenClasses(
        frequency=(logit.masked_fill(absent, -torch.inf) if separable else logit).softmax(-1),
        label=torch.arange(classes),
        distinct=token < distinct,
    )


def contexts(
    frequency: Float[Tensor, "seed label token"],
    *,
    samples: int,
    length: int,
    generators: Sequence[torch.Generator],
) -> Contexts:
    """Draw finite contexts: each sample has a random class, and tokens that are independent given the class.

        P[label = i] = 1/K,    P[token_j = l | label = i] = frequency[i, l],  j = 1..length

    Args:
        frequency: P[token | class] of every seed, e.g. `token_classes(...).frequency`.
        samples, length: number of contexts for each seed, and of tokens in each.
        generators: one for each seed; the samples of a seed do not depend on the other seeds.

    Returns:
        `Contexts`: the tokens in order, their frequencies (counts over length), and the labels.

    >>> certain = torch.eye(2, dtype=torch.float64)[None]
    >>> drawn = contexts(certain, samples=5, length=3, generators=[torch.Generator().manual_seed(0)])
    >>> bool((drawn.token == drawn.label[..., None]).all())
    True
    """
    samples, length = whole("samples", samples), whole("length", length)
    frequency = as_floating("frequency", frequency, expected="[seed, label, token]", remedy="pass P[token | class]")
    _check_frequency(frequency, len(check_generators(generators)))
    memory.check("samples", 32 * samples * (length + frequency.shape[-1]), "draw fewer contexts at once")
    labels, tokens = [], []
    for probability, generator in zip(frequency, generators, strict=True):
        label = torch.randint(len(probability), (samples,), generator=generator)
        labels.append(label)
        tokens.append(torch.multinomial(probability[label], length, replacement=True, generator=generator))
    token = torch.stack(tokens)
    counts = torch.zeros(*token.shape[:2], frequency.shape[-1], dtype=frequency.dtype)
    counts.scatter_add_(-1, token, torch.ones_like(token, dtype=frequency.dtype))
    return Contexts(token=token, frequency=counts / length, label=torch.stack(labels))


def stream_contexts(frequency: Tensor, *, samples: int, length: int, key: Int[Tensor, "2 _"]) -> Contexts:
    """Return the contexts of one step of training: `contexts` as a function of a key, without a generator's state.

    Args:
        frequency: P[token | class] of every seed, [seed, label, token].
        samples, length: number of contexts for each seed, and of tokens in each.
        key: `joma.noise.key` of the seeds and the step.

    >>> frequency = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    >>> drawn = stream_contexts(frequency, samples=4, length=3, key=noise.key(torch.tensor([7]), 3))
    >>> drawn.label.tolist(), drawn.token.tolist()
    ([[0, 0, 0, 1]], [[[1, 1, 0], [0, 1, 0], [0, 0, 0], [2, 2, 2]]])
    """
    samples, length = whole("samples", samples), whole("length", length)
    frequency = as_floating("frequency", frequency, expected="[seed, label, token]", remedy="pass P[token | class]")
    _check_stream_size(frequency, samples, length)
    u = noise.uniform((samples, 1 + length), key=key, site=_STREAM).to(frequency.dtype)
    if frequency.shape[:1] != key.shape[1:]:  # the values stay unread: a GPU would be awaited
        expected = f"[seed, label, token] with {key.shape[-1]} seeds, as the key"
        raise InputError("frequency", expected, f"shape {tuple(frequency.shape)}", "give one key for each seed")
    label = (u[..., 0] * frequency.shape[1]).long().clamp_max(frequency.shape[1] - 1)
    cumulative = frequency.cumsum(-1)
    bounds = (cumulative / cumulative[..., -1:])[..., :-1]
    of_sample = torch.take_along_dim(bounds, label[..., None], dim=1)
    token = (u[..., 1:, None] >= of_sample[:, :, None]).sum(-1)
    counts = (token[..., None] == torch.arange(frequency.shape[-1], device=token.device)).to(frequency.dtype).mean(-2)
    return Contexts(token=token, frequency=counts, label=label)


def _check_stream_size(frequency: Tensor, samples: int, length: int) -> None:
    if frequency.ndim != 3 or frequency.numel() == 0:
        expected, remedy = "[seed, label, token], not empty", "give at least one class and token"
        raise InputError("frequency", expected, f"shape {tuple(frequency.shape)}", remedy)
    seeds, _, tokens = frequency.shape
    needed = 16 * seeds * samples * (1 + length) * tokens
    if frequency.device.type == "cpu" and needed > _SURELY_FREE:
        memory.check("samples`, `length", needed, "draw fewer or shorter contexts at once")


def _check_frequency(frequency: Tensor, seeds: int) -> None:
    if frequency.ndim != 3 or len(frequency) != seeds:
        got = f"shape {tuple(frequency.shape)}"
        raise InputError(
            "frequency", f"[seed, label, token] with {seeds} seeds", got, "give one generator for each seed"
        )
    if frequency.numel() == 0:
        raise InputError(
            "frequency", "non-empty", f"shape {tuple(frequency.shape)}", "give at least one class and token"
        )
    error = float((frequency.sum(dim=-1) - 1).abs().max())
    if not error <= 1e-5 or bool((frequency < 0).any()):  # `not <=` is true for NaN too
        got = f"sums that differ from 1 by up to {error:.3g} and a smallest value of {float(frequency.min()):.3g}"
        raise InputError("frequency", "probabilities that sum to 1 over tokens", got, "divide by the sum first")
