"""The ranks of a checkpoint's matrices: each its own, read one ahead, with errors in their place."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import save_file

from joma.arguments import InputError
from joma.probes.rank import stable_rank
from joma.watch import Checkpoints, checkpoint_ranks
from joma.watch.checkpoint_ranks import read_ahead, stable_ranks


def random_matrices():
    generator = torch.Generator().manual_seed(0)
    scales = {"a": 1.0, "b": 0.1, "c": 3.0}
    return {name: torch.randn(20, 30, generator=generator) * torch.logspace(0, -s, 30) for name, s in scales.items()}


@pytest.fixture
def checkpoint(tmp_path):
    save_file({name: weight.bfloat16() for name, weight in random_matrices().items()}, tmp_path / "model.safetensors")
    return Checkpoints(tmp_path)[0]


def test_every_matrix_has_its_own_rank(checkpoint):
    checked = []
    ranks = stable_ranks(checkpoint, ["c", "a", "b"], lambda name, weight: checked.append((name, weight.dtype)))
    expected = random_matrices()
    assert ranks == [stable_rank(expected[name].bfloat16()).item() for name in "cab"]
    assert checked == [(name, torch.float32) for name in "cab"]
    assert stable_ranks(checkpoint, [], lambda *_: None) == []


def test_a_matrix_that_is_refused_ends_the_measurement(checkpoint):
    def refuse(name, _):
        if name == "b":
            raise InputError(name, "finite", "NaN", "leave it out")

    with pytest.raises(InputError, match="`b` must be finite"):
        stable_ranks(checkpoint, ["a", "b", "c"], refuse)


def test_a_full_gpu_is_no_obstacle(checkpoint, monkeypatch):
    """Moving a matrix to the GPU fails as on one without free memory: it and the others are measured on the CPU."""
    expected, devices, to = stable_ranks(checkpoint, ["a", "b"], lambda *_: None), [], torch.Tensor.to

    def move(weight, target, *args, **kwargs):
        if isinstance(target, str):
            devices.append(target)
        if target == "cuda":
            raise torch.OutOfMemoryError
        return to(weight, target, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", move)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checkpoint_ranks, "MIN_VALUES_FOR_GPU", 1)
    assert stable_ranks(checkpoint, ["a", "b"], lambda *_: None) == expected
    assert devices == ["cuda", "cpu"]


def test_the_next_tensor_is_read_meanwhile_and_no_more():
    """The reader of the second tensor waits until the first is being used: both must be under way at once."""
    second_is_read, reads = threading.Event(), []

    def read(name):
        reads.append((name, threading.current_thread() is threading.main_thread()))
        if name == "b":
            second_is_read.set()
        return torch.tensor(ord(name))

    tensors = read_ahead(["a", "b", "c"], read)
    assert next(tensors)[0] == "a"
    assert second_is_read.wait(timeout=30)
    assert reads == [("a", False), ("b", False)]
    assert [name for name, _ in tensors] == ["b", "c"]


def test_an_error_of_the_reader_is_raised_in_its_turn():
    def read(name):
        if name == "b":
            raise OSError("gone")
        return torch.tensor(0)

    tensors = read_ahead(["a", "b", "c"], read)
    assert next(tensors)[0] == "a"
    with pytest.raises(OSError, match="gone"):
        next(tensors)


def test_a_reader_that_is_left_early_ends():
    tensors = read_ahead([str(index) for index in range(50)], lambda name: torch.tensor(int(name)))
    next(tensors)
    tensors.close()
    for thread in threading.enumerate():
        if thread.name.startswith("joma-read-ahead"):
            thread.join(timeout=30)
            assert not thread.is_alive()
