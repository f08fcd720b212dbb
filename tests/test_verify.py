import math

import pytest

from joma import cli
from joma import verify as verification
from joma.verify import CHECKS, Check, verify


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.theorem}: {check.statement}")
def test_every_check_holds(check):
    assert check.error() <= check.tolerance


def test_all_five_theorems_are_checked():
    assert {check.theorem for check in CHECKS} == {"1", "2", "3", "4", "5"}


def test_a_failing_check_and_a_nan_are_seen_and_exit_1(monkeypatch, capsys):
    bad = (
        Check("9", "a", "b", 1e-8, lambda: 1e-7),
        Check("9", "a", "b", 1e-8, lambda: math.nan),
        Check("9", "a", "b", 1e-8, lambda: 1e-9),
    )
    monkeypatch.setattr(verification, "CHECKS", bad)
    assert [result.verdict for result in verify()] == ["does not hold", "does not hold", "holds"]
    assert cli.main(["verify"]) == 1
    assert "does not hold" in capsys.readouterr().out
