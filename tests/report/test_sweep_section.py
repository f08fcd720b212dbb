"""The section of a sweep in the report."""

import re

import pytest

from joma.report.html import write_report
from joma.report.sweep_section import claim_rows, read_section
from joma.sweep_execution import draw_claim
from joma.sweeps import Grid
from joma.sweeps.joined import claims_dataset
from offered_studies import offer
from sweep_study import sweep


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "sweep_study"})


def test_a_report_has_one_section_for_a_sweep(tmp_path):
    result = sweep(tmp_path, Grid({"slope": [1.0, 2.0, 3.0], "points": [1, 4]}))
    draw_claim(result)
    report = write_report(tmp_path)
    assert (report.runs, report.sweeps, report.left_out) == (0, (result.path,), ())
    page = report.path.read_text()
    assert page.count('<section class="study') == 1
    assert "Sweep of toy over slope, points" in page
    assert "3 units finished, 3 units failed" in " ".join(page.split())
    (units,) = re.findall(r"<li>`points` must be at least 2.*?>(\d units: .*?)<", page)
    assert units == "3 units: slope=1.0, points=1; slope=2.0, points=1; slope=3.0, points=1"
    assert page.count("data:image/svg+xml") == 1


def test_claims_are_counted_over_the_points(tmp_path):
    result = sweep(tmp_path, Grid({"slope": [1.0, 2.0, 3.0]}))
    rows = claim_rows(claims_dataset(result))
    assert [(row["name"], row["verdicts"], row["measured"]) for row in rows] == [
        ("end", "1 holds, 2 do not", "1.005 to 3.005"),
        ("each", "2 hold, 1 does not", "1.005 to 3.005"),
        ("later", "3 not tested", "1.005 to 3.005"),
    ]
    assert [unit["verdicts"] for unit in read_section(result.path)["units"]][1] == "2 hold, 1 not tested"


def test_a_damaged_sweep_is_left_out_and_named(tmp_path):
    first, second = (sweep(tmp_path, Grid({"slope": slopes})) for slopes in ([1.0], [2.0]))
    (second.path / "sweep.json").write_text("{}")
    report = write_report(tmp_path)
    assert report.sweeps == (first.path,)
    assert second.path.name in report.left_out[0]
