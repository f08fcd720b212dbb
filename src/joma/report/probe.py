"""A probed model or series as tables and as a figure: what `joma probe` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.files import write_json
from joma.report.figure import canvas, evenly_spaced, letters, marker, series, style
from joma.report.figure import save as save_figure
from joma.report.table import grid, number
from joma.runs import TRAJECTORY, provenance, write_trajectory

if TYPE_CHECKING:
    from rich.table import Table

    from joma.watch.series import Fault

HEADINGS = {
    "step": "at step",
    "p_value": "p (noise alone)",
    "least_head": "least head",
    "greatest_head": "greatest head",
}
SHOWN = 6  # layers that are drawn as curves, evenly spaced
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
    """What is wrong with the series, then its layers and its weights."""
    if faults:
        rows = ((fault.kind, f"{fault.message}; {fault.remedy}.", str(len(fault.left_out))) for fault in faults)
        yield grid("Audit", ("fault", "what, and what to do", "left out"), rows)
    found = {
        "Entropy of attention / nats": layers(data),
        "Stable rank of the MLP's lower matrices": weights(data),
        "Root mean square cosine": cosines(data),
    }
    for title, rows in found.items():
        if rows:
            columns = [HEADINGS.get(key, key) for key in rows[0]]
            yield grid(title, columns, ([_cell(value) for value in row.values()] for row in rows))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value if np.isfinite(value) else None)
    return str(value)


def layers(data: xr.Dataset) -> list[dict[str, Any]]:
    """For each layer the course of its entropy and the chance under the null of no bounce; for one model, its heads."""
    found = []
    for layer in data.layer.values if "entropy" in data else ():
        own = data.entropy.sel(layer=layer)
        row = {"layer": str(layer), "heads": int(own.notnull().any("step").sum())}
        if _alone(data):
            row |= {"mean": float(own.mean()), "least_head": float(own.min()), "greatest_head": float(own.max())}
        else:
            course = _course(own.mean("head"))
            chance = float(data.bounce_p_value.sel(layer=layer))
            row |= {**course, "recovery": course["end"] - course["least"], "p_value": chance}
        found.append(row)
    return found


def weights(data: xr.Dataset) -> list[dict[str, Any]]:
    """For each lower matrix the course of its stable rank."""
    if "stable_rank" not in data:
        return []
    ranks = {str(name): data.stable_rank.sel(weight=name) for name in data.weight.values}
    if _alone(data):
        return [{"weight": name, "stable rank": float(values[0])} for name, values in ranks.items()]
    return [{"weight": name, **_course(values)} for name, values in ranks.items()]


def cosines(data: xr.Dataset) -> list[dict[str, Any]]:
    """Embeddings, and hidden vectors at a few depths, at the start and the end, beside random directions."""
    curves = {"token embeddings": data.embedding_cosine} if "embedding_cosine" in data else {}
    if "hidden_cosine" in data:
        for depth in evenly_spaced(data.sizes["depth"], 4):
            curves[f"hidden vectors at depth {depth}"] = data.hidden_cosine.isel(depth=depth)
    random = float(data.embedding_random.max()) if "embedding_random" in data else float("nan")
    found = []
    for name, curve in curves.items():
        course = _course(curve)
        values = {"cosine": course["end"]} if _alone(data) else {key: course[key] for key in ("start", "end")}
        found.append({"between": name, **values, "random directions": random})
    return found


def _alone(data: xr.Dataset) -> bool:
    return data.sizes["step"] == 1


def _course(curve: xr.DataArray) -> dict[str, Any]:
    there = curve.dropna("step")
    if not there.size:
        return {"start": np.nan, "least": np.nan, "step": "–", "end": np.nan}
    lowest = there.isel(step=int(np.argmin(there.values)))
    return {"start": float(there[0]), "least": float(lowest), "step": int(lowest.step), "end": float(there[-1])}


def summary(data: xr.Dataset) -> dict[str, Any]:
    """The tables as data, for `--json`."""
    found: dict[str, Any] = {
        "source": data.attrs["source"],
        "steps": data.step.values.tolist(),
        "checkpoints": data.checkpoint.values.tolist(),
        "entropy": layers(data),
        "stable_rank": weights(data),
        "cosines": cosines(data),
    }
    return _jsonable(found)


def _jsonable(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _jsonable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_jsonable(one) for one in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def save(data: xr.Dataset, faults: Sequence[Fault], folder: Path) -> None:
    """Write `trajectory.nc`, `audit.json` and the figure into `folder`, each whole."""
    write_json(folder / "audit.json", [asdict(fault) for fault in faults])
    write_trajectory(folder / TRAJECTORY, data.assign_attrs(provenance()))
    with style():
        figure = draw(data)
    save_figure(figure, folder / "figures" / "1-probe", caption=CAPTION_OF_ONE if _alone(data) else CAPTION)


def draw(data: xr.Dataset) -> Figure:
    """Draw what was measured, over the steps or, for one model, over its layers."""
    panels = [panel for panel in (_entropy, _ranks, _directions, _heads) if panel.__name__ in _drawable(data)]
    figure, axes = canvas(1, len(panels), width=3.5, height=2.9)
    for axis, panel in zip(axes[0], panels, strict=True):
        panel(axis, data)
    letters(axes)
    return figure


def _drawable(data: xr.Dataset) -> set[str]:
    several = not _alone(data)
    found = {"_ranks"} if "stable_rank" in data else set()
    if "entropy" in data:
        found |= {"_heads", "_entropy"} if several else {"_heads"}
    if "hidden_cosine" in data or "embedding_cosine" in data:
        found |= {"_directions"}
    return found


def _over_steps(axes: Axes, data: xr.Dataset, curves: Sequence[tuple[str, xr.DataArray]]) -> None:
    for place, (label, curve) in enumerate(curves):
        look = {**series(place), "marker": marker(place)["marker"], "markersize": 3, "markerfacecolor": "white"}
        axes.plot(data.step.values + 1, curve.values, label=label, **look)
    axes.set(xscale="log", xlabel="step + 1")
    axes.margins(y=0.25 if len(curves) > 4 else 0.12)  # room for the legend
    axes.legend(ncols=2 if len(curves) > 4 else 1)


def _entropy(axes: Axes, data: xr.Dataset) -> None:
    mean = data.entropy.mean("head")
    places = evenly_spaced(data.sizes["layer"], SHOWN)
    _over_steps(axes, data, [(f"layer {place}", mean.isel(layer=place)) for place in places])
    axes.set(ylabel="entropy / nats", title="Attention, mean over heads")


def _ranks(axes: Axes, data: xr.Dataset) -> None:
    ranks = data.stable_rank
    axes.set(ylabel="stable rank", title="Lower matrix of the MLP")
    if not _alone(data):
        places = evenly_spaced(data.sizes["weight"], SHOWN)
        _over_steps(axes, data, [(f"matrix {place}", ranks.isel(weight=place)) for place in places])
        return
    axes.plot(np.arange(data.sizes["weight"]), ranks.isel(step=0), **{**marker(0), "linestyle": "-"})
    axes.set(xlabel="matrix, from the first layer on", xticks=evenly_spaced(data.sizes["weight"], 8))


def _directions(axes: Axes, data: xr.Dataset) -> None:
    axes.set(ylabel="root mean square cosine", title="Orthogonality")
    if not _alone(data):
        curves = [("embeddings", data.embedding_cosine)] if "embedding_cosine" in data else []
        if "hidden_cosine" in data:
            places = evenly_spaced(data.sizes["depth"], 3)
            curves += [(f"hidden, depth {place}", data.hidden_cosine.isel(depth=place)) for place in places]
        _over_steps(axes, data, curves)
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


def _heads(axes: Axes, data: xr.Dataset) -> None:
    last = data.entropy.dropna("step", how="all").isel(step=-1)
    image = axes.imshow(last.values, cmap="viridis", aspect="auto", vmin=0)
    axes.grid(visible=False)
    when = "" if _alone(data) else f", step {int(last.step)}"
    axes.set(xlabel="head", ylabel="layer", title=f"Entropy / nats{when}")
    axes.set_xticks(evenly_spaced(last.sizes["head"], 8))
    axes.set_yticks(evenly_spaced(last.sizes["layer"], 8))
    axes.figure.colorbar(image, ax=axes)
