"""Hooks on modules, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn


class Hooks(NamedTuple):
    """What is called before and after each call of a module.

    Attributes:
        module: the module.
        enter: called with the module and its positional arguments, and with a dictionary of the others if `kwargs`.
        leave: called with the module, its positional arguments and its output, which is None if it raises an error.
        kwargs: whether `enter` takes the keyword arguments.
    """

    module: nn.Module
    enter: Callable[..., None]
    leave: Callable[..., None]
    kwargs: bool = False


def around(outer: Hooks, inner: Hooks) -> Hooks:
    """Return one pair of hooks for two pairs of a module that take keyword arguments: `outer` enters first.

    A pair costs more to register, to call and to remove than what ours do.

    >>> entered = []
    >>> outer, inner = (Hooks(nn.ReLU(), lambda *_, n=n: entered.append(n), print, kwargs=True) for n in "ab")
    >>> around(outer, inner).enter(nn.ReLU(), (), {})
    >>> entered
    ['a', 'b']
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outer.enter(module, args, kwargs)
        inner.enter(module, args, kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inner.leave(module, args, output)
        outer.leave(module, args, output)

    return Hooks(outer.module, enter, leave, kwargs=True)


class _Hook(partial[None]):
    """A hook of the watched module alone: in a copy of it, or when it is unpickled, it does nothing.

    The context removes its hooks from the module itself, and knows nothing of copies that are made inside.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_ignore_arguments,)


def _ignore_arguments(*_: object) -> None: ...


@contextmanager
def module_hooks(hooks: Iterable[Hooks]) -> Iterator[None]:
    """Register hooks on modules: `enter` runs before all other hooks of its module, `leave` also after an error.

    >>> names, layer = [], nn.Identity()
    >>> with module_hooks([Hooks(layer, lambda *_: names.append("in"), lambda *_: names.append("out"))]):
    ...     layer(1), layer(2)
    (1, 2)
    >>> layer(3), names
    (3, ['in', 'out', 'in', 'out'])
    """
    handles: list[Any] = []
    try:
        for module, enter, leave, kwargs in hooks:
            handles.append(module.register_forward_pre_hook(_Hook(enter), prepend=True, with_kwargs=kwargs))
            handles.append(module.register_forward_hook(_Hook(leave), always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
