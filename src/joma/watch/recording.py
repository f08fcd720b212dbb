"""What `joma.watch.attention` returns: the measures of each layer's attention for each forward pass."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from joma.arguments import MAX_WHOLE, InputError, StateError, choice, whole
from joma.kernels.entropy_choice import PRECISIONS
from joma.probes.summary import MAX_TOP, MEASURES, AttentionCall, Sinks, check_measures
from joma.watch.blocks import first_free
from joma.watch.constants import Constants
from joma.watch.merged_heads import HeadsUnknown
from joma.watch.repeats import Computation, describe_unknown, may_be_parts
from joma.watch.rows import RowMasks, check_rows
from joma.watch.sequence_starts import sequence_starts
from joma.watch.unseen import (
    BY_NAME,
    AttentionNotSeen,
    Kind,
    describe,
    may_attend,
    nothing_called,
    nothing_seen,
    unseen_reason,
)
from joma.watch.views import RecordingViews

REDUCTIONS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {  # axes of [measure, layer, batch, head, query]
    "mean": ((2, 4), ("head",)),
    "batch": ((2,), ("head", "query")),
    "none": ((), ("batch", "head", "query")),
}
MAX_STACKED = 2**16  # elements of a layer's measures up to which the layers are brought to the host together
DEFAULT_MEASURES = ("entropy", "effective_tokens")


@dataclass(slots=True)
class Frame:
    """A module that is being called."""

    name: str
    module: nn.Module
    kind: Kind | None  # if it seems to be attention
    inputs: tuple[Any, ...] = ()  # its positional arguments
    keywords: dict[str, Any] = field(default_factory=dict)  # its other arguments
    explained: bool = False  # whether something in it was recorded, or is listed as not seen
    combines: bool = False  # whether two activations were multiplied with each other in it
    computations: tuple[Computation, ...] = ()  # the attentions that it has computed itself

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All its arguments."""
        return *self.inputs, *self.keywords.values()


@dataclass(slots=True)
class _Pending:
    """The measures of one call, not yet reduced."""

    values: dict[str, Float[Tensor, "batch head query"]]
    rows: Bool[Tensor, "batch query"] | None

    def kind(self) -> tuple[object, ...]:
        """Return what calls must have in common to be reduced in one batch."""
        value = next(iter(self.values.values()))
        return value.shape, value.dtype, value.device, id(self.rows)


class Recording(RecordingViews):
    """The results of `attention`: the measures of each layer for each forward pass, in the order of the calls.

    Attributes:
        measures: the names of the measures.
        longest: the number of keys in the longest attention recorded.
        not_seen: for each layer that seems to be attention and was called, but not recorded, the reason.
        constants: the parameters and buffers of the model; the context gives them.
        heads_unknown: for each layer whose weights have one axis that may be of sequences or of heads, the reason; it
            is recorded as one head.
        repeats_unknown: for each module that computes attention several times in one call, the reason, where its
            entries `name`, `name[1]` … may be sequences, heads or chunks of queries of one attention.
        row_masks: the masks that the model's modules are called with, and which rows they leave open.
        options: the measures to compute and how: recordings with the same options share one computation.
        refused: the error that explains why a call was not recorded, the first one if there are several, or None.
        listeners: functions that are called with the layer and the `AttentionCall` of each attention recorded.
        pass_started, pass_ended: functions that are called when a pass begins, and when the outermost module returns.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        measures: str | Sequence[str] = DEFAULT_MEASURES,
        top: int = 8,
        sinks: Sinks = 0,
        precision: str = "highest",
        reduce: str = "mean",
        rows: Tensor | str = "masks",
    ) -> None:
        choice("precision", precision, PRECISIONS)
        self.measures = check_measures(measures)
        self.top = whole("top", top, low=1, high=MAX_TOP)
        self.sinks = check_sinks(sinks)
        self.precision, self.row_masks = precision, RowMasks(rows)
        self.longest = 0
        self.not_seen: dict[str, str] = {}
        self.heads_unknown: dict[str, str] = {}
        self.repeats_unknown: dict[str, str] = {}
        self.refused: InputError | None = None
        self._has_weights = False  # whether a module of `not_seen` has attention weights
        self._warned: set[str] = set()  # layers of `not_seen` of which a warning has been given
        self.constants = Constants(())
        self.listeners: list[Callable[[str, AttentionCall], None]] = []
        self.pass_started: list[Callable[[], None]] = []
        self.pass_ended: list[Callable[[], None]] = []
        self._axes, self._dims = choice("reduce", reduce, REDUCTIONS)
        self._model_name = type(model).__name__
        self._passes: list[dict[str, Tensor]] = []  # for each layer [measure, *reduced], in the order of `_stored`
        self._pending: dict[str, _Pending] = {}  # of the current pass
        self._row_counts: list[tuple[int, list[str], Tensor]] = []  # [computed, layer] of layers reduced together
        self._call_stack: list[Frame] = []
        self._entry_modules: set[str] = set()  # modules that were called from outside during the current pass
        self._thread, self._other_threads = threading.get_ident(), False
        self._computed = tuple(name for name in MEASURES if name in self.measures and name != "effective_tokens")
        if "effective_tokens" in self.measures and "entropy" not in self.measures:
            self._computed = ("entropy", *self._computed)
        maxima = [name for name in self._computed if MEASURES[name].reduction == "maximum"]
        self._computed = (*(name for name in self._computed if name not in maxima), *maxima)
        given = id(self.sinks) if isinstance(self.sinks, Tensor) else self.sinks
        self.options: tuple[Any, ...] = (self._computed, self.top, given, self.precision)

    @property
    def rows(self) -> Tensor | str:
        """The rows that count, as given to `attention`; may be changed between forward passes."""
        return self.row_masks.rows

    @rows.setter
    def rows(self, rows: Tensor | str) -> None:
        self.row_masks.rows = check_rows(rows)

    @property
    def rows_unknown(self) -> dict[str, str]:
        """For each layer whose padded rows the model's masks do not tell, the reason; all its rows count."""
        return self.row_masks.unknown

    @property
    def passes(self) -> list[dict[str, Tensor]]:
        """The first measure by layer for each pass, on the model's device: [head], or [batch, head, query], …"""
        self._reduce_pending()
        index = self._stored.index(self.measures[0])
        return [{layer: values[index] for layer, values in layers.items()} for layers in self._passes if layers]

    def values(self) -> list[dict[str, Tensor]]:
        """Return all measures by layer for each pass, on the model's device: [measure, *reduced]."""
        self._reduce_pending()
        order = [self._stored.index(name) for name in self.measures]
        return [
            {layer: torch.stack([values[index] for index in order]) for layer, values in layers.items()}
            for layers in self._passes
            if layers
        ]

    @property
    def entropy(self) -> xr.DataArray:
        """The entropy in nats, with dims pass, layer, head (and batch, query if not reduced)."""
        return self.dataset().entropy

    @property
    def effective_tokens(self) -> xr.DataArray:
        """The effective number of tokens attended to: exp(entropy) of each row, then reduced like the entropy."""
        return self.dataset().effective_tokens

    def dataset(self) -> xr.Dataset:
        """Return a labelled Dataset, a variable per measure; NaN where a layer has fewer heads or was not called."""
        layers, block = self.arrays()
        dims = ("pass", "layer", *self._dims)
        sizes = dict(zip(dims, block.shape[1:], strict=True))
        coordinates = {dim: np.arange(sizes[dim]) for dim in dims if dim != "layer"}
        variables = {name: (dims, values) for name, values in zip(self.measures, block, strict=True)}
        dataset = xr.Dataset(variables, {**coordinates, "layer": np.array(layers)})
        for name in self.measures:
            dataset[name].attrs.update(long_name=MEASURES[name].label, units=MEASURES[name].unit)
        return dataset

    def arrays(self) -> tuple[list[str], Float[np.ndarray, "measure pass layer *rest"]]:
        """Return the names of the layers, and all measures in one array without labels."""
        self._reduce_pending()
        passes = [layers for layers in self._passes if layers]
        if not passes and self.refused is not None:
            raise self.refused
        if not passes:
            raise StateError("recording", "has no forward pass", "call `model(...)` inside the context")
        order = [self._stored.index(name) for name in self.measures]
        if len(passes) == 1 and len({values.shape for values in passes[0].values()}) == 1:
            block = np.stack(_on_host(list(passes[0].values())), axis=1)
            return list(passes[0]), block[order, None]
        names = list(dict.fromkeys(layer for layers in passes for layer in layers))
        shapes = np.array([values.shape[1:] for layers in passes for values in layers.values()])
        block = np.full((len(self._stored), len(passes), len(names), *shapes.max(axis=0)), np.nan)
        for index, layers in enumerate(passes):
            for layer, values in zip(layers, _on_host(list(layers.values())), strict=True):
                position = (slice(None), index, names.index(layer), *map(slice, values.shape[1:]))
                block[position] = values
        return names, block[order]

    def row_counts(self) -> dict[str, int]:
        """Return how many rows of attention were counted in all passes, by layer."""
        self._reduce_pending()
        rows: dict[str, int] = {}
        for _, layers, counts in self._row_counts:
            for layer, count in zip(layers, counts[0].tolist(), strict=True):
                rows[layer] = rows.get(layer, 0) + count
        return rows

    def pass_row_counts(self) -> Int[np.ndarray, "measure pass layer"]:
        """Return in how many rows each measure is defined, for each pass and layer of `arrays`."""
        self._reduce_pending()
        numbers = [number for number, layers in enumerate(self._passes) if layers]
        names = list(dict.fromkeys(layer for layers in self._passes for layer in layers))
        block = np.zeros((len(self._computed), len(numbers), len(names)), dtype=int)
        for number, layers, counts in self._row_counts:
            block[:, numbers.index(number), [names.index(layer) for layer in layers]] = counts.cpu().numpy()
        computed = ("entropy" if name == "effective_tokens" else name for name in self.measures)
        return block[[self._computed.index(name) for name in computed]]

    @property
    def active(self) -> bool:
        """Whether a module of the model is being called."""
        return bool(self._call_stack) and self._in_forward_pass()

    @property
    def call_stack(self) -> tuple[Frame, ...]:
        """The modules that are being called, the outermost first."""
        return tuple(self._call_stack)

    def enter(
        self, name: str, kind: Kind | None, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Note the call of a module of a layer; `kind` says what kind of attention it seems to be.

        A new pass begins when a module that has been called from outside in this pass is called from outside again.
        """
        if not self._in_forward_pass():
            self._other_threads |= threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1
            return
        if not name and self._call_stack:  # left behind by an exception that the caller has caught
            self._call_stack.clear()
            self._pending.clear()
        if not self._call_stack:
            if not self._passes or name in self._entry_modules:
                self._passes.append({})
                self._entry_modules.clear()
                for listener in self.pass_started:
                    listener()
            self._entry_modules.add(name)
        self._call_stack.append(Frame(name, module, kind, inputs, keywords))

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Note the return from a module, or its error if `output` is None; after the outermost, reduce the pending."""
        failed = output is None
        if self._in_forward_pass() and self._call_stack:
            frame = self._call_stack[-1]
            kind = None if frame.explained or failed else frame.kind
            if kind is not None and may_attend(frame.module, kind, combines=frame.combines):
                self.overlook(unseen_reason(frame.module, kind))
            if len(frame.computations) > 1 and not failed:
                self._note_repeats(frame)
            self._call_stack.pop()
            if not self._call_stack:
                if failed and sys.exc_info()[0] is not None:
                    self._drop_pass()
                self._reduce_pending()
                for listener in self.pass_ended:
                    listener()

    def _note_repeats(self, frame: Frame) -> None:
        """Note a module whose attentions of one call may be parts of one."""
        computations = [computation for computation in frame.computations if computation.label in self._pending]
        reason = may_be_parts(computations, [frame.module for frame in self._call_stack], frame.arguments)
        if reason is not None:
            self.repeats_unknown.setdefault(frame.name or self._model_name, reason)

    def _drop_pass(self) -> None:
        """Forget what a call has recorded that ended with an error, which the caller may catch."""
        self._pending.clear()
        if self._passes and not self._passes[-1]:
            self._passes.pop()

    def overlook(self, reason: str, depth: int = 0) -> None:
        """List the module that is called as not seen."""
        frame = self._call_stack[depth - 1]
        self._has_weights |= frame.kind is None or frame.kind.has_weights
        self.not_seen.setdefault(frame.name or self._model_name, reason)
        self._explain()

    def take_off(self, frames: Sequence[Frame]) -> None:
        """Take modules off the list of those not seen: they computed weights that are recorded where values are."""
        for frame in frames:
            self.not_seen.pop(frame.name, None)

    @property
    def awaits_combination(self) -> bool:
        """Whether a module is being called that counts as attention if it multiplies two activations."""
        return any(frame.kind is BY_NAME and not frame.explained for frame in self._call_stack)

    def note_combination(self) -> None:
        """Note that the modules which are being called multiply two activations with each other."""
        for frame in self._call_stack:
            frame.combines = True

    def _explain(self) -> None:
        for frame in self._call_stack:
            frame.explained = True

    def refuse(self, error: InputError, depth: int = 0) -> None:
        """Warn at the first call that cannot be recorded; the call itself proceeds."""
        self.overlook(error.problem, depth)
        if self.refused is None:
            self.refused = error
            self._warned.update(self.not_seen)
            warnings.warn(f"attention that cannot be measured is not recorded: {error}", stacklevel=6)

    def first_tokens(self, call: AttentionCall, keys: int) -> Int[Tensor, "batch 1 query"] | None:
        """Return the first key of each row's own sequence, negative if dropped; None if it is key 0 everywhere."""
        tensor = call.query if call.logits is None else call.logits
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            return None
        name, shown = self._call_stack[-1].name, sequence_starts(call)
        first = self.row_masks.first_tokens(name, tensor.shape[0], tensor.shape[2], keys, shown)
        return None if first is None else first[:, None]

    def record(
        self, call: AttentionCall, values: dict[str, Float[Tensor, "batch head query"]], keys: int, depth: int = 0
    ) -> str:
        """Keep the measures of one attention of the module that is called, `depth` levels deep or the innermost.

        Returns its label in this pass.
        """
        self.longest = max(self.longest, keys)
        self._explain()
        frame = self._call_stack[depth - 1]
        name = frame.name or self._model_name
        label = first_free(name, self._passes[-1], self._pending)
        batch, heads, queries = next(iter(values.values())).shape
        frame.computations += (Computation(label, batch, heads, queries),)
        rows = self.row_masks.rows_for(label, batch, queries)
        if rows is None:
            self.row_masks.suspect(label, call, batch, queries)
        self._pending[label] = _Pending(values, rows)
        for listener in self.listeners:
            listener(label, call)
        return label

    def retract(self, label: str) -> None:
        """Forget an attention of the current pass that has turned out to be none."""
        self._pending.pop(label, None)
        if self._kept is not None:
            self._kept.drop(label)

    def close(self) -> None:
        """Reduce what is pending, forget the modules, and warn of what was not seen."""
        self._reduce_pending()
        self._call_stack.clear()
        self.pass_ended.clear()
        if self._other_threads:
            message = "calls of the model from other threads are not recorded; call it in the thread of the context"
            warnings.warn(message, AttentionNotSeen, stacklevel=4)
        if self.heads_unknown or self.repeats_unknown:
            message = describe_unknown(self.heads_unknown, self.repeats_unknown)
            warnings.warn(message, HeadsUnknown, stacklevel=4)
        not_warned = {layer: reason for layer, reason in self.not_seen.items() if layer not in self._warned}
        if any(self._passes) and not_warned:
            message = f"attention was not recorded of {describe(not_warned)}; see `not_seen` of the recording"
            warnings.warn(message, AttentionNotSeen, stacklevel=4)

    def check_seen(self) -> None:
        """Raise an error if modules were called and no attention was recorded."""
        if self._passes and not any(self._passes) and self.refused is None:
            raise nothing_seen(self._model_name, self.not_seen, has_weights=self._has_weights)

    def check_called(self) -> None:
        """Raise an error if no module was called that may compute attention."""
        if not self._passes:
            raise nothing_called(self._model_name)

    def _in_forward_pass(self) -> bool:
        """Whether this is the thread of the context, and not the recomputation of a forward in a backward pass."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    @property
    def _stored(self) -> tuple[str, ...]:
        """The measures of a reduced call, in the order in which they are stored."""
        maxima = tuple(name for name in self._computed if MEASURES[name].reduction == "maximum")
        derived = ("effective_tokens",) if "effective_tokens" in self.measures else ()
        return (*(name for name in self._computed if name not in maxima), *derived, *maxima)

    def _reduce_pending(self) -> None:
        """Reduce the pending measures, those of one shape in one batch: on a GPU the calls cost more than the work."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        groups: dict[Any, list[str]] = {}
        for label, call in pending.items():
            groups.setdefault(call.kind(), []).append(label)
        reduced: dict[str, Tensor] = {}
        with torch._C.DisableTorchFunction():  # these are not calls of the model: nothing is to be intercepted
            for labels in groups.values():
                values = self._stack([pending[label] for label in labels])
                defined = values.eq(values)  # False for NaN
                counts = defined.any(dim=3).sum(dim=(2, 3))
                self._row_counts.append((len(self._passes) - 1, labels, counts))
                reduced.update(zip(labels, self._reduce(values, defined).unbind(1), strict=True))
        for label in pending:  # in the order of the calls
            self._passes[-1][label] = reduced[label]

    def _stack(self, calls: list[_Pending]) -> Float[Tensor, "computed layer batch head query"]:
        """Return the measures of calls of one shape, NaN for rows that do not count."""
        values = torch.stack([call.values[name] for name in self._computed for call in calls])
        values = values.unflatten(0, (len(self._computed), len(calls)))
        if calls[0].rows is not None:
            values = values.where(calls[0].rows.to(values.device)[:, None], torch.nan)
        return values

    def _reduce(
        self,
        values: Float[Tensor, "computed layer batch head query"],
        defined: Bool[Tensor, "computed layer batch head query"],
    ) -> Float[Tensor, "measure layer *reduced"]:
        """Return the measures, reduced, in the order of `_stored`; `defined` says where they are no NaN."""
        means = sum(MEASURES[name].reduction == "mean" for name in self._computed)
        effective = "effective_tokens" in self.measures  # from the entropy, which is the first
        parts = [values[:means], values[:1].exp()] if effective else [values[:means]]
        parts = [torch.cat(parts) if len(parts) > 1 else parts[0]] if means else []
        if means and self._axes:
            counts = defined[:means].sum(self._axes)
            counts = torch.cat((counts, counts[:1])) if effective and means > 1 else counts
            parts = [parts[0].nansum(self._axes).div_(counts)]  # as `nanmean`, whose counts would be counted again
        if means < len(self._computed):
            parts.append(_maximum(values[means:], defined[means:], self._axes))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _on_host(values: list[Tensor]) -> list[np.ndarray]:
    """Return tensors in float64 on the host; small ones of one kind together: each transfer waits for the device."""
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        kind = index if value.numel() > MAX_STACKED else None
        groups.setdefault((kind, value.shape, value.dtype, value.device), []).append(index)
    arrays: dict[int, np.ndarray] = {}
    for indices in groups.values():
        stacked = torch.stack([values[index] for index in indices]) if len(indices) > 1 else values[indices[0]][None]
        arrays.update(zip(indices, stacked.cpu().double().numpy(), strict=True))  # no kernel to convert
    return [arrays[index] for index in range(len(values))]


def _maximum(values: Tensor, defined: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the largest defined value, NaN where none is defined."""
    if not axes:
        return values
    if values.numel() == 0:
        return values.nanmean(dim=axes)
    return values.masked_fill(~defined, -torch.inf).amax(axes).masked_fill(~defined.any(dim=axes), torch.nan)


def check_sinks(sinks: Any) -> Sinks:
    """Return `sinks` if they may be key numbers: a whole number, a tuple of them, or a tensor with one for each row.

    How many keys there are is known only when the model runs.

    >>> check_sinks(range(2)), check_sinks(np.array([0, -1]))
    ((0, 1), (0, -1))
    """
    if isinstance(sinks, Tensor) and sinks.ndim > 0:
        if sinks.is_floating_point() or sinks.is_complex() or sinks.dtype == torch.bool:
            raise InputError("sinks", "whole numbers", sinks.dtype, "give key numbers")
        return sinks
    if isinstance(sinks, np.ndarray | np.integer):
        sinks = sinks.tolist()
    if isinstance(sinks, list | tuple | range):
        return tuple(whole("sinks", number, low=-MAX_WHOLE) for number in sinks)
    return whole("sinks", sinks, low=-MAX_WHOLE)
