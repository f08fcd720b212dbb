"""`joma sweep`: its tables, its exit codes and its JSON; units run in this process."""

import json
from pathlib import Path

import pytest

from command_line import joma
from joma import engine, open_run, open_sweep
from offered_studies import offer
from sweep_study import InlineEngine


class Engine(InlineEngine):
    def __init__(self, jobs=None, **_):
        super().__init__()
        self.jobs = jobs or 2


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "sweep_study"})
    monkeypatch.setattr(engine, "LocalEngine", Engine, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def test_a_sweep_prints_its_units_before_and_its_verdicts_after(tmp_path, capsys):
    args = ("sweep", "toy", "--grid", "slope=2,2.01", "--grid", "points=3,4", "--out", tmp_path)
    code, out, err = joma(*args, "--jobs", 2, capsys=capsys)
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "4 units: 4 to run, 0 finished already; 2 at once about 2 s, estimated from the preset's 1 s" in words
    assert out.index("to run") < out.index("The line ends at 2.")
    assert "4 hold" in out
    code, out, _ = joma(*args, capsys=capsys)
    assert code == 0
    assert "4 units, 4 finished, 0 failed; 0 run now" in " ".join(out.split())
    path = Path(out.split("The sweep: ")[1].split()[0])
    assert open_sweep(path).value.sizes == {"slope": 2, "points": 2, "seed": 3, "time": 5}


def test_exit_codes_and_failures(tmp_path, capsys):
    claims = ("sweep", "toy", "--grid", "slope=1,2", "--out", tmp_path)
    assert joma(*claims, capsys=capsys)[0] == 1
    failing = ("sweep", "toy", "--grid", "points=1,4", "--out", tmp_path)
    code, out, err = joma(*failing, capsys=capsys)
    assert code == 2
    assert "joma: points=1: `points` must be at least 2" in err
    assert "1 of 2 units failed; --retry-failed runs them again" in err
    code, out, err = joma(*failing, capsys=capsys)
    assert code == 2
    assert "points=1" in err
    code, out, err = joma(*failing, "--retry-failed", capsys=capsys)
    assert code == 2
    assert "1 to run, 1 finished already" in " ".join(out.split())
    assert "--retry-failed" not in err


def test_json_has_every_unit(tmp_path, capsys):
    args = ("sweep", "toy", "--grid", "points=1,4", "--set", "slope=2", "--seeds", 1, "--out", tmp_path, "--json")
    code, out, _ = joma(*args, capsys=capsys)
    document = json.loads(out)
    assert code == 2
    assert document["grid"] == {"points": [1, 4]}
    assert [unit["state"] for unit in document["units"]] == ["failed", "finished"]
    assert document["units"][0]["failure"]["kind"] == "input"
    assert [claim["name"] for claim in document["units"][1]["claims"]] == ["end", "each", "later"]
    assert open_run(document["units"][1]["path"]).sizes == {"seed": 1, "time": 4}
    assert document["figure"].endswith("1-end.svg")


def test_random_points_are_the_same_again_and_more_keep_the_first(tmp_path, capsys):
    args = ("sweep", "toy", "--grid", "slope=0.1:10:log", "--seed", 7, "--seeds", 1, "--out", tmp_path, "--json")
    first, again, more = (json.loads(joma(*args, "--random", n, capsys=capsys)[1]) for n in (2, 2, 4))
    assert first == again
    assert [unit["path"] for unit in more["units"][:2]] == [unit["path"] for unit in first["units"]]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--grid", "slope=1,2", "--claim", "ends"), "end"),
        (("--grid", "slope=1,2", "--address", "auto"), "--address"),
        (("--grid", "slope=1,2", "--gpus-per-run", "1", "--device", "cpu"), "--gpus-per-run"),
        (("--grid", "slope=1,2", "--engine", "ray", "--jobs", "2"), "--jobs"),
        (("--grid", "slope=1,nan"), "finite"),
        ((), "--grid"),
    ],
)
def test_bad_options_are_one_line_and_nothing_is_written(tmp_path, capsys, args, expected):
    code, _, err = joma("sweep", "toy", *args, "--out", tmp_path / "out", capsys=capsys)
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
