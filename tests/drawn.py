"""What a panel of a figure shows, for the tests of drawings."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes


def legend(axes: Axes) -> list[str]:
    """Return the labels of the legend, in its order."""
    box = axes.get_legend()
    return [] if box is None else [text.get_text() for text in box.get_texts()]


def title(axes: Axes) -> str:
    """Return the title with the letter before it, as `letters` sets it."""
    return axes.get_title(loc="left")


def series(axes: Axes) -> dict[str, np.ndarray]:
    """Return the points [point, (x, y)] of every labelled line and, of labelled error bars, the means."""
    bars = {container.get_label(): container.lines[0] for container in axes.containers}
    lines = {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    return {label: line.get_xydata() for label, line in {**lines, **bars}.items()}
