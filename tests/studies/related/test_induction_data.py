"""Sampled sequences: against a loop that draws symbol by symbol, their laws, and the power at which worlds match."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from joma import noise
from joma.arguments import InputError
from joma.studies.related.induction_data import (
    CHAIN,
    DOUBLY,
    MATCHED_SHARPNESS,
    NEXT,
    START,
    WORLDS,
    World,
    draw,
    draw_kernels,
)
from joma.theory.in_context_markov import stationary, window_chain

SIZES = {"symbols": 3, "samples": 5, "length": 20}


def laws(world, samples=4000, seed=0):
    kernel = draw_kernels(world, noise.key(torch.tensor([seed]), 0), symbols=3, samples=samples)[0].double().numpy()
    return kernel / kernel.sum(-1, keepdims=True)


def information(kernel):
    """Mean mutual information of a symbol and its successor, in nats."""
    pi = stationary(kernel)
    joint = pi[..., None] * kernel
    ratio = np.where(joint > 0, kernel / pi[..., None, :], 1.0)
    return float((joint * np.log(ratio)).sum((-2, -1)).mean())


@pytest.mark.parametrize("parents", [(1,), (2,), (1, 2), (1, 3)])
def test_the_scan_draws_what_a_loop_over_symbols_draws(parents):
    seeds = torch.tensor([3, 8])
    sequences = draw(World("loop", parents), seeds, 7, **SIZES)
    key = noise.key(seeds, 7)
    uniform = noise.uniform((5, 20 - parents[-1]), key=key, site=NEXT)
    for seed, row in np.ndindex(2, 5):
        tokens, kernel = sequences.tokens[seed, row].tolist(), sequences.kernel[seed, row]
        for t in range(parents[-1], 20):
            bounds = kernel[tuple(tokens[t - lag] for lag in parents)].cumsum(-1)[:-1]
            assert tokens[t] == int((uniform[seed, row, t - parents[-1]] >= bounds).sum())


def test_the_first_symbols_are_stationary():
    world = World("pair", (1, 2))
    sequences = draw(world, torch.tensor([0]), 1, symbols=2, samples=40, length=4)
    uniform = noise.uniform((40,), key=noise.key(torch.tensor([0]), 1), site=START)[0]
    law = sequences.kernel[0].double().numpy()
    start = stationary(window_chain(law / law.sum(-1, keepdims=True), (1, 2)))
    chosen = (uniform.numpy()[:, None] >= start.cumsum(-1)[:, :-1]).sum(-1)
    windows = 2 * sequences.tokens[0, :, 0] + sequences.tokens[0, :, 1]
    assert (windows.numpy() == chosen).mean() > 0.95  # a bound may be rounded to the other side


def test_dirichlet_rows_are_uniform_on_the_simplex():
    kernel = laws(WORLDS[CHAIN])
    assert kernel.mean() == pytest.approx(1 / 3)
    assert (kernel**2).mean() == pytest.approx(2 / 12, abs=4e-3)  # E p² = 2/(k(k + 1))


def test_doubly_stochastic_laws_have_columns_that_sum_to_1():
    np.testing.assert_allclose(laws(WORLDS[DOUBLY], 50).sum(-2), 1.0, atol=1e-6)


def test_the_matched_world_has_the_information_of_dirichlet_rows():
    target = information(laws(WORLDS[CHAIN], 20_000))
    solved = brentq(lambda power: information(laws(World("", sharpness=power), 20_000)) - target, 0.8, 1.4, xtol=1e-3)
    assert solved == pytest.approx(MATCHED_SHARPNESS, abs=0.02)


def test_a_seeds_sequences_do_not_depend_on_its_neighbours():
    alone = draw(WORLDS[CHAIN], torch.tensor([4]), 2, **SIZES)
    together = draw(WORLDS[CHAIN], torch.tensor([1, 4]), 2, **SIZES)
    torch.testing.assert_close(together.tokens[1:], alone.tokens)
    assert not torch.equal(together.tokens[0], alone.tokens[0])


def test_too_many_permutations_and_too_short_sequences_are_refused():
    with pytest.raises(InputError, match="`symbols` must be at most 5"):
        draw(WORLDS[DOUBLY], torch.tensor([0]), 0, symbols=6, samples=1, length=5)
    with pytest.raises(InputError, match="`length` must be at least 3"):
        draw(World("far", (1, 3)), torch.tensor([0]), 0, symbols=2, samples=1, length=2)
