"""What the figures of recordings show: the data of their panels, their titles and labels, and that all can be drawn."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from joma.watch.figures import MAX_LABEL, MAX_TICKS, draw_map, draw_recording, draw_trajectory, short_names


def recording(layers: int, heads: int, *names: str, passes: int = 2) -> xr.Dataset:
    random = np.random.default_rng(layers + heads)
    dims = ("pass", "layer", "head")
    values = {name: (dims, random.random((passes, layers, heads))) for name in ("entropy", *names)}
    data = xr.Dataset(values, {"layer": [f"model.layers.{layer}.attn" for layer in range(layers)]})
    data.entropy.attrs["units"] = "nat"
    return data


def trajectory(steps: list[int], layers: int, heads: int, *names: str) -> xr.Dataset:
    random = np.random.default_rng(0)
    shape = (len(steps), layers, heads)
    values = {name: (("step", "layer", "head"), random.random(shape)) for name in ("entropy", *names)}
    ranks = (("step", "weight"), 1 + random.random((len(steps), layers)))
    coordinates = {
        "layer": [f"h.{layer}.attn" for layer in range(layers)],
        "weight": [f"h.{n}.fc" for n in range(layers)],
    }
    data = xr.Dataset({**values, "stable_rank": ranks}, {"step": steps, **coordinates})
    data.entropy.attrs["units"] = "nat"
    return data


def rendered(figure: Figure) -> Figure:
    """Return the figure after rendering it: warnings, such as of missing glyphs, are errors here."""
    figure.savefig(io.BytesIO(), format="png")
    return figure


@pytest.mark.parametrize("layers", [1, 12, 48])
@pytest.mark.parametrize("heads", [2, 64])
def test_the_heat_map_has_the_mean_entropy_of_each_head_and_its_own_range(layers: int, heads: int) -> None:
    data = recording(layers, heads)
    panel, *_ = rendered(draw_recording(data)).axes
    (image,) = panel.images
    mean = data.entropy.values.mean(axis=0)
    np.testing.assert_allclose(image.get_array(), mean)
    np.testing.assert_allclose(image.get_clim(), (mean.min(), mean.max()))
    layer, head = np.argwhere(mean == mean.min())[0]
    assert panel.get_title() == f"Least: layer {layer}, head {head} ({mean.min():.2f} nats)"
    assert len(panel.get_xticks()) <= MAX_TICKS
    assert len(panel.get_yticks()) <= MAX_TICKS


@pytest.mark.parametrize("layers", [2, 48])
def test_a_model_with_one_head_is_drawn_by_layer(layers: int) -> None:
    data = recording(layers, 1)
    (panel,) = rendered(draw_recording(data)).axes
    assert not panel.images
    np.testing.assert_allclose(panel.lines[0].get_ydata(), data.entropy.values.mean(axis=0)[:, 0])


@pytest.mark.parametrize("layers", [3, 40])
def test_sinks_are_drawn_by_layer_with_the_spread_over_heads_if_they_were_measured(layers: int) -> None:
    data = recording(layers, 8, "sink_mass")
    figure = rendered(draw_recording(data))
    panel = figure.axes[1]
    sinks = data.sink_mass.values.mean(axis=0)
    np.testing.assert_allclose(panel.lines[0].get_ydata(), sinks.mean(axis=1))
    if layers == 3:
        segments = np.array(panel.collections[0].get_segments())
        np.testing.assert_allclose(segments[:, :, 1], np.stack([sinks.min(axis=1), sinks.max(axis=1)], axis=1))
    strongest = int(sinks.mean(axis=1).argmax())
    assert f"Most on sinks: layer {strongest} ({100 * sinks.mean(axis=1).max():.0f} %)" in panel.get_title(loc="left")


def test_sequences_and_queries_are_averaged_over_and_missing_heads_stay_blank() -> None:
    values = np.random.default_rng(0).random((1, 2, 3, 4, 5))  # pass, layer, batch, head, query
    values[:, 1, :, 2:] = np.nan
    data = xr.Dataset({"entropy": (("pass", "layer", "batch", "head", "query"), values)}, {"layer": ["a", "b"]})
    (image,) = rendered(draw_recording(data)).axes[0].images
    np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), values.mean(axis=(0, 2, 4)))


def test_equal_heads_and_diverged_models_are_named_as_such() -> None:
    data = recording(2, 2)
    assert rendered(draw_recording(xr.ones_like(data))).axes[0].get_title() == "All heads: 1.00 nats"
    nothing = rendered(draw_recording(data * np.nan))
    assert nothing.axes[0].get_title() == "No finite value"


def test_another_measure_takes_the_place_of_entropy() -> None:
    data = recording(3, 4, "distance", "sink_mass")
    data.distance.attrs.update(long_name="attended distance", units="tokens")
    first = rendered(draw_recording(data[["distance", "sink_mass"]]))
    np.testing.assert_allclose(first.axes[0].images[0].get_array(), data.distance.mean("pass"))
    assert first.axes[-1].get_ylabel() == "attended distance / tokens"
    assert len(rendered(draw_recording(data[["sink_mass"]])).axes) == 1
    training = trajectory([0, 1], 2, 2, "distance", "sink_mass")
    assert [panel.get_ylabel() for panel in draw_trajectory(training[["distance", "sink_mass"]]).axes] == [
        "distance",
        "sink mass",
    ]
    assert len(rendered(draw_trajectory(training[["stable_rank"]])).axes) == 1


def test_a_training_shows_the_mean_over_heads_of_a_few_layers_and_the_ranks() -> None:
    data = trajectory([0, 10, 20, 30], 12, 4)
    figure = rendered(draw_trajectory(data))
    entropy, ranks = figure.axes
    for line, layer in zip(entropy.lines, (0, 4, 7, 11), strict=True):
        np.testing.assert_allclose(line.get_ydata(), data.entropy[:, layer].mean("head"))
        np.testing.assert_array_equal(line.get_xdata(), data.step)
        np.testing.assert_allclose(ranks.lines[(0, 4, 7, 11).index(layer)].get_ydata(), data.stable_rank[:, layer])
    assert [text.get_text() for text in entropy.get_legend().get_texts()] == [f"layer {n}" for n in (0, 4, 7, 11)]
    low = np.asarray(data.entropy[:, 0].min("head"))
    assert low.min() == pytest.approx(entropy.collections[0].get_paths()[0].vertices[:, 1].min())
    assert entropy.get_xscale() == "linear"


@pytest.mark.parametrize(("layers", "heads"), [(2, 1), (48, 64)])
def test_a_long_training_with_sinks_is_drawn_on_a_logarithmic_axis(layers: int, heads: int) -> None:
    data = trajectory([0, 8, 64, 512, 4000], layers, heads, "sink_mass")
    figure = rendered(draw_trajectory(data))
    assert [panel.get_xscale() for panel in figure.axes] == ["log"] * 3
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_xdata(), data.step + 1)


def test_the_title_of_a_training_says_how_the_mean_went() -> None:
    data = trajectory([0, 1, 2], 1, 1)[["entropy"]]
    for values, title in (
        ([3.0, 2.5, 2.0], "Entropy falls: 3 to 2 nats"),
        ([np.nan, 2.0, 3.0], "Entropy rises: 2 to 3 nats"),
        ([2.0, 5.0, 2.01], "Entropy stays at 2.01 nats"),
        ([np.nan] * 3, "Entropy: never finite"),
    ):
        changed = data.copy(data={"entropy": np.reshape(values, (3, 1, 1))})
        assert rendered(draw_trajectory(changed)).axes[0].get_title() == title
    assert draw_trajectory(data.isel(step=[0])).axes[0].get_title().startswith("Entropy is 0.637")


def test_the_axis_of_values_that_hardly_change_has_the_values_themselves() -> None:
    data = trajectory([0, 1, 2], 2, 2, "sink_mass")
    data["entropy"] = 1.5006 + 1e-6 * data.entropy
    data["sink_mass"] = 0.25 + 1e-6 * data.sink_mass
    figures = draw_trajectory(data), draw_recording(data.isel(step=0)[["sink_mass"]])
    for axes in [rendered(figures[0]).axes[0], rendered(figures[0]).axes[1], rendered(figures[1]).axes[0]]:
        assert axes.yaxis.get_offset_text().get_text() == ""


def attention_map(tokens: list[str] | None, size: int = 4) -> xr.DataArray:
    weights = np.tril(np.random.default_rng(0).random((size, size)) + 0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    coordinates = {"query": np.arange(size), "key": np.arange(size), "head": 1, "layer": "h.0.attn"}
    if tokens:
        coordinates |= {"query_token": ("query", tokens), "key_token": ("key", tokens)}
    return xr.DataArray(weights, dims=("query", "key"), coords=coordinates)


def test_a_map_shows_its_weights_and_its_tokens() -> None:
    tokens = [" The", "$x_1$", "\n", "中<b>"]
    weights = attention_map(tokens)
    panel = rendered(draw_map(weights)).axes[0]
    np.testing.assert_allclose(panel.images[0].get_array(), weights.values)
    labels = [" The", "$x_1$", r"\n", "□<b>"]
    assert [label.get_text() for label in panel.get_xticklabels()] == labels
    assert [label.get_text() for label in panel.get_yticklabels()] == labels
    share = weights.values.mean(axis=0)[0]
    assert panel.get_title() == f"h.0.attn, head 1:\n{100 * share:.0f} % of the weight on key 0, “ The”"


@pytest.mark.parametrize(
    ("distance", "place"), [(0, "the query itself"), (2, "the key 2 before"), (-1, "the key 1 after")]
)
def test_the_title_of_a_map_names_the_distance_where_most_of_the_weight_is(distance: int, place: str) -> None:
    weights = xr.zeros_like(attention_map(None, 6))
    rows = np.arange(6)[max(0, distance) : 6 + min(0, distance)]
    weights.values[rows, rows - distance] = 1.0
    share = len(rows) / 6
    assert rendered(draw_map(weights)).axes[0].get_title().endswith(f"{100 * share:.0f} % of the weight on {place}")
    later = weights.assign_attrs(offset=1)  # with a cache, queries stand later
    nearer = {0: "the key 1 before", 2: "the key 3 before", -1: "the query itself"}[distance]
    assert draw_map(later).axes[0].get_title().endswith(nearer)


def test_a_map_without_tokens_or_with_hidden_rows_has_positions() -> None:
    weights = attention_map(None)[1:]
    panel = rendered(draw_map(weights)).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["1", "2", "3"]
    by_distance = [np.trace(weights.values, offset) / 3 for offset in (1, 0, -1, -2)]  # rows 1 to 3
    assert panel.get_title().endswith(f"{100 * by_distance[1]:.0f} % of the weight on the key 1 before")
    assert by_distance[1] > max(*np.delete(by_distance, 1), *weights.values.mean(axis=0))
    assert "no query sees a key" in rendered(draw_map(weights * np.nan)).axes[0].get_title()
    assert rendered(draw_map(attention_map(None, 300))).axes[0].get_xticks().tolist() == [*range(0, 300, 25)]
    assert len(rendered(draw_map(attention_map(["a"] * 300, 300))).axes[0].get_xticks()) == 40


def test_layers_with_long_names_have_numbers_in_titles_and_names_beside_the_heat_map() -> None:
    names = ["encoder.block.0.SelfAttention", "decoder.block.0.SelfAttention", "decoder.block.0.EncDecAttention"]
    data = recording(3, 4, "sink_mass").assign_coords(layer=names)
    heat_map, sinks, _ = rendered(draw_recording(data)).axes
    labels = ["0: encoder.SelfAttention", "1: decoder.SelfAttention", "2: decoder.EncDecAttention"]
    assert [label.get_text() for label in heat_map.get_yticklabels()] == labels
    assert [label.get_text() for label in sinks.get_xticklabels()] == ["0", "1", "2"]
    assert re.search(r"Least: layer [012], head", heat_map.get_title(loc="left"))
    training = trajectory([0, 1], 3, 2).assign_coords(layer=names)
    (first, *_) = rendered(draw_trajectory(training)).axes[0].get_legend().get_texts()
    assert first.get_text() == "layer encoder.SelfAttention"


def test_short_names_stay_apart() -> None:
    assert short_names(["attn"]) == ["attn"]
    assert short_names(["a.0.attn", "a.1.attn", "a.10.attn"]) == ["0", "1", "10"]
    assert short_names(["m.0.attn", "m.1.mixer.attn"]) == ["0", "1.mixer"]
    assert short_names(["a.b.c.d", "a.b.c.c.d"]) == ["d", "c.d"]
    assert short_names(["h.0.attn.c.weight", "h.1.fc.weight"]) == ["0.attn.c", "1.fc"]
    assert short_names(["m.attn", "m.attn[1]", "m"]) == ["m.attn", "m.attn[1]", "m"]
    assert max(map(len, short_names(["x" * 30 + ".0", "y" * 30 + ".0"]))) > MAX_LABEL
