"""The zoo itself: what a hostile checkpoint must not do is noticed."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from robustness.zoo import GoodSeries, Hostile, Outcome, run_apart


def write_weights(folder: Path, step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start, direction = torch.randn(2, 4, 6, generator=generator)
    save_file({"layers.0.fc1.weight": start + 0.01 * step * direction}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return GoodSeries(tmp_path_factory.mktemp("good"), write_weights)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def scale(folder: Path) -> None:
    save_file({"layers.0.fc1.weight": torch.ones(4, 6)}, folder / "model.safetensors")


def rename(folder: Path) -> str:
    return folder.rename(folder.parent / "step35").name


def test_the_outcome_must_be_the_expected_one(good):
    good.check(Hostile("nothing", lambda _: None, "measured"))
    good.check(Hostile("cut", cut, message="complete safetensors file"))
    good.check(Hostile("renamed", rename, "measured"))
    for wrong in (
        Hostile("nothing", lambda _: None),
        Hostile("cut", cut, "measured"),
        Hostile("cut", cut, message="another reason"),
        Hostile("other values", scale, "measured"),
    ):
        with pytest.raises(AssertionError, match=wrong.name):
            good.check(wrong)


def test_no_other_checkpoint_may_change(good):
    def damage_another(folder: Path) -> None:
        scale(folder.parent / "step40")

    with pytest.raises(AssertionError, match="spreads changed step40"):
        good.check(Hostile("spreads", damage_another, "any"))


def allocate() -> Outcome:
    torch.ones(1 << 29)
    return Outcome({})


def wait() -> Outcome:
    time.sleep(60)
    return Outcome({})


def compute() -> Outcome:
    while True:
        pass


def crash() -> Outcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Outcome({})


@pytest.mark.parametrize(
    ("function", "problem"),
    [(allocate, "memory"), (wait, "no answer"), (compute, "no answer"), (crash, "exit code -11")],
)
def test_memory_time_and_crashes_are_bounded(function, problem):
    wall = 0.5 if function is wait else 30
    assert problem in run_apart(function, seconds=1, memory=1 << 30, wall=wall).problem


def test_permissions_hold_for_root_too(tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    assert (
        "PermissionError"
        in run_apart(lambda: Outcome({}, ((tmp_path / "secret").read_text(),)), seconds=20, memory=1 << 30).problem
    )
