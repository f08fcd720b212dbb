"""Every field of the configs of `studies/symmetry` changes the run."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import xarray as xr

from addition_runs import SMALL
from joma.studies.symmetry import addition, addition_training, permutation, position_emergence
from joma.study import Context

SETTING = {
    "digits": 2, "reverse": True, "held": 0.4, "layers": 3, "heads": 1, "width": 12, "init": "small", "batch": 9,
    "steps": 5, "rate": 2e-2, "warm_up": 3, "weight_decay": 0.5, "precision": "high",
}  # fmt: skip
CHANGES = {
    "permutation": {"width": 12, "heads": 1, "vocabulary": 7, "length": 3, "sequences": 3, "inputs": 9},
    "addition": {**SETTING, "every": 2, "arms": ("mlp 1",), "asked": 12, "glance": 7, "probed": 9, "together": 1},
    "position-emergence": {
        **SETTING, "corpus": "another", "tokeniser": "basic_english", "length": 7, "windows": 5, "records": 4,
        "asked": 9, "probed": 9, "compared": 4, "nulls": 5, "widths": (8, 12),
    },
}  # fmt: skip
TABLE = {"positions": ("none", "rotary"), "mask": ("causal",), "layers": (2,), "residual": ("on",), "norm": ("pre",)}
MODULES = {"permutation": permutation, "addition": addition, "position-emergence": position_emergence}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two short texts, by name."""
    folder = tmp_path_factory.mktemp("texts")
    paths = {name: folder / f"{name}.txt" for name in ("one", "another")}
    for name, path in paths.items():
        path.write_text(
            f"This is {name} text, of which some words come again and some do not. " * 400, encoding="utf-8"
        )
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def configs(texts):
    """The smallest config of each study."""
    emergence = position_emergence.Config(
        digits=1, layers=2, heads=2, width=8, batch=8, steps=4, rate=1e-2, warm_up=2, held=0.3, corpus=texts["one"],
        tokeniser="bytes", length=6, windows=4, records=3, asked=12, probed=10, compared=5, nulls=4, widths=(8,),
    )  # fmt: skip
    return {
        "permutation": permutation.Config(width=8, length=4, vocabulary=6, sequences=2, inputs=8),
        "addition": replace(SMALL, arms=("none causal", "mlp 1")),
        "position-emergence": emergence,
    }


def observe(study, config):
    """Return the trajectory of one seed, and what it does not show: precision, groups of arms and test pairs."""
    calls = []
    fit, exact_match = Context.fit, addition_training.exact_match

    def watched_fit(context, *args, **options):
        calls.append((options["label"], options["compute"]))
        return fit(context, *args, **options)

    def watched_exact_match(model, tokens, digits):
        calls.append(tokens.tolist())
        return exact_match(model, tokens, digits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "TABLE", TABLE)  # two of 144 cells
        patch.setattr(Context, "fit", watched_fit)
        patch.setattr(addition_training, "exact_match", watched_exact_match)
        return MODULES[study].run(config, Context((0,))), calls


@pytest.fixture(scope="module")
def baselines(configs):
    return {study: observe(study, config) for study, config in configs.items()}


@pytest.mark.parametrize("study", CHANGES)
def test_every_field_is_changed_below(study):
    assert set(CHANGES[study]) == {field.name for field in fields(MODULES[study].Config)}


@pytest.mark.parametrize(("study", "name"), [(study, name) for study, changes in CHANGES.items() for name in changes])
def test_a_changed_field_changes_the_run(study, name, configs, baselines, texts):
    value = texts["another"] if name == "corpus" else CHANGES[study][name]
    assert value != getattr(configs[study], name)
    expected, expected_calls = baselines[study]
    trajectory, calls = observe(study, replace(configs[study], **{name: value}))
    assert calls != expected_calls or not trajectory.identical(expected)


@pytest.mark.parametrize("study", CHANGES)
def test_the_same_config_gives_the_same_run(study, configs, baselines):
    expected, expected_calls = baselines[study]
    trajectory, calls = observe(study, configs[study])
    assert calls == expected_calls
    xr.testing.assert_identical(trajectory, expected)
