"""Let functions accept the former names of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from joma.arguments import InputError

T = TypeVar("T")
Parameters = ParamSpec("Parameters")


def old_names(**renamed: str) -> Callable[[Callable[Parameters, T]], Callable[Parameters, T]]:
    """Let a function accept former names of its keyword arguments: `old_names(t="times")`.

    >>> @old_names(t="times")
    ... def double(times):
    ...     return 2 * times
    >>> double(t=3), double(times=3), double(3)
    (6, 6, 6)
    """

    def decorate(function: Callable[Parameters, T]) -> Callable[Parameters, T]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
            for old, new in renamed.items():
                if old in kwargs:
                    if new in kwargs:
                        raise InputError(old, f"left out where `{new}` is given", "both", f"give `{new}` alone")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
