"""Measures of `entropy-floor` on made-up runs whose answers are known."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import spearmanr

from joma.studies.related import entropy_floor_measures as measures

DIMS = ("arm", "rate", "seed", "step", "layer")


@pytest.fixture
def made_up():
    generator = np.random.default_rng(0)
    entropy, floor = generator.random((2, 2, 2, 2, 5, 3))
    coords = {"arm": ["plain", "σReparam"], "rate": [0.01, 0.1], "seed": [0, 1], "step": [0, 1, 2, 6, 12]}
    variables = {name: (DIMS, generator.random(entropy.shape)) for name in ("logit_norm", "weight_norm", "bound_slack")}
    return xr.Dataset(
        {
            **variables,
            "entropy": (DIMS, entropy),
            "floor": (DIMS, floor),
            "slack": (DIMS, entropy - floor),
            "loss": (DIMS[:-1], generator.random(entropy.shape[:-1])),
            "row_lowest": (("seed", "key_count", "norm"), [[[1.0, 2.1]], [[1.1, 2.0]]]),
            "row_floor": (("key_count", "norm"), [[1.0, 1.6]]),
            "peak_lowest": (("key_count", "norm"), [[1.5, 2.0]]),
            "matrix_lowest": (("seed", "matrix_size", "spectral_norm"), [[[1.0, 0.5]], [[1.2, 0.4]]]),
            "matrix_gradient": (("seed", "matrix_size", "spectral_norm"), [[[1e-8, 1e-9]], [[1e-7, 0.0]]]),
            "identity": (("matrix_size", "spectral_norm"), [[0.9, 0.5]]),
            "mean_floor": (("matrix_size", "spectral_norm"), [[0.8, 0.3]]),
        },
        coords,
    )


def test_rows_and_matrices(made_up):
    assert measures.row_difference(made_up) == pytest.approx(0.25)
    assert measures.lower_peaks(made_up) == pytest.approx(0.25)
    np.testing.assert_allclose(measures.below_mean_floor(made_up), [0.2, 0.1])
    np.testing.assert_allclose(measures.below_identity(made_up), [0.0, -0.1])
    np.testing.assert_allclose(measures.converged(made_up), [1e-8, 1e-7])


def test_training(made_up):
    entropy, norm, loss = (made_up[name].values for name in ("entropy", "logit_norm", "loss"))
    least = entropy.mean(axis=-1).min(axis=-1)
    np.testing.assert_allclose(measures.collapse(made_up), least[0, 0] - least[0, 1])
    np.testing.assert_allclose(measures.entropy_gain(made_up, made_up.rate.max()), least[1, 1] - least[0, 1])
    largest = norm.mean(axis=-1).max(axis=-1)
    np.testing.assert_allclose(measures.norm_excess(made_up), largest[0, 1] / largest[1, 1])
    np.testing.assert_allclose(measures.loss_gain(made_up), (loss[0, 1] - loss[1, 1])[:, 3:].mean(axis=-1))
    slack = made_up.slack.values
    np.testing.assert_allclose(measures.below_floor(made_up), slack.min(axis=(0, 1, 3, 4)))
    np.testing.assert_allclose(measures.below_bound(made_up), made_up.bound_slack.values.min(axis=(0, 1, 3, 4)))


@pytest.mark.parametrize(("measure", "name", "sign"), [("floor", "floor", 1), ("weight", "weight_norm", -1)])
def test_rank_correlations_are_spearmans(made_up, measure, name, sign):
    values = getattr(measures, f"{measure}_correlation")(made_up)
    for seed in range(2):
        correlations = [
            spearmanr(
                made_up.entropy.values[arm, rate, seed, :, layer], made_up[name].values[arm, rate, seed, :, layer]
            )
            for arm in range(2)
            for rate in range(2)
            for layer in range(3)
        ]
        expected = sign * np.mean([float(np.asarray(correlation)[0]) for correlation in correlations])
        assert float(values[seed]) == pytest.approx(expected)


def test_a_seed_of_which_a_model_diverged_has_no_measure(made_up):
    """It does not count by what it was before, nor by its other models."""
    for name in ("entropy", "floor", "slack", "logit_norm", "weight_norm", "bound_slack", "loss"):
        made_up[name].loc[{"arm": "plain", "rate": 0.1, "seed": 1, "step": [6, 12]}] = np.nan
    trained = [
        measures.collapse(made_up),
        measures.entropy_gain(made_up, made_up.rate.max()),
        measures.norm_excess(made_up),
        measures.loss_gain(made_up),
        measures.below_floor(made_up),
        measures.below_bound(made_up),
        measures.floor_correlation(made_up),
        measures.weight_correlation(made_up),
    ]
    for values in trained:
        np.testing.assert_array_equal(np.isnan(values), [False, True])
    assert np.isfinite(measures.entropy_gain(made_up, made_up.rate.min())).all()
