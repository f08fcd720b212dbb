"""The task of `hierarchy-order`: which of the hidden tokens of a latent tree's sequence occur, given the visible ones.

The trees have 16 tokens. Each query asks for one hidden token, and the answer is whether it occurs in the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from joma.arguments import scalar
from joma.data.trees import HBLT
from joma.models.transformer import Decoder
from joma.theory import hierarchy

DEEP, SHALLOW = (2, 2, 2, 2), (2, 2, 4)  # branching; the shallow tree lacks the latents just above the tokens
P0 = (0.5, 0.5)
P_CHILD = np.array([[0.8, -0.2], [0.8, -0.2]])  # of the deep tree: ρ_0 = 0.3 in both branches
TOKENS = math.prod(DEEP)
ROOT = len(DEEP)  # height of the root in the deep tree, above the heights 1 to 3 of its latents
SIBLINGS, COUSINS = 1, 2  # heights in the deep tree; the shallow tree's lowest latents join both kinds directly
VOCABULARY = 1 + 2 * TOKENS  # the start, the tokens, and a query for each token
FIRST_QUERY = 1 + TOKENS  # the position of the first query, after the start and the tokens


class Sequences(NamedTuple):
    """Sequences of a tree with hidden tokens: which tokens are visible, which are queried, and whether these occur."""

    visible: Bool[Tensor, "*batch token"]
    queries: Integer[Tensor, "*batch query"]
    answers: Bool[Tensor, "*batch query"]

    def inputs(self) -> tuple[Integer[Tensor, "*batch position"], Float[Tensor, "*batch position"]]:
        """Return tokens and multiplicities for a decoder: the start, a position for every token, and the queries.

        The start is token 0, token l is 1 + l, and the query for it is 1 + TOKENS + l. Tokens that are not visible, and
        the queries, have multiplicity 0: no position attends to them.
        """
        shape = self.visible.shape[:-1]
        tokens = torch.arange(FIRST_QUERY, device=self.visible.device).expand(*shape, FIRST_QUERY)
        multiplicity = F.pad(F.pad(self.visible, (1, 0), value=True), (0, self.queries.shape[-1]), value=False)
        return torch.cat([tokens, self.queries.long() + FIRST_QUERY], dim=-1), multiplicity.float()


def trees(rho: float) -> dict[str, HBLT]:
    """Return the deep tree and two shallow trees in which each token, given the class, occurs as often as there.

    Twice the probability of a token given class c is `1 − ρ^{L−1} p(c)`. `shallow` has the deep tree's ρ; `matched` has
    ρ², so that tokens under one of its lowest latents occur together as often as the deep tree's cousins.

    >>> [tree.depth for tree in trees(0.85).values()]
    [4, 3, 3]
    """
    # From 0.8 on, `matched` has p(c) = P_CHILD / ρ within [−1, 1].
    rho = scalar("rho", rho, low=0.8, high=0.99)
    return {
        "deep": HBLT.regular(DEEP, p0=P0, p_child=P_CHILD, rho=rho),
        "shallow": HBLT.regular(SHALLOW, p0=P0, p_child=P_CHILD * rho, rho=rho),
        "matched": HBLT.regular(SHALLOW, p0=P0, p_child=P_CHILD / rho, rho=rho**2),
    }


def predictions(tree: HBLT) -> xr.Dataset:
    """Return Theorem 5's co-occurrence and the common ancestor's height of each pair, and each token's probability."""
    first, second = np.triu_indices(TOKENS, k=1)
    cooccurrence = hierarchy.cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho)
    return xr.Dataset(
        {
            "height": ("pair", tree.depth - hierarchy.common_depth(tree.parents)[first, second]),
            "cooccurrence": ("pair", cooccurrence[first, second]),
            "marginal": ("token", hierarchy.marginals(tree.parents, tree.p0, tree.p_child, tree.rho)),
        },
        {"one": ("pair", first), "other": ("pair", second)},
    )


def draw_sequences(
    tree: HBLT, shape: tuple[int, int], queries: int, generators: Sequence[torch.Generator], device: str
) -> Sequences:
    """Draw sequences [minibatch, seed, sample, ...], and hide and query `queries` random tokens of each.

    Args:
        tree: what generates the sequences.
        shape: numbers of minibatches, and of samples in each.
        queries: number of hidden tokens in each sequence, each with a query.
        generators: one for each seed.
        device: the device of the result.
    """
    token = torch.stack([tree.sample(math.prod(shape), generator=generator).token for generator in generators])
    priority = torch.stack(
        [torch.rand(samples.shape, generator=stream) for samples, stream in zip(token, generators, strict=True)]
    )
    hidden = priority.argsort(dim=-1)[..., :queries]
    parts = token.scatter(-1, hidden, value=False), hidden.to(torch.uint8), token.gather(-1, hidden)
    return Sequences(*(part.unflatten(1, shape).transpose(0, 1).contiguous().to(device) for part in parts))


def answer_loss(data: Sequences) -> Callable[[Decoder, Tensor], Tensor]:
    """Return the loss of a step, the cross-entropy of the answers in its minibatch; the minibatches repeat in order."""

    def loss(model: Decoder, step: Tensor) -> Float[Tensor, " seed"]:
        index = (step % len(data.answers))[None]  # `index_select` keeps the index on the device; `[step]` would not
        minibatch = Sequences(*(part.index_select(0, index)[0] for part in data))
        tokens, multiplicity = minibatch.inputs()
        score = model(tokens, multiplicity=multiplicity)[:, :, FIRST_QUERY:, 0]
        return F.binary_cross_entropy_with_logits(score, minibatch.answers.float(), reduction="none").mean(dim=(1, 2))

    return loss
