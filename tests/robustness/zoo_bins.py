"""Hostile checkpoints of torch's own format, `pytorch_model.bin`: pickles, zip archives and their tensors."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from robustness.zoo import Hostile
from robustness.zoo_safetensors import FILE, FIRST, SECOND

BIN = "pytorch_model.bin"
OLD = {"_use_new_zipfile_serialization": False}
Tensors = dict[str, Any]


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def saved(edit: Callable[[Tensors], Any], folder: Path, **options: Any) -> None:
    """Save the weights as torch does, after `edit` has changed them or returned something else."""
    tensors = dict(load_file(folder / FILE))
    (folder / FILE).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that are in beta
        content = edit(tensors)
        torch.save(tensors if content is None else content, folder / BIN, **options)


def with_tensor(make: Callable[[Tensor], object], folder: Path, **options: Any) -> None:
    """Save the weights with another object in the place of the first one."""
    saved(lambda tensors: tensors.update({FIRST: make(tensors[FIRST])}), folder, **options)


def legacy(edit: Callable[[Tensors], Any], folder: Path) -> None:
    saved(edit, folder, **OLD)


def as_bytes(content: bytes, folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / BIN).write_bytes(content)


def as_pickle(content: bytes, folder: Path) -> None:
    """Write an archive as torch does, with any pickle and one storage."""
    (folder / FILE).unlink()
    write_archive(
        folder / BIN, {"archive/data.pkl": content, "archive/byteorder": b"little", "archive/data/0": bytes(192)}
    )


def write_archive(file: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def with_entry(suffix: str, content: bytes | None, folder: Path) -> None:
    """Change or remove an entry of a sound archive."""

    def edit(entries: dict[str, bytes]) -> None:
        name = entry_of(entries, suffix)
        del entries[name]
        if content is not None:
            entries[name] = content

    repacked(edit, folder)


def without_permission(folder: Path) -> None:
    saved(lambda _: None, folder)
    (folder / BIN).chmod(0)


def as_pipe(folder: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / BIN)


def repacked(edit: Callable[[dict[str, bytes]], object], folder: Path, compression: int = zipfile.ZIP_STORED) -> None:
    """Change the entries of a sound archive."""
    saved(lambda _: None, folder)
    with zipfile.ZipFile(folder / BIN) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    edit(entries)
    write_archive(folder / BIN, entries, compression)


def entry_of(entries: dict[str, bytes], suffix: str) -> str:
    return next(name for name in entries if name.endswith(suffix))


def changed_pickle(old: bytes, new: bytes, folder: Path) -> None:
    """Replace bytes of the pickle in a sound archive."""

    def edit(entries: dict[str, bytes]) -> None:
        name = entry_of(entries, "data.pkl")
        assert old in entries[name]
        entries[name] = entries[name].replace(old, new)

    repacked(edit, folder)


def zip_bomb(folder: Path) -> None:
    """Write 3 MB that unpack to 3 GB: the first storage is zeros, compressed, with the size that it has unpacked."""
    packer = zlib.compressobj(wbits=-15)
    block = packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_FULL_FLUSH)
    stream, size = 750 * block + zlib.compressobj(wbits=-15).flush(), (750 << 22).to_bytes(4, "little")

    def compress_first(content: bytearray) -> None:
        for start, method, length in ((content.find(b"PK\3\4"), 8, 22), (content.find(b"PK\1\2"), 10, 24)):
            content[start + method], content[start + length : start + length + 4] = zipfile.ZIP_DEFLATED, size

    saved(lambda _: None, folder)
    with zipfile.ZipFile(folder / BIN) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    storage = entry_of(entries, "data/0")
    write_archive(folder / BIN, {storage: stream, **{name: entries[name] for name in entries if name != storage}})
    changed_bytes(compress_first, folder)


def changed_bytes(edit: Callable[[bytearray], object], folder: Path) -> None:
    content = bytearray((folder / BIN).read_bytes())
    edit(content)
    (folder / BIN).write_bytes(content)


def edited(edit: Callable[[bytearray], object], folder: Path, **options: Any) -> None:
    """Change the bytes of a sound file."""
    saved(lambda _: None, folder, **options)
    changed_bytes(edit, folder)


def in_directory(position: int, value: bytes, content: bytearray) -> None:
    """Overwrite a field of every entry in the archive's directory."""
    start = content.find(b"PK\1\2")
    while start >= 0:
        content[start + position : start + position + len(value)] = value
        start = content.find(b"PK\1\2", start + 4)


def rebuilt(*changes: Any) -> Callable[[Tensor], object]:
    """Return a function that saves a tensor with another offset, sizes, strides or metadata."""

    def make(tensor: Tensor) -> Call:
        storage = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)
        arguments = [storage, 0, tuple(tensor.shape), tensor.stride(), False, OrderedDict()]
        for position, value in changes:
            arguments[position:] = [value, *arguments[position + 1 :]]
        return Call(torch._utils._rebuild_tensor_v2, *arguments)

    return make


def itself(tensors: Tensors) -> None:
    tensors["self"] = tensors


def tar(folder: Path) -> None:
    (folder / FILE).unlink()
    with tarfile.open(folder / BIN, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"\x80\x02}."))


KEYS: dict[str, Callable[[Tensors], Any]] = {
    "integer keys": lambda tensors: dict(enumerate(tensors.values())),
    "mixed keys": lambda tensors: tensors.update({3: torch.ones(2)}),
    "bytes for keys": lambda tensors: {name.encode(): tensor for name, tensor in tensors.items()},
    "tuples for keys": lambda tensors: {(name, 1): tensor for name, tensor in tensors.items()},
    "None for a key": lambda tensors: tensors.update({None: torch.ones(2)}),
    "NUL in a key": lambda tensors: tensors.update({"a\0b": torch.ones(2)}),
    "lone surrogate in a key": lambda tensors: tensors.update({"\ud800": torch.ones(2)}),
    "nested tables": lambda tensors: {"model": tensors},
    "deeply nested tables": lambda tensors: {"a": {"b": {"c": {"d": tensors}}}},
    "list of tensors": lambda tensors: list(tensors.values()),
    "a tensor alone": lambda tensors: tensors[FIRST],
    "None": lambda _: Call(dict),
    "a number": lambda _: 3,
    "a text": lambda _: "weights",
    "an empty table": lambda _: {},
    "a table that contains itself": itself,
    "None for a tensor": lambda tensors: tensors.update({FIRST: None}),
    "a number for a tensor": lambda tensors: tensors.update({FIRST: 3.5}),
    "a text beside tensors": lambda tensors: tensors.update(version="1.0"),
    "an array for a tensor": lambda tensors: tensors.update({FIRST: tensors[FIRST].numpy()}),
    "a module": lambda _: nn.Linear(2, 2),
    "a path": lambda tensors: tensors.update(x=Path("a")),
    "a call of os.mkdir": lambda tensors: tensors.update(x=Call(os.mkdir, "made-by-a-pickle")),
    "a call of bytearray": lambda tensors: tensors.update(x=Call(bytearray, 2_900_000_000)),
    "a call of torch.Tensor": lambda tensors: tensors.update({FIRST: Call(torch.Tensor, 8, 6)}),
    "a missing tensor": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != FIRST},
    "another architecture": lambda tensors: tensors.update(more=torch.ones(2, 2)),
}
TENSORS: dict[str, Callable[[Tensor], object]] = {
    "sparse tensor": lambda tensor: tensor.to_sparse(),
    "sparse tensor of compressed rows": lambda tensor: tensor.to_sparse_csr(),
    "sparse tensor of 10^18 values": lambda _: torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.long), [1.0], (10**9,) * 2
    ),
    "meta tensor": lambda tensor: tensor.to("meta"),
    "meta tensor of 10^12 values": lambda _: torch.empty(10**6, 10**6, device="meta"),
    "quantised tensor": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "quantised tensor by channel": lambda tensor: torch.quantize_per_channel(
        tensor, torch.ones(8), torch.zeros(8), 0, torch.quint8
    ),
    "complex tensor": lambda tensor: torch.complex(tensor, tensor),
    "conjugate tensor": lambda tensor: torch.complex(tensor, tensor).conj(),
    "negated view": torch._neg_view,
    "nested tensor": lambda tensor: torch.nested.nested_tensor([tensor[:2], tensor[2:]]),
    "expanded tensor of 160 GB": lambda _: torch.ones(1).expand(200_000, 200_000),
    "expanded tensor of 10^18 values": lambda _: torch.ones(1).expand(10**9, 10**9),
    "NaN weights": lambda tensor: tensor.fill_(float("nan")),
    "infinite weights": lambda tensor: tensor.fill_(float("inf")),
    "transposed matrix": lambda tensor: tensor.T,
    "scalar": lambda _: torch.tensor(1.0),
    "matrix without rows": lambda _: torch.ones(0, 6),
    "offset beyond the storage": rebuilt((1, 10**6)),
    "negative offset": rebuilt((1, -4)),
    "float offset": rebuilt((1, 0.0)),
    "bool offset": rebuilt((1, True)),
    "negative sizes": rebuilt((2, (-8, -6))),
    "float sizes": rebuilt((2, (8.0, 6.0))),
    "bool sizes": rebuilt((2, (True, True))),
    "sizes beyond the storage": rebuilt((2, (800, 6))),
    "sizes beyond 64 bits": rebuilt((2, (2**62, 2**62))),
    "sizes of 1000 digits": rebuilt((2, (10**1000, 6))),
    "sizes that are None": rebuilt((2, None)),
    "a thousand sizes": rebuilt((2, (1,) * 1000), (3, (1,) * 1000)),
    "more sizes than strides": rebuilt((2, (8, 6, 1))),
    "negative strides": rebuilt((3, (-6, -1))),
    "strides beyond the storage": rebuilt((3, (10**6, 1))),
    "strides of 1000 digits": rebuilt((3, (10**1000, 1))),
    "unknown metadata": rebuilt((6, {"neg": True})),
    "too many arguments": rebuilt((6, None), (7, None)),
    "a text for a storage": rebuilt((0, "storage")),
}
TUPLES = b"\x80\x02}" + b")" + b"\x85" * 50_000 + b"K\1s."  # a table whose key is a tuple in a tuple in a tuple …
DOUBLED = b"\x80\x02})" + b"2\x86" * 60 + b"K\1s."  # a key of 2^60 tuples
PICKLES: dict[str, bytes] = {
    "empty pickle": b"",
    "pickle that only begins": b"\x80\x02",
    "pickle of another protocol": b"\x80\xff}.",
    "pickle without an end": b"\x80\x02}q\0",
    "pickle that ends at once": b".",
    "pickle with an empty stack": b"\x80\x02000.",
    "pickle with an unknown code": b"\x80\x02\xfe.",
    "pickle of a text of 4 GB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "pickle of bytes of 10^18": b"\x80\x04\x8e" + struct.pack("<Q", 10**18) + b".",
    "pickle of a number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "pickle with a note at 4 billion": b"\x80\x02}r\xff\xff\xff\xff.",
    "pickle with an unknown note": b"\x80\x02hc.",
    "pickle of marks": b"\x80\x02" + b"(" * 50_000 + b".",
    "pickle of nested lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "pickle of nested tuples as a key": TUPLES,
    "pickle of doubled tuples as a key": DOUBLED,
    "pickle that sets an item of a number": b"\x80\x02K\1K\2K\3s.",
    "pickle that appends to a table": b"\x80\x02}K\3a.",
    "pickle that builds a number": b"\x80\x02K\1}b.",
    "pickle that calls a number": b"\x80\x02K\1)R.",
    "pickle with a list for a key": b"\x80\x02}]K\3s.",
    "pickle with a strange global": b"\x80\x02cos\nsystem\nX\2\0\0\0lsR.",
    "pickle with an extension": b"\x80\x02\x82\x01.",
    "pickle with a name that is no UTF-8": b"\x80\x02c\xff\n\xfe\n.",
    "pickle with a text that is no UTF-8": b"\x80\x02}X\1\0\0\0\xffK\1s.",
    "pickle with a strange identity": b"\x80\x02}X\1\0\0\0wK\3Qs.",
    "pickle with an unknown storage": b"\x80\x02(X\7\0\0\0storagectorch\nOddStorage\nX\1\0\0\x000X\3\0\0\0cpuK\x30tQ.",
    "pickle of ten million codes": b"\x80\x02" + b"N0" * 5_000_000 + b"}.",
}
BYTES: dict[str, bytes] = {
    "empty bin": b"",
    "text": b"no such thing",
    "web page": b"<!DOCTYPE html><html></html>",
    "two letters of a zip": b"PK",
    "local header of a zip": b"PK\3\4" + bytes(100),
    "empty zip": b"PK\5\6" + bytes(18),
    "zip of 65535 entries": b"PK\5\6" + bytes(4) + b"\xff\xff\xff\xff" + b"\xff\xff\xff\x7f" + bytes(6),
    "gzip": gzip.compress(b"weights"),
    "plain pickle": pickle.dumps({"w": 3}, protocol=2),
    "plain pickle of a list": pickle.dumps([1, 2], protocol=4),
    "zeros": bytes(10_000),
}
ARCHIVES: dict[str, Callable[[Path], object]] = {
    "zip bomb": zip_bomb,
    "compressed archive": partial(repacked, lambda _: None, compression=zipfile.ZIP_DEFLATED),
    "archive without a pickle": partial(with_entry, "data.pkl", None),
    "archive with two pickles": partial(repacked, lambda entries: entries.update({"b/data.pkl": b"\x80\x02}."})),
    "archive without a storage": partial(with_entry, "data/0", None),
    "archive with a short storage": partial(with_entry, "data/0", bytes(8)),
    "archive with a long storage": partial(with_entry, "data/0", bytes(800)),
    "archive of the other byte order": partial(with_entry, "byteorder", b"big"),
    "archive of a strange byte order": partial(with_entry, "byteorder", b"x" * 99),
    "archive with an encrypted entry": partial(edited, partial(in_directory, 8, b"\1\0")),
    "archive with sizes of 4 GB": partial(edited, partial(in_directory, 20, b"\xf0\xff\xff\xff\xf0\xff\xff\xff")),
    "archive with two sizes": partial(edited, partial(in_directory, 24, b"\xf0\xff\xff\x7f")),
    "archive with offsets beyond its end": partial(edited, partial(in_directory, 42, b"\xf0\xff\xff\x7f")),
    "archive with offsets inside a tensor": partial(edited, partial(in_directory, 42, b"\x60\x06\0\0")),
    "archive with an unknown compression": partial(edited, partial(in_directory, 10, b"\x63\0")),
    "archive that is cut in half": partial(edited, lambda content: content.__delitem__(slice(len(content) // 2, None))),
    "archive without its end": partial(edited, lambda content: content.__delitem__(slice(-1, None))),
    "archive without its beginning": partial(edited, lambda content: content.__delitem__(slice(0, 100))),
    "storage of another name": partial(changed_pickle, b"X\1\0\0\x000", b"X\1\0\0\x009"),
    "storage with a path for a name": partial(changed_pickle, b"X\1\0\0\x000", b"X\6\0\0\0../../"),
    "storage of doubles": partial(changed_pickle, b"FloatStorage", b"DoubleStorage"),
    "storage of whole numbers": partial(changed_pickle, b"FloatStorage", b"IntStorage"),
    "storage of complex numbers": partial(changed_pickle, b"FloatStorage", b"ComplexFloatStorage"),
    "duplicate keys": partial(changed_pickle, SECOND.encode(), FIRST.encode()),
    "old archive of tar": tar,
    "old format, cut": partial(edited, lambda content: content.__delitem__(slice(-9, None)), **OLD),
    "old format, more bytes": partial(edited, lambda content: content.extend(b"abc"), **OLD),
    "old format, other magic": partial(edited, lambda content: content.__setitem__(slice(4, 8), b"abcd"), **OLD),
    "old format, huge storage": partial(
        edited,
        lambda content: content.__setitem__(slice(-4 * 48 - 8, -4 * 48), b"\xff" * 7 + b"\x7f"),
        **OLD,
    ),
    "old format, expanded tensor": partial(with_tensor, TENSORS["expanded tensor of 160 GB"], **OLD),
    "old format, integer keys": partial(legacy, KEYS["integer keys"]),
    "old format, os.mkdir": partial(legacy, KEYS["a call of os.mkdir"]),
    "old format, sparse tensor": partial(with_tensor, TENSORS["sparse tensor"], **OLD),
    "old format, sizes beyond the storage": partial(with_tensor, TENSORS["sizes beyond the storage"], **OLD),
    "bin that is a FIFO": as_pipe,
    "bin without permission": without_permission,
}


def on_another_device(folder: Path) -> None:
    changed_pickle(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0", folder)


def with_metadata(tensors: Tensors) -> OrderedDict[str, Any]:
    state = OrderedDict(tensors)
    state._metadata = OrderedDict({"": {"version": 1}})  # pyright: ignore[reportAttributeAccessIssue]
    return state


def parameters(tensors: Tensors) -> Tensors:
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}


def from_one_storage(tensors: Tensors) -> Tensors:
    """Make all tensors views of one storage, the first one transposed in it."""
    flat = torch.cat(
        [tensors[FIRST].T.flatten(), *(tensor.flatten() for name, tensor in tensors.items() if name != FIRST)]
    )
    views, start = {}, 0
    for name, tensor in [(FIRST, tensors[FIRST]), *((n, t) for n, t in tensors.items() if n != FIRST)]:
        part = flat[start : start + tensor.numel()]
        views[name] = part.view(6, 8).T if name == FIRST else part.view(tensor.shape)
        start += tensor.numel()
    return views


SOUND: dict[str, Callable[[Path], object]] = {
    "state dict": partial(saved, lambda _: None),
    "parameters": partial(saved, parameters),
    "tensors that require gradients": partial(
        saved, lambda tensors: [t.requires_grad_() for t in tensors.values()] and None
    ),
    "state dict of a module, with its versions": partial(saved, with_metadata),
    "views of one storage": partial(saved, from_one_storage),
    "tensors of another device": on_another_device,
    "protocol 4": partial(saved, with_metadata, pickle_protocol=4),
    "old format": partial(legacy, lambda _: None),
    "old format with parameters": partial(legacy, parameters),
    "old format with views of one storage": partial(legacy, from_one_storage),
}

HOSTILE_BINS = [
    *(Hostile(f"bin: {name}", partial(saved, edit)) for name, edit in KEYS.items()),
    *(Hostile(f"bin: {name}", partial(with_tensor, make)) for name, make in TENSORS.items()),
    *(Hostile(name, partial(as_pickle, content)) for name, content in PICKLES.items()),
    *(Hostile(name, partial(as_bytes, content)) for name, content in BYTES.items()),
    *(Hostile(name, damage) for name, damage in ARCHIVES.items()),
    *(Hostile(f"sound bin: {name}", damage, "measured") for name, damage in SOUND.items()),
]
