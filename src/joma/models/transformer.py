"""A standard decoder, every part switchable, for many seeds at once.

    x = embedding[tokens] + positions
    x = x + attention(norm(x)),    x = x + mlp(norm(x))    in every layer; the norm before, after or absent
    logits = norm(x) W + b

Every parameter has the seed as its leading axis, and no number passes from one seed to another. Weights are stored as
[seed, in, out], so that every product is one batched product over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma.arguments import InputError, choice, whole
from joma.kernels.head import surprisal
from joma.kernels.short import fits, short_attention
from joma.kernels.table import FEW, lookup
from joma.models.block import ACTIVATIONS
from joma.noise import dropout, split, streams

CHOICES: dict[str, dict[str, str]] = {
    "norm": {"pre": "x + f(norm(x)), and norm(x) at the end", "post": "norm(x + f(x))", "none": "x + f(x)"},
    "positions": {"none": "", "sinusoidal": "added", "learned": "added", "rotary": "queries and keys are turned"},
    "mask": {"causal": "a position sees itself and earlier ones", "full": "every position sees every other"},
    "attention": {"trained": "softmax(q·k/√d)", "frozen": "W_Q, W_K stay as drawn", "uniform": "equal weights"},
}
SITES = ("embedding", "weights", "attention", "hidden", "mlp")  # of dropout; attention and mlp mean their outputs
WATCHED: dict[str, str] = {
    "attention": "attention weights [seed, sample, head, query, key]",
    "hidden": "hidden units of the MLP, after the activation [seed, sample, position, hidden]",
    "residual": "what enters the first layer and what leaves each layer [seed, sample, position, width]",
}

Maybe = Tensor | None
Lengths = Sequence[int] | None
Stream = Float[Tensor, "seed sample position width"]
Kept = Mapping[str, list[Tensor]]  # every layer appends to the names of `WATCHED` that are in it
_NONE: Kept = {}


class Rule(NamedTuple):
    """How a matrix [in, out] starts: normal of deviation `scale(in, out)`, or uniform within ±; its bias so, or 0."""

    scale: Callable[[int, int], float]
    normal: bool = False
    bias: bool = False


_LINEAR, _FLAT = Rule(lambda rows, _: rows**-0.5, bias=True), Rule(lambda *_: 0.1)
_STACKED = Rule(lambda rows, columns: math.sqrt(6 / (rows + 3 * columns)))  # W_Q, W_K, W_V drawn as one matrix
_ROLES = ("embedding", "attention", "projection", "mlp", "head")
INITS: dict[str, dict[str, Rule]] = {
    # torch.nn.Linear and torch.nn.Embedding as they come
    "linear": dict.fromkeys(_ROLES, _LINEAR) | {"embedding": Rule(lambda *_: 1.0, normal=True)},
    # torch.nn.TransformerEncoderLayer as it comes; embedding and head within ±0.1
    "encoder": dict(zip(_ROLES, (_FLAT, _STACKED, Rule(_LINEAR.scale), _LINEAR, _FLAT), strict=True)),
    "small": dict.fromkeys(_ROLES, Rule(lambda *_: 0.02, normal=True)),
}


@dataclass(frozen=True)
class DecoderConfig:
    """The parts of a decoder.

    Attributes:
        hidden: hidden units of an MLP, 4 width if not given. outputs: classes of the head, the vocabulary if not given.
        length: most positions; needed with positional encodings.
        norm, positions, mask, attention: names of `CHOICES`. activation, init: of `ACTIVATIONS`, `INITS`.
        residual: whether x is added to what attention and the MLP make of it; for each layer a pair, or one for all.
        projection: whether attention's output passes through W_O.
        alike: whether all layers start as the first, as those of `torch.nn.TransformerEncoder` do, each a copy of one.
        tied: the head is the transposed embedding, without bias. scale_embedding: embeddings are multiplied by √width.
        dropout: probability at each of `sites`, names of `SITES`.
    """

    vocabulary: int
    width: int
    layers: int = 1
    heads: int = 1
    hidden: int | None = None
    outputs: int | None = None
    length: int | None = None
    norm: str = "pre"
    positions: str = "none"
    mask: str = "causal"
    attention: str = "trained"
    activation: str = "relu"
    init: str = "linear"
    alike: bool = False
    residual: bool | tuple[tuple[bool, bool], ...] = True
    projection: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    head_bias: bool = True
    tied: bool = False
    scale_embedding: bool = False
    dropout: float = 0.0
    sites: tuple[str, ...] = SITES

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "hidden", "outputs", "length"):
            if (value := getattr(self, name)) is not None:
                whole(name, value)
        for name, table in {**CHOICES, "activation": ACTIVATIONS, "init": INITS}.items():
            choice(name, getattr(self, name), table)
        for site in self.sites:
            choice("sites", site, dict.fromkeys(SITES))
        if self.width % self.heads:
            raise InputError("heads", f"a divisor of the width {self.width}", self.heads, "change one of them")
        if self.positions == "rotary" and (part := self.width // self.heads) % 2:
            raise InputError("width", "even in each head with rotary positions", part, "change width or heads")
        if self.positions != "none" and self.length is None:
            raise InputError("length", f"given with {self.positions} positions", None, "give the most positions")
        if self.tied and self.outputs not in (None, self.vocabulary):
            raise InputError("outputs", f"the vocabulary, {self.vocabulary}, if tied", self.outputs, "untie the head")
        if not isinstance(self.residual, bool) and [len(pair) for pair in self.residual] != [2] * self.layers:
            expected = f"a bool, or a pair (attention, mlp) for each of {self.layers} layers"
            raise InputError("residual", expected, self.residual, "give one pair a layer")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError("dropout", "in [0, 1)", self.dropout, "give the probability of dropping a number")


@dataclass(frozen=True)
class _Draw:
    """Draws parameters: every seed's numbers from its own generator, on the CPU, in float32 whatever the dtype."""

    rules: Mapping[str, Rule]
    generators: Sequence[torch.Generator]
    dtype: torch.dtype

    def __call__(self, role: str, *shape: int, bias: bool = False) -> nn.Parameter:
        """Return a matrix [seed, in, out], or the bias [seed, out] that belongs to one."""
        rule, values = self.rules[role], torch.zeros(len(self.generators), *shape[bias:])
        scale = rule.scale(*shape)
        for own, generator in zip(values, self.generators, strict=True):
            if rule.normal and not bias:
                own.normal_(0.0, scale, generator=generator)
            elif rule.bias or not bias:
                own.uniform_(-scale, scale, generator=generator)
        return nn.Parameter(values.to(self.dtype))


class Linear(nn.Module):
    """y = x W + b, with W [seed, in, out] and b [seed, out] or none."""

    products = ("weight",)  # what products alone read: a training loop may hand in a copy of half precision

    def __init__(self, draw: _Draw, role: str, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight, self.bias = draw(role, rows, columns), draw(role, rows, columns, bias=True) if bias else None

    def forward(
        self, x: Float[Tensor, "seed sample position in"], *, biased: bool = True
    ) -> Float[Tensor, "seed sample position out"]:
        return _affine(x, self.weight, self.bias if biased else None)


def _affine(x: Stream, weight: Float[Tensor, "seed width out"], bias: Maybe) -> Float[Tensor, "seed sample _ out"]:
    flat = x.flatten(1, 2)
    if bias is None:
        y = flat @ weight
    elif torch.compiler.is_compiling():  # the compiler adds the bias where the product is read next
        y = flat @ weight
        y = y + bias[:, None].to(y.dtype)
    else:
        y = torch.baddbmm(bias[:, None], flat, weight)
    return y.unflatten(1, x.shape[1:3])


class Norm(nn.Module):
    """LayerNorm with each seed's own gain and offset."""

    def __init__(self, draw: _Draw, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(len(draw.generators), width, dtype=draw.dtype))
        self.offset = nn.Parameter(torch.zeros_like(self.gain))

    def forward(self, x: Stream) -> Stream:
        return torch.addcmul(self.offset[:, None, None], F.layer_norm(x, x.shape[-1:]), self.gain[:, None, None])


@dataclass(frozen=True)
class _Dropout:
    """Dropout at the named sites, keyed by `joma.noise`; none without a key."""

    p: float
    sites: tuple[str, ...]

    def acts(self, key: Maybe, site: str) -> bool:
        return key is not None and self.p > 0 and site in self.sites

    def __call__(self, x: Tensor, key: Maybe, site: str) -> Tensor:
        return dropout(x, self.p, key=key, site=SITES.index(site)) if key is not None and self.acts(key, site) else x


class Asks(NamedTuple):
    """Who asks: of sequences that stand in a row, each seeing itself alone, the last few positions, or all for 0."""

    lengths: tuple[int, ...]
    last: int

    @property
    def all(self) -> Asks:
        return Asks(self.lengths, 0)

    def of(self, x: Tensor, *, dim: int) -> Tensor:
        """Return those who ask of all positions along an axis."""
        if not self.last:
            return x
        parts = [x] if len(self.lengths) == 1 else x.split(self.lengths, dim=dim)
        tails = [part.narrow(dim, part.shape[dim] - self.last, self.last) for part in parts]
        return tails[0] if len(tails) == 1 else torch.cat(tails, dim=dim)

    def each(self, table: Tensor, *, dim: int) -> Tensor:
        """Return the rows of a table of positions, counted from the start of each sequence."""
        rows = [table.narrow(dim, 0, length) for length in self.lengths]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=dim)


class Given(NamedTuple):
    """Queries and keys from elsewhere, [seed, sample, position, width], for the seeds that do not go by their own."""

    own: Bool[Tensor, " seed"]
    query: Tensor
    key: Tensor

    def instead(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        own = self.own[:, None, None, None]
        return torch.where(own, query, self.query.to(query.dtype)), torch.where(own, key, self.key.to(key.dtype))


class Entrance(nn.Module):
    """What is done to looked-up embeddings before the first layer: scale, positions, dropout."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers, self.drop = config.layers, _Dropout(config.dropout, config.sites)
        self.scale = math.sqrt(config.width) if config.scale_embedding else None

    def forward(self, x: Stream, positions: Maybe, noise: Maybe) -> tuple[Stream, Sequence[Maybe]]:
        """Return the residual stream, and for each layer a key of its own."""
        x = x if self.scale is None else x * self.scale
        x = x if positions is None else x + positions[:, None]
        keys = [None] * self.layers if noise is None else split(noise, self.layers).unbind()
        return self.drop(x, noise, "embedding"), keys


class Attention(nn.Module):
    """Several heads of softmax attention, or of equal weights.

    The weights are computed as a matrix: sequences have a few dozen positions here, so that it is smaller than the
    residual stream, and one way serves keyed dropout, multiplicities and probes. Where none of these is asked for, and
    positions are few, `short` is quicker on CUDA.
    """

    turns: Float[Tensor, "2 length half"] | None

    def __init__(self, config: DecoderConfig, draw: _Draw) -> None:
        super().__init__()
        self.drop = _Dropout(config.dropout, config.sites)
        self.heads, width, bias = config.heads, config.width, config.attention_bias
        query, key, self.value = (Linear(draw, "attention", width, width, bias=bias) for _ in range(3))
        # Query and key are drawn in any case, so that all else starts as it does with trained attention.
        self.query, self.key = (None, None) if config.attention == "uniform" else (query, key)
        for linear in (query, key):
            linear.requires_grad_(config.attention == "trained")
        self.projection = Linear(draw, "projection", width, width, bias=bias) if config.projection else None
        turns = _waves(config, width // self.heads, draw.dtype) if config.positions == "rotary" else None
        self.register_buffer("turns", turns, persistent=False)

    def forward(
        self, x: Stream, reach: Tensor, *, asks: Asks, noise: Maybe, kept: Kept, given: Given | None = None
    ) -> Tensor:
        """Return [seed, sample, query, width]; `reach` is added to the scores."""
        reach, short = asks.of(reach, dim=-2), given is None and self._short(x, reach, noise, kept)
        biases = self._biases() if short and self.turns is None else None  # turned they are not added any more
        query, key, value = self._projected(x, asks, biased=biases is None)
        if query is not None and key is not None and given is not None:
            query, key = given.instead(query, key)
        if short and query is not None and key is not None:
            query, key = query.to(value.dtype), key.to(value.dtype)
            mixed = short_attention(query, key, value, reach, heads=self.heads, biases=biases)
        else:
            weights = self._weights(query, key, reach, x)
            kept.get("attention", []).append(weights)
            mixed = self.drop(weights, noise, "weights") @ self._heads(value)
            mixed = mixed.transpose(2, 3).flatten(3)
        return self.drop(mixed if self.projection is None else self.projection(mixed), noise, "attention")

    def asked(self, x: Stream, asks: Asks) -> tuple[Tensor, Tensor]:
        """Return the queries and keys; there are none where attention is uniform."""
        query, key, _ = self._projected(x, asks, biased=True)
        assert query is not None
        assert key is not None
        return query, key

    def _short(self, x: Stream, reach: Tensor, noise: Maybe, kept: Kept) -> bool:
        """Whether no weights are asked for, nothing is done to them, and there is a kernel for so few positions."""
        plain = "attention" not in kept and reach.ndim == 2 and not self.drop.acts(noise, "weights")
        return plain and self.query is not None and fits(x, self.heads)

    def _biases(self) -> Float[Tensor, "3 seed width"] | None:
        found = (part.bias for part in (self.query, self.key, self.value) if part is not None)
        parts: list[Tensor] = [bias for bias in found if bias is not None]
        return torch.stack(parts) if parts else None

    def _projected(self, x: Stream, asks: Asks, *, biased: bool) -> tuple[Maybe, Maybe, Stream]:
        """Return queries and keys, turned by their positions, and values; only these where attention is uniform."""
        if self.query is None or self.key is None:
            return None, None, self.value(x)
        asking = asks.of(x, dim=2)
        if asking is not x or not x.is_cuda or self.value.weight.dtype.itemsize == 2:
            query, key, value = (
                self.query(asking, biased=biased),
                self.key(x, biased=biased),
                self.value(x, biased=biased),
            )
        else:
            # One product instead of three; joining the weights costs nothing where they are cast to half precision.
            parts = (self.query, self.key, self.value)
            weight = torch.cat([part.weight for part in parts], dim=-1)
            bias: list[Tensor] = [part.bias for part in parts if part.bias is not None and biased]
            query, key, value = _affine(x, weight, torch.cat(bias, dim=-1) if bias else None).chunk(3, dim=-1)
        return self._turned(query, asks), self._turned(key, asks.all), value

    def _weights(
        self, query: Maybe, key: Maybe, reach: Tensor, x: Stream
    ) -> Float[Tensor, "seed sample head asks key"]:
        if query is None or key is None:
            return reach.softmax(-1).expand(*x.shape[:2], self.heads, reach.shape[-2], x.shape[2])
        query, key = self._heads(query), self._heads(key)
        return torch.add(reach, query @ key.mT, alpha=query.shape[-1] ** -0.5).softmax(-1)

    def _heads(self, x: Stream) -> Float[Tensor, "seed sample head position part"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(2, 3)

    def _turned(self, x: Stream, asks: Asks) -> Stream:
        """Turn units i and i + part/2 of every head as a pair, as far as the position says."""
        if self.turns is None:
            return x
        sin, cos = asks.of(asks.each(self.turns, dim=1), dim=1)[:, :, None]
        a, b = x.unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3)


class Layer(nn.Module):
    """Attention, then the MLP φ(x W_1 + b_1) W_2 + b_2, each with its residual connection and its norm."""

    def __init__(self, config: DecoderConfig, draw: _Draw, number: int) -> None:
        super().__init__()
        self.order, self.activation = config.norm, ACTIVATIONS[config.activation]
        self.drop = _Dropout(config.dropout, config.sites)
        self.residual = (config.residual,) * 2 if isinstance(config.residual, bool) else config.residual[number]
        width, hidden = config.width, config.hidden or 4 * config.width
        self.attention = Attention(config, draw)
        self.lower = Linear(draw, "mlp", width, hidden, bias=config.mlp_bias)
        self.upper = Linear(draw, "mlp", hidden, width, bias=config.mlp_bias)
        self.norms = nn.ModuleList(Norm(draw, width) for _ in range(2) if config.norm != "none")

    def forward(
        self,
        x: Stream,
        reach: Tensor,
        *,
        asks: Asks,
        noise: Maybe,
        skips: Maybe,
        kept: Kept = _NONE,
        given: Given | None = None,
    ) -> Float[Tensor, "seed sample place width"]:
        y = self.attention(self._before(0, x), reach, asks=asks, noise=noise, kept=kept, given=given)
        x = self._around(0, asks.of(x, dim=2), y, skips)
        x = self._around(1, x, self._mlp(self._before(1, x), noise=noise, kept=kept), skips)
        kept.get("residual", []).append(x)
        return x

    def asked(self, x: Stream, asks: Asks) -> tuple[Tensor, Tensor]:
        """Return the queries and keys that attention makes of the residual stream."""
        return self.attention.asked(self._before(0, x), asks)

    def _mlp(self, x: Stream, *, noise: Maybe, kept: Kept) -> Stream:
        hidden = self.activation(self.lower(x))
        kept.get("hidden", []).append(hidden)
        return self.drop(self.upper(self.drop(hidden, noise, "hidden")), noise, "mlp")

    def _before(self, part: int, x: Stream) -> Stream:
        return self.norms[part](x) if self.order == "pre" else x

    def _around(self, part: int, x: Stream, y: Stream, skips: Maybe) -> Stream:
        if skips is not None:
            y = torch.addcmul(y, x, skips[:, part, None, None, None])
        elif self.residual[part]:
            y = x + y
        return self.norms[part](y) if self.order == "post" else y


class Decoder(nn.Module):
    """A decoder of the given parts.

    Args:
        config: the parts.
        generators: one for each seed, whose numbers do not depend on the other seeds.
        residual: [seed, layer, 2], whether each seed has the residual connections around attention and around the MLP;
            where it is not given, the config's are those of all seeds.
        positions: each seed's own encoding, of those that are added; where it is not given, the config's.
        dtype: of the parameters.

    >>> config = DecoderConfig(vocabulary=10, width=8, layers=2, heads=2, positions="rotary", length=5)
    >>> model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(3)])
    >>> model(torch.arange(5).expand(4, 5)).shape
    torch.Size([3, 4, 5, 10])
    """

    positions: Float[Tensor, "seed length width"] | None  # what is added: the same at all times, or learned
    learns: Float[Tensor, "seed 1 1"] | None  # 1 for those seeds that learn theirs, where others have `waves`
    waves: Float[Tensor, "seed length width"] | None
    skips: Float[Tensor, "seed layer 2"] | None
    compiled = (Entrance, Layer)  # what a training loop may compile; one graph serves all layers

    def __init__(
        self,
        config: DecoderConfig,
        *,
        generators: Sequence[torch.Generator],
        residual: Maybe = None,
        positions: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        streams(generators)
        if residual is not None and residual.shape != (len(generators), config.layers, 2):
            expected = f"of shape {(len(generators), config.layers, 2)}: seed, layer, attention and MLP"
            raise InputError("residual", expected, tuple(residual.shape), "give a pair for each layer of each seed")
        self.register_buffer("skips", None if residual is None else residual.to(dtype), persistent=False)
        self.config, width, draw = config, config.width, _Draw(INITS[config.init], generators, dtype)
        self.embedding = draw("embedding", config.vocabulary, width)
        self.entrance = Entrance(config)
        self.layers = nn.ModuleList(Layer(config, draw, number) for number in range(config.layers))
        if config.alike:  # the others were drawn in any case, so that the head starts as it does without
            for layer in self.layers[1:]:
                layer.load_state_dict(self.layers[0].state_dict())
        self.norm = Norm(draw, width) if config.norm == "pre" else None
        outputs = config.outputs or config.vocabulary
        self.head = None if config.tied else Linear(draw, "head", width, outputs, bias=config.head_bias)
        self._place(draw, positions)

    def _place(self, draw: _Draw, names: Sequence[str] | None) -> None:
        """Make the positional encodings; learned ones are drawn last, so that all else starts as it does without."""
        for name in ("positions", "learns", "waves"):
            self.register_buffer(name, None, persistent=False)
        width, own = self.config.width, [self.config.positions]
        if names is not None:
            self._check_positions(names, len(draw.generators))
            own = list(names)
        if "sinusoidal" in own:  # sine and cosine by turns, the same for every seed that has them
            waves = _waves(self.config, width, draw.dtype).permute(1, 2, 0).flatten(1)[:, :width]
            self.positions = torch.stack([waves * (name == "sinusoidal") for name in own])
        if "learned" in own:
            drawn = draw("embedding", self.config.length or 0, width)
            if len({*own}) > 1:
                self.waves = torch.zeros_like(drawn) if self.positions is None else self.positions
                self.learns = torch.tensor([name == "learned" for name in own]).to(draw.dtype)[:, None, None]
                drawn = nn.Parameter(drawn.detach() * self.learns)
            self.positions = drawn

    def _check_positions(self, names: Sequence[str], seeds: int) -> None:
        added = {name: what for name, what in CHOICES["positions"].items() if name != "rotary"}
        for name in names:
            choice("positions", name, added)
        if len(names) != seeds:
            raise InputError("positions", f"one for each of {seeds} seeds", len(names), "give one a seed")
        if self.config.positions == "rotary" or (self.config.length is None and {*names} != {"none"}):
            got = f"{self.config.positions} positions, length {self.config.length}"
            raise InputError("config", "without rotary positions, and with a length", got, "change it")

    @property
    def added(self) -> Float[Tensor, "seed length width"] | None:
        """What is added to the embeddings for their positions; None for nothing."""
        if self.positions is None or self.learns is None or self.waves is None:
            return self.positions
        return self.waves + self.learns * self.positions

    def forward(
        self, tokens: Tensor, *, last: int = 0, lengths: Lengths = None, noise: Maybe = None, multiplicity: Maybe = None
    ) -> Float[Tensor, "seed sample place output"]:
        """Return the logits.

        Args:
            tokens: [sample, position], or [seed, sample, position] where each seed has its own.
            last: how many of the last positions' logits, 0 for all; the last layer computes no others.
            lengths: of several sequences that stand one after the other. Each sees itself alone and has positions and
                last positions of its own: without dropout the same as one call for each, in fewer and larger products.
            noise: `joma.noise.key` of the seeds and the step, for dropout; without it there is no dropout.
            multiplicity: shaped like tokens, with or without the seed axis. A position of multiplicity m stands for m
                equal ones, 0 for none: ln m is added to its scores. Without positional encoding and dropout this is
                exact for padding that repeats at the start, and under a full mask for any tokens that repeat.
        """
        return self.read(self.states(tokens, last=last, lengths=lengths, noise=noise, multiplicity=multiplicity))

    def states(
        self,
        tokens: Tensor,
        *,
        last: int = 0,
        lengths: Lengths = None,
        noise: Maybe = None,
        multiplicity: Maybe = None,
        kept: Kept = _NONE,
    ) -> Float[Tensor, "seed sample place width"]:
        """Return the residual stream after the last layer, which `read` turns into logits."""
        asks = Asks((tokens.shape[-1],) if lengths is None else tuple(lengths), whole("last", last, low=0))
        self._check(tokens, multiplicity, asks)
        added = self.added
        positions = None if added is None else asks.each(added, dim=1)
        x, keys = self.entrance(self._embed(tokens, self.embedding), positions, noise)
        kept.get("residual", []).append(x)
        reach = self._reach(x, multiplicity, asks)
        given = self._given(tokens, positions, noise, reach, asks)
        for number, (layer, key, own) in enumerate(zip(self.layers, keys, self._asking(asks), strict=True)):
            x = layer(x, reach, asks=own, noise=key, skips=self._skips(number), kept=kept, given=given[number])
        return x

    def _given(
        self, tokens: Tensor, positions: Maybe, noise: Maybe, reach: Tensor, asks: Asks
    ) -> Sequence[Given | None]:
        """Return for each layer the queries and keys that do not come from it; here none."""
        del tokens, positions, noise, reach, asks
        return [None] * len(self.layers)

    def _asking(self, asks: Asks) -> list[Asks]:
        """Return who asks in each layer: all, for the next one needs them, but in the last."""
        return [asks.all] * (len(self.layers) - 1) + [asks]

    def _skips(self, number: int) -> Float[Tensor, "seed 2"] | None:
        return None if self.skips is None else self.skips[:, number]

    def read(self, states: Stream) -> Float[Tensor, "seed sample position output"]:
        """Return the logits of the final residual stream: the final norm, if there is one, and the head."""
        states = states if self.norm is None else self.norm(states)
        if self.head is not None:
            return self.head(states)
        return (states.flatten(1, 2) @ self.embedding.mT).unflatten(1, states.shape[1:3])

    def surprisal(
        self,
        tokens: Tensor,
        target: Tensor,
        *,
        last: int = 0,
        lengths: Lengths = None,
        noise: Maybe = None,
        multiplicity: Maybe = None,
        kept: Kept = _NONE,
    ) -> Float[Tensor, "seed sample place"]:
        """Return −ln p(target) in nats, the logits never kept; other arguments as those of a call.

        Args:
            tokens: as for a call.
            target: what each place should say, [sample, place], or [seed, sample, place] where each seed has its own.
            last, lengths, noise, multiplicity: as for a call.
            kept: lists, by names of `WATCHED`, to which every layer appends what it made on the way.
        """
        states = self.states(tokens, last=last, lengths=lengths, noise=noise, multiplicity=multiplicity, kept=kept)
        states = states if self.norm is None else self.norm(states)
        weight = self.embedding.mT if self.head is None else self.head.weight
        bias = None if self.head is None else self.head.bias
        bias = weight.new_zeros(len(weight), weight.shape[-1]) if bias is None else bias
        return surprisal(states, weight, bias, target)

    def activations(
        self, tokens: Tensor, names: Sequence[str] = tuple(WATCHED), *, multiplicity: Maybe = None
    ) -> dict[str, list[Tensor]]:
        """Return for each of the names, described in `WATCHED`, a tensor a layer; there is no dropout."""
        kept: dict[str, list[Tensor]] = {name: [] for name in names if choice("names", name, WATCHED)}
        self.states(tokens, multiplicity=multiplicity, kept=kept)
        return kept

    @staticmethod
    def _embed(tokens: Tensor, embedding: Float[Tensor, "seed vocabulary width"]) -> Stream:
        # One table of all seeds' rows: the backward pass of `embedding[seed, tokens]` adds in no fixed order. A token
        # outside the vocabulary is sent past the end of the table, not into the next seed's rows.
        seeds, vocabulary, _ = embedding.shape
        first = torch.arange(0, seeds * vocabulary, vocabulary, device=tokens.device)[:, None, None]
        rows = (first + tokens).masked_fill((tokens < 0) | (tokens >= vocabulary), seeds * vocabulary)
        table = embedding.flatten(0, 1)
        return lookup(rows, table) if table.is_cuda and vocabulary <= FEW else F.embedding(rows, table)

    def _reach(self, x: Stream, multiplicity: Maybe, asks: Asks) -> Float[Tensor, "... query key"]:
        """Return what is added to the scores: 0 or ln m, and for what is not to be seen the least finite number."""
        # Not −∞: where there is nothing at all to see it would give NaN, which reaches the others as 0 · NaN.
        least = torch.finfo(x.dtype).min
        seen = [torch.ones(length, length, dtype=torch.bool, device=x.device) for length in asks.lengths]
        seen = torch.block_diag(*(own.tril() if self.config.mask == "causal" else own for own in seen))
        reach = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, least)
        if multiplicity is None:
            return reach
        return (multiplicity.to(x.dtype).log()[..., None, None, :] + reach).clamp_min(least)

    def _check(self, tokens: Tensor, multiplicity: Maybe, asks: Asks) -> None:
        seeds, vocabulary, _ = self.embedding.shape
        if tokens.ndim < 2 or tokens.shape[:-2] not in ((), (seeds,)) or tokens.is_floating_point():
            expected = f"whole numbers [sample, position] or [seed, sample, position] of {seeds} seeds"
            raise InputError("tokens", expected, f"{tokens.dtype} {tuple(tokens.shape)}", "give token numbers")
        if sum(asks.lengths) != tokens.shape[-1] or not asks.lengths:
            raise InputError("lengths", f"adding up to {tokens.shape[-1]}", asks.lengths, "give those of all sequences")
        most, got = self.config.length, ", ".join(map(str, asks.lengths))
        if min(asks.lengths) < 1 or (most is not None and max(asks.lengths) > most):
            expected = "of at least 1 position" if most is None else f"of 1 to {most} positions"
            raise InputError("tokens", expected, got, "cut them or raise `length`")
        if asks.last > min(asks.lengths):
            raise InputError("last", f"at most the positions, {got}", asks.last, "ask for fewer")
        if multiplicity is not None and multiplicity.shape not in (tokens.shape, tokens.shape[-2:]):
            got = f"{tuple(multiplicity.shape)} for tokens {tuple(tokens.shape)}"
            raise InputError("multiplicity", "shaped like the tokens", got, "give one number for each position")
        # Only the CPU looks at values: elsewhere a look would stall the device, and the end of the table is the guard.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= vocabulary:
                raise InputError("tokens", f"in [0, {vocabulary - 1}]", f"{low} to {high}", "widen the vocabulary")


def _waves(config: DecoderConfig, width: int, dtype: torch.dtype) -> Float[Tensor, "2 length half"]:
    """Return sine and cosine of position / 10000^(2i/width) for every pair i of units."""
    rates = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(config.length or 0, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()]).to(dtype)
