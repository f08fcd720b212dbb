"""A decoder whose attention can be frozen from some step on, while all its other parameters continue to train.

Freezing W_Q and W_K is not enough: their inputs, embeddings and the output of lower layers, still change, and so does
attention. Here queries and keys come from a frozen copy of the decoder, which reads the same tokens with the
same dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from numpy.typing import ArrayLike
from torch import Tensor, nn

from joma.arguments import InputError
from joma.models.config import DecoderConfig
from joma.models.layers import Layer, QueryKeyOverride, QueryPositions
from joma.models.transformer import Decoder
from joma.tensors import as_whole


class FrozenAttentionDecoder(Decoder):
    """A decoder that freezes each seed's attention weights, as a function of the tokens, from a given step on.

    Call `set_step` before every step. After `freeze_steps[s]` updates the attention of seed s is that of a copy of the
    decoder at that step: neither embeddings, W_Q, W_K nor lower layers change it any more, and no gradient passes
    through it.

    Args:
        config, generators, options: as for `Decoder`; attention must not be uniform, and positions must not be learned.
        freeze_steps: for each seed, the step from which its attention is frozen.

    >>> config = DecoderConfig(vocabulary=10, width=8)
    >>> generators = [torch.Generator().manual_seed(0)]
    >>> model = FrozenAttentionDecoder(config, generators=generators, freeze_steps=torch.tensor([3]))
    >>> model.set_step(torch.tensor(3))
    >>> before = model.activations(torch.arange(4)[None], ["attention"])["attention"][0]
    >>> _ = model.embedding.data.normal_()
    >>> torch.equal(before, model.activations(torch.arange(4)[None], ["attention"])["attention"][0])
    True
    """

    freeze_steps: Int[Tensor, " seed"]
    going: Bool[Tensor, " seed"]  # seeds whose attention still trains; the name is stored in checkpoints

    def __init__(
        self,
        config: DecoderConfig,
        *,
        generators: Sequence[torch.Generator],
        freeze_steps: ArrayLike | Tensor,
        **options: Any,
    ) -> None:
        super().__init__(config, generators=generators, **options)
        expected = f"a whole number for each of {len(generators)} seeds"
        remedy = "give the step from which each seed's attention is frozen"
        shape = (len(generators),)
        steps = as_whole("freeze_steps", freeze_steps, shape=shape, expected=expected, remedy=remedy)
        if config.attention == "uniform" or (self.positions is not None and self.positions.requires_grad):
            expected = "attention that is not uniform, and positions that are not learned"
            got = f"{config.attention} attention, {config.positions} positions"
            remedy = "use trained attention, and sinusoidal or rotary positions"
            raise InputError("config", expected, got, remedy, must="have")
        self.register_buffer("freeze_steps", steps, persistent=False)
        self.register_buffer("going", torch.ones_like(steps, dtype=torch.bool))
        self.past = copy.deepcopy(self.layers).requires_grad_(False)
        self.past_embedding = nn.Parameter(self.embedding.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def set_step(self, step: Tensor) -> None:
        """Set the number of updates so far; up to `freeze_steps` the copy follows the decoder."""
        self.going.copy_(step < self.freeze_steps)
        follows = step <= self.freeze_steps
        pairs = zip(self.past.parameters(), self.layers.parameters(), strict=True)
        for past, present in ((self.past_embedding, self.embedding), *pairs):
            torch.where(follows.view(-1, *(1,) * (past.ndim - 1)), present.to(past.dtype), past, out=past)

    def _overrides(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        noise: Tensor | None,
        mask: Tensor,
        query_positions: QueryPositions,
    ) -> Sequence[QueryKeyOverride | None]:
        """Return for each layer the queries and keys of the frozen copy."""
        overrides = []
        with torch.no_grad():
            x, keys = self.input_stage(self._embed(tokens, self.past_embedding), positions, noise)
            by_layer = zip(self.past, keys, self._layer_queries(query_positions), strict=True)
            for number, (layer, key, queries) in enumerate(by_layer):
                assert isinstance(layer, Layer)
                overrides.append(QueryKeyOverride(self.going, *layer.queries_and_keys(x, queries)))
                if number < len(self.past) - 1:  # nothing reads the output of the copy's last layer
                    scale = self._layer_residual_scale(number)
                    x = layer(x, mask, query_positions=queries, noise=key, residual_scale=scale)
        return overrides
