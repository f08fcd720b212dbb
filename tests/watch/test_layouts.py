"""Modules whose softmax is measured where it is taken: the axes in order, and global tokens refused by name."""

import pytest
import torch

from joma.arguments import InputError
from joma.watch import attention
from joma.watch.layouts import LAYOUTS, in_order
from watch.families import TEXT
from watch.tiny_configs import normal, tiny_model


@pytest.mark.parametrize("axes", sorted(set(LAYOUTS.values())))
def test_axes_are_put_in_order(axes: str) -> None:
    sizes = {"b": 2, "n": 3, "h": 4, "q": 5, "k": 6}
    logits = normal(*(sizes[letter] for letter in axes))
    expected = torch.einsum(f"{axes}->{''.join(letter for letter in 'bnhqk' if letter in axes)}", logits)
    assert torch.equal(in_order(logits, axes), expected)


def test_a_longformer_with_global_tokens_is_refused() -> None:
    model = tiny_model("longformer", attention_window=4)
    tokens = torch.zeros(2, 9, dtype=torch.long)
    tokens[:, 0] = 1
    with pytest.raises(InputError, match="LongformerSelfAttention has global tokens"), attention(model):
        model(**TEXT, global_attention_mask=tokens)
