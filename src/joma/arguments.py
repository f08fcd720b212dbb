"""Arguments are checked once, at the public surface, and every complaint has four parts.

The argument, what was expected, what came, and what to do about it: `InputError` says all four, and the command line
turns it into one line and exit code 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

T = TypeVar("T")


class InputError(ValueError):
    """Bad input: the message names the argument, what was expected, what came, and the remedy."""

    def __init__(self, name: str, expected: str, got: object, remedy: str) -> None:
        super().__init__(f"`{name}` must be {expected}, got {got}; {remedy}.")


def real(
    name: str,
    value: ArrayLike,
    *,
    ndim: int | None = None,
    low: float = -np.inf,
    high: float = np.inf,
    finite: bool = True,
    empty: bool = False,
) -> np.ndarray:
    """Return `value` as a float64 array, or raise `InputError`.

    `low` and `high` are inclusive. `finite=False` lets infinities pass, never NaN.

    >>> real("rho", [0, 0.5, 1], low=0, high=1)
    array([0. , 0.5, 1. ])
    >>> real("rho", 1.5, low=0, high=1)
    Traceback (most recent call last):
    joma.arguments.InputError: `rho` must be in [0, 1], got 1.5; give values inside the range.
    """
    try:
        array = np.asarray(value)
        if np.iscomplexobj(array):
            raise TypeError("complex numbers")
        array = array.astype(np.float64)
    except (TypeError, ValueError) as cause:
        raise InputError(name, "an array of real numbers", cause, "pass numbers of one rectangular shape") from None
    if not empty and array.size == 0:
        raise InputError(name, "non-empty", f"shape {array.shape}", "give at least one value")
    if ndim is not None and array.ndim != ndim:
        raise InputError(name, f"{ndim}-dimensional", f"shape {array.shape}", "reshape it")
    if np.isnan(array).any():
        raise InputError(name, "free of NaN", f"{int(np.isnan(array).sum())} NaN", "drop or fill them first")
    if finite and not np.isfinite(array).all():
        raise InputError(name, "finite", "an infinite value", "give finite values")
    outside = array[(array < low) | (array > high)]
    if outside.size:
        raise InputError(name, _interval(low, high), f"{outside.flat[0]:.6g}", "give values inside the range")
    return array


def positive(name: str, value: ArrayLike, *, ndim: int | None = None) -> np.ndarray:
    """Return `value` as a float64 array above zero, or raise `InputError`.

    >>> positive("sigma", 2)
    array(2.)
    """
    array = real(name, value, ndim=ndim)
    if (array <= 0.0).any():
        raise InputError(name, "above 0", f"{array.min():.6g}", "give positive values")
    return array


def scalar(name: str, value: float, *, above: bool = False) -> float:
    """Return `value` as one number of at least 0, or above 0.

    >>> scalar("temperature", 0.5, above=True)
    0.5
    """
    return float(positive(name, value, ndim=0) if above else real(name, value, ndim=0, low=0.0))


def _interval(low: float, high: float) -> str:
    if np.isinf(high):
        return f"at least {low:g}"
    return f"at most {high:g}" if np.isinf(low) else f"in [{low:g}, {high:g}]"


def probabilities(name: str, value: ArrayLike, *, axis: int = -1, ndim: int | None = None) -> np.ndarray:
    """Return `value` as float64, checked to be non-negative and to sum to one along `axis`.

    >>> probabilities("p0", [0.5, 0.6])
    Traceback (most recent call last):
    joma.arguments.InputError: `p0` must be summing to 1, got sums in [1.1, 1.1]; divide by the sum first.
    """
    array = real(name, value, low=0.0, ndim=ndim)
    sums = array.sum(axis=axis)
    if np.abs(sums - 1).max() > 1e-9:
        got = f"sums in [{sums.min():.6g}, {sums.max():.6g}]"
        raise InputError(name, "summing to 1", got, "divide by the sum first")
    return array


def whole(name: str, value: Any, *, low: int = 1, high: int | None = None) -> int:
    """Return `value` as an int that is at least `low` and at most `high`.

    >>> whole("depth", 3)
    3
    """
    number = np.asarray(value)
    bounds = f"a whole number of at least {low}" if high is None else f"a whole number in [{low}, {high}]"
    if number.ndim or number.dtype.kind not in "iuf" or not np.isfinite(number) or number != int(number):
        raise InputError(name, bounds, repr(value), "give one whole number")
    if number < low or (high is not None and number > high):
        raise InputError(name, bounds, repr(value), "give a number inside the range")
    return int(number)


def choice(name: str, value: str, table: Mapping[str, T]) -> T:
    """Look `value` up in `table`; an unknown name lists the known ones.

    >>> choice("attention", "sofmax", {"linear": 1, "softmax": 2})
    Traceback (most recent call last):
    joma.arguments.InputError: `attention` must be one of linear, softmax, got 'sofmax'; did you mean 'softmax'.
    """
    if isinstance(value, str) and value in table:
        return table[value]
    raise InputError(name, f"one of {', '.join(table)}", repr(value), _nearest(value, list(table)))


def distinct(name: str, values: Sequence[T], *, least: int = 1) -> list[T]:
    """Return `values` as a list, if there are at least so many and none comes twice.

    >>> distinct("depths", (1, 2, 1))
    Traceback (most recent call last):
    joma.arguments.InputError: `depths` must be at least 1 value, each once, got (1, 2, 1); give each value once.
    """
    if len(values) < least or len({*values}) < len(values):
        expected = f"at least {least} value{'s' * (least != 1)}, each once" if least else "different values"
        raise InputError(name, expected, values or "none", "give each value once")
    return list(values)


def _nearest(value: object, known: list[str]) -> str:
    import difflib  # only the error path needs it

    close = difflib.get_close_matches(str(value), known, n=1)
    return f"did you mean {close[0]!r}" if close else "choose a known one"


def broadcast(**arrays: np.ndarray) -> tuple[int, ...]:
    """Return the common shape of the named arrays, or raise `InputError` naming them all.

    >>> broadcast(mu=np.zeros(3), v0=np.zeros(()))
    (3,)
    """
    try:
        return np.broadcast_shapes(*(array.shape for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        names = "`, `".join(arrays)
        raise InputError(names, "of shapes that broadcast together", shapes, "align them from the right") from None
