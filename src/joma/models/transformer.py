"""A standard decoder, every part switchable, for many seeds at once.

    x = embedding[tokens] + positions
    x = x + attention(norm(x)),    x = x + mlp(norm(x))    in every layer; the norm before, after or absent
    logits = norm(x) W + b

`config.py` lists the parts, `initialisation.py` draws the parameters, `layers.py` has the modules, and here they become
a decoder. Every parameter has the seed as its leading axis, and no number passes from one seed to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from joma import memory
from joma.arguments import InputError, choice, instance, sequence, whole
from joma.kernels.head import surprisal, takes_copies
from joma.kernels.head_matrix import half_copy
from joma.kernels.products import ProductWeight
from joma.kernels.table import fits, lookup
from joma.models.config import CHOICES, SITES, DecoderConfig
from joma.models.initialisation import COPIES, INITS, ParameterDraw
from joma.models.layers import (
    NOTHING_WATCHED,
    WATCHABLE,
    InputStage,
    Layer,
    Linear,
    Norm,
    QueryKeyOverride,
    QueryPositions,
    QueryScale,
    ResidualStream,
    Watched,
    sinusoids,
)
from joma.noise import check_generators
from joma.tensors import as_tensor

__all__ = ["CHOICES", "INITS", "SITES", "Decoder", "DecoderConfig", "Layer", "Linear"]


class Decoder(nn.Module):
    """A Transformer decoder for many seeds at once, built from the parts that `config` names.

    Args:
        config: the parts.
        generators: one for each seed, whose numbers do not depend on the other seeds.
        residual: [seed, layer, 2], whether each seed has the residual connections around attention and around the MLP;
            None for those of the config in all seeds.
        positions: the positional encoding of each seed, among those that are added to embeddings; None for that of the
            config in all seeds.
        dtype: of the parameters.

    >>> config = DecoderConfig(vocabulary=10, width=8, layers=2, heads=2, positions="rotary", length=5)
    >>> model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(3)])
    >>> model(torch.arange(5).expand(4, 5)).shape
    torch.Size([3, 4, 5, 10])
    """

    positions: Float[Tensor, "seed length width"] | None  # learned (a parameter) or sinusoidal (a buffer)
    # Where some seeds learn their encoding and others do not: 1 for those that learn, and the encodings of the others.
    learns_positions: Float[Tensor, "seed 1 1"] | None
    fixed_positions: Float[Tensor, "seed length width"] | None
    residual_scale: Float[Tensor, "seed layer 2"] | None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        generators: Sequence[torch.Generator],
        residual: Tensor | None = None,
        positions: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_generators(generators)
        instance("config", config, DecoderConfig, "pass `DecoderConfig(vocabulary=..., width=...)`")
        needed = COPIES * len(generators) * config.parameter_count * dtype.itemsize
        memory.check("config", needed, "choose a smaller width, fewer layers or fewer seeds")
        if residual is not None:
            residual = as_tensor("residual", residual, expected="[seed, layer, 2]", remedy="give booleans")
        if residual is not None and residual.shape != (len(generators), config.layers, 2):
            expected = f"of shape {(len(generators), config.layers, 2)}: seed, layer, attention and MLP"
            raise InputError("residual", expected, tuple(residual.shape), "give a pair for each layer of each seed")
        self.register_buffer("residual_scale", None if residual is None else residual.to(dtype), persistent=False)
        self.config, width, draw = config, config.width, ParameterDraw(INITS[config.init], generators, dtype)
        self.embedding = draw("embedding", config.vocabulary, width)
        self.input_stage = InputStage(config)
        self.layers = nn.ModuleList(Layer(config, draw, number) for number in range(config.layers))
        if config.alike:  # all layers are drawn in any case, so that the head starts as without `alike`
            for layer in self.layers[1:]:
                layer.load_state_dict(self.layers[0].state_dict())
        self.norm = Norm(draw, width) if config.norm == "pre" else None
        outputs = config.outputs or config.vocabulary
        self.head = None if config.tied else Linear(draw, "head", width, outputs, bias=config.head_bias)
        self._init_positions(draw, positions)

    def _init_positions(self, draw: ParameterDraw, names: Sequence[str] | None) -> None:
        """Create the positional encodings; learned ones are drawn last, so that the other parameters do not change."""
        for buffer in ("positions", "learns_positions", "fixed_positions"):
            self.register_buffer(buffer, None, persistent=False)
        width, encodings = self.config.width, [self.config.positions]
        if names is not None:
            encodings = sequence("positions", names, "the name of each seed's encoding")
            self._check_positions(encodings, len(draw.generators))
        if "sinusoidal" in encodings:  # sine and cosine alternate, the same numbers for every seed
            sinusoidal = sinusoids(self.config, width, draw.dtype).permute(1, 2, 0).flatten(1)[:, :width]
            self.positions = torch.stack([sinusoidal * (name == "sinusoidal") for name in encodings])
        if "learned" in encodings:
            learned = draw("embedding", self.config.length or 0, width)
            if len({*encodings}) > 1:
                self.fixed_positions = torch.zeros_like(learned) if self.positions is None else self.positions
                learns = torch.tensor([name == "learned" for name in encodings])
                self.learns_positions = learns.to(draw.dtype)[:, None, None]
                learned = nn.Parameter(learned.detach() * self.learns_positions)
            self.positions = learned

    def _check_positions(self, names: Sequence[str], seeds: int) -> None:
        added = {name: text for name, text in CHOICES["positions"].items() if name != "rotary"}
        for name in names:
            choice("positions", name, added)
        if len(names) != seeds:
            raise InputError("positions", f"one for each of {seeds} seeds", len(names), "give one name for each seed")
        if self.config.positions == "rotary" or (self.config.length is None and {*names} != {"none"}):
            got = f"{self.config.positions} positions, length {self.config.length}"
            expected = "a length and no rotary positions where each seed has its own encoding"
            raise InputError("config", expected, got, "change the config, or omit `positions`", must="have")

    @property
    def position_encoding(self) -> Float[Tensor, "seed length width"] | None:
        """The positional encodings that are added to the embeddings, or None if there are none."""
        if self.positions is None or self.learns_positions is None or self.fixed_positions is None:
            return self.positions
        return self.fixed_positions + self.learns_positions * self.positions

    def compiled_modules(self) -> list[nn.Module]:
        """Return the modules that a training loop may compile; one graph serves all layers."""
        return [module for module in self.modules() if isinstance(module, (InputStage, Layer))]

    def product_weights(self) -> dict[str, ProductWeight]:
        """Return the weights that only matrix products read, by name: those in compiled modules, and a large head's."""
        modules = dict(self.named_modules())
        prefixes = tuple(f"{name}." for name, module in modules.items() if isinstance(module, (InputStage, Layer)))
        linear = {name: module for name, module in modules.items() if isinstance(module, Linear)}
        weights = {
            f"{name}.weight": ProductWeight(module, "weight")
            for name, module in linear.items()
            if name.startswith(prefixes)
        }
        if self.head is not None and takes_copies(self.head.weight.shape[-1]):
            weights["head.weight"] = ProductWeight(self.head, "weight", half_copy)
        return weights

    def forward(
        self,
        tokens: Tensor,
        *,
        last: int = 0,
        lengths: Sequence[int] | None = None,
        noise: Tensor | None = None,
        multiplicity: Tensor | None = None,
    ) -> Float[Tensor, "seed sample query output"]:
        """Return the logits at the query positions.

        Args:
            tokens: [sample, position], or [seed, sample, position] where each seed has its own.
            last: how many of the last positions to return, 0 for all; the last layer computes no others.
            lengths: of packed sequences that stand one after the other. Each attends to itself alone and counts its own
                positions: without dropout this equals one call for each sequence, in fewer and larger products.
            noise: `joma.noise.key` of the seeds and the step, for dropout; without it there is no dropout.
            multiplicity: shaped like tokens, with or without the seed axis. A position of multiplicity m stands for m
                equal ones, 0 for none: ln m is added to its scores. Without positional encoding and dropout this is
                exact for padding that repeats at the start, and under a full mask for any tokens that repeat.
        """
        return self.logits(
            self.final_states(tokens, last=last, lengths=lengths, noise=noise, multiplicity=multiplicity)
        )

    def final_states(
        self,
        tokens: Tensor,
        *,
        last: int = 0,
        lengths: Sequence[int] | None = None,
        noise: Tensor | None = None,
        multiplicity: Tensor | None = None,
        watched: Watched = NOTHING_WATCHED,
    ) -> Float[Tensor, "seed sample query width"]:
        """Return the residual stream after the last layer, which `logits` turns into logits.

        Args:
            tokens, last, lengths, noise, multiplicity: as for a call of the model.
            watched: lists by names of `WATCHABLE`, to which every layer appends its activations.
        """
        packed = (tokens.shape[-1],) if lengths is None else tuple(lengths)
        query_positions = QueryPositions(packed, whole("last", last, low=0))
        self._check(tokens, multiplicity, query_positions)
        encoding = self.position_encoding
        positions = None if encoding is None else query_positions.pack(encoding, dim=1)
        x, keys = self.input_stage(self._embed(tokens, self.embedding), positions, noise)
        watched.get("residual", []).append(x)
        mask = self._mask(x, multiplicity, query_positions)
        overrides = self._overrides(tokens, positions, noise, mask, query_positions)
        by_layer = zip(self.layers, keys, self._layer_queries(query_positions), overrides, strict=True)
        for number, (layer, key, queries, override) in enumerate(by_layer):
            # Lists of its own for each layer: a compiled layer is compiled again for lists of another length.
            layer_watched = {name: [] for name in watched}
            # A layer with one query a sequence would be compiled by itself: six seconds, for a few rows to compute.
            call: Callable[..., Any] = layer._call_impl if queries.last == 1 else layer
            x = call(
                x,
                mask,
                query_positions=queries,
                noise=key,
                residual_scale=self._layer_residual_scale(number),
                watched=layer_watched,
                override=override,
            )
            for name, tensors in layer_watched.items():
                watched[name].extend(tensors)
        return x

    def _overrides(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        noise: Tensor | None,
        mask: Tensor,
        query_positions: QueryPositions,
    ) -> Sequence[QueryKeyOverride | QueryScale | None]:
        """Return, for each layer, what changes the queries and keys it computes: nothing here, but subclasses may."""
        del tokens, positions, noise, mask, query_positions
        return [None] * len(self.layers)

    def _layer_queries(self, query_positions: QueryPositions) -> list[QueryPositions]:
        """Return the query positions of each layer: all, since the next layer reads them, except in the last layer."""
        return [query_positions.all] * (len(self.layers) - 1) + [query_positions]

    def _layer_residual_scale(self, number: int) -> Float[Tensor, "seed 2"] | None:
        return None if self.residual_scale is None else self.residual_scale[:, number]

    def logits(self, states: ResidualStream) -> Float[Tensor, "seed sample position output"]:
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
        lengths: Sequence[int] | None = None,
        noise: Tensor | None = None,
        multiplicity: Tensor | None = None,
        watched: Watched = NOTHING_WATCHED,
    ) -> Float[Tensor, "seed sample query"]:
        """Return −ln p(target) in nats at the query positions, without keeping the logits.

        Args:
            tokens: as for a call of the model.
            target: the token to predict at each query, [sample, query], or [seed, sample, query] where each seed has
                its own.
            last, lengths, noise, multiplicity: as for a call of the model.
            watched: lists by names of `WATCHABLE`, to which every layer appends its activations.
        """
        states = self.final_states(
            tokens, last=last, lengths=lengths, noise=noise, multiplicity=multiplicity, watched=watched
        )
        states = states if self.norm is None else self.norm(states)
        weight = self.embedding.mT if self.head is None else self.head.weight
        bias = None if self.head is None else self.head.bias
        if bias is None:  # as wide as the vocabulary, which a padded copy of the weight is not
            bias = self.embedding.new_zeros(len(weight), self.config.outputs or self.config.vocabulary)
        return surprisal(states, weight, bias, target)

    def activations(
        self, tokens: Tensor, names: Sequence[str] = tuple(WATCHABLE), *, multiplicity: Tensor | None = None
    ) -> dict[str, list[Tensor]]:
        """Return, for each of the names described in `WATCHABLE`, one tensor for each layer, without dropout."""
        watched: dict[str, list[Tensor]] = {name: [] for name in names if choice("names", name, WATCHABLE)}
        self.final_states(tokens, multiplicity=multiplicity, watched=watched)
        return watched

    @staticmethod
    def _embed(tokens: Tensor, embedding: Float[Tensor, "seed vocabulary width"]) -> ResidualStream:
        # One table of all seeds' rows: the backward pass of `embedding[seed, tokens]` adds in no fixed order. A token
        # outside the vocabulary is sent past the end of the table, not into the next seed's rows.
        seeds, vocabulary, _ = embedding.shape
        first = torch.arange(0, seeds * vocabulary, vocabulary, device=tokens.device)[:, None, None]
        rows = (first + tokens).masked_fill((tokens < 0) | (tokens >= vocabulary), seeds * vocabulary)
        table = embedding.flatten(0, 1)
        rows = rows.expand(seeds, -1, -1)
        return lookup(rows, table) if fits(rows, table) else F.embedding(rows, table)

    def _mask(
        self, x: ResidualStream, multiplicity: Tensor | None, query_positions: QueryPositions
    ) -> Float[Tensor, "... query key"]:
        """Return what is added to the scores: 0 or ln m, and the least finite number for keys that must not be seen."""
        # Not −∞: a row without any visible key would be NaN, which would reach other rows as 0 · NaN.
        least = torch.finfo(x.dtype).min
        blocks = [torch.ones(length, length, dtype=torch.bool, device=x.device) for length in query_positions.lengths]
        visible = torch.block_diag(*(block.tril() if self.config.mask == "causal" else block for block in blocks))
        mask = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill(~visible, least)
        if multiplicity is None:
            return mask
        return (multiplicity.to(x.dtype).log()[..., None, None, :] + mask).clamp_min(least)

    def _check(self, tokens: Tensor, multiplicity: Tensor | None, query_positions: QueryPositions) -> None:
        seeds, vocabulary, _ = self.embedding.shape
        if tokens.ndim < 2 or tokens.shape[:-2] not in ((), (seeds,)) or tokens.is_floating_point():
            expected = f"whole numbers [sample, position] or [seed, sample, position] of {seeds} seeds"
            raise InputError("tokens", expected, f"{tokens.dtype} {tuple(tokens.shape)}", "give token numbers")
        self._check_lengths(tokens.shape[-1], query_positions)
        if multiplicity is not None and multiplicity.shape not in (tokens.shape, tokens.shape[-2:]):
            got = f"{tuple(multiplicity.shape)} for tokens {tuple(tokens.shape)}"
            raise InputError("multiplicity", "shaped like the tokens", got, "give one number for each position")
        # Values are checked on the CPU only: a GPU would have to be waited for, and there `_embed` guards the table.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= vocabulary:
                raise InputError("tokens", f"in [0, {vocabulary - 1}]", f"{low} to {high}", "widen the vocabulary")

    def _check_lengths(self, positions: int, query_positions: QueryPositions) -> None:
        (lengths, last), max_length = query_positions, self.config.length
        if sum(lengths) != positions or not lengths:
            raise InputError("lengths", f"up to {positions}", lengths, "give those of all sequences", must="add")
        listed = ", ".join(map(str, lengths))
        if min(lengths) < 1 or (max_length is not None and max(lengths) > max_length):
            expected = "at least 1 position" if max_length is None else f"1 to {max_length} positions"
            raise InputError("tokens", expected, listed, "cut them or raise `length`", must="have")
        if last > min(lengths):
            got = f"{last} for lengths {listed}"
            raise InputError("last", "at most the length of each sequence", got, "choose fewer positions")
