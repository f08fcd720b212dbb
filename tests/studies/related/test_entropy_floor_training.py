"""σReparam by its definition, the probe of every row beside the weights that the model uses, and the training."""

import numpy as np
import pytest
import torch

from joma.models.config import DecoderConfig
from joma.models.transformer import Decoder
from joma.probes.entropy import shannon_entropy
from joma.studies.related.entropy_floor_training import (
    AttentionRowsProbe,
    SigmaReparamDecoder,
    query_key_weights,
    train,
)
from joma.studies.text.language_training import LanguageSetting, read_text
from joma.study import Context

CONFIG = DecoderConfig(
    vocabulary=20, width=8, layers=2, heads=2, length=6, positions="sinusoidal", attention_bias=False
)
WINDOWS = torch.randint(20, (5, 6), generator=torch.Generator().manual_seed(9))


def generators(count=2):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


@pytest.fixture
def model():
    decoder = SigmaReparamDecoder(CONFIG, generators=generators(), dtype=torch.float64)
    with torch.no_grad():
        decoder.gamma.copy_(torch.rand(decoder.gamma.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    return decoder


def by_definition(model):
    """Return a plain decoder whose stored query and key weights are γ W/‖W‖₂."""
    plain = Decoder(CONFIG, generators=generators(), dtype=torch.float64)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name not in ("gamma", "right")})
    with torch.no_grad():
        for number, pair in enumerate(query_key_weights(plain)):
            for side, weight in enumerate(pair):
                norm = torch.linalg.matrix_norm(weight, 2)
                weight.mul_((model.gamma[:, number, side] / norm)[:, None, None])
    return plain


def test_the_model_is_one_with_normalised_weights(model):
    torch.testing.assert_close(model(WINDOWS), by_definition(model)(WINDOWS))


def test_gradients_are_those_of_the_normalised_weight(model):
    """Through γ W/‖W‖₂ by autograd, where the norm is torch's and differentiable."""
    loss = model.surprisal(WINDOWS[:, :-1], WINDOWS[:, 1:]).sum()
    weight, _ = query_key_weights(model)[1]
    gradients = torch.autograd.grad(loss, [weight, model.gamma])
    plain = by_definition(model)
    query, _ = query_key_weights(plain)[1]
    (outer,) = torch.autograd.grad(plain.surprisal(WINDOWS[:, :-1], WINDOWS[:, 1:]).sum(), [query])
    inner = weight.detach().clone().requires_grad_()
    gamma = model.gamma.detach()[:, 1, 0].clone().requires_grad_()
    normalised = gamma[:, None, None] * inner / torch.linalg.matrix_norm(inner, 2)[:, None, None]
    expected = torch.autograd.grad((normalised * outer).sum(), [inner, gamma])
    torch.testing.assert_close(gradients[0], expected[0])
    torch.testing.assert_close(gradients[1][:, 1, 0], expected[1])
    # A step along W itself does not change γ W/‖W‖: its gradient is orthogonal to it.
    torch.testing.assert_close((gradients[0] * weight).sum(dim=(1, 2)), torch.zeros(2, dtype=torch.float64))


def test_power_iteration_follows_the_weights(model):
    with torch.no_grad():
        for pair in query_key_weights(model):
            for weight in pair:
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    for _ in range(300):
        model.iterate()
    torch.testing.assert_close(model(WINDOWS), by_definition(model)(WINDOWS), rtol=1e-6, atol=1e-8)
    assert "right" in model.state_dict()  # a resumed training continues from the same vectors


@pytest.mark.parametrize("reparam", [True, False])
def test_the_probe_measures_the_attention_that_the_model_uses(model, reparam):
    decoder = model if reparam else by_definition(model)
    measures = AttentionRowsProbe(WINDOWS)(decoder, 0)
    for number, attention in enumerate(decoder.activations(WINDOWS, ["attention"])["attention"]):
        entropy = shannon_entropy(attention)[..., 1:].mean(dim=(1, 2, 3))
        torch.testing.assert_close(measures["entropy"][:, number], entropy)
        seen = [attention[:, :, :, row, : row + 1].log() for row in range(1, 6)]
        norms = [torch.linalg.vector_norm(row - row.mean(dim=-1, keepdim=True), dim=-1) for row in seen]
        torch.testing.assert_close(measures["logit_norm"][:, number], torch.stack(norms, dim=-1).mean(dim=(1, 2, 3)))
    assert bool((measures["slack"] >= -1e-12).all())
    assert bool((measures["bound_slack"] >= -1e-12).all())
    assert bool((measures["weight_floor"] <= measures["floor"] + 1e-12).all())
    assert measures["row_entropy"].shape == (2, 30)
    norm = torch.linalg.matrix_norm(query_key_weights(by_definition(model))[0][0], 2)
    torch.testing.assert_close(norm, model.gamma[:, 0, 0])


def test_both_arms_train_on_the_same_text():
    setting = LanguageSetting(
        tokeniser="bytes", width=8, hidden=8, heads=2, length=8, dropout=0.0, batch=4, columns=4, steps=6, every=3
    )
    context = Context((0, 1))
    trained = train(setting, context, read_text(setting, context), layers=1, rates=(1e-3, 1e-2), probe=2)
    assert dict(trained.loss.sizes) == {"arm": 2, "rate": 2, "seed": 2, "step": 5}
    assert trained.step.values.tolist() == [0, 1, 2, 3, 6]
    first = trained.isel(step=0)
    np.testing.assert_allclose(first.loss.isel(rate=0), first.loss.isel(rate=1), rtol=1e-6)  # rates share their start
    assert float(abs(first.weight_norm.isel(arm=0) - first.weight_norm.isel(arm=1)).min()) > 0
    assert (trained.loss.isel(step=-1) < trained.loss.isel(step=0)).all()
