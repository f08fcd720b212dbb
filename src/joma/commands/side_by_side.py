"""Studies run one after another in this process, or side by side on an engine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from joma.commands.engines import open_engine
from joma.commands.plans import Plan
from joma.commands.printing import BAD_INPUT, INTERNAL, print_error
from joma.terminal import printable
from joma.train import interrupt

if TYPE_CHECKING:
    from joma.engine import Engine, Failure, Result
    from joma.progress import Progress
    from joma.study import Outcome

PROCESS_MEMORY = 2**30  # bytes that a study takes in a process of its own, with torch, at the quick presets


class StudyStoppedAllError(Exception):
    """A study failed in a way that ends the command: bad input, or a defect. What went wrong is printed already."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Place:
    """Where studies run.

    Attributes:
        jobs: how many run at the same time on this machine; one runs in the process of the command itself.
        ray: whether they run on a Ray cluster instead.
        address: the address of the cluster; Ray is started on this machine if it is None.
    """

    jobs: int = 1
    ray: bool = False
    address: str | None = None

    def gpus_each(self, device: str) -> float:
        """Return how many GPUs a study gets: one, or a part of one if there are more studies than GPUs."""
        if device != "cuda" or self.ray:
            return float(device == "cuda")
        return min(1.0, visible_gpus() / self.jobs)


def outcomes(plans: Sequence[Plan], place: Place, progress: Progress) -> Generator[tuple[Plan, Outcome | None]]:
    """Make runs and yield each with its outcome when it has ended, None if it could not be made.

    They are made in this process, in order, if only one unit of work is left, or may run at a time. Otherwise what is
    left runs on an engine, the longest first. A run that is planned twice is made once.
    """
    first = {plan.run.path: plan for plan in reversed(plans)}
    repeated = [plan for plan in plans if first[plan.run.path] is not plan]
    trained = [plan for plan in plans if plan not in repeated and plan.is_trained]
    waiting = [plan for plan in plans if plan not in repeated and plan not in trained]
    jobs = min(place.jobs, sum(max(1, len(plan.split)) for plan in waiting))
    if not waiting or (jobs < 2 and not place.ray):
        yield from one_after_another(plans, progress)
        return
    engine_name, local_jobs = ("ray", None) if place.ray else ("local", jobs)
    with open_engine(engine_name, jobs=local_jobs, address=place.address, progress=progress) as engine:
        units = _submit(waiting, engine, place.gpus_each(waiting[0].device))
        yield from one_after_another(trained, progress)
        yield from _collect(units, engine)
    yield from one_after_another(repeated, progress)


def _submit(plans: Iterable[Plan], engine: Engine, gpus: float) -> dict[str, Plan]:
    """Submit the units of work of all plans, the longest first; return the plan of each unit, by its name."""
    plan_of: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: -plan.unit_seconds):
        for unit in plan.units(gpus):
            engine.submit(unit)
            plan_of[unit.name] = plan
    return plan_of


def _collect(plan_of: dict[str, Plan], engine: Engine) -> Iterator[tuple[Plan, Outcome | None]]:
    """Yield each plan with its outcome when its last unit has ended."""
    left = Counter(plan.study.name for plan in plan_of.values())
    failed: set[str] = set()
    for result in engine.results():
        plan = plan_of[result.unit.name]
        name = plan.study.name
        left[name] -= 1
        if not _has_value(result):
            failed.add(name)
        if not left[name]:
            yield plan, None if name in failed else _unless_impossible(partial(plan.outcome, result.value))


def one_after_another(plans: Iterable[Plan], progress: Progress) -> Iterator[tuple[Plan, Outcome | None]]:
    """Make runs in this process; yield each with its outcome, None if its folder or memory did not allow it."""
    for plan in plans:
        yield plan, _unless_impossible(partial(plan.execute, progress))


def _unless_impossible(make: Callable[[], Outcome]) -> Outcome | None:
    """Return the outcome of a run; if its folder or memory do not allow it, print why, so that the others are made."""
    from joma.files import StorageError
    from joma.memory import OutOfMemory

    try:
        return make()
    except (StorageError, OutOfMemory) as problem:
        print_error(problem)
        if interrupt.was_interrupted():  # Ctrl-C came first, and saving failed
            raise KeyboardInterrupt from None
        return None


def _has_value(result: Result) -> bool:
    """Return whether a unit has a value; print why it has none, and raise if that ends the command."""
    failure = result.failure
    if failure is None:
        return True
    if failure.kind == "interrupted":
        raise KeyboardInterrupt
    _report(result.unit.name, failure)
    if failure.kind in ("input", "error"):
        raise StudyStoppedAllError(BAD_INPUT if failure.kind == "input" else INTERNAL)
    return False


def _report(name: str, failure: Failure) -> None:
    """Print why a unit failed, after the traceback of a defect."""
    message = failure.message if name in failure.message else f"{name}: {failure.message}"
    if failure.kind == "error":
        sys.stderr.writelines(f"{printable(line)}\n" for line in failure.details.splitlines())
        message = f"{message}; please report it with the lines above."
    print_error(message)


def default_jobs(device: str) -> int:
    """Return how many studies run at once if nobody says how many: one a GPU, or what cores and memory allow."""
    from joma import memory
    from joma.engine.devices import usable_cores

    if device == "cuda":
        return max(1, visible_gpus())
    return max(1, min(usable_cores(), memory.available() // PROCESS_MEMORY))


def visible_gpus() -> int:
    """Return the number of GPUs of this machine that this process may use."""
    import torch

    return torch.cuda.device_count()
