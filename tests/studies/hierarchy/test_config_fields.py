"""Every field of the configs of `studies/hierarchy` changes the run."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import pytest
import xarray as xr

from joma.studies.hierarchy import alignment, hierarchy_order, scan_snap
from joma.study import Context

MODULES = {"alignment": alignment, "scan-snap": scan_snap, "hierarchy-order": hierarchy_order}
CONFIGS = {
    "alignment": alignment.Config(
        classes=(4,), children=(2,), latents=((5, 5),), vocabulary=8, length=30, width=4, layers=2, hidden=5,
        rate=1e-2, batch=8, steps=6, records=3, controls=(4,),
    ),
    "scan-snap": scan_snap.Config(
        queries=1, classes=2, distinct=2, common=2, outputs=4, steps=1000, records=20, sweep=(100.0, 1000.0),
        shares=(0.5, 0.1),
    ),
    "hierarchy-order": hierarchy_order.Config(width=4, steps=12, batch=4, pool=5, probes=96, moments=4),
}  # fmt: skip
CHANGES = {
    "alignment": {
        "classes": (5,), "children": (3,), "latents": ((5, 6),), "vocabulary": 9, "length": 31, "width": 5,
        "layers": 3, "hidden": 6, "rate": 2e-2, "weight_decay": 0.5, "batch": 7, "steps": 5, "records": 4,
        "controls": (), "precision": "high", "compiled": False,
    },
    "scan-snap": {
        "queries": 2, "classes": 3, "distinct": 3, "common": 3, "share": 0.6, "variation": 0.4, "outputs": 5,
        "rate_z": 0.2, "steps": 1001, "records": 21, "sweep": (100.0, 900.0), "shares": (0.5, 0.2),
    },
    "hierarchy-order": {
        "rho": 0.8, "asked": 3, "width": 6, "rate": 1e-2, "steps": 13, "batch": 5, "pool": 4, "probes": 95,
        "moments": 3,
    },
}  # fmt: skip


def observe(study, **changes):
    """Return the trajectory of one seed, and what it shows on CUDA only: how each training computes."""
    computes = []
    fit_together = Context.fit_together

    def watched_fit(context, trainings):
        computes.extend(training.compute for training in trainings)
        return fit_together(context, trainings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "fit_together", watched_fit)
        two_arms = {name: scan_snap.ARMS[name] for name in (scan_snap.PREMISES, "faster")}
        patch.setattr(scan_snap, "ARMS", two_arms)  # the others differ in the ratio of rates alone
        return MODULES[study].run(replace(CONFIGS[study], **changes), Context((0,))), computes


@functools.cache
def baseline(study):
    return observe(study)


@pytest.mark.parametrize("study", CHANGES)
def test_every_field_is_changed_below(study):
    assert set(CHANGES[study]) == {field.name for field in fields(MODULES[study].Config)}


@pytest.mark.parametrize(("study", "name"), [(study, name) for study, changes in CHANGES.items() for name in changes])
def test_a_changed_field_changes_the_run(study, name):
    value = CHANGES[study][name]
    assert value != getattr(CONFIGS[study], name)
    expected, expected_computes = baseline(study)
    trajectory, computes = observe(study, **{name: value})
    if name in ("precision", "compiled"):
        assert computes != expected_computes
    else:
        assert not trajectory.identical(expected)


@pytest.mark.parametrize("study", CHANGES)
def test_the_same_config_gives_the_same_run(study):
    expected, expected_computes = baseline(study)
    trajectory, computes = observe(study)
    assert computes == expected_computes
    xr.testing.assert_identical(trajectory, expected)
