"""Probe a model on one fixed batch while it trains: attention by layer and head, stable rank by weight.

`Recorder` is for a plain training loop; the callbacks in `joma.watch.hf` and `joma.watch.lightning` use it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from joma.arguments import InputError, StateError, whole
from joma.probes.summary import Sinks
from joma.runs import write_recording
from joma.stamp import provenance
from joma.watch import averages
from joma.watch.block_values import GRADIENT, combine_blocks, has_gradients, hidden_parts, watch_blocks
from joma.watch.blocks import all_modules, find_blocks
from joma.watch.collapse import Collapsed, CollapseDetector
from joma.watch.distributed import find_processes, model_device, reshard, unwrap
from joma.watch.evaluation import call_model, evaluation_mode, move, preserve_random_state
from joma.watch.failures import Failures, free_device_memory, is_out_of_memory
from joma.watch.gradients import gradient_norms
from joma.watch.hidden_states import HiddenStates
from joma.watch.log_keys import LogKeys
from joma.watch.probe_options import Policy, checked_options
from joma.watch.recording import DEFAULT_MEASURES, Recording
from joma.watch.trajectory import Measurement, Probe, trajectory_dataset
from joma.watch.views import RecorderViews
from joma.watch.watching import attention, check_model
from joma.watch.weight_ranks import select_weights, stable_ranks


class Recorder(RecorderViews):
    """Probe `model` on `batch` at the steps that are due, keep the trajectory, log it, and warn of collapse.

    A probe runs the model once in evaluation mode without gradients; it leaves training flags, gradients and random
    number generators unchanged. It costs about one and a half forward passes of the batch, and the stable ranks. A
    probe that fails does not end the training: it is a `ProbeFailed` warning, and is tried again when next due.

    A model in `DistributedDataParallel` or sharded by `fully_shard` is measured by all its processes together: call the
    recorder on every one of them, each with its own batch. The results are means over all rows, and the same on all;
    the ranks of hidden states are means of those of each batch.

    Args:
        model: any module that `joma.watch.attention` can watch; wrappers of distributed training are looked through.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments; it is moved to the
            model's device.
        at: the steps to probe at, such as those of `joma.schedule`; or an interval in steps; or a function of the step.
            By default 0, 8, 16, 32 … 512 and every 1,000. If a due step is skipped, the next call probes instead.
        forward: how to run `model` on `batch`, if not by `model(batch)`, `model(*batch)` or `model(**batch)`.
        measures: names of measures of `joma.attention_summary`, such as "entropy", "sink_mass" or "distance".
        top: the number of keys that "top_mass" adds up, at most 16.
        sinks: the keys whose weight "sink_mass" adds up, by default the first.
        ranks: True for the stable ranks of the MLPs' lower matrices, which are recognised by their usual names, or of
            all matrices except embeddings if there are none; a regular expression for the names of matrices; or False.
        residual: record the norm of the residual stream after each block: `residual_rms` and `residual_norm`.
        activation_ranks: record stable rank and participation ratio of the hidden states after each block and of what
            its attention returns, as in `joma.watch.activations`.
        gradients: record the norm of the gradient by block, `gradient_norm`: that of the update which leads to the
            step, of the whole accumulated batch, before clipping. In a plain loop call `read_gradients` where this
            gradient is; without it the recorder takes the gradients that it finds when it is called.
        blocks: a regular expression for the names of the blocks, as in `joma.watch.activations`.
        rows: the query positions that count, as in `joma.watch.attention`: by default "masks", the real tokens.
        precision: as in `joma.attention_entropy`, "highest" or "high".
        floor: a head counts as low below this mean entropy in nats. At 0.05 it puts about 99 % on one token.
        rank_floor: a weight counts as low if its stable rank began at or above this value and is below it. At 1.1 one
            direction holds 91 % of its squared norm.
        patience: the number of low probes in a row before the warning, which is given once per head and weight.
        log: where the scalars go besides being returned: a function of the scalars and the step, a TensorBoard
            `SummaryWriter`, the module `wandb` or a run of it, the module `mlflow` or `trackio`, or a list of these.
            Of several processes only the first one logs.
        summary: log one value for each layer and measure, and one stable rank for each layer.
        distributed: whether all processes of the process group measure together; by default if `model` is wrapped or
            sharded for them.
        strict: let a probe that fails raise its error.

    >>> import torch, warnings
    >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> recorder = Recorder(block, torch.zeros(1, 5, 8), at=lambda step: step % 10 == 0, ranks="linear1")
    >>> with warnings.catch_warnings():  # a probe turns torch's fast path off and warns of it once
    ...     warnings.simplefilter("ignore")
    ...     for step in range(21):
    ...         scalars = recorder(step)
    >>> sorted(scalars)
    ['attention_entropy/self_attn', 'attention_entropy_min/self_attn', 'stable_rank/linear1']
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
        measures: str | Sequence[str] = DEFAULT_MEASURES,
        top: int = 8,
        sinks: Sinks = 0,
        ranks: bool | str = True,
        residual: bool = False,
        activation_ranks: bool = False,
        gradients: bool = False,
        blocks: str | None = None,
        rows: Tensor | str = "masks",
        precision: str = "highest",
        floor: float = 0.05,
        rank_floor: float = 1.1,
        patience: int = 3,
        log: Any = None,
        summary: bool = False,
        distributed: bool | None = None,
        strict: bool = False,
    ) -> None:
        names = {name: value for name, value in locals().items() if name not in ("self", "model", "batch")}
        options = checked_options(names)
        self._processes = find_processes(check_model(model), options["distributed"])
        self.model, self.batch = unwrap(model), batch
        self.forward, self._is_due = options["forward"] or call_model, options["at"]
        self.weights = select_weights(self.model, options["ranks"])
        self._watching = {name: options[name] for name in ("measures", "top", "sinks", "rows", "precision")}
        self._blocks = {name: options[name] for name in ("residual", "activation_ranks", "rows", "blocks")}
        named: Collection[str] = ()
        if options["residual"] or options["activation_ranks"] or options["gradients"] or options["blocks"] is not None:
            named = find_blocks(self.model, options["blocks"])  # raises an error if there are none
        elif options["summary"]:
            named = find_blocks(self.model, required=False)
        self._with_gradients = options["gradients"]
        self._read: dict[
            int, dict[str, float]
        ] = {}  # the norms of gradients that were read for a coming probe, by step
        self._log, self._strict = options["log"], options["strict"]
        self._keys = LogKeys(self.weights, measures=options["measures"], summary=options["summary"], blocks=named)
        levels = {name: options[name] for name in ("floor", "rank_floor", "patience")}
        self._detector, self._failures = CollapseDetector(**levels), Failures()
        self._probes: list[Probe] = []
        self._last_call: int | None = None

    def __call__(self, step: int, *, gradients: bool = True) -> dict[str, float]:
        """Probe if a step has become due since the last call, and return the scalars to log, else {}.

        `gradients` is as in `probe`.
        """
        step = whole("step", step, low=0)
        due = self._has_become_due(step)
        self._last_call = step
        return self.probe(step, gradients=gradients) if due else {}

    def read_gradients(self, step: int, *, always: bool = False, scale: float = 1.0) -> None:
        """Measure the gradients now for the probe at `step`, if a step is due by then, or `always`.

        Call it after the last `loss.backward()` of a batch and before the gradients are clipped, with the number that
        the step will have after `optimizer.step()`: the callbacks do so, and a plain loop then has the same numbers as
        they. `scale` is the factor of a gradient scaler, if it has not yet unscaled the gradients. Without the option
        `gradients` nothing is measured.
        """
        step = whole("step", step, low=0)
        if self._with_gradients and (always or self._has_become_due(step)):
            norms = self._gradient_norms(step)
            self._read = {step: {block: norm / scale for block, norm in norms.items()}}

    def _has_become_due(self, step: int) -> bool:
        try:
            if self._last_call is None or step == self._last_call + 1:
                return bool(self._is_due(step))
            return any(map(self._is_due, range(self._last_call + 1, step + 1)))
        except Exception as error:
            self._give_up("the function `at`", step, error, remedy="it takes a step and returns True or False")
            return False

    def probe(self, step: int, *, gradients: bool = True) -> dict[str, float]:
        """Probe now, whether due or not, and return the scalars to log.

        They are {} if this step has been probed already, and if the probe fails. With `gradients=False` only those
        gradients count that `read_gradients` has measured for this step: later they may be clipped, or those of a part
        of the next batch, or gone.
        """
        step = whole("step", step, low=0)
        if self._probes and step == self._probes[-1].step:
            return {}
        out_of_memory = False
        try:
            measurement = self._measure(step, gradients)
        except Exception as error:
            self._give_up("a probe", step, error)
            out_of_memory = is_out_of_memory(error)
        else:
            return self._keep(step, measurement)
        if out_of_memory:  # the error, and with it the tensors of the failed pass, is gone only here
            free_device_memory()
        return {}

    def dataset(self) -> xr.Dataset:
        """Return the trajectory: a variable per measure (step, layer, head), and `stable_rank` (step, weight).

        `collapsed` (step, layer, head) and `rank_collapsed` (step, weight) say what has collapsed by each step.
        """
        if not self._probes and self._failures.any:
            raise StateError("recorder", "has no probe that succeeded", "see the warning `ProbeFailed`")
        if not self._probes:
            raise StateError("recorder", "has no probe yet", "call it at a step that is due")
        return trajectory_dataset(self._probes, self.weights)

    def save(self, path: str | Path) -> None:
        """Write the trajectory as netCDF, with provenance; `joma.open_run(path)` reads it."""
        write_recording(Path(path), self.dataset().assign_attrs(provenance()))

    def _measure(self, step: int, with_gradients: bool) -> Measurement:
        """Measure the model; what fails on one process raises an error on all of them."""
        with self._processes.together():
            if self._probes and step < self._probes[-1].step:
                remedy = "count steps upwards, and use a new Recorder for a new training"
                raise InputError("step", f"after the last probe, at {self._probes[-1].step}", step, remedy)
            device = model_device(self.model)
            self.batch = move(self.batch, device)
        alone = self._processes.count == 1
        with self._processes.together():
            recording, states = self._run(device, "mean" if alone else "none")
            parts = hidden_parts(states)
            averaged = averages.means(recording) if alone else averages.row_sums(recording)
        if isinstance(averaged, averages.RowSums):
            averaged = averages.combine(averaged, self._processes)
        blocks = combine_blocks(parts, self._processes)
        if self._with_gradients:
            blocks |= {GRADIENT: self._read.pop(step, {}) or (self._gradient_norms(step) if with_gradients else {})}
        return Measurement(*averaged, stable_ranks(self.model, self.weights, self._processes), blocks)

    def _gradient_norms(self, step: int) -> dict[str, float]:
        """Return the gradient norms by block; {} before the training has begun, and if they cannot be measured."""
        if not self._probes and not has_gradients(self.model):
            return {}
        try:
            with self._processes.together():
                return gradient_norms(self.model, blocks=self._blocks["blocks"])
        except Exception as error:
            self._give_up("measuring the gradients", step, error)
            return {}

    def _run(self, device: torch.device, reduce: str) -> tuple[Recording, HiddenStates | None]:
        """Run the model on the batch, and return what was recorded of attention and of hidden states."""
        watching = attention(self.model, reduce=reduce, **self._watching)
        blocks, modules = watch_blocks(self.model, self._blocks), all_modules(self.model).values()
        try:
            with preserve_random_state(device), evaluation_mode(modules), watching as recording, blocks as states:
                self.forward(self.model, self.batch)
        finally:
            reshard(modules)
        if recording.longest == 0 and recording.refused is not None:
            raise recording.refused
        recording.check_called()
        if recording.longest < 2:
            remedy = "give a batch of longer sequences"
            raise InputError("batch", "sequences of at least two tokens", f"{recording.longest}", remedy)
        return recording, states

    def _keep(self, step: int, measurement: Measurement) -> dict[str, float]:
        """Add a measurement to the trajectory, warn of what has collapsed, and log."""
        short = self._keys.layers(measurement.layers)
        entropy = measurement.values.get("entropy", np.full((len(measurement.layers), 1), np.nan))
        quiet = self._processes.rank > 0
        heads = self._detector.heads(step, measurement.layers, entropy, short, quiet=quiet)
        weights = self._detector.weights(step, self.weights, measurement.ranks, self._keys.weights, quiet=quiet)
        self._probes.append(Probe(step, measurement, Collapsed(heads, weights)))
        scalars = self._keys.scalars(self._probes[-1])
        if self._log is not None and self._processes.rank == 0:
            try:
                self._log(dict(scalars), step)
            except Exception as error:
                self._give_up("logging a probe", step, error, remedy="check the logger; `dataset()` has the values")
        return scalars

    def _give_up(self, what: str, step: int, error: Exception, *, remedy: str = "") -> None:
        """Warn of a failure, on the first process alone; raise it if `strict`."""
        if self._strict:
            raise error
        if self._processes.rank == 0:
            self._failures.warn(what, step, error, remedy=remedy, stacklevel=4)
