"""The deterministic combination tree of JoMA's Table 1: classes combine latents, latents combine tokens.

Each class has exactly one sequence, so a minibatch is a vector of counts over the classes: `minibatch_counts` draws it.
Without positional encoding and under a causal mask all leading pads have the same activations, so
`Combinations.collapsed` merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import comb

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from joma import memory
from joma.arguments import InputError, flag, sequence, whole
from joma.noise import check_generators

CHUNK = 2**22  # labels drawn at once, 32 MiB


@dataclass(frozen=True, eq=False)
class Collapsed:
    """Sequences whose leading pads are merged.

    Attributes:
        sequence: tokens, aligned at the right, so that the last position is the last token.
        multiplicity: how many positions of the full sequence each position stands for; 0 if it stands for none.
    """

    sequence: Int[Tensor, "seed label position"]
    multiplicity: Int[Tensor, "seed label position"]


@dataclass(frozen=True, eq=False)
class Combinations:
    """One tree for each seed: the sequence of every class, and the latents behind it.

    Attributes:
        sequence: the tokens of each class in ascending order, padded at the left.
        token: whether each token, the pad left out, is reached from each class.
        reached: for each layer of latents from the lowest up, whether each latent is reached from each class.
        members: for each layer of latents from the lowest up, and last for the classes, whether each node of the layer
            below belongs to the combination. Below the lowest layer are the tokens, the pad left out.
        padding: the token number of the pad, the last of the vocabulary.
    """

    sequence: Int[Tensor, "seed label position"]
    token: Bool[Tensor, "seed label token"]
    reached: tuple[Bool[Tensor, "seed label _"], ...]
    members: tuple[Bool[Tensor, "seed _ _"], ...]
    padding: int

    @property
    def twins(self) -> Bool[Tensor, "seed label"]:
        """Whether each class has the same sequence as another class, its twin."""
        return _same_tokens(self.token).sum(dim=-1) > 1

    @property
    def accuracy_cap(self) -> Float[Tensor, " seed"]:
        """The best accuracy of any function of the sequence if classes are equally likely: distinct sequences / C.

        >>> tree = CombinationTree(classes=20, children=2, latents=(10, 20))
        >>> drawn = tree.draw([torch.Generator().manual_seed(seed) for seed in (0, 2)])
        >>> drawn.twins.sum(dim=-1), drawn.accuracy_cap
        (tensor([2, 0]), tensor([0.9500, 1.0000], dtype=torch.float64))
        """
        repeats = _same_tokens(self.token).tril(-1).any(dim=-1)  # an earlier class has the same sequence
        return 1 - repeats.double().mean(dim=-1)

    def collapsed(self, *, fill: bool = False) -> Collapsed:
        """Merge the leading pads of every sequence, which a causal model without positions cannot tell apart.

        Let n be the number of tokens in a sequence of length L, and W one more than the largest n, but at most L. The
        result has W positions. Position W−n−1 is a pad that stands for L−n pads, and the positions before it stand for
        nothing (multiplicity 0). With `fill` every position stands for something: the first for L−W+1 pads, each other
        for one. Either gives the same activations as the full sequence if attention weighs key j by its multiplicity,

            a_ij = m_j exp(s_ij) / Σ_{l≤i} m_l exp(s_il)

        but without `fill` the attention rows of positions that stand for nothing are 0/0: leave them out.

        >>> tree = CombinationTree(classes=2, children=2, latents=(3,), vocabulary=6, length=9)
        >>> drawn = tree.draw([torch.Generator().manual_seed(6)])
        >>> drawn.sequence
        tensor([[[5, 5, 5, 5, 5, 5, 0, 1, 4],
                 [5, 5, 5, 5, 5, 0, 1, 3, 4]]])
        >>> drawn.collapsed().sequence
        tensor([[[5, 5, 0, 1, 4],
                 [5, 0, 1, 3, 4]]])
        >>> drawn.collapsed().multiplicity
        tensor([[[0, 6, 1, 1, 1],
                 [5, 1, 1, 1, 1]]])
        >>> drawn.collapsed(fill=True).multiplicity
        tensor([[[5, 1, 1, 1, 1],
                 [5, 1, 1, 1, 1]]])
        """
        length, sizes = self.sequence.shape[-1], self.token.sum(dim=-1, keepdim=True)
        width = min(length, 1 + int(sizes.max()))
        sequence = self.sequence[..., length - width :].contiguous()
        multiplicity = torch.ones_like(sequence)
        if fill:
            multiplicity[..., 0] += length - width
        else:
            position, pad = torch.arange(width, device=sizes.device), width - sizes - 1
            multiplicity = torch.where(position == pad, length - sizes, (position > pad).long())
        return Collapsed(sequence, multiplicity)


@dataclass(frozen=True)
class CombinationTree:
    """The sizes of a random combination tree; `draw` draws trees of these sizes.

    Every latent of the lowest layer is a combination of `children` tokens out of 0..M−2, every latent of the next layer
    up is a combination of `children` latents of the lowest, and so on up to the classes. The combinations of a layer
    are distinct, and all ways to choose them are equally likely. Token M−1 is the pad.

    Attributes:
        classes: C, number of classes.
        children: N_ch, number of members of a combination.
        latents: number of latents in each layer, from the lowest up: the (N_0, N_1) of Table 1.
        vocabulary: M, number of tokens, the pad included.
        length: L, of the padded sequences.

    >>> drawn = CombinationTree(classes=30, children=3).draw([torch.Generator().manual_seed(s) for s in range(5)])
    >>> drawn.sequence.shape, [tuple(table.shape) for table in drawn.reached]
    (torch.Size([5, 30, 30]), [(5, 30, 10), (5, 30, 20)])
    """

    classes: int = 20
    children: int = 2
    latents: Sequence[int] = (10, 20)
    vocabulary: int = 100
    length: int = 30

    def __post_init__(self) -> None:
        layers = sequence("latents", self.latents, "the number of latents in each layer")
        checked = {
            "classes": whole("classes", self.classes),
            "children": whole("children", self.children),
            "latents": tuple(whole(f"latents[{layer}]", number) for layer, number in enumerate(layers)),
            "vocabulary": whole("vocabulary", self.vocabulary, low=2),
            "length": whole("length", self.length),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        below = self.vocabulary - 1
        names = [f"latents[{layer}]" for layer in range(len(self.latents))] + ["classes"]
        for name, number in zip(names, (*self.latents, self.classes), strict=True):
            _check_combinations(name, number, below, self.children)
            below = number

    def draw(self, generators: Sequence[torch.Generator], *, twins: bool = True, tries: int = 1000) -> Combinations:
        """Draw one tree for each seed; a seed's tree does not depend on the other seeds.

        Args:
            generators: one for each seed.
            twins: whether two classes may have the same sequence, which caps the accuracy below one. If not, a seed's
                tree is drawn again until all its sequences differ: all trees without twins are equally likely.
            tries: the largest number of trees to draw for a seed if `twins` is false.

        Returns:
            `Combinations`.

        >>> streams = [torch.Generator().manual_seed(seed) for seed in range(3)]
        >>> CombinationTree(classes=30, children=3).draw(streams, twins=False).accuracy_cap.tolist()
        [1.0, 1.0, 1.0]
        """
        tries, twins = whole("tries", tries), flag("twins", twins)
        sizes = (self.vocabulary - 1, *self.latents, self.classes)
        memory.check("classes", 16 * sum(a * b for a, b in pairwise(sizes)), "choose a smaller tree")
        trees = [
            self._draw(seed, generator, twins, tries) for seed, generator in enumerate(check_generators(generators))
        ]
        members = tuple(torch.stack(layer) for layer in zip(*trees, strict=True))
        token, *reached = _reach(members)
        longest = int(token.sum(dim=-1).max())
        if longest > self.length:
            remedy = f"lengthen the sequences, or give fewer `children` than {self.children}"
            raise InputError("length", f"at least {longest}, the tokens of the longest sequence", self.length, remedy)
        padding = self.vocabulary - 1
        return Combinations(_sequences(token, self.length, padding), token, tuple(reached), members, padding)

    def _draw(self, seed: int, generator: torch.Generator, twins: bool, tries: int) -> list[Bool[Tensor, "_ _"]]:
        for _ in range(1 if twins else tries):
            sizes = (self.vocabulary - 1, *self.latents, self.classes)
            members = [_distinct(number, below, self.children, generator) for below, number in pairwise(sizes)]
            if twins or not _same_tokens(_reach(members)[0]).tril(-1).any():
                return members
        expected = f"possible in one of {tries} trees for seed number {seed}"
        remedy = "raise `tries`, give more `latents` or fewer `classes`, or allow twins"
        raise InputError("twins=False", expected, "two classes of the same sequence in every tree", remedy)


def minibatch_counts(
    classes: int, *, batch: int, steps: int, generators: Sequence[torch.Generator]
) -> Int[Tensor, "step seed label"]:
    """Draw minibatches of B samples, each of a random class, and return how often each class occurs in each of them.

        n_t ~ Multinomial(B; 1/C, …, 1/C),    (1/B) Σ_{samples} loss = Σ_c (n_tc/B) loss_c

    The second equation is exact if a class has one sequence and the loss of a sample does not depend on the others of
    its batch (no batch norm, no dropout). On the CPU, counts drawn for some steps and then, from the same generators,
    for more steps are the same as counts drawn for all steps at once.

    Args:
        classes: C, number of classes.
        batch: B, number of samples in a minibatch.
        steps: number of minibatches.
        generators: one for each seed; each draws B × steps labels, one minibatch after another.

    Returns:
        Counts [step, seed, label] whose sum over labels is B.

    >>> minibatch_counts(4, batch=128, steps=2, generators=[torch.Generator().manual_seed(0)])[:, 0]
    tensor([[35, 30, 23, 40],
            [34, 28, 35, 31]])
    """
    classes, batch, steps = whole("classes", classes), whole("batch", batch), whole("steps", steps)
    memory.check("steps", 8 * steps * classes + 16 * batch, "draw fewer steps at once, or smaller batches")
    return torch.stack([_counts(classes, batch, steps, generator) for generator in check_generators(generators)], dim=1)


def _counts(classes: int, batch: int, steps: int, generator: torch.Generator) -> Int[Tensor, "step label"]:
    counts = torch.zeros(steps, classes, dtype=torch.int64, device=generator.device)
    for chunk in counts.split(max(1, CHUNK // batch)):
        label = torch.randint(classes, (len(chunk), batch), generator=generator, device=generator.device)
        chunk.scatter_add_(1, label, torch.ones_like(label))
    return counts


def _check_combinations(name: str, number: int, below: int, children: int) -> None:
    """Refuse a layer that has more nodes than there are combinations of nodes of the layer below."""
    if number > (available := comb(below, children)):
        expected = f"at most {available}, the distinct combinations of {children} out of the {below} below"
        raise InputError(name, expected, number, "ask for fewer, enlarge the layer below, or change `children`")


def _distinct(number: int, below: int, children: int, generator: torch.Generator) -> Bool[Tensor, "number below"]:
    """Draw `number` distinct combinations one after another; repetitions are skipped."""
    combinations: dict[tuple[int, ...], None] = {}  # in place of a set, which has no order
    while len(combinations) < number:
        order = torch.rand((number, below), generator=generator, device=generator.device, dtype=torch.float64).argsort()
        combinations |= dict.fromkeys(map(tuple, order[:, :children].sort().values.tolist()))
    chosen = torch.tensor(list(islice(combinations, number)), device=generator.device)
    return torch.zeros(number, below, dtype=torch.bool, device=generator.device).scatter_(1, chosen, True)


def _reach(members: Sequence[Bool[Tensor, "*seed _ _"]]) -> list[Bool[Tensor, "*seed label _"]]:
    """Return which nodes are reached from each class: the tokens, then each layer of latents from the lowest up."""
    reached = [members[-1]]
    for table in reversed(members[:-1]):
        reached.append((reached[-1].float() @ table.float()) > 0)
    return reached[::-1]


def _sequences(token: Bool[Tensor, "seed label token"], length: int, padding: int) -> Int[Tensor, "seed label length"]:
    """Return the tokens of each class in ascending order, padded at the left to `length`."""
    index = torch.arange(token.shape[-1], device=token.device)
    ordered = torch.where(token, index, -1).sort(dim=-1).values
    ordered = functional.pad(ordered, (length, 0), value=-1)[..., -length:]
    return ordered.masked_fill(ordered < 0, padding)


def _same_tokens(token: Bool[Tensor, "*seed label token"]) -> Bool[Tensor, "*seed label label"]:
    """Return for each pair of classes whether they have the same tokens: each has as many as both share."""
    indicator = token.float()
    shared, size = indicator @ indicator.mT, indicator.sum(dim=-1)
    return (shared == size[..., None]) & (shared == size[..., None, :])
