"""Draw what was recorded of a model's attention: layers and heads, a training, or one attention map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from joma.drawing import band, canvas, evenly_spaced, letters, marker, measured, series, style
from joma.terminal import printable
from joma.watch.display import by_layer_and_head, main_measure, quantity

SHOWN = 4  # layers or weights drawn as curves, evenly spaced: more bands hide each other
MAX_TICKS = 12
MAX_TOKENS = 40  # labels on an axis of a map
MAX_LABEL = 18  # characters
MAX_SHORT, MAX_NAME = 6, 28  # characters of a layer's name, in titles and beside a heat map
LOGARITHMIC = 64  # a training longer than this many of its first intervals is drawn on a logarithmic axis
MISSING = "□"


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of layers without the parts that all have in common.

    >>> short_names(["model.layers.0.attn", "model.layers.1.attn"])
    ['0', '1']
    >>> short_names(["encoder.0.self", "decoder.0.self", "decoder.0.cross"])
    ['encoder.self', 'decoder.self', 'decoder.cross']
    """
    parts = [name.split(".") for name in names]
    if len(names) < 2:
        return list(names)
    if len({len(words) for words in parts}) == 1:
        varying = [index for index, words in enumerate(zip(*parts, strict=True)) if len(set(words)) > 1]
        return [".".join(words[index] for index in varying) for words in parts]
    shortest = min(map(len, parts))
    first = _shared(parts, shortest - 1)
    last = _shared([words[::-1] for words in parts], shortest - 1 - first)
    return [".".join(words[first : len(words) - last]) for words in parts]


def _shared(parts: Sequence[Sequence[str]], most: int) -> int:
    """Return how many of the first `most` words all have in common."""
    return next((index for index in range(most) if len({words[index] for words in parts}) > 1), most)


def draw_recording(data: xr.Dataset) -> Figure:
    """Draw the entropy of each head as a heat map, and the weight on the sinks by layer if it was measured.

    Where entropy was not measured, the first measure takes its place.

    Args:
        data: what `Recording.dataset` returns, with dims layer and head; any others are averaged over.
    """
    panels: list[Callable[[Axes, xr.Dataset], None]] = [_draw_heads] if main_measure(data) != "sink_mass" else []
    panels += [_draw_sinks] if "sink_mass" in data else []
    height = 2.6 if data.sizes["head"] == 1 else min(5.2, max(2.6, 1.1 + 0.16 * data.sizes["layer"]))
    return _draw(data, panels, height=height, beside=max(map(len, Layers.of(data).long), default=0))


def draw_trajectory(data: xr.Dataset) -> Figure:
    """Draw entropy, sinks and stable ranks over a training, for layers evenly spaced from the first to the last.

    Args:
        data: what `Recorder.dataset` returns, with dims step, layer, head and weight.
    """
    panels: list[Callable[[Axes, xr.Dataset], None]] = []
    panels += [_draw_main_over_steps] if main_measure(data) not in (None, "sink_mass") else []
    panels += [_draw_sinks_over_steps] if "sink_mass" in data else []
    panels += [_draw_ranks_over_steps] if "stable_rank" in data else []
    return _draw(data, panels, height=2.9)


def _draw(
    data: xr.Dataset, panels: Sequence[Callable[[Axes, xr.Dataset], None]], *, height: float, beside: int = 0
) -> Figure:
    """Draw the panels in a row; `beside` is the number of characters of the longest name beside them."""
    with style():
        figure, axes = canvas(1, len(panels), width=3.9 + 0.08 * beside / len(panels), height=height)
        for axis, draw_panel in zip(axes[0], panels, strict=True):
            draw_panel(axis, data)
        if len(panels) > 1:
            letters(axes)
    return figure


class Layers(NamedTuple):
    """The labels of layers: short ones, which are their numbers where names are long, and those with their names."""

    short: list[str]
    long: list[str]

    @classmethod
    def of(cls, data: xr.Dataset) -> Layers:
        """Return the labels of the layers of a Dataset."""
        names = short_names([printable(name) for name in data.layer.values])
        if max(map(len, names), default=0) <= MAX_SHORT:
            return cls(names, names)
        numbers = [str(number) for number in range(len(names))]
        return cls(numbers, [f"{number}: {_end(name)}" for number, name in zip(numbers, names, strict=True)])


def _end(name: str) -> str:
    """Return the end of a long name, which tells layers apart."""
    return _label(name if len(name) <= MAX_NAME else f"…{name[-MAX_NAME + 1 :]}", MAX_NAME)


def _ticks(count: int) -> list[int]:
    """Return at most `MAX_TICKS` indices of `count` items in equal intervals, from the first."""
    return [*range(0, count, -(-count // MAX_TICKS))]


def _draw_heads(axes: Axes, data: xr.Dataset) -> None:
    measure = data[main_measure(data)]
    values, label = by_layer_and_head(measure), quantity(measure)
    layers = Layers.of(data)
    title = _least_head(values, layers.short, label)
    if values.sizes["head"] == 1:  # a heat map of one column says less than points
        _draw_by_layer(axes, values, layers)
        axes.set(ylabel=label, title=title)
        return
    image = axes.imshow(values.values, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_facecolor("lightgrey")  # heads that a layer does not have
    axes.grid(visible=False)
    axes.set(xlabel="head", ylabel="layer", title=title)
    axes.set_xticks(_ticks(values.sizes["head"]))
    _label_layers(axes, layers)
    axes.figure.colorbar(image, ax=axes, label=label)


def _least_head(by_head: xr.DataArray, names: Sequence[str], label: str) -> str:
    """Return a title: where the measure is least, or that all heads are alike."""
    values, unit = by_head.values, f" {label.partition(' / ')[2]}".rstrip()
    if not np.isfinite(values).any():
        return "No finite value"
    least, greatest = float(np.nanmin(values)), float(np.nanmax(values))
    if greatest - least < 0.005:
        return f"All heads: {least:.2f}{unit}"
    layer, head = divmod(int(np.nanargmin(values)), values.shape[1])
    return f"Least: layer {names[layer]}, head {head} ({least:.2f}{unit})"


def _label_layers(axes: Axes, layers: Layers, *, along_x: bool = False) -> None:
    """Label the layers, as many as there is room for."""
    shown = _ticks(len(layers.short))
    if along_x:
        axes.set_xticks(shown, [layers.short[index] for index in shown], parse_math=False)
    else:
        axes.set_yticks(shown, [layers.long[index] for index in shown], parse_math=False)


def _draw_by_layer(axes: Axes, values: xr.DataArray, layers: Layers) -> None:
    """Draw the mean over heads by layer, and the least and the greatest head: as bars, or as a band for many layers."""
    numbers, heads = np.arange(len(layers.short)), values.sizes["head"]
    if len(numbers) <= 2 * MAX_TICKS:
        measured(axes, numbers, values, over="head", linestyle="-", linewidth=0.8)
    else:
        band(axes, numbers, values, over="head")
    _label_layers(axes, layers, along_x=True)
    _whole_numbers(axes)
    axes.set_xlabel("layer" if heads == 1 else "layer (mean, least and greatest head)")
    axes.margins(x=max(0.03, 0.3 / len(numbers)))


def _draw_sinks(axes: Axes, data: xr.Dataset) -> None:
    sinks = by_layer_and_head(data.sink_mass)
    layers = Layers.of(data)
    _draw_by_layer(axes, sinks, layers)
    mean = sinks.mean("head")
    title = "No finite value"
    if mean.notnull().any():
        layer = int(np.nanargmax(mean.values))
        title = f"Most on sinks: layer {layers.short[layer]} ({100 * float(mean[layer]):.0f} %)"
    axes.set(ylabel=quantity(data.sink_mass), title=title, ylim=(0, 1.06 * axes.get_ylim()[1]))


def _draw_main_over_steps(axes: Axes, data: xr.Dataset) -> None:
    _draw_layers_over_steps(axes, data, data[main_measure(data)])


def _draw_sinks_over_steps(axes: Axes, data: xr.Dataset) -> None:
    _draw_layers_over_steps(axes, data, data.sink_mass)


def _draw_ranks_over_steps(axes: Axes, data: xr.Dataset) -> None:
    names = short_names([printable(name) for name in data.weight.values])
    for index, weight in enumerate(evenly_spaced(len(names), SHOWN)):
        appearance = {**series(index), "marker": marker(index)["marker"], "markerfacecolor": "white"}
        axes.plot(
            _steps(data), data.stable_rank.isel(weight=weight), label=f"weight {_label(names[weight])}", **appearance
        )
    _finish_over_steps(axes, data)
    axes.set(ylabel="stable rank", title=_course("Stable rank", data.stable_rank.mean("weight")))


def _draw_layers_over_steps(axes: Axes, data: xr.Dataset, variable: xr.DataArray) -> None:
    """Draw the mean over heads as a line, and a band from the least to the greatest head, for a few layers."""
    names = short_names([printable(name) for name in data.layer.values])
    for index, layer in enumerate(evenly_spaced(len(names), SHOWN)):
        curve = variable.isel(layer=layer).transpose("step", "head")
        draw = band if data.sizes["step"] > 1 else measured
        draw(axes, _steps(data), curve, index, f"layer {_end(names[layer])}", over="head")
    _finish_over_steps(axes, data)
    name, _, unit = quantity(variable).partition(" / ")
    axes.set(ylabel=quantity(variable), title=_course(name.capitalize(), variable.mean(("layer", "head")), unit))


def _whole_numbers(axes: Axes) -> None:
    """Label the values as they are, not as differences from a number above the axis."""
    axes.ticklabel_format(axis="y", useOffset=False)


def _is_logarithmic(data: xr.Dataset) -> bool:
    """Return whether steps are drawn on a logarithmic axis: the first interval is short beside the whole training."""
    steps = data.step.values
    return len(steps) > 2 and bool(steps[-1] - steps[0] > LOGARITHMIC * (steps[1] - steps[0]))


def _steps(data: xr.Dataset) -> np.ndarray:
    return data.step.values + 1 if _is_logarithmic(data) else data.step.values


def _finish_over_steps(axes: Axes, data: xr.Dataset) -> None:
    if _is_logarithmic(data):
        axes.set(xscale="log", xlabel="step + 1")
        axes.minorticks_off()
    else:
        axes.set_xlabel("step")
    _whole_numbers(axes)
    low, high = axes.get_ylim()
    labels = axes.get_legend_handles_labels()[1]
    columns = 2 if max(map(len, labels), default=0) <= MAX_LABEL - 2 else 1
    legend = axes.legend(ncols=columns, loc="upper right")
    room = 0.14 * -(-len(labels) // columns)  # for the legend, which then covers no curve
    axes.set_ylim(max(low, 0.0) if axes.dataLim.y0 >= 0 else low, high + room * (high - low))
    for text in legend.get_texts():
        text.set_parse_math(False)


def _course(quantity: str, curve: xr.DataArray, unit: str = "") -> str:
    """Return a title: how the mean over layers and heads went from the first to the last step."""
    defined = curve.dropna("step")
    if not defined.size:
        return f"{quantity}: never finite"
    first, last = float(defined[0]), float(defined[-1])
    if defined.size == 1:
        return f"{quantity} is {last:.3g} {unit}".rstrip()
    if abs(last - first) < 0.02 * max(abs(first), abs(last)):
        return f"{quantity} stays at {last:.3g} {unit}".rstrip()
    return f"{quantity} {'falls' if last < first else 'rises'}: {first:.3g} to {last:.3g} {unit}".rstrip()


def draw_map(weights: xr.DataArray) -> Figure:
    """Draw one attention map, [query, key], with its tokens as labels if it has any.

    Args:
        weights: what `Recording.maps` returns, for one sequence and one head.
    """
    queries, keys = weights.sizes["query"], weights.sizes["key"]
    side = lambda count: min(7.5, max(2.6, 1.2 + 0.17 * count))  # noqa: E731
    with style():
        figure, axes = canvas(1, 1, width=side(keys) + 0.9, height=side(queries))
        panel = axes[0, 0]
        image = panel.imshow(weights.values, cmap="viridis", aspect="auto", interpolation="nearest", vmin=0)
        panel.set_facecolor("lightgrey")  # rows of queries that see no key
        panel.grid(visible=False)
        shown = _token_ticks(weights, "key")
        steep = 90 if "key_token" in weights.coords else 0
        panel.set_xticks(shown, _token_labels(weights, "key", shown), parse_math=False, rotation=steep)
        shown = _token_ticks(weights, "query")
        panel.set_yticks(shown, _token_labels(weights, "query", shown), parse_math=False)
        panel.set(xlabel="key", ylabel="query")
        panel.set_title(_concentration(weights), parse_math=False)
        figure.colorbar(image, ax=panel, label="attention weight")
    return figure


def _token_ticks(weights: xr.DataArray, axis: str) -> list[int]:
    """Return which positions are labelled: tokens as many as can be read, numbers in equal intervals."""
    count = weights.sizes[axis]
    return evenly_spaced(count, MAX_TOKENS) if f"{axis}_token" in weights.coords else _ticks(count)


def _token_labels(weights: xr.DataArray, axis: str, shown: Sequence[int]) -> list[str]:
    positions, tokens = weights[axis].values, weights.coords.get(f"{axis}_token")
    return [_label(str(positions[index] if tokens is None else tokens.values[index])) for index in shown]


def _concentration(weights: xr.DataArray) -> str:
    """Return a title: the layer and head, and where most of the weight is, on one key or at one distance."""
    where = f"{printable(str(weights.coords['layer'].values))}, head {int(weights.coords['head'])}"
    seen = weights.dropna("query", how="all")
    if not seen.size:
        return f"{where}:\nno query sees a key"
    by_key = seen.mean("query").values
    behind = (seen["query"].values + seen.attrs.get("offset", 0))[:, None] - seen["key"].values
    by_distance = {int(n): float(seen.values[behind == n].sum()) / len(behind) for n in np.unique(behind)}
    key, distance = int(np.nanargmax(by_key)), max(by_distance, key=by_distance.__getitem__)
    if by_distance[distance] > by_key[key]:
        place = (
            "the query itself" if distance == 0 else f"the key {abs(distance)} {'before' if distance > 0 else 'after'}"
        )
        return f"{where}:\n{100 * by_distance[distance]:.0f} % of the weight on {place}"
    token = f", “{_token_labels(seen, 'key', [key])[0]}”" if "key_token" in seen.coords else ""
    return f"{where}:\n{100 * by_key[key]:.0f} % of the weight on key {int(seen['key'][key])}{token}"


def _label(text: str, most: int = MAX_LABEL) -> str:
    """Return a label of few characters, each of which the font of the figures has."""
    text = printable(text)
    text = text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 + 1 :]}"
    glyphs = _glyphs()
    return "".join(char if ord(char) in glyphs else MISSING for char in text)


@cache
def _glyphs() -> frozenset[int]:
    """Return the characters of the font of the figures: matplotlib warns of any other."""
    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())
