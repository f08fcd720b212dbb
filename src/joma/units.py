"""The units of work that engines run: functions of a folder, a display and arguments that JSON has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joma.engine import Output
from joma.progress import Progress
from joma.studies import load
from joma.study import Study, execute, shards


def run_study(
    out: Path,
    progress: Progress,
    *,
    study: str,
    preset: str,
    config: Mapping[str, Any],
    seeds: int,
    device: str = "cpu",
) -> Output:
    """Run a study and judge its claims, unless this run is finished; the value is its `Outcome`.

    Args:
        out: the folder of runs.
        progress: where progress is reported.
        study: its name.
        preset: the preset whose claims it decides.
        config: all fields of its config, as JSON has them.
        seeds: their number.
        device: where models train.
    """
    chosen = load(study)
    outcome = execute(
        chosen,
        preset=preset,
        out=out,
        seeds=seeds,
        config=config_of(chosen, preset, config),
        device=device,
        progress=progress,
    )
    value = dataclasses.asdict(outcome) | {"path": str(outcome.path)}
    return Output(value, (str(outcome.path.relative_to(out)),))


def train_shard(
    out: Path,
    progress: Progress,
    *,
    study: str,
    preset: str,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    seed_count: int,
    device: str = "cpu",
) -> Output:
    """Train some seeds of a run, unless this shard is trained; the process that submitted the unit joins the shards.

    Args:
        out, progress, study, preset, config, device: as for `run_study`.
        seeds: consecutive seeds.
        seed_count: the number of seeds of the whole run.
    """
    chosen = load(study)
    path = shards.train_shard(
        chosen,
        seeds,
        seed_count=seed_count,
        preset=preset,
        out=out,
        config=config_of(chosen, preset, config),
        device=device,
        progress=progress,
    )
    return Output(folders=(str(path.relative_to(out)),))


def config_of(study: Study, preset: str, fields: Mapping[str, Any]) -> Any:
    """Return the config with these fields, as JSON has them."""
    kind = type(study.presets[preset].config)
    return kind(**{name: tuple_of(value) for name, value in fields.items()})


def tuple_of(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists, as configs have them.

    >>> tuple_of([1, [2, 3]])
    (1, (2, 3))
    """
    return tuple(map(tuple_of, value)) if isinstance(value, list) else value
