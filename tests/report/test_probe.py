"""What `joma probe` shows: the records and tables of known measurements, and what the figure draws."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr

from joma.report.probe import CAPTION, CAPTION_OF_ONE, cosines, draw, layers, save, summary, tables, weights
from joma.runs import open_run
from joma.watch.series import Fault

STEPS = [0, 1, 8, 100]
FAULT = Fault("misplaced", ("step9",), "the weights of step9 belong after step100", "download it again", ("step9",))


def series_data(layer_count: int = 2) -> xr.Dataset:
    """Return a series whose entropy falls to its minimum at step 8 and recovers; head 1 is 0.5 nats above head 0."""
    course = np.array([3.0, 2.0, 1.0, 1.5])
    entropy = course[:, None, None] + 0.1 * np.arange(layer_count)[:, None] + np.array([-0.25, 0.25])
    ranks = np.array([10.0, 6.0, 4.0, 5.0])[:, None] + np.arange(layer_count)
    variables = {
        "entropy": (("step", "layer", "head"), entropy),
        "stable_rank": (("step", "weight"), ranks),
        "embedding_cosine": ("step", [0.2, 0.2, 0.25, 0.3]),
        "embedding_random": ("step", [0.2, 0.2, 0.2, 0.2]),
        "hidden_cosine": (("step", "depth"), np.array([0.4, 0.5, 0.6, 0.7])[:, None] + 0.01 * np.arange(3)),
        "bounce_p_value": ("layer", 0.02 + 0.01 * np.arange(layer_count)),
    }
    coordinates = {
        "step": STEPS,
        "checkpoint": ("step", [f"step{step}" for step in STEPS]),
        "layer": [f"h.{layer}.attn" for layer in range(layer_count)],
        "weight": [f"h.{layer}.mlp" for layer in range(layer_count)],
    }
    return xr.Dataset(variables, coordinates, {"source": "someone/model"})


def single_data() -> xr.Dataset:
    return series_data().isel(step=[2]).drop_vars("bounce_p_value")


def panels(data: xr.Dataset) -> dict:
    """Return the panels by their title without the letter; the colour bar has no title."""
    titled = {axes.get_title(loc="left"): axes for axes in draw(data).axes if axes.get_title(loc="left")}
    return {title.split(")  ")[1]: axes for title, axes in titled.items()}


def cells(table) -> list[list[str]]:
    """Return the rows of a rich table."""
    return [[str(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_a_series_has_the_course_of_each_layer():
    first, second = layers(series_data())
    assert first == {
        "layer": "h.0.attn",
        "heads": 2,
        "start": pytest.approx(3.0),
        "least": pytest.approx(1.0),
        "step": 8,
        "end": pytest.approx(1.5),
        "recovery": pytest.approx(0.5),
        "p_value": pytest.approx(0.02),
    }
    assert (second["layer"], second["least"]) == ("h.1.attn", pytest.approx(1.1))


def test_one_model_has_its_heads_instead_of_a_course():
    first, _ = layers(single_data())
    expected = {"mean": pytest.approx(1.0), "least_head": pytest.approx(0.75), "greatest_head": pytest.approx(1.25)}
    assert first == {"layer": "h.0.attn", "heads": 2, **expected}
    assert weights(single_data())[1] == {"weight": "h.1.mlp", "stable rank": 5.0}
    assert cosines(single_data())[0] == {"between": "token embeddings", "cosine": 0.25, "random directions": 0.2}


def test_weights_and_cosines_of_a_series():
    assert weights(series_data())[0] == {"weight": "h.0.mlp", "start": 10.0, "least": 4.0, "step": 8, "end": 5.0}
    embeddings, *hidden = cosines(series_data())
    assert embeddings == {"between": "token embeddings", "start": 0.2, "end": 0.3, "random directions": 0.2}
    assert [record["between"] for record in hidden] == [f"hidden vectors at depth {depth}" for depth in range(3)]
    assert hidden[2]["end"] == pytest.approx(0.72)


def test_steps_without_a_measurement_are_passed_over_and_heads_that_a_layer_lacks_are_not_counted():
    data = series_data()
    data.entropy[0] = np.nan
    data.entropy[:, 1, 1] = np.nan
    first, second = layers(data)
    assert (first["start"], first["heads"], second["heads"]) == (pytest.approx(2.0), 2, 1)
    data.entropy[:, 1] = np.nan
    (_, missing) = layers(data)
    assert missing["step"] == "–"
    assert np.isnan(missing["least"])


def test_tables_show_faults_first_and_a_dash_for_what_is_missing():
    data = series_data()
    data.entropy[:, 1] = np.nan
    audit, entropy, ranks, cosine = tables(data, [FAULT])
    assert str(audit.title) == "Audit"
    assert cells(audit) == [["misplaced", f"{FAULT.message}; download it again.", "1"]]
    assert [str(column.header) for column in entropy.columns] == [
        "layer",
        "heads",
        "start",
        "least",
        "at step",
        "end",
        "recovery",
        "p (noise alone)",
    ]
    assert cells(entropy)[0] == ["h.0.attn", "2", "3", "1", "8", "1.5", "0.5", "0.02"]
    assert cells(entropy)[1] == ["h.1.attn", "0", "–", "–", "–", "–", "–", "0.03"]
    assert cells(ranks)[1] == ["h.1.mlp", "11", "5", "8", "6"]
    assert cells(cosine)[0] == ["token embeddings", "0.2", "0.3", "0.2"]


def test_a_table_names_the_steps_that_it_lacks():
    data = series_data()
    assert next(str(table.title) for table in tables(data, [])) == "Entropy of attention / nats"
    data.entropy[3] = np.nan
    data.hidden_cosine[1:] = np.nan
    entropy, ranks, cosine = (str(table.title) for table in tables(data, []))
    assert entropy == "Entropy of attention / nats\nnot measured at step 100"
    assert ranks == "Stable rank of the MLP's lower matrices"
    assert cosine == "Root mean square cosine\nhidden vectors not measured at steps 1, 8, 100"
    assert summary(data)["missing_steps"] == {"entropy": [100], "hidden_cosine": [1, 8, 100]}
    assert "Entropy / nats, step 8" in panels(data)


def test_there_is_no_table_for_what_was_not_measured():
    only_ranks = series_data()[["stable_rank"]]
    assert [str(table.title) for table in tables(only_ranks, [])] == ["Stable rank of the MLP's lower matrices"]


def test_the_summary_is_valid_json_with_null_for_nan():
    data = series_data().drop_vars("embedding_random")
    content = json.loads(json.dumps(summary(data), allow_nan=False))
    assert content["source"] == "someone/model"
    assert content["steps"] == STEPS
    assert content["checkpoints"] == ["step0", "step1", "step8", "step100"]
    assert content["entropy"][0]["recovery"] == pytest.approx(0.5)
    assert content["cosines"][0]["random directions"] is None


def test_a_series_is_drawn_over_step_plus_one():
    data = series_data()
    drawn = panels(data)
    titles = ["Attention, mean over heads", "Lower matrix of the MLP", "Orthogonality", "Entropy / nats, step 100"]
    assert list(drawn) == titles
    entropy, ranks, cosine = (drawn[title] for title in titles[:3])
    for axes, ylabel in ((entropy, "entropy / nats"), (ranks, "stable rank"), (cosine, "root mean square cosine")):
        assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "step + 1", ylabel)
        assert axes.lines[0].get_xdata().tolist() == [1, 2, 9, 101]
    assert [line.get_label() for line in entropy.lines] == ["layer 0", "layer 1"]
    np.testing.assert_allclose(entropy.lines[1].get_ydata(), data.entropy.mean("head").isel(layer=1))
    np.testing.assert_allclose(ranks.lines[0].get_ydata(), [10.0, 6.0, 4.0, 5.0])
    legend = [text.get_text() for text in cosine.get_legend().get_texts()]
    assert legend == ["embeddings", "hidden, depth 0", "hidden, depth 1", "hidden, depth 2"]
    random = cosine.lines[-1]
    assert (random.get_linestyle(), random.get_ydata()) == (":", [0.2, 0.2])
    assert cosine.get_ylim()[0] == 0


def test_of_many_layers_six_are_drawn_from_the_first_to_the_last():
    lines = panels(series_data(layer_count=24))["Attention, mean over heads"].lines
    assert [line.get_label() for line in lines] == [f"layer {layer}" for layer in (0, 5, 9, 14, 18, 23)]


def test_the_heads_are_a_map_of_the_last_measured_step():
    data = series_data()
    data.entropy[3] = np.nan
    axes = panels(data)["Entropy / nats, step 8"]
    np.testing.assert_allclose(axes.images[0].get_array(), data.entropy.isel(step=2))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    assert axes.images[0].get_clim()[0] == 0


def test_one_model_is_drawn_over_its_layers():
    drawn = panels(single_data())
    assert list(drawn) == ["Lower matrix of the MLP", "Orthogonality", "Entropy / nats"]
    ranks, cosine, _ = drawn.values()
    assert ranks.get_xlabel() == "matrix, from the first layer on"
    assert [data.tolist() for data in ranks.lines[0].get_data()] == [[0, 1], [4.0, 5.0]]
    assert cosine.get_xlabel() == "depth"
    np.testing.assert_allclose(cosine.lines[0].get_ydata(), [0.6, 0.61, 0.62])


def test_embeddings_alone_are_one_labelled_point():
    axes = panels(single_data()[["embedding_cosine", "embedding_random"]])["Orthogonality"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["token embeddings"]
    assert axes.lines[0].get_ydata().tolist() == [0.25]


@pytest.mark.parametrize(("data", "caption"), [(series_data(), CAPTION), (single_data(), CAPTION_OF_ONE)])
def test_the_files_of_a_probe(data, caption, tmp_path):
    save(data, [FAULT], tmp_path)
    assert json.loads((tmp_path / "audit.json").read_text()) == [
        {
            "kind": "misplaced",
            "checkpoints": ["step9"],
            "message": "the weights of step9 belong after step100",
            "remedy": "download it again",
            "left_out": ["step9"],
        }
    ]
    stored = open_run(tmp_path)
    assert stored.drop_attrs().identical(data.drop_attrs())
    assert stored.attrs["source"] == "someone/model"
    assert stored.attrs["joma_version"]
    assert (tmp_path / "figures" / "1-probe.txt").read_text() == caption + "\n"
    assert (tmp_path / "figures" / "1-probe.svg").stat().st_size > 1000
