"""The unit of a checkpoint: whatever its address was made from is opened again, and nothing else."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from fake_hub import REPOSITORY, serve, write_series
from joma.arguments import InputError
from joma.progress import SILENT
from joma.watch import Checkpoints
from joma.watch.audit import SKETCH, Sketch
from joma.watch.byte_ranges import Unreadable
from joma.watch.checkpoint_units import find_measure, measure_checkpoint, open_checkpoint
from joma.watch.engine_measures import decode
from joma.watch.probing import WEIGHTS


def reopened(series, index=0):
    """Return a checkpoint that was opened from its address, after a journey as JSON."""
    return open_checkpoint(**json.loads(json.dumps(series.address(series[index]))))


def test_a_checkpoint_of_a_series_is_opened_again(tmp_path, monkeypatch):
    write_series(tmp_path / "series", (0, 10, 20))
    monkeypatch.chdir(tmp_path)
    series = Checkpoints("series")
    address = series.address(series[2])
    monkeypatch.chdir("/")
    checkpoint = open_checkpoint(**address)
    assert (checkpoint.name, checkpoint.tensor("w").tolist()) == ("step20", [20.0] * 6)


def test_names_that_only_a_pattern_orders_are_opened_again(tmp_path):
    write_series(tmp_path, (3, 4), name="part-{}-of-training")
    series = Checkpoints(tmp_path, pattern=r"part-(?P<step>\d+)-of-training")
    assert [reopened(series, index).tensor("w")[0].item() for index in (0, 1)] == [3.0, 4.0]


def test_a_folder_that_is_a_model_is_opened_again(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert reopened(Checkpoints(tmp_path)).tensor("w").tolist() == [1.0, 1.0]


def test_a_revision_of_the_hub_is_opened_again(tmp_path):
    write_series(tmp_path, (0, 10))
    with serve(tmp_path) as hub:
        series = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert reopened(series, 1).tensor("w").tolist() == [10.0] * 6
        assert series.bytes_read == 0
        changed = series.address(series[1]) | {"identity": "of yesterday"}
        with pytest.raises(Unreadable, match="`step10` must be the checkpoint that was to be measured, got a revision"):
            open_checkpoint(**changed)


def test_an_adapter_finds_the_base_that_the_series_found(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    save_file({"a.weight": torch.zeros(4, 3)}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "series" / "checkpoint-7").mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["a"], "base_model_name_or_path": "base"}
    (tmp_path / "series" / "checkpoint-7" / "adapter_config.json").write_text(json.dumps(config))
    adapter = {
        "base_model.model.a.lora_A.weight": torch.ones(1, 3),
        "base_model.model.a.lora_B.weight": torch.ones(4, 1),
    }
    save_file(adapter, tmp_path / "series" / "checkpoint-7" / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)  # the adapter names its base relative to here
    series = Checkpoints("series")
    address = series.address(series[0])
    monkeypatch.chdir("/")
    assert open_checkpoint(**address).tensor("a.weight").eq(2).all()


def test_copies_with_their_times_are_the_same_and_others_are_not(tmp_path):
    write_series(tmp_path / "first", (0, 1))
    shutil.copytree(tmp_path / "first", tmp_path / "second")  # as on another machine
    first, second = Checkpoints(tmp_path / "first"), Checkpoints(tmp_path / "second")
    assert first[1].identity != second[1].identity
    moved = first.address(first[1]) | {"source": str(tmp_path / "second")}
    assert open_checkpoint(**moved).tensor("w").tolist() == [1.0] * 6
    os.utime(tmp_path / "second" / "step1" / "model.safetensors", (1, 1))
    with pytest.raises(Unreadable, match=r"files of other sizes or times in .*second on .*; copy it with its times"):
        open_checkpoint(**moved)


def test_a_folder_that_is_missing_here_is_named(tmp_path):
    write_series(tmp_path / "series", (0,))
    series = Checkpoints(tmp_path / "series")
    address = series.address(series[0]) | {"source": str(tmp_path / "elsewhere")}
    with pytest.raises(Unreadable, match=f"got no {tmp_path}/elsewhere on "):
        open_checkpoint(**address)


def test_a_unit_ends_with_its_first_error(tmp_path):
    write_series(tmp_path, (0,))  # weights that no Transformer has
    series = Checkpoints(tmp_path)
    fields = {
        "address": series.address(series[0]),
        "measures": [{"name": "audit"}, {"name": "weights"}, {"name": "audit"}],
    }
    value = measure_checkpoint(tmp_path, SILENT, **fields).value
    sketch, error = (decode("step0", outcome) for outcome in value)
    assert Sketch.unpack(sketch).shapes == {"m": [2, 3], "w": [6]}
    assert isinstance(error, InputError)
    assert "must have weights with the names of a Transformer's" in str(error)


def test_measures_are_found_by_the_names_they_are_stored_under():
    assert (find_measure("audit"), find_measure("weights")) == (SKETCH, WEIGHTS)
    assert find_measure("attention", tokens=[[1, 2]], measures=["entropy"]).name == "attention"
