"""Check the arguments of public functions; every error has four parts.

The parts are the argument, what was expected, what was given, and what to do about it. `InputError` keeps all four as
attributes, and the command line prints them as one line and exits with code 2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

T = TypeVar("T")


class InputError(ValueError):
    """Bad input: which argument, what was expected of it, what was given, and what to do.

    Attributes:
        name: the argument.
        expected: what it must be, as it follows "must be" in the message.
        got: what was given instead.
        remedy: what to do, without a full stop.
        must: the verb, "be" unless given.
        problem: the message without the remedy.

    >>> problem = InputError("p0", "to 1", 1.1, "divide it by its sum", must="sum")
    >>> problem.name, problem.remedy
    ('p0', 'divide it by its sum')
    >>> print(problem)
    `p0` must sum to 1, got 1.1; divide it by its sum.
    """

    def __init__(self, name: str, expected: str, got: object, remedy: str, *, must: str = "be") -> None:
        self.problem = f"`{name}` must {must} {expected}, got {got}"
        super().__init__(f"{self.problem}; {remedy}.")
        self.name, self.expected, self.got, self.remedy, self.must = name, expected, got, remedy, must

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its parts in another process; what was given may not survive, its text does."""
        return functools.partial(type(self), must=self.must), (self.name, self.expected, str(self.got), self.remedy)


class StateError(RuntimeError):
    """An object is used in the wrong state, such as a model that has not been run yet.

    Attributes:
        subject: the object.
        required: the state that it must be in.
        remedy: what to do, without a full stop.

    >>> print(StateError("block", "needs a forward pass first", "call the block on some contexts"))
    `block` needs a forward pass first; call the block on some contexts.
    """

    def __init__(self, subject: str, required: str, remedy: str) -> None:
        super().__init__(f"`{subject}` {required}; {remedy}.")
        self.subject, self.required, self.remedy = subject, required, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its parts in another process."""
        return type(self), (self.subject, self.required, self.remedy)


def short_reason(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none.

    >>> short_reason(ValueError("no such file\\nsee the log")), short_reason(EOFError())
    ('no such file', 'EOFError')
    """
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__


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


def scalar(
    name: str, value: ArrayLike, *, low: float = -np.inf, high: float = np.inf, above: float | None = None
) -> float:
    """Return `value` as one finite float in [low, high], and greater than `above` if that is given.

    >>> scalar("temperature", 0.5, above=0.0)
    0.5
    >>> scalar("temperature", 0.0, above=0.0)
    Traceback (most recent call last):
    joma.arguments.InputError: `temperature` must be above 0, got 0; give a larger number.
    """
    number = float(real(name, value, ndim=0, low=low, high=high))
    if above is not None and number <= above:
        raise InputError(name, f"above {above:g}", f"{number:.6g}", "give a larger number")
    return number


def _interval(low: float, high: float) -> str:
    if np.isinf(high):
        return f"at least {low:g}"
    return f"at most {high:g}" if np.isinf(low) else f"in [{low:g}, {high:g}]"


def probabilities(name: str, value: ArrayLike, *, axis: int = -1, ndim: int | None = None) -> np.ndarray:
    """Return `value` as float64, checked to be non-negative and to sum to one along `axis`.

    >>> probabilities("p0", [0.5, 0.6])
    Traceback (most recent call last):
    joma.arguments.InputError: `p0` must sum to 1, got 1.1; divide it by its sum.
    """
    array = real(name, value, low=0.0, ndim=ndim)
    sums = array.sum(axis=axis)
    if np.abs(sums - 1).max() > 1e-9:
        low, high = f"{sums.min():.6g}", f"{sums.max():.6g}"
        got = low if low == high else f"sums from {low} to {high}"
        raise InputError(name, "to 1", got, "divide it by its sum", must="sum")
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
    """Return `values` as a list; raise `InputError` if there are fewer than `least` or any is repeated.

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


def aligned(**arrays: ArrayLike) -> list[np.ndarray]:
    """Return the named arrays as float64, broadcast to their common shape of at least one axis.

    >>> aligned(mu=[1.0, 2.0], v0=0.5)
    [array([1., 2.]), array([0.5, 0.5])]
    """
    checked = {name: np.atleast_1d(real(name, array)) for name, array in arrays.items()}
    shape = broadcast(**checked)
    return [np.broadcast_to(array, shape) for array in checked.values()]


def plain_text(name: str, value: str) -> str:
    r"""Return `value` if files and folders can be named by it: UTF-8 without a NUL character.

    >>> plain_text("--out", "runs\0")
    Traceback (most recent call last):
    joma.arguments.InputError: `--out` must be UTF-8 text without NUL, got 'runs\x00'; write it in other characters.
    """
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        got = repr(value) if len(value) <= 80 else f"{value[:80]!r} …"
        raise InputError(name, "UTF-8 text without NUL", got, "write it in other characters")
    return value
