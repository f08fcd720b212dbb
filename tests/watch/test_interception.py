"""What is intercepted proceeds unchanged: outputs, gradients and returned weights are the same bits as without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from joma.watch import attention
from tiny_models import DECODERS, TOKENS, eager_entropies, with_large_weights

IMPLEMENTATIONS = ["sdpa", "eager"]


@pytest.mark.parametrize("family", DECODERS)
def test_eager_models_have_the_entropies_of_their_weights_and_the_same_outputs(family: str) -> None:
    model, names = DECODERS[family]()
    with_large_weights(model)
    model.set_attn_implementation("eager")
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    plain = model(input_ids=TOKENS, attention_mask=mask).logits
    with attention(model, reduce="none") as seen:
        inside = model(input_ids=TOKENS, attention_mask=mask).logits
    assert torch.equal(inside, plain)
    assert model.config._attn_implementation == "eager"
    expected = eager_entropies(model, names, input_ids=TOKENS, attention_mask=mask)
    assert list(seen.passes[0]) == list(expected)
    for layer, values in expected.items():
        entropy = seen.passes[0][layer].transpose(1, 2)[mask.bool()]
        torch.testing.assert_close(entropy, values.transpose(1, 2)[mask.bool()], atol=2e-6, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_output_attentions_returns_what_it_returns_without_the_watcher(family: str, implementation: str) -> None:
    model, _ = DECODERS[family]()
    with_large_weights(model)
    model.set_attn_implementation(implementation)

    def weights() -> list[Tensor | None]:
        return list(model(input_ids=TOKENS, output_attentions=True).attentions or ())

    plain = weights()
    with attention(model) as seen:
        inside = weights()
    assert len(plain) == len(inside)
    for before, now in zip(plain, inside, strict=True):
        assert (before is None and now is None) or torch.equal(before, now)
    assert len(seen.passes[0]) == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_is_the_same_bits_under_the_watcher(family: str, implementation: str) -> None:
    def train(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, _ = DECODERS[family]()
        model.set_attn_implementation(implementation)
        with_large_weights(model).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for _ in range(3):
            if watched:
                with attention(model, measures=("entropy", "sink_mass")):
                    loss = model(input_ids=TOKENS, labels=TOKENS).loss
            else:
                loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(plain, inside) for plain, inside in zip(train(False), train(True), strict=True))


def test_an_einsum_layer_beside_an_sdpa_layer_is_recorded() -> None:
    class Einsum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", x, x).softmax(-1), x)

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)

    model = nn.Sequential(Einsum(), Fused())
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    with attention(model, reduce="none") as seen:
        first = model[0](x)
        model[1](x)
    torch.testing.assert_close(first, nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0))
    assert list(seen.passes[0]) == ["0", "1"]
    torch.testing.assert_close(seen.passes[0]["0"], seen.passes[0]["1"], atol=2e-6, rtol=0)
