"""The block compared with the formulas of the theory, written out in NumPy sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import erf, expit

from joma.arguments import InputError, StateError
from joma.models import ACTIVATIONS, ATTENTIONS, Block, BlockConfig

TOKENS, HIDDEN, QUERIES, SAMPLES, DIM = 4, 3, 2, 5, 8


def _normal(y):
    return np.exp(-(y**2) / 2) / np.sqrt(2 * np.pi)


# φ and φ' of each name, independent of both torch and joma.theory.
PHI = {
    "linear": (lambda y: y, np.ones_like),
    "relu": (lambda y: np.maximum(y, 0), lambda y: (y > 0) * 1.0),
    "leaky_relu": (lambda y: np.maximum(y, 0.01 * y), lambda y: np.where(y > 0, 1.0, 0.01)),
    "gelu": (
        lambda y: y * (1 + erf(y / np.sqrt(2))) / 2,
        lambda y: (1 + erf(y / np.sqrt(2))) / 2 + y * _normal(y),
    ),
    "silu": (lambda y: y * expit(y), lambda y: expit(y) + y * expit(y) * (1 - expit(y))),
    "tanh": (np.tanh, lambda y: 1 - np.tanh(y) ** 2),
}


def attention_and_jacobian(attention, z, x, temperature):
    """Return b of one sample and its Jacobian ∂b/∂z, [token, token]."""
    if attention == "linear":
        return x * z, np.diag(x)
    if attention == "exp":
        return x * np.exp(z), np.diag(x * np.exp(z))
    b = x * np.exp(z / temperature)
    b = b / b.sum()
    return b, (np.diag(b) - np.outer(b, b)) / temperature


def streams(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def make(seeds=(0, 1), scale=0.7, **options):
    """A block of two seeds, and of two queries unless the options say otherwise."""
    model = {name: options.pop(name) for name in ("embeddings", "dtype") if name in options}
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "queries": QUERIES, "dim": DIM, **options}
    return Block(BlockConfig(scale=scale, **sizes), generators=streams(*seeds), **model)


def problem(seed, seeds=2):
    """Contexts with some tokens missing, queries, targets and sample weights, different for each seed."""
    rng = np.random.default_rng(seed)
    x = rng.dirichlet(np.ones(TOKENS), size=(seeds, SAMPLES)) * (rng.random((seeds, SAMPLES, TOKENS)) > 0.3)
    x[..., 0] += 0.1
    query = rng.integers(QUERIES, size=(seeds, SAMPLES))
    target = rng.normal(size=(seeds, SAMPLES, HIDDEN))
    weight = rng.dirichlet(np.ones(SAMPLES), size=seeds)
    return x, query, target, weight


def backward(block, x, query, target, weight):
    """Propagate half the squared error, averaged with weights, so that g = target − h; return h."""
    h = block(torch.tensor(x), torch.tensor(query))
    error = ((h - torch.tensor(target)) ** 2).sum(-1) / 2
    (torch.tensor(weight) * error).sum().backward()
    return h.detach().numpy()


@given(
    attention=st.sampled_from(sorted(ATTENTIONS)),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    residual=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_forward_and_gradients_are_those_of_the_theory(attention, activation, residual, bias, seed):
    temperature = 0.6 if attention == "softmax" else 1.0
    options = {"attention": attention, "activation": activation, "temperature": temperature}
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:, : TOKENS + QUERIES]
    block = make((seed, seed + 1), residual=residual, bias=bias, embeddings=torch.tensor(basis), **options)
    if bias:
        with torch.no_grad():
            block.bias.copy_(torch.tensor(rng.normal(size=(2, HIDDEN))))
    x, query, target, weight = problem(seed)
    h = backward(block, x, query, target, weight)
    phi, slope = PHI[activation]
    for s in range(2):
        w, z, v = (p[s].detach().numpy() for p in (block.w, block.z, block.v))
        np.testing.assert_allclose(v, basis[:, :TOKENS].T @ w, atol=1e-14)
        v_dot, z_dot = np.zeros_like(v), np.zeros_like(z)
        b_bar, pull = np.zeros(TOKENS), np.zeros(TOKENS)
        for i in range(SAMPLES):
            q, p = query[s, i], weight[s, i]
            b, jacobian = attention_and_jacobian(attention, z[q], x[s, i], temperature)
            f = basis[:, :TOKENS] @ b + (basis[:, TOKENS + q] if residual else 0)
            y = w.T @ f + (block.bias[s].detach().numpy() if bias else 0)
            np.testing.assert_allclose(h[s, i], phi(y), rtol=1e-12, atol=1e-13)
            backpropagated = (target[s, i] - phi(y)) * slope(y)  # g_k h'_k
            v_dot += p * np.outer(b, backpropagated)
            z_dot[q] += p * jacobian.T @ (v @ backpropagated)
            b_bar += p * b
            pull += p * b * (b @ (v @ backpropagated))
        np.testing.assert_allclose(-basis[:, :TOKENS].T @ block.w.grad[s].numpy(), v_dot, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(-block.z.grad[s].numpy(), z_dot, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(block.mean_attention(torch.tensor(weight))[s].numpy(), b_bar, rtol=1e-12)
        np.testing.assert_allclose(block.pull()[s].numpy(), pull, rtol=1e-10, atol=1e-12)


def law_defect(block, seed):
    """Return the largest |d/dt| of linear attention's conserved quantity, relative to the size of its two terms."""
    x, query, target, weight = problem(seed)
    backward(block, x, query, target, weight)
    v_dot = block.U_C.T @ block.w.grad
    of_z, of_v = (block.z * block.z.grad).sum(1), (block.v * v_dot).sum(-1)
    return float(((of_z - of_v).abs().max() / of_v.abs().max()).detach())


@given(seed=st.integers(0, 2**31), activation=st.sampled_from(sorted(ACTIVATIONS)))
def test_linear_attention_conserves_what_theorem_1_says(seed, activation):
    assert law_defect(make(attention="linear", activation=activation, bias=True), seed) < 1e-10


BREAKERS = {
    "norm": {"norm": True},
    "skip": {"skip": True},
    "embeddings": {"embeddings": torch.randn(DIM, TOKENS + QUERIES, generator=torch.Generator().manual_seed(0))},
}


@pytest.mark.parametrize("breaker", BREAKERS)
@given(seed=st.integers(0, 2**31))
def test_each_breaker_breaks_the_law(breaker, seed):
    assert law_defect(make(attention="linear", activation="tanh", **BREAKERS[breaker]), seed) > 1e-3


@given(seed=st.integers(0, 2**31))
def test_norm_and_skip_follow_their_formulas(seed):
    x, query, _, _ = problem(seed)
    plain, normed, skipped = make(), make(norm=True), make(skip=True)
    arguments = torch.tensor(x), torch.tensor(query)
    b = plain.attend(*arguments).detach().numpy()
    U, u, w = plain.U_C.numpy(), plain.u_q.numpy(), plain.w.detach().numpy()
    f = b @ U.T + u.T[query]
    centred = f - f.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed(*arguments).detach().numpy(), unit @ w, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(skipped(*arguments).detach().numpy(), f @ w + f[..., :HIDDEN], rtol=1e-12, atol=1e-13)


@given(attention=st.sampled_from(sorted(ATTENTIONS)), seeds=st.lists(st.integers(0, 999), min_size=2, max_size=5))
def test_a_seed_has_the_same_numbers_alone_and_among_others(attention, seeds):
    together, x = make(seeds, attention=attention), torch.tensor(problem(0, 1)[0][0])
    query = torch.arange(SAMPLES) % QUERIES
    for position, seed in enumerate(seeds):
        alone = make((seed,), attention=attention)
        assert torch.equal(alone.w[0], together.w[position])
        assert torch.equal(alone.z[0], together.z[position])
        torch.testing.assert_close(alone(x, query)[0], together(x, query)[position], rtol=1e-13, atol=1e-14)


def test_contexts_may_be_shared_or_different_for_each_seed():
    block = make()
    x, query, _, _ = (torch.tensor(value) for value in problem(3))
    shared = torch.stack([x[0], x[0]]), torch.stack([query[0], query[0]])
    torch.testing.assert_close(block(x[0], query[0]), block(*shared), rtol=0, atol=1e-15)
    torch.testing.assert_close(block(x, query)[0], block(x[0], query[0])[0], rtol=0, atol=1e-15)
    single_query = make(queries=1)
    expected = single_query(x, torch.zeros(SAMPLES, dtype=torch.long))
    torch.testing.assert_close(single_query(x), expected, rtol=0, atol=0)


def test_softmax_survives_logits_that_would_overflow():
    block = make((0,), queries=1, scale=0.0)
    with torch.no_grad():
        block.z[..., 0] = 2000.0
    x = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.25, 0.0, 0.75]], dtype=torch.float64)
    expected = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [0.0, 0.25, 0.0, 0.75]]], dtype=torch.float64)
    torch.testing.assert_close(block.attend(x), expected, rtol=0, atol=1e-15)


def test_float32_blocks_take_float64_contexts():
    block = make(dtype=torch.float32)
    assert block(torch.tensor(problem(0)[0]), torch.tensor(problem(0)[1])).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"attention": "sofmax"}, "attention"),
        ({"activation": "swish"}, "activation"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"attention": "exp", "temperature": 0.5}, "temperature"),
        ({"dim": TOKENS + QUERIES - 1}, "dim"),
        ({"embeddings": torch.eye(DIM)}, "embeddings"),
        ({"embeddings": torch.eye(DIM + 1, TOKENS + QUERIES)}, "embeddings"),
        ({"skip": True, "hidden": DIM + 1}, "hidden"),
        ({"tokens": 0}, "tokens"),
        ({"queries": -1}, "queries"),
        ({"scale": -1.0}, "scale"),
        ({"seeds": ()}, "generators"),
    ],
)
def test_bad_options_are_named(options, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        make(**options)


@pytest.mark.parametrize(
    ("x", "query", "names"),
    [
        (torch.ones(SAMPLES, TOKENS + 1), torch.zeros(SAMPLES, dtype=torch.long), "x"),
        (torch.ones(3, SAMPLES, TOKENS), torch.zeros(SAMPLES, dtype=torch.long), "x"),
        (torch.ones(SAMPLES, TOKENS), torch.zeros(SAMPLES + 1, dtype=torch.long), "query"),
        (torch.ones(SAMPLES, TOKENS), None, "query"),
    ],
)
def test_bad_contexts_are_named(x, query, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        make()(x, query)


def test_mean_attention_needs_a_forward_pass_and_pull_a_backward_pass():
    block = make()
    with pytest.raises(StateError, match="`block` needs a forward pass first"):
        block.mean_attention()
    block(torch.ones(SAMPLES, TOKENS), torch.zeros(SAMPLES, dtype=torch.long))
    with pytest.raises(StateError, match="`block` needs a backward pass first"):
        block.pull()


@pytest.mark.parametrize("sizes", [{"tokens": 10**8, "hidden": 1}, {"tokens": 2, "hidden": 10**15}])
def test_sizes_beyond_memory_are_refused_before_anything_is_allocated(sizes):
    with pytest.raises(InputError, match=r"`config` must be small enough for this machine's memory, got a size of .*B"):
        Block(BlockConfig(**sizes), generators=[torch.Generator()])
