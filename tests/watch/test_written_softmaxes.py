"""Steps of a softmax are recognised as one if they are its own, and only then."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from joma.watch.written_softmaxes import WrittenSoftmaxes
from tiny_models import random_normal


def logits(seed: int = 0) -> Tensor:
    return random_normal(2, 3, 4, 4, seed=seed)


def exponential(steps: WrittenSoftmaxes, scores: Tensor) -> Tensor:
    result = scores.exp()
    assert steps.note(Tensor.exp, (scores,), {}, result) is None
    return result


@given(st.integers(-4, 3), st.booleans())
def test_exponentials_over_their_sum_are_a_softmax_along_the_axis_of_the_sum(axis: int, named: bool) -> None:
    steps, scores = WrittenSoftmaxes(), logits()
    powers = exponential(steps, scores)
    total = powers.sum(axis, keepdim=True)
    arguments = ((powers,), {"dim": [axis], "keepdim": True}) if named else ((powers, axis, True), {})
    assert steps.note(Tensor.sum, *arguments, total) is None
    softmaxed = steps.note(Tensor.div, (powers, total), {}, powers / total)
    assert softmaxed is not None
    assert softmaxed[0] is scores
    assert softmaxed[1] == axis
    torch.testing.assert_close(powers / total, softmaxed[0].softmax(softmaxed[1]))
    assert steps.note(Tensor.div, (powers, total), {}, powers / total) is None  # a softmax is found once


def test_the_exponential_of_a_log_softmax_is_a_softmax() -> None:
    steps, scores = WrittenSoftmaxes(), logits()
    logarithm = scores.log_softmax(-1)
    assert steps.note(Tensor.log_softmax, (scores, -1), {}, logarithm) is None
    assert steps.note(torch.exp, (logarithm,), {}, logarithm.exp()) == (scores, -1)


@pytest.mark.parametrize("changed", ["logits", "exponentials", "sum"])
def test_what_is_changed_between_two_steps_is_no_softmax(changed: str) -> None:
    steps, scores = WrittenSoftmaxes(), logits()
    powers = exponential(steps, scores)
    total = powers.sum(-1, keepdim=True)
    steps.note(Tensor.sum, (powers, -1, True), {}, total)
    {"logits": scores, "exponentials": powers, "sum": total}[changed].add_(1.0)
    assert steps.note(Tensor.div, (powers, total), {}, powers / total) is None


def test_a_sum_of_others_a_sum_without_its_axis_and_forgotten_steps_are_no_softmax() -> None:
    steps, first, second = WrittenSoftmaxes(), logits(), logits(seed=1)
    earlier, powers = exponential(steps, first), exponential(steps, second)
    for operand, keepdim in ((earlier, True), (powers, False)):
        total = operand.sum(-1, keepdim=keepdim)
        steps.note(Tensor.sum, (operand, -1), {"keepdim": keepdim}, total)
        assert steps.note(Tensor.div, (powers, total), {}, powers / operand.sum(-1, keepdim=True)) is None
    total = powers.sum(-1, keepdim=True)
    steps.note(Tensor.sum, (powers, -1, True), {}, total)
    steps.clear()
    assert steps.note(Tensor.div, (powers, total), {}, powers / total) is None


def test_tensors_without_a_version_are_not_remembered() -> None:
    steps = WrittenSoftmaxes()
    with torch.inference_mode():
        scores = logits() + 0.0
        powers = scores.exp()
        total = powers.sum(-1, keepdim=True)
        steps.note(torch.exp, (scores,), {}, powers)
        steps.note(torch.sum, (powers, -1, True), {}, total)
        assert steps.note(torch.div, (powers, total), {}, powers / total) is None
