import hashlib
import json
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from joma import open_run
from joma.arguments import InputError
from joma.files import DamagedFile, StorageError
from joma.manifest import read_manifest, write_manifest
from joma.runs import (
    TRAJECTORY,
    Description,
    Run,
    StoredClaims,
    adopt,
    check_run,
    find_runs,
    finish,
    read_claims,
    read_config,
    reopen,
    write_recording,
)
from joma.stamp import provenance
from joma.verdicts import present_form

DESCRIPTION = Description("A line", "Euclid", about="Lines.", figures=["1-line"])
CLAIM = present_form({"name": "x", "verdict": "holds", "measured": {"values": [1.0]}})


def a_run(out, seeds=(0, 1), **config):
    return Run(out, "study", 1, {"steps": 3, **config}, seeds)


def a_trajectory():
    values = np.arange(6.0).reshape(2, 3)
    return xr.Dataset({"entropy": (("seed", "step"), values)}, {"seed": [0, 1], "step": [0, 1, 5]})


def finished(out):
    run = a_run(out)
    run.begin("quick")
    run.save(a_trajectory(), device="cpu", wall_time=1.0)
    (run.path / "figures").mkdir()
    (run.path / "figures" / "1-line.svg").write_text("<svg/>")
    finish(run.path, StoredClaims([CLAIM], DESCRIPTION, 1.5))
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
    assert read_claims(run.path) == StoredClaims([CLAIM], DESCRIPTION, 1.5)
    xr.testing.assert_identical(open_run(run.path / TRAJECTORY), dataset)


def test_runs_that_are_joined_and_written_keep_their_labels(tmp_path):
    for place, name in enumerate(("short", "much longer")):
        write_recording(tmp_path / f"{place}.nc", a_trajectory().expand_dims(arm=[name]))
    joined = xr.concat([open_run(tmp_path / f"{place}.nc") for place in range(2)], dim="arm")
    joined.to_netcdf(tmp_path / "joined.nc", engine="h5netcdf")
    with pytest.raises(StorageError, match=r"joined.nc has no checksum file .*check=False"):
        open_run(tmp_path / "joined.nc")
    assert open_run(tmp_path / "joined.nc", check=False).arm.values.tolist() == ["short", "much longer"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("runs"))


@contextmanager
def replaced(file, content):
    before = file.read_bytes()
    file.write_bytes(content)
    yield
    file.write_bytes(before)


@given(data=st.data())
def test_a_trajectory_cut_or_changed_anywhere_is_named_never_opened(stored, data):
    file = stored.path / TRAJECTORY
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    with replaced(file, content), pytest.raises(DamagedFile, match=r"trajectory\.nc is .*altered since it was written"):
        open_run(stored.path)
    open_run(stored.path)


@pytest.mark.parametrize("name", ["config.json", "claims.json", "manifest.json", "figures/1-line.svg"])
@given(data=st.data())
def test_a_changed_byte_of_any_other_file_is_named(stored, name, data):
    file = stored.path / name
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with replaced(file, content), pytest.raises(DamagedFile) as problem:
        check_run(stored.path)
    assert problem.value.file == file


def test_a_recording_that_stands_alone_is_checked_by_the_file_beside_it(tmp_path):
    file = tmp_path / "watch.nc"
    write_recording(file, a_trajectory())
    xr.testing.assert_identical(open_run(file), a_trajectory())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"watch\.nc is cut short or altered"):
        open_run(file)


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_open_run_says_that_a_file_is_broken(tmp_path, keep):
    file = finished(tmp_path).path / TRAJECTORY
    whole = file.read_bytes()
    file.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(DamagedFile, match="is no readable trajectory"):
        open_run(file, check=False)


def test_a_trajectory_of_another_run_is_refused_even_if_its_checksum_is_right(tmp_path):
    run, other = finished(tmp_path), a_run(tmp_path, rate=1.0)
    other.begin("quick")
    other.save(a_trajectory(), device="cpu", wall_time=1.0)
    shutil.copy(other.path / TRAJECTORY, run.path / TRAJECTORY)
    write_manifest(run.path, read_manifest(run.path).identity, ["config.json", TRAJECTORY])
    with pytest.raises(DamagedFile, match=r"trajectory\.nc is of another run than config\.json: its config is"):
        open_run(run.path)


@pytest.mark.parametrize("kind", ["external link", "soft link", "external storage", "virtual"])
def test_a_trajectory_that_leads_to_other_files_is_refused(tmp_path, kind):
    h5py.File(tmp_path / "other.h5", "w").create_dataset("secret", data=np.arange(3.0))
    with h5py.File(tmp_path / "a.nc", "w") as file:
        if kind == "external link":
            file["x"] = h5py.ExternalLink("other.h5", "/secret")
        elif kind == "soft link":
            file["x"] = h5py.SoftLink("/y")
        elif kind == "external storage":
            file.create_dataset("x", (3,), "f8", external=[(str(tmp_path / "other.h5"), 0, 24)])
        else:
            layout = h5py.VirtualLayout((3,), "f8")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", (3,))
            file.create_virtual_dataset("x", layout)
    with pytest.raises(DamagedFile, match=r"'x' is (a link to another place|stored in another file)"):
        open_run(tmp_path / "a.nc", check=False)


def test_arrays_larger_than_memory_are_refused_before_they_are_read(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file.create_dataset("x", (10**13,), "f8", chunks=(1024,))
    with pytest.raises(InputError, match=r"a\.nc` must be small enough .* 80 TB"):
        open_run(tmp_path / "a.nc", check=False)


def test_a_run_without_its_manifest_is_not_trusted(tmp_path):
    run = finished(tmp_path)
    (run.path / "manifest.json").unlink()
    for read in (open_run, check_run, read_claims, read_config):
        with pytest.raises(DamagedFile, match=r"manifest\.json is missing: the run is not finished, or"):
            read(run.path)
    assert run.stage == "begun"


def test_a_run_that_is_judged_again_is_trained_until_it_is_finished(tmp_path):
    run = finished(tmp_path)
    assert run.stage == "finished"
    reopen(run.path)
    assert run.stage == "trained"
    xr.testing.assert_identical(open_run(run.path).drop_attrs(), a_trajectory())
    with pytest.raises(StorageError, match=r"is trained but not judged.*`joma judge .*` completes it"):
        check_run(run.path)


def as_version_0_1(path):
    """Turn a finished run into what version 0.1.0 would have written."""
    claims = json.loads((path / "claims.json").read_text())
    del claims["description"]
    digest = hashlib.sha256((path / TRAJECTORY).read_bytes()).hexdigest()
    (path / "claims.json").write_text(json.dumps({**claims, "trajectory_sha256": digest}))
    (path / "manifest.json").unlink()


def test_a_run_of_version_0_1_is_adopted_if_its_trajectory_is_intact(tmp_path):
    run = finished(tmp_path)
    as_version_0_1(run.path)
    assert run.stage == "trained"
    xr.testing.assert_identical(open_run(run.path).drop_attrs(), a_trajectory())
    as_version_0_1(finished(tmp_path / "other").path)
    path = next((tmp_path / "other").glob("*/*"))
    file = path / "config.json"
    file.write_text(file.read_text().replace('"steps": 3', '"steps": 4'))
    with pytest.raises(DamagedFile, match=r"is of another run than config\.json: its config is '{\"steps\": 3}'"):
        adopt(path)
    (path / TRAJECTORY).write_bytes(b"x")
    with pytest.raises(DamagedFile, match="altered since its claims were measured"):
        adopt(path)


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
        check_run(run.path)


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


@pytest.mark.parametrize("change", [{"description": {"nonsense": 1}}, {"description": 5}])
def test_claims_that_no_run_wrote_are_named(tmp_path, change):
    run = finished(tmp_path)
    file = run.path / "claims.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    names = ["config.json", "claims.json", TRAJECTORY]
    write_manifest(run.path, json.loads((run.path / "config.json").read_text()), names)
    with pytest.raises(StorageError, match=r"claims\.json is not what a run writes"):
        read_claims(run.path)


@pytest.mark.parametrize("name", ["recording.nc", TRAJECTORY])
@pytest.mark.parametrize("beside_a_run", [False, True])
def test_a_recording_is_read_whatever_its_name_and_place(tmp_path, name, beside_a_run):
    recording = xr.Dataset({"loss": ("step", [2.0, 1.0])})
    if beside_a_run:
        (tmp_path / "config.json").write_text("{}")
        write_manifest(tmp_path, {"study": "toy"}, ["config.json"])
    write_recording(tmp_path / name, recording)
    assert open_run(tmp_path / name).loss.values.tolist() == [2.0, 1.0]
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedFile, match="cut short or altered"):
        open_run(tmp_path / name)
