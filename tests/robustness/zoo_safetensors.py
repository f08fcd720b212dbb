"""Hostile checkpoints of the safetensors format: headers, files that are no files, indexes, names of steps."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from robustness.zoo import HOSTILE, Hostile

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "layers.0.fc1.weight", "layers.1.fc1.weight"
SHAPE, SIZE = [8, 6], 4 * 8 * 6


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a sound checkpoint: they move along a straight line during the training."""
    shapes = {FIRST: (8, 6), SECOND: (8, 6), "embed_tokens.weight": (12, 6), "norm.bias": (6,)}
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(2, *shape, generator=generator) for name, shape in shapes.items()}
    return {name: start + 0.02 * step * direction for name, (start, direction) in drawn.items()}


def write_sound(folder: Path, step: int) -> None:
    """Write a sound checkpoint."""
    save_file(tensors_of(step), folder / FILE)


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and its data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(file: Path, header: Any, data: bytes) -> None:
    """Write a safetensors file with any header: bytes, a text, or what JSON can say."""
    text = header if isinstance(header, bytes | str) else json.dumps(header)
    text = text.encode() if isinstance(text, str) else text
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def cut(size: int, folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:size])


def with_bytes(content: bytes, folder: Path) -> None:
    (folder / FILE).write_bytes(content)


def with_entry(changes: dict[str, Any], folder: Path) -> None:
    """Change the first tensor's entry in the header."""
    header, data = split(folder / FILE)
    header[FIRST] = {**header[FIRST], **changes}
    write_file(folder / FILE, header, data)


def with_header(edit: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    header, data = split(folder / FILE)
    write_file(folder / FILE, edit(header), data)


def without(key: str, folder: Path) -> None:
    header, data = split(folder / FILE)
    del header[FIRST][key]
    write_file(folder / FILE, header, data)


def repeated(header: dict[str, Any]) -> str:
    return json.dumps(header)[:-1] + f', "{FIRST}": {json.dumps(header[FIRST])}}}'


def moved(by: int, folder: Path) -> None:
    """Move all tensors behind the first one, which leaves a hole or an overlap."""
    header, data = split(folder / FILE)
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] > 0:
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    write_file(folder / FILE, header, data + bytes(max(0, by)))


def shifted(folder: Path) -> None:
    """Leave a hole before the first tensor."""
    header, data = split(folder / FILE)
    for entry in header.values():
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    write_file(folder / FILE, header, bytes(8) + data)


def renamed_tensor(name: str, folder: Path) -> None:
    with_header(lambda header: {name if key == FIRST else key: entry for key, entry in header.items()}, folder)


def with_tensors(edit: Callable[[dict[str, torch.Tensor]], object], folder: Path) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE)


def filled(value: float, folder: Path) -> None:
    with_tensors(lambda tensors: tensors[FIRST].fill_(value), folder)


NESTED = "[" * 100_000 + "]" * 100_000
NESTED_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000
MANY = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(5_000)}

HEADERS: dict[str, Callable[[Path], None]] = {
    "empty file": partial(cut, 0),
    "four bytes": partial(cut, 4),
    "cut inside the header": partial(cut, 40),
    "cut by one byte": partial(cut, -1),
    "header length 0": partial(with_bytes, bytes(8)),
    "header length 2^63": partial(with_bytes, (1 << 63).to_bytes(8, "little") + b"{}"),
    "header length above the limit": partial(with_bytes, (100_000_001).to_bytes(8, "little") + b"{}"),
    "a web page": partial(with_bytes, b"<html><body>404</body></html>"),
    "a pointer of git lfs": partial(with_bytes, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "header that is no JSON": partial(with_header, lambda _: "no json"),
    "header that is a list": partial(with_header, lambda _: "[]"),
    "header that is a string": partial(with_header, lambda _: '"text"'),
    "header that is null": partial(with_header, lambda _: "null"),
    "header that is a number": partial(with_header, lambda _: "12"),
    "header in UTF-16": partial(with_header, lambda header: json.dumps(header).encode("utf-16")),
    "header with a byte order mark": partial(with_header, lambda header: b"\xef\xbb\xbf" + json.dumps(header).encode()),
    "header that is no UTF-8": partial(
        with_header, lambda header: json.dumps(header).encode().replace(b"fc1", b"\xff")
    ),
    "text after the header's JSON": partial(with_header, lambda header: json.dumps(header) + " x"),
    "deeply nested lists": partial(with_header, lambda _: '{"w":' + NESTED + "}"),
    "deeply nested objects": partial(with_header, lambda _: NESTED_OBJECT),
    "deeply nested shape": partial(with_header, lambda _: f'{{"w":{{"dtype":"F32","shape":{NESTED}}}}}'),
    "duplicate names": partial(with_header, repeated),
    "no tensors": partial(with_bytes, (2).to_bytes(8, "little") + b"{}"),
    "only metadata": partial(with_bytes, (19).to_bytes(8, "little") + b'{"__metadata__":{}}'),
    "data without tensors": partial(with_header, lambda _: "{}"),
    "metadata that is a list": partial(with_header, lambda header: {**header, "__metadata__": [1]}),
    "metadata of numbers": partial(with_header, lambda header: {**header, "__metadata__": {"a": 1}}),
    "metadata of nested objects": partial(with_header, lambda header: {**header, "__metadata__": {"a": {}}}),
    "five thousand tensors": partial(with_header, lambda header: {**header, **MANY}),
    "entry that is a list": partial(with_header, lambda header: {**header, FIRST: [1]}),
    "entry that is null": partial(with_header, lambda header: {**header, FIRST: None}),
    "lone surrogate in a name": partial(renamed_tensor, "layers.0.fc1\ud800.weight"),
    "NUL in a name": partial(renamed_tensor, "layers\0.0.fc1.weight"),
    "newline in a name": partial(renamed_tensor, "layers.0.fc1.weight\n"),
    "escape sequence in a name": partial(renamed_tensor, "\x1b[31mlayers.0.fc1.weight"),
    "empty name": partial(renamed_tensor, ""),
    "very long name": partial(renamed_tensor, "a" * 100_000),
    "bytes after the last tensor": lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"\0"),
    "hole between tensors": partial(moved, 8),
    "overlapping tensors": partial(moved, -8),
    "hole before the first tensor": shifted,
    "two tensors at one place": partial(with_entry, {"data_offsets": [SIZE, 2 * SIZE]}),
}
ENTRIES: dict[str, dict[str, Any]] = {
    "negative size": {"shape": [-8, 6]},
    "two negative sizes": {"shape": [-8, -6]},
    "float sizes": {"shape": [8.0, 6.0]},
    "NaN size": {"shape": [float("nan"), 6]},
    "infinite size": {"shape": [float("inf"), 6]},
    "bool sizes": {"shape": [True] * 2, "data_offsets": [0, 4]},
    "text sizes": {"shape": ["8", "6"]},
    "a size that wraps around": {"shape": [2**62, 2**62, 16, 48]},
    "a size of 2^63": {"shape": [2**63, 6]},
    "a size of 4000 digits": {"shape": [10**4000, 6]},
    "two hundred thousand sizes": {"shape": [1] * 200_000 + SHAPE},
    "a product of ten million digits": {"shape": [10**4000] * 2500},
    "shape of 1 TB": {"shape": [2**19, 2**19], "data_offsets": [0, 2**40]},
    "shape that is a number": {"shape": 48},
    "shape that is null": {"shape": None},
    "shape that is a table": {"shape": {"8": 6}},
    "shape that is a text": {"shape": "86"},
    "another shape of the same size": {"shape": [6, 8]},
    "a shape of another size": {"shape": [8, 7]},
    "float offsets": {"data_offsets": [0.0, float(SIZE)]},
    "bool offset": {"data_offsets": [False, SIZE]},
    "negative offset": {"data_offsets": [-SIZE, 0]},
    "reversed offsets": {"data_offsets": [SIZE, 0]},
    "three offsets": {"data_offsets": [0, SIZE, SIZE]},
    "one offset": {"data_offsets": [0]},
    "offsets that are null": {"data_offsets": None},
    "offsets that are a text": {"data_offsets": "01"},
    "offsets beyond the file": {"data_offsets": [10**9, 10**9 + SIZE]},
    "offsets of 4000 digits": {"data_offsets": [10**4000, 10**4000 + SIZE]},
    "unknown dtype": {"dtype": "F4"},
    "complex dtype": {"dtype": "C64", "shape": [8, 3]},
    "dtype of control characters": {"dtype": "\x1b[2J\nF32"},
    "dtype that is a number": {"dtype": 32},
    "dtype that is null": {"dtype": None},
    "dtype that is a list": {"dtype": ["F32"]},
    "dtype of half the size": {"dtype": "F16"},
    "dtype of whole numbers": {"dtype": "I32"},
    "dtype of positive numbers": {"dtype": "U32"},
}
VALUES: dict[str, Callable[[Path], object]] = {
    "NaN weights": partial(filled, float("nan")),
    "infinite weights": partial(filled, float("inf")),
    "one more tensor": partial(with_tensors, lambda tensors: tensors.update(more=torch.ones(3))),
    "a missing tensor": partial(with_tensors, lambda tensors: tensors.pop(FIRST)),
    "a matrix without rows": partial(with_tensors, lambda tensors: tensors.update({FIRST: torch.ones(0, 6)})),
    "a scalar for a matrix": partial(with_tensors, lambda tensors: tensors.update({FIRST: torch.tensor(1.0)})),
}


def replaced(make: Callable[[Path], object], folder: Path) -> None:
    """Put something else in the place of the weight file."""
    (folder / FILE).unlink()
    make(folder / FILE)


def bind(path: Path) -> None:
    """Make a socket; its path must be short, so that it is given relative to the folder."""
    folder_before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(folder_before)


def sparse(size: int, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def huge_but_complete(path: Path) -> None:
    """Write a file of 64 GB without data on the disk, whose only matrix is as large."""
    write_file(path, {FIRST: {"dtype": "F32", "shape": [2**17, 2**17], "data_offsets": [0, 2**36]}}, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**36)


def replaced_folder(make: Callable[[Path], object], folder: Path) -> None:
    (folder / FILE).unlink()
    folder.rmdir()
    make(folder)


def linked(folder: Path) -> None:
    (folder / FILE).rename(folder / "blob")
    (folder / FILE).symlink_to("blob")


def renamed(name: str, folder: Path) -> str:
    return folder.rename(folder.parent / name).name


FILES: dict[str, Callable[[Path], object]] = {
    "no file": partial(replaced, lambda _: None),
    "a FIFO": partial(replaced, os.mkfifo),
    "a socket": partial(replaced, bind),
    "a folder for a file": partial(replaced, Path.mkdir),
    "a link to nowhere": partial(replaced, lambda path: path.symlink_to("nowhere")),
    "a link to itself": partial(replaced, lambda path: path.symlink_to(path)),
    "a link to a device": partial(replaced, lambda path: path.symlink_to("/dev/zero")),
    "a link to a folder": partial(replaced, lambda path: path.symlink_to(path.parent)),
    "zeros of 1 TB": partial(replaced, partial(sparse, 2**40)),
    "a matrix of 64 GB": partial(replaced, huge_but_complete),
    "a file without permission": lambda folder: (folder / FILE).chmod(0),
    "a folder without permission": lambda folder: folder.chmod(0),
    "a folder that may not be listed": lambda folder: folder.chmod(0o300),
    "a folder that may only be listed": lambda folder: folder.chmod(0o400),
    "a folder that is a link to nowhere": partial(replaced_folder, lambda path: path.symlink_to("nowhere")),
    "a folder that is a link to itself": partial(replaced_folder, lambda path: path.symlink_to(path)),
}


def with_index(index: Any, folder: Path) -> None:
    """Write an index, with the sound weights in its first shard."""
    (folder / FILE).rename(folder / "a.safetensors")
    text = index if isinstance(index, bytes | str) else json.dumps(index)
    (folder / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)


def with_map(files: Any, folder: Path) -> None:
    with_index({"weight_map": files}, folder)


def with_twin(folder: Path) -> None:
    """Write two shards that contain the same names."""
    with_map({FIRST: "a.safetensors", SECOND: "b.safetensors"}, folder)
    save_file({FIRST: torch.ones(8, 6)}, folder / "b.safetensors")


def special_index(make: Callable[[Path], object], folder: Path) -> None:
    (folder / FILE).rename(folder / "a.safetensors")
    make(folder / INDEX)


INDEXES: dict[str, Callable[[Path], object]] = {
    "index that is no JSON": partial(with_index, "no json"),
    "index that is a list": partial(with_index, "[]"),
    "index that is null": partial(with_index, "null"),
    "index without a map": partial(with_index, "{}"),
    "index in UTF-16": partial(with_index, '{"weight_map": {"w": "a.safetensors"}}'.encode("utf-16")),
    "index of deeply nested lists": partial(with_index, NESTED),
    "index of deeply nested objects": partial(with_index, NESTED_OBJECT),
    "index with a nested map": partial(with_index, '{"weight_map":' + NESTED_OBJECT + "}"),
    "map that is a list": partial(with_map, ["a.safetensors"]),
    "map that is a text": partial(with_map, "a.safetensors"),
    "empty map": partial(with_map, {}),
    "map to numbers": partial(with_map, {FIRST: 3}),
    "map to numbers and names": partial(with_map, {FIRST: 3, SECOND: "a.safetensors"}),
    "map to lists": partial(with_map, {FIRST: ["a.safetensors"]}),
    "map to null": partial(with_map, {FIRST: None}),
    "shard outside the folder": partial(with_map, {FIRST: "../step40/model.safetensors"}),
    "shard with an absolute path": partial(with_map, {FIRST: "/etc/passwd"}),
    "shard that is missing": partial(with_map, {FIRST: "a.safetensors", SECOND: "b.safetensors"}),
    "shard that is the index": partial(with_map, {FIRST: INDEX}),
    "shard that is the folder": partial(with_map, {FIRST: "."}),
    "shard with NUL in its name": partial(with_map, {FIRST: "a\0.safetensors"}),
    "tensors in two shards": with_twin,
    "index of 1 TB": partial(special_index, partial(sparse, 2**40)),
    "index that is a FIFO": partial(special_index, os.mkfifo),
    "index that is a link to nowhere": partial(special_index, lambda path: path.symlink_to("nowhere")),
}
NAMES = {
    "step beyond 64 bits": "step" + "9" * 20,
    "step of 2^63": f"step{2**63}",
    "step of 200 digits": "step" + "1" * 200,
}
SOUND: dict[str, Callable[[Path], object]] = {
    "a link to the file": linked,
    "an index of one shard": partial(with_map, {FIRST: "a.safetensors"}),
    "metadata": partial(with_header, lambda header: {**header, "__metadata__": {"format": "pt"}}),
    "a header with spaces at its end": partial(with_header, lambda header: json.dumps(header) + "    "),
    "a step in other digits": partial(renamed, "step" + "".join(chr(0x0660 + int(digit)) for digit in HOSTILE[4:])),
    "a FIFO beside the weights": lambda folder: os.mkfifo(folder / "notes"),
    "a link to nowhere beside the weights": lambda folder: (folder / "notes").symlink_to("nowhere"),
}

HOSTILE_SAFETENSORS = [
    *(Hostile(name, damage) for name, damage in {**HEADERS, **VALUES, **FILES, **INDEXES}.items()),
    *(Hostile(name, partial(with_entry, changes)) for name, changes in ENTRIES.items()),
    *(Hostile(f"no {key}", partial(without, key)) for key in ("dtype", "shape", "data_offsets")),
    *(Hostile(name, partial(renamed, step)) for name, step in NAMES.items()),
    *(Hostile(name, damage, "measured") for name, damage in SOUND.items()),
]
