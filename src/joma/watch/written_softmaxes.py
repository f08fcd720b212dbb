"""Recognise a softmax that a module writes out: exponentials divided by their sum, or the exponential of a log-softmax.

Each step is known by the identity and the version of its tensors, so that nothing can have changed them in between.
Tensors of inference mode have no version; their steps are not remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EXPONENTIALS = frozenset((torch.exp, Tensor.exp))
LOG_SOFTMAXES = frozenset((torch.log_softmax, F.log_softmax, Tensor.log_softmax, torch.special.log_softmax))
SUMS = frozenset((torch.sum, Tensor.sum))
QUOTIENTS = frozenset(
    (torch.div, Tensor.div, torch.divide, Tensor.divide, torch.true_divide, Tensor.true_divide, Tensor.__truediv__)
)
STEPS = EXPONENTIALS | LOG_SOFTMAXES | SUMS | QUOTIENTS


class _Step(NamedTuple):
    """A step on the way to a softmax: its result, and the logits that it started from."""

    result: weakref.ref[Tensor]
    version: int  # of the result
    logits: Tensor
    logits_version: int
    axis: int | None = None  # of the keys, once it is known

    def is_result(self, tensor: Any) -> bool:
        """Return whether a tensor is the result of this step, and neither it nor the logits have been changed since."""
        return (
            self.result() is tensor and tensor._version == self.version and self.logits._version == self.logits_version
        )


class WrittenSoftmaxes:
    """The last steps of a thread that may become a softmax."""

    def __init__(self) -> None:
        self._logarithm: _Step | None = None
        self._exponential: _Step | None = None
        self._sum: _Step | None = None

    def clear(self) -> None:
        """Forget all steps."""
        self._logarithm = self._exponential = self._sum = None

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[Tensor, int] | None:
        """Remember a step; return the logits and the axis of the keys if the result is a softmax."""
        if not args or not _has_version(args[0]) or not _has_version(result) or args[0].ndim < 3:
            return None
        if func in LOG_SOFTMAXES:
            self._logarithm = _step(result, args[0], _axis(args, kwargs))
        elif func in EXPONENTIALS:
            return self._after_logarithm(args[0], result)
        elif func in SUMS:
            if self._exponential is not None and self._exponential.is_result(args[0]) and _keeps_dim(args, kwargs):
                self._sum = _step(result, self._exponential.logits, _axis(args, kwargs))
        elif len(args) == 2 and not kwargs:
            return self._quotient(*args)
        return None

    def _after_logarithm(self, tensor: Tensor, result: Tensor) -> tuple[Tensor, int] | None:
        """Return the logits of a log-softmax whose exponential is taken, or remember the exponential of a tensor."""
        step = self._logarithm
        if step is None or step.axis is None or not step.is_result(tensor):
            self._exponential = _step(result, tensor)
            return None
        self.clear()
        return step.logits, step.axis

    def _quotient(self, numerator: Any, denominator: Any) -> tuple[Tensor, int] | None:
        """Return the logits if exponentials are divided by their own sum."""
        exponential, total = self._exponential, self._sum
        if exponential is None or total is None or total.axis is None or total.logits is not exponential.logits:
            return None
        if not exponential.is_result(numerator) or not total.is_result(denominator):
            return None
        self.clear()
        return exponential.logits, total.axis


def _step(result: Tensor, logits: Tensor, axis: int | None = None) -> _Step:
    return _Step(weakref.ref(result), result._version, logits, logits._version, axis)


def _has_version(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not tensor.is_inference()


def _axis(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the one axis that a function works along; None for several or none."""
    axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if isinstance(axis, list | tuple) and len(axis) == 1:
        axis = axis[0]
    return axis if type(axis) is int else None


def sum_axes(args: tuple[Any, ...], kwargs: Mapping[str, Any], ndim: int) -> set[int]:
    """Return the axes that a sum adds up, counted from the first.

    >>> sum_axes((torch.ones(2, 3), -1), {}, 2), sum_axes((torch.ones(2, 3),), {}, 2)
    ({1}, {0, 1})
    """
    axes = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    axes = range(ndim) if axes is None else axes
    return {axis % ndim for axis in ((axes,) if isinstance(axes, int) else axes)}


def _keeps_dim(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("keepdim", kwargs.get("keepdims")))
