"""The populations of the study `ladder`: the block holds the Bayes posterior of some, and of others it cannot.

*overlap*: every token occurs in every class. *separable*: the tokens that are not common occur in one class each.
*lengths*: contexts of one token, or of several; normalised attention does not see how many. *noise*: in some contexts a
third of the tokens is equally likely in all classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import root_scalar
from scipy.special import softmax

from joma.arguments import InputError, real, scalar, whole
from joma.probes.entropy import shannon_entropy
from joma.theory.optimum import planted
from joma.theory.populations import Population, Source, multiset_probabilities, multisets, population

WORLDS = ("overlap", "separable", "lengths", "noise")
# Kinds of random worlds: tokens independent given the class; then with two lengths, with noise, or with both; and a
# world whose optimum is planted.
KINDS = ("independent", "lengths", "noise", "lengths and noise", "planted")

Distributions = Float[np.ndarray, "label token"]


@dataclass(frozen=True)
class WorldConfig:
    """The tokens, classes and contexts of the worlds, and how many worlds are predicted."""

    tokens: int = 6
    """A third of them, the last ones, are common: they have the same exponent in all classes."""
    classes: int = 2
    length: int = 4
    """Tokens of a context."""
    scale: float = 0.7
    """P_c(l) ∝ exp(scale · normal number)."""
    long_length: int = 5
    """Tokens of a context in *lengths* that is not of one token."""
    short: float = 0.5
    """Share of contexts of one token in *lengths*."""
    noisy: float = 0.5
    """Share of contexts in *noise* in which a third of the tokens is equally likely in all classes."""
    shares: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 0.9)
    """Shares of contexts of one token at which the optimum of *lengths* is predicted."""
    planted: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    """Entropies of attention, divided by ln M, at which an optimum is planted."""
    draws: int = 20
    """Random worlds of each seed."""


class World(NamedTuple):
    """A population, what kind it is, and the logits of its optimum if they were planted."""

    population: Population
    kind: str
    planted: Float[np.ndarray, " token"] | None = None


def check(config: WorldConfig) -> None:
    """Raise `InputError` if the worlds cannot be drawn with this config."""
    whole("tokens", config.tokens, low=3)
    for name in ("classes", "length", "long_length"):
        whole(name, getattr(config, name), low=2)
    if config.tokens - config.tokens // 3 < config.classes:
        remedy = "use more tokens: two thirds of them are divided among the classes"
        raise InputError("tokens", f"enough for {config.classes} classes", config.tokens, remedy)
    scalar("scale", config.scale, above=0.0)
    whole("draws", config.draws)
    for name in ("short", "noisy"):
        scalar(name, getattr(config, name), low=0.0, high=1.0)
    if real("shares", config.shares, ndim=1, low=0.0).max() >= 1:
        remedy = "leave it out: attention has no effect on contexts of one token"
        raise InputError("shares", "below 1", max(config.shares), remedy)
    entropies = real("planted", config.planted, ndim=1, high=1.0)
    if entropies.min() <= 0:
        raise InputError("planted", "above 0", entropies.min(), "attention has this share of the largest entropy")


def draw_exponents(
    classes: int, tokens: int, scale: float, common: int, generator: np.random.Generator
) -> Distributions:
    """Return normal exponents of P_c(l), [class, token]; the last `common` tokens have the same in all classes."""
    exponents = scale * generator.normal(size=(classes, tokens))
    exponents[:, tokens - common :] = exponents[0, tokens - common :]
    return exponents


def named_worlds(config: WorldConfig, generator: np.random.Generator) -> tuple[dict[str, Population], Distributions]:
    """Return the populations by the names of `WORLDS`, and the P_c(l) of *overlap*; all have the same exponents."""
    common = config.tokens // 3
    exponents = draw_exponents(config.classes, config.tokens, config.scale, common, generator)
    p = softmax(exponents, axis=1)
    sources = {
        "overlap": [Source(p, config.length)],
        "separable": [Source(_separated(p, common), config.length)],
        "lengths": two_lengths(p, config.long_length, config.short),
        "noise": noisy_sources(exponents, config.length, config.noisy),
    }
    return {name: population(sources[name]) for name in WORLDS}, p


def _separated(p: Distributions, common: int) -> Distributions:
    """Return P_c(l) with every token but the last `common` ones left in one class only, in turn."""
    classes, tokens = p.shape
    other_class = np.arange(tokens) % classes != np.arange(classes)[:, None]
    other_class[:, tokens - common :] = False
    separated = np.where(other_class, 0.0, p)
    return separated / separated.sum(axis=1, keepdims=True)


def two_lengths(p: Distributions, length: int, short: float) -> list[Source]:
    """Return sources of contexts of one token, with probability `short`, and of `length` tokens."""
    return [Source(p, 1, short), Source(p, length, 1 - short)]


def noisy_sources(exponents: Distributions, length: int, noisy: float, short: float = 0.0) -> list[Source]:
    """Return sources of contexts; with probability `noisy` a third of the tokens is equally likely in all classes."""
    silent = exponents.copy()
    third = max(1, exponents.shape[1] // 3)
    silent[:, :third] = exponents[:, :third].mean(axis=0)
    parts = [(softmax(exponents, axis=1), 1 - noisy), (softmax(silent, axis=1), noisy)]
    lengths = [(1, short), (length, 1 - short)]
    return [Source(p, n, share * part) for p, share in parts for n, part in lengths if share * part > 0]


def short_worlds(config: WorldConfig, p: Distributions) -> list[World]:
    """Return *lengths* at every share of contexts of one token."""
    return [World(population(two_lengths(p, config.long_length, share)), "lengths") for share in config.shares]


def planted_world(shape: tuple[int, int, int], scale: float, entropy: float, generator: np.random.Generator) -> World:
    """Return a world whose optimum has attention of a given entropy, divided by ln M.

    The tokens of a context are independent, whatever its class, and a block draws the class: `optimum.planted`. Its
    weights are of the size of naive Bayes', n · scale · normal numbers; its logits have a random direction, and the
    length at which attention has this entropy.

    Args:
        shape: numbers of classes, tokens, and tokens of a context.
        scale: of the weights, and of the exponents of the tokens' probabilities.
        entropy: of the planted attention, in (0, 1].
        generator: draws probabilities, weights and logits.
    """
    classes, tokens, length = shape
    counts = multisets(tokens, length)
    frequent = softmax(scale * generator.normal(size=(1, tokens)), axis=1)
    v, direction = length * scale * generator.normal(size=(tokens, classes)), generator.normal(size=tokens)
    z = direction * _length_of_entropy(direction, entropy)
    return World(planted(counts, multiset_probabilities(counts, frequent)[:, 0], v, z), "planted", z)


def _length_of_entropy(direction: Float[np.ndarray, " token"], entropy: float) -> float:
    """Return the factor of the logits at which the entropy of their softmax is this share of the largest."""
    if entropy == 1:
        return 0.0
    bracket = (0.0, 1e4)
    return float(
        root_scalar(lambda factor: float(relative_entropy(factor * direction)) - entropy, bracket=bracket).root
    )


def planted_worlds(config: WorldConfig, generator: np.random.Generator) -> list[World]:
    """Return a world for each planted entropy."""
    shape = (config.classes, config.tokens, config.length)
    return [planted_world(shape, config.scale, entropy, generator) for entropy in config.planted]


def random_worlds(config: WorldConfig, generator: np.random.Generator) -> list[World]:
    """Return random worlds of all kinds: none of the config's sizes matters but their number."""
    return [_random_world(generator) for _ in range(config.draws)]


def _random_world(generator: np.random.Generator) -> World:
    kind = KINDS[generator.integers(len(KINDS))]
    tokens, classes, length = (int(generator.integers(*ends)) for ends in ((4, 8), (2, 4), (2, 5)))
    scale, entropy = generator.uniform(0.4, 1.2), generator.uniform(0.3, 1.0)
    short, noisy = generator.uniform(0.05, 0.9), generator.uniform(0.1, 0.9)
    common = int(generator.integers(tokens // 2 + 1))
    if kind == "planted":
        return planted_world((classes, tokens, length), scale, entropy, generator)
    exponents = draw_exponents(classes, tokens, scale, common, generator)
    sources: Sequence[Source] = noisy_sources(
        exponents, length, noisy if "noise" in kind else 0.0, short if "lengths" in kind else 0.0
    )
    return World(population(sources), kind)


def relative_entropy(z: Float[np.ndarray, "*time token"]) -> Float[np.ndarray, "*time"]:
    """Return the entropy of the attention softmax(z) over all tokens, divided by its largest, ln M."""
    entropy = shannon_entropy(torch.from_numpy(np.asarray(z)).softmax(-1)).numpy()
    return np.asarray(entropy / np.log(np.shape(z)[-1]))  # not a NumPy number, for one time
