"""The tutorial's code is taken from the page and run."""

import re
from pathlib import Path

import numpy as np
import pytest

from joma import open_run
from joma.report.html import write_report
from joma.runs import read_claims
from joma.verdicts import KINDS

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
STUDY_CODE, USE_CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_study_has_at_most_80_lines_of_code():
    assert len([line for line in STUDY_CODE.splitlines() if line.strip()]) <= 80


def test_the_page_lists_every_kind_of_claim():
    assert re.findall(r"^  \| `(\w+)` \|", PAGE, flags=re.MULTILINE) == list(KINDS)


def lead_by_hand(run):
    """Return the final weight of the most frequent token less the largest of the others."""
    weights = dict(zip(run.frequency.values, run.weight.values[-1], strict=True))
    first = weights.pop(max(weights))
    return first - max(weights.values())


def test_the_study_runs_and_its_claims_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "frequency"}
    exec(compile(STUDY_CODE, "frequency.py", "exec"), names)
    exec(compile(USE_CODE, "use.py", "exec"), names)
    assert capsys.readouterr().out == "[('law', 'holds'), ('lead', 'holds')]\n"
    outcome, study = names["outcome"], names["STUDY"]
    run = open_run(outcome.path)
    sentence = r"Trained weights stay within \S+ of Theorem 2; the most frequent token leads by 0\.\d\d\."
    assert re.fullmatch(sentence, read_claims(outcome.path).description.outcome)
    assert float(names["lead"](run)[0]) == pytest.approx(lead_by_hand(run.isel(seed=0)))
    assert dict(run.weight.sizes) == {"seed": 10, "step": 21, "token": 6}
    np.testing.assert_allclose(run.weight.isel(step=0), 0.0)
    (axes,) = study.figures["weights"].draw(run).axes
    assert len(axes.lines) == 12
    np.testing.assert_allclose(axes.lines[0].get_ydata(), run.predicted[0, :, 0])
    assert write_report(Path("runs")).runs == 1
