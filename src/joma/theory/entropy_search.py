"""Searches for attention of low entropy: the oracles of `joma.theory.entropy_floor`, which use none of its bounds.

`lowest_row` minimises the entropy of one row over the sphere of logits by BFGS, `lowest_matrix` the mean entropy of the
rows of a matrix over the ball of a spectral norm by a projected gradient. Both start at random.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize

from joma.arguments import check_size, instance, scalar, whole
from joma.theory.entropy_floor import softmax_entropy, softmax_entropy_gradient

MAX_NORM = 500.0  # beyond it the least entropy, of the order of e^−σ, is no longer a normal number
CONVERGED = 1e-7  # size of the projected gradient, in nats, below which a search counts as converged
_ARMIJO = 1e-4  # share of the decrease that the gradient promises which a step must achieve
_STEPS = (1e-3, 1e6)  # least and largest step
_HALVINGS = 40


class LowRows(NamedTuple):
    """Where the searches for a row of low entropy ended."""

    entropy: Float[np.ndarray, " start"]
    logits: Float[np.ndarray, "start key"]  # centred, of the given norm


class LowMatrices(NamedTuple):
    """Where the searches for a matrix of low mean entropy ended."""

    entropy: Float[np.ndarray, " start"]  # mean over rows
    logits: Float[np.ndarray, "start row key"]
    gradient: Float[np.ndarray, " start"]  # size of the projected gradient

    @property
    def converged(self) -> Bool[np.ndarray, " start"]:
        """Whether the projected gradient is below `CONVERGED`."""
        return self.gradient < CONVERGED


def lowest_row(logit_norm: float, keys: int, *, starts: int, generator: np.random.Generator) -> LowRows:
    """Minimise the entropy of softmax(z) over centred logits of norm σ by BFGS, from random starts.

        z = σ (y − ȳ)/‖y − ȳ‖,    y ~ N(0, I) at the start;    ln H is minimised, so that a small H keeps its digits

    Args:
        logit_norm: σ, positive.
        keys: T, number of logits, at least 2.
        starts: number of searches.
        generator: of the starts.

    >>> rows = lowest_row(4.0, 10, starts=5, generator=np.random.default_rng(0))
    >>> rows.entropy.min().round(6), np.sort(rows.logits[rows.entropy.argmin()]).round(3)[[0, -2, -1]]
    (np.float64(0.618855), array([-0.422, -0.422,  3.795]))
    """
    norm, count = scalar("logit_norm", logit_norm, above=0.0, high=MAX_NORM), whole("keys", keys, low=2)
    number = whole("starts", starts)
    check_size("keys", (count, count))
    check_size("starts", (number, count))
    random = _checked_generator(generator)

    def objective(y: np.ndarray) -> tuple[float, np.ndarray]:
        centred = y - y.mean()
        length = np.linalg.norm(centred)
        direction = centred / length
        entropy = float(softmax_entropy(norm * direction))
        gradient = norm * softmax_entropy_gradient(norm * direction) / entropy
        gradient = gradient - gradient.mean()
        return float(np.log(entropy)), (gradient - direction * (direction @ gradient)) / length

    ends = []
    for start in random.normal(size=(number, count)):
        end = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}).x
        ends.append(norm * (end - end.mean()) / np.linalg.norm(end - end.mean()))
    logits = np.stack(ends)
    return LowRows(softmax_entropy(logits), logits)


def lowest_matrix(
    spectral_norm: float, keys: int, *, starts: int, generator: np.random.Generator, iterations: int = 3000
) -> LowMatrices:
    """Minimise the mean entropy of the rows of T×T logits over ‖A‖₂ ≤ σ by a projected gradient, from random starts.

        A ← Π(A − η ∇),    Π clips the singular values at σ,    η by Barzilai and Borwein, halved until the mean falls

    Args:
        spectral_norm: σ, positive.
        keys: T, number of rows and of keys, at least 2.
        starts: number of searches, which run side by side; their first matrices are orthogonal times σ.
        generator: of the starts.
        iterations: the most steps of a search.

    >>> found = lowest_matrix(4.0, 3, starts=8, generator=np.random.default_rng(0))
    >>> found.entropy.min().round(4), bool(found.converged[found.entropy.argmin()])
    (np.float64(0.1773), True)
    """
    norm, count = scalar("spectral_norm", spectral_norm, above=0.0, high=MAX_NORM), whole("keys", keys, low=2)
    number, most = whole("starts", starts), whole("iterations", iterations)
    check_size("starts", (number, count, count))
    left, _, right = np.linalg.svd(_checked_generator(generator).normal(size=(number, count, count)))
    return _descend(norm * left @ right, norm, most)


def _descend(logits: Float[np.ndarray, "start row key"], norm: float, iterations: int) -> LowMatrices:
    """Descend from every start at once; a start that has converged stays where it is."""
    entropy, gradient = _mean_entropy(logits), _mean_gradient(logits)
    step = np.full(len(logits), float(logits.shape[-1]))
    size = _projected_size(logits, gradient, norm)
    for _ in range(iterations):
        active = np.flatnonzero(size >= CONVERGED / 10)
        if not active.size:
            break
        before = logits[active]
        moved = _line_search(before, gradient[active], entropy[active], step[active], norm)
        change, slope = moved - before, _mean_gradient(moved) - gradient[active]
        step[active] = np.clip(_square(change) / np.maximum((change * slope).sum(axis=(-2, -1)), 1e-300), *_STEPS)
        logits[active], entropy[active], gradient[active] = moved, _mean_entropy(moved), gradient[active] + slope
        size[active] = _projected_size(moved, gradient[active], norm)
    return LowMatrices(entropy, logits, size)


def _line_search(
    logits: Float[np.ndarray, "start row key"],
    gradient: Float[np.ndarray, "start row key"],
    entropy: Float[np.ndarray, " start"],
    step: Float[np.ndarray, " start"],
    norm: float,
) -> Float[np.ndarray, "start row key"]:
    """Return the projected point of each start, or one on the way to it at which the mean entropy is lower."""
    direction = _clipped(logits - step[:, None, None] * gradient, norm) - logits
    promised = (direction * gradient).sum(axis=(-2, -1))
    share = np.ones(len(logits))
    for _ in range(_HALVINGS):
        moved = logits + share[:, None, None] * direction  # the ball is convex: it stays inside
        too_high = _mean_entropy(moved) > entropy + _ARMIJO * share * promised + 1e-15
        if not too_high.any():
            break
        share = np.where(too_high, share / 2, share)
    return logits + share[:, None, None] * direction


def _clipped(logits: Float[np.ndarray, "start row key"], norm: float) -> Float[np.ndarray, "start row key"]:
    """Return the nearest matrices of spectral norm at most `norm`."""
    left, values, right = np.linalg.svd(logits)
    return (left * np.minimum(values, norm)[:, None, :]) @ right


def _projected_size(logits: np.ndarray, gradient: np.ndarray, norm: float) -> Float[np.ndarray, " start"]:
    """Return by how much a step of the size of the number of rows moves each matrix, over that size."""
    rows = logits.shape[-1]
    return np.sqrt(_square(_clipped(logits - rows * gradient, norm) - logits)) / rows


def _square(matrices: Float[np.ndarray, "start row key"]) -> Float[np.ndarray, " start"]:
    return (matrices**2).sum(axis=(-2, -1))


def _mean_entropy(logits: Float[np.ndarray, "start row key"]) -> Float[np.ndarray, " start"]:
    return softmax_entropy(logits).mean(axis=-1)


def _mean_gradient(logits: Float[np.ndarray, "start row key"]) -> Float[np.ndarray, "start row key"]:
    return softmax_entropy_gradient(logits) / logits.shape[-2]


def _checked_generator(generator: np.random.Generator) -> np.random.Generator:
    return instance("generator", generator, np.random.Generator, "pass `numpy.random.default_rng(seed)`")
