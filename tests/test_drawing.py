"""What each drawing helper draws: data, looks, labels and limits; and the files that a figure is saved as."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from joma.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    band,
    bars,
    canvas,
    clear,
    evenly_spaced,
    fixed_canvas,
    letters,
    marker,
    measured,
    png,
    save,
    series,
    style,
    theory,
)

X = np.array([1.0, 2.0, 4.0])
SEEDS = xr.DataArray([[0.0, 1.0, 2.0], [2.0, 1.0, 5.0], [1.0, 4.0, 2.0]], dims=("seed", "step"))


@pytest.fixture
def axes():
    return canvas()[1][0, 0]


def test_a_canvas_has_panels_of_the_given_size_in_the_style():
    figure, panels = canvas(2, 3, width=2.0, height=1.5, sharex=True)
    assert panels.shape == (2, 3)
    assert figure.get_size_inches().tolist() == [6.0, 3.0]
    assert panels[0, 0].get_shared_x_axes().joined(panels[0, 0], panels[1, 2])
    assert not panels[0, 0].spines["top"].get_visible()
    assert panels[0, 0].xaxis.get_gridlines()[0].get_visible()


def test_a_fixed_canvas_leaves_its_panels_in_place_whatever_is_drawn():
    places = []
    for label in ("y", "a label that is much\nwider"):
        figure, panels = fixed_canvas(2, 2, width=3.0, height=2.0)
        panels[0, 0].set(ylabel=label, title=label)
        png(figure)
        places.append([panel.get_position().bounds for panel in panels.flat])
    assert places[0] == places[1]
    assert figure.get_size_inches().tolist() == [6.0, 4.0]
    assert not panels[0, 0].spines["top"].get_visible()


def test_a_png_has_the_size_of_the_figure_and_the_same_bytes_each_time():
    first, second = (png(fixed_canvas(1, 2, width=3.0, height=2.0)[0]) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")
    assert [int.from_bytes(first[start : start + 4]) for start in (16, 20)] == [660, 220]  # at 110 dots per inch


def test_the_style_ends_with_its_block():
    before = mpl.rcParams["axes.grid"]
    with style():
        assert mpl.rcParams["axes.grid"]
        assert mpl.rcParams["svg.hashsalt"] == "joma"
    assert mpl.rcParams["axes.grid"] == before
    assert mpl.rcParams["svg.hashsalt"] is None


def test_series_differ_in_black_and_white():
    assert len(COLOURS) == len(set(COLOURS)) == len(set(map(str, LINES))) == len(set(MARKERS))
    assert [series(index) for index in (1, 8)] == [{"color": COLOURS[1], "linestyle": LINES[1]}] * 2
    assert marker(9) == marker(2)
    assert marker(2)["marker"] == MARKERS[2]
    assert marker(2)["linestyle"] == "none"


def test_theory_is_a_line(axes):
    theory(axes, X, X**2, 2, "prediction", linewidth=3.0)
    (line,) = axes.lines
    np.testing.assert_array_equal(line.get_xydata(), np.stack([X, X**2], axis=1))
    assert to_hex(line.get_color()) == COLOURS[2].lower()
    assert line.get_linestyle() == "-."
    assert line.get_marker() == "None"
    assert (line.get_label(), line.get_linewidth()) == ("prediction", 3.0)


@pytest.mark.parametrize("kind", [list, np.asarray, lambda values: xr.DataArray(values, dims="step")])
def test_a_measurement_without_seeds_is_points(axes, kind):
    measured(axes, X, kind([3.0, 1.0, 2.0]), 1, "run")
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [3.0, 1.0, 2.0]
    assert (line.get_linestyle(), line.get_marker(), line.get_markerfacecolor()) == ("None", MARKERS[1], "white")
    assert line.get_label() == "run"
    assert not axes.containers


def test_a_measurement_with_seeds_has_bars_from_the_lowest_to_the_highest(axes):
    measured(axes, X, SEEDS, 3, "runs")
    (container,) = axes.containers
    points, _, (segments,) = container.lines
    np.testing.assert_allclose(points.get_xydata(), [[1.0, 1.0], [2.0, 2.0], [4.0, 3.0]])
    ends = np.array([segment[:, 1] for segment in segments.get_segments()])
    np.testing.assert_allclose(ends, [[0.0, 2.0], [1.0, 4.0], [2.0, 5.0]])
    assert container.get_label() == "runs"
    assert points.get_marker() == MARKERS[3]


def test_seeds_that_agree_are_drawn_though_their_mean_rounds_past_them(axes):
    values = xr.DataArray(np.full((3, 2), 0.1), dims=("seed", "step"))
    assert float(values.mean("seed")[0]) > 0.1
    measured(axes, [0, 1], values)
    ends = axes.containers[0].lines[2][0].get_segments()[0]
    np.testing.assert_allclose(ends[:, 1], 0.1, rtol=1e-12)


def test_bars_are_distances_from_the_mean():
    mean, distances = bars(SEEDS)
    assert mean.tolist() == [1.0, 2.0, 3.0]
    assert distances.tolist() == [[1.0, 1.0, 1.0], [1.0, 2.0, 2.0]]


def test_a_band_is_the_mean_between_the_lowest_and_the_highest_seed(axes):
    band(axes, X, SEEDS, 1, "runs")
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [1.0, 2.0, 3.0]
    assert (line.get_label(), line.get_linestyle()) == ("runs", "--")
    (area,) = axes.collections
    corners = {tuple(corner) for corner in area.get_paths()[0].vertices.tolist()}
    assert corners == {(1.0, 0.0), (2.0, 1.0), (4.0, 2.0), (1.0, 2.0), (2.0, 4.0), (4.0, 5.0)}
    assert to_hex(area.get_facecolor()[0]) == to_hex(line.get_color()) == COLOURS[1].lower()
    assert 0 < area.get_alpha() < 0.5


@given(count=st.integers(1, 60), shown=st.integers(2, 12))
def test_evenly_spaced_indices_reach_from_the_first_to_the_last(count, shown):
    indices = evenly_spaced(count, shown)
    assert (indices[0], indices[-1]) == (0, count - 1)
    assert len(indices) == min(count, shown)
    assert np.ptp(np.diff(indices)) <= 1 if len(indices) > 1 else count == 1


def test_panels_are_lettered_row_by_row():
    _, panels = canvas(2, 2)
    panels[0, 1].set_title("Entropy")
    letters(panels)
    assert [panel.get_title(loc="left") for panel in panels.flat] == ["(a)", "(b)  Entropy", "(c)", "(d)"]
    assert [panel.get_title() for panel in panels.flat] == [""] * 4


def drawn_figure():
    figure, panels = canvas()
    theory(panels[0, 0], X, X, 0, "line")
    panels[0, 0].legend()
    return figure


def test_a_figure_is_saved_as_pictures_and_caption_with_the_same_bytes_each_time(tmp_path):
    for folder in ("first", "second"):
        save(drawn_figure(), tmp_path / folder / "1-line", caption="A line.")
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / f).iterdir()} for f in ("first", "second"))
    assert sorted(first) == ["1-line.pdf", "1-line.svg", "1-line.txt"]
    assert first == second
    assert first["1-line.svg"].startswith(b"<?xml")
    assert first["1-line.pdf"].startswith(b"%PDF")
    assert first["1-line.txt"] == b"A line.\n"
    written = save(drawn_figure(), tmp_path / "first" / "1-line", caption="A line.", pdf=False)
    assert sorted(written) == sorted((tmp_path / "first").iterdir())  # the earlier PDF is gone
    assert {path.name: path.read_bytes() for path in written} == {n: second[n] for n in ("1-line.svg", "1-line.txt")}


def test_only_saved_figures_that_are_not_kept_are_removed(tmp_path):
    for stem in ("1-line", "2-old", "3-lacks-its-pdf", "named"):
        for suffix in (".svg", ".pdf", ".txt"):
            (tmp_path / f"{stem}{suffix}").write_text("")
    (tmp_path / "3-lacks-its-pdf.pdf").unlink()
    clear(tmp_path, keep=["1-line"])
    assert {path.stem for path in tmp_path.iterdir()} == {"1-line", "3-lacks-its-pdf", "named"}
    clear(tmp_path / "none", keep=[])


def test_figures_that_were_being_removed_when_the_process_died_are_removed(tmp_path):
    for name in ("1-line.svg", "2-old.pdf", "2-old.txt", "2-mine.pdf", "secret.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "figures").mkdir()
    clear(tmp_path, keep=["1-line"], earlier=["1-line", "2-old", "3-gone", "../secret", "1-/../secret"])
    assert {path.name for path in tmp_path.iterdir()} == {"1-line.svg", "2-mine.pdf", "secret.txt", "figures"}
