"""The arguments of one attention: two names of one argument, and logits in place of queries and keys."""

from __future__ import annotations

import pytest
import torch

from joma.arguments import InputError
from joma.probes.attention_call import AttentionCall, batches, nth, one_name


def test_an_argument_has_one_of_its_two_names():
    names = ("mask", "attn_mask")
    assert [one_name(names, values) for values in ((None, None), (1, None), (None, 2))] == [None, 1, 2]
    with pytest.raises(InputError, match="`attn_mask` must be left out where `mask` is given, got both; give `mask`"):
        one_name(names, (1, 2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"query": torch.ones(2, 4)}, "query"),
        ({"softcap": 2.0}, "softcap"),
        ({"mask": torch.ones(3, 5)}, "mask"),
        ({"logits": torch.ones(3, dtype=torch.int64)}, "logits"),
        ({"sink_logits": torch.ones(3)}, "sink_logits"),
    ],
)
def test_logits_are_given_alone(change, name):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        batches(AttentionCall(**{"logits": torch.ones(2, 3, 5), **change}))


def test_batches_have_four_axes_and_cover_all_others():
    call = AttentionCall(torch.ones(3, 2, 4, 5, 6), torch.ones(3, 2, 4, 7, 6))
    split = batches(call)
    assert (len(split.scores), split.shape, split.keys) == (3, (3, 2, 4, 5), 7)
    assert {scores.query.shape for scores in split.scores} == {(2, 4, 5, 6)}
    assert len(batches(AttentionCall(logits=torch.ones(3, 2, 4, 5, 6))).scores) == 3
    assert nth(torch.arange(6).view(2, 3, 1, 1, 1, 1), 4).item() == 4
