"""Copy finished runs into `docs/runs/` with small trajectories: `python docs/store_runs.py runs/<study>/<hash> …`.

A trajectory is compressed without loss after its large variables are rounded, to 14 binary digits or as many more as it
takes to change nothing that is printed: by the present claims all verdicts, the sentence of what came out, and every
measured value to its printed digits are the same. netCDF's shuffle then makes the bits that are zero cost nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from joma.files import write_bytes
from joma.manifest import write_manifest
from joma.report.table import number
from joma.runs import CONFIG, TRAJECTORY, find_runs, open_run, read_claims, read_config
from joma.studies import load
from joma.study import Study, judge

FOLDER = Path(__file__).with_name("runs")
ROUNDED = "rounded_to_bits"  # the attribute that says which variables are rounded
LAYOUTS = {np.dtype(np.float64): (np.uint64, 52), np.dtype(np.float32): (np.uint32, 23)}
"""Of each type, the integers of its size and its number of binary digits after the leading one."""
BITS = range(14, 48, 2)  # to how many digits a variable may be rounded; 14 leave an error below 1e-4
LARGE = 1 << 14  # bytes; smaller variables are stored as they are


def printed(study: Study, run: xr.Dataset, preset: str) -> list[Any]:
    """Return everything that is printed of a run, as text: verdicts, measured values and what came out."""
    records = [claim.judge(run, preset) for claim in study.claims]
    outcome = study.outcome(run) if study.outcome else ""
    return [outcome, *((record["name"], record["verdict"], record["reason"], *_digits(record)) for record in records)]


def _digits(record: dict[str, Any]) -> Iterable[str]:
    measured = record["measured"]
    yield from (number(measured[name]) for name in ("mean", "sd", "min", "max"))
    yield from (number(value) for value in (*(measured["interval"] or ()), *measured["values"]))


def smaller(study: Study, run: xr.Dataset, preset: str) -> xr.Dataset:
    """Return a run whose large variables have as few significant bits as leave everything that is printed as it is."""
    expected = printed(study, run, preset)
    large = [name for name in run.data_vars if run[name].dtype in LAYOUTS and run[name].nbytes >= LARGE]
    names = sorted(map(str, large), key=lambda name: -run[name].nbytes)
    fewest = _with_bits(run, dict.fromkeys(names, BITS[0]))
    if printed(study, fewest, preset) == expected:
        return fewest
    bits: dict[str, int] = {}
    for name in names:
        _, digits = LAYOUTS[run[name].dtype]
        attempts = ({**bits, name: count} for count in BITS if count < digits)
        same = (attempt for attempt in attempts if printed(study, _with_bits(run, attempt), preset) == expected)
        bits = next(same, bits)
    return _with_bits(run, bits)


def _with_bits(run: xr.Dataset, bits: dict[str, int]) -> xr.Dataset:
    """Return a run with these variables rounded; an attribute has the number of bits of each, earlier ones included."""
    if not bits:
        return run
    variables = {name: run[name].copy(data=rounded(run[name].values, count)) for name, count in bits.items()}
    earlier = json.loads(run.attrs.get(ROUNDED, "{}"))
    fewest = {name: min(count, earlier.get(name, count)) for name, count in bits.items()}
    return run.assign(variables).assign_attrs({ROUNDED: json.dumps({**earlier, **fewest}, sort_keys=True)})


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Return floating-point numbers rounded to `bits` binary digits after the leading one; what is not finite stays.

    >>> rounded(np.array([1 / 3, np.inf]), 3)
    array([0.34375,     inf])
    """
    integer, digits = LAYOUTS[values.dtype]
    dropped, half = integer(digits - bits), integer(1 << (digits - bits - 1))
    integers = np.ascontiguousarray(values).view(integer)
    nearest = (((integers + half) >> dropped) << dropped).view(values.dtype)
    return np.where(np.isfinite(values), nearest, values)


def compressed(run: xr.Dataset) -> bytes:
    """Return a run as the content of a netCDF-4 file whose large variables are compressed without loss, each whole."""
    options = {"zlib": True, "complevel": 9, "shuffle": True}
    large = (name for name, values in run.variables.items() if values.dtype.kind in "biuf" and values.nbytes >= LARGE)
    encoding = {name: {**options, "chunksizes": run[name].shape} for name in large}
    return bytes(run.to_netcdf(engine="h5netcdf", encoding=encoding))


def store(source: Path, folder: Path = FOLDER, study: Study | None = None) -> Path:
    """Write a finished run into `folder`, in place of the earlier run of its study, and return where it is.

    Raises:
        ValueError: the run that would be stored is not judged as its source is; nothing is replaced then.
    """
    identity, run = read_config(source), open_run(source)
    study, preset = study or load(identity["study"]), identity["preset"]
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / study.name / source.name
        copy.mkdir(parents=True)
        shutil.copyfile(source / CONFIG, copy / CONFIG)
        write_bytes(copy / TRAJECTORY, compressed(smaller(study, run, preset)))
        write_manifest(copy, identity, [CONFIG, TRAJECTORY], complete=False)
        judge(study, copy)
        if printed(study, open_run(copy), preset) != printed(study, run, preset):
            raise ValueError(f"{source} would be judged otherwise if it were rounded.")
        for earlier in [path for path in find_runs(folder) if path.parent.name == study.name]:
            shutil.rmtree(earlier)
        shutil.copytree(copy, folder / study.name / source.name)
    return folder / study.name / source.name


def main(sources: list[str]) -> None:
    """Store the named runs and print how large they are."""
    for source in map(Path, sources):
        before = (source / TRAJECTORY).stat().st_size
        path = store(source)
        after, claims = (path / TRAJECTORY).stat().st_size, len(read_claims(path).claims)
        bits = open_run(path).attrs.get(ROUNDED, "none")
        sys.stdout.write(f"{path}: {before:,} to {after:,} bytes, {claims} claims as before; rounded: {bits}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
