"""Modules whose softmax is measured where it is taken: the axes in order, and global tokens refused by name."""

import pytest
import torch
from torch import nn

from joma.arguments import InputError
from joma.watch import attention
from joma.watch.layouts import LAYOUTS, fits, in_order, rearranged_rows
from watch.families import TEXT
from watch.tiny_configs import normal, tiny_model


class TwoHeads(nn.Module):
    num_heads = 2


@pytest.mark.parametrize("axes", sorted(set(LAYOUTS.values())))
def test_axes_are_put_in_order(axes: str) -> None:
    sizes = {"b": 3, "n": 4, "h": 2, "q": 5, "k": 6}
    letters = axes.replace("(bh)", "bh")
    separate = normal(*(sizes[letter] for letter in letters))
    logits = separate.flatten(0, 1) if axes.startswith("(bh)") else separate
    assert fits(logits, axes)
    assert not fits(logits[0], axes)
    if "h" not in letters:
        separate, letters = separate[:, None], letters.replace("b", "bh")
    expected = torch.einsum(f"{letters}->{''.join(letter for letter in 'bnhqk' if letter in letters)}", separate)
    assert torch.equal(in_order(logits, axes, TwoHeads()), expected)


def test_a_longformer_with_global_tokens_is_refused() -> None:
    model = tiny_model("longformer", attention_window=4)
    tokens = torch.zeros(2, 9, dtype=torch.long)
    tokens[:, 0] = 1
    with pytest.raises(InputError, match="LongformerSelfAttention has global tokens"), attention(model):
        model(**TEXT, global_attention_mask=tokens)


class Blocks(nn.Module):
    block_len = 4


class ProphetNetDecoder(nn.Module):
    ngram = 2


def test_tokens_are_put_in_the_order_of_rows() -> None:
    real = torch.tensor([[True, True, False], [True, True, True]])
    modules = {"": nn.Identity(), "a": Blocks(), "decoder": ProphetNetDecoder(), "decoder.b": nn.Identity()}

    def rows(layer: str, *shape: int, modules: dict[str, nn.Module] = modules) -> list[list[int]] | None:
        result = rearranged_rows(real, modules, layer, (shape[0], shape[1]))
        return None if result is None else result.int().tolist()

    assert rows("a", 2, 4) == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert rows("a", 4, 4) is None
    assert rows("decoder.b[1]", 4, 3) == [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert rows("decoder.b", 2, 9) == [[1, 1, 0] * 3, [1] * 9]
    assert rows("decoder.b", 2, 6) is None
    assert rows("b", 4, 3) is None
    assert rows("b", 4, 3, modules={"": ProphetNetDecoder()}) is not None
