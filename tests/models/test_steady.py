"""A decoder with frozen attention, compared with an earlier copy of itself and with a layer written out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

from joma import noise
from joma.arguments import InputError
from joma.models.steady import FrozenAttentionDecoder
from joma.models.transformer import Decoder, DecoderConfig
from joma.train import Optimiser, Record, Saving, fit

CONFIG = DecoderConfig(
    vocabulary=11, width=8, layers=3, heads=2, hidden=6, length=7, norm="post", positions="sinusoidal", init="encoder"
)
TOKENS = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(5))
TARGET = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(6))


def generators():
    return [torch.Generator().manual_seed(seed) for seed in range(2)]


def pair(freeze_steps, **changes):
    """Return a plain decoder, and one that starts with the same parameters and freezes its attention."""
    config, steps = dataclasses.replace(CONFIG, **changes), torch.tensor(freeze_steps)
    plain = Decoder(config, generators=generators(), dtype=torch.float64)
    return plain, FrozenAttentionDecoder(config, generators=generators(), freeze_steps=steps, dtype=torch.float64)


def perturb(model, seed=0):
    """Change every parameter that trains, in a way that depends on its name alone: equal decoders stay equal."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)
    return model


def attention(model, **options):
    watched = {"attention": []}
    model.final_states(TOKENS, watched=watched, **options)
    return watched["attention"]


def gradients(model, **options):
    model.zero_grad()
    model.surprisal(TOKENS, TARGET, **options).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


KINDS = [
    {},
    {"norm": "pre", "positions": "rotary", "width": 12},
    {"dropout": 0.3},
    {"attention_bias": False, "projection": False, "mask": "full", "norm": "none"},
    {"attention": "frozen"},
]


@pytest.mark.parametrize("changes", KINDS)
def test_it_is_a_plain_decoder_before_its_step_and_attends_as_at_that_step_afterwards(changes):
    plain, freezing = pair([5, 3], **changes)
    options = {"noise": noise.key(torch.arange(2), 9)} if "dropout" in changes else {}
    for step in range(4):
        perturb(plain, step), perturb(freezing, step)
        freezing.set_step(torch.tensor(step))
        expected, computed = gradients(plain, **options), gradients(freezing, **options)
        training = 2 if step < 3 else 1  # at step 3 the second seed has the same attention, but no gradient of it
        for name, gradient in expected.items():
            torch.testing.assert_close(computed[name][:training], gradient[:training], rtol=0, atol=1e-12)
        torch.testing.assert_close(attention(freezing, **options), attention(plain, **options), rtol=0, atol=1e-14)
    at_step = {3: attention(plain, **options)}
    for step in range(4, 8):
        perturb(plain, step), perturb(freezing, step)
        freezing.set_step(torch.tensor(step))
        frozen, at_step[step] = attention(freezing, **options), attention(plain, **options)
        for layer in range(3):
            torch.testing.assert_close(frozen[layer][1], at_step[3][layer][1], rtol=0, atol=1e-14)
            assert not torch.allclose(at_step[step][layer][1], at_step[3][layer][1], atol=1e-3)
            torch.testing.assert_close(frozen[layer][0], at_step[min(step, 5)][layer][0], rtol=0, atol=1e-14)


def test_no_gradient_reaches_the_parameters_behind_frozen_attention():
    _, freezing = pair([9, 2])
    freezing.set_step(torch.tensor(2))
    for name, gradient in gradients(perturb(freezing)).items():
        of_attention = name.endswith(("query.weight", "query.bias", "key.weight"))
        # The bias of keys shifts all scores of a query by the same number: its gradient is zero in any case.
        assert (gradient[1].abs().max() == 0) == (of_attention or name.endswith("key.bias"))
        if not name.endswith("key.bias"):
            assert gradient[0].abs().max() > 0


def test_values_and_all_else_come_from_the_present_parameters():
    """One layer by hand: softmax of scores from the past parameters, all else from the present ones."""
    config = {"layers": 1, "heads": 1}
    past, freezing = pair([0, 0], **config)
    freezing.set_step(torch.tensor(0))
    present = perturb(pair([0, 0], **config)[0], 3)
    perturb(freezing, 3)
    seed, length = 1, TOKENS.shape[1]

    def stream(model):
        return model.embedding[seed][TOKENS] + model.positions[0]

    def linear(part, x):
        return x @ part.weight[seed] + part.bias[seed]

    def normed(part, x):
        return layer_norm(x, x.shape[-1:]) * part.gain[seed] + part.offset[seed]

    frozen = past.layers[0].attention
    query, key = (linear(part, stream(past)) for part in (frozen.query, frozen.key))
    scores = query @ key.mT / 8**0.5
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    layer, x = present.layers[0], stream(present)
    x = normed(layer.norms[0], x + linear(layer.attention.projection, weights @ linear(layer.attention.value, x)))
    x = normed(layer.norms[1], x + linear(layer.upper, linear(layer.lower, x).relu()))
    torch.testing.assert_close(freezing(TOKENS)[seed], linear(present.head, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(freezing(TOKENS, last=2)[seed], linear(present.head, x)[:, -2:], rtol=0, atol=1e-12)


def test_attention_of_a_seed_without_residual_connections_is_frozen_too():
    residual = torch.tensor([[[True, False]] * 3, [[False, True]] * 3])
    options = {"generators": generators(), "residual": residual, "dtype": torch.float64}
    plain = Decoder(CONFIG, **options)
    freezing = FrozenAttentionDecoder(CONFIG, **{**options, "generators": generators()}, freeze_steps=[2, 2])
    expected = attention(plain)
    freezing.set_step(torch.tensor(2))
    torch.testing.assert_close(attention(perturb(freezing)), expected, rtol=0, atol=1e-14)


def trained(folder=None, stop=None):
    """Train with attention frozen from steps 4 and 6 on; fail at the step `stop`, if there is one."""
    model = pair([4, 6], dropout=0.2)[1]

    def loss(model, step):
        if stop is not None and int(step) == stop:
            raise RuntimeError("stopped")
        model.set_step(step)
        return model.surprisal(TOKENS, TARGET, noise=noise.key(torch.arange(2), step)).mean((1, 2))

    def measure(model, step):
        del step
        with torch.no_grad():
            return {"attention": torch.stack([weights.flatten(1) for weights in attention(model)], 1)}

    record = Record(measure, dims={"attention": ("layer", "number")}, gradients=False)
    saving = None if folder is None else Saving(folder, at=range(10))
    return fit(model, loss, optimiser=Optimiser("adam", 1e-2), steps=10, record=record, saving=saving)


def test_attention_freezes_in_training_and_a_resumed_run_has_the_same_numbers(tmp_path):
    uninterrupted = trained()
    for seed, freeze_step in enumerate((4, 6)):
        weights = uninterrupted.attention.isel(seed=seed).values
        assert (abs(np.diff(weights[: freeze_step + 1], axis=0)).max(axis=(1, 2)) > 1e-4).all()
        frozen = weights[freeze_step:]
        np.testing.assert_array_equal(frozen, np.broadcast_to(frozen[0], frozen.shape))
    assert bool((uninterrupted.loss.diff("step") != 0).all())
    for stop in (3, 5, 8):
        with pytest.raises(RuntimeError, match="stopped"):
            trained(tmp_path / str(stop), stop)
        resumed = trained(tmp_path / str(stop))
        np.testing.assert_array_equal(resumed.attention, uninterrupted.attention)
        np.testing.assert_array_equal(resumed.loss, uninterrupted.loss)


@pytest.mark.parametrize(
    ("freeze_steps", "changes", "message"),
    [
        ([1], {}, "`freeze_steps` must be a whole number for each of 2 seeds"),
        ([1.5, 2.0], {}, "`freeze_steps` must be a whole number for each of 2 seeds, got torch.float32"),
        ([1, 2], {"attention": "uniform"}, "`config` must have attention that is not uniform"),
        ([1, 2], {"positions": "learned"}, "positions that are not learned"),
    ],
)
def test_bad_input_is_named(freeze_steps, changes, message):
    with pytest.raises(InputError, match=message):
        pair(freeze_steps, **changes)
