"""A callback for Lightning: `Trainer(callbacks=[joma.watch.lightning.EntropyCallback()])`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import nn

from joma.arguments import InputError
from joma.watch.callbacks import RecorderCallback, replaced
from joma.watch.evaluation import call_model
from joma.watch.probe_options import check_options
from joma.watch.recorder import Recorder

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import DummyLogger
else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.loggers.logger import DummyLogger
    except ImportError:
        try:
            from pytorch_lightning import Callback
            from pytorch_lightning.loggers.logger import DummyLogger
        except ImportError:
            remedy = "run `pip install 'joma[lightning]'`"
            raise InputError("lightning", "installed", "no such package", remedy) from None


class EntropyCallback(RecorderCallback, Callback):
    """Record attention entropy and stable rank while a Lightning `Trainer` trains, and log them to its loggers.

    Every probe goes directly to each of `trainer.loggers`: `log_dict` would drop the probes between two multiples of
    `log_every_n_steps`. `trajectory` has every head. The callback never ends the training: what it cannot measure is a
    `ProbeFailed` warning. With several processes each measures its own batch, and the results are means over all rows.

    Args:
        batch: the fixed probe batch; by default the first training batch.
        forward: how to run the module on the batch. By default `module(**batch)` for a mapping, `module(batch[0])` for
            a tuple or list of inputs and targets, `module(batch)` otherwise; a module without a `forward` that takes
            the batch runs its `training_step` (with manual optimisation its `validation_step`) without logging.
        options: as for `joma.watch.Recorder`: `at`, `ranks`, `rows`, `precision`, `floor`, `patience` …

    >>> callback = EntropyCallback(at=[0, 100, 1000], ranks=False)
    """

    def __init__(
        self, batch: Any = None, *, forward: Callable[[nn.Module, Any], object] | None = None, **options: Any
    ) -> None:
        self.batch, self.options = batch, check_options({"forward": forward, **options})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new trajectory."""
        del trainer, pl_module
        self._start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Probe before the first step; the first batch is the default probe batch."""
        del batch_idx
        if self.recorder is None and not self._failed:
            with self._guarded("preparing the probes", trainer.global_step):
                processes = self._processes(pl_module)
                options = {**self.options, "distributed": processes.count > 1}
                options["forward"] = self.options["forward"] or functools.partial(_run_on_batch, trainer)
                with processes.together():
                    recorder = Recorder(pl_module, batch if self.batch is None else self.batch, **options)
                self.recorder = recorder
                self._log(trainer, recorder(trainer.global_step, gradients=False))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Probe if the step is due."""
        del pl_module, outputs, batch, batch_idx
        if self.recorder is not None:
            self._log(trainer, self.recorder(trainer.global_step, gradients=False))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measure the gradients, before clipping, if the coming step is due or the last, and the option is set."""
        del pl_module
        if self.recorder is not None and self.options.get("gradients"):
            step = trainer.global_step + 1
            last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
            last, scale = last_batch or step == trainer.max_steps, _gradient_scale(trainer, optimizer)
            self.recorder.read_gradients(step, always=last, scale=scale)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe at the last step."""
        del pl_module
        if self.recorder is not None:
            self._log(trainer, self.recorder.probe(trainer.global_step, gradients=False))

    def _log(self, trainer: Trainer, scalars: dict[str, float]) -> None:
        for logger in trainer.loggers if scalars and trainer.is_global_zero else ():
            with self._guarded("logging a probe", trainer.global_step):
                logger.log_metrics(scalars, step=trainer.global_step)


def _gradient_scale(trainer: Trainer, optimizer: Any) -> float:
    """Return the factor in the gradients before the step: 1, unless a fused optimizer is to divide by it itself."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler.get_scale() if scaler and getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0


def _run_on_batch(trainer: Trainer, module: LightningModule, batch: Any) -> object:
    """Run a module on a batch: by its `forward` if that takes the batch's inputs, else by a step of its own."""
    inputs, parts = (batch[0], len(batch)) if isinstance(batch, tuple | list) else (batch, 1)
    with trainer.precision_plugin.forward_context():
        if parts <= 2 and _has_forward(module) and _takes(module.forward, inputs):  # of three, one may be a mask
            return call_model(module, inputs if isinstance(inputs, Mapping) else (inputs,))
        step = _own_step(module)
        arguments = next(
            (arguments for arguments in ((batch, 0), (batch,), (batch, 0, 0)) if _binds(step, *arguments)), (batch, 0)
        )
        with _without_traces(trainer, module):
            return step(*arguments)


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module's class defines `forward`, other than Lightning's, which raises an error."""
    defining = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), nn.Module)
    return defining is not nn.Module and not defining.__module__.startswith(("lightning.", "pytorch_lightning."))


def _takes(function: Callable[..., Any], inputs: Any) -> bool:
    return _binds(function, **inputs) if isinstance(inputs, Mapping) else _binds(function, inputs)


def _binds(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _own_step(module: LightningModule) -> Callable[..., Any]:
    """Return the step that runs the module on a batch and does not train it."""
    if module.automatic_optimization:
        return module.training_step
    if type(module).validation_step.__module__.startswith(("lightning.", "pytorch_lightning.")):
        got = f"{type(module).__name__}, whose `training_step` optimises by itself and which has no `validation_step`"
        remedy = "pass `forward=lambda module, batch: …` to the callback, which runs the model on the batch"
        raise InputError("module", "one that can be run without training it", got, remedy)
    return module.validation_step


@contextmanager
def _without_traces(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Run a step that logs nothing: `log` and `log_dict` do nothing, loggers are dummies, metrics keep their state."""
    with ExitStack() as stack:
        for part in module.modules():
            if hasattr(part, "log_dict"):
                stack.enter_context(replaced(vars(part), log=_nothing, log_dict=_nothing))
            elif hasattr(part, "_update_count") and hasattr(part, "_defaults"):  # a torchmetrics.Metric
                state = {name: deepcopy(vars(part)[name]) for name in _metric_state(part)}
                stack.callback(vars(part).update, state)
        loggers = trainer.loggers
        trainer.loggers = [DummyLogger()] if loggers else []
        stack.callback(setattr, trainer, "loggers", loggers)
        yield


def _metric_state(metric: Any) -> list[str]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "_cache", "_is_synced"]
    return [name for name in names if name in vars(metric)]


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
