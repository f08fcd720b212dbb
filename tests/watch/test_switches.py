"""What is switched while attention is watched: each switch warns once, and is undone afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from joma.watch import AttentionSwitched, attention, switches
from tiny_models import CausalBlock, random_normal, textbook_entropy, with_large_weights


@pytest.fixture(autouse=True)
def _no_warnings_given_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_warned", set())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_runs_without_its_fast_path_with_one_warning(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = with_large_weights(nn.TransformerEncoder(layer, 2))
    x = random_normal(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[3], [5]]) if padded else None
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        message = "fast path.* up to rounding except for padded rows, which it may leave at 0, and as before"
        watched = attention(encoder, reduce="none", rows="all")
        with pytest.warns(AttentionSwitched, match=message), watched as recording:
            inside = encoder(x, src_key_padding_mask=padding)
        with attention(encoder):
            encoder(x, src_key_padding_mask=padding)
        assert torch.equal(encoder(x, src_key_padding_mask=padding), plain)
    actual = torch.ones(2, 5, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(inside[actual], plain[actual], atol=1e-5, rtol=1e-5)
    assert bool((plain[~actual] == 0).all())
    assert bool((inside[~actual] != 0).any()) == padded
    assert torch.backends.mha.get_fastpath_enabled()
    _, matrix = encoder.layers[0].self_attn(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    assert list(recording.passes[0]) == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(recording.passes[0]["layers.0.self_attn"], textbook_entropy(matrix), atol=2e-5, rtol=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_fast_path_is_back_after_the_last_of_contexts_that_end_in_any_order(order: tuple[int, int]) -> None:
    contexts = [attention(nn.Linear(2, 2)), attention(nn.Linear(2, 2))]
    for context in contexts:
        context.__enter__()
    contexts[order[0]].__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    contexts[order[1]].__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_compiled_model_runs_eagerly_inside() -> None:
    model = nn.Sequential(with_large_weights(CausalBlock(scaled_dot_product_attention)))
    compiled = torch.compile(model, backend="eager")
    x = random_normal(1, 4, 8)
    plain = compiled(x)
    context = attention(compiled)
    with pytest.warns(AttentionSwitched, match="compiled"):
        recording = context.__enter__()
    inside = compiled(x)
    context.__exit__(None, None, None)
    torch.testing.assert_close(inside, plain)
    assert list(recording.passes[0]) == ["0"]
    torch.testing.assert_close(compiled(x), plain)
