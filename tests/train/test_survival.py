"""Runs that survive: killed processes, damaged checkpoints, Ctrl-C, and folders of other runs."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joma import open_run
from joma.files import FolderLocked, StorageError
from joma.train import Optimiser, Record, Saving, fit
from joma.train.checkpoint import CheckpointStore, DamagedCheckpoint

SURVIVOR = Path(__file__).with_name("survivor.py")


def test_killed_twenty_times_a_run_ends_with_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SURVIVOR), str(tmp_path), "20"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["killed"] == 20
    assert report["same"] == dict.fromkeys(report["same"], True)
    assert report["files"] == ["400.safetensors", "400.safetensors.sha256"]


class Numbers(nn.Module):
    def __init__(self, values, more=None):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(values, dtype=torch.float64))
        if more is not None:
            self.more = nn.Parameter(torch.ones(len(values)), requires_grad=more)


def quadratic(model, _step):
    return (model.p**2).sum(-1) / 2


VALUES = ((1.0, 2.0), (3.0, 4.0))


def trained(
    folder, loss=quadratic, *, values=VALUES, more=None, save=(5, 10, 15), min_seconds=0.0, record=(), **options
):
    """Train two seeds, saving in `folder` (None: nowhere); `record` has further options of `Record`."""
    model = Numbers(values, more)
    options = {"optimiser": Optimiser("adam", 0.1), "steps": 20, **options}
    measures = Record(lambda m, _: {"p": m.p}, dims={"p": ("token",)}, **dict(record))
    saving = None if folder is None else Saving(folder, save, min_seconds)
    run = fit(model, loss, record=measures, saving=saving, **options)
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


def test_saves_that_come_too_soon_are_left_out(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path, loss=stopping_at(17), min_seconds=1e9)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path, loss=stopping_at(17), min_seconds=1e-9)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == ["10.safetensors", "15.safetensors"]


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
    with pytest.warns(DamagedCheckpoint, match=f"{newest.name} .*; the checkpoint of step {stop // 5 * 5 - 5} is used"):
        weights, run = trained(folder)
    expected, whole = trained(folder / "other")
    assert torch.equal(weights, expected)
    assert run.identical(whole)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe broken", b"0" * 64])
def test_a_checksum_that_is_broken_is_named_and_where_nothing_is_left_the_run_begins_anew(tmp_path, content):
    with pytest.raises(RuntimeError):
        trained(tmp_path, save=(5,), loss=stopping_at(7))
    (tmp_path / "5.safetensors.sha256").write_bytes(content)
    with pytest.warns(DamagedCheckpoint, match=r"5\.safetensors is cut short or altered; the run begins at step 0"):
        weights, run = trained(tmp_path)
    expected, whole = trained(tmp_path / "other")
    assert torch.equal(weights, expected)
    assert run.identical(whole)


LEFT = ("2.safetensors", "3.safetensors.sha256", ".joma-161-a_b0c.safetensors", ".joma-161.safetensors-a_b0c.sha256")
OTHERS = ("notes.safetensors", ".hidden", "07.safetensors")


def test_a_finished_run_is_tidied_where_it_was_killed_before_it_could_be(tmp_path):
    trained(tmp_path)
    for name in LEFT:
        (tmp_path / name).touch()
    trained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["20.safetensors", "20.safetensors.sha256"]


ADAM, SGD = Optimiser("adam", 0.1), Optimiser("sgd", 0.1)
CHANGES = {
    "steps": {"steps": 40},
    "record.at": {"record": {"at": (0, 2)}},
    "model": {"values": ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))},
    "optimiser": {"optimiser": Optimiser("adam", 0.1, betas=(0.9, 0.95))},
    "seeds": {"record": {"seeds": (7, 8)}},
}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("differs", sorted(CHANGES))
def test_checkpoints_of_another_run_are_refused(tmp_path, differs, finished):
    with nullcontext() if finished else pytest.raises(RuntimeError):
        trained(tmp_path, loss=quadratic if finished else stopping_at(17))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError, match=rf"{tmp_path} .* another run, which differs in {differs}; choose another"):
        trained(tmp_path, **CHANGES[differs])
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("first", "second"), [(ADAM, SGD), (SGD, ADAM)])
def test_checkpoints_of_another_rule_are_refused(tmp_path, first, second):
    with pytest.raises(RuntimeError):
        trained(tmp_path, loss=stopping_at(17), optimiser=first)
    with pytest.raises(StorageError, match="differs in optimiser"):
        trained(tmp_path, optimiser=second)


def test_a_parameter_frozen_since_is_refused(tmp_path):
    with pytest.raises(RuntimeError):
        trained(tmp_path, loss=stopping_at(17), more=True)
    with pytest.raises(StorageError, match="differs in model"):
        trained(tmp_path, more=False)


def test_checkpoints_that_do_not_name_their_run_are_refused(tmp_path):
    trained(tmp_path)
    checkpoint = CheckpointStore(tmp_path).load()
    assert checkpoint is not None
    CheckpointStore(tmp_path).save(20, checkpoint.tensors)
    with pytest.raises(StorageError, match=rf"{tmp_path} .* do not name their run; choose another folder, or delete"):
        trained(tmp_path)


def test_other_moments_to_record_are_fine_while_they_are_still_to_come(tmp_path):
    with pytest.raises(RuntimeError):
        trained(tmp_path, loss=stopping_at(17), record={"at": (0, 14, 18)})
    weights, run = trained(tmp_path, record={"at": (0, 14, 15, 20)})
    expected, whole = trained(tmp_path / "other", record={"at": (0, 14, 15, 20)})
    assert torch.equal(weights, expected)
    assert run.identical(whole)


def test_a_folder_is_held_while_it_is_written_to(tmp_path):
    def loss(model, now):
        with pytest.raises(FolderLocked):
            trained(tmp_path)
        return quadratic(model, now)

    trained(tmp_path, loss=loss, steps=2, save=())
    trained(str(tmp_path), steps=2, save=())  # a path as words will do


def test_buffers_go_on_where_they_were(tmp_path):
    def counting(stop):
        def loss(model, now):
            model.mean.mul_(0.5).add_(model.p.detach())
            model.count.add_(1)
            if int(now) == stop:
                raise RuntimeError("power cut")
            return quadratic(model, now) * (1 + model.mean.square().sum(-1))

        return loss

    def model():
        model = Numbers(((1.0, 2.0), (3.0, 4.0)))
        both = torch.zeros(4, 2, dtype=torch.float64)
        model.register_buffer("mean", both[:2])
        model.register_buffer("rest", both[2:])  # views of one tensor
        model.register_buffer("count", torch.tensor(0))
        model.register_buffer("passing", torch.zeros(3), persistent=False)
        return model

    whole, torn, again = model(), model(), model()
    options, saving = {"optimiser": ADAM, "steps": 20}, Saving(tmp_path, (5, 10, 15))
    run = fit(whole, counting(None), **options)
    with pytest.raises(RuntimeError):
        fit(torn, counting(17), saving=saving, **options)
    assert fit(again, counting(None), saving=saving, **options).identical(run)
    assert all(tensor.equal(again.state_dict()[name]) for name, tensor in whole.state_dict().items())
    checkpoint = CheckpointStore(tmp_path).load()
    assert checkpoint is not None
    assert "buffer/count" in checkpoint.tensors
    assert "buffer/passing" not in checkpoint.tensors


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
    generation = CheckpointStore(tmp_path).load()
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
    generation = CheckpointStore(tmp_path).load()
    assert generation is not None
    assert generation.step == 20
    weights, run = trained(tmp_path)
    expected, whole = trained(tmp_path / "other")
    assert torch.equal(weights, expected)
    assert run.identical(whole)


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_after_the_last_update_is_not_swallowed(tmp_path, saved):
    def loss(model, now):
        if int(now) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return quadratic(model, now)

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path if saved else None, loss=loss)
    if saved:
        _, run = trained(tmp_path, loss=stopping_at(0))
        assert run.identical(trained(tmp_path / "other")[1])


def command(out):
    """A whole study from the command line, small: four arms, one after the other."""
    small = ("width=16", "hidden=32", "steps=60", "records=4")
    changes = [word for change in small for word in ("--set", change)]
    return [sys.executable, "-m", "joma", "run", "alignment", "--out", str(out), "--seeds", "1", *changes]


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
    for file in whole.glob("alignment/*/checkpoints/*/60.safetensors"):
        assert file.read_bytes() == (torn / file.relative_to(whole)).read_bytes()
