"""What the study `max-margin` reads from solved flows."""

import numpy as np
import pytest

from joma.studies.related.max_margin_data import factor_starts, sequences, starts
from joma.studies.related.max_margin_flows import (
    cosine_gap,
    is_locally_best,
    matrix_differences,
    matrix_paths,
    rank_exponent,
    timed_flows,
    vector_paths,
)
from joma.study import Context
from joma.theory.margins import margin_multipliers, max_margin, token_differences
from joma.theory.token_selection import attention_weights, factor_path, vector_path

CONTEXT = Context((0, 1))
# On the line the token at 1 is selected. Its margin over the token at 0 is 1, over that at −5 it is 6.
TOKENS = np.array([[[1.0], [0.0], [-5.0]]])
SCORES = [([1.0, 0.5, 2.0], True), ([0.5, 1.0, 0.0], False), ([1.0, 0.0, 0.0], True), ([0.5, 0.5, 0.0], True)]


@pytest.mark.parametrize(("g", "expected"), SCORES)
def test_only_better_tokens_within_the_margin_count_against_a_selection(g, expected):
    assert is_locally_best(TOKENS, np.array([g]), np.array([0])) is expected


@pytest.mark.parametrize("seed", range(5))
def test_with_different_scores_locally_best_tokens_beat_their_support_tokens(seed):
    rng = np.random.default_rng(seed)
    x, g = rng.normal(size=(2, 3, 6)), rng.uniform(size=(2, 3))
    for selected in np.ndindex(3, 3):
        index = np.array(selected)
        lead = (np.take_along_axis(g, index[:, None], axis=1) - g)[np.arange(3) != index[:, None]]
        if (lead > 0).any():
            support = margin_multipliers(token_differences(x, index)) > 1e-9
            assert is_locally_best(x, g, index) == bool((lead[support] > 0).all())


def test_a_sequence_is_lost_for_good_if_the_others_carry_its_best_token_away():
    """The first sequence pulls p to the right, where the wrong token of the second one gains 3 on its best token."""
    x, g = np.array([[[1.0, 0.0], [0.0, 0.0]], [[-3.0, 0.2], [0.0, 0.0]]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    path = vector_path(x, g, np.array([4.0, 0.0]), [0.0, 100.0, 200.0, 400.0])
    np.testing.assert_array_equal(attention_weights(x, path.p[-1]).argmax(axis=-1), [0, 1])
    slope = (path.p[-1] - path.p[-2]) / (path.log_time[-1] - path.log_time[-2])
    np.testing.assert_allclose(slope, [1.0, 0.0], atol=1e-6)
    assert is_locally_best(x, g, np.array([0, 1]))
    best = max_margin(token_differences(x, [0, 0]))
    assert np.linalg.norm(slope - best) > 0.5


def test_the_cosine_gap_is_one_less_cosine_and_exact_for_small_angles():
    rng = np.random.default_rng(0)
    vectors, solution = rng.normal(size=(5, 7)), rng.normal(size=7)
    expected = 1 - vectors @ solution / np.linalg.norm(vectors, axis=-1) / np.linalg.norm(solution)
    np.testing.assert_allclose(cosine_gap(vectors, solution), expected, atol=1e-14)
    np.testing.assert_allclose(cosine_gap(np.array([1.0, 1e-9]), np.array([1.0, 0.0])), 0.5e-18, rtol=1e-6)
    assert np.isnan(cosine_gap(np.zeros(2), np.array([1.0, 0.0])))


def test_paths_approach_the_solution_of_the_tokens_that_they_select():
    data, p0 = sequences(CONTEXT, "test", (2, 3, 6)), starts(CONTEXT, 6)
    lengths = np.array([0.0, 20.0, 40.0, 80.0, 160.0])
    measured, paths = vector_paths(data, p0, lengths, 2)
    assert paths.shape == (4, 2, 3, 6)
    np.testing.assert_array_equal(paths[:, :, 0], np.concatenate([p0, p0]))
    assert bool((measured.selects_best.sel(scores="equal") == 1).all())
    assert bool((measured.slope_error.isel(length=-1) < measured.slope_error.isel(length=1)).all())
    assert float(measured.half_slope_error.sel(scores="equal").max()) < 0.2
    assert bool((measured.last_switch < 160).all())


def test_timed_flows_have_every_arm_and_begin_at_the_starts():
    data, p0 = sequences(CONTEXT, "test", (2, 3, 6)), starts(CONTEXT, 6)
    flow = timed_flows(data, p0, np.array([0.0, 5.0]))
    assert flow.shape == (4, 2, 2, 6)
    np.testing.assert_array_equal(flow[:, :, 0], np.concatenate([p0, p0]))


def test_matrix_paths_have_the_larger_margin_in_their_norm():
    data, factors = sequences(CONTEXT, "test", (2, 3, 4)), factor_starts(CONTEXT, 4, 1e-3)
    measured = matrix_paths(data, factors, 80.0, np.array([20.0, 40.0]))
    share = measured.margin_share
    assert bool((share <= 1 + 1e-9).all())
    assert float(share.sel(parameters="W", norm_kind="frobenius").min()) > 0.95
    np.testing.assert_allclose(measured.nuclear_bound, measured.nuclear_norm, rtol=1e-7)
    np.testing.assert_array_equal(
        share.sel(parameters="K Q", norm_kind="nuclear"), measured.nuclear_shares.isel(factor_path=0)
    )


@pytest.mark.parametrize("seed", [1, 5])
def test_the_second_singular_value_departs_by_the_predicted_power(seed):
    """Seed 1: rank one is optimal and the second direction dies out. Seed 5: it is not, and the second one grows."""
    context = Context((seed,))
    data = sequences(context, "matrix sequences", (3, 4, 8))
    k0, q0 = factor_starts(context, 8, 1e-3)[:, 0]
    x, z, g = data.x[0], data.z[0], data.g[0, 0]
    path = factor_path(x, z, g, k0, q0, lengths=[80.0, 88.0])
    products = path.k @ path.q.transpose(0, 2, 1)
    sizes = np.linalg.svd(products, compute_uv=False)
    power = np.diff(np.log(sizes[:, 1] / sizes[:, 0])) / np.diff(np.log(sizes[:, 0]))
    exponent, alignment = rank_exponent(x, z, g, products[0])
    assert power[0] == pytest.approx(exponent, abs=2e-3)
    assert alignment > 0.99
    assert (power[0] > 0) == (seed == 5)
    assert matrix_differences(x, z, g).shape == (9, 8, 8)
