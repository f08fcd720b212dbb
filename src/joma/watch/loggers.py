"""Send the scalars of a probe to the loggers that people use; the table `DESTINATIONS` has one entry for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from joma.arguments import InputError, described

Log = Callable[[dict[str, float], int], object]


class Destination(NamedTuple):
    """A kind of logger: what it is called, how it is recognised, and how scalars are logged to it."""

    name: str
    recognises: Callable[[Any], bool]
    log: Callable[[Any, dict[str, float], int], object]


def _has_method(name: str, *parameters: str) -> Callable[[Any], bool]:
    """Return a function that says whether an object has a method `name` with all these parameters."""

    def check(target: Any) -> bool:
        method = getattr(target, name, None)
        if not callable(method):
            return False
        try:
            return set(parameters) <= set(inspect.signature(method).parameters)
        except (TypeError, ValueError):
            return False

    return check


def _is_wandb(target: Any) -> bool:
    """Return whether `target` is the module or a run of Weights & Biases, whose `log` has a step that must not fall."""
    return callable(getattr(target, "log", None)) and hasattr(target, "define_metric")


def _log_to_tensorboard(writer: Any, scalars: dict[str, float], step: int) -> None:
    for key, value in scalars.items():
        writer.add_scalar(key, value, step)


def _log_to_wandb(target: Any, scalars: dict[str, float], step: int) -> None:
    """Log at `step`, or at the run's own step if that is further: W&B drops what is logged at a past step."""
    run = getattr(target, "run", None) or target  # the module has the current run, a run has none
    current = getattr(run, "step", 0)
    current = current if isinstance(current, int) else 0
    target.log({**scalars, "probe_step": step}, step=max(step, current))


DESTINATIONS = (
    Destination("a TensorBoard `SummaryWriter`", _has_method("add_scalar"), _log_to_tensorboard),
    Destination("the `wandb` module or a run of it", _is_wandb, _log_to_wandb),
    Destination(
        "the `mlflow` module",
        _has_method("log_metrics", "metrics", "step"),
        lambda target, scalars, step: target.log_metrics(scalars, step=step),
    ),
    Destination(
        "the `trackio` module",
        _has_method("log", "step"),
        lambda target, scalars, step: target.log(scalars, step=step),
    ),
)


def check_log(log: Any) -> Log | None:
    """Return the function that logs scalars at a step, or None for None; a list or tuple holds several loggers.

    >>> check_log(lambda scalars, step: print(step, scalars))({"attention_entropy/h.0": 1.5}, 8)
    8 {'attention_entropy/h.0': 1.5}
    """
    if log is None:
        return None
    if isinstance(log, list | tuple):
        return _log_to_all([function for function in map(check_log, log) if function is not None])
    for destination in DESTINATIONS:
        if destination.recognises(log):
            return _log_to(destination, log)
    if callable(log):
        return log
    known = ", ".join(destination.name for destination in DESTINATIONS)
    raise InputError("log", f"a function of scalars and step, or {known}", described(log), "pass one of them")


def _log_to(destination: Destination, target: Any) -> Log:
    return lambda scalars, step: destination.log(target, scalars, step)


def _log_to_all(functions: list[Log]) -> Log:
    """Return a function that logs to every logger, also after one of them has failed, and then raises its error."""

    def log(scalars: dict[str, float], step: int) -> None:
        errors: list[Exception] = []
        for function in functions:
            try:
                function(dict(scalars), step)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return log
