"""The block with the theorems' drives: first order in the rate, both closed forms, and the blow-up."""

from dataclasses import replace

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies.theorems.driven_block import LINEAR_SHARE, DriveConfig, distance, train
from joma.study import Context
from joma.theory import flows

SMALL = DriveConfig(until=1.5, components=3)
PAIRS = (("trained", "predicted"), ("linear_trained", "linear_predicted"))


@pytest.fixture(scope="module")
def trajectory():
    return train(SMALL, Context((0, 1)))


@pytest.mark.parametrize("pair", PAIRS)
def test_sgd_is_first_order_in_the_rate(trajectory, pair):
    finer = train(replace(SMALL, rate=SMALL.rate / 2), Context((0, 1)))
    times = trajectory.time.values[::40]
    coarse_gap, fine_gap = (
        abs(result[pair[0]] - result[pair[1]]).sel(time=times, method="nearest").max() for result in (trajectory, finer)
    )
    assert float(coarse_gap / fine_gap) == pytest.approx(2, rel=0.1)


def test_both_closed_forms_are_the_integrated_flows(trajectory):
    seed = trajectory.isel(seed=1)
    mu, times = seed.mu.values, seed.time.values[1:]
    np.testing.assert_allclose(seed.predicted[1:], flows.nonlinear(mu, times, SMALL.v0).states, atol=1e-8)
    linear = flows.linear(mu, seed.linear_time.values[1:], SMALL.v0).states
    np.testing.assert_allclose(seed.linear_predicted[1:], linear, atol=1e-8)


def test_the_constant_drive_is_followed_until_just_before_the_blow_up(trajectory):
    np.testing.assert_allclose(trajectory.linear_time[:, -1] / trajectory.blow_up, LINEAR_SHARE)
    integrated = flows.linear(trajectory.mu.values[0], 10.0, SMALL.v0).blow_up
    assert float(trajectory.blow_up[0]) == pytest.approx(integrated, rel=1e-9)
    assert float(trajectory.linear_line_entropy[:, -1].max()) < 1e-3  # the winner has taken all


def test_distance_is_the_largest_over_tokens_and_times(trajectory):
    shifted = trajectory.assign(trained=trajectory.predicted.copy())
    shifted["trained"][0, 5, 2] += 0.3 * (1 + abs(float(shifted.predicted[0, 5, 2])))
    np.testing.assert_allclose(distance(shifted, *PAIRS[0]), [0.3, 0.0])


def test_a_bad_config_is_refused_by_name():
    with pytest.raises(InputError, match="`components` must"):
        train(replace(SMALL, components=1), Context((0,)))
