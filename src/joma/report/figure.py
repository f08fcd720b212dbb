"""The one drawing stack: matplotlib without global state, one style, theory as lines and measurement as points.

Series differ by colour *and* by line style and marker, so that a figure is read in black and white too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from joma.files import write_text, write_whole

# Okabe and Ito's colours, dark to light so that their greys differ too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
PICTURES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # what a figure is saved as, with what metadata
CAPTION = ".txt"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "mathtext.fontset": "dejavusans",
    "pdf.fonttype": 42,
    "savefig.bbox": "tight",
    "svg.fonttype": "path",
    "svg.hashsalt": "joma",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def style() -> Iterator[None]:
    """The house style, for the drawing inside the block."""
    with mpl.rc_context(STYLE):
        yield


def canvas(rows: int = 1, columns: int = 1, *, width: float = 3.4, height: float = 2.6, **options: Any) -> tuple:
    """A Figure and its array of Axes [rows, columns], each panel `width` x `height` inches, in the house style.

    >>> figure, axes = canvas(1, 2)
    >>> axes.shape
    (1, 2)
    """
    with style():
        figure = Figure(figsize=(width * columns, height * rows))
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def series(index: int) -> dict[str, Any]:
    """Colour, line style and marker number `index`: keyword arguments for one series."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}


def marker(index: int) -> dict[str, Any]:
    """Marker and colour number `index`, hollow so that the line below stays visible."""
    colour = COLOURS[index % len(COLOURS)]
    return {"color": colour, "marker": MARKERS[index % len(MARKERS)], "markerfacecolor": "white", "linestyle": "none"}


def theory(axes: Axes, x: ArrayLike, y: ArrayLike, index: int = 0, label: str | None = None, **options: Any) -> None:
    """A prediction: a line."""
    axes.plot(np.asarray(x), np.asarray(y), **{**series(index), "label": label, **options})


def measured(
    axes: Axes, x: ArrayLike, y: xr.DataArray | ArrayLike, index: int = 0, label: str | None = None, **options: Any
) -> None:
    """A measurement: points at the mean over `seed` with bars from the least to the greatest seed.

    `y` without a `seed` axis is drawn as bare points; a plain array has no seeds.
    """
    look = {**marker(index), "label": label, **options}
    if not (isinstance(y, xr.DataArray) and "seed" in y.dims):
        axes.plot(np.asarray(x), np.asarray(y), **look)
        return
    mean, spread = bars(y)
    axes.errorbar(np.asarray(x), mean, yerr=spread, elinewidth=0.9, capsize=2, **look)


def bars(y: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over `seed`, and how far the least and the greatest seed lie below and above it, [2, ...]."""
    mean = y.mean("seed")
    spread = np.stack([np.asarray(mean - y.min("seed")), np.asarray(y.max("seed") - mean)])
    return np.asarray(mean), np.maximum(spread, 0.0)  # the mean of equal numbers may round past them


def band(axes: Axes, x: ArrayLike, y: xr.DataArray, index: int = 0, label: str | None = None) -> None:
    """A measured curve with many points: its mean over `seed` as a line, least to greatest as a shaded band."""
    axes.plot(np.asarray(x), np.asarray(y.mean("seed")), label=label, **series(index))
    low, high = np.asarray(y.min("seed")), np.asarray(y.max("seed"))
    axes.fill_between(np.asarray(x), low, high, color=COLOURS[index % len(COLOURS)], alpha=0.18, linewidth=0)


def evenly_spaced(count: int, shown: int) -> list[int]:
    """Return at most `shown` indices of `count` items, evenly spaced from the first to the last.

    >>> evenly_spaced(12, 4), evenly_spaced(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    return sorted(set(np.linspace(0, count - 1, min(count, shown)).round().astype(int).tolist()))


def letters(axes: np.ndarray) -> None:
    """Letter the panels (a), (b), … at the upper left, for the caption to refer to."""
    for letter, panel in zip("abcdefghijklmnopqrstuvwxyz", axes.flat, strict=False):
        panel.set_title(f"({letter})  {panel.get_title()}".rstrip(), loc="left")
        panel.set_title("", loc="center")


def save(figure: Figure, stem: Path, *, caption: str) -> None:
    """Write `stem.svg` for the report, `stem.pdf` for a paper and `stem.txt`, the caption, each whole."""
    with style():
        for suffix, metadata in PICTURES.items():

            def write(temporary: Path, metadata: dict = metadata) -> None:
                figure.savefig(temporary, metadata=metadata)

            write_whole(stem.with_suffix(suffix), write)
    write_text(stem.with_suffix(CAPTION), caption + "\n")


def clear(folder: Path, *, keep: Collection[str]) -> None:
    """Remove the numbered figures of other names that `save` wrote there; what lacks one of its files it did not."""
    for left in folder.glob("[0-9]*-*.svg"):
        files = [left.with_suffix(suffix) for suffix in (*PICTURES, CAPTION)]
        if left.stem not in keep and all(file.is_file() for file in files):
            for file in files:
                file.unlink()
