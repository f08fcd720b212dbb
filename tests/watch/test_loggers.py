"""Loggers are recognised by what they offer; TensorBoard for real, the others by stand-ins of the same signatures."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from joma.arguments import InputError
from joma.watch.loggers import DESTINATIONS, check_log

SCALARS = {"attention_entropy/h.0": 1.5, "stable_rank/h.0": 3.0}


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars in TensorBoard's event files: by key, the steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def test_tensorboard(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        log = check_log(writer)
        log(SCALARS, 0)
        log(SCALARS, 8)
    assert read_events(tmp_path) == {key: [(0, value), (8, value)] for key, value in SCALARS.items()}


class WandbRun:
    """A stand-in for a run of W&B, whose steps must not fall: what is logged at a past step is dropped."""

    def __init__(self) -> None:
        self.step, self.rows = 0, []

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        if step is None or step >= self.step:
            self.rows.append((self.step if step is None else step, data))
            self.step = self.rows[-1][0] + (step is None)


def test_weights_and_biases_keeps_probes_beside_logs_that_count_their_own_steps() -> None:
    run = WandbRun()
    module = SimpleNamespace(run=run, log=run.log, define_metric=run.define_metric)
    check_log(run)(SCALARS, 8)
    for _ in range(5):
        run.log({"loss": 1.0})
    check_log(module)(SCALARS, 10)
    check_log(module)(SCALARS, 100)
    probes = [(step, data) for step, data in run.rows if "probe_step" in data]
    assert [(step, data["probe_step"]) for step, data in probes] == [(8, 8), (13, 10), (100, 100)]
    assert all(SCALARS.items() <= data.items() for _, data in probes)


def test_mlflow_and_trackio_by_their_signatures() -> None:
    logged: list[Any] = []

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        logged.append(("mlflow", metrics, step))

    def log(metrics: dict[str, Any], step: int | None = None) -> None:
        logged.append(("trackio", metrics, step))

    check_log([SimpleNamespace(log_metrics=log_metrics, log_metric=None), SimpleNamespace(log=log)])(SCALARS, 3)
    assert logged == [("mlflow", SCALARS, 3), ("trackio", SCALARS, 3)]


def test_a_logger_that_fails_leaves_the_others_theirs() -> None:
    logged: list[int] = []

    def full(*_: Any) -> None:
        raise OSError("disk full")

    log = check_log([lambda _, step: logged.append(step), full, lambda _, step: logged.append(-step)])
    with pytest.raises(OSError, match="disk full"):
        log(SCALARS, 8)
    assert logged == [8, -8]


def test_functions_and_what_is_refused() -> None:
    logged: list[Any] = []
    check_log(lambda scalars, step: logged.append((scalars, step)))(SCALARS, 1)
    assert logged == [(SCALARS, 1)]
    assert check_log(None) is None
    for unknown in ("wandb", logging.getLogger("x"), logging, 3):
        with pytest.raises(
            InputError, match=r"`log` must be a function of scalars and step, or .*SummaryWriter.*trackio"
        ):
            check_log(unknown)
    assert len({destination.name for destination in DESTINATIONS}) == len(DESTINATIONS)
