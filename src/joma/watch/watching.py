"""Record the attention of any model, by layer and head, while it runs.

Hooks on the model's modules show which module made a call; they are removed when the context ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from joma.arguments import InputError
from joma.probes.summary import Sinks
from joma.watch.blocks import all_modules, layer_names
from joma.watch.constants import Constants
from joma.watch.flash import rebound
from joma.watch.interception import interception, measured_function
from joma.watch.module_hooks import Hooks
from joma.watch.recording import DEFAULT_MEASURES, Recording
from joma.watch.registry import wrapped_registry
from joma.watch.switches import without_compilation, without_fast_path
from joma.watch.unseen import attention_kind, calls_no_attention


def check_model(model: Any, modules: Mapping[str, nn.Module] | None = None) -> nn.Module:
    """Return `model` if it is a module whose attention calls can be intercepted, else raise an error.

    `modules` are those of the model, if the caller has them.
    """
    if not isinstance(model, nn.Module):
        got = f"{type(model).__name__} {model!r}" if isinstance(model, str) else type(model).__name__
        raise InputError("model", "a `torch.nn.Module`", got, "load it first, or use `joma probe` for a name")
    classes = set(map(type, (modules or all_modules(model)).values()))
    if [kind for kind in classes if issubclass(kind, torch.jit.ScriptModule)]:
        remedy = "watch the original module: calls inside TorchScript cannot be intercepted"
        raise InputError("model", "free of TorchScript", type(model).__name__, remedy)
    return model


@contextmanager
def attention(
    model: nn.Module,
    *,
    measures: str | Sequence[str] = DEFAULT_MEASURES,
    top: int = 8,
    sinks: Sinks = 0,
    precision: str = "highest",
    reduce: str = "mean",
    rows: Tensor | str = "masks",
    maps: bool | int = False,
) -> Iterator[Recording]:
    """Record entropy and other measures of attention by layer and head for every forward pass inside the context.

    Works with any module that calls `scaled_dot_product_attention` or averages values by a softmax: Hugging Face's,
    `nn.MultiheadAttention`, `nn.TransformerEncoder`, timm's, your own. It never builds an L x L matrix that the model
    does not build itself, and the model's outputs are the same bits. FlexAttention, FlashAttention and transformers'
    registry of attention functions are measured from their arguments. A module that seems to be attention and was not
    recorded, or changes its weights after the softmax, is listed in `not_seen` with the reason; one warning names it.

    Two things are switched inside the context, with one warning each, and change outputs by rounding errors: the
    fused fast path of `nn.MultiheadAttention` and `nn.TransformerEncoder` is off (padded rows, which it leaves at 0,
    are then computed), and compiled models run eagerly. A call that cannot be measured (nested tensors, vmap) proceeds
    with one warning. Dropout of attention weights is not part of the entropy. What a backward pass computes again
    (gradient checkpointing) is not recorded twice. The device is not synchronised before `.dataset()`, unless a model
    drops a column after its softmax (GPT-OSS) or applies a mask after it, or keys are hidden by packed position ids.
    Such a mask may hide what had no weight, or empty whole rows, which are then undefined; if it hides more, the module
    is listed in `not_seen`.

    A softmax of at least three axes is followed through functions that permute, reshape, mask and scale it up to
    `matmul`, `bmm`, `einsum` or `linear` with values that are no parameters or buffers. Sums of elementwise products
    are listed in `not_seen`. Not seen at all, unless the module's class or the attribute that holds it says attention,
    are other ways to average values: `tensordot`, one sequence or head of the weights at a time, and functions of your
    own in C++ or Triton. Where sequences and heads share an axis, the modules' arguments say how many there are; if
    they do not, the layer is recorded as one head and listed in `heads_unknown`, with one warning. A module that
    computes attention several times in one call, for each sequence, head or chunk of queries, has several entries; it
    is listed in `repeats_unknown`, with one warning, unless each is a whole attention.

    Args:
        model: the module to watch, and to call.
        measures: names of measures of `joma.attention_summary`, such as "entropy", "sink_mass" or "distance".
        top: the number of keys that "top_mass" adds up, at most 16.
        sinks: the keys whose weight "sink_mass" adds up, by default 0: the first token of the row's own sequence, which
            is not key 0 if the batch is padded on the left or packed. Where sequences begin is read from the masks and
            position ids of the modules, and from what the attention itself shows where it has as many keys as queries.
            A sink that its row does not see has weight 0.
        precision: as in `joma.attention_entropy`, "highest" or "high".
        reduce: "mean" over sequences and query positions, "batch" over sequences alone, or "none" to keep [batch, head,
            query]. The largest logit is reduced by its maximum.
        rows: the query positions that count: "masks" for those that the model's own masks mark as real tokens, "all",
            or a boolean tensor [batch, query]. A mask hides padding as a key, but a padded query still attends to the
            tokens before it. "masks" reads the arguments of the model and its modules: `attention_mask`,
            `decoder_attention_mask` or else labels of −100 on a decoder's side, torch's `*_key_padding_mask`. A layer
            whose attention has another shape is listed in `rows_unknown`, with one warning; all its rows count.
        maps: whether to keep the queries and keys of the last pass, for `Recording.maps` and `plot_map`: True for at
            most 256 MiB, or a number of bytes.

    Returns:
        A `Recording`, whose `.dataset()` has dims pass, layer, head. A layer has the name of the module that made the
        call; its second attention in the same pass is `name[1]`.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True, dropout=0.0)
    >>> with attention(block) as recording:
    ...     out = block(torch.zeros(1, 5, 8))
    >>> recording.entropy.sel(layer="self_attn").values
    array([[1.6094..., 1.6094...]])
    """
    modules = all_modules(model) if isinstance(model, nn.Module) else {}
    check_model(model, modules)
    options: dict[str, Any] = {"precision": precision, "reduce": reduce, "rows": rows}
    recording = Recording(model, measures=measures, top=top, sinks=sinks, **options)
    recording.constants = Constants(modules.values())
    recording.keep_maps(maps)
    with ExitStack() as stack:
        stack.enter_context(without_fast_path(modules.values()))
        stack.enter_context(without_compilation(modules.values()))
        stack.enter_context(wrapped_registry(measured_function))
        stack.enter_context(rebound({type(module).__module__ for module in modules.values()}, measured_function))
        layers = layer_names(modules)
        layer_modules = {layers[name]: module for name, module in modules.items()}
        stack.enter_context(recording.row_masks.hooks(layer_modules, _hooks(modules, layers, recording)))
        stack.enter_context(interception(recording))
        yield recording
    recording.close()
    recording.check_seen()


def _hooks(modules: Mapping[str, nn.Module], layers: Mapping[str, str], recording: Recording) -> Iterator[Hooks]:
    """Yield hooks that notify `recording` when a module is entered and left, with the name of its layer."""
    kinds = set(map(type, modules.values()))
    without_attention = {kind for kind in kinds if calls_no_attention(kind)}
    elementary = {kind for kind in kinds if kind.__module__.startswith("torch.nn.modules")}  # linear maps, norms, …
    for name, module in modules.items():
        kind = type(module)
        is_plain = kind in without_attention and "forward" not in module.__dict__
        if name and (is_plain or (kind in elementary and not module._modules)):
            continue
        enter = partial(recording.enter, layers[name], attention_kind(module, layers[name]))
        yield Hooks(module, enter, recording.leave, kwargs=True)
