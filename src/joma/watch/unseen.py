"""Why a module's attention is not in a recording: known kinds of modules by name, and what to do about them.

`KINDS` is the table to add to: a pattern for the names of classes, and what is said of such a module. The first pattern
that matches counts. A module of the first group is never recorded; the others are listed if nothing in them was.
A class may have any name. So a module that its parent calls `attn` is listed too, if it multiplies two activations, as
queries and keys are, or holds their projections: parts of attention, gates and layers of features do neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from torch import nn

from joma.arguments import InputError


class AttentionNotSeen(UserWarning):
    """Modules that look like attention were called, and nothing of them was recorded."""


class Kind(NamedTuple):
    """A kind of module: how to recognise its class, what is said of it, and whether it has attention weights at all."""

    pattern: re.Pattern[str]
    reason: str
    has_weights: bool


CHANNELS = re.compile(r"^(XCA|XCAttention|\w*CrossCovariance\w*|Channel(Block|Attention)\w*|\w*ChannelAttn)$")
KINDS = tuple(
    Kind(re.compile(pattern), reason, has_weights)
    for pattern, reason, has_weights in (
        (CHANNELS.pattern, "attends to channels, not to positions", True),
        (r"(?i)nystrom\w*attention$", "approximates attention by landmarks: it has no matrix of weights", True),
        (r"^(FactorAttnConvRelPosEnc|LambdaLayer)$", "averages keys before queries see them: linear attention", True),
        (r"ProbSparseAttention$", "attends from a choice of queries, the others average all values", True),
        (r"(BlockSparse|GlobalLocal)Attention$", "attends to blocks of keys, each row in several pieces", True),
        (
            r"Mamba\d?(Mixer|Layer)?$|(Bamba|FalconH1)Mixer$|SSM$|S4D$",
            "is a state-space model: it has no attention weights",
            False,
        ),
        (r"(?i)rwkv\w*(attention|timemix\w*)$", "is a recurrence: it has no attention weights", False),
        (r"DeltaNet|DeltaRule|DeltaAttention", "is linear attention, a recurrence: it has no attention weights", False),
        (
            r"(?i)retention|lightning_?att|linear_?(self_?)?att|^LiteMLA$",
            "is linear attention: it has no softmax",
            False,
        ),
        (r"(?i)lstm(layer|cell|backend)$|rglru$", "is a recurrence: it has no attention weights", False),
        (r"FourierTransform$", "mixes positions by a Fourier transform: it has no attention weights", False),
        (
            r"(?i)hyena\w*(filter|operator)$|shortconv$",
            "mixes positions by convolutions: it has no attention weights",
            False,
        ),
        (r"Deformable\w*Attention$", "attends to sampled points, not to all positions", True),
        (r"^(LSH|Local)SelfAttention$", "hashes or chunks the sequence, and takes no softmax (Reformer)", True),
        (r"^GPSA$", "weighs values by a sum of two softmaxes", True),
        (r"^(Yoso|Mra)\w*Attention$", "approximates attention: it has no matrix of weights", True),
        (r"(?i)att(ention|n)", "calls no SDPA, and no softmax whose result averages values", True),
    )
)
BY_NAME = Kind(  # a module that is called attention by its parent, such as `self_attn`, `attns.0` or `attention_layer`
    re.compile(
        r"(?i)(^|\.)(?![a-wyz]_)\w*(att(ention|n)|attend|mha)(_?(layer|block|module|fn|op|core))?s?_?\d*(\.\d+)*$"
    ),
    KINDS[-1].reason,
    True,
)
_PROJECTION = re.compile(  # the name of a layer or a parameter that makes queries or keys
    r"(?i)^(to_?|w_?|c_?|in_?|fc_?)?(q|k|qk|kv|qkv|query|key|queries|keys|query_key_value)"
    r"(_?(proj\w*|lin\w*|layer|dense|weight|net|map|conv))?\d*$"
)
_NO_ATTENTION_REMEDY = (
    "call the model itself, not its `forward`; a model's own attention is seen where it calls "
    "`torch.nn.functional.scaled_dot_product_attention`, or averages values by a softmax"
)
_NOT_SEEN_REMEDY = (
    "let it call `torch.nn.functional.scaled_dot_product_attention`, or multiply the result of a softmax by the values"
)
_NOT_CALLED_REMEDY = (
    "let `forward` call the model in this thread; of a model without attention measure the weights, such as by "
    "`joma.stable_rank`"
)
NO_VALUES = "it ran on meta or fake tensors, which hold no values"
NEVER_RECORDED = 5  # the first kinds: their softmaxes are no attention of positions to positions
_NOT_ATTENTION = re.compile(r"(?i)(norm|dropout|mask|bias|embeddings?|output|projection|mlp|softmax)$")

PARTS_WITHOUT_ATTENTION = re.compile(r"(MLP|RMSNorm|RotaryEmbedding)$")  # the names of classes in `transformers.models`


def attention_kind(module: nn.Module, path: str = "") -> Kind | None:
    """Return which kind of attention, or of what stands in its place, a module seems to be; None if none.

    Its class says so, or else its place in the model: the attribute at the end of its dotted path.

    >>> attention_kind(nn.MultiheadAttention(4, 2)).reason
    'calls no SDPA, and no softmax whose result averages values'
    >>> attention_kind(nn.Linear(4, 2)) is None, attention_kind(nn.Bilinear(2, 2, 2), "h.0.attn") is BY_NAME
    (True, True)
    """
    return _kind_of_class(type(module).__name__) or _kind_of_path(path)


@cache
def _kind_of_class(name: str) -> Kind | None:
    """Return the kind by the name of a class; a model has many modules of few classes."""
    if _NOT_ATTENTION.search(name):
        return None
    return next((kind for kind in KINDS if kind.pattern.search(name)), None)


def calls_no_attention(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class are known to call no attention: parts of transformers' models, and lists.

    >>> calls_no_attention(nn.ModuleList), calls_no_attention(nn.MultiheadAttention)
    (True, False)
    """
    package = kind.__module__
    is_part = package.startswith("transformers.models.") and PARTS_WITHOUT_ATTENTION.search(kind.__name__) is not None
    return is_part or package == "transformers.activations" or kind.forward is nn.Module.forward


def unseen_reason(module: nn.Module, kind: Kind) -> str:
    """Return why nothing was recorded of a module, and what would make it visible where that is known."""
    reason = f"{type(module).__name__} {kind.reason}"
    if kind.reason == KINDS[-1].reason and getattr(module, "fused_attn", None) is False:
        return f"{reason}; call `timm.layers.set_fused_attn(True)` before the model is built"
    return reason


@cache
def _kind_of_path(path: str) -> Kind | None:
    """Return the kind of a module that its parent calls attention."""
    return BY_NAME if BY_NAME.pattern.search(path) else None


def may_attend(module: nn.Module, kind: Kind, *, combines: bool) -> bool:
    """Return whether a call of a module of this kind, in which nothing was recorded, may have computed attention.

    `combines` says whether two activations were multiplied with each other in the call.
    """
    return kind is not BY_NAME or combines or any(map(_PROJECTION.match, (*module._modules, *module._parameters)))


def never_recorded(modules: Iterable[nn.Module]) -> str | None:
    """Return why attention inside these modules is not measured even where it takes a softmax, or None if it is."""
    for module in modules:
        reason = _refusal(type(module).__name__)
        if reason is not None:
            return reason
    return None


@cache
def _refusal(name: str) -> str | None:
    """Return why a class of this name is never recorded."""
    kind = next((kind for kind in KINDS[:NEVER_RECORDED] if kind.pattern.search(name)), None)
    return None if kind is None else f"{name} {kind.reason}"


def nothing_seen(model: str, not_seen: Mapping[str, str], *, has_weights: bool) -> InputError:
    """Return the error for a model in which modules were called and no attention was recorded.

    `has_weights` says whether one of those that were not seen has attention weights.
    """
    if not not_seen:
        return InputError("model", "attention", f"{model}, which does not", _NO_ATTENTION_REMEDY, must="compute")
    got = f"{model}: {describe(not_seen)}"
    if {*not_seen.values()} == {NO_VALUES}:
        remedy = "call the model on tensors that hold values"
        return InputError("model", "attention that can be measured", got, remedy, must="compute")
    if has_weights:
        return InputError("model", "attention that can be measured", got, _NOT_SEEN_REMEDY, must="compute")
    remedy = "attention measures do not apply to it, but those of its weights do, such as `joma.stable_rank`"
    return InputError("model", "attention", got, remedy, must="compute")


def nothing_called(model: str) -> InputError:
    """Return the error for a forward pass in which no module was called that may compute attention.

    >>> print(nothing_called("Net").problem)
    `model` must compute attention in its forward pass, got Net, of which no module was called that may
    """
    got = f"{model}, of which no module was called that may"
    return InputError("model", "attention in its forward pass", got, _NOT_CALLED_REMEDY, must="compute")


def describe(not_seen: Mapping[str, str]) -> str:
    """Return the modules in groups of the same reason, as one line.

    >>> describe({"h.0.mixer": "M has none", "h.1.mixer": "M has none", "h.2.mixer": "M has none", "a": "it is B"})
    '3 modules h.0.mixer … h.2.mixer (M has none), a (it is B)'
    """
    groups: dict[str, list[str]] = {}
    for layer, reason in not_seen.items():
        groups.setdefault(reason, []).append(layer)
    return ", ".join(f"{_names(layers)} ({reason})" for reason, layers in groups.items())


def _names(layers: list[str]) -> str:
    if len(layers) < 3:
        return " and ".join(layers)
    return f"{len(layers)} modules {layers[0]} … {layers[-1]}"
