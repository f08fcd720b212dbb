"""A sweep on disk: `sweep.json`, `failures.json` and `figures/` in `OUT/sweeps/<study>/<hash>/`.

Its runs are ordinary runs in `OUT/sweeps/runs/<study>/<hash>/`. All sweeps share them, so that a larger grid repeats
nothing. They lie apart from the runs of `joma run`, whose report has a section for each; a run that is finished there
is used where it is. `manifest.json` lists `sweep.json` and the figure, and is complete once the figure is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from joma.arguments import InputError, short_reason
from joma.files import (
    DamagedFile,
    StorageError,
    as_path,
    exists,
    is_folder,
    list_folder,
    parse_json,
    read_checked,
    short_hash,
    write_checked,
    write_json,
)
from joma.manifest import Manifest, read_manifest, write_manifest
from joma.runs import FIGURES, StoredClaims, read_claims
from joma.sweeps.points import Draws, Grid, Range

SWEEPS, RUNS = "sweeps", "runs"
SWEEP, FAILURES = "sweep.json", "failures.json"
FORMAT = 1
REMEDY = "delete the folder and repeat `joma sweep`; finished runs are kept"
State = Literal["finished", "failed", "missing"]


@dataclass(frozen=True)
class SweepUnit:
    """One point of a sweep: the values of the keys, and the name of the folder of its run."""

    point: Mapping[str, Any]
    run: str

    @property
    def label(self) -> str:
        """The point as text, such as `steps=500, rate=0.1`."""
        return ", ".join(f"{key}={value_label(value)}" for key, value in self.point.items())


def value_label(value: Any) -> str:
    """Return a value of a config as text; the members of a list are joined by commas.

    >>> value_label((1, 2.5)), value_label(None)
    ('1,2.5', 'None')
    """
    return ",".join(map(value_label, value)) if isinstance(value, (list, tuple)) else str(value)


@dataclass(frozen=True)
class Sweep:
    """Many runs of one study.

    Attributes:
        path: the folder, `OUT/sweeps/<study>/<hash>`.
        study, version, preset: what is run.
        seeds: their number in every run.
        fixed: the fields of the config that do not vary.
        plan: which values the others have.
        units: the points, in their order.
    """

    path: Path
    study: str
    version: int
    preset: str
    seeds: int
    fixed: Mapping[str, Any]
    plan: Grid | Draws
    units: Sequence[SweepUnit]

    @property
    def content(self) -> dict[str, Any]:
        """The content of `sweep.json`."""
        return {
            "format": FORMAT,
            "study": self.study,
            "version": self.version,
            "preset": self.preset,
            "seeds": self.seeds,
            "fixed": dict(self.fixed),
            **self.plan.as_json(),
            "units": [{"point": dict(unit.point), "run": unit.run} for unit in self.units],
        }

    @property
    def runs(self) -> Path:
        """The folder that runs of sweeps are stored in."""
        return self.path.parents[1] / RUNS

    def place(self, unit: SweepUnit) -> Path:
        """Return the folder of runs that holds the run of a unit, or that it is to be stored in."""
        elsewhere = self.path.parents[2]  # where `joma run` stores its runs
        is_there = is_finished(elsewhere / self.study / unit.run)
        return elsewhere if is_there and not is_finished(self.runs / self.study / unit.run) else self.runs

    def run_path(self, unit: SweepUnit) -> Path:
        """Return the folder of the run of a unit, whether it exists or not."""
        return self.place(unit) / self.study / unit.run

    @cached_property
    def finished(self) -> dict[str, StoredClaims]:
        """The claims of the finished units by the name of their run; they are read once."""
        paths = {unit.run: self.run_path(unit) for unit in self.units}
        return {name: read_claims(path) for name, path in paths.items() if is_finished(path)}

    @cached_property
    def failures(self) -> dict[str, dict[str, str]]:
        """Why units have no run, by the name of the run: kind, message and details. Finished units are left out."""
        file = self.path / FAILURES
        stored = parse_json(file, read_checked(file, REMEDY)) if exists(file) else {}
        return {name: failure for name, failure in stored.items() if name not in self.finished}

    @property
    def failed_units(self) -> dict[str, list[SweepUnit]]:
        """The units that failed, by their message."""
        units: dict[str, list[SweepUnit]] = {}
        for unit in self.units:
            if unit.run in self.failures:
                units.setdefault(self.failures[unit.run]["message"], []).append(unit)
        return units

    def state(self, unit: SweepUnit) -> State:
        """Return whether a unit is finished, has failed, or was not run yet."""
        if unit.run in self.finished:
            return "finished"
        return "failed" if unit.run in self.failures else "missing"

    def begin(self) -> None:
        """Write `sweep.json` and its manifest, which says that no figure is drawn."""
        write_json(self.path / SWEEP, self.content)
        self._write_manifest([SWEEP], complete=False)

    def write_failures(self, failures: Mapping[str, Mapping[str, str]]) -> None:
        """Replace the stored failures, by the name of the run."""
        write_checked(self.path / FAILURES, (json.dumps(failures, indent=1) + "\n").encode())

    def finish(self) -> None:
        """List the figure in the manifest and mark it as complete."""
        pictures = [f"{FIGURES}/{file.name}" for file in list_folder(self.path / FIGURES)]
        self._write_manifest([SWEEP, *pictures], complete=True)

    def _write_manifest(self, names: Sequence[str], *, complete: bool) -> None:
        write_manifest(self.path, {"sweep": self.path.name}, names, complete=complete)  # no "study": it is no run

    @property
    def manifest(self) -> Manifest:
        """The files of the folder, with their checksums."""
        manifest = read_manifest(self.path, remedy=REMEDY)
        if manifest is None:
            raise DamagedFile(self.path / SWEEP, "has no manifest: the sweep was not begun", REMEDY)
        return manifest


def planned(path: Path, **fields: Any) -> Sweep:
    """Return the sweep with these fields below the folder `path` of sweeps; its content decides its folder."""
    sweep = Sweep(path / fields["study"], **fields)
    return Sweep(sweep.path / short_hash(json.dumps(sweep.content, sort_keys=True), 12), **fields)


def is_finished(path: Path) -> bool:
    """Return whether a run is finished; one whose manifest is damaged is not."""
    try:
        manifest = read_manifest(path)
    except StorageError:
        return False
    return manifest is not None and manifest.complete


def find_sweeps(out: Path) -> list[Path]:
    """Return the folders of the sweeps below `out`, the folder of all runs, sorted by study and name."""
    studies = [folder for folder in list_folder(out / SWEEPS) if is_folder(folder)]
    return [path for folder in studies for path in list_folder(folder) if is_folder(path) and exists(path / SWEEP)]


def read_sweep(path: str | Path) -> Sweep:
    """Read a sweep, after checking `sweep.json` against its manifest.

    Args:
        path: the folder of the sweep, `OUT/sweeps/<study>/<hash>`.
    """
    path = as_path("path", path).absolute()
    if not exists(path / SWEEP):
        sweeps = ", ".join(map(str, find_sweeps(path)))
        hint = f"sweeps below it: {sweeps}" if sweeps else "give the folder of a sweep, `OUT/sweeps/<study>/<hash>`"
        raise StorageError(f"no sweep at {path}; {hint}.")
    manifest = read_manifest(path, remedy=REMEDY)
    if manifest is None:
        raise DamagedFile(path / SWEEP, "has no manifest: the sweep was being begun", REMEDY)
    fields = parse_json(path / SWEEP, manifest.read(SWEEP))
    try:
        plan = _plan(fields)
        units = [SweepUnit(unit["point"], unit["run"]) for unit in fields["units"]]
        names = ("study", "version", "preset", "seeds", "fixed")
        return Sweep(path, **{name: fields[name] for name in names}, plan=plan, units=units)
    except (InputError, KeyError, TypeError) as cause:
        raise DamagedFile(path / SWEEP, f"is not what a sweep writes ({short_reason(cause)})", REMEDY) from None


def _plan(fields: Mapping[str, Any]) -> Grid | Draws:
    if "grid" in fields:
        return Grid(fields["grid"])
    sources = {key: Range(**source) if isinstance(source, dict) else source for key, source in fields["random"].items()}
    return Draws(sources, fields["count"], fields["seed"])
