"""A run on disk: `config.json`, `trajectory.nc`, `figures/`, `claims.json` and `log.txt` in `OUT/<study>/<hash>/`.

`claims.json` is written last, so a run is finished if and only if it exists. It holds the trajectory's checksum and
what a reader needs to know of the study.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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
class Description:
    """What is stored about the study for readers of a run, so that a report needs no study's code.

    Attributes:
        title, source, about: of the study, for a reader.
        figures: names of the files in `figures/`, without suffix, in the order in which they are shown. None in runs of
            version 0.1.0, whose figures are ordered by the number that their names begin with.
    """

    title: str = ""
    source: str = ""
    about: str = ""
    figures: Sequence[str] | None = None


@dataclass(frozen=True)
class StoredClaims:
    """The content of `claims.json`: a record for each claim, the run's description, and how long the run took."""

    claims: list[dict[str, Any]]
    description: Description
    wall_time: float


@dataclass(frozen=True)
class Run:
    """One run of a study and its folder. Study, version, config and seeds decide the folder's name."""

    out: Path
    study: str
    version: int
    config: Mapping[str, Any]
    seeds: Sequence[int]

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes this run from others: study, version, config and seeds."""
        return {
            "study": self.study,
            "version": self.version,
            "config": dict(self.config),
            "seeds": list(self.seeds),
        }

    @property
    def path(self) -> Path:
        """The folder, `OUT/<study>/<hash>`."""
        text = json.dumps(self.identity, sort_keys=True)
        return self.out / self.study / short_hash(text, 12)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run's folder for this process, after checking that the folders are of the right kind.

        If bad input shows inside the block, the folders that were made for the run are removed again.
        """
        if (self.out / "config.json").exists():
            raise StorageError(f"{self.out} is itself a run; choose a folder that holds runs with `--out`.")
        if any(self.out.glob("*/config.json")):
            raise StorageError(f"{self.out} holds the runs of one study; choose the folder above it with `--out`.")
        new_folders = [folder for folder in (self.path, self.path.parent, self.out) if not folder.exists()]
        try:
            with lock(self.path):
                self._check_identity()
                yield
        except InputError:
            if self.path in new_folders:
                shutil.rmtree(self.path)
            for folder in new_folders[1:]:
                with suppress(OSError):  # another run may be in it by now
                    folder.rmdir()
            raise

    def _check_identity(self) -> None:
        """Refuse a folder that another run wrote, such as one that was copied or edited by hand."""
        file = self.path / "config.json"
        if not file.exists():
            return
        stored = {name: value for name, value in _read_fields(file).items() if name != "preset"}
        if stored != json.loads(json.dumps(self.identity)):
            other = f"study {stored.get('study')!r}, version {stored.get('version')}"
            raise StorageError(f"{self.path} holds another run ({other}); move it away or choose another `--out`.")

    @property
    def finished(self) -> bool:
        """Whether `claims.json`, the last file of a run, exists."""
        return (self.path / "claims.json").exists()

    def begin(self, preset: str) -> None:
        """Write `config.json`: the first write, so that a folder without permission is noticed before any work."""
        write_json(self.path / "config.json", {**self.identity, "preset": preset})
        self.log(f"begun: {self.study}, version {self.version}, preset {preset}, seeds {list(self.seeds)}")

    def save(self, trajectory: xr.Dataset, *, device: str, wall_time: float) -> xr.Dataset:
        """Stamp provenance on `trajectory`, write it, and return it as it is read from the disk."""
        stamp = provenance() | {"device": device, "wall_time_s": f"{wall_time:.3f}"}
        identity = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.identity.items()}
        write_trajectory(self.path / TRAJECTORY, trajectory.assign_attrs({**identity, **stamp}))
        return open_run(self.path)

    def finish(self, stored: StoredClaims) -> None:
        """Write `claims.json`, which ends the run."""
        write_claims(self.path, stored)
        self.log(f"finished after {stored.wall_time:.1f} s")

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


def write_claims(path: Path, stored: StoredClaims) -> None:
    """Write `claims.json`, with the checksum of the trajectory on which the claims were measured."""
    content = {
        "wall_time_s": round(stored.wall_time, 3),
        "trajectory_sha256": checksum(path / TRAJECTORY),
        "description": asdict(stored.description),
        "claims": stored.claims,
    }
    write_json(path / "claims.json", content)


def read_claims(path: Path) -> StoredClaims:
    """Read a finished run's claims, after checking that its trajectory is the one on which they were measured."""
    fields = _read_fields(path / "claims.json", "claims", "wall_time_s", "trajectory_sha256")
    trajectory = path / TRAJECTORY
    if not trajectory.exists():
        raise StorageError(f"{trajectory} is missing; delete {path} to run it again.")
    if checksum(trajectory) != fields["trajectory_sha256"]:
        raise StorageError(f"{trajectory} is cut short or altered since its claims were measured; {_restore(path)}")
    try:
        for claim in fields["claims"]:
            if "said" in claim:  # the name of this field in runs of version 0.1.0
                claim["statement"] = claim.pop("said")
        description = Description(**fields.get("description", {}))  # runs of version 0.1.0 have none
    except (TypeError, AttributeError) as cause:
        reason = short_reason(cause)
        raise StorageError(f"{path / 'claims.json'} is not what a run writes ({reason}); {_restore(path)}") from None
    return StoredClaims(fields["claims"], description, fields["wall_time_s"])


def read_config(path: Path) -> dict[str, Any]:
    """Read what a run is: `study`, `version`, `config`, `seeds` and `preset`."""
    return _read_fields(path / "config.json", "study", "version", "config", "seeds", "preset")


def _read_fields(file: Path, *names: str) -> dict[str, Any]:
    """Read a JSON object that has at least these fields."""
    fields = read_json(file)
    if not isinstance(fields, dict):
        raise StorageError(f"{file} is not what a run writes; delete {file.parent} to run it again.")
    if missing := [name for name in names if name not in fields]:
        raise StorageError(f"{file} lacks {', '.join(missing)}; {_restore(file.parent)}")
    return fields


def _restore(path: Path) -> str:
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
        runs = sorted(str(file.parent) for file in path.glob(f"**/{TRAJECTORY}")) if path.is_dir() else []
        hint = f"runs below it: {', '.join(runs)}" if runs else "give the folder of a run, `OUT/<study>/<hash>`"
        raise StorageError(f"no trajectory at {file}; {hint}.")
    try:
        with xr.open_dataset(file, engine="h5netcdf") as dataset:
            # Without the encoding, or labels that are joined and written again would be cut to the first one's length.
            return dataset.load().drop_encoding()
    except Exception as cause:  # h5py, h5netcdf and xarray each raise their own on a broken file
        raise StorageError(
            f"{file} is no readable trajectory ({short_reason(cause)}); {_restore(file.parent)}"
        ) from None


def write_trajectory(path: Path, trajectory: xr.Dataset) -> None:
    """Write a Dataset as netCDF-4, whole or not at all. Attributes must be strings: netCDF has no bools or dicts.

    The file is made in memory: HDF5 would crash the process if the file system refused a write.
    """
    write_bytes(path, trajectory.to_netcdf(engine="h5netcdf"))


def find_runs(out: Path, depth: int = 2) -> list[Path]:
    """Return the finished runs below `out`, by study and then oldest first; judging a run again keeps its age.

    They lie `depth` folders down: two if `out` is the folder of all runs, one if it holds the runs of one study, none
    if it is itself a run.
    """
    paths = [claims.parent for claims in out.glob("*/" * depth + "claims.json")]
    return sorted(paths, key=lambda path: (path.parent.name, _modified(path)))


def _modified(path: Path) -> int:
    files = (file for file in (path / TRAJECTORY, path / "claims.json") if file.exists())
    return next(files).stat().st_mtime_ns


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def provenance() -> dict[str, str]:
    """Return versions, platform, commit and time: the one place where provenance is stamped."""
    stamp = {"created": now(), "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            stamp[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            stamp[f"{package}_version"] = "not installed"
    stamp["git_commit"] = _commit()
    return stamp


def _commit() -> str:
    """Return the commit of the source tree that this package runs from, or "unknown" for an installed package."""
    folder = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"
