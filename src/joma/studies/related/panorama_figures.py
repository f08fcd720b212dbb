"""The figures of the study `panorama`, drawn from its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from joma.drawing import COLOURS, LINES, canvas
from joma.studies.common_axes import STEP
from joma.studies.related.panorama_measures import comes_back, curves, is_judged, onset, ranks, regained
from joma.studies.related.panorama_sources import MINIMA, SOURCES
from joma.studies.theorems.ladder_training import BOUNCE, VISIBLE_FALL

ROWS = {
    "axes_entropy": "entropy / largest",
    "axes_sink": "weight on the most\nattended key",
    "axes_rank": "stable rank / start",
}
SHADES = {"none": "#D55E00", "dense": "#0072B2", "open": "0.45"}  # colours of the kinds of minimum
ROW_HEIGHT = 0.27  # inches, of a source in the figure of returns
CAPTIONS = {
    "axes": "Lines: mean over seeds. Shaded: from the lowest to the highest seed. Time is divided by the first step "
    f"at which entropy has moved by {VISIBLE_FALL:g} (the last step if it never does). Columns: what is known in "
    "advance of the least loss. Top: entropy over its largest value. Middle: weight on the most attended key. Bottom: "
    "stable rank of the first map above attention, over that at the start. Titles: medians over models.",
    "returns": f"Mean over seeds, with bars from the lowest to the highest. Dotted: {BOUNCE:g}, from which on "
    "attention has come back. Crosses: entropy does not fall visibly, or training is shorter than ten times the time "
    "at which it moves. At the right: what the minimum of the loss predicts.",
}


def draw_axes(run: xr.Dataset) -> Figure:
    """Draw the three numbers of all sources over time, a row for each number and a column for each kind of minimum."""
    figure, axes = canvas(len(ROWS), len(MINIMA), width=3.5, height=2.1, sharex=True, sharey="row")
    present = curves(run)
    for column, (minimum, title) in enumerate(MINIMA.items()):
        names = [name for name in present if SOURCES[name].minimum == minimum]
        for row, axis in enumerate(ROWS):
            for index, name in enumerate(names):
                _draw_curve(axes[row, column], present[name], axis, index)
            axes[row, column].set_title(_panel_title(axis, title, [present[name] for name in names]))
        axes[-1, column].set_xlabel("step / step at which entropy has moved")
        handles = [Line2D([], [], label=SOURCES[name].title, **_look(index)) for index, name in enumerate(names)]
        axes[-1, column].legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2, fontsize=7, handlelength=2.6
        )
    for row, label in enumerate(ROWS.values()):
        axes[row, 0].set_ylabel(label)
    axes[-1, 0].set_yscale("log")
    axes[0, 0].set(xscale="log", ylim=(-0.03, 1.05))
    axes[1, 0].set_ylim(-0.03, 1.05)
    return figure


def _panel_title(axis: str, kind: str, sources: Sequence[xr.Dataset]) -> str:
    """Return what a panel shows in one line: the median over sources of what its number does from start to end."""
    if axis == "axes_entropy":
        return f"{kind[0].upper()}{kind[1:]}"
    means = [series(curve, axis).mean("seed") for curve in sources]
    ends = [(float(mean[0]), float(mean[-1])) for mean in means if mean.size and np.isfinite(mean).all()]
    if not ends:
        return "not recorded"
    start, end = np.median(ends, axis=0)
    if axis == "axes_sink":
        return f"weight on one key: {start:.2f} to {end:.2f}"
    return f"stable rank: {end:.2f} of its start"


def series(curve: xr.Dataset, axis: str) -> xr.DataArray:
    """Return what is drawn of a curve: entropy and sink as they are, the stable rank over that at the start."""
    if axis != "axes_rank":
        return curve[axis]
    return ranks(curve) / ranks(curve).isel({STEP: 0}, drop=True)


def _look(index: int) -> dict[str, Any]:
    """Return colour and line style of line number `index`; from the eighth on colours return with other styles."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[(index + index // len(COLOURS)) % len(LINES)]}


def _draw_curve(panel: Axes, curve: xr.Dataset, axis: str, index: int) -> None:
    """Draw the mean of a number over seeds, and the band from the lowest to the highest seed."""
    values = series(curve, axis)
    time = values[STEP].values / time_unit(curve)
    later = time > 0
    spread = (values.min("seed"), values.mean("seed"), values.max("seed"))
    low, mean, high = (np.asarray(part)[later] for part in spread)
    look = _look(index)
    panel.plot(time[later], mean, linewidth=1.3, **look)
    panel.fill_between(time[later], low, high, color=look["color"], alpha=0.13, linewidth=0)


def time_unit(curve: xr.Dataset) -> float:
    """Return the onset, or the last step of a source whose entropy never moves visibly."""
    start = onset(curve)
    return start if np.isfinite(start) else float(curve[STEP][-1])


def draw_returns(run: xr.Dataset) -> Figure:
    """Draw the share of its fall that the entropy of each source regains, by kind of minimum and kind of units."""
    present = sorted(curves(run).items(), key=lambda item: list(MINIMA).index(SOURCES[item[0]].minimum))
    figure, axes = canvas(1, 1, width=6.4, height=ROW_HEIGHT * len(present) + 1.2)
    panel = axes[0, 0]
    for height, (name, curve) in enumerate(present):
        _draw_return(panel, height, name, curve)
    counted = [curve for _, curve in present if is_judged(curve)]
    panel.axvline(BOUNCE, color="black", linewidth=0.8, linestyle=":")
    panel.set_yticks(range(len(present)), [SOURCES[name].title for name, _ in present])
    panel.set(
        xlim=(-0.05, 1.1),
        ylim=(len(present) - 0.5, -0.5),
        xlabel="share of its fall that entropy regains",
        title=f"Attention comes back in {sum(map(comes_back, counted))} of {len(counted)} models that are judged",
    )
    below = (0.4, -0.62 / (len(present) * ROW_HEIGHT))
    panel.legend(handles=_return_handles(), loc="upper center", bbox_to_anchor=below, ncols=2)
    return figure


def _return_handles() -> list[Line2D]:
    """Return the legend of the figure of returns: colours of minima, markers of units and of what is not judged."""
    points: dict[str, Any] = {"linestyle": "none"}
    kinds = [Line2D([], [], color=SHADES[kind], marker="s", label=text, **points) for kind, text in MINIMA.items()]
    markers = {
        "linear units": {"marker": "o", "markerfacecolor": "white"},
        "nonlinear units": {"marker": "o"},
        "not judged": {"marker": "x"},
    }
    return kinds + [Line2D([], [], color="black", label=label, **look, **points) for label, look in markers.items()]


def _draw_return(panel: Axes, height: int, name: str, curve: xr.Dataset) -> None:
    """Draw a source as one point: the mean over seeds with a bar from the lowest to the highest."""
    source, share = SOURCES[name], regained(curve)
    colour, mean = SHADES[source.minimum], float(share.mean())
    panel.plot([float(share.min()), float(share.max())], [height, height], color=colour, linewidth=1.2)
    filled = "white" if source.units == "linear" else colour
    look: dict[str, Any] = {"marker": "o", "markerfacecolor": filled} if is_judged(curve) else {"marker": "x"}
    panel.plot([mean], [height], color=colour, markersize=6, linestyle="none", **look)
    if source.minimum_predicts is not None:
        text = f"predicted: {'comes back' if source.minimum_predicts else 'stays'}"
        panel.annotate(text, (1.01, height), xycoords=("axes fraction", "data"), fontsize=7, va="center")
