"""A good series of checkpoints with a hostile one inside: the others must be measured as if it were not there.

Every series is probed in a forked process with limits on memory and time, without root's right to read everything, so
that a crash, a hang or a huge allocation is a failure of the one case.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from joma.watch.probing import probe
from joma.watch.series import Checkpoints

STEPS, HOSTILE_STEP = (0, 10, 20, 40), 30
HOSTILE = f"step{HOSTILE_STEP}"
MEMORY = 3 << 30  # bytes that a probe may allocate beyond what the process has
RESIDENT = 1 << 29  # bytes that a probe of these tiny checkpoints may really use
SECONDS = 10  # of computing; the clock on the wall may show more on a busy machine
WALL = 12  # times as many seconds, for what waits without computing


@dataclass(frozen=True)
class Hostile:
    """A hostile checkpoint.

    Attributes:
        name: what is wrong with it.
        damage: makes a sound checkpoint's folder hostile; returns the folder's new name if it renames it.
        outcome: what must become of it: it is left out; all or a part of it is measured with the values that it has
            without the damage; or either of them ("any": then the values are not judged here).
        lost: the variables that are not measured if the outcome is "partly".
        message: a part of the fault's message.
    """

    name: str
    damage: Callable[[Path], object]
    outcome: Literal["left out", "measured", "partly", "any"] = "left out"
    lost: tuple[str, ...] = ()
    message: str = ""


class Outcome(NamedTuple):
    """What a probe of a series returned, or the traceback of what it raised."""

    values: Mapping[str, Mapping[tuple[Any, ...], float]]  # by checkpoint, then by variable and labels; without NaN
    faults: tuple[Any, ...] = ()
    problem: str = ""
    resident: int = 0
    seconds: float = 0.0

    def of(self, checkpoint: str) -> list[Any]:
        """Return the faults that name a checkpoint."""
        return [fault for fault in self.faults if checkpoint in fault.checkpoints]


@dataclass
class GoodSeries:
    """A series of sound checkpoints, and copies of it that contain a hostile one.

    Attributes:
        folder: where the series is written.
        write: writes the sound checkpoint of a step into a folder that exists.
        shared: writes files that all checkpoints share into the folder of the series.
    """

    folder: Path
    write: Callable[[Path, int], object]
    shared: Callable[[Path], object] = lambda _: None
    expected: Outcome = field(init=False)
    whole: Outcome = field(init=False)

    def __post_init__(self) -> None:
        """Write and probe the series, once without and once with the checkpoint that hostile ones replace."""
        self.template = self.folder / "template"
        self.template.mkdir(parents=True)
        self.shared(self.template)
        for step in STEPS:
            (self.template / f"step{step}").mkdir()
            self.write(self.template / f"step{step}", step)
        _probe(self.template)  # what is imported here need not be imported in every forked process
        self.expected = probe_apart(self.template)
        self.sound = self.folder / HOSTILE
        self.sound.mkdir()
        self.write(self.sound, HOSTILE_STEP)
        self.whole = probe_apart(self._copy(lambda _: None)[0])
        assert not self.expected.problem, self.expected.problem
        assert not self.whole.problem, self.whole.problem
        assert set(self.expected.values) == {f"step{step}" for step in STEPS}, self.expected
        assert set(self.whole.values) == {*self.expected.values, HOSTILE}, self.whole

    def _copy(self, *damages: Callable[[Path], object]) -> tuple[Path, list[str]]:
        """Copy the series with damaged checkpoints inside; return its folder and the names of these checkpoints."""
        folder, names = self.folder / "series", []
        remove(folder)
        shutil.copytree(self.template, folder)
        for number, damage in enumerate(damages):
            path = folder / (HOSTILE if len(damages) == 1 else f"step{1000 + number}")
            shutil.copytree(self.sound, path)
            name = damage(path)
            names.append(name if isinstance(name, str) else path.name)
        return folder, names

    def probe(self, hostile: Hostile, **limits: int) -> tuple[Outcome, str]:
        """Return what a probe makes of the series with the hostile checkpoint, and the checkpoint's name."""
        folder, (name,) = self._copy(hostile.damage)
        try:
            return probe_apart(folder, **limits), name
        finally:
            remove(folder)

    def check_together(self, hostiles: Sequence[Hostile], **limits: int) -> None:
        """Check many checkpoints that must be left out in one series, which is faster than one after another."""
        folder, names = self._copy(*(hostile.damage for hostile in hostiles))
        try:
            result = probe_apart(folder, **limits)
        finally:
            remove(folder)
        assert not result.problem, result.problem
        assert result.resident < RESIDENT, f"{result.resident:,} bytes of memory"
        assert result.values == self.expected.values
        for name, hostile in zip(names, hostiles, strict=True):
            self._check_outcome(hostile, name, result)

    def check(self, hostile: Hostile, **limits: int) -> Outcome:
        """Raise AssertionError unless the hostile checkpoint has the outcome it must have, and changes no other."""
        result, name = self.probe(hostile, **limits)
        self._check_others(hostile, name, result)
        self._check_outcome(hostile, name, result)
        return result

    def _check_others(self, hostile: Hostile, name: str, result: Outcome) -> None:
        """Raise AssertionError if the probe failed, took too much memory, or changed another checkpoint."""
        assert not result.problem, f"{hostile.name}: {result.problem}"
        assert result.resident < RESIDENT, f"{hostile.name}: {result.resident:,} bytes of memory"
        for checkpoint, values in self.expected.values.items():
            assert result.values.get(checkpoint) == values, f"{hostile.name} changed {checkpoint}: {result.faults}"
        strangers = {*result.values} - {*self.expected.values} - {name}
        assert not strangers, f"{hostile.name}: {strangers} are measured"
        others = [fault for fault in self._unusual(result.faults) if name not in fault.checkpoints]
        assert not others, f"{hostile.name} has faults of others: {others}"

    def _unusual(self, faults: Iterable[Any]) -> list[Any]:
        """Return the faults that the series does not have without a hostile checkpoint."""
        usual = {(fault.kind, fault.remedy) for fault in self.whole.faults}
        return [fault for fault in faults if (fault.kind, fault.remedy) not in usual]

    def _check_outcome(self, hostile: Hostile, name: str, result: Outcome) -> None:
        faults, values = self._unusual(result.of(name)), result.values.get(name, {})
        messages = [str(fault) for fault in faults]
        left_out = not values and bool(faults)
        if hostile.outcome == "any":
            assert left_out or values, f"{hostile.name} is neither measured nor named"
            return
        # Without its config the heads of a checkpoint cannot be told apart, and NaN has no balance: what is there of
        # heads must be right.
        missing = {key for key in self.whole.values[HOSTILE] if hostile.lost and is_of_heads(key) and key not in values}
        expected = {
            key: value
            for key, value in self.whole.values[HOSTILE].items()
            if key[0] not in hostile.lost and key not in missing
        }
        if hostile.outcome == "left out":
            assert left_out, f"{hostile.name} is not left out: {values}, {messages}"
        else:
            assert values == expected, f"{hostile.name} is measured as {values}, not as {expected}: {messages}"
        losses = [fault.loses_data for fault in faults if not str(fault).startswith("the head laws of")]
        named = all(losses) and bool(losses)
        assert named == (hostile.outcome != "measured"), f"{hostile.name}: {messages}"
        assert hostile.message in " ".join(messages), f"{hostile.name}: {messages}"


def is_of_heads(key: tuple[str, ...]) -> bool:
    """Return whether a measure is about the laws of a head, which needs the model's config."""
    return key[0].startswith(("query_key_", "value_output_"))


def remove(folder: Path) -> None:
    """Remove a folder with whatever a hostile checkpoint has put there, such as folders that may not be entered."""
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            if not (Path(parent) / name).is_symlink():
                (Path(parent) / name).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def probe_apart(folder: Path, *, seconds: int = SECONDS, memory: int = MEMORY) -> Outcome:
    """Probe a series in a forked process that may use so many seconds and bytes."""
    return run_apart(lambda: _probe(folder), seconds=seconds, memory=memory)


def run_apart(function: Callable[[], Outcome], *, seconds: int, memory: int, wall: float = WALL) -> Outcome:
    """Call a function in a forked process with limits; a crash, a hang or an exception becomes the problem."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads; the child uses one
        child = os.fork()
    if child == 0:
        _answer(function, writer, seconds, memory)
    os.close(writer)
    content, deadline = b"", time.monotonic() + wall * seconds
    with open(reader, "rb", buffering=0) as pipe:
        while time.monotonic() < deadline:
            if select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (chunk := pipe.read(1 << 20)):
                    break
                content += chunk
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not content:
        code = os.waitstatus_to_exitcode(status)
        late = code in (-signal.SIGKILL, -signal.SIGXCPU)
        problem = f"no answer in {seconds} s" if late else f"ended with exit code {code}"
        return Outcome({}, problem=problem)
    return pickle.loads(content)


def _answer(function: Callable[[], Outcome], writer: int, seconds: int, memory: int) -> None:
    """Call the function, write what it returns to a pipe, and leave the process."""
    try:
        faulthandler.disable()  # a crash is seen from outside
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        _give_up_root_rights()
        size = resource.getpagesize()
        pages, resident_pages = Path("/proc/self/statm").read_text().split()[:2]
        limit = int(pages) * size + int(memory)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        start = time.monotonic()
        try:
            result = function()
        except BaseException:
            result = Outcome({}, problem=traceback.format_exc())
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = result._replace(resident=peak - int(resident_pages) * size, seconds=time.monotonic() - start)
        content = pickle.dumps(result)
        while content:
            content = content[os.write(writer, content) :]
    finally:
        os._exit(0)


def _give_up_root_rights() -> None:
    """Let permissions of files hold for root too, in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface, this process
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the lower 32 rights and the upper ones
    if libc.capget(header, rights) == 0:
        rights[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.capset(header, rights)


def _probe(folder: Path) -> Outcome:
    result = probe(Checkpoints(folder), text="The cat sat on the mat, and the dog lay on the rug. " * 4)
    return Outcome(labelled(result.data), result.audit.faults)


def labelled(data: Any) -> dict[str, dict[tuple[Any, ...], float]]:
    """Return the measured numbers of each checkpoint, by variable and labels; NaN stands for what is missing."""
    values: dict[str, dict[tuple[Any, ...], float]] = {str(name): {} for name in data.checkpoint.values}
    for variable, array in data.data_vars.items():
        if "step" not in array.dims:
            continue
        for index, number in np.ndenumerate(array.transpose("step", ...).values):
            dims = [dim for dim in array.dims if dim != "step"]
            labels = [str(array[dim].values[i]) for dim, i in zip(dims, index[1:], strict=True)]
            if not np.isnan(number):
                values[str(data.checkpoint.values[index[0]])][variable, *labels] = float(number)
    return values
