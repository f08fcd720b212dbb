"""Probe a model on one fixed batch while it trains: attention entropy by layer and head, stable rank by weight.

`Recorder` is for a plain training loop; the callbacks in `joma.watch.hf` and `joma.watch.lightning` use it as well.
"""

from __future__ import annotations

import inspect
import math
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn

from joma.arguments import InputError, StateError, choice, scalar, whole
from joma.kernels.entropy_choice import PRECISIONS
from joma.probes.rank import stable_rank
from joma.runs import write_recording
from joma.stamp import provenance
from joma.watch.recording import DEFAULT_MEASURES, check_rows
from joma.watch.watching import attention, check_model

MAX_STACKED = 2**24  # elements that are copied at once to measure weights of the same shape together
LOWER_MATRIX = (  # of an MLP, in GPT-NeoX, OPT, torch, Llama, Phi, GPT-2, BERT and ViT, OLMo, DistilBERT, T5
    r"(?:^|\.)(dense_h_to_4h|fc1|linear1|up_proj|gate_proj|gate_up_proj|c_fc|intermediate\.dense|ff_proj|lin1|wi|wi_[01]"
    r"|w1)\.weight$"
)
Policy = int | Collection[int] | Callable[[int], bool]


class EntropyCollapse(UserWarning):
    """A head has put nearly all its weight on one token for several probes in a row."""


class RankCollapse(UserWarning):
    """A weight has acted along a single direction for several probes in a row."""


def doubling(step: int) -> bool:
    """Return whether to probe at `step` by default: at 0, 8, 16, 32 … 512, then every 1,000.

    These are nine probes in a thousand steps, each cheaper than a step: less than one per cent of the training.

    >>> [step for step in range(3001) if doubling(step)]
    [0, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000]
    """
    return step % 1000 == 0 or (8 <= step < 1000 and step & (step - 1) == 0)


class Measurement(NamedTuple):
    """The result of one probe: both quantities by layer and head, and the stable rank of each weight."""

    layers: list[str]
    values: Float[np.ndarray, "quantity layer head"]
    ranks: list[float]


class Recorder:
    """Probe `model` on `batch` at the steps that are due, keep the trajectory, and warn of collapse.

    A probe runs the model once in evaluation mode without gradients; it leaves training flags, gradients and random
    number generators unchanged. It costs about one and a half forward passes of the batch, and the stable ranks.

    Args:
        model: any module that `joma.watch.attention` can watch.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments; it is moved to the
            model's device.
        at: the steps to probe at, such as those of `joma.schedule`; or an interval in steps; or a function of the step.
            By default 0, 8, 16, 32 … 512 and every 1,000. If a due step is skipped, the next call probes instead.
        forward: how to run `model` on `batch`, if not by `model(batch)`, `model(*batch)` or `model(**batch)`.
        ranks: True for the stable ranks of the MLPs' lower matrices, which are recognised by their usual names, or of
            all matrices except embeddings if there are none; a regular expression for the names of matrices; or False.
        rows: the query positions that count, [batch, query], as in `joma.watch.attention`.
        precision: as in `joma.attention_entropy`, "highest" or "high".
        floor: a head counts as low below this mean entropy in nats. At 0.05 it puts about 99 % on one token.
        rank_floor: a weight counts as low if its stable rank began at or above this value and is below it. At 1.1 one
            direction holds 91 % of its squared norm.
        patience: the number of low probes in a row before the warning, which is given once per head and weight.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> recorder = Recorder(block, torch.zeros(1, 5, 8), at=lambda step: step % 10 == 0, ranks="linear1")
    >>> with warnings.catch_warnings():  # a probe turns torch's fast path off and warns of it once
    ...     warnings.simplefilter("ignore")
    ...     for step in range(21):
    ...         scalars = recorder(step)
    >>> sorted(scalars)
    ['attention_entropy/self_attn', 'attention_entropy_min/self_attn', 'stable_rank/linear1.weight']
    >>> dict(recorder.dataset().sizes)
    {'step': 3, 'layer': 1, 'head': 2, 'weight': 1}
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        at: Policy | None = None,
        forward: Callable[[nn.Module, Any], object] | None = None,
        ranks: bool | str = True,
        rows: Tensor | None = None,
        precision: str = "highest",
        floor: float = 0.05,
        rank_floor: float = 1.1,
        patience: int = 3,
    ) -> None:
        self.model, self.batch, self.precision = check_model(model), batch, precision
        CHECKS["precision"](precision)
        self.rows, self.forward = CHECKS["rows"](rows), forward or call_model
        self.weights = _select_weights(model, CHECKS["ranks"](ranks))
        self.floor, self.rank_floor = CHECKS["floor"](floor), CHECKS["rank_floor"](rank_floor)
        self.patience = CHECKS["patience"](patience)
        self._is_due = CHECKS["at"](at)
        self._measurements: list[Measurement] = []
        self._steps: list[int] = []
        self._last_call: int | None = None
        self._low_probes: dict[tuple[str, ...], int] = {}  # how many in a row, by head or weight

    def __call__(self, step: int) -> dict[str, float]:
        """Probe if a step has become due since the last call, and return the scalars to log, else {}."""
        first = step if self._last_call is None else self._last_call + 1
        self._last_call = step
        return self.probe(step) if any(map(self._is_due, range(first, step + 1))) else {}

    def probe(self, step: int) -> dict[str, float]:
        """Probe now, whether due or not, and return the scalars to log; {} if this step has been probed already."""
        step = whole("step", step, low=0)
        if self._steps and step <= self._steps[-1]:
            if step == self._steps[-1]:
                return {}
            remedy = "count steps upwards, and use a new Recorder for a new training"
            raise InputError("step", f"after the last probe, at {self._steps[-1]}", step, remedy)
        measurement = self._measure()
        self._steps.append(step)
        self._measurements.append(measurement)
        self._warn_of_collapse(measurement)
        return self._scalars(measurement)

    def dataset(self) -> xr.Dataset:
        """Return the trajectory: `entropy`, `effective_tokens` (step, layer, head) and `stable_rank` (step, weight)."""
        if not self._measurements:
            raise StateError("recorder", "has no probe yet", "call it at a step that is due")
        layers = list(dict.fromkeys(layer for measurement in self._measurements for layer in measurement.layers))
        heads = max(measurement.values.shape[-1] for measurement in self._measurements)
        block = np.full((len(DEFAULT_MEASURES), len(self._measurements), len(layers), heads), np.nan)
        for index, measurement in enumerate(self._measurements):
            positions = [layers.index(layer) for layer in measurement.layers]
            block[:, index, positions, : measurement.values.shape[-1]] = measurement.values
        dims = ("step", "layer", "head")
        variables = {name: (dims, values) for name, values in zip(DEFAULT_MEASURES, block, strict=True)}
        dataset = xr.Dataset(variables, {"step": self._steps, "layer": layers, "head": np.arange(heads)})
        if self.weights:
            dataset = dataset.assign_coords(weight=list(self.weights))
            ranks = np.array([measurement.ranks for measurement in self._measurements])
            dataset["stable_rank"] = (("step", "weight"), ranks)
        dataset["entropy"].attrs["units"] = "nat"
        return dataset

    def save(self, path: str | Path) -> None:
        """Write the trajectory as netCDF, with provenance; `joma.open_run(path)` reads it."""
        write_recording(Path(path), self.dataset().assign_attrs(provenance()))

    def _measure(self) -> Measurement:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        self.batch = _move(self.batch, device)
        with _evaluation_mode(self.model), attention(self.model, precision=self.precision, rows=self.rows) as recording:
            self.forward(self.model, self.batch)
        if recording.longest == 0 and recording.refused is not None:
            raise recording.refused
        if recording.longest < 2:
            remedy = "give a batch of longer sequences"
            raise InputError("batch", "sequences of at least two tokens", f"{recording.longest}", remedy)
        layers, block = recording.arrays()
        count = np.isfinite(block).sum(axis=1)
        values = np.where(count, np.nansum(block, axis=1) / np.maximum(count, 1), np.nan)
        return Measurement(layers, values, _stable_ranks([self.model.get_parameter(name) for name in self.weights]))

    def _warn_of_collapse(self, measurement: Measurement) -> None:
        step = self._steps[-1]
        for layer, heads in zip(measurement.layers, measurement.values[0].tolist(), strict=True):
            for head, entropy in enumerate(heads):
                if self._stays_low(("head", layer, str(head)), entropy < self.floor):
                    message = f"attention entropy of layer {layer!r}, head {head}, has collapsed: {entropy:.3g} nats"
                    warnings.warn(f"{message} at step {step}.", EntropyCollapse, stacklevel=4)
        for name, start, rank in zip(self.weights, self._measurements[0].ranks, measurement.ranks, strict=True):
            if self._stays_low(("weight", name), start >= self.rank_floor > rank):
                message = f"stable rank of weight {name!r} has collapsed: {rank:.3g}, from {start:.3g}"
                warnings.warn(f"{message}, at step {step}.", RankCollapse, stacklevel=4)

    def _scalars(self, measurement: Measurement) -> dict[str, float]:
        """Return what is logged: for each layer the mean and minimum over its heads, and each stable rank."""
        scalars: dict[str, float] = {}
        for layer, heads in zip(measurement.layers, measurement.values[0], strict=True):
            defined = heads[~np.isnan(heads)]  # empty if the model has diverged
            scalars[f"attention_entropy/{layer}"] = float(defined.mean()) if defined.size else math.nan
            scalars[f"attention_entropy_min/{layer}"] = float(defined.min()) if defined.size else math.nan
        ranks = zip(self.weights, measurement.ranks, strict=True)
        return scalars | {f"stable_rank/{name}": rank for name, rank in ranks}

    def _stays_low(self, key: tuple[str, ...], low: bool) -> bool:
        """Count the low probes in a row of a head or weight; return True once, when they reach `patience`.

        From then on the count stays there, so that the warning is not repeated.
        """
        count = self._low_probes.get(key, 0)
        if count < self.patience:
            self._low_probes[key] = count + 1 if low else 0
        return count < self.patience == self._low_probes[key]


class RecorderCallback:
    """The common part of the callbacks of all frameworks: a recorder, made when training begins, and its trajectory."""

    recorder: Recorder | None = None

    @property
    def trajectory(self) -> xr.Dataset:
        """All probes so far, with dims step, layer, head and weight."""
        return self._started_recorder().dataset()

    def save(self, path: str | Path) -> None:
        """Write the trajectory as netCDF, with provenance; `joma.open_run(path)` reads it."""
        self._started_recorder().save(path)

    def _started_recorder(self) -> Recorder:
        if self.recorder is None:
            raise StateError(type(self).__name__, "has no trajectory before training has begun", "train first")
        return self.recorder


def _check_policy(at: Any) -> Callable[[int], bool]:
    """Return the function that says whether a step is due."""
    if at is None:
        return doubling
    if callable(at):
        return cast(Callable[[int], bool], at)
    if isinstance(at, Number):
        interval = whole("at", at)
        return lambda step: step % interval == 0
    if not isinstance(at, Iterable):
        got = type(at).__name__
        raise InputError("at", "steps, an interval or a function", got, "write at=100 for every 100 steps")
    return frozenset(whole("at", step, low=0) for step in at).__contains__


def _check_ranks(ranks: Any) -> bool | str:
    """Return `ranks` if it selects weights: a bool or a regular expression."""
    try:
        return ranks if isinstance(ranks, bool) else re.compile(ranks).pattern
    except (TypeError, re.error) as cause:
        got = f"{ranks!r} ({cause})"
        raise InputError("ranks", "True, False or a regular expression", got, "correct it") from None


CHECKS: dict[str, Callable[[Any], Any]] = {
    "at": _check_policy,
    "ranks": _check_ranks,
    "rows": check_rows,
    "precision": lambda value: choice("precision", value, PRECISIONS),
    "floor": lambda value: scalar("floor", value, low=0.0),
    "rank_floor": lambda value: scalar("rank_floor", value, low=0.0),
    "patience": lambda value: whole("patience", value),
}


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` if all are valid options of a `Recorder`; callbacks check them before training begins."""
    known = {name: name for name in inspect.signature(Recorder).parameters if name not in ("model", "batch")}
    for name, value in options.items():
        choice("options", name, known)
        CHECKS.get(name, lambda _: None)(value)
    return options


def call_model(model: nn.Module, batch: Any) -> object:
    """Call `model` on a mapping, a tuple or list, or a single argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _stable_ranks(weights: list[nn.Parameter]) -> list[float]:
    """Return the stable rank of each weight; weights of one shape, or its transpose, are measured together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, weight in enumerate(weights):
        groups.setdefault((*sorted(weight.shape), weight.dtype, weight.device), []).append(index)
    ranks = [0.0] * len(weights)
    for group in groups.values():
        batch_size = max(1, MAX_STACKED // weights[group[0]].numel())
        for start in range(0, len(group), batch_size):
            indices = group[start : start + batch_size]
            wide = [weights[index].detach() for index in indices]
            wide = [weight if weight.shape[0] <= weight.shape[1] else weight.T for weight in wide]
            batch = stable_rank(torch.stack(wide) if len(wide) > 1 else wide[0]).reshape(-1).tolist()
            for index, rank in zip(indices, batch, strict=True):
                ranks[index] = rank
    return ranks


def _select_weights(model: nn.Module, ranks: bool | str) -> tuple[str, ...]:
    """Return the names of the weights whose stable rank is to be measured."""
    if ranks is False:
        return ()
    matrices = {name: id(weight) for name, weight in model.named_parameters() if weight.ndim == 2}
    selected = tuple(name for name in matrices if re.search(LOWER_MATRIX if ranks is True else ranks, name))
    if selected:
        return selected
    if ranks is True:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return tuple(name for name, weight in matrices.items() if weight not in embeddings)
    known = ", ".join(list(matrices)[:6]) or "none"
    remedy = f"the matrices are {known} …"
    raise InputError("ranks", "a pattern that matches the name of a matrix", repr(ranks), remedy)


def _move(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a nested batch to `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _move(value, device) for name, value in batch.items()}
    return type(batch)(_move(value, device) for value in batch) if isinstance(batch, tuple | list) else batch


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients, and restore the training flag of each module afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and torch after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
