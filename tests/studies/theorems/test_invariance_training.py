"""Training of Figure 2's block: its laws at any rate, and numbers of Figure 2 from an independent derivation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.studies.theorems.invariance import BROKEN, worst
from joma.studies.theorems.invariance_training import (
    ACTIVATIONS,
    ATTENTIONS,
    BREAKERS,
    TOKEN_KINDS,
    TRAINED_ARMS,
    BlockSetting,
    Config,
    long_trial,
    overlapping,
    prepare,
    trial,
)
from joma.study import Context

SMALL = Config(classes=4, distinct=3, common=2, dim=8, steps=40)


# The numbers below come from two derivations that share no code with this package.
def test_figure_2_linear_units():
    final = trial(Config(), Context((0, 1, 2)), BlockSetting("softmax", "linear")).isel(step=-1).sel(arm="base")
    gaussian, random = final.sel(kind="gaussian"), final.sel(kind="random", seed=0)
    assert gaussian.correlation.sel(seed=0) == pytest.approx(0.9955, abs=5e-5)
    assert gaussian.error.sel(seed=0, correction="none") == pytest.approx(7.96, abs=5e-3)
    assert gaussian.error.sel(seed=0, correction="gap") == pytest.approx(0.006, abs=5e-4)
    assert 0.9865 <= float(gaussian.correlation.min()) <= float(gaussian.correlation.max()) <= 0.9965
    errors = gaussian.error.sel(correction="none")
    assert 6.85 <= float(errors.min()) <= float(errors.max()) <= 8.05
    assert random.correlation == pytest.approx(0.982, abs=5e-4)
    assert random.error.sel(correction="none") == pytest.approx(2.42, abs=5e-3)
    assert random.error.sel(correction="gap") == pytest.approx(0.0025, abs=5e-5)
    assert float(final.error.sel(correction="step").max()) < 1e-13


def test_figure_2_relu_units():
    compared = trial(Config(), Context((0,)), BlockSetting("softmax", "relu"))
    final = compared.isel(step=-1, seed=0).sel(kind="gaussian", arm="base")
    assert final.correlation == pytest.approx(0.980, abs=5e-4)
    assert final.error.sel(correction="none") == pytest.approx(3.83, abs=5e-3)
    assert final.error.sel(correction="gap") == pytest.approx(0.003, abs=5e-4)


@settings(max_examples=20)
@given(
    setting=st.builds(BlockSetting, st.sampled_from(ATTENTIONS), st.sampled_from(ACTIVATIONS)),
    rates=st.tuples(st.floats(0.01, 2.0), st.floats(0.01, 2.0)),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 9999),
)
def test_the_finite_step_law_is_exact_at_any_rates(setting, rates, temperature, seed):
    config = replace(SMALL, rate=rates[0], rate_z=rates[1], temperature=temperature)
    compared = trial(config, Context((seed,)), setting)
    error = compared.error.sel(correction="step")
    moving = (error.arm != "zero") | (error.step > 2)  # from zero, z has not moved after one step: 0/0 up to rounding
    assert float(error.where(moving, 0.0).max()) < 1e-10
    if setting.attention == "softmax":
        assert float(compared.logit_sum.max()) < 1e-12


@pytest.mark.parametrize("attention", ["exp", "linear"])
def test_sgd_departs_from_the_flows_law_in_proportion_to_the_rate(attention):
    def departure(rate, steps):
        config = replace(SMALL, rate=rate, rate_z=rate, steps=steps)
        error = trial(config, Context((0,)), BlockSetting(attention, "gelu")).error.isel(step=-1)
        return error.sel(correction="none", arm="base")

    np.testing.assert_allclose(departure(0.2, 100) / departure(0.1, 200), 2.0, rtol=0.02)


@pytest.mark.parametrize("breaker", BREAKERS)
@pytest.mark.parametrize("attention", ["exp", "linear"])
def test_each_breaker_breaks_the_law(attention, breaker):
    broken = trial(SMALL, Context((0, 1)), replace(BROKEN, attention=attention, breaker=breaker))
    assert float(broken.error.isel(step=-1).sel(correction="step").min()) > 0.01


def test_a_breaker_of_no_strength_breaks_nothing():
    for breaker, config in {"overlap": replace(SMALL, overlap=0.0), "decay": replace(SMALL, decay=0.0)}.items():
        unbroken = trial(config, Context((0,)), replace(BROKEN, breaker=breaker))
        assert float(unbroken.error.sel(correction="step").max()) < 1e-10


def test_a_diverged_seed_is_nan_and_never_skipped():
    config = replace(SMALL, rate=10.0, rate_z=10.0)
    compared = trial(config, Context((0, 1, 2)), BlockSetting("exp", "linear")).sel(arm="base")
    assert compared.error.sel(kind="random", seed=2).isnull().all()
    assert float(compared.error.sel(kind="gaussian", correction="step").max()) < 1e-8
    np.testing.assert_array_equal(np.isnan(worst(compared.error)), [False, False, True])
    with pytest.raises(InputError, match=r"`rate`.*diverged"):
        trial(replace(SMALL, rate=1e6, rate_z=1e6), Context((0,)), BlockSetting("exp", "linear"))


def test_seeds_and_kinds_of_tokens_of_which_all_diverged_stay_in_the_trajectory():
    config = replace(SMALL, rate=10.0, rate_z=10.0)
    compared = trial(config, Context((2,)), BlockSetting("exp", "linear")).sel(arm="base")
    assert compared.kind.values.tolist() == list(TOKEN_KINDS)
    assert compared.seed.values.tolist() == [2]
    np.testing.assert_array_equal(compared.loss.isnull().all(("step", "seed")), [False, True])


@given(columns=st.integers(1, 6), cosine=st.floats(0, 1))
def test_overlapping_embeddings_have_one_cosine(columns, cosine):
    U = overlapping(columns + 2, columns, cosine)
    expected = (1 - cosine) * torch.eye(columns, dtype=torch.float64) + cosine
    torch.testing.assert_close(U.T @ U, expected, rtol=0, atol=1e-14)


def by_hand(config, setting, arm):
    """Return the logits z and the weights v after SGD that is written out: one block, both kinds of tokens, seed 0."""
    prepared = prepare(config, Context((0,)), setting)
    arms, count = list(setting.arms(config)), len(prepared.x)
    models = slice(arms.index(arm) * count, (arms.index(arm) + 1) * count)
    block = prepare(config, Context((0,)), BlockSetting(setting.attention, setting.activation, "decay")).block
    rates = setting.arms(config)[arm]
    with torch.no_grad():
        for parameter, start in ((block.w, prepared.block.w), (block.z, prepared.block.z)):
            parameter.copy_(start[models])
    for _ in range(config.steps):
        h = block(prepared.x)
        loss = torch.nn.functional.cross_entropy(h.mT, torch.arange(config.classes).expand(count, -1), reduction="none")
        gradients = torch.autograd.grad(loss.mean(-1).sum(), (block.w, block.z))
        with torch.no_grad():
            for parameter, gradient, rate in zip(
                (block.w, block.z), gradients, (rates.rate, rates.rate_z), strict=True
            ):
                parameter.sub_(rate * gradient)
    return block.z.detach()[:, 0].numpy(), block.v.detach().numpy()


PLAIN_ARMS = [(setting, arm) for setting, arms in TRAINED_ARMS.items() for arm in arms if setting.breaker == "none"]


@pytest.mark.parametrize(("setting", "arm"), PLAIN_ARMS)
def test_each_arm_trains_as_by_hand(setting, arm):
    compared = trial(SMALL, Context((0, 1)), setting).sel(arm=arm, seed=0)
    z, _ = by_hand(SMALL, setting, arm)
    law = z**2 if setting.attention == "linear" else z
    np.testing.assert_allclose(compared.law.transpose("kind", "token"), law, rtol=0, atol=1e-14)


def test_from_zero_the_logits_are_half_the_squares_of_the_weights():
    """Along the flow z = ½ Σ_k v_k² without a constant; SGD at a rate of 0.001 is near it."""
    config = replace(SMALL, rate=1e-3, rate_z=1e-3, steps=2000)
    z, v = by_hand(config, BlockSetting("exp", "gelu"), "zero")
    assert abs(z).max() > 1e-3
    np.testing.assert_allclose(z, (v**2).sum(-1) / 2, rtol=2e-3)


def test_unequal_rates_enter_as_their_ratio():
    """Attention that learns four times as fast moves four times as far for the same weights: z = (κ/2) Σ_k v_k² + c."""
    config = replace(SMALL, rate=4e-3, rate_z=4e-3, steps=2000)
    (z0, v0), (z, v) = (
        by_hand(replace(config, steps=steps), BlockSetting("exp", "gelu"), "unequal") for steps in (0, 2000)
    )
    np.testing.assert_allclose(z - z0, 2 * ((v**2).sum(-1) - (v0**2).sum(-1)), rtol=5e-3, atol=1e-6)


def test_the_long_training_continues_the_arm_of_small_rates():
    config = replace(SMALL, long_steps=SMALL.steps)
    compared = trial(config, Context((0, 1)), BlockSetting("exp", "linear")).error.sel(arm="small", correction="none")
    long = long_trial(config, Context((0, 1))).rename(long_step="step")
    np.testing.assert_allclose(long, compared.sel(step=long.step).transpose(*long.dims), rtol=1e-6, atol=1e-12)


def test_a_diverged_seed_of_the_long_training_is_nan():
    config = replace(SMALL, small_rate=10.0, long_steps=40)
    error = long_trial(config, Context((0, 1, 2)))
    np.testing.assert_array_equal(error.sel(kind="random").isnull().all("long_step"), [False, False, True])


def test_an_arm_in_which_every_seed_diverged_is_nan_and_does_not_stop_the_others():
    compared = trial(replace(SMALL, small_rate=1e6), Context((0,)), BlockSetting("exp", "linear"))
    assert compared.error.sel(arm="small").isnull().all()
    assert not compared.error.sel(arm="base").isnull().any()
