"""Alignment against a loop over `numpy.corrcoef`, and the transformations that must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.alignment import latent_alignment, mean_alignment


@st.composite
def cases(draw):
    """Latents, some of them constant, and activations, some of whose units are constant."""
    seeds, samples, positions = draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(1, 4))
    latents, units = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    latent = rng.random((seeds, samples, latents)) < draw(st.sampled_from([0.2, 0.5, 0.9]))
    hidden = rng.standard_normal((seeds, samples, positions, units)).round(2)  # a range is 0 or no less than 0.01
    hidden[..., rng.random(units) < 0.3] = draw(st.floats(-5, 5))
    return torch.from_numpy(latent), torch.from_numpy(hidden), rng


def by_loops(latent, hidden, absolute=False, weight=None):
    """Return the alignment one correlation at a time; `weight` is how often each sample is repeated."""
    result = np.full((latent.shape[0], latent.shape[2]), np.nan)
    for seed, column in np.ndindex(*result.shape):
        repeats = np.ones(latent.shape[1], dtype=int) if weight is None else weight[seed]
        y = np.repeat(latent[seed, :, column].double().numpy(), repeats)
        if np.ptp(y) == 0:
            continue
        correlations = []
        for unit in range(hidden.shape[-1]):
            h = np.repeat(hidden[seed, ..., unit].numpy().max(axis=-1), repeats)
            correlations.append(np.corrcoef(y, h)[0, 1] if np.ptp(h) > 0 else 0.0)
        result[seed, column] = max(map(abs, correlations)) if absolute else max(correlations)
    return result


@given(cases(), st.booleans())
def test_alignment_is_the_largest_of_numpys_correlations(case, absolute):
    latent, hidden, _ = case
    ours = latent_alignment(latent, hidden, absolute=absolute)
    np.testing.assert_allclose(ours.numpy(), by_loops(latent, hidden, absolute), rtol=0, atol=1e-12)
    maxed = latent_alignment(latent, hidden.amax(-2), absolute=absolute)
    torch.testing.assert_close(maxed, ours, rtol=0, atol=0, equal_nan=True)
    for seed, expected in enumerate(ours):
        alone = latent_alignment(latent[seed], hidden[seed], absolute=absolute)
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-15, equal_nan=True)


@given(cases(), st.booleans())
def test_a_weight_is_a_number_of_repeats(case, absolute):
    latent, hidden, rng = case
    repeats = rng.integers(0, 4, latent.shape[:2])
    repeats[:, 0] += 1
    spoilt = hidden.clone()
    spoilt[torch.from_numpy(repeats) == 0] = torch.nan  # a sample of weight 0 is ignored
    ours = latent_alignment(latent, spoilt, weight=torch.from_numpy(repeats), absolute=absolute)
    np.testing.assert_allclose(ours.numpy(), by_loops(latent, hidden, absolute, repeats), rtol=0, atol=1e-12)
    common = torch.from_numpy(repeats[0])
    torch.testing.assert_close(
        latent_alignment(latent, hidden, weight=common),
        latent_alignment(latent, hidden, weight=7.5 * common.expand(latent.shape[:2])),
        rtol=0,
        atol=1e-12,
        equal_nan=True,
    )


@given(cases())
def test_absent_positions_are_ignored(case):
    latent, hidden, rng = case
    present = torch.from_numpy(rng.random(hidden.shape[:-1]) < 0.5)
    present[..., -1] = True
    spoilt = hidden.clone()
    spoilt[~present] = torch.nan
    expected = by_loops(latent, hidden.masked_fill(~present[..., None], -torch.inf))
    ours = latent_alignment(latent, spoilt, present=present)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-12)


@given(cases(), st.floats(0.1, 10), st.floats(-10, 10))
def test_scale_shift_and_order_of_units_do_not_matter(case, scale, shift):
    latent, hidden, rng = case
    ours = latent_alignment(latent, hidden)
    order = torch.from_numpy(rng.permutation(hidden.shape[-1]))
    for changed in (scale * hidden + shift, hidden[..., order], hidden[..., torch.cat([order, order])]):
        torch.testing.assert_close(latent_alignment(latent, changed), ours, rtol=0, atol=1e-11, equal_nan=True)
    torch.testing.assert_close(
        latent_alignment(scale * latent + shift, hidden), ours, rtol=0, atol=1e-11, equal_nan=True
    )


@given(cases())
def test_a_unit_equal_to_the_latent_aligns_and_its_negative_only_in_absolute_value(case):
    latent, _, _ = case
    varies = latent.any(-2) & ~latent.all(-2)
    y = latent.double()
    expected = torch.ones_like(varies, dtype=torch.float64).masked_fill(~varies, torch.nan)
    torch.testing.assert_close(latent_alignment(latent, y), expected, rtol=0, atol=1e-14, equal_nan=True)
    for column in range(y.shape[-1]):
        single = latent[..., column : column + 1]
        opposite = latent_alignment(single, -single.double())
        torch.testing.assert_close(opposite, -expected[..., column : column + 1], rtol=0, atol=1e-14, equal_nan=True)
        absolute = latent_alignment(single, -single.double(), absolute=True)
        torch.testing.assert_close(absolute, expected[..., column : column + 1], rtol=0, atol=1e-14, equal_nan=True)


@given(st.integers(0, 999), st.floats(1e-7, 1e7))
def test_rounding_of_a_constant_unit_is_no_alignment(seed, size):
    generator = torch.Generator().manual_seed(seed)
    latent = (torch.arange(20) < 7)[:, None]
    noise = torch.randint(-2, 3, (20, 50), generator=generator).float()
    hidden = size * (1 + noise * torch.finfo(torch.float32).eps)
    assert float(latent_alignment(latent, hidden)) == 0
    assert float(latent_alignment(latent, hidden, tolerance=0.0)) > 0.1
    signal = size * (1 + 1e-3 * latent.float())
    assert float(latent_alignment(latent, torch.cat([hidden, signal], dim=-1))) > 0.99


@given(st.integers(0, 999))
def test_a_diverged_seed_is_nan_and_changes_no_other(seed):
    generator = torch.Generator().manual_seed(seed)
    latent = torch.rand(3, 8, 4, generator=generator) < 0.5
    hidden = torch.randn(3, 8, 2, 5, generator=generator)
    good = latent_alignment(latent, hidden)
    hidden[0, 3, 1, 2], hidden[2, 3, 1, 2] = torch.nan, torch.inf
    ours = latent_alignment(latent, hidden)
    assert bool(ours[[0, 2]].isnan().all())
    torch.testing.assert_close(ours[1], good[1], rtol=0, atol=0, equal_nan=True)
    means = mean_alignment(ours)
    assert bool(means[[0, 2]].isnan().all())
    torch.testing.assert_close(means[1], mean_alignment(good)[1], rtol=0, atol=0, equal_nan=True)


@given(cases())
def test_the_mean_is_over_latents_that_vary(case):
    latent, hidden, _ = case
    aligned = latent_alignment(latent, hidden)
    for ours, values in zip(mean_alignment(aligned).tolist(), aligned.numpy(), strict=True):
        defined = values[~np.isnan(values)]
        np.testing.assert_allclose(ours, defined.mean() if defined.size else np.nan, rtol=1e-13)


LATENT, HIDDEN = (
    torch.eye(4, dtype=torch.bool)[None],
    torch.randn(1, 4, 3, 6, generator=torch.Generator().manual_seed(0)),
)


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ({"latent": torch.ones(3)}, "latent", "sample"),
        ({"latent": torch.ones(1, 4, 0)}, "latent", "non-empty"),
        ({"latent": torch.full((1, 4, 2), torch.nan)}, "latent", "8 values"),
        ({"hidden": HIDDEN[:, :3]}, "hidden", r"\(1, 3, 3, 6\)"),
        ({"hidden": HIDDEN.expand(2, -1, -1, -1)}, "hidden", "same seeds"),
        ({"hidden": HIDDEN[0, 0]}, "hidden", r"\(3, 6\)"),
        ({"hidden": HIDDEN[..., :0]}, "hidden", "non-empty"),
        ({"hidden": HIDDEN.long()}, "hidden", "floating"),
        ({"present": torch.ones(1, 4, 2, dtype=torch.bool)}, "present", r"\(1, 4, 2\)"),
        ({"present": torch.ones(1, 4, 3)}, "present", "float32"),
        ({"present": torch.zeros(1, 4, 3, dtype=torch.bool)}, "present", "no position"),
        ({"present": torch.ones(1, 4, dtype=torch.bool), "hidden": HIDDEN.amax(-2)}, "present", "boolean"),
        ({"weight": torch.ones(3)}, "weight", r"\(3,\)"),
        ({"weight": torch.tensor([1.0, -1.0, 1.0, 1.0])}, "weight", "least value -1"),
        ({"weight": torch.zeros(4)}, "weight", "least sum 0"),
        ({"weight": torch.full((4,), torch.nan)}, "weight", "nan"),
        ({"tolerance": -0.1}, "tolerance", "range"),
    ],
)
def test_bad_input_is_named(change, name, word):
    options = {"latent": LATENT, "hidden": HIDDEN, **change}
    with pytest.raises(InputError, match=f"`{name}` must .*{word}"):
        latent_alignment(options.pop("latent"), options.pop("hidden"), **options)


@pytest.mark.parametrize("aligned", [torch.tensor(1.0), torch.ones(3, dtype=torch.int64)])
def test_a_mean_of_anything_else_is_refused(aligned):
    with pytest.raises(InputError, match="`aligned`"):
        mean_alignment(aligned)
