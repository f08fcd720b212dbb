"""Averages of an activation and of its slope over noise along one direction: what Theorem 3 is made of.

For a preactivation r + spread·u, where u has unit variance, the mean E[φ], the slope E[φ'] and the tilt E[uφ'].
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
        mean: to E[φ].
        slopes: to E[φ'] and E[uφ'].
        curved: to those two, then E[φ''], E[uφ''] and E[u²φ''], the last three to about 1e-10.
    """

    mean: Callable[[Values, Values], Values]
    slopes: Averaged
    curved: Callable[[Values, Values], Curved]


@dataclass(frozen=True)
class Law:
    """The noise along one direction, at unit variance, as a function of a coordinate in which its mass is analytic.

    Attributes:
        place: from the coordinate to u.
        coordinate: the inverse, clipped to the support.
        mass: the density in that coordinate.
        breaks: ends of the panels that resolve the mass.
        step: slope and tilt of ReLU in closed form.
    """

    place: Callable[[Values], Values]
    coordinate: Callable[[Values], Values]
    mass: Callable[[Values], Values]
    breaks: tuple[float, ...]
    step: Averaged


def _gaussian(_dimension: int | None) -> Law:
    def step(r: Values, spread: Values) -> Slopes:
        x = r / spread
        return np.asarray(ndtr(x)), normal_density(x)

    # 2e-19 of the mass lies beyond 9
    return Law(np.asarray, lambda u: np.clip(u, -9.0, 9.0), normal_density, (-9.0, -3.0, 3.0, 9.0), step)


def _ball(dimension: int | None) -> Law:
    """A uniform ball in d dimensions, whose density along one is ∝ (1 − u²/R²)^((d−1)/2), R² = d + 2 for unit variance.

    With u = R sin α it is ∝ cos^d α, without the branch points that even d puts at the edge.
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
    return Law(lambda a: radius * np.sin(a), coordinate, lambda a: constant * np.cos(a) ** d, tuple(breaks), step)


NOISES: dict[str, Callable[[int | None], Law]] = {"gaussian": _gaussian, "ball": _ball}


def _linear(r: Values, _spread: Values) -> Slopes:
    return np.ones(r.shape), np.zeros(r.shape)


def _rectified(leak: float, step: Averaged, r: Values, spread: Values) -> Slopes:
    slope, tilt = step(r, spread)
    return leak + (1 - leak) * slope, (1 - leak) * tilt


def _piecewise_mean(slopes: Averaged, r: Values, spread: Values) -> Values:
    """φ(y) = yφ'(y) for linear, ReLU and leaky ReLU."""
    slope, tilt = slopes(r, spread)
    return r * slope + spread * tilt


def _gelu(r: Values, spread: Values) -> Slopes:
    """Gaussian noise: the product of two normal densities is one, of variance q = 1 + spread², times E."""
    q = 1.0 + spread**2
    z = r / np.sqrt(q)
    e = normal_density(z) / np.sqrt(q)
    return ndtr(z) + r * e / q, spread * e * (1.0 + 1.0 / q - (r / q) ** 2)


def _gelu_mean(r: Values, spread: Values) -> Values:
    q = 1.0 + spread**2
    z = r / np.sqrt(q)
    return r * ndtr(z) + spread**2 * normal_density(z) / np.sqrt(q)


# Where φ' of the smooth activations varies: their poles are π/2 or more from the axis, their tails gone at 40.
_BENDS = (-40.0, -12.0, -4.0, 0.0, 4.0, 12.0, 40.0)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


@dataclass(frozen=True)
class _Quadrature:
    """Gauss–Legendre on panels that end where the law, the bends or the kinks of φ ask for it.

    Such panels keep every pole of SiLU and tanh at a distance that 24 nodes see as 1e-16 or less, however wide or
    narrow the noise is: Gauss–Hermite nodes, tied to the noise alone, step over φ' once nσ is large.
    """

    activation: Activation
    law: Law

    def nodes(self, r: Values, spread: Values) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the mask [..., panel] of the panels that have a length, and u, mass and y [kept panel, node] there."""
        bends = np.array([*_BENDS, *self.activation.kinks])
        own = self.law.coordinate((bends - r[..., None]) / spread[..., None])
        given = np.broadcast_to(np.array(self.law.breaks), (*r.shape, len(self.law.breaks)))
        ends = np.sort(np.concatenate([own, given], axis=-1), axis=-1)
        half = (ends[..., 1:] - ends[..., :-1]) / 2
        kept = half > 0
        where = (ends[..., 1:] - half)[kept][:, None] + half[kept][:, None] * _NODES
        u, mass = self.law.place(where), self.law.mass(where) * half[kept][:, None] * _WEIGHTS
        at = np.broadcast_to(r[..., None], kept.shape)[kept], np.broadcast_to(spread[..., None], kept.shape)[kept]
        return kept, u, mass, at[0][:, None] + at[1][:, None] * u

    def slopes(self, r: Values, spread: Values) -> Slopes:
        kept, u, mass, y = self.nodes(*np.broadcast_arrays(r, spread))
        weighted = self.activation.slope(y) * mass
        return _gathered(kept, weighted.sum(-1)), _gathered(kept, (weighted * u).sum(-1))

    def mean(self, r: Values, spread: Values) -> Values:
        kept, _, mass, y = self.nodes(*np.broadcast_arrays(r, spread))
        return _gathered(kept, (self.activation.value(y) * mass).sum(-1))

    def curved(self, r: Values, spread: Values) -> Curved:
        if not self.activation.smooth:  # φ'' has a point mass at a kink
            return _differences(self.slopes, r, spread)
        kept, u, mass, y = self.nodes(*np.broadcast_arrays(r, spread))
        weighted = self.activation.slope(y) * mass
        bent = (self.activation.slope(y + _STEP) - self.activation.slope(y - _STEP)) * mass / (2 * _STEP)
        flat, bent_flat = (_gathered(kept, term.sum(-1)) for term in (weighted, bent))
        tilt, bent_tilt = (_gathered(kept, (term * u).sum(-1)) for term in (weighted, bent))
        return flat, tilt, bent_flat, bent_tilt, _gathered(kept, (bent * u**2).sum(-1))


def _gathered(kept: np.ndarray, panels: np.ndarray) -> Values:
    sums = np.zeros(kept.shape)
    sums[kept] = panels
    return sums.sum(-1)


_STEP = 1e-5  # truncation and rounding of a central difference are then alike


def _differences(slopes: Averaged, r: Values, spread: Values) -> Curved:
    """E[φ''] is the slope's derivative in r; E[uφ''] and E[u²φ''] are the tilt's in r and in the spread."""
    h = _STEP * spread
    moved = np.stack([r, r + h, r - h, r, r]), np.stack([spread, spread, spread, spread + h, spread - h])
    slope, tilt = slopes(*moved)
    first, second, third = slope[1] - slope[2], tilt[1] - tilt[2], tilt[3] - tilt[4]
    return slope[0], tilt[0], first / (2 * h), second / (2 * h), third / (2 * h)


def averages(activation: str | Activation, noise: str = "gaussian", dimension: int | None = None) -> Averages:
    """Return the functions from (r, spread) to E φ, and to E φ' and E uφ', at r + spread·u.

    Closed forms for linear, ReLU and leaky ReLU under either noise and for GELU under Gaussian noise, else quadrature.

    >>> averages("relu").mean(np.zeros(1), np.ones(1)).round(6)
    array([0.398942])
    """
    unit, law = named(activation), choice("noise", noise, NOISES)(dimension)
    piecewise = {"linear": _linear, "relu": law.step, "leaky_relu": partial(_rectified, LEAK, law.step)}
    if unit.name in piecewise:
        slopes = piecewise[unit.name]
        return Averages(partial(_piecewise_mean, slopes), slopes, partial(_differences, slopes))
    if (unit.name, noise) == ("gelu", "gaussian"):
        return Averages(_gelu_mean, _gelu, partial(_differences, _gelu))
    rule = _Quadrature(unit, law)
    return Averages(rule.mean, rule.slopes, rule.curved)
