"""The conserved matrices of a head: kept by gradient flow, changed by SGD, decay and Adam as the formulas say."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.balance import Rotary, commuting_part, head_balance, head_drift, head_gram, head_imbalance

WIDTH, LENGTH, SAMPLES = 5, 4, 3


class Attention:
    """Causal attention in float64 with heads that share key heads, and a nonlinear network and loss above it.

    Weights are [head, head_dim, width], that of the output [head, width, head_dim].
    """

    def __init__(self, *, head_dim=4, heads=2, key_heads=1, rotary=None, norm=False, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.rotary, self.norm, self.groups = rotary, norm, heads // key_heads
        self.parameters = {
            "query": draw(heads, head_dim, WIDTH),
            "key": draw(key_heads, head_dim, WIDTH),
            "value": draw(key_heads, head_dim, WIDTH),
            "output": draw(heads, WIDTH, head_dim),
            "query_bias": draw(heads, head_dim),
            "key_bias": draw(key_heads, head_dim),
            "value_bias": draw(key_heads, head_dim),
            "upper": draw(WIDTH, 2),
        }
        self.x, self.target = 2 * draw(SAMPLES, LENGTH, WIDTH), 4 * draw(SAMPLES, LENGTH, 2)

    def project(self, name, parameters):
        vectors = torch.einsum("hdw,slw->shld", parameters[name], self.x) + parameters[f"{name}_bias"][:, None]
        if self.norm and name != "value":
            vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        if self.rotary is not None and name != "value":
            vectors = rotated(vectors, self.rotary)
        return vectors if name == "query" else vectors.repeat_interleave(self.groups, dim=1)

    def loss(self, parameters):
        query, key, value = (self.project(name, parameters) for name in ("query", "key", "value"))
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = (query @ key.mT).masked_fill(hidden, -torch.inf).softmax(dim=-1)
        y = torch.einsum("shld,hwd->slw", weights @ value, parameters["output"]) + self.x
        return (torch.tanh(y) @ parameters["upper"] - self.target).square().mean()

    def gradients(self, parameters):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        return dict(zip(leaves, torch.autograd.grad(self.loss(leaves), list(leaves.values())), strict=True))

    def grams(self, parameters, rotary="own"):
        """Return the terms of both laws, each [key head, head_dim, head_dim]."""
        rotary = self.rotary if rotary == "own" else rotary
        query = parameters["query"].unflatten(0, (-1, self.groups)).transpose(1, 2).flatten(2)
        query_bias = parameters["query_bias"].unflatten(0, (-1, self.groups)).mT
        output = parameters["output"].mT.unflatten(0, (-1, self.groups)).transpose(1, 2).flatten(2)
        queries_keys = (
            head_gram(query, query_bias, rotary=rotary),
            head_gram(parameters["key"], parameters["key_bias"], rotary=rotary),
        )
        return queries_keys, (head_gram(parameters["value"], parameters["value_bias"]), head_gram(output))


def rotated(vectors, rotary):
    """Rotate the pairs of dimensions of [..., position, head_dim] by their frequencies, one plane at a time."""
    turned = vectors.clone()
    for index, (first, second) in enumerate(zip(*(dims.tolist() for dims in rotary.pairs), strict=True)):
        angle = torch.arange(vectors.shape[-2], dtype=torch.float64) * 0.7**index
        turned[..., first] = vectors[..., first] * angle.cos() - vectors[..., second] * angle.sin()
        turned[..., second] = vectors[..., first] * angle.sin() + vectors[..., second] * angle.cos()
    return turned


def flow(model, *, time=1.0, steps=250):
    """Integrate gradient flow by the classical Runge-Kutta method and return the parameters at the end."""

    def slope(parameters):
        return {name: -gradient for name, gradient in model.gradients(parameters).items()}

    def moved(parameters, slopes, factor):
        return {name: tensor + factor * slopes[name] for name, tensor in parameters.items()}

    h, now = time / steps, model.parameters
    for _ in range(steps):
        first = slope(now)
        second = slope(moved(now, first, h / 2))
        third = slope(moved(now, second, h / 2))
        fourth = slope(moved(now, third, h))
        now = {k: v + h / 6 * (first[k] + 2 * second[k] + 2 * third[k] + fourth[k]) for k, v in now.items()}
    return now


CASES = {
    "one head": {"heads": 1},
    "two heads": {"heads": 2, "key_heads": 2},
    "shared keys": {"heads": 4, "key_heads": 2},
    "rotary": {"rotary": Rotary(4)},
    "neighbours rotated": {"rotary": Rotary(4, interleaved=True)},
    "partly rotated": {"rotary": Rotary(2), "head_dim": 5},
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_flow_keeps_both_laws(case):
    model = Attention(**CASES[case])
    end = flow(model)
    for (first, second), (first_start, second_start) in zip(
        model.grams(end), model.grams(model.parameters), strict=True
    ):
        assert torch.linalg.matrix_norm(first - first_start).min() > 1e-2  # far more than the law allows Δ to change
        torch.testing.assert_close(first - second, first_start - second_start, rtol=0, atol=1e-8)
        assert head_drift(first, second, first_start, second_start).max() < 1e-7


@pytest.mark.parametrize(
    "changes", [{"rotary": Rotary(4)}, {"norm": True}, {"rotary": Rotary(2), "head_dim": 5}], ids=str
)
def test_rotary_positions_and_norms_break_the_full_law_of_queries_and_keys_alone(changes):
    model = Attention(**changes)
    end = flow(model)
    drifts = [
        head_drift(*now, *start)
        for now, start in zip(model.grams(end, None), model.grams(model.parameters, None), strict=True)
    ]
    assert drifts[0].min() > 0.05
    assert drifts[1].max() < 1e-7


def sgd_step(model, parameters, rate, decay, biases=True):
    """Return the parameters after one step; `biases` says whether they decay too."""
    gradients = model.gradients(parameters)
    decays = {name: decay * (biases or not name.endswith("bias")) for name in parameters}
    return {name: (1 - rate * decays[name]) * tensor - rate * gradients[name] for name, tensor in parameters.items()}


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_one_step_of_sgd_adds_the_balance_of_the_gradients(case, decay):
    """Δ becomes (1 − rate·λ)² Δ + rate² (the same of the gradients), to rounding."""
    model, rate = Attention(**CASES[case]), 0.2
    after = model.grams(sgd_step(model, model.parameters, rate, decay))
    before, gradients = model.grams(model.parameters), model.grams(model.gradients(model.parameters))
    for (first, second), (old_first, old_second), (g_first, g_second) in zip(after, before, gradients, strict=True):
        expected = (1 - rate * decay) ** 2 * (old_first - old_second) + rate**2 * (g_first - g_second)
        torch.testing.assert_close(first - second, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("biases", [True, False])
def test_decay_multiplies_the_balance_only_if_biases_decay_too(biases):
    model, rate, decay = Attention(), 0.2, 0.3
    after = model.grams(sgd_step(model, model.parameters, rate, decay, biases))
    before, gradients = model.grams(model.parameters), model.grams(model.gradients(model.parameters))
    for (first, second), (old_first, old_second), (g_first, g_second) in zip(after, before, gradients, strict=True):
        expected = (1 - rate * decay) ** 2 * (old_first - old_second) + rate**2 * (g_first - g_second)
        error = torch.linalg.matrix_norm(first - second - expected) / torch.linalg.matrix_norm(expected)
        assert bool((error < 1e-11).all()) if biases else bool((error > 1e-3).all())


def test_weight_decay_alone_decays_the_balance_at_twice_its_rate():
    """Small steps: Δ(t) = Δ(0) exp(−2 λ t), with time t = rate · steps, up to the steps' squares."""
    model, decay, rate, steps = Attention(), 0.5, 2e-3, 500
    now = model.parameters
    for _ in range(steps):
        now = sgd_step(model, now, rate, decay)
    for (first, second), (first_start, second_start) in zip(
        model.grams(now), model.grams(model.parameters), strict=True
    ):
        expected = (first_start - second_start) * math.exp(-2 * decay * rate * steps)
        error = torch.linalg.matrix_norm(first - second - expected) / torch.linalg.matrix_norm(expected)
        assert error.max() < 0.02
        assert head_drift(first, second, first_start, second_start).min() > 0.05


def test_adam_leaves_both_laws():
    model = Attention()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in model.parameters.items()}
    optimiser = torch.optim.Adam(leaves.values(), lr=1e-3)
    for _ in range(100):
        optimiser.zero_grad()
        model.loss(leaves).backward()
        optimiser.step()
    end = {name: tensor.detach() for name, tensor in leaves.items()}
    for now, start in zip(model.grams(end), model.grams(model.parameters), strict=True):
        assert head_drift(*now, *start).min() > 0.05


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "dims"), [(6, 6), (6, 4), (5, 2), (4, 0)])
def test_what_commutes_is_the_mean_over_all_rotations(size, dims, interleaved):
    """Four angles for each pair average products of two sines and cosines exactly."""
    generator = torch.Generator().manual_seed(size + dims)
    w = torch.randn(size, 7, generator=generator, dtype=torch.float64)
    matrix, rotary = w @ w.T, Rotary(dims, interleaved)
    pairs = list(zip(*(part.tolist() for part in rotary.pairs), strict=True))
    total, angles = torch.zeros_like(matrix), [k * math.pi / 2 for k in range(4)]
    for choice in itertools.product(angles, repeat=len(pairs)):
        rotation = torch.eye(size, dtype=torch.float64)
        for angle, (first, second) in zip(choice, pairs, strict=True):
            rotation[first, first] = rotation[second, second] = math.cos(angle)
            rotation[first, second], rotation[second, first] = -math.sin(angle), math.sin(angle)
        total += rotation @ matrix @ rotation.T
    torch.testing.assert_close(commuting_part(matrix, rotary), total / 4 ** len(pairs), rtol=1e-12, atol=1e-12)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 7))


@given(shapes, st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_measures_are_scale_free_and_at_most_one(shape, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    grams = [head_gram(weight) for weight in weights]
    for measure, arguments in ((head_imbalance, grams[:2]), (head_drift, grams)):
        values = measure(*arguments)
        assert values.shape == shape[:1]
        assert ((values >= 0) & (values <= 1 + 1e-12)).all()
        torch.testing.assert_close(measure(*(scale * gram for gram in arguments)), values, rtol=1e-6, atol=1e-9)


@given(shapes, st.integers(0, 2**31))
def test_the_measures_of_known_changes(shape, seed):
    """Equal changes of both terms are no drift, a change of one alone is a drift of 1; so for imbalance."""
    generator = torch.Generator().manual_seed(seed)
    first, second, change = (head_gram(torch.randn(*shape, generator=generator, dtype=torch.float64)) for _ in range(3))
    torch.testing.assert_close(
        head_drift(first + change, second + change, first, second), torch.zeros(shape[0]).double()
    )
    torch.testing.assert_close(head_drift(first + change, second, first, second), torch.ones(shape[0]).double())
    torch.testing.assert_close(head_imbalance(first, 0 * first), torch.ones(shape[0]).double())
    assert head_imbalance(first, first).abs().max() == 0
    shrunk = head_drift(0.9 * first, 0.9 * second, first, second)
    torch.testing.assert_close(shrunk, head_imbalance(first, second), rtol=1e-6, atol=1e-9)


@given(shapes, st.integers(0, 2**31))
def test_the_gram_is_that_of_the_matrix_with_its_bias_as_a_column(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(*shape, generator=generator), torch.randn(shape[:2], generator=generator)
    augmented = torch.cat([weight, bias[..., None]], dim=-1).double()
    expected = torch.einsum("biw,bjw->bij", augmented, augmented)
    torch.testing.assert_close(head_gram(weight, bias), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head_balance(weight, weight), torch.zeros_like(expected))


def test_a_diverged_head_is_nan_and_the_others_are_not():
    weight = torch.ones(2, 3, 4)
    weight[1, 0, 0] = torch.nan
    assert head_imbalance(head_gram(weight), head_gram(torch.ones(2, 3, 4))).isnan().tolist() == [False, True]


def test_a_head_that_has_not_moved_has_no_drift():
    gram = head_gram(torch.eye(2))
    assert head_drift(gram, gram, gram, gram).isnan()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: head_gram([1.0, 2.0]), "weight"),
        (lambda: head_gram(torch.ones(2, 0)), "weight"),
        (lambda: head_gram(torch.ones(2, 3), torch.ones(3)), "bias"),
        (lambda: head_gram(torch.ones(3, 3), rotary=Rotary(3)), "rotary.dims"),
        (lambda: head_gram(torch.ones(3, 3), rotary=Rotary(4)), "rotary.dims"),
        (lambda: head_balance(torch.ones(2, 3), torch.ones(3, 3)), "key"),
        (lambda: head_imbalance(torch.ones(2, 3), torch.ones(2, 3)), "first"),
        (lambda: head_imbalance(torch.ones(2, 2), torch.ones(3, 3)), "second"),
        (lambda: head_drift(*[torch.ones(2, 2)] * 3, torch.ones(3, 3)), "second_start"),
    ],
)
def test_an_error_names_the_argument(call, name):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        call()
