"""Join the runs of a sweep: one labelled Dataset with the keys of the grid as dimensions."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from joma import memory
from joma.arguments import InputError
from joma.files import file_size
from joma.runs import TRAJECTORY, open_run
from joma.sweeps.points import Grid
from joma.sweeps.store import Sweep, read_sweep, value_label

UNIT = "unit"  # the dimension of random points
STATISTICS = {"measured": "mean", "measured_min": "min", "measured_max": "max"}  # over seeds
CLAIM_FIELDS = ("kind", "statement", "quantity", "expected")


def open_sweep(path: str | Path, *, variables: Sequence[str] | None = None) -> xr.Dataset:
    """Open the runs of a sweep as one labelled `xarray.Dataset`, wholly in memory.

    The keys of a grid are dimensions, with their values in the order in which they were given; lists are labelled by
    their text. Random points have the dimension `unit`, and the keys are coordinates along it. What units lack is NaN
    ("" for text): those that failed or were not run yet, and labels that only other units have, such as later steps.
    A variable or dimension of the runs that has the name of a key, or of one of the sweep's variables, is renamed to
    `run_<name>`.

    Args:
        path: the folder of the sweep, `OUT/sweeps/<study>/<hash>`.
        variables: which variables of the runs to load, all if None; `()` for the claims alone, which is fast.

    Returns:
        The variables of the runs and, over `claim` and the grid, `measured` (mean over seeds), `measured_min`,
        `measured_max` and `verdict`; over the grid `state` ("finished", "failed" or "missing") and `run`, the folder.
    """
    sweep = read_sweep(path)
    claims = claims_dataset(sweep)
    if variables is not None and not variables:
        return claims
    layout = _Layout.of(sweep)
    trajectories = _trajectories(sweep, taken={*map(str, claims.variables), *claims.dims}, variables=variables)
    return claims.merge(_joined(trajectories, layout), compat="override", join="exact", combine_attrs="override")


@dataclass(frozen=True)
class _Layout:
    """Dimensions, sizes and coordinates of the points of a sweep."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: Mapping[str, Any]

    @classmethod
    def of(cls, sweep: Sweep) -> _Layout:
        plan = sweep.plan
        if isinstance(plan, Grid):
            coordinates = {key: _coordinate(values) for key, values in plan.values.items()}
            return cls(plan.keys, tuple(map(len, plan.values.values())), coordinates)
        along = {key: (UNIT, _coordinate([unit.point[key] for unit in sweep.units])) for key in plan.keys}
        count = len(sweep.units)
        return cls((UNIT,), (count,), {UNIT: np.arange(count), **along})


def _coordinate(values: Sequence[Any]) -> np.ndarray:
    """Return values of a config as labels: numbers and flags as they are, everything else as text."""
    kinds = {type(value) for value in values}
    if kinds <= {int, float} or kinds == {bool}:
        return np.array(values)
    return np.array([value_label(value) for value in values])


def claims_dataset(sweep: Sweep) -> xr.Dataset:
    """Return what was measured of each claim at each point, with its verdict; no trajectory is read."""
    layout = _Layout.of(sweep)
    records = {claim["name"]: claim for stored in sweep.finished.values() for claim in stored.claims}
    row = {name: index for index, name in enumerate(records)}
    size = len(sweep.units)
    states = np.array([sweep.state(unit) for unit in sweep.units])
    numbers = {name: np.full((len(row), size), np.nan) for name in STATISTICS}
    verdicts = np.full((len(row), size), "does not hold")
    verdicts[:] = states
    for column, unit in enumerate(sweep.units):
        for claim in sweep.finished[unit.run].claims if unit.run in sweep.finished else ():
            verdicts[row[claim["name"]], column] = claim["verdict"]
            for name, statistic in STATISTICS.items():
                value = claim["measured"][statistic]
                numbers[name][row[claim["name"]], column] = np.nan if value is None else value
    over_claims = {**numbers, "verdict": verdicts}
    over_points = {"state": states, "run": np.array([str(sweep.run_path(unit)) for unit in sweep.units])}
    data: dict[str, Any] = {
        name: (("claim", *layout.dims), values.reshape(-1, *layout.shape)) for name, values in over_claims.items()
    }
    data |= {name: (layout.dims, values.reshape(layout.shape)) for name, values in over_points.items()}
    about: dict[str, Any] = {
        name: ("claim", np.array([claim[name] for claim in records.values()], dtype=str)) for name in CLAIM_FIELDS
    }
    for bound in ("low", "high"):
        limits = [math.nan if claim[bound] is None else claim[bound] for claim in records.values()]
        about[f"expected_{bound}"] = ("claim", np.array(limits, dtype=np.float64))
    attributes = {name: value for name, value in sweep.content.items() if name != "units"}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in attributes.items()}
    return xr.Dataset(data, {"claim": np.array([*records], dtype=str), **about, **layout.coordinates}, texts)


def _trajectories(sweep: Sweep, *, taken: set[Any], variables: Sequence[str] | None) -> dict[int, xr.Dataset]:
    """Return the chosen variables of the finished runs, by the number of the unit."""
    paths = {index: sweep.run_path(unit) for index, unit in enumerate(sweep.units) if unit.run in sweep.finished}
    size = sum(file_size(path / TRAJECTORY) for path in paths.values())
    memory.check("variables", 2 * size if variables is None else size, "choose fewer variables")
    trajectories = {}
    for index, path in paths.items():
        dataset = open_run(path)
        if variables is not None:
            dataset = dataset[_known(dataset, variables)]
        names = {*dataset.variables, *dataset.dims}
        trajectories[index] = dataset.rename({name: f"run_{name}" for name in names if name in taken})
    return trajectories


def _known(dataset: xr.Dataset, variables: Sequence[str]) -> list[str]:
    """Return the variables, after checking that the run has them."""
    if unknown := [name for name in variables if name not in dataset.variables]:
        known = ", ".join(map(str, dataset.data_vars))
        raise InputError("variables", "variables of the runs", ", ".join(map(repr, unknown)), f"choose among {known}")
    return list(variables)


def _joined(trajectories: Mapping[int, xr.Dataset], layout: _Layout) -> xr.Dataset:
    """Return the variables of all runs, each with the dimensions of the grid before its own."""
    axes = {dim: _Axis.of(dim, list(trajectories.values())) for dim in _dims(trajectories.values())}
    samples = dict(_samples(trajectories))
    shapes = {name: (*layout.shape, *(axes[str(dim)].size for dim in sample.dims)) for name, sample in samples.items()}
    needed = sum(math.prod(shape) * samples[name].dtype.itemsize for name, shape in shapes.items())
    memory.check("variables", needed, "choose fewer variables")
    data: dict[str, Any] = {}
    for name, sample in samples.items():
        members = {index: dataset[name] for index, dataset in trajectories.items() if name in dataset.variables}
        values = _filled(members, shapes[name], layout, [axes[dim] for dim in map(str, sample.dims)])
        data[name] = ((*layout.dims, *sample.dims), values, sample.attrs)
    labels = {dim: axis.labels for dim, axis in axes.items() if axis.has_labels}
    coordinates = {name for dataset in trajectories.values() for name in dataset.coords if name in data}
    return xr.Dataset(data, labels).set_coords(list(coordinates))


def _dims(datasets: Any) -> list[str]:
    return list(dict.fromkeys(str(dim) for dataset in datasets for dim in dataset.dims))


def _samples(trajectories: Mapping[int, xr.Dataset]) -> Iterator[tuple[str, xr.DataArray]]:
    """Yield each variable that is no index, as one run has it; one whose dimensions differ between runs is left out."""
    names = dict.fromkeys(name for dataset in trajectories.values() for name in dataset.variables)
    for name in names:
        members = [dataset[name] for dataset in trajectories.values() if name in dataset.variables]
        if name in members[0].dims:
            continue
        if len({member.dims for member in members}) > 1:
            warnings.warn(f"{name} is left out: its dimensions differ between the runs.", stacklevel=5)
            continue
        yield str(name), members[0]


@dataclass(frozen=True)
class _Axis:
    """The labels of a dimension in all runs together: numbers in order, others as they first appear."""

    name: str
    labels: Any  # an index of xarray
    has_labels: bool

    @property
    def size(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, dim: str, datasets: Sequence[xr.Dataset]) -> _Axis:
        members = [dataset for dataset in datasets if dim in dataset.dims]
        indexes = [member.indexes[dim] for member in members if dim in member.indexes]
        if len(indexes) < len(members) or not all(index.is_unique for index in indexes):
            return cls(dim, range(max(member.sizes[dim] for member in members)), has_labels=False)
        labels = indexes[0]
        for index in indexes[1:]:
            labels = labels if labels.equals(index) else labels.append(index).unique()
        if len(labels) > len(indexes[0]) and labels.dtype.kind in "iuf":
            labels = labels.sort_values()
        return cls(dim, labels, has_labels=True)

    def positions(self, member: xr.DataArray) -> np.ndarray:
        """Return where the labels of a run lie among those of all runs."""
        if not self.has_labels:
            return np.arange(member.sizes[self.name])
        return self.labels.get_indexer(member.indexes[self.name])


def _filled(
    members: Mapping[int, xr.DataArray], shape: tuple[int, ...], layout: _Layout, axes: Sequence[_Axis]
) -> np.ndarray:
    """Return one variable of all runs as one array; where no run has a value it is NaN, or "" for text."""
    dtype = np.result_type(*(member.dtype for member in members.values()))
    is_full = sum(member.size for member in members.values()) == math.prod(shape)
    is_text = dtype.kind in "OUST"
    if is_text:
        values = np.full(shape, "", dtype=object)
    else:
        values = np.full(shape, 0 if is_full else np.nan, dtype if is_full or dtype.kind in "fc" else np.float64)
    for index, member in members.items():
        cell = values[np.unravel_index(index, layout.shape)] if axes else values
        place = np.ix_(*(axis.positions(member) for axis in axes)) if axes else np.unravel_index(index, layout.shape)
        cell[place] = member.values
    return values.astype(str) if is_text else values
