"""What `icl-autoregression` measures, on a run made by hand."""

import numpy as np
import pytest
import xarray as xr

from joma.studies.related import icl_autoregression_measures as measures
from joma.study import NotInRun


@pytest.fixture
def run():
    """One seed; two unitary arms, a fixed start and haar; d = 2."""
    eye = np.eye(2)
    A = np.stack([eye, eye + 0.01 * (1 - eye), eye + 0.2 * (1 - eye), eye])[None]
    B = np.stack([2 * eye, eye, eye + 0.1 * (1 - eye), eye + 0.03 * (1 - eye)])[None]
    product = np.zeros((1, 4, 2, 2))
    product[..., 0] = [[[1 / 3, 1 / 3], [0.25, 0.255], [0.25, 0.25], [0.25, 0.25]]]
    product[0, 0, 1, 1] = 0.01
    return xr.Dataset(
        {
            "loss": (("seed", "arm", "record"), [[[1.0, 0.34], [1.0, 0.25], [1.0, 0.2], [1.0, 0.26]]]),
            "formula": ("arm", [1 / 3, 0.25, 0.25, 0.25]),
            "length": ("arm", [3, 4, 4, 4]),
            "process": ("arm", ["unitary", "unitary", "fixed", "haar"]),
            "A_size": (("seed", "arm", "row", "column"), A),
            "B_size": (("seed", "arm", "row", "column"), B),
            "product": (("seed", "arm", "row", "part"), product),
            "best_scalar_loss": (("seed", "arm"), [[np.nan, np.nan, np.nan, 0.255]]),
            "searched_loss": (("seed", "searched"), [[0.25, 0.2]]),
            "searched_formula": 0.25,
        },
        {"seed": [0], "searched": ["unitary", "fixed"]},
    )


def test_losses_are_compared_with_the_formula(run):
    np.testing.assert_allclose(measures.from_formula(run, "unitary"), [0.34 - 1 / 3])
    np.testing.assert_allclose(measures.below_formula(run, "fixed"), [0.05])
    np.testing.assert_allclose(measures.beside_best_scalar(run), [0.005])
    np.testing.assert_allclose(measures.from_searched_formula(run, "fixed"), [0.05])
    with pytest.raises(NotInRun):
        measures.from_searched_formula(run, "rotations")


def test_matrices_are_compared_with_diagonal_ones(run):
    np.testing.assert_allclose(measures.diagonal_error(run, "unitary"), [0.01])
    np.testing.assert_allclose(measures.diagonal_error(run, "fixed"), [0.2])
    np.testing.assert_allclose(measures.diagonal_error(run, "haar"), [0.03])


def test_the_step_has_a_size_and_no_imaginary_part(run):
    np.testing.assert_allclose(measures.step_error(run, "unitary"), [0.03])


def test_a_diverged_layer_is_not_left_out_of_the_largest(run):
    run["loss"][0, 0, -1] = np.nan
    run["A_size"][0, 0] = np.nan
    run["product"][0, 0] = np.nan
    for measure in (measures.from_formula, measures.below_formula, measures.diagonal_error, measures.step_error):
        assert np.isnan(measure(run, "unitary")).all(), measure.__name__
    assert np.isfinite(measures.diagonal_error(run, "fixed")).all()
