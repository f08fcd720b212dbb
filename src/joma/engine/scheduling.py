"""Which unit starts next on a machine: first in, first out, within its cores, GPUs and memory."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from joma.arguments import InputError, short_reason
from joma.engine.unit import Unit

TYPICAL_MEMORY = 500_000_000  # bytes of a process with torch; assumed of a unit that does not state its memory
MAX_SHARES = 1000  # units that can share a GPU


@dataclass(frozen=True)
class Machine:
    """What units share.

    Attributes:
        jobs: units that run at the same time.
        cores: processor cores.
        memory: bytes.
        devices: GPUs, by the names that CUDA_VISIBLE_DEVICES has for them.
    """

    jobs: int
    cores: int
    memory: int
    devices: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Grant:
    """What a unit was given to run with.

    Attributes:
        unit: the unit.
        cores: the cores that it needs, or all of them if it needs more.
        memory: the bytes that are set aside for it.
        devices: its GPUs.
        share: the part of each of them that it may use.
    """

    unit: Unit
    cores: int
    memory: int
    devices: tuple[str, ...] = ()
    share: Fraction = Fraction(0)


@dataclass
class Schedule:
    """Units that wait and units that run.

    A unit never starts before one that was submitted earlier, so that a large one is not passed for ever by small ones.
    A unit that needs more cores or memory than the machine has runs when it can have all of them.
    """

    machine: Machine
    waiting: deque[Unit] = field(default_factory=deque)
    running: list[Grant] = field(default_factory=list)

    def submit(self, unit: Unit) -> None:
        """Append a unit to those that wait."""
        self.waiting.append(unit)

    def start(self) -> Grant | None:
        """Start the first unit that waits, and return what it is given; None if there is none or no room for it."""
        if not self.waiting or len(self.running) >= self.machine.jobs:
            return None
        grant = self._room_for(self.waiting[0])
        if grant is not None:
            self.waiting.popleft()
            self.running.append(grant)
        return grant

    def end(self, grant: Grant) -> None:
        """Take back what a unit was given."""
        self.running.remove(grant)

    def clear(self) -> list[Unit]:
        """Remove the units that wait, and return them."""
        units = list(self.waiting)
        self.waiting.clear()
        return units

    def _room_for(self, unit: Unit) -> Grant | None:
        cores = min(unit.needs.cores, self.machine.cores)
        memory = min(unit.needs.memory or TYPICAL_MEMORY, self.machine.memory)
        if cores > self.machine.cores - sum(grant.cores for grant in self.running):
            return None
        if memory > self.machine.memory - sum(grant.memory for grant in self.running):
            return None
        count, share = gpu_shares(unit.needs.gpus)
        devices = self._free_devices(count, share)
        return Grant(unit, cores, memory, devices, share) if len(devices) == count else None

    def _free_devices(self, count: int, share: Fraction) -> tuple[str, ...]:
        """Return at most `count` GPUs of which `share` is free, those with the least load first."""
        load = dict.fromkeys(self.machine.devices, Fraction(0))
        for grant in self.running:
            for device in grant.devices:
                load[device] += grant.share
        free = [device for device in sorted(load, key=load.__getitem__) if load[device] + share <= 1]
        return tuple(sorted(free[:count], key=list(load).index))


def gpu_shares(gpus: float) -> tuple[int, Fraction]:
    """Return the number of GPUs that a unit uses, and the part of each.

    >>> gpu_shares(2.0), gpu_shares(1 / 3), gpu_shares(0)
    ((2, Fraction(1, 1)), (1, Fraction(1, 3)), (0, Fraction(0, 1)))
    """
    if gpus == 0:
        return 0, Fraction(0)
    if gpus < 1:
        return 1, max(Fraction(gpus).limit_denominator(MAX_SHARES), Fraction(1, MAX_SHARES))
    return int(gpus), Fraction(1)


def check_arguments(unit: Unit) -> None:
    """Raise `InputError` if JSON lacks an argument of a unit."""
    try:
        json.dumps(unit.as_json())
    except (TypeError, ValueError) as problem:
        name, remedy = f"arguments of {unit.name}", "give numbers, texts, and lists and mappings of them"
        raise InputError(name, "what JSON has", short_reason(problem), remedy) from None


def check_needs(unit: Unit, devices: Iterable[str]) -> None:
    """Raise `InputError` if a unit needs what no machine has, or more GPUs than there are in `devices`."""
    needs, name = unit.needs, f"needs of {unit.name}"
    if needs.cores < 1:
        raise InputError(name, "one core at least", f"{needs.cores} cores", "give a number from 1 on", must="have")
    if needs.memory < 0:
        raise InputError(name, "a size of memory", needs.memory, "give a number of bytes, or 0", must="have")
    if not (math.isfinite(needs.gpus) and needs.gpus >= 0 and (needs.gpus <= 1 or needs.gpus == int(needs.gpus))):
        raise InputError(name, "a part of one GPU or whole GPUs", needs.gpus, "give 0.5, 1 or 2, say", must="have")
    count, present = gpu_shares(needs.gpus)[0], len(list(devices)) if needs.gpus else 0
    if count > present:
        remedy = "run it on the CPU, or where CUDA_VISIBLE_DEVICES and nvidia-smi list enough of them"
        raise InputError(name, f"no more GPUs than there are ({present})", count, remedy, must="have")
