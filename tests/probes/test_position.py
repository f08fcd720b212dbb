"""The readout of positions against explicit covariances, and adjacency against a count of triples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.position import adjacency, position_decodability
from toy_decoder import decoder

SEEDS = st.integers(0, 2**32)
STATES = torch.randn(2, 6, 4, 3, generator=torch.Generator().manual_seed(0))


def by_folds(states, folds, ridge):
    """Return accuracy, its spread over folds and by position: the discriminant by explicit covariances, by loops."""
    samples, positions, width = states.shape
    right = np.zeros((samples, positions))
    for fold in range(folds):
        training = np.array([i for i in range(samples) if i % folds != fold])
        rows = states[training].reshape(-1, width)
        label = np.tile(np.arange(positions), len(training))
        means = np.stack([rows[label == p].mean(axis=0) for p in range(positions)])
        within = np.cov((rows - means[label]).T, bias=True).reshape(width, width)
        total = np.cov(rows.T, bias=True).reshape(width, width)
        inverse = np.linalg.inv(within + ridge * np.trace(total) / width * np.eye(width))
        for i in range(fold, samples, folds):
            for p in range(positions):
                difference = states[i, p] - means
                right[i, p] = np.argmin([d @ inverse @ d for d in difference]) == p
    of_fold = [right[fold::folds].mean() for fold in range(folds)]
    return right.mean(), np.std(of_fold, ddof=1), right.mean(axis=0)


@given(seed=SEEDS, samples=st.integers(4, 9), positions=st.integers(2, 5), width=st.integers(1, 6))
@settings(max_examples=30)
def test_decodability_is_that_of_the_nearest_mean_fold_by_fold(seed, samples, positions, width):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((2, 3, samples, positions, width))
    states[:, 1] += rng.standard_normal((positions, width))
    readout = position_decodability(torch.from_numpy(states), folds=3, ridge=0.01)
    assert readout.chance == 1 / positions
    for lead in np.ndindex(2, 3):
        accuracy, spread, by_position = by_folds(states[lead], 3, 0.01)
        np.testing.assert_allclose(readout.accuracy[lead], accuracy, rtol=0, atol=1e-12)
        np.testing.assert_allclose(readout.spread[lead], spread, rtol=0, atol=1e-12)
        np.testing.assert_allclose(readout.by_position[lead], by_position, rtol=0, atol=1e-12)


@given(seed=SEEDS, scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
@settings(max_examples=20)
def test_scales_shifts_and_rotations_do_not_change_decodability(seed, scale, shift):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((12, 5, 4)) + 2 * rng.standard_normal((5, 4))
    turn = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    plain = position_decodability(torch.from_numpy(states))
    turned = position_decodability(torch.from_numpy(scale * states @ turn + shift))
    torch.testing.assert_close(turned.by_position, plain.by_position, rtol=0, atol=0)


def test_positions_along_a_line_are_all_found():
    """Regression on one-hot positions would predict only the first and the last."""
    generator = torch.Generator().manual_seed(0)
    states = torch.arange(8.0)[:, None] * torch.tensor([1.0, 2.0]) + 0.1 * torch.randn(40, 8, 2, generator=generator)
    assert position_decodability(states).by_position.tolist() == [1.0] * 8


def test_states_without_position_are_at_chance_and_fixed_ones_are_found():
    generator = torch.Generator().manual_seed(0)
    alike = torch.randn(30, 1, 6, generator=generator).expand(30, 5, 6)
    fixed = torch.randn(1, 5, 6, generator=generator).expand(30, 5, 6)
    readout = position_decodability(torch.stack([alike, fixed, torch.ones(30, 5, 6)]))
    np.testing.assert_allclose(readout.accuracy, [0.2, 1.0, 0.2], atol=1e-12)
    noise = position_decodability(torch.randn(400, 5, 6, generator=generator))
    assert abs(float(noise.accuracy) - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 2000)


# Adjacency


@given(seed=SEEDS, positions=st.integers(3, 6), width=st.integers(1, 4))
@settings(max_examples=30)
def test_adjacency_is_a_count_of_triples(seed, positions, width):
    rng = np.random.default_rng(seed)
    states = rng.integers(-2, 3, size=(2, 3, positions, width)).astype(float)
    neighbours = adjacency(torch.from_numpy(states), nulls=3, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    orders = [torch.randperm(positions, generator=generator).numpy() for _ in range(3)]
    for lead in range(2):
        scores = [neighbours.score[lead], *neighbours.null[lead]]
        for order, score in zip([np.arange(positions), *orders], scores, strict=True):
            assert float(score) == pytest.approx(count_of_triples(states[lead][:, order]), abs=1e-12)
        for distance in range(1, positions):
            pairs = [cosine(row[i], row[i + distance]) for row in states[lead] for i in range(positions - distance)]
            np.testing.assert_allclose(neighbours.cosine[lead, distance - 1], np.mean(pairs), rtol=0, atol=1e-12)


def cosine(a, b):
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return a @ b / size if size else 0.0


def count_of_triples(states):
    points = []
    for row in states:
        for i, j, k in itertools.product(range(len(row)), repeat=3):
            if abs(i - j) == 1 and abs(i - k) > 1:
                difference = cosine(row[i], row[j]) - cosine(row[i], row[k])
                points.append(0.5 if abs(difference) < 1e-9 else float(difference > 0))
    return np.mean(points)


def test_causal_layers_with_random_weights_make_neighbours_similar_and_full_ones_do_not():
    tokens = torch.randint(9, (40, 10), generator=torch.Generator().manual_seed(0))

    def scores(mask):
        model = decoder((0, 1, 2), layers=2, width=32, mask=mask, residual=False)
        return adjacency(torch.stack(model.activations(tokens, ["residual"])["residual"], dim=1))

    causal, full = scores("causal"), scores("full")
    assert causal.score.shape == (3, 3)
    assert causal.null.shape == (3, 3, 100)
    assert bool((causal.score[:, 1:] > causal.null[:, 1:].amax(dim=-1)).all())
    assert float((full.score - 0.5).abs().max()) < 0.05
    assert float((causal.score[:, 0] - 0.5).abs().max()) < 0.05


# Diverged seeds and bad input


@given(seed=SEEDS, value=st.sampled_from([torch.nan, torch.inf, -torch.inf]), entries=st.sampled_from([1, 50]))
@settings(max_examples=25)
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, value, entries):
    rng = np.random.default_rng(seed)
    states = torch.from_numpy(rng.standard_normal((3, 2, 10, 4, 5)))
    before = position_decodability(states), adjacency(states, nulls=3)
    states[1, 0].view(-1)[rng.integers(200, size=entries)] = value
    after = position_decodability(states), adjacency(states, nulls=3)
    diverged = torch.tensor([[False, False], [True, False], [False, False]])
    for probe, names in enumerate([("accuracy", "spread", "by_position"), ("score", "null", "cosine")]):
        for name in names:
            values, expected = getattr(after[probe], name), getattr(before[probe], name)
            assert bool(values[diverged].isnan().all())
            torch.testing.assert_close(values[~diverged], expected[~diverged], rtol=0, atol=1e-13)


def test_diverged_states_without_a_leading_axis_are_nan():
    states = torch.full((6, 4, 3), torch.nan)
    assert math.isnan(position_decodability(states).accuracy)
    assert math.isnan(adjacency(states).score)


def test_arrays_and_lists_give_the_same_as_tensors():
    array = STATES.double().numpy()[..., ::-1]
    array.flags.writeable = False
    tensor = torch.from_numpy(array.copy())
    assert position_decodability(array, folds=2).accuracy.equal(position_decodability(tensor, folds=2).accuracy)
    assert adjacency(array).score.equal(adjacency(tensor.tolist()).score)


@pytest.mark.parametrize(
    ("probe", "states", "options", "name"),
    [
        (position_decodability, STATES.long(), {}, "states"),
        (position_decodability, STATES.long().numpy(), {}, "states"),
        (position_decodability, [[[1.0], [2.0, 3.0]]], {}, "states"),
        (position_decodability, STATES[0, 0], {}, "states"),
        (position_decodability, STATES[..., :1, :], {}, "states"),
        (position_decodability, STATES[..., :0], {}, "states"),
        (position_decodability, STATES, {"folds": 7}, "folds"),
        (position_decodability, STATES, {"folds": 1}, "folds"),
        (position_decodability, STATES, {"ridge": 0.0}, "ridge"),
        (adjacency, STATES[..., :2, :], {}, "states"),
        (adjacency, STATES, {"nulls": 0}, "nulls"),
    ],
)
def test_bad_input_is_named(probe, states, options, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        probe(states, **options)
