"""In-context regression: the exact loss by sampling, optima by another solver, laws by quadrature and integration."""

from __future__ import annotations

from contextlib import suppress

import mpmath as mp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad, solve_ivp
from scipy.optimize import minimize

from joma.arguments import InputError
from joma.theory import in_context
from joma.theory.integration import Solver

SPECTRUM, LENGTH = np.array([1.6, 1.0, 0.6, 0.3]), 12
spectra = st.lists(st.floats(0.05, 3.0), min_size=1, max_size=4)
lengths = st.integers(1, 60)
noises = st.floats(0.0, 2.0)


def sample(spectrum, length, noise, count, seed=0):
    """Return w and h of prompts, without the module's formulas."""
    generator = np.random.default_rng(seed)
    w = generator.normal(size=(count, len(spectrum)))
    x = np.sqrt(spectrum) * generator.normal(size=(count, length, len(spectrum)))
    y = np.einsum("pnd,pd->pn", x, w) + noise * generator.normal(size=(count, length))
    return w, np.einsum("pn,pnd->pd", y, x) / length


def matrices(seed, size):
    return np.random.default_rng(seed).normal(size=(size, size)) / 2


# --- The loss and its optimum ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_the_loss_is_that_of_sampled_prompts(noise):
    g = matrices(1, 4)
    w, h = sample(SPECTRUM, LENGTH, noise, 200_000)
    losses = ((h @ g - w) ** 2 @ SPECTRUM) / 2  # the mean over the query is exact
    exact = in_context.population_loss(g, SPECTRUM, LENGTH, noise)
    assert abs(losses.mean() - exact) < 4 * losses.std() / np.sqrt(len(losses))


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_the_second_moment_is_that_of_sampled_prompts(noise):
    _, h = sample(SPECTRUM, 3, noise, 200_000, seed=2)
    square = h**2
    error = square.std(axis=0) / np.sqrt(len(h))
    np.testing.assert_array_less(abs(square.mean(axis=0) - in_context.second_moment(SPECTRUM, 3, noise)), 4 * error)


def test_noise_adds_its_variance_over_the_length_times_the_covariance():
    added = in_context.second_moment(SPECTRUM, LENGTH, 0.7) - in_context.second_moment(SPECTRUM, LENGTH)
    np.testing.assert_allclose(added, 0.7**2 / LENGTH * SPECTRUM, rtol=1e-13)


@settings(max_examples=25)
@given(spectra, lengths, noises)
def test_the_optimum_is_that_of_a_search_over_all_matrices(spectrum, length, noise):
    size = len(spectrum)

    def loss(flat):
        return float(in_context.population_loss(flat.reshape(size, size), spectrum, length, noise))

    result = minimize(loss, np.zeros(size**2), method="BFGS", options={"gtol": 1e-10})
    gamma = in_context.preconditioner(spectrum, length, noise)
    optimum = in_context.population_loss(np.diag(gamma), spectrum, length, noise)
    assert in_context.least_loss(spectrum, length, noise) == pytest.approx(float(optimum), abs=1e-12)
    assert optimum <= result.fun + 1e-12
    assert optimum == pytest.approx(result.fun, abs=1e-8)


def test_the_numbers_of_the_standard_task():
    assert in_context.least_loss(SPECTRUM, LENGTH) == pytest.approx(0.490141, abs=5e-7)
    np.testing.assert_allclose(in_context.preconditioner(np.ones(5), 7), 7 / (7 + 5 + 1), rtol=1e-14)


@settings(max_examples=25)
@given(spectra, lengths, noises)
def test_the_plain_step_is_the_best_multiple_of_the_identity(spectrum, length, noise):
    rate, loss = in_context.plain_step(spectrum, length, noise)
    eye = np.eye(len(spectrum))
    best = minimize(
        lambda r: float(in_context.population_loss(r[0] * eye, spectrum, length, noise)), [0.3], options={"gtol": 1e-12}
    )
    assert loss == pytest.approx(best.fun, abs=1e-10)
    assert rate == pytest.approx(best.x[0], abs=1e-5)
    assert loss >= in_context.least_loss(spectrum, length, noise) - 1e-13


@given(spectra, lengths, noises)
def test_plateaus_begin_at_no_answer_and_end_at_the_optimum(spectrum, length, noise):
    losses = in_context.plateaus(spectrum, length, noise)
    assert losses[0] == pytest.approx(sum(spectrum) / 2)
    assert losses[-1] == pytest.approx(in_context.least_loss(spectrum, length, noise), abs=1e-12)
    assert (np.diff(losses) < 0).all()


@given(spectra, st.floats(0, 300).map(lambda power: 10.0**power), noises)
def test_losses_of_long_prompts_keep_their_digits(spectrum, length, noise):
    """They fall as 1/N, to 1e-300, and are not the rounding of what they are a difference of: against 700 digits."""
    gain = in_context.preconditioner(spectrum, length, noise)
    with mp.workdps(700):
        values, examples = [mp.mpf(value) for value in sorted(spectrum, reverse=True)], mp.mpf(length)
        total = mp.fsum(values) + mp.mpf(noise) ** 2
        moments = [(1 + 1 / examples) * value**2 + total / examples * value for value in values]
        learnt = [value - value**2 * value / moment for value, moment in zip(values, moments, strict=True)]
        steps = [(mp.fsum(learnt[:m]) + mp.fsum(values[m:])) / 2 for m in range(len(values) + 1)]
        square, curvature = mp.fsum(v**2 for v in values), mp.fsum(m * v for m, v in zip(moments, values, strict=True))
        plain = (mp.fsum(values) - square**2 / curvature) / 2
    np.testing.assert_allclose(in_context.plateaus(spectrum, length, noise), [float(x) for x in steps], rtol=1e-13)
    best = [
        in_context.least_loss(spectrum, length, noise),
        in_context.population_loss(np.diag(gain), spectrum, length, noise),
        in_context.shifted_risk(gain, spectrum, length, noise),
    ]
    # Half a rounding of γ costs its square: 1e-32, to which the loss of a given matrix falls
    np.testing.assert_allclose(best, float(steps[-1]), rtol=1e-12, atol=1e-30)
    assert best[0] == pytest.approx(float(steps[-1]), rel=1e-13)
    assert in_context.plain_step(spectrum, length, noise).loss == pytest.approx(float(plain), rel=1e-12, abs=1e-30)


def test_plateaus_are_losses_of_partial_optima():
    gamma = in_context.preconditioner(SPECTRUM, LENGTH)
    partial = [np.diag(np.where(np.arange(4) < m, gamma, 0.0)) for m in range(5)]
    expected = in_context.population_loss(partial, SPECTRUM, LENGTH)
    np.testing.assert_allclose(in_context.plateaus(SPECTRUM, LENGTH), expected, rtol=1e-13)


# --- Shifts ----------------------------------------------------------------------------------------------------------


@given(spectra, st.one_of(lengths, st.just(np.inf)), noises, st.integers(0, 1000))
def test_the_shifted_risk_is_the_loss_of_a_diagonal_matrix(spectrum, length, noise, seed):
    gain = np.random.default_rng(seed).normal(size=len(spectrum))
    exact = in_context.population_loss(np.diag(gain), spectrum, length, noise)
    assert float(in_context.shifted_risk(gain, spectrum, length, noise)) == pytest.approx(float(exact), abs=1e-11)


def test_endless_prompts_leave_an_error_and_reversed_eigenvalues_are_worse_than_no_answer():
    gain = in_context.preconditioner(SPECTRUM, LENGTH)
    assert in_context.shifted_risk(gain, SPECTRUM, np.inf) == pytest.approx(0.15148, abs=5e-6)
    assert in_context.shifted_risk(gain, SPECTRUM[::-1], LENGTH) == pytest.approx(3.918, abs=5e-4)
    w, h = sample(SPECTRUM, 2000, 0.0, 2000, seed=3)  # a prompt that is nearly endless
    losses = ((h * gain - w) ** 2 @ SPECTRUM) / 2
    exact = float(in_context.shifted_risk(gain, SPECTRUM, 2000))
    assert abs(losses.mean() - exact) < 4 * losses.std() / np.sqrt(len(losses))


# --- Flows -----------------------------------------------------------------------------------------------------------


def numerical_descent(loss, state, step=1e-6):
    """Return minus the gradient by central differences."""
    return np.array([(loss(state - step * e) - loss(state + step * e)) / (2 * step) for e in np.eye(len(state))])


def initial_slope(path):
    """Return the flow's slope at the start, from a very short path."""
    parts = [(values[1] - values[0]).ravel() / path.times[1] for values in path.parameters.values()]
    return np.concatenate(parts)


def test_the_merged_flow_descends_the_population_loss():
    generator = np.random.default_rng(0)
    u, U = generator.normal(size=2), generator.normal(size=(2, 3, 3))

    def loss(state):
        matrix = np.tensordot(state[:2], state[2:].reshape(2, 3, 3), axes=1)
        return float(in_context.population_loss(matrix, SPECTRUM[:3], 5, 0.4))

    path = in_context.merged_flow(u, U, SPECTRUM[:3], 5, times=[0.0, 1e-8], noise=0.4)
    expected = numerical_descent(loss, np.concatenate([u, U.ravel()]))
    np.testing.assert_allclose(initial_slope(path), expected, atol=1e-5)


def test_the_separate_flow_descends_the_population_loss():
    generator = np.random.default_rng(0)
    u, K, Q = generator.normal(size=2), generator.normal(size=(2, 2, 3)), generator.normal(size=(2, 2, 3))

    def loss(state):
        keys, queries = state[2:14].reshape(2, 2, 3), state[14:].reshape(2, 2, 3)
        matrix = sum(state[h] * keys[h].T @ queries[h] for h in range(2))
        return float(in_context.population_loss(matrix, SPECTRUM[:3], 5, 0.4))

    path = in_context.separate_flow(u, K, Q, SPECTRUM[:3], 5, times=[0.0, 1e-8], noise=0.4)
    expected = numerical_descent(loss, np.concatenate([u, K.ravel(), Q.ravel()]))
    np.testing.assert_allclose(initial_slope(path), expected, atol=1e-5)


@settings(max_examples=10)
@given(st.integers(0, 1000), st.integers(1, 3))
def test_flows_conserve_and_end_at_the_optimum(seed, heads):
    generator = np.random.default_rng(seed)
    spectrum, times = [1.2, 0.7], np.linspace(0.0, 300.0, 40)
    merged = in_context.merged_flow(
        0.3 * generator.normal(size=heads),
        0.3 * generator.normal(size=(heads, 2, 2)),
        spectrum,
        6,
        times=times,
        noise=0.5,
    )
    keys, queries = 0.3 * generator.normal(size=(2, heads, 2, 2))
    separate = in_context.separate_flow(
        0.3 * generator.normal(size=heads), keys, queries, spectrum, 6, times=times, noise=0.5
    )
    for path in (merged, separate):
        assert abs(path.conserved - path.conserved[0]).max() < 1e-8
        assert (np.diff(path.loss) <= 1e-9).all()
        assert path.loss[-1] >= in_context.least_loss(spectrum, 6, 0.5) - 1e-12
    assert merged.loss[-1] == pytest.approx(in_context.least_loss(spectrum, 6, 0.5), abs=1e-6)


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(2, 40), st.floats(0.3, 2.0), noises, st.floats(1e-3, 3.0))
def test_the_logistic_law_is_the_merged_flow(directions, length, variance, noise, start):
    times = np.linspace(0.0, 5.0, 11)
    c = np.sqrt(start)
    U = c / np.sqrt(directions) * np.eye(directions)
    solver = Solver("DOP853", rtol=1e-12, atol=1e-14)
    path = in_context.merged_flow(
        [c], [U], np.full(directions, variance), length, times=times, noise=noise, solver=solver
    )
    q = in_context.logistic(times, start, directions, length, variance=variance, noise=noise)
    np.testing.assert_allclose(path.matrix[:, 0, 0] * np.sqrt(directions), q, rtol=1e-8, atol=1e-12)


def test_a_small_merged_start_grows_at_the_growth_rate():
    rate = in_context.growth_rate(SPECTRUM)
    U = 1e-7 * np.diag(SPECTRUM**2) / rate
    solver = Solver("DOP853", rtol=1e-12, atol=1e-20)
    path = in_context.merged_flow([1e-7], [U], SPECTRUM, LENGTH, times=[0.0, 2.0], solver=solver)
    growth = np.log(path.parameters["u"][1, 0] / 1e-7) / 2.0
    assert growth == pytest.approx(rate, rel=1e-8)


@settings(max_examples=40)
@given(st.floats(0.05, 3.0), lengths, noises, st.floats(0.01, 0.9), st.floats(0.02, 0.95))
def test_aligned_times_are_quadratures(variance, length, noise, part, share):
    gamma = float(in_context.preconditioner([variance], length, noise)[0])
    start = part * np.cbrt(share * gamma)
    value, _ = quad(
        lambda v: 1 / (variance**2 * v**2 * (1 - v**3 / gamma)), start, np.cbrt(share * gamma), epsrel=1e-12, limit=200
    )
    time = float(in_context.aligned_time(share, [variance], length, start, noise)[0])
    assert time == pytest.approx(value, rel=1e-8, abs=1e-8)


def test_aligned_times_are_those_of_the_integrated_law():
    gamma, halves = in_context.preconditioner(SPECTRUM, LENGTH), in_context.aligned_time(0.5, SPECTRUM, LENGTH, 0.05)
    for direction, (lam, g) in enumerate(zip(SPECTRUM, gamma, strict=True)):

        def half(_, v, g=g):
            return v[0] ** 3 - g / 2

        solution = solve_ivp(
            lambda _, v, lam=lam, g=g: lam**2 * v**2 * (1 - v**3 / g), (0, 400), [0.05], events=half, rtol=1e-12,
            atol=1e-14,
        )  # fmt: skip
        assert halves[direction] == pytest.approx(solution.t_events[0][0], rel=1e-9)


def exact_time(share, variance, length, start):
    """Return the time of one direction by the antiderivative in 60 digits, and its condition number in the start."""
    with mp.workdps(60):
        lam = mp.mpf(variance)
        gamma = 1 / ((1 + mp.mpf(1) / length) * lam + lam / length)

        def antiderivative(s):
            logarithms = mp.log(1 + s + s**2) / 6 - mp.log(1 - s) / 3
            return logarithms - 1 / s - mp.atan((2 * s + 1) / mp.sqrt(3)) / mp.sqrt(3)

        end, begun = mp.cbrt(mp.mpf(share)), mp.mpf(start) / mp.cbrt(gamma)
        integral = antiderivative(end) - antiderivative(begun)
        return float(integral / (lam**2 * mp.cbrt(gamma))), float(1 + 1 / (begun * (1 - begun**3) * integral))


@settings(max_examples=300)
@given(
    st.one_of(st.floats(0.05, 3.0), st.floats(-11, 11).map(lambda power: 10**power)),
    lengths,
    st.one_of(  # near both ends, and between them
        st.floats(1, 53).map(lambda bits: 1 - 2**-bits), st.floats(-20, -1).map(lambda p: 10**p), st.floats(0.01, 0.99)
    ),
    st.one_of(st.floats(-8, 0).map(lambda p: 10**p), st.floats(0, 15).map(lambda p: 1 - 10**-p)),
)
def test_aligned_times_keep_their_digits_at_both_ends(variance, length, share, part):
    """From starts far below the share or next to it, and to shares that differ from 1 in the last bit only."""
    start = part * float(np.cbrt(share * in_context.preconditioner([variance], length)[0]))
    assume(share < 1 and start >= in_context.SMALLEST)
    expected, condition = exact_time(share, variance, length, start)
    assume(0 < condition < 1e13)  # the start is below the share by more than rounding
    time = float(in_context.aligned_time(share, [variance], length, start)[0])
    assert time == pytest.approx(expected, rel=8 * np.finfo(float).eps * condition)


def test_the_time_of_the_largest_share_is_finite():
    """Where cbrt(share) rounds to 1; by quadrature in 30 digits of dv / (λ² v² (1 − v³/γ))."""
    times = in_context.aligned_time(1 - 2**-53, SPECTRUM, LENGTH, 0.05)
    with mp.workdps(30):
        for time, lam in zip(times, map(mp.mpf, SPECTRUM), strict=True):
            gamma = 1 / ((1 + mp.mpf(1) / LENGTH) * lam + mp.fsum(SPECTRUM) / LENGTH)
            end = mp.cbrt(gamma * (1 - mp.mpf(2) ** -53))
            knots = [mp.mpf("0.05"), *(mp.cbrt(gamma) - end * mp.mpf(10) ** -k for k in range(1, 16)), end]
            expected = mp.mpf(mp.quad(lambda v, lam=lam, g=gamma: 1 / (lam**2 * v**2 * (1 - v**3 / g)), knots))
            assert time == pytest.approx(float(expected), rel=1e-13)


@given(st.floats(0.01, 0.999), st.integers(0, 4))
def test_a_start_next_to_the_share_is_refused_or_takes_no_negative_time(share, steps):
    start = float(np.cbrt(share * in_context.preconditioner([1.0], LENGTH)[0]))
    for _ in range(steps):
        start = np.nextafter(start, 0)
    with suppress(InputError):
        assert in_context.aligned_time(share, [1.0], LENGTH, start) > 0


# --- The saddle of the whole layer -----------------------------------------------------------------------------------


def whole_layer_hessian(spectrum, length, count):
    """Return the Hessian over (p_x, p_y, Q, q) at the saddle, by sampling, and its directions' first derivatives.

    E[J Jᵀ] + E[r ∇²r], with the mean over the query taken exactly: ŷ is linear in x_q with coefficients
    c = (p_x + …) as below.
    """
    size = len(spectrum)
    generator = np.random.default_rng(5)
    w = generator.normal(size=(count, size))
    x = np.sqrt(spectrum) * generator.normal(size=(count, length, size))
    y = np.einsum("pnd,pd->pn", x, w)
    S, h, s = np.einsum("pni,pnj->pij", x, x) / length, np.einsum("pn,pnd->pd", y, x) / length, (y**2).mean(axis=1)
    amplitude = np.sqrt(in_context.preconditioner(spectrum, length)[0])
    first = np.eye(size)[0]
    residual = amplitude**2 * h[:, :1] * first - w  # coefficients of x_q
    eye = np.eye(size)
    jacobian = [amplitude * h[:, i, None] * first for i in range(size)]  # p_x
    jacobian += [amplitude * s[:, None] * first]  # p_y
    jacobian += [amplitude * S[:, 0, i, None] * eye[j] for i in range(size) for j in range(size)]  # Q
    jacobian += [amplitude * h[:, :1] * eye[i] for i in range(size)]  # q
    J = np.stack(jacobian, axis=1) * np.sqrt(spectrum)
    hessian = np.einsum("pad,pbd->ab", J, J) / count
    weighted = residual * spectrum
    with_h = np.einsum("pi,pj->ij", h, weighted) / count  # E[r h_i x_qj]
    with_S = np.einsum("pab,pj->abj", S, weighted) / count
    px, py, q = slice(0, size), size, slice(size + 1 + size**2, None)
    Q = slice(size + 1, size + 1 + size**2)
    second = np.zeros_like(hessian)
    second[px, q] += with_h
    second[py, Q] += with_h.ravel()
    second[px, Q] += with_S.reshape(size, -1)
    second[py, q] += (s[:, None] * weighted).mean(axis=0)
    return hessian + second + second.T, residual


def test_the_rank_one_saddle_is_the_hessian_of_sampled_prompts():
    hessian, residual = whole_layer_hessian(SPECTRUM, LENGTH, 300_000)
    saddle = in_context.rank_one_saddle(SPECTRUM, LENGTH)
    rates = np.linalg.eigvalsh(-hessian)[::-1]
    assert (residual**2 @ SPECTRUM).mean() / 2 == pytest.approx(saddle.loss, rel=0.01)
    assert saddle.loss == in_context.plateaus(SPECTRUM, LENGTH)[1]
    assert rates[0] == pytest.approx(saddle.escape_rate, rel=0.05)
    assert rates[1] < 0.05 * rates[0]  # no other deviation grows


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: in_context.second_moment([1.0, 0.0], 3), "spectrum"),
        (lambda: in_context.second_moment([1.0], 0.5), "length"),
        (lambda: in_context.second_moment([1.0], 3, -1.0), "noise"),
        (lambda: in_context.population_loss(np.eye(3), [1.0, 2.0], 3), "matrix"),
        (lambda: in_context.shifted_risk([1.0, 2.0, 3.0], [1.0, 2.0], 3), "gain"),
        (lambda: in_context.aligned_time(1.0, [1.0], 3, 0.1), "share"),
        (lambda: in_context.aligned_time(0.5, [1.0], 3, 0.9), "start"),
        (lambda: in_context.logistic([0.0], 0.0, 2, 3), "start"),
        (lambda: in_context.merged_flow([0.1], [np.eye(3)], [1.0, 2.0], 3, times=[1.0]), "U"),
        (lambda: in_context.separate_flow([0.1], [[[1.0, 2.0]]], [[[1.0]]], [1.0, 2.0], 3, times=[1.0]), "Q"),
        (lambda: in_context.merged_flow([1e101], [np.eye(1)], [1.0], 3, times=[1.0]), "u` must"),
        (lambda: in_context.merged_flow([0.1], [[[1e101]]], [1.0], 3, times=[1.0]), "U` must"),
        (lambda: in_context.separate_flow([-1e101], [[[0.1]]], [[[0.1]]], [1.0], 3, times=[1.0]), "u` must"),
        (lambda: in_context.separate_flow([0.1], [[[1e101]]], [[[0.1]]], [1.0], 3, times=[1.0]), "K` must"),
        (lambda: in_context.separate_flow([0.1], [[[0.1]]], [[[1e101]]], [1.0], 3, times=[1.0]), "Q` must"),
        (lambda: in_context.rank_one_saddle([1.0], 3), "spectrum"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}"):
        call()
