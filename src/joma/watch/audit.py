"""Audit a series of checkpoints: find its faults before anything is measured or drawn.

Public series have had the weights of one step under the name of another, the final shard in the middle of training,
and several steps with the same weights (issues 83, 198, 205 and 206 of Pythia). The audit compares sketches of the
checkpoints: a span of values from each of a few tensors of every file. During training the weights move along a path,
so that each checkpoint lies where the detour from its neighbours is smallest; a checkpoint that would fit elsewhere
with less than half the detour is not what its name says.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from jaxtyping import Float

from joma.arguments import InputError
from joma.progress import SILENT, Progress
from joma.watch.series import Checkpoints, Fault, LazyCheckpoint
from joma.watch.store import Measure, Store
from joma.watch.weight_files import WeightFile

NOT_FINITE_REMEDY = "download it again; if nothing changes, the training had diverged by then"
PUBLISHER_REMEDY = "and report it to the publisher if nothing changes"
SAMPLED_TENSORS, SPAN = 32, 512  # the number of sampled tensors per checkpoint, and of values from each
DETOUR_RATIO = 2.0  # a detour this many times the smallest one is a fault; in correct series the ratio is 1
MIN_CHECKPOINTS = 4  # the order of fewer checkpoints cannot be judged
_METADATA = "words"  # the key of a sketch's metadata in stores; existing stores have it, so it cannot be renamed


@dataclass(frozen=True)
class Audit:
    """The faults of a series, and the checkpoints that are left out because of them."""

    faults: tuple[Fault, ...]

    @property
    def left_out(self) -> frozenset[str]:
        """The names of the checkpoints whose measurements would be misleading."""
        return frozenset(name for fault in self.faults for name in fault.left_out)

    @property
    def incomplete(self) -> bool:
        """Whether a checkpoint was left out or not measured; checkpoints that are merely identical do not count."""
        return any(fault.loses_data for fault in self.faults)


def audit_series(series: Checkpoints, *, store: Store | None = None, progress: Progress = SILENT) -> Audit:
    """Find unreadable, identical and misplaced checkpoints, and those of another architecture or with NaN or infinity.

    Two faults are invisible to distances between checkpoints: a series that is reversed as a whole, and a wrong order
    among fewer than four checkpoints.

    Args:
        series: the checkpoints.
        store: where sketches are kept, so that a second audit reads nothing.
        progress: where to show the progress.

    Returns:
        The faults; none of them raises an error, so that the rest of the series can be measured.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (0, 1, 2):
    ...         (Path(folder) / f"step{step}").mkdir()
    ...         save_file({"w": torch.ones(3, 3) * (step > 1)}, Path(folder) / f"step{step}" / "model.safetensors")
    ...     [(fault.kind, fault.checkpoints) for fault in audit_series(Checkpoints(folder)).faults]
    [('identical', ('step0', 'step1'))]
    """
    return audit_sketches(series, series.measure(SKETCH, store=store, progress=progress))


def audit_sketches(
    series: Checkpoints, sampled: Iterable[tuple[LazyCheckpoint, dict[str, np.ndarray] | InputError]]
) -> Audit:
    """Return the audit of a series whose checkpoints have been sketched; no weights are read.

    Args:
        series: the checkpoints.
        sampled: each checkpoint in training order, with the result of `SKETCH` or the error.
    """
    faults, sketches = list(series.faults), {}
    for checkpoint, arrays in sampled:
        if isinstance(arrays, InputError):
            faults.append(Fault.from_error("unreadable", checkpoint.name, arrays))
        else:
            sketches[checkpoint.name] = Sketch.unpack(arrays)
    faults += [fault for name, sketch in sketches.items() for fault in _not_finite(name, sketch)]
    faults += _other_architectures(sketches)
    left_out = {name for fault in faults for name in fault.left_out}
    sound = {name: sketch for name, sketch in sketches.items() if name not in left_out}
    for file, tensors in _tensors_by_file(sound):
        faults += _misnamed(sound, tensors, file)
    return Audit(tuple(faults))


@dataclass(frozen=True)
class Sketch:
    """A few thousand values that represent a checkpoint.

    Attributes:
        shapes: the shape of every tensor, by name, and its dtype if that is not a floating one.
        file: the file of each sampled tensor.
        digest: a hash of each sampled span; equal hashes mean equal bits.
        values: the sampled spans.
    """

    shapes: Mapping[str, list[int | str]]
    file: Mapping[str, str]
    digest: Mapping[str, str]
    values: Mapping[str, np.ndarray]

    def pack(self) -> dict[str, np.ndarray]:
        """Return the sketch as named arrays, for the store."""
        metadata = {"shapes": dict(self.shapes), "file": dict(self.file), "digest": dict(self.digest)}
        return {_METADATA: np.frombuffer(json.dumps(metadata).encode(), dtype=np.uint8).copy(), **self.values}

    @classmethod
    def unpack(cls, arrays: Mapping[str, np.ndarray]) -> Sketch:
        """Return the sketch that `pack` turned into named arrays."""
        metadata = json.loads(arrays[_METADATA].tobytes())
        return cls(**metadata, values={name: arrays[name] for name in metadata["file"]})


def sample(checkpoint: LazyCheckpoint) -> dict[str, np.ndarray]:
    """Return the sketch of a checkpoint: the same spans of the same tensors for every checkpoint, from each file."""
    per_file = max(2, SAMPLED_TENSORS // len(checkpoint.files))
    file, digest, values = {}, {}, {}
    for file_name, weights in checkpoint.files.items():
        matrices = [name for name in weights.names() if len(weights.shape(name)) > 1] or weights.names()
        for name in sorted(matrices, key=_hash)[:per_file]:
            size = int(np.prod(weights.shape(name)))
            start = _hash(name) % max(1, size - SPAN + 1)
            span = weights.part(name, start, min(size, start + SPAN)).double().numpy()
            file[name], digest[name] = file_name, hashlib.sha256(span.tobytes()).hexdigest()[:16]
            with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is a fault
                values[name] = span.astype(np.float32)
    shapes = {name: _shape(checkpoint.files[file_name], name) for name, file_name in checkpoint.layout.items()}
    return Sketch(shapes, file, digest, values).pack()


def _shape(weights: WeightFile, name: str) -> list[int | str]:
    """Return the shape of a tensor, and its dtype if that is not a floating one."""
    dtype = weights.dtype(name)
    return [*weights.shape(name), *([] if dtype.is_floating_point else [str(dtype)])]


def _hash(name: str) -> int:
    """Return a pseudo-random number that depends on the name alone."""
    return zlib.crc32(name.encode())


SKETCH = Measure("audit", 2, sample, {"tensors": SAMPLED_TENSORS, "run": SPAN})


def _not_finite(name: str, sketch: Sketch) -> Iterator[Fault]:
    """Yield a fault if weights of the checkpoint are NaN or infinite: its distance to others is undefined."""
    tensors = [tensor for tensor, span in sketch.values.items() if not np.isfinite(span).all()]
    if tensors:
        message = f"{name} has weights that are NaN or infinite ({_enumerate(tensors)})"
        yield Fault("not finite", (name,), message, NOT_FINITE_REMEDY, (name,))


def _other_architectures(sketches: Mapping[str, Sketch]) -> Iterator[Fault]:
    """Yield a fault for each checkpoint whose tensors differ in name, shape or kind from those of the majority."""
    if not sketches:
        return
    signatures = {name: json.dumps(sorted(sketch.shapes.items())) for name, sketch in sketches.items()}
    usual, _ = Counter(signatures.values()).most_common(1)[0]
    example = next(sketch for name, sketch in sketches.items() if signatures[name] == usual)
    for name, sketch in sketches.items():
        if signatures[name] != usual:
            tensors = sorted({*sketch.shapes, *example.shapes})
            different = next(tensor for tensor in tensors if sketch.shapes.get(tensor) != example.shapes.get(tensor))
            shape, usual_shape = (shapes.get(different, "missing") for shapes in (sketch.shapes, example.shapes))
            message = f"{name} has another architecture: {different} is {shape} here and {usual_shape} in the others"
            yield Fault("architecture", (name,), message, "check its revision or leave it out", (name,))


def _tensors_by_file(sketches: Mapping[str, Sketch]) -> list[tuple[str, list[str]]]:
    """Return the sampled tensors of each file, or of all files together if the checkpoints are sharded differently.

    The name of the file is empty where it does not matter.
    """
    if not sketches:
        return []
    layouts = [dict(sketch.file) for sketch in sketches.values()]
    common = sorted(set.intersection(*(set(layout) for layout in layouts)))
    if any({name: layout[name] for name in common} != layouts[0] for layout in layouts):
        return [("", common)]
    files = sorted(set(layouts[0].values()))
    labels = files if len(files) > 1 else [""]
    return [
        (label, [name for name in common if layouts[0][name] == file])
        for label, file in zip(labels, files, strict=True)
    ]


def _misnamed(sketches: Mapping[str, Sketch], tensors: Sequence[str], file: str) -> list[Fault]:
    """Return the faults of checkpoints, or of their parts in `file`, that are identical to others or out of order."""
    names = list(sketches)
    digests = [tuple(sketch.digest[tensor] for tensor in tensors) for sketch in sketches.values()]
    between = distances([sketch.values for sketch in sketches.values()], tensors)
    weights = f"the weights in {file} of" if file else "the weights of"
    unique = [index for index in range(len(names)) if digests.count(digests[index]) == 1]
    faults, left_out = [], set()
    for cluster in _identical(digests):
        retained, dropped = _best_fit(cluster, between, unique)
        faults.append(_identical_fault(names, cluster, retained, dropped, weights))
        left_out |= set(dropped)
    rest = [index for index in range(len(names)) if index not in left_out]
    for point, before, after in misplaced(between[np.ix_(rest, rest)]):
        name, low, high = names[rest[point]], *(None if i is None else names[rest[i]] for i in (before, after))
        where = f"between {low} and {high}" if low and high else (f"after {low}" if low else f"before {high}")
        message = f"{weights} {name} belong {where}"
        faults.append(Fault("misplaced", (name,), message, f"download it again, {PUBLISHER_REMEDY}", (name,)))
    return faults


def _identical_fault(
    names: Sequence[str], cluster: Sequence[int], retained: Sequence[int], dropped: Sequence[int], weights: str
) -> Fault:
    """Return the fault of the checkpoints `cluster`, which are identical; those in `dropped` are left out."""
    checkpoints = tuple(names[index] for index in cluster)
    message = f"{weights} {_enumerate(checkpoints)} are the same in every sampled value"
    remedy = "download them again, unless the training stood still there"
    if cluster[0] == 0:
        remedy = (
            "correct before the first update, for example if the learning rate warms up from 0; else download again"
        )
    if dropped:
        message += f"; they fit best as {names[retained[0]]}"
        remedy = f"download them again, {PUBLISHER_REMEDY}"
    return Fault("identical", checkpoints, message, remedy, tuple(names[index] for index in dropped))


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def _identical(digests: Sequence[tuple[str, ...]]) -> Iterator[list[int]]:
    """Yield the indices of each set of two or more equal checkpoints."""
    for repeated, count in Counter(digests).items():
        if count > 1:
            yield [index for index, digest in enumerate(digests) if digest == repeated]


def _best_fit(
    cluster: Sequence[int], between: Float[np.ndarray, "n n"], unique: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Split identical checkpoints into the group of neighbours that fits its place best, and the others.

    The fit is judged by the checkpoints in `unique`, which equal no other: a wrong one would confirm its copies.
    """
    groups = [
        [index for _, index in group] for _, group in groupby(enumerate(cluster), key=lambda pair: pair[1] - pair[0])
    ]
    if len(groups) == 1:
        return groups[0], []
    anchors = sorted(unique)
    costs = []
    for group in groups:
        gap = int(np.searchsorted(anchors, group[0]))
        costs.append(detours(between[group[0]], anchors, between)[gap] if anchors else 0.0)
    best = int(np.argmin(costs))
    return groups[best], [index for number, group in enumerate(groups) for index in group if number != best]


def distances(values: Sequence[Mapping[str, np.ndarray]], tensors: Sequence[str]) -> Float[np.ndarray, "n n"]:
    """Return the root mean square over tensors of ‖x_i − x_j‖, each tensor relative to its median norm."""
    squared = np.zeros((len(values), len(values)))
    for tensor in tensors:
        points = np.stack([value[tensor] for value in values]).astype(np.float64)
        norms = (points**2).sum(axis=1)
        scale = np.median(norms) or norms.max() or 1.0
        for row, point in enumerate(points):
            squared[row] += ((points - point) ** 2).sum(axis=1) / scale
    return np.sqrt(squared / max(1, len(tensors)))


def detours(
    from_point: Float[np.ndarray, " n"], path: Sequence[int], between: Float[np.ndarray, "n n"]
) -> Float[np.ndarray, " gaps"]:
    """Return by how much `path` gets longer if a point x is inserted before, between or after its stations.

    d(k, x) + d(x, k+1) − d(k, k+1) for a gap between two stations, and d(end, x) for an end.

    Args:
        from_point: the distances d(x, ·).
        path: the stations, in order.
        between: the distances between all points.
    """
    to_stations = from_point[list(path)]
    legs = np.array([between[a, b] for a, b in pairwise(path)])
    return np.concatenate([to_stations[:1], to_stations[:-1] + to_stations[1:] - legs, to_stations[-1:]])


def misplaced(between: Float[np.ndarray, "n n"]) -> list[tuple[int, int | None, int | None]]:
    """Return the points whose detour would be less than 1/`DETOUR_RATIO` of the present one at another place.

    The point whose move shortens the path most is removed first and the others are judged without it, since a wrong
    point leaves a gap that its neighbours seem to fit.

    Args:
        between: the distances between all points, which are in training order.

    Returns:
        Each misplaced point with the stations before and after its proper place, None at an end. Stations are points
        that are not misplaced themselves.
    """
    path, removed = list(range(len(between))), []
    while len(path) >= MIN_CHECKPOINTS:
        savings = [_saving(point, path, between) for point in path]
        worst = int(np.argmax(savings))
        if savings[worst] <= 0:
            break
        path.remove(culprit := _culprit(path[worst], path, between))
        removed.append(culprit)
    gaps = {point: int(np.argmin(detours(between[point], path, between))) for point in sorted(removed)}
    return [
        (point, path[gap - 1] if gap else None, path[gap] if gap < len(path) else None) for point, gap in gaps.items()
    ]


def _culprit(point: int, path: Sequence[int], between: Float[np.ndarray, "n n"]) -> int:
    """Return which of two neighbours is misplaced if `point` belongs beyond its neighbour, otherwise `point`.

    The neighbour belongs beyond `point` just as well, so that their order does not tell which of them is wrong: it is
    the one without which the path is shorter.
    """
    position = path.index(point)
    others = [*path[:position], *path[position + 1 :]]
    gap = int(np.argmin(detours(between[point], others, between)))
    if abs(gap - position) != 1:
        return point
    return max((point, others[min(gap, position)]), key=lambda station: _detour(station, path, between))


def _detour(point: int, path: Sequence[int], between: Float[np.ndarray, "n n"]) -> float:
    """Return by how much `path` would be shorter without one of its stations."""
    position = path.index(point)
    return float(detours(between[point], [*path[:position], *path[position + 1 :]], between)[position])


def _saving(point: int, path: Sequence[int], between: Float[np.ndarray, "n n"]) -> float:
    """Return by how much the path gets shorter if `point` moves to its best place; 0 if it is not misplaced."""
    position = path.index(point)
    costs = detours(between[point], [*path[:position], *path[position + 1 :]], between)
    noise = 1e-6 * between.max()  # rounding, if a point lies exactly on the path
    is_misplaced = costs[position] + noise > DETOUR_RATIO * (costs.min() + noise)
    return float(costs[position] - costs.min()) if is_misplaced else 0.0
