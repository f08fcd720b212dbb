"""A decoder with clamped entropy, compared with a plain one, a layer with scaled queries, and its own target."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from joma import noise
from joma.arguments import InputError
from joma.models.clamped import GAIN, MAX_STEP, ClampedEntropyDecoder
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.entropy import shannon_entropy
from joma.train import Optimiser, Record, Saving, fit

CONFIG = DecoderConfig(
    vocabulary=11, width=8, layers=2, heads=2, hidden=6, length=7, norm="post", positions="sinusoidal", init="encoder"
)
TOKENS = torch.randint(11, (6, 7), generator=torch.Generator().manual_seed(5))
TARGET = torch.randint(11, (6, 7), generator=torch.Generator().manual_seed(6))
NEVER = 10**6


def generators():
    return [torch.Generator().manual_seed(seed) for seed in range(2)]


def clamped(clamp_steps, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return ClampedEntropyDecoder(
        config, generators=generators(), clamp_steps=torch.tensor(clamp_steps), dtype=torch.float64
    )


@torch.no_grad()
def entropy(model):
    attention = model.activations(TOKENS, ["attention"])["attention"]
    return torch.stack([shannon_entropy(weights).mean(dim=(1, 2, 3)) for weights in attention], dim=1)


def adapt(model, step):
    """Let the controller act on entropy and its slope, a difference quotient over ln β of each layer."""
    present, slopes = entropy(model), []
    for layer in range(len(model.layers)):
        model.log_scale[:, layer] += 1e-5
        slopes.append((present - entropy(model))[:, layer] / 1e-5)
        model.log_scale[:, layer] -= 1e-5
    model.adapt(torch.as_tensor(step), present, torch.stack(slopes, dim=1))


def gradients(model, **options):
    model.zero_grad()
    model.surprisal(TOKENS, TARGET, **options).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3}, {"norm": "pre", "positions": "rotary"}])
def test_it_is_a_plain_decoder_until_it_is_clamped(changes):
    model = clamped([[3, 3], [3, 3]], **changes)
    plain = Decoder(dataclasses.replace(CONFIG, **changes), generators=generators(), dtype=torch.float64)
    options = {"noise": noise.key(torch.arange(2), 4)} if "dropout" in changes else {}
    for step in range(4):
        adapt(model, step)
    expected, computed = gradients(plain, **options), gradients(model, **options)
    for name, gradient in expected.items():
        torch.testing.assert_close(computed[name], gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_the_temperature_scales_the_scores_of_its_layer_and_seed(positions):
    """A plain decoder with queries times β is the same function, and so has gradients that are times β in W_Q."""
    model = clamped([[0, 0], [0, 0]], positions=positions)
    model.log_scale.copy_(torch.tensor([[0.3, -0.2], [0.0, 0.7]]))
    scale = model.log_scale.exp()
    plain = Decoder(dataclasses.replace(CONFIG, positions=positions), generators=generators(), dtype=torch.float64)
    with torch.no_grad():
        for number, layer in enumerate(plain.layers):
            layer.attention.query.weight.mul_(scale[:, number, None, None])
            layer.attention.query.bias.mul_(scale[:, number, None])
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=1e-12)
    expected, computed = gradients(plain), gradients(model)
    for name, gradient in expected.items():
        factor = torch.ones_like(gradient)
        if ".query." in name:
            factor = factor * scale[:, int(name.split(".")[1])].view(-1, *(1,) * (gradient.ndim - 1))
        torch.testing.assert_close(computed[name], gradient * factor, rtol=0, atol=1e-12)


def test_every_parameter_has_a_gradient_while_entropy_is_clamped():
    model = clamped([[0, 0], [0, 0]])
    model.log_scale.fill_(0.4)
    for name, gradient in gradients(model).items():
        if not name.endswith("key.bias"):  # it shifts all scores of a query alike: softmax does not see it
            assert (gradient.abs().flatten(1).amax(1) > 0).all(), name
    assert not model.log_scale.requires_grad


def test_the_controller_finds_the_temperature_of_a_given_entropy():
    """With fixed parameters entropy returns to its target after a shift of the scores, by steps that shrink."""
    model = clamped([[0, 0], [0, NEVER]])
    adapt(model, 0)
    target = model.target.clone()
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.query.weight.mul_(3.0)
    assert ((entropy(model) - target).abs() > 1e-3).all()
    for step in range(1, 60):
        adapt(model, step)
    reached = entropy(model)
    clamps = torch.tensor([[True, True], [True, False]])
    torch.testing.assert_close(reached[clamps], target[clamps], rtol=0, atol=1e-6)
    assert model.log_scale[1, 1] == 0
    torch.testing.assert_close(model.target[1, 1], reached[1, 1], rtol=0, atol=1e-6)


def test_one_update_is_a_damped_step_of_newtons_method_and_bounded():
    model, slope = clamped([[0, 0], [0, 0]]), torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=torch.float64)
    model.adapt(torch.tensor(0), torch.full((2, 2), 1.5), slope)
    excess = torch.tensor([[0.0, 0.2], [-0.1, 0.01]], dtype=torch.float64)
    model.adapt(torch.tensor(1), 1.5 + excess, slope)
    expected = torch.tensor([[0.0, GAIN * 0.2 / 2.0], [-GAIN * 0.1 / 0.5, MAX_STEP]], dtype=torch.float64)
    torch.testing.assert_close(model.log_scale, expected, rtol=0, atol=1e-12)


def trained(folder=None, stop=None, clamp_steps=((4, 6), (6, NEVER))):
    """Train with entropy clamped; fail at the step `stop`, if there is one."""
    model = clamped(clamp_steps, dropout=0.2)

    def loss(model, step):
        if stop is not None and int(step) == stop:
            raise RuntimeError("stopped")
        adapt(model, step)
        return model.surprisal(TOKENS, TARGET, noise=noise.key(torch.arange(2), step)).mean((1, 2))

    record = Record(lambda model, _: {"entropy": entropy(model)}, dims={"entropy": ("layer",)}, gradients=False)
    saving = None if folder is None else Saving(folder, at=range(60))
    return fit(model, loss, optimiser=Optimiser("adam", 1e-2), steps=60, record=record, saving=saving)


def test_entropy_stays_in_training_and_all_else_trains():
    """Entropy moves by less than a tenth of what it moves by without the clamp."""
    free, clamp = trained(clamp_steps=((NEVER,) * 2,) * 2), trained()
    for seed, layer, step in ((0, 0, 4), (0, 1, 6), (1, 0, 6)):
        before = {"seed": seed, "layer": layer, "step": slice(0, step + 1)}
        if step == 4:
            np.testing.assert_array_equal(clamp.entropy.isel(before), free.entropy.isel(before))
        target, after = clamp.entropy.isel(seed=seed, layer=layer, step=step), slice(step, None)
        moved = abs(free.entropy.isel(seed=seed, layer=layer, step=after) - target).max()
        deviation = abs(clamp.entropy.isel(seed=seed, layer=layer, step=after) - target).max()
        assert float(deviation) < 0.1 * float(moved)
    assert bool((clamp.loss.diff("step") != 0).all())
    assert bool((clamp.loss.isel(step=-1) < clamp.loss.isel(step=4)).all())


def test_a_resumed_run_has_the_same_numbers(tmp_path):
    uninterrupted = trained()
    for stop in (3, 5, 40):
        with pytest.raises(RuntimeError, match="stopped"):
            trained(tmp_path / str(stop), stop)
        resumed = trained(tmp_path / str(stop))
        np.testing.assert_array_equal(resumed.entropy, uninterrupted.entropy)
        np.testing.assert_array_equal(resumed.loss, uninterrupted.loss)


@pytest.mark.parametrize(
    ("clamp_steps", "changes", "message"),
    [
        ([[1, 1]], {}, r"`clamp_steps` must be whole numbers \[seed, layer\] of shape \(2, 2\)"),
        ([[1.5, 1], [2, 2]], {}, "got torch.float32"),
        ([[1, 1], [2, 2]], {"attention": "uniform"}, "`config` must have attention that is not uniform"),
    ],
)
def test_bad_input_is_named(clamp_steps, changes, message):
    with pytest.raises(InputError, match=message):
        clamped(clamp_steps, **changes)
