"""Where checkpoints are: local folders, and revisions of a hub that a local server plays."""

import builtins
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fake_hub import REPOSITORY, serve, write_series
from joma.arguments import InputError
from joma.watch import Checkpoints, weight_files
from joma.watch.locations import Folders, Hub
from joma.watch.store import Measure, Store
from joma.watch.weight_files import Unreadable

TOTAL = Measure("total", 1, lambda checkpoint: {"total": checkpoint.tensor("w").numpy().sum(keepdims=True)})


def test_a_folder_lists_its_subfolders_and_is_a_model_if_it_holds_weights(tmp_path):
    write_series(tmp_path, [4, 0])
    (tmp_path / ".cache").mkdir()
    (tmp_path / "notes.txt").write_text("")
    folders = Folders(tmp_path)
    assert folders.names() == ["step0", "step4"]
    assert folders.single is None
    assert Folders(tmp_path / "step4").single == "step4"
    assert folders.folder("step4") == tmp_path / "step4"
    assert Folders(tmp_path / "step4").folder("step4") == tmp_path / "step4"


def test_the_identity_of_a_local_file_changes_with_its_content(tmp_path):
    write_series(tmp_path, [0])
    file = tmp_path / "step0" / "model.safetensors"
    before = Folders(tmp_path).entries("step0")[file.name]
    assert Folders(tmp_path).entries("step0")[file.name].identity == before.identity
    file.write_bytes(file.read_bytes() + b"\0")
    assert Folders(tmp_path).entries("step0")[file.name].identity != before.identity
    assert before.name == "step0/model.safetensors"
    assert before.path() == file


def forbid(monkeypatch, function, path):
    """Let a function of `Path` fail for one path as if permission were denied: tests may run as root."""
    original = getattr(Path, function)

    def fail(self, *args, **kwargs):
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, function, fail)


def test_a_source_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    write_series(tmp_path, [0, 1])
    with monkeypatch.context() as patch:
        forbid(patch, "iterdir", tmp_path)
        with pytest.raises(
            InputError, match=r"`source` must be a folder that can be read, got .*\(Permission denied\)"
        ):
            Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        forbid(patch, "is_dir", tmp_path)
        with pytest.raises(InputError, match="check the path and its permissions"):
            Checkpoints(tmp_path)
    with pytest.raises(InputError, match="File name too long"):
        Checkpoints("x" * 300)


@pytest.mark.parametrize("function", ["iterdir", "stat", "open"])
def test_a_checkpoint_that_may_not_be_read_is_left_out_by_name(tmp_path, monkeypatch, function):
    write_series(tmp_path, range(3))
    folder = tmp_path / "step1"
    forbid(monkeypatch, function, folder if function == "iterdir" else folder / "model.safetensors")
    name = (
        "`step1` must be a readable folder" if function == "iterdir" else "`step1/model.safetensors` must be a readable"
    )
    results = [values for _, values in Checkpoints(tmp_path).measure(TOTAL)]
    assert f"{name}" in str(results[1])
    assert "got Permission denied; check its permissions" in str(results[1])
    assert [results[0]["total"].item(), results[2]["total"].item()] == [0, 12]


def test_what_is_no_folder_or_no_file_is_named_and_never_opened(tmp_path):
    write_series(tmp_path, range(4))
    (tmp_path / "step9").symlink_to(tmp_path / "step9")
    (tmp_path / "step7").write_text("a file is no checkpoint, and no fault")
    for step, make in enumerate([os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir]):
        file = tmp_path / f"step{step}" / "model.safetensors"
        file.unlink()
        make(file)
    results = {checkpoint.name: str(values) for checkpoint, values in Checkpoints(tmp_path).measure(TOTAL)}
    assert "`step0/model.safetensors` must be a regular file, got a named pipe" in results["step0"]
    assert "`step1/model.safetensors` must be a regular file, got a device" in results["step1"]
    assert "`step2` must be a checkpoint with model.safetensors" in results["step2"]
    assert "18." in results["step3"]
    assert "`step9` must be a readable folder" in results["step9"]
    assert set(results) == {"step0", "step1", "step2", "step3", "step9"}


def test_a_folder_that_vanishes_is_not_replaced_by_the_model_around_it(tmp_path):
    write_series(tmp_path, [0, 1])
    save_file({"w": torch.ones(6)}, tmp_path / "model.safetensors")
    series = Checkpoints(tmp_path)
    shutil.rmtree(tmp_path / "step1")
    results = [values for _, values in series.measure(TOTAL)]
    assert "`step1` must be a readable folder" in str(results[1])


def test_hub_revisions_are_read_by_byte_ranges(tmp_path):
    write_series(tmp_path, [0, 512, 4], size=200_000)
    with serve(tmp_path) as hub:
        series = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert series.steps == (0, 4, 512)
        assert series[2].tensor("m").tolist() == [[1.0] * 3] * 2
        assert series[1].part("w", 100, 103).tolist() == [4.0] * 3
        assert hub.served == series.bytes_read == 2 * weight_files.FIRST_READ + 24 + 12
        assert torch.equal(series[2].tensor("w"), torch.full((200_000,), 512.0))
        assert series[0].identity != series[1].identity == series[1].identity


def test_a_second_run_over_the_hub_downloads_no_file(tmp_path):
    write_series(tmp_path / "hub", [0, 1, 2])
    store = Store(tmp_path / "store")
    with serve(tmp_path / "hub") as hub:
        series = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        first = [values["total"] for _, values in series.measure(TOTAL, store=store)]
        served = hub.served
        assert served > 0
        again = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        np.testing.assert_equal([values["total"] for _, values in again.measure(TOTAL, store=store)], first)
        assert (hub.served, again.bytes_read) == (served, 0)


def test_a_bin_file_on_the_hub_is_downloaded_into_the_cache(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub" / "step1").mkdir(parents=True)
    torch.save({"w": torch.arange(5)}, tmp_path / "hub" / "step1" / "pytorch_model.bin")
    with serve(tmp_path / "hub") as hub:
        (only,) = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert only.tensor("w").tolist() == [0, 1, 2, 3, 4]
        assert list((tmp_path / "cache").iterdir())


def test_refusals_of_the_hub_are_named(tmp_path):
    write_series(tmp_path, [0, 1])
    with serve(tmp_path) as hub:
        with pytest.raises(InputError, match=r"'someone/other', which is not a folder and not a public repository"):
            Checkpoints("someone/other", endpoint=hub.endpoint)
        with pytest.raises(InputError, match="not a repository's name; check the spelling"):
            Checkpoints("no such/folder/here", endpoint=hub.endpoint)
        series = Checkpoints(REPOSITORY, endpoint=hub.endpoint, revisions=["step1", "step7"])
        assert [(fault.kind, fault.checkpoints) for fault in series.faults] == [("unknown", ("step7",))]
        hub.ranges = False
        message = r"`step1/model\.safetensors` must be served by byte ranges, got status 200"
        with pytest.raises(Unreadable, match=message):
            series[0].part("w", 2, 3)
    with pytest.raises(InputError, match=r"does not answer \(.*\); check the network, or give the folder"):
        Checkpoints(REPOSITORY, endpoint=hub.endpoint)


def test_a_file_that_ends_early_on_the_hub_is_named(tmp_path):
    write_series(tmp_path, [0], size=100_000)
    with serve(tmp_path) as hub:
        (only,) = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert only.names() == ("m", "w")
        file = tmp_path / "step0" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100_000])
        with pytest.raises(Unreadable, match=r"step0/model\.safetensors"):
            only.tensor("w")


def test_without_the_package_of_the_hub_the_remedy_is_named(monkeypatch):
    real_import = builtins.__import__

    def without_hub(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(InputError, match=r"'someone/model', which is not a folder, .*; pip install 'joma\[hf\]'"):
        Hub(REPOSITORY, None)
