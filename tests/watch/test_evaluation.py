"""Running a model for a measurement leaves flags, gradients and random numbers as they were."""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from joma.watch.evaluation import call_model, evaluation_mode, move, preserve_random_state

Pair = namedtuple("Pair", "tokens mask")


def test_flags_are_restored_one_by_one_and_overridden_methods_are_not_called() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> nn.Module:
            raise AssertionError(f"a probe must not merge adapters, as train({mode}) would")

    model = nn.Sequential(Merging(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    model[2].training = False
    with evaluation_mode(list(model.modules())):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, True, False]
    with pytest.raises(KeyError), evaluation_mode(list(model.modules())):
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert torch.is_grad_enabled()


def test_every_kind_of_batch_is_moved_and_passed() -> None:
    tensor = torch.ones(2)
    batch = {"x": [tensor, (tensor, "text")], "pair": Pair(tensor, None)}
    moved = move(batch, torch.device("meta"))
    assert moved["x"][0].is_meta
    assert moved["x"][1][0].is_meta
    assert moved["x"][1][1] == "text"
    assert moved["pair"].tokens.is_meta
    assert type(moved["pair"]) is Pair

    class Model(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> tuple[object, ...]:
            return args, kwargs

    assert call_model(Model(), {"a": 1}) == ((), {"a": 1})
    assert call_model(Model(), [1, 2]) == ((1, 2), {})
    assert call_model(Model(), 3) == ((3,), {})


def test_the_random_state_of_all_three_generators_is_preserved() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    with preserve_random_state():
        assert numbers() == expected
        numbers()
    assert numbers() == expected
