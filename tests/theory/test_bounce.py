"""The bounce of entropy against 40-digit solutions and brute search, and the condition for it against both."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory import growth
from joma.theory.bounce import entropy_bounce, final_trend

FIG4 = [1.265432, 1.396091, 1.922268, 2.366884, 2.470280, 2.488770, 2.896919, 2.902236, 3.304665, 3.689334]
TWENTIETHS = st.integers(2, 60).map(lambda n: n / 20)


def entropy(v):
    """Return the entropy of softmax(v²/2) in mpmath's working precision."""
    powers = [mp.exp(x**2 / 2) for x in v]
    total = sum(powers)
    return -sum(e / total * mp.log(e / total) for e in powers)


def test_the_checked_figures():
    bounce = entropy_bounce([1.0, 1.5, 2.0, 2.5, 3.0])
    assert bounce.start == pytest.approx(1.609, abs=5e-4)
    assert bounce.least == pytest.approx(0.4278, abs=5e-5)
    assert bounce.time == pytest.approx(0.661, abs=5e-4)
    assert bounce.limit == pytest.approx(0.862, abs=5e-4)
    assert bounce.depth == pytest.approx(bounce.limit - bounce.least, abs=1e-15)


def test_figure_4():
    bounce = entropy_bounce(FIG4, temperature=3.0)
    assert bounce.start == pytest.approx(2.3026, abs=5e-5)
    assert bounce.least == pytest.approx(0.9407, abs=5e-5)
    assert bounce.time == pytest.approx(13.4, abs=0.05)
    assert bounce.limit == pytest.approx(1.6216, abs=5e-5)


def late_solution(mu, v0, t):
    """Return v(t) near μ in mpmath's working precision: t = exp(−μ²/2) drop + a remainder that hardly depends on it."""
    rest, drop = mp.exp(-(mu**2) / 2), mp.mpf(t)
    for _ in range(8):
        v = mu - (mu - v0) * mp.exp(-drop)
        remainder = mp.quad(lambda s: (mp.exp(-(s**2) / 2) - rest) / (mu - s), [v0, v], method="gauss-legendre")
        drop = (t - remainder) / rest
    return v


def test_a_bounce_too_shallow_for_doubles_is_there_all_the_same():
    """μ = (0.2, 0.3, 0.5) seems not to bounce; 40 digits show that it does, by 4e-13."""
    bounce = entropy_bounce([0.2, 0.3, 0.5])
    with mp.workdps(40):
        mu, v0 = [mp.mpf(x) for x in (0.2, 0.3, 0.5)], mp.mpf(0.05)
        times = [float(bounce.time) + shift for shift in (-0.01, 0, 0.01)]
        depth = [entropy(mu) - entropy([late_solution(m, v0, t) for m in mu]) for t in times]
        assert depth[0] < depth[1] > depth[2]
        assert float(bounce.depth) == pytest.approx(float(depth[1]), rel=1e-9)
    assert bounce.depth == pytest.approx(4.4e-13, rel=0.01)
    assert bounce.time == pytest.approx(18.51, abs=0.005)


@settings(max_examples=40)
@example(pairs=[(1.5, 0.0), (0.4375, 0.0), (-2.375, 1.0), (-0.75, -1.0), (-0.75, -2.0)], temperature=3.5)  # turns twice
@given(
    pairs=st.lists(st.tuples(st.floats(-2.5, 2.5), st.floats(-2.5, 2.5)), min_size=2, max_size=6),
    temperature=st.one_of(st.none(), st.floats(1.5, 4)),
)
def test_no_time_has_less_entropy(pairs, temperature):
    mu, v0 = np.array(pairs).T
    bounce = entropy_bounce(mu, v0, temperature=temperature)
    t = np.append(np.geomspace(1e-4, 300, 600), 0.0 if np.isinf(bounce.time) else bounce.time)
    if temperature is None:
        entropy = growth.attention_entropy(growth.nonlinear(mu, t, v0))
    else:
        entropy = growth.attention_entropy(growth.softmax_nonlinear(mu, t, v0, temperature), temperature)
    assert bounce.least <= min(entropy.min(), bounce.start, bounce.limit) + 1e-13
    if np.isinf(bounce.time):
        assert bounce.least == bounce.limit
        assert bounce.depth == 0
    else:
        assert entropy[-1] == pytest.approx(bounce.least, abs=1e-12)
        assert bounce.depth > 0


@settings(max_examples=40)
@given(mu=st.lists(TWENTIETHS, min_size=2, max_size=8))
def test_in_the_papers_setting_all_but_equal_components_bounce(mu):
    assume(len(set(mu)) > 1)
    bounce = entropy_bounce(mu)
    assert final_trend(mu) == 1
    assert bounce.depth > 0
    assert 0 < bounce.time < np.inf
    assert bounce.least < bounce.start


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 8).map(lambda n: n / 4), min_size=2, max_size=5, unique=True),
    data=st.data(),
)
def test_the_final_trend_is_that_of_entropy_in_many_digits(sizes, data):
    count = len(sizes)
    mu = np.array(sizes) * data.draw(st.lists(st.sampled_from([-1, 1]), min_size=count, max_size=count))
    v0 = np.array(
        data.draw(st.lists(st.integers(-22, 22).map(lambda n: n / 10 + 0.03), min_size=count, max_size=count))
    )
    rate = np.sort(np.exp(mu**2 / 2))
    t = 60 / (rate[1] - rate[0]) * np.array([1.0, 1.05])
    log_gap = growth.nonlinear_log_gap(mu, t, v0)
    with mp.workdps(int(30 + 1.1 * rate[0] * t[-1])):
        first, second = (
            entropy(
                [
                    m - s * abs(m) * mp.exp(y)
                    for m, s, y in zip(map(mp.mpf, mu), np.sign(mu - v0).tolist(), row, strict=True)
                ]
            )
            for row in log_gap.tolist()
        )
        assert final_trend(mu, v0) == float(mp.sign(second - first))


@pytest.mark.parametrize(
    ("mu", "v0", "trend"),
    [
        ([1.0, 2.0], [0.05, 0.05], 1),
        ([1.0, 2.0], [1.2, 0.05], -1),  # the last to move comes from beyond
        ([-1.0, 2.0], [0.05, 0.05], 1),
        ([1.0, 2.0], [1.0, 0.05], -1),  # the smaller rests: the larger decides, and draws attention to itself
        ([1.0, 2.0], [1.0, 2.5], 1),
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([0.0, 2.0], [0.5, 0.05], -1),  # v² at rate 2, before exp(2)
        ([0.0, 0.5, 2.0], [0.5, 0.05, 0.05], 1),  # exp(1/8), before 2
        ([1.0, -1.0], [0.05, 0.05], 1),  # the limit is uniform
        ([1.0, 1.0], [0.05, 0.05], 0),
        ([0.0, 0.0], [0.3, -0.3], 0),
        ([0.0, 0.0], [0.3, 0.2], 1),
        ([1.0, 1.0, 2.0], [0.9, 1.5, 0.05], -1),  # ties add up: 0.1 from below, 0.5 from beyond
        ([1.0, 1.0, 2.0], [0.05, 1.01, 0.05], 1),
    ],
)
def test_final_trends_by_hand(mu, v0, trend):
    assert final_trend(mu, v0) == trend
    late = growth.attention_entropy(growth.nonlinear(mu, [8.0, 10.0], v0))
    if abs(late[1] - late[0]) > 1e-14:
        assert np.sign(late[1] - late[0]) == trend


def test_the_measured_rule_for_a_bounce_that_shows():
    rng = np.random.default_rng(7)
    regained, mean = [], []
    for _ in range(200):
        low, high = np.sort(rng.uniform(0.1, 3.7, 2))
        mu = rng.uniform(low, high, rng.integers(2, 12))
        bounce = entropy_bounce(mu)
        regained.append(bounce.depth / (bounce.start - bounce.least))
        mean.append(mu.mean())
    for share, threshold, right in ((0.001, 0.69, 0.97), (0.01, 0.88, 0.96), (0.1, 1.27, 0.93)):
        assert ((np.array(regained) > share) == (np.array(mean) > threshold)).mean() >= right


def test_starts_and_limits_can_be_the_least():
    rising = entropy_bounce([1.0, 1.1], [0.0, 3.0])
    assert rising.time == 0
    assert rising.least == rising.start
    falling = entropy_bounce([0.2, 0.3, 0.5], 0.25)
    assert falling.time == np.inf
    assert falling.least == falling.limit
    constant = entropy_bounce([1.0, 1.0, 1.0])
    assert constant.depth == 0
    assert constant.start == constant.least == constant.limit
    resting = entropy_bounce([1.0, 2.0], [1.0, 2.0])
    assert resting.depth == 0


def test_rows_are_independent():
    mu = np.array([[1.0, 1.5, 3.0], [0.2, 0.3, 0.5]])
    both = entropy_bounce(mu, [[0.05], [0.1]], temperature=2.5)
    for row, v0 in enumerate((0.05, 0.1)):
        single = entropy_bounce(mu[row], v0, temperature=2.5)
        assert [field[row] for field in both] == [float(field) for field in single]
    np.testing.assert_array_equal(final_trend(mu, [[0.05], [0.25]]), [1, -1])
    assert both.time.shape == (2,)
    assert entropy_bounce(mu[0]).time.shape == ()


@pytest.mark.parametrize(
    ("call", "argument", "complaint"),
    [
        (lambda: entropy_bounce(1.0), "mu", "1-dimensional"),
        (lambda: entropy_bounce([1.0, np.nan]), "mu", "NaN"),
        (lambda: entropy_bounce([1.0, 11.0]), "mu", "in [-10, 10]"),
        (lambda: entropy_bounce([1.0, 2.0], temperature=0.0), "temperature", "above 0"),
        (lambda: final_trend([1.0, 2.0], [1.0, 2.0, 3.0]), "mu", "broadcast"),
        (lambda: final_trend([1.0, 2.0], temperature=-1.0), "temperature", "above 0"),
    ],
)
def test_bad_input_names_the_argument(call, argument, complaint):
    with pytest.raises(InputError) as error:
        call()
    assert f"`{argument}`" in str(error.value)
    assert complaint in str(error.value)


@settings(max_examples=25)
@given(
    mu=st.lists(st.floats(0.3, 3.0), min_size=2, max_size=6),
    v0=st.floats(0.01, 0.25),
    temperature=st.floats(1.0, 4.0),
)
def test_the_flow_that_is_not_normalised_bounces_at_any_temperature_when_its_weights_do(mu, v0, temperature):
    bounce = entropy_bounce(mu, v0, temperature=temperature, normalised=False)
    late = np.geomspace(1e-3, 300, 400)
    times = late if np.isinf(bounce.time) else np.append(late, bounce.time)
    entropy = growth.attention_entropy(growth.nonlinear(mu, times, v0, temperature=temperature), temperature)
    assert bounce.least <= entropy.min() + 1e-12
    if np.isfinite(bounce.time):
        assert entropy[-1] == pytest.approx(bounce.least, abs=1e-11)
    assert entropy_bounce(mu, v0, normalised=False) == entropy_bounce(mu, v0)
