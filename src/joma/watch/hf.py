"""A callback for the Hugging Face `Trainer`: `Trainer(..., callbacks=[joma.watch.hf.EntropyCallback()])`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from joma.arguments import InputError
from joma.watch.recorder import Probing, Recorder, known_options, same_random_numbers

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError:
    raise InputError("transformers", "installed", "no such package", "run `pip install 'joma[hf]'`") from None

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

MOST = 4  # examples in a probe that was not given: rows enough for a mean, and less than a training step's work


class EntropyCallback(Probing, TrainerCallback):
    """Record attention entropy and stable rank while a `Trainer` trains, and log them as the Trainer logs.

    What is logged reaches all that the Trainer reports to (TensorBoard, W&B, MLflow, trackio) and its `log_history`:
    for each layer the mean and the least entropy over its heads, and each stable rank. `trajectory` keeps every head.

    Args:
        batch: the fixed probe batch, a mapping of the model's arguments; by default the first examples of the training
            set, at most four, put together by the Trainer's own collator. Its `attention_mask` says which rows count.
        options: as for `joma.watch.Recorder`: `at`, `forward`, `ranks`, `rows`, `precision`, `floor`, `patience` …

    >>> callback = EntropyCallback(at=[0, 100, 1000], ranks=False)
    """

    def __init__(self, batch: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.batch, self.options = batch, known_options(options)
        self._trainer: Trainer | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the batch, and probe before the first step."""
        del control
        self._trainer = _caller()
        model = kwargs["model"]
        batch = self.batch
        if batch is None:
            batch = _first_examples(kwargs["train_dataloader"], min(MOST, args.per_device_train_batch_size))
        options = {"rows": _rows(model, batch), **self.options}
        self.recorder = Recorder(model, batch, **options)
        self._log(self.recorder(state.global_step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Probe if due, and at the last step."""
        del args, kwargs
        if self.recorder is not None:
            last = state.global_step >= state.max_steps or control.should_training_stop
            scalars = self.recorder(state.global_step)
            self._log(scalars or (self.recorder.probe(state.global_step) if last else {}))

    def _log(self, scalars: dict[str, float]) -> None:
        if scalars and self._trainer is not None:
            self._trainer.log(dict(scalars))


def _caller() -> Trainer:
    """The Trainer under way: it hands its callbacks everything but itself, and `Trainer.log` is the way to all logs."""
    from transformers import Trainer  # seconds, and whoever gets here has loaded it

    frame = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, Trainer):
            return own
        frame = frame.f_back
    raise InputError(
        "EntropyCallback", "called by a `transformers.Trainer`", "another caller", "use `joma.watch.Recorder`"
    )


def _first_examples(loader: Any, count: int) -> Mapping[str, Any]:
    """The first `count` examples, collated. Starting the loader itself would draw random numbers."""
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        got = f"a training set without indices, {type(data).__name__}"
        raise InputError("batch", "given for a streamed training set", got, "pass `batch=` to the callback")
    with same_random_numbers():
        return loader.collate_fn([data[index] for index in range(min(count, len(data)))])


def _rows(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """The tokenizer's mask marks queries as well as keys, unless the model has a decoder of its own beside."""
    mask = batch.get("attention_mask")
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and not both else None
