"""What the documentation says of stored runs is what they come to, and what its commands would run."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from joma import cli
from joma.report.table import spread
from joma.runs import Run, open_run, read_claims, read_config
from joma.studies import load

STORED = Path(__file__).parents[1] / "docs" / "wikitext-2"
RUNS = sorted(found.parent for found in STORED.glob("*/*/claims.json"))


def row(record):
    return f"| {record['name']} | {record['expected']} | {spread(record['measured'])} | {record['verdict']} |"


def section(study):
    _, _, after = (STORED / "README.md").read_text(encoding="utf-8").partition(f"## {study.name}: {study.title}\n")
    return after.partition("\n## ")[0]


def test_all_stored_runs_are_found():
    assert len(RUNS) == 5


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.parent.name)
def test_a_stored_run_comes_to_what_its_page_says(path):
    study, stored, run = load(path.parent.name), read_claims(path), open_run(path)
    judged = [claim.judge(run, read_config(path)["preset"]) for claim in study.claims]
    _, *said = [line for line in section(study).splitlines() if line.startswith("| ")]
    assert said == [row(record) for record in judged]
    assert said == [row(record) for record in stored.claims]
    assert [record["statement"] for record in stored.claims] == [claim.statement for claim in study.claims]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.parent.name)
def test_a_page_names_the_run_its_figure_and_its_cost(path):
    study, seeds = load(path.parent.name), len(read_config(path)["seeds"])
    page = " ".join(section(study).split())
    cost = f"{seeds} seed{'s' * (seeds > 1)}, {read_claims(path).wall_time:.0f} s"
    assert f"{cost}; stored in `{path.relative_to(STORED)}`." in page
    assert f"![{study.name}]({study.name}.png)" in page
    assert (STORED / f"{study.name}.png").is_file()
    assert any(drawing.caption in page for drawing in study.figures.values())


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.parent.name)
def test_the_command_of_a_page_is_that_of_the_stored_run(path):
    study, there = load(path.parent.name), read_config(path)
    (line,) = [line for line in section(study).splitlines() if line.startswith("    joma run ")]
    options = shlex.split(line)[3:]
    given = [*zip(options[::2], options[1::2], strict=True)]
    config = cli.changed(study, there["preset"], tuple(value for name, value in given if name == "--set"))
    seeds = range(int(dict(given).get("--seeds", study.presets[there["preset"]].seeds)))
    text = {"text_sha256": there["config"]["text_sha256"]}
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    assert Run(STORED, study.name, study.version, fields | text, seeds).path == path
    assert dict(given)["--preset"] == there["preset"]
