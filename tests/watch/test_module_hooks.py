"""Hooks that are there as long as a context is open, and see errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.watch.module_hooks import Hooks, module_hooks


class Fails(nn.Module):
    def forward(self, x: Tensor, *, stop: bool = False) -> Tensor:
        if stop:
            raise RuntimeError("stop")
        return x


def test_hooks_see_arguments_outputs_and_errors_and_are_removed() -> None:
    seen: list[Any] = []
    model, x = Fails(), torch.ones(1)
    model.register_forward_pre_hook(lambda *_: seen.append("later"))
    enter, leave = lambda *args: seen.append(args[1:]), lambda *args: seen.append(args[2])
    with module_hooks([Hooks(model, enter, leave), Hooks(model, enter, leave, kwargs=True)]):
        model(x, stop=False)
        assert seen == [((x,), {"stop": False}), ((x,),), "later", x, x]
        seen.clear()
        with pytest.raises(RuntimeError, match="stop"):
            model(x, stop=True)
        assert seen[2:] == ["later", None, None]
    seen.clear()
    model(x)
    assert seen == ["later"]


def test_hooks_are_removed_if_one_cannot_be_registered() -> None:
    model = Fails()
    hooks = [Hooks(model, print, print), Hooks(None, print, print)]  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError), module_hooks(hooks):
        pass
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_copies_of_a_model_have_hooks_that_do_nothing() -> None:
    seen: list[Any] = []
    model, x = Fails(), torch.ones(1)

    def note(*args: Any) -> None:
        seen.append(args)

    hooks = [Hooks(model, note, note), Hooks(model, lambda *_: note(), note, kwargs=True)]
    with module_hooks(hooks):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert copied(x, stop=False) is x
        assert not seen
        model(x)
    assert len(seen) == 4
