"""Noise keyed by seed, step and site, compared with the same hash in Python's integers, and tested statistically."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from joma import noise
from joma.arguments import InputError

WORD = 2**32
NUMBERS = st.integers(0, 2**63 - 1)


def mix(word):
    """Return lowbias32 of a word, as its author states it, in unbounded integers."""
    word ^= word >> 16
    word = word * 0x7FEB352D % WORD
    word ^= word >> 15
    word = word * 0x846CA68B % WORD
    return word ^ (word >> 16)


def bits(element, seed, step, site):
    """Return the 32 random bits of one element, by the formula of `joma.noise`."""
    keys = []
    for lane in (1, 2):
        key = mix(lane)
        for number in (seed % WORD, seed // WORD, step % WORD, step // WORD, site):
            key = mix((key + number) % WORD)
        keys.append(key)
    return mix(mix(element ^ keys[0]) ^ keys[1])


def uniform(count, seeds=(0,), step=0, site=0):
    return noise.uniform((count,), key=noise.key(torch.tensor(seeds), step), site=site).numpy()


@given(seeds=st.lists(NUMBERS, min_size=1, max_size=3), step=NUMBERS, site=st.integers(0, 2**32 - 1))
def test_the_hash_is_the_one_in_unbounded_integers(seeds, step, site):
    numbers = noise.uniform((2, 3), key=noise.key(torch.tensor(seeds), torch.tensor(step)), site=site)
    expected = [[(bits(i, seed, step, site) >> 8) / 2**24 for i in range(6)] for seed in seeds]
    assert numbers.dtype == torch.float32
    np.testing.assert_array_equal(numbers.reshape(len(seeds), 6).double().numpy(), expected)


@given(seed=NUMBERS, step=NUMBERS, site=st.integers(0, 1000), p=st.floats(0.0, 0.999))
def test_dropout_drops_where_the_bits_are_below_p(seed, step, site, p):
    x = torch.linspace(1.0, 2.0, 20, dtype=torch.float64)[None]
    dropped = noise.dropout(x, p, key=noise.key(torch.tensor([seed]), step), site=site)
    retained = np.array([bits(i, seed, step, site) >= round(p * WORD) for i in range(20)])
    np.testing.assert_allclose(dropped[0], np.where(retained, x[0] / (1 - p), 0.0), rtol=1e-15)


def test_fixed_values():
    """A run may be resumed under a later version: these words must never change."""
    words = [3150016374, 1977519822, 2080823105]
    assert [bits(element, seed=3, step=14, site=15) for element in range(3)] == words
    assert uniform(3, (3,), 14, 15)[0].tolist() == [(word >> 8) / 2**24 for word in words]


@given(
    seeds=st.lists(NUMBERS, min_size=2, max_size=5),
    step=NUMBERS,
    which=st.integers(0, 4),
    as_tensor=st.booleans(),
)
def test_a_seeds_noise_does_not_depend_on_the_other_seeds(seeds, step, which, as_tensor):
    which %= len(seeds)
    step = torch.tensor(step) if as_tensor else step
    with_others = noise.uniform((4, 5), key=noise.key(torch.tensor(seeds), step), site=7)
    alone = noise.uniform((4, 5), key=noise.key(torch.tensor([seeds[which]]), step), site=7)
    assert with_others[which].equal(alone[0])


def test_the_key_of_a_step_needs_no_steps_before_it():
    seeds, step = torch.tensor([0, 1]), torch.tensor(0)
    for number in range(5):
        assert noise.key(seeds, step).equal(noise.key(seeds, number))
        assert noise.key(seeds.int(), step.int()).equal(noise.key(seeds, number))
        step += 1


@settings(max_examples=25)
@given(seed=NUMBERS, step=NUMBERS, site=st.integers(0, 1000))
def test_uniform_by_kolmogorov_and_smirnov(seed, step, site):
    numbers = uniform(20_000, (seed,), step, site)[0]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-7
    pairs = np.histogram2d(numbers[:-1:2], numbers[1::2], bins=16, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-7


def test_the_p_values_of_many_keys_are_themselves_uniform():
    samples = [uniform(2_000, range(20), step, site) for step in range(5) for site in range(4)]
    p_values = stats.kstest(np.concatenate(samples), "uniform", axis=1).pvalue
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def largest_correlation(rows):
    """Return the largest |correlation| of two rows, in standard deviations of that of independent rows."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    products = np.abs(unit @ unit.T)[np.triu_indices(len(rows), 1)]
    return products.max() * math.sqrt(rows.shape[1])


@pytest.mark.parametrize("along", ["seed", "step", "site", "neighbour"])
def test_no_correlation(along):
    """Among 64 · 63/2 = 2,016 independent pairs the largest exceeds 5 deviations once in 900 times."""
    count = 20_000
    rows = {
        "seed": lambda: uniform(count, range(64)),
        "step": lambda: np.concatenate([uniform(count, step=step) for step in range(64)]),
        "site": lambda: np.concatenate([uniform(count, site=site) for site in range(64)]),
        "neighbour": lambda: np.stack([uniform(count + 64)[0, shift : count + shift] for shift in range(64)]),
    }[along]()
    assert largest_correlation(rows.astype(np.float64)) < 5
    low_bits = np.floor(rows.astype(np.float64) * 2**24) % 256
    assert largest_correlation(low_bits) < 5


@given(seed=NUMBERS, step=NUMBERS, bit=st.integers(0, 31), which=st.sampled_from(["seed", "step", "site"]))
def test_one_bit_of_the_key_flips_half_the_bits(seed, step, bit, which):
    flip = {"seed": 0, "step": 0, "site": 0, which: 1 << bit}
    before = uniform(1_000, (seed,), step, 1)
    after = uniform(1_000, (seed ^ flip["seed"],), step ^ flip["step"], 1 ^ flip["site"])
    words = ((before * 2**24).astype(np.int64) ^ (after * 2**24).astype(np.int64))[0]
    flipped = (words[:, None] >> np.arange(24) & 1).mean(axis=0)
    assert np.abs(flipped - 0.5).max() < 6.5 * 0.5 / math.sqrt(1_000)


def test_keys_of_a_long_run_are_distinct():
    sites = torch.arange(40)
    keys = torch.stack([noise._fold(noise.key(torch.arange(16), step)[..., None], sites) for step in range(500)])
    first, second = keys.transpose(0, 1).flatten(1)
    assert len(torch.unique(first * 2**32 + second)) == 500 * 40 * 16


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_has_the_variance_of_a_coin(p):
    count = 200_000
    x = torch.ones(2, count, dtype=torch.float64, requires_grad=True)
    dropped = noise.dropout(x, p, key=noise.key(torch.tensor([0, 1]), 5), site=2)
    deviation = math.sqrt(p / (1 - p) / count)
    assert (dropped.mean(dim=1) - 1).abs().max() < 4 * deviation
    assert set(dropped.unique().tolist()) == {0.0, 1 / (1 - p)}
    dropped.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(dropped.detach())


def test_no_dropout_is_the_identity():
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    assert noise.dropout(x, 0.0, key=noise.key(torch.tensor([3]), 0), site=0).equal(x)


def test_values_are_never_read():
    """The meta device has no values: a step that waits for the device, and so cannot be captured, would fail."""
    key = noise.key(torch.arange(3, device="meta"), torch.tensor(4, device="meta"))
    assert noise.dropout(torch.ones(3, 4, device="meta"), 0.5, key=key, site=1).shape == (3, 4)


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has warnings of its own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_devices_agree_exactly():
    seeds, step = torch.tensor([0, 5, 2**40 + 1]), torch.tensor(2**33 + 7)
    on_cpu = noise.uniform((1000, 7), key=noise.key(seeds, step), site=3)
    on_cuda = noise.uniform((1000, 7), key=noise.key(seeds.cuda(), step.cuda()), site=3)
    assert on_cuda.cpu().equal(on_cpu)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_devices_agree_at_steps_that_are_numbers():
    seeds = torch.tensor([0, 5])
    for step in (0, 3, 4, 2**33 + 7, -1):
        assert noise.key(seeds.cuda(), step).cpu().equal(noise.key(seeds, step))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda key: noise.dropout(torch.ones(1, 2), 1.0, key=key, site=0), r"`p` must be in \[0, 1\), got 1.0"),
        (lambda key: noise.dropout(torch.ones(1, 2), -0.1, key=key, site=0), r"`p` must be in \[0, 1\)"),
        (lambda key: noise.dropout(torch.ones(1, 2), math.nan, key=key, site=0), r"`p` must be in \[0, 1\)"),
        (lambda key: noise.dropout(torch.ones(2, 2), 0.5, key=key, site=0), "`key` must be of 2 seeds, like x, got 1"),
        (lambda key: noise.uniform((2**16, 2**17), key=key, site=0), "`shape` must be of at most 2³² elements"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError, match=message):
        call(noise.key(torch.tensor([0]), 0))


@pytest.mark.parametrize(
    ("seeds", "step", "message"),
    [
        (torch.tensor([[0]]), 0, "`seeds` must be one whole number for each seed"),
        (torch.tensor([0.0]), 0, "`seeds` must be one whole number for each seed"),
        (torch.tensor([0]), torch.tensor(1.5), "`step` must be one whole number"),
        (torch.tensor([0]), torch.tensor([1, 2]), "`step` must be one whole number"),
    ],
)
def test_bad_keys(seeds, step, message):
    with pytest.raises(InputError, match=message):
        noise.key(seeds, step)
