"""See the attention of a model while it runs, whatever name its modules have bound the function to.

A `TorchFunctionMode` sees each call of `scaled_dot_product_attention`, and each softmax of modules that compute their
own weights. The measures are computed from the arguments, and the call proceeds unchanged, so that the outputs are the
same bits.
`torch.nn.functional.multi_head_attention_forward` hides its call from modes; a copy of it runs instead, the same code
with two of its global names bound to ours. A mode belongs to one thread: calls from other threads (`nn.DataParallel`)
run normally and are not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from joma.arguments import InputError, short_reason
from joma.probes.summary import AttentionCall, summary_rows
from joma.watch.empty_keys import without_empty_keys
from joma.watch.flex import flex_call
from joma.watch.layouts import attends_globally, fits, in_order, layout
from joma.watch.merged_heads import merged_heads, tensors, unknown_heads
from joma.watch.recording import Frame, Recording
from joma.watch.softmaxes import LINEAR, PRODUCTS, SOFTMAXES, Softmaxes, Use, attention_logits, head_count, holds_values
from joma.watch.switches import compilation
from joma.watch.unseen import NO_VALUES, never_recorded
from joma.watch.weight_functions import IN_PLACE
from joma.watch.written_softmaxes import STEPS

_SDPA = F.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward
_SUBTRACTIONS = (torch.sub, Tensor.sub, torch.subtract, Tensor.subtract)
_COMBINATIONS = {*PRODUCTS, torch.functional.einsum, torch.functional.tensordot} - {F.linear}  # of two activations
_local = threading.local()


class Interceptor(TorchFunctionMode):
    """The mode of a thread, shared by all contexts that are open in it."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[Recording] = []
        self.softmaxes = Softmaxes(self._is_constant)
        self._followed = self.softmaxes.traces
        self._off = False  # inside a call that has been measured as a whole
        self._handlers: dict[Any, Callable[..., Any]] = {
            _SDPA: self._attend,
            _MULTI_HEAD: self._multi_head_attention,
            flex_operator: self._flex,
            **{function: partial(self._softmax, function) for function in SOFTMAXES},
            F.softmin: self._softmin,
            **{function: partial(self._subtract, function) for function in _SUBTRACTIONS},
            **{function: partial(self._written, function) for function in STEPS},
            **{function: partial(self._in_place, function) for function in IN_PLACE},
            **{function: partial(self._combine, function) for function in _COMBINATIONS},
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types  # this method is short because a pass calls it hundreds of times
        if func in self._handlers and not self._off:
            handler = self._handlers[func]
            return handler(*args, **kwargs) if kwargs else handler(*args)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self._followed and not self._off:
            use = self.softmaxes.follow(func, args, kwargs, result)
            if use is not None:
                self._measure_softmax(use)
        return result

    @property
    def active(self) -> list[Recording]:
        """The recordings of models that are being called."""
        return [recording for recording in self.recordings if recording.active]

    def _is_constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or a buffer of a watched model."""
        return any(tensor in recording.constants for recording in self.recordings)

    def measure(self, call: AttentionCall, depths: Mapping[Recording, int] | None = None) -> dict[Recording, str]:
        """Add the measures of an attention to each active recording; recordings with equal options share them.

        `depths` says how deep in the stack of calls the module is that computes it; the innermost if not given.
        Returns the label of the attention in each recording.
        """
        labels: dict[Recording, str] = {}
        active = [recording for recording in self.active if not _overlooked(recording, call)]
        if not active:
            return labels
        tensor = cast(Tensor, call.query if call.logits is None else call.logits)
        keys = cast(Tensor, call.key).shape[-2] if call.logits is None else tensor.shape[-1]
        with _without_autocast(tensor.device.type):
            for options in {recording.options: None for recording in active}:
                recordings = [recording for recording in active if recording.options == options]
                try:
                    rows = _rows(call, recordings, keys)
                except (InputError, RuntimeError) as cause:  # if torch cannot compute it either, the call itself fails
                    for recording in recordings:
                        recording.refuse(_input_error(cause), (depths or {}).get(recording, 0))
                    continue
                values = {name: _three_axes(row) for name, row in rows.items()}
                for recording in recordings:
                    labels[recording] = recording.record(call, values, keys, (depths or {}).get(recording, 0))
        return labels

    def call_measured(
        self, function: Callable[..., Any], call: AttentionCall | InputError, *args: Any, **kwargs: Any
    ) -> Any:
        """Measure a call as a whole, then run it as without interception: what happens inside is not seen again."""
        with self._switched_off():
            if isinstance(call, InputError):
                for recording in self.active:
                    recording.refuse(call)
            else:
                self.measure(call)
            with compilation():
                return function(*args, **kwargs)

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        """Take this mode from the stack of modes: code that is compiled inside would otherwise trace it."""
        self._off = True
        try:
            with _pop_mode_temporarily() if _get_current_function_mode() is self else nullcontext():
                yield
        finally:
            self._off = False

    def _flex(self, *args: Any, **kwargs: Any) -> Any:
        """Measure FlexAttention, then run it."""
        query, key, _, score_mod, block_mask, scale = args[:6]
        self.measure(flex_call(query, key, score_mod, block_mask, scale=scale))
        return flex_operator(*args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record the measures, then call SDPA with the same arguments."""
        arguments = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        options = {name: arguments[name] for name in ("scale", "enable_gqa") if name in arguments}
        causal, mask = arguments.get("is_causal", False), arguments.get("attn_mask")
        call = AttentionCall(query, key, mask=mask, causal=causal, **options)
        active = self.active
        call = _in_order(call, active[0].call_stack[-1].module) if active else call
        ordered = cast(Tensor, call.query)
        if active and ordered.ndim == 3 and ordered.shape[:1] == cast(Tensor, call.key).shape[:1]:
            self._measure_merged(call, active[0])
        else:
            self.measure(call)
        return _SDPA(query, key, value, *args, **kwargs)

    def _measure_merged(self, call: AttentionCall, recording: Recording) -> None:
        """Measure a call of SDPA on [first, position, dim], whose first axis is of sequences, of heads or of both."""
        query, key = cast(Tensor, call.query), cast(Tensor, call.key)
        sizes = query.shape[0], query.shape[1], key.shape[1]
        heads = _merged_heads(recording.call_stack, sizes)
        split = {"query": query.unflatten(0, (-1, heads or 1)), "key": key.unflatten(0, (-1, heads or 1))}
        mask = call.mask
        if type(mask) is Tensor and mask.ndim == 3:
            mask = mask.unflatten(0, (-1, heads or 1)) if len(mask) == sizes[0] else mask[None]
        labels = self.measure(replace(call, mask=mask, **split))
        if heads is None:
            _note_unknown_heads(labels, sizes)

    def _multi_head_attention(
        self, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **kwargs: Any
    ):
        """Run `multi_head_attention_forward` with its SDPA and its softmax replaced by ours."""

        def softmax(logits: Tensor, dim: int) -> Tensor:
            """Measure the logits: with `need_weights` SDPA is not called."""
            self.measure(AttentionCall(logits=logits.unflatten(0, (-1, heads))))
            return F.softmax(logits, dim=dim)

        replaced = {
            "scaled_dot_product_attention": self._attend,
            "softmax": softmax,
            "has_torch_function": lambda _: False,
        }
        original = cast(FunctionType, _MULTI_HEAD)
        copy = FunctionType(original.__code__, {**original.__globals__, **replaced}, None, original.__defaults__)
        copy.__kwdefaults__ = original.__kwdefaults__
        return copy(query, key, value, width, heads, *args, **kwargs)

    def _softmax(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute a softmax, and follow its result if it may be attention."""
        weights = func(*args, **kwargs)
        active = self.active
        if active:
            logits = args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if isinstance(dim, int) and logits.ndim > 2 and kwargs.get("out") is None:
                self._note_softmax(active, logits, weights, dim)
        return weights

    def _note_softmax(self, active: list[Recording], logits: Tensor, weights: Tensor, dim: int) -> None:
        """Follow the result of a softmax, or measure it at once in a module whose order of axes is known."""
        module = active[0].call_stack[-1].module
        axes = layout(module)
        if axes is None:
            self.softmaxes.add(logits, weights, dim, {recording: recording.call_stack for recording in active})
        elif attends_globally(module, logits):
            for recording in active:
                recording.overlook(f"{type(module).__name__} has global tokens, whose rows are computed twice")
        elif fits(logits, axes):
            self.measure(AttentionCall(logits=in_order(logits, axes, module)))

    def _subtract(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        result = func(*args, **kwargs)
        self.softmaxes.note_shift(args, result)
        if self._followed:
            self.softmaxes.follow(func, args, kwargs, result)  # which is no use of them
        return result

    def _softmin(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute a softmin, and follow its result as the softmax of the negative logits."""
        weights = F.softmin(*args, **kwargs)
        active = self.active
        logits = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if active and isinstance(dim, int) and logits.ndim > 2:
            self._note_softmax(active, -logits, weights, dim)
        return weights

    def _written(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute a step of a softmax that a module may write out, and follow the result of the last one."""
        result = func(*args, **kwargs)
        active = self.active
        softmax = self.softmaxes.written.note(func, args, kwargs, result) if active else None
        if softmax is not None:
            self._note_softmax(active, softmax[0], result, softmax[1])
        elif self._followed:
            self._follow(func, args, kwargs, result)
        return result

    def _combine(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Multiply tensors, follow weights among them, and note whether two activations are multiplied."""
        result = func(*args, **kwargs)
        if self._followed:
            self._follow(func, args, kwargs, result)
        recordings = [recording for recording in self.active if recording.awaits_combination]
        if recordings and sum(not self._is_constant(factor) for factor in tensors((*args, *kwargs.values()))) > 1:
            for recording in recordings:
                recording.note_combination()
        return result

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow weights among the arguments of a call, and measure them if it uses them as attention."""
        use = self.softmaxes.follow(func, args, kwargs, result)
        if use is not None:
            self._measure_softmax(use)

    def _in_place(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function that may hide keys in weights themselves, and compare them with what they were."""
        before = self.softmaxes.copy(args[0]) if self._followed and args else None
        result = func(*args, **kwargs)
        if self._followed:
            self.softmaxes.follow(func, args, kwargs, result, before)  # no use of them
        return result

    def _measure_softmax(self, use: Use) -> None:
        """Measure a softmax that has averaged values, as attention of the module that called both."""
        depths: dict[Recording, int] = {}
        heads, reason, shape = None, self._refusal(use), use.softmax.logits.shape
        merged = len(shape) == 3 and len(use.queries) == 1
        sizes = _sizes(shape, use) if merged else None
        for recording, before in use.softmax.context.items():
            now = recording.call_stack
            common = [frame for frame, other in zip(before, now, strict=False) if frame is other]
            depths[recording] = len(common)
            if reason:
                module = common[-1].module if common else now[-1].module
                recording.overlook(f"{type(module).__name__} {reason}", len(common))
            elif sizes is not None:
                heads = heads or _merged_heads(common, sizes)
            else:
                heads = heads or head_count(frame.module for frame in reversed(common))
        if not reason:
            logits, sinks = attention_logits(use, heads)
            use.softmax.labels = self.measure(AttentionCall(logits=logits, sink_logits=sinks), depths)
            for recording, before in use.softmax.context.items():
                recording.take_off(before[depths[recording] :])
            if sizes is not None and heads is None:
                _note_unknown_heads(use.softmax.labels, sizes)

    @staticmethod
    def _refusal(use: Use) -> str:
        """Return why a softmax that averages values is not measured, or ""; linear attention takes two of them."""
        first = use.averaged
        if first is not None and _in_one_call(first.context, use.softmax.context):
            for recording, label in first.labels.items():
                recording.retract(label)
            return LINEAR
        return use.change or ("changes its logits in place after the softmax" if use.softmax.overwritten else "")


def _sizes(logits: torch.Size, use: Use) -> tuple[int, int, int]:
    """Return the lengths of the axes of logits that are of no queries and no keys, of the queries, and of the keys."""
    (other,) = {0, 1, 2} - {use.softmax.axis, *use.queries}
    return logits[other], logits[use.queries[0]], logits[use.softmax.axis]


def _merged_heads(frames: Sequence[Frame], sizes: tuple[int, int, int]) -> int | None:
    arguments = [argument for frame in frames for argument in frame.arguments]
    return merged_heads([frame.module for frame in frames], arguments, sizes)


def _note_unknown_heads(labels: Mapping[Recording, str], sizes: tuple[int, int, int]) -> None:
    for recording, label in labels.items():
        recording.heads_unknown.setdefault(label, unknown_heads(sizes))


def _in_one_call(first: Mapping[Recording, Any], second: Mapping[Recording, Any]) -> bool:
    """Whether two softmaxes were taken in the same call of a module, by the stacks of calls at both."""
    return any(first[recording][-1] is second[recording][-1] for recording in first if recording in second)


def _rows(call: AttentionCall, recordings: list[Recording], keys: Any) -> dict[str, Tensor]:
    """Return the measures of a call for recordings of the same options.

    The weight of a first token that a cache has dropped is 0, and keys that a cache has not filled yet are no distance.
    """
    names, top, _, precision = recordings[0].options
    sinks, first, excess = recordings[0].sinks, None, None
    if isinstance(sinks, int) and sinks == 0 and "sink_mass" in names:
        tokens = (recording.first_tokens(call, keys) for recording in recordings)
        first = next((first for first in tokens if first is not None), None)
        sinks = 0 if first is None else first.clamp_min(0)
    if "distance" in names and call.positions is None and not recordings[0].row_masks.reads_another:
        call, excess = without_empty_keys(call, keys)
    rows = summary_rows(call, names, top=top, sinks=sinks, precision=precision)
    if first is not None:
        rows["sink_mass"] = rows["sink_mass"] * (first >= 0)  # a row without keys stays NaN
    if excess is not None:
        rows["distance"] = rows["distance"] - excess
    return rows


def _input_error(cause: Exception) -> InputError:
    """Return an error of torch, such as one of memory or of a kind of tensor, in the form of ours."""
    if isinstance(cause, InputError):
        return cause
    remedy = "watch fewer measures or a shorter batch if it is memory, else report it"
    return InputError("attention", "measured", short_reason(cause), remedy)


def _overlooked(recording: Recording, call: AttentionCall) -> bool:
    """Whether this attention is none that a recording measures; the recording then lists it as not seen."""
    reason = never_recorded([frame.module for frame in recording.call_stack])
    tensor = call.query if call.logits is None else call.logits
    if reason is not None:
        recording.overlook(reason)
    elif isinstance(tensor, Tensor) and not holds_values(tensor):
        recording.overlook(NO_VALUES)
    else:
        return False
    return True


def _in_order(call: AttentionCall, module: nn.Module) -> AttentionCall:
    """Return a call of SDPA with its axes in the usual order, by what is known of the module that makes it."""
    axes = layout(module)
    if axes is None or not isinstance(call.query, Tensor) or not isinstance(call.key, Tensor):
        return call
    tensors = {"query": call.query, "key": call.key} | ({} if call.mask is None else {"mask": call.mask})
    if not all(isinstance(tensor, Tensor) and fits(tensor, axes) for tensor in tensors.values()):
        return call
    return replace(call, **{name: in_order(cast(Tensor, tensor), axes, module) for name, tensor in tensors.items()})


def _three_axes(rows: Tensor) -> Tensor:
    """Return measures [*batch, head, query] with three axes; further axes are batch."""
    rows = rows if rows.ndim > 2 else rows.unsqueeze(-2)  # one head
    return (rows if rows.ndim > 2 else rows[None]).flatten(0, -3)


def _without_autocast(device: str) -> Any:
    """Return a context without autocast; checking whether it is needed is cheaper than entering it."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def measured_function(function: Callable[..., Any], read: Callable[..., AttentionCall]) -> Callable[..., Any]:
    """Return `function`, which computes attention, measured while a model is watched; `read` reads its arguments."""

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        mode: Interceptor | None = getattr(_local, "interceptor", None)
        if mode is None or mode._off or not mode.active:
            return function(*args, **kwargs)
        try:
            call = read(*args, **kwargs)
        except InputError as error:
            call = error
        except Exception as cause:  # another version of the function may take other arguments: the model must go on
            name, remedy = getattr(function, "__name__", "attention"), "report this with the version of its package"
            call = InputError(name, "called with known arguments", short_reason(cause), remedy)
        return mode.call_measured(function, call, *args, **kwargs)

    return measured


@contextmanager
def interception(recording: Recording) -> Iterator[None]:
    """Add `recording` to the thread's interceptor, which is active as long as it has any recording."""
    mode = getattr(_local, "interceptor", None)
    if mode is None:
        mode = _local.interceptor = Interceptor()
    if not mode.recordings:
        mode.__enter__()
    mode.recordings.append(recording)
    recording.pass_ended.append(mode.softmaxes.clear)
    try:
        yield
    finally:
        mode.recordings.remove(recording)
        mode.softmaxes.clear()
        if not mode.recordings:
            mode.__exit__(None, None, None)
