"""The loss of linear attention against sampled sequences, a search over all matrices, and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory import in_context_autoregression as theory

sizes = st.tuples(st.integers(2, 5), st.sampled_from([2, 4]))


def drawn(number, dim, count=2):
    """Return random complex matrices."""
    generator = np.random.default_rng(number)
    return [generator.normal(size=(dim, dim)) + 1j * generator.normal(size=(dim, dim)) for _ in range(count)]


def sampled_tokens(process, length, dim, *, samples, number=0):
    """Return s_1 to s_{T+1}, [sample, time, dim], from the recursion s ← W s, not from powers of eigenvalues."""
    generator = np.random.default_rng(number)
    count = dim // 2 if process == "rotations" else dim
    angle, start = generator.uniform(0, 2 * np.pi, (2, samples, count))
    if process == "rotations":
        W = np.zeros((samples, dim, dim))
        for plane in range(count):
            cosine, sine = np.cos(angle[:, plane]), np.sin(angle[:, plane])
            block = np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)
            W[:, 2 * plane : 2 * plane + 2, 2 * plane : 2 * plane + 2] = block
        token = np.sqrt(2) * np.stack([np.cos(start), np.sin(start)], -1).reshape(samples, dim)
    else:
        W = np.exp(1j * angle)[:, :, None] * np.eye(dim)
        token = np.exp(1j * start * (process != "fixed"))
    tokens = [token]
    for _ in range(length):
        tokens.append(np.einsum("sij,sj->si", W, tokens[-1]))
    return np.stack(tokens, axis=1)


def predicted(A, B, tokens, positions=None):
    """Return out for each sample, by the definition."""
    values = tokens[:, 1:-1] if positions is None else tokens[:, :-1]
    keys = tokens[:, :-2] if positions is None else tokens[:, :-1]
    scores = np.einsum("stj,jk,sk->st", keys.conj(), A, tokens[:, -2])
    weights = 1.0 if positions is None else positions
    return np.einsum("il,st,stl->si", B, scores * weights, values)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("process", theory.PROCESSES)
def test_the_exact_loss_is_the_mean_over_sampled_sequences(process, plain):
    length, dim, samples = 4, 4, 60_000
    A, B = (0.3 * matrix for matrix in drawn(1, dim))
    if process == "rotations":
        A, B = A.real, B.real
    positions = np.array([0.5, -1.0, 0.3, 0.8]) if plain else None
    tokens = sampled_tokens(process, length, dim, samples=samples)
    losses = (np.abs(predicted(A, B, tokens, positions) - tokens[:, -1]) ** 2).mean(-1)
    exact = theory.population_loss(A, B, length, process=process, positions=positions)
    assert abs(losses.mean() - exact) < 5 * losses.std() / np.sqrt(samples)


@settings(max_examples=30)
@given(size=sizes, number=st.integers(0, 10**6))
def test_diagonal_matrices_have_the_closed_loss(size, number):
    length, dim = size
    a, b = (matrix[0] for matrix in drawn(number, dim))
    expected = theory.population_loss(np.diag(a), np.diag(b), length)
    np.testing.assert_allclose(theory.diagonal_loss(a, b, length), expected, rtol=1e-10)


@given(size=sizes)
def test_the_best_step_has_the_best_loss_and_is_stationary(size):
    length, dim = size
    step = float(theory.best_step(length, dim))
    for process in ("unitary", "rotations"):
        at = [
            theory.population_loss(factor * step * np.eye(dim), np.eye(dim), length, process=process)
            for factor in (0.99, 1.0, 1.01)
        ]
        np.testing.assert_allclose(at[1], theory.best_loss(length, dim), rtol=1e-12)
        assert at[1] < min(at[0], at[2])


@pytest.mark.parametrize("process", ["unitary", "rotations"])
@pytest.mark.parametrize(("length", "dim"), [(2, 2), (3, 2), (6, 2), (2, 4), (3, 4), (5, 4)])
def test_no_search_finds_less_than_the_formula(process, length, dim):
    best = theory.optimum(length, dim, process=process, starts=4, generator=np.random.default_rng(0))
    np.testing.assert_allclose(best.loss, theory.best_loss(length, dim), atol=1e-8)


@settings(max_examples=40)
@given(size=sizes, number=st.integers(0, 10**6), share=st.floats(0, 1))
def test_off_diagonal_entries_only_cost(size, number, share):
    """The inequality of the proof: a loss is at least that of the diagonals alone."""
    length, dim = size
    A, B = (share * matrix + (1 - share) * np.diag(np.diag(matrix)) for matrix in drawn(number, dim))
    alone = theory.diagonal_loss(np.diag(A), np.diag(B), length)
    assert theory.population_loss(A, B, length) >= alone * (1 - 1e-12)


def test_a_search_from_a_fixed_start_finds_less_than_one_step_of_descent():
    best = theory.optimum(8, 4, process="fixed", generator=np.random.default_rng(0))
    np.testing.assert_allclose(best.loss, 0.272856, atol=1e-6)
    np.testing.assert_allclose(theory.population_loss(best.A, best.B, 8, process="fixed"), best.loss, rtol=1e-10)


@settings(max_examples=30)
@given(
    length=st.integers(2, 5),
    number=st.integers(0, 10**6),
    process=st.sampled_from(["unitary", "rotations"]),
)
def test_plain_tokens_are_never_better_than_zero(length, number, process):
    """The loss is 1 plus the energy of the output: scaling both by 10⁻³ leaves no gain of the first order."""
    A, B = drawn(number, 4)
    positions = np.random.default_rng(number).normal(size=length)
    energy = theory.population_loss(A, B, length, process=process, positions=positions) - 1
    small = theory.population_loss(1e-3 * A, B, length, process=process, positions=positions) - 1
    assert energy > 0
    np.testing.assert_allclose(small, 1e-6 * energy, rtol=1e-6)


def test_the_gradient_of_the_search_is_that_of_autograd():
    """At the end of a search the slope vanishes: by autograd on sampled sequences' exact second moments."""
    best = theory.optimum(3, 2, process="fixed", generator=np.random.default_rng(1))
    angles = 2 * torch.pi * torch.arange(8, dtype=torch.float64) / 8  # a grid integrates these polynomials exactly
    angle = torch.cartesian_prod(angles, angles)
    tokens = torch.polar(torch.ones(64, 4, 2, dtype=torch.float64), torch.arange(4)[None, :, None] * angle[:, None])
    A, B = (torch.tensor(matrix, requires_grad=True) for matrix in (best.A, best.B))
    scores = torch.einsum("stj,jk,sk->st", tokens[:, :2].conj(), A, tokens[:, 2])
    out = torch.einsum("il,st,stl->si", B, scores, tokens[:, 1:3])
    loss = (out - tokens[:, 3]).abs().square().mean()
    np.testing.assert_allclose(float(loss.detach()), best.loss, rtol=1e-10)
    for gradient in torch.autograd.grad(loss, (A, B)):
        assert gradient.abs().max() < 1e-6


def test_the_basis_of_rotations_is_unitary_and_diagonalises_them():
    basis = theory.rotation_basis(4)
    np.testing.assert_allclose(basis @ basis.conj().T, np.eye(4), atol=1e-15)
    turn = np.array([[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]])
    turned = basis @ np.kron(np.eye(2), turn) @ basis.conj().T
    np.testing.assert_allclose(turned, np.diag(np.exp([0.3j, -0.3j] * 2)), atol=1e-15)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.best_step(1, 4), "length"),
        (lambda: theory.best_loss(3, 0), "dim"),
        (lambda: theory.diagonal_loss([1.0], [1.0, 2.0], 3), "b"),
        (lambda: theory.diagonal_loss([np.nan + 1j], [1.0], 3), "a"),
        (lambda: theory.population_loss(np.eye(2), np.eye(3), 3), "A`, `B"),
        (lambda: theory.population_loss(np.eye(2), np.eye(2), 1), "length"),
        (lambda: theory.population_loss(np.eye(2), np.eye(2), 3, process="unitry"), "process"),
        (lambda: theory.population_loss(np.eye(3), np.eye(3), 3, process="rotations"), "dim"),
        (lambda: theory.population_loss(np.eye(2), np.eye(2), 3, positions=[1.0]), "positions"),
        (lambda: theory.optimum(3, 3, process="rotations", generator=np.random.default_rng(0)), "dim"),
        (lambda: theory.rotation_basis(3), "dim"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
