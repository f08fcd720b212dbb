"""Damage every stored file in many ways: nothing may be believed that was not written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from joma.manifest import MANIFEST
from robustness import damage
from robustness.damage import Damage
from robustness.stored_folders import (
    cached_text,
    finished_runs,
    interrupted_run,
    large_run,
    probed_series,
    recordings,
    steady,
    trained_model,
)
from robustness.trials import Stored, Tally, Trials, workspace

SHARE = 0.4  # of all damages that are listed below are tried at scale 1
BYTES = 12  # positions of every file at which a bit and a byte are changed, at scale 1
EVERY = {"judge": 8, "joma run": 6, "joma judge": 24, "joma report": 6}  # the slower readers read one damage in so many
NEVER_DRAWN = ("config.json", "trajectory.nc", MANIFEST)  # `judge` is fast if one of these is damaged: it refuses


def torture(scale: float) -> dict[str, int]:
    """Try about 1,500 damages at scale 1, each through every reader, or through a part of the slower ones."""
    tally = Tally()
    with workspace() as folder, steady():
        for stored in all_stored(folder):
            damage_all(stored, tally, folder, scale)
    return tally.table()


def all_stored(folder: Path) -> Iterator[Stored]:
    """Yield every kind of stored folder."""
    yield from finished_runs(folder)
    yield large_run(folder)
    yield interrupted_run(folder)
    yield probed_series(folder)
    yield from recordings(folder)
    yield trained_model(folder)
    yield cached_text(folder)


def damage_all(stored: Stored, tally: Tally, folder: Path, scale: float) -> None:
    """Try a fixed sample of the damages of every file of a stored folder, the larger the larger `scale`."""
    trials = Trials(stored, tally, folder)
    for number, file in enumerate(stored.files):
        every = list(damages(stored, file, folder, round(BYTES * max(1.0, scale))))
        count = min(len(every), max(1, round(SHARE * scale * len(every))))
        sample = random.Random(f"{stored.name} {file}").sample(every, count)
        for index, single in enumerate(sample, start=5 * number):
            trials.run(file, [single], readers(stored, file, index))


def damages(stored: Stored, file: str, folder: Path, count: int) -> Iterator[Damage]:
    """Yield the damages of one file."""
    path = stored.folder / file
    content, others = path.read_bytes(), stored.others.get(file, {})
    deleted = (MANIFEST not in file) and (path.parent / MANIFEST).exists()
    yield from damage.of_bytes(content, count * (10 if stored.name == "a large run" else 1), file)
    yield from damage.of_kind(_another(stored, file, folder))
    for name, contents in others.items():
        yield damage.together(name, contents)
    if file.endswith(".json"):
        for single in damage.of_json(content):
            yield single
            if deleted:
                yield damage.without_manifest(single, file)
    if file.endswith(".nc"):
        yield from damage.of_hdf5(path)
        if deleted:
            yield from damage.hostile_hdf5(folder)
            yield from (damage.without_manifest(single, file) for single in damage.of_hdf5(path))


def _another(stored: Stored, file: str, folder: Path) -> Path | None:
    """Write the first of the other contents of a file to a place of its own, to be linked to."""
    for contents in stored.others.get(file, {}).values():
        path = folder / "another" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[file])
        return path
    return None


def readers(stored: Stored, file: str, index: int) -> list[str]:
    """Return the readers that read damage number `index` of a file."""
    fast = file.endswith(NEVER_DRAWN)
    return [
        name for name in stored.readers if index % (EVERY.get(name, 1) if not fast else 1 + 2 * (name in EVERY)) == 0
    ]
