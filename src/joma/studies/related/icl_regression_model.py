"""Layers of attention on prompts of linear regression, and the prompts, drawn anew at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from joma import noise
from joma.arguments import InputError, choice, positive, scalar, whole
from joma.noise import check_generators

ATTENTIONS = {"linear": "(1/N) scores", "softmax": "softmax(scores) over the N examples"}
# Which blocks of P and of Q are trained, as (row, column); the others are zero.
BLOCKS = {
    "descent": ([("y", "y")], [("x", "x")]),
    "transform": ([("x", "x"), ("y", "y")], [("x", "x")]),
    "whole": ([("x", "x"), ("x", "y"), ("y", "x"), ("y", "y")],) * 2,
}
SITE, LABELS = 1, 2  # of the random numbers of prompts, and of their labels' noise


@dataclass(frozen=True)
class PromptConfig:
    """The sizes and switches of `PromptAttention`.

    Attributes:
        directions: d, the dimension of x; a token is (x, y).
        layers, heads: numbers of them.
        attention: a name of `ATTENTIONS`.
        scale: standard deviation of the entries at the start.
        value: P_yy at the start, with alternating signs from head to head; None to draw it too.
    """

    directions: int
    layers: int = 1
    heads: int = 1
    attention: str = "linear"
    scale: float = 0.05
    value: float | None = None

    def __post_init__(self) -> None:
        for name in ("directions", "layers", "heads"):
            whole(name, getattr(self, name))
        choice("attention", self.attention, ATTENTIONS)
        scalar("scale", self.scale, low=0.0)


class PromptAttention(nn.Module):
    """Attention layers that answer the query of a prompt, for many seeds at once.

    Tokens z = (x, y) are the examples and, last, the query (x_q, 0). Every token attends to the N examples:

        z ← z + Σ_h Σ_i a_h(z, z_i) P_h z_i,    a_h(z, z_i) = zᵀ Q_h z_i / N,  or softmax over i of zᵀ Q_h z_i
        ŷ = −(the query's y after the last layer)

    With linear attention, P = e_y e_yᵀ and Q_xx = −A in each layer, y_i becomes what is left of it after a step of
    gradient descent with the preconditioner A, and ŷ is the answer of as many steps as there are layers.

    Args:
        config: sizes and switches.
        blocks: for each model on the leading axis a name of `BLOCKS`, or one name for all.
        generators: one for each model.
        dtype: of the parameters.

    >>> generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    >>> model = PromptAttention(PromptConfig(2, layers=3), ["descent", "whole"], generators=generators)
    >>> model(torch.randn(2, 10, 6, 3)).shape
    torch.Size([2, 10])
    """

    free: Float[Tensor, "seed matrix layer head row column"]

    def __init__(
        self,
        config: PromptConfig,
        blocks: str | Sequence[str] = "whole",
        *,
        generators: Sequence[torch.Generator],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_generators(generators)
        self.config, size = config, config.directions + 1
        names = [blocks] * len(generators) if isinstance(blocks, str) else list(blocks)
        if len(names) != len(generators):
            raise InputError(
                "blocks", f"one name for each of {len(generators)} models", len(names), "name one for each"
            )
        free = torch.stack([free_entries(name, config.directions) for name in names]).to(dtype)
        self.register_buffer("free", free[:, :, None, None], persistent=False)
        shape = (2, config.layers, config.heads, size, size)
        draws = torch.stack([torch.randn(shape, generator=generator, dtype=dtype) for generator in generators])
        start = config.scale * draws
        if config.value is not None:
            signs = torch.tensor([(-1.0) ** head for head in range(config.heads)], dtype=dtype)
            start[:, 0, :, :, -1, -1] = config.value * signs
        P, Q = (start * self.free).unbind(1)
        self.P = nn.Parameter(P.contiguous())  # [seed, layer, head, size, size]
        self.Q = nn.Parameter(Q.contiguous())

    def forward(self, tokens: Float[Tensor, "seed prompt token size"]) -> Float[Tensor, "seed prompt"]:
        """Return ŷ for prompts whose last token is the query, with y = 0."""
        P, Q = self.P * self.free[:, 0], self.Q * self.free[:, 1]
        for layer in range(self.config.layers):
            readers = tokens[:, :, -1:] if layer == self.config.layers - 1 else tokens
            tokens = readers + self._attended(readers, tokens[:, :, :-1], P[:, layer], Q[:, layer])
        return -tokens[:, :, -1, -1]

    def _attended(
        self,
        readers: Float[Tensor, "seed prompt reader size"],
        examples: Float[Tensor, "seed prompt example size"],
        P: Float[Tensor, "seed head size size"],
        Q: Float[Tensor, "seed head size size"],
    ) -> Float[Tensor, "seed prompt reader size"]:
        if self.config.attention == "softmax":
            values = examples[:, None] @ P[:, :, None].mT
            return (_weights(readers, examples, Q) @ values).sum(1)
        # (1/N) Σ_i (zᵀ Q z_i) P z_i by way of (1/N) Σ_i z_i z_iᵀ, which needs no weights of single examples.
        moments = examples.mT @ examples / examples.shape[-2]
        maps = (Q[:, None] @ moments[:, :, None] @ P[:, None].mT).sum(2)
        return readers @ maps

    def query_attention(self, tokens: Float[Tensor, "seed prompt token size"]) -> Tensor:
        """Return the softmax weights of the query's attention in the first layer, [seed, head, prompt, example]."""
        return _weights(tokens[:, :, -1:], tokens[:, :, :-1], self.Q[:, 0])[..., 0, :]

    def steps(self) -> Float[Tensor, "seed layer direction direction"]:
        """Return A of each layer, the preconditioners of gradient descent, from the blocks P_yy and Q_xx alone."""
        return -torch.einsum("slh,slhij->slij", self.P[..., -1, -1], self.Q[..., :-1, :-1])

    def rank_one(self) -> Float[Tensor, "seed layer direction direction"]:
        """Return −Q_xy P_yx, the product that the other blocks of a single layer add to A, of rank one for one head."""
        return -torch.einsum("slhi,slhj->slij", self.Q[..., :-1, -1], self.P[..., -1, :-1])


def free_entries(blocks: str, directions: int) -> Float[Tensor, "2 size size"]:
    """Return 1 for the entries of P and Q that are trained, and 0 for those that are zero.

    >>> free_entries("descent", 1)
    tensor([[[0., 0.],
             [0., 1.]],
            [[1., 0.],
             [0., 0.]]])
    """
    part = {"x": slice(0, directions), "y": slice(directions, None)}
    free = torch.zeros(2, directions + 1, directions + 1)
    for matrix, pairs in zip(free, choice("blocks", blocks, BLOCKS), strict=True):
        for row, column in pairs:
            matrix[part[row], part[column]] = 1.0
    return free


def _weights(readers: Tensor, examples: Tensor, Q: Tensor) -> Float[Tensor, "seed head prompt reader example"]:
    return (readers[:, None] @ Q[:, :, None] @ examples[:, None].mT).softmax(dim=-1)


@dataclass(frozen=True)
class Prompts:
    """Prompts of each seed: tokens (x, y) with the query last, and what the query's label would be."""

    tokens: Float[Tensor, "seed prompt token size"]
    target: Float[Tensor, "seed prompt"]

    def repeat(self, arms: int) -> Prompts:
        """Return the same prompts for every arm."""
        return Prompts(self.tokens.repeat(arms, 1, 1, 1), self.target.repeat(arms, 1))

    def losses(self, model: PromptAttention) -> Float[Tensor, "seed prompt"]:
        """Return ½ (ŷ − w·x_q)² of each prompt."""
        return (model(self.tokens) - self.target).square() / 2


class PromptSource:
    """Prompts of N examples x ~ N(0, diag(spectrum)), y = w·x, w ~ N(0, I): a function of the seed and the step.

    With `label_noise` the examples' labels are y + label_noise · N(0, 1); what the query is answered with has no noise.
    """

    def __init__(
        self,
        spectrum: Sequence[float],
        length: int,
        seeds: Sequence[int],
        device: str = "cpu",
        *,
        label_noise: float = 0.0,
    ) -> None:
        self.label_noise = scalar("label_noise", label_noise, low=0.0)
        self.deviation = torch.from_numpy(positive("spectrum", spectrum, ndim=1)).sqrt().float().to(device)
        self.length, self.seeds = whole("length", length), torch.tensor(list(seeds), device=device)

    def draw(self, step: Tensor | int, count: int) -> Prompts:
        """Return `count` prompts for each seed."""
        size, key = len(self.deviation), noise.key(self.seeds, step)
        draws = normal((count, self.length + 2, size), key=key)
        x, w = draws[:, :, 1:] * self.deviation, draws[:, :, :1]
        y = (x * w).sum(dim=-1, keepdim=True)
        shown = y.clone()
        if self.label_noise:
            shown += self.label_noise * normal((count, self.length + 1, 1), key=key, site=LABELS)
        shown[:, :, -1] = 0.0
        return Prompts(torch.cat([x, shown], dim=-1), y[:, :, -1, 0])


def normal(shape: Sequence[int], *, key: Tensor, site: int = SITE) -> Float[Tensor, "seed ..."]:
    """Return standard normal numbers of `shape` for each seed, by the method of Box and Muller.

    >>> draws = normal((50, 1000), key=noise.key(torch.tensor([0]), 3))
    >>> bool(draws.mean().abs() < 0.02), bool((draws.std() - 1).abs() < 0.02)
    (True, True)
    """
    count = math.prod(shape)
    half = -(-count // 2)
    uniform = noise.uniform((2, half), key=key, site=site)
    radius, angle = (-2 * torch.log1p(-uniform[:, 0])).sqrt(), 2 * math.pi * uniform[:, 1]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[:, :count].view(len(uniform), *shape)
