"""The masks that the modules of a model are called with, and which tokens they mark as real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

HIDDEN = -1e4  # an additive mask at or below this value hides a key: exp(−10⁴) is 0
IGNORED_LABEL = -100  # the label of a padded position, as torch's cross entropy ignores it
_LENGTHS = "lengths"  # of sequences that are padded on the right, as XLM takes them
_XLNET = (
    "input_mask",
    "perm_mask",
)  # XLNet's own padding mask, and an argument that only XLNet has: BERT's is of tokens
_REAL_MASKS = ("attention_mask", _LENGTHS)  # nonzero marks a real token
_PADDING_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "decoder_padding_mask", _XLNET[0])
_MASKS_OF_OTHERS = ("encoder_attention_mask", "memory_key_padding_mask", "memory_mask", "context_mask")
_DECODER_ARGUMENTS = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds")
_MASKS = {*_REAL_MASKS, *_PADDING_MASKS, *_MASKS_OF_OTHERS, _DECODER_ARGUMENTS[0]}
_OTHER_SEQUENCES = ("key_value_states", "encoder_hidden_states", "memory", "context")
_IMAGES = ("pixel_values", "pixel_values_videos", "images", "image")
_TOKENS = ("input_ids", "inputs_embeds")
HOOKED = {
    *_REAL_MASKS, *_PADDING_MASKS, *_MASKS_OF_OTHERS[:2], *_DECODER_ARGUMENTS[:1], "key_value_states", *_IMAGES
}  # fmt: skip
_KEPT = {*HOOKED, *_MASKS_OF_OTHERS, *_DECODER_ARGUMENTS, *_OTHER_SEQUENCES, *_TOKENS} | {
    "hidden_states",
    "labels",
    "position_ids",
    "query",
    "key",
}


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
    rows = visible(mask, -1)
    queries, keys = mask.shape[-2:]
    if queries == 1 and keys > 1:
        return visible(mask, -2)
    if queries != keys:
        return rows
    diagonal = visible(mask.diagonal(dim1=-2, dim2=-1)[:, :, None], -2)
    return rows & (visible(mask, -2) | ~diagonal.any(-1, keepdim=True))


def shows_all(logits: Tensor) -> Bool[Tensor, ""]:
    """Return whether every token is seen by a query, by logits [batch, head, position, position] that include a mask.

    A logit is hidden if it is as far below the largest one of its sequence as only a mask puts it. As in `seen_tokens`,
    nothing follows from logits that hide every token from itself.
    """
    largest = logits.amax((1, 2))
    hidden = largest.amax(-1, keepdim=True) + HIDDEN / 2
    itself = logits.diagonal(dim1=-2, dim2=-1).amax(1)
    return (~(largest <= hidden) | (itself <= hidden).all(-1, keepdim=True)).all()  # NaN is not hidden


def visible(mask: Tensor, dim: int) -> Bool[Tensor, "batch position"]:
    """Return whether any element along an axis, and of any head, is visible."""
    return is_visible(mask.any(dim).any(1) if mask.dtype == torch.bool else mask.amax((1, dim)))


def is_visible(mask: Tensor) -> Bool[Tensor, "*shape"]:
    """Return where a mask, boolean, of numbers or additive, leaves a key visible."""
    return mask > HIDDEN if mask.is_floating_point() else mask != 0


class Parameters:
    """What follows from the names of the arguments of a module's forward; computed once, because a pass has many calls.

    Attributes:
        names: all of them.
        positional: those that may be given by position, in order.
        has_masks: whether one of them is a mask, or says that no mask of others holds.
        two_sided: whether the module has an encoder and a decoder.
        is_xlnet: whether its `input_mask` is of padding.
    """

    def __init__(self, names: Mapping[str, bool]) -> None:
        self.names = frozenset(names)
        self.positional = tuple(name for name, is_positional in names.items() if is_positional)
        self.first = next(iter(names), "")
        self.has_masks = not HOOKED.isdisjoint(names)
        self.two_sided = not self.names.isdisjoint(_DECODER_ARGUMENTS) or (
            self.names >= {"src_key_padding_mask", "tgt_key_padding_mask"}
        )
        self.is_xlnet = _XLNET[1] in names


class ModuleCall:
    """The arguments of one call of a module that say which tokens are real."""

    def __init__(self, name: str, parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.parameters, self.two_sided = name, parameters.names, parameters.two_sided
        given = dict(zip(parameters.positional, args, strict=False)) | kwargs
        self.first = args[0] if args else given.get(parameters.first)
        self.arguments = {name: value for name, value in given.items() if name in _KEPT and isinstance(value, Tensor)}
        if _LENGTHS in self.arguments:
            self._read_lengths(self.arguments.pop(_LENGTHS))
        if _XLNET[0] in self.arguments:
            padding = self.arguments.pop(_XLNET[0])
            self.arguments |= {_XLNET[0]: padding != 0} if parameters.is_xlnet else {}
        self.has_masks = not _MASKS.isdisjoint(self.arguments) or (self.two_sided and "labels" in self.arguments)

    def _read_lengths(self, lengths: Tensor) -> None:
        """Keep lengths [batch] as the mask [batch, position] of the module's own input."""
        given = self._input(*_TOKENS, "hidden_states")
        if given is not None and lengths.shape == given.shape[:1] and not lengths.is_floating_point():
            positions = torch.arange(given.shape[1], device=lengths.device)
            self.arguments[_LENGTHS] = positions < lengths.detach()[:, None]

    def _input(self, *names: str) -> Tensor | None:
        """Return the first of the module's arguments of these names that is a sequence, else its first argument."""
        tensors = [*(self.arguments.get(name) for name in names), self.first]
        return next((tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim > 1), None)

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
        """Whether the other sequence could be the queries' own, as far as names and shapes show."""
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
            names = (_REAL_MASKS[0], *names, "src_key_padding_mask") if self.side(layer) == "decoder" else ()
        elif self.is_cross:
            names = (_REAL_MASKS[0], "key_padding_mask")
        for mask in self._masks(names):
            if mask.read is not seen_tokens:
                yield mask._replace(length=0)

    def _masks(self, names: tuple[str, ...], *inputs: str) -> Iterator[Mask]:
        """Yield the arguments of these names, with the length of the first of these inputs that was given."""
        given = self._input(*inputs)
        for name in names:
            values = self.arguments.get(name)
            if values is None:
                continue
            padding = "padding" in name or name == _XLNET[0]
            length = 0 if padding or given is None or given.shape[0] != values.shape[0] else given.shape[1]
            if values.ndim <= 2 and (padding or values.ndim == 2):
                yield Mask(name, values, not_padding if padding else real_tokens, length)
            elif values.ndim in (3, 4) and not padding:
                yield Mask(name, values, seen_tokens)
