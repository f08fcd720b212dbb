"""The tables of a probed model or series, as `joma probe` shows them, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from joma.drawing import clear as clear_figures
from joma.drawing import evenly_spaced
from joma.drawing import save as save_figure
from joma.files import remove_leftovers, write_json, write_text
from joma.manifest import file_checksum, write_manifest
from joma.report.probe_figures import Quantity, draw, head_curves, head_measure, is_single
from joma.report.probe_page import AUDIT, PAGE, draw_figures, quantities, render
from joma.report.table import grid, number
from joma.runs import FIGURES, TRAJECTORY, write_trajectory
from joma.stamp import provenance

if TYPE_CHECKING:
    from rich.table import Table

    from joma.watch.series import Fault

HEADINGS = {
    "step": "at step",
    "p_value": "p (noise alone)",
    "least_head": "least head",
    "greatest_head": "greatest head",
}
GAPS = 8  # steps that are named in the note of a table


def tables(data: xr.Dataset, faults: Sequence[Fault]) -> Iterator[Table]:
    """Yield a table of the faults, then tables of layers, weights, heads and cosines; none for what is not measured."""
    if faults:
        rows = ((fault.kind, str(fault), str(len(fault.left_out))) for fault in faults)
        yield grid("Audit", ("fault", "what, and what to do", "left out"), rows)
    measures = [(_title(name, quantity), name, layers(data, name)) for name, quantity in quantities(data).items()]
    contents = (
        *measures,
        ("Stable rank of the MLP's lower matrices", "stable_rank", weights(data)),
        ("Head laws, at the end", f"value_output_{head_measure(data)}", heads(data)),
        ("Root mean square cosine", "hidden_cosine", cosines(data)),
    )
    for title, variable, records in contents:
        if records:
            columns = [HEADINGS.get(key, key) for key in records[0]]
            rows = ([_cell(value) for value in record.values()] for record in records)
            yield grid(title, columns, rows, _gaps(data, variable))


def _gaps(data: xr.Dataset, variable: str) -> str:
    """Return a note on the steps at which a variable was not measured: an end before the last step must not hide it."""
    steps = missing_steps(data).get(variable, [])
    shown = ", ".join(map(str, steps[:GAPS])) + (f" and {len(steps) - GAPS} more" if len(steps) > GAPS else "")
    what = "hidden vectors not measured" if variable == "hidden_cosine" else "not measured"
    return f"{what} at step{'s' * (len(steps) > 1)} {shown}" if steps else ""


def missing_steps(data: xr.Dataset) -> dict[str, list[int]]:
    """Return the steps at which a variable has no value, for each variable that has any."""
    gaps = {}
    for name, variable in data.data_vars.items():
        if "step" in variable.dims:
            missing = variable.isnull().all([dim for dim in variable.dims if dim != "step"])
            gaps[str(name)] = data.step.values[missing.values].tolist()
            if "module" in variable.dims:  # a law that does not exist is no gap, nor is the step that drift starts from
                expected = data.step.values[1:] if "_drift" in str(name) else data.step.values
                gaps[str(name)] = [] if missing.all() else [step for step in gaps[str(name)] if step in expected]
    return {name: steps for name, steps in gaps.items() if steps}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value if np.isfinite(value) else None)
    return str(value)


def _title(name: str, quantity: Quantity) -> str:
    return "Entropy of attention / nats" if name == "entropy" else quantity.axis[:1].upper() + quantity.axis[1:]


def layers(data: xr.Dataset, name: str = "entropy") -> list[dict[str, Any]]:
    """Return a record per layer: the course of a measure of attention, or for one model that of its heads.

    For the entropy there are also its recovery and the p-value of noise.
    """
    records = []
    for layer in data.layer.values if name in data else ():
        values = data[name].sel(layer=layer)
        record = {"layer": str(layer), "heads": int(values.notnull().any("step").sum())}
        if is_single(data):
            least, greatest = float(values.min()), float(values.max())
            record |= {"mean": float(values.mean()), "least_head": least, "greatest_head": greatest}
        else:
            record |= _course(values.mean("head"), greatest=name != "entropy")
            if name == "entropy":
                p_value = float(data.bounce_p_value.sel(layer=layer))
                record |= {"recovery": record["end"] - record["least"], "p_value": p_value}
        records.append(record)
    return records


def weights(data: xr.Dataset) -> list[dict[str, Any]]:
    """Return a record for each lower matrix: the course of its stable rank."""
    if "stable_rank" not in data:
        return []
    ranks = {str(name): data.stable_rank.sel(weight=name) for name in data.weight.values}
    if is_single(data):
        return [{"weight": name, "stable rank": float(rank[0])} for name, rank in ranks.items()]
    return [{"weight": name, **_course(rank)} for name, rank in ranks.items()]


def heads(data: xr.Dataset) -> list[dict[str, Any]]:
    """Return a record for each attention module: how far its heads are from either law, and different heads too.

    Of a series it is the drift since the first checkpoint, of one model the imbalance; each time the last value.
    """
    measure = head_measure(data)
    if measure is None:
        return []
    records = []
    for index, module in enumerate(map(str, data.module.values)):
        record: dict[str, Any] = {"attention": module, "measure": measure}
        for label, values, others in head_curves(data, measure):
            for name, part in ((label, values), (f"{label} of different heads", others)):
                known = part.isel(layer=index).mean("head").dropna("step")
                record[name] = float(known[-1]) if known.size else float("nan")
        records.append(record)
    return records


def cosines(data: xr.Dataset) -> list[dict[str, Any]]:
    """Return records of embeddings and of hidden vectors at a few depths, each beside that of random directions."""
    curves = {"token embeddings": data.embedding_cosine} if "embedding_cosine" in data else {}
    if "hidden_cosine" in data:
        for depth in evenly_spaced(data.sizes["depth"], 4):
            curves[f"hidden vectors at depth {depth}"] = data.hidden_cosine.isel(depth=depth)
    random = float(data.embedding_random.max()) if "embedding_random" in data else float("nan")
    records = []
    for name, curve in curves.items():
        course = _course(curve)
        values = {"cosine": course["end"]} if is_single(data) else {key: course[key] for key in ("start", "end")}
        records.append({"between": name, **values, "random directions": random})
    return records


def _course(curve: xr.DataArray, *, greatest: bool = False) -> dict[str, Any]:
    """Return the value of a curve at the start, at its minimum and at the end, and the step of the minimum.

    With `greatest` the greatest value stands before that at the end.
    """
    measured = curve.dropna("step")
    if not measured.size:
        start = least = most = end = np.nan
        step: int | str = "–"
    else:
        minimum = measured.isel(step=int(np.argmin(measured.values)))
        start, least, end = float(measured[0]), float(minimum), float(measured[-1])
        most, step = float(measured.max()), int(minimum.step)
    return {"start": start, "least": least, "step": step, **({"greatest": most} if greatest else {}), "end": end}


def summary(data: xr.Dataset) -> dict[str, Any]:
    """Return the tables as data, for `--json`."""
    content: dict[str, Any] = {
        "source": data.attrs["source"],
        "steps": data.step.values.tolist(),
        "checkpoints": data.checkpoint.values.tolist(),
        "entropy": layers(data),
        "measures": {name: layers(data, name) for name in quantities(data) if name != "entropy"},
        "stable_rank": weights(data),
        "heads": heads(data),
        "cosines": cosines(data),
        "missing_steps": missing_steps(data),
    }
    return _without_nan(content)


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def save(data: xr.Dataset, faults: Sequence[Fault], folder: Path) -> Path:
    """Write `trajectory.nc`, `audit.json`, the figures and their page into `folder`, each whole; return the page.

    First comes a manifest that lists no file, and last the one of all: if the process dies, a mixture of old and new
    files is not taken for a result, nor for a damaged one.
    """
    identity = {"source": data.attrs["source"]}
    data = data.assign_attrs(provenance())
    remove_leftovers(folder, deep=True)
    write_manifest(folder, identity, (), complete=False)
    write_json(folder / AUDIT, [asdict(fault) for fault in faults])
    write_trajectory(folder / TRAJECTORY, data)
    names, pictures = [TRAJECTORY, AUDIT], {}
    for name, panels, caption in draw_figures(data):
        files = save_figure(draw(panels), folder / FIGURES / name, caption=caption)
        names += [f"{FIGURES}/{file.name}" for file in files]
        pictures[name] = (folder / FIGURES / f"{name}.svg").read_bytes()
    clear_figures(folder / FIGURES, keep=list(pictures))
    contents = {name: ((folder / name).stat().st_size, file_checksum(folder / name)) for name in names}
    write_text(folder / PAGE, render(data, faults, pictures, contents))
    write_manifest(folder, identity, [*names, PAGE])
    return folder / PAGE
