"""Configs drawn at random: the first few here, more in `make torture`."""

import pytest

from robustness.fuzz_configs import problems

pytest.importorskip("transformers")


def test_a_drawn_config_gives_a_model_or_one_line():
    assert list(problems(range(30))) == []


def test_another_error_is_noticed(monkeypatch):
    monkeypatch.setattr("robustness.fuzz_configs.build_skeleton", None)
    monkeypatch.setattr("robustness.fuzz_configs.VALUES", (2,))
    (first, *_) = problems(range(20))
    assert "TypeError" in first
