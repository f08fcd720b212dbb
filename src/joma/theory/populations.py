"""All contexts that a source of tokens can produce, with their probabilities: averages without sampling.

The tokens of a context are independent given its class, so a context is a multiset of tokens, and there are few of
them. `population` enumerates them with their joint probabilities with the class; the Bayes risk follows from these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.special import gammaln, xlogy

from joma.arguments import InputError, check_size, instance, probabilities, scalar, sequence, whole, whole_array

MAX_CONTEXTS = 10**6
MAX_COUNT = 10**9  # of a token in a context: beyond it, logarithms of factorials lose too many digits


@dataclass(frozen=True, eq=False)
class Source:
    """Contexts of `length` tokens, each drawn independently from the distribution of the context's class.

    Attributes:
        p: P_c(l), probability of each token given the class, [class, token].
        length: number of tokens n of a context.
        share: probability that a context comes from this source, whatever its class; those of a population sum to 1.
    """

    p: ArrayLike
    length: int
    share: float = 1.0

    def __post_init__(self) -> None:
        """Check the source when it is created."""
        object.__setattr__(self, "p", probabilities("p", self.p, ndim=2))
        object.__setattr__(self, "length", whole("length", self.length))
        object.__setattr__(self, "share", scalar("share", self.share, low=0.0, high=1.0))


@dataclass(frozen=True, eq=False)
class Population:
    """Every context of positive probability; create it with `population`, or with `optimum.planted`.

    Attributes:
        counts: how often each token occurs in a context, [context, token].
        joint: P(context, class), [context, class].
    """

    counts: Int[np.ndarray, "context token"]
    joint: Float[np.ndarray, "context label"]

    @property
    def x(self) -> Float[np.ndarray, "context token"]:
        """Frequencies of the tokens, counts/n."""
        return self.counts / self.counts.sum(axis=1, keepdims=True)

    @property
    def weight(self) -> Float[np.ndarray, " context"]:
        """Probability of each context."""
        return self.joint.sum(axis=1)

    @property
    def posterior(self) -> Float[np.ndarray, "context label"]:
        """Return P(class | context)."""
        return self.joint / self.joint.sum(axis=1, keepdims=True)

    @property
    def bayes_risk(self) -> float:
        """Least cross entropy of any prediction of the class from the counts, E[−ln P(class | context)], in nats."""
        return float(-xlogy(self.joint, self.posterior).sum())


def multisets(tokens: int, length: int) -> Int[np.ndarray, "context token"]:
    """Return the counts of every multiset of `length` tokens, [multiset, token].

        number of multisets = (tokens + length − 1)! / (length! (tokens − 1)!)

    Args:
        tokens: number of different tokens.
        length: number of tokens in a multiset.

    >>> multisets(2, 3)
    array([[3, 0],
           [2, 1],
           [1, 2],
           [0, 3]])
    """
    tokens, length = whole("tokens", tokens), whole("length", length)
    number = math.comb(tokens + length - 1, length)
    if number > MAX_CONTEXTS:
        raise InputError("length", f"such that there are at most {MAX_CONTEXTS} multisets", number, "shorten contexts")
    check_size("length", (number, tokens))
    members = np.array(list(combinations_with_replacement(range(tokens), length)))
    return (members[:, :, None] == np.arange(tokens)).sum(axis=1)


def multiset_probabilities(counts: ArrayLike, p: ArrayLike) -> Float[np.ndarray, "context label"]:
    """Return the multinomial probability of each multiset given the class.

        P(counts | c) = n! Π_l P_c(l)^counts_l / counts_l!

    Args:
        counts: whole numbers, [multiset, token].
        p: P_c(l), [class, token].

    Returns:
        [multiset, class].

    >>> multiset_probabilities([[2, 0], [1, 1], [0, 2]], [[0.5, 0.5], [1.0, 0.0]])
    array([[0.25, 1.  ],
           [0.5 , 0.  ],
           [0.25, 0.  ]])
    """
    number, chance = whole_array("counts", counts, ndim=2, low=0, high=MAX_COUNT), probabilities("p", p, ndim=2)
    if number.shape[1] != chance.shape[1]:
        expected = f"[multiset, token] with {chance.shape[1]} tokens"
        raise InputError("counts", expected, f"shape {number.shape}", "match `p`")
    check_size("counts", (*number.shape, len(chance)))
    orders = gammaln(number.sum(axis=1) + 1) - gammaln(number + 1).sum(axis=1)
    return np.exp(orders[:, None] + xlogy(number[:, None], chance).sum(axis=-1))


def class_probabilities(prior: ArrayLike | None, classes: int) -> Float[np.ndarray, " label"]:
    """Return the probability π_c of each class, all positive; uniform if `prior` is None.

    >>> class_probabilities(None, 4)
    array([0.25, 0.25, 0.25, 0.25])
    """
    classes = whole("classes", classes)
    if prior is None:
        check_size("classes", (classes,))
        return np.full(classes, 1 / classes)
    chance = probabilities("prior", prior, ndim=1)
    if chance.shape != (classes,):
        raise InputError("prior", f"one number for each of {classes} classes", f"shape {chance.shape}", "match `p`")
    if (chance == 0).any():
        raise InputError("prior", "above 0 everywhere", "a probability of 0", "leave out classes that do not occur")
    return chance


def population(sources: Sequence[Source], prior: ArrayLike | None = None) -> Population:
    """Enumerate the contexts of a mixture of sources, with their joint probabilities with the class.

        P(counts, c) = π_c Σ_s share_s P_s(counts | c)

    A multiset that several sources produce is one context: who sees it does not know where it came from. Contexts of
    probability zero are left out.

    Args:
        sources: with the same tokens and classes; their shares sum to 1.
        prior: π_c, probability of each class, all positive; uniform by default.

    Returns:
        A `Population`.

    >>> world = population([Source([[0.5, 0.5], [1.0, 0.0]], length=2)])
    >>> world.counts.tolist(), world.posterior[0].tolist(), round(world.bayes_risk, 4)
    ([[2, 0], [1, 1], [0, 2]], [0.2, 0.8], 0.3128)
    """
    listed = [instance("sources", source, Source, "pass `Source(p, length)`") for source in _listed(sources)]
    shapes = {np.shape(source.p) for source in listed}
    if len(shapes) > 1:
        raise InputError("sources", "of the same classes and tokens", f"shapes {sorted(shapes)}", "match their `p`")
    probabilities("sources' shares", [source.share for source in listed])
    ((classes, tokens),) = shapes
    chance = class_probabilities(prior, classes)
    contexts, joints = [], []
    for length in sorted({source.length for source in listed}):
        counts = multisets(tokens, length)
        parts = [
            source.share * multiset_probabilities(counts, source.p) for source in listed if source.length == length
        ]
        contexts.append(counts)
        joints.append(chance * sum(parts))
    counts, joint = np.concatenate(contexts), np.concatenate(joints)
    possible = joint.sum(axis=1) > 0
    return Population(counts[possible], joint[possible])


def _listed(sources: Sequence[Source]) -> list[Source]:
    listed = sequence("sources", sources, "a list of `Source`")
    if not listed:
        raise InputError("sources", "at least one", "none", "give a list of `Source`")
    return listed
