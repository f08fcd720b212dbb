"""Measures of series of checkpoints, on runs with known numbers."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from joma.studies import pretrained_measures as measures
from joma.study import NotInRun

NAN = np.nan


def models(**values):
    """Return a run of two models and one seed; each value has the axes (model, …) that its measure reads."""
    dims = {
        "bounce_depth": ("model", "layer"), "bounce_recovery": ("model", "layer"), "bounce_p_value": ("model", "layer"),
        "stable_rank": ("model", "step", "matrix"), "embedding_cosine": ("model", "step"),
        "embedding_random": ("model", "step"),
    }  # fmt: skip
    variables = {name: (dims[name], np.array(value)) for name, value in values.items()}
    return xr.Dataset(variables, coords={"model": ["a", "b"]}).expand_dims(seed=[0])


def test_falls_and_rises_are_those_of_the_lowest_layer_and_means_over_models_that_have_a_series():
    run = models(bounce_depth=[[1.0, 9.0], [NAN, NAN]], bounce_recovery=[[0.5, 9.0], [0.7, 9.0]])
    np.testing.assert_allclose(measures.entropy_fall(run), [1.0])
    np.testing.assert_allclose(measures.entropy_recovery(run), [0.6])


def test_the_rise_must_be_more_than_noise_in_every_model():
    run = models(bounce_p_value=[[0.01, 0.9], [0.2, 0.9]])
    np.testing.assert_allclose(measures.least_certain_recovery(run), [0.2])
    run = models(bounce_p_value=[[0.01, 0.9], [NAN, NAN]])  # of a single checkpoint
    np.testing.assert_allclose(measures.least_certain_recovery(run), [0.01])


@pytest.mark.parametrize("measure", [measures.entropy_fall, measures.entropy_recovery, measures.least_certain_recovery])
def test_without_a_long_series_nothing_is_measured(measure):
    none = [[NAN], [NAN]]
    with pytest.raises(NotInRun, match="series with enough checkpoints"):
        measure(models(bounce_depth=none, bounce_recovery=none, bounce_p_value=none))


def test_the_rank_that_is_left_is_the_least_over_steps_and_a_mean_over_matrices():
    ranks = [[[10.0, 20.0], [4.0, 20.0], [5.0, 8.0]], [[7.0, 7.0], [NAN, NAN], [NAN, NAN]]]
    np.testing.assert_allclose(measures.rank_left(models(stable_rank=ranks)), [0.4])


def test_embeddings_are_compared_at_the_last_step_that_each_model_has():
    cosines, random = [[0.1, 0.2, 0.3], [0.4, NAN, NAN]], [[0.1, 0.1, 0.1], [0.2, NAN, NAN]]
    run = models(embedding_cosine=cosines, embedding_random=random)
    np.testing.assert_allclose(measures.last_value(run.embedding_cosine), [[0.3, 0.4]])
    np.testing.assert_allclose(measures.embedding_excess(run), [(3 + 2) / 2])


def test_a_toy_is_no_pretrained_model():
    public = models(bounce_depth=[[1.0], [1.0]])
    toy = public.assign_coords(model=[measures.TINY_MODEL, "b"])
    assert measures.public_models(public) is public
    assert measures.toy_models(toy) is toy
    with pytest.raises(NotInRun, match=r"pretrained model, only a tiny GPT-NeoX trained here"):
        measures.public_models(toy)
    with pytest.raises(NotInRun, match="tiny GPT-NeoX"):
        measures.toy_models(public)
