"""The figures of `value-invariant` draw what the run says."""

from __future__ import annotations

import numpy as np
import pytest

from joma.studies.theorems.value_figures import (
    ARM_NAMES,
    FLOOR,
    NETWORK_NAMES,
    RUNG_NAMES,
    draw_above,
    draw_breakers,
    draw_heads,
    draw_laws,
)
from joma.studies.theorems.value_invariant import Config, run
from joma.study import Context

SMALL = Config(
    classes=3, distinct=2, common=2, queries=2, values=2, head_width=2, hidden=3, steps=12, samples=4, length=3,
    batch=2, ladder_steps=8, until=0.3,
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return run(SMALL, Context((0, 1)))


def drawn(axes):
    """Return the heights of all points and lines of a panel, sorted."""
    return np.sort(np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]))


def test_laws_have_a_panel_for_the_flow_and_two_for_sgd(small):
    flow, alone, full = draw_laws(small).axes
    assert [panel.get_title(loc="left")[:3] for panel in (flow, alone, full)] == ["(a)", "(b)", "(c)"]
    change = small.flow_change.mean(("seed", "law", "rates")).isel(time=-1)
    assert drawn(flow)[-1] == pytest.approx(float(change))
    assert drawn(alone)[-1] >= float(small.sgd.sel(correction="none", rates="equal").isel(step=1).mean("seed").max())
    assert float(small.rounding) in drawn(full)


def test_what_stands_above_has_a_point_for_each_seed_network_and_law(small):
    (panel,) = draw_above(small).axes
    points = drawn(panel)
    errors = np.where(small.above.isel(step=-1) == 0, FLOOR, small.above.isel(step=-1))
    np.testing.assert_allclose(points, np.sort(errors.ravel()))
    assert [label.get_text() for label in panel.get_xticklabels()] == list(NETWORK_NAMES.values())


def test_breakers_and_rungs_have_a_point_for_each_seed(small):
    left, middle, right = draw_breakers(small).axes
    end = small.isel(step=-1, ladder_step=-1)
    np.testing.assert_allclose(drawn(left), np.sort(np.where(end.broken == 0, FLOOR, end.broken).ravel()))
    np.testing.assert_allclose(drawn(right), np.sort([*end.ladder_correlation.values.ravel(), 0.0, 0.0]))
    assert [label.get_text() for label in middle.get_xticklabels()] == list(RUNG_NAMES.values())
    assert all(panel.get_title(loc="left") for panel in (left, middle, right))


def test_heads_have_the_drift_of_every_arm_from_either_law_and_what_decay_leaves(small):
    left, middle, right = draw_heads(small).axes
    arms = list(ARM_NAMES)
    assert arms == small.head_arm.values.tolist()
    shown = small.isel(ladder_step=slice(5, None, 5))
    for panel, law in ((left, "query_key"), (middle, "value_output")):
        mean = shown.sel(head_law=law).mean("seed")
        expected = [*mean.head_drift.values.ravel(), *mean.head_drift_shifted.sel(head_arm="adam").values.ravel()]
        assert set(np.round(expected, 12)) <= set(np.round(drawn(panel), 12))
    sizes = shown.head_size.mean(("seed", "head_law")).values.ravel()
    assert {*np.round(sizes, 12), *np.round(small.head_factor.sel(head_arm="decay").values, 12)} <= set(
        np.round(drawn(right), 12)
    )
