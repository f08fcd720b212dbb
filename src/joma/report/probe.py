"""The tables and the figure of a probed model or series, as `joma probe` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import canvas, evenly_spaced, letters, marker, series, style
from joma.drawing import save as save_figure
from joma.files import remove_leftovers, write_json
from joma.manifest import write_manifest
from joma.report.table import grid, number
from joma.runs import FIGURES, TRAJECTORY, write_trajectory
from joma.stamp import provenance

if TYPE_CHECKING:
    from rich.table import Table

    from joma.watch.series import Fault

AUDIT = "audit.json"
HEADINGS = {
    "step": "at step",
    "p_value": "p (noise alone)",
    "least_head": "least head",
    "greatest_head": "greatest head",
}
SHOWN = 6  # layers drawn as curves, evenly spaced
GAPS = 8  # steps that are named in the note of a table
CAPTION = (
    "A series of checkpoints over training (step 0 stands at 1). Entropy of attention, mean over heads and rows, and "
    "stable rank of the lower matrix of the MLP, for layers evenly spaced from the first to the last; root mean square "
    "cosine between token embeddings and between hidden vectors, dotted what random directions would give; entropy of "
    "each head at the last step."
)
CAPTION_OF_ONE = (
    "One model. Entropy of attention of each head, stable rank of the lower matrix of each MLP, and root mean square "
    "cosine between hidden vectors at each depth, dotted what random directions would give."
)


def tables(data: xr.Dataset, faults: Sequence[Fault]) -> Iterator[Table]:
    """Yield a table of the faults, then tables of layers, weights and cosines; none for what was not measured."""
    if faults:
        rows = ((fault.kind, str(fault), str(len(fault.left_out))) for fault in faults)
        yield grid("Audit", ("fault", "what, and what to do", "left out"), rows)
    contents = (
        ("Entropy of attention / nats", "entropy", layers(data)),
        ("Stable rank of the MLP's lower matrices", "stable_rank", weights(data)),
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
    return {name: steps for name, steps in gaps.items() if steps}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value if np.isfinite(value) else None)
    return str(value)


def layers(data: xr.Dataset) -> list[dict[str, Any]]:
    """Return a record per layer: the course of its entropy and the p-value of noise, or for one model its heads."""
    records = []
    for layer in data.layer.values if "entropy" in data else ():
        entropy = data.entropy.sel(layer=layer)
        record = {"layer": str(layer), "heads": int(entropy.notnull().any("step").sum())}
        if _is_single(data):
            least, greatest = float(entropy.min()), float(entropy.max())
            record |= {"mean": float(entropy.mean()), "least_head": least, "greatest_head": greatest}
        else:
            course = _course(entropy.mean("head"))
            p_value = float(data.bounce_p_value.sel(layer=layer))
            record |= {**course, "recovery": course["end"] - course["least"], "p_value": p_value}
        records.append(record)
    return records


def weights(data: xr.Dataset) -> list[dict[str, Any]]:
    """Return a record for each lower matrix: the course of its stable rank."""
    if "stable_rank" not in data:
        return []
    ranks = {str(name): data.stable_rank.sel(weight=name) for name in data.weight.values}
    if _is_single(data):
        return [{"weight": name, "stable rank": float(rank[0])} for name, rank in ranks.items()]
    return [{"weight": name, **_course(rank)} for name, rank in ranks.items()]


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
        values = {"cosine": course["end"]} if _is_single(data) else {key: course[key] for key in ("start", "end")}
        records.append({"between": name, **values, "random directions": random})
    return records


def _is_single(data: xr.Dataset) -> bool:
    """Return whether the data are of one model, not of a series."""
    return data.sizes["step"] == 1


def _course(curve: xr.DataArray) -> dict[str, Any]:
    """Return the value of a curve at the start, at its minimum and at the end, and the step of the minimum."""
    measured = curve.dropna("step")
    if not measured.size:
        return {"start": np.nan, "least": np.nan, "step": "–", "end": np.nan}
    minimum = measured.isel(step=int(np.argmin(measured.values)))
    start, end = float(measured[0]), float(measured[-1])
    return {"start": start, "least": float(minimum), "step": int(minimum.step), "end": end}


def summary(data: xr.Dataset) -> dict[str, Any]:
    """Return the tables as data, for `--json`."""
    content: dict[str, Any] = {
        "source": data.attrs["source"],
        "steps": data.step.values.tolist(),
        "checkpoints": data.checkpoint.values.tolist(),
        "entropy": layers(data),
        "stable_rank": weights(data),
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


def save(data: xr.Dataset, faults: Sequence[Fault], folder: Path) -> None:
    """Write `trajectory.nc`, `audit.json` and the figure into `folder`, each whole, and last their manifest.

    Before them comes a manifest that lists no file: if the process dies, a mixture of old and new files is not taken
    for a result, nor for a damaged one.
    """
    identity = {"source": data.attrs["source"]}
    remove_leftovers(folder, deep=True)
    write_manifest(folder, identity, (), complete=False)
    write_json(folder / AUDIT, [asdict(fault) for fault in faults])
    write_trajectory(folder / TRAJECTORY, data.assign_attrs(provenance()))
    with style():
        figure = draw(data)
    files = save_figure(figure, folder / FIGURES / "1-probe", caption=CAPTION_OF_ONE if _is_single(data) else CAPTION)
    names = [TRAJECTORY, AUDIT, *(f"{FIGURES}/{file.name}" for file in files)]
    write_manifest(folder, identity, names)


def draw(data: xr.Dataset) -> Figure:
    """Draw what was measured: over the steps of a series, or over the layers of one model."""
    panels = _panels(data)
    figure, axes = canvas(1, len(panels), width=3.5, height=2.9)
    for axis, draw_panel in zip(axes[0], panels, strict=True):
        draw_panel(axis, data)
    letters(axes)
    return figure


def _panels(data: xr.Dataset) -> list[Callable[[Axes, xr.Dataset], None]]:
    """Return the functions that draw a panel each, for what was measured."""
    panels: list[Callable[[Axes, xr.Dataset], None]] = []
    if "entropy" in data and not _is_single(data):
        panels.append(_draw_entropy)
    if "stable_rank" in data:
        panels.append(_draw_ranks)
    if "hidden_cosine" in data or "embedding_cosine" in data:
        panels.append(_draw_cosines)
    if "entropy" in data:
        panels.append(_draw_heads)
    return panels


def _draw_over_steps(axes: Axes, data: xr.Dataset, curves: Sequence[tuple[str, xr.DataArray]]) -> None:
    """Draw labelled curves over step + 1, so that a logarithmic axis can show step 0."""
    for index, (label, curve) in enumerate(curves):
        appearance = {**series(index), "marker": marker(index)["marker"], "markersize": 3, "markerfacecolor": "white"}
        axes.plot(data.step.values + 1, curve.values, label=label, **appearance)
    axes.set(xscale="log", xlabel="step + 1")
    axes.margins(y=0.25 if len(curves) > 4 else 0.12)  # room for the legend
    axes.legend(ncols=2 if len(curves) > 4 else 1)


def _draw_entropy(axes: Axes, data: xr.Dataset) -> None:
    mean = data.entropy.mean("head")
    shown = evenly_spaced(data.sizes["layer"], SHOWN)
    _draw_over_steps(axes, data, [(f"layer {layer}", mean.isel(layer=layer)) for layer in shown])
    axes.set(ylabel="entropy / nats", title="Attention, mean over heads")


def _draw_ranks(axes: Axes, data: xr.Dataset) -> None:
    ranks = data.stable_rank
    axes.set(ylabel="stable rank", title="Lower matrix of the MLP")
    if not _is_single(data):
        shown = evenly_spaced(data.sizes["weight"], SHOWN)
        _draw_over_steps(axes, data, [(f"matrix {matrix}", ranks.isel(weight=matrix)) for matrix in shown])
        return
    axes.plot(np.arange(data.sizes["weight"]), ranks.isel(step=0), **{**marker(0), "linestyle": "-"})
    axes.set(xlabel="matrix, from the first layer on", xticks=evenly_spaced(data.sizes["weight"], 8))


def _draw_cosines(axes: Axes, data: xr.Dataset) -> None:
    axes.set(ylabel="root mean square cosine", title="Orthogonality")
    if not _is_single(data):
        curves = [("embeddings", data.embedding_cosine)] if "embedding_cosine" in data else []
        if "hidden_cosine" in data:
            shown = evenly_spaced(data.sizes["depth"], 3)
            curves += [(f"hidden, depth {depth}", data.hidden_cosine.isel(depth=depth)) for depth in shown]
        _draw_over_steps(axes, data, curves)
    elif "hidden_cosine" in data:
        values = data.hidden_cosine.isel(step=0)
        axes.plot(np.arange(values.size), values, **{**marker(0), "linestyle": "-"})
        axes.set(xlabel="depth", xticks=evenly_spaced(values.size, 8))
    else:
        axes.plot(0, data.embedding_cosine.isel(step=0), **marker(0))
        axes.set_xticks([0], ["token embeddings"])
    if "embedding_random" in data:
        axes.axhline(float(data.embedding_random.max()), color="grey", linestyle=":", linewidth=1)
    axes.set(ylim=(0, 1.3 * axes.get_ylim()[1]), yticks=np.linspace(0, 1, 6))


def _draw_heads(axes: Axes, data: xr.Dataset) -> None:
    last = data.entropy.dropna("step", how="all").isel(step=-1)
    image = axes.imshow(last.values, cmap="viridis", aspect="auto", vmin=0)
    axes.grid(visible=False)
    step = "" if _is_single(data) else f", step {int(last.step)}"
    axes.set(xlabel="head", ylabel="layer", title=f"Entropy / nats{step}")
    axes.set_xticks(evenly_spaced(last.sizes["head"], 8))
    axes.set_yticks(evenly_spaced(last.sizes["layer"], 8))
    axes.figure.colorbar(image, ax=axes)
