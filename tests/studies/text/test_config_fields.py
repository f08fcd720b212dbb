"""Every field of a config of the studies of text decides something: another value changes the run or is refused."""

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from joma.arguments import InputError
from joma.studies import load
from joma.study import Context

STUDIES = ("entropy-text", "learning-rates", "activation-control", "bounce-control", "bounce-cause", "invariant-text")
BASE = {
    "width": 4, "hidden": 4, "length": 4, "batch": 16, "columns": 2, "steps": 10, "every": 5, "glance": 20,
    "rate": 1e-2, "layers": 2, "depths": (2,), "rates": (1e-2,), "activations": ("relu",), "arms": ("held",),
    "tokens": 6, "queries": 3, "permutations": 5, "value_path": True,
}  # fmt: skip
OTHER = {
    "tokeniser": "bytes", "width": 6, "hidden": 5, "heads": 2, "length": 5, "dropout": 0.1, "batch": 15, "columns": 3,
    "steps": 9, "clip": 0.01, "restart": False, "every": 4, "glance": 16, "precision": "exact", "alike": False,
    "activation": "gelu", "rate": 2e-2, "layers": 1, "depths": (1,), "rates": (2e-2,), "activations": ("gelu",),
    "arms": ("frozen",), "tokens": 7, "queries": 2, "permutations": 6, "sgd_rate": 0.5, "dropout_at": "published",
    "memorised": 1, "attention_rate": 2e-2, "attention_steps": 3, "value_path": False,
}  # fmt: skip
BASE_OF = {"bounce-cause": {"arms": ("sgd", "memorised"), "attention_steps": 2}}
OTHER_OF = {"bounce-cause": {"arms": ("value-path",)}}


@functools.cache
def texts():
    """Two texts of 600 words of 12 types, so that an epoch is shorter than the training."""
    folder = Path(tempfile.mkdtemp())
    for seed in (0, 1):
        words = np.random.default_rng(seed).choice([*"abcdefghijkl"], size=600, p=np.arange(1, 13) / 78)
        (folder / f"{seed}.txt").write_text(" ".join(words))
    return str(folder / "0.txt"), str(folder / "1.txt")


def config_of(name, **changes):
    config = load(name).presets["quick"].config
    fields = {field.name for field in dataclasses.fields(config)}
    base = {"corpus": texts()[0], **BASE, **BASE_OF.get(name, {})}
    return dataclasses.replace(config, **{field: base[field] for field in base if field in fields}, **changes)


def other_value(name, field):
    """Return another value of a study's field than that of `config_of`."""
    return texts()[1] if field == "corpus" else {**OTHER, **OTHER_OF.get(name, {})}[field]


def cases():
    for name in STUDIES:
        for field in dataclasses.fields(load(name).presets["quick"].config):
            yield pytest.param(name, field.name, id=f"{name}, {field.name}")


@functools.cache
def base_run(name):
    return load(name).run(config_of(name), Context((0,)))


@pytest.mark.parametrize(("name", "field"), list(cases()))
def test_another_value_changes_the_run_or_is_refused(name, field):
    value = other_value(name, field)
    assert value != getattr(config_of(name), field)
    config = dataclasses.replace(config_of(name), **{field: value})
    try:
        trajectory = load(name).run(config, Context((0,)))
    except InputError as error:
        assert error.name == field  # noqa: PT017  (most fields are not refused)
    else:
        assert not trajectory.equals(base_run(name))
