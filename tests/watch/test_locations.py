"""Where checkpoints are: local folders, and revisions of a hub that a local server plays."""

import builtins

import numpy as np
import pytest
import torch

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
