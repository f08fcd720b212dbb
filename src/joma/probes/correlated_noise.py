"""Estimate noise that is correlated from point to point, around a trend whose turns the data choose.

A curve is a trend plus autoregressive noise of order 0, 1 or 2. A trend that follows the curve too closely hides the
correlation, and one that misses a turn counts the turn as correlated noise. So trend and noise are fitted together, and
the data choose how many turns the trend has and which order the noise has.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

_MAX_TERMS = 6  # steps, kinks and falls of a trend
_PENALTY = 4.0  # times ln n: by how much one of these must lower −2 ln likelihood
_EXACT = 1e-13  # residuals below this share of the curve's largest deviation are rounding errors
_MAX_CURVES = 512  # fitted at once


class Autoregression(NamedTuple):
    """Partial correlations of normal noise with its last point and the one before: the order is 2, or 1 or 0 by zeros.

    >>> Autoregression(0.5).correlations(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    first: float
    second: float = 0.0

    def correlations(self, points: int) -> Float[np.ndarray, " lag"]:
        """Return the correlation over 0, 1, … points: r_k = a₁ r_{k−1} + a₂ r_{k−2}."""
        weight = self.first * (1 - self.second)
        values = [1.0, self.first]
        for _ in range(points - 2):
            values.append(weight * values[-1] + self.second * values[-2])
        return np.array(values[:points])

    @property
    def long_run(self) -> float:
        """Return n Var(mean of n points) / Var(one point) for many points: 1 for independent noise."""
        return (1 - self.first**2) * (1 - self.second**2) / ((1 - self.first) * (1 - self.second)) ** 2


CANDIDATES = (
    *(Autoregression(first) for first in (0.0, 0.15, 0.3, 0.45, 0.6, 0.75)),
    *(Autoregression(first, 0.3) for first in (0.15, 0.3, 0.45, 0.6)),
)


class NoiseEstimate(NamedTuple):
    """Which of `CANDIDATES` the noise of each curve is, and its standard deviation."""

    candidate: Int[np.ndarray, " curve"]
    sd: Float[np.ndarray, " curve"]  # of one point


class _Whitened(NamedTuple):
    """A trend's terms, times the inverse root of the noise's correlations."""

    root: Float[np.ndarray, "step step"]
    log_determinant: float  # of the correlations
    smooth: Float[np.ndarray, "smooth step"]  # orthonormal
    breaks: Float[np.ndarray, "term step"]  # steps, kinks and falls, orthogonal to `smooth`, of length 1
    products: Float[np.ndarray, "term term"]  # of `breaks` with each other


def correlated_noise(white: Float[np.ndarray, "curve step"], noise: Autoregression) -> Float[np.ndarray, "curve step"]:
    """Return normal noise of variance 1 with the correlations of `noise`, from independent noise of variance 1."""
    return white @ _factor(noise, white.shape[-1]).T


def estimate_noise(y: Float[np.ndarray, "curve step"]) -> NoiseEstimate:
    """Return the noise of curves with at least five points: correlations R and standard deviation σ.

        minimise  n ln RSS + ln det R + 4 m ln n   over R and m,    σ² = RSS / (n − K − 2m)

    RSS = (y − trend)ᵀ R⁻¹ (y − trend); R is one of `CANDIDATES`. The trend has K smooth terms (a line, and cosines for
    curves of at least 30 points) and m steps, kinks or early falls, of which each is the one that lowers RSS most. It
    has a height and a position, and so costs two degrees of freedom.
    """
    parts = [_estimate_part(y[first : first + _MAX_CURVES]) for first in range(0, len(y), _MAX_CURVES)]
    return NoiseEstimate(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def _estimate_part(y: Float[np.ndarray, "curve step"]) -> NoiseEstimate:
    points = y.shape[-1]
    smooth, terms = _trend_size(points)
    whitened = _whitened(points)
    squares = np.stack([_squares(y, candidate, terms) for candidate in whitened], axis=1)
    rounding = points * (_EXACT * np.abs(y).max(axis=-1)) ** 2
    squares = np.maximum(squares, np.maximum(rounding, np.finfo(float).tiny)[:, None, None])
    log_determinants = np.array([candidate.log_determinant for candidate in whitened])
    costs = log_determinants[:, None] + _PENALTY * np.log(points) * np.arange(terms + 1)
    best = (points * np.log(squares) + costs).reshape(len(y), -1).argmin(axis=-1)
    which, chosen = np.divmod(best, terms + 1)
    least = squares.reshape(len(y), -1)[np.arange(len(y)), best]
    return NoiseEstimate(which, np.sqrt(least / (points - smooth - 2 * chosen)))


def _trend_size(points: int) -> tuple[int, int]:
    """Return the number of smooth terms of a trend and the greatest number of its steps, kinks and falls."""
    smooth = 2 + min(max(points - 10, 0) // 20, 4)
    return smooth, min(_MAX_TERMS, (points - smooth) // 4)


@lru_cache(maxsize=256)
def _factor(noise: Autoregression, points: int) -> Float[np.ndarray, "step step"]:
    """Return the Cholesky factor of the correlations."""
    lag = np.abs(np.subtract.outer(np.arange(points), np.arange(points)))
    return np.linalg.cholesky(noise.correlations(points)[lag])


@lru_cache(maxsize=16)
def _whitened(points: int) -> tuple[_Whitened, ...]:
    """Return the terms of trends for each of `CANDIDATES`.

    Of long curves not every point can be a step or kink: each of the first 32, where training curves fall steeply, and
    32 of the others.
    """
    step = np.arange(points)
    position = step[1:] if points <= 65 else np.unique(np.r_[1:33, np.linspace(33, points - 1, 32).round()])
    steps = (step >= position[:, None]).astype(float)
    kinks = np.maximum(step - position[position < points - 1, None], 0.0) / points
    waves = [np.cos(np.pi * number * (step + 0.5) / points) for number in range(2, _trend_size(points)[0])]
    smooth, breaks = np.stack([np.ones(points), step / points, *waves]), np.concatenate([steps, kinks, _falls(points)])
    return tuple(_whiten(smooth, breaks, _factor(candidate, points)) for candidate in CANDIDATES)


def _falls(points: int) -> Float[np.ndarray, "fall step"]:
    """Return falls in the first third of a curve, of several widths: logistic functions, which end as exponentials."""
    falls = [np.empty((0, points))]
    for width in 2.0 ** np.arange(1, np.log2(max(points / 8, 1)) + 1e-9):
        position = np.arange(0, points / 3, max(width, points / 32))
        falls.append(1 / (1 + np.exp(np.minimum(2 * (np.arange(points) - position[:, None]) / width, 100.0))))
    return np.concatenate(falls)


def _whiten(
    smooth: Float[np.ndarray, "smooth step"],
    breaks: Float[np.ndarray, "term step"],
    factor: Float[np.ndarray, "step step"],
) -> _Whitened:
    root = np.linalg.inv(factor).T
    basis = np.linalg.qr((smooth @ root).T)[0].T
    terms = breaks @ root
    terms = terms - (terms @ basis.T) @ basis
    terms /= np.linalg.norm(terms, axis=-1, keepdims=True)
    return _Whitened(root, 2 * float(np.log(np.diag(factor)).sum()), basis, terms, terms @ terms.T)


def _squares(y: Float[np.ndarray, "curve step"], whitened: _Whitened, terms: int) -> Float[np.ndarray, "curve count"]:
    """Return RSS with 0, 1, … of the breaks, each the one that lowers it most (orthogonal matching pursuit)."""
    white = y @ whitened.root
    white = white - (white @ whitened.smooth.T) @ whitened.smooth
    squares = [(white**2).sum(axis=-1)]
    inner = white @ whitened.breaks.T  # of the residual with each term
    length = np.ones_like(inner)  # squared, of the part of each term that the chosen terms do not span
    chosen: list[np.ndarray] = []  # inner products of each term with the orthonormalised chosen ones
    curve = np.arange(len(y))
    for _ in range(terms):
        gains = inner**2 / np.maximum(length, 1e-3)
        best = np.where(length > 1e-3, gains, -1.0).argmax(axis=-1)  # a chosen term is not chosen again, even for 0
        product = whitened.products[best]
        for earlier in chosen:
            product -= earlier[curve, best][:, None] * earlier
        root = np.sqrt(length[curve, best])
        product /= root[:, None]
        gain = inner[curve, best] / root
        squares.append(np.maximum(squares[-1] - gain**2, 0.0))
        inner -= gain[:, None] * product
        length -= product**2
        chosen.append(product)
    return np.stack(squares, axis=-1)
