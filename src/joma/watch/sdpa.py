"""Record the attention entropy of any model that calls `torch.nn.functional.scaled_dot_product_attention`.

A `TorchFunctionMode` sees this call whatever name a module has bound the function to. The entropy is computed from the
query, the key and the mask, and then the call proceeds unchanged, so that the outputs are the same bits.
`torch.nn.functional.multi_head_attention_forward` hides its call from modes; a copy of it runs instead, the same code
with two of its global names bound to ours. Hooks on the model's modules show which module made the call; they are
removed when the context ends. A mode belongs to one thread: calls from other threads (`nn.DataParallel`) run normally
and are not recorded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma.arguments import InputError, StateError, choice
from joma.kernels.entropy_choice import PRECISIONS
from joma.probes.entropy import attention_entropy, effective_tokens
from joma.watch.switches import hugging_face_with_sdpa, without_compilation, without_fast_path

QUANTITIES = ("entropy", "effective_tokens")
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # left out of a layer's name
_NO_SDPA_REMEDY = (
    "make it call `torch.nn.functional.scaled_dot_product_attention` (Hugging Face: `attn_implementation='sdpa'`), "
    "and call the model itself, not its `forward`"
)
_SDPA = F.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward
_local = threading.local()


def _mean(values: Float[Tensor, "quantity layer batch head query"]) -> Float[Tensor, "quantity layer head"]:
    return values.nanmean(dim=(2, 4))


def _unreduced(
    values: Float[Tensor, "quantity layer batch head query"],
) -> Float[Tensor, "quantity layer batch head query"]:
    return values


REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "mean": (_mean, ("head",)),
    "none": (_unreduced, ("batch", "head", "query")),
}


class Recording:
    """The results of `attention`: the entropies of each layer for each forward pass, in the order of the calls.

    Attributes:
        rows: as given to `attention`; may be changed between forward passes.
        longest: the number of keys in the longest attention recorded.
        refused: the error that explains why a call was not recorded, the first one if there are several, or None.
    """

    def __init__(self, model: nn.Module, *, precision: str, reduce: str, rows: Tensor | None) -> None:
        choice("precision", precision, PRECISIONS)
        self.precision, self.rows = precision, check_rows(rows)
        self.longest = 0
        self.refused: InputError | None = None
        self._reduce, self._dims = choice("reduce", reduce, REDUCTIONS)
        self._model_name = type(model).__name__
        self._passes: list[dict[str, Tensor]] = []
        self._pending: dict[str, Float[Tensor, "batch head query"]] = {}  # of the current pass, not yet reduced
        self._call_stack: list[str] = []  # names of the modules that are being called
        self._entry_modules: set[str] = set()  # modules that were called from outside during the current pass
        self._thread = threading.get_ident()

    @property
    def passes(self) -> list[dict[str, Tensor]]:
        """The entropy by layer for each pass, on the model's device: [head], or [batch, head, query] if not reduced."""
        self._reduce_pending()
        return [{layer: values[0] for layer, values in layers.items()} for layers in self._passes if layers]

    @property
    def entropy(self) -> xr.DataArray:
        """The entropy in nats, with dims pass, layer, head (and batch, query if not reduced)."""
        return self.dataset().entropy

    @property
    def effective_tokens(self) -> xr.DataArray:
        """The effective number of tokens attended to: exp(entropy) of each row, then reduced like the entropy."""
        return self.dataset().effective_tokens

    def dataset(self) -> xr.Dataset:
        """Return both quantities as a labelled Dataset; NaN where a layer has fewer heads or was not called."""
        layers, block = self.arrays()
        dims = ("pass", "layer", *self._dims)
        variables = {name: (dims, values) for name, values in zip(QUANTITIES, block, strict=True)}
        sizes = dict(zip(dims, block.shape[1:], strict=True))
        coordinates = {dim: np.arange(sizes[dim]) for dim in dims if dim != "layer"}
        dataset = xr.Dataset(variables, {**coordinates, "layer": np.array(layers)})
        dataset["entropy"].attrs["units"] = "nat"
        return dataset

    def arrays(self) -> tuple[list[str], Float[np.ndarray, "quantity pass layer *rest"]]:
        """Return the names of the layers, and both quantities in one array without labels."""
        self._reduce_pending()
        passes = [layers for layers in self._passes if layers]
        if not passes and self.refused is not None:
            raise self.refused
        if not passes:
            raise StateError("recording", "has no forward pass", "call `model(...)` inside the context")
        names = list(dict.fromkeys(layer for layers in passes for layer in layers))
        shapes = np.array([values.shape[1:] for layers in passes for values in layers.values()])
        block = np.full((len(QUANTITIES), len(passes), len(names), *shapes.max(axis=0)), np.nan)
        for index, layers in enumerate(passes):
            for layer, values in layers.items():
                position = (slice(None), index, names.index(layer), *map(slice, values.shape[1:]))
                block[position] = values.double().cpu().numpy()
        return names, block

    def _enter(self, name: str) -> None:
        """Note the call of a module.

        A new pass begins when a module that has been called from outside in this pass is called from outside again.
        """
        if not self._in_forward_pass():
            return
        if not name and self._call_stack:  # left behind by an exception that the caller has caught
            self._call_stack.clear()
            self._pending.clear()
        if not self._call_stack:
            if not self._passes or name in self._entry_modules:
                self._passes.append({})
                self._entry_modules.clear()
            self._entry_modules.add(name)
        self._call_stack.append(name)

    def _leave(self) -> None:
        if self._in_forward_pass() and self._call_stack:
            self._call_stack.pop()
            if not self._call_stack:
                self._reduce_pending()

    def _in_forward_pass(self) -> bool:
        """Whether this is the thread of the context, and not the recomputation of a forward in a backward pass."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    @property
    def active(self) -> bool:
        """Whether a module of the model is being called."""
        return bool(self._call_stack) and self._in_forward_pass()

    def _refuse(self, error: InputError) -> None:
        """Warn at the first call that cannot be recorded; the call itself proceeds."""
        if self.refused is None:
            self.refused = error
            warnings.warn(f"attention that cannot be measured is not recorded: {error}", stacklevel=6)

    def _record(self, entropy: Float[Tensor, "batch head query"], keys: int) -> None:
        self.longest = max(self.longest, keys)
        name = self._call_stack[-1] or self._model_name
        recorded, index, label = self._passes[-1], 0, name
        while label in recorded or label in self._pending:
            index += 1
            label = f"{name}[{index}]"
        self._pending[label] = entropy

    def _reduce_pending(self) -> None:
        """Reduce the pending entropies, those of one shape in one batch: on a GPU the calls cost more than the work."""
        pending, self._pending = self._pending, {}
        groups: dict[Any, list[str]] = {}
        for label, entropy in pending.items():
            groups.setdefault((entropy.shape, entropy.dtype, entropy.device), []).append(label)
        reduced: dict[str, Tensor] = {}
        with torch._C.DisableTorchFunction():  # these are not calls of the model: nothing is to be intercepted
            for labels in groups.values():
                entropy = torch.stack([pending[label] for label in labels])
                if self.rows is not None:
                    entropy = entropy.where(self._row_mask(entropy[0])[:, None], torch.nan)
                values = self._reduce(torch.stack([entropy, effective_tokens(entropy)]))
                reduced.update(zip(labels, values.unbind(1), strict=True))
        for label in pending:  # in the order of the calls
            self._passes[-1][label] = reduced[label]

    def _row_mask(self, entropy: Float[Tensor, "batch head query"]) -> Bool[Tensor, "batch query"]:
        """Return `rows` as a mask for this entropy."""
        shape = (entropy.shape[0], entropy.shape[2])
        rows = check_rows(self.rows)
        if rows is None or rows.shape != shape:
            got = None if rows is None else tuple(rows.shape)
            remedy = "give one value for each query of each sequence, or use reduce='none' and choose rows afterwards"
            raise InputError("rows", f"of shape {shape} like the recorded attention", got, remedy)
        return rows.to(device=entropy.device, dtype=torch.bool)


def check_rows(rows: Any) -> Tensor | None:
    """Return `rows` if it is a tensor or None, else raise an error."""
    if rows is None or isinstance(rows, Tensor):
        return rows
    raise InputError("rows", "a boolean tensor [batch, query]", type(rows).__name__, "pass the `attention_mask`")


def check_model(model: Any) -> nn.Module:
    """Return `model` if it is a module whose attention calls can be intercepted, else raise an error."""
    if not isinstance(model, nn.Module):
        got = f"{type(model).__name__} {model!r}" if isinstance(model, str) else type(model).__name__
        raise InputError("model", "a `torch.nn.Module`", got, "load it first, or use `joma probe` for a name")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        remedy = "watch the original module: calls inside TorchScript cannot be intercepted"
        raise InputError("model", "free of TorchScript", type(model).__name__, remedy)
    return model


@contextmanager
def attention(
    model: nn.Module, *, precision: str = "highest", reduce: str = "mean", rows: Tensor | None = None
) -> Iterator[Recording]:
    """Record the attention entropy H = −Σ p ln p by layer and head for every forward pass inside the context.

    Works with any module that calls `scaled_dot_product_attention`: Hugging Face models, `nn.MultiheadAttention`,
    `nn.TransformerEncoder`, your own. It never builds an L x L matrix, and the model's outputs are the same bits.

    Three things are switched inside the context, with one warning each, and change outputs by rounding errors: the
    fused fast path of `nn.MultiheadAttention` and `nn.TransformerEncoder` is off (padded rows, which it leaves at 0,
    are then computed), Hugging Face models with another attention use SDPA, and compiled models run eagerly. A call
    that cannot be measured (nested tensors, vmap) proceeds with one warning. Dropout of attention weights is not part
    of the entropy. What a backward pass computes again (gradient checkpointing) is not recorded twice. The device is
    not synchronised before `.dataset()`.

    Args:
        model: the module to watch, and to call.
        precision: as in `joma.attention_entropy`, "highest" or "high".
        reduce: "mean" over sequences and query positions, or "none" to keep [batch, head, query].
        rows: boolean [batch, query], the query positions that count, such as a tokenizer's `attention_mask`: a mask
            hides padding as a key, but a padded query still attends to the tokens before it. By default all query
            positions count that may attend to any key.

    Returns:
        A `Recording`, whose `.dataset()` has dims pass, layer, head. A layer has the name of the module that made the
        call; its second call in the same pass is `name[1]`.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True, dropout=0.0)
    >>> with attention(block) as recording:
    ...     out = block(torch.zeros(1, 5, 8))
    >>> recording.entropy.sel(layer="self_attn").values
    array([[1.6094..., 1.6094...]])
    """
    check_model(model)
    recording = Recording(model, precision=precision, reduce=reduce, rows=rows)
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        stack.enter_context(hugging_face_with_sdpa(modules.values()))
        stack.enter_context(without_fast_path(modules.values()))
        stack.enter_context(without_compilation(modules.values()))
        stack.enter_context(_hooks(modules, recording))
        stack.enter_context(_interception(recording))
        yield recording
    recording._reduce_pending()
    if recording._passes and not any(recording._passes) and recording.refused is None:
        got = f"{recording._model_name}, which does not"
        raise InputError("model", "scaled-dot-product attention", got, _NO_SDPA_REMEDY, must="call")


@contextmanager
def _hooks(modules: Mapping[str, nn.Module], recording: Recording) -> Iterator[None]:
    """Register hooks that notify `recording` when each module is entered and left."""
    handles = []
    try:
        for name, module in modules.items():
            if name and not module._modules and type(module).__module__.startswith("torch.nn.modules"):
                continue  # torch's elementary layers (linear maps, norms, …) do not call attention
            layer = ".".join(part for part in name.split(".") if part not in WRAPPERS)

            def enter(*_: Any, layer: str = layer) -> None:
                recording._enter(layer)

            def leave(*_: Any) -> None:
                recording._leave()

            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Interceptor(TorchFunctionMode):
    """The mode of a thread, shared by all contexts that are open in it."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[Recording] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types  # this method is short because a pass calls it hundreds of times
        if func is _SDPA:
            func = self._attend
        elif func is _MULTI_HEAD:
            func = self._multi_head_attention
        return func(*args, **kwargs) if kwargs else func(*args)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record the entropies, then call SDPA with the same arguments."""
        arguments = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        options = {name: arguments[name] for name in ("scale", "enable_gqa") if name in arguments}
        self._measure(query, key, arguments.get("attn_mask"), causal=arguments.get("is_causal", False), **options)
        return _SDPA(query, key, value, *args, **kwargs)

    def _multi_head_attention(
        self, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **kwargs: Any
    ):
        """Run `multi_head_attention_forward` with its SDPA and its softmax replaced by ours."""

        def softmax(logits: Tensor, dim: int) -> Tensor:
            """Measure the logits, as a bias on queries and keys of zero: with `need_weights` SDPA is not called."""
            bias = logits.unflatten(0, (-1, heads))
            zeros = bias.new_zeros(*bias.shape[:2], 1, 1)
            self._measure(zeros.expand(-1, -1, bias.shape[2], -1), zeros.expand(-1, -1, bias.shape[3], -1), bias)
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

    def _measure(
        self, query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool = False, **options: Any
    ) -> None:
        """Add the entropy of this attention to each active recording, in that recording's precision."""
        active = [recording for recording in self.recordings if recording.active]
        if not active:
            return
        with _without_autocast(query.device.type):
            for precision in {recording.precision: None for recording in active}:
                recordings = [recording for recording in active if recording.precision == precision]
                try:
                    entropy = attention_entropy(query, key, causal=causal, mask=mask, precision=precision, **options)
                except InputError as error:  # if torch cannot compute it either, SDPA raises its own error
                    for recording in recordings:
                        recording._refuse(error)
                    continue
                entropy = entropy if entropy.ndim > 2 else entropy.unsqueeze(-2)  # one head
                entropy = (entropy if entropy.ndim > 2 else entropy[None]).flatten(0, -3)  # further axes are batch
                for recording in recordings:
                    recording._record(entropy, key.shape[-2])


def _without_autocast(device: str) -> Any:
    """Return a context without autocast; checking whether it is needed is cheaper than entering it."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def _interception(recording: Recording) -> Iterator[None]:
    """Add `recording` to the thread's interceptor, which is active as long as it has any recording."""
    mode = getattr(_local, "interceptor", None)
    if mode is None:
        mode = _local.interceptor = _Interceptor()
    if not mode.recordings:
        mode.__enter__()
    mode.recordings.append(recording)
    try:
        yield
    finally:
        mode.recordings.remove(recording)
        if not mode.recordings:
            mode.__exit__(None, None, None)
