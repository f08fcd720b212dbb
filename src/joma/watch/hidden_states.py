"""Record what flows around attention: the norm of the residual stream, and the ranks of hidden states, by block.

Hooks on the blocks and on the attention inside them see the tensors that they return. The measurements are a few
numbers for each block and stay on the model's device; the model's outputs and its training are the same bits.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from joma.arguments import InputError, StateError, flag, instance
from joma.probes.spectrum import state_ranks
from joma.watch.blocks import all_modules, find_blocks, first_free, named_modules
from joma.watch.module_hooks import Hooks, module_hooks
from joma.watch.rows import RowMasks
from joma.watch.switches import without_compilation, without_fast_path

NORMS, RANKS = ("residual_rms", "residual_norm"), ("stable_rank", "participation_ratio")
QUANTITIES = len(NORMS + RANKS) + 1  # and the number of tokens that count
HIDDEN, ATTENTION = "hidden", "attention"  # the streams


class _Call(NamedTuple):
    """A call of a module: the module's name, and the label of the block if it is one."""

    name: str
    block: str | None


class HiddenStates:
    """The results of `activations`: norms and ranks of each block for each forward pass, in the order of the calls.

    Attributes:
        blocks: the names of the blocks.
        row_masks: the masks that the model's modules are called with; its `rows` are as given to `activations`.
        refused: the error that explains why an output was not recorded, the first one if there are several, or None.
    """

    def __init__(self, model: nn.Module, *, residual: bool, ranks: bool, rows: Tensor | str, blocks: str | None):
        self._residual, self._ranks = flag("residual", residual), flag("ranks", ranks)
        if not self._residual and not self._ranks:
            raise InputError("residual`, `ranks", "True, at least one of them", "False for both", "set one of them")
        self.row_masks = RowMasks(rows, remedy="give `rows` as a tensor [batch, token]")
        self._block_modules = find_blocks(model, blocks)
        self._widths = {name: block.widths for name, block in self._block_modules.items()}
        self._sequence_first = {name for name, block in self._block_modules.items() if block.is_sequence_first}
        self._attention = (
            {name for block in self._block_modules.values() for name in block.attention} if ranks else set()
        )
        self._model_name = type(model).__name__
        self.blocks = tuple(name or self._model_name for name in self._block_modules)
        self.refused: InputError | None = None
        self._passes: list[dict[tuple[str, str], Float[Tensor, " quantity"]]] = []
        self._calls: list[_Call] = []  # the modules that are being called, outermost first
        self._entry_modules: set[str] = set()  # modules that were called from outside during the current pass
        self._labels: set[str] = set()  # blocks that have been called during the current pass
        self._thread = threading.get_ident()

    @property
    def rows_unknown(self) -> dict[str, str]:
        """For each block whose padded tokens the model's masks do not show, the reason; all its tokens count."""
        return self.row_masks.unknown

    def dataset(self) -> xr.Dataset:
        """Return the norms (pass, block) and the ranks (pass, block, stream); NaN for what was not called."""
        labels, streams, table = self._table()
        dataset = xr.Dataset(coords={"pass": np.arange(table.shape[1]), "block": labels})
        if self._residual:
            dataset = dataset.assign({NORMS[i]: (("pass", "block"), table[i, ..., 0]) for i in range(2)})
        if self._ranks:
            dataset = dataset.assign_coords(stream=streams)
            dataset = dataset.assign({RANKS[i]: (("pass", "block", "stream"), table[2 + i]) for i in range(2)})
        return dataset

    def token_counts(self) -> Float[np.ndarray, "pass block"]:
        """Return how many tokens counted in the norms, for the passes and blocks of `dataset`."""
        return self._table()[2][-1, ..., 0]

    def _table(self) -> tuple[list[str], list[str], Float[np.ndarray, "quantity pass block stream"]]:
        """Return the blocks, the streams, and all that was measured; the last quantity is the number of tokens."""
        passes = [values for values in self._passes if values]
        if not passes and self.refused is not None:
            raise self.refused
        if self._passes and not passes:
            got, remedy = f"{', '.join(self.blocks[:3])} …, of which none was", "name others with `blocks=`"
            raise InputError("blocks", "called by the model", got, remedy)
        if not passes:
            raise StateError("recording", "has no forward pass", "call `model(...)` inside the context")
        labels = list(dict.fromkeys(block for values in passes for block, _ in values))
        streams = list(dict.fromkeys([HIDDEN, *(stream for values in passes for _, stream in values)]))
        table = np.full((QUANTITIES, len(passes), len(labels), len(streams)), np.nan)
        for index, values in enumerate(passes):
            for (label, stream), numbers in zip(values, _on_host(list(values.values())), strict=True):
                table[:, index, labels.index(label), streams.index(stream)] = numbers
        return labels, streams, table

    def __repr__(self) -> str:
        passes = sum(map(bool, self._passes))
        return f"<{type(self).__name__} of {len(self.blocks)} blocks, {passes} pass{'es' * (passes != 1)}>"

    def _enter(self, name: str, *_: Any) -> None:
        """Note the call of a module.

        A new pass begins when a module that has been called from outside in this pass is called from outside again.
        """
        if not self._in_forward_pass():
            return
        for index, call in enumerate(self._calls):  # left behind by an exception that the caller has caught
            if call.name == name:
                del self._calls[index:]
                break
        if not self._calls:
            if not self._passes or name in self._entry_modules:
                self._begin_pass()
            self._entry_modules.add(name)
        self._calls.append(_Call(name, self._new_label(name) if name in self._block_modules else None))

    def _leave(self, name: str, _module: nn.Module, _inputs: Any, output: object) -> None:
        """Note that a module returns, or raises if `output` is None, and measure what it returns."""
        if not self._in_forward_pass() or all(call.name != name for call in self._calls):
            return
        while self._calls[-1].name != name:
            self._calls.pop()
        call = self._calls.pop()
        if output is None and sys.exc_info()[0] is not None:
            if not self._calls:
                self._passes.pop()  # a pass that fails is no pass
            return
        outer = call if call.block else next((other for other in reversed(self._calls) if other.block), None)
        if outer is not None and outer.block and (outer is call or name in self._attention):
            stream = HIDDEN if outer is call else self._new_stream(outer.block)
            self._record((outer.block, stream), name, outer.name, output)

    def _begin_pass(self) -> None:
        self._passes.append({})
        self._entry_modules.clear()
        self._labels.clear()

    def _new_label(self, name: str) -> str:
        """Return the name of a block, with a number from its second call in a pass on."""
        label = first_free(name or self._model_name, self._labels)
        self._labels.add(label)
        return label

    def _new_stream(self, block: str) -> str:
        """Return "attention", with a number from the second attention of a block on, such as cross attention."""
        return first_free(ATTENTION, {stream for label, stream in self._passes[-1] if label == block})

    def _in_forward_pass(self) -> bool:
        """Whether this is the thread of the context, and not the recomputation of a forward in a backward pass."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    def _record(self, key: tuple[str, str], name: str, block: str, output: object) -> None:
        """Measure the first tensor that the module `name` returns, unless it cannot be measured; then warn once."""
        try:
            states = _check_states(_first_tensor(output), ", ".join(key))
            with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                states = self._batch_first(states.detach(), block)
                rows = self.row_masks.rows_for(name, *states.shape[:2], device=states.device)
                if rows is not None:  # a token may have several vectors, as with hyper-connections
                    rows = rows[(..., *(None,) * (states.ndim - 3))].expand(states.shape[:-1])
                self._passes[-1][key] = self._measure(states, rows, norms=key[1] == HIDDEN)
        except (InputError, torch.OutOfMemoryError) as cause:
            if self.refused is None:
                got = f"{type(cause).__name__} at {key[0]}"
                smaller = InputError("model", "small enough to be measured", got, "watch a smaller batch")
                self.refused = cause if isinstance(cause, InputError) else smaller
                warnings.warn(f"hidden states that cannot be measured are not recorded: {self.refused}", stacklevel=6)

    def _batch_first(self, states: Tensor, block: str) -> Float[Tensor, "batch *position dim"]:
        """Return states with the batch as first axis and the dimensions as last, from any order that blocks use."""
        if states.ndim == 2:
            return states[None]
        if states.ndim == 3:
            return states.transpose(0, 1) if block in self._sequence_first else states
        widths = self._widths[block]
        channels_first = (
            states.shape[-1] not in widths and states.shape[1] in widths
        )  # an image [batch, dim, row, column]
        return states.movedim(1, -1) if channels_first else states

    def _measure(
        self, states: Float[Tensor, "*position dim"], rows: Bool[Tensor, "*position"] | None, *, norms: bool
    ) -> Float[Tensor, " quantity"]:
        """Return the norms and the ranks of hidden states, NaN for what is not asked for, and the number of tokens."""
        values = torch.full((QUANTITIES,), torch.nan, dtype=torch.float64, device=states.device)
        values[-1] = states.shape[:-1].numel() if rows is None else rows.sum()
        if norms and self._residual:
            values[0], values[1] = _norms(states, rows)
        if self._ranks:
            ranks = state_ranks(states.flatten(0, -2), None if rows is None else rows.flatten())
            values[2], values[3] = ranks
        return values


@contextmanager
def activations(
    model: nn.Module,
    *,
    residual: bool = True,
    ranks: bool = True,
    rows: Tensor | str = "masks",
    blocks: str | None = None,
) -> Iterator[HiddenStates]:
    """Record norms of the residual stream and ranks of hidden states, by block, for every forward pass in the context.

    The residual stream is what a block returns, x of [token, dim]. Recorded are its root mean square √(mean x²), the
    mean length ‖x_i‖ of its vectors, and for `ranks` the stable rank ‖X‖_F²/‖X‖_2² and the participation ratio
    (Σλ)²/Σλ² of its covariance (`joma.participation_ratio`); the ranks also of what the block's attention returns.

    Works with the models of transformers, timm and torch, and with your own. Use it where the forward passes are, in
    training or evaluation, alone or together with `joma.watch.attention`. What a backward pass computes again
    (gradient checkpointing) is not recorded twice, and the device is not synchronised before `.dataset()`. Compiled
    models run eagerly inside the context, and torch's fused fast path is off, as in `joma.watch.attention`.

    Args:
        model: the module to watch, and to call.
        residual: whether to record `residual_rms` and `residual_norm`.
        ranks: whether to record `stable_rank` and `participation_ratio`.
        rows: the tokens that count: "masks" for those that the model's own masks mark as real tokens, "all", or a
            boolean tensor [batch, token], as in `joma.watch.attention`.
        blocks: a regular expression for the names of the blocks. By default the members of the model's lists of
            modules that contain attention.

    Returns:
        A `HiddenStates`, whose `.dataset()` has dims pass, block, and for the ranks stream: "hidden", "attention", and
        "attention[1]" for a second attention of a block. A block's second call in the same pass is `name[1]`.

    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> with activations(encoder) as recording:
    ...     out = encoder(torch.randn(2, 5, 8))
    >>> dict(recording.dataset().sizes)
    {'pass': 1, 'block': 3, 'stream': 2}
    """
    instance("model", model, nn.Module, "load it first")
    recording = HiddenStates(model, residual=residual, ranks=ranks, rows=rows, blocks=blocks)
    modules = all_modules(model).values()
    with ExitStack() as stack:
        stack.enter_context(without_fast_path(modules))
        stack.enter_context(without_compilation(modules))
        stack.enter_context(module_hooks(_hooks(model, recording)))  # before the masks', which forget a call at its end
        stack.enter_context(recording.row_masks.hooks(named_modules(model)))
        yield recording


def _hooks(model: nn.Module, recording: HiddenStates) -> Iterator[Hooks]:
    """Yield hooks for the blocks, their attention (for the ranks), and all modules that contain a block."""
    blocks = recording._block_modules
    outer = {name.rsplit(".", count)[0] for name in blocks for count in range(1, name.count(".") + 1)} | {""}
    for name, module in named_modules(model).items():
        if name in recording._attention or name in outer or name in blocks:
            yield Hooks(module, partial(recording._enter, name), partial(recording._leave, name))


def _first_tensor(output: object) -> Tensor | None:
    """Return the first tensor in the output of a module: a tensor, or a tuple, mapping or dataclass of outputs."""
    if isinstance(output, Tensor):
        return output
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    elif is_dataclass(output):
        parts = [getattr(output, field.name) for field in fields(output)]
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)


def _check_states(output: Any, name: str) -> Tensor:
    """Return hidden states that can be measured, whole if they are sharded; raise an error for others."""
    states = output.full_tensor() if hasattr(output, "full_tensor") else output
    remedy = "call the model on ordinary tensors, or name other modules with `blocks=`"
    if states is None or states.ndim < 2 or not states.is_floating_point() or states.numel() == 0:
        got = "no tensor" if states is None else f"{states.dtype} of shape {tuple(states.shape)}"
        raise InputError(name, "a floating tensor [batch, token, dim]", got, remedy, must="return")
    if isinstance(states, FakeTensor) or states.is_meta or states.is_nested or is_functorch_wrapped_tensor(states):
        kind = "nested" if states.is_nested else "transformed" if not states.is_meta else "meta"
        raise InputError(name, "an ordinary tensor", f"a {kind} one", remedy, must="return")
    return states


def _norms(
    states: Float[Tensor, "*position dim"], rows: Bool[Tensor, "*position"] | None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the root mean square of the states, and the mean length of their vectors."""
    dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
    lengths = torch.linalg.vector_norm(states, dim=-1, dtype=dtype).double()
    if rows is None:
        return lengths.square().mean().div(states.shape[-1]).sqrt(), lengths.mean()
    lengths, count = torch.where(rows, lengths, 0), rows.sum()
    return (lengths.square().sum() / (count * states.shape[-1])).sqrt(), lengths.sum() / count


def _on_host(values: list[Tensor]) -> list[list[float]]:
    """Return tensors of one shape as lists, with one transfer from each device."""
    numbers: dict[int, list[float]] = {}
    for device in dict.fromkeys(value.device for value in values):
        indices = [index for index, value in enumerate(values) if value.device == device]
        numbers.update(zip(indices, torch.stack([values[index] for index in indices]).tolist(), strict=True))
    return [numbers[index] for index in range(len(values))]
