"""Averages of an activation and of its slope over noise along one direction: the ingredients of Theorem 3.

The preactivation is r + spread·u, where u has unit variance. The mean is E[φ], the slope E[φ'] and the tilt E[uφ'].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import beta, betainc, ndtr

from joma.arguments import InputError, choice, whole
from joma.theory.activations import LEAK, Activation, named, normal_density

Values = Float[np.ndarray, "..."]
Slopes = tuple[Values, Values]
Averaged = Callable[[Values, Values], Slopes]  # from (r, spread) to slope and tilt
Curved = tuple[Values, Values, Values, Values, Values]


class Averages(NamedTuple):
    """The moments of one activation under one noise, as functions of r and of the spread.

    Attributes:
        mean: returns E[φ].
        slopes: returns E[φ'] and E[uφ'].
        curved: returns those two, then E[φ''], E[uφ''] and E[u²φ'']; the last three are accurate to about 1e-10.
    """

    mean: Callable[[Values, Values], Values]
    slopes: Averaged
    curved: Callable[[Values, Values], Curved]


@dataclass(frozen=True)
class NoiseLaw:
    """The distribution of the noise along one direction, at unit variance, in a coordinate with an analytic density.

    Attributes:
        position: maps the coordinate to u.
        coordinate: the inverse map, clipped to the support.
        density: the density in that coordinate.
        breaks: ends of the panels that resolve the density.
        step: slope and tilt of ReLU in closed form.
    """

    position: Callable[[Values], Values]
    coordinate: Callable[[Values], Values]
    density: Callable[[Values], Values]
    breaks: tuple[float, ...]
    step: Averaged


def _gaussian(_dimension: int | None) -> NoiseLaw:
    def step(r: Values, spread: Values) -> Slopes:
        x = r / spread
        return np.asarray(ndtr(x)), normal_density(x)

    # 2e-19 of the mass lies beyond 9
    return NoiseLaw(np.asarray, lambda u: np.clip(u, -9.0, 9.0), normal_density, (-9.0, -3.0, 3.0, 9.0), step)


def _ball(dimension: int | None) -> NoiseLaw:
    """Return the law of a uniform ball in d dimensions: density ∝ (1 − u²/R²)^((d−1)/2), R² = d + 2 for unit variance.

    With u = R sin α it is ∝ cos^d α, without the branch points at the edge that it has in u for even d.
    """
    if dimension is None:
        raise InputError("dimension", "given for ball noise", "None", "pass the number of dimensions of the ball")
    d = whole("dimension", dimension)
    radius, half = np.sqrt(d + 2.0), (d + 1) / 2
    constant = 1.0 / beta(0.5, half)

    def step(r: Values, spread: Values) -> Slopes:
        edge = np.clip(-r / (spread * radius), -1.0, 1.0)
        tilt = radius * constant / (d + 1) * ((1.0 - edge) * (1.0 + edge)) ** half
        return np.asarray(betainc(half, half, (1.0 - edge) / 2)), np.asarray(tilt)

    def coordinate(u: Values) -> Values:
        return np.asarray(np.arcsin(np.clip(u / radius, -1.0, 1.0)))

    breaks = sorted({float(coordinate(np.asarray(3.0 * k))) for k in range(-3, 4)})
    return NoiseLaw(lambda a: radius * np.sin(a), coordinate, lambda a: constant * np.cos(a) ** d, tuple(breaks), step)


NOISES: dict[str, Callable[[int | None], NoiseLaw]] = {"gaussian": _gaussian, "ball": _ball}


def _linear(r: Values, _spread: Values) -> Slopes:
    return np.ones(r.shape), np.zeros(r.shape)


def _rectified(leak: float, step: Averaged, r: Values, spread: Values) -> Slopes:
    slope, tilt = step(r, spread)
    return leak + (1 - leak) * slope, (1 - leak) * tilt


def _piecewise_mean(slopes: Averaged, r: Values, spread: Values) -> Values:
    """Return E[φ] from slope and tilt, since φ(y) = yφ'(y) for linear, ReLU and leaky ReLU."""
    slope, tilt = slopes(r, spread)
    return r * slope + spread * tilt


def _gelu(r: Values, spread: Values) -> Slopes:
    """Return slope and tilt of GELU under Gaussian noise, from a normal density of variance q = 1 + spread²."""
    q = 1.0 + spread**2
    z = r / np.sqrt(q)
    e = normal_density(z) / np.sqrt(q)
    return ndtr(z) + r * e / q, spread * e * (1.0 + 1.0 / q - (r / q) ** 2)


def _gelu_mean(r: Values, spread: Values) -> Values:
    q = 1.0 + spread**2
    z = r / np.sqrt(q)
    return r * ndtr(z) + spread**2 * normal_density(z) / np.sqrt(q)


# Where φ' of the smooth activations varies: their poles are π/2 or more from the axis, and their tails vanish at 40.
_BENDS = (-40.0, -12.0, -4.0, 0.0, 4.0, 12.0, 40.0)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


@dataclass(frozen=True)
class _Quadrature:
    """Gauss–Legendre quadrature on panels that end at the breaks of the law and at the bends and kinks of φ.

    Such panels keep every pole of SiLU and tanh so far away that the error of 24 nodes is 1e-16 or less, however wide
    or narrow the noise is. Gauss–Hermite nodes depend on the noise alone, and miss the variation of φ' if nσ is large.
    """

    activation: Activation
    law: NoiseLaw

    def nodes(self, r: Values, spread: Values) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the mask [..., panel] of the panels of positive length, and u, mass and y [panel in it, node]."""
        bends = np.array([*_BENDS, *self.activation.kinks])
        bend_ends = self.law.coordinate((bends - r[..., None]) / spread[..., None])
        law_ends = np.broadcast_to(np.array(self.law.breaks), (*r.shape, len(self.law.breaks)))
        ends = np.sort(np.concatenate([bend_ends, law_ends], axis=-1), axis=-1)
        half = (ends[..., 1:] - ends[..., :-1]) / 2
        mask = half > 0
        coordinate = (ends[..., 1:] - half)[mask][:, None] + half[mask][:, None] * _NODES
        u, mass = self.law.position(coordinate), self.law.density(coordinate) * half[mask][:, None] * _WEIGHTS
        panel_r = np.broadcast_to(r[..., None], mask.shape)[mask]
        panel_spread = np.broadcast_to(spread[..., None], mask.shape)[mask]
        return mask, u, mass, panel_r[:, None] + panel_spread[:, None] * u

    def slopes(self, r: Values, spread: Values) -> Slopes:
        mask, u, mass, y = self.nodes(*np.broadcast_arrays(r, spread))
        weighted = self.activation.slope(y) * mass
        return _sum_panels(mask, weighted.sum(-1)), _sum_panels(mask, (weighted * u).sum(-1))

    def mean(self, r: Values, spread: Values) -> Values:
        mask, _, mass, y = self.nodes(*np.broadcast_arrays(r, spread))
        return _sum_panels(mask, (self.activation.value(y) * mass).sum(-1))

    def curved(self, r: Values, spread: Values) -> Curved:
        if not self.activation.smooth:  # φ'' has a point mass at a kink
            return _differences(self.slopes, r, spread)
        mask, u, mass, y = self.nodes(*np.broadcast_arrays(r, spread))
        weighted = self.activation.slope(y) * mass
        curvature = (self.activation.slope(y + _STEP) - self.activation.slope(y - _STEP)) * mass / (2 * _STEP)
        slope, mean_curvature = (_sum_panels(mask, term.sum(-1)) for term in (weighted, curvature))
        tilt, curvature_tilt = (_sum_panels(mask, (term * u).sum(-1)) for term in (weighted, curvature))
        return slope, tilt, mean_curvature, curvature_tilt, _sum_panels(mask, (curvature * u**2).sum(-1))


def _sum_panels(mask: np.ndarray, panels: np.ndarray) -> Values:
    """Return the sums over the last axis of `mask`, from the values of the panels in that mask."""
    sums = np.zeros(mask.shape)
    sums[mask] = panels
    return sums.sum(-1)


_STEP = 1e-5  # truncation and rounding errors of a central difference are then of the same size


def _differences(slopes: Averaged, r: Values, spread: Values) -> Curved:
    """Return the curved moments: E[φ''] is ∂slope/∂r, and E[uφ''] and E[u²φ''] are ∂tilt/∂r and ∂tilt/∂spread."""
    h = _STEP * spread
    shifted = np.stack([r, r + h, r - h, r, r]), np.stack([spread, spread, spread, spread + h, spread - h])
    slope, tilt = slopes(*shifted)
    first, second, third = slope[1] - slope[2], tilt[1] - tilt[2], tilt[3] - tilt[4]
    return slope[0], tilt[0], first / (2 * h), second / (2 * h), third / (2 * h)


def averages(activation: str | Activation, noise: str = "gaussian", dimension: int | None = None) -> Averages:
    """Return the functions from (r, spread) to E φ, and to E φ' and E uφ', at r + spread·u.

    Closed forms are used for linear, ReLU and leaky ReLU under either noise and for GELU under Gaussian noise, and
    quadrature for the others.

    >>> averages("relu").mean(np.zeros(1), np.ones(1)).round(6)
    array([0.398942])
    """
    phi, law = named(activation), choice("noise", noise, NOISES)(dimension)
    piecewise = {"linear": _linear, "relu": law.step, "leaky_relu": partial(_rectified, LEAK, law.step)}
    if phi.name in piecewise:
        slopes = piecewise[phi.name]
        return Averages(partial(_piecewise_mean, slopes), slopes, partial(_differences, slopes))
    if (phi.name, noise) == ("gelu", "gaussian"):
        return Averages(_gelu_mean, _gelu, partial(_differences, _gelu))
    quadrature = _Quadrature(phi, law)
    return Averages(quadrature.mean, quadrature.slopes, quadrature.curved)
