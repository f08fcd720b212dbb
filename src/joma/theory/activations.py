"""Activations of a hidden unit, each with its slope: one table for the whole theory.

`slope` is the derivative; at a kink it is the derivative from the left, as in PyTorch's ReLU. Everything is float64,
and the tails neither overflow nor cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfcx, expit, ndtr

from joma.arguments import as_numbers, choice, scalar

LEAK = 0.01  # slope of the leaky ReLU below zero

Elementwise = Callable[[ArrayLike], np.ndarray]


@dataclass(frozen=True)
class Activation:
    """φ and φ' as elementwise functions of the preactivation, and the points where φ' jumps (`kinks`)."""

    name: str
    value: Elementwise
    slope: Elementwise
    kinks: tuple[float, ...] = ()

    @property
    def smooth(self) -> bool:
        """Whether φ' is continuous everywhere."""
        return not self.kinks

    def jump(self, kink: float) -> float:
        """Return φ'(kink + 0) − φ'(kink − 0)."""
        above, below = np.nextafter(kink, np.inf), np.nextafter(kink, -np.inf)
        return float(self.slope(above) - self.slope(below))


def normal_density(y: ArrayLike) -> np.ndarray:
    """Return the standard normal density ϕ(y); it is 0 in the far tails, without overflow.

    >>> float(normal_density(0.0))
    0.3989422804014327
    """
    y = np.clip(as_numbers("y", y), -40.0, 40.0)  # exp(−800) is already 0
    return np.asarray(np.exp(-0.5 * y * y) / np.sqrt(2 * np.pi))


def _linear(y: ArrayLike) -> np.ndarray:
    return np.array(y, dtype=np.float64)


def _linear_slope(y: ArrayLike) -> np.ndarray:
    return np.ones(np.shape(y))


def _rectified(y: ArrayLike, leak: float) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.where(y > 0, y, leak * y)


def _rectified_slope(y: ArrayLike, leak: float) -> np.ndarray:
    return np.where(np.asarray(y) > 0, 1.0, leak)


def _gelu(y: ArrayLike) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.asarray(y * ndtr(y))


def _gelu_slope(y: ArrayLike) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.asarray(ndtr(y) + y * normal_density(y))


def _silu(y: ArrayLike) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.asarray(y * expit(y))


def _silu_slope(y: ArrayLike) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.asarray(expit(y) * (1.0 + y * expit(-y)))


def _tanh(y: ArrayLike) -> np.ndarray:
    return np.asarray(np.tanh(y, dtype=np.float64))


def _tanh_slope(y: ArrayLike) -> np.ndarray:
    y = np.asarray(y, dtype=np.float64)
    return np.asarray(4.0 * expit(2.0 * y) * expit(-2.0 * y))  # 1 − tanh² cancels in the tails


def _rectifier(name: str, leak: float) -> Activation:
    return Activation(name, partial(_rectified, leak=leak), partial(_rectified_slope, leak=leak), (0.0,))


_LINEAR = Activation("linear", _linear, _linear_slope)

ACTIVATIONS: dict[str, Activation] = {
    "linear": _LINEAR,
    "identity": _LINEAR,
    "relu": _rectifier("relu", 0.0),
    "leaky_relu": _rectifier("leaky_relu", LEAK),
    "gelu": Activation("gelu", _gelu, _gelu_slope),
    "silu": Activation("silu", _silu, _silu_slope),
    "tanh": Activation("tanh", _tanh, _tanh_slope),
}


def named(activation: str | Activation) -> Activation:
    """Return the activation of that name; an `Activation` is returned as it is.

    >>> named("identity").name
    'linear'
    """
    return activation if isinstance(activation, Activation) else choice("activation", activation, ACTIVATIONS)


def smoothed(activation: str | Activation, width: ArrayLike) -> Activation:
    """Return the activation with each kink rounded over `width`, so that an integrator does not stall there.

    A jump J of the slope at k is a term J·relu(y − k). It is convolved with a normal density of standard deviation w:

        relu(u) → u Φ(u/w) + w ϕ(u/w),    1(u > 0) → Φ(u/w)

    For piecewise linear activations (ReLU, leaky ReLU) the result is φ convolved with that density. It differs from φ
    by at most |J| w/√(2π), at the kink, and equals φ beyond 40 widths from it. Smooth activations are returned
    unchanged.

    Args:
        activation: a name of `ACTIVATIONS`, or an `Activation`.
        width: standard deviation w > 0 of the normal density, in units of the preactivation.

    Returns:
        An `Activation` without kinks.

    >>> float(smoothed("relu", 0.1).slope(0.0))
    0.5
    """
    base = named(activation)
    scale = scalar("width", width, above=0.0)
    if base.smooth:
        return base
    jumps = tuple((kink, base.jump(kink)) for kink in base.kinks)
    value, slope = partial(_rounded_value, base.value, jumps, scale), partial(_rounded_slope, base.slope, jumps, scale)
    return Activation(f"{base.name} smoothed over {scale:g}", value, slope)


def _rounded_value(base: Elementwise, jumps: tuple[tuple[float, float], ...], width: float, y: ArrayLike) -> np.ndarray:
    y, value = np.asarray(y, dtype=np.float64), base(y)
    for kink, jump in jumps:
        # What rounding adds is ϕ(s) − sΦ(−s) = ϕ(s)(1 − s·Mills(s)), s ≥ 0; this form avoids cancellation in the tails.
        s = np.abs(y - kink) / width
        value = value + jump * width * normal_density(s) * (1.0 - s * np.sqrt(np.pi / 2) * erfcx(s / np.sqrt(2)))
    return np.asarray(value)


def _rounded_slope(base: Elementwise, jumps: tuple[tuple[float, float], ...], width: float, y: ArrayLike) -> np.ndarray:
    y, slope = np.asarray(y, dtype=np.float64), base(y)
    for kink, jump in jumps:
        slope = slope + jump * (ndtr((y - kink) / width) - (y > kink))
    return np.asarray(slope)
