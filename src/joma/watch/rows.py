"""Find the query positions of an attention that are real tokens, from the masks that the model is called with.

A mask hides padding as a key, but a padded query still attends to the tokens before it, and its entropy would enter the
mean. Hooks note the masks that each module of a model receives; the masks of the innermost module that has one of the
right shape hold for an attention. Where they leave the rows open, the layer is listed with the reason.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from joma.arguments import InputError
from joma.probes.attention_call import AttentionCall
from joma.watch.layouts import rearranged_rows
from joma.watch.masks import (
    Mask,
    ModuleCall,
    Parameters,
    is_visible,
    not_padding,
    real_tokens,
    seen_tokens,
    shows_all,
    visible,
)
from joma.watch.module_hooks import Hooks, around, module_hooks
from joma.watch.sequence_starts import starts_by_mask

CHOICES = ("masks", "all")
_REMEDY = "give `rows` as a tensor [batch, query], or watch with reduce='none' and choose them"
_UNNAMED_MASK = "its mask hides tokens from all queries, and no argument such as `attention_mask` says what they are"


class RowsUnknown(UserWarning):
    """The model's masks have padding, but do not say which rows of an attention are padded: all its rows count."""


def check_rows(rows: Any) -> Tensor | str:
    """Return `rows` if it is a tensor [batch, query], "masks" or "all", else raise an error.

    >>> check_rows("masks")
    'masks'
    """
    if isinstance(rows, Tensor) or (isinstance(rows, str) and rows in CHOICES):
        return rows
    expected = 'a boolean tensor [batch, query], "masks" or "all"'
    got = repr(rows) if isinstance(rows, str) else type(rows).__name__
    raise InputError("rows", expected, got, 'use "masks" for the rows that the model\'s own masks mark as tokens')


class RowMasks:
    """The rows that count in each attention of a watched model.

    Attributes:
        rows: a tensor [batch, query], "masks" or "all"; may be changed between forward passes.
        unknown: for each layer whose rows the masks leave open, the reason; all its rows count.
    """

    def __init__(self, rows: Tensor | str = "masks", remedy: str = _REMEDY) -> None:
        self.rows = check_rows(rows)
        self.unknown: dict[str, str] = {}
        self._remedy = remedy  # the end of the warning
        self._modules: Mapping[str, nn.Module] = {}
        self._calls: list[ModuleCall] = []  # of the modules that are being called, the innermost last
        self._results: dict[tuple[Any, ...], tuple[Tensor, Any]] = {}  # of `_once`, with the tensors they are of
        self._suspects: dict[str, Tensor] = {}  # whether the masks of a layer show every token
        self._thread = threading.get_ident()

    @contextmanager
    def hooks(self, modules: Mapping[str, nn.Module], outer: Iterable[Hooks] = ()) -> Iterator[None]:
        """Note the masks of every call of `modules` inside the context, and warn once of rows that are unknown.

        `outer` are other hooks that take keyword arguments, each around ours of the same module.
        """
        self._modules = modules
        hooks: dict[nn.Module, Hooks] = {}
        for name, parameters in _parameters(modules).items():
            if parameters.has_masks:
                enter, leave = partial(self._enter, name, parameters), partial(self._leave, name)
                hooks[modules[name]] = Hooks(modules[name], enter, leave, kwargs=True)
        for other in outer:
            inner = hooks.get(other.module)
            hooks[other.module] = other if inner is None else around(other, inner)
        try:
            with module_hooks(hooks.values()):
                yield
        finally:
            self._modules = {}
            self._calls.clear()
            self._results.clear()
        suspects = (layer for layer, shown in self._suspects.items() if not bool(shown))
        self.unknown |= {layer: _UNNAMED_MASK for layer in suspects if layer not in self.unknown}
        if self.unknown:
            layers = ", ".join(list(self.unknown)[:4]) + (" …" if len(self.unknown) > 4 else "")
            message = (
                f"all rows of {layers} count, padded ones too: {next(iter(self.unknown.values()))}; {self._remedy}."
            )
            warnings.warn(message, RowsUnknown, stacklevel=5)

    def _enter(
        self, name: str, parameters: Parameters, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the call of a module; an exception may have left an earlier one behind."""
        if threading.get_ident() == self._thread:
            self._forget(name)
            self._calls.append(ModuleCall(name, parameters, args, kwargs))

    def _leave(self, name: str, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Forget the call of a module and all calls inside it."""
        for depth, call in enumerate(self._calls):
            if call.name == name:
                del self._calls[depth:]
                break
        if not self._calls:
            self._results.clear()

    def rows_for(
        self, layer: str, batch: int, queries: int, device: torch.device | None = None
    ) -> Bool[Tensor, "batch query"] | None:
        """Return which rows of the attention [batch, head, query] that `layer` is computing count; None for all."""
        if isinstance(self.rows, Tensor):
            return _given_rows(self.rows, batch, queries, device)
        if self.rows == "all" or not any(call.has_masks for call in self._calls):
            return None
        misfits: list[Mask] = []
        for mask in self._query_masks(layer):
            real = None if mask.doubtful else self._fit(mask, batch, queries)
            if real is not None:
                return real.to(device) if device is not None else real
            misfits.append(mask)
        for mask in misfits:
            if mask.read is not seen_tokens and not mask.doubtful:
                real = rearranged_rows(self._real(mask), self._modules, layer, (batch, queries))
                if real is not None:
                    return real.to(device) if device is not None else real
        self._note_unknown(layer, misfits, (batch, queries))
        return None

    def suspect(self, layer: str, call: AttentionCall, batch: int, queries: int) -> None:
        """Note that an attention's mask may hide padding that no argument of a known name describes.

        A token that no query of its own sequence sees is padding; whether there is one is looked up at the end.
        """
        mask = call.mask if call.logits is None else call.logits
        if self.rows == "all" or not isinstance(mask, Tensor) or self.reads_another:
            return
        if mask.ndim == 4 and mask.shape[0] == batch and mask.shape[-1] == queries:
            mask = mask.detach()
            shown = seen_tokens(mask).all() if call.logits is None else shows_all(mask)
            self._suspects[layer] = shown & self._suspects[layer] if layer in self._suspects else shown

    def first_tokens(
        self, layer: str, batch: int, queries: int, keys: int, shown: Int[Tensor, "some_batch query"] | None = None
    ) -> Int[Tensor, "batch query"] | None:
        """Return the index of the first real key of each row's sequence; None if it is key 0 in every row.

        With padding on the left and in packed sequences key 0 is padding, or belongs to another sequence. A negative
        index is that of a token which is no longer among the keys, as a cache of a sliding window drops it. `shown` is
        where the sequences begin by the keys that the attention itself shows: of what is known the last start counts.
        """
        if self.reads_another:
            masks = (mask for call in reversed(self._calls) for mask in call.keys(layer))
            real = next((real for mask in masks if (real := self._fit(mask, batch, keys)) is not None), None)
            starts = shown if real is None else real.int().argmax(-1, keepdim=True)
        else:
            starts = self._known_starts(layer, batch, queries, keys)
            if shown is not None:
                starts = shown if starts is None else torch.where(starts < 0, starts, torch.maximum(starts, shown))
        return None if starts is None else starts.expand(batch, queries)

    def _known_starts(
        self, layer: str, batch: int, queries: int, keys: int
    ) -> Int[Tensor, "some_batch some_query"] | None:
        """Return where each row's sequence begins by the masks and the position ids of the modules."""
        positions = self._positions(batch, queries)
        starts = None if positions is None or queries != keys else self._once(_starts_by_position, positions)
        for mask in self._query_masks(layer):
            if mask.read in (real_tokens, not_padding) and self._fit(mask, batch, queries) is not None:
                by_mask = self._starts(mask, batch, queries, keys)
                if starts is None or by_mask is None:
                    return starts if by_mask is None else by_mask
                return torch.where(by_mask < 0, by_mask, torch.maximum(starts, by_mask))
        if starts is None:
            starts = self._cached_starts(self._visible_keys(layer, batch, keys), positions, queries, keys)
        return starts

    def _starts(self, mask: Mask, batch: int, queries: int, keys: int) -> Int[Tensor, "batch query"] | None:
        """Return where each row's sequence starts by a mask; None if at key 0, or if the keys are not the mask's."""
        numbered = mask.read is real_tokens and not mask.values.is_floating_point()
        starts = self._once(_starts_by_number, mask.values if numbered else self._real(mask))
        sequences, length = self._real(mask).shape
        dropped = max(0, length - keys)  # from the cache of a sliding window
        if sequences not in (1, batch) or (dropped and length == queries):
            return None
        if starts is None:
            return torch.full((batch, queries), -dropped, device=mask.values.device) if dropped else None
        return (starts[:, -queries:] - dropped if dropped else starts[:, -queries:]).expand(batch, queries)

    def _positions(self, batch: int, queries: int) -> Int[Tensor, "some_batch query"] | None:
        """Return the position ids of the queries, by the innermost module that has them."""
        arguments = (call.arguments.get("position_ids") for call in reversed(self._calls))
        shapes = (1, queries), (batch, queries)
        return next((positions for positions in arguments if positions is not None and positions.shape in shapes), None)

    def _visible_keys(self, layer: str, batch: int, keys: int) -> Tensor | None:
        """Return the mask [batch, head, query, key] of a layer, if there is one."""
        masks = (mask.values for mask in self._query_masks(layer) if mask.read is seen_tokens)
        return next((mask for mask in masks if mask.ndim == 4 and mask.shape[::3] in ((1, keys), (batch, keys))), None)

    def _cached_starts(
        self, mask: Tensor | None, positions: Tensor | None, queries: int, keys: int
    ) -> Int[Tensor, "some_batch some_query"] | None:
        """Return where each row's sequence starts by the visible keys, and by the positions of queries after a cache.

        A query's own key is the last that it sees, and its position the number of keys from the first token to it.
        """
        cached = positions if queries < keys else None
        if mask is None:
            if cached is None or self._once(_highest, cached) < keys:
                return None
            return torch.arange(keys - queries, keys, device=cached.device) - cached
        if queries == keys == mask.shape[2]:
            return self._once(starts_by_mask, mask)
        first = self._once(_first_visible, mask)
        if cached is None or mask.shape[2] != queries:
            return first
        return torch.minimum(first, self._once(_last_visible, mask) - cached)

    @property
    def reads_another(self) -> bool:
        """Whether the attention that is being computed reads another sequence."""
        return bool(self._calls) and self._calls[-1].reads_another

    def _query_masks(self, layer: str) -> Iterator[Mask]:
        """Yield the masks that may hold for the queries of a layer: those of tokens, the innermost first, then others.

        The masks [batch, head, query, key] of inner modules are made from those of the outer ones.
        """
        visible: list[Mask] = []
        for call in reversed(self._calls):
            for mask in call.queries(layer):
                if mask.read is seen_tokens:
                    visible.insert(0, mask)
                else:
                    yield mask
            if call.is_image:
                break
        if not self.reads_another:
            yield from visible

    def _real(self, mask: Mask) -> Bool[Tensor, "batch position"]:
        return self._once(mask.read, mask.values)

    def _once(self, function: Callable[..., Any], values: Tensor, *arguments: int) -> Any:
        """Return `function(values, *arguments)`, computed once in each pass, however many layers ask for it."""
        index = (function, id(values), *arguments)
        if index not in self._results:
            self._results[index] = values, function(values.detach(), *arguments)
        return self._results[index][1]

    def _fit(self, mask: Mask, batch: int, queries: int) -> Bool[Tensor, "batch query"] | None:
        """Return the mask for this attention, or None if its shape does not fit.

        With a cache the mask is longer than the queries, which are its last positions. Attention within blocks of a
        sequence has each block as a sequence of its own; the last one is filled up with padding.
        """
        real = self._real(mask)
        if real.shape[0] not in (1, batch):
            blocks = _block_count(real.shape, batch, queries)
            return self._once(_in_blocks, real, blocks, queries) if blocks else None
        if real.shape[1] > queries == mask.length:
            real = self._once(_last_columns, real, queries)
        return self._once(_expand, real, batch) if real.shape[1] == queries else None

    def _note_unknown(self, layer: str, misfits: list[Mask], shape: tuple[int, int]) -> None:
        """List a layer whose rows are unknown: a mask with padding is of another shape, or may be the keys' alone."""
        if layer in self.unknown:
            return
        for mask in misfits:
            if mask.read is not seen_tokens and not bool(self._real(mask).all()):
                got = f"`{mask.name}` {tuple(mask.values.shape)}"
                doubt = f"does not fit its attention [batch, query] = {shape}"
                self.unknown[layer] = f"{got} {'may hold for its keys alone' if mask.doubtful else doubt}"
                return


def _parameters(modules: Mapping[str, nn.Module]) -> dict[str, Parameters]:
    """Return the names of the arguments of each module's forward, and what follows from them."""
    by_class = {kind: _signature(kind.forward) for kind in set(map(type, modules.values()))}
    return {
        name: Parameters(_names(module.forward)) if "forward" in module.__dict__ else by_class[type(module)]
        for name, module in modules.items()
    }


@lru_cache(maxsize=1024)
def _signature(method: Callable[..., Any]) -> Parameters:
    """Return the names of the arguments of a method without `self`; reading a signature takes longer than a hook."""
    names = _names(method)
    return Parameters(dict(list(names.items())[1:]))


def _names(function: Callable[..., Any]) -> dict[str, bool]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function without a signature, such as one in C
        return {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = (parameter for parameter in parameters if parameter.kind not in variable)
    return {parameter.name: parameter.kind is not inspect.Parameter.KEYWORD_ONLY for parameter in named}


def _given_rows(rows: Tensor, batch: int, queries: int, device: torch.device | None) -> Bool[Tensor, "batch query"]:
    """Return the user's rows as a mask for this attention."""
    if rows.shape != (batch, queries):
        remedy = 'use rows="masks", which follows the model\'s own masks through every shape'
        expected = f"of shape {(batch, queries)} like the recorded attention"
        raise InputError("rows", expected, tuple(rows.shape), remedy)
    return rows.to(device=device, dtype=torch.bool)


def _expand(values: Tensor, batch: int) -> Tensor:
    return values if values.shape[0] == batch else values.expand(batch, -1)


def _block_count(shape: torch.Size, batch: int, queries: int) -> int:
    """Return in how many blocks of `queries` positions each sequence of a mask is cut to give `batch`, or 0."""
    blocks, rest = divmod(batch, shape[0])
    return blocks if blocks > 1 and not rest and 0 <= blocks * queries - shape[1] < queries else 0


def _in_blocks(real: Tensor, blocks: int, queries: int) -> Tensor:
    return nn.functional.pad(real, (0, blocks * queries - real.shape[1])).reshape(-1, queries)


def _last_columns(values: Tensor, count: int) -> Tensor:
    return values[:, -count:]


def _starts_by_number(numbers: Tensor) -> Int[Tensor, "batch position"] | None:
    """Return where the sequence of each position starts; a larger number than before begins a new sequence."""
    largest = numbers.int().cummax(-1).values
    return _last_true(largest > nn.functional.pad(largest[:, :-1], (1, 0)))


def _starts_by_position(positions: Tensor) -> Int[Tensor, "batch position"] | None:
    """Return where the sequence of each position starts, from position ids that start at 0 in each sequence."""
    return _last_true(positions == 0)


def _last_true(starts: Bool[Tensor, "batch position"]) -> Int[Tensor, "batch position"] | None:
    """Return for each position the last one up to it that is True, or None if this is the first everywhere."""
    positions = torch.arange(starts.shape[-1], device=starts.device)
    last = torch.where(starts, positions, 0).cummax(-1).values
    return last if bool(last.any()) else None


def _first_visible(mask: Tensor) -> Int[Tensor, "batch 1"]:
    """Return the first key that any query of a mask [batch, head, query, key] sees."""
    return visible(mask, -2).int().argmax(-1, keepdim=True)


def _last_visible(mask: Tensor) -> Int[Tensor, "batch query"]:
    """Return the last key that each query of a mask [batch, head, query, key] sees, in the first head."""
    return mask.shape[-1] - 1 - is_visible(mask[:, 0]).flip(-1).int().argmax(-1)


def _highest(positions: Tensor) -> int:
    return int(positions.max())
