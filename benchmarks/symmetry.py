"""Symmetry: the permutation table's time, what it says, and the ceiling of addition without order.

On CUDA, where there is one: the time of all arms of addition x 5 seeds, extrapolated from a few steps of each. By
`python -m benchmarks.symmetry --steps 3000` they are trained to the end; `--arms "none causal,mlp all"` chooses some.
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
from joma.studies import execute, load
from joma.studies.symmetry import addition, addition_training
from joma.study import Context, Outcome

SECONDS = 30
MINUTES, MEMORY = 15, 100
PAPER: addition.Config = addition.STUDY.presets["paper"].config
SHORT = 300  # steps of each fit from which the time of all is extrapolated


def rows() -> Iterator[Row]:
    """Yield what is measured, what is asked, what is reached, and whether that is enough."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        outcome = execute(load("permutation"), preset="quick", out=folder)
        taken = time.perf_counter() - begun
        yield "permutation table, 144 cells x 5 seeds: seconds", f"≤ {SECONDS}", f"{taken:.1f}", taken <= SECONDS
        yield from _claims(outcome)
    for digits, reverse in ((2, False), (2, True), (3, False), (3, True)):
        found = ceiling(digits, reverse=reverse)
        what = f"addition without order, {digits} digits, {'reversed' if reverse else 'plain'}: exact match"
        if digits == 2:
            yield what, "0.285", f"{found.exact:g}", found.exact == 0.285
        else:
            yield what, f"≤ {found.bound:g}", f"{found.exact:g}", found.greedy <= found.exact <= found.bound
    if torch.cuda.is_available():
        yield from on_cuda()


def _claims(outcome: Outcome) -> Iterator[Row]:
    for claim in outcome.claims:
        end = "max" if claim["expected"].startswith("≤") else "min"
        reached = f"{claim['measured'][end]:.2g}"
        yield f"permutation table, {claim['name']}", claim["expected"], reached, claim["verdict"] == "holds"


class Clock(Progress):
    """Times every fit: what it takes to begin, a step, a record, and what a longer one would take."""

    def __init__(self, config: addition.Config) -> None:
        self.config = config
        self.taken, self.expected, self.memory = 0.0, 0.0, 0.0

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Task]:
        """Time the fit, and print what was found as soon as it is done."""
        work = _Stamps()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        yield work
        torch.cuda.synchronize()
        ended, memory = time.perf_counter(), torch.cuda.max_memory_reserved() / 2**30
        at = addition_training.moments(self.config)
        stamps = np.array([work.times[step] for step in at[:-1]])  # there is no step after the last record
        a_step, a_record = np.polyfit(np.diff(at[:-1]), np.diff(stamps), 1)
        last = ended - stamps[-1] - a_step * (at[-1] - at[-2])
        records = len(addition_training.moments(replace(self.config, steps=PAPER.steps)))
        whole = stamps[0] - begun + a_step * PAPER.steps + a_record * (records - 2) + last
        self.taken, self.expected = self.taken + ended - begun, self.expected + whole
        self.memory = max(self.memory, memory)
        print(
            f"  {label}: {ended - begun:.1f} s for {total} steps; to begin {stamps[0] - begun:.1f} s, "
            f"a step {1e3 * a_step:.2f} ms, a record {a_record:.2f} s, the last {last:.2f} s; "
            f"{PAPER.steps} steps: {whole:.1f} s; {memory:.1f} GiB",
            flush=True,
        )


class _Stamps(Task):
    def __init__(self) -> None:
        self.times: list[float] = []

    def advance(self, amount: int = 1) -> None:
        """Note the time; after a step that is recorded the device has done all that was asked of it."""
        self.times += [time.perf_counter()] * amount


def on_cuda(steps: int = SHORT, seeds: int = 5, arms: tuple[str, ...] | None = None) -> Iterator[Row]:
    """Train the arms of the paper preset, for so many steps, and say what all of theirs would take."""
    config = replace(PAPER, steps=steps, arms=arms)
    clock = Clock(config)
    found = addition.run(config, Context(tuple(range(seeds)), "cuda", clock))
    what = f"addition, {found.sizes['arm']} arms x {seeds} seeds on {torch.cuda.get_device_name()}"
    met = bool(clock.expected <= 60 * MINUTES)
    yield f"{what}: minutes, from {steps} steps", f"≤ {MINUTES}", f"{clock.expected / 60:.1f}", met
    yield f"{what}: GiB", f"≤ {MEMORY}", f"{clock.memory:.1f}", clock.memory <= MEMORY
    if steps == PAPER.steps:
        for name in found.arm.values:
            values = ", ".join(f"{value:.4f}" for value in found.accuracy.sel(arm=name).isel(step=-1).values)
            print(f"  {name}: exact match {values}", flush=True)
        for claim in addition.CLAIMS:
            judged = claim.judge(found, "paper")
            if "paper" in claim.presets and judged["measured"]["mean"] is not None:
                yield (
                    f"addition, {claim.name}",
                    judged["expected"],
                    f"{judged['measured']['mean']:.4f}",
                    judged["verdict"] == "holds",
                )


def main() -> None:
    """Train for as many steps as asked, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=SHORT)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", default="", help="names parted by commas; all if not given")
    given = parser.parse_args()
    for what, asked, reached, met in on_cuda(
        given.steps, given.seeds, tuple(filter(None, given.arms.split(","))) or None
    ):
        print(f"{what:<78} {asked:>16} {reached:>22}  {'ok' if met else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()
