"""The store of checkpoints: what counts, what is kept, and what is refused."""

import shutil
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.files import StorageError
from joma.train.checkpoint import CheckpointStore, DamagedCheckpoint

LEFT = ("2.safetensors", "3.safetensors.sha256", ".joma-161-a_b0c.safetensors", ".joma-161.safetensors-a_b0c.sha256")
OTHERS = ("notes.safetensors", ".hidden", "07.safetensors")


def test_a_checkpoint_without_its_checksum_does_not_count(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, {"x": torch.ones(2)})
    store.save(6, {"x": torch.zeros(2)})
    (tmp_path / "6.safetensors.sha256").unlink()
    with pytest.warns(
        DamagedCheckpoint, match=r"6\.safetensors has no checksum file; the checkpoint of step 3 is used"
    ):
        checkpoint = store.load()
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert torch.equal(checkpoint.tensors["x"], torch.ones(2))


@settings(max_examples=25)  # every save is flushed to the disk
@given(
    saved=st.sets(st.integers(4, 30), min_size=1, max_size=5),
    keep=st.integers(1, 4),
    damaged=st.sets(st.integers(4, 30)),
)
def test_a_save_removes_what_is_older_and_not_whole(tmp_path_factory, saved, keep, damaged):
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in saved:
        CheckpointStore(folder).save(step, {"x": torch.ones(2)}, keep=99)
    damaged &= saved
    for step in damaged:
        (folder / f"{step}.safetensors").write_bytes(b"cut")
    for name in (*LEFT, *OTHERS):
        (folder / name).touch()
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedCheckpoint)
        checkpoint = store.load()
    assert (checkpoint.step if checkpoint else None) == max(saved - damaged, default=None)
    store.save(31, {"x": torch.zeros(2)}, keep=keep)
    passed = {step for step in damaged if checkpoint is None or step > checkpoint.step}
    remaining = [*sorted(saved - passed), 31][-keep:]
    expected = {f"{step}.safetensors{more}" for step in remaining for more in ("", ".sha256")}
    assert {file.name for file in folder.iterdir()} == {*expected, *OTHERS}


def test_tensors_and_identity_come_back_as_they_were(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(True), "c": torch.zeros(0, dtype=torch.long)}
    CheckpointStore(tmp_path, {"steps": "3"}).save(2, tensors)
    checkpoint = CheckpointStore(tmp_path).load()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.identity) == (2, {"steps": "3"})
    assert checkpoint.tensors.keys() == tensors.keys()
    assert all(checkpoint.tensors[name].equal(tensor) for name, tensor in tensors.items())


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path / "missing").load() is None


def test_a_file_that_cannot_be_removed_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "1.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"cannot remove .*1\.safetensors"):
        store.save(2, {"x": torch.ones(1)})


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, {"x": torch.ones(2)})
    for suffix in ("", ".sha256"):
        shutil.copy(tmp_path / f"3.safetensors{suffix}", tmp_path / f"7.safetensors{suffix}")
    with pytest.warns(DamagedCheckpoint, match=r"7\.safetensors holds another step than its name says; .* step 3"):
        checkpoint = store.load()
    assert checkpoint.step == 3
