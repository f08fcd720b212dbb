"""What the documentation says of stored runs is what they come to."""

from pathlib import Path

import pytest

from joma.report.table import spread
from joma.runs import Run, open_run, read_claims, read_config
from joma.studies import load

STORED = Path(__file__).parents[1] / "docs" / "wikitext-2"
RUNS = sorted(found.parent for found in STORED.glob("*/*/claims.json"))


def row(record):
    return f"| {record['name']} | {record['expected']} | {spread(record['measured'])} | {record['verdict']} |"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.parent.name)
def test_a_stored_run_comes_to_what_its_page_says(path):
    there, study = read_config(path), load(path.parent.name)
    judged = [claim.judge(open_run(path), there["preset"]) for claim in study.claims]
    _, _, section = (STORED / "README.md").read_text(encoding="utf-8").partition(f"## {study.name}: ")
    said = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert said[1:] == [row(record) for record in judged]
    assert [row(record) for record in read_claims(path)["claims"]] == said[1:]
    assert [record["said"] for record in read_claims(path)["claims"]] == [claim.said for claim in study.claims]
    assert f"stored in `{path.relative_to(STORED)}`" in section
    assert Run(STORED, study.name, study.version, there["config"], there["seeds"]).path == path


def test_all_stored_runs_are_found():
    assert len(RUNS) == 5
