"""Find the attention of modules that compute their own weights: a softmax whose result averages values.

A softmax alone may be anything: a router, a gate, the output of a classifier. Its result is followed until a matrix
product or an einsum adds up its axis of keys. If the other factor has an axis of keys but no axis of queries, and is no
parameter or buffer, then the softmax was attention. Its logits are measured if all functions in between leave the
weights as they are (`weight_functions`). If one changes them, the weights are not those of the logits, and the reason
is reported.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joma.watch.weight_functions import (
    COPIES,
    MULTIPLICATIONS,
    PERMUTATIONS,
    SELECTIONS,
    VIEWS,
    WITHOUT_WEIGHTS,
    after_mask,
    leaves_weights,
    may_hide_keys,
)
from joma.watch.written_softmaxes import SUMS, WrittenSoftmaxes, sum_axes

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_head", "h")
Axes = tuple[tuple[int, ...], ...]  # for each axis of a tensor, the axes of the softmax that it comes from

SOFTMAXES = frozenset((torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax))
PRODUCTS: dict[Any, tuple[int, int]] = {  # the positions of the two factors among the arguments
    torch.matmul: (0, 1),
    Tensor.matmul: (0, 1),
    Tensor.__matmul__: (0, 1),
    Tensor.__rmatmul__: (1, 0),
    torch.bmm: (0, 1),
    Tensor.bmm: (0, 1),
    torch.baddbmm: (1, 2),
    Tensor.baddbmm: (1, 2),
    torch.linalg.matmul: (0, 1),
    F.linear: (0, 1),  # with the second factor transposed
}
CHANGED = "changes its weights after the softmax"
HIDES = "hides keys after the softmax that have weight"
SUMMED = "adds up products of weights and values without a matrix product"
SEVERAL = "weighs values by several softmaxes"
LINEAR = "averages values that a softmax has averaged already: linear attention"


@dataclass(slots=True)
class Softmax:
    """A softmax that may be attention: its logits, until it is used."""

    logits: Tensor
    axis: int  # of the keys
    version: int | None  # of the logits when the weights were computed, or None if unknown
    context: Any  # what the caller wants to know of the moment of the softmax
    used: bool = False
    labels: dict[Any, str] = field(default_factory=dict)  # of the attention that the caller has measured

    @property
    def overwritten(self) -> bool:
        """Whether the logits have been changed in place since."""
        return self.version is not None and self.logits._version != self.version


class _Trace(NamedTuple):
    """A tensor that holds the weights of a softmax, possibly permuted, masked or cut, or something made of them."""

    tensor: weakref.ref[Tensor]
    softmax: Softmax
    axes: Axes
    columns: tuple[int, int]  # the first key and the end of those that are left
    change: str  # how the weights have been changed; "" if they have not
    version: int | None  # of the tensor, or None if unknown
    emptied: Tensor | None = None  # the rows of the logits that a mask has emptied

    @property
    def key_axis(self) -> int | None:
        """The axis of keys."""
        axis = (self.softmax.axis,)
        return self.axes.index(axis) if axis in self.axes else None

    def changed(self) -> str:
        """Return how the weights have been changed, in place too."""
        tensor = self.tensor()
        overwritten = self.version is not None and tensor is not None and self.version != tensor._version
        return self.change or (CHANGED if overwritten else "")


class _Call(NamedTuple):
    """A call of a function of torch."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Product(NamedTuple):
    """A product of weights with other factors."""

    queries: tuple[int, ...] = ()  # their axes of the logits, if the product adds up the keys of attention
    values: Sequence[Tensor] = ()  # the other factors
    keeps_keys: bool = False  # whether the result has an axis of keys


class Use(NamedTuple):
    """The use of a softmax as attention."""

    softmax: Softmax
    queries: tuple[int, ...]  # axes of the logits
    columns: tuple[int, int]
    change: str = ""  # why its logits are not those of the weights
    averaged: Softmax | None = None  # the softmax that has averaged the values before
    emptied: Tensor | None = None  # the rows of the logits that a mask has emptied after the softmax


class Softmaxes:
    """The softmaxes of a thread whose results have not been used yet.

    Attributes:
        traces: the tensors that hold their weights, by identity; the same dictionary for good.
        written: the steps of softmaxes that modules write out.
    """

    def __init__(self, is_constant: Callable[[Tensor], bool]) -> None:
        self._is_constant = is_constant  # whether a tensor is a parameter or a buffer of a model
        self.traces: dict[int, _Trace] = {}
        self.written = WrittenSoftmaxes()
        self._shift: tuple[weakref.ref[Tensor], Tensor] | None = None  # logits minus their maximum, and the logits
        self._averages: deque[tuple[weakref.ref[Tensor], Softmax]] = deque(maxlen=4)  # the last averages of values

    def __bool__(self) -> bool:
        return bool(self.traces)

    def clear(self) -> None:
        """Forget all of them."""
        self.traces.clear()
        self._averages.clear()
        self.written.clear()
        self._shift = None

    def add(self, logits: Tensor, weights: Tensor, dim: int, context: Any) -> None:
        """Follow `weights`, the softmax of `logits` along `dim`."""
        if not isinstance(weights, Tensor):
            return
        axis = dim % logits.ndim
        if self._shift is not None and self._shift[0]() is logits:
            logits = self._shift[1]
        self._shift = None
        version = None if logits.is_inference() else logits._version
        axes = tuple((index,) for index in range(logits.ndim))
        self._keep(weights, Softmax(logits, axis, version, context), axes, (0, logits.shape[axis]))

    def note_shift(self, args: tuple[Any, ...], result: Any) -> None:
        """Remember logits from which their maximum is subtracted before the softmax: they are what is measured."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return
        logits, maximum = args[0], args[1]
        if logits.ndim > 3 and maximum.shape == (*logits.shape[:-1], 1) and logits.shape[-1] > 1:
            self._shift = weakref.ref(result), logits

    def copy(self, tensor: Any) -> Tensor | None:
        """Return a copy of a tensor that holds weights, before a function changes it in place; None of any other."""
        trace = self.traces.get(id(tensor))
        return None if trace is None or trace.tensor() is not tensor else tensor.detach().clone()

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        before: Tensor | None = None,
    ) -> Use | None:
        """Follow the weights among the arguments of a call to its result; return their use if this is one.

        `before` is a copy of weights that the call has changed in place.
        """
        operands = list(self._operands(args, kwargs))
        if not operands:
            return None
        call, several = _Call(func, args, kwargs or {}), len({id(trace.softmax) for _, trace in operands}) > 1
        for position, trace in () if several else operands:
            product = _product(call, position, trace, self._is_constant)
            if product is None:
                break
            if product.queries and not trace.softmax.used:
                trace.softmax.used = True
                self._forget(trace.softmax)
                return self._use(trace, product, result)
            if not product.keeps_keys:
                return None
        self._derive(call, operands, SEVERAL if several else "", result, before)
        return None

    def _use(self, trace: _Trace, product: _Product, result: Any) -> Use:
        """Return the use of a softmax, and remember what it has averaged."""
        averaged = None
        for average, softmax in self._averages:
            tensor = average()
            if tensor is not None and any(_same_storage(value, tensor) for value in product.values):
                averaged = softmax
        if isinstance(result, Tensor):
            self._averages.append((weakref.ref(result), trace.softmax))
        return Use(trace.softmax, product.queries, trace.columns, trace.changed(), averaged, trace.emptied)

    def _operands(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[tuple[int, _Trace]]:
        """Yield the arguments that hold weights, with their positions; a list counts as its items."""
        for position, argument in enumerate((*args, *(kwargs or {}).values())):
            for offset, value in enumerate(argument if isinstance(argument, list | tuple) else (argument,)):
                trace = self.traces.get(id(value))
                if trace is not None and trace.tensor() is value:
                    yield position + offset, trace

    def _derive(
        self, call: _Call, operands: list[tuple[int, _Trace]], change: str, result: Any, before: Tensor | None
    ) -> None:
        """Follow the weights to the tensors of `result`, and note whether the function may have changed them."""
        func, trace = call.func, operands[0][1]
        tensor = trace.tensor()
        if tensor is None or func in WITHOUT_WEIGHTS:
            return
        if func is Tensor.__setitem__:
            func, result = (torch.masked_fill if _is_mask(*call.args[1:]) else func), call.args[0]
        for _, other in operands:  # a function that works in place has made a new version by now
            change = change or (other.change if other.tensor() is result else other.changed())
        alone = len(operands) == 1 or func in COPIES or func in VIEWS
        arguments = (*call.args, *call.kwargs.values())
        if not change and not (alone and leaves_weights(func, arguments, tensor, trace.key_axis)):
            change = CHANGED
            if alone and may_hide_keys(func, arguments):
                trace, change = _masked(trace, tensor if before is None else before, result)
        for part in result if isinstance(result, list | tuple) else (result,):
            if isinstance(part, Tensor) and (change or part.is_floating_point()):
                self._follow_to(part, call, trace, change)

    def _follow_to(self, part: Tensor, call: _Call, trace: _Trace, change: str) -> None:
        """Follow the weights to a tensor if each of its axes comes from known axes."""
        tensor, axes, columns = trace.tensor(), trace.axes, trace.columns
        if tensor is None:
            return
        if call.func in PERMUTATIONS:
            numbered = torch.empty(*range(2, 2 + tensor.ndim), device="meta")
            axes = tuple(axes[size - 2] for size in call.func(numbered, *call.args[1:], **call.kwargs).shape)
        elif part.shape == tensor.shape:
            pass
        elif part.numel() == tensor.numel():
            axes = _reshaped(axes, tensor.shape, part.shape)
        elif part.ndim == tensor.ndim and call.func in VIEWS and _same_storage(part, tensor):
            columns = _cut(trace, tensor, part)
        elif part.ndim == tensor.ndim and call.func in MULTIPLICATIONS and self._weighs_values(call, tensor, axes):
            change = SUMMED
        elif part.ndim != tensor.ndim or call.func not in SELECTIONS:
            return
        self._keep(part, trace.softmax, axes, columns, change=change, emptied=trace.emptied)

    def _weighs_values(self, call: _Call, tensor: Tensor, axes: Axes) -> bool:
        """Whether weights are multiplied by what is the same for several queries: values, before keys are added up."""
        other = next((argument for argument in call.args if argument is not tensor), None)
        if not isinstance(other, Tensor) or self._is_constant(other):
            return False
        shape = (*(1,) * (tensor.ndim - other.ndim), *other.shape)
        sizes = zip(axes, tensor.shape, shape, strict=True)
        return any(origin and size > 1 and of_other == 1 for origin, size, of_other in sizes)

    def _keep(
        self,
        tensor: Tensor,
        softmax: Softmax,
        axes: Axes,
        columns: tuple[int, int],
        *,
        change: str = "",
        emptied: Tensor | None = None,
    ) -> None:
        number = id(tensor)

        def forget(_: object, traces: dict[int, _Trace] = self.traces) -> None:
            traces.pop(number, None)

        version = None if tensor.is_inference() else tensor._version
        self.traces[number] = _Trace(weakref.ref(tensor, forget), softmax, axes, columns, change, version, emptied)

    def _forget(self, softmax: Softmax) -> None:
        for number, trace in list(self.traces.items()):
            if trace.softmax is softmax:
                del self.traces[number]


def attention_logits(use: Use, heads: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits as [*batch, head, query, key], and one logit per head for a column that is no key, or None.

    A column that is dropped after the softmax is a sink if it is the same for all rows of a head, else a key.
    """
    softmax = use.softmax
    logits, queries = softmax.logits.detach(), list(use.queries)
    if use.emptied is not None:
        logits = logits.masked_fill(use.emptied, -torch.inf)
    if len(queries) > 1 and logits.ndim - len(queries) < 3:  # heads and queries have been merged into one axis
        queries.remove(next((axis for axis in queries if logits.shape[axis] == heads), queries[0]))
    others = [axis for axis in range(logits.ndim) if axis != softmax.axis and axis not in queries]
    if heads and len(queries) > 1 and len(others) == 2 and logits.shape[others[1]] * logits.shape[queries[0]] == heads:
        others.append(queries.pop(0))  # the heads that share a head of keys, in an einsum
    logits = logits.permute(*others, *queries, softmax.axis)
    logits = logits.flatten(len(others), -2) if len(queries) > 1 else logits
    if heads and len(others) == 1 and logits.shape[0] % heads == 0:
        logits = logits.unflatten(0, (-1, heads))
    elif heads and len(others) > 2 and logits.shape[len(others) - 1] * logits.shape[len(others) - 2] == heads:
        logits = logits.flatten(len(others) - 2, len(others) - 1)
    elif len(others) == 1:
        logits = logits.unsqueeze(1)
    start, stop = use.columns
    if (start, stop) == (0, logits.shape[-1]):
        return logits, None
    column = torch.cat([logits[..., :start], logits[..., stop:]], dim=-1)
    sinks = column[(0,) * (logits.ndim - 3)][:, 0, 0]
    if (
        column.shape[-1] > 1
        or not holds_values(column)
        or not torch.equal(column, sinks[:, None, None].expand_as(column))
    ):
        return logits, None
    return logits[..., start:stop], sinks


def holds_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values, which meta and fake tensors have not.

    >>> holds_values(torch.zeros(1)), holds_values(torch.zeros(1, device="meta"))
    (True, False)
    """
    return not tensor.is_meta and type(tensor).__name__ != "FakeTensor"


def head_count(modules: Iterator[nn.Module]) -> int | None:
    """Return the number of heads by the attributes of a module, the innermost first."""
    for module in modules:
        for owner in (module, module.__dict__.get("config")):
            for name in HEAD_COUNTS:
                count = getattr(owner, name, None)
                if type(count) is int and count > 0:
                    return count
    return None


def _product(call: _Call, position: int, trace: _Trace, is_constant: Callable[[Tensor], bool]) -> _Product | None:
    """Return what a product does with the weights at a position of its arguments; None if it is no product."""
    if call.func in PRODUCTS:
        return _matrix_product(call, position, trace, is_constant)
    if call.func in SUMS and trace.change == SUMMED:
        others = tuple(axis for origin in trace.axes for axis in origin if axis != trace.softmax.axis)
        return _Product(others) if trace.key_axis in sum_axes(call.args, call.kwargs, len(trace.axes)) else None
    return _einsum(call.args, position, trace, is_constant) if call.func is torch.functional.einsum else None


def _matrix_product(call: _Call, position: int, trace: _Trace, is_constant: Callable[[Tensor], bool]) -> _Product:
    """Return the axes of queries if a matrix product adds up the keys."""
    left, right = PRODUCTS[call.func]
    if position not in (left, right) or len(call.args) <= max(left, right):
        return _Product()
    as_given = position == left or call.func is F.linear
    axes = trace.axes if as_given else (*trace.axes[:-2], *reversed(trace.axes[-2:]))
    other = call.args[right if position == left else left]
    if len(axes) < 2 or not isinstance(other, Tensor):
        return _Product()
    if axes[-1] != (trace.softmax.axis,):
        return _Product(keeps_keys=True)
    return _Product() if is_constant(other) else _Product(axes[-2], [other])


def _einsum(args: tuple[Any, ...], position: int, trace: _Trace, is_constant: Callable[[Tensor], bool]) -> _Product:
    """Return the axes of queries if an einsum adds up the keys."""
    if not isinstance(args[0], str):
        return _Product()
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if not arrow:
        letters = inputs.replace(",", "").replace(".", "")
        output = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    term = terms.pop(position - 1)
    values = [operand for operand in _without(operands, position - 1) if not is_constant(operand)]
    before, _, after = term.partition("...")
    named = dict(zip(before, trace.axes, strict=False)) | dict(zip(reversed(after), reversed(trace.axes), strict=False))
    keys = [letter for letter, origin in named.items() if origin == (trace.softmax.axis,)]
    joined = "".join(terms)
    if len(keys) == 1 and keys[0] in output:
        return _Product(keeps_keys=True)
    if len(keys) != 1 or keys[0] not in joined or not values:
        return _Product()
    queries = [origin for letter, origin in named.items() if letter not in joined and letter in output]
    return _Product(tuple(sorted(axis for origin in queries for axis in origin)), values)


def _without(items: Any, index: int) -> list[Any]:
    return [item for number, item in enumerate(items) if number != index]


def _is_mask(index: Any, value: Any) -> bool:
    """Whether `weights[index] = value` fills what a mask hides."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(value, Tensor)


def _masked(trace: _Trace, before: Tensor, after: Any) -> tuple[_Trace, str]:
    """Return what is known of weights after a mask, and how it has changed them."""
    if not isinstance(after, Tensor) or not holds_values(before):
        return trace, ""
    keeps, emptied = after_mask(before.detach(), after.detach(), trace.key_axis)
    if not keeps or emptied is None:
        return trace, "" if keeps else HIDES
    order = [axis for origin in trace.axes for axis in origin]
    logits = trace.softmax.logits
    if sorted(order) != list(range(logits.ndim)):
        return trace, HIDES
    rows = emptied.reshape([1 if axis == trace.softmax.axis else logits.shape[axis] for axis in order])
    rows = rows.permute([order.index(axis) for axis in range(logits.ndim)])
    return trace._replace(emptied=rows if trace.emptied is None else rows | trace.emptied), ""


def _same_storage(result: Tensor, tensor: Tensor) -> bool:
    is_wrapped = cast(Any, torch._C)._functorch.is_functorch_wrapped_tensor
    if is_wrapped(result) or is_wrapped(tensor):  # which have no storage of their own
        return False
    return result.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def _cut(trace: _Trace, tensor: Tensor, result: Tensor) -> tuple[int, int]:
    """Return which keys a slice of the weights holds."""
    axis = trace.key_axis
    if axis is None or result.shape[axis] == tensor.shape[axis]:
        return trace.columns
    offset = int(result.storage_offset() - tensor.storage_offset()) // max(1, tensor.stride(axis))
    first = trace.columns[0] + offset % tensor.shape[axis]
    return first, first + result.shape[axis]


def _reshaped(axes: Axes, old: torch.Size, new: torch.Size) -> Axes:
    """Return the axes after a reshape, matching groups of axes of the same product in order."""
    result: list[tuple[int, ...]] = []
    left, right = 0, 0
    while right < len(new):
        last_left, last_right = left + 1, right + 1
        while math.prod(old[left:last_left]) != math.prod(new[right:last_right]):
            if math.prod(old[left:last_left]) < math.prod(new[right:last_right]) and last_left < len(old):
                last_left += 1
            elif last_right < len(new):
                last_right += 1
            else:
                break
        group = range(left, min(last_left, len(old)))
        longer = [index for index in group if old[index] > 1] or group  # an axis of length 1 is no part of a longer one
        origin = tuple(axis for index in longer for axis in axes[index])
        result += [origin if new[index] > 1 or last_right - right == 1 else () for index in range(right, last_right)]
        left, right = last_left, last_right
    return tuple(result)
