"""The head laws in the tables, figures and page of a probe: the drift of a series, the imbalance of one model."""

from __future__ import annotations

import numpy as np
import pytest

from joma.report.probe import heads, missing_steps, summary, tables
from joma.report.probe_figures import draw, head_measure
from joma.report.probe_page import draw_figures, section
from joma.report.probe_sentences import head_heading
from probed import series_data, single_data, with_heads

SERIES, SINGLE = with_heads(series_data()), with_heads(single_data())
OF_OTHERS = "values and outputs of different heads"


def figure_of(data):
    ((name, panels, caption),) = [each for each in draw_figures(data) if "head" in each[0]]
    return name, draw(panels), caption


def test_a_series_shows_its_drift_and_a_model_its_imbalance():
    assert (head_measure(SERIES), head_measure(SINGLE), head_measure(series_data())) == ("drift", "imbalance", None)


def test_records_are_the_last_values():
    record = heads(SERIES)[1]
    assert (record["attention"], record["measure"]) == ("h.1.attn", "drift")
    assert record["queries and keys"] == pytest.approx(0.1)
    assert record["values and outputs"] == pytest.approx(0.2)
    assert record[OF_OTHERS] == pytest.approx(0.6)
    assert heads(SINGLE)[0][OF_OTHERS] == pytest.approx(0.6 / 2 * 0.5)
    assert heads(series_data()) == []
    assert summary(SERIES)["heads"][1] == record


def test_the_first_step_has_no_drift_and_that_is_no_gap():
    assert missing_steps(SERIES) == {}
    later = SERIES.copy(deep=True)
    later.value_output_drift[2] = np.nan
    later.query_key_drift[:] = np.nan  # normed queries have no law
    assert missing_steps(later) == {"value_output_drift": [8]}
    assert "queries and keys" not in heads(later)[0]


def test_a_table_is_shown():
    titles = [str(table.title) for table in tables(SERIES, ())]
    assert titles.index("Head laws, at the end") == titles.index("Stable rank of the MLP's lower matrices") + 1
    assert "Head laws, at the end" not in [str(table.title) for table in tables(series_data(), ())]


def test_headings_say_the_measure_and_that_of_different_heads():
    assert head_heading(SERIES, "drift") == (
        "Drift from what gradient flow keeps of a head: 0.1 (0.6 between different heads) for queries and keys, "
        "0.2 (0.6 between different heads) for values and outputs"
    )
    alone = SINGLE.assign({f"{law}_imbalance_others": SINGLE.query_key_imbalance * np.nan for law in ("query_key",)})
    assert head_heading(alone, "imbalance").startswith("Imbalance of heads: 0.025 for queries and keys, 0.05 (")


def test_curves_are_those_of_the_layers_and_of_different_heads():
    name, figure, caption = figure_of(SERIES)
    assert name.endswith("-head_drift")
    assert "dotted: between terms of different heads" in caption
    for axes, value in zip(figure.axes, (0.1, 0.2), strict=True):
        *layers, others = axes.lines
        assert [line.get_label() for line in axes.lines] == ["layer 0", "layer 1", "different heads"]
        for line in layers:
            np.testing.assert_allclose(line.get_ydata(), value * np.linspace(0.5, 1.0, 4)[1:])
        np.testing.assert_allclose(others.get_ydata(), 0.6 * np.linspace(0.5, 1.0, 4)[1:])
        np.testing.assert_array_equal(others.get_xdata(), layers[0].get_xdata())


def test_one_model_is_drawn_by_layer():
    name, figure, _ = figure_of(SINGLE)
    assert name.endswith("-head_imbalance")
    for axes in figure.axes:
        np.testing.assert_allclose(axes.lines[-1].get_ydata(), [0.15, 0.15])


@pytest.mark.parametrize("data", [SERIES, SINGLE], ids=["series", "single"])
def test_the_page_has_a_part_with_a_table(data):
    (part,) = [part for part in section(data, (), {})["parts"] if "head_" in part["figure"]["name"]]
    columns, (_, row) = part["table"]["columns"], part["table"]["rows"]
    assert columns[:3] == ["", "attention", "key heads"]
    assert len(columns) == len(row) == 7
    assert row[1:3] == ["h.1.attn", "2"]
    assert row[3][0].startswith("0.1 ± " if data is SERIES else "0.025 ± ")
    assert row[6] == ("0.6" if data is SERIES else "0.15")
