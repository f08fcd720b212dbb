"""Warnings of probes that failed: one for each cause, with a remedy."""

from __future__ import annotations

import warnings

import pytest
import torch

from joma.arguments import InputError
from joma.watch.failures import Failures, ProbeFailed, free_device_memory, is_out_of_memory


def test_each_cause_warns_once_whatever_its_numbers() -> None:
    failures = Failures()
    with pytest.warns(ProbeFailed, match=r"^a probe failed at step 8, and training goes on: RuntimeError: size 3;"):
        failures.warn("a probe", 8, RuntimeError("size 3"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failures.warn("a probe", 16, RuntimeError("size 4.5"))
    with pytest.warns(ProbeFailed, match="logging a probe failed at step 16"):
        failures.warn("logging a probe", 16, RuntimeError("size 3"))


def test_our_own_errors_have_their_remedy_and_others_get_one() -> None:
    error = InputError("batch", "sequences", 1, "give a batch of longer sequences")
    with pytest.warns(
        ProbeFailed, match=r"goes on: `batch` must be sequences, got 1; give a batch of longer seq\w+\.$"
    ):
        Failures().warn("a probe", 0, error)
    with pytest.warns(ProbeFailed, match=r"goes on: MemoryError; give a smaller `batch`\.$"):
        Failures().warn("a probe", 0, MemoryError())
    with pytest.warns(ProbeFailed, match=r"OSError: disk full; check it\.$"):
        Failures().warn("a probe", 0, OSError("disk full"), remedy="check it")


def test_out_of_memory_is_recognised() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory"))
    assert not is_out_of_memory(RuntimeError("shape"))
    free_device_memory()
