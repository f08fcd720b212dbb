"""The page Runs: it runs as a script, its code gives its curves, and folders without runs are a sentence."""

import numpy as np
import pytest

import toy_study
from joma.arguments import InputError
from joma.drawing import png
from joma.lab import runs as page
from joma.study import execute
from lab_pages import run_as_script, run_code, run_page, widget


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two runs of one study."""
    out = tmp_path_factory.mktemp("out") / "runs"
    for slope in (1.0, 2.0):
        execute(toy_study.STUDY, out=out, config=toy_study.Config(slope=slope))
    return out


def choose(folder, **changes):
    known = page.entries(str(folder))
    return run_page(page.app, folder=widget(str(folder)), known=known, chosen=widget([*known]), **changes)


def test_the_page_runs_as_a_script_without_a_network(tmp_path):
    run_as_script("runs", tmp_path)


def test_the_code_to_copy_gives_the_curves_of_the_page(folder):
    names = choose(folder)
    copied = run_code(names["code"])
    assert len(copied.curves) == len(names["selected"]) == 2
    for copied_curve, curve in zip(copied.curves, names["selected"].values(), strict=True):
        np.testing.assert_array_equal(copied_curve, curve.transpose(*copied_curve.dims))


def test_the_claims_of_all_chosen_runs_are_listed_with_their_verdicts(folder):
    claims = choose(folder)["claims"]
    assert len(claims) == 2 * len(toy_study.STUDY.claims)
    assert {claim["verdict"] for claim in claims} <= {"holds", "does not hold", "not tested"}


def test_a_folder_of_one_study_or_one_run_will_do(folder):
    (study,) = folder.iterdir()
    assert [*page.entries(str(study)).values()] == [*page.entries(str(folder)).values()]
    path = next(study.iterdir())
    assert [*page.entries(str(path)).values()] == [path]


@pytest.mark.parametrize("name", ["", "  ", "no-such-folder", "NaN"])
def test_a_folder_without_runs_is_a_sentence_and_the_page_goes_on(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="`folder` must be one with runs or sweeps below it"):
        page.entries(name)
    assert run_page(page.app, folder=widget(name))["claims"] == []


def test_a_damaged_run_is_left_out_and_the_others_are_drawn(folder, tmp_path):
    import shutil

    out = tmp_path / "runs"
    shutil.copytree(folder, out)
    first, _ = page.entries(str(out)).values()
    content = (first / "trajectory.nc").read_bytes()
    (first / "trajectory.nc").write_bytes(content[:-100])
    page.opened.cache_clear()
    assert len(choose(out)["datasets"]) == 1


def test_lines_are_labels_of_a_dimension_and_places_select_the_others():
    import xarray as xr

    values = xr.DataArray(np.arange(24.0).reshape(2, 3, 4), {"arm": ["a", "b"]}, ("arm", "layer", "step"))
    data = {"run": xr.Dataset({"value": values})}
    lines = page.curves(data, "value", "step", "arm", {"layer": 2})
    assert {label: line.values.tolist() for label, line in lines.items()} == {
        "arm a": [8, 9, 10, 11],
        "arm b": [20, 21, 22, 23],
    }
    assert png(page.draw(lines, "value", "step", True)).startswith(b"\x89PNG")
    assert page.usual_axis(values) == "step"
    assert page.drawable(data["run"]) == ["value"]
