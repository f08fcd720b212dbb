"""The audit of a series: correct series have no fault, and every kind of fault is found and named."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fake_hub import REPOSITORY, serve
from joma.watch import Checkpoints
from joma.watch.audit import audit_series, detours, distances, misplaced
from joma.watch.store import Store

STEPS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000, 4000, 5000]
WALKS = ("walk", "drift", "noise")


def walk(kind, steps, generator):
    """Weights along a path: a random walk in log-time, a straight drift, or drift under noise as large as its steps."""
    time = np.log1p(np.asarray(steps, dtype=float))
    start, direction = generator.normal(size=(2, 3000))
    noise = generator.normal(size=(len(time), 3000))
    rises = np.sqrt(np.diff(time, prepend=time[0]))[:, None]
    if kind == "walk":
        return start + 0.3 * np.cumsum(rises * noise, axis=0)
    return start + 0.2 * np.outer(time, direction) + (0.1 if kind == "noise" else 1e-4) * noise


def write_checkpoints(folder: Path, points, steps=STEPS, shards=1, dtype=torch.float32):
    """Write a checkpoint for each point, cut into 10 x 10 matrices, in one file or in shards."""
    for step, point in zip(steps, points, strict=True):
        path = folder / f"step{step}"
        path.mkdir(parents=True)
        matrices = torch.tensor(point, dtype=dtype).reshape(-1, 10, 10)
        named = {f"layer{i}.weight": matrix.clone() for i, matrix in enumerate(matrices)}
        if shards == 1:
            save_file(named, path / "model.safetensors")
            continue
        file_of = {name: f"model-{i * shards // len(named)}.safetensors" for i, name in enumerate(named)}
        for file in sorted(set(file_of.values())):
            save_file({name: tensor for name, tensor in named.items() if file_of[name] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


def faults_of(source, **options):
    faults = audit_series(Checkpoints(source, **options)).faults
    return [(fault.kind, fault.checkpoints, fault.left_out) for fault in faults]


@pytest.mark.parametrize("kind", WALKS)
@given(seed=st.integers(0, 10_000), count=st.integers(4, len(STEPS)))
def test_a_correct_series_has_no_fault(kind, seed, count):
    points = walk(kind, STEPS[:count], np.random.default_rng(seed))
    assert misplaced(distances([{"w": point} for point in points], ["w"])) == []


@pytest.mark.parametrize("kind", WALKS)
@given(seed=st.integers(0, 10_000), places=st.tuples(st.integers(0, 15), st.integers(0, 15)))
def test_weights_of_another_step_are_found(kind, seed, places):
    wrong, source = places
    if abs(wrong - source) < 3:  # too near to be distinguished by distances
        return
    generator = np.random.default_rng(seed)
    points = walk(kind, STEPS, generator)
    points[wrong] = points[source] + 1e-3 * generator.normal(size=3000)
    (fault,) = misplaced(distances([{"w": point} for point in points], ["w"]))
    assert fault[0] in (wrong, source)  # which of two nearly equal points is the wrong one is unknown …
    if 0 < source < 15:
        assert fault[0] == wrong  # … unless the correct one has neighbours on both sides


@pytest.mark.parametrize("kind", ["walk", "drift"])
@given(seed=st.integers(0, 10_000), place=st.integers(1, 13))  # at the ends the order is unknown
def test_exchanged_neighbours_are_found(kind, seed, place):
    points = walk(kind, range(16), np.random.default_rng(seed))
    points[[place, place + 1]] = points[[place + 1, place]]
    faults = misplaced(distances([{"w": point} for point in points], ["w"]))
    assert faults
    assert {fault[0] for fault in faults} <= {place - 1, place, place + 1, place + 2}


@pytest.mark.parametrize("kind", ["walk", "drift"])
@given(seed=st.integers(0, 10_000), place=st.integers(0, 15), scale=st.floats(1, 30))
def test_weights_that_are_far_from_all_others_are_never_blamed_on_a_neighbour(kind, seed, place, scale):
    generator = np.random.default_rng(seed)
    points = walk(kind, STEPS, generator)
    points[place] += scale * generator.normal(size=3000) * np.abs(points).max()
    assert {fault[0] for fault in misplaced(distances([{"w": point} for point in points], ["w"]))} <= {place}


@given(seed=st.integers(0, 1000), count=st.integers(1, 8))
def test_a_detour_is_the_change_of_the_path_length(seed, count):
    points = np.random.default_rng(seed).normal(size=(count + 1, 3))
    between = np.linalg.norm(points[:, None] - points[None], axis=-1)

    def length(order):
        return sum(between[a, b] for a, b in pairwise(order))

    path = list(range(count))
    expected = [length([*path[:gap], count, *path[gap:]]) - length(path) for gap in range(count + 1)]
    np.testing.assert_allclose(detours(between[count], path, between), expected, atol=1e-12)


def test_distances_are_relative_to_each_tensor():
    a = np.random.default_rng(0).normal(size=(5, 40))
    b = np.random.default_rng(1).normal(size=(5, 60))
    plain = [{"a": x, "b": y} for x, y in zip(a, b, strict=True)]
    scaled = [{"a": 1e4 * x, "b": 1e-3 * y} for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(distances(plain, ["a", "b"]), distances(scaled, ["a", "b"]), rtol=1e-12)
    expected = np.linalg.norm(a[0] - a[3]) / np.sqrt(np.median((a**2).sum(1)))
    assert distances(plain, ["a"])[0, 3] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sound_series_on_disk_has_no_fault(tmp_path, dtype):
    write_checkpoints(tmp_path, walk("walk", STEPS, np.random.default_rng(0)), dtype=dtype)
    assert faults_of(tmp_path) == []


def test_the_first_steps_may_be_identical_and_are_kept(tmp_path):
    """Pythia's issues 83 and 198: step0, step1 and step2 are the same."""
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[:3] = points[0]
    write_checkpoints(tmp_path, points)
    assert faults_of(tmp_path) == [("identical", ("step0", "step1", "step2"), ())]


def test_the_final_weights_under_many_names(tmp_path):
    """Pythia's issue 205: more than half of the revisions, among them all early ones, hold the final weights."""
    points = walk("walk", STEPS, np.random.default_rng(0))
    wrong = [*range(9), 11]
    points[wrong] = points[-1]
    write_checkpoints(tmp_path, points)
    names = tuple(f"step{STEPS[i]}" for i in wrong)
    assert faults_of(tmp_path) == [("identical", (*names, "step5000"), names)]


def test_one_shard_of_the_final_weights(tmp_path):
    """Pythia's issue 206: two revisions have the first shard of the last revision; their other shards are correct."""
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[[6, 9], :1000] = points[-1, :1000]
    write_checkpoints(tmp_path, points, shards=3)
    result = audit_series(Checkpoints(tmp_path))
    (fault,) = result.faults
    assert (fault.kind, fault.checkpoints) == ("identical", ("step32", "step256", "step5000"))
    assert fault.message.startswith("the weights in model-0.safetensors of step32, step256, step5000 are the same")
    assert "they fit best as step5000" in fault.message
    assert result.left_out == {"step32", "step256"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_a_fault_and_the_others_are_still_judged(tmp_path, value):
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[4] = points[12] + 1e-3
    points[7], points[9] = value, value
    write_checkpoints(tmp_path, points)
    faults = {fault.checkpoints: fault for fault in audit_series(Checkpoints(tmp_path)).faults}
    kinds = {names: (fault.kind, fault.left_out) for names, fault in faults.items()}
    assert kinds == {
        ("step64",): ("not finite", ("step64",)),
        ("step256",): ("not finite", ("step256",)),
        ("step8",): ("misplaced", ("step8",)),
    }
    assert "step64 has weights that are NaN or infinite (layer" in faults["step64",].message


def test_float64_weights_beyond_float32_are_a_fault_without_a_warning(tmp_path):
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[5] = 1e300
    write_checkpoints(tmp_path, points, dtype=torch.float64)
    assert faults_of(tmp_path) == [("not finite", ("step16",), ("step16",))]


def test_identical_neighbours_are_expected_only_at_the_start(tmp_path):
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[1], points[8] = points[0], points[9]
    write_checkpoints(tmp_path, points)
    first, later = audit_series(Checkpoints(tmp_path)).faults
    assert (first.checkpoints, later.checkpoints) == (("step0", "step1"), ("step128", "step256"))
    assert "before the first update" in first.remedy
    assert later.remedy == "download them again, unless the training stood still there"


@given(seed=st.integers(0, 10_000), wrong=st.sets(st.integers(0, 15), min_size=2, max_size=5), to=st.integers(0, 15))
def test_a_misplaced_checkpoint_is_sent_to_stations_that_are_not_misplaced(seed, wrong, to):
    generator = np.random.default_rng(seed)
    points = walk("walk", STEPS, generator)
    for place in wrong:
        points[place] = points[to] + 1e-2 * generator.normal(size=3000)
    faults = misplaced(distances([{"w": point} for point in points], ["w"]))
    stations = {station for _, before, after in faults for station in (before, after)}
    assert not stations & {point for point, _, _ in faults}


def test_one_misplaced_shard(tmp_path):
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[4, 2000:] = points[12, 2000:] + 1e-3
    write_checkpoints(tmp_path, points, shards=3)
    (fault,) = audit_series(Checkpoints(tmp_path)).faults
    assert (fault.kind, fault.checkpoints, fault.left_out) == ("misplaced", ("step8",), ("step8",))
    assert fault.message.startswith("the weights in model-2.safetensors of step8 belong")
    assert "step2000" in fault.message


def test_every_other_fault_is_named_and_the_other_checkpoints_are_sound(tmp_path):
    points = walk("walk", STEPS, np.random.default_rng(0))
    write_checkpoints(tmp_path, points, shards=2)
    (tmp_path / "step4" / "model-1.safetensors").unlink()
    cut = tmp_path / "step16" / "model-0.safetensors"
    cut.write_bytes(cut.read_bytes()[:3000])
    write_checkpoints(tmp_path / "other", points[:1, :2900], [64])
    other = tmp_path / "other" / "step64" / "model.safetensors"
    for file in (tmp_path / "step64").iterdir():
        file.unlink()
    other.rename(tmp_path / "step64" / "model.safetensors")
    for file in (tmp_path / "step128").iterdir():
        file.unlink()
    torch.save({"w": torch.ones(2), "x": tmp_path}, tmp_path / "step128" / "pytorch_model.bin")
    result = audit_series(Checkpoints(tmp_path, revisions=[f"step{step}" for step in [*STEPS, 77]]))
    assert {(fault.kind, fault.checkpoints[0]) for fault in result.faults} == {
        ("unknown", "step77"),
        ("unreadable", "step4"),
        ("unreadable", "step16"),
        ("architecture", "step64"),
        ("unreadable", "step128"),
    }
    messages = {fault.checkpoints[0]: str(fault) for fault in result.faults}
    assert "1 of 2 missing: model-1.safetensors; download them again" in messages["step4"]
    assert "`step16/model-0.safetensors` must be a complete safetensors file" in messages["step16"]
    assert "layer29.weight is missing here and [10, 10] in the others" in messages["step64"]
    assert "a pickle with pathlib.PosixPath in it; convert it to safetensors" in messages["step128"]
    assert result.left_out == {"step77", "step4", "step16", "step64", "step128"}


def test_whole_numbers_where_the_others_have_floating_ones_are_another_architecture(tmp_path):
    write_checkpoints(tmp_path, walk("walk", STEPS, np.random.default_rng(0)))
    file = tmp_path / "step16" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    (fault,) = audit_series(Checkpoints(tmp_path)).faults
    assert (fault.kind, fault.left_out) == ("architecture", ("step16",))
    assert "is [10, 10, 'torch.int32'] here and [10, 10] in the others" in fault.message


def test_checkpoints_that_are_sharded_differently_are_compared_as_a_whole(tmp_path):
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[4] = points[12] + 1e-3
    write_checkpoints(tmp_path, points[:8], STEPS[:8], shards=2)
    write_checkpoints(tmp_path, points[8:], STEPS[8:])
    assert faults_of(tmp_path) == [("misplaced", ("step8",), ("step8",))]


def test_a_second_audit_reads_nothing_and_the_first_only_samples(tmp_path):
    points = np.repeat(walk("walk", STEPS, np.random.default_rng(0)), 30, axis=1)
    write_checkpoints(tmp_path / "s", points)
    store = Store(tmp_path / "store")
    first = Checkpoints(tmp_path / "s")
    audit_series(first, store=store)
    size = sum(file.stat().st_size for file in (tmp_path / "s").rglob("*.safetensors"))
    assert first.bytes_read < size / 2
    again = Checkpoints(tmp_path / "s")
    assert audit_series(again, store=store) == audit_series(first, store=store)
    assert again.bytes_read == 0


def test_a_series_on_the_hub_is_audited(tmp_path):
    points = walk("walk", STEPS, np.random.default_rng(0))
    points[4] = points[12]
    write_checkpoints(tmp_path, points)
    with serve(tmp_path) as hub:
        assert faults_of(REPOSITORY, endpoint=hub.endpoint) == [("identical", ("step8", "step2000"), ("step8",))]
