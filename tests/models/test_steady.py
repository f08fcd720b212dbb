"""A decoder whose attention is held: against a decoder as it was, and against a layer written out by hand."""

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
from joma.train import Optimiser, fit

CONFIG = DecoderConfig(
    vocabulary=11, width=8, layers=3, heads=2, hidden=6, length=7, norm="post", positions="sinusoidal", init="encoder"
)
TOKENS = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(5))
TARGET = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(6))


def streams():
    return [torch.Generator().manual_seed(seed) for seed in range(2)]


def pair(until, **changes):
    """A decoder, and one that starts as it does and is held."""
    config = dataclasses.replace(CONFIG, **changes)
    steady = FrozenAttentionDecoder(config, generators=streams(), freeze_steps=torch.tensor(until), dtype=torch.float64)
    return Decoder(config, generators=streams(), dtype=torch.float64), steady


def shaken(model, seed=0):
    """The same change of every parameter that trains, by name, so that decoders that are equal stay so."""
    with torch.no_grad():
        for name, own in sorted(model.named_parameters()):
            if own.requires_grad:
                generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
                own.add_(torch.randn(own.shape, generator=generator, dtype=own.dtype), alpha=0.3)
    return model


def attention(model, **options):
    kept = {"attention": []}
    model.final_states(TOKENS, watched=kept, **options)
    return kept["attention"]


def gradients(model, **options):
    model.zero_grad()
    model.surprisal(TOKENS, TARGET, **options).sum().backward()
    return {name: own.grad for name, own in model.named_parameters() if own.requires_grad}


KINDS = [
    {},
    {"norm": "pre", "positions": "rotary", "width": 12},
    {"dropout": 0.3},
    {"attention_bias": False, "projection": False, "mask": "full", "norm": "none"},
    {"attention": "frozen"},
]


@pytest.mark.parametrize("changes", KINDS)
def test_before_the_step_it_is_the_decoder_and_after_it_attends_as_it_did(changes):
    plain, steady = pair([5, 3], **changes)
    options = {"noise": noise.key(torch.arange(2), 9)} if "dropout" in changes else {}
    for step in range(4):
        shaken(plain, step), shaken(steady, step)
        steady.set_step(torch.tensor(step))
        expected, found = gradients(plain, **options), gradients(steady, **options)
        last = 2 if step < 3 else 1  # the second seed's attention is held at step 3: the same, without its gradient
        for name, own in expected.items():
            torch.testing.assert_close(found[name][:last], own[:last], rtol=0, atol=1e-12)
        torch.testing.assert_close(attention(steady, **options), attention(plain, **options), rtol=0, atol=1e-14)
    then = attention(plain, **options)
    for step in range(4, 8):
        shaken(plain, step), shaken(steady, step)
        steady.set_step(torch.tensor(step))
        own, now = attention(steady, **options), attention(plain, **options)
        for layer in range(3):
            torch.testing.assert_close(own[layer][1], then[layer][1], rtol=0, atol=1e-14)
            assert not torch.allclose(now[layer][1], then[layer][1], atol=1e-3)
        if step == 5:
            first = now
        for layer in range(3):
            expected = now if step < 5 else first
            torch.testing.assert_close(own[layer][0], expected[layer][0], rtol=0, atol=1e-14)


def test_no_gradient_reaches_what_made_the_attention():
    _, steady = pair([9, 2])
    steady.set_step(torch.tensor(2))
    for name, slope in gradients(shaken(steady)).items():
        asks = name.endswith(("query.weight", "query.bias", "key.weight"))
        # A key's bias moves all scores of a query alike: its gradient is nothing in any case.
        assert (slope[1].abs().max() == 0) == (asks or name.endswith("key.bias"))
        if not name.endswith("key.bias"):
            assert slope[0].abs().max() > 0


def test_values_and_all_else_are_those_of_now():
    """One layer by hand: softmax of scores from the parameters then, all else from those of now."""
    config = {"layers": 1, "heads": 1}
    then, steady = pair([0, 0], **config)
    steady.set_step(torch.tensor(0))
    now = shaken(pair([0, 0], **config)[0], 3)
    shaken(steady, 3)
    seed, length = 1, TOKENS.shape[1]

    def stream(model):
        return model.embedding[seed][TOKENS] + model.positions[0]

    def linear(part, x):
        return x @ part.weight[seed] + part.bias[seed]

    def normed(part, x):
        return layer_norm(x, x.shape[-1:]) * part.gain[seed] + part.offset[seed]

    query, key = (linear(part, stream(then)) for part in (then.layers[0].attention.query, then.layers[0].attention.key))
    scores = query @ key.mT / 8**0.5
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    layer, x = now.layers[0], stream(now)
    x = normed(layer.norms[0], x + linear(layer.attention.projection, weights @ linear(layer.attention.value, x)))
    x = normed(layer.norms[1], x + linear(layer.upper, linear(layer.lower, x).relu()))
    torch.testing.assert_close(steady(TOKENS)[seed], linear(now.head, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(steady(TOKENS, last=2)[seed], linear(now.head, x)[:, -2:], rtol=0, atol=1e-12)


def test_a_seed_without_residual_connections_is_held_as_well():
    residual = torch.tensor([[[True, False]] * 3, [[False, True]] * 3])
    options = {"generators": streams(), "residual": residual, "dtype": torch.float64}
    plain = Decoder(CONFIG, **options)
    steady = FrozenAttentionDecoder(CONFIG, **{**options, "generators": streams()}, freeze_steps=[2, 2])
    then = attention(plain)
    steady.set_step(torch.tensor(2))
    torch.testing.assert_close(attention(shaken(steady)), then, rtol=0, atol=1e-14)


def trained(folder=None, stop=None):
    """Train with attention held from steps 4 and 6 on; stop by a fault at a step."""
    model = pair([4, 6], dropout=0.2)[1]

    def loss(model, step):
        if stop is not None and int(step) == stop:
            raise RuntimeError("stopped")
        model.set_step(step)
        return model.surprisal(TOKENS, TARGET, noise=noise.key(torch.arange(2), step)).mean((1, 2))

    def record(model, step):
        del step
        with torch.no_grad():
            return {"attention": torch.stack([own.flatten(1) for own in attention(model)], 1)}

    options = {"steps": 10, "save": range(10), "checkpoints": folder, "record": record, "gradients": False}
    return fit(model, loss, optimiser=Optimiser("adam", 1e-2), dims={"attention": ("layer", "number")}, **options)


def test_it_is_held_in_training_and_a_run_that_was_stopped_goes_on_alike(tmp_path):
    whole = trained()
    for seed, until in enumerate((4, 6)):
        own = whole.attention.isel(seed=seed).values
        assert (abs(np.diff(own[: until + 1], axis=0)).max(axis=(1, 2)) > 1e-4).all()
        np.testing.assert_array_equal(own[until:], np.broadcast_to(own[until], own[until:].shape))
    assert bool((whole.loss.diff("step") != 0).all())
    for stop in (3, 5, 8):
        with pytest.raises(RuntimeError, match="stopped"):
            trained(tmp_path / str(stop), stop)
        again = trained(tmp_path / str(stop))
        np.testing.assert_array_equal(again.attention, whole.attention)
        np.testing.assert_array_equal(again.loss, whole.loss)


@pytest.mark.parametrize(
    ("until", "changes", "match"),
    [
        ([1], {}, "`freeze_steps` must be a whole number for each of 2 seeds"),
        ([1.5, 2.0], {}, "`freeze_steps` must be a whole number for each of 2 seeds, got torch.float32"),
        ([1, 2], {"attention": "uniform"}, "`config` must have attention that is not uniform"),
        ([1, 2], {"positions": "learned"}, "positions that are not learned"),
    ],
)
def test_bad_input(until, changes, match):
    with pytest.raises(InputError, match=match):
        pair(until, **changes)
