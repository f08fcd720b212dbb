"""Series of checkpoints: their order, which checkpoints are chosen, and what is measured and stored."""

import json
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fake_hub import write_series
from joma.arguments import InputError
from joma.watch import Checkpoints
from joma.watch.series import Fault, _in_training_order
from joma.watch.store import Measure, Store
from joma.watch.weight_files import Unreadable

PYTHIA = [0, *(2**k for k in range(10)), *range(1000, 144_000, 1000)]
OLMO = [(0, 0), (1000, 5), (2000, 9), (90_000, 398), (90_500, 400)]


def total(checkpoint):
    return {"total": checkpoint.tensor("w").numpy().sum(keepdims=True)}


TOTAL = Measure("total", 1, total)


@pytest.mark.parametrize(
    "names",
    [
        [f"step{step}" for step in PYTHIA],
        [f"checkpoint-{step}" for step in range(500, 12_000, 500)],
        [f"step{step}-tokens{tokens}B" for step, tokens in OLMO],
        [f"stage1-step{step}-tokens{tokens}B" for step, tokens in OLMO],
        [f"global_step{step}" for step in PYTHIA],
    ],
)
@given(order=st.randoms(use_true_random=False))
def test_known_series_come_in_training_order_whatever_the_order_of_their_names(names, order: random.Random):
    shuffled = [*names, "main", "stage2-ingredient1-step1000-tokens5B"]
    order.shuffle(shuffled)
    members, without_step, faults = _in_training_order(shuffled, None)
    assert faults == ()
    assert [name for _, name in members] == names
    assert set(without_step) == {"main", "stage2-ingredient1-step1000-tokens5B"}
    assert [step for step, _ in members] == sorted(int(re.search(r"\d+(?=$|-tokens)", name)[0]) for name in names)


def test_folders_are_read_lazily_and_in_order(tmp_path):
    series = Checkpoints(write_series(tmp_path, [8, 0, 1000, 64]))
    assert series.steps == (0, 8, 64, 1000)
    assert len(series) == 4
    assert series.bytes_read == 0
    assert [checkpoint.step for checkpoint in series] == [0, 8, 64, 1000]
    assert series.bytes_read == 0
    assert series[-1].tensor("w").tolist() == [1000.0] * 6
    assert [checkpoint.name for checkpoint in series[1:3]] == ["step8", "step64"]
    assert series[0].names() == ("m", "w")
    assert series[0].shape("m") == (2, 3)
    with pytest.raises(InputError, match=r"`name` must be a tensor of step0, got 'x'; see `names\(\)`"):
        series[0].tensor("x")


def test_a_pattern_chooses_and_orders(tmp_path):
    write_series(tmp_path, [3, 20], "run-a-{}")
    write_series(tmp_path, [1, 5], "run-b-{}")
    assert Checkpoints(tmp_path, pattern=r"run-b-(?P<step>\d+)").steps == (1, 5)
    assert Checkpoints(tmp_path, pattern=r"run-.-(?P<step>\d+)").steps == (1, 3, 5, 20)
    for pattern, message in {"run-(": "a regular expression", r"run-b-(\d+)": "must have a group `step`"}.items():
        with pytest.raises(InputError, match=message):
            Checkpoints(tmp_path, pattern=pattern)
    write_series(tmp_path, [3], "run-b-{}")
    with pytest.raises(InputError, match=r"run-a-3 and run-b-3 for step 3"):
        Checkpoints(tmp_path, pattern=r"run-.-(?P<step>\d+)")


def test_revisions_choose_and_unknown_ones_are_faults(tmp_path):
    write_series(tmp_path, [0, 1, 2])
    write_series(tmp_path, [7], "final{}")
    series = Checkpoints(tmp_path, revisions=["step2", "step0", "step99", "final7"])
    assert series.steps == (0, 2)
    assert [(fault.kind, fault.checkpoints) for fault in series.faults] == [
        ("unknown", ("step99",)),
        ("unordered", ("final7",)),
    ]
    assert "choose among final7, step0, step1, step2" in series.faults[0].remedy
    assert Checkpoints(tmp_path, revisions=["final7"]).steps == (0,)
    with pytest.raises(InputError, match="a series with the revisions step99"):
        Checkpoints(tmp_path, revisions=["step99"])


def test_one_revision_may_be_a_string_and_an_empty_source_is_refused(tmp_path):
    write_series(tmp_path, [0, 3, 7])
    assert Checkpoints(tmp_path, revisions="step3").names == ("step3",)
    for source in ("", "  "):
        with pytest.raises(InputError, match=r"must be a folder or a repository, got an empty name; write `\.`"):
            Checkpoints(source)


def test_a_model_folder_is_a_series_of_one(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (only,) = Checkpoints(tmp_path)
    assert only.tensor("w").tolist() == [1, 1, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a series with checkpoints named by their step"):
        Checkpoints(tmp_path / "empty")


def test_weights_that_are_in_no_folder_and_a_file_for_a_folder_come_with_a_remedy(tmp_path):
    with pytest.raises(InputError, match=r"got .* with none; give the folder that holds the checkpoints"):
        Checkpoints(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step={step}.ckpt").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"with step=1.ckpt, step=2.ckpt; put each checkpoint into a folder named after"
    ):
        Checkpoints(tmp_path)
    for step in (1, 2):
        save_file({"w": torch.ones(1)}, tmp_path / f"step_{step}.safetensors")
    with pytest.raises(
        Unreadable, match=r"name the model's file model.safetensors, or put each checkpoint into a folder"
    ):
        Checkpoints(tmp_path)[0].names()
    with pytest.raises(InputError, match=r"got '.*step_1.safetensors', which is a file; give the folder that it is in"):
        Checkpoints(tmp_path / "step_1.safetensors")


def test_an_unreadable_checkpoint_comes_as_its_error_and_the_others_are_measured(tmp_path):
    series = Checkpoints(write_series(tmp_path, range(4)))
    file = tmp_path / "step2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    results = [values for _, values in series.measure(TOTAL, leave_out=["step0"])]
    assert isinstance(results[1], Unreadable)
    assert "`step2/model.safetensors`" in str(results[1])
    assert [values["total"].item() for values in (results[0], results[2])] == [6, 18]


def test_an_unexpected_error_of_a_measure_names_the_checkpoint_and_its_type(tmp_path):
    series, store = Checkpoints(write_series(tmp_path / "s", range(3))), Store(tmp_path / "store")

    def measure_with_defect(checkpoint):
        if checkpoint.step == 1:
            raise IndexError("index 3 is out of range")
        return total(checkpoint)

    results = [values for _, values in series.measure(Measure("total", 1, measure_with_defect), store=store)]
    message = (
        r"`step1` must be a checkpoint whose total can be measured, got IndexError \(index 3 is out of range\); .*"
    )
    assert re.fullmatch(message + r"report it as a defect of joma\.", str(results[1]))
    assert isinstance(results[1].__cause__, IndexError)
    assert [results[0]["total"].item(), results[2]["total"].item()] == [0, 12]
    assert len(list(store.folder.glob("*.safetensors"))) == 2


def test_an_error_of_the_store_is_not_blamed_on_a_checkpoint(tmp_path, monkeypatch):
    series, store = Checkpoints(write_series(tmp_path / "s", range(3))), Store(tmp_path / "store")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(store, "put", full)
    with pytest.raises(OSError, match="No space left"):
        list(series.measure(TOTAL, store=store))


def test_steps_and_names_that_cannot_be_stored_are_faults(tmp_path):
    write_series(tmp_path, [0, 5, 2**63 - 1])
    names = [f"step{2**63}", "step" + "9" * 250]
    for name in names:
        (tmp_path / name).mkdir()
    series = Checkpoints(tmp_path)
    assert series.steps == (0, 5, 2**63 - 1)
    assert sorted(fault.checkpoints for fault in series.faults) == sorted((name,) for name in names)
    assert all(fault.loses_data and "is not a whole number from 0 to" in str(fault) for fault in series.faults)
    (tmp_path / "bad\udcff7").mkdir()
    (fault,) = Checkpoints(tmp_path, pattern=r"\D*(?P<step>\d{1,5})").faults
    assert (fault.checkpoints, fault.left_out) == (("bad\udcff7",), ("bad\udcff7",))
    assert "not UTF-8" in fault.message
    faults = Checkpoints(tmp_path, pattern=r"step(?P<step>.|.{19})").faults
    assert {fault.checkpoints[0] for fault in faults} == {f"step{2**63}"}


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    (tmp_path / "step1").mkdir()
    for shard in ("a", "b"):
        save_file({"w": torch.ones(3)}, tmp_path / "step1" / f"{shard}.safetensors")
    index = json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}})
    (tmp_path / "step1" / "model.safetensors.index.json").write_text(index)
    (only,) = Checkpoints(tmp_path)
    with pytest.raises(Unreadable, match=r"each tensor once, got w in a\.safetensors and in b\.safetensors"):
        only.names()


@pytest.mark.parametrize("left_out", [True, False])
def test_a_fault_has_the_parts_of_the_error_even_if_they_contain_semicolons(left_out):
    error = Unreadable("step2/model.safetensors", "complete; whole", "a; b", "download it; or leave it out")
    fault = Fault.from_error("unreadable", "step2", error, left_out=left_out)
    assert fault.message == "`step2/model.safetensors` must be complete; whole, got a; b"
    assert fault.remedy == "download it; or leave it out"
    assert fault.checkpoints == ("step2",)
    assert fault.left_out == (("step2",) if left_out else ())
    assert str(fault) == str(error)


def test_identical_checkpoints_lose_no_data_unless_one_is_left_out():
    assert not Fault("identical", ("step0", "step1"), "same", "none").loses_data
    assert Fault("identical", ("step0", "step9"), "same", "none", ("step0",)).loses_data
    assert Fault("not measured", ("step0",), "no config", "add it").loses_data
