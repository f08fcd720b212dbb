"""Symmetry: the time and the claims of the permutation table, and the ceiling of addition without order.

On a CUDA device also the time of all arms of addition x 5 seeds, extrapolated from a few steps of each.
`python -m benchmarks.symmetry --steps 3000` trains them to the end; `--arms "none causal,mlp all"` selects some.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from benchmarks import Row
from joma.data.addition import ceiling
from joma.progress import Progress, Task
from joma.studies import load
from joma.studies.symmetry import addition
from joma.study import Context, Outcome, execute

MAX_SECONDS = 30  # of the permutation table
MAX_MINUTES, MAX_GIB = 15, 100  # of addition on CUDA
PAPER: addition.Config = addition.STUDY.presets["paper"].config
SHORT = 300  # steps of each fit, from which the time of all steps is extrapolated


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        outcome = execute(load("permutation"), preset="quick", out=folder)
        taken = time.perf_counter() - start
        what = "permutation table, 144 cells x 5 seeds: seconds"
        yield what, f"≤ {MAX_SECONDS}", f"{taken:.1f}", taken <= MAX_SECONDS
        yield from _claims(outcome)
    for digits, reverse in ((2, False), (2, True), (3, False), (3, True)):
        best = ceiling(digits, reverse=reverse)
        what = f"addition without order, {digits} digits, {'reversed' if reverse else 'plain'}: exact match"
        if digits == 2:
            yield what, "0.285", f"{best.exact:g}", best.exact == 0.285
        else:
            yield what, f"≤ {best.bound:g}", f"{best.exact:g}", best.greedy <= best.exact <= best.bound
    if torch.cuda.is_available():
        yield from on_cuda()


def _claims(outcome: Outcome) -> Iterator[Row]:
    for claim in outcome.claims:
        extreme = "max" if claim["expected"].startswith("≤") else "min"
        result = f"{claim['measured'][extreme]:.2g}"
        yield f"permutation table, {claim['name']}", claim["expected"], result, claim["verdict"] == "holds"


class Clock(Progress):
    """Time every fit: its start, a step, a record, and an extrapolation to the steps of the paper preset."""

    def __init__(self, config: addition.Config) -> None:
        self.config = config
        self.taken, self.expected, self.memory = 0.0, 0.0, 0.0

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        """Time the fit, and print the times as soon as it is done."""
        stamps_task = _Stamps()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield stamps_task
        torch.cuda.synchronize()
        ended, memory = time.perf_counter(), torch.cuda.max_memory_reserved() / 2**30
        at = addition.record_steps(self.config)
        stamps = np.array([stamps_task.times[step] for step in at[:-1]])  # no step follows the last record
        step_time, record_time = np.polyfit(np.diff(at[:-1]), np.diff(stamps), 1)
        last = ended - stamps[-1] - step_time * (at[-1] - at[-2])
        records = len(addition.record_steps(replace(self.config, steps=PAPER.steps)))
        full = stamps[0] - start + step_time * PAPER.steps + record_time * (records - 2) + last
        self.taken, self.expected = self.taken + ended - start, self.expected + full
        self.memory = max(self.memory, memory)
        print(
            f"  {label}: {ended - start:.1f} s for {total} steps; start {stamps[0] - start:.1f} s, "
            f"a step {1e3 * step_time:.2f} ms, a record {record_time:.2f} s, the last {last:.2f} s; "
            f"{PAPER.steps} steps: {full:.1f} s; {memory:.1f} GiB",
            flush=True,
        )


class _Stamps(Task):
    def __init__(self) -> None:
        self.times: list[float] = []

    def advance(self, amount: int = 1) -> None:
        """Append the time; after a recorded step the device has finished all of its work."""
        self.times += [time.perf_counter()] * amount


def on_cuda(steps: int = SHORT, seeds: int = 5, arms: tuple[str, ...] | None = None) -> Iterator[Row]:
    """Train the arms of the paper preset for `steps` steps, and extrapolate the time to all of its steps."""
    config = replace(PAPER, steps=steps, arms=arms)
    clock = Clock(config)
    run = addition.run(config, Context(tuple(range(seeds)), "cuda", clock))
    what = f"addition, {run.sizes['arm']} arms x {seeds} seeds on {torch.cuda.get_device_name()}"
    met = bool(clock.expected <= 60 * MAX_MINUTES)
    yield f"{what}: minutes, from {steps} steps", f"≤ {MAX_MINUTES}", f"{clock.expected / 60:.1f}", met
    yield f"{what}: GiB", f"≤ {MAX_GIB}", f"{clock.memory:.1f}", clock.memory <= MAX_GIB
    if steps == PAPER.steps:
        for name in run.arm.values:
            values = ", ".join(f"{value:.4f}" for value in run.accuracy.sel(arm=name).isel(step=-1).values)
            print(f"  {name}: exact match {values}", flush=True)
        for claim in addition.CLAIMS:
            judged = claim.judge(run, "paper")
            if "paper" in claim.presets and judged["measured"]["mean"] is not None:
                yield (
                    f"addition, {claim.name}",
                    judged["expected"],
                    f"{judged['measured']['mean']:.4f}",
                    judged["verdict"] == "holds",
                )


def main() -> None:
    """Train for the given number of steps, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=SHORT)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", default="", help="names separated by commas; all if not given")
    options = parser.parse_args()
    arms = tuple(filter(None, options.arms.split(","))) or None
    for what, target, result, met in on_cuda(options.steps, options.seeds, arms):
        print(f"{what:<78} {target:>16} {result:>22}  {'ok' if met else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()
