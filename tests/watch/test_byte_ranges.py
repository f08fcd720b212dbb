"""Byte ranges of files: exact, complete, and every error of a reader becomes one kind."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.watch import byte_ranges
from joma.watch.byte_ranges import ByteSource, StoredTensor, Unreadable, check_memory, local_file, reading


@given(content=st.binary(max_size=60), chunk=st.integers(1, 70), start=st.integers(0, 60), stop=st.integers(0, 70))
def test_a_range_is_a_slice_of_the_file_or_refused(content, chunk, start, stop):
    source = ByteSource("m", len(content), lambda first, last: content[first:last])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "FETCH_BYTES", chunk)
        if start <= stop <= len(content):
            assert source.read(start, stop) == content[start:stop]
        else:
            with pytest.raises(Unreadable, match="`m` must be a complete file"):
                source.read(start, stop)


def test_a_file_that_has_become_shorter_is_named(tmp_path):
    file = tmp_path / "m"
    file.write_bytes(bytes(100))
    source = local_file(file, "step1/m")
    file.write_bytes(bytes(50))
    with pytest.raises(Unreadable, match="`step1/m` must be a complete file, got 40 bytes where 80 were requested"):
        source.read(10, 90)
    file.unlink()
    with pytest.raises(Unreadable, match="`step1/m` must be a readable file, got No such file or directory; down"):
        source.read(10, 20)


@pytest.mark.parametrize(
    "error",
    [
        *(MemoryError(), OverflowError("too large"), RecursionError("too deep"), struct.error("4 bytes"), EOFError()),
        *(
            AssertionError(),
            AttributeError("x"),
            IndexError("pop"),
            KeyError("w"),
            UnicodeDecodeError("a", b"", 0, 1, "b"),
        ),
    ],
)
def test_every_error_of_a_reader_names_the_file_and_its_type(error):
    message = rf"`m` must be a complete file, got .* \({type(error).__name__}"
    with pytest.raises(Unreadable, match=message) as raised, reading("m"):
        raise error
    assert raised.value.__cause__ is error


def test_errors_that_are_named_already_and_interrupts_pass():
    with pytest.raises(InputError, match="`x` must be y"), reading("m"):
        raise InputError("x", "y", "z", "do")
    with pytest.raises(KeyboardInterrupt), reading("m"):
        raise KeyboardInterrupt


def test_memory_is_checked_by_name():
    check_memory("m", 1000)
    with pytest.raises(Unreadable, match=r"`m` must be small enough for this machine's memory, got a size of 1 EB"):
        check_memory("m", 10**18)


@given(shape=st.lists(st.integers(0, 4), max_size=3), order=st.permutations(range(3)))
def test_the_span_of_a_tensor_is_that_of_its_strides(shape, order):
    shape = [*shape, *[1] * (3 - len(shape))]
    tensor = torch.zeros(shape).permute(order)
    stored = StoredTensor(tensor.dtype, tuple(tensor.shape), 0, tensor.stride())
    assert stored.count == tensor.numel()
    assert stored.nbytes == 4 * tensor.numel()
    if tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        assert stored.span == last + 1
