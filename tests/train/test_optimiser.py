"""Every rule with each seed's own rate, clipping, schedule and restarts, against torch's optimisers seed by seed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from joma.arguments import InputError
from joma.train import Optimiser, packed
from joma.train.optimiser import gradient_norms
from joma.train.packed import PackedAdam, leading_part

BETAS = st.sampled_from([(0.9, 0.999), (0.5, 0.95), (0.0, 0.0)])
PLAIN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
SHAPES = {"a": (3, 4, 2), "b": (3, 5), "c": (3,)}
STEPS = 7


class Numbers(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))


def slopes(seed):
    """Gradients of three seeds whose sizes differ by orders of magnitude, step by step."""
    generator, size = torch.Generator().manual_seed(seed), torch.tensor([0.01, 1.0, 100.0], dtype=torch.float64)
    for _ in range(STEPS):
        drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        yield {name: gradient * size.view(-1, *(1,) * (gradient.ndim - 1)) for name, gradient in drawn.items()}


def expected(optimiser, seed, seed_index, rates, hold):
    """Seed `one` alone in torch's own loop; `hold`: the step from which `b` is left alone."""
    parameters = {
        name: nn.Parameter(value.detach()[seed_index].clone()) for name, value in Numbers(**SHAPES).named_parameters()
    }
    for step, gradients in enumerate(slopes(seed)):
        if step % (optimiser.restart or STEPS) == 0:
            groups = [{"params": [p], "lr": 0.0} for p in parameters.values()]
            moments = {} if optimiser.name == "sgd" else {"betas": optimiser.betas}
            plain = PLAIN[optimiser.name](groups, weight_decay=optimiser.weight_decay, **moments)
        for (name, p), group in zip(parameters.items(), plain.param_groups, strict=True):
            p.grad = gradients[name][seed_index].clone()
            group["lr"] = rates[seed_index] * (1 - step / 10) * (name != "b" or step < hold)
        if optimiser.clip is not None:
            nn.utils.clip_grad_norm_(
                [p for name, p in parameters.items() if name != "b" or step < hold], optimiser.clip
            )
        plain.step()
    return parameters


@pytest.mark.parametrize("name", sorted(PLAIN))
@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rates=st.one_of(st.floats(1e-6, 1.0).map(lambda rate: (rate,) * 3), st.tuples(*[st.floats(1e-6, 1.0)] * 3)),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clip=st.one_of(st.none(), st.floats(1e-3, 10.0)),
    restart=st.sampled_from([None, 3]),
    betas=BETAS,
    hold=st.integers(0, STEPS),
)
def test_every_seed_is_updated_as_torch_would_update_it_alone(name, seed, rates, **options):
    hold = options.pop("hold")
    rate = rates[0] if len(set(rates)) == 1 else rates

    def fading(now):
        return 1 - now.double() / 10

    schedules = {"b": lambda now: fading(now) * (now < hold), "*": fading}
    optimiser = Optimiser(name, rate, schedules=schedules, **options)
    model = Numbers(**SHAPES)
    rule = optimiser.build(model)
    for step, gradients in enumerate(slopes(seed)):
        for key, parameter in model.named_parameters():
            parameter.grad = gradients[key].clone()
        rule.update(torch.tensor(step))
    for seed_index in range(3):
        for key, parameter in expected(optimiser, seed, seed_index, rates, hold).items():
            torch.testing.assert_close(
                getattr(model, key).detach()[seed_index], parameter.detach(), rtol=1e-11, atol=1e-11
            )


@pytest.mark.parametrize("name", ["adam", "adamw"])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rate=st.one_of(st.floats(1e-6, 1.0), st.tuples(*[st.floats(1e-6, 1.0)] * 3)),
    decay=st.sampled_from([0.0, 0.1]),
    clip=st.one_of(st.none(), st.floats(1e-3, 10.0)),
    restart=st.sampled_from([None, 3]),
    betas=BETAS,
    large=st.sampled_from([1, 14, 10**6]),
    lost=st.one_of(st.none(), st.integers(0, 3)),
)
def test_the_rule_of_cuda_is_that_of_the_cpu(name, seed, large, lost, **options):
    """Uncompiled; `large` decides which parameters are packed, `lost` when seed 1's gradients turn NaN."""
    options["weight_decay"] = options.pop("decay")
    optimiser = Optimiser(name, schedules={"b": lambda now: (now < 4).double()}, **options)
    models = Numbers(**SHAPES), Numbers(**SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "LARGE", large)
        patch.setattr(torch, "compile", lambda function, **_: function)
        rules = optimiser.build(models[0]), PackedAdam(optimiser, models[1])
        for step, gradients in enumerate(slopes(seed)):
            diverged = torch.tensor([False, lost is not None and step >= lost, False])
            for model, rule in zip(models, rules, strict=True):
                for key, parameter in model.named_parameters():
                    parameter.grad = gradients[key].clone()
                    parameter.grad[diverged] = torch.nan
                rule.update(torch.tensor(step), diverged if diverged.any() else None)
    trained_seeds = [0, 1, 2] if lost is None else [0, 2]
    for key in SHAPES:
        torch.testing.assert_close(getattr(models[1], key), getattr(models[0], key), rtol=1e-11, atol=1e-11)
        for kind, parameter in rules[0].moments[key].items():
            # Where gradient and decay cancel, a moment is as small as the rounding of its summands, which are about 1.
            torch.testing.assert_close(
                rules[1].moments[key][kind][trained_seeds], parameter[trained_seeds], rtol=1e-11, atol=1e-15
            )
            assert rules[1].moments[key][kind].isfinite().all()


def test_a_closed_gate_leaves_the_parameters_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = Numbers(**SHAPES)
    rule = PackedAdam(Optimiser("adamw", 0.1, weight_decay=0.1), model)
    rule.gate.zero_()
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for key, parameter in model.named_parameters():
        parameter.grad = next(slopes(1))[key]
    rule.update(torch.tensor(0))
    assert all(parameter.detach().equal(start[key]) for key, parameter in model.named_parameters())


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    clip=st.one_of(st.none(), st.floats(1e-3, 10.0)),
    of_half=st.booleans(),
    padding=st.integers(0, 2),
)
def test_halves_have_the_gradients_and_follow_their_parameters(seed, clip, of_half, padding):
    """As a rule whose gradients are rounded to bfloat16, whichever of the two has them; what a copy adds is ignored."""
    optimiser = Optimiser("adam", 0.1, clip=clip, weight_decay=0.1)
    models = Numbers(**SHAPES).float(), Numbers(**SHAPES).float()

    def maker(parameter):
        return F.pad(parameter.bfloat16(), (0, padding) * (parameter.ndim - 1), value=torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "LARGE", 1)
        patch.setattr(torch, "compile", lambda function, **_: function)
        rules = [PackedAdam(optimiser, model) for model in models]
        halves = rules[1].half_copies(dict.fromkeys(["a", "none of them"], maker))
        assert set(halves) == {"a"}
        for step, gradients in enumerate(slopes(seed)):
            for model, rule in zip(models, rules, strict=True):
                rule.zero_grad()
                for key, parameter in model.named_parameters():
                    parameter.grad = gradients[key].float()
            rounded = gradients["a"].bfloat16()
            models[0].a.grad = rounded.float()
            if of_half:
                models[1].a.grad, halves["a"].grad = None, maker(rounded)
            for rule in rules:
                rule.update(torch.tensor(step))
            assert leading_part(halves["a"], models[1].a).equal(models[1].a.bfloat16())
    for key in SHAPES:
        torch.testing.assert_close(getattr(models[1], key), getattr(models[0], key), rtol=1e-6, atol=1e-6)


def test_what_both_have_of_a_gradient_is_added_and_only_float32_is_halved(monkeypatch):
    monkeypatch.setattr(packed, "LARGE", 1)
    assert not PackedAdam(Optimiser("adam"), Numbers(**SHAPES)).half_copies({"a": Tensor.bfloat16})
    model = Numbers(**SHAPES).float()
    rule = PackedAdam(Optimiser("adam"), model)
    (half,) = rule.half_copies({"a": Tensor.bfloat16}).values()
    model.a.grad, half.grad = torch.full_like(model.a, -1.0), torch.full_like(half, 100.0)
    assert rule._gradients(["a"])[0].eq(99.0).all()


def test_a_parameter_without_gradient_is_named(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(InputError, match="no gradient of"):
        PackedAdam(Optimiser("adam"), Numbers(**SHAPES)).update(torch.tensor(0))


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_lost_seed_is_left_alone(name):
    optimiser = Optimiser(name, 0.1, weight_decay=0.1, clip=1.0)
    free, model = Numbers(**SHAPES), Numbers(**SHAPES)
    rules = [optimiser.build(free), optimiser.build(model)]
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for step, gradients in enumerate(slopes(3)):
        for key in SHAPES:
            getattr(free, key).grad = gradients[key].clone()
            spoiled = gradients[key].clone()
            spoiled[1] = torch.nan
            getattr(model, key).grad = spoiled
        rules[0].update(torch.tensor(step))
        rules[1].update(torch.tensor(step), torch.tensor([False, True, False]))
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach()[1], start[key][1], rtol=0, atol=0)
        torch.testing.assert_close(parameter.detach()[[0, 2]], getattr(free, key).detach()[[0, 2]], rtol=1e-13, atol=0)


def test_norms_are_over_all_tensors_of_a_seed():
    gradients = next(slopes(5))
    flat = torch.cat([gradient.reshape(3, -1) for gradient in gradients.values()], dim=1)
    torch.testing.assert_close(gradient_norms(gradients.values()), flat.norm(dim=1))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"clip": -1.0}, "clip"),
        ({"restart": 0}, "restart"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9, float("nan"))}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"rate": (0.1, -0.1)}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rates": {"a": -1.0}}, "rates"),
        ({"name": "adagrad"}, "optimiser"),
    ],
)
def test_bad_options_are_refused(options, argument):
    with pytest.raises(InputError, match=f"`{argument}`"):
        Optimiser(**options)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"rate": (0.1, 0.2)}, "rate"),
        ({"rates": {"d": 0.1}}, "rates"),
        ({"schedules": {"d*": torch.sign}}, "schedules"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, argument):
    with pytest.raises(InputError, match=f"`{argument}`"):
        Optimiser(**options).build(Numbers(**SHAPES))
