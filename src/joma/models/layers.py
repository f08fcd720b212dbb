"""The modules that a decoder is made of, for many seeds at once: input stage, attention, layer.

Every parameter has the seed as its leading axis, and no number passes from one seed to another. Weights are stored as
[seed, in, out], so that every product is one batched product over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma.kernels.head_matrix import is_copy
from joma.kernels.short import WeightDropout, fits, short_attention, short_attention_joined
from joma.models.block import ACTIVATIONS
from joma.models.config import SITES, DecoderConfig
from joma.models.initialisation import ParameterDraw
from joma.noise import dropout, split

WATCHABLE: dict[str, str] = {
    "attention": "attention weights [seed, sample, head, query, key]",
    "hidden": "hidden units of the MLP, after the activation [seed, sample, position, hidden]",
    "residual": "the residual stream before the first layer and after each layer [seed, sample, position, width]",
}

ResidualStream = Float[Tensor, "seed sample position width"]
Watched = Mapping[str, list[Tensor]]  # by names of `WATCHABLE`: every layer appends its tensor to each list
NOTHING_WATCHED: Watched = {}


class Linear(nn.Module):
    """y = x W + b, with W [seed, in, out] and b [seed, out] or none."""

    def __init__(self, draw: ParameterDraw, role: str, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight, self.bias = draw(role, rows, columns), draw(role, rows, columns, bias=True) if bias else None
        self.shape = rows, columns

    def forward(
        self, x: Float[Tensor, "seed sample position in"], *, add_bias: bool = True
    ) -> Float[Tensor, "seed sample position out"]:
        weight = self.weight
        if is_copy(weight, x.shape[-1]):
            weight = weight[:, : self.shape[0], : self.shape[1]]
        return _affine(x, weight, self.bias if add_bias else None)


def _affine(
    x: ResidualStream, weight: Float[Tensor, "seed width out"], bias: Tensor | None
) -> Float[Tensor, "seed sample _ out"]:
    flat = x.flatten(1, 2)
    if bias is None:
        y = flat @ weight
    elif torch.compiler.is_compiling():  # the compiler fuses the addition into the operation that reads the product
        y = flat @ weight
        y = y + bias[:, None].to(y.dtype)
    else:
        y = torch.baddbmm(bias[:, None], flat, weight)
    return y.unflatten(1, x.shape[1:3])


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return g.contiguous()


def contiguous_gradient(x: Tensor) -> Tensor:
    """Return x, whose gradient will be contiguous: autograd copies one that is not when it becomes a parameter's.

    In a compiled module the gradient is written that way in the first place.
    """
    result = _ContiguousGradient.apply(x)
    assert isinstance(result, Tensor)
    return result


class Norm(nn.Module):
    """LayerNorm with a gain and an offset for each seed."""

    def __init__(self, draw: ParameterDraw, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(len(draw.generators), width, dtype=draw.dtype))
        self.offset = nn.Parameter(torch.zeros_like(self.gain))

    def forward(self, x: ResidualStream) -> ResidualStream:
        return torch.addcmul(self.offset[:, None, None], F.layer_norm(x, x.shape[-1:]), self.gain[:, None, None])


@dataclass(frozen=True)
class KeyedDropout:
    """Dropout at the named sites with the masks of a key of `joma.noise`; without a key there is none."""

    p: float
    sites: tuple[str, ...]

    def applies(self, key: Tensor | None, site: str) -> bool:
        """Return whether there is dropout at this site."""
        return key is not None and self.p > 0 and site in self.sites

    def __call__(self, x: Tensor, key: Tensor | None, site: str) -> Tensor:
        if key is None or not self.applies(key, site):
            return x
        return dropout(x, self.p, key=key, site=SITES.index(site))

    def of_weights(self, key: Tensor | None) -> WeightDropout | None:
        """Return the dropout on attention weights, for the kernel that applies it; None if there is none."""
        if key is None or not self.applies(key, "weights"):
            return None
        return WeightDropout(self.p, key, SITES.index("weights"))


class QueryPositions(NamedTuple):
    """The query positions: the last `last` of each packed sequence, or all of them if `last` is 0.

    Packed sequences stand one after the other along the axis of positions, and each attends to itself alone.

    Attributes:
        lengths: of the packed sequences.
        last: how many of the last positions of each are queries.
    """

    lengths: tuple[int, ...]
    last: int

    @property
    def all(self) -> QueryPositions:
        """The same sequences with every position as a query."""
        return QueryPositions(self.lengths, 0)

    def select(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the query positions of `x`, which has all positions along the axis `dim`."""
        if not self.last:
            return x
        sequences = [x] if len(self.lengths) == 1 else x.split(self.lengths, dim=dim)
        queries = [part.narrow(dim, part.shape[dim] - self.last, self.last) for part in sequences]
        return queries[0] if len(queries) == 1 else torch.cat(queries, dim=dim)

    def pack(self, table: Tensor, *, dim: int) -> Tensor:
        """Return the rows of a table of positions for all packed positions; each sequence starts at row 0."""
        rows = [table.narrow(dim, 0, length) for length in self.lengths]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=dim)


class QueryKeyOverride(NamedTuple):
    """Queries and keys [seed, sample, position, width] that replace a layer's in some of the seeds.

    Attributes:
        computed: the seeds that use the queries and keys that the layer computes.
        query, key: what the other seeds use instead.
    """

    computed: Bool[Tensor, " seed"]
    query: Tensor
    key: Tensor

    def apply(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys to use in place of those that the layer computed."""
        computed = self.computed[:, None, None, None]
        query = torch.where(computed, query, self.query.to(query.dtype))
        return query, torch.where(computed, key, self.key.to(key.dtype))


class QueryScale(NamedTuple):
    """Factors of a layer's queries, and so of its attention scores: inverse temperatures.

    Attributes:
        scale: one factor for each seed.
    """

    scale: Float[Tensor, " seed"]

    def apply(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries times their factors, and the keys."""
        return query * self.scale[:, None, None, None], key


class InputStage(nn.Module):
    """Scale embeddings, add positional encodings and apply dropout, before the first layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers, self.dropout = config.layers, KeyedDropout(config.dropout, config.sites)
        self.scale = math.sqrt(config.width) if config.scale_embedding else None

    def forward(
        self, x: ResidualStream, positions: Tensor | None, noise: Tensor | None
    ) -> tuple[ResidualStream, Sequence[Tensor | None]]:
        """Return the residual stream, and a noise key for each layer."""
        x = x if self.scale is None else x * self.scale
        x = x if positions is None else x + positions[:, None]
        keys = [None] * self.layers if noise is None else split(noise, self.layers).unbind()
        return self.dropout(x, noise, "embedding"), keys


class Attention(nn.Module):
    """Several heads of softmax attention, or of uniform attention.

    The attention weights are computed as a matrix: sequences have a few dozen positions here, so that the matrix is
    smaller than the residual stream, and one code path serves all variants and the probes. Where nothing reads the
    weights and positions are few, `joma.kernels.short` is faster on CUDA.
    """

    rotation: Float[Tensor, "2 length half"] | None  # sine and cosine of the rotary angles

    def __init__(self, config: DecoderConfig, draw: ParameterDraw) -> None:
        super().__init__()
        self.dropout = KeyedDropout(config.dropout, config.sites)
        self.heads, width, bias = config.heads, config.width, config.attention_bias
        query, key, self.value = (Linear(draw, "attention", width, width, bias=bias) for _ in range(3))
        # Query and key are drawn even if unused, so that all other parameters start as they do with trained attention.
        self.query, self.key = (None, None) if config.attention == "uniform" else (query, key)
        for linear in (query, key):
            linear.requires_grad_(config.attention == "trained")
        self.projection = Linear(draw, "projection", width, width, bias=bias) if config.projection else None
        rotation = sinusoids(config, width // self.heads, draw.dtype) if config.positions == "rotary" else None
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(
        self,
        x: ResidualStream,
        mask: Tensor,
        *,
        query_positions: QueryPositions,
        noise: Tensor | None,
        watched: Watched,
        override: QueryKeyOverride | QueryScale | None = None,
    ) -> Float[Tensor, "seed sample query width"]:
        """Return the output of attention at the query positions; `mask` is added to the scores."""
        mask = query_positions.select(mask, dim=-2)
        if override is None and self._kernel_fits(x, watched):
            mixed = self._by_kernel(x, mask, query_positions, noise)
        else:
            query, key, value = self._project(x, query_positions, add_bias=True)
            if query is not None and key is not None and override is not None:
                query, key = override.apply(query, key)
            weights = self._weights(query, key, mask, x)
            watched.get("attention", []).append(weights)
            mixed = self.dropout(weights, noise, "weights") @ self._split_heads(value)
            mixed = mixed.transpose(2, 3).flatten(3)
        return self.dropout(mixed if self.projection is None else self.projection(mixed), noise, "attention")

    def _by_kernel(
        self, x: ResidualStream, mask: Tensor, query_positions: QueryPositions, noise: Tensor | None
    ) -> Float[Tensor, "seed sample query width"]:
        """Return what attention mixes, by the kernel for few positions."""
        options = {"heads": self.heads, "dropout": self.dropout.of_weights(noise)}
        if self._joins_products(x, query_positions) and self.rotation is None:
            return short_attention_joined(self._joined_product(x, add_bias=True), mask, **options)
        # The kernel adds the biases, unless queries and keys are rotated: the rotation must include them.
        biases = self._stacked_biases() if self.rotation is None else None
        query, key, value = self._project(x, query_positions, add_bias=biases is None)
        assert query is not None
        assert key is not None
        return short_attention(query.to(value.dtype), key.to(value.dtype), value, mask, biases=biases, **options)

    def _joined_product(self, x: ResidualStream, *, add_bias: bool) -> Float[Tensor, "seed sample position _"]:
        """Return queries, keys and values side by side, from one product instead of three.

        Joining the weights costs nothing where they are cast to half precision.
        """
        assert self.query is not None
        assert self.key is not None
        linears = (self.query, self.key, self.value)
        weight = torch.cat([contiguous_gradient(linear.weight) for linear in linears], dim=-1)
        bias = [contiguous_gradient(linear.bias) for linear in linears if linear.bias is not None and add_bias]
        return _affine(x, weight, torch.cat(bias, dim=-1) if bias else None)

    def queries_and_keys(self, x: ResidualStream, query_positions: QueryPositions) -> tuple[Tensor, Tensor]:
        """Return the queries at the query positions and the keys at all positions; uniform attention has none."""
        query, key, _ = self._project(x, query_positions, add_bias=True)
        assert query is not None
        assert key is not None
        return query, key

    def _kernel_fits(self, x: ResidualStream, watched: Watched) -> bool:
        """Return whether the kernel can be used: nothing reads the attention weights, and it supports the sizes."""
        return "attention" not in watched and self.query is not None and fits(x, self.heads)

    def _stacked_biases(self) -> Float[Tensor, "3 seed width"] | None:
        linears = (linear.bias for linear in (self.query, self.key, self.value) if linear is not None)
        biases: list[Tensor] = [bias for bias in linears if bias is not None]
        return torch.stack(biases) if biases else None

    def _project(
        self, x: ResidualStream, query_positions: QueryPositions, *, add_bias: bool
    ) -> tuple[Tensor | None, Tensor | None, ResidualStream]:
        """Return queries and keys, rotated by their positions, and values; only values if attention is uniform."""
        if self.query is None or self.key is None:
            return None, None, self.value(x)
        if not self._joins_products(x, query_positions):
            at_queries = query_positions.select(x, dim=2)
            query, key, value = (
                self.query(at_queries, add_bias=add_bias),
                self.key(x, add_bias=add_bias),
                self.value(x, add_bias=add_bias),
            )
        else:
            query, key, value = self._joined_product(x, add_bias=add_bias).chunk(3, dim=-1)
        return self._rotate(query, query_positions), self._rotate(key, query_positions.all), value

    def _joins_products(self, x: ResidualStream, query_positions: QueryPositions) -> bool:
        """Return whether one product gives queries, keys and values: on CUDA, for all positions, from full weights."""
        return not query_positions.last and x.is_cuda and self.value.weight.dtype.itemsize != 2

    def _weights(
        self, query: Tensor | None, key: Tensor | None, mask: Tensor, x: ResidualStream
    ) -> Float[Tensor, "seed sample head query key"]:
        if query is None or key is None:
            return mask.softmax(-1).expand(*x.shape[:2], self.heads, mask.shape[-2], x.shape[2])
        query, key = self._split_heads(query), self._split_heads(key)
        return torch.add(mask, query @ key.mT, alpha=query.shape[-1] ** -0.5).softmax(-1)

    def _split_heads(self, x: ResidualStream) -> Float[Tensor, "seed sample head position part"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(2, 3)

    def _rotate(self, x: ResidualStream, query_positions: QueryPositions) -> ResidualStream:
        """Rotate units i and i + d/2 of every head, d its width, as a pair by the angle of the position."""
        if self.rotation is None:
            return x
        sin, cos = query_positions.select(query_positions.pack(self.rotation, dim=1), dim=1)[:, :, None]
        a, b = x.unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3)


class Layer(nn.Module):
    """Attention, then the MLP φ(x W_1 + b_1) W_2 + b_2, each with its residual connection and its norm."""

    def __init__(self, config: DecoderConfig, draw: ParameterDraw, number: int) -> None:
        super().__init__()
        self.norm_placement, self.activation = config.norm, ACTIVATIONS[config.activation]
        self.dropout = KeyedDropout(config.dropout, config.sites)
        self.residual = (config.residual,) * 2 if isinstance(config.residual, bool) else config.residual[number]
        width, hidden = config.width, config.hidden or 4 * config.width
        self.attention = Attention(config, draw)
        self.lower = Linear(draw, "mlp", width, hidden, bias=config.mlp_bias)
        self.upper = Linear(draw, "mlp", hidden, width, bias=config.mlp_bias)
        self.norms = nn.ModuleList(Norm(draw, width) for _ in range(2) if config.norm != "none")

    def forward(
        self,
        x: ResidualStream,
        mask: Tensor,
        *,
        query_positions: QueryPositions,
        noise: Tensor | None,
        residual_scale: Float[Tensor, "seed 2"] | None,
        watched: Watched = NOTHING_WATCHED,
        override: QueryKeyOverride | QueryScale | None = None,
    ) -> Float[Tensor, "seed sample query width"]:
        """Return the residual stream at the query positions after this layer.

        Args:
            x: the residual stream at all positions.
            mask: what is added to the attention scores.
            query_positions: the positions to compute.
            noise: a key of `joma.noise` for dropout, or None.
            residual_scale: factors of x in the two residual connections; None for the connections of the config.
            watched: lists to append activations to.
            override: queries and keys that replace those of this layer, or factors of them.
        """
        y = self.attention(
            self._pre_norm(0, x),
            mask,
            query_positions=query_positions,
            noise=noise,
            watched=watched,
            override=override,
        )
        x = self._add_residual(0, query_positions.select(x, dim=2), y, residual_scale)
        x = self._add_residual(1, x, self._mlp(self._pre_norm(1, x), noise=noise, watched=watched), residual_scale)
        watched.get("residual", []).append(x)
        return x

    def queries_and_keys(self, x: ResidualStream, query_positions: QueryPositions) -> tuple[Tensor, Tensor]:
        """Return the queries and keys that attention computes from the residual stream."""
        return self.attention.queries_and_keys(self._pre_norm(0, x), query_positions)

    def _mlp(self, x: ResidualStream, *, noise: Tensor | None, watched: Watched) -> ResidualStream:
        hidden = self.activation(self.lower(x))
        watched.get("hidden", []).append(hidden)
        return self.dropout(self.upper(self.dropout(hidden, noise, "hidden")), noise, "mlp")

    def _pre_norm(self, part: int, x: ResidualStream) -> ResidualStream:
        return self.norms[part](x) if self.norm_placement == "pre" else x

    def _add_residual(self, part: int, x: ResidualStream, y: ResidualStream, scale: Tensor | None) -> ResidualStream:
        """Return the output y of attention (part 0) or MLP (part 1) plus its input x, then the norm if it is `post`."""
        if scale is not None:
            y = torch.addcmul(y, x, scale[:, part, None, None, None])
        elif self.residual[part]:
            y = x + y
        return self.norms[part](y) if self.norm_placement == "post" else y


def sinusoids(config: DecoderConfig, width: int, dtype: torch.dtype) -> Float[Tensor, "2 length half"]:
    """Return sine and cosine of position / 10000^(2i/width) for every pair i of units."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(config.length or 0, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()]).to(dtype)
