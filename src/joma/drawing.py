"""Figures by matplotlib without global state, in one style: predictions as lines, measurements as points.

Series differ by colour *and* by line style or marker, so that a figure can be read in black and white too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from joma.files import list_folder, remove, write_text, write_whole

# The colours of Okabe and Ito, roughly from dark to light. Some have the same grey: line styles and markers differ too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
PDF = ".pdf"
FORMATS = {".svg": {"Date": None}, PDF: {"CreationDate": None}}  # no dates: equal figures must be equal bytes
CAPTION = ".txt"
NUMBERED = r"\d+-[^/\0]+"  # the names of figures, without suffix
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

_WRITTEN = {"relu": "ReLU", "leaky_relu": "leaky ReLU", "gelu": "GELU", "silu": "SiLU"}


def activation_name(activation: object) -> str:
    """Return an activation's name as it is written in a figure.

    >>> activation_name("leaky_relu"), activation_name("tanh")
    ('leaky ReLU', 'tanh')
    """
    return _WRITTEN.get(str(activation), str(activation).replace("_", " "))


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of the reports to whatever is drawn inside the block."""
    with mpl.rc_context(STYLE):
        yield


def canvas(rows: int = 1, columns: int = 1, *, width: float = 3.4, height: float = 2.6, **options: Any) -> tuple:
    """Return a Figure and its array of Axes [rows, columns], in the style of the reports.

    Args:
        rows, columns: number of panels.
        width, height: size of a panel in inches.
        options: for `Figure.subplots`, such as `sharex=True`.

    >>> figure, axes = canvas(1, 2)
    >>> axes.shape
    (1, 2)
    """
    with style():
        figure = Figure(figsize=(width * columns, height * rows))
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def fixed_canvas(rows: int = 1, columns: int = 1, *, width: float = 3.4, height: float = 2.6, **options: Any) -> tuple:
    """Return a Figure and its Axes as `canvas` does, with margins that do not depend on what is drawn.

    It has few ticks and is drawn in two thirds of the time. Panels stay where they are from one picture to the next, as
    they must in pictures that answer a slider.

    >>> figure, axes = fixed_canvas(1, 2)
    >>> figure.get_layout_engine() is None
    True
    """
    across, down = width * columns, height * rows
    margins = {
        "left": 0.6 / across,
        "right": 1 - 0.12 / across,
        "bottom": 0.45 / down,
        "top": 1 - 0.3 / down,
        "wspace": 0.72 / (width - 0.72),
        "hspace": 0.75 / (height - 0.75),
    }
    with mpl.rc_context(STYLE | {"figure.constrained_layout.use": False}):
        figure = Figure(figsize=(across, down))
        axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=margins, **options)
        for panel in axes.flat:
            panel.locator_params(nbins=5)  # ticks are half of the time that a small figure takes
    return figure, axes


def series(index: int) -> dict[str, Any]:
    """Return colour and line style of series number `index`, as keyword arguments of `plot`.

    >>> series(1)
    {'color': '#0072B2', 'linestyle': '--'}
    """
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}


def marker(index: int) -> dict[str, Any]:
    """Return colour and marker of series number `index`, as keyword arguments of `plot` without a line.

    The marker is hollow, so that a line below it stays visible.
    """
    colour = COLOURS[index % len(COLOURS)]
    return {"color": colour, "marker": MARKERS[index % len(MARKERS)], "markerfacecolor": "white", "linestyle": "none"}


def theory(axes: Axes, x: ArrayLike, y: ArrayLike, index: int = 0, label: str | None = None, **options: Any) -> None:
    """Draw a prediction as a line, with the colour and line style of series number `index`."""
    axes.plot(np.asarray(x), np.asarray(y), **{**series(index), "label": label, **options})


def measured(
    axes: Axes,
    x: ArrayLike,
    y: xr.DataArray | ArrayLike,
    index: int = 0,
    label: str | None = None,
    *,
    over: str = "seed",
    **options: Any,
) -> None:
    """Draw a measurement as points at the mean over `seed`, with error bars from the lowest to the highest seed.

    A `y` without the dimension `seed`, such as any plain array, is drawn as points without bars; `over` names another
    dimension, such as `head`.
    """
    appearance = {**marker(index), "label": label, **options}
    if not (isinstance(y, xr.DataArray) and over in y.dims):
        axes.plot(np.asarray(x), np.asarray(y), **appearance)
        return
    mean, distances = bars(y, over)
    axes.errorbar(np.asarray(x), mean, yerr=distances, elinewidth=0.9, capsize=2, **appearance)


def bars(y: xr.DataArray, over: str = "seed") -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over `seed`, and the distances [2, ...] from it to the lowest and to the highest seed."""
    mean = y.mean(over)
    distances = np.stack([np.asarray(mean - y.min(over)), np.asarray(y.max(over) - mean)])
    return np.asarray(mean), np.maximum(distances, 0.0)  # rounding may place the mean of equal numbers outside of them


def band(
    axes: Axes, x: ArrayLike, y: xr.DataArray, index: int = 0, label: str | None = None, *, over: str = "seed"
) -> None:
    """Draw a measured curve of many points: the mean over `seed` as a line, lowest to highest seed as a shaded band."""
    axes.plot(np.asarray(x), np.asarray(y.mean(over)), label=label, **series(index))
    low, high = np.asarray(y.min(over)), np.asarray(y.max(over))
    axes.fill_between(np.asarray(x), low, high, color=COLOURS[index % len(COLOURS)], alpha=0.18, linewidth=0)


def evenly_spaced(count: int, shown: int) -> list[int]:
    """Return at most `shown` indices of `count` items, evenly spaced from the first to the last.

    >>> evenly_spaced(12, 4), evenly_spaced(3, 4)
    ([0, 4, 7, 11], [0, 1, 2])
    """
    return sorted(set(np.linspace(0, count - 1, min(count, shown)).round().astype(int).tolist()))


def letters(axes: np.ndarray) -> None:
    """Put (a), (b), … before the panels' titles, at the left, so that the caption can refer to them."""
    for letter, panel in zip("abcdefghijklmnopqrstuvwxyz", axes.flat, strict=False):
        panel.set_title(f"({letter})  {panel.get_title()}".rstrip(), loc="left")
        panel.set_title("", loc="center")


def save(figure: Figure, stem: Path, *, caption: str, pdf: bool = True) -> list[Path]:
    """Write `stem.svg` for the report, `stem.pdf` for a paper, the caption as `stem.txt`; return these paths.

    Without `pdf` only the other two: it takes longer than the rest, mostly for its fonts. An earlier one is removed.
    """
    suffixes = [suffix for suffix in FORMATS if pdf or suffix != PDF]
    if not pdf:
        remove(stem.with_suffix(PDF))
    with style():
        for suffix in suffixes:
            write_whole(stem.with_suffix(suffix), partial(figure.savefig, metadata=FORMATS[suffix]))
    write_text(stem.with_suffix(CAPTION), caption + "\n")
    return [stem.with_suffix(suffix) for suffix in (*suffixes, CAPTION)]


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file, in the style of the reports, for a page that shows it at once."""
    content = BytesIO()
    with mpl.rc_context(STYLE | {"savefig.bbox": None}):  # to find the tight box takes as long as the drawing
        figure.savefig(content, format="png", metadata={"Software": None}, pil_kwargs={"compress_level": 1})
    return content.getvalue()


def clear(folder: Path, *, keep: Collection[str], earlier: Collection[str] = ()) -> None:
    """Remove the numbered figures that `save` wrote to `folder` before, except for those named in `keep`.

    Those are the `earlier` ones, of which some files may be missing if they were being removed when the process died,
    and pictures with all the files that `save` writes. Any other picture is left alone: `save` did not write it.
    """
    stems = {folder / name for name in earlier if re.fullmatch(NUMBERED, name)}
    names = {path.name for path in list_folder(folder)}
    for stem in {name.rpartition(".")[0] for name in names}:
        if re.fullmatch(NUMBERED, stem) and all(f"{stem}{suffix}" in names for suffix in (*FORMATS, CAPTION)):
            stems.add(folder / stem)
    for stem in sorted(stem for stem in stems if stem.name not in keep):
        for suffix in (*FORMATS, CAPTION):
            remove(stem.with_suffix(suffix))
