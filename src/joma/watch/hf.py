"""A callback for the Hugging Face `Trainer`: `Trainer(..., callbacks=[joma.watch.hf.EntropyCallback()])`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from joma.arguments import InputError, StateError
from joma.watch.recorder import Recorder, RecorderCallback, check_options, preserve_random_state

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError:
    raise InputError("transformers", "installed", "no such package", "run `pip install 'joma[hf]'`") from None

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

MAX_EXAMPLES = 4  # in the default probe batch: enough for a mean, and cheaper than a training step


class EntropyCallback(RecorderCallback, TrainerCallback):
    """Record attention entropy and stable rank while a `Trainer` trains, and log them through the Trainer.

    The logs go to everything that the Trainer reports to (TensorBoard, W&B, MLflow, trackio) and to its `log_history`:
    for each layer the mean and the minimum entropy over its heads, and each stable rank. `trajectory` has every head.

    Args:
        batch: the fixed probe batch, a mapping of the model's arguments; by default the first examples of the training
            set, at most four, collated by the Trainer's collator. Its `attention_mask` selects the query positions that
            count.
        options: as for `joma.watch.Recorder`: `at`, `forward`, `ranks`, `rows`, `precision`, `floor`, `patience` …

    >>> callback = EntropyCallback(at=[0, 100, 1000], ranks=False)
    """

    def __init__(self, batch: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.batch, self.options = batch, check_options(options)
        self._trainer: Trainer | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the probe batch, and probe before the first step."""
        del control
        self._trainer = _calling_trainer()
        model = kwargs["model"]
        batch = self.batch
        if batch is None:
            batch = _first_examples(kwargs["train_dataloader"], min(MAX_EXAMPLES, args.per_device_train_batch_size))
        options = {"rows": _query_mask(model, batch), **self.options}
        self.recorder = Recorder(model, batch, **options)
        self._log(self.recorder(state.global_step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Probe if the step is due, and at the last step."""
        del args, kwargs
        if self.recorder is not None:
            last = state.global_step >= state.max_steps or control.should_training_stop
            scalars = self.recorder(state.global_step)
            self._log(scalars or (self.recorder.probe(state.global_step) if last else {}))

    def _log(self, scalars: dict[str, float]) -> None:
        if scalars and self._trainer is not None:
            self._trainer.log(dict(scalars))


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


def _first_examples(loader: Any, count: int) -> Mapping[str, Any]:
    """Return the first `count` examples, collated; iterating over the loader would draw random numbers."""
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        got = f"a training set without indices, {type(dataset).__name__}"
        raise InputError("batch", "given for a streamed training set", got, "pass `batch=` to the callback")
    with preserve_random_state():
        return loader.collate_fn([dataset[index] for index in range(min(count, len(dataset)))])


def _query_mask(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the tokenizer's mask, which marks queries as well as keys unless the model is an encoder-decoder."""
    mask = batch.get("attention_mask")
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and not encoder_decoder else None
