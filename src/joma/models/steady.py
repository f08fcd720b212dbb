"""A decoder whose attention can be held as it is, while all the rest of it learns on.

Holding W_Q and W_K does not do that: what they are multiplied by, embeddings and the output of lower layers, still
moves, and attention with it. Here queries and keys come from a copy of the decoder that stands still, and reads the
same tokens with the same dropout.
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
from joma.models.transformer import Asks, Decoder, DecoderConfig, Given, Layer, Maybe
from joma.tensors import as_tensor


class SteadyDecoder(Decoder):
    """A decoder that holds the attention weights of each seed, as a function of the tokens, from a step of its own on.

    Before every step it must be told which one it is, by `tell`. After `until[s]` updates of seed s its attention is
    that of a copy as it was then: neither embeddings, W_Q, W_K nor lower layers change it any more, and no gradient
    passes through it.

    Args:
        config, generators, options: as of `Decoder`; attention not uniform, positions not learned.
        until: the step of each seed.

    >>> config = DecoderConfig(vocabulary=10, width=8)
    >>> model = SteadyDecoder(config, generators=[torch.Generator().manual_seed(0)], until=torch.tensor([3]))
    >>> model.tell(torch.tensor(3))
    >>> before = model.activations(torch.arange(4)[None], ["attention"])["attention"][0]
    >>> _ = model.embedding.data.normal_()
    >>> torch.equal(before, model.activations(torch.arange(4)[None], ["attention"])["attention"][0])
    True
    """

    until: Int[Tensor, " seed"]
    going: Bool[Tensor, " seed"]

    def __init__(
        self,
        config: DecoderConfig,
        *,
        generators: Sequence[torch.Generator],
        until: ArrayLike | Tensor,
        **options: Any,
    ) -> None:
        super().__init__(config, generators=generators, **options)
        expected, remedy = f"a whole number for each of {len(generators)} seeds", "give the step each is held from"
        steps = as_tensor("until", until, expected=expected, remedy=remedy)
        if steps.shape != (len(generators),) or steps.is_floating_point():
            raise InputError("until", expected, f"{steps.dtype} {tuple(steps.shape)}", remedy)
        if config.attention == "uniform" or (self.positions is not None and self.positions.requires_grad):
            expected = "attention that is computed, and positions that are not learned"
            got = f"{config.attention} attention, {config.positions} positions"
            raise InputError("config", expected, got, "take trained attention, and sinusoidal or rotary positions")
        self.register_buffer("until", steps, persistent=False)
        self.register_buffer("going", torch.ones_like(steps, dtype=torch.bool))
        self.past = copy.deepcopy(self.layers).requires_grad_(False)
        self.past_embedding = nn.Parameter(self.embedding.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def tell(self, step: Tensor) -> None:
        """Take note of how many updates there were; up to `until` the copy follows the decoder."""
        self.going.copy_(step < self.until)
        follows = step <= self.until
        pairs = zip(self.past.parameters(), self.layers.parameters(), strict=True)
        for past, now in ((self.past_embedding, self.embedding), *pairs):
            torch.where(follows.view(-1, *(1,) * (past.ndim - 1)), now.to(past.dtype), past, out=past)

    def _given(
        self, tokens: Tensor, positions: Maybe, noise: Maybe, reach: Tensor, asks: Asks
    ) -> Sequence[Given | None]:
        given = []
        with torch.no_grad():
            x, keys = self.entrance(self._embed(tokens, self.past_embedding), positions, noise)
            for layer, key, own in zip(self.past, keys, self._asking(asks), strict=True):
                assert isinstance(layer, Layer)
                given.append(Given(self.going, *layer.asked(x, own)))
                if len(given) < len(self.past):
                    x = layer(x, reach, asks=own, noise=key, skips=self._skips(len(given) - 1))
        return given
