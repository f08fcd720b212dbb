import json

import pytest

from command_line import joma
from offered_studies import offer


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "toy_study"})
    monkeypatch.setenv("COLUMNS", "120")


def test_set_parses_lists_and_repeats(tmp_path, capsys):
    args = ("run", "toy", "--out", tmp_path, "--set", "levels=1,2.5,3", "--set", "points=7", "--seeds", 1, "--json")
    code, out, _ = joma(*args, capsys=capsys)
    assert code == 0
    config = json.loads((tmp_path / json.loads(out)[0]["path"] / "config.json").read_text())
    assert config["config"]["levels"] == [1, 2.5, 3]
    assert config["config"]["points"] == 7
    assert config["seeds"] == [0]


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("bold=True", "bold", True),
        ("bold=true", "bold", True),
        ("bold=False", "bold", False),
        ("names=a,b c", "names", ["a", "b c"]),
        ("names=", "names", []),
        ("names=None", "names", None),
        ("levels=", "levels", []),
    ],
)
def test_set_parses_switches_and_lists_that_may_be_none_or_empty(tmp_path, capsys, change, key, value):
    code, out, _ = joma("run", "toy", "--out", tmp_path, "--set", change, "--json", capsys=capsys)
    assert code == 0
    config = json.loads((tmp_path / json.loads(out)[0]["path"] / "config.json").read_text())
    assert config["config"][key] == value
