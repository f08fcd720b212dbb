"""The curves that are read from stored runs, and the packaged file."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.runs import find_runs, open_run
from joma.studies.common_axes import NAMES, STEP
from joma.studies.related import panorama_stored
from joma.studies.related.panorama_sources import STORED
from joma.studies.related.panorama_stored import MAX_RECORDS, PACKAGED, READERS, gather, stored, stored_curves, thinned
from test_docs import load_script

DOCS = Path(__file__).parents[3] / "docs"


def stored_run(study):
    return open_run(next(path for path in find_runs(DOCS / "runs") if path.parent.name == study))


def test_every_stored_source_has_a_reader():
    assert list(READERS) == list(STORED)


@pytest.mark.parametrize("study", ["winner", "sparse-dense"])
def test_attention_by_theorem_1_is_the_trained_one(study):
    """The runs store the entropy of softmax(z), which Theorem 1 says is that of softmax(v²/2); SGD is near its flow."""
    run = stored_run(study)
    curve = panorama_stored.single_unit(run)
    expected = run.entropy / np.log(run.sizes["token"])
    np.testing.assert_allclose(curve.axes_entropy, expected.transpose("seed", "time"), atol=0.02)
    assert (curve.axes_sink >= 1 / run.sizes["token"] - 1e-12).all()
    np.testing.assert_allclose(curve.axes_rank.isel({STEP: -1}), 1.0)


def test_the_entropy_of_a_language_model_is_relative_to_uniform_attention():
    run = stored_run("entropy-text").sel(depth=1)
    length = panorama_stored.language_length(run)
    uniform = np.mean(np.log(np.arange(1, length + 1)))
    curve = panorama_stored.language_model(run.assign(entropy=xr.full_like(run.entropy, uniform)))
    np.testing.assert_allclose(curve.axes_entropy, 1.0)
    assert curve.axes_sink.isnull().all()


def test_thinning_keeps_the_ends_and_every_minimum():
    entropy = np.random.default_rng(0).normal(size=(3, 500))
    variables = dict.fromkeys(NAMES, (("seed", STEP), entropy))
    curve = xr.Dataset(variables, {STEP: np.arange(500)})
    thin = thinned(curve)
    assert thin.sizes[STEP] <= MAX_RECORDS
    assert thin[STEP][[0, -1]].values.tolist() == [0, 499]
    np.testing.assert_array_equal(thin.axes_entropy.min(STEP), curve.axes_entropy.min(STEP))


def test_the_packaged_file_is_small_and_read_by_default():
    assert PACKAGED.stat().st_size < 150_000
    curves = stored_curves(stored(""))
    assert {"winner", "sparse-dense", "wikitext", "wikitext-linear"} <= set(curves) <= set(STORED)
    for curve in curves.values():
        assert (curve.axes_entropy <= 1 + 1e-6).all()


def test_the_packaged_file_agrees_with_the_stored_runs():
    """`python docs/make_axes.py` writes it anew."""
    packaged, present = stored_curves(stored("")), stored_curves(gather([DOCS / "runs"]))
    assert {"winner", "sparse-dense", "wikitext", "wikitext-linear"} <= set(present)
    for name, curve in present.items():
        xr.testing.assert_identical(packaged[name], curve)


def test_a_folder_of_runs_is_read_in_its_place(tmp_path):
    for study in ("winner", "entropy-text"):
        shutil.copytree(DOCS / "runs" / study, tmp_path / study)
    assert list(stored_curves(stored(str(tmp_path)))) == ["winner", "wikitext"]
    assert "winner/" in panorama_stored.inputs(str(tmp_path))["stored_runs"]
    assert len(panorama_stored.inputs("")["stored_axes_sha256"]) == 64


def test_a_folder_without_runs_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="`runs` must"):
            stored(str(folder))


def test_the_script_writes_what_is_gathered(tmp_path, monkeypatch, capsys):
    make_axes = load_script("make_axes")
    monkeypatch.setattr(make_axes, "PACKAGED", tmp_path / "axes.nc")
    make_axes.main([])
    assert "winner/" in capsys.readouterr().out
    written = open_run(tmp_path / "axes.nc", check=False)
    xr.testing.assert_identical(written, gather([DOCS / "runs"]))
