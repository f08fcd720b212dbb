"""The similarity of slices against loops over pairs of slices, by covariances, by kernels and by Song et al.'s sum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.slices import own_location, slice_similarity
from toy_decoder import decoder

SEEDS = st.integers(0, 2**32)
STATES = torch.randn(2, 6, 4, 3, generator=torch.Generator().manual_seed(0))


def centred(x):
    return x - x.mean(axis=0)


def by_covariance(x, y):
    """Linear CKA by cross-covariances."""
    x, y = centred(x), centred(y)
    return np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def by_kernels(x, y):
    """Linear CKA by the independence criterion tr(K H L H) of the Gram matrices."""
    h = np.eye(len(x)) - 1 / len(x)

    def criterion(k, other):
        return np.trace(k @ h @ other @ h)

    k, other = x @ x.T, y @ y.T
    return criterion(k, other) / math.sqrt(criterion(k, k) * criterion(other, other))


def unbiased(x, y):
    """Song et al.'s estimate by its sum over distinct samples i, j, q, r, up to a common factor."""
    k, other = x @ x.T, y @ y.T
    total = 0.0
    for i, j, q, r in itertools.permutations(range(len(x)), 4):
        total += k[i, j] * (other[i, j] + other[q, r] - 2 * other[i, q])
    return total


@st.composite
def stacks(draw):
    rng = np.random.default_rng(draw(SEEDS))
    seeds, layers, samples = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(4, 6))
    shape = (seeds, layers, samples, draw(st.integers(2, 3)), draw(st.integers(1, 5)))
    return rng.standard_normal(shape) + draw(st.sampled_from([0.0, 3.0])), draw(st.integers(1, 7))


@given(stacks())
@settings(max_examples=25)
def test_similarities_are_those_of_loops_over_pairs(case):
    states, block = case
    plain = slice_similarity(torch.from_numpy(states), block=block)
    fair = slice_similarity(torch.from_numpy(states), block=block, debiased=True)
    seeds, layers, _, positions, width = states.shape
    assert plain.cka.shape == (seeds, layers, layers, positions, positions)
    for seed, a, b, i, j in np.ndindex(*plain.cka.shape):
        x, y = states[seed, a, :, i], states[seed, b, :, j]
        np.testing.assert_allclose(plain.cka[seed, a, b, i, j], by_covariance(x, y), rtol=0, atol=1e-12)
        np.testing.assert_allclose(plain.cka[seed, a, b, i, j], by_kernels(x, y), rtol=0, atol=1e-10)
        units = [np.corrcoef(x[:, k], y[:, k])[0, 1] for k in range(width)]
        np.testing.assert_allclose(plain.correlation[seed, a, b, i, j], np.mean(units), rtol=0, atol=1e-12)
    x, y = states[0, 0, :, 0], states[0, -1, :, 1]
    sizes = [unbiased(x, x), unbiased(y, y)]
    if min(sizes) > 1e-9:
        expected = np.clip(unbiased(x, y) / math.sqrt(sizes[0] * sizes[1]), -1, 1)
        np.testing.assert_allclose(fair.cka[0, 0, -1, 0, 1], expected, rtol=1e-8, atol=1e-8)


def test_few_samples_make_unrelated_slices_similar_unless_debiased():
    states = torch.randn(2, 40, 4, 100, generator=torch.Generator().manual_seed(0))
    plain, fair = (slice_similarity(states, debiased=debiased).cka[0, 1] for debiased in (False, True))
    assert float(plain.min()) > 0.6
    assert float(fair.abs().max()) < 0.1


def test_what_does_not_vary_is_left_out():
    states = torch.randn(2, 20, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = slice_similarity(states)
    padded = torch.cat([states, torch.full((2, 20, 3, 2), 5.0, dtype=torch.float64)], dim=-1)
    padded[..., -1] += 1e-9 * torch.rand(2, 20, 3, generator=torch.Generator().manual_seed(1))
    ours = slice_similarity(padded)
    torch.testing.assert_close(ours.cka, expected.cka, rtol=0, atol=1e-14)
    torch.testing.assert_close(ours.correlation, expected.correlation, rtol=0, atol=1e-14)
    states[0, :, 1] = 7.0
    fixed = slice_similarity(states)
    missing = fixed.cka.isnan()
    assert missing.equal(fixed.correlation.isnan())
    assert missing.sum() == 2 * 6 - 1
    assert bool(missing[0, :, 1].all())
    assert bool(missing[:, 0, :, 1].all())
    torch.testing.assert_close(fixed.cka[~missing], expected.cka[~missing], rtol=0, atol=0)
    left = own_location(fixed.cka[1:, :1, ::2, ::2])  # from layer 1 to layer 0, without location 1
    ours = own_location(fixed.cka)
    torch.testing.assert_close(ours.share[1, 0], left.share[0, 0], rtol=0, atol=0)
    torch.testing.assert_close(ours.margin[1, 0], left.margin[0, 0], rtol=0, atol=0)


@given(stacks())
@settings(max_examples=25)
def test_a_location_is_its_own_if_no_other_is_as_similar(case):
    states, _ = case
    similarity = slice_similarity(torch.from_numpy(states)).correlation
    ours = own_location(similarity)
    for index in np.ndindex(*similarity.shape[:-2]):
        table = similarity[index].numpy()
        margins = [table[i, i] - max(np.delete(table[i], i)) for i in range(len(table))]
        np.testing.assert_allclose(ours.margin[index], np.mean(margins), rtol=0, atol=1e-12)
        assert float(ours.share[index]) == pytest.approx(np.mean(np.array(margins) > 0))


def test_a_residual_stream_stays_at_its_location():
    model = decoder(layers=4, width=32, vocabulary=9)
    tokens = torch.randint(9, (200, 6), generator=torch.Generator().manual_seed(0))
    states = torch.stack(model.activations(tokens, ["residual"])["residual"], dim=-4)
    stays = own_location(slice_similarity(states).cka)
    assert stays.share.shape == (1, 5, 5)
    assert float(stays.share.min()) == 1.0
    shuffled = states[..., torch.tensor([1, 2, 3, 4, 5, 0]), :].clone()
    moved = own_location(slice_similarity(torch.cat([states[:, :1], shuffled[:, 1:]], dim=1)).cka)
    assert float(moved.share[0, 0, 1:].max()) == 0.0


@given(seed=SEEDS, value=st.sampled_from([torch.nan, torch.inf]), debiased=st.booleans())
@settings(max_examples=25)
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, value, debiased):
    rng = np.random.default_rng(seed)
    states = torch.from_numpy(rng.standard_normal((3, 2, 10, 4, 5)))
    before = slice_similarity(states, debiased=debiased)
    states[1].view(-1)[rng.integers(400)] = value
    after = slice_similarity(states, debiased=debiased)
    for values, expected in ((after.cka, before.cka), (after.correlation, before.correlation)):
        assert bool(values[1].isnan().all())
        torch.testing.assert_close(values[::2], expected[::2], rtol=0, atol=1e-13)
        ours, plain = own_location(values), own_location(expected)
        for field in ("share", "margin"):
            assert bool(getattr(ours, field)[1].isnan().all())
            torch.testing.assert_close(getattr(ours, field)[::2], getattr(plain, field)[::2], rtol=0, atol=1e-13)


def test_arrays_and_lists_give_the_same_as_tensors():
    array = STATES.double().numpy()[..., ::-1]
    array.flags.writeable = False
    tensor = torch.from_numpy(array.copy())
    similar = slice_similarity(array).cka
    assert similar.equal(slice_similarity(tensor).cka)
    assert own_location(similar.numpy()).margin.equal(own_location(similar).margin)


@pytest.mark.parametrize(
    ("probe", "states", "options", "name"),
    [
        (own_location, torch.ones(1, 1, 2, 2, dtype=torch.int64), {}, "similarity"),
        (own_location, [[[[1.0, 0.5], [0.5]]]], {}, "similarity"),
        (slice_similarity, STATES[0], {}, "states"),
        (slice_similarity, STATES[:, :1], {}, "states"),
        (slice_similarity, STATES[:, :3], {"debiased": True}, "states"),
        (slice_similarity, STATES, {"tolerance": 2.0}, "tolerance"),
        (slice_similarity, STATES, {"block": 0}, "block"),
        (own_location, STATES[0], {}, "similarity"),
        (own_location, STATES, {}, "similarity"),
        (own_location, torch.ones(2, 2, 1, 1), {}, "similarity"),
    ],
)
def test_bad_input_is_named(probe, states, options, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        probe(states, **options)
