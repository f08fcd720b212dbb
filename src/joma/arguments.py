"""Check the arguments of public functions; every error has four parts.

The parts are the argument, what was expected, what was given, and what to do about it. `InputError` keeps all four as
attributes, and the command line prints them as one line and exits with code 2.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np

from joma.terminal import printable

T = TypeVar("T")

MAX_WHOLE = 2**63 - 1  # the largest number of NumPy's and torch's default integers
SUM_ERROR = 1e-9  # by which a sum of probabilities may miss 1
_MAX_GOT = 300  # characters of what was given that a message shows
_MAX_ITEMS = 10**7  # of a list of single values
_TEMPORARIES = 8  # arrays of the size of the result that a formula may need at once
_KINDS = {
    "b": "booleans",
    "c": "complex numbers",
    "M": "dates",
    "m": "durations",
    "S": "bytes",
    "T": "strings",
    "U": "strings",
    "V": "a structured array",
}


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

    The message is one line: control characters are escaped, and a long `got` is shortened.
    """

    def __init__(self, name: str, expected: str, got: object, remedy: str, *, must: str = "be") -> None:
        self.problem = printable(f"`{name}` must {must} {expected}, got {_shortened(str(got))}")
        super().__init__(f"{self.problem}; {printable(remedy)}.")
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


def _shortened(text: str) -> str:
    if len(text) <= _MAX_GOT:
        return text
    return f"{text[: _MAX_GOT // 2]} … {text[-_MAX_GOT // 2 :]}"


def short_reason(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none.

    >>> short_reason(ValueError("no such file\\nsee the log")), short_reason(EOFError())
    ('no such file', 'EOFError')
    """
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__


def as_numbers(name: str, value: Any) -> np.ndarray:
    """Return `value` as a new float64 array, or raise `InputError` if it is anything but real numbers.

    Numbers are ints, floats, fractions, decimals, NumPy's numbers, and arrays or nested lists of them; also tensors of
    any device (their values, without gradients), `xarray.DataArray`, and columns of pandas. Booleans are not numbers: a
    mask in place of rates is a mistake. Neither are strings of digits, dates, complex numbers or masked entries.

    >>> as_numbers("rate", [1, 0.5])
    array([1. , 0.5])
    >>> as_numbers("rate", ["1", "2"])
    Traceback (most recent call last):
    joma.arguments.InputError: `rate` must be an array of real numbers, got strings; pass numbers of one ... shape.
    """
    try:
        array = np.asarray(_values(value))
        problem = _no_numbers(value, array)
        if problem is None:
            with np.errstate(over="ignore"):  # a number beyond float64 becomes infinite
                return array.astype(np.float64)
    except MemoryError:
        got = f"shape {np.shape(value)}"
        raise InputError(name, "small enough for this machine's memory", got, "give fewer numbers") from None
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as cause:
        problem = short_reason(cause)
    raise InputError(name, "an array of real numbers", problem, "pass numbers of one rectangular shape") from None


def _values(value: Any) -> Any:
    """Return a tensor's values as an array, also if it requires gradients, is on a GPU or has half precision."""
    torch = sys.modules.get("torch")  # the theory does not import it, but whoever passes a tensor has
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    values = value.detach().cpu()
    return (values.double() if values.is_floating_point() else values.resolve_conj()).numpy()


def _no_numbers(value: Any, array: np.ndarray) -> str | None:
    """Return what an array holds instead of real numbers, or None; `value` is what it was made from."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        return f"{np.ma.count_masked(value)} masked entries"
    if isinstance(value, list | tuple):
        problem = _no_numbers_inside(value)
        if problem is not None:
            return problem
    if array.dtype.kind == "O":
        strangers = (item for item in array.flat if not _is_real(item))
        return next((f"a {type(item).__name__}" for item in strangers), None)
    return _KINDS.get(array.dtype.kind)


def _no_numbers_inside(items: Sequence[Any]) -> str | None:
    """Return what NumPy would silently read as numbers in nested lists: booleans and masked entries."""
    for item in items:
        problem = None
        if isinstance(item, bool | np.bool_):
            problem = "booleans"
        elif isinstance(item, list | tuple):
            problem = _no_numbers_inside(item)
        elif isinstance(item, np.ndarray):
            problem = _no_numbers(item, np.asarray(item))
        if problem is not None:
            return problem
    return None


def _is_real(item: Any) -> bool:
    return isinstance(item, numbers.Real | Decimal) and not isinstance(item, bool | np.bool_)


def real(
    name: str,
    value: Any,
    *,
    ndim: int | None = None,
    low: float = -np.inf,
    high: float = np.inf,
    finite: bool = True,
    empty: bool = False,
) -> np.ndarray:
    """Return `value` as a float64 array, or raise `InputError`.

    `low` and `high` are inclusive. `finite=False` lets infinities pass, never NaN. `as_numbers` says what counts as
    numbers.

    >>> real("rho", [0, 0.5, 1], low=0, high=1)
    array([0. , 0.5, 1. ])
    >>> real("rho", 1.5, low=0, high=1)
    Traceback (most recent call last):
    joma.arguments.InputError: `rho` must be in [0, 1], got 1.5; give values inside the range.
    """
    array = as_numbers(name, value)
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


def positive(name: str, value: Any, *, ndim: int | None = None) -> np.ndarray:
    """Return `value` as a float64 array above zero, or raise `InputError`.

    >>> positive("sigma", 2)
    array(2.)
    """
    array = real(name, value, ndim=ndim)
    if (array <= 0.0).any():
        raise InputError(name, "above 0", f"{array.min():.6g}", "give positive values")
    return array


def scalar(name: str, value: Any, *, low: float = -np.inf, high: float = np.inf, above: float | None = None) -> float:
    """Return `value` as one finite float in [low, high], and greater than `above` if that is given.

    >>> scalar("temperature", 0.5, above=0.0)
    0.5
    >>> scalar("temperature", 0.0, above=0.0)
    Traceback (most recent call last):
    joma.arguments.InputError: `temperature` must be above 0, got 0; give a larger number.
    """
    is_good = type(value) is float and low <= value <= high and math.isfinite(value)  # arrays take many times longer
    number = value if is_good else float(real(name, value, ndim=0, low=low, high=high))
    if above is not None and number <= above:
        raise InputError(name, f"above {above:g}", f"{number:.6g}", "give a larger number")
    return number


def _interval(low: float, high: float) -> str:
    if np.isinf(high):
        return f"at least {low:g}"
    return f"at most {high:g}" if np.isinf(low) else f"in [{low:g}, {high:g}]"


def probabilities(name: str, value: Any, *, axis: int = -1, ndim: int | None = None) -> np.ndarray:
    """Return `value` as float64, checked to be non-negative and to sum to one along `axis`.

    >>> probabilities("p0", [0.5, 0.6])
    Traceback (most recent call last):
    joma.arguments.InputError: `p0` must sum to 1, got 1.1; divide it by its sum.
    """
    array = real(name, value, low=0.0, ndim=ndim)
    check_last_axis(name, array, "give one probability for each case")
    with np.errstate(over="ignore"):
        sums = array.sum(axis=axis)
    if np.abs(sums - 1).max() > SUM_ERROR:
        low, high = f"{sums.min():.6g}", f"{sums.max():.6g}"
        got = low if low == high else f"sums from {low} to {high}"
        raise InputError(name, "to 1", got, "divide it by its sum", must="sum")
    return array


def whole(name: str, value: Any, *, low: int = 1, high: int | None = None) -> int:
    """Return `value` as an int that is at least `low` and at most `high`.

    >>> whole("depth", 3)
    3
    """
    bounds = f"a whole number of at least {low}" if high is None else f"a whole number in [{low}, {high}]"
    number = value if type(value) is int else _whole_number(name, value, bounds)
    limit = MAX_WHOLE if high is None else high
    if number < low or number > limit:
        bounds = bounds if number < low or high is not None else f"{bounds} and below 2^63"
        raise InputError(name, bounds, number, "give a number inside the range")
    return number


def _whole_number(name: str, value: Any, bounds: str) -> int:
    try:
        array = np.asarray(_values(value))
        if array.ndim == 0 and array.dtype.kind in "iu":  # not by way of float64, which rounds above 2^53
            return int(array)
        number = as_numbers(name, value)
    except (InputError, TypeError, ValueError, RuntimeError):
        number = np.asarray(np.nan)
    if number.ndim or not np.isfinite(number) or number != np.rint(number):
        raise InputError(name, bounds, described(value), "give one whole number")
    return int(number)


def whole_numbers(
    name: str, value: Any, *, ndim: int | None = None, low: float = -np.inf, high: float = np.inf
) -> np.ndarray:
    """Return `value` as a float64 array of whole numbers in [low, high], or raise `InputError`.

    >>> whole_numbers("keys", [2, 2.5], low=1)
    Traceback (most recent call last):
    joma.arguments.InputError: `keys` must be whole numbers, got 2.5; round them first.
    """
    array = real(name, value, ndim=ndim, low=low, high=high)
    fractions = array[array != np.rint(array)]
    if fractions.size:
        raise InputError(name, "whole numbers", f"{fractions[0]:.6g}", "round them first")
    return array


def whole_array(name: str, value: Any, *, ndim: int, low: int, high: int) -> np.ndarray:
    """Return `value` as an int64 array of whole numbers in [low, high], or raise `InputError`.

    >>> whole_array("counts", [[2, 0], [1.0, 1]], ndim=2, low=0, high=9)
    array([[2, 0],
           [1, 1]])
    """
    return whole_numbers(name, value, ndim=ndim, low=low, high=high).astype(np.int64)


def increasing(name: str, value: Any, *, low: float = 0.0) -> np.ndarray:
    """Return `value` as one row of numbers, each above the one before it and the first at least `low`.

    >>> increasing("times", [0, 2, 1])
    Traceback (most recent call last):
    joma.arguments.InputError: `times` must be one increasing row, got 1 after 2; sort them and drop repetitions.
    """
    row = np.atleast_1d(real(name, value, low=low))
    falls = np.flatnonzero(row[1:] <= row[:-1]) if row.ndim == 1 else []
    if row.ndim != 1 or len(falls):
        got = f"shape {row.shape}" if row.ndim != 1 else f"{row[falls[0] + 1]:.6g} after {row[falls[0]]:.6g}"
        raise InputError(name, "one increasing row", got, "sort them and drop repetitions")
    return row


def check_last_axis(name: str, array: np.ndarray, remedy: str) -> None:
    """Raise `InputError` if an array is a single number, which has no last axis.

    >>> check_last_axis("logits", np.array(2.0), "put the keys on the last axis")
    Traceback (most recent call last):
    joma.arguments.InputError: `logits` must be at least 1-dimensional, got one number; put the keys on the last axis.
    """
    if array.ndim == 0:
        raise InputError(name, "at least 1-dimensional", "one number", remedy)


def described(value: Any) -> str:
    """Return what a value is, for a message: arrays by shape and type, short values as they are written.

    >>> described(np.zeros((2, 3))), described("3"), described(None)
    ('an ndarray of float64 and shape (2, 3)', "'3'", 'None')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype") and getattr(value, "shape", ()) != ():
        return f"{_with_article(type(value).__name__)} of {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 and text.isprintable() else _with_article(type(value).__name__)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeio' or noun == 'ndarray' else 'a'} {noun}"


def choice(name: str, value: str, table: Mapping[str, T]) -> T:
    """Look `value` up in `table`; an unknown name lists the known ones.

    >>> choice("attention", "sofmax", {"linear": 1, "softmax": 2})
    Traceback (most recent call last):
    joma.arguments.InputError: `attention` must be one of linear, softmax, got 'sofmax'; did you mean 'softmax'.
    """
    if isinstance(value, str) and value in table:
        return table[value]
    raise InputError(name, f"one of {', '.join(table)}", described(value), _nearest(value, list(table)))


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool, if it is True or False, or 1 or 0.

    >>> flag("causal", np.True_)
    True
    >>> flag("causal", "no")
    Traceback (most recent call last):
    joma.arguments.InputError: `causal` must be True or False, got 'no'; give one of the two.
    """
    if value is True or value is False:
        return value
    if not isinstance(value, int | np.bool_) or value not in (0, 1):
        raise InputError(name, "True or False", described(value), "give one of the two")
    return bool(value)


def instance(name: str, value: Any, kind: type[T], remedy: str) -> T:
    """Return `value`, if it is of the class `kind`.

    >>> instance("step", 3, int, "give a number")
    3
    """
    if not isinstance(value, kind):
        raise InputError(name, _with_article(kind.__name__), described(value), remedy)
    return value


def sequence(name: str, value: Any, expected: str, *, ordered: bool = True) -> list[Any]:
    """Return the items of a list, a tuple, an array or another iterable; a set only if they need not be ordered.

    >>> sequence("latents", (10, 20), "a number for each layer")
    [10, 20]
    """
    refused = (str, bytes, Mapping, set, frozenset) if ordered else (str, bytes, Mapping)
    if isinstance(value, Iterable) and not isinstance(value, refused):
        size = getattr(value, "shape", (0,))
        if len(size) > 0 and size[0] <= _MAX_ITEMS:
            return list(value)
    raise InputError(name, expected, described(value), "give a list")


def in_range(names: str, *results: Any) -> None:
    """Raise `InputError` if a result is NaN or infinite, because the arguments `names` are too large or too small.

    >>> in_range("v`, `v0", np.array([1.0, np.inf]))
    Traceback (most recent call last):
    joma.arguments.InputError: `v`, `v0` must be such that the result is a finite number, got an overflow; rescale them.
    """
    if not all(np.isfinite(result).all() for result in results):
        raise InputError(names, "such that the result is a finite number", "an overflow", "rescale them")


def distinct(name: str, values: Sequence[T], *, least: int = 1) -> list[T]:
    """Return `values` as a list; raise `InputError` if there are fewer than `least` or any is repeated.

    >>> distinct("depths", (1, 2, 1))
    Traceback (most recent call last):
    joma.arguments.InputError: `depths` must be at least 1 value, each once, got (1, 2, 1); give each value once.
    """
    try:
        repeated = len({*values}) < len(values)
    except TypeError:  # no sequence, or values that cannot be compared
        raise InputError(name, "a list of single values", described(values), "give each value once") from None
    if len(values) < least or repeated:
        expected = f"at least {least} value{'s' * (least != 1)}, each once" if least else "different values"
        raise InputError(name, expected, values or "none", "give each value once")
    return list(values)


def _nearest(value: object, known: list[str]) -> str:
    import difflib  # only the error path needs it

    close = difflib.get_close_matches(value[:100] if isinstance(value, str) else "", known, n=1)
    return f"did you mean {close[0]!r}" if close else "choose a known one"


def broadcast(**arrays: np.ndarray) -> tuple[int, ...]:
    """Return the common shape of the named arrays, or raise `InputError` naming them all.

    >>> broadcast(mu=np.zeros(3), v0=np.zeros(()))
    (3,)
    """
    try:
        shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        names = "`, `".join(arrays)
        raise InputError(names, "of shapes that broadcast together", shapes, "align them from the right") from None
    check_size("`, `".join(arrays), shape)
    return shape


def check_size(name: str, shape: Sequence[int]) -> None:
    """Raise `InputError` if a formula over arrays of `shape` cannot fit into the memory of this machine.

    >>> check_size("times", (10**9, 10**9))
    Traceback (most recent call last):
    joma.arguments.InputError: `times` must be of a size that fits into memory, got shape (1000000000, 1000000000); ...
    """
    try:
        np.empty((_TEMPORARIES, *shape))  # asks the system for memory, and does not use it
    except (MemoryError, ValueError):
        expected, remedy = "of a size that fits into memory", "give fewer values at once"
        raise InputError(name, expected, f"shape {tuple(shape)}", remedy) from None


def aligned(**arrays: Any) -> list[np.ndarray]:
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
