"""The page of a probed model or series: the audit, each measure as a figure and a table, and where they come from."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import xarray as xr

from joma.files import DamagedFile, StorageError, exists
from joma.manifest import Manifest, read_manifest
from joma.report import probe_sentences as sentences
from joma.report.probe_figures import (
    HEAD_MEASURES,
    Quantity,
    describe,
    figures,
    head_curves,
    is_single,
    measured_steps,
)
from joma.report.table import number
from joma.runs import FIGURES, open_run

if TYPE_CHECKING:
    from joma.report.probe_figures import Panel
    from joma.watch.series import Fault

Cell = str | tuple[str, str]  # the text of a cell of a table, and a line in small print below it

AUDIT, PAGE = "audit.json", "probe.html"
MAX_DEPTH = 4  # of the folders below DIR in which results are looked for
APART = frozenset([FIGURES, "checkpoints", "measures", "sweeps"])  # subfolders that hold no results of their own
KNOWN = {"entropy": Quantity("attention entropy", "nats"), "sink_mass": Quantity("attention to the first token", "")}
HEADS = {f"head_{measure}": measure for measure in HEAD_MEASURES}  # the figures of head laws
ABOUT = {
    "entropy": "Entropy of the attention weights of each query, mean over all queries of the text.",
    "sink_mass": "Share of the attention weights on the first token, mean over all queries of the text.",
    "stable_rank": "Stable rank ‖W‖²_F / ‖W‖²₂ of the matrix by which each MLP reads its input.",
    "head_drift": "Drift from the laws that gradient flow keeps of each head, W_Q W_Qᵀ − W_K W_Kᵀ and W_V W_Vᵀ − "
    "W_Oᵀ W_O, since the first checkpoint: 0 under the law, 1 where one of the two terms moves alone; dotted: between "
    "terms of different heads, which no law ties to each other.",
    "head_imbalance": "Imbalance of each head: the norm of W_Q W_Qᵀ − W_K W_Kᵀ, and of W_V W_Vᵀ − W_Oᵀ W_O, relative "
    "to those of its two terms; dotted: between terms of different heads.",
    "cosines": "Root mean square cosine between token embeddings and between hidden vectors; 0 is orthogonal, and "
    "the dotted line is what random directions give.",
}


def quantities(data: xr.Dataset) -> dict[str, Quantity]:
    """Return the measures of attention in the data, by layer and head; their labels and units are attributes."""
    names = [str(name) for name, variable in data.data_vars.items() if {*variable.dims} == {"step", "layer", "head"}]
    names = [name for name in names if not name.endswith("_sd")]
    names.sort(key=lambda name: [*KNOWN, name].index(name))  # entropy and sinks first
    return {name: _quantity(name, data[name].attrs) for name in names}


def _quantity(name: str, attributes: Mapping[str, Any]) -> Quantity:
    label, unit = str(attributes.get("long_name", name.replace("_", " "))), str(attributes.get("units", ""))
    return KNOWN.get(name, Quantity(label, "" if unit == "1" else unit))


def draw_figures(data: xr.Dataset) -> Iterator[tuple[str, Sequence[Panel], str]]:
    """Yield the name, the panels and the caption of each figure; names are numbered in their order."""
    for index, (name, panels) in enumerate(figures(data, quantities(data)), 1):
        yield f"{index}-{name}", panels, f"{_about(name, data)} {describe(panels)}"


def _about(name: str, data: xr.Dataset) -> str:
    if name in ABOUT:
        return ABOUT[name]
    label, description = _quantity(name, data[name].attrs).label, data[name].attrs.get("description")
    return f"{label[:1].upper()}{label[1:]}{f', {description}' if description else ''}."


def heading(data: xr.Dataset) -> str:
    """Return the result of a probe in one line: what attention entropy does, or else the stable rank or the cosines."""
    if "entropy" in data and data.entropy.notnull().any():
        return sentences.entropy_heading(data)
    if "stable_rank" in data:
        return sentences.rank_heading(data)
    return sentences.cosine_heading(data)


def section(data: xr.Dataset, faults: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> dict[str, Any]:
    """Return what the templates show of a probe.

    Args:
        data: the measurements, with the attributes that say where they come from.
        faults: the audit, as stored.
        pictures: the figures as data URLs, by their names.
    """
    known = quantities(data)
    parts = []
    for name, _, caption in draw_figures(data):
        variable = name.partition("-")[2]
        parts.append(
            {
                "heading": _heading(variable, data, known),
                "figure": {"name": name, "caption": caption, "image": pictures.get(name)},
                "table": _table(variable, data, known),
            }
        )
    return {
        "title": heading(data),
        "source": str(data.attrs.get("source", "unknown")),
        "extent": _extent(data),
        "note": _note(data),
        "faults": [_fault(fault) for fault in faults],
        "parts": parts,
        "attributes": {key: str(value) for key, value in sorted(data.attrs.items())},
        "checkpoints": list(zip(data.step.values.tolist(), map(str, data.checkpoint.values), strict=True)),
        "unit": data.attrs.get("unit", "step"),
    }


def _extent(data: xr.Dataset) -> str:
    """Return which checkpoints were measured."""
    if is_single(data):
        return f"one model, {data.checkpoint.values[0]}"
    unit, steps = data.attrs.get("unit", "step"), data.step.values
    return f"{len(steps)} checkpoints, {unit} {steps[0]:,} to {steps[-1]:,}"


def _note(data: xr.Dataset) -> str:
    """Return what the heading rests on, in small print."""
    if "entropy" not in data or is_single(data):
        return ""
    if sentences.bounced_layers(data) is None:
        return "A recovery is tested with five checkpoints or more."
    return (
        "A layer recovers where its entropy, the mean over heads, falls by more than noise does and then rises so "
        f"clearly that noise alone would do so with p ≤ {sentences.SIGNIFICANCE:g}; each layer is tested by itself."
    )


def _fault(fault: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": fault["kind"],
        "message": fault["message"],
        "remedy": fault["remedy"],
        "left_out": len(fault["left_out"]),
        "checkpoints": list(fault["checkpoints"]),
    }


def _heading(name: str, data: xr.Dataset, known: Mapping[str, Quantity]) -> str:
    if name in known:
        return sentences.attention_heading(name, data, known[name])
    if name in HEADS:
        return sentences.head_heading(data, HEADS[name])
    return sentences.rank_heading(data) if name == "stable_rank" else sentences.cosine_heading(data)


def _table(name: str, data: xr.Dataset, known: Mapping[str, Quantity]) -> dict[str, Any]:
    if name in known:
        return _attention_table(name, data, known[name])
    if name == "stable_rank":
        rows = {str(weight): data.stable_rank.sel(weight=weight) for weight in data.weight.values}
        return _course_table("matrix", "stable rank", rows)
    if name in HEADS:
        return _head_table(data, HEADS[name])
    rows = {"token embeddings": data.embedding_cosine} if "embedding_cosine" in data else {}
    if "hidden_cosine" in data:
        rows |= {f"hidden vectors, depth {d}": data.hidden_cosine.isel(depth=d) for d in range(data.sizes["depth"])}
    if "embedding_random" in data:
        rows["random directions"] = data.embedding_random
    return _course_table("between", "cosine", rows)


def _course_table(item: str, value: str, curves: Mapping[str, xr.DataArray]) -> dict[str, Any]:
    """Return a table of curves: value and step of start, minimum, maximum and end, or the value of one model."""
    single = all(curve.sizes["step"] == 1 for curve in curves.values())
    columns = ["", item, value] if single else ["", item, "start", "least", "greatest", "end"]
    rows = []
    for index, (name, curve) in enumerate(curves.items()):
        known = curve.dropna("step")
        if not known.size:
            rows.append([str(index), name, *["–"] * (len(columns) - 2)])
            continue
        ends = [_short(float(known[index])) for index in (0, -1)]
        extremes = [_at_step(known, int(find(known.values))) for find in (np.argmin, np.argmax)]
        rows.append([str(index), name, *(ends[1:] if single else (ends[0], *extremes, ends[1]))])
    return {"columns": columns, "rows": rows, "note": ""}


def _at_step(curve: xr.DataArray, index: int) -> tuple[str, str]:
    return _short(float(curve[index])), f"at {int(curve.step[index]):,}"


def _attention_table(name: str, data: xr.Dataset, quantity: Quantity) -> dict[str, Any]:
    """Return a table of layers: mean ± standard deviation over heads and their range, at the start and at the end."""
    variable = measured_steps(data[name])
    single = variable.sizes["step"] == 1
    spread = data.get(f"{name}_sd")
    course = ["start", "least mean", "greatest mean", "end"]
    columns = ["", "layer", "heads", *([quantity.axis] if single else course)]
    columns += ["over sequences"] * (spread is not None)
    tested = name == "entropy" and not single and "bounce_p_value" in data
    columns += ["p (noise alone)"] * tested
    rows = []
    for index, layer in enumerate(map(str, data.layer.values)):
        values = variable.isel(layer=index)
        known = values.dropna("step", how="all")
        row: list[Cell] = [str(index), layer, str(int(values.notnull().any("step").sum()))]
        if known.sizes["step"]:
            mean = known.mean("head")
            extremes = [_at_step(mean, int(find(mean.values))) for find in (np.argmin, np.argmax)]
            row += [] if single else [_spread(known.isel(step=0)), *extremes]
            row += [_spread(known.isel(step=-1))]
            row += [] if spread is None else [_mean_sd(spread.isel(layer=index).sel(step=int(known.step[-1])))]
        else:
            row += ["–"] * (len(columns) - 3 - tested)
        row += [number(_finite(data.bounce_p_value.isel(layer=index)))] if tested else []
        rows.append(row)
    note = "Mean ± standard deviation over heads; below it the least and the greatest head."
    note += " Over sequences: standard deviation of the sequences' means, mean over heads." * (spread is not None)
    return {"columns": columns, "rows": rows, "note": note}


def _head_table(data: xr.Dataset, measure: str) -> dict[str, Any]:
    """Return a table of attention modules: the last measure of either head law, and that between different heads."""
    laws = list(head_curves(data, measure))
    columns = ["", "attention", "key heads"]
    for label, _, _ in laws:
        columns += [f"{HEAD_MEASURES[measure]}, {label}", "between different heads"]
    rows = []
    for index, module in enumerate(map(str, data.module.values)):
        count = max(int(values.isel(layer=index).notnull().any("step").sum()) for _, values, _ in laws)
        row: list[Cell] = [str(index), module, str(count)]
        for _, values, others in laws:
            known, chance = (part.isel(layer=index).dropna("step", how="all") for part in (values, others))
            row.append(_spread(known.isel(step=-1)) if known.sizes["step"] else "–")
            row.append(_short(float(chance.isel(step=-1).mean())) if chance.sizes["step"] else "–")
        rows.append(row)
    note = "Mean ± standard deviation over key heads; below it the least and the greatest head."
    return {"columns": columns, "rows": rows, "note": note}


def _finite(value: xr.DataArray) -> float | None:
    return float(value) if np.isfinite(float(value)) else None


def _mean_sd(spread: xr.DataArray) -> str:
    value = _finite(spread.mean())
    return "–" if value is None else f"± {_short(value)}"


def _spread(values: xr.DataArray) -> str | tuple[str, str]:
    """Return mean ± standard deviation over heads, and below it the least and the greatest head."""
    known = values.dropna("head").values
    if len(known) == 1:
        return _short(float(known[0]))
    mean, sd, low, high = (
        _short(float(value)) for value in (known.mean(), known.std(ddof=1), known.min(), known.max())
    )
    return f"{mean} ± {sd}", f"{low} to {high}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def data_url(picture: bytes) -> str:
    """Return an SVG picture as a URL that contains it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode('ascii')}"


def environment() -> jinja2.Environment:
    """Return the templates of the reports, which escape whatever is put into them."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def render(
    data: xr.Dataset, faults: Sequence[Fault], pictures: Mapping[str, bytes], files: Mapping[str, tuple[int, str]]
) -> str:
    """Return the page of a probe.

    Args:
        data: the measurements, with provenance as attributes.
        faults: the audit.
        pictures: the figures as SVG, by their names.
        files: size and SHA-256 of the files beside the page.
    """
    urls = {name: data_url(picture) for name, picture in pictures.items()}
    content = section(data, [asdict(fault) for fault in faults], urls) | {"files": files}
    return environment().get_template("probe.html").render(probe=content)


def find_probes(out: Path, excluded: Sequence[Path] = ()) -> list[Path]:
    """Return the folders with results of a probe below `out`, sorted, whether they are intact or not."""
    folders = []
    for place, subfolders, _ in os.walk(out):
        folder = Path(place)
        depth = len(folder.relative_to(out).parts)
        subfolders[:] = sorted(name for name in subfolders if name not in APART and depth < MAX_DEPTH)
        if folder not in excluded and _is_probe(folder):
            folders.append(folder)
    return sorted(folders)


def _is_probe(folder: Path) -> bool:
    """Return whether a folder holds results of a probe; one whose manifest is damaged is judged by its files."""
    try:
        manifest = read_manifest(folder)
    except StorageError:
        return exists(folder / AUDIT)
    return manifest is not None and "source" in manifest.identity and "study" not in manifest.identity


def read_probe(folder: Path) -> dict[str, Any]:
    """Return what the templates show of a stored probe, all of it checked against its manifest."""
    remedy = "run `joma probe` again"
    manifest = read_manifest(folder, remedy=remedy)
    if manifest is None or not manifest.complete:
        raise DamagedFile(folder, "was being probed when its writer was stopped, or is being probed now", remedy)
    manifest.check()
    data = open_run(folder)
    faults = json.loads(manifest.read(AUDIT))
    files = {name: (entry.size, entry.sha256) for name, entry in manifest.files.items()}
    return section(data, faults, _pictures(manifest)) | {"files": files, "path": folder}


def _pictures(manifest: Manifest) -> dict[str, str]:
    names = [name for name in manifest.files if name.startswith(f"{FIGURES}/") and name.endswith(".svg")]
    return {Path(name).stem: data_url(manifest.read(name)) for name in names}
