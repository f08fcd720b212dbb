"""A run on disk: `config.json`, `trajectory.nc`, `figures/`, `claims.json` and `log.txt` in `OUT/<study>/<hash>/`.

`manifest.json` lists them with their checksums (all but the log, which nothing reads), and is written twice: without
claims and figures once the trajectory is stored, and completely at the end. A run is finished if and only if its
manifest is complete. Every reader checks what it reads against the manifest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import xarray as xr

from joma import memory
from joma.arguments import InputError, short_reason
from joma.files import (
    DamagedFile,
    StorageError,
    as_path,
    checksum_file,
    exists,
    file_size,
    is_folder,
    list_folder,
    lock,
    parse_json,
    read_checked,
    read_json,
    remove_leftovers,
    short_hash,
    storage_error,
    write_bytes,
    write_checked,
    write_json,
)
from joma.manifest import MANIFEST, Manifest, file_checksum, read_manifest, write_manifest
from joma.stamp import code_identity, has_changed, now, provenance
from joma.verdicts import present_form

TRAJECTORY, CONFIG, CLAIMS, FIGURES = "trajectory.nc", "config.json", "claims.json", "figures"
SHARDS, OF_SEEDS = "shards", "of_seeds"  # the folder of a run's shards; what only the identity of a shard has
HIGHLIGHT = "0-highlight"  # the name of the small picture for the report's first screen, without suffix
LARGE_ARRAY = 1 << 22  # bytes; a larger array is read while its checksum is computed, not after it


@dataclass(frozen=True)
class Description:
    """What is stored about the study for readers of a run, so that a report needs no study's code.

    Attributes:
        title, source: of the study, for a reader.
        statement: what the paper says.
        about: what was done.
        outcome: what came out of this run.
        highlight: what the small picture `figures/0-highlight.svg` on the report's first screen shows, such as "Figure
            4"; empty if there is none.
        figures: names of the files in `figures/`, without suffix, in the order in which they are shown. None in runs of
            version 0.1.0, whose figures are ordered by the number that their names begin with.
    """

    title: str = ""
    source: str = ""
    statement: str = ""
    about: str = ""
    outcome: str = ""
    highlight: str = ""
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
        return {"study": self.study, "version": self.version, "config": dict(self.config), "seeds": list(self.seeds)}

    @property
    def path(self) -> Path:
        """The folder, `OUT/<study>/<hash>`."""
        return self.out / self.study / short_hash(json.dumps(self.identity, sort_keys=True), 12)

    @property
    def label(self) -> dict[str, str]:
        """What a checkpoint stores of its run, and must agree when training resumes."""
        return {"study": f"{self.study}, version {self.version}", "run": self.path.name}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run's folder for this process, after checking that the folders are of the right kind.

        If bad input shows inside the block, the folders that were made for the run are removed again, unless they hold
        a checkpoint or the trajectory.
        """
        new_folders = self._missing_folders()
        with lock(self.path):  # while the folders are removed, too: nobody else may begin the run in them
            try:
                remove_leftovers(self.path, deep=True)
                self._check_identity()
                yield
            except InputError:
                if self.path in new_folders and not self._holds_results:
                    shutil.rmtree(self.path, ignore_errors=True)  # the bad input is what to report
                for folder in new_folders[1:]:
                    with suppress(OSError):  # another run may be in it by now
                        folder.rmdir()
                raise

    @property
    def _holds_results(self) -> bool:
        """Whether a checkpoint, a shard or the trajectory is stored, which took time to compute."""
        places = ("checkpoints/*/*", f"{SHARDS}/*")
        return os.path.lexists(self.path / TRAJECTORY) or any(any(self.path.glob(place)) for place in places)

    def _missing_folders(self) -> list[Path]:
        """Return the folders that have to be made for the run, the innermost first; refuse one that is itself a run."""
        try:
            if (self.out / CONFIG).exists():
                raise StorageError(f"{self.out} is itself a run; choose a folder that holds runs with `--out`.")
            if any(self.out.glob(f"*/{CONFIG}")):
                raise StorageError(f"{self.out} holds the runs of one study; choose the folder above it with `--out`.")
            folders = [folder for folder in (self.path, *self.path.parents) if folder.is_relative_to(self.out)]
            return [folder for folder in folders if not folder.exists()]
        except StorageError:
            raise
        except OSError as cause:  # a folder that may not be searched, or a name that is too long
            raise storage_error(self.out, cause) from None

    def _check_identity(self) -> None:
        """Refuse a folder that another run wrote, such as one that was copied or edited by hand."""
        file = self.path / CONFIG
        if not exists(file):
            return
        stored = {name: value for name, value in _read_fields(file).items() if name != "preset"}
        if stored != json.loads(json.dumps(self.identity)):
            other = f"study {stored.get('study')!r}, version {stored.get('version')}"
            remedy = "move the folder away or choose another `--out`"
            raise StorageError(f"{file} says that its folder holds another run ({other}); {remedy}.")

    @property
    def stage(self) -> Literal["begun", "trained", "finished"]:
        """How far the run has come: nothing is stored for good, the trajectory is, or everything is."""
        adopt(self.path)
        manifest = read_manifest(self.path, remedy=_restore)
        if manifest is None:
            return "begun"
        return "finished" if manifest.complete else "trained"

    def begin(self, preset: str) -> None:
        """Write `config.json`: the first write, so that a folder without permission is noticed before any work."""
        write_json(self.path / CONFIG, {**self.identity, "preset": preset})
        tree = code_identity()["source_tree"]  # the code that runs is that of now, whenever the run ends
        self.log(f"begun: {self.study}, version {self.version}, preset {preset}, seeds {list(self.seeds)}, tree {tree}")

    def save(
        self, trajectory: xr.Dataset, *, device: str, wall_time: float, stamp: Mapping[str, str] | None = None
    ) -> None:
        """Stamp provenance on `trajectory`, this process's if `stamp` is None; write it and the manifest."""
        changed = {"source_changed": "while the run was computed"} if stamp is None and has_changed() else {}
        stamp = {**(stamp or provenance()), **changed, "device": device, "wall_time_s": f"{wall_time:.3f}"}
        write_trajectory(self.path / TRAJECTORY, trajectory.assign_attrs({**_attributes(self.identity), **stamp}))
        _write_stage(self.path, complete=OF_SEEDS in self.identity)

    def log(self, line: str) -> None:
        """Append one line, with the time, to `log.txt`."""
        log(self.path, line)


def log(path: Path, line: str) -> None:
    """Append one line, with the time, to a run's `log.txt`."""
    try:
        with open(path / "log.txt", "a", encoding="utf-8", opener=_open_without_waiting) as file:
            file.write(f"{now()} {line}\n")
    except OSError as cause:
        raise storage_error(path / "log.txt", cause) from None


def _open_without_waiting(name: str, flags: int) -> int:
    """Open a file to write to; a pipe in its place raises an error instead of waiting for a reader."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def check_run(path: Path) -> tuple[Manifest, xr.Dataset]:
    """Check all files of a finished run, and that they belong together; return its manifest and its trajectory.

    Figures may be missing, because they can be drawn again; those that exist are checked.
    """
    manifest = _manifest(path)
    if not manifest.complete:
        remedy = f"`joma judge {path}` completes it"
        raise StorageError(f"{path} is trained but not judged, as it was interrupted or is being judged; {remedy}.")
    missing = [name for name in manifest.files if name.startswith(f"{FIGURES}/") and not exists(path / name)]
    manifest.check({*manifest.files} - {TRAJECTORY, *missing})  # `open_run` checks the trajectory
    return manifest, open_run(path / TRAJECTORY)


def reopen(path: Path) -> None:
    """Mark a run as not judged while its claims and figures are replaced: if the process dies, it is judged again."""
    _write_stage(path, complete=False)


def finish(path: Path, stored: StoredClaims) -> None:
    """Write `claims.json` and the complete manifest, which ends the run; its figures are in place."""
    seconds, description = round(stored.wall_time, 3), asdict(stored.description)
    write_json(path / CLAIMS, {"wall_time_s": seconds, "description": description, "claims": stored.claims})
    stems = {*(stored.description.figures or ()), *([HIGHLIGHT] if stored.description.highlight else [])}
    files = (file for file in list_folder(path / FIGURES) if file.stem in stems and not is_folder(file))
    figures = (f"{FIGURES}/{file.name}" for file in files)
    _write_stage(path, complete=True, results=(CLAIMS, *figures))


def _write_stage(path: Path, *, complete: bool, results: Iterable[str] = ()) -> None:
    """Write the manifest of config and trajectory, and of claims and figures if the run is complete."""
    names = [CONFIG, TRAJECTORY, *results]
    earlier = read_manifest(path, remedy=_restore)
    arrays = {} if earlier else {TRAJECTORY: _large_arrays(path / TRAJECTORY)}
    write_manifest(path, _read_fields(path / CONFIG), names, complete=complete, earlier=earlier, arrays=arrays)


def _large_arrays(file: Path) -> list[tuple[int, int]]:
    """Return where the large arrays lie in a trajectory that was just written, from byte to byte, in order.

    Arrays in chunks and those of text are not among them: to read them, HDF5 follows addresses that lie beside them.
    """
    import h5py

    places = []
    with h5py.File(file, "r") as root:
        for dataset in root.values():
            if isinstance(dataset, h5py.Dataset) and dataset.dtype.kind in "biufc" and dataset.nbytes >= LARGE_ARRAY:
                start = dataset.id.get_offset()  # None unless it is stored in one piece
                places += [] if start is None else [(start, start + dataset.id.get_storage_size())]
    return sorted(places)


def _manifest(path: Path) -> Manifest:
    """Return a run's manifest, or raise an error that says how to get one."""
    manifest = read_manifest(path, remedy=_restore)
    if manifest is None:
        problem = "is missing: the run is not finished, or was written by version 0.1.0"
        remedy = "`joma run` with the same options completes it, or `open_run(path, check=False)` reads it unchecked"
        raise DamagedFile(path / MANIFEST, problem, remedy)
    return manifest


def adopt(path: Path, preset: str | None = None) -> None:
    """Write the manifest of a run that version 0.1.0 finished, which has none; other runs are left as they are.

    Its `claims.json` has the checksum of its trajectory, and the trajectory says what `config.json` must say. Claims
    and figures are not trusted: the run counts as trained, not as judged. Nor is the preset in `config.json`, which
    no checksum covers, if the `preset` that it was run with is known.
    """
    if exists(path / MANIFEST) or not exists(path / CLAIMS):
        return
    fields = read_json(path / CLAIMS)
    stored = fields.get("trajectory_sha256") if isinstance(fields, dict) else None
    file = path / TRAJECTORY
    if stored is None:
        return
    if not exists(file) or file_checksum(file) != stored:
        problem = f"is missing or altered since its claims were measured, or {path / CLAIMS} is"
        raise DamagedFile(file, problem, _restore(file))
    fields = _read_fields(path / CONFIG)
    _check_agreement(path, _load(file), fields)
    if preset is not None and fields.get("preset") != preset:
        write_json(path / CONFIG, {**fields, "preset": preset})
    _write_stage(path, complete=False)


def read_claims(path: Path) -> StoredClaims:
    """Read a finished run's claims, after checking them against its manifest."""
    fields = _checked_fields(_manifest(path), CLAIMS, "claims", "wall_time_s")
    try:
        description = Description(**fields["description"])
        claims = [present_form(claim) for claim in fields["claims"]]
    except (TypeError, KeyError) as cause:
        problem = f"is not what a run writes ({short_reason(cause)})"
        raise DamagedFile(path / CLAIMS, problem, _restore(path / CLAIMS)) from None
    return StoredClaims(claims, description, fields["wall_time_s"])


def earlier_figures(path: Path) -> list[str]:
    """Return the names of a run's figures when it was last judged, if its `claims.json` still says so."""
    try:
        names = read_json(path / CLAIMS)["description"]["figures"]
    except (StorageError, KeyError, TypeError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_config(path: Path) -> dict[str, Any]:
    """Read what a run is: `study`, `version`, `config`, `seeds` and `preset`; it is checked against the manifest."""
    return _checked_fields(_manifest(path), CONFIG, "study", "version", "config", "seeds", "preset")


def _checked_fields(manifest: Manifest, name: str, *names: str) -> dict[str, Any]:
    """Read a JSON object that has at least these fields, from the bytes that are checked against the manifest."""
    return _fields(manifest.folder / name, parse_json(manifest.folder / name, manifest.read(name)), *names)


def _read_fields(file: Path, *names: str) -> dict[str, Any]:
    """Read a JSON object that has at least these fields."""
    return _fields(file, read_json(file), *names)


def _fields(file: Path, fields: Any, *names: str) -> dict[str, Any]:
    """Return the content of a file if it is an object that has at least these fields."""
    if not isinstance(fields, dict):
        raise StorageError(f"{file} is not what a run writes; delete {file.parent} to run it again.")
    if missing := [name for name in names if name not in fields]:
        raise StorageError(f"{file} lacks {', '.join(missing)}; {_restore(file)}.")
    return fields


def _restore(file: Path) -> str:
    """Return what to do about a damaged file of a run: only claims and figures can be written anew without training."""
    if file.name == CLAIMS or file.parent.name == FIGURES:
        return f"restore it, or let `joma judge {file.parents[file.name != CLAIMS]}` write claims and figures anew"
    remedy = f"delete {file.parent} to run it again"
    return remedy if file.parent.parent.name == SHARDS else f"restore it, or {remedy}"


def open_run(path: str | Path, *, check: bool = True) -> xr.Dataset:
    """Open a run's trajectory as a labelled `xarray.Dataset`, wholly in memory.

    Args:
        path: the run's folder, its `trajectory.nc`, or a file that `joma.watch.Recorder` saved.
        check: compare the file with the checksum in its folder's manifest or beside it, and what it says of its run
            with `config.json`. False reads a file that has no checksum, such as one that you wrote yourself.

    Returns:
        The Dataset with dims among `seed, step, time, layer, head, token, …`; attributes are strings, the config is
        one JSON string.
    """
    path = as_path("path", path)
    file = path / TRAJECTORY if is_folder(path) else path
    if not exists(file) and not exists(file.parent / MANIFEST):
        runs = sorted(str(file.parent) for file in path.glob(f"**/{TRAJECTORY}")) if is_folder(path) else []
        hint = f"runs below it: {', '.join(runs)}" if runs else "give the folder of a run, `OUT/<study>/<hash>`"
        raise StorageError(f"no trajectory at {file}; {hint}.")
    if not check:
        return _load(file)
    if _stands_alone(file):
        return _load_recording(file)
    manifest = _manifest(file.parent)
    with manifest.checking(file.name):
        dataset = _load(file)
    if CONFIG in manifest.files:
        manifest.check([CONFIG])
        _check_agreement(file.parent, dataset, manifest.identity)
    return dataset


def _stands_alone(file: Path) -> bool:
    """Return whether a trajectory has its checksum beside it, as a recording has, and not in a manifest."""
    manifest = read_manifest(file.parent, remedy=_restore)
    if manifest is not None and file.name in manifest.files:
        return False
    return file.name != TRAJECTORY or exists(checksum_file(file))


def _load_recording(file: Path) -> xr.Dataset:
    """Read a file that `write_recording` wrote."""
    memory.check(str(file), file_size(file), "open it with xarray, lazily")
    return _load(file, read_checked(file, "restore both, or read it unchecked with `open_run(path, check=False)`"))


def _check_agreement(path: Path, dataset: xr.Dataset, identity: Mapping[str, Any]) -> None:
    """Check that a trajectory, `config.json` and the manifest are of the same run."""
    if _read_fields(path / CONFIG) != dict(identity):
        raise DamagedFile(path / CONFIG, "is of another run than the manifest", _restore(path / CONFIG))
    expected = _attributes({name: value for name, value in identity.items() if name != "preset"})
    for name, text in expected.items():
        stored = dataset.attrs.get(name)
        if stored != text:
            problem = f"is of another run than {CONFIG}: its {name} is {stored!r}, not {text!r}"
            raise DamagedFile(path / TRAJECTORY, problem, _restore(path / TRAJECTORY))


def _attributes(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return what identifies a run as the attributes of its trajectory: netCDF has strings, but no lists or dicts."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in identity.items()}


def _load(file: Path, content: bytes | None = None) -> xr.Dataset:
    """Read a trajectory into memory, from the file or from its content."""
    try:
        _check_contents(file, content)
        with xr.open_dataset(file if content is None else BytesIO(content), engine="h5netcdf") as dataset:
            # Without the encoding, or labels that are joined and written again would be cut to the first one's length.
            return dataset.load().drop_encoding()
    except InputError:
        raise
    except Exception as cause:  # h5py, h5netcdf and xarray each raise their own on a broken file
        problem = f"is no readable trajectory ({short_reason(cause)})"
        raise DamagedFile(file, problem, _restore(file)) from None


def _check_contents(file: Path, content: bytes | None) -> None:
    """Refuse a file that leads to other files, or whose arrays do not fit into memory, before any array is read."""
    import h5py

    sizes: list[int] = []

    def visit(group: h5py.Group) -> None:
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"{name!r} is a link to another place")
            member = group[name]
            if isinstance(member, h5py.Group):
                visit(member)
            elif isinstance(member, h5py.Dataset):
                if member.external or member.is_virtual:
                    raise ValueError(f"{name!r} is stored in another file")
                sizes.append(member.nbytes)

    with h5py.File(file if content is None else BytesIO(content), "r") as root:
        visit(root)
    memory.check(str(file), sum(sizes), "open it with xarray, lazily")


def write_trajectory(path: Path, trajectory: xr.Dataset) -> None:
    """Write a Dataset as netCDF-4, whole or not at all. Attributes must be strings: netCDF has no bools or dicts.

    The file is made in memory: HDF5 would crash the process if the file system refused a write.
    """
    write_bytes(path, trajectory.to_netcdf(engine="h5netcdf"))


def write_recording(path: Path, trajectory: xr.Dataset) -> None:
    """Write a Dataset as netCDF-4 that stands alone, with its checksum beside it."""
    remove_leftovers(path.parent)
    write_checked(path, trajectory.to_netcdf(engine="h5netcdf"))


def find_runs(out: Path, depth: int = 2) -> list[Path]:
    """Return the runs below `out` that are trained, by study and then oldest first; judging a run keeps its age.

    They lie `depth` folders down: two if `out` has all runs, one if those of a study, none if it is itself a run.
    Damaged runs and folders that may not be read are among them; probed models are not.
    """
    return sorted(filter(_is_run, _folders(out, depth)), key=lambda path: (path.parent.name, _modified(path)))


def _folders(out: Path, depth: int) -> list[Path]:
    """Return the folders `depth` levels below `out`, and those on the way that may not be read."""
    if depth == 0:
        return [out]
    try:
        subfolders = [path for path in out.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [out]
    return [folder for subfolder in subfolders for folder in _folders(subfolder, depth - 1)]


def _is_run(path: Path) -> bool:
    """Return whether a folder is that of a run, not of a shard; one that is damaged or may not be read counts too."""
    try:
        manifest = read_manifest(path)
        if manifest is None:
            return exists(path / CLAIMS)
        return OF_SEEDS not in manifest.identity and ("study" in manifest.identity or exists(path / CONFIG))
    except StorageError:
        return True


def _modified(path: Path) -> int:
    """Return when a run was trained, in nanoseconds; 0 if that cannot be known."""
    for name in (TRAJECTORY, CLAIMS, MANIFEST):
        with suppress(OSError):
            return (path / name).stat().st_mtime_ns
    return 0
