"""Theorem 3: one hidden unit with uniform attention, fed by a mixture of isotropic distributions.

A component c has centre x̄_c and weight a_c = E[g | c] P[c]. Let n = ‖v‖ and r_c = v·x̄_c + ξ. The noise has scale σ, and
its component along v is σu with u of unit variance. The theorem then needs three moments of the activation:

    mean  E[φ(r + nσu)],     slope  E[φ'(r + nσu)] = θ1/n,     tilt  E[u φ'(r + nσu)] = θ2/(n²σ)

so that v̇ = Σ_c a_c (slope_c x̄_c + σ tilt_c v/n), the gradient of Σ_c a_c mean_c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from joma.arguments import InputError, broadcast, choice, in_range, instance, positive, real, scalar
from joma.theory.activations import Activation
from joma.theory.moments import Averages, Values, averages


def theta(
    activation: str | Activation,
    r: ArrayLike,
    norm: ArrayLike,
    sigma: ArrayLike = 1.0,
    *,
    noise: str = "gaussian",
    dimension: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return θ1 and θ2 of Theorem 3.

        θ1(r) = ∫ φ'(y) p((y − r)/‖v‖) dy,    θ2(r) = ∫ φ'(y) (y − r) p((y − r)/‖v‖) dy

    where p is the density of the noise along one direction. Closed forms are used where they exist, otherwise
    quadrature with an error below 1e-14 ‖v‖ for θ1 and 1e-14 ‖v‖² σ for θ2.

    Args:
        activation: a name of `ACTIVATIONS`, or an `Activation`.
        r: v·x̄ + ξ, the preactivation at the centre.
        norm: ‖v‖ > 0.
        sigma: standard deviation of the noise along one direction, > 0.
        noise: `gaussian`, or `ball` for noise uniform in a ball.
        dimension: number of dimensions of the ball; its radius is σ√(dimension + 2).

    Returns:
        θ1 and θ2, of the shape that `r`, `norm` and `sigma` broadcast to.

    >>> theta("relu", [-1.0, 0.0, 1.0], 2.0)[0].round(6)
    array([0.617075, 1.      , 1.382925])
    """
    r, norm, sigma = real("r", r), positive("norm", norm), positive("sigma", sigma)
    shape = broadcast(r=r, norm=norm, sigma=sigma)
    moments = averages(activation, noise, dimension)
    with np.errstate(all="ignore"):
        spread = norm * sigma
        if (spread == 0).any():
            raise InputError("norm`, `sigma", "such that their product is above 0", "an underflow", "rescale them")
        slope, tilt = moments.slopes(*np.broadcast_arrays(*np.atleast_1d(r, spread)))
        thetas = np.asarray(norm * slope.reshape(shape)), np.asarray(norm**2 * sigma * tilt.reshape(shape))
    in_range("r`, `norm`, `sigma", *thetas)
    return thetas


@dataclass(frozen=True)
class Unit:
    """A hidden unit and the mixture that is its input: what Theorem 3's flow depends on. Create it with `Unit.of`."""

    moments: Averages
    centres: Float[np.ndarray, "component token"]
    weights: Float[np.ndarray, " component"]
    sigma: float
    xi: float

    @classmethod
    def of(
        cls,
        activation: str | Activation,
        centres: ArrayLike,
        weights: ArrayLike,
        *,
        xi: ArrayLike = 0.0,
        sigma: ArrayLike = 1.0,
        noise: str = "gaussian",
    ) -> Unit:
        """Check the data of Theorem 3 and return a unit.

        Args:
            activation: a name of `ACTIVATIONS`, or an `Activation`.
            centres: x̄_c [component, token].
            weights: a_c = E[g | c] P[c] [component].
            xi: ξ, the contribution of the query's embedding and of a bias to the preactivation.
            sigma: standard deviation of the noise along one direction.
            noise: `gaussian`, or `ball` for noise uniform in a ball of radius σ√(tokens + 2).

        >>> Unit.of("relu", [[1.0, 0.0], [0.0, 1.0]], [1.0, -0.5]).centres.shape
        (2, 2)
        """
        x, a = real("centres", centres, ndim=2), real("weights", weights, ndim=1)
        if len(a) != len(x):
            got = f"{len(a)} weights and {len(x)} centres"
            raise InputError("weights", "one for each centre", got, "give a_c = E[g | c] P[c] for each component")
        moments = averages(activation, noise, x.shape[1])
        return cls(moments, x, a, scalar("sigma", sigma, above=0.0), scalar("xi", xi))

    @classmethod
    def check(cls, unit: Unit) -> Unit:
        """Return `unit`, or raise `InputError` if it is anything else.

        >>> Unit.check(Unit.of("relu", [[1.0]], [1.0])).sigma
        1.0
        """
        return instance("unit", unit, cls, "create it with `Unit.of`")

    def vectors(self, v: ArrayLike) -> Float[np.ndarray, "*batch token"]:
        """Return `v` [..., token] as float64, after a check that it matches the centres and is not zero."""
        array, tokens = real("v", v), self.centres.shape[1]
        if array.ndim == 0 or array.shape[-1] != tokens:
            expected = f"of {tokens} tokens on its last axis"
            raise InputError("v", expected, f"shape {array.shape}", "align it with `centres`")
        with np.errstate(over="ignore"):
            norm = np.linalg.norm(array, axis=-1)
        if not norm.all():
            raise InputError(
                "v", "other than the zero vector", "‖v‖ = 0", "the theorem divides by ‖v‖: start away from zero"
            )
        return array

    def seen(self, v: Float[np.ndarray, "*batch token"]) -> tuple[Values, Values]:
        """Return r_c = v·x̄_c + ξ and the spread nσ, both [..., component]."""
        r = v @ self.centres.T + self.xi
        return r, np.broadcast_to(self.sigma * np.linalg.norm(v, axis=-1, keepdims=True), r.shape)

    def terms(self, v: Float[np.ndarray, "*batch token"]) -> tuple[Values, Values]:
        """Return Σ a slope x̄ [..., token] and Σ a σ tilt/‖v‖ [..., 1]: the drive is first + second · v."""
        slope, tilt = self.moments.slopes(*self.seen(v))
        across = self.sigma * (tilt @ self.weights)[..., None] / np.linalg.norm(v, axis=-1, keepdims=True)
        return (self.weights * slope) @ self.centres, across

    def drive(self, v: Float[np.ndarray, "*batch token"]) -> Float[np.ndarray, "*batch token"]:
        """Return Theorem 3's right-hand side, unchecked."""
        pull, across = self.terms(v)
        return pull + across * v


def _plain(drive: Values, _v: Values, _decay: float) -> Values:
    return drive


def _sphere(drive: Values, v: Values, _decay: float) -> Values:
    direction = v / np.linalg.norm(v, axis=-1, keepdims=True)
    return drive - (drive * direction).sum(-1, keepdims=True) * direction


def _decayed(drive: Values, v: Values, decay: float) -> Values:
    return drive - decay * v


FLOWS: dict[str, Callable[[Values, Values, float], Values]] = {"plain": _plain, "sphere": _sphere, "decayed": _decayed}


def velocity(unit: Unit, v: ArrayLike, *, flow: str = "plain", decay: float = 0.0) -> np.ndarray:
    """Return v̇ of Theorem 3, for η_w = 1.

        plain:    v̇ = (1/‖v‖) Σ_c a_c θ1(r_c) x̄_c + (1/‖v‖³) Σ_c a_c θ2(r_c) v
        sphere:   the plain v̇ minus its component along v: the norm does not change
        decayed:  the plain v̇ minus λv

    Args:
        unit: from `Unit.of`.
        v: weights [..., token], not zero.
        flow: a name of `FLOWS`.
        decay: λ of the decayed flow.

    Returns:
        v̇, of the shape of `v`.

    >>> velocity(Unit.of("relu", [[1.0, 0.0]], [1.0]), [2.0, 0.0]).round(6)
    array([1.083315, 0.      ])
    """
    array = Unit.check(unit).vectors(v)
    flow_velocity, rate = choice("flow", flow, FLOWS), scalar("decay", decay, low=0.0)
    with np.errstate(all="ignore"):
        v_dot = np.asarray(flow_velocity(unit.drive(array), array, rate))
    in_range("v`, `unit`, `decay", v_dot)
    return v_dot


def offset_velocity(unit: Unit, v: ArrayLike) -> np.ndarray:
    """Return ξ̇ = Σ_c a_c θ1(r_c)/‖v‖ of Theorem 3 for η_w = 1, of shape `v.shape[:-1]`.

    >>> float(offset_velocity(Unit.of("relu", [[1.0, 0.0]], [0.5]), [0.0, 2.0]))
    0.25
    """
    array = Unit.check(unit).vectors(v)
    with np.errstate(all="ignore"):
        xi_dot = np.asarray(unit.moments.slopes(*unit.seen(array))[0] @ unit.weights)
    in_range("v`, `unit", xi_dot)
    return xi_dot


def objective(unit: Unit, v: ArrayLike, *, decay: float = 0.0) -> np.ndarray:
    """Return the objective Σ_c a_c E_c φ(v·x + ξ) − (λ/2)‖v‖², which the plain (λ = 0) and decayed flows climb.

    >>> round(float(objective(Unit.of("relu", [[1.0, 0.0]], [1.0]), [2.0, 0.0])), 6)
    2.166631
    """
    array, rate = Unit.check(unit).vectors(v), scalar("decay", decay, low=0.0)
    with np.errstate(all="ignore"):
        mean = unit.moments.mean(*unit.seen(array))
        value = np.asarray(mean @ unit.weights - rate / 2 * (array**2).sum(-1))
    in_range("v`, `unit`, `decay", value)
    return value


def fixed_centre(unit: Unit, v: ArrayLike, *, flow: str = "plain", decay: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return the rate and the centre μ such that Theorem 3's flow is v̇ = rate (μ − v), the form of Theorem 4.

        μ = Σ_c a_c θ1(r_c) x̄_c / (‖v‖ rate)
        plain:    rate = −Σ_c a_c θ2(r_c)/‖v‖³, so that μ = −‖v‖² Σ a θ1 x̄ / Σ a θ2
        sphere:   rate = v·Σ_c a_c θ1(r_c) x̄_c/‖v‖³
        decayed:  rate = λ − Σ_c a_c θ2(r_c)/‖v‖³

    v moves towards μ only where the rate is positive: for the plain flow where Σ a θ2 < 0. Elsewhere there is no such
    centre: μ is NaN, and the rate is returned as it is. Rate and centre change with v; at a critical point μ = v.

    Args:
        unit: from `Unit.of`.
        v: weights [..., token], not zero.
        flow: a name of `FLOWS`.
        decay: λ of the decayed flow.

    Returns:
        The rate [...] and μ [..., token].

    >>> rate, centre = fixed_centre(Unit.of("tanh", [[1.0, 0.0]], [1.0]), [1.0, 0.0])
    >>> float(rate.round(6)), centre.round(6)
    (0.266088, array([1.689663, 0.      ]))
    """
    array, damping = Unit.check(unit).vectors(v), scalar("decay", decay, low=0.0)
    with np.errstate(all="ignore"):
        pull, across = unit.terms(array)
        rates = {
            "plain": -across,
            "sphere": (array * pull).sum(-1, keepdims=True) / (array**2).sum(-1, keepdims=True),
            "decayed": damping - across,
        }
    rate = choice("flow", flow, rates)
    in_range("v`, `unit`, `decay", rate)
    with np.errstate(over="ignore"):  # as the rate goes to zero the centre goes to infinity
        centre = np.divide(pull, rate, out=np.full(array.shape, np.nan), where=rate > 0)
    return np.asarray(rate[..., 0]), centre
