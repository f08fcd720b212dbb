"""The trees of `hierarchy-order`, the sequences drawn from them, and the loss, against Theorem 5 and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.hierarchy import hidden_tokens as task
from joma.study import Context
from joma.theory import hierarchy


def _decoder(layers: int, dtype: torch.dtype = torch.float32) -> Decoder:
    config = DecoderConfig(vocabulary=33, width=8, layers=layers, outputs=1, mask="full")
    return Decoder(config, generators=Context((0, 1)).generators("weights"), dtype=dtype)


def test_every_token_occurs_as_often_in_every_tree_in_each_class():
    for classes in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]):
        marginals = [
            hierarchy.marginals(tree.parents, classes, tree.p_child, tree.rho) for tree in task.trees(0.85).values()
        ]
        np.testing.assert_allclose(marginals, np.full((3, 16), marginals[0][0]), rtol=0, atol=1e-15)


def test_the_matched_tree_has_the_deep_trees_cousins_as_siblings():
    deep, shallow, matched = (task.predictions(tree) for tree in task.trees(0.85).values())
    cousins, siblings = (deep.height == height for height in (task.COUSINS, task.SIBLINGS))
    np.testing.assert_allclose(matched.cooccurrence[cousins], deep.cooccurrence[cousins], rtol=1e-13)
    assert (shallow.cooccurrence[cousins] > deep.cooccurrence[cousins] + 0.05).all()
    assert (shallow.height[cousins | siblings] == 1).all()
    np.testing.assert_array_equal(np.unique(deep.height, return_counts=True)[1], [8, 16, 32, 64])


def test_sequences_hide_the_queried_tokens_and_answer_as_the_tree_draws():
    tree = task.trees(0.85)["deep"]
    drawn = task.draw_sequences(tree, (50, 100), 4, Context((7,)).seed_generators(), "cpu")
    assert drawn.visible.shape == (50, 1, 100, 16)
    queried = F.one_hot(drawn.queries.long(), 16).sum(dim=-2)
    assert int(queried.max()) == 1
    assert not (drawn.visible & queried.bool()).any()
    marginal = hierarchy.marginals(tree.parents, tree.p0, tree.p_child, tree.rho)[0]
    assert float(drawn.answers.float().mean()) == pytest.approx(marginal, abs=0.02)
    # Where a token's sibling is visible, the answer is yes with Theorem 5's probability; all siblings are alike.
    sibling_visible = drawn.visible.gather(-1, drawn.queries.long() ^ 1)
    pairs, yes = int(sibling_visible.sum()), int((sibling_visible & drawn.answers).sum())
    expected = float(hierarchy.cooccurrence(1, 4, 0.85, 0.3))
    assert yes / pairs == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / pairs))


def test_an_answer_depends_on_what_is_visible_and_not_on_other_queries():
    model = _decoder(3, torch.float64)
    drawn = task.draw_sequences(task.trees(0.85)["deep"], (1, 96), 4, Context((5, 6)).generators("data"), "cpu")
    sequences = task.Sequences(*(part[0] for part in drawn))

    def first_score(sequences: task.Sequences) -> torch.Tensor:
        tokens, multiplicity = sequences.inputs()
        return model(tokens, multiplicity=multiplicity)[:, :, 17, 0]

    others = torch.cat([sequences.queries[..., :1], sequences.queries[..., 1:].flip(1)], dim=-1)
    score = first_score(sequences)
    torch.testing.assert_close(first_score(sequences._replace(queries=others)), score, rtol=1e-12, atol=1e-12)
    nothing_visible = sequences._replace(visible=torch.zeros_like(sequences.visible))
    assert (first_score(nothing_visible) - score).abs().mean() > 1e-3


def test_the_loss_is_the_cross_entropy_of_the_minibatches_in_turn():
    data = task.draw_sequences(task.trees(0.85)["deep"], (3, 5), 4, Context((0, 1)).generators("data"), "cpu")
    model = _decoder(1)
    loss = task.answer_loss(data)(model, torch.tensor(7))
    minibatch = task.Sequences(*(part[1] for part in data))
    tokens, multiplicity = minibatch.inputs()
    probability = model(tokens, multiplicity=multiplicity)[:, :, 17:, 0].sigmoid().detach()
    expected = -torch.where(minibatch.answers, probability, 1 - probability).log().mean(dim=(1, 2))
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
