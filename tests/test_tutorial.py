"""The tutorial's code is taken from the page and run."""

import re
from pathlib import Path

import numpy as np

from joma import open_run
from joma.report.html import write_report

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
STUDY_CODE, USE_CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_study_has_at_most_60_lines_of_code():
    assert len([line for line in STUDY_CODE.splitlines() if line.strip()]) <= 60


def test_the_study_runs_and_its_claims_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "frequency"}
    exec(compile(STUDY_CODE, "frequency.py", "exec"), names)
    exec(compile(USE_CODE, "use.py", "exec"), names)
    assert capsys.readouterr().out == "[('first', 'holds'), ('law', 'holds')]\n"
    outcome, study = names["outcome"], names["STUDY"]
    run = open_run(outcome.path)
    assert dict(run.weight.sizes) == {"seed": 3, "step": 21, "token": 6}
    np.testing.assert_allclose(run.weight.isel(step=0), 0.0)
    (axes,) = study.figures["weights"].draw(run).axes
    assert len(axes.lines) == 12
    np.testing.assert_allclose(axes.lines[0].get_ydata(), run.predicted[0, :, 0])
    assert write_report(Path("runs")).runs == 1
