"""Ways to damage a stored file: bytes, kinds of files, values in JSON, the structure of HDF5.

A damage is applied to one file of a folder. What every reader of the folder makes of it is tried by `trials`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from joma.manifest import MANIFEST, read_manifest, write_manifest

SPARSE_BYTES = 1 << 40  # a file of a terabyte that takes no space on the disk
WORDS = {
    "holds": "does not hold",
    "does not hold": "holds",
    "not tested": "holds",
    "quick": "paper",
    "every": "mean",
    "mean": "every",
}


@dataclass(frozen=True)
class Damage:
    """One damage: its name, the function of folder and file that makes it, and other files that it changes."""

    name: str
    apply: Callable[[Path, str], object]
    also: tuple[str, ...] = ()


def replaced(name: str, content: bytes) -> Damage:
    """Return the damage that gives a file other content."""
    return Damage(name, lambda folder, file: (folder / file).write_bytes(content))


def together(name: str, contents: Mapping[str, bytes]) -> Damage:
    """Return the damage that gives several files other content, whichever of them it is said of."""

    def apply(folder: Path, file: str) -> None:
        del file
        for other, content in contents.items():
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).write_bytes(content)

    return Damage(name, apply, tuple(contents))


def of_bytes(content: bytes, count: int, seed: str) -> Iterator[Damage]:
    """Yield about `count` damages of single bytes, spread over a file, and the cuts and additions."""
    generator = random.Random(seed)
    for index in range(count if content else 0):
        position = min(len(content) - 1, int((index + generator.random()) * len(content) / count))
        bit, byte = generator.randrange(8), content[position]
        yield replaced(f"flip bit {bit} of byte {position}", _with_byte(content, position, byte ^ (1 << bit)))
        printable = generator.choice([other for other in b'0123456789abcdefXYZ "-+.,' if other != byte])
        yield replaced(f"byte {position} as {chr(printable)!r}", _with_byte(content, position, printable))
    middle = len(content) // 2
    cuts = {"nothing": 0, "half": middle, "all but a byte": max(0, len(content) - 1)}
    yield from (replaced(f"cut to {name}", content[:size]) for name, size in cuts.items() if size < len(content))
    yield from (replaced(f"append {end[:9]!r}", content + end) for end in (b"\n", b"\0", b"}", b"x" * 4096))
    if content:
        yield replaced("twice", content * 2)
        yield replaced("a byte inserted", content[:middle] + b"1" + content[middle:])
        yield replaced("a byte removed", content[:middle] + content[middle + 1 :])
        yield replaced("zeros", bytes(len(content)))
        yield replaced("backwards", content[::-1])


def _with_byte(content: bytes, position: int, byte: int) -> bytes:
    return content[:position] + bytes([byte]) + content[position + 1 :]


def of_kind(other: Path | None) -> Iterator[Damage]:
    """Yield the damages that put something else in a file's place, such as a link to the file of another run."""

    def remove(folder: Path, file: str) -> Path:
        path = folder / file
        path.unlink()
        return path

    def grow(folder: Path, file: str) -> None:
        os.truncate(folder / file, SPARSE_BYTES)

    yield Damage("deleted", remove)
    yield Damage("a folder", lambda folder, file: remove(folder, file).mkdir())
    yield Damage("a pipe", lambda folder, file: os.mkfifo(remove(folder, file)))
    yield Damage("a link to nothing", lambda folder, file: remove(folder, file).symlink_to("nowhere"))
    yield Damage("a link to itself", lambda folder, file: remove(folder, file).symlink_to(Path(file).name))
    yield Damage("a terabyte of zeros after it", grow)
    if other is not None:
        yield Damage("a link to that of another", lambda folder, file: remove(folder, file).symlink_to(other))


def of_json(content: bytes) -> Iterator[Damage]:
    """Yield damages of the values in a JSON file, each a valid JSON file again."""
    value = json.loads(content)
    for place, leaf in _leaves(value):
        for change in _changes(leaf):
            yield replaced(f"{'.'.join(map(str, place))} is {change!r:.40}", _dumped(_with_leaf(value, place, change)))
    for place, members in _containers(value):
        where = ".".join(map(str, place)) or "all"
        if isinstance(members, list) and len(members) > 1:
            yield replaced(f"{where} reversed", _dumped(_with_leaf(value, place, members[::-1])))
            yield replaced(f"{where} without its last", _dumped(_with_leaf(value, place, members[:-1])))
        elif isinstance(members, dict):
            for key in members:
                rest = {name: member for name, member in members.items() if name != key}
                yield replaced(f"{where} without {key}", _dumped(_with_leaf(value, place, rest)))
            yield replaced(f"{where} with another", _dumped(_with_leaf(value, place, {**members, "another": 1})))


def _dumped(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (dict, list)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(member, (*place, key))
    else:
        yield place, value


def _containers(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (dict, list)):
        yield place, value
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _containers(member, (*place, key))


def _changes(leaf: Any) -> list[Any]:
    """Return other values of the same type, one of them close by."""
    if isinstance(leaf, bool):
        return [not leaf]
    if isinstance(leaf, int):
        return [leaf + 1, -leaf - 1]
    if isinstance(leaf, float):
        return [leaf * (1 + 1e-9) + 1e-12, -leaf - 1.0]
    if isinstance(leaf, str):
        return [WORDS.get(leaf, f"{leaf}s"), ""] if leaf else ["a"]
    return [0]


def _with_leaf(value: Any, place: tuple[Any, ...], leaf: Any) -> Any:
    """Return a copy of `value` in which `leaf` stands at `place`."""
    if not place:
        return leaf
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _with_leaf(value[place[0]], place[1:], leaf)
    return copy


def of_hdf5(file: Path) -> Iterator[Damage]:
    """Yield damages that leave an HDF5 file well-formed: other numbers, attributes, names and variables."""
    with h5py.File(file, "r") as root:
        names = [name for name, member in root.items() if isinstance(member, h5py.Dataset)]
        attributes = [(name, key) for name in ["/", *names] for key in root[name].attrs]
    for name in names:
        yield _edited(f"one number of {name}", lambda root, name=name: _change_number(root[name]))
        yield _edited(f"{name} renamed", lambda root, name=name: root.move(name, f"{name}s"))
        yield _edited(f"{name} deleted", lambda root, name=name: root.__delitem__(name))
    for name, key in attributes:
        yield _edited(f"attribute {key} of {name}", lambda root, name=name, key=key: _change_attribute(root[name], key))
    yield _edited("another variable", lambda root: root.create_dataset("another", data=np.zeros(3)))
    yield _edited("another attribute", lambda root: root.attrs.update({"another": "1"}))


def _edited(name: str, edit: Callable[[h5py.File], object]) -> Damage:
    def apply(folder: Path, file: str) -> None:
        with h5py.File(folder / file, "r+") as root:
            edit(root)

    return Damage(name, apply)


def _change_number(dataset: h5py.Dataset) -> None:
    values = dataset[()]
    if values.dtype.kind in "iuf":
        values.flat[0] += 1
    else:
        values.flat[0] = b"another"
    dataset[...] = values


def _change_attribute(member: Any, key: str) -> None:
    value = member.attrs[key]
    if isinstance(value, str):
        member.attrs[key] = value.replace("1", "2") if "1" in value else f"{value}s"
    else:
        del member.attrs[key]


def hostile_hdf5(elsewhere: Path) -> Iterator[Damage]:
    """Yield structures that lead outside the file or beyond the memory, each with a manifest that agrees with them."""
    with h5py.File(elsewhere / "elsewhere.h5", "w") as root:
        root["value"] = np.zeros((3, 4))
    (elsewhere / "elsewhere.bin").write_bytes(bytes(96))
    other, raw = str(elsewhere / "elsewhere.h5"), str(elsewhere / "elsewhere.bin")

    def virtual(root: h5py.File) -> None:
        layout = h5py.VirtualLayout((3, 4), "<f8")
        layout[...] = h5py.VirtualSource(other, "value", (3, 4))
        root.create_virtual_dataset("another", layout)

    def deep(root: h5py.File) -> None:
        root.create_group("group")["another"] = h5py.ExternalLink(other, "value")

    edits: dict[str, Callable[[h5py.File], object]] = {
        "external link": lambda root: root.__setitem__("another", h5py.ExternalLink(other, "value")),
        "external link in a group": deep,
        "soft link": lambda root: root.__setitem__("another", h5py.SoftLink("/value")),
        "link to itself": lambda root: root.create_group("group").__setitem__("group", root["group"]),
        "external storage": lambda root: root.create_dataset("another", (12,), "<f8", external=[(raw, 0, 96)]),
        "virtual dataset": virtual,
        "ten terabytes": lambda root: root.create_dataset("another", (1_250_000_000_000,), "<f8", fillvalue=1.0),
        "ten terabytes in chunks": lambda root: root.create_dataset(
            "another", (1_250_000_000_000,), "<f8", chunks=(1000,), compression="gzip"
        ),
    }
    for name, edit in edits.items():
        yield forged(_edited(name, edit))


def forged(damage: Damage) -> Damage:
    """Return a damage after which the manifest is written again, so that it agrees with the damaged files."""

    def apply(folder: Path, file: str) -> None:
        damage.apply(folder, file)
        where = (folder / file).parent
        manifest = read_manifest(where)
        assert manifest is not None
        places = {name: entry.arrays for name, entry in manifest.files.items()}
        write_manifest(where, manifest.identity, manifest.files, complete=manifest.complete, arrays=places)

    return Damage(f"{damage.name}, manifest forged", apply, damage.also)


def without_manifest(damage: Damage, file: str) -> Damage:
    """Return a damage after which the manifest beside `file` is deleted."""

    def apply(folder: Path, file: str) -> None:
        damage.apply(folder, file)
        _manifest_beside(folder, file).unlink()

    return Damage(f"{damage.name}, manifest deleted", apply, (*damage.also, _manifest_name(file)))


def _manifest_beside(folder: Path, file: str) -> Path:
    return next(path / MANIFEST for path in (folder / file).parents if (path / MANIFEST).exists())


def _manifest_name(file: str) -> str:
    parent = Path(file).parent
    return str((parent.parent if parent.name == "figures" else parent) / MANIFEST)


def copy_folder(folder: Path, copy: Path) -> None:
    """Copy a folder to a place, after removing what is there."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, symlinks=True)
