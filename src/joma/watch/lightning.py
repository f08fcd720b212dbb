"""A callback for Lightning: `Trainer(callbacks=[joma.watch.lightning.EntropyCallback()])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from joma.arguments import InputError
from joma.watch.recorder import Recorder, RecorderCallback, call_model, check_options

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            remedy = "run `pip install 'joma[lightning]'`"
            raise InputError("lightning", "installed", "no such package", remedy) from None


class EntropyCallback(RecorderCallback, Callback):
    """Record attention entropy and stable rank while a Lightning `Trainer` trains, and log them to its loggers.

    Every probe goes directly to each of `trainer.loggers`: `log_dict` would drop the probes between two multiples of
    `log_every_n_steps`. `trajectory` has every head.

    Args:
        batch: the fixed probe batch; by default the first training batch.
        forward: how to run the module on the batch; by default `module(**batch)` for a mapping, `module(batch[0])`
            for a tuple or list of inputs and targets, `module(batch)` otherwise.
        options: as for `joma.watch.Recorder`: `at`, `ranks`, `rows`, `precision`, `floor`, `patience` …

    >>> callback = EntropyCallback(at=[0, 100, 1000], ranks=False)
    """

    def __init__(
        self, batch: Any = None, *, forward: Callable[[nn.Module, Any], object] | None = None, **options: Any
    ) -> None:
        self.batch, self.options = batch, {"forward": forward or _call_on_inputs, **check_options(options)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new trajectory."""
        del trainer, pl_module
        self.recorder = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Probe before the first step; the first batch is the default probe batch."""
        del batch_idx
        if self.recorder is None:
            self.recorder = Recorder(pl_module, batch if self.batch is None else self.batch, **self.options)
            self._log(trainer, self.recorder(trainer.global_step))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Probe if the step is due."""
        del pl_module, outputs, batch, batch_idx
        if self.recorder is not None:
            self._log(trainer, self.recorder(trainer.global_step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe at the last step."""
        del pl_module
        if self.recorder is not None:
            self._log(trainer, self.recorder.probe(trainer.global_step))

    def _log(self, trainer: Trainer, scalars: dict[str, float]) -> None:
        for logger in trainer.loggers if scalars else ():
            logger.log_metrics(scalars, step=trainer.global_step)


def _call_on_inputs(module: nn.Module, batch: Any) -> object:
    """Call the module on the inputs of a batch: the first part of a tuple or list of inputs and targets."""
    return module(batch[0]) if isinstance(batch, tuple | list) else call_model(module, batch)
