"""Every field of the configs of `studies/theorems` changes the run."""

from __future__ import annotations

import pytest

from config_fields import Fields
from joma.studies.theorems import (
    cooccurrence,
    critical_points,
    invariance,
    ladder,
    sparse_dense,
    value_invariant,
    winner,
)

MODULES = {
    "invariance": invariance, "winner": winner, "sparse-dense": sparse_dense, "ladder": ladder,
    "critical-points": critical_points, "cooccurrence": cooccurrence, "value-invariant": value_invariant,
}  # fmt: skip
SEED = 2  # with which the runs of the plain ReLU flow in one mixture do not all end alike
CONFIGS = {
    "invariance": invariance.Config(classes=3, distinct=2, common=2, dim=9, steps=10),
    "winner": winner.Config(tokens=3, samples=6, steps=200, until=0.5, figure_3_steps=10),
    "sparse-dense": sparse_dense.Config(
        figure_4_mu=(1.3, 2.4, 3.6), figure_4_steps=50, until=0.05, components=2, draws=2, classes=3, distinct=2,
        common=2, units_steps=10,
    ),
    "ladder": ladder.Config(
        tokens=4, length=3, long_length=3, until=50.0, constant_until=10.0, records=10, shares=(0.0,), planted=(0.6,),
        draws=2, searches=1, gelu_worlds=("overlap",), sgd_worlds=("overlap",), sgd_steps=10,
        trained_arms=("base",), trained_steps=10, trained_probe=8, trained_batch=8,
    ),
    "critical-points": critical_points.Config(
        tokens=3, components=2, close=0.5, starts=3, overlaps=(0.0,), mixtures=4, runs=5, clock=200.0, driven=("relu",),
        context_tokens=3, samples=2, horizon=0.5, times=3,
    ),
    "cooccurrence": cooccurrence.Config(samples=1000, trees=1, rhos=(0.3, 0.7), c=(0.0, 1.0), gaps=(0.3, 0.1)),
    "value-invariant": value_invariant.Config(
        classes=3, distinct=2, common=2, queries=2, values=2, head_width=2, hidden=3, steps=6, samples=4, length=3,
        batch=2, ladder_steps=6, until=0.1,
    ),
}  # fmt: skip
CHANGES = {
    "invariance": {
        "classes": 4, "distinct": 3, "common": 3, "dim": 10, "steps": 9, "rate": 0.2, "rate_z": 0.2,
        "small_rate": 0.02, "ratio": 2.0, "long_steps": 5, "temperature": 0.6, "overlap": 0.3, "decay": 0.02,
        "adam_rate": 0.02,
    },
    "winner": {
        "tokens": 4, "samples": 7, "steps": 202, "until": 0.6, "figure_3_steps": 9, "figure_3_rate": 0.2,
        "figure_3_temperature": 0.6,
    },
    "sparse-dense": {
        "figure_4_mu": (1.3, 2.4), "figure_4_temperature": 2.0, "figure_4_step": 0.03, "figure_4_steps": 40,
        "example_mu": (1.0, 2.0), "pair_mu": (1.5, 1.2), "v0": 0.06, "components": 3, "until": 0.04, "rate": 2e-3,
        "draws": 3, "classes": 4, "distinct": 3, "common": 3, "units_steps": 9, "units_rate": 0.2,
        "units_temperature": 0.6,
    },
    "ladder": {
        "tokens": 5, "classes": 3, "length": 2, "scale": 0.8, "long_length": 4, "short": 0.6, "noisy": 0.6,
        "shares": (0.1,), "planted": (0.7,), "draws": 3, "rate": 0.4, "rate_z": 3.0, "start_v": 0.06, "start_z": 0.02,
        "until": 60.0, "constant_until": 12.0, "records": 12, "searches": 2, "gelu_worlds": ("separable",),
        "sgd_worlds": ("lengths",), "sgd_steps": 9,
        "trained_arms": ("product",), "trained_rates": (2.0,), "trained_steps": 9, "trained_classes": 3,
        "trained_distinct": 9, "trained_common": 9, "trained_scale": 1.0, "trained_length": 6, "trained_batch": 9,
        "trained_probe": 9, "trained_optimum": 4,
    },
    "critical-points": {
        "activations": ("linear", "relu", "leaky_relu", "gelu", "silu", "tanh", "identity"), "tokens": 4,
        "components": 3, "sigma": 0.6, "close": 0.9, "overlaps": (0.5,), "fate_tokens": 4, "fate_components": 2,
        "mixtures": 3, "runs": 3, "clock": 1.0, "driven": ("relu", "tanh"), "decay": 0.2, "starts": 2,
        "context_weights": (0.6, -0.25, -0.25), "context_tokens": 4, "context_sigma": 0.1, "samples": 4,
        "horizon": 0.4, "times": 4,
    },
    "value-invariant": {
        "classes": 4, "distinct": 3, "common": 3, "queries": 3, "values": 3, "head_width": 3, "hidden": 4, "scale": 0.2,
        "steps": 7, "rate": 0.1, "overlap": 0.3, "decay": 0.02, "adam_rate": 0.02, "samples": 5, "length": 4,
        "batch": 3, "ladder_steps": 7, "until": 0.2,
    },
    "cooccurrence": {
        "samples": 1001, "trees": 2, "rhos": (0.3, 0.8), "rho": 0.8, "c": (0.0, 2.0), "gaps": (0.3, 0.2),
    },
}  # fmt: skip


FIELDS = {study: Fields(MODULES[study], CONFIGS[study], CHANGES[study], SEED) for study in CHANGES}


@pytest.mark.parametrize("study", CHANGES)
def test_every_field_is_changed_below(study):
    FIELDS[study].assert_all_are_changed()


@pytest.mark.parametrize(("study", "name"), [(study, name) for study, changes in CHANGES.items() for name in changes])
def test_a_changed_field_changes_the_run(study, name):
    FIELDS[study].assert_changes_the_run(name)


@pytest.mark.parametrize("study", CHANGES)
def test_the_same_config_gives_the_same_run(study):
    FIELDS[study].assert_repeats()
