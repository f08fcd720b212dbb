"""A model in training: its optimiser state, what was recorded so far, and which seeds have diverged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from joma.arguments import InputError
from joma.progress import Task
from joma.train import cuda
from joma.train.checkpoint import TrainingCheckpoint
from joma.train.optimiser import Optimiser
from joma.train.options import Compute, Record
from joma.train.protocol import CapturedStep

Model = TypeVar("Model", bound=nn.Module)
Loss = Callable[[Model, Tensor], Tensor]

NEVER = -1  # the step of divergence of a seed that stayed finite
REFRESH_SECONDS = 0.5  # between two readings of the loss for the progress bar


class _OnDevice(NamedTuple):
    """What was recorded at one step and is still on the device.

    Attributes:
        values: by name.
        diverged: for each seed the step at which it diverged.
        computed: the event after which the device has computed them; None on the CPU.
    """

    values: Mapping[str, Tensor]
    diverged: Int[Tensor, " seed"]
    computed: torch.cuda.Event | None


class Training(Generic[Model]):
    """One training run, step by step. At step n the parameters have been updated n times.

    Attributes:
        step_number: the number of updates, a tensor without axes on the model's device, which the loss reads.
        diverged: for each seed the step at which its loss was first not finite, −1 if it never was.
        recorded_at: the recorded steps.
        stream: on CUDA, this training's own stream. A step is captured on it; the loop makes all steps on it too.
    """

    def __init__(self, model: Model, loss: Loss[Model], optimiser: Optimiser, record: Record, compute: Compute) -> None:
        self.model, self.loss, self.record, self.compute = model, loss, record, compute
        self.seeds = count_seeds(model)
        self.updater = optimiser.build(model)
        device = next(model.parameters()).device
        self.step_number = torch.zeros((), dtype=torch.long, device=device)
        self.diverged: Int[Tensor, " seed"] = torch.full((self.seeds,), NEVER, dtype=torch.long, device=device)
        self.losses = self.replayed_losses = torch.zeros(self.seeds, device=device)
        self._recorded: dict[str, list[Tensor]] = {}
        self._on_device: list[_OnDevice] = []  # what was recorded and is not yet copied to the CPU
        self.recorded_at: list[int] = []
        self.device, self.on_cuda = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_cuda else None
        self.graph: CapturedStep | None = None
        self.throttle, self.late_loss = cuda.Throttle(), cuda.LateNumber()
        self.loss_shown_at = time.monotonic()

    def set_priority(self, priority: int) -> None:
        """Take a CUDA stream of this priority, 0 or lower, the lower the more urgent; before a step is captured."""
        if self.stream is not None:
            self.stream = torch.cuda.Stream(self.device, priority=priority)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Compute on this training's stream for the duration of the block; on the CPU nothing changes."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @property
    def recorded(self) -> dict[str, list[Tensor]]:
        """The values of each recorded variable, one tensor [seed, ...] a recorded step, on the CPU."""
        self._fetch()
        return self._recorded

    def prepare(self, start: int) -> None:
        """Set the step to start from; on CUDA, capture a step on the training's stream before the first is made."""
        self.step_number.fill_(start)
        if self.on_cuda:
            with cuda.joined(self.stream), self.on_stream():
                self._capture(start)

    def step(self, step: int, *, record: bool, update: bool) -> None:
        """Make one step: replay the captured step, or run eagerly on the CPU and where gradients are recorded."""
        if record:
            self.recorded_at.append(step)
        if self.graph is not None and update and not (record and self.record.reads_gradients):
            self._replay(self.graph, step, record=record)
            return
        self.step_number.fill_(step)
        self._backward()
        diverged = self._diverged_seeds()
        if record:
            self._fetch()
            self._append(self._checked({"loss": self.losses, **self.record.measure(self.model, step)}), diverged)
        if update:
            self.updater.update(self.step_number, diverged)
        self.step_number.fill_(step + 1)

    def _replay(self, graph: CapturedStep, step: int, *, record: bool) -> None:
        # Copies: the replayed step may change the tensors that the measures are views of.
        measures = self.record.measure(self.model, step) if record else {}
        measures = {name: value.clone() for name, value in measures.items()}
        graph.replay()
        self.throttle.count_step()
        self.losses = self.replayed_losses
        if record:
            self._fetch()  # those of the last recorded step, which the device has passed long ago
            values = self._checked({"loss": self.losses.clone(), **measures})
            self._on_device.append(_OnDevice(values, self.diverged.clone(), cuda.mark(self.device)))

    def _fetch(self) -> None:
        """Append to the record what is still on the device; this waits for the device to have computed it, no more."""
        for values, diverged_at, computed in self._on_device:
            with cuda.stream_after(computed, self.device):
                diverged = diverged_at != NEVER
                self._append(values, diverged if bool(diverged.any()) else None)
        self._on_device.clear()

    def _backward(self) -> None:
        self.updater.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.compute.half and self.on_cuda):
            losses = self.loss(self.model, self.step_number)
        if losses.shape != (self.seeds,):
            expected, got = f"one value for each of {self.seeds} seeds", f"shape {tuple(losses.shape)}"
            raise InputError("loss", expected, got, "average over all axes but the seed's")
        if not losses.requires_grad:
            expected, got = "a function of the model's parameters", "a tensor without a gradient"
            raise InputError("loss", expected, got, "compute it from the model, with nothing detached")
        losses.sum().backward()
        self.losses = losses.detach()
        newly_diverged = ~self.losses.isfinite() & (self.diverged == NEVER)
        self.diverged.copy_(torch.where(newly_diverged, self.step_number, self.diverged))

    def _diverged_seeds(self) -> Bool[Tensor, " seed"] | None:
        """Return which seeds have diverged, or None if none has."""
        diverged = self.diverged != NEVER
        return diverged if bool(diverged.any()) else None

    def _checked(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what was measured, or raise `InputError` if it lacks the seed's axis."""
        for name, value in values.items():
            if value.shape[:1] != (self.seeds,):
                got = f"{name} of shape {tuple(value.shape)} for {self.seeds} seeds"
                raise InputError("record", "tensors with the seed as leading axis", got, "keep that axis")
        return values

    def _append(self, values: Mapping[str, Tensor], diverged: Bool[Tensor, " seed"] | None) -> None:
        """Append one value of each variable to the record; those of diverged seeds become NaN."""
        for name, value in values.items():
            # NumPy does not know bfloat16.
            dtype = torch.float32 if value.dtype == torch.bfloat16 else value.dtype
            copy = value.detach().to("cpu", dtype, copy=True)
            if diverged is not None and value.is_floating_point():
                copy[diverged.cpu()] = torch.nan
            self._recorded.setdefault(name, []).append(copy)

    def _capture(self, start: int) -> None:
        """Capture a whole step, with the model's modules compiled and its large weights in half precision."""
        modules = cuda.compiled_modules(self.model, self.compute)
        trial, reset = partial(self._trial_step, start), self.updater.zero_grad
        with self._state_restored(), cuda.half_weights(self.model, self.updater, self.compute), modules:
            self.graph = cuda.capture(self._captured_step, trial=trial, reset=reset)
            self.replayed_losses = self.losses  # every replay writes its losses to this tensor

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Undo on exit what trial steps change.

        While an updater's gate is closed, the parameters do not change, so that they need no copy.
        """
        gate = self.updater.gate
        changing = {name: t for name, t in self.tensors().items() if gate is None or not name.startswith("model/")}
        zero_moments = gate is not None and int(self.step_number) == 0
        copies = {
            name: tensor.to("cpu", copy=True)
            for name, tensor in changing.items()
            if not (zero_moments and "rule/" in name)
        }
        if gate is not None:
            gate.zero_()
        self.updater.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in changing.items():
                    tensor.copy_(copies[name]) if name in copies else tensor.zero_()
            if gate is not None:
                gate.fill_(1.0)

    def _trial_step(self, step: int) -> None:
        self.step_number.fill_(step)  # the loss may be undefined after the last step of the run
        self._captured_step()

    def _captured_step(self) -> None:
        self._backward()
        self.updater.update(self.step_number, self.diverged != NEVER)
        self.step_number.add_(1)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a step changes, by name: parameters, buffers, moments, the step and divergence."""
        persistent = self.model.state_dict()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}
        tensors = {f"buffer/{name}": buffer.detach() for name, buffer in buffers.items()}
        for name, parameter in self.model.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
            moments = self.updater.moments.get(name, {})
            tensors |= {f"rule/{name}/{kind}": moment for kind, moment in moments.items()}
        return tensors | {"now": self.step_number, "diverged": self.diverged}

    def state(self, *, final: bool = False) -> dict[str, Tensor]:
        """Return what a checkpoint holds; that of a finished run leaves the optimiser state out."""
        tensors = {name: t for name, t in self.tensors().items() if not (final and name.startswith("rule/"))}
        # Buffers may be views of each other, parameters are not; the file format wants separate tensors.
        tensors = {name: t.clone() if name.startswith("buffer/") else t for name, t in tensors.items()}
        recorded = {f"recorded/{name}": torch.stack(values) for name, values in self.recorded.items()}
        at = torch.tensor(self.recorded_at, dtype=torch.long)
        return tensors | recorded | {"at": at, "finished": torch.tensor(final)}

    def restore(self, checkpoint: TrainingCheckpoint) -> None:
        """Restore the state from a checkpoint of this run."""
        tensors = self.tensors()
        with torch.no_grad():
            for name, value in checkpoint.tensors.items():
                if name in tensors:
                    tensors[name].copy_(value)
                elif name.startswith("recorded/"):
                    self.recorded[name.removeprefix("recorded/")] = list(value)
        self.recorded_at = checkpoint.tensors["at"].tolist()

    def differences(self, checkpoint: TrainingCheckpoint, record_steps: frozenset[int]) -> list[str]:
        """Return which of `at` and `model` differ between this run and the run that wrote the checkpoint."""
        final = bool(checkpoint.tensors["finished"])
        expected_at = sorted(step for step in record_steps if step < checkpoint.step or final)
        same = {
            "record.at": checkpoint.tensors["at"].tolist() == expected_at,
            "model": _layout(self.state(final=final)) == _layout(checkpoint.tensors),
        }
        return [name for name, agrees in same.items() if not agrees]

    def report(self, task: Task) -> None:
        """Advance the progress bar by one step and, twice a second, show the loss (on CUDA a recent one)."""
        task.advance()
        if time.monotonic() - self.loss_shown_at > REFRESH_SECONDS:
            self.loss_shown_at = time.monotonic()
            loss = self.late_loss.exchange(self.losses.nanmean())
            if loss is not None:
                task.say(f"loss {loss:.4g}")


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor of a state, without the record, which grows."""
    state = {name: tensor for name, tensor in tensors.items() if name.split("/")[0] not in ("at", "recorded")}
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def count_seeds(model: nn.Module) -> int:
    """Return the length of the leading axis, which all parameters must share."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        expected = "a module whose parameters all have the seed as leading axis"
        raise InputError("model", expected, shapes or "no parameters", "add that axis to each")
    seeds = next(iter(shapes.values()))[0]
    if not seeds:
        raise InputError("model", "a module with at least one seed", shapes, "build it with one or more")
    return seeds
