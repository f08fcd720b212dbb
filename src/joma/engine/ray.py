"""The engine for clusters: units are tasks of Ray, which schedules them, retries them, and carries their results.

Ray is imported when an engine is made; `pip install 'joma[ray]'` installs it.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joma import memory
from joma.arguments import short_reason, whole
from joma.engine import connecting
from joma.engine.display import Display, Report, warn_here
from joma.engine.messages import Message
from joma.engine.performing import INTERRUPTED, describe
from joma.engine.processes import THREADS
from joma.engine.remote import UPDATE_SECONDS, Board, relocated, versions, work
from joma.engine.scheduling import check_needs
from joma.engine.unit import Engine, Failure, Needs, Result, Unit
from joma.files import DamagedFile, StorageError, remove, write_text
from joma.progress import SILENT, Progress
from joma.transport import unpack

RETRIES = 3
PER_CORE = 4  # tasks that Ray holds for each core, so that no core waits for the driver
MIN_TASKS = 16  # also where a cluster has no cores yet, so that one that grows on demand sees the demand
CLUSTER_SECONDS = 5.0  # between two looks at the nodes of the cluster
CANCEL_SECONDS = 1.4  # for a cancelled unit to save what it can; it is ended then


@dataclass(frozen=True)
class Submission:
    """A unit, the number of its submission, and whether its result was damaged on its way once."""

    unit: Unit
    key: int
    resent: bool = False


class RayEngine(Engine):
    """Units run as tasks on the machines of a Ray cluster.

    The machines need no common file system: a worker performs a unit in a folder of its own, and what it wrote travels
    back and is checked against its manifest. They need the same versions of joma and Python.

    Args:
        address: of a cluster, as `ray.init` takes it: "auto", "host:6379" or "ray://host:10001". If None, the present
            connection to Ray is used; if it has none, Ray is started on this machine alone.
        shared: whether all machines see the folders of units under the same path; workers write there then.
        progress: where the progress of units is shown.
        warn: called with every warning, once for each text.
        retries: how often Ray runs a unit again whose worker or machine died.

    Raises:
        InputError: Ray is not installed, or the cluster does not answer.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        shared: bool = False,
        progress: Progress = SILENT,
        warn: Callable[[str], None] = warn_here,
        retries: int = RETRIES,
    ) -> None:
        self.retries, self.shared = whole("retries", retries, low=0), shared
        self._ray = connecting.import_ray()
        self._connection = connecting.connect(self._ray, address)
        self._display = RemoteDisplay(progress, warn)
        self._board = connecting.start_actor(self._ray, Board)
        self._function = self._ray.remote(work)
        self._marker = f".joma-{uuid.uuid4().hex}" if shared else None
        self._marked: set[Path] = set()
        self._waiting: deque[Submission] = deque()
        self._running: dict[Any, Submission] = {}
        self._ended: deque[Result] = deque()
        self._submissions = 0
        self._nodes, self._nodes_time, self._cores = dict[str, dict[str, float]](), -CLUSTER_SECONDS, 0.0

    def submit(self, unit: Unit) -> None:
        check_needs(unit, [str(number) for number in range(int(unit.needs.gpus) + 1)])
        if self._marker is not None and unit.out not in self._marked:
            write_text(unit.out / self._marker, "seen by all machines of a cluster\n")
            self._marked.add(unit.out)
        self._waiting.append(Submission(unit, self._next_key()))

    def results(self) -> Iterator[Result]:
        while self._waiting or self._running or self._ended:
            while self._ended:
                yield self._ended.popleft()
            self._look_at_cluster()
            while self._waiting and len(self._running) < max(MIN_TASKS, PER_CORE * self._cores):
                self._start(self._waiting.popleft())
            for task in self._wait():
                result = self._collect(task)
                if result is not None:
                    yield result

    def cancel(self) -> None:
        self._ended += [Result(submission.unit, failure=INTERRUPTED) for submission in self._waiting]
        self._waiting.clear()
        tasks = list(self._running)
        for task in tasks:
            self._ray.cancel(task, force=False)
        ended, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_SECONDS) if tasks else ([], [])
        for task in left:
            self._ray.cancel(task, force=True)
        self._ended += [Result(self._running.pop(task).unit, failure=INTERRUPTED) for task in left]
        self._ended += [result for task in ended if (result := self._collect(task)) is not None]
        self._ended += [
            Result(submission.unit, failure=INTERRUPTED) for submission in self._waiting
        ]  # to be sent again
        self._waiting.clear()

    def close(self) -> None:
        if self._connection is None:
            return
        try:
            self.cancel()
            self._ray.kill(self._board)
        finally:
            self._ended.clear()
            self._display.close()
            for folder in self._marked:
                with suppress(StorageError):
                    remove(folder / str(self._marker))
            self._connection.close()
            self._connection = None

    def _next_key(self) -> int:
        self._submissions += 1
        return self._submissions

    def _start(self, submission: Submission) -> None:
        """Hand a unit to Ray."""
        unit = submission.unit
        problem = self._infeasible(unit.needs)
        if problem and self._connection is not None and self._connection.started:
            self._ended.append(Result(unit, failure=Failure("input", f"{problem}; run it on a larger machine.")))
            return
        if problem:
            self._display.warn(f"{problem}; units that need it wait for one to join.")
        order = {
            "versions": versions(),
            "unit": replace(unit, out=unit.out.absolute()).as_json(),
            "key": submission.key,
            "attempts": self.retries + 1,
            "marker": self._marker,
        }
        options = {"name": unit.name, "max_retries": self.retries, **ray_needs(unit.needs)}
        self._running[self._function.options(**options).remote(order, self._board)] = submission

    def _infeasible(self, needs: Needs) -> str:
        """Return why no node of the cluster can run a unit, empty if one can."""
        wanted = {"CPU": needs.cores, "GPU": needs.gpus, "memory": needs.memory}
        if any(all(node.get(name, 0) >= size for name, size in wanted.items()) for node in self._nodes.values()):
            return ""
        gpus = f", {needs.gpus:g} GPUs" if needs.gpus else ""
        size = f", {memory.readable(needs.memory)} of memory" if needs.memory else ""
        return f"no machine of the cluster has {needs.cores} cores{gpus}{size}"

    def _wait(self) -> list[Any]:
        """Wait for tasks to end, at most for the time between two updates of the display; return those that did."""
        tasks = list(self._running)
        if not tasks:
            return []
        ended, _ = self._ray.wait(tasks, num_returns=1, timeout=UPDATE_SECONDS)
        if ended:
            ended, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)
        units = {submission.key: submission.unit for submission in self._running.values()}
        self._display.update(self._ray, self._board, units)
        return ended

    def _collect(self, task: Any) -> Result | None:
        """Return what became of a unit whose task has ended; None if it is sent again."""
        submission = self._running.pop(task)
        try:
            answer = self._ray.get(task)
        except self._ray.exceptions.RayError as problem:
            result = Result(submission.unit, failure=task_failure(self._ray, problem, self.retries + 1))
        else:
            result = self._receive(submission, answer)
        self._display.end(submission)
        return result

    def _receive(self, submission: Submission, answer: dict[str, Any]) -> Result | None:
        """Write what a worker sent into the folder of the unit."""
        unit, failure = submission.unit, answer["failure"] and Failure(**answer["failure"])
        try:
            for name, files in answer["folders"].items():
                unpack(files, unit.out / name)
        except DamagedFile as problem:
            if not submission.resent:
                self._display.warn(f"{unit.name}: {problem} It is run again.")
                self._waiting.appendleft(Submission(unit, self._next_key(), resent=True))
                return None
            failure = describe(problem)
        except StorageError as problem:
            failure = describe(problem)
        for text in answer["warnings"]:
            self._display.warn(text)
        value = relocated(answer["value"], answer["out"], str(unit.out)) if failure is None else None
        host = "" if answer["host"] == platform.node() else answer["host"]
        return Result(unit, value, failure, answer["seconds"], host)

    def _look_at_cluster(self) -> None:
        """Count the cores of the cluster now and then, and warn of machines that are gone."""
        if time.monotonic() - self._nodes_time < CLUSTER_SECONDS:
            return
        self._nodes_time = time.monotonic()
        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        present = {name: node["Resources"] for name, node in nodes.items() if node["Alive"]}
        for name in [*self._nodes]:
            if name not in present:
                address = nodes[name]["NodeManagerAddress"] if name in nodes else name
                self._display.warn(f"the machine {address} has left the cluster; its units run again elsewhere.")
        self._nodes, self._cores = present, sum(node.get("CPU", 0) for node in present.values())


def ray_needs(needs: Needs) -> dict[str, Any]:
    """Return what a unit needs as options of a task of Ray.

    A process is bound to its number of threads from its start: workers with another environment are other processes.

    >>> ray_needs(Needs(cores=2, memory=10))["num_cpus"], ray_needs(Needs(gpus=0.5))["num_gpus"]
    (2, 0.5)
    """
    environment: dict[str, str] = {name: str(needs.cores) for name in THREADS}
    if not needs.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    options: dict[str, Any] = {"num_cpus": needs.cores, "num_gpus": needs.gpus}
    if needs.memory:
        options["memory"] = needs.memory
    return options | {"runtime_env": {"env_vars": environment}}


def task_failure(ray: Any, problem: Any, attempts: int) -> Failure:
    """Return the failure that an error of a task of Ray is."""
    errors, reason = ray.exceptions, short_reason(problem)
    if isinstance(problem, errors.TaskCancelledError):
        return INTERRUPTED
    if isinstance(problem, errors.OutOfMemoryError):
        return Failure("memory", "its machine was out of memory, and Ray ended it; run fewer units side by side.")
    if isinstance(problem, errors.RayTaskError):
        text = str(problem)
        if "failed to import on the worker" in text or "ModuleNotFoundError" in text:
            joma_version, python_version = versions()
            remedy = f"install joma {joma_version} on Python {python_version} there"
            return Failure("input", f"a worker of the cluster cannot import joma; {remedy}.", text)
        return Failure("error", f"internal error ({type(problem.cause).__name__}): {short_reason(problem.cause)}", text)
    lost = (errors.WorkerCrashedError, errors.ObjectLostError, errors.NodeDiedError, errors.LocalRayletDiedError)
    if isinstance(problem, lost):
        remedy = "look into Ray's logs on the machines for the reason"
        return Failure("lost", f"its worker or machine died {attempts} times; {remedy}.", str(problem))
    return Failure("error", f"Ray could not run it ({type(problem).__name__}): {reason}", str(problem))


class RemoteDisplay:
    """Shows what the board says of the units that run; one that does not answer is left alone."""

    def __init__(self, progress: Progress, warn: Callable[[str], None]) -> None:
        self.display = Display(progress, warn, several=True)
        self.tasks: dict[int, int] = {}  # the number of the task that is shown, by submission
        self.ended: list[int] = []
        self.request: Any = None

    def update(self, ray: Any, board: Any, units: Mapping[int, Unit]) -> None:
        """Show what the board answered to the last request, if it did, and send the next."""
        if self.request is None:
            self.request, self.ended = board.take.remote(self.ended), []
        elif ray.wait([self.request], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):  # the work goes on without a display
                for key, message in ray.get(self.request).items():
                    if key in units:
                        self._show(key, units[key], message)
            self.request = None

    def _show(self, key: int, unit: Unit, message: Message) -> None:
        number = self.tasks.get(key)
        if number == message["number"]:
            message = {name: value for name, value in message.items() if name != "label"}
        else:
            self.display.end(unit)
            self.tasks[key] = message["number"]
        self.display.show(Report(unit, message))

    def warn(self, text: str) -> None:
        """Pass on a warning, once for each text."""
        self.display.show(Report(None, {"kind": "warning", "message": text}))

    def end(self, submission: Submission) -> None:
        """Remove a unit that has ended."""
        self.tasks.pop(submission.key, None)
        self.ended.append(submission.key)
        self.display.end(submission.unit)

    def close(self) -> None:
        """Remove all units."""
        self.display.close()
