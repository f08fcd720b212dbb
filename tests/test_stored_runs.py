"""Runs are stored smaller than they were made, and say the same."""

import dataclasses
import json

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma.runs import TRAJECTORY, open_run, read_claims, read_config
from joma.study import Claim, at_most, execute
from test_docs import load_script
from toy_study import STUDY as TOY

store_runs = load_script("store_runs")


def run(_, context):
    """Return a noisy variable, of which a mean is judged, and two others, of which a difference of 1e-13 is."""
    noise = np.random.default_rng(0).normal(size=(len(context.seeds), 5000))
    variables = {"noise": noise, "first": noise, "second": noise * (1 + 1e-13)}
    return xr.Dataset({name: (("seed", "time"), values) for name, values in variables.items()}).assign(
        value=(("seed", "time"), noise)
    )


def difference(trajectory):
    return abs(trajectory.second - trajectory["first"]).max("time")


STUDY = dataclasses.replace(
    TOY,
    run=run,
    figures={},
    outcome=lambda trajectory: f"The mean is {float(trajectory.noise.mean()):.3g}.",
    claims=(
        Claim("mean", "The mean is small.", lambda trajectory: trajectory.noise.mean("time"), at_most(1.0), "check"),
        Claim("equal", "Both are equal.", difference, at_most(1e-12), "check"),
    ),
)


@pytest.fixture
def source(tmp_path):
    return execute(STUDY, out=tmp_path / "runs").path


def test_a_stored_run_is_smaller_and_says_the_same(source, tmp_path):
    path = store_runs.store(source, tmp_path / "stored", STUDY)
    before, after = open_run(source), open_run(path)
    assert (path / TRAJECTORY).stat().st_size < 0.8 * (source / TRAJECTORY).stat().st_size
    assert read_config(path) == read_config(source)
    assert read_claims(path).description == read_claims(source).description
    assert store_runs.printed(STUDY, after, "quick") == store_runs.printed(STUDY, before, "quick")
    assert {name: after.attrs[name] for name in before.attrs} == before.attrs


def test_only_variables_that_no_printed_number_needs_exactly_are_rounded(source, tmp_path):
    before, after = open_run(source), open_run(store_runs.store(source, tmp_path / "stored", STUDY))
    bits = json.loads(after.attrs[store_runs.ROUNDED])
    assert bits["noise"] == bits["value"] == 14
    assert not {"first", "second"} <= set(bits)
    for name in set(before.data_vars) - set(bits):
        np.testing.assert_array_equal(after[name], before[name])
    np.testing.assert_allclose(after.noise, before.noise, rtol=2**-15, atol=0)


def test_a_run_replaces_the_earlier_one_of_its_study_and_can_be_stored_again(source, tmp_path):
    other = execute(STUDY, out=tmp_path / "runs", seeds=2).path
    first = store_runs.store(other, tmp_path / "stored", STUDY)
    second = store_runs.store(source, tmp_path / "stored", STUDY)
    assert second.is_dir()
    assert not first.exists()
    assert store_runs.store(second, tmp_path / "stored", STUDY) == second
    assert open_run(second).identical(open_run(store_runs.store(source, tmp_path / "again", STUDY)))


def test_a_run_whose_printed_numbers_would_change_replaces_nothing(source, tmp_path, monkeypatch):
    first = store_runs.store(source, tmp_path / "stored", STUDY)
    content = (first / TRAJECTORY).read_bytes()
    monkeypatch.setattr(store_runs, "smaller", lambda _study, run, _preset: run.assign(noise=run.noise + 1))
    with pytest.raises(ValueError, match="judged otherwise"):
        store_runs.store(source, tmp_path / "stored", STUDY)
    assert (first / TRAJECTORY).read_bytes() == content


@given(st.lists(st.floats(1e-300, 1e300), min_size=1), st.sampled_from(store_runs.BITS))
def test_rounding_keeps_as_many_digits_as_it_says(numbers, bits):
    values = np.array(numbers) * np.resize([1, -1], len(numbers))
    rounded = store_runs.rounded(values, bits)
    assert (abs(rounded - values) <= 2.0 ** -(bits + 1) * abs(values)).all()
    mantissa, _ = np.frexp(rounded)
    assert (mantissa * 2.0 ** (bits + 1) % 1 == 0).all()


def test_rounding_leaves_what_is_no_number_or_not_finite():
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    np.testing.assert_array_equal(store_runs.rounded(values, 23), values)
