"""Why a module's attention is not in a recording: known kinds of modules by name, and what to do about them.

`KINDS` is the table to add to: a pattern for the names of classes, and what is said of such a module. The first pattern
that matches counts. A module of the first group is never recorded; the others are listed if nothing in them was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from torch import nn


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
NO_VALUES = "it ran on meta or fake tensors, which hold no values"
NEVER_RECORDED = 5  # the first kinds: their softmaxes are no attention of positions to positions
_NOT_ATTENTION = re.compile(r"(?i)(norm|dropout|mask|bias|embeddings?|output|projection|mlp|softmax)$")

PARTS_WITHOUT_ATTENTION = re.compile(r"(MLP|RMSNorm|RotaryEmbedding)$")  # the names of classes in `transformers.models`


def attention_kind(module: nn.Module) -> Kind | None:
    """Return which kind of attention, or of what stands in its place, a module seems to be by its class; None if none.

    >>> attention_kind(nn.MultiheadAttention(4, 2)).reason
    'calls no SDPA, and no softmax whose result averages values'
    >>> attention_kind(nn.Linear(4, 2)) is None
    True
    """
    return _kind_of_class(type(module).__name__)


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
