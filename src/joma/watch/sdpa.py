"""Record the entropy of attention in any model that calls `torch.nn.functional.scaled_dot_product_attention`.

A `TorchFunctionMode` sees that call under whichever name a module bound it; the entropy is computed beside it, from
the query, the key and the mask, and the call itself goes on untouched: the same bits come out.
`torch.nn.functional.multi_head_attention_forward` hides its call from modes; a copy of it is run instead, the same
code with two of its names bound to ours. Hooks on the model's modules, for as long as the context lasts, say which
module called. A mode belongs to one thread: calls from others (`nn.DataParallel`) run, and are not recorded.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
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

from joma.arguments import InputError, choice
from joma.kernels.entropy_choice import PRECISIONS
from joma.probes.entropy import attention_entropy, effective_tokens

QUANTITIES = ("entropy", "effective_tokens")
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # no part of a layer's name
OTHERS = ("eager", "flex_attention", "flash_attention")  # what Hugging Face models may use in the place of SDPA
_REMEDY = (
    "make it call `torch.nn.functional.scaled_dot_product_attention` (Hugging Face: `attn_implementation='sdpa'`), "
    "and call the model itself, not its `forward`"
)
_SDPA = F.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward
_said: set[str] = set()
_local = threading.local()


class AttentionSwitched(UserWarning):
    """Inside the context the model runs another kernel than outside: equal to rounding, not to the bit.

    But for padded rows of `nn.TransformerEncoder`: its fast path leaves them at 0, and without it they are computed.
    """


def _mean(values: Float[Tensor, "quantity layer batch head query"]) -> Float[Tensor, "quantity layer head"]:
    return values.nanmean(dim=(2, 4))


def _all(
    values: Float[Tensor, "quantity layer batch head query"],
) -> Float[Tensor, "quantity layer batch head query"]:
    return values


REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "mean": (_mean, ("head",)),
    "none": (_all, ("batch", "head", "query")),
}


class Recording:
    """What `attention` has seen: for each forward pass, in order of the calls, the entropies of each layer.

    Attributes:
        rows: as given to `attention`; may be set anew between forward passes.
        longest: the number of keys in the longest attention seen.
        refused: why a call was not recorded, the first if several; None if all were.
    """

    def __init__(self, model: nn.Module, *, precision: str, reduce: str, rows: Tensor | None) -> None:
        choice("precision", precision, PRECISIONS)
        self.precision, self.rows = precision, checked_rows(rows)
        self.longest = 0
        self.refused: InputError | None = None
        self._reduce, self._dims = choice("reduce", reduce, REDUCTIONS)
        self._model = type(model).__name__
        self._passes: list[dict[str, Tensor]] = []
        self._waiting: dict[str, Float[Tensor, "batch head query"]] = {}  # of the pass under way, not yet reduced
        self._calling: list[str] = []
        self._outermost: set[str] = set()  # the modules that the pass under way was called by from outside
        self._thread = threading.get_ident()

    @property
    def passes(self) -> list[dict[str, Tensor]]:
        """For each pass the entropy by layer, on its own device: [head], or [batch, head, query] if not reduced."""
        self._settle()
        return [{layer: values[0] for layer, values in each.items()} for each in self._passes if each]

    @property
    def entropy(self) -> xr.DataArray:
        """Entropy in nats, with dims pass, layer, head (and batch, query if not reduced)."""
        return self.dataset().entropy

    @property
    def effective_tokens(self) -> xr.DataArray:
        """The number of tokens attended to, exp(entropy) of each row, then reduced like the entropy."""
        return self.dataset().effective_tokens

    def dataset(self) -> xr.Dataset:
        """Both quantities as one labelled Dataset; nan where a layer has fewer heads or a pass skipped it."""
        layers, block = self.arrays()
        dims = ("pass", "layer", *self._dims)
        variables = {name: (dims, values) for name, values in zip(QUANTITIES, block, strict=True)}
        sizes = dict(zip(dims, block.shape[1:], strict=True))
        coordinates = {dim: np.arange(sizes[dim]) for dim in dims if dim != "layer"}
        found = xr.Dataset(variables, {**coordinates, "layer": np.array(layers)})
        found["entropy"].attrs["units"] = "nat"
        return found

    def arrays(self) -> tuple[list[str], Float[np.ndarray, "quantity pass layer *rest"]]:
        """The same without labels: the names of the layers, and both quantities in one array."""
        self._settle()
        passes = [each for each in self._passes if each]
        if not passes and self.refused is not None:
            raise self.refused
        if not passes:
            raise InputError("model", "called inside the context", "no forward pass", "call `model(...)` inside it")
        layers = list(dict.fromkeys(layer for each in passes for layer in each))
        shapes = np.array([values.shape[1:] for each in passes for values in each.values()])
        block = np.full((len(QUANTITIES), len(passes), len(layers), *shapes.max(axis=0)), np.nan)
        for index, each in enumerate(passes):
            for layer, values in each.items():
                place = (slice(None), index, layers.index(layer), *map(slice, values.shape[1:]))
                block[place] = values.double().cpu().numpy()
        return layers, block

    def _enter(self, name: str) -> None:
        """A module is called. A pass ends when a module that was called from outside is called from there again."""
        if not self._own():
            return
        if not name and self._calling:  # an interrupt that the caller survived has left them behind
            self._calling.clear()
            self._waiting.clear()
        if not self._calling:
            if not self._passes or name in self._outermost:
                self._passes.append({})
                self._outermost.clear()
            self._outermost.add(name)
        self._calling.append(name)

    def _leave(self) -> None:
        if self._own() and self._calling:
            self._calling.pop()
            if not self._calling:
                self._settle()

    def _own(self) -> bool:
        """Whether this is the thread of the context, and no recomputation of a forward pass in a backward pass."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    @property
    def calling(self) -> bool:
        """Whether a module of the model is under way."""
        return bool(self._calling) and self._own()

    def _refuse(self, problem: InputError) -> None:
        """The call goes on as it is, and it is said once that it was not recorded."""
        if self.refused is None:
            self.refused = problem
            warnings.warn(f"attention that cannot be measured is not recorded: {problem}", stacklevel=6)

    def _record(self, entropy: Float[Tensor, "batch head query"], keys: int) -> None:
        self.longest = max(self.longest, keys)
        name = self._calling[-1] or self._model
        seen, index, label = self._passes[-1], 0, name
        while label in seen or label in self._waiting:
            index += 1
            label = f"{name}[{index}]"
        self._waiting[label] = entropy

    def _settle(self) -> None:
        """Reduce what waits, layers of one shape at once: on a GPU a layer alone costs more in calls than in work."""
        waiting, self._waiting = self._waiting, {}
        alike: dict[Any, list[str]] = {}
        for label, entropy in waiting.items():
            alike.setdefault((entropy.shape, entropy.dtype, entropy.device), []).append(label)
        found: dict[str, Tensor] = {}
        for labels in alike.values():
            entropy = torch.stack([waiting[label] for label in labels])
            if self.rows is not None:
                entropy = entropy.where(self._rows(entropy[0])[:, None], torch.nan)
            values = self._reduce(torch.stack([entropy, effective_tokens(entropy)]))
            found.update(zip(labels, values.unbind(1), strict=True))
        for label in waiting:  # in the order of the calls
            self._passes[-1][label] = found[label]

    def _rows(self, entropy: Float[Tensor, "batch head query"]) -> Bool[Tensor, "batch query"]:
        shape = (entropy.shape[0], entropy.shape[2])
        rows = checked_rows(self.rows)
        if rows is None or rows.shape != shape:
            got = None if rows is None else tuple(rows.shape)
            remedy = "give one value for each query of each sequence, or choose rows yourself with reduce='none'"
            raise InputError("rows", f"of shape {shape}, as the attention seen", got, remedy)
        return rows.to(device=entropy.device, dtype=torch.bool)


def checked_rows(rows: Any) -> Tensor | None:
    """Return the rows that count, if they are given as a tensor."""
    if rows is None or isinstance(rows, Tensor):
        return rows
    raise InputError("rows", "a boolean tensor [batch, query]", type(rows).__name__, "pass the `attention_mask`")


def checked_model(model: Any) -> nn.Module:
    """Return the model, if its calls of attention can be seen."""
    if not isinstance(model, nn.Module):
        got = f"{type(model).__name__} {model!r}" if isinstance(model, str) else type(model).__name__
        raise InputError("model", "a `torch.nn.Module`", got, "load it first, or use `joma probe` for a name")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        remedy = "watch the module that was scripted or traced: TorchScript calls attention out of sight"
        raise InputError("model", "free of TorchScript", type(model).__name__, remedy)
    return model


@contextmanager
def attention(
    model: nn.Module, *, precision: str = "highest", reduce: str = "mean", rows: Tensor | None = None
) -> Iterator[Recording]:
    """Record the entropy H = −Σ p ln p of attention, by layer and head, in every forward pass inside the context.

    Works on any module that calls `scaled_dot_product_attention`: Hugging Face models, `nn.MultiheadAttention`,
    `nn.TransformerEncoder`, your own. No L x L matrix is made; the model's outputs are the same bits. Three things are
    switched for as long as the context lasts, which is said once and moves outputs by rounding: the fused fast path
    of `nn.MultiheadAttention` and `nn.TransformerEncoder` (off; padded rows, which it leaves at 0, are then computed),
    Hugging Face models with another attention (to SDPA), and compiled models (run eagerly). A call that cannot be
    measured (nested tensors, vmap) goes on as it is, and that is said once. Dropout of attention weights is left out of
    the entropy. What a backward pass computes again (gradient checkpointing) is not recorded twice. Nothing waits for
    the device until `.dataset()`.

    Args:
        model: the module to watch, and to call.
        precision: as in `joma.attention_entropy`, "highest" or "high".
        reduce: "mean" over sequences and rows, or "none" to keep [batch, head, query].
        rows: boolean [batch, query], the rows that count, such as a tokenizer's `attention_mask`: a mask hides padding
            as a key, yet a padded query still attends to the tokens before it. By default every row counts that may
            attend to anything at all.

    Returns:
        A `Recording`, whose `.dataset()` has dims pass, layer, head. A layer bears the name of the module that called;
        its second call in the same pass is `name[1]`.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True, dropout=0.0)
    >>> with attention(block) as seen:
    ...     out = block(torch.zeros(1, 5, 8))
    >>> seen.entropy.sel(layer="self_attn").values
    array([[1.6094..., 1.6094...]])
    """
    checked_model(model)
    recording = Recording(model, precision=precision, reduce=reduce, rows=rows)
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        stack.enter_context(_sdpa_for_hugging_face(modules.values()))
        stack.enter_context(_no_fast_path(modules.values()))
        stack.enter_context(_no_compilation(modules.values()))
        stack.enter_context(_hooks(modules, recording))
        stack.enter_context(_intercepted(recording))
        yield recording
    recording._settle()
    if recording._passes and not any(recording._passes) and recording.refused is None:
        raise InputError("model", "one that calls scaled-dot-product attention", f"{recording._model}, none", _REMEDY)


@contextmanager
def _hooks(modules: Mapping[str, nn.Module], recording: Recording) -> Iterator[None]:
    handles = []
    try:
        for name, module in modules.items():
            if name and not module._modules and type(module).__module__.startswith("torch.nn.modules"):
                continue  # torch's own layers without parts (linear maps, norms, …) call no attention
            bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)

            def enter(*_: Any, name: str = bare) -> None:
                recording._enter(name)

            def leave(*_: Any) -> None:
                recording._leave()

            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Interceptor(TorchFunctionMode):
    """The one mode of a thread, shared by all contexts that are open in it."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[Recording] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types  # hundreds of calls a pass come by here
        if func is _SDPA:
            func = self._attend
        elif func is _MULTI_HEAD:
            func = self._open_multi_head
        return func(*args, **kwargs) if kwargs else func(*args)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        """Note the entropies, and call SDPA as it was called."""
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | more
        kept = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
        self._note(query, key, given.get("attn_mask"), causal=given.get("is_causal", False), **kept)
        return _SDPA(query, key, value, *rest, **more)

    def _open_multi_head(
        self, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *rest: Any, **more: Any
    ):
        """Run `multi_head_attention_forward` with its SDPA and its softmax bound to ours."""

        def softmax(logits: Tensor, dim: int) -> Tensor:  # asked for weights, it has the logits: an additive bias
            bias = logits.unflatten(0, (-1, heads))
            empty = bias.new_zeros(*bias.shape[:2], 1, 1)
            self._note(empty.expand(-1, -1, bias.shape[2], -1), empty.expand(-1, -1, bias.shape[3], -1), bias)
            return F.softmax(logits, dim=dim)

        names = {
            "scaled_dot_product_attention": self._attend,
            "softmax": softmax,
            "has_torch_function": lambda _: False,
        }
        original = cast(FunctionType, _MULTI_HEAD)
        opened = FunctionType(original.__code__, {**original.__globals__, **names}, None, original.__defaults__)
        opened.__kwdefaults__ = original.__kwdefaults__
        return opened(query, key, value, width, heads, *rest, **more)

    def _note(self, query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool = False, **more: Any) -> None:
        calling = [recording for recording in self.recordings if recording.calling]
        if not calling:
            return
        with _without_autocast(query.device.type):
            for precision in {recording.precision: None for recording in calling}:
                own = [recording for recording in calling if recording.precision == precision]
                try:
                    entropy = attention_entropy(query, key, causal=causal, mask=mask, precision=precision, **more)
                except InputError as problem:  # what torch cannot do either it says itself
                    for recording in own:
                        recording._refuse(problem)
                    continue
                entropy = entropy if entropy.ndim > 2 else entropy.unsqueeze(-2)  # one head
                entropy = (entropy if entropy.ndim > 2 else entropy[None]).flatten(0, -3)  # further axes are batch
                for recording in own:
                    recording._record(entropy, key.shape[-2])


def _without_autocast(device: str) -> Any:
    """Keep products as they are asked for; a context costs more than to ask whether it is needed."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def _intercepted(recording: Recording) -> Iterator[None]:
    """Add `recording` to the thread's interceptor, which is on the stack of modes while anything listens."""
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


@contextmanager
def _no_fast_path(modules: Collection[nn.Module]) -> Iterator[None]:
    """The fused inference kernels of torch's own Transformer modules never call SDPA."""
    before = torch.backends.mha.get_fastpath_enabled()
    if before and any(isinstance(module, nn.MultiheadAttention) and not module.training for module in modules):
        said = "the fused fast path of `nn.MultiheadAttention` is off while attention is watched"
        _say_once("fast path", said, " but for padded rows, which it may leave at 0,")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _no_compilation(modules: Collection[nn.Module]) -> Iterator[None]:
    """Compiled code is past interception; it is run eagerly, and stands as it was afterwards."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and the import takes seconds
        yield
        return
    if any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in modules):
        _say_once("compiled", "a compiled model runs eagerly while attention is watched")
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _sdpa_for_hugging_face(modules: Collection[nn.Module]) -> Iterator[None]:
    """Switch Hugging Face models that use another attention to SDPA, and back."""
    before: list[tuple[Any, str]] = []
    known: set[int] = set()
    for module in modules:
        config = module.__dict__.get("config")  # `getattr` would search parameters, buffers and parts in vain
        name = getattr(config, "_attn_implementation", None)
        if isinstance(name, str) and id(config) not in known:
            known.add(id(config))
            before.append((module, name))
    other = [(module, name) for module, name in before if name.startswith(OTHERS) or "/" in name]
    try:
        for module, name in other:
            _switch(module, name)
        if other:
            names = ", ".join(sorted({name for _, name in other}))
            _say_once(f"from {names}", f"attention {names!r} is replaced by 'sdpa' while attention is watched")
        yield
    finally:
        for module, name in before if other else ():  # the outer ones first: each sets those inside it as well
            if module.config._attn_implementation != name:
                module.set_attn_implementation(name)


def _switch(module: Any, name: str) -> None:
    """Set `module` to SDPA by the public interface, or refuse it."""
    cause = "it has no `set_attn_implementation`"
    try:
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("sdpa")
            cause = "it does not follow transformers' attention interface"
    except (ValueError, ImportError) as refusal:
        cause = str(refusal).splitlines()[0]
    if module.config._attn_implementation != "sdpa":
        got = f"{type(module).__name__} with {name!r} attention ({cause})"
        remedy = (
            "load it with `attn_implementation='sdpa'`; a model without SDPA can only be measured by its own weights"
        )
        raise InputError("model", "one whose attention can be switched to SDPA", got, remedy)


def _say_once(key: str, message: str, but: str = "") -> None:
    if key not in _said:
        _said.add(key)
        message = f"{message}; outputs are equal to rounding{but or ','} and as before afterwards."
        warnings.warn(message, AttentionSwitched, stacklevel=5)
