"""Tables of recordings: their numbers against NumPy's, their length, and what is escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import xarray as xr

from joma.watch.display import as_html, as_text, summarise_recording, summarise_trajectory


def recording(layers: int, heads: int) -> xr.Dataset:
    values = np.random.default_rng(0).random((2, layers, heads)) * 3
    names = [f"model.layers.{layer}.attn" for layer in range(layers)]
    return xr.Dataset({"entropy": (("pass", "layer", "head"), values)}, {"layer": names})


def test_a_row_has_heads_mean_and_spread_over_heads_least_and_rows() -> None:
    data = recording(2, 5)
    heads = data.entropy.values.mean(axis=0)
    text = as_text(summarise_recording("GPT", data, {"model.layers.1.attn": 84}, {}))
    title, columns, first, second = text.splitlines()
    assert title == "Attention of GPT: 2 passes, 2 layers"
    assert columns.split("  ")[1] == "layer"
    expected = [f"{heads[1].mean():.3f}", "±", f"{heads[1].std(ddof=1):.3f}", f"{heads[1].min():.3f}", "84"]
    assert second.split() == ["model.layers.1.attn", "5", *expected]
    assert first.split()[-1] == "–"
    assert len({len(line) for line in (columns, first, second)}) == 1


def test_many_layers_are_shown_by_the_first_and_the_last() -> None:
    not_seen = {f"layer.{index}": "its weights are not computed by softmax" for index in range(5)}
    lines = as_text(summarise_recording("GPT", recording(48, 64), {}, not_seen)).splitlines()
    assert len(lines) <= 13
    assert lines[2].split()[0] == "model.layers.0.attn"
    assert lines[6].strip() == "… 41 more"
    assert lines[9].split()[0] == "model.layers.47.attn"
    assert lines[-3] == "not seen: layer.0 (its weights are not computed by softmax)"
    assert lines[-1] == "not seen: 3 more, listed in `.not_seen`"
    assert max(map(len, lines)) <= 100


def test_unreduced_recordings_missing_heads_and_long_names() -> None:
    values = np.random.default_rng(0).random((1, 1, 2, 3, 4))
    values[:, :, :, 1:] = np.nan
    data = xr.Dataset({"entropy": (("pass", "layer", "batch", "head", "query"), values)}, {"layer": ["x" * 80]})
    row = as_text(summarise_recording("M", data, {}, {})).splitlines()[2].split()
    assert row[0] == "…" + "x" * 43
    assert row[1:3] == ["1", f"{values[0, 0, :, 0].mean():.3f}"]
    empty = as_text(summarise_recording("M", data * np.nan, {}, {})).splitlines()[2].split()
    assert empty[1:] == ["3", "NaN", "NaN", "–"]


def test_a_recording_without_a_pass_says_so() -> None:
    assert as_text(summarise_recording("M", None, {}, {})) == "Attention of M: no forward pass recorded yet"
    assert as_text(summarise_trajectory("M", None)) == "Recorder of M: no probe yet"


def test_a_trajectory_has_the_first_and_the_last_probe_and_the_ranks() -> None:
    entropy = np.array([[[3.0, 2.0], [1.0, 1.0]], [[2.0, 1.0], [0.5, 0.25]]])
    ranks = np.array([[4.0, 6.0], [2.0, 2.0]])
    data = xr.Dataset(
        {"entropy": (("step", "layer", "head"), entropy), "stable_rank": (("step", "weight"), ranks)},
        {"step": [0, 100], "layer": ["a", "b"], "weight": ["v", "w"]},
    )
    lines = [line.split() for line in as_text(summarise_trajectory("GPT", data)).splitlines()]
    assert " ".join(lines[0]) == "Recorder of GPT: 2 probes, steps 0 to 100"
    assert lines[2] == ["a", "2", "2.500", "±", "0.707", "1.500", "±", "0.707", "1.000"]
    assert lines[3][-1] == "0.250"
    assert " ".join(lines[4]) == "stable rank of 2 weights: 4 to 6 at step 0, 2 at step 100"
    first = as_text(summarise_trajectory("GPT", data.isel(step=[0]))).splitlines()
    assert first[0] == "Recorder of GPT: 1 probe, step 0"
    assert first[1].split() == ["layer", "heads", "entropy", "at", "step", "0", "least"]
    assert first[2].split() == ["a", "2", "2.500", "±", "0.707", "2.000"]
    assert first[4] == "stable rank of 2 weights: 4 to 6 at step 0"
    only_ranks = as_text(summarise_trajectory("GPT", data[["stable_rank"]]))
    assert only_ranks.splitlines()[1].startswith("stable rank of 2 weights")


def test_what_is_nan_is_said_in_the_table_and_below_it() -> None:
    entropy = np.array([[[3.0, 2.0, 4.0], [1.0, 1.0, np.nan]], [[2.0, 1.0, np.nan], [np.nan, np.nan, np.nan]]])
    ranks = np.array([[4.0, 6.0], [np.nan, 2.0]])
    data = xr.Dataset(
        {"entropy": (("step", "layer", "head"), entropy), "stable_rank": (("step", "weight"), ranks)},
        {"step": [0, 100], "layer": ["a", "b"], "weight": ["v", "w"]},
    )
    summary = summarise_trajectory("GPT", data)
    lines = [line.split() for line in as_text(summary).splitlines()]
    assert lines[2] == ["a", "3", "3.000", "±", "1.000", "1.500", "±", "0.707", "1.000"]
    assert lines[3] == ["b", "2", "1.000", "±", "0.000", "NaN", "NaN"]  # which has two heads
    note = "NaN or infinite at step 100: 3 of 5 heads, 1 of 2 weights"
    assert as_text(summary).splitlines()[-1] == note
    assert f"<p>{note}</p>" in as_html(summary)
    lost = as_text(summarise_trajectory("GPT", (data * np.nan).isel(step=[1])))
    assert "stable rank of 2 weights: NaN at step 100" in lost
    assert lost.endswith("NaN or infinite at step 100: 6 of 6 heads, 2 of 2 weights")
    assert "NaN" not in as_text(summarise_trajectory("GPT", data.isel(step=[0])))
    text = as_text(
        summarise_recording("GPT", data.rename(step="pass")[["entropy"]].isel({"pass": [1]}), {}, {"c": "why"})
    )
    assert text.splitlines()[2].split() == ["a", "2", "1.500", "±", "0.707", "1.000", "–"]
    assert text.splitlines()[4:] == ["NaN or infinite over all rows: 3 of 5 heads", "not seen: c (why)"]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_escaped_and_has_no_resources() -> None:
    data = recording(2, 2).assign_coords(layer=["<script>alert(1)</script>", "b&c"])
    reader = Reader()
    reader.feed(as_html(summarise_recording("<Model>", data, {}, {"<i>": "<img src=x>"})))
    assert {tag for tag, _ in reader.tags} == {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert all(not attributes for _, attributes in reader.tags)
    assert "<script>alert(1)</script>" in reader.text
    assert "not seen: <i> (<img src=x>)" in reader.text


def test_control_characters_do_not_reach_the_terminal() -> None:
    data = recording(1, 2).assign_coords(layer=["a\x1b[2Jb"])
    text = as_text(summarise_recording("M\x1b", data, {}, {"x\n": "y\x07"}))
    assert text.replace("\n", "").isprintable()
