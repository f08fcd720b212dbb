"""Many seeds of one run in shards: each is trained apart, in any process or on any GPU, and joined on the seed axis.

    OUT/<study>/<hash>/shards/<first>-<last>/  config.json  trajectory.nc  manifest.json  log.txt  checkpoints/

A shard is stored like a run, without claims and figures, inside the run that it belongs to, so that no reader of runs
takes it for one. To run 12 seeds on 4 GPUs:

    split = split_seeds(12, 4)
    for index, seeds in enumerate(split):  # anywhere, in any order, side by side
        train_shard(study, seeds, seed_count=12, out=out, device=f"cuda:{index}")
    outcome = join_shards(study, split, out=out)

On the CPU the joined run has the bits of one that was never split. On CUDA a seed's numbers depend on the number of
seeds beside it, as they do without shards: kernels choose the order of their sums by the size of the batch.

Training a shard locks the shard's folder alone, and joining locks that of the run, so that shards train side by side
and one process joins them. Both may be killed at any moment and repeated: a trained shard is not trained again, one
that was begun resumes, and shards are removed only when the run is finished.

Without a shared file system, a worker sends `joma.transport.pack(path)` of its shard, and the process that joins writes
it by `unpack(files, shard_of(study, seeds, seed_count=…, out=…).path)`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from joma.arguments import InputError, choice, whole
from joma.files import DamagedFile, StorageError, as_path
from joma.manifest import read_manifest
from joma.progress import SILENT, Progress
from joma.runs import CONFIG, OF_SEEDS, SHARDS, Run, check_run
from joma.stamp import STAMP, now
from joma.study.context import Context
from joma.study.execution import (
    MAX_SEEDS,
    QUICK,
    Outcome,
    Study,
    complete,
    compute,
    describe_diverged_seeds,
    device_name,
    planned_run,
    warn_of_diverged_seeds,
)

SPLIT_REMEDY = "use `split_seeds`"


@dataclass(frozen=True)
class Shard(Run):
    """Some consecutive seeds of a run, and their folder inside that of the run.

    Attributes:
        seed_count: the number of seeds of the whole run.
    """

    seed_count: int = 1

    @property
    def whole(self) -> Run:
        """The run that the shard belongs to."""
        return Run(self.out, self.study, self.version, self.config, tuple(range(self.seed_count)))

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes this shard from others: the run's identity, its own seeds, and the number of all seeds."""
        return {**super().identity, OF_SEEDS: self.seed_count}

    @property
    def path(self) -> Path:
        """The folder, `OUT/<study>/<hash>/shards/<first>-<last>`."""
        return self.whole.path / SHARDS / self.name

    @property
    def name(self) -> str:
        """The first and the last seed."""
        return f"{self.seeds[0]}-{self.seeds[-1]}"

    @property
    def label(self) -> dict[str, str]:
        """What a checkpoint stores of its shard, and must agree when training resumes."""
        return {**self.whole.label, "seeds": f"{self.name} of {self.seed_count}"}

    @property
    def is_trained(self) -> bool:
        """Whether the shard is stored; whether it is intact is checked when it is read."""
        return read_manifest(self.path) is not None

    @property
    def is_joined(self) -> bool:
        """Whether the whole run is trained already, so that nobody needs the shard any more."""
        return read_manifest(self.whole.path) is not None


def split_seeds(count: int, shards: int) -> tuple[tuple[int, ...], ...]:
    """Split the seeds 0 to `count` − 1 into consecutive shards whose sizes differ by at most one.

    There are never more shards than seeds.

    >>> split_seeds(5, 2)
    ((0, 1, 2), (3, 4))
    """
    count = whole("count", count, high=MAX_SEEDS)
    shards = min(whole("shards", shards), count)
    bounds = [index * (count // shards) + min(index, count % shards) for index in range(shards + 1)]
    return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))


def check_splits(study: Study, device: str) -> None:
    """Raise `InputError` if the seeds of a study cannot be split on a device without changing their last bits."""
    if not study.exact_shards and not device.startswith("cuda"):
        got = f"{study.name} on {device}, where PyTorch's kernels round differently for another number of seeds"
        remedy = "run it without shards, or on CUDA, where that is so in every study"
        raise InputError("shards", "asked for only where a seed's bits do not depend on its shard", got, remedy)


def shard_of(
    study: Study,
    seeds: Sequence[int],
    *,
    seed_count: int,
    preset: str = QUICK,
    out: Path | str = "runs",
    config: Any = None,
) -> Shard:
    """Return the shard of these seeds, trained or not: its folder is `.path`, its run is `.whole`.

    Args:
        study: what is run.
        seeds: consecutive seeds, as a member of `split_seeds`.
        seed_count: the number of seeds of the whole run.
        preset: gives the config if `config` is None.
        out: the folder of runs.
        config: as for `execute`.
    """
    chosen = choice("preset", preset, study.presets)
    seeds, seed_count = tuple(seeds), whole("seed_count", seed_count, high=MAX_SEEDS)
    if not seeds or seeds != tuple(range(seeds[0], seeds[-1] + 1)) or seeds[0] < 0 or seeds[-1] >= seed_count:
        raise InputError("seeds", f"consecutive seeds from 0 to {seed_count - 1}", seeds, SPLIT_REMEDY)
    run = planned_run(study, chosen.config if config is None else config, seeds=seed_count, out=as_path("out", out))
    return Shard(run.out, run.study, run.version, run.config, seeds, seed_count)


def train_shard(
    study: Study,
    seeds: Sequence[int],
    *,
    seed_count: int,
    preset: str = QUICK,
    out: Path | str = "runs",
    config: Any = None,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> Path:
    """Train some seeds of a run and store their trajectory; nothing is judged or drawn.

    A trained shard is checked and not trained again, one that was begun resumes, and nothing is done if the run is
    joined already.

    Args:
        study, preset, out, config, device, progress: as for `execute`.
        seeds: consecutive seeds, as a member of `split_seeds`.
        seed_count: the number of seeds of the whole run.

    Returns:
        The folder of the shard, or that of the whole run if it is joined already. Both have a manifest.

    Raises:
        InputError: bad arguments, or a study whose bits depend on the shard (`check_splits`).
        DamagedFile: the shard is trained, but not what was written; its folder is named, delete it.
        FolderLocked: another process trains this shard.
    """
    check_splits(study, device)
    config = choice("preset", preset, study.presets).config if config is None else config
    shard = shard_of(study, seeds, seed_count=seed_count, preset=preset, out=out, config=config)
    if shard.is_joined:
        return shard.whole.path
    with shard.locked():
        if shard.is_joined:  # another process has joined the run just now, and removed its shards
            shutil.rmtree(shard.path, ignore_errors=True)
            return shard.whole.path
        if shard.is_trained:
            _checked(shard)
            return shard.path
        shard.begin(preset)
        context = Context(tuple(shard.seeds), device, progress, shard.path / "checkpoints", shard.label)
        result, wall_time = compute(study, config, context)
        if line := describe_diverged_seeds(result):
            shard.log(line)  # joining warns of it
        shard.save(result, device=device_name(device), wall_time=wall_time)
        shard.log(f"trained after {wall_time:.1f} s")
    return shard.path


def join_shards(
    study: Study,
    split: Sequence[Sequence[int]],
    *,
    preset: str = QUICK,
    out: Path | str = "runs",
    config: Any = None,
) -> Outcome:
    """Join the trained shards of a run, judge its claims, draw its figures, store everything and remove the shards.

    The run is the one that `execute` would have stored. Its wall time is the sum of those of its shards, which may have
    trained at the same time. Checkpoints are not joined. A finished run is treated as by `execute`.

    Args:
        study, preset, out, config: as for `execute`, and the same as for `train_shard`.
        split: the seeds of each shard, as from `split_seeds`.

    Raises:
        StorageError: shards are missing; they are named.
        DamagedFile: a shard is not what was written; its folder is named, delete it and train it again.
        InputError: results that do not belong to a seed differ between shards: the study cannot be split.
        FolderLocked: another process joins the run.
    """
    seeds = [seed for part in split for seed in part]
    if not seeds or seeds != list(range(len(seeds))):
        raise InputError("split", "all seeds from 0, in order", list(split), SPLIT_REMEDY)
    options: dict[str, Any] = {"seed_count": len(seeds), "preset": preset, "out": out, "config": config}
    shards = [shard_of(study, part, **options) for part in split]
    run = shards[0].whole

    def join() -> None:
        missing = [shard.name for shard in shards if not shard.is_trained]
        if missing:
            remedy = "train them before they are joined"
            raise StorageError(f"{run.path} lacks the shards of seeds {', '.join(missing)}; {remedy}.")
        parts = [_checked(shard) for shard in shards]
        joined = _concatenated(study.name, parts)
        run.begin(preset)
        warn_of_diverged_seeds(joined, run)
        times = [float(part.attrs["wall_time_s"]) for part in parts]
        listing = ", ".join(f"{shard.name} ({time:.1f} s)" for shard, time in zip(shards, times, strict=True))
        run.log(f"joined shards: {listing}")
        stamp = {name: now() if name == "created" else _distinct(parts, name) for name in STAMP}
        run.save(joined, device=_distinct(parts, "device"), wall_time=sum(times), stamp=stamp)

    return complete(study, run, preset, join)


def _checked(shard: Shard) -> xr.Dataset:
    """Return the trajectory of a shard after checking it, and that it is this shard's."""
    manifest, trajectory = check_run(shard.path)
    stored = {name: value for name, value in manifest.identity.items() if name != "preset"}
    if stored != json.loads(json.dumps(shard.identity)):
        raise DamagedFile(shard.path / CONFIG, "is that of another shard", f"delete {shard.path} to train it again")
    return trajectory


def _distinct(parts: Sequence[xr.Dataset], name: str) -> str:
    """Return an attribute of the shards: one text if they agree, otherwise all of them."""
    return ", ".join(sorted({part.attrs.get(name, "unknown") for part in parts}))


def _concatenated(study: str, parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join trajectories on the axis `seed`; raise `InputError` if they differ in anything that has no such axis."""
    first, *others = parts
    stamped = {*STAMP, "study", "version", "config", "seeds", OF_SEEDS, "device", "wall_time_s"}
    attributes = [{name: text for name, text in part.attrs.items() if name not in stamped} for part in parts]
    _agree(study, "names of variables", [list(part.variables) for part in parts])
    _agree(study, "attributes", attributes)
    variables: dict[str, xr.Variable] = {}
    for name, variable in first.variables.items():
        same_name = [variable, *(part.variables[name] for part in others)]
        _agree(study, f"dims of `{name}`", [(variable.dims, variable.dtype) for variable in same_name])
        if "seed" in variable.dims:
            axis = variable.dims.index("seed")
            sizes = [(*variable.shape[:axis], *variable.shape[axis + 1 :]) for variable in same_name]
            _agree(study, f"sizes of `{name}`", sizes)
            values = np.concatenate([variable.values for variable in same_name], axis)
        else:
            _agree(study, f"`{name}`", [_bits(variable) for variable in same_name])
            values = variable.values
        variables[str(name)] = xr.Variable(variable.dims, values, variable.attrs)
    coordinates = {str(name): variables.pop(str(name)) for name in first.coords}
    return xr.Dataset(variables, coordinates, attributes[0])


def _agree(study: str, what: str, values: Sequence[Any]) -> None:
    """Raise `InputError` unless all values, one of each shard, are equal."""
    if any(value != values[0] for value in values):
        expected, got = "a study whose seeds can be split", f"{study}, whose {what} differ between shards"
        raise InputError("study", expected, got, "run it without shards")


def _bits(variable: xr.Variable) -> Any:
    """Return what is equal for equal values, NaN included: bytes, or a list of texts."""
    values = variable.values
    return (values.shape, values.tolist() if values.dtype == object else values.tobytes())
