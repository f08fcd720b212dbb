"""What the arms learn and how they are measured, compared with plain formulas over positions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from joma.models import OneLayer
from joma.studies.theorems.ladder_arms import ALL, ARMS, BASE
from joma.studies.theorems.ladder_task import Task, TrainedLadderConfig
from joma.study import Context

SMALL = TrainedLadderConfig(
    trained_classes=3, trained_distinct=4, trained_common=3, trained_length=6, trained_batch=5, trained_probe=7
)
CONTEXT = Context((3, 8))


def model_of(task, *, scale=2.0):
    """A model whose logits are large, so that attention is far from uniform."""
    config = replace(task.model_config, scale_z=scale, scale_qk=1.0, scale=0.7)
    return OneLayer(config, generators=CONTEXT.generators("test", None) * len(task.arms), dtype=torch.float32)


def test_all_arms_have_the_same_tokens_and_probe():
    arms = [BASE, ARMS["constant"], ARMS["separable"]]
    mixed, alone, positions = Task(SMALL, CONTEXT, arms), Task(SMALL, CONTEXT, [BASE]), Task(SMALL, CONTEXT, [ALL])
    for step in (0, 17):
        drawn, plain = mixed.draw(step, 5), alone.draw(step, 5)
        assert torch.equal(drawn.token[:2], plain.token)
        assert torch.equal(drawn.token[2:4], plain.token)
        assert torch.equal(drawn.label, plain.label.repeat(3, 1))
        assert not torch.equal(drawn.token[4:], plain.token)  # other classes
        assert torch.equal(positions.draw(step, 5).token, plain.token)
    assert torch.equal(alone.probe.token, positions.probe.token)
    assert not torch.equal(alone.draw(0, 7).token, alone.probe.token)


@pytest.mark.parametrize("name", ["base", "product", "values", "all-free", "top"])
def test_entropy_is_that_of_attention_over_positions(name):
    task = Task(SMALL, CONTEXT, [ARMS[name]])
    model = model_of(task)
    logits, tokens = model.logits.detach().double().numpy(), task.probe.token.numpy()
    expected = []
    for z, sequences in zip(logits, tokens, strict=True):
        rows = []
        for sequence in sequences:
            # All positions: the query at position i sees those up to i, itself included; rows 3, 4 and 5 of 6.
            prefixes = [sequence[:end] for end in (3, 4, 5)] if task.all_positions else [sequence]
            for prefix in prefixes:
                scores = z[prefix[-1] if task.all_positions else 0][prefix]
                p = np.exp(scores - scores.max())
                p /= p.sum()
                rows.append(-(p * np.log(p)).sum() / np.log(len(prefix)))
        expected.append(np.mean(rows))
    np.testing.assert_allclose(task.entropy(model).detach(), expected, rtol=2e-5)


def test_uniform_attention_has_entropy_one():
    for name in ("base", "all-free"):
        task = Task(SMALL, CONTEXT, [ARMS[name]])
        np.testing.assert_allclose(task.entropy(model_of(task, scale=0.0)).detach(), 1.0, rtol=1e-6)


def test_losses_are_cross_entropies_of_the_class_or_of_the_next_tokens():
    task = Task(SMALL, CONTEXT, [BASE])
    model, contexts = model_of(task), task.draw(4, 5)
    outputs = model(contexts.frequency)
    expected = [F.cross_entropy(y, label) for y, label in zip(outputs, contexts.label, strict=True)]
    torch.testing.assert_close(task.losses(model, contexts), torch.stack(expected))
    arms = Task(SMALL, CONTEXT, [ALL, ARMS["last-free"]])
    model, contexts = model_of(arms), arms.draw(4, 5)
    outputs, target = model(contexts.token[..., :-1]), contexts.token[..., 1:]
    expected = [F.cross_entropy(outputs[m].flatten(0, 1), target[m].flatten()) for m in (0, 1)]
    expected += [F.cross_entropy(outputs[m, :, -1], target[m, :, -1]) for m in (2, 3)]
    torch.testing.assert_close(arms.losses(model, contexts), torch.stack(expected))


def test_a_fixed_batch_is_the_same_at_every_step_and_is_not_the_probe():
    arm = replace(ARMS["repeated"], repeated=7)  # as many as the probe has
    task, fresh = Task(SMALL, CONTEXT, [arm]), Task(SMALL, CONTEXT, [BASE])
    model = model_of(task)
    losses = [task.loss(model, torch.tensor(step)) for step in (0, 3)]
    assert torch.equal(*losses)
    torch.testing.assert_close(losses[0], task.losses(model, task.fixed_batch))
    assert task.fixed_batch.token.shape == (2, 7, 6)
    assert not torch.equal(task.fixed_batch.token, task.probe.token)
    assert torch.equal(task.probe.token, fresh.probe.token)
    assert fresh.fixed_batch is None
    assert not torch.equal(*(fresh.loss(model, torch.tensor(step)) for step in (0, 3)))


def test_the_constant_gradient_is_that_of_the_theory():
    task = Task(SMALL, CONTEXT, [ARMS["constant"]])
    contexts = task.draw(0, 5)
    outputs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model = model_of(task)
    model.forward = lambda _: outputs
    task.losses(model, contexts).sum().backward()
    g = F.one_hot(contexts.label, 3) - 1 / 3
    torch.testing.assert_close(-5 * outputs.grad, g)


def test_the_spread_is_that_of_the_logits_over_tokens():
    task = Task(SMALL, CONTEXT, [ARMS["all-product"]])
    model = model_of(task)
    by_query = model.logits.detach().numpy().std(axis=-1)
    np.testing.assert_allclose(task.measure(model, 0)["spread"], by_query.mean(axis=-1), rtol=1e-5)
