"""The figure of a sweep: curves for one key, a heat map for two, panels for more, and points for random ones."""

import numpy as np
import pytest

from joma.arguments import InputError
from joma.sweeps import Draws, Grid, Range
from joma.sweeps.figure import check_claim, default_claim, draw
from joma.sweeps.joined import claims_dataset
from sweep_study import sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweeps")


def drawn(folder, plan):
    data = claims_dataset(sweep(folder, plan))
    figure, caption = draw(data, "end")
    figure.draw_without_rendering()
    return data, figure, caption


def test_one_key_is_a_curve_with_the_bounds_of_the_claim(folder):
    data, figure, caption = drawn(folder, Grid({"slope": [1.0, 2.0, 3.0]}))
    (panel,) = figure.axes
    curve = panel.lines[0]
    np.testing.assert_array_equal(curve.get_xdata(), [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(curve.get_ydata(), data.measured.sel(claim="end"))
    heights = [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == ":"]
    assert heights == [1.95, 2.05]
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {
        "holds",
        "does not hold",
        "expected 2 ± 0.05",
    }
    assert caption.startswith("The line ends at 2.")


def test_two_keys_are_a_heat_map_with_numbers_and_crosses(folder):
    data, figure, _ = drawn(folder, Grid({"slope": [1.0, 2.0, 3.0], "points": [1, 4]}))
    panel = figure.axes[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("slope", "points")
    shown = panel.images[0].get_array()
    expected = data.measured.sel(claim="end").transpose("points", "slope").values
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), np.isnan(expected))
    np.testing.assert_array_equal(shown.compressed(), expected[np.isfinite(expected)])
    assert [text.get_text() for text in panel.texts] == ["1\n✗", "2", "3\n✗"]


def test_further_keys_are_panels(folder):
    _, figure, _ = drawn(folder, Grid({"slope": [1.0, 2.0, 3.0], "points": [3, 4], "bold": [True, False]}))
    assert [panel.get_title() for panel in figure.axes if panel.images] == ["bold True", "bold False"]


def test_random_points_are_drawn_over_each_key(folder):
    _, figure, _ = drawn(folder, Draws({"slope": Range(0.01, 3.0, logarithmic=True), "mode": ["run", "plain"]}, 3))
    assert [panel.get_xlabel() for panel in figure.axes] == ["slope", "mode"]
    assert figure.axes[0].get_xscale() == "log"


def test_a_claim_that_changes_its_verdict_is_drawn_unless_another_is_chosen(folder):
    data = claims_dataset(sweep(folder, Grid({"slope": [1.0, 2.0]})))
    assert default_claim(data) == "end"
    assert default_claim(data.sel(slope=[1.0])) == "end"
    always = data.assign(verdict=data.verdict.where(data.claim != "end", "holds"))
    assert default_claim(always) == "each"
    assert default_claim(data.sel(claim=["later"])) == "later"
    assert default_claim(data.where(data.slope > 5)) is None
    with pytest.raises(InputError, match="end"):
        check_claim(data, "ends")
