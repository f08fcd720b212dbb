"""The flows of `icl-regression`: what is stored agrees with the closed forms and with plain loops."""

import numpy as np
import pytest
from scipy.special import expit

from joma.studies.related import icl_regression_flows as flows
from joma.theory import in_context
from studies.related.icl_regression_run import SMALL, small_run


def test_the_half_time_is_where_the_loss_has_fallen_by_half():
    path = in_context.Path(np.array([0.0, 1.0, 2.0, 3.0]), np.empty(0), np.array([4.0, 4.0, 2.0, 0.0]), np.empty(0), {})
    assert flows.half_time(path, 0.0) == pytest.approx(2.0)
    assert flows.half_time(path, 0.0, 0.25) == pytest.approx(1.5)


def test_flows_end_at_their_plateaus():
    run, losses = small_run(), in_context.plateaus(SMALL.spectrum, SMALL.length)
    np.testing.assert_allclose(run.separate_end.sel(form="low rank"), losses[1], atol=1e-9)
    np.testing.assert_allclose(run.separate_end.sel(form="rank one"), losses[-1], atol=1e-9)
    np.testing.assert_allclose(run.separate_loss[:, :, -1], run.separate_end, rtol=1e-6)
    np.testing.assert_allclose(run.merged_loss[..., 0], losses[0], atol=1e-4)


def test_crossing_times_are_the_first_records_above_one_half():
    shares = np.array([[[0.0, 0.0], [0.6, 0.0], [1.0, 0.4]]])
    np.testing.assert_array_equal(flows._crossing_times(shares, np.array([0.0, 2.0, 5.0])), [[2.0, np.inf]])


def test_a_loss_that_waits_is_near_and_flat_and_one_that_passes_is_not():
    times = np.append(0.0, np.geomspace(0.1, 1e4, 500))
    levels = in_context.plateaus(SMALL.spectrum, SMALL.length)
    fallen = expit(60 * np.log((times[:, None] + 1e-9) / [10, 100, 1000]))  # sharp steps
    stairs = levels[0] + fallen @ np.diff(levels)
    slide = np.interp(np.log(times + 1e-9), [np.log(10), np.log(11)], [levels[0], levels[-1]])
    visits = flows._plateau_visits(SMALL, np.stack([stairs, slide, slide]), times)
    assert float(visits.visit_distance[0].max()) < 1e-9
    assert float(visits.visit_slope[0].max()) < 1e-6
    assert float(visits.visit_slope[1].min()) > 1.0


def test_sampled_risks_are_near_the_exact_ones():
    risks = flows.sampled_risks(SMALL, np.random.default_rng(0))
    for name in ("shift", "long", "noise"):
        assert abs(risks[f"{name}_sampled"] - risks[f"{name}_exact"]) < 4 * risks[f"{name}_error"]
    gain = in_context.preconditioner(SMALL.spectrum, SMALL.length, SMALL.noise)
    assert float(risks.noise_exact) == pytest.approx(in_context.least_loss(SMALL.spectrum, SMALL.length, SMALL.noise))
    assert gain.sum() < in_context.preconditioner(SMALL.spectrum, SMALL.length).sum()


def test_prompts_are_drawn_in_chunks_of_any_size(monkeypatch):
    monkeypatch.setattr(flows, "CHUNK", 100)
    options = {"count": 37, "generator": np.random.default_rng(0)}
    assert flows._prompt_losses(np.ones(3), np.array(SMALL.spectrum), 8, 0.0, **options).shape == (37,)
