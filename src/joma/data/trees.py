"""Latent trees that generate token sequences: a class at the root, latents in the levels below, tokens at the leaves.

A tree is a frozen description; `sample` draws from it level by level and returns the tokens together with the latents
that they came from. Nodes are numbered from the root down, level by level, and from left to right within a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import ArrayLike
from torch import Tensor

from joma import memory
from joma.arguments import InputError, probabilities, real, scalar, sequence, whole
from joma.noise import check_generator


@dataclass(frozen=True)
class TreeSample:
    """Samples of a tree, with the latents that they came from.

    Attributes:
        label: the class, which is the root.
        latents: the bits of each level from the root's children (depth 1) down to the level above the tokens.
        token: whether each token is in the sequence.
    """

    label: Int[Tensor, " sample"]
    latents: tuple[Bool[Tensor, "sample _"], ...]
    token: Bool[Tensor, "sample token"]


@dataclass(frozen=True, eq=False)
class HBLT:
    """The hierarchical binary latent tree HBLT(ρ) of Theorem 5, with all tokens at one depth.

        P[y_0 = c] = p0(c),    P[y_β = 0 | y_0 = c] = (1 + p_{β|0}(c))/2,    P[y_child = y_parent] = (1 + ρ)/2 below β

    Attributes:
        child_counts: for each level above the tokens, how many children each of its nodes has. `((2,), (1, 3))` is a
            root with two children, the first with one token below it and the second with three.
        p0: probabilities of the classes.
        p_child: p_{β|0}(c) in [−1, 1], one row for each child of the root, one column for each class.
        rho: ρ in [0, 1].

    >>> tree = HBLT.regular((2, 2), p0=[0.5, 0.5], p_child=[[0.8, -0.2], [0.6, 0.0]], rho=0.9)
    >>> drawn = tree.sample(1000, generator=torch.Generator().manual_seed(0))
    >>> drawn.label.shape, [level.shape[1] for level in drawn.latents], drawn.token.shape
    (torch.Size([1000]), [2], torch.Size([1000, 4]))
    """

    child_counts: Sequence[Sequence[int]]
    p0: ArrayLike
    p_child: ArrayLike
    rho: float

    def __post_init__(self) -> None:
        counts = _check_levels(self.child_counts)
        p0 = probabilities("p0", self.p0, ndim=1)
        p_child = real("p_child", self.p_child, ndim=2, low=-1.0, high=1.0)
        if p_child.shape != (counts[0][0], p0.size):
            expected = f"{counts[0][0]} children of the root x {p0.size} classes"
            remedy = "give one row for each child and one column for each class"
            raise InputError("p_child", expected, f"shape {p_child.shape}", remedy)
        rho = scalar("rho", self.rho, low=0.0, high=1.0)
        for name, value in {"child_counts": counts, "p0": p0, "p_child": p_child, "rho": rho}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def regular(cls, branching: Sequence[int], *, p0: ArrayLike, p_child: ArrayLike, rho: float) -> HBLT:
        """Return the tree whose nodes at depth d all have `branching[d]` children.

        >>> HBLT.regular((1, 2, 2), p0=[1.0], p_child=[[0.5]], rho=0.9).child_counts
        ((1,), (2,), (2, 2))
        """
        levels = sequence("branching", branching, "the number of children at each depth")
        if not levels:
            raise InputError("branching", "at least one level", "none", "give the root's number of children, as (2,)")
        numbers = [whole(f"branching[{level}]", number) for level, number in enumerate(levels)]
        memory.check("branching", 64 * math.prod(numbers), "choose a smaller tree")
        widths = np.cumprod([1, *numbers])
        counts = tuple((number,) * int(width) for number, width in zip(numbers, widths, strict=False))
        return cls(counts, p0, p_child, rho)

    @classmethod
    def random(cls, *, generator: torch.Generator, classes: int = 3, max_tokens: int = 12, max_nodes: int = 20) -> HBLT:
        """Draw a tree with 2 to `max_tokens` tokens and at most `max_nodes` nodes, root and tokens included.

        The depth is uniform over 2, 3, 4 and each node's number of children over 1, 2, 3; both are drawn again until
        the tree fits. `p0` is uniform over the simplex, `p_child` over [−1, 1], ρ over [0, 1].

        >>> tree = HBLT.random(generator=torch.Generator().manual_seed(0))
        >>> tree.depth, len(tree.parents), tree.tokens
        (4, 16, 7)
        """
        classes, max_tokens = whole("classes", classes), whole("max_tokens", max_tokens, low=2)
        max_nodes, counts = whole("max_nodes", max_nodes, low=4), ((1,),)
        generator = check_generator(generator, required=True)
        memory.check("classes", 64 * classes, "give fewer classes")
        while not 2 <= sum(counts[-1]) <= max_tokens or 1 + sum(map(sum, counts)) > max_nodes:
            counts = _random_counts(generator)
        uniform = torch.rand((counts[0][0] + 1, classes), generator=generator, dtype=torch.float64).numpy()
        weight = -np.log1p(-uniform[-1])  # exponential variables, normalised, are uniform over the simplex
        rho = float(torch.rand((), generator=generator, dtype=torch.float64))
        return cls(counts, weight / weight.sum(), 2 * uniform[:-1] - 1, rho)

    @property
    def depth(self) -> int:
        """L, the number of levels below the root."""
        return len(self.child_counts)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(self.child_counts[-1])

    @property
    def parents(self) -> Int[np.ndarray, " node"]:
        """The parent of each node, −1 for the root, as `joma.theory.hierarchy` expects a tree.

        >>> HBLT(((2,), (1, 3)), p0=[1.0], p_child=[[0.5], [0.2]], rho=0.9).parents
        array([-1,  0,  0,  1,  2,  2,  2])
        """
        counts = np.concatenate([np.asarray(level) for level in self.child_counts])
        return np.concatenate([[-1], np.repeat(np.arange(counts.size), counts)])

    def sample(self, count: int, *, generator: torch.Generator) -> TreeSample:
        """Draw `count` independent sequences, on the generator's device.

        Returns:
            `TreeSample`: labels [sample], bits of the latents level by level, and bits of the tokens [sample, token].
        """
        count, generator = whole("count", count), check_generator(generator, required=True)
        memory.check("count", 10 * count * len(self.parents), "draw fewer sequences at once")
        options = {"generator": generator, "device": generator.device, "dtype": torch.float64}
        p0, p_child = (torch.as_tensor(np.asarray(table), device=generator.device) for table in (self.p0, self.p_child))
        label = torch.multinomial(p0, count, replacement=True, generator=generator)
        bits = torch.rand((count, len(p_child)), **options) < ((1 - p_child) / 2).T[label]
        levels = [bits]
        for counts in self.child_counts[1:]:
            copies = bits.repeat_interleave(torch.tensor(counts, device=bits.device), dim=1)
            bits = copies ^ (torch.rand(copies.shape, **options) < (1 - self.rho) / 2)
            levels.append(bits)
        return TreeSample(label, tuple(levels[:-1]), levels[-1])


def _check_levels(child_counts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of children as tuples of ints, if each level has one for every node of the level above."""
    child_counts = sequence("child_counts", child_counts, "for each level, how many children each node has")
    if len(child_counts) == 0:
        raise InputError("child_counts", "at least one level", "none", "give the root's number of children, as ((2,),)")
    levels, width = [], 1
    for depth, level in enumerate(child_counts):
        counts = sequence(f"child_counts[{depth}]", level, "one number for each node")
        if len(counts) != width:
            expected = f"one number for each of the {width} nodes at depth {depth}"
            remedy = "a level has as many nodes as the level above has children"
            raise InputError(f"child_counts[{depth}]", expected, f"{len(counts)} numbers", remedy)
        levels.append(tuple(whole(f"child_counts[{depth}]", number) for number in counts))
        width = sum(levels[-1])
    return tuple(levels)


def _random_counts(generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
    levels, width = [], 1
    for _ in range(int(torch.randint(2, 5, (), generator=generator))):
        levels.append(tuple(torch.randint(1, 4, (width,), generator=generator).tolist()))
        width = sum(levels[-1])
    return tuple(levels)
