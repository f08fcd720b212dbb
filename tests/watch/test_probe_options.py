"""Options are checked by name, with the error that names them."""

from __future__ import annotations

import inspect

import pytest

from joma.arguments import InputError
from joma.watch import Recorder
from joma.watch.probe_options import CHECKS, check_options, checked_options, doubling


def test_the_default_policy_is_dense_at_the_start() -> None:
    due = [step for step in range(5001) if doubling(step)]
    assert due == [0, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000, 4000, 5000]


def test_every_option_of_a_recorder_has_its_check() -> None:
    assert set(CHECKS) == set(inspect.signature(Recorder).parameters) - {"model", "batch"}
    defaults = {name: parameter.default for name, parameter in inspect.signature(Recorder).parameters.items()}
    assert check_options({name: defaults[name] for name in CHECKS})


def test_bad_values_are_named() -> None:
    bad = {
        "forward": [3, "model"],
        "log": [3, "wandb", object()],
        "summary": ["yes"],
        "strict": [2],
        "distributed": [3],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(InputError, match=f"`{name}` must be"):
                check_options({name: value})
    with pytest.raises(InputError, match=r"`options` must be one of at, .* got 'evry'"):
        checked_options({"evry": 3})
