"""What `joma probe` shows: the records and tables of known measurements, and what the figure draws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from joma.manifest import read_manifest
from joma.report.probe import cosines, layers, save, summary, tables, weights
from joma.runs import open_run
from probed import FAULT, STEPS, series_data, single_data


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
    audit, entropy, sinks, ranks, cosine = tables(data, [FAULT])
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
    assert str(sinks.title) == "Attention to the first token"
    assert cells(sinks)[0] == ["h.0.attn", "2", "0.1", "0.1", "0", "0.4", "0.4"]
    assert cells(ranks)[1] == ["h.1.mlp", "11", "5", "8", "6"]
    assert cells(cosine)[0] == ["token embeddings", "0.2", "0.3", "0.2"]


def test_a_table_names_the_steps_that_it_lacks():
    data = series_data()
    assert next(str(table.title) for table in tables(data, [])) == "Entropy of attention / nats"
    data.entropy[3] = np.nan
    data.hidden_cosine[1:] = np.nan
    entropy, _, ranks, cosine = (str(table.title) for table in tables(data, []))
    assert entropy == "Entropy of attention / nats\nnot measured at step 100"
    assert ranks == "Stable rank of the MLP's lower matrices"
    assert cosine == "Root mean square cosine\nhidden vectors not measured at steps 1, 8, 100"
    assert summary(data)["missing_steps"] == {"entropy": [100], "hidden_cosine": [1, 8, 100]}


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
    assert content["measures"]["sink_mass"][1] == pytest.approx(
        {"layer": "h.1.attn", "heads": 2, "start": 0.1, "least": 0.1, "step": 0, "greatest": 0.4, "end": 0.4}
    )


def test_the_files_of_a_probe(tmp_path, monkeypatch):
    monkeypatch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(1, 1)))
    data = series_data()
    (tmp_path / "figures").mkdir()
    for suffix in (".svg", ".pdf", ".txt"):  # as an earlier version drew it
        (tmp_path / "figures" / f"1-probe{suffix}").write_text("old")
    page = save(data, [FAULT], tmp_path)
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
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    names = ("1-entropy", "2-sink_mass", "3-stable_rank", "4-cosines")
    assert figures == {f"{name}{suffix}" for name in names for suffix in (".svg", ".pdf", ".txt")}
    assert page == tmp_path / "probe.html"
    manifest = read_manifest(tmp_path)
    assert manifest.complete
    assert set(manifest.files) == {
        "trajectory.nc",
        "audit.json",
        "probe.html",
        *(f"figures/{name}" for name in figures),
    }
    manifest.check()
