"""What a folder holds besides the series: each thing is named with its reason, and used where its place is certain."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fake_hub import REPOSITORY, serve, write_series
from joma.watch import Checkpoints
from joma.watch.audit import Audit
from joma.watch.ignored import holds_weights, trainer_step


def write_model(folder, value=1.0, *, step=None):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((6,), value), "m": torch.ones(2, 3)}, folder / "model.safetensors")
    if step is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.5}))


def messages(series):
    assert all(fault.kind == "ignored" for fault in series.faults)
    assert not Audit(series.faults).incomplete
    return {fault.checkpoints: str(fault) for fault in series.faults}


def test_folders_that_look_like_checkpoints_are_named_with_a_remedy(tmp_path):
    write_series(tmp_path, [0, 10])
    for name in ("final", "best", "step_abc", "epoch_3"):
        write_model(tmp_path / name)
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "runs").mkdir()  # logs of TensorBoard
    series = Checkpoints(tmp_path)
    assert series.steps == (0, 10)
    faults = messages(series)
    assert set(faults) == {("final",), ("best",), ("step_abc",), ("epoch_3",), ("checkpoint-last",)}
    assert faults["final",] == (
        "the name 'final' says no step, so that its place in the series is unknown; rename it after its step, such as "
        "step1000, or give its name as a revision to measure it alone."
    )
    assert faults["epoch_3",] == (
        "epoch_3 counts epochs, and the series counts steps; give the pattern `epoch` to measure the epochs instead."
    )
    assert faults["checkpoint-last",] == "checkpoint-last holds no weights; save the weights into it, or remove it."
    assert Checkpoints(tmp_path, pattern="epoch").steps == (3,)
    assert Checkpoints(tmp_path, revisions=["final"]).names == ("final",)


def test_epochs_are_the_steps_where_nothing_counts_steps(tmp_path):
    write_series(tmp_path, [10, 2, 1], "epoch_{}")
    write_model(tmp_path / "best")
    series = Checkpoints(tmp_path)
    assert (series.unit, series.steps, series.names) == ("epoch", (1, 2, 10), ("epoch_1", "epoch_2", "epoch_10"))
    assert list(messages(series)) == [("best",)]
    assert Checkpoints(write_series(tmp_path / "steps", [5])).unit == "step"


def test_a_final_model_comes_last_if_its_trainer_says_so(tmp_path):
    write_series(tmp_path, [100, 200], "checkpoint-{}")
    write_model(tmp_path / "final", step=250)
    series = Checkpoints(tmp_path)
    assert list(zip(series.steps, series.names, strict=True))[-1] == (250, "final")
    assert series.faults == ()


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("final", 200, "its trainer_state.json says step 200, as does checkpoint-200; nothing is lost if the weights"),
        ("final", 150, "its trainer_state.json says step 150; rename it to step150 if it belongs to this training"),
        ("best", 250, "its trainer_state.json says step 250; rename it to step250"),
    ],
)
def test_a_model_whose_place_is_not_certain_is_ignored(name, step, reason, tmp_path):
    write_series(tmp_path, [100, 200], "checkpoint-{}")
    write_model(tmp_path / name, step=step)
    series = Checkpoints(tmp_path)
    assert series.steps == (100, 200)
    assert reason in messages(series)[name,]


def test_two_final_models_are_both_ignored(tmp_path):
    write_series(tmp_path, [100])
    write_model(tmp_path / "final", step=200)
    write_model(tmp_path / "last", step=300)
    series = Checkpoints(tmp_path)
    assert series.steps == (100,)
    assert set(messages(series)) == {("final",), ("last",)}


@pytest.mark.parametrize("content", ["", "[]", '{"global_step": "7"}', '{"global_step": true}', '{"global_step": -1}'])
def test_a_trainer_state_without_a_step_says_nothing(content, tmp_path):
    (tmp_path / "trainer_state.json").write_text(content)
    assert trainer_step(tmp_path) is None


def test_the_model_that_the_trainer_saved_beside_its_checkpoints_is_named(tmp_path):
    write_series(tmp_path, [100, 200], "checkpoint-{}")
    write_model(tmp_path, step=200)
    (tmp_path / "training_args.bin").write_bytes(b"")
    ((names, message),) = messages(Checkpoints(tmp_path)).items()
    assert names == ("model.safetensors", "training_args.bin")
    assert "in the folder itself are not in the series: trainer_state.json says step 200, as does checkpoint" in message


def test_files_that_are_not_read_are_named_once_for_the_series(tmp_path):
    write_series(tmp_path, [0, 1, 2])
    for step in range(3):
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
            (tmp_path / f"step{step}" / name).write_bytes(b"")
    (tmp_path / "step1" / "pytorch_model.bin").write_bytes(b"")
    faults = list(messages(Checkpoints(tmp_path)).items())
    assert len(faults) == 2
    (training, state), (beside, other) = faults
    assert len(training) == 12
    assert state.startswith(
        "optimizer.pt, rng_state.pth, scheduler.pt, training_args.bin in 3 checkpoints hold the state"
    )
    assert beside == ("step1/pytorch_model.bin",)
    assert other.startswith("pytorch_model.bin in step1 is not read: other files hold the weights that are measured; ")


def test_one_model_beside_other_folders_and_files(tmp_path):
    write_model(tmp_path)
    write_model(tmp_path / "best")
    (tmp_path / "optimizer.pt").write_bytes(b"")
    series = Checkpoints(tmp_path)
    assert series.names == (tmp_path.name,)
    assert set(messages(series)) == {("best",), ("optimizer.pt",)}


def test_shards_and_adapters_are_read(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / "step1" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "step1" / name).write_bytes(b"")
    (tmp_path / "step2").mkdir()
    (tmp_path / "step2" / "adapter_model.safetensors").write_bytes(b"")
    assert Checkpoints(tmp_path).faults == ()


def test_the_main_branch_on_the_hub_is_named(tmp_path):
    pytest.importorskip("huggingface_hub")
    write_series(tmp_path, [0, 1])
    write_model(tmp_path / "main")
    with serve(tmp_path) as hub:
        series = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert series.steps == (0, 1)
        assert list(messages(series)) == [("main",)]


def test_a_folder_that_cannot_be_listed_holds_no_weights(tmp_path):
    assert not holds_weights(tmp_path / "nowhere")
    (tmp_path / "optimizer.bin").write_bytes(b"")
    assert not holds_weights(tmp_path)
