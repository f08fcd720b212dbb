"""Measurements in a folder: nothing is measured twice, and a damaged or swapped measurement is measured again."""

import fcntl
import shutil
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fake_hub import write_series
from joma.watch import Checkpoints, weight_files
from joma.watch.store import DamagedMeasurement, Measure, Store


def total(checkpoint):
    return {"total": checkpoint.tensor("w").numpy().sum(keepdims=True)}


TOTAL = Measure("total", 1, total)


def totals(series, store, measure=TOTAL):
    return [values["total"].item() for _, values in series.measure(measure, store=store)]


def test_a_second_run_reads_nothing_and_a_changed_file_is_read_again(tmp_path):
    series, store = Checkpoints(write_series(tmp_path / "s", range(5))), Store(tmp_path / "store")
    assert totals(series, store) == [0, 6, 12, 18, 24]
    again = Checkpoints(tmp_path / "s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.ByteSource, "read", None)
        assert totals(again, store) == [0, 6, 12, 18, 24]
    assert again.bytes_read == 0
    save_file({"w": torch.ones(6)}, tmp_path / "s" / "step3" / "model.safetensors")
    assert totals(again, store) == [0, 6, 12, 6, 24]
    assert 0 < again.bytes_read < 400
    newer = Measure("total", 2, lambda checkpoint: {"total": checkpoint.tensor("w").numpy()[:1]})
    assert totals(again, store, newer) == [0, 1, 2, 1, 4]


def test_an_interrupted_series_resumes_at_the_checkpoint_where_it_stopped(tmp_path):
    series, store = Checkpoints(write_series(tmp_path / "s", range(6))), Store(tmp_path / "store")
    measured = []

    def interrupted(checkpoint):
        measured.append(checkpoint.step)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return total(checkpoint)

    measure = Measure("total", 1, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(series.measure(measure, store=store))
    assert len(list(series.measure(measure, store=store))) == 6
    assert measured == [0, 1, 2, 3, 3, 4, 5]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A series of two checkpoints and the store of their measurements."""
    folder = tmp_path_factory.mktemp("measured")
    series, store = Checkpoints(write_series(folder / "s", [1, 2])), Store(folder / "store")
    assert totals(series, store) == [6, 12]
    return series, store


@settings(max_examples=200)
@given(data=st.data())
def test_a_changed_byte_in_the_store_is_named_and_measured_again(measured, data):
    series, store = measured
    file = data.draw(st.sampled_from(sorted(store.folder.iterdir())))
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(damaged)
    with pytest.warns(DamagedMeasurement, match=f"{file.with_suffix('').stem}.*measured again"):
        assert totals(series, store) == [6, 12]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert totals(series, store) == [6, 12]
    file.write_bytes(content)


def test_a_measurement_in_the_place_of_another_is_measured_again(measured, tmp_path):
    series, store = measured
    swapped = Store(shutil.copytree(store.folder, tmp_path / "store"))
    first, second = sorted(swapped.folder.glob("*.safetensors"))
    for suffix in ("", ".sha256"):
        paths = [file.with_name(file.name + suffix) for file in (first, second)]
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)
    with pytest.warns(DamagedMeasurement):
        assert totals(series, swapped) == [6, 12]
    first.write_bytes(second.read_bytes())
    digest = second.with_name(second.name + ".sha256").read_text()
    first.with_name(first.name + ".sha256").write_text(digest.replace(second.name, first.name))
    with pytest.warns(DamagedMeasurement, match="is the measurement of something else; it is measured again"):
        assert totals(series, swapped) == [6, 12]


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    leftover, living = tmp_path / ".joma-total-abc.safetensors", tmp_path / ".joma-total-def.safetensors"
    leftover.touch()
    with living.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Store(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [living.name]


def test_arrays_of_any_order_come_back(tmp_path):
    series, store = Checkpoints(write_series(tmp_path / "s", [1])), Store(tmp_path / "store")
    values = {"a": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "b": np.array(3)}
    measure = Measure("any", 1, lambda _: values)
    (checkpoint,) = series
    store.put(checkpoint, measure, values)
    loaded = store.get(checkpoint, measure)
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value)
