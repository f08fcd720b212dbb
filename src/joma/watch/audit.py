"""Is a series what it says it is? Faults are named before anything is measured or drawn.

Public series have had the weights of one step under the name of another, the final shard in the middle of training,
and steps that are all the same (Pythia's issues 83, 198, 205 and 206). Each checkpoint is judged by a sketch: a few
runs of values of a few tensors of each file. Weights move along a path, so a checkpoint lies where the detour from its
neighbours is least; one that would fit elsewhere at less than half the detour is not what its name says.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from jaxtyping import Float

from joma.arguments import InputError
from joma.progress import SILENT, Progress
from joma.watch.series import Checkpoint, Checkpoints, Fault, Measure, Store

DIVERGED = "download it again; if it stays so, training had diverged by then"
TENSORS, RUN = 32, 512  # tensors of a checkpoint that are sampled, and values of each
FARTHER = 2.0  # a detour this many times the least one is a fault: true series stay at 1
ENOUGH = 4  # checkpoints below which the order cannot be judged


@dataclass(frozen=True)
class Audit:
    """What is wrong with a series, and which of its checkpoints are left out for it."""

    faults: tuple[Fault, ...]

    @property
    def left_out(self) -> frozenset[str]:
        """Names of checkpoints whose measures would mislead."""
        return frozenset(name for fault in self.faults for name in fault.left_out)

    @property
    def incomplete(self) -> bool:
        """Whether anything was left out or could not be measured; identical neighbours alone are no such thing."""
        return any(fault.grave for fault in self.faults)


def audit(series: Checkpoints, *, store: Store | None = None, progress: Progress = SILENT) -> Audit:
    """Look for unreadable, foreign, identical and misplaced checkpoints in `series`, and for weights that diverged.

    The whole series in reverse, or one too short (fewer than four), cannot be told by distances alone.

    Args:
        series: the checkpoints.
        store: where sketches are kept, so that a second audit reads nothing.
        progress: where to show how far it is.

    Returns:
        The faults; nothing is raised for them, so that the rest of the series can be measured.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (0, 1, 2):
    ...         (Path(folder) / f"step{step}").mkdir()
    ...         save_file({"w": torch.ones(3, 3) * (step > 1)}, Path(folder) / f"step{step}" / "model.safetensors")
    ...     [(fault.kind, fault.checkpoints) for fault in audit(Checkpoints(folder)).faults]
    [('identical', ('step0', 'step1'))]
    """
    faults, sketches = list(series.faults), {}
    for checkpoint, found in series.measure(SKETCH, store=store, progress=progress):
        if isinstance(found, InputError):
            faults.append(Fault.told("unreadable", checkpoint.name, found))
        else:
            sketches[checkpoint.name] = Sketch.unpacked(found)
    faults += [fault for name, sketch in sketches.items() for fault in _diverged(name, sketch)]
    faults += _foreign(sketches)
    out = {name for fault in faults for name in fault.left_out}
    sound = {name: sketch for name, sketch in sketches.items() if name not in out}
    for file, tensors in _groups(sound):
        faults += _misnamed(sound, tensors, file)
    return Audit(tuple(faults))


@dataclass(frozen=True)
class Sketch:
    """A checkpoint in a few thousand values.

    Attributes:
        shapes: of every tensor, by name.
        file: that each sampled tensor lies in.
        digest: of each sampled run, so that equal means equal to the last bit.
        values: the sampled runs.
    """

    shapes: Mapping[str, list[int]]
    file: Mapping[str, str]
    digest: Mapping[str, str]
    values: Mapping[str, np.ndarray]

    def packed(self) -> dict[str, np.ndarray]:
        """As named arrays, for the store."""
        words = {"shapes": dict(self.shapes), "file": dict(self.file), "digest": dict(self.digest)}
        return {"words": np.frombuffer(json.dumps(words).encode(), dtype=np.uint8).copy(), **self.values}

    @classmethod
    def unpacked(cls, arrays: Mapping[str, np.ndarray]) -> Sketch:
        """From named arrays."""
        words = json.loads(arrays["words"].tobytes())
        return cls(**words, values={name: arrays[name] for name in words["file"]})


def sketch(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Sample the same runs of the same tensors of every checkpoint, from each of its files."""
    each = max(2, TENSORS // len(checkpoint.files))
    file, digest, values = {}, {}, {}
    for place, weights in checkpoint.files.items():
        matrices = [name for name in weights.names() if len(weights.shape(name)) > 1] or weights.names()
        for name in sorted(matrices, key=_number)[:each]:
            size = int(np.prod(weights.shape(name)))
            start = _number(name) % max(1, size - RUN + 1)
            run = weights.part(name, start, min(size, start + RUN)).double().numpy()
            file[name], digest[name] = place, hashlib.sha256(run.tobytes()).hexdigest()[:16]
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is told
                values[name] = run.astype(np.float32)
    shapes = {name: list(checkpoint.shape(name)) for name in checkpoint.names()}
    return Sketch(shapes, file, digest, values).packed()


def _number(name: str) -> int:
    """A number that looks random and depends on the name alone."""
    return zlib.crc32(name.encode())


SKETCH = Measure("audit", 1, sketch, {"tensors": TENSORS, "run": RUN})


def _diverged(name: str, sketch: Sketch) -> Iterator[Fault]:
    """The fault of a checkpoint with weights that are no numbers: it is at no distance from the others."""
    found = [tensor for tensor, run in sketch.values.items() if not np.isfinite(run).all()]
    if found:
        said = f"{name} has weights that are NaN or infinite ({_listed(found)})"
        yield Fault("not finite", (name,), said, DIVERGED, (name,))


def _foreign(sketches: Mapping[str, Sketch]) -> Iterator[Fault]:
    """Checkpoints whose tensors have other names or shapes than most."""
    if not sketches:
        return
    signature = {name: json.dumps(sorted(sketch.shapes.items())) for name, sketch in sketches.items()}
    usual, _ = Counter(signature.values()).most_common(1)[0]
    example = next(sketch for name, sketch in sketches.items() if signature[name] == usual)
    for name, sketch in sketches.items():
        if signature[name] != usual:
            tensors = sorted({*sketch.shapes, *example.shapes})
            other = next(one for one in tensors if sketch.shapes.get(one) != example.shapes.get(one))
            here, there = (one.shapes.get(other, "no such tensor") for one in (sketch, example))
            said = f"{name} is of another architecture: {other} is {here} here and {there} in the others"
            yield Fault("architecture", (name,), said, "check its revision or leave it out", (name,))


def _groups(sketches: Mapping[str, Sketch]) -> list[tuple[str, list[str]]]:
    """The sampled tensors of each file, or all as one where checkpoints are cut into files differently."""
    if not sketches:
        return []
    layouts = [dict(sketch.file) for sketch in sketches.values()]
    common = sorted(set.intersection(*(set(layout) for layout in layouts)))
    if any({name: layout[name] for name in common} != layouts[0] for layout in layouts):
        return [("", common)]
    files = sorted(set(layouts[0].values()))
    named = files if len(files) > 1 else [""]
    return [
        (label, [name for name in common if layouts[0][name] == file]) for label, file in zip(named, files, strict=True)
    ]


def _misnamed(sketches: Mapping[str, Sketch], tensors: Sequence[str], file: str) -> list[Fault]:
    """Checkpoints, or their parts in one file, that are identical to others or lie out of order."""
    names = list(sketches)
    digests = [tuple(sketch.digest[tensor] for tensor in tensors) for sketch in sketches.values()]
    between = distances([sketch.values for sketch in sketches.values()], tensors)
    part = f"the weights in {file} of " if file else ""
    faults, out = [], set()
    for cluster in _clusters(digests):
        kept, dropped = _true_run(cluster, between, [i for i in range(len(names)) if digests.count(digests[i]) == 1])
        listed = tuple(names[i] for i in cluster)
        said = f"{part}{_listed(listed)} are the same in every value sampled"
        remedy = "download them again, unless training stood still there"
        if cluster[0] == 0:
            remedy = "as it should be before the first update, as where the rate warms up from 0; else download again"
        if dropped:
            said += f"; they fit {names[kept[0]]} best"
            remedy = "download them again, and tell whoever published them if it stays so"
        faults.append(Fault("identical", listed, said, remedy, tuple(names[i] for i in dropped)))
        out |= set(dropped)
    rest = [i for i in range(len(names)) if i not in out]
    for place, before, after in misplaced(between[np.ix_(rest, rest)]):
        name, low, high = names[rest[place]], *(None if i is None else names[rest[i]] for i in (before, after))
        where = f"between {low} and {high}" if low and high else (f"after {low}" if low else f"before {high}")
        remedy = "download it again, and tell whoever published it if it stays so"
        faults.append(Fault("misplaced", (name,), f"{part}{name} belong {where}", remedy, (name,)))
    return faults


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _clusters(digests: Sequence[tuple[str, ...]]) -> Iterator[list[int]]:
    """The checkpoints of each set of two or more that are equal."""
    for digest, count in Counter(digests).items():
        if count > 1:
            yield [i for i, own in enumerate(digests) if own == digest]


def _true_run(
    cluster: Sequence[int], between: Float[np.ndarray, "n n"], unique: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Of identical checkpoints, the run of neighbours that fits its place best, and the others.

    Places are judged against those that are like no other: a wrong one would vouch for its copies.
    """
    runs = [[i for _, i in run] for _, run in groupby(enumerate(cluster), key=lambda pair: pair[1] - pair[0])]
    if len(runs) == 1:
        return runs[0], []
    anchors = sorted(unique)
    costs = []
    for run in runs:
        place = int(np.searchsorted(anchors, run[0]))
        costs.append(detours(between[run[0]], anchors, between)[place] if anchors else 0.0)
    best = int(np.argmin(costs))
    return runs[best], [i for place, run in enumerate(runs) for i in run if place != best]


def distances(values: Sequence[Mapping[str, np.ndarray]], tensors: Sequence[str]) -> Float[np.ndarray, "n n"]:
    """Root mean square over tensors of ‖x_i − x_j‖, each tensor relative to its median norm."""
    squared = np.zeros((len(values), len(values)))
    for tensor in tensors:
        points = np.stack([value[tensor] for value in values]).astype(np.float64)
        norms = (points**2).sum(axis=1)
        scale = np.median(norms) or norms.max() or 1.0
        for row, point in enumerate(points):
            squared[row] += ((points - point) ** 2).sum(axis=1) / scale
    return np.sqrt(squared / max(1, len(tensors)))


def detours(
    own: Float[np.ndarray, " n"], path: Sequence[int], between: Float[np.ndarray, "n n"]
) -> Float[np.ndarray, " gaps"]:
    """By how much the path gets longer if a point is put before, between or after its stations.

    d(k, x) + d(x, k+1) − d(k, k+1) in a gap, and d(end, x) at an end.
    """
    there = own[list(path)]
    legs = np.array([between[a, b] for a, b in pairwise(path)])
    return np.concatenate([there[:1], there[:-1] + there[1:] - legs, there[-1:]])


def misplaced(between: Float[np.ndarray, "n n"]) -> list[tuple[int, int | None, int | None]]:
    """Points that would fit elsewhere at less than 1/`FARTHER` of the detour, with the stations of that gap.

    The one whose move shortens the path most is taken out first and the others are judged without it, since a wrong
    point makes a gap that its neighbours seem to fit. Stations are among those that are left in the end.
    """
    path, found = list(range(len(between))), []
    while len(path) >= ENOUGH:
        savings = [_saving(i, path, between) for i in path]
        worst = int(np.argmax(savings))
        if savings[worst] <= 0:
            break
        found.append(path.pop(worst))
    gaps = {own: int(np.argmin(detours(between[own], path, between))) for own in sorted(found)}
    return [(own, path[gap - 1] if gap else None, path[gap] if gap < len(path) else None) for own, gap in gaps.items()]


def _saving(own: int, path: Sequence[int], between: Float[np.ndarray, "n n"]) -> float:
    """By how much the least detour is shorter than the own one, 0 where that is no fault."""
    place = path.index(own)
    costs = detours(between[own], [*path[:place], *path[place + 1 :]], between)
    noise = 1e-6 * between.max()  # rounding, where a point lies on the path exactly
    faulty = costs[place] + noise > FARTHER * (costs.min() + noise)
    return float(costs[place] - costs.min()) if faulty else 0.0
