"""State dicts are read as torch reads them, without running their pickles; everything else is refused."""

import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from joma.watch import state_dicts
from joma.watch.state_dicts import DTYPES
from joma.watch.weight_files import ByteCounter, PickledFile, Unreadable

FORMATS = pytest.mark.parametrize("zipped", [True, False])


def bin_file(path):
    return PickledFile(path, path.name, ByteCounter())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bins")


@st.composite
def tensors(draw, dtypes):
    """Draw a tensor of any dtype and layout: transposed, cut out of a larger one, expanded, a parameter."""
    dtype = draw(st.sampled_from(sorted(dtypes, key=str)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = 1
    for size in shape:
        count *= size
    values = torch.arange(count).remainder(7).to(dtype).reshape(shape)
    change = draw(st.sampled_from(["none", "transposed", "part", "expanded", "parameter", "requires gradients"]))
    if change == "transposed":
        values = values.permute(tuple(reversed(range(len(shape)))))
    elif change == "part" and shape:
        values = values[shape[0] // 2 :]
    elif change == "expanded":
        values = values.unsqueeze(0).expand(2, *shape)
    elif change == "parameter":
        values = nn.Parameter(values, requires_grad=False)
    elif change == "requires gradients" and dtype in (torch.float32, torch.bfloat16):
        values = values.requires_grad_()
    return values


OLD_DTYPES = {dtype for name, dtype in DTYPES.items() if name.endswith("Storage")}  # torch's old format has no others


def states(dtypes):
    return st.dictionaries(st.text("ab.0é", min_size=1, max_size=8), tensors(dtypes), min_size=1, max_size=4)


@given(
    case=st.tuples(st.just(True), states({*DTYPES.values()})) | st.tuples(st.just(False), states(OLD_DTYPES)),
    protocol=st.sampled_from([2, 3, 4, 5]),
    ordered=st.booleans(),
)
def test_every_state_dict_is_read_as_torch_reads_it(folder, case, protocol, ordered):
    zipped, state = case
    content = OrderedDict(state) if ordered else state
    if ordered:
        content._metadata = OrderedDict({"": {"version": 1}})
    options = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    torch.save(content, folder / "m.bin", **options)
    expected = torch.load(folder / "m.bin", weights_only=False)
    file = bin_file(folder / "m.bin")
    assert file.names() == tuple(sorted(expected))
    for name, tensor in expected.items():
        assert file.shape(name) == tensor.shape
        assert file.dtype(name) == tensor.dtype
        assert torch.equal(bits(file.tensor(name)), bits(tensor))
        middle = tensor.numel() // 2
        assert torch.equal(bits(file.part(name, 0, middle)), bits(tensor.reshape(-1)[:middle]))
        assert torch.equal(file.tensor(name, torch.float32), tensor.detach().to(torch.float32))


def bits(tensor):
    return tensor.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


@FORMATS
def test_only_values_that_are_read_are_counted(tmp_path, zipped):
    state = {"b": torch.randn(4, 3), "a": torch.arange(3)}
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=zipped)
    file = bin_file(tmp_path / "m.bin")
    assert file.names() == ("a", "b")
    assert file.counter.total == 0
    assert torch.equal(file.tensor("b"), state["b"])
    assert file.counter.total == 48


@FORMATS
def test_tensors_that_share_a_storage_and_tensors_with_attributes_are_read(tmp_path, zipped):
    whole = torch.arange(24.0).reshape(4, 6)
    marked = torch.arange(6.0)
    marked.note = "an attribute"
    parameter = nn.Parameter(torch.arange(5.0))
    parameter.note = "another"
    state = {
        "whole": whole,
        "part": whole[1:3, 2:4],
        "flipped": whole.T,
        "same": whole,
        "marked": marked,
        "p": parameter,
    }
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=zipped)
    file = bin_file(tmp_path / "m.bin")
    for name, tensor in state.items():
        assert torch.equal(file.tensor(name), tensor.detach())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


@FORMATS
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": Evil()}, "m.bin", _use_new_zipfile_serialization=zipped)
    message = r"`m.bin` must contain tensors only, got a pickle with posix.mkdir in it; convert it to safetensors"
    with pytest.raises(Unreadable, match=message):
        bin_file(tmp_path / "m.bin").names()
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_a_bin_file_of_other_objects_or_cut_short_is_named(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "nested.bin")
    torch.save({"w": torch.ones(20_000)}, tmp_path / "cut.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:30_000])
    (tmp_path / "noise.bin").write_bytes(b"no such thing")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"w": 3}, protocol=4))
    torch.save({"w": torch.ones(2), 3: torch.ones(2)}, tmp_path / "keys.bin")
    expected = {
        "nested": "a table of tensors, got a table as model; save only the model's `state_dict",
        "cut": "download it again",
        "noise": "noise.bin",
        "plain": "written by torch, got one without its magic number",
        "keys": "a table of tensors by name, got 3 for a name",
    }
    for name, message in expected.items():
        with pytest.raises(Unreadable, match=message):
            bin_file(tmp_path / f"{name}.bin").names()


def test_what_would_take_more_memory_than_the_file_is_refused_by_its_size(tmp_path):
    torch.save({"w": torch.ones(1).expand(200_000, 200_000)}, tmp_path / "m.bin")
    message = r"must contain tensors that are not larger than it, got 160 GB for w in a file of [\d.]+ kB"
    with pytest.raises(Unreadable, match=message):
        bin_file(tmp_path / "m.bin").names()
    torch.save({"w": torch.zeros(1000, 1000)}, tmp_path / "m.bin")
    with zipfile.ZipFile(tmp_path / "m.bin") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "m.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    message = r"must be an uncompressed archive, got an archive of [\d.]+ kB that unpacks to 4 MB"
    with pytest.raises(Unreadable, match=message):
        bin_file(tmp_path / "m.bin").names()


def test_a_pickle_that_is_too_long_is_refused_before_it_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(state_dicts, "MAX_PICKLE", 2000)
    torch.save({f"layer{i}{'x' * 200}": torch.ones(2) for i in range(20)}, tmp_path / "m.bin")
    with pytest.raises(Unreadable, match=r"an archive without a table of tensors of at most 2 kB"):
        bin_file(tmp_path / "m.bin").names()
