"""All binary sequences and the layer that reads them: against plain loops over strings, autograd and symmetry."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.even_pairs import (
    all_sequences,
    pair_attention,
    pair_flow,
    pair_margins,
    pair_start,
    pair_svm,
    parity_by_chain,
    parity_by_pairs,
    phase_boundary,
)
from joma.theory.integration import Solver
from joma.theory.invariants import correlation, predict, relative_error

seeds = st.integers(0, 2**32 - 1)
SOLVER = Solver("DOP853", rtol=1e-8, atol=1e-10)


def strings(max_length: int) -> list[tuple[int, ...]]:
    """Return all sequences as tuples, in the order of `all_sequences`."""
    return [symbols for length in range(1, max_length + 1) for symbols in product((0, 1), repeat=length)]


def draw(seed, world, scale=1.0):
    generator = np.random.default_rng(seed)
    return scale * generator.normal(size=world.tokens), scale * generator.normal(size=(world.tokens, world.tokens))


@pytest.mark.parametrize("max_length", [1, 2, 5])
def test_the_sequences_are_those_of_a_loop(max_length):
    world = all_sequences(max_length)
    assert world.weight.sum() == pytest.approx(max_length)
    for index, symbols in enumerate(strings(max_length)):
        tokens = [2 * position + symbol for position, symbol in enumerate(symbols)]
        assert np.flatnonzero(world.present[index]).tolist() == tokens
        assert (world.first[index], world.last[index]) == (tokens[0], tokens[-1])
        assert world.length[index] == len(symbols)
        assert world.even_pair[index] == (1 if symbols[0] == symbols[-1] else -1)
        assert world.even[index] == (1 if sum(symbols) % 2 == 0 else -1)
        assert world.number[index] == int("".join(map(str, symbols)), 2)


@given(seed=seeds)
@settings(max_examples=20)
def test_margins_and_attention_are_those_of_a_loop(seed):
    world = all_sequences(3)
    u, logits = draw(seed, world)
    margins, attention = pair_margins(world, world.even, u, logits), pair_attention(world, logits)
    for index, symbols in enumerate(strings(3)):
        tokens = [2 * position + symbol for position, symbol in enumerate(symbols)]
        weights = np.exp([logits[tokens[-1], token] for token in tokens])
        weights /= weights.sum()
        np.testing.assert_allclose(attention[index, tokens], weights, atol=1e-14)
        f = sum(weight * u[token] for weight, token in zip(weights, tokens, strict=True))
        assert margins[index] == pytest.approx(world.even[index] * f, abs=1e-12)


@given(seed=seeds, task=st.sampled_from(["even_pair", "even"]), weight=st.sampled_from(["weight", "chain_weight"]))
@settings(max_examples=20)
def test_the_flow_is_the_descent_direction_of_autograd(seed, task, weight):
    world = all_sequences(3)
    label, weights = getattr(world, task), getattr(world, weight)
    u, logits = draw(seed, world)
    parameters = [torch.tensor(array, requires_grad=True) for array in (u, logits)]
    masked = parameters[1][torch.from_numpy(world.last)].masked_fill(torch.from_numpy(world.present) == 0, -torch.inf)
    f = masked.softmax(-1) @ parameters[0]
    loss = (torch.from_numpy(weights) * torch.nn.functional.softplus(-torch.from_numpy(label) * f)).sum()
    gradients = torch.autograd.grad(loss, parameters)
    w0 = pair_start(world)[0]
    w0[: world.tokens, 0] = u
    velocity = pair_flow(world, label, weights).velocity(w0, logits, np.zeros(1))
    np.testing.assert_allclose(velocity.w[: world.tokens, 0], -gradients[0], atol=1e-13)
    np.testing.assert_allclose(velocity.z, -gradients[1], atol=1e-13)


def test_at_zero_only_sequences_of_one_symbol_move_the_linear_layer():
    world = all_sequences(4)
    velocity = pair_flow(world, world.even_pair).velocity(*pair_start(world), np.zeros(1))
    np.testing.assert_allclose(velocity.w[: world.tokens, 0], [0.25, 0.25, *[0.0] * 6], atol=1e-15)
    assert abs(velocity.z).max() < 1e-15
    alone = pair_flow(world, world.even_pair, world.decision_weight).velocity(*pair_start(world), np.zeros(1))
    assert max(abs(alone.w).max(), abs(alone.z).max()) < 1e-15


def test_the_flow_does_not_know_which_symbol_is_which():
    """To exchange 0 and 1 changes no label of even pairs: the flow from zero is symmetric."""
    world = all_sequences(3)
    path = pair_flow(world, world.even_pair).solve([20.0], *pair_start(world), solver=SOLVER)
    flip = np.arange(world.tokens) ^ 1
    np.testing.assert_allclose(path.v[0], path.v[0][flip], atol=1e-7)
    np.testing.assert_allclose(path.z[0], path.z[0][flip][:, flip], atol=1e-7)


def test_numbers_of_the_world_up_to_length_4():
    """Norms and the SVM of an independent gradient descent at rate 0.1, steps 60, 566 and 60,000, to its digits."""
    world = all_sequences(4)
    path = pair_flow(world, world.even_pair).solve([6.0, 56.6, 6000.0], *pair_start(world), solver=SOLVER)
    np.testing.assert_allclose(np.linalg.norm(path.v[..., 0], axis=1), [1.42, 8.48, 19.17], atol=0.006)
    np.testing.assert_allclose(np.linalg.norm(path.z, axis=(1, 2)), [0.35, 6.79, 12.81], atol=0.006)
    svm = pair_svm(world, world.even_pair, path.z[-1])
    assert np.linalg.norm(svm) == pytest.approx(2.30, abs=0.006)
    assert pair_margins(world, world.even_pair, svm, path.z[-1]).min() == pytest.approx(1.0, abs=1e-8)


def test_theorem_1_without_its_ledger_correlates_and_misses_the_scale():
    """Correlation 0.87 and relative error 2.96 of an independent descent at rate 0.1 after 100,000 steps."""
    world = all_sequences(4)
    flow, start = pair_flow(world, world.even_pair), pair_start(world)
    path = flow.solve([0.0, 1e4], *start, solver=SOLVER)
    logits = path.z.sum(axis=1)
    by_tokens = world.weight @ world.present  # sequences weigh more the longer they are
    for b_ref, alike, error in ((flow.b_ref, 0.872, 2.96), (by_tokens / by_tokens.sum(), 0.998, 3.4)):
        prediction = predict("softmax", path.v, path.v[0], start[1], b_ref=b_ref)
        assert correlation(logits, prediction)[-1] == pytest.approx(alike, abs=0.0005)
        assert relative_error(logits, prediction, logits[0])[-1] == pytest.approx(error, abs=0.02)


def test_the_reference_of_the_flow_is_its_mean_attention_at_zero():
    """Each sequence has the same part in it, however long it is."""
    world = all_sequences(4)
    flow = pair_flow(world, world.even_pair)
    np.testing.assert_allclose(flow.b_ref, flow.velocity(*pair_start(world), np.zeros(1)).b_bar, rtol=1e-14)


def test_uniform_attention_does_not_separate_even_pairs():
    world = all_sequences(3)
    with pytest.raises(InputError, match="`logits`"):
        pair_svm(world, world.even_pair, np.zeros((6, 6)))


@given(seed=seeds, scale=st.floats(0.1, 20))
@settings(max_examples=100)
def test_no_layer_knows_the_parity_of_all_sequences_up_to_length_2(seed, scale):
    """If 0, 1 and 11 are right then u of both tokens of 01 is positive, and their mixture is not negative."""
    world = all_sequences(2)
    assert pair_margins(world, world.even, *draw(seed, world, scale)).min() <= 0.0


@pytest.mark.parametrize("max_length", [2, 3, 6])
@pytest.mark.parametrize("chain", [parity_by_chain, parity_by_pairs])
def test_right_decisions_give_the_right_parity(max_length, chain):
    world = all_sequences(max_length)
    np.testing.assert_array_equal(chain(world, world.even_pair < 0), world.even < 0)


@given(seed=seeds)
@settings(max_examples=30)
def test_chains_follow_the_decisions_as_a_loop_does(seed):
    world = all_sequences(4)
    odd_pair = np.random.default_rng(seed).random(len(world.length)) < 0.5
    decision = dict(zip(strings(4), odd_pair.tolist(), strict=True))
    for index, symbols in enumerate(strings(4)):
        state: tuple[int, ...] = symbols
        while len(state) > 1:
            state = (int(decision[state]), *state[1:-1])
        assert bool(parity_by_chain(world, odd_pair)[index]) == (state == (1,))
        running = symbols[0]
        for symbol in symbols[1:]:
            running = int(decision[(running, symbol)])
        assert bool(parity_by_pairs(world, odd_pair)[index]) == bool(running)


def test_the_weights_of_states_count_all_chains():
    world = all_sequences(5)
    index = {symbols: place for place, symbols in enumerate(strings(5))}
    counted = np.zeros(len(index))
    for symbols in strings(5):
        weight = 0.5 ** len(symbols)
        state: tuple[int, ...] = symbols
        counted[index[state]] += weight
        while len(state) > 1:
            state = (state[0] ^ state[-1], *state[1:-1])
            counted[index[state]] += weight
    np.testing.assert_allclose(world.chain_weight, counted, atol=1e-15)
    np.testing.assert_array_equal(world.decision_weight, np.where(world.length > 1, world.chain_weight, 0.0))


def test_the_boundary_is_where_the_least_margin_passes_zero():
    assert phase_boundary([0.0, 2.0, 4.0], [-3.0, 1.0, 5.0]) == pytest.approx(1.5)
    assert phase_boundary([1.0, 2.0], [0.5, 1.0]) == 1.0
    assert phase_boundary([0.0, 1.0], [-1.0, 0.0]) == np.inf


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("max_length", lambda: all_sequences(0)),
        ("max_length", lambda: all_sequences(99)),
        ("label", lambda: pair_flow(all_sequences(2), [1.0, -1.0])),
        ("label", lambda: pair_flow(all_sequences(1), [1.0, 0.5])),
        ("weight", lambda: pair_flow(all_sequences(1), [1.0, 1.0], [0.0, 0.0])),
        ("logits", lambda: pair_attention(all_sequences(2), np.zeros((2, 2)))),
        ("u", lambda: pair_margins(all_sequences(1), [1.0, 1.0], [1.0], np.zeros((2, 2)))),
        ("times", lambda: phase_boundary([0.0, 0.0], [1.0, 2.0])),
        ("odd_pair", lambda: parity_by_chain(all_sequences(1), np.array([1, 0]))),
        ("world", lambda: parity_by_pairs(all_sequences(1), np.array([True, False]))),
    ],
)
def test_bad_arguments_are_named(name, call):
    with pytest.raises(InputError, match=f"`{name}`"):
        call()
