"""The common part of the callbacks: what fails is a warning, and the trajectory says why there is none."""

from __future__ import annotations

import pytest

from joma.arguments import StateError
from joma.watch.callbacks import RecorderCallback
from joma.watch.failures import ProbeFailed


def callback(**options: object) -> RecorderCallback:
    built = RecorderCallback()
    built.options = options
    return built


def test_an_error_is_a_warning_unless_strict() -> None:
    plain = callback()
    with pytest.raises(StateError, match="`RecorderCallback` has no trajectory before training has begun; train first"):
        _ = plain.trajectory
    with (
        pytest.warns(ProbeFailed, match="preparing the probes failed at step 3.*KeyError"),
        plain._guarded("preparing the probes", 3),
    ):
        raise KeyError("x")
    with pytest.raises(StateError, match="could not prepare its probes; see the warning"):
        plain.save("x.nc")
    plain._start()
    with pytest.raises(StateError, match="before training"):
        _ = plain.trajectory
    with pytest.raises(KeyError), callback(strict=True)._guarded("preparing the probes", 3):
        raise KeyError("x")
    with pytest.raises(KeyboardInterrupt), callback()._guarded("preparing the probes", 3):
        raise KeyboardInterrupt
