"""The long part of the zoo: every hostile weight file in a series of its own, and random damage to good files.

A damaged file is refused by name, or measured. If it is measured, the format's own reader must accept it too and return
the same tensors: a file is never read as something else than it is.
"""

from __future__ import annotations

import random
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from joma.watch.byte_ranges import local_file
from joma.watch.weight_files import ByteCounter, PickledFile, SafetensorsFile
from robustness.zoo import HOSTILE, MEMORY, SECONDS, GoodSeries, Hostile, Outcome, run_apart
from robustness.zoo_bins import BIN, HOSTILE_BINS, OLD, parameters, saved, write_archive
from robustness.zoo_safetensors import FILE, HOSTILE_SAFETENSORS, split, write_file, write_sound

MUTATIONS = 800  # at scale 1
VALUES = [0, 1, -1, 2**31, 2**63, 10**30, 1.5, True, None, "", "F32", "I8", [], {}, [0, 0], [8, 6], [6, 8], [0, 192]]
Draw = random.Random


def torture(scale: float) -> dict[str, int]:
    """Check every hostile file in turn, and random damage to good ones; return what became of them."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        good = GoodSeries(Path(folder) / "series", write_sound)
        for hostile in [*HOSTILE_SAFETENSORS, *HOSTILE_BINS]:
            with _recorded(failures):
                good.check(hostile)
                left_out = hostile.outcome == "left out"
                counts["hostile weight files left out" if left_out else "unusual weight files measured"] += 1
        for seed in range(round(scale * MUTATIONS)):
            kind = list(MUTATION_KINDS)[seed % len(MUTATION_KINDS)]
            with _recorded(failures):
                counts[f"damaged weight files {check_mutation(good, Path(folder) / 'copy', kind, seed)}"] += 1
    if failures:
        raise AssertionError("\n".join(failures))
    return dict(counts)


@contextmanager
def _recorded(failures: list[str]) -> Iterator[None]:
    try:
        yield
    except AssertionError as failure:
        failures.append(str(failure))


def check_mutation(good: GoodSeries, copy: Path, kind: str, seed: int) -> str:
    """Damage a good file at random; return "refused" or "measured"."""

    def damage(folder: Path) -> None:
        MUTATION_KINDS[kind](folder, random.Random(seed))
        (file,) = folder.iterdir()
        copy.write_bytes(file.read_bytes())

    hostile = Hostile(f"{kind} with seed {seed}", damage, "any")
    if HOSTILE not in good.check(hostile).values:
        return "refused"
    compared = run_apart(lambda: _compare(copy, kind), seconds=SECONDS, memory=MEMORY)
    assert not compared.problem, f"{hostile.name} is measured, but: {compared.problem}"
    return "measured"


def _compare(file: Path, kind: str) -> Outcome:
    """Compare our reader with the format's own."""
    if kind.startswith("safetensors"):
        weights, expected = SafetensorsFile(local_file(file, "copy"), ByteCounter()), load_file(file)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weights, expected = PickledFile(file, "copy", ByteCounter()), torch.load(file, weights_only=True)
    assert weights.names() == tuple(sorted(expected))
    for name, tensor in expected.items():
        values = weights.tensor(name)
        assert values.shape == tensor.shape
        assert values.dtype == tensor.dtype
        assert values.numpy().tobytes() == tensor.detach().numpy().tobytes()
    return Outcome({})


def damage_bytes(content: bytes, draw: Draw) -> bytes:
    """Change bits or bytes, cut, extend, clear or repeat a part, or put two parts in the other order."""
    result = bytearray(content)
    first, last = sorted(draw.randrange(len(result)) for _ in range(2))
    kind = draw.choice(["bit", "bit", "byte", "bytes", "cut", "extend", "clear", "repeat", "exchange"])
    if kind == "bit":
        result[first] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        result[first] = draw.randrange(256)
    elif kind == "bytes":
        for _ in range(8):
            result[draw.randrange(len(result))] = draw.randrange(256)
    elif kind == "cut":
        del result[first:]
    elif kind == "extend":
        result += draw.randbytes(1 + first % 64)
    elif kind == "clear":
        result[first:last] = bytes(last - first)
    elif kind == "repeat":
        result[first:first] = result[first:last]
    else:
        result[first:] = result[last:] + result[first:last]
    return bytes(result)


def safetensors_bytes(folder: Path, draw: Draw) -> None:
    (folder / FILE).write_bytes(damage_bytes((folder / FILE).read_bytes(), draw))


def safetensors_header_bytes(folder: Path, draw: Draw) -> None:
    """Damage the header's text, and give its length correctly."""
    content = (folder / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    write_file(folder / FILE, damage_bytes(content[8 : 8 + length], draw), content[8 + length :])


def safetensors_header_values(folder: Path, draw: Draw) -> None:
    """Put other values into the entries of the header."""
    header, data = split(folder / FILE)
    for _ in range(draw.randint(1, 2)):
        name, other = draw.choice(sorted(header)), draw.choice(sorted(header))
        key = draw.choice(["dtype", "shape", "data_offsets"])
        change = draw.choice(["value", "number", "other", "whole", "name"])
        if change == "value":
            header[name] = {**header[name], key: draw.choice(VALUES)}
        elif change == "number" and key != "dtype":
            numbers = list(header[name][key]) if isinstance(header[name][key], list) else [0]
            numbers[draw.randrange(len(numbers)) if numbers else 0 :] = [draw.choice(VALUES)]
            header[name] = {**header[name], key: numbers}
        elif change == "other":
            header[name] = {**header[name], key: header[other].get(key)}
        elif change == "whole":
            header[name], header[other] = header[other], header[name]
        elif change == "name":
            header[draw.choice(["x", "", "__metadata__", f"{name}.1"])] = header.pop(name)
            break
    write_file(folder / FILE, header, data)


def bin_bytes(folder: Path, draw: Draw) -> None:
    saved(draw.choice([lambda _: None, parameters]), folder)
    (folder / BIN).write_bytes(damage_bytes((folder / BIN).read_bytes(), draw))


def bin_pickle(folder: Path, draw: Draw) -> None:
    """Damage the pickle in an archive whose checksums are correct."""
    saved(draw.choice([lambda _: None, parameters]), folder)
    with zipfile.ZipFile(folder / BIN) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    entries[name] = damage_bytes(entries[name], draw)
    write_archive(folder / BIN, entries)


def bin_of_the_old_format(folder: Path, draw: Draw) -> None:
    saved(draw.choice([lambda _: None, parameters]), folder, **OLD)
    (folder / BIN).write_bytes(damage_bytes((folder / BIN).read_bytes(), draw))


MUTATION_KINDS: dict[str, Callable[[Path, Draw], None]] = {
    "safetensors bytes": safetensors_bytes,
    "safetensors header bytes": safetensors_header_bytes,
    "safetensors header values": safetensors_header_values,
    "bin bytes": bin_bytes,
    "bin pickle": bin_pickle,
    "bin of the old format": bin_of_the_old_format,
}
