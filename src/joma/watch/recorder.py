"""Probe a model on one fixed batch while it trains, in a plain loop: entropy by layer and head, stable rank by weight.

The callbacks of `joma.watch.hf` and `joma.watch.lightning` are this recorder, called by their framework.
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

from joma.arguments import InputError, choice, scalar, whole
from joma.kernels.entropy_choice import PRECISIONS
from joma.probes.rank import stable_rank
from joma.runs import provenance, write_trajectory
from joma.watch.sdpa import QUANTITIES, attention, checked_model, checked_rows

STACKED = 2**24  # numbers that are copied at once to measure weights of one shape together
LOWER = (  # the lower layer of an MLP: GPT-NeoX, OPT, torch, Llama, Phi, GPT-2, BERT and ViT, OLMo, DistilBERT, T5
    r"(?:^|\.)(dense_h_to_4h|fc1|linear1|up_proj|gate_proj|gate_up_proj|c_fc|intermediate\.dense|ff_proj|lin1|wi|wi_[01]"
    r"|w1)\.weight$"
)
Policy = int | Collection[int] | Callable[[int], bool]


class EntropyCollapse(UserWarning):
    """A head puts nearly all its weight on one token, probe after probe."""


class RankCollapse(UserWarning):
    """A weight has come to act along one direction only, probe after probe."""


def doubling(step: int) -> bool:
    """Whether to probe at `step` by default: at 0, 8, 16, 32 … 512, then every 1,000.

    Nine probes in a thousand steps, each cheaper than a step, are less than one per cent of the training.

    >>> [step for step in range(3001) if doubling(step)]
    [0, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000]
    """
    return step % 1000 == 0 or (8 <= step < 1000 and step & (step - 1) == 0)


class Probe(NamedTuple):
    """One probe: both quantities by layer and head, and the stable rank of each weight."""

    layers: list[str]
    values: Float[np.ndarray, "quantity layer head"]
    ranks: list[float]


class Recorder:
    """Probe `model` on `batch` when a step is due, keep the trajectory, and warn of collapse.

    A probe runs the model once in evaluation mode without gradients; training flags, gradients and random numbers stay
    as they were. It costs about one and a half forward passes of the batch, and what the stable ranks take.

    Args:
        model: any module that `joma.watch.attention` can watch.
        batch: a tensor, a tuple or list of positional or a mapping of keyword arguments; moved to the model's device.
        at: the steps to probe at, from `joma.schedule`; or a number, for every so many; or a function of the step. By
            default 0, 8, 16, 32 … 512 and every 1,000. A step that was jumped over is made good at the next call.
        forward: how to run `model` on `batch`, if not `model(batch)`, `model(*batch)` or `model(**batch)`.
        ranks: stable ranks of the lower layers of the MLPs, known by their usual names, or where none bears one of all
            matrices but embeddings (True); of the matrices whose name matches a regular expression; or none (False).
        rows: the rows that count, [batch, query], as in `joma.watch.attention`.
        precision: as in `joma.attention_entropy`, "highest" or "high".
        floor: a head below this mean entropy, in nats, is near zero. At 0.05 it puts about 99 % on one token.
        rank_floor: a weight has collapsed when it began above this stable rank and fell below it. At 1.1 one direction
            holds 91 % of its squared norm.
        patience: for how many probes in a row before it is said, once for each head and each weight.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> recorder = Recorder(block, torch.zeros(1, 5, 8), at=lambda step: step % 10 == 0, ranks="linear1")
    >>> with warnings.catch_warnings():  # torch's own fast path is off during a probe, which is said once
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
        self.model, self.batch, self.precision = checked_model(model), batch, precision
        CHECKS["precision"](precision)
        self.rows, self.forward = CHECKS["rows"](rows), forward or call
        self.weights = _chosen(model, CHECKS["ranks"](ranks))
        self.floor, self.rank_floor = CHECKS["floor"](floor), CHECKS["rank_floor"](rank_floor)
        self.patience = CHECKS["patience"](patience)
        self._due = CHECKS["at"](at)
        self._probes: list[Probe] = []
        self._steps: list[int] = []
        self._called: int | None = None
        self._low: dict[tuple[str, ...], int] = {}  # for how many probes in a row each head or weight has been low

    def __call__(self, step: int) -> dict[str, float]:
        """Probe if a due step has come since the last call, and return the scalars for a logger, else {}."""
        since = step if self._called is None else self._called + 1
        self._called = step
        return self.probe(step) if any(map(self._due, range(since, step + 1))) else {}

    def probe(self, step: int) -> dict[str, float]:
        """Probe now, whether due or not; at a step that has been probed already, {}."""
        step = whole("step", step, low=0)
        if self._steps and step <= self._steps[-1]:
            if step == self._steps[-1]:
                return {}
            remedy = "count steps upwards, and begin a new Recorder for a new training"
            raise InputError("step", f"after the last probe, at {self._steps[-1]}", step, remedy)
        found = self._measure()
        self._steps.append(step)
        self._probes.append(found)
        self._watch_for_collapse(found)
        return self._scalars(found)

    def dataset(self) -> xr.Dataset:
        """The trajectory: `entropy`, `effective_tokens` by step, layer and head; `stable_rank` by step and weight."""
        if not self._probes:
            raise InputError("recorder", "one that has probed", "no probe", "call it at a step that is due")
        layers = list(dict.fromkeys(layer for probe in self._probes for layer in probe.layers))
        heads = max(probe.values.shape[-1] for probe in self._probes)
        block = np.full((len(QUANTITIES), len(self._probes), len(layers), heads), np.nan)
        for index, probe in enumerate(self._probes):
            places = [layers.index(layer) for layer in probe.layers]
            block[:, index, places, : probe.values.shape[-1]] = probe.values
        variables = {name: (("step", "layer", "head"), values) for name, values in zip(QUANTITIES, block, strict=True)}
        found = xr.Dataset(variables, {"step": self._steps, "layer": layers, "head": np.arange(heads)})
        if self.weights:
            found = found.assign_coords(weight=list(self.weights))
            found["stable_rank"] = (("step", "weight"), np.array([probe.ranks for probe in self._probes]))
        found["entropy"].attrs["units"] = "nat"
        return found

    def save(self, path: str | Path) -> None:
        """Write the trajectory as netCDF, with provenance; `joma.open_run(path)` reads it."""
        write_trajectory(Path(path), self.dataset().assign_attrs(provenance()))

    def _measure(self) -> Probe:
        device = next((own.device for own in self.model.parameters()), torch.device("cpu"))
        self.batch = _moved(self.batch, device)
        with _evaluation(self.model), attention(self.model, precision=self.precision, rows=self.rows) as seen:
            self.forward(self.model, self.batch)
        if seen.longest == 0 and seen.refused is not None:
            raise seen.refused
        if seen.longest < 2:
            remedy = "give a batch of longer sequences"
            raise InputError("batch", "texts of at least two tokens", f"{seen.longest}", remedy)
        layers, block = seen.arrays()
        count = np.isfinite(block).sum(axis=1)
        values = np.where(count, np.nansum(block, axis=1) / np.maximum(count, 1), np.nan)
        return Probe(layers, values, _stable_ranks([self.model.get_parameter(name) for name in self.weights]))

    def _watch_for_collapse(self, found: Probe) -> None:
        step = self._steps[-1]
        for layer, row in zip(found.layers, found.values[0].tolist(), strict=True):
            for head, value in enumerate(row):
                if self._stays_low(("head", layer, str(head)), value < self.floor):
                    message = f"attention entropy of layer {layer!r}, head {head}, has collapsed: {value:.3g} nats"
                    warnings.warn(f"{message} at step {step}.", EntropyCollapse, stacklevel=4)
        for name, began, value in zip(self.weights, self._probes[0].ranks, found.ranks, strict=True):
            if self._stays_low(("weight", name), began >= self.rank_floor > value):
                message = f"stable rank of weight {name!r} has collapsed: {value:.3g}, from {began:.3g}"
                warnings.warn(f"{message}, at step {step}.", RankCollapse, stacklevel=4)

    def _scalars(self, found: Probe) -> dict[str, float]:
        """The mean and the least over the heads of each layer, and each stable rank; the trajectory has all heads."""
        flat: dict[str, float] = {}
        for layer, heads in zip(found.layers, found.values[0], strict=True):
            known = heads[~np.isnan(heads)]  # none where the model has diverged
            flat[f"attention_entropy/{layer}"] = float(known.mean()) if known.size else math.nan
            flat[f"attention_entropy_min/{layer}"] = float(known.min()) if known.size else math.nan
        return flat | {f"stable_rank/{name}": rank for name, rank in zip(self.weights, found.ranks, strict=True)}

    def _stays_low(self, key: tuple[str, ...], low: bool) -> bool:
        """Count, and answer once: what has been said stays at or beyond `patience` for good."""
        count = self._low.get(key, 0)
        if count < self.patience:
            self._low[key] = count + 1 if low else 0
        return count < self.patience == self._low[key]


class Probing:
    """What the callbacks of all frameworks share: a recorder once training has begun, and its trajectory."""

    recorder: Recorder | None = None

    @property
    def trajectory(self) -> xr.Dataset:
        """All probes so far, with dims step, layer, head and weight."""
        return self._begun().dataset()

    def save(self, path: str | Path) -> None:
        """Write the trajectory as netCDF, with provenance; `joma.open_run(path)` reads it."""
        self._begun().save(path)

    def _begun(self) -> Recorder:
        if self.recorder is None:
            raise InputError("trajectory", "asked for once training has begun", "no training", "train first")
        return self.recorder


def _policy(at: Any) -> Callable[[int], bool]:
    """Whether a step is due."""
    if at is None:
        return doubling
    if callable(at):
        return cast(Callable[[int], bool], at)
    if isinstance(at, Number):
        every = whole("at", at)
        return lambda step: step % every == 0
    if not isinstance(at, Iterable):
        got = type(at).__name__
        raise InputError("at", "steps, a whole number or a function", got, "write at=100 for every 100 steps")
    return frozenset(whole("at", step, low=0) for step in at).__contains__


def _pattern(ranks: Any) -> bool | str:
    """What says of which weights the stable rank is taken."""
    try:
        return ranks if isinstance(ranks, bool) else re.compile(ranks).pattern
    except (TypeError, re.error) as cause:
        got = f"{ranks!r} ({cause})"
        raise InputError("ranks", "True, False or a regular expression", got, "mend it") from None


CHECKS: dict[str, Callable[[Any], Any]] = {
    "at": _policy,
    "ranks": _pattern,
    "rows": checked_rows,
    "precision": lambda value: choice("precision", value, PRECISIONS),
    "floor": lambda value: scalar("floor", value, low=0.0),
    "rank_floor": lambda value: scalar("rank_floor", value, low=0.0),
    "patience": lambda value: whole("patience", value),
}


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options`, all of them a `Recorder`'s, or name the one that is not: before training, not in its midst."""
    known = {name: name for name in inspect.signature(Recorder).parameters if name not in ("model", "batch")}
    for name, value in options.items():
        choice("options", name, known)
        CHECKS.get(name, lambda _: None)(value)
    return options


def call(model: nn.Module, batch: Any) -> object:
    """Run `model` on a mapping, a tuple or list, or a single argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _stable_ranks(weights: list[nn.Parameter]) -> list[float]:
    """Of all weights; those of one shape, or of its transpose, together, as many as may be copied at once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, weight in enumerate(weights):
        groups.setdefault((*sorted(weight.shape), weight.dtype, weight.device), []).append(index)
    ranks = [0.0] * len(weights)
    for group in groups.values():
        several = max(1, STACKED // weights[group[0]].numel())
        for start in range(0, len(group), several):
            part = group[start : start + several]
            wide = [weights[index].detach() for index in part]
            wide = [each if each.shape[0] <= each.shape[1] else each.T for each in wide]
            found = stable_rank(torch.stack(wide) if len(wide) > 1 else wide[0]).reshape(-1).tolist()
            for index, rank in zip(part, found, strict=True):
                ranks[index] = rank
    return ranks


def _chosen(model: nn.Module, ranks: bool | str) -> tuple[str, ...]:
    """The names of the weights whose stable rank is asked for."""
    if ranks is False:
        return ()
    flat = {name: id(weight) for name, weight in model.named_parameters() if weight.ndim == 2}
    chosen = tuple(name for name in flat if re.search(LOWER if ranks is True else ranks, name))
    if chosen:
        return chosen
    if ranks is True:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return tuple(name for name, weight in flat.items() if weight not in embeddings)
    known = ", ".join(list(flat)[:6]) or "none"
    raise InputError("ranks", "a pattern that the name of a matrix matches", repr(ranks), f"there are {known} …")


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    return type(batch)(_moved(value, device) for value in batch) if isinstance(batch, tuple | list) else batch


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's own training flag comes back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Python, NumPy and torch draw afterwards what they would have drawn without what is done inside."""
    before, array = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(before)
        np.random.set_state(array)  # noqa: NPY002
