"""The figure of a sweep: the measured value of one claim over the grid, beside what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from joma.arguments import InputError, choice
from joma.drawing import COLOURS, canvas, evenly_spaced, marker, style
from joma.sweeps.joined import UNIT

MAX_PANELS = 6
MAX_TICKS = 16  # labels of an axis
MAX_TEXTS = 150  # cells of a heat map with their number in them
LOG_RATIO = 50.0  # numbers that are all positive and span more are drawn on a logarithmic axis
TESTED = ("holds", "does not hold")
# How points are drawn by their verdict: markers differ, as in black and white.
APPEARANCE = {"holds": ("o", "white"), "does not hold": ("X", None), "not tested": (".", None)}


def default_claim(data: xr.Dataset) -> str | None:
    """Return the first claim whose verdict changes over the grid, or else that is tested, or else has a number."""
    is_finite = np.isfinite(data.measured)
    dims = [dim for dim in data.measured.dims if dim != "claim"]
    holds, fails = ((is_finite & (data.verdict == verdict)).any(dims).values for verdict in TESTED)
    for known in (holds & fails, holds | fails, is_finite.any(dims).values):
        names = data.claim.values[known]
        if len(names):
            return str(names[0])
    return None


def check_claim(data: xr.Dataset, claim: str) -> None:
    """Raise `InputError` if the runs of a sweep have no such claim, or no number for it."""
    name = choice("--claim", claim, {str(name): str(name) for name in data.claim.values})
    if not np.isfinite(data.measured.sel(claim=name)).any():
        raise InputError("--claim", "measured at some point", f"{claim}, which is not", "choose another claim")


def draw(data: xr.Dataset, claim: str) -> tuple[Figure, str]:
    """Draw the value of a claim over the grid; return the figure and its caption.

    One key is the horizontal axis of a curve, two are those of a heat map, and further ones give a panel for each of
    their values. Random points are drawn over each key.

    Args:
        data: what `claims_dataset` or `open_sweep` returns.
        claim: the name of one of its claims.
    """
    values = data.sel(claim=claim)
    keys = [str(dim) for dim in values.measured.dims if values.sizes[dim] > 1]
    with style():
        if UNIT in values.dims:
            figure, how = _random(values)
        elif len(keys) < 2:
            figure, how = _curve(values, keys[0] if keys else str(values.measured.dims[0]))
        else:
            figure, how = _heat_maps(values, keys)
    quantity = f" Measured: {str(values.quantity.item()).rstrip('.')}." if values.quantity.item() else ""
    return figure, f"{values.statement.item()}{quantity} {how} {_expectation(values)}"


def _expectation(values: xr.Dataset) -> str:
    return f"Expected: {values.expected.item()}. A cross marks points at which the claim does not hold."


def _bounds(values: xr.Dataset) -> list[float]:
    bounds = (float(values.expected_low), float(values.expected_high))
    return [bound for bound in bounds if math.isfinite(bound)]


def _is_logarithmic(numbers: np.ndarray) -> bool:
    known = numbers[np.isfinite(numbers)]
    return bool(known.size and known.min() > 0 and known.max() / known.min() > LOG_RATIO)


def _curve(values: xr.Dataset, key: str) -> tuple[Figure, str]:
    """Draw the values over one key, with bars from the least to the greatest seed."""
    figure, axes = canvas(width=4.6, height=3.0)
    panel, line = axes[0, 0], values.squeeze([dim for dim in values.measured.dims if dim != key])
    x = _positions(panel, line[key])
    panel.plot(x, line.measured.values, color=COLOURS[1], linewidth=1)
    _points(panel, x, line)
    panel.set_ylabel(f"measured, {line.claim.item()}")
    _expected_lines(panel, values)
    panel.legend()
    return figure, f"Mean over seeds as points over {key}, with bars from the least to the greatest seed."


def _random(values: xr.Dataset) -> tuple[Figure, str]:
    """Draw the values of random points, over one key in each panel."""
    keys = [str(name) for name, coordinate in values.coords.items() if coordinate.dims == (UNIT,) and name != UNIT]
    figure, axes = canvas(1, min(len(keys), MAX_PANELS), height=3.0, sharey=True)
    sources = json.loads(values.attrs["random"])
    for panel, key in zip(axes[0], keys, strict=False):
        is_logarithmic = isinstance(sources[key], dict) and sources[key]["logarithmic"]
        _points(panel, _positions(panel, values[key], logarithmic=is_logarithmic), values)
        _expected_lines(panel, values)
    axes[0, 0].set_ylabel(f"measured, {values.claim.item()}")
    axes[0, 0].legend()
    return (
        figure,
        f"Mean over seeds of {values.sizes[UNIT]} random points, with bars from the least to the greatest seed.",
    )


def _positions(panel: Axes, labels: xr.DataArray, *, logarithmic: bool = False) -> np.ndarray:
    """Return where points lie on the horizontal axis: at their numbers, or side by side with their labels."""
    panel.set_xlabel(str(labels.name))
    if labels.dtype.kind in "iuf":
        if logarithmic or _is_logarithmic(labels.values):
            panel.set_xscale("log")
        if labels.dims != (UNIT,) and labels.size <= MAX_TICKS:  # the values of the grid, and no others
            panel.set_xticks(labels.values, labels=[_short(label) for label in labels.values.tolist()])
            panel.set_xticks([], minor=True)
        return labels.values
    texts, places = np.unique(labels.values.astype(str), return_inverse=True)
    if len(texts) == labels.size:  # in the order in which they were given
        texts, places = labels.values.astype(str), np.arange(labels.size)
    panel.set_xticks(range(len(texts)), labels=list(texts), rotation=30 * (max(map(len, texts)) > 8))
    panel.set_xlim(-0.5, len(texts) - 0.5)
    return places


def _points(panel: Axes, x: np.ndarray, line: xr.Dataset) -> None:
    """Draw points with the marker of their verdict, and bars over seeds."""
    if _is_logarithmic(line.measured.values) and all(bound > 0 for bound in _bounds(line)):
        panel.set_yscale("log")
    mean = line.measured.values
    distances = np.stack([mean - line.measured_min.values, line.measured_max.values - mean]).clip(min=0)
    for verdict, (shape, face) in APPEARANCE.items():
        chosen = (line.verdict.values == verdict) & np.isfinite(mean)
        if chosen.any():
            colour = COLOURS[2] if verdict == "does not hold" else COLOURS[1]
            looks = {**marker(1), "marker": shape, "color": colour, "markerfacecolor": face or colour, "label": verdict}
            looks |= {"markersize": 6} if verdict == "does not hold" else {}
            bars = np.nan_to_num(distances[:, chosen])
            panel.errorbar(x[chosen], mean[chosen], yerr=bars, elinewidth=0.9, capsize=2, **looks)


def _expected_lines(panel: Axes, values: xr.Dataset) -> None:
    for index, bound in enumerate(_bounds(values)):
        label = f"expected {values.expected.item()}" if index == 0 else None
        panel.axhline(bound, color="#555555", linestyle=":", linewidth=1.2, label=label)


def _heat_maps(values: xr.Dataset, keys: list[str]) -> tuple[Figure, str]:
    """Draw one heat map of the two longest keys for each combination of the others."""
    across, down = sorted(keys, key=lambda key: -values.sizes[key])[:2]
    others = [key for key in keys if key not in (across, down)]
    panels = list(_panels(values.squeeze(drop=True), others))
    shown = [panels[index] for index in evenly_spaced(len(panels), MAX_PANELS)]
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    width = max(3.4, 0.55 * values.sizes[across] + 1.8)
    figure, axes = canvas(rows, columns, width=width, height=max(2.2, 0.34 * values.sizes[down] + 1.3))
    numbers = values.measured.values[np.isfinite(values.measured.values)]
    norm = LogNorm if _is_logarithmic(numbers) else Normalize
    limits = (numbers.min(), numbers.max()) if numbers.size else (0.0, 1.0)
    for panel in axes.flat[len(shown) :]:
        panel.set_visible(False)
    for panel, (title, part) in zip(axes.flat, shown, strict=False):
        panel.set_title(title)
        _heat_map(panel, part.transpose(down, across, ...), norm(*limits))
    how = f"Mean over seeds, over {across} and {down}; hatched cells have no number."
    if len(shown) < len(panels):
        how += f" Shown are {len(shown)} of {len(panels)} panels."
    return figure, how


def _panels(values: xr.Dataset, others: list[str]) -> Iterator[tuple[str, xr.Dataset]]:
    """Yield the values for each combination of the other keys, and its title."""
    if not others:
        yield "", values
        return
    for index in np.ndindex(*(values.sizes[key] for key in others)):
        part = values.isel(dict(zip(others, map(int, index), strict=True)))
        yield ", ".join(f"{key} {part[key].item()}" for key in others), part


def _heat_map(panel: Axes, part: xr.Dataset, norm: Normalize) -> None:
    down, across = part.measured.dims
    numbers = part.measured.values
    panel.set_facecolor("#dddddd")
    panel.grid(visible=False)
    panel.patch.set(hatch="///", edgecolor="#999999")
    image = panel.imshow(np.ma.masked_invalid(numbers), cmap="cividis", aspect="auto", norm=norm)
    for name, set_ticks, set_label in (
        (across, panel.set_xticks, panel.set_xlabel),
        (down, panel.set_yticks, panel.set_ylabel),
    ):
        labels = [_short(label) for label in part[name].values.tolist()]
        places = evenly_spaced(len(labels), MAX_TICKS)
        set_ticks(places, labels=[labels[place] for place in places])
        set_label(str(name))
    _cell_texts(panel, part, image)
    figure = panel.figure
    assert figure is not None
    bar = figure.colorbar(image, ax=panel, label=f"measured, {part.claim.item()}")
    low, high = image.get_clim()
    for bound in _bounds(part):
        if low is not None and high is not None and low < bound < high:
            bar.ax.axhline(bound, color="white", linewidth=2.5)
            bar.ax.axhline(bound, color="black", linewidth=1.2, linestyle=":")


def _cell_texts(panel: Axes, part: xr.Dataset, image: Any) -> None:
    """Write the number into each cell of a heat map, and a cross where the claim does not hold."""
    numbers, verdicts = part.measured.values, part.verdict.values
    for row, column in np.ndindex(numbers.shape):
        number, fails = numbers[row, column], verdicts[row, column] == "does not hold"
        if not np.isfinite(number):
            continue
        text = f"{number:.3g}" if numbers.size <= MAX_TEXTS else ""
        text += ("\n✗" if text else "✗") if fails else ""
        colour = "white" if image.norm(number) < 0.5 else "black"
        panel.text(column, row, text, ha="center", va="center", fontsize=7, color=colour, linespacing=0.9)


def _short(label: Hashable) -> str:
    return f"{label:.4g}" if isinstance(label, float) else str(label)
