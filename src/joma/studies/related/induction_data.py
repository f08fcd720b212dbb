"""The sequences of the study `induction-phases`: each has its own law, drawn anew at every step of training.

All randomness comes from the seed and the step (`joma.noise`), so that a run that was interrupted goes on with the same
sequences. Worlds of one shape see the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from joma import noise
from joma.arguments import InputError, whole

ROWS, START, NEXT = 1, 2, 3  # the sites of the noise
DOUBLINGS = 8  # the first symbols have the law of the chain after 2^8 steps, which is its stationary one
MAX_PERMUTED = 5  # symbols: k! permutations are mixed
TINY = 1e-30  # keeps a row whose draws are all 0 from being divided by 0


@dataclass(frozen=True)
class World:
    """How the laws of sequences are drawn.

    Attributes:
        name: for the run and the figures.
        parents: lags of the symbols that the next one depends on, from the nearest to the farthest.
        sharpness: if not None, laws are doubly stochastic: mixtures of all permutations whose weights are proportional
            to this power of exponential draws. If None, rows are independent draws from Dirichlet(1).
    """

    name: str
    parents: tuple[int, ...] = (1,)
    sharpness: float | None = None


# With this power the next symbol tells as much about its parent as with Dirichlet rows, if there are 3 symbols, so that
# only the unigram is taken away. `test_induction_data.py` solves for it.
MATCHED_SHARPNESS = 1.05
CHAIN, LAG_2, DOUBLY = "chain", "lag 2", "doubly stochastic"
WORLDS = {
    world.name: world
    for world in (
        World(CHAIN),
        World(LAG_2, parents=(2,)),
        World(DOUBLY, sharpness=MATCHED_SHARPNESS),
    )
}


@dataclass(frozen=True)
class Sequences:
    """Sequences and the laws they came from.

    Attributes:
        tokens: [seed, sample, position].
        kernel: probability of the next symbol given its parents, [seed, sample, parent, (parent, …,) symbol].
    """

    tokens: Int[Tensor, "seed sample position"]
    kernel: Float[Tensor, "seed sample ..."]


def draw(world: World, seeds: Tensor, step: Tensor | int, *, symbols: int, samples: int, length: int) -> Sequences:
    """Return `samples` sequences of `length` symbols for each seed, each with its own law.

    Args:
        world: how laws are drawn.
        seeds: [seed], on the device where the sequences are needed.
        step: one whole number, or a tensor without axes on that device.
        symbols, samples, length: sizes.

    >>> sequences = draw(WORLDS["chain"], torch.tensor([0, 1]), 5, symbols=3, samples=4, length=7)
    >>> sequences.tokens.shape, sequences.kernel.shape
    (torch.Size([2, 4, 7]), torch.Size([2, 4, 3, 3]))
    """
    key = noise.key(seeds, step)
    kernel = draw_kernels(world, key, symbols=symbols, samples=samples)
    windows = _windows(kernel, world.parents)
    longest, count = world.parents[-1], windows.shape[-2]
    if whole("length", length) < longest:
        raise InputError("length", f"at least {longest}, the longest lag of a parent", length, "lengthen sequences")
    start = _choose(_stationary(windows, symbols), noise.uniform((samples,), key=key, site=START))
    uniform = noise.uniform((samples, length - longest), key=key, site=NEXT)
    chosen = _choose(windows[..., None, :, :], uniform[..., None])  # [seed, sample, position, window]
    numbers = torch.arange(count, device=chosen.device)
    later = _composed(numbers * symbols % count + chosen)
    visited = later.gather(-1, start[..., None, None].expand(*later.shape[:-1], 1))[..., 0] % symbols
    places = symbols ** torch.arange(longest - 1, -1, -1, device=start.device)
    return Sequences(torch.cat([start[..., None] // places % symbols, visited], dim=-1), kernel)


def draw_kernels(world: World, key: Tensor, *, symbols: int, samples: int) -> Float[Tensor, "seed sample ..."]:
    """Return the laws of `samples` sequences for each seed.

    >>> kernels = draw_kernels(WORLDS["doubly stochastic"], noise.key(torch.tensor([0]), 5), symbols=3, samples=4)
    >>> bool((kernels.sum(-2) - 1).abs().max() < 1e-6)
    True
    """
    if world.sharpness is None:
        shape = (samples, *[symbols] * (len(world.parents) + 1))
        draws = _exponential(shape, key) + TINY
        return draws / draws.sum(-1, keepdim=True)
    if symbols > MAX_PERMUTED:
        raise InputError("symbols", f"at most {MAX_PERMUTED} in doubly stochastic worlds", symbols, "give fewer")
    matrices = _permutations(symbols, str(key.device))
    draws = _exponential((samples, len(matrices)), key) ** world.sharpness + TINY
    return torch.einsum("sbp,pij->sbij", draws / draws.sum(-1, keepdim=True), matrices)


@cache  # a captured step of training can read a tensor, but not copy one to the device
def _permutations(symbols: int, device: str) -> Float[Tensor, "permutation symbol symbol"]:
    return torch.eye(symbols)[torch.tensor([*permutations(range(symbols))])].to(device)


def _exponential(shape: Sequence[int], key: Tensor) -> Tensor:
    return -torch.log1p(-noise.uniform(shape, key=key, site=ROWS))


def _windows(kernel: Tensor, parents: Sequence[int]) -> Float[Tensor, "seed sample window symbol"]:
    """Return the law of the next symbol for every window of the last symbols, the newest of which is the last digit."""
    symbols = kernel.shape[-1]
    numbers = torch.arange(symbols ** parents[-1], device=kernel.device)
    digits = [numbers // symbols ** (lag - 1) % symbols for lag in parents]
    return kernel[(slice(None), slice(None), *digits)]


def _stationary(windows: Float[Tensor, "seed sample window symbol"], symbols: int) -> Float[Tensor, "seed sample _"]:
    """Return the distribution of windows after 2^DOUBLINGS steps, from any window."""
    count = windows.shape[-2]
    numbers = torch.arange(count, device=windows.device)
    following = numbers[:, None] * symbols % count + torch.arange(symbols, device=windows.device)
    chain = torch.zeros(*windows.shape[:2], count, count, device=windows.device)
    chain = chain.scatter(-1, following.expand_as(windows), windows)
    for _ in range(DOUBLINGS):
        chain = chain @ chain
        chain = chain / chain.sum(-1, keepdim=True)  # rounding must not grow
    return chain.mean(-2)


def _choose(probability: Float[Tensor, "... choice"], uniform: Float[Tensor, ...]) -> Int[Tensor, ...]:
    """Return the choice whose interval of cumulated probability contains a uniform number."""
    bounds = probability.cumsum(-1)[..., :-1]
    return (uniform[..., None] >= bounds).sum(-1)


def _composed(maps: Int[Tensor, "seed sample position window"]) -> Int[Tensor, "seed sample position window"]:
    """Return f_t ∘ … ∘ f_0 for every position t: a window's successor after t + 1 steps, in log₂(positions) passes."""
    distance = 1
    while distance < maps.shape[-2]:
        later = maps[..., distance:, :].gather(-1, maps[..., :-distance, :])
        maps = torch.cat([maps[..., :distance, :], later], dim=-2)
        distance *= 2
    return maps
