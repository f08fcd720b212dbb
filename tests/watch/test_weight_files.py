"""The readers of weight files: every tensor as it was written, damaged files named, and no pickled code run."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from joma.arguments import InputError
from joma.watch import byte_ranges, weight_files
from joma.watch.byte_ranges import Unreadable, local_file
from joma.watch.weight_files import (
    DTYPES,
    ByteCounter,
    FileEntry,
    PickledFile,
    SafetensorsFile,
    select_weight_files,
)


def safetensors_file(path):
    return SafetensorsFile(local_file(path, path.name), ByteCounter())


def bin_file(path):
    return PickledFile(path, path.name, ByteCounter())


def entry(path):
    return FileEntry(path.name, path.name, lambda: local_file(path, path.name), lambda: path)


def entries_of(folder):
    return {path.name: entry(path) for path in folder.iterdir()}


def random_tensor(shape, dtype, seed):
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
    chunk=st.integers(1, 40),
    first_read=st.integers(8, 400),
)
def test_every_tensor_is_read_as_safetensors_wrote_it(folder, kinds, chunk, first_read):
    stored = {f"t{i}": random_tensor(tuple(shape), DTYPES[kind], i) for i, (kind, shape) in enumerate(kinds)}
    save_file(stored, folder / "all.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "FETCH_BYTES", chunk)
        patch.setattr(weight_files, "FIRST_READ", first_read)
        file = safetensors_file(folder / "all.safetensors")
        assert file.names() == tuple(sorted(stored))
        for name, expected in stored.items():
            tensor = file.tensor(name)
            assert tensor.dtype == expected.dtype == file.dtype(name)
            assert tensor.shape == expected.shape == file.shape(name)
            assert tensor.flatten().view(torch.uint8).tolist() == expected.flatten().view(torch.uint8).tolist()


@given(start=st.integers(0, 34), count=st.integers(0, 35), block=st.integers(1, 50))
def test_parts_and_conversion_are_slices_of_the_whole_tensor(folder, start, count, block):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"w": weight}, folder / "part.safetensors")
    torch.save({"w": weight}, folder / "part.bin")
    stop = min(35, start + count)
    for file in (safetensors_file(folder / "part.safetensors"), bin_file(folder / "part.bin")):
        assert file.names() == ("w",)
        assert torch.equal(file.part("w", start, stop), weight.flatten()[start:stop])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_files, "CONVERT_VALUES", block)
            assert torch.equal(file.tensor("w", torch.float32), weight.float())


def test_only_the_requested_bytes_are_read(tmp_path):
    save_file({"big": torch.zeros(300_000), "small": torch.arange(10)}, tmp_path / "m.safetensors")
    file = safetensors_file(tmp_path / "m.safetensors")
    file.names()
    header = file.counter.total
    assert header == weight_files.FIRST_READ
    file.tensor("small")
    file.part("big", 1000, 1100)
    assert file.counter.total == header + 80 + 400


@given(share=st.floats(0, 1, exclude_max=True))
def test_an_incomplete_file_is_named_however_much_of_it_is_missing(folder, share):
    save_file({"w": torch.ones(40), "v": torch.ones(3, 3)}, folder / "whole.safetensors")
    content = (folder / "whole.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(content[: int(share * len(content))])
    message = r"`cut.safetensors` must be a complete safetensors file, .*; download it again"
    with pytest.raises(Unreadable, match=message):
        safetensors_file(folder / "cut.safetensors").names()


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_as_safetensors(folder, content):
    header = json.dumps({"w": 3}).encode()
    for text in (content, len(content).to_bytes(8, "little") + content, len(header).to_bytes(8, "little") + header):
        (folder / "other.safetensors").write_bytes(text)
        with pytest.raises(Unreadable, match=r"other\.safetensors"):
            safetensors_file(folder / "other.safetensors").names()


def test_safetensors_are_preferred_to_bin_and_an_index_names_its_shards(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "a-1.safetensors", "a-2.safetensors", "optimizer.bin"):
        (tmp_path / name).write_bytes(b"")
    index = {"weight_map": {"w": "a-1.safetensors", "v": "a-2.safetensors", "u": "a-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    entries = entries_of(tmp_path)
    assert list(select_weight_files(entries, "step1", ByteCounter())) == ["model.safetensors"]
    del entries["model.safetensors"]
    assert list(select_weight_files(entries, "step1", ByteCounter())) == ["a-1.safetensors", "a-2.safetensors"]
    incomplete = {name: file for name, file in entries.items() if name != "a-2.safetensors"}
    with pytest.raises(Unreadable, match=r"1 of 2 missing: a-2.safetensors; download them again"):
        select_weight_files(incomplete, "step1", ByteCounter())
    del entries["model.safetensors.index.json"]
    assert list(select_weight_files(entries, "step1", ByteCounter())) == ["pytorch_model.bin"]
    with pytest.raises(Unreadable, match=r"`step1` must be a checkpoint with model\.safetensors or pytorch_model\.bin"):
        select_weight_files({}, "step1", ByteCounter())


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": {"w": null, "v": "a"}}',
        "[" * 100_000,
    ],
)
def test_a_bad_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match="download"):
        select_weight_files(entries_of(tmp_path), "step1", ByteCounter())


def test_an_unknown_dtype_is_named_and_not_mistaken_for_damage(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(Unreadable, match=r"must contain tensors in F64, .*, got F4 for w; convert it") as raised:
        safetensors_file(file).names()
    assert "download" not in str(raised.value)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    change=st.sampled_from([-4, -1, 1, 4, 1000]),
    position=st.integers(0, 1),
    which=st.integers(0, 3),
)
def test_what_is_accepted_is_what_safetensors_accepts(folder, sizes, change, position, which):
    """One changed position makes a hole, an overlap, or a length that does not fit: the format's own reader refuses."""
    tensors = {f"t{i}": torch.arange(size, dtype=torch.float32) for i, size in enumerate(sizes)}
    save_file(tensors, folder / "sound.safetensors")
    content = (folder / "sound.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[f"t{which % len(sizes)}"]["data_offsets"][position] += change
    text = json.dumps(header).encode()
    (folder / "changed.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(SafetensorError):
        load_file(folder / "changed.safetensors")
    with pytest.raises(Unreadable, match=r"`changed\.safetensors` must be a complete safetensors file"):
        safetensors_file(folder / "changed.safetensors").names()


def test_a_tensor_beyond_the_memory_is_refused_before_it_is_read(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**19, 2**19], "data_offsets": [0, 2**40]}}).encode()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 2**40)  # takes no space on the disk
    weights = safetensors_file(file)
    assert weights.shape("w") == (2**19, 2**19)
    assert weights.part("w", 2**37, 2**37 + 3).tolist() == [0, 0, 0]
    message = r"`model\.safetensors: w` must be small enough for this machine's memory, got a size of 1\.1 TB where"
    with pytest.raises(Unreadable, match=message):
        weights.tensor("w", torch.float32)


def test_an_index_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "model.safetensors.index.json").open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(Unreadable, match=r"must be a small JSON file, got one of 1\.1 TB"):
        select_weight_files(entries_of(tmp_path), "step1", ByteCounter())
