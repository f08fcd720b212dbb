import json
import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from joma.arguments import InputError
from joma.watch import weight_files
from joma.watch.weight_files import (
    DTYPES,
    Entry,
    Meter,
    PickledFile,
    SafetensorsFile,
    Unreadable,
    local_bytes,
    weight_files,
)


def opened(path):
    return SafetensorsFile(local_bytes(path, path.name), Meter())


def entry(path):
    return Entry(path.name, path.name, lambda: local_bytes(path, path.name), lambda: path)


def filled(shape, dtype, seed):
    raw = torch.randint(0, 100, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    count = raw[..., 0].numel()
    if dtype == torch.bool:
        return (raw[..., 0] > 50).reshape(shape)
    return raw.to(torch.uint8).reshape(-1).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensors")


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=4
    ),
    piece=st.integers(1, 40),
    head=st.integers(8, 400),
)
def test_every_tensor_is_read_as_safetensors_wrote_it(folder, kinds, piece, head):
    stored = {f"t{i}": filled(tuple(shape), DTYPES[kind], i) for i, (kind, shape) in enumerate(kinds)}
    save_file(stored, folder / "all.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "PIECE", piece)
        patch.setattr(tensors, "HEAD", head)
        file = opened(folder / "all.safetensors")
        assert file.names() == tuple(sorted(stored))
        for name, tensor in stored.items():
            found = file.tensor(name)
            assert found.dtype == tensor.dtype == file.dtype(name)
            assert found.shape == tensor.shape == file.shape(name)
            assert found.flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()


@given(start=st.integers(0, 34), count=st.integers(0, 35), block=st.integers(1, 50))
def test_parts_and_conversion_are_slices_of_the_whole(folder, start, count, block):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"w": weight}, folder / "part.safetensors")
    torch.save({"w": weight}, folder / "part.bin")
    stop = min(35, start + count)
    for file in (opened(folder / "part.safetensors"), PickledFile(folder / "part.bin", "part.bin", Meter())):
        assert file.names() == ("w",)
        assert torch.equal(file.part("w", start, stop), weight.flatten()[start:stop])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensors, "BLOCK", block)
            assert torch.equal(file.tensor("w", torch.float32), weight.float())


def test_only_what_is_asked_for_is_read(tmp_path):
    save_file({"big": torch.zeros(300_000), "small": torch.arange(10)}, tmp_path / "m.safetensors")
    file = opened(tmp_path / "m.safetensors")
    file.names()
    header = file.meter.bytes
    assert header == weight_files.HEAD
    file.tensor("small")
    file.part("big", 1000, 1100)
    assert file.meter.bytes == header + 80 + 400


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_half_downloaded_file_is_named_whatever_is_there_of_it(folder, share):
    save_file({"w": torch.ones(40), "v": torch.ones(3, 3)}, folder / "whole.safetensors")
    content = (folder / "whole.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(content[: int(share * len(content))])
    with pytest.raises(Unreadable, match=r"`cut.safetensors` must be a whole safetensors file, .*; download it again"):
        opened(folder / "cut.safetensors").names()


@given(st.binary(max_size=200))
def test_other_bytes_are_no_safetensors(folder, content):
    header = json.dumps({"w": 3}).encode()
    for text in (content, len(content).to_bytes(8, "little") + content, len(header).to_bytes(8, "little") + header):
        (folder / "other.safetensors").write_bytes(text)
        if text[8:].strip() == b"{}":
            continue
        with pytest.raises(Unreadable, match=r"other\.safetensors"):
            opened(folder / "other.safetensors").names()


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_files_of_both_kinds_are_read(tmp_path, zipped):
    state = {"b": torch.randn(4, 3), "a": torch.arange(3)}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=zipped)
    file = PickledFile(tmp_path / "m.bin", "m.bin", Meter())
    assert file.names() == ("a", "b")
    assert file.shape("b") == (4, 3)
    assert torch.equal(file.tensor("b"), state["b"])
    assert file.meter.bytes == 48


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": Evil()}, "m.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(Unreadable, match=r"`m.bin` must be tensors alone, got a pickle .*; convert it to safetensors"):
        PickledFile(tmp_path / "m.bin", "m.bin", Meter()).names()
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_a_plain_pickle_is_refused_without_a_warning(tmp_path):
    (tmp_path / "m.bin").write_bytes(pickle.dumps({"x": tmp_path}, protocol=4))
    with pytest.raises(Unreadable, match="must be tensors alone"):
        PickledFile(tmp_path / "m.bin", "m.bin", Meter()).names()


def test_a_bin_file_of_other_things_or_cut_short_is_named(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "nested.bin")
    torch.save({"w": torch.ones(20_000)}, tmp_path / "cut.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:30_000])
    (tmp_path / "noise.bin").write_bytes(b"no such thing")
    for name, message in {"nested": "a table of tensors", "cut": "download it again", "noise": "noise.bin"}.items():
        with pytest.raises(Unreadable, match=message):
            PickledFile(tmp_path / f"{name}.bin", f"{name}.bin", Meter()).names()


def test_safetensors_come_before_bin_and_an_index_names_its_shards(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "a-1.safetensors", "a-2.safetensors", "optimizer.bin"):
        (tmp_path / name).write_bytes(b"")
    index = {"weight_map": {"w": "a-1.safetensors", "v": "a-2.safetensors", "u": "a-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    entries = {path.name: entry(path) for path in tmp_path.iterdir()}
    assert list(weight_files(entries, "step1", Meter())) == ["model.safetensors"]
    del entries["model.safetensors"]
    assert list(weight_files(entries, "step1", Meter())) == ["a-1.safetensors", "a-2.safetensors"]
    missing = {name: one for name, one in entries.items() if name != "a-2.safetensors"}
    with pytest.raises(Unreadable, match=r"1 of 2 missing: a-2.safetensors; download them again"):
        weight_files(missing, "step1", Meter())
    del entries["model.safetensors.index.json"]
    assert list(weight_files(entries, "step1", Meter())) == ["pytorch_model.bin"]
    with pytest.raises(Unreadable, match=r"`step1` must be a checkpoint with model\.safetensors or pytorch_model\.bin"):
        weight_files({}, "step1", Meter())


@pytest.mark.parametrize("text", ["no json", "[]", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match="download"):
        weight_files({path.name: entry(path) for path in tmp_path.iterdir()}, "step1", Meter())


def test_a_type_that_is_not_known_is_named_and_not_taken_for_damage(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(Unreadable, match=r"must be of tensors in F64, .*, got F4 for w; convert it") as told:
        SafetensorsFile(local_bytes(file, "model.safetensors"), Meter()).names()
    assert "download" not in str(told.value)
