"""The flow of a one-layer Transformer: its velocity against autograd, and the laws of the value path along it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.integration import Solver
from joma.theory.invariants import ATTENTIONS, conserved, predict, relative_error
from joma.theory.losses import constant
from joma.theory.value_flow import ValueRates, value_block
from value_problems import ACTIVATIONS, QUERIES, TOKENS, draw, torch_descent

seeds = st.integers(0, 2**32 - 1)
RATES = [(1.0, 1.0), (0.6, 1.7)]
TIMES = np.linspace(0, 3, 7)


@pytest.mark.parametrize("attention", list(ATTENTIONS))
@pytest.mark.parametrize("factored", [False, True])
@given(
    seed=seeds,
    activation=st.sampled_from(list(ACTIVATIONS)),
    norm=st.booleans(),
    skip=st.booleans(),
    orthonormal=st.booleans(),
    temperature=st.floats(0.4, 2),
    rates=st.tuples(st.floats(0.2, 3), st.floats(0.2, 3), st.floats(0, 3)),
)
@settings(max_examples=25)
def test_velocity_is_the_descent_direction_of_autograd(attention, factored, rates, **problem):
    flow, start, label = draw(attention, factored=factored, rates=rates, **problem)
    velocity = flow.velocity(start)
    descent, averages = torch_descent(flow, start, label)
    assert list(velocity.parameters) == list(flow.names)
    for name, direction in descent.items():
        expected = flow.rates.of(name) * direction
        np.testing.assert_allclose(
            velocity.parameters[name], expected, rtol=0, atol=1e-13 * (1 + np.abs(expected).max()), err_msg=name
        )
    for name, expected in averages.items():
        np.testing.assert_allclose(getattr(velocity, name), expected, rtol=0, atol=1e-13 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_velocity_lowers_the_loss_as_finite_differences_say(attention):
    """Without autograd: −d loss/dt along the flow is Σ |velocity|²/rate, for the loss that cross entropy integrates."""
    flow, start, label = draw(attention, seed=4, rates=(0.6, 1.7, 0.8), factored=True)

    def loss(parameters):
        logits = []
        flow_outputs = value_block(
            attention, flow.activation, lambda outputs: logits.append(outputs) or 0 * outputs, flow.x,
            query=flow.query, weight=flow.weight, rates=flow.rates, architecture=flow.architecture,
        )  # fmt: skip
        flow_outputs.velocity(parameters)
        outputs = logits[-1]
        shifted = outputs - outputs.max(1, keepdims=True)
        surprisal = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(label)), label]
        return flow.weight @ surprisal

    velocity = flow.velocity(start).parameters
    width = 1e-5
    ahead, behind = (
        loss({name: start[name] + sign * width * velocity[name] for name in flow.names}) for sign in (1, -1)
    )
    speed = sum((velocity[name] ** 2).sum() / flow.rates.of(name) for name in flow.names)
    assert (behind - ahead) / (2 * width) == pytest.approx(speed, rel=1e-8)


@pytest.mark.parametrize("attention", ["exp", "linear"])
@pytest.mark.parametrize("rates", RATES)
@given(seed=seeds, activation=st.sampled_from(list(ACTIVATIONS)))
@settings(max_examples=5)
def test_free_logits_keep_the_law_of_the_values(attention, rates, seed, activation):
    """JoMA's law with value vectors in the place of hidden units: LayerNorm, a residual, an MLP and a head above."""
    flow, start, _ = draw(attention, seed=seed, rates=rates, activation=activation)
    path = flow.solve(TIMES, start)
    constant_of_motion = conserved(attention, path.p, path.z, rate_w=rates[1], rate_z=rates[0])
    assert np.abs(constant_of_motion - constant_of_motion[0]).max() <= 1e-8
    assert np.abs(path.z - path.z[0]).max() > 1e-2  # something was learned
    wrong = conserved(attention, path.p, path.z, rate_w=rates[1], rate_z=2 * rates[0])
    assert np.abs(wrong - wrong[0]).max() > 1e-3  # the rates matter


@pytest.mark.parametrize("rates", RATES)
@given(seed=seeds, activation=st.sampled_from(list(ACTIVATIONS)), temperature=st.floats(0.5, 2))
@settings(max_examples=5)
def test_softmax_keeps_the_law_with_its_ledger(rates, seed, activation, temperature):
    flow, start, _ = draw("softmax", seed=seed, rates=rates, activation=activation, temperature=temperature)
    path = flow.solve(TIMES, start)
    options = {"kappa": rates[0] / rates[1], "temperature": temperature, "b_ref": flow.b_ref}
    predicted = predict("softmax", path.p, path.p[0], path.z[0], **options)
    total = path.z.sum(axis=1)
    assert np.abs(total - (predicted - path.ledger.total)).max() <= 1e-8
    assert relative_error(total, predicted, total[0])[-1] > 1e-3  # without the ledger it is not exact
    np.testing.assert_allclose(path.z.sum(axis=2), np.broadcast_to(path.z[0].sum(axis=1), (7, QUERIES)), atol=1e-8)


@pytest.mark.parametrize("rates", RATES)
@given(seed=seeds, activation=st.sampled_from(list(ACTIVATIONS)))
@settings(max_examples=5)
def test_factored_linear_attention_keeps_keys_against_values(rates, seed, activation):
    flow, start, _ = draw("linear", seed=seed, rates=rates, factored=True, activation=activation)
    path = flow.solve(TIMES, start)
    keys = np.swapaxes(path.k, -1, -2)
    constant_of_motion = conserved("linear", path.p, keys, rate_w=rates[1], rate_z=rates[0])
    by_hand = (path.k**2).sum(2) / rates[0] - (path.p**2).sum(2) / rates[1]
    np.testing.assert_allclose(constant_of_motion, by_hand, atol=1e-12)
    assert np.abs(by_hand - by_hand[0]).max() <= 1e-8
    assert np.abs((path.k**2).sum(2) - (path.k[0] ** 2).sum(1)).max() > 1e-3
    assert path.keys is None


@pytest.mark.parametrize("attention", ["exp", "softmax"])
@pytest.mark.parametrize("rates", RATES)
@given(seed=seeds, activation=st.sampled_from(list(ACTIVATIONS)), temperature=st.floats(0.5, 2))
@settings(max_examples=4)
def test_factored_exp_and_softmax_follow_the_key_ledger(attention, rates, seed, activation, temperature):
    options = {"temperature": temperature} if attention == "softmax" else {}
    flow, start, _ = draw(attention, seed=seed, rates=rates, factored=True, activation=activation, **options)
    path = flow.solve(TIMES, start)
    growth = 0.5 * ((path.k**2).sum(2) - (path.k[0] ** 2).sum(1))
    assert path.keys is not None
    np.testing.assert_allclose(growth, path.keys.total, rtol=0, atol=1e-8)
    quantity = (path.k**2).sum(2) / rates[0] - (path.p**2).sum(2) / rates[1]
    assert np.abs(quantity - quantity[0]).max() > 1e-3  # what linear attention keeps is not constant here


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_embeddings_that_are_not_orthonormal_break_the_law(attention):
    errors = []
    for seed in range(3):
        flow, start, _ = draw(attention, seed=seed, orthonormal=False)
        path = flow.solve([0.0, 3.0], start, solver=Solver(rtol=1e-9, atol=1e-11))
        predicted = predict(attention, path.p, path.p[0], path.z[0], b_ref=flow.b_ref) - path.ledger.total
        total = (path.z**flow.attention.power).sum(axis=1)
        errors.append(relative_error(total, predicted, total[0])[-1])
    assert min(errors) > 0.05


def test_a_rate_of_zero_freezes_what_stands_above():
    flow, start, _ = draw("exp", seed=1, rates=(1.0, 1.0, 0.0))
    path = flow.solve([0.0, 1.0], start)
    for name in ("W_O", "W_1", "W_2", "W_H"):
        np.testing.assert_array_equal(path.parameters[name][1], start[name])
    assert np.abs(path.p[1] - path.p[0]).max() > 1e-3


def small(**changes):
    arguments = {"attention": "exp", "activation": "tanh", "gradient": constant(1.0), "x": [[0.5, 0.5]], **changes}
    return value_block(**arguments)


def test_bad_input_is_named():
    cases = [
        (lambda: small(attention="none"), "`attention`"),
        (lambda: small(activation="relu"), "`activation` must be smooth"),
        (lambda: small(attention="softmax", x=[[0.0, 0.0]]), "`x` must be positive somewhere"),
        (lambda: small(query=0.5), "`query`"),
        (lambda: ValueRates(rate_v=0.0), "`rate_v`"),
        (lambda: small().solve([1.0], {"z": [[0.0]]}), "`start` must be the parameters z, W_V"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()
    flow, start, _ = draw("exp", seed=0)
    with pytest.raises(InputError, match="`W_O` must be"):
        flow.solve([1.0], start | {"W_O": np.ones((2, 10))})
    with pytest.raises(InputError, match="`z` must be"):
        flow.solve([1.0], start | {"z": np.ones((QUERIES, TOKENS + 1))})
    narrow = small(gradient=lambda outputs: outputs[:, :1])
    with pytest.raises(InputError, match=r"`gradient` must be .sample, output. of shape .1, 2."):
        narrow.solve([1.0], {name: np.eye(3) for name in narrow.names} | {"z": [[0.0, 0.0]], "W_H": np.ones((3, 2))})
