"""Theorems 2 and 4 against mpmath, matrix exponentials and integrators that share nothing with them."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from scipy.special import erf

from joma.arguments import InputError
from joma.theory import growth, inversion

ACCURACY = 1e-12
SALIENCES = [0.9, 0.7, 0.5, -0.3, 0.1]
FIG4 = [1.265432, 1.396091, 1.922268, 2.366884, 2.470280, 2.488770, 2.896919, 2.902236, 3.304665, 3.689334]

weights = st.one_of(st.floats(-6, 6), st.sampled_from([-6.0, -1.0, 0.0, 1e-9, 0.05, 1.0, 6.0]))


# --- Theorem 2 -------------------------------------------------------------------------------------------------------


def time_to(v, delta, v0, *, kappa=1.0, drift=1.0):
    """Return the time at which `linear` reaches v, to 40 digits; `drift` is D/Δ."""
    with mp.workdps(40):
        root = mp.sqrt(mp.mpf(kappa) / 2)
        travelled = mp.erf(root * v) - mp.erf(root * v0)
        return mp.sqrt(mp.pi / 2 / kappa) * travelled / (mp.mpf(delta) * drift)


@settings(max_examples=300)
@given(delta=weights, v0=weights, step=st.floats(0, 13))
@example(delta=-1.0, v0=6.0, step=12.0)
@example(delta=6.0, v0=6.0, step=0.9)
@example(delta=0.1, v0=-6.0, step=12.9)
def test_linear_agrees_with_mpmath(delta, v0, step):
    assume(abs(delta) > 1e-200)
    v = v0 + np.sign(delta) * step
    assume(abs(v) <= 6.9)  # beyond, rounding t alone can carry v to infinity
    t = float(time_to(v, delta, v0))
    speed = abs(delta) * np.exp(v**2 / 2)
    assert abs(growth.linear(delta, t, v0) - v) <= ACCURACY * (1 + speed * t)


@settings(max_examples=150)
@given(
    delta=st.floats(0.01, 6),
    v0=st.floats(-4, 4),
    z0=st.floats(-6, 6),
    kappa=st.floats(0.1, 3),
    rate_w=st.floats(0.01, 10),
    step=st.floats(0, 6),
    sign=st.sampled_from([-1, 1]),
)
def test_linear_from_any_logits_agrees_with_mpmath(*, delta, v0, z0, kappa, rate_w, step, sign):
    v = v0 + sign * step
    assume(abs(v) * np.sqrt(kappa) <= 6.9)
    with mp.workdps(40):
        drift = mp.mpf(rate_w) * mp.exp(mp.mpf(z0) - mp.mpf(kappa) * mp.mpf(v0) ** 2 / 2)
    t = float(time_to(v, sign * delta, v0, kappa=kappa, drift=drift))
    speed = delta * float(drift) * np.exp(kappa * v**2 / 2)
    got = growth.linear(sign * delta, t, v0, z0=z0, kappa=kappa, rate_w=rate_w)
    assert abs(got - v) <= ACCURACY * (1 + speed * t)


@settings(max_examples=25)
@given(
    delta=st.floats(-1, 1), v0=st.floats(-2, 2), z0=st.floats(-2, 2), rate_w=st.floats(0.2, 2), rate_z=st.floats(0.2, 2)
)
def test_linear_is_the_blocks_own_flow(delta, v0, z0, rate_w, rate_z):
    """The coupled flow of weights and logits, integrated without the conserved quantity."""
    end = float(min(0.8 * growth.blow_up_time(delta, v0, z0=z0, kappa=rate_z / rate_w, rate_w=rate_w), 3.0))

    def flow(_, state):
        pull = delta * np.exp(state[1])
        return [rate_w * pull, rate_z * pull * state[0]]

    solution = solve_ivp(flow, (0, end), [v0, z0], method="DOP853", rtol=1e-12, atol=1e-12)
    got = growth.linear(delta, end, v0, z0=z0, kappa=rate_z / rate_w, rate_w=rate_w)
    np.testing.assert_allclose(got, solution.y[0, -1], rtol=1e-8, atol=1e-9)


def test_default_logits_are_those_at_which_the_drift_is_the_salience():
    t, v0 = np.linspace(0, 0.4, 5), np.array([-1.0, 0.3, 2.0])
    explicit = growth.linear(0.2, t, v0, z0=0.7 * v0**2 / 2, kappa=0.7)
    np.testing.assert_allclose(growth.linear(0.2, t, v0, kappa=0.7), explicit, rtol=1e-14)


@settings(max_examples=100)
@given(delta=weights, v0=weights)
def test_blow_up_time_agrees_with_mpmath_and_parts_finite_from_infinite(delta, v0):
    assume(abs(delta) > 1e-200)
    blow_up = growth.blow_up_time(delta, v0)
    expected = time_to(mp.sign(delta) * mp.inf, delta, v0)
    assert abs(blow_up / float(expected) - 1) < 1e-13
    before, at, after = growth.linear(delta, [np.nextafter(blow_up, 0), blow_up, 2 * blow_up], v0)
    assert at == after == np.sign(delta) * np.inf
    assert abs(before) < 11


def test_linear_reproduces_the_checked_figures():
    limit = growth.linear_limit(SALIENCES)
    assert limit[0] == np.inf
    np.testing.assert_allclose(limit[1:], [1.22064, 0.76471, -0.43073, 0.13971], atol=5e-6)
    nearly = growth.linear(SALIENCES, 0.99 * growth.blow_up_time(SALIENCES).min())
    np.testing.assert_allclose(nearly, [2.57583, 1.20036, 0.75542, -0.42615, 0.13830], atol=5e-6)


@settings(max_examples=100)
@given(
    pairs=st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6),
    kappa=st.floats(0.2, 3),
    z0=st.one_of(st.none(), st.floats(-2, 2)),
)
def test_losers_stand_where_the_winners_time_brings_them(pairs, kappa, z0):
    delta, v0 = np.array(pairs).T
    assume(np.abs(delta).max() > 1e-3)
    blow_up = growth.blow_up_time(delta, v0, z0=z0, kappa=kappa)
    limit = growth.linear_limit(delta, v0, z0=z0, kappa=kappa)
    winner = blow_up == blow_up.min()
    np.testing.assert_array_equal(limit[winner], np.sign(delta[winner]) * np.inf)
    drift = delta if z0 is None else delta * np.exp(z0 - kappa * v0**2 / 2)
    covered = np.sqrt(np.pi / 2 / kappa) * (erf(np.sqrt(kappa / 2) * limit) - erf(np.sqrt(kappa / 2) * v0))
    np.testing.assert_allclose(covered[~winner], (drift * blow_up.min())[~winner], rtol=1e-12, atol=1e-14)


def test_limits_without_growth_and_with_ties():
    np.testing.assert_array_equal(growth.linear_limit([0.0, 0.0], [0.1, -0.2]), [0.1, -0.2])
    np.testing.assert_array_equal(growth.linear_limit([1.0, -1.0, 0.0], [0.0, 0.0, 0.5]), [np.inf, -np.inf, 0.5])
    np.testing.assert_array_equal(growth.linear_limit([[1.0], [0.0]]), [[np.inf], [0.0]])
    assert growth.linear_limit(-2.0) == -np.inf


def test_the_closed_form_is_erf_of_v_over_root_two_and_not_of_v_over_two():
    """The slides say that erf(v_l/2)/Δ_l is one number for all l; an integrator says that erf(v_l/√2)/Δ_l is."""
    delta = np.array([0.9, 0.7, 0.5, 0.1])
    end = 0.9 * np.sqrt(np.pi / 2) / 0.9
    v = solve_ivp(lambda _, v: delta * np.exp(v**2 / 2), (0, end), np.zeros(4), rtol=1e-12, atol=1e-12).y[:, -1]
    as_derived, as_printed = erf(v / np.sqrt(2)) / delta, erf(v / 2) / delta
    np.testing.assert_allclose(as_derived, np.sqrt(2 / np.pi) * end, rtol=1e-9)
    assert as_printed.max() / as_printed.min() - 1 > 0.04
    # Nor does v = 2 erf⁻¹(c t) solve the equation for any c: d erf(v/2)/dt = Δ exp(v²/4)/√π is no constant.
    np.testing.assert_allclose(growth.linear(delta, end), v, rtol=1e-9)


@settings(max_examples=60)
@given(delta=st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_from_zero_attention_only_gets_sparser(delta):
    assume(np.abs(delta).max() > 1e-3)
    blow_up = growth.blow_up_time(delta).min()
    entropy = growth.attention_entropy(growth.linear(delta, np.linspace(0, 1, 50) * blow_up))
    assert (np.diff(entropy) <= 1e-14).all()
    ties = (np.abs(delta) == np.abs(delta).max()).sum()
    assert entropy[-1] == pytest.approx(np.log(ties), abs=1e-14)


def test_from_other_starts_entropy_need_not_fall():
    blow_up = growth.blow_up_time([1.0, 0.1], [0.0, 1.0]).min()
    entropy = growth.attention_entropy(growth.linear([1.0, 0.1], np.linspace(0, 1, 50) * blow_up, [0.0, 1.0]))
    assert np.diff(entropy).max() > 1e-3


# --- linear attention ------------------------------------------------------------------------------------------------

rates = st.floats(0.05, 5)


@settings(max_examples=100)
@given(delta=st.floats(-2, 2), t=st.floats(0, 3), v0=st.floats(-3, 3), z0=st.floats(-3, 3), rate_w=rates, rate_z=rates)
def test_linear_attention_is_a_matrix_exponential(*, delta, t, v0, z0, rate_w, rate_z):
    v, z = expm(delta * t * np.array([[0, rate_w], [rate_z, 0]])) @ [v0, z0]
    scale = 1e-12 * np.exp(np.sqrt(rate_w * rate_z) * abs(delta) * t) * (1 + abs(v0) + abs(z0)) * 10
    assert abs(growth.linear_attention(delta, t, v0, z0, rate_w=rate_w, rate_z=rate_z) - v) <= scale
    assert abs(growth.linear_attention(delta, t, z0, v0, rate_w=rate_z, rate_z=rate_w) - z) <= scale


def test_linear_attention_decays_and_overflows_without_a_warning():
    with np.errstate(all="raise"):
        v = growth.linear_attention([1.0, -1.0, 2.0, 1.0], [0.0, 30.0, 1e4], [-1.0, 1.0, 0.0, -2.0], [1, 1, 0, 1])
    np.testing.assert_allclose(
        v[1], [-np.exp(-30.0), np.exp(-30.0), 0.0, -2 * np.exp(-30.0) - np.sinh(30.0)], rtol=1e-14
    )
    np.testing.assert_array_equal(v[2], [0.0, 0.0, 0.0, -np.inf])


# --- Theorem 4 -------------------------------------------------------------------------------------------------------


def time_to_gap(mu, v0, drop):
    """Return the time in which `nonlinear` shrinks the gap by exp(−drop), and v then, by the stable quadrature."""
    with mp.workdps(60):
        mu, v0 = mp.mpf(mu), mp.mpf(v0)
        rest = mp.exp(-(mu**2) / 2)
        v = mu - (mu - v0) * mp.exp(-mp.mpf(drop))
        pieces = int(4 * abs(v - v0)) + 1
        ends = [v0 + (v - v0) * k / pieces for k in range(pieces + 1)]
        integral = mp.quad(
            lambda s: (mp.exp(-(s**2) / 2) - rest) / (mu - s), ends, method="gauss-legendre", maxdegree=4
        )
        return rest * drop + integral, v


@settings(max_examples=300)
@given(mu=weights, v0=weights, drop=st.one_of(st.floats(1e-9, 3), st.floats(1e-9, 60)))
@example(mu=6.0, v0=-6.0, drop=0.001)
@example(mu=6.0, v0=-6.0, drop=0.7)
@example(mu=-6.0, v0=6.0, drop=50.0)
@example(mu=0.0, v0=-6.0, drop=4.0)
@example(mu=0.0, v0=5e-324, drop=1.0)
@example(mu=1.0, v0=1.0 + 2**-52, drop=1.0)
def test_nonlinear_agrees_with_mpmath(mu, v0, drop):
    assume(mu != v0)
    exact, v = time_to_gap(mu, v0, drop)
    t, v = float(exact), float(v)
    growing = np.exp(v**2 / 2)
    assert abs(growth.nonlinear(mu, t, v0) - v) <= ACCURACY * (1 + abs(mu - v) * growing * t)
    if mu != 0:
        with mp.workdps(30):
            log_gap = mp.log(abs(1 - mp.mpf(v0) / mp.mpf(mu))) - drop
        assert abs(growth.nonlinear_log_gap(mu, t, v0) - float(log_gap)) <= ACCURACY * (1 + growing * t)


@settings(max_examples=40)
@given(mu=st.floats(-3, 3), v0=st.floats(-3, 3), temperature=st.floats(0.7, 6), end=st.floats(0.01, 3))
def test_nonlinear_at_any_temperature_agrees_with_an_integrator(mu, v0, temperature, end):
    flow = solve_ivp(
        lambda _, v: (mu - v) * np.exp(v**2 / temperature), (0, end), [v0], method="LSODA", rtol=1e-10, atol=1e-12
    )
    v = growth.nonlinear([mu], [0.0, end], v0, temperature=temperature)
    assert v[0, 0] == v0
    assert v[1, 0] == pytest.approx(flow.y[0, -1], abs=1e-6)
    assert growth.nonlinear(mu, end, v0, temperature=2.0) == growth.nonlinear(mu, end, v0)


@settings(max_examples=60)
@given(mu=st.floats(-6, 6), v0=st.floats(-6, 6), late=st.floats(1, 1e9))
def test_past_convergence_the_log_gap_goes_on_as_mpmath_says(mu, v0, late):
    assume(abs(mu) > 1e-3 and abs(mu - v0) > 1e-6)
    drop = 60.0 + late
    with mp.workdps(60):
        settled, _ = time_to_gap(mu, v0, 100.0)
        t = float(settled + mp.exp(-(mp.mpf(mu) ** 2) / 2) * (mp.mpf(drop) - 100))
        first = float(mp.log(abs(1 - mp.mpf(v0) / mp.mpf(mu))))
    assert growth.nonlinear(mu, t, v0) == pytest.approx(mu, abs=1e-15)
    assert abs(growth.nonlinear_log_gap(mu, t, v0) - (first - drop)) <= ACCURACY * (1 + np.exp(mu**2 / 2) * t)


def test_at_zero_the_solution_is_an_exponential_integral():
    """μ = 0: t = ½ [E₁(v²/2) − E₁(v0²/2)]."""
    for v0, v in [(3.0, 1.0), (-2.0, -1e-3), (0.05, 1e-30)]:
        t = float((mp.e1(mp.mpf(v) ** 2 / 2) - mp.e1(mp.mpf(v0) ** 2 / 2)) / 2)
        np.testing.assert_allclose(growth.nonlinear(0.0, t, v0), v, rtol=1e-12 * (1 + t))


def test_starts_rest_points_and_ends_are_exact():
    mu, v0 = np.meshgrid([-37.0, -6.0, -0.3, 0.0, 1.0, 6.0, 37.0], [-37.0, -6.0, 0.0, 0.05, 1.0, 6.0, 37.0])
    with np.errstate(all="raise"):
        v = growth.nonlinear(mu, [0.0, 1e-300, 1e3, 1e300], v0)
        rest = growth.nonlinear([-6.0, 0.0, 2.5], [0.0, 0.7, 1e9], [-6.0, 0.0, 2.5])
        log_gap = growth.nonlinear_log_gap([1.0, 37.0], [0.0, 1e300], [1.0, 0.05])
    np.testing.assert_array_equal(v[0], v0)
    np.testing.assert_array_equal(v[2:], [mu, mu])
    np.testing.assert_array_equal(rest, [[-6.0, 0.0, 2.5]] * 3)
    np.testing.assert_allclose(log_gap, [[-np.inf, np.log1p(-0.05 / 37)], [-np.inf, -np.inf]], rtol=1e-12)


def test_neither_blocks_nor_the_order_of_times_matter(monkeypatch):
    rng = np.random.default_rng(0)
    mu, v0, t = rng.uniform(-3, 3, 40), rng.uniform(-3, 3, 40), rng.uniform(0, 3, 30)
    once = growth.nonlinear(mu, t, v0)
    normalised = growth.softmax_nonlinear(mu, t, v0)
    monkeypatch.setattr(inversion, "_BLOCK", 64)
    np.testing.assert_allclose(growth.nonlinear(mu, t, v0), once, rtol=0, atol=1e-13)
    np.testing.assert_allclose(growth.softmax_nonlinear(mu, t, v0), normalised, rtol=0, atol=1e-13)
    np.testing.assert_allclose([growth.nonlinear(mu, s, v0) for s in t], once, rtol=0, atol=1e-13)


def test_convergence_rates_reproduce_the_checked_figures():
    log_gap = growth.nonlinear_log_gap([1.5, 1.0], [0.5, 1.0, 2.0, 4.0, 20.0])
    np.testing.assert_allclose(log_gap[:, 0] / log_gap[:, 1], [1.013, 1.151, 1.487, 1.714, 1.841], atol=5e-4)
    limit = growth.convergence_ratio(1.5, 1.0)
    assert limit == pytest.approx(1.868, abs=5e-4)
    late = growth.nonlinear_log_gap([1.5, 1.0], [1e3, 2e3, 4e3])
    errors = limit - late[:, 0] / late[:, 1]
    np.testing.assert_allclose(errors[:-1] / errors[1:], 2, rtol=2e-3)  # at the rate 1/t


def test_entropy_reproduces_the_checked_figures():
    mu = [1.0, 1.5, 2.0, 2.5, 3.0]
    t = np.linspace(0, 2, 2001)
    entropy = growth.attention_entropy(growth.nonlinear(mu, t))
    assert entropy[0] == pytest.approx(1.609, abs=5e-4)
    assert entropy.min() == pytest.approx(0.4278, abs=5e-5)
    assert t[entropy.argmin()] == pytest.approx(0.661, abs=1e-3)
    assert growth.attention_entropy(mu) == pytest.approx(0.862, abs=5e-4)


# --- normalised attention --------------------------------------------------------------------------------------------


hundredths = st.integers(-250, 250).map(lambda n: n / 100)


def softmax_flow(mu, temperature):
    def flow(_, v):
        attention = np.exp((v**2 - (v**2).max()) / temperature)
        return (mu - v) * attention / attention.sum()

    return flow


@settings(max_examples=40)
@example(pairs=[(0.0, 0.0), (0.73, -0.01), (2.49, 1.6)], temperature=1.328125, end=50.0)
@given(
    pairs=st.lists(st.tuples(hundredths, hundredths), min_size=1, max_size=6),
    temperature=st.floats(1, 5),
    end=st.floats(0.1, 50),
)
def test_softmax_nonlinear_agrees_with_an_integrator(pairs, temperature, end):
    """LSODA, as DOP853 is off by 1e-10 near the centres, where its steps are as long as its stability allows."""
    mu, v0 = np.array(pairs).T
    flow = softmax_flow(mu, temperature)
    solution = solve_ivp(flow, (0, end), v0, method="LSODA", rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(
        growth.softmax_nonlinear(mu, end, v0, temperature), solution.y[:, -1], rtol=0, atol=1e-10
    )


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(weights, weights), min_size=1, max_size=8),
    t=st.floats(0, 8),
    temperature=st.floats(0.75, 5),
)
def test_the_logarithms_of_the_gaps_fall_by_the_time_in_sum(pairs, t, temperature):
    mu, v0 = np.array(pairs).T
    assume((np.abs(mu - v0) > 0.05).all())
    gap = np.abs(mu - growth.softmax_nonlinear(mu, t, v0, temperature))
    assume((gap > 1e-3).all())  # nearer, v itself no longer holds the digits
    assert np.log(np.abs(mu - v0) / gap).sum() == pytest.approx(t, abs=1e-10)


def test_softmax_nonlinear_reproduces_figure_4():
    t = np.linspace(0, 100, 1001)
    entropy = growth.attention_entropy(growth.softmax_nonlinear(FIG4, t, temperature=3.0), 3.0)
    assert entropy.min() == pytest.approx(0.9407, abs=5e-5)
    assert t[entropy.argmin()] == pytest.approx(13.4, abs=0.05)
    assert entropy[-1] == pytest.approx(1.5491, abs=5e-5)
    assert growth.attention_entropy(FIG4, 3.0) == pytest.approx(1.6216, abs=5e-5)
    ends = growth.softmax_nonlinear(FIG4, [1e4, 1e12], temperature=3.0)
    np.testing.assert_allclose(growth.attention_entropy(ends, 3.0), 1.6216, atol=5e-5)
    np.testing.assert_allclose(ends[1], FIG4, rtol=1e-15)


def test_eulers_steps_reproduce_the_authors_figure_4():
    flow, v = softmax_flow(np.array(FIG4), 3.0), np.full(10, 0.05)
    path = [v]
    for _ in range(5000):
        v = v + 0.02 * flow(0, v)
        path.append(v)
    entropy = growth.attention_entropy(path, 3.0)
    assert entropy[0] == pytest.approx(2.3026, abs=5e-5)
    assert entropy.argmin() == 669
    assert entropy.min() == pytest.approx(0.9416, abs=5e-5)
    assert entropy[-1] == pytest.approx(1.5493, abs=5e-5)


@pytest.mark.parametrize("mu", [2.0, 6.0, 10.0])
@pytest.mark.parametrize("count", [1, 5])
def test_equal_tokens_share_attention_equally(mu, count):
    """v = μ − (μ − v0) exp(−t/count), also where the clock τ moves by less than its own rounding."""
    t = np.linspace(0, 40, 81)
    v = growth.softmax_nonlinear(np.full(count, mu), t, -1.0)
    expected = mu - (mu + 1) * np.exp(-t / count)
    np.testing.assert_allclose(
        v, np.broadcast_to(expected[:, None], v.shape), rtol=0, atol=1e-10 if mu == 10 else 1e-13
    )


def test_softmax_nonlinear_with_components_at_rest_and_fast_ones():
    mu, v0, t = np.array([6.0, -6.0, 3.0, 1.0, 0.0]), np.array([-6.0, 6.0, 0.05, 1.0, 2.0]), [1e-3, 1.0, 10.0]
    solution = solve_ivp(softmax_flow(mu, 2.0), (0, 10), v0, method="LSODA", rtol=1e-12, atol=1e-13, t_eval=t)
    with np.errstate(all="raise"):
        got = growth.softmax_nonlinear(mu, t, v0)
    np.testing.assert_allclose(got, solution.y.T, rtol=0, atol=1e-8)
    np.testing.assert_array_equal(got[:, 3], 1.0)


# --- entropy ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(v=st.lists(st.floats(-30, 30), min_size=1, max_size=6), temperature=st.floats(0.1, 10))
def test_attention_entropy_agrees_with_mpmath(v, temperature):
    with mp.workdps(400):
        logits = [mp.mpf(x) ** 2 / mp.mpf(temperature) for x in v]
        total = sum(mp.exp(a) for a in logits)
        p = [mp.exp(a) / total for a in logits]
        expected = -sum(q * mp.log(q) for q in p)
    assume(expected == 0 or expected > 1e-300)
    # Rounding T alone moves a logit of size a by a/2**53.
    tolerance = 1e-14 * (1 + float(max(logits)))
    assert growth.attention_entropy(v, temperature) == pytest.approx(float(expected), rel=tolerance, abs=0)


def test_blown_up_weights_share_all_attention():
    v = [[np.inf, 1.0, 2.0], [np.inf, -np.inf, 30.0], [np.inf, np.inf, np.inf], [1e300, 1.0, 0.0]]
    with np.errstate(all="raise"):
        np.testing.assert_allclose(growth.attention_entropy(v), [0, np.log(2), np.log(3), 0], rtol=1e-15)


# --- shapes and bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "solve",
    [growth.linear, growth.linear_attention, growth.nonlinear, growth.nonlinear_log_gap, growth.softmax_nonlinear],
)
def test_times_come_first_then_components(solve):
    rng = np.random.default_rng(1)
    parameter, t, v0 = rng.uniform(0.2, 1, (4, 1)), rng.uniform(0, 1, (3, 2)), rng.uniform(-1, 1, 5)
    whole = solve(parameter, t, v0)
    assert whole.shape == (3, 2, 4, 5)
    for i in np.ndindex(3, 2):
        np.testing.assert_allclose(solve(parameter, t[i], v0), whole[i], rtol=1e-13, atol=1e-14)
    for row in range(4):
        np.testing.assert_allclose(solve(parameter[row], t, v0), whole[:, :, row], rtol=1e-13, atol=1e-14)
    scalar = solve(0.5, 0.25, 0.1)
    assert isinstance(scalar, np.ndarray)
    assert scalar.shape == ()


@pytest.mark.parametrize("solve", [growth.blow_up_time, growth.linear_limit])
def test_scalars_give_arrays_without_axes(solve):
    assert isinstance(solve(0.5), np.ndarray)
    assert solve(0.5).shape == ()
    assert solve([[0.5], [0.2]], [0.1, 0.2, 0.3]).shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "argument", "complaint"),
    [
        (lambda: growth.linear(np.nan, 1.0), "delta", "NaN"),
        (lambda: growth.linear([], 1.0), "delta", "non-empty"),
        (lambda: growth.linear(1.0, -1.0), "times", "at least 0"),
        (lambda: growth.linear(1.0, np.inf), "times", "finite"),
        (lambda: growth.linear([1.0, 2.0], 1.0, [1.0, 2.0, 3.0]), "delta", "broadcast"),
        (lambda: growth.linear(1.0, 1.0, kappa=0.0), "kappa", "positive"),
        (lambda: growth.linear(1.0, 1.0, rate_w=-1.0), "rate_w", "above 0"),
        (lambda: growth.linear(1.0, 1.0, 30.0, kappa=2.0), "v0", "√kappa"),
        (lambda: growth.blow_up_time("x"), "delta", "real numbers"),
        (lambda: growth.linear_limit([np.inf, 1.0]), "delta", "finite"),
        (lambda: growth.linear_attention(1.0, 1.0, rate_z=0.0), "rate_z", "positive"),
        (lambda: growth.nonlinear(38.0, 1.0), "mu", "in [-37, 37]"),
        (lambda: growth.nonlinear(1.0, 1.0, -38.0), "v0", "in [-37, 37]"),
        (lambda: growth.nonlinear(1.0, [0.0, -1e-9]), "times", "at least 0"),
        (lambda: growth.nonlinear([1.0, 2.0], 1.0, [1.0, 2.0, 3.0]), "mu", "broadcast"),
        (lambda: growth.nonlinear([], 1.0), "mu", "non-empty"),
        (lambda: growth.nonlinear(1.0, []), "times", "non-empty"),
        (lambda: growth.nonlinear_log_gap([1.0, 0.0], 1.0), "mu", "zeros"),
        (lambda: growth.convergence_ratio([1.0, 2.0], [1.0, 2.0, 3.0]), "mu_j", "broadcast"),
        (lambda: growth.softmax_nonlinear([1.0, 2.0], 1.0, temperature=0.0), "temperature", "above 0"),
        (lambda: growth.softmax_nonlinear([1.0, 11.0], 1.0), "mu", "in [-10, 10]"),
        (lambda: growth.attention_entropy(1.0), "v", "1-dimensional"),
        (lambda: growth.attention_entropy([1.0, np.nan]), "v", "NaN"),
        (lambda: growth.attention_entropy([1.0, 2.0], -1.0), "temperature", "above 0"),
    ],
)
def test_bad_input_names_the_argument(call, argument, complaint):
    with pytest.raises(InputError) as error:
        call()
    assert f"`{argument}`" in str(error.value)
    assert complaint in str(error.value)


@pytest.mark.parametrize("solve", [growth.linear, growth.nonlinear, growth.softmax_nonlinear])
def test_the_former_name_of_times_still_works(solve):
    parameters, times = [0.9, 0.4], [0.0, 0.5, 1.0]
    np.testing.assert_array_equal(solve(parameters, t=times), solve(parameters, times=times))
    np.testing.assert_array_equal(solve(parameters, t=times), solve(parameters, times))
    with pytest.raises(InputError, match="give `times` alone"):
        solve(parameters, t=times, times=times)
