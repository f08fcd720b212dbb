"""Draw a probed model or series: each measure of attention by layer and head, stable ranks, head laws and cosines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from joma.drawing import canvas, evenly_spaced, letters, marker, series, style

HEAD_LAWS = {"query_key": "queries and keys", "value_output": "values and outputs"}
HEAD_MEASURES = {"drift": "drift from the law", "imbalance": "imbalance"}
OTHERS = "_others"  # ends the names of measures between different heads
SHOWN = 6  # layers drawn as curves, evenly spaced
TICKS = 5  # labels on an axis of checkpoints
LOGARITHMIC = 64  # a training longer than this many of its first intervals is drawn on a logarithmic axis
MARKED = 40  # checkpoints; more of them are drawn as lines without markers
WIDTH, HEIGHT = 3.5, 2.9  # of a panel, in inches
MISSING = "#d0d0d0"  # heads that a layer does not have, and checkpoints that were not measured


class Quantity(NamedTuple):
    """What a measure of attention is called in a figure, and its unit, which may be empty."""

    label: str
    unit: str

    @property
    def axis(self) -> str:
        """The label of an axis."""
        return f"{self.label} / {self.unit}" if self.unit else self.label


class Panel(NamedTuple):
    """A panel of a figure: its title, what it shows, for the caption, and how it is drawn."""

    title: str
    shows: str
    draw: Callable[[Axes], None]


def is_single(data: xr.Dataset) -> bool:
    """Return whether the data are of one model, not of a series."""
    return data.sizes["step"] == 1


def measured_steps(variable: xr.DataArray) -> xr.DataArray:
    """Return a variable without the steps at which it was not measured."""
    return variable.dropna("step", how="all")


def attention_panels(variable: xr.DataArray, quantity: Quantity) -> list[Panel]:
    """Return the panels of a measure of attention, [step, layer, head]."""
    last = measured_steps(variable).isel(step=-1).transpose("layer", "head")
    at_end = "" if variable.sizes["step"] == 1 else f", {_at(variable, last)}"
    heads = Panel(
        f"Each head{at_end}",
        "each head" if variable.sizes["step"] == 1 else f"each head at the end ({_at(variable, last)})",
        lambda axes: _draw_heads(axes, last, quantity),
    )
    if variable.sizes["step"] == 1:
        by_layer = Panel(
            "By layer",
            "the mean over heads by layer, with the least and the greatest head",
            lambda axes: _draw_layers(axes, last, quantity),
        )
        return [by_layer, heads] if variable.sizes["head"] > 1 else [by_layer]
    shown = evenly_spaced(variable.sizes["layer"], SHOWN)
    mean = variable.mean("head")
    curves = [(f"layer {layer}", mean.isel(layer=layer)) for layer in shown]
    over = "" if variable.sizes["head"] == 1 else ", mean over heads"
    panels = [
        Panel(
            "Mean over heads" if over else "Over the training",
            f"over the training{over}{_selection(shown, variable.sizes['layer'], 'layers')}",
            lambda axes: _draw_curves(axes, curves, quantity.axis),
        ),
        Panel(
            "Every head",
            "every head over the training, layer by layer",
            lambda axes: _draw_all_heads(axes, variable, quantity),
        ),
    ]
    return [*panels, heads] if variable.sizes["head"] > 1 else panels


def rank_panels(data: xr.Dataset) -> list[Panel]:
    """Return the panels of the stable ranks of the MLPs' lower matrices."""
    ranks = data.stable_rank
    if is_single(data):
        return [Panel("", "each matrix", lambda axes: _draw_row(axes, ranks.isel(step=0), "stable rank", "matrix"))]
    shown = evenly_spaced(data.sizes["weight"], SHOWN)
    curves = [(f"matrix {matrix}", ranks.isel(weight=matrix)) for matrix in shown]
    selection = _selection(shown, data.sizes["weight"], "matrices")
    panels = [
        Panel(
            "Over the training", f"over the training{selection}", lambda axes: _draw_curves(axes, curves, "stable rank")
        )
    ]
    if data.sizes["weight"] > 1:
        panels.append(
            Panel("Every matrix", "every matrix", lambda axes: _draw_map(axes, ranks, "stable rank", "matrix"))
        )
    return panels


def head_measure(data: xr.Dataset) -> str | None:
    """Return which measure of the head laws is shown: the drift of a series, else the imbalance; None without any."""
    for measure in HEAD_MEASURES:
        if any(data[name].notnull().any() for law in HEAD_LAWS if (name := f"{law}_{measure}") in data):
            return measure
    return None


def head_curves(data: xr.Dataset, measure: str) -> Iterator[tuple[str, xr.DataArray, xr.DataArray]]:
    """Yield the label of each head law, its measure [step, layer, head], and the one between different heads."""
    for law, label in HEAD_LAWS.items():
        names = [f"{law}_{measure}{ending}" for ending in ("", OTHERS)]
        if names[0] in data and data[names[0]].notnull().any():
            values, others = (data[name].rename(module="layer", key_head="head") for name in names)
            yield label, values, others


def head_panels(data: xr.Dataset, measure: str) -> list[Panel]:
    """Return a panel for each head law: its measure by layer, over the training if there is one."""
    panels = []
    for label, values, others in head_curves(data, measure):
        quantity = Quantity(HEAD_MEASURES[measure], "")
        shown = evenly_spaced(values.sizes["layer"], SHOWN)
        by = "mean over heads by layer, with the least and the greatest head" if is_single(data) else "mean over heads"
        selection = "" if is_single(data) else _selection(shown, values.sizes["layer"], "layers")
        draw_law = partial(_draw_head_law, values=values, others=others, shown=shown, quantity=quantity)
        panels.append(Panel(f"{label[:1].upper()}{label[1:]}", f"{label}, {by}{selection}", draw_law))
    return panels


def _draw_head_law(
    axes: Axes, *, values: xr.DataArray, others: xr.DataArray, shown: Sequence[int], quantity: Quantity
) -> None:
    """Draw the measure of a head law by layer, and between different heads as a dotted line."""
    chance = {"color": "grey", "linestyle": ":", "linewidth": 1, "label": "different heads"}
    if values.sizes["step"] == 1:
        _draw_layers(axes, values.isel(step=0), quantity)
        axes.plot(np.arange(values.sizes["layer"]), others.isel(step=0).mean("head"), **chance)
    else:
        mean = values.mean("head")
        _draw_curves(axes, [(f"layer {layer}", mean.isel(layer=layer)) for layer in shown], quantity.axis)
        known = others.mean(("layer", "head")).dropna("step")
        axes.plot(known.step.values + is_logarithmic(values.step.values), known.values, **chance)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def cosine_panels(data: xr.Dataset) -> list[Panel]:
    """Return the panels of the cosines between embeddings and between hidden vectors."""
    label = "root mean square cosine"
    random = float(data.embedding_random.max()) if "embedding_random" in data else None
    hidden = data.hidden_cosine if "hidden_cosine" in data else None
    if is_single(data):
        if hidden is not None:
            values = hidden.isel(step=0)
            return [
                Panel(
                    "Hidden vectors",
                    "hidden vectors at each depth",
                    lambda axes: _draw_row(axes, values, label, "depth", random),
                )
            ]
        point = data.embedding_cosine
        return [Panel("", "token embeddings", lambda axes: _draw_point(axes, float(point[0]), label, random))]
    curves = [("embeddings", data.embedding_cosine)] if "embedding_cosine" in data else []
    if hidden is not None:
        depths = evenly_spaced(data.sizes["depth"], 3)
        curves += [(f"hidden, depth {depth}", hidden.isel(depth=depth)) for depth in depths]
    panels = [Panel("Over the training", "over the training", lambda axes: _draw_curves(axes, curves, label, random))]
    if hidden is not None and data.sizes["depth"] > 3:
        panels.append(
            Panel("Every depth", "hidden vectors at every depth", lambda axes: _draw_map(axes, hidden, label, "depth"))
        )
    return panels


def draw(panels: Sequence[Panel]) -> Figure:
    """Draw panels in a row."""
    with style():
        figure, axes = canvas(1, len(panels), width=WIDTH, height=HEIGHT)
        for axis, panel in zip(axes[0], panels, strict=True):
            panel.draw(axis)
            axis.set_title(panel.title)
        if len(panels) > 1:
            letters(axes)
    return figure


def describe(panels: Sequence[Panel]) -> str:
    """Return what the panels show, as a sentence of a caption."""
    if len(panels) == 1:
        return f"{panels[0].shows[0].upper()}{panels[0].shows[1:]}."
    return f"{'; '.join(f'({letter}) {panel.shows}' for letter, panel in zip('abcdef', panels, strict=False))}."


def _at(variable: xr.DataArray, last: xr.DataArray) -> str:
    return f"{variable.attrs.get('axis', 'step')} {int(last.step):,}"


def _selection(shown: Sequence[int], count: int, items: str) -> str:
    return f", {len(shown)} of {count} {items}" if len(shown) < count else ""


def is_logarithmic(steps: np.ndarray) -> bool:
    """Return whether steps are drawn on a logarithmic axis: the first interval is short beside the whole training."""
    return len(steps) > 2 and bool(steps[-1] - steps[0] > LOGARITHMIC * (steps[1] - steps[0]))


def _draw_curves(
    axes: Axes, curves: Sequence[tuple[str, xr.DataArray]], label: str, random: float | None = None
) -> None:
    """Draw labelled curves over the steps, or over step + 1 on a logarithmic axis, which can then show step 0."""
    steps = curves[0][1].step.values
    logarithmic = is_logarithmic(steps)
    for index, (name, curve) in enumerate(curves):
        appearance = {**series(index), "markersize": 3, "markerfacecolor": "white"}
        if len(steps) <= MARKED:
            appearance["marker"] = marker(index)["marker"]
        known = curve.dropna("step")
        axes.plot(known.step.values + logarithmic, known.values, label=name, **appearance)
    if random is not None:
        axes.axhline(random, color="grey", linestyle=":", linewidth=1, label="random directions")
    unit = curves[0][1].attrs.get("axis", "step")
    axes.set(xlabel=f"{unit} + 1" if logarithmic else unit, ylabel=label)
    axes.margins(y=0.08)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=TICKS + 2))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(TICKS, integer=True))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2 if random is not None else 3)


def _draw_map(axes: Axes, variable: xr.DataArray, label: str, rows: str) -> None:
    """Draw [step, row] as a heat map over the checkpoints, each as wide as the others."""
    (dim,) = (dim for dim in variable.dims if dim != "step")
    _heat_map(axes, variable.transpose(dim, "step").values, label)
    axes.set(ylabel=rows)
    _label_indices(axes.yaxis, variable.sizes[dim])
    _label_checkpoints(axes, variable)


def _draw_all_heads(axes: Axes, variable: xr.DataArray, quantity: Quantity) -> None:
    """Draw the heads of all layers, one below the other, over the checkpoints."""
    layers, heads = variable.sizes["layer"], variable.sizes["head"]
    _heat_map(axes, variable.transpose("layer", "head", "step").values.reshape(layers * heads, -1), quantity.axis)
    shown = range(0, layers, -(-layers // 8))
    axes.set_yticks([layer * heads + (heads - 1) / 2 for layer in shown], [str(layer) for layer in shown])
    if layers <= 16 and heads > 1:
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", linewidth=0.8)
    axes.set(ylabel="layer")
    _label_checkpoints(axes, variable)


def _draw_heads(axes: Axes, values: xr.DataArray, quantity: Quantity) -> None:
    """Draw [layer, head] as a heat map."""
    _heat_map(axes, values.values, quantity.axis)
    axes.set(xlabel="head", ylabel="layer")
    _label_indices(axes.xaxis, values.sizes["head"])
    _label_indices(axes.yaxis, values.sizes["layer"])


def _heat_map(axes: Axes, values: np.ndarray, label: str) -> None:
    """Draw a matrix in the colours of its own range."""
    image = axes.imshow(values, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_facecolor(MISSING)
    axes.grid(visible=False)
    bar = axes.figure.colorbar(image, ax=axes, label=label)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()


def _label_indices(axis: object, count: int) -> None:
    axis.set_ticks(range(0, count, -(-count // 8)))  # pyright: ignore[reportAttributeAccessIssue]


def _label_checkpoints(axes: Axes, variable: xr.DataArray) -> None:
    """Label columns of a heat map by their steps, as many as there is room for."""
    shown = evenly_spaced(variable.sizes["step"], TICKS)
    axes.set_xticks(shown, [short_number(int(variable.step[index])) for index in shown])
    axes.set_xlabel(f"{variable.attrs.get('axis', 'step')} (columns are checkpoints)")


def short_number(value: int) -> str:
    """Return a number of a few characters, to two decimals of thousands or millions where it is large.

    >>> short_number(512), short_number(143000), short_number(1_250_000)
    ('512', '143k', '1.25M')
    """
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size * (10 if letter == "k" else 1):
            return f"{value / size:.2f}".rstrip("0").rstrip(".") + letter
    return str(value)


def _draw_layers(axes: Axes, values: xr.DataArray, quantity: Quantity) -> None:
    """Draw the mean over heads by layer, and the range over heads as a band."""
    layers, mean = np.arange(values.sizes["layer"]), values.mean("head")
    if values.sizes["head"] > 1:
        axes.fill_between(layers, values.min("head"), values.max("head"), color="#0072B2", alpha=0.18, linewidth=0)
        axes.plot(layers, values.min("head"), layers, values.max("head"), color="#0072B2", linewidth=0.6)
    appearance = {"linestyle": "-"} | ({"marker": ""} if len(layers) > 24 else {})
    axes.plot(layers, mean, **{**marker(0), **appearance})
    axes.set(xlabel="layer", ylabel=quantity.axis)
    axes.margins(x=0.08, y=0.08)
    _label_indices(axes.xaxis, values.sizes["layer"])


def _draw_row(axes: Axes, values: xr.DataArray, label: str, name: str, random: float | None = None) -> None:
    axes.plot(np.arange(values.size), values.values, **{**marker(0), "linestyle": "-"})
    if random is not None:
        axes.axhline(random, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel=name, ylabel=label)
    axes.margins(x=0.08, y=0.08)
    _label_indices(axes.xaxis, values.size)


def _draw_point(axes: Axes, value: float, label: str, random: float | None) -> None:
    axes.plot(0, value, **marker(0))
    if random is not None:
        axes.axhline(random, color="grey", linestyle=":", linewidth=1)
    axes.set_xticks([0], ["token embeddings"])
    axes.set_ylabel(label)


def figures(data: xr.Dataset, quantities: dict[str, Quantity]) -> Iterator[tuple[str, list[Panel]]]:
    """Yield the name and the panels of each figure, for what was measured.

    Args:
        data: what `joma.watch.probing.probe` returns.
        quantities: the measures of attention in it, by the names of their variables.
    """
    unit = data.attrs.get("unit", "step")
    data = data.assign({name: variable.assign_attrs(axis=unit) for name, variable in data.data_vars.items()})
    for name, quantity in quantities.items():
        if data[name].notnull().any():
            yield name, attention_panels(data[name], quantity)
    if "stable_rank" in data:
        yield "stable_rank", rank_panels(data)
    if (measure := head_measure(data)) is not None:
        yield f"head_{measure}", head_panels(data, measure)
    if "hidden_cosine" in data or "embedding_cosine" in data:
        yield "cosines", cosine_panels(data)
