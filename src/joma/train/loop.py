"""The training loop: many seeds are one model with the seed as the leading axis of every parameter.

The seeds' losses are added and propagated back at once. No parameter is shared, so each seed's gradient is its own, and
a seed trains as it would alone.

On CUDA a step is compiled and captured once and then replayed: no Python is left in it. On the CPU the same code runs
eagerly. With a folder for checkpoints a run that was killed goes on where it was, and on the CPU ends with the same
bits as one never killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor, nn

from joma import schedule
from joma.arguments import InputError, choice, whole
from joma.files import StorageError, lock
from joma.progress import SILENT, Progress, Task
from joma.train.checkpoint import Checkpoints, Generation
from joma.train.interrupt import interruptible
from joma.train.optimiser import Optimiser

Model = TypeVar("Model", bound=nn.Module)
Record = Callable[[Model, int], Mapping[str, Tensor]]

NEVER = -1  # the step at which a seed that stayed finite diverged
HEARTBEAT = 0.5  # seconds between two looks at the loss for the progress bar
PRECISIONS = {"highest": "float32", "high": "TF32", "bf16": "bfloat16, accumulated in float32; records TF32"}


def _nothing(model: nn.Module, step: int) -> dict[str, Tensor]:  # noqa: ARG001  (the signature of `record`)
    return {}


def fit(
    model: Model,
    loss: Callable[[Model, Tensor], Tensor],
    *,
    optimiser: Optimiser,
    steps: int,
    record: Record = _nothing,
    at: Iterable[int] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    seeds: Sequence[int] | None = None,
    checkpoints: Path | str | None = None,
    save: Iterable[int] | None = None,
    spare: float = 0.0,
    precision: str = "highest",
    compiled: bool = True,
    dynamic: bool = False,
    gradients: bool = True,
    progress: Progress = SILENT,
    label: str = "training",
) -> xr.Dataset:
    """Train every seed of `model` for `steps` steps and return what was recorded on the way.

        θ_s ← θ_s − rule(∂L_s/∂θ_s),    L_s = loss(model, step)[s]

    At step n the model has been updated n times. `record` is called between the backward pass and the update, so that
    it sees the parameters *and* the gradients of that step; at the last step there is no update any more. If it asks
    for no gradients (`gradients=False`), a step that is recorded can be a replay too, on CUDA.

    A seed whose loss is not finite is frozen where it is, and NaN is recorded for it from that step on; the others go
    on undisturbed.

    A run that was saved goes on as if it had never stopped, provided that whatever is random in `loss` and `record`
    comes from the step and a seed, as of `joma.noise`: the state of a generator that they draw from is not saved.
    Parameters and persistent buffers of the model are, and what was recorded.

    Args:
        model: the seed is the leading axis of each of its parameters.
        loss: from the model and the step, a tensor without axes on the model's device, to each seed's loss, [seed]. On
            CUDA it is captured: whatever changes from step to step must come from the step's tensor, and with bf16
            products large weights of `Linear` may be there in bfloat16.
        optimiser: rule, rates and clipping.
        steps: number of updates.
        record: from the model and the step to named tensors [seed, ...].
        at: the steps at which to record, e.g. of `joma.schedule`; every step if not given.
        dims: names of the axes after `seed` of what `record` returns, by variable.
        seeds: labels of the seed axis, 0, 1, … if not given.
        checkpoints: a folder of its own; with one, the run is saved, and goes on from what is there. The folder is
            held meanwhile. Checkpoints of another run, by its model, optimiser, steps, recorded steps or seeds, are
            refused.
        save: the steps at which to save; ten of them if not given.
        spare: seconds; a save that would come sooner after the last one, or after the start, is left out.
        precision: of float32 matrix products on CUDA, a name of `PRECISIONS`; the CPU's are always exact.
        compiled: whether the parts that the model calls `compiled` are compiled on CUDA before a step is captured.
        dynamic: compile for all sizes at once, where many models of other sizes train one after the other; else there
            is a graph for each size, the quicker one.
        gradients: whether `record` looks at gradients.
        progress, label: where to report progress, and under which words.

    Returns:
        A Dataset over `seed` and `step` with `loss`, all that `record` returns, and `diverged` [seed]: the step at
        which the seed's loss was first not finite, −1 if it never was.

    >>> model = nn.Module()
    >>> model.p = nn.Parameter(torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    >>> run = fit(model, lambda model, step: (model.p**2).sum(-1) / 2, optimiser=Optimiser("sgd", 0.5), steps=2)
    >>> run.loss.values
    array([[0.5    , 0.125  , 0.03125],
           [2.     , 0.5    , 0.125  ]])
    """
    steps = whole("steps", steps, low=0)
    moments = _chosen("at", range(steps + 1) if at is None else at, steps)
    if not moments:
        raise InputError("at", "at least one step", "none", "use a policy of joma.schedule")
    saves = _chosen("save", schedule.every(max(1, steps // 10), steps) if save is None else save, steps)
    options = {"precision": precision, "compiled": compiled, "dynamic": dynamic, "gradients": gradients}
    training = _Training(model, loss, optimiser, record, **options)
    labels = _labels(seeds, training.diverged)
    store = None if checkpoints is None else Checkpoints(Path(checkpoints), _about(optimiser, steps, labels))
    with nullcontext() if store is None else lock(store.folder):
        start, finished = training.resume(store, moments)
        if not finished:
            with _products(precision), interruptible() as stop, progress.task(label, total=steps) as work:
                training.prepare(start)
                work.skip(start)
                saved = time.monotonic()
                for step in range(start, steps + 1):
                    due = step in saves and step < steps  # after the last step the run is saved as finished
                    due = due and time.monotonic() - saved >= spare
                    if store is not None and step > start and (due or stop):
                        store.save(step, training.state())
                        saved = time.monotonic()
                    if stop:
                        raise KeyboardInterrupt
                    training.step(step, record=step in moments, update=step < steps)
                    if step < steps:
                        training.tell(work)
                if store is not None:
                    store.save(steps, training.state(final=True), keep=1)
            if stop:  # in the last step or while it was saved
                raise KeyboardInterrupt
        elif store is not None:
            store.tidy(steps, keep=1)
    return _dataset(training.recorded, training.steps_lost(), sorted(moments), dims or {}, labels)


class _Training(Generic[Model]):
    """A model in training: its rule, what was recorded so far, and the seeds that were lost."""

    def __init__(
        self,
        model: Model,
        loss: Callable[[Model, Tensor], Tensor],
        optimiser: Optimiser,
        record: Record,
        *,
        precision: str,
        compiled: bool,
        dynamic: bool,
        gradients: bool = True,
    ) -> None:
        self.model, self.loss, self.optimiser, self.record = model, loss, optimiser, record
        self.half, self.compiled, self.dynamic = precision == "bf16", compiled, dynamic
        self.gradients = gradients and record is not _nothing
        self.seeds = _seeds(model)
        self.rule = optimiser.build(model)
        device = next(model.parameters()).device
        self.now = torch.zeros((), dtype=torch.long, device=device)
        self.diverged = torch.full((self.seeds,), NEVER, dtype=torch.long, device=device)
        self.losses = self.replayed = torch.zeros(self.seeds, device=device)
        self.recorded: dict[str, list[Tensor]] = {}
        self.recorded_at: list[int] = []
        self.on_cuda = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.seen = time.monotonic()

    def prepare(self, start: int) -> None:
        """On CUDA, capture a step before the first one, where the rule's moments are still zero."""
        self.now.fill_(start)
        if self.on_cuda:
            self._capture(start)

    def step(self, step: int, *, record: bool, update: bool) -> None:
        """One step: eager where gradients are recorded and on the CPU, otherwise a replay of the captured one."""
        if record:
            self.recorded_at.append(step)
        if self.graph is not None and update and not (record and self.gradients):
            # Copies: the step that follows may change what the values are views of.
            before = {name: own.clone() for name, own in self.record(self.model, step).items()} if record else {}
            self.graph.replay()
            self.losses = self.replayed
            if record:
                _keep(self.recorded, {"loss": self.losses, **before}, self._lost())
            return
        self.now.fill_(step)
        self._backward()
        lost = self._lost()
        if record:
            _keep(self.recorded, {"loss": self.losses, **self.record(self.model, step)}, lost)
        if update:
            self.rule.update(self.now, lost)
        self.now.fill_(step + 1)

    def _backward(self) -> None:
        self.rule.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.half and self.on_cuda):
            losses = self.loss(self.model, self.now)
        if losses.shape != (self.seeds,):
            expected, got = f"one value for each of {self.seeds} seeds", f"shape {tuple(losses.shape)}"
            raise InputError("loss", expected, got, "average over all axes but the seed's")
        if not losses.requires_grad:
            expected, got = "one that depends on the model's parameters", "a tensor without a gradient"
            raise InputError("loss", expected, got, "compute it from the model, with nothing detached")
        losses.sum().backward()
        self.losses = losses.detach()
        fresh = ~self.losses.isfinite() & (self.diverged == NEVER)
        self.diverged.copy_(torch.where(fresh, self.now, self.diverged))

    def _lost(self) -> Bool[Tensor, " seed"] | None:
        lost = self.diverged != NEVER
        return lost if bool(lost.any()) else None

    def _capture(self, start: int) -> None:
        """Compile what repeats in the model and capture a whole step.

        The steps on trial that this takes change no parameter; all else that they change is put back.
        """
        aside = torch.cuda.Stream()
        parts = _compiled_parts(self.model, enabled=self.compiled, dynamic=self.dynamic)
        with self._on_trial(), self._halved(), parts:
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self._trials(start)
            torch.cuda.current_stream().wait_stream(aside)
            self.rule.zero_grad()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._captured_step()
            self.replayed = self.losses  # where every replay leaves them

    @contextmanager
    def _halved(self) -> Iterator[None]:
        """Replace large weights that products alone read by copies in the products' own precision.

        The captured step then neither casts them nor their gradients, which would move as many bytes as half an update.
        """
        halve = getattr(self.rule, "halve", None) if self.half else None
        places = {} if halve is None else _product_weights(self.model)
        whole: dict[str, nn.Parameter] = {}
        for name, half in ({} if halve is None else halve(places)).items():
            module, own = places[name]
            whole[name] = getattr(module, own)
            setattr(module, own, half)
        try:
            yield
        finally:
            for name, weight in whole.items():
                module, own = places[name]
                setattr(module, own, weight)

    @contextmanager
    def _on_trial(self) -> Iterator[None]:
        gate = getattr(self.rule, "gate", None)
        changing = {name: own for name, own in self._tensors().items() if gate is None or not name.startswith("model/")}
        fresh = gate is not None and int(self.now) == 0  # then the moments are zero, and need not be kept
        kept = {name: own.to("cpu", copy=True) for name, own in changing.items() if not (fresh and "rule/" in name)}
        if gate is not None:
            gate.zero_()
        self.rule.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, own in changing.items():
                    own.copy_(kept[name]) if name in kept else own.zero_()
            if gate is not None:
                gate.fill_(1.0)

    def _trials(self, start: int) -> None:
        for _ in range(3):
            self.now.fill_(start)  # the loss need not know any step but those of the run
            self._captured_step()

    def _captured_step(self) -> None:
        self._backward()
        self.rule.update(self.now, self.diverged != NEVER)
        self.now.add_(1)

    def _tensors(self) -> dict[str, Tensor]:
        """All that a step changes: parameters, buffers, the rule's state, the step and the seeds lost, by name."""
        persistent = self.model.state_dict()
        buffers = {name: own for name, own in self.model.named_buffers() if name in persistent}
        tensors = {f"buffer/{name}": own.detach() for name, own in buffers.items()}
        for name, parameter in self.model.named_parameters():
            tensors[f"model/{name}"] = parameter.detach()
            tensors |= {f"rule/{name}/{kind}": own for kind, own in self.rule.moments.get(name, {}).items()}
        return tensors | {"now": self.now, "diverged": self.diverged}

    def state(self, *, final: bool = False) -> dict[str, Tensor]:
        """What a checkpoint holds; a finished run needs no optimiser any more."""
        tensors = {name: own for name, own in self._tensors().items() if not (final and name.startswith("rule/"))}
        # Buffers may be views of each other, parameters are not; a file wants each tensor on its own.
        tensors = {name: own.clone() if name.startswith("buffer/") else own for name, own in tensors.items()}
        recorded = {f"recorded/{name}": torch.stack(values) for name, values in self.recorded.items()}
        at = torch.tensor(self.recorded_at, dtype=torch.long)
        return tensors | recorded | {"at": at, "finished": torch.tensor(final)}

    def resume(self, store: Checkpoints | None, moments: frozenset[int]) -> tuple[int, bool]:
        """Take up the newest whole checkpoint; return the step to go on with, and whether all is done already."""
        found = None if store is None else store.load()
        if found is None or store is None:
            return 0, False
        differs = self._differs(found, store, moments)
        if differs:
            other = f"of another run, which differs in {', '.join(differs)}"
            which = other if found.about else "that do not name their run"
            remedy = "choose another folder, or delete that one to begin anew"
            raise StorageError(f"{store.folder} holds checkpoints {which}; {remedy}.")
        own = self._tensors()
        with torch.no_grad():
            for name, tensor in found.tensors.items():
                if name in own:
                    own[name].copy_(tensor)
                elif name.startswith("recorded/"):
                    self.recorded[name.removeprefix("recorded/")] = list(tensor)
        self.recorded_at = found.tensors["at"].tolist()
        return found.step, bool(found.tensors["finished"])

    def _differs(self, found: Generation, store: Checkpoints, moments: frozenset[int]) -> list[str]:
        """The arguments by which a checkpoint is one of another run; none if it is one of this run."""
        differs = [name for name, own in store.about.items() if found.about.get(name) != own]
        if differs:
            return differs
        final = bool(found.tensors["finished"])
        own, there = (
            {
                name: (own.shape, own.dtype)
                for name, own in tensors.items()
                if name.split("/")[0] not in ("at", "recorded")
            }
            for tensors in (self.state(final=final), found.tensors)
        )
        at = sorted(step for step in moments if step < found.step or final)
        same = {"at": found.tensors["at"].tolist() == at, "model": own == there}
        return [name for name, agrees in same.items() if not agrees]

    def tell(self, work: Task) -> None:
        """Count a step as done and, now and then, say what the loss is."""
        work.advance()
        if time.monotonic() - self.seen > HEARTBEAT:
            self.seen = time.monotonic()
            work.say(f"loss {float(self.losses.nanmean()):.4g}")

    def steps_lost(self) -> Int[np.ndarray, " seed"]:
        """The step at which each seed was lost, −1 for those that were not."""
        return self.diverged.cpu().numpy()


@contextmanager
def _compiled_parts(model: nn.Module, *, enabled: bool, dynamic: bool) -> Iterator[None]:
    """Compile the modules of the classes that the model calls `compiled`, a graph a class, while a step is captured."""
    classes = getattr(model, "compiled", ()) if enabled else ()
    parts = [part for part in model.modules() if isinstance(part, classes)]
    with torch._dynamo.config.patch(recompile_limit=64):
        for part in parts:
            part.compile(dynamic=dynamic)
        try:
            yield
        finally:
            for part in parts:
                part._compiled_call_impl = None


def _product_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """By name, the module and the attribute of each weight in the compiled parts that products alone read."""
    prefixes = [name for name, part in model.named_modules() if isinstance(part, getattr(model, "compiled", ()))]
    return {
        f"{name}.{own}": (module, own)
        for name, module in model.named_modules()
        if any(name.startswith(f"{prefix}.") for prefix in prefixes)
        for own in getattr(module, "products", ())
    }


@contextmanager
def _products(precision: str) -> Iterator[None]:
    choice("precision", precision, PRECISIONS)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _chosen(name: str, chosen: Iterable[int], steps: int) -> frozenset[int]:
    return frozenset(whole(name, step, low=0, high=steps) for step in chosen)


def _about(optimiser: Optimiser, steps: int, labels: Sequence[int]) -> dict[str, str]:
    """What a checkpoint says of its run, by argument: of a schedule of rates the pattern alone."""
    rule = {**vars(optimiser), "rates": dict(optimiser.rates), "schedules": list(optimiser.schedules)}
    said = {"optimiser": rule, "steps": steps, "seeds": labels}
    return {name: json.dumps(own, default=_plain, sort_keys=True) for name, own in said.items()}


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


def _seeds(model: nn.Module) -> int:
    """Return the length of the leading axis, which all parameters must share."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        expected = "a module whose parameters all have the seed as leading axis"
        raise InputError("model", expected, shapes or "no parameters", "add that axis")
    seeds = next(iter(shapes.values()))[0]
    if not seeds:
        raise InputError("model", "one of at least one seed", shapes, "build it with a seed or more")
    return seeds


def _labels(seeds: Sequence[int] | None, diverged: Tensor) -> Sequence[int]:
    labels = range(len(diverged)) if seeds is None else seeds
    if len(labels) != len(diverged):
        raise InputError("seeds", f"{len(diverged)} labels", len(labels), "give one for each seed of the model")
    return labels


def _keep(recorded: dict[str, list[Tensor]], values: Mapping[str, Tensor], lost: Bool[Tensor, " seed"] | None) -> None:
    seeds = values["loss"].shape
    for name, value in values.items():
        if value.shape[:1] != seeds:
            got = f"{name} of shape {tuple(value.shape)} for {len(values['loss'])} seeds"
            raise InputError("record", "tensors with the seed as leading axis", got, "keep that axis")
        # NumPy does not know bfloat16.
        kept = value.detach().to("cpu", torch.float32 if value.dtype == torch.bfloat16 else value.dtype, copy=True)
        if lost is not None and value.is_floating_point():
            kept[lost.cpu()] = torch.nan
        recorded.setdefault(name, []).append(kept)


def _dataset(
    recorded: Mapping[str, list[Tensor]],
    diverged: Int[np.ndarray, " seed"],
    steps: Sequence[int],
    dims: Mapping[str, Sequence[str]],
    labels: Sequence[int],
) -> xr.Dataset:
    variables = {}
    for name, values in recorded.items():
        array = torch.stack(values, dim=1).numpy()
        further = tuple(dims.get(name, ()))
        if len(further) != array.ndim - 2:
            got = f"{further} for the shape {array.shape[2:]} of {name!r}"
            raise InputError("dims", "one name for each axis after the seed's", got, "name them in `dims`")
        variables[name] = (("seed", "step", *further), array)
    variables["diverged"] = (("seed",), diverged)
    coords = {"seed": np.asarray(labels), "step": np.asarray(steps)}
    return xr.Dataset(variables, coords=coords)
