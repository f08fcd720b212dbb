"""A callback for the Hugging Face `Trainer`: `Trainer(..., callbacks=[joma.watch.hf.EntropyCallback()])`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from joma.arguments import InputError, StateError
from joma.watch.callbacks import RecorderCallback, replaced
from joma.watch.distributed import Processes
from joma.watch.evaluation import preserve_random_state
from joma.watch.probe_options import check_options
from joma.watch.recorder import Recorder

try:
    from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback
except ImportError:
    raise InputError("transformers", "installed", "no such package", "run `pip install 'joma[hf]'`") from None

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

MAX_EXAMPLES = 4  # in the default probe batch: enough for a mean, and cheaper than a training step


class EntropyCallback(RecorderCallback, TrainerCallback):
    """Record attention entropy and stable rank while a `Trainer` trains, and log them through the Trainer.

    The logs go to everything that the Trainer reports to (TensorBoard, W&B, MLflow, trackio) and to its `log_history`:
    for each layer the mean and the minimum entropy over its heads, and each stable rank; the console gets one short
    line. `trajectory` has every head. The callback never ends the training: what it cannot measure is a `ProbeFailed`
    warning. With several processes each measures examples of its own, and the results are means over all of them.

    Args:
        batch: the fixed probe batch, a mapping of the model's arguments; by default the first examples of the training
            set, at most four, collated by the Trainer's collator; for transformers' own causal language models without
            labels and without a cache of keys and values, which would only cost. Its masks select the query positions
            that count.
        options: as for `joma.watch.Recorder`: `at`, `forward`, `ranks`, `rows`, `precision`, `floor`, `patience` …

    >>> callback = EntropyCallback(at=[0, 100, 1000], ranks=False)
    """

    def __init__(self, batch: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.batch, self.options = batch, check_options(options)
        self._trainer: Trainer | None = None
        self._before_clipping = ExitStack()  # closed, it restores the Trainer's clipping and reads the gradients once

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the probe batch, and probe before the first step."""
        del control
        self._start()
        self._trainer, model = _calling_trainer(), kwargs["model"]
        with self._guarded("preparing the probes", state.global_step):
            processes = self._processes(model)
            with processes.together():
                batch = self.batch
                if batch is None:
                    count = min(MAX_EXAMPLES, args.per_device_train_batch_size)
                    batch = _examples(kwargs["train_dataloader"], count, processes)
                    batch = batch if self.options.get("forward") else _without_labels_and_cache(model, batch)
                options = {"distributed": processes.count > 1, **self.options}
                recorder = Recorder(model, batch, **options)
            self.recorder = recorder
            self._log(recorder(state.global_step, gradients=False))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Probe if the step is due, and at the last step."""
        del args, kwargs
        if self.recorder is not None:
            last = state.global_step >= state.max_steps or control.should_training_stop
            scalars = self.recorder(state.global_step, gradients=False)
            if last and not scalars:
                scalars = self.recorder.probe(state.global_step, gradients=False)
            if scalars:  # nearly all steps have none
                self._log(scalars)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the gradients measured when the Trainer is about to clip them, if the option `gradients` is set.

        A Trainer has no event between the backward pass and clipping, but clips by `accelerator.clip_grad_norm_`.
        """
        del args, control, kwargs
        if self._trainer is not None and self.recorder is not None and self.options.get("gradients"):
            accelerator, recorder, step = self._trainer.accelerator, self.recorder, state.global_step + 1
            clip, last = accelerator.clip_grad_norm_, step >= state.max_steps

            def read() -> None:
                scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0  # which clipping divides by
                recorder.read_gradients(step, always=last, scale=scale)

            def read_and_clip(*args: Any, **kwargs: Any) -> Any:
                self._before_clipping.close()
                return clip(*args, **kwargs)

            self._before_clipping = ExitStack()
            self._before_clipping.callback(read)
            self._before_clipping.enter_context(replaced(vars(accelerator), clip_grad_norm_=read_and_clip))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the gradients here if nothing has clipped them."""
        del args, state, control, kwargs
        if self.options.get("gradients"):
            self._before_clipping.close()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Probe at the last step if another callback ends the training there."""
        del args, kwargs
        if control.should_training_stop:
            self._probe_last(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Probe at the last step if the training has ended early; the model may be the best one instead by now."""
        del control, kwargs
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self._probe_last(state)

    def _probe_last(self, state: TrainerState) -> None:
        """Probe after the gradients have been set to zero, unless this step has been probed."""
        if self.recorder is not None:
            self._log(self.recorder.probe(state.global_step, gradients=False))

    def _log(self, scalars: dict[str, float]) -> None:
        """Log through the Trainer, with one short line for the console."""
        trainer = self._trainer
        if scalars and trainer is not None:
            should_log = trainer.control.should_log  # which `log` sets to False: the step's own loss is logged after us
            with self._guarded("logging a probe", trainer.state.global_step), _short_on_console(trainer, scalars):
                trainer.log(dict(scalars))
            trainer.control.should_log = should_log


def _calling_trainer() -> Trainer:
    """Return the Trainer that calls this callback.

    A Trainer passes everything but itself to its callbacks, and only `Trainer.log` reaches all logs: search the stack.
    """
    from transformers import Trainer  # takes seconds, unless it has been imported already, as it has here

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    remedy = "use `joma.watch.Recorder` in another training loop"
    raise StateError("EntropyCallback", "must be called by a `transformers.Trainer`", remedy)


def _examples(loader: Any, count: int, processes: Processes) -> Mapping[str, Any]:
    """Return examples, collated: the first `count` for the first process, the next ones for the next process.

    Iterating over the loader would draw random numbers.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        got = f"a training set without indices, {type(dataset).__name__}"
        raise InputError("batch", "given for a streamed training set", got, "pass `batch=` to the callback")
    count = min(count, len(dataset))
    first = processes.rank * count
    with preserve_random_state():
        return loader.collate_fn([dataset[index % len(dataset)] for index in range(first, first + count)])


def _without_labels_and_cache(model: nn.Module, batch: Any) -> Any:
    """Return examples from which a causal language model of transformers computes no loss and no cache for generation.

    A probe reads neither. Of a large vocabulary the loss takes more memory than all else.
    """
    kind = type(model)
    is_known = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("ForCausalLM")
    if not is_known or not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    without_cache = {"use_cache": False} if "use_cache" in inspect.signature(kind.forward).parameters else {}
    return {name: value for name, value in batch.items() if name != "labels"} | without_cache


@contextmanager
def _short_on_console(trainer: Trainer, scalars: dict[str, float]) -> Iterator[None]:
    """Let the Trainer's callbacks that print show one value for each kind of key: a model has hundreds of keys."""
    kinds: dict[str, list[float]] = {}
    for key, value in scalars.items():
        kinds.setdefault(key.partition("/")[0], []).append(value)
    short = {
        kind: f"{min(values) if kind.endswith('_min') else sum(values) / len(values):.4g}"
        for kind, values in kinds.items()
    }
    printing = [
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, PrinterCallback | ProgressCallback) and "on_log" not in vars(callback)
    ]
    for callback in printing:
        vars(callback)["on_log"] = _with_logs(callback.on_log, short)
    try:
        yield
    finally:
        for callback in printing:
            del vars(callback)["on_log"]


def _with_logs(on_log: Any, short: dict[str, str]) -> Any:
    """Return `on_log` with these logs instead of the probe's; the epoch stays."""

    def print_short(args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        epoch = {"epoch": logs["epoch"]} if logs and "epoch" in logs else {}
        return on_log(args, state, control, logs={**short, **epoch}, **kwargs)

    return print_short
