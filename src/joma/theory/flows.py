"""The reduced flows of Theorems 2 and 4, integrated: the counterparts of the closed forms in `growth`.

`block_flow` has the flow of the whole block, of which these are limits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from joma.arguments import aligned, scalar
from joma.theory.integration import DEFAULT_SOLVER, Solution, Solver, integrate


def linear(delta: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.0, *, solver: Solver = DEFAULT_SOLVER) -> Solution:
    """Integrate Theorem 2's flow: linear activation, one hidden unit, constant gradient.

        v̇ = Δ ∘ exp(v²/2)

    `growth.linear` is its closed form. All components stop at the first blow-up.

    Args:
        delta: salience Δ of each token.
        times: as in `integrate`.
        v0: start, broadcast against `delta`.
        solver: method and tolerances.

    Returns:
        A `Solution`, with states [time, *token].

    >>> round(linear([0.9, 0.7], times=9.0).blow_up, 6)  # sqrt(π/2)/0.9
    1.392571
    """
    salience, start = aligned(delta=delta, v0=v0)
    return integrate(lambda _, v: salience * np.exp(v**2 / 2), start, times, solver)


def nonlinear(mu: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.05, *, solver: Solver = DEFAULT_SOLVER) -> Solution:
    """Integrate Theorem 4's flow: nonlinear activation near a centre μ, with attention folded into the weights.

        v̇ = (μ − v) ∘ exp(v²/2)

    `growth.nonlinear` inverts its quadrature.

    Args:
        mu: centre, one component for each token.
        times: as in `integrate`.
        v0: start, broadcast against `mu`.
        solver: method and tolerances.

    Returns:
        A `Solution`, with states [time, *token].

    >>> nonlinear([1.0, 2.0], times=50.0).states.round(9)
    array([[1., 2.]])
    """
    centre, start = aligned(mu=mu, v0=v0)
    return integrate(lambda _, v: (centre - v) * np.exp(v**2 / 2), start, times, solver)


def softmax_nonlinear(
    mu: ArrayLike,
    times: ArrayLike,
    v0: ArrayLike = 0.05,
    *,
    temperature: float = 2.0,
    solver: Solver = DEFAULT_SOLVER,
) -> Solution:
    """Integrate Theorem 4's flow with normalised attention.

        v̇ = (μ − v) ∘ softmax(v²/T)

    `growth.softmax_nonlinear` solves it by a change of time.

    Args:
        mu: centre, [..., token]; softmax is over the last axis.
        times: as in `integrate`.
        v0: start, broadcast against `mu`.
        temperature: T.
        solver: method and tolerances.

    Returns:
        A `Solution`, with states [time, ..., token].

    >>> softmax_nonlinear([1.0, 2.0], times=200.0).states.round(6)
    array([[1., 2.]])
    """
    centre, start = aligned(mu=mu, v0=v0)
    divisor = scalar("temperature", temperature, above=0.0)
    return integrate(lambda _, v: (centre - v) * softmax(v**2 / divisor, axis=-1), start, times, solver)
