"""Noise as a function of the seed, the step, the site in the model and the element, without the state of a generator.

    u_i = h(h(i ⊕ k_0) ⊕ k_1) / 2³²,    k_j = h(h(h(h(j + 1) + seed) + step) + site)    (seed, step: low, high word)

A generator has a state, and what it draws next depends on all earlier draws. Here there is no state: a seed's dropout
masks are the same whichever other seeds train with it, however often the run was interrupted, and on every device. The
step may be a tensor on the device, so that one captured CUDA graph serves all steps.

`h` is the 32-bit mixer "lowbias32" of Chris Wellons: two multiplications between three shifts, a bijection. Words are
stored in int64, where the product of a word and a multiplier of 31 bits cannot overflow: all devices agree exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from joma.arguments import MAX_WHOLE, InputError, described, scalar, whole

_WORD = 0xFFFFFFFF  # the largest 32-bit word, and the mask that reduces a number modulo 2³²
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_KEYS = 2**20  # of one call of `split`
# The second multiplier is above 2³¹; modulo 2³² the negative number is the same.
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0x7FEB352D, 0x846CA68B - 2**32


def check_generators(generators: Sequence[torch.Generator]) -> Sequence[torch.Generator]:
    """Return `generators`, or raise `InputError` unless they are one `torch.Generator` for each seed.

    >>> len(check_generators([torch.Generator().manual_seed(seed) for seed in range(3)]))
    3
    """
    is_list = isinstance(generators, Sequence) and len(generators) > 0
    if not is_list or not all(isinstance(generator, torch.Generator) for generator in generators):
        remedy = "pass `[torch.Generator().manual_seed(seed) for seed in seeds]`"
        raise InputError("generators", "one torch.Generator for each seed", described(generators), remedy)
    return generators


def check_generator(generator: torch.Generator | None, *, required: bool = False) -> torch.Generator:
    """Return `generator`, or a new one with seed 0 in place of None; raise `InputError` for anything else.

    With `required` None raises too.

    >>> check_generator(None).initial_seed()
    0
    """
    if generator is None and not required:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        remedy = "pass `torch.Generator().manual_seed(seed)`"
        raise InputError("generator", "a torch.Generator", described(generator), remedy)
    return generator


def key(seeds: Tensor, step: Tensor | int) -> Int[Tensor, "2 seed"]:
    """Return the key of each seed at a step, two words, for `uniform` and `dropout`.

    Args:
        seeds: one whole number for each seed, [seed], on the device where the noise is used.
        step: one whole number; inside a captured or compiled step, a tensor on the same device.

    >>> key(torch.tensor([0, 7]), 3)[:, 1].equal(key(torch.tensor([7]), 3)[:, 0])
    True
    """
    if not _is_whole(seeds) or seeds.ndim != 1:
        raise InputError("seeds", "one whole number for each seed", described(seeds), "pass `torch.tensor(seeds)`")
    if isinstance(step, Tensor):
        if not _is_whole(step) or step.ndim:
            raise InputError("step", "one whole number", described(step), "pass an int or a tensor without axes")
        step = step.long()
    else:
        step = whole("step", step, low=-MAX_WHOLE - 1)
    seeds = seeds.long()
    if not seeds.is_cuda:
        return _words(seeds, step)
    # One launch instead of fifty. The compiler would make a number that changes symbolic, and cannot shift it.
    return torch.compile(_words)(seeds, torch.as_tensor(step, device=seeds.device))


def split(key: Int[Tensor, "2 seed"], count: int) -> Int[Tensor, "{count} 2 seed"]:
    """Return `count` independent keys, for the parts of a model that use the same sites.

    >>> split(key(torch.tensor([7]), 3), 4).unique().numel()
    8
    """
    key, count = _check_key(key), whole("count", count, high=MAX_KEYS)
    words = _fold(key, _WORD).expand(count, *key.shape).clone()
    return _fold(words, torch.arange(count, device=key.device)[:, None, None])


def uniform(shape: Sequence[int], *, key: Int[Tensor, "2 seed"], site: int) -> Float[Tensor, "seed ..."]:
    """Return numbers uniform in [0, 1), multiples of 2⁻²⁴, of `shape` for each seed.

    Args:
        shape: without the seed's axis.
        key: from `joma.noise.key`.
        site: a different number for every place where a model uses noise.

    >>> uniform((2,), key=key(torch.tensor([7]), 3), site=1)
    tensor([[0.1798, 0.8655]])
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise InputError("shape", "a sequence of whole numbers", described(shape), "pass `tuple(x.shape[1:])`")
    sizes = tuple(whole("shape", size, low=0) for size in shape)
    return (_bits(sizes, _check_key(key), site) >> 8).float() * 2.0**-24


def dropout(x: Float[Tensor, "seed ..."], p: float, *, key: Int[Tensor, "2 _"], site: int) -> Tensor:
    """Return x with each element set to zero with probability p, and the others divided by 1 − p.

    Args:
        x: with the seed's axis first.
        p: the probability of dropping an element.
        key: from `joma.noise.key`, for the same seeds in the same order.
        site: a different number for every place where a model uses noise.

    >>> dropout(torch.ones(1, 6), 0.5, key=key(torch.tensor([7]), 3), site=1)
    tensor([[0., 2., 0., 0., 0., 2.]])
    """
    p = p if type(p) is float else scalar("p", p)
    if not 0.0 <= p < 1.0:
        raise InputError("p", "in [0, 1)", p, "give the probability of dropping an element")
    key = _check_key(key)
    if not isinstance(x, Tensor) or x.ndim == 0 or x.dtype not in _FLOATS or x.device != key.device:
        expected = f"floating [seed, ...] on {key.device}, as the key"
        raise InputError("x", expected, described(x), "pass activations with the seed's axis first")
    if len(x) != key.shape[1]:
        raise InputError("key", f"of {len(x)} seeds, like x", key.shape[1], "create it from the same seeds, in order")
    retained = _bits(x.shape[1:], key, site) >= round(p * 2**32)
    return x * retained * (1.0 / (1.0 - p))


def _bits(shape: Sequence[int], key: Int[Tensor, "2 seed"], site: int) -> Int[Tensor, "seed ..."]:
    """Return 32 random bits for each element: its number within the seed, keyed twice and mixed twice."""
    count = math.prod(shape)
    site = site if type(site) is int and abs(site) <= MAX_WHOLE else whole("site", site, low=-MAX_WHOLE - 1)
    if count > _WORD:
        raise InputError("shape", "of at most 2³² elements for each seed", tuple(shape), "use several sites")
    first, second = _fold(key, site)[:, :, None]
    words = torch.arange(count, device=key.device) ^ first
    words = _mix(_mix(words).bitwise_xor_(second))
    return words.view(key.shape[1], *shape)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )


def _check_key(key: Any) -> Int[Tensor, "2 seed"]:
    if not _is_whole(key) or key.dtype != torch.int64 or key.ndim != 2 or key.shape[0] != 2:
        raise InputError("key", "two words for each seed, [2, seed]", described(key), "create it with `joma.noise.key`")
    return key


def _words(seeds: Tensor, step: Tensor | int) -> Int[Tensor, "2 seed"]:
    words = _mix(torch.arange(1, 3, device=seeds.device)[:, None].repeat(1, len(seeds)))
    for number in (seeds, seeds >> 32, step, step >> 32):
        words = _fold(words, number)
    return words


def _fold(words: Tensor, number: Tensor | int) -> Tensor:
    """Return new words that depend on the words and on the low 32 bits of the number."""
    return _mix((words + (number & _WORD)) & _WORD)


def _mix(words: Tensor) -> Tensor:
    """Scramble 32-bit words in place: each bit of the result depends on every bit of the word."""
    words ^= words >> 16
    words *= FIRST_MULTIPLIER
    words &= _WORD
    words ^= words >> 15
    words *= SECOND_MULTIPLIER
    words &= _WORD
    words ^= words >> 16
    return words
