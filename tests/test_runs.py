import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma import open_run
from joma.files import StorageError
from joma.runs import TRAJECTORY, Description, Run, StoredClaims, find_runs, provenance, read_claims, write_trajectory


def a_run(out, seeds=(0, 1), **config):
    return Run(out, "study", 1, {"steps": 3, **config}, seeds)


def a_trajectory():
    values = np.arange(6.0).reshape(2, 3)
    return xr.Dataset({"entropy": (("seed", "step"), values)}, {"seed": [0, 1], "step": [0, 1, 5]})


def finished(out):
    run = a_run(out)
    run.begin("quick")
    run.save(a_trajectory(), device="cpu", wall_time=1.0)
    run.finish(StoredClaims([{"name": "x"}], Description("A line", "Euclid", "Lines.", ["1-line"]), 1.5))
    return run


def test_the_folder_depends_on_config_seeds_study_and_version_alone(tmp_path):
    path = a_run(tmp_path).path
    assert path == a_run(tmp_path).path
    assert path.parent == tmp_path / "study"
    others = [a_run(tmp_path, rate=1.0), a_run(tmp_path, seeds=(0,)), Run(tmp_path, "study", 2, {"steps": 3}, (0, 1))]
    assert len({path, *(other.path for other in others)}) == 4


def test_what_is_saved_comes_back_labelled_and_stamped(tmp_path):
    run = finished(tmp_path)
    dataset = open_run(run.path)
    xr.testing.assert_identical(dataset.drop_attrs(), a_trajectory())
    assert json.loads(dataset.attrs["config"]) == {"steps": 3}
    assert json.loads(dataset.attrs["seeds"]) == [0, 1]
    assert dataset.attrs["device"] == "cpu"
    assert set(provenance()) <= set(dataset.attrs)
    assert all(isinstance(value, str) for value in dataset.attrs.values())
    assert find_runs(tmp_path) == [run.path]
    assert read_claims(run.path) == StoredClaims(
        [{"name": "x"}], Description("A line", "Euclid", "Lines.", ["1-line"]), 1.5
    )
    xr.testing.assert_identical(open_run(run.path / TRAJECTORY), dataset)


def test_runs_that_are_joined_and_written_keep_their_labels(tmp_path):
    for place, name in enumerate(("short", "much longer")):
        write_trajectory(tmp_path / f"{place}.nc", a_trajectory().expand_dims(arm=[name]))
    joined = xr.concat([open_run(tmp_path / f"{place}.nc") for place in range(2)], dim="arm")
    joined.to_netcdf(tmp_path / "joined.nc", engine="h5netcdf")
    assert open_run(tmp_path / "joined.nc").arm.values.tolist() == ["short", "much longer"]


@given(st.data())
def test_a_trajectory_cut_anywhere_is_named_never_opened(tmp_path_factory, data):
    run = finished(tmp_path_factory.mktemp("runs"))
    file = run.path / TRAJECTORY
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(StorageError, match=r"trajectory\.nc is cut short or altered.*delete .* to run it again"):
        read_claims(run.path)


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_open_run_says_that_a_file_is_broken(tmp_path, keep):
    file = finished(tmp_path).path / TRAJECTORY
    whole = file.read_bytes()
    file.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(StorageError, match="is no readable trajectory"):
        open_run(file)


def test_open_run_points_to_the_runs_below_a_folder(tmp_path):
    run = finished(tmp_path)
    with pytest.raises(StorageError, match=f"runs below it: {run.path}"):
        open_run(tmp_path)
    with pytest.raises(StorageError, match="no trajectory at"):
        open_run(tmp_path / "nowhere")


def test_a_missing_trajectory_is_named(tmp_path):
    run = finished(tmp_path)
    (run.path / TRAJECTORY).unlink()
    with pytest.raises(StorageError, match=r"trajectory\.nc is missing"):
        read_claims(run.path)


def test_a_trajectory_that_the_disk_has_no_room_for_is_one_clear_error(tmp_path):
    """A real refusal by the kernel in mid-write; HDF5 by itself would end the process with a crash, after the error."""
    script = textwrap.dedent(
        f"""
        import pathlib, resource, numpy, xarray
        from joma.files import StorageError
        from joma.runs import write_trajectory
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        data = xarray.Dataset({{f"v{{n}}": ("x", numpy.random.default_rng(n).normal(size=2000)) for n in range(5)}})
        try:
            write_trajectory(pathlib.Path({str(tmp_path)!r}) / "a.nc", data)
        except StorageError as problem:
            print(problem)
            raise SystemExit(7)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
    assert "File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_run_is_refused_and_kept(tmp_path):
    run = finished(tmp_path)
    file = run.path / "config.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(StorageError, match=r"holds another run \(study 'study', version 7\)"), run.locked():
        pass
    assert '"version": 7' in file.read_text()


def test_a_run_is_no_folder_for_runs(tmp_path):
    inside = a_run(finished(tmp_path).path)
    with pytest.raises(StorageError, match="is itself a run; choose a folder"), inside.locked():
        pass
    assert not inside.path.exists()


@pytest.mark.parametrize("change", [{"description": {"nonsense": 1}}, {"description": 5}, {"claims": [3]}])
def test_claims_that_no_run_wrote_are_named(tmp_path, change):
    run = finished(tmp_path)
    file = run.path / "claims.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(StorageError, match=r"claims\.json is not what a run writes"):
        read_claims(run.path)
