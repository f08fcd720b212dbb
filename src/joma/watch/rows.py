"""Find the query positions of an attention that are real tokens, from the masks that the model is called with.

A mask hides padding as a key, but a padded query still attends to the tokens before it, and its entropy would enter the
mean. Hooks note the masks that each module of a model receives; the masks of the innermost module that has one of the
right shape hold for an attention. Where they leave the rows open, the layer is listed with the reason.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from joma.arguments import InputError

CHOICES = ("masks", "all")
HIDDEN = -1e4  # an additive mask at or below this value hides a key: exp(−10⁴) is 0
IGNORED_LABEL = -100  # the label of a padded position, as torch's cross entropy ignores it
_REAL_MASKS = ("attention_mask",)  # nonzero marks a real token
_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "decoder_padding_mask")
_MASKS_OF_OTHERS = ("encoder_attention_mask", "memory_key_padding_mask", "memory_mask", "context_mask")
_DECODER_ARGUMENTS = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds")
_MASKS = {*_REAL_MASKS, *_PADDING_MASKS, *_MASKS_OF_OTHERS, _DECODER_ARGUMENTS[0]}
_OTHER_SEQUENCES = ("key_value_states", "encoder_hidden_states", "memory", "context")
_IMAGES = ("pixel_values", "pixel_values_videos", "images", "image")
_TOKENS = ("input_ids", "inputs_embeds")
_HOOKED = {
    *_REAL_MASKS, *_PADDING_MASKS, *_MASKS_OF_OTHERS[:2], *_DECODER_ARGUMENTS[:1], "key_value_states", *_IMAGES
}  # fmt: skip
_KEPT = {*_HOOKED, *_MASKS_OF_OTHERS, *_DECODER_ARGUMENTS, *_OTHER_SEQUENCES, *_TOKENS} | {
    "hidden_states",
    "labels",
    "position_ids",
    "query",
    "key",
}


class RowsUnknown(UserWarning):
    """The model's masks have padding, but do not say which rows of an attention are padded: all its rows count."""


class Mask(NamedTuple):
    """A mask that a module was called with.

    Attributes:
        name: the argument.
        values: the tensor.
        read: the function that returns True for real tokens.
        length: how many positions the module's own input has, or 0 if unknown: the rest of the mask is of a cache.
        doubtful: whether it may be the mask of the keys alone.
    """

    name: str
    values: Tensor
    read: Callable[[Tensor], Tensor]
    length: int = 0
    doubtful: bool = False


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


def real_tokens(mask: Tensor) -> Bool[Tensor, "batch position"]:
    """Return True where a mask, or the numbers of packed sequences, mark a real token.

    >>> real_tokens(torch.tensor([[1, 1, 2, 0]])), real_tokens(torch.tensor([[0.0, -torch.inf]]))
    (tensor([[ True,  True,  True, False]]), tensor([[ True, False]]))
    """
    if not mask.is_floating_point():
        return mask != 0
    additive = (mask < 0).any() | (mask > 1).any() | (mask == 0).all()  # such as Longformer's: 0 is visible
    return torch.where(additive, mask > HIDDEN, mask != 0)


def not_padding(mask: Tensor) -> Bool[Tensor, "batch position"]:
    """Return True where torch's padding mask, which is True or −∞ for padding, leaves a position."""
    mask = mask if mask.ndim > 1 else mask[None]
    return mask > HIDDEN if mask.is_floating_point() else mask == 0


def labelled(labels: Tensor) -> Bool[Tensor, "batch position"]:
    """Return True where a position has a label."""
    return labels != IGNORED_LABEL


def seen_tokens(mask: Tensor) -> Bool[Tensor, "batch position"]:
    """Return True for the queries of a mask [batch, head, query, key] that see a key and, if it is square, are seen.

    A token that no query sees is padding, unless the mask hides every token from itself.
    """
    mask = mask if mask.ndim == 4 else mask[:, None]
    mask = mask[:, :1] if mask.stride(1) == 0 else mask  # expanded over heads
    rows = _visible(mask, -1)
    queries, keys = mask.shape[-2:]
    if queries == 1 and keys > 1:
        return _visible(mask, -2)
    if queries != keys:
        return rows
    diagonal = _visible(mask.diagonal(dim1=-2, dim2=-1)[:, :, None], -2)
    return rows & (_visible(mask, -2) | ~diagonal.any(-1, keepdim=True))


def _visible(mask: Tensor, dim: int) -> Bool[Tensor, "batch position"]:
    """Return whether any element along an axis, and of any head, is visible."""
    largest = mask.amax((1, dim)) if mask.dtype != torch.bool else mask.any(dim).any(1)
    return largest > HIDDEN if mask.is_floating_point() else largest != 0


class ModuleCall:
    """The arguments of one call of a module that say which tokens are real."""

    def __init__(
        self, name: str, parameters: Mapping[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name, self.parameters = name, parameters
        positional = (name for name, is_positional in parameters.items() if is_positional)
        given = dict(zip(positional, args, strict=False)) | kwargs
        self.first = args[0] if args else given.get(next(iter(parameters), ""))
        self.arguments = {name: value for name, value in given.items() if name in _KEPT and isinstance(value, Tensor)}
        self.two_sided = any(name in parameters for name in _DECODER_ARGUMENTS) or (
            "src_key_padding_mask" in parameters and "tgt_key_padding_mask" in parameters
        )
        self.has_masks = not _MASKS.isdisjoint(self.arguments) or (self.two_sided and "labels" in self.arguments)

    @property
    def is_image(self) -> bool:
        """Whether the call is on images alone, to which no mask of a text applies."""
        return any(name in self.arguments for name in _IMAGES) and not any(name in self.arguments for name in _TOKENS)

    @property
    def reads_another(self) -> bool:
        """Whether the call is given another sequence to attend to."""
        query, key = self.arguments.get("query"), self.arguments.get("key")
        if query is not None and key is not None:
            return query is not key
        return any(name in self.arguments for name in _OTHER_SEQUENCES)

    @property
    def is_cross(self) -> bool:
        """Whether the mask of another sequence stands under the name of the queries' own."""
        return self.reads_another and not any(name in self.parameters for name in _MASKS_OF_OTHERS)

    @property
    def may_be_self(self) -> bool:
        """Whether the other sequence could be the queries' own, as far as names and shapes tell."""
        query, key = self.arguments.get("query", self.first), self.arguments.get("key")
        others = [key, *(self.arguments.get(name) for name in _OTHER_SEQUENCES[1:])]
        return isinstance(query, Tensor) and any(key is not None and key.shape[:2] == query.shape[:2] for key in others)

    def side(self, layer: str) -> str:
        """Return "encoder" or "decoder", where an encoder-decoder's layer is, or ""."""
        for part in layer[len(self.name) :].lower().split("."):
            if ("encoder" in part) != ("decoder" in part):
                return "encoder" if "encoder" in part else "decoder"
        return ""

    def queries(self, layer: str) -> Iterator[Mask]:
        """Yield the masks that hold for the queries of a layer."""
        side = self.side(layer) if self.two_sided else ""
        if side == "decoder":
            decoder_masks = ("decoder_attention_mask", "tgt_key_padding_mask", "decoder_padding_mask")
            masks = list(self._masks(decoder_masks, *_DECODER_ARGUMENTS[1:]))
            labels = self.arguments.get("labels")
            if not masks and labels is not None and labels.ndim == 2 and not labels.is_floating_point():
                masks = [Mask("labels", labels, labelled)]
            yield from masks
        elif side == "encoder":
            yield from self._masks((*_REAL_MASKS, "src_key_padding_mask"), *_TOKENS)
        elif not self.two_sided and (not self.is_cross or self.may_be_self):
            for mask in self._masks((*_REAL_MASKS, *_PADDING_MASKS), *_TOKENS, "hidden_states"):
                yield mask._replace(doubtful=self.is_cross)

    def keys(self, layer: str) -> Iterator[Mask]:
        """Yield the masks [batch, key] of the other sequence that a layer attends to."""
        names = _MASKS_OF_OTHERS[:2]
        if self.two_sided:
            names = (*_REAL_MASKS, *names, "src_key_padding_mask") if self.side(layer) == "decoder" else ()
        elif self.is_cross:
            names = (*_REAL_MASKS, "key_padding_mask")
        for mask in self._masks(names):
            if mask.read is not seen_tokens:
                yield mask._replace(length=0)

    def _masks(self, names: tuple[str, ...], *inputs: str) -> Iterator[Mask]:
        """Yield the arguments of these names, with the length of the first of these inputs that was given."""
        tensors = [*(self.arguments.get(name) for name in inputs), self.first]
        given = next((tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim > 1), None)
        for name in names:
            values = self.arguments.get(name)
            if values is None:
                continue
            padding = "padding" in name
            length = 0 if padding or given is None or given.shape[0] != values.shape[0] else given.shape[1]
            if values.ndim <= 2 and (padding or values.ndim == 2):
                yield Mask(name, values, not_padding if padding else real_tokens, length)
            elif values.ndim in (3, 4) and not padding:
                yield Mask(name, values, seen_tokens)


class RowMasks:
    """The rows that count in each attention of a watched model.

    Attributes:
        rows: a tensor [batch, query], "masks" or "all"; may be changed between forward passes.
        unknown: for each layer whose rows the masks leave open, the reason; all its rows count.
    """

    def __init__(self, rows: Tensor | str = "masks") -> None:
        self.rows = check_rows(rows)
        self.unknown: dict[str, str] = {}
        self._calls: list[ModuleCall] = []  # of the modules that are being called, the innermost last
        self._results: dict[tuple[Any, ...], tuple[Tensor, Any]] = {}  # of `_once`, with the tensors they are of
        self._suspects: dict[str, Tensor] = {}  # whether the masks of a layer show every token
        self._thread = threading.get_ident()

    @contextmanager
    def hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Note the masks of every call of `modules` inside the context, and warn once of rows that are unknown."""
        handles = []
        try:
            for name, module in modules.items():
                parameters = _parameters(module)
                if not _HOOKED.isdisjoint(parameters):
                    handles += self._hook(name, module, parameters)
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._calls.clear()
            self._results.clear()
        reason = "its mask hides tokens from all queries, and no argument such as `attention_mask` says what they are"
        suspects = (layer for layer, shown in self._suspects.items() if not bool(shown))
        self.unknown |= {layer: reason for layer in suspects if layer not in self.unknown}
        if self.unknown:
            layers = ", ".join(list(self.unknown)[:4]) + (" …" if len(self.unknown) > 4 else "")
            reason = next(iter(self.unknown.values()))
            message = f"all rows of {layers} count, padded ones too: {reason}; use reduce='none' and choose the rows."
            warnings.warn(message, RowsUnknown, stacklevel=5)

    def _hook(self, name: str, module: nn.Module, parameters: Mapping[str, bool]) -> Iterator[Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == self._thread:
                self._leave(name)  # an exception may have left it behind
                self._calls.append(ModuleCall(name, parameters, args, kwargs))

        def leave(*_: Any) -> None:
            if threading.get_ident() == self._thread:
                self._leave(name)

        yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield module.register_forward_hook(leave, always_call=True)

    def _leave(self, name: str) -> None:
        """Forget the call of a module and all calls inside it."""
        depth = next((depth for depth, call in enumerate(self._calls) if call.name == name), len(self._calls))
        del self._calls[depth:]
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
        self._note_unknown(layer, misfits, (batch, queries))
        return None

    def suspect(self, layer: str, mask: object, batch: int, queries: int) -> None:
        """Note that an attention's mask may hide padding of which no argument of a known name tells.

        A token that no query of its own sequence sees is padding; whether there is one is looked up at the end.
        """
        if self.rows == "all" or not isinstance(mask, Tensor) or self._reads_another():
            return
        if mask.ndim == 4 and mask.shape[0] == batch > 1 and mask.shape[-1] == queries:
            shown = seen_tokens(mask.detach()).all()
            self._suspects[layer] = shown & self._suspects[layer] if layer in self._suspects else shown

    def first_tokens(self, layer: str, batch: int, queries: int, keys: int) -> Int[Tensor, "batch query"] | None:
        """Return the index of the first real key of each row's sequence; None if it is key 0 in every row.

        With padding on the left and in packed sequences key 0 is padding, or belongs to another sequence.
        """
        if self._reads_another():
            masks = (mask for call in reversed(self._calls) for mask in call.keys(layer))
            real = next((real for mask in masks if (real := self._fit(mask, batch, keys)) is not None), None)
            return None if real is None else real.int().argmax(-1, keepdim=True).expand(batch, queries)
        for mask in self._query_masks(layer):
            if mask.read in (real_tokens, not_padding) and self._fit(mask, batch, queries) is not None:
                return self._starts(mask, batch, queries, keys)
        starts = self._packed_starts(batch, queries) if queries == keys else None
        if starts is not None:
            return starts
        for mask in self._query_masks(layer):
            if mask.read is seen_tokens and mask.values.ndim == 4 and mask.values.shape[::3] == (batch, keys):
                visible = self._once(_visible, mask.values, -2)
                return visible.int().argmax(-1, keepdim=True).expand(batch, queries)
        return None

    def _starts(self, mask: Mask, batch: int, queries: int, keys: int) -> Int[Tensor, "batch query"] | None:
        """Return where each row's sequence starts by a mask; None if at key 0, or if the keys are not the mask's."""
        numbered = mask.read is real_tokens and not mask.values.is_floating_point()
        starts = self._once(_starts_by_number, mask.values if numbered else self._real(mask))
        return None if starts is None or starts.shape[1] > keys else _expand(starts[:, -queries:], batch)

    def _packed_starts(self, batch: int, queries: int) -> Int[Tensor, "batch query"] | None:
        """Return where each row's sequence starts by the position ids, which start at 0 again in each sequence."""
        for call in reversed(self._calls):
            positions = call.arguments.get("position_ids")
            if positions is not None and positions.shape in ((1, queries), (batch, queries)):
                starts = self._once(_starts_by_position, positions)
                return None if starts is None else _expand(starts, batch)
        return None

    def _reads_another(self) -> bool:
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
        if not self._reads_another():
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


def _parameters(module: nn.Module) -> Mapping[str, bool]:
    """Return the names of the arguments of a module's forward, in order, and whether each may be positional."""
    return _signature(type(module).forward) if "forward" not in vars(module) else _names(module.forward)


@functools.lru_cache(maxsize=1024)
def _signature(method: Callable[..., Any]) -> Mapping[str, bool]:
    """Return the names of the arguments of a method without `self`; reading a signature takes longer than a hook."""
    names = _names(method)
    return dict(list(names.items())[1:])


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
