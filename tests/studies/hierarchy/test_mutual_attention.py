"""Mutual attention against the logits of a first layer and against an average written as a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from joma.arguments import InputError
from joma.models.transformer import Decoder, DecoderConfig, Layer
from joma.studies.hierarchy.hidden_tokens import Sequences, draw_sequences, trees
from joma.studies.hierarchy.mutual_attention import attention_measure, log_odds, pair_average
from joma.study import Context


def _sequences(samples: int = 96) -> Sequences:
    drawn = draw_sequences(trees(0.85)["deep"], (1, samples), 4, Context((5, 6)).generators("probes"), "cpu")
    return Sequences(*(part[0] for part in drawn))


def test_attention_of_the_first_layer_is_the_logits_of_the_embeddings():
    config = DecoderConfig(vocabulary=33, width=8, layers=1, outputs=1, mask="full")
    model, sequences = Decoder(config, generators=Context((0, 1)).generators("weights")), _sequences()
    attention = attention_measure(sequences)(model, 0)["attention"]
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    assert layer.attention.query is not None
    assert layer.attention.key is not None
    x = layer.norms[0](model.embedding[:, None])
    query, key = (linear(x)[:, 0] for linear in (layer.attention.query, layer.attention.key))
    logits = query[:, 17:] @ key[:, :17].mT / math.sqrt(8)
    odds = logits[..., 1:] - logits[..., :1]
    queried = F.one_hot(sequences.queries.long(), 16).sum(dim=-2).float()
    count = queried.mT @ sequences.visible.float()
    first, second = np.triu_indices(16, k=1)
    expected = ((odds * count + (odds * count).mT) / (count + count.mT))[:, first, second]
    torch.testing.assert_close(attention[:, 0], expected.detach(), rtol=0, atol=1e-5)


def test_entropy_is_that_of_the_queries_attention():
    config = DecoderConfig(vocabulary=33, width=8, layers=2, outputs=1, mask="full")
    model, sequences = Decoder(config, generators=Context((0, 1)).generators("weights")), _sequences()
    entropy = attention_measure(sequences)(model, 0)["entropy"]
    tokens, multiplicity = sequences.inputs()
    for layer, weights in enumerate(model.activations(tokens, ["attention"], multiplicity=multiplicity)["attention"]):
        rows = weights[:, :, 0, 17:]  # the queries' rows; hidden tokens and queries are attended to by none
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 96, 4))
        expected = -(rows * rows.clamp_min(1e-30).log()).sum(dim=-1).mean(dim=(1, 2))
        torch.testing.assert_close(entropy[:, layer], expected.detach(), rtol=0, atol=1e-6)


def test_log_odds_do_not_depend_on_the_attention_to_other_tokens():
    logits = torch.tensor([0.5, 2.0, -1.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(log_odds(logits.softmax(-1)), logits[1:] - logits[0])
    torch.testing.assert_close(log_odds(logits[:3].softmax(-1)), (logits[1:] - logits[0])[:2])
    assert log_odds(torch.tensor([1.0, 0.0])).isfinite().all()


def test_mutual_attention_averages_over_all_meetings_in_both_directions():
    sequences, generator = _sequences(), torch.Generator().manual_seed(0)
    odds = torch.randn(2, 96, 4, 16, generator=generator)
    averages = pair_average(odds, sequences.visible, F.one_hot(sequences.queries.long(), 16).float())
    for pair in (0, 50, 119):
        tokens = [int(side[pair]) for side in np.triu_indices(16, k=1)]
        meetings = [
            float(odds[1, sample, query, visible])
            for queried, visible in (tokens, tokens[::-1])
            for sample, query in np.argwhere(sequences.queries[1].numpy() == queried)
            if sequences.visible[1, sample, visible]
        ]
        assert float(averages[1, pair]) == pytest.approx(np.mean(meetings), abs=1e-5)


def test_too_few_sequences_for_every_pair_to_meet_are_refused():
    with pytest.raises(InputError, match="`probes` must be enough that for any two tokens"):
        attention_measure(_sequences(samples=2))
