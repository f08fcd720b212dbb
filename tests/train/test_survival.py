"""Runs that survive: killed processes, damaged checkpoints, Ctrl-C, and folders of other runs."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joma import open_run
from joma.files import StorageError
from joma.train import Optimiser, fit
from joma.train.checkpoint import Checkpoints, DamagedCheckpoint

SURVIVOR = Path(__file__).with_name("survivor.py")


def test_killed_twenty_times_a_run_ends_with_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SURVIVOR), str(tmp_path), "20"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["killed"] == 20
    assert report["same"] == dict.fromkeys(report["same"], True)
    assert {"400.safetensors", "400.safetensors.sha256"} <= set(report["files"])


class Numbers(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def quadratic(model, _step):
    return (model.p**2).sum(-1) / 2


def trained(folder, steps=20, save=(5, 10, 15), loss=quadratic, values=((1.0, 2.0), (3.0, 4.0))):
    model = Numbers(values)
    run = fit(model, loss, optimiser=Optimiser("adam", 0.1), steps=steps, checkpoints=folder, save=save,
              record=lambda m, _: {"p": m.p}, dims={"p": ("token",)})  # fmt: skip
    return model.p.detach().clone(), run


def stopping_at(step):
    def loss(model, now):
        if int(now) == step:
            raise RuntimeError("power cut")
        return quadratic(model, now)

    return loss


def test_only_the_newest_two_are_kept_and_a_finished_run_keeps_one(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path, loss=stopping_at(17))
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == ["10.safetensors", "15.safetensors"]
    trained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["20.safetensors", "20.safetensors.sha256"]


def test_a_finished_run_is_loaded_not_trained(tmp_path):
    weights, run = trained(tmp_path)
    again, loaded = trained(tmp_path, loss=stopping_at(0))
    assert torch.equal(weights, again)
    assert run.identical(loaded)


@settings(max_examples=25)  # every save is flushed to the disk
@given(cut=st.integers(0, 400), flip=st.booleans(), stop=st.sampled_from([11, 16, 19]))
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path_factory, cut, flip, stop):
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.raises(RuntimeError):
        trained(folder, loss=stopping_at(stop))
    newest = max(folder.glob("*.safetensors"), key=lambda file: int(file.stem))
    content = bytearray(newest.read_bytes())
    if flip:
        content[cut % len(content)] ^= 1
    else:
        del content[cut % len(content) :]
    newest.write_bytes(bytes(content))
    with pytest.warns(DamagedCheckpoint, match=newest.name):
        weights, run = trained(folder)
    expected, whole = trained(folder / "other")
    assert torch.equal(weights, expected)
    assert run.identical(whole)


def test_a_checkpoint_without_its_checksum_does_not_count(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(3, {"x": torch.ones(2)})
    store.save(6, {"x": torch.zeros(2)})
    (tmp_path / "6.safetensors.sha256").unlink()
    generation = store.load()
    assert generation is not None
    assert generation.step == 3
    assert torch.equal(generation.tensors["x"], torch.ones(2))


@pytest.mark.parametrize("change", [{"values": ((1.0, 2.0, 3.0),)}, {"steps": 12}])
def test_checkpoints_of_another_run_are_refused(tmp_path, change):
    with pytest.raises(RuntimeError):
        trained(tmp_path, loss=stopping_at(17))
    with pytest.raises(StorageError, match="another model or a longer run; choose another folder"):
        trained(tmp_path, **change)
    assert (tmp_path / "15.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_ends(tmp_path, number):
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {str(SURVIVOR.parent)!r})
        import pathlib, survivor
        survivor.STEPS = 10**6
        print("ready", flush=True)
        try:
            survivor.train(pathlib.Path({str(tmp_path)!r}))
        except KeyboardInterrupt:
            sys.exit(130)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while not list(tmp_path.glob("*.sha256")):
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == 130
    process.stdout.close()
    generation = Checkpoints(tmp_path).load()
    assert generation is not None
    assert 0 < generation.step < 10**6
    assert not bool(generation.tensors["finished"])


def test_ctrl_c_in_the_last_step_is_saved_too(tmp_path):
    def loss(model, now):
        if int(now) == 19:
            os.kill(os.getpid(), signal.SIGINT)
        return quadratic(model, now)

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, loss=loss)
    generation = Checkpoints(tmp_path).load()
    assert generation is not None
    assert generation.step == 20
    weights, run = trained(tmp_path)
    expected, whole = trained(tmp_path / "other")
    assert torch.equal(weights, expected)
    assert run.identical(whole)


def command(out):
    """A whole study from the command line, small: four arms, one after the other."""
    small = ("width=16", "hidden=32", "steps=120", "records=4")
    changes = [word for change in small for word in ("--set", change)]
    return [sys.executable, "-m", "joma", "run", "alignment", "--out", str(out), "--seeds", "2", *changes]


def finished(out):
    return next(iter(out.glob("alignment/*/trajectory.nc")), None)


def test_a_study_that_was_killed_goes_on_with_the_same_command(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert subprocess.run(command(whole), capture_output=True, check=False).returncode in (0, 1)
    for arms in (1, 3):  # killed after the first arm's checkpoints appear, and after the third's
        process = subprocess.Popen(command(torn), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(list(torn.glob("alignment/*/checkpoints/*/*.sha256"))) < arms and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert finished(torn) is None
    assert subprocess.run(command(torn), capture_output=True, check=False).returncode in (0, 1)
    first, second = (open_run(finished(out)) for out in (whole, torn))
    assert first.drop_attrs().identical(second.drop_attrs())
    for file in whole.glob("alignment/*/checkpoints/*/120.safetensors"):
        assert file.read_bytes() == (torn / file.relative_to(whole)).read_bytes()
