"""Theorem 1 against PyTorch's autograd: laws at random states, and the ledger along SGD that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from joma.arguments import InputError
from joma.theory.invariants import (
    ATTENTIONS,
    conserved,
    correlation,
    folded_gain,
    ledger,
    predict,
    reference,
    relative_error,
)

ACTIVATIONS = {
    "linear": lambda y: y,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
}
LOSSES = {
    "cross entropy": lambda h, target: functional.cross_entropy(h, target.argmax(1), reduction="none"),
    "squared error": lambda h, target: 0.5 * ((h - target) ** 2).sum(1),
    "constant gradient": lambda h, target: -(h * target).sum(1),
}
seeds = st.integers(0, 2**32 - 1)


@dataclass
class Block:
    """The theory's block in PyTorch: samples, parameters and a loss."""

    attention: str
    activation: Callable
    loss: Callable
    x: torch.Tensor
    query: torch.Tensor
    target: torch.Tensor
    embedding: torch.Tensor
    w: torch.Tensor
    z: torch.Tensor
    bias: torch.Tensor
    temperature: float = 1.0

    @classmethod
    def random(cls, seed, attention, activation, loss, *, queries=3, tokens=5, hidden=4, samples=8, temperature=1.0):
        draw = torch.Generator().manual_seed(seed)
        x = torch.rand(samples, tokens, generator=draw, dtype=torch.float64) + 1e-3
        dim = tokens + queries + 1
        square = torch.randn(dim, dim, generator=draw, dtype=torch.float64)
        return cls(
            attention,
            ACTIVATIONS[activation],
            LOSSES[loss],
            x / x.sum(1, keepdim=True),
            torch.arange(samples) % queries,
            torch.randn(samples, hidden, generator=draw, dtype=torch.float64),
            torch.linalg.qr(square).Q[:, : tokens + queries],
            (0.5 * torch.randn(dim, hidden, generator=draw, dtype=torch.float64)).requires_grad_(),
            (0.5 * torch.randn(queries, tokens, generator=draw, dtype=torch.float64)).requires_grad_(),
            (0.1 * torch.randn(hidden, generator=draw, dtype=torch.float64)).requires_grad_(),
            temperature,
        )

    @property
    def v(self):
        return (self.embedding[:, : self.x.shape[1]].T @ self.w).detach().numpy()

    def descend(self, samples):
        """Return the descent directions of w, z and bias, and E[b] and the pull of b, over these samples."""
        x, z = self.x[samples], self.z[self.query[samples]]
        b = {"linear": x * z, "exp": x * z.exp(), "softmax": functional.softmax(x.log() + z / self.temperature, 1)}[
            self.attention
        ]
        tokens = x.shape[1]
        f = b @ self.embedding[:, :tokens].T + self.embedding.T[tokens:][self.query[samples]]
        loss = self.loss(self.activation(f @ self.w + self.bias), self.target[samples]).mean()
        w, z, bias, y = (-grad for grad in torch.autograd.grad(loss, [self.w, self.z, self.bias, b]))
        pull = (b * (b * y).sum(1, keepdim=True)).sum(0)  # y has the samples' weights in it
        return w, z, bias, b.detach().mean(0).numpy(), pull.detach().numpy()


def sgd(block, *, rate_w, rate_z, steps, rate_bias=0.1, batch=None, generator=None):
    """Train and record; `batch` draws a minibatch at each step."""
    record = {"v": [block.v], "z": [block.z.detach().numpy().copy()], "b_bar": [], "pull": []}
    for _ in range(steps):
        samples = torch.arange(len(block.x))
        if batch is not None:
            samples = torch.randint(len(block.x), (batch,), generator=generator)
        w, z, bias, b_bar, pull = block.descend(samples)
        with torch.no_grad():
            block.w += rate_w * w
            block.z += rate_z * z
            block.bias += rate_bias * bias
        record["b_bar"].append(b_bar)
        record["pull"].append(pull)
        record["v"].append(block.v)
        record["z"].append(block.z.detach().numpy().copy())
    return {name: np.array(values) for name, values in record.items()}


def account(run, *, rate_w, rate_z, temperature, b_ref):
    """Return Σ_m z_m, its prediction, and the ledger."""
    rates = {"rate_w": rate_w, "rate_z": rate_z, "temperature": temperature, "b_ref": b_ref}
    book = ledger(run["v"], run["b_bar"], run["pull"], **rates)
    common = {"kappa": rate_z / rate_w, "temperature": temperature, "b_ref": b_ref}
    return run["z"].sum(1), predict("softmax", run["v"], run["v"][0], run["z"][0], **common), book


# The laws


problems = st.fixed_dictionaries(
    {
        "seed": seeds,
        "queries": st.integers(1, 3),
        "activation": st.sampled_from(list(ACTIVATIONS)),
        "loss": st.sampled_from(list(LOSSES)),
    }
)


@pytest.mark.parametrize("attention", ["linear", "exp"])
@given(problem=problems, rate_w=st.floats(0.1, 10), rate_z=st.floats(0.1, 10))
@settings(max_examples=40)
def test_conserved_has_no_time_derivative(attention, problem, rate_w, rate_z):
    """Both laws are quadratic at most: a central difference of any width is their derivative, to rounding."""
    block = Block.random(attention=attention, **problem)
    v, z = block.v, block.z.detach().numpy()
    w_dot, z_dot, *_ = block.descend(torch.arange(len(block.x)))
    v_dot = (block.embedding[:, : block.x.shape[1]].T @ w_dot).numpy() * rate_w
    z_dot = z_dot.numpy() * rate_z
    speed = max(np.abs(v_dot).max(), np.abs(z_dot).max())
    assume(speed > 1e-3)  # not every ReLU is dead
    width = 0.1 / speed
    rates = {"rate_w": rate_w, "rate_z": rate_z}
    ahead = conserved(attention, v + width * v_dot, z + width * z_dot, **rates)
    behind = conserved(attention, v - width * v_dot, z - width * z_dot, **rates)
    terms = ((v**2).sum(1) + 1) / rate_w + ((z**2).sum(0) + 1) / rate_z
    assert (np.abs(ahead - behind) <= 1e-14 * terms).all()
    wrong = conserved(attention, v + width * v_dot, z + width * z_dot, rate_w=rate_w, rate_z=2 * rate_z)
    base = conserved(attention, v - width * v_dot, z - width * z_dot, rate_w=rate_w, rate_z=2 * rate_z)
    assert np.abs(wrong - base).max() > 1e-6 * terms.max()  # the rates matter


@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_prediction_is_what_keeps_the_conserved_quantity(attention):
    rng = np.random.default_rng(0)
    v, v0, z0 = rng.normal(size=(7, 5, 4)), rng.normal(size=(5, 4)), rng.normal(size=(3, 5))
    total = predict(attention, v, v0, z0, kappa=2.5)
    one_query = total[:, None, :] if attention == "exp" else np.sqrt(total.clip(0))[:, None, :]
    invariant = conserved(attention, v, one_query, rate_w=0.4, rate_z=1.0)
    start = conserved(attention, v0, z0, rate_w=0.4, rate_z=1.0)
    real_root = total > 0
    assert real_root.sum() > 20
    assert np.abs(invariant - start)[real_root].max() < 1e-13 * np.abs(v).max() ** 2 * 40


@given(problem=problems, log_rate=st.floats(-3, 1.5), kappa=st.floats(0.2, 5), temperature=st.floats(0.3, 3))
@settings(max_examples=40)
def test_ledger_is_exact_along_sgd_of_any_step_size(problem, log_rate, kappa, temperature):
    assume(problem["loss"] != "squared error" or log_rate < -1)  # it diverges at large steps
    block = Block.random(attention="softmax", temperature=temperature, **problem)
    rates = {"rate_w": 10**log_rate, "rate_z": kappa * 10**log_rate}
    b_ref = reference(block.x.numpy())
    run = sgd(block, steps=30, **rates)
    total, predicted, book = account(run, temperature=temperature, b_ref=b_ref, **rates)
    scale = np.abs([predicted - total[0], book.drift, book.gap, book.step]).max()
    assert np.abs(total - (predicted - book.total)).max() <= 1e-10 * scale
    if scale > 0:  # a dead ReLU learns nothing
        assert np.abs(predicted - total).max() > 1e-6 * scale  # without the ledger it is not exact


@pytest.mark.parametrize("queries", [1, 3])
def test_ledger_holds_for_minibatches_and_any_reference(queries):
    block = Block.random(5, "softmax", "gelu", "cross entropy", queries=queries, temperature=0.5)
    rates = {"rate_w": 0.3, "rate_z": 0.8}
    run = sgd(block, steps=50, batch=3, generator=torch.Generator().manual_seed(1), **rates)
    for b_ref in (np.full(5, 0.2), np.array([1.0, 0, 0, 0, 0]), reference(block.x.numpy())):
        total, predicted, book = account(run, temperature=0.5, b_ref=b_ref, **rates)
        assert relative_error(total, predicted - book.total, total[0])[1:].max() < 1e-10


def test_each_term_of_the_ledger_is_needed():
    block = Block.random(2, "softmax", "tanh", "cross entropy", temperature=0.5)
    rates = {"rate_w": 1.0, "rate_z": 1.0}
    run = sgd(block, steps=40, **rates)
    total, predicted, book = account(run, temperature=0.5, b_ref=reference(block.x.numpy()), **rates)
    for left_out in (book.drift, book.gap, book.step):
        assert relative_error(total, predicted - book.total + left_out, total[0])[-1] > 1e-2


@given(seed=seeds, rate=st.floats(0.01, 10))
@settings(max_examples=20)
def test_softmax_keeps_the_sum_over_tokens_for_each_query(seed, rate):
    block = Block.random(seed, "softmax", "gelu", "squared error", temperature=0.7)
    run = sgd(block, rate_w=rate, rate_z=rate, steps=3)
    invariant = conserved("softmax", run["v"], run["z"])
    assert invariant.shape == (4, 3)
    assert np.abs(invariant - invariant[0]).max() <= 1e-13 * (1 + np.abs(run["z"]).max())


def test_only_the_sum_over_queries_is_predicted():
    block = Block.random(3, "exp", "gelu", "cross entropy")
    run = sgd(block, rate_w=0.002, rate_z=0.002, steps=1500)
    total = run["z"].sum(1)
    predicted = predict("exp", run["v"], run["v"][0], run["z"][0])
    assert relative_error(total, predicted, total[0])[-1] < 3e-3  # what finite steps cost
    alone = predict("exp", run["v"], run["v"][0], run["z"][0, :1])
    assert relative_error(run["z"][:, 0], alone, run["z"][0, 0])[-1] > 0.5


def test_leading_axes_broadcast():
    rng = np.random.default_rng(0)
    v, z0, b_ref = rng.normal(size=(6, 2, 5, 3)), rng.normal(size=(2, 4, 5)), rng.dirichlet(np.ones(5), size=2)
    b_bar, pull = rng.random((5, 2, 5)), rng.random((5, 2, 5))
    rates = {"rate_w": 0.5, "rate_z": 0.2, "temperature": 0.7}
    whole = ledger(v, b_bar, pull, b_ref=b_ref, **rates)
    both = predict("softmax", v, v[0], z0, b_ref=b_ref, temperature=0.7)
    assert both.shape == whole.drift.shape == (6, 2, 5)
    for seed in range(2):
        of_one_seed = ledger(v[:, seed], b_bar[:, seed], pull[:, seed], b_ref=b_ref[seed], **rates)
        np.testing.assert_allclose(whole.total[:, seed], of_one_seed.total, rtol=1e-14)
        alone = predict("softmax", v[3, seed], v[0, seed], z0[seed], b_ref=b_ref[seed], temperature=0.7)
        np.testing.assert_allclose(both[3, seed], alone, rtol=1e-14)


# Figure 2


def figure_2(seed, *, gaussian):
    """10 distinct and 10 common tokens, 20 classes of one sample each, whose logits are the hidden units."""
    rng = np.random.default_rng(seed)
    x = rng.random((20, 20)) / 2
    if gaussian:
        x[:, :10] = np.exp(-((np.arange(10) - np.arange(20)[:, None] / 2) ** 2) / 30)
    x /= x.sum(axis=1, keepdims=True)
    embedding = np.linalg.qr(rng.normal(size=(30, 30)))[0][:, :21]
    block = Block(
        "softmax",
        ACTIVATIONS["linear"],
        LOSSES["cross entropy"],
        torch.tensor(x),
        torch.zeros(20, dtype=torch.int64),
        torch.eye(20, dtype=torch.float64),
        torch.tensor(embedding),
        torch.tensor(0.01 * rng.normal(size=(30, 20)), requires_grad=True),
        torch.tensor(0.01 * rng.normal(size=(1, 20)), requires_grad=True),
        torch.zeros(20, dtype=torch.float64, requires_grad=True),
        0.5,
    )
    rates = {"rate_w": 0.1, "rate_z": 0.1}
    run = sgd(block, steps=2000, rate_bias=0.0, **rates)
    total, predicted, book = account(run, temperature=0.5, b_ref=reference(x), **rates)
    without_step = relative_error(total, predicted - book.drift - book.gap, total[0])[-1]
    exact = relative_error(total, predicted - book.total, total[0])[1:].max()
    return correlation(total, predicted)[-1], relative_error(total, predicted, total[0])[-1], without_step, exact


@pytest.mark.parametrize("seed", range(3))
def test_figure_2_correlates_yet_misses_the_scale(seed):
    alike, error, without_step, exact = figure_2(seed, gaussian=True)
    assert 0.98 < alike < 0.998
    assert 6.5 < error < 8.5
    assert 0.004 < without_step < 0.008
    assert exact < 1e-10


def test_figure_2_with_random_token_probabilities():
    alike, error, without_step, exact = figure_2(0, gaussian=False)
    assert 0.95 < alike < 0.99
    assert 1.5 < error < 5
    assert 0.001 < without_step < 0.005
    assert exact < 1e-10


# Agreement


@given(seed=seeds, tokens=st.integers(2, 30), shift=st.floats(-5, 5), scale=st.floats(0.01, 100))
def test_correlation_is_pearsons_and_blind_to_scale(seed, tokens, shift, scale):
    rng = np.random.default_rng(seed)
    z, z_hat = rng.normal(size=(2, 3, tokens))
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(z, z_hat, strict=True)]
    np.testing.assert_allclose(correlation(z, z_hat), expected, atol=1e-12)
    np.testing.assert_allclose(correlation(z, shift + scale * z_hat), expected, atol=1e-9)
    np.testing.assert_allclose(correlation(z, -z_hat), [-number for number in expected], atol=1e-12)


@given(seed=seeds, powers=st.lists(st.integers(-290, 290), min_size=2, max_size=4))
def test_rows_of_very_different_sizes_are_measured_each_by_itself(seed, powers):
    """Rows may be 1e290 and 1e-290 in one array: correlation and relative error do not see the unit of a row."""
    rng = np.random.default_rng(seed)
    z, z_hat, z0 = rng.normal(size=(3, len(powers), 5))
    unit = 10.0 ** np.array(powers)[:, None]
    np.testing.assert_allclose(correlation(z * unit, z_hat * unit[::-1]), correlation(z, z_hat), atol=1e-13)
    np.testing.assert_allclose(
        relative_error(z * unit, z_hat * unit, z0 * unit), relative_error(z, z_hat, z0), rtol=1e-13
    )


def test_correlation_with_a_constant_is_undefined():
    assert np.isnan(correlation([0.1] * 10, np.arange(10.0)))
    assert np.isnan(correlation(np.arange(10.0), [0.0] * 10))


@given(seed=seeds, factor=st.floats(-3, 3))
def test_relative_error_counts_in_units_of_the_movement(seed, factor):
    z, z0 = np.random.default_rng(seed).normal(size=(2, 4, 6))
    assert relative_error(z, z0 + factor * (z - z0), z0) == pytest.approx(np.full(4, abs(1 - factor)), abs=1e-13)


def test_relative_error_where_nothing_moved():
    z = np.ones((2, 3))
    np.testing.assert_array_equal(relative_error(z, [[1.0, 1, 1], [1, 1, 2]], z), [0.0, np.inf])


def test_reference_is_the_mean_of_frequencies():
    counts = np.array([[1.0, 4.0], [3.0, 1.0]])
    np.testing.assert_allclose(reference(counts), np.array([0.2 + 0.75, 0.8 + 0.25]) / 2)
    np.testing.assert_allclose(reference(counts, [0.75, 0.25]), np.array([0.3375, 0.6625]))
    np.testing.assert_array_equal(reference([[0.0, 0.0], [1.0, 3.0]]), [0.25, 0.75])


@given(seed=seeds)
def test_reference_is_the_mean_of_uniform_attention(seed):
    """PyTorch's softmax with equal logits sees counts, frequencies and rows of any size alike."""
    block = Block.random(seed, "softmax", "linear", "constant gradient")
    with torch.no_grad():
        block.z.zero_()
    uniform = block.descend(torch.arange(8))[3]
    frequency, size = block.x.numpy(), np.random.default_rng(seed).lognormal(sigma=3.0, size=(8, 1))
    np.testing.assert_allclose(reference(frequency), uniform, rtol=1e-13)
    np.testing.assert_allclose(reference(size * frequency), uniform, rtol=1e-13)


@given(seed=seeds)
def test_reference_of_frequencies_is_their_plain_mean_to_the_bit(seed):
    """A division by a sum that is 1 up to rounding would move the last bits of all runs with frequencies."""
    rng = np.random.default_rng(seed)
    frequency, weight = rng.dirichlet(np.ones(7), size=9), rng.dirichlet(np.ones(9))
    mean = weight @ frequency
    np.testing.assert_array_equal(reference(frequency, weight), mean / mean.sum())


# Bad input

V, Z = np.ones((5, 4)), np.ones((3, 5))
LEDGER = {"rate_w": 1.0, "rate_z": 1.0, "temperature": 1.0, "b_ref": np.full(5, 0.2)}
PATH, STEPS = np.ones((3, 5, 4)), np.ones((2, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predict("sofmax", V, V, Z), "`attention` must be one of linear, exp, softmax.*did you mean 'softmax'"),
        (lambda: predict("exp", V, V, np.ones((3, 4))), "`z0` must be of 5 tokens"),
        (lambda: predict("exp", V, V, np.ones(5)), "`z0` must be of axes .*query, token"),
        (lambda: predict("exp", V, np.ones((5, 3)), Z), "`v0` must be of .token, hidden. .5, 4."),
        (lambda: predict("exp", V * np.nan, V, Z), "`v` must be free of NaN"),
        (lambda: predict("exp", np.ones((0, 4)), V, Z), "`v` must be non-empty"),
        (lambda: predict("exp", np.ones((2, 5, 4)), V, np.ones((3, 3, 5))), "broadcast together"),
        (lambda: predict("exp", V, V, Z, kappa=-1.0), "`kappa` must be at least 0"),
        (lambda: predict("softmax", V, V, Z), "`b_ref` must be given for softmax"),
        (lambda: predict("softmax", V, V, Z, b_ref=np.full(5, 0.3)), "`b_ref` must sum to 1"),
        (lambda: predict("softmax", V, V, Z, b_ref=np.full(4, 0.25)), "`b_ref` must be of 5 tokens"),
        (lambda: predict("softmax", V, V, Z, b_ref=np.full(5, 0.2), temperature=0), "`temperature` must be above 0"),
        (lambda: conserved("exp", V, Z, rate_w=0.0), "`rate_w` must be above 0"),
        (lambda: conserved("exp", V, Z, rate_z=np.inf), "`rate_z` must be finite"),
        (lambda: ledger(V, STEPS, STEPS, **LEDGER), "`v` must be of axes .step . 1"),
        (lambda: ledger(PATH, np.ones((3, 5)), STEPS, **LEDGER), "`b_bar` must be of shape .2, 5."),
        (lambda: ledger(PATH, STEPS, np.ones((2, 4)), **LEDGER), "`pull` must be of shape .2, 5."),
        (lambda: folded_gain(V, V, Z), "`z0` must be the logits of one query.*3 queries"),
        (lambda: reference([[0.0, 0.0]]), "`x` must be positive somewhere"),
        (lambda: reference([[1e308, 1e308]]), "`x` must be such that the result is a finite number"),
        (lambda: reference([[1.0, -1.0]]), "`x` must be at least 0"),
        (lambda: reference([[1.0, 1.0]], [0.5, 0.5]), "`weight` must be one for each of 1 samples"),
        (lambda: correlation([1.0, 2.0], [1.0, 2.0, 3.0]), "broadcast together"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_three_attentions():
    assert list(ATTENTIONS) == ["linear", "exp", "softmax"]
