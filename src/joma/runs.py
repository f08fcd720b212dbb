"""A run on disk: `config.json`, `trajectory.nc`, `figures/`, `claims.json` and `log.txt` in `OUT/<study>/<hash>/`.

`claims.json` is written last, so a run is finished if and only if it is there; it carries the trajectory's checksum.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xarray as xr

from joma.arguments import InputError, short_reason
from joma.files import StorageError, checksum, lock, read_json, short_hash, storage_error, write_bytes, write_json

TRAJECTORY = "trajectory.nc"
PACKAGES = ("joma", "numpy", "scipy", "torch", "xarray", "h5netcdf", "matplotlib")


@dataclass(frozen=True)
class Run:
    """One run of a study: where it lies and what it is. `identity` decides the folder, `notes` do not."""

    out: Path
    study: str
    version: int
    config: Mapping[str, Any]
    seeds: Sequence[int]

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this run this run: study, version, config and seeds."""
        return {
            "study": self.study,
            "version": self.version,
            "config": dict(self.config),
            "seeds": list(self.seeds),
        }

    @property
    def path(self) -> Path:
        """`OUT/<study>/<hash>`."""
        text = json.dumps(self.identity, sort_keys=True)
        return self.out / self.study / short_hash(text, 12)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the run's folder for this process, unless it or the folder above is something else.

        Bad input that is found inside leaves nothing behind: the folders that were made for it go again.
        """
        if (self.out / "config.json").exists():
            raise StorageError(f"{self.out} is itself a run; choose a folder that holds runs with `--out`.")
        if any(self.out.glob("*/config.json")):
            raise StorageError(f"{self.out} holds the runs of one study; choose the folder above it with `--out`.")
        made = [folder for folder in (self.path, self.path.parent, self.out) if not folder.exists()]
        try:
            with lock(self.path):
                self._check()
                yield
        except InputError:
            if self.path in made:
                shutil.rmtree(self.path)
            for folder in made[1:]:
                with suppress(OSError):  # another run may be there by now
                    folder.rmdir()
            raise

    def _check(self) -> None:
        """Refuse a folder that was written by another run, such as one that was copied or edited by hand."""
        file = self.path / "config.json"
        if not file.exists():
            return
        there = {key: value for key, value in _record(file).items() if key != "preset"}
        if there != json.loads(json.dumps(self.identity)):
            said = f"study {there.get('study')!r}, version {there.get('version')}"
            raise StorageError(f"{self.path} holds another run ({said}); move it away or choose another `--out`.")

    @property
    def finished(self) -> bool:
        """Whether `claims.json`, the last file of a run, is there."""
        return (self.path / "claims.json").exists()

    def begin(self, preset: str) -> None:
        """Write `config.json`: the first write, so that a folder that refuses is found before any work."""
        write_json(self.path / "config.json", {**self.identity, "preset": preset})
        self.log(f"begun: {self.study}, version {self.version}, preset {preset}, seeds {list(self.seeds)}")

    def save(self, trajectory: xr.Dataset, *, device: str, wall_time: float) -> xr.Dataset:
        """Stamp provenance on `trajectory`, write it, and return it as it now stands on disk."""
        notes = provenance() | {"device": device, "wall_time_s": f"{wall_time:.3f}"}
        identity = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.identity.items()}
        write_trajectory(self.path / TRAJECTORY, trajectory.assign_attrs({**identity, **notes}))
        return open_run(self.path)

    def finish(self, claims: list[dict[str, Any]], *, wall_time: float) -> None:
        """Write `claims.json`, which ends the run."""
        write_claims(self.path, claims, wall_time=wall_time)
        self.log(f"finished after {wall_time:.1f} s")

    def log(self, line: str) -> None:
        """Append one line, with the time, to `log.txt`."""
        log(self.path, line)


def log(path: Path, line: str) -> None:
    """Append one line, with the time, to a run's `log.txt`."""
    try:
        with (path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{now()} {line}\n")
    except OSError as cause:
        raise storage_error(path / "log.txt", cause) from None


def write_claims(path: Path, claims: list[dict[str, Any]], *, wall_time: float) -> None:
    """Write `claims.json`, with the checksum of the trajectory that they were measured on."""
    notes = {"wall_time_s": round(wall_time, 3), "trajectory_sha256": checksum(path / TRAJECTORY)}
    write_json(path / "claims.json", {**notes, "claims": claims})


def read_claims(path: Path) -> dict[str, Any]:
    """Read a finished run's claims, after checking that its trajectory is the one they were measured on."""
    record = _record(path / "claims.json", "claims", "wall_time_s", "trajectory_sha256")
    trajectory = path / TRAJECTORY
    if not trajectory.exists():
        raise StorageError(f"{trajectory} is missing; delete {path} to run it again.")
    if checksum(trajectory) != record["trajectory_sha256"]:
        raise StorageError(f"{trajectory} is cut short or altered since its claims were measured; {_again(path)}")
    for claim in record["claims"]:
        if "said" in claim:  # the name of the field in runs that version 0.1.0 stored
            claim["statement"] = claim.pop("said")
    return record


def read_config(path: Path) -> dict[str, Any]:
    """Read what a run is: `study`, `version`, `config`, `seeds` and `preset`."""
    return _record(path / "config.json", "study", "version", "config", "seeds", "preset")


def _record(file: Path, *names: str) -> dict[str, Any]:
    """Read a JSON file that holds names and values, these at least."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise StorageError(f"{file} is not what a run writes; delete {file.parent} to run it again.")
    if missing := [name for name in names if name not in found]:
        raise StorageError(f"{file} lacks {', '.join(missing)}; {_again(file.parent)}")
    return found


def _again(path: Path) -> str:
    return f"restore it, or delete {path} to run it again."


def open_run(path: str | Path) -> xr.Dataset:
    """Open a run's trajectory as a labelled `xarray.Dataset`, wholly in memory.

    Args:
        path: the run's folder, or its `trajectory.nc`.

    Returns:
        The Dataset with dims among `seed, step, time, layer, head, token, …`; attributes are strings, the config is
        one JSON string.
    """
    path = Path(path)
    file = path / TRAJECTORY if path.is_dir() else path
    if not file.exists():
        found = sorted(str(found.parent) for found in path.glob(f"**/{TRAJECTORY}")) if path.is_dir() else []
        hint = f"runs below it: {', '.join(found)}" if found else "give the folder of a run, `OUT/<study>/<hash>`"
        raise StorageError(f"no trajectory at {file}; {hint}.")
    try:
        with xr.open_dataset(file, engine="h5netcdf") as dataset:
            # How labels were stored is forgotten: joined and written again, they would be cut to the first's length.
            return dataset.load().drop_encoding()
    except Exception as cause:  # h5py, h5netcdf and xarray each raise their own on a broken file
        raise StorageError(f"{file} is no readable trajectory ({short_reason(cause)}); {_again(file.parent)}") from None


def write_trajectory(path: Path, trajectory: xr.Dataset) -> None:
    """Write a Dataset as netCDF-4, whole. Attributes must be strings: netCDF refuses bools, None and dicts.

    The file is made in memory: where the file system refuses a write of its own, HDF5 ends the process with a crash.
    """
    write_bytes(path, trajectory.to_netcdf(engine="h5netcdf"))


def find_runs(out: Path, depth: int = 2) -> list[Path]:
    """The finished runs below `out`, by study and then oldest first; judging one anew makes it no younger.

    They lie two folders down; one where `out` holds the runs of one study, none where it is itself a run.
    """
    found = [claims.parent for claims in out.glob("*/" * depth + "claims.json")]
    return sorted(found, key=lambda path: (path.parent.name, _age(path)))


def _age(path: Path) -> int:
    there = (file for file in (path / TRAJECTORY, path / "claims.json") if file.exists())
    return next(there).stat().st_mtime_ns


def now() -> str:
    """This moment in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def provenance() -> dict[str, str]:
    """Versions, platform, commit and time: stamped here and nowhere else."""
    stamp = {"created": now(), "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            stamp[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            stamp[f"{package}_version"] = "not installed"
    stamp["git_commit"] = _commit()
    return stamp


def _commit() -> str:
    """The commit of the source tree that this package runs from, or "unknown" for an installed one."""
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"
