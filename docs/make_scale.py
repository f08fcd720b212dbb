"""Write the numbers and the figure of `docs/scale.md` from `docs/scale.json`, written by `python -m benchmarks.scale`.

The model of a job of n units on w workers, each unit with c seconds of work and a result of b bytes:

    T(n, w) = start + max(⌈n/w⌉ (c + overhead), n driver, n b / link)
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from generated import paragraph, table, with_generated_parts

DOCS = Path(__file__).parent
PAGE, NUMBERS, FIGURE = DOCS / "scale.md", DOCS / "scale.json", DOCS / "scale.svg"

# Assumptions; everything else is measured.
LINK = 1.25e9  # bytes a second into the driver's machine: 10 Gbit/s
READING = 1e9  # bytes a second from the hub or a file system to all workers together
GPUS, UNITS = 64, 10_000
COSTS = {"1 s": 1.0, "10 s": 10.0, "1 minute": 60.0, "10 minutes": 600.0}
WORKERS = (1, 8, 64, 154)

CHECKPOINTS = 154
PYTHIA = {  # layers, width and vocabulary of the public configs
    "70M": (6, 512, 50_304),
    "160M": (12, 768, 50_304),
    "410M": (24, 1024, 50_304),
    "1B": (16, 2048, 50_304),
    "1.4B": (24, 2048, 50_304),
    "2.8B": (32, 2560, 50_304),
    "6.9B": (32, 4096, 50_432),
    "12B": (36, 5120, 50_688),
}


@dataclass(frozen=True)
class EngineFit:
    """What an engine costs.

    Attributes:
        start: seconds until the first unit runs.
        overhead: seconds of a unit beside its work.
        driver: processor seconds of the driver for a unit without work.
        driver_run: the same for a unit of `winner`, whose files it checks and stores where no file system is shared.
    """

    start: float
    overhead: float
    driver: float
    driver_run: float


@dataclass(frozen=True)
class Job:
    """The time of a job, and what bounds it: "work", "driver" or "link"."""

    seconds: float
    bound: str


def fit_engine(numbers: dict[str, Any], name: str) -> EngineFit:
    """Fit a line to the times of units without work on one worker: intercept and slope are start and overhead."""
    empty = [row for row in numbers[name]["empty"] if row["workers"] == 1]
    counts = [row["units"] for row in empty]
    overhead, start = np.polyfit(counts, [row["seconds"] for row in empty], 1)
    driver, _ = np.polyfit(counts, [row["driver_seconds"] for row in empty], 1)
    arrival = numbers["transfer"]["unpack_seconds"] if name == "ray" else 0.0
    return EngineFit(max(0.0, start), overhead, driver, driver + arrival)


def job_time(
    fit: EngineFit, units: int, workers: int, *, cost: float, driver: float, size: float = 0.0, link: float = LINK
) -> Job:
    """Return the time of a job by the model.

    >>> job_time(EngineFit(1.0, 0.5, 0.01, 0.01), 100, 10, cost=1.5, driver=0.01)
    Job(seconds=21.0, bound='work')
    >>> job_time(EngineFit(1.0, 0.5, 0.01, 0.01), 100, 1000, cost=1.5, driver=0.03)
    Job(seconds=4.0, bound='driver')
    """
    parts = {"work": math.ceil(units / workers) * (cost + fit.overhead), "driver": units * driver}
    parts["link"] = units * size / link
    bound = max(parts, key=lambda name: parts[name])
    return Job(fit.start + parts[bound], bound)


def layer_parameters(layers: int, width: int) -> int:
    """Return the number of parameters in the layers of a GPT-NeoX: attention and MLP with biases, and two norms."""
    return layers * (12 * width**2 + 13 * width)


def parameters(layers: int, width: int, vocabulary: int) -> int:
    """Return the number of all parameters: layers, the two embeddings, and the last norm.

    >>> parameters(6, 512, 50_304)
    70426624
    """
    return layer_parameters(layers, width) + 2 * vocabulary * width + 2 * width


def checkpoint_cost(checkpoint: dict[str, float], layers: int, width: int) -> float:
    """Return the seconds of one core for a checkpoint; all its measures pass over the weights of the layers."""
    seconds = sum(checkpoint[f"{name}_seconds"] for name in ("audit", "weights", "attention"))
    measured = layer_parameters(int(checkpoint["layers"]), int(checkpoint["width"]))
    return seconds * layer_parameters(layers, width) / measured


def bytes_read(layers: int, width: int, vocabulary: int) -> int:
    """Return the bytes that the workers read of a checkpoint in half precision: all, and the lower matrices twice."""
    return 2 * parameters(layers, width, vocabulary) + 2 * 4 * layers * width**2


def pythia_job(fit: EngineFit, numbers: dict[str, Any], workers: int) -> Job:
    """Return the time of probing all checkpoints of the eight sizes, one size after another."""
    seconds, bounds = 0.0, []
    for layers, width, vocabulary in PYTHIA.values():
        cost, size = checkpoint_cost(numbers["checkpoint"], layers, width), bytes_read(layers, width, vocabulary)
        job = job_time(fit, CHECKPOINTS, workers, cost=cost, driver=fit.driver, size=size, link=READING)
        seconds, bounds = seconds + job.seconds, [*bounds, "reading" if job.bound == "link" else job.bound]
    return Job(seconds, max(set(bounds), key=bounds.count))


def duration(seconds: float) -> str:
    """Return a time with three digits at most.

    >>> duration(0.0023), duration(0.4), duration(42.2), duration(700.0), duration(9000.0)
    ('2.3 ms', '400 ms', '42 s', '12 min', '2.5 h')
    """
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    if seconds < 300:
        return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.3g} h"


def amount(size: float) -> str:
    """Return a number of bytes.

    >>> amount(1234.0), amount(49.1e9), amount(7.56e12)
    ('1.2 kB', '49 GB', '7.6 TB')
    """
    unit, name = next(pair for pair in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= pair[0])
    return f"{size / unit:.1f} {name}" if size < 10 * unit else f"{size / unit:.0f} {name}"


def engines_part(numbers: dict[str, Any]) -> str:
    """Return what engines and results cost, and on which machine."""
    fits = {name: fit_engine(numbers, name) for name in ("local", "ray")}
    columns = ["engine", "start", "overhead a unit", "driver, a unit without work", "driver, a unit of `winner`"]
    rows = [
        [name, duration(fit.start), duration(fit.overhead), duration(fit.driver), duration(fit.driver_run)]
        for name, fit in fits.items()
    ]
    transfer, checkpoint, where = numbers["transfer"], numbers["checkpoint"], numbers["machine"]
    seconds, size = transfer["pack_seconds"] + transfer["unpack_seconds"], transfer["bytes"]
    units = " and ".join(f"{numbers[name]['winner'][0]['work_seconds']:.2g} s on {name}" for name in ("local", "ray"))
    sentences = [
        f"A unit of `winner` works {units}, and its files are {amount(size)}: {duration(transfer['pack_seconds'])} to",
        f"read and check them where they were written, {duration(transfer['unpack_seconds'])} to check and write them",
        f"where they arrive, together {1e6 * seconds / size:.2g} s a MB.",
        f"A checkpoint of {amount(checkpoint['bytes'])} takes {duration(checkpoint['audit_seconds'])} for the audit's",
        f"sketch, {duration(checkpoint['weights_seconds'])} for its weights and",
        f"{duration(checkpoint['attention_seconds'])} for attention, with one thread; its measurements travel as",
        f"{amount(checkpoint['result_bytes'])}. Measured on {where['cores']} cores ({where['processor']}) at a load of",
        f"{where['load']:g}, with Python {where['python']} and torch {where['torch']}.",
    ]
    return f"{table(columns, rows)}\n\n{paragraph(sentences)}\n"


def check_part(numbers: dict[str, Any]) -> str:
    """Return measured times beside those of the model; it was fitted to one worker without work."""
    rows = []
    for name in ("local", "ray"):
        fit = fit_engine(numbers, name)
        cost = next(row["work_seconds"] for row in numbers[name]["winner"] if row["workers"] == 1)
        for row in numbers[name]["winner"]:
            job = job_time(fit, row["units"], row["workers"], cost=cost, driver=fit.driver_run)
            rows.append([f"{name}: {row['units']} units of `winner`", row, job.seconds])
    fit, checkpoint = fit_engine(numbers, "local"), numbers["checkpoint"]
    cost = checkpoint_cost(checkpoint, int(checkpoint["layers"]), int(checkpoint["width"]))
    for row in numbers["probing"]:  # the workers had started
        job = job_time(fit, row["units"], row["workers"], cost=cost, driver=fit.driver)
        rows.append(
            [f"local: {row['units']} checkpoints of {amount(checkpoint['bytes'])}", row, job.seconds - fit.start]
        )
    lines = [
        [what, str(row["workers"]), duration(row["seconds"]), duration(seconds), f"{row['seconds'] / seconds:.2f}"]
        for what, row, seconds in rows
    ]
    return table(["job", "workers", "measured", "model", "ratio"], lines) + "\n"


def units_part(numbers: dict[str, Any]) -> str:
    """Return what the model says of many units on many GPUs."""
    fit, size = fit_engine(numbers, "ray"), numbers["transfer"]["bytes"]
    rows = []
    for name, cost in COSTS.items():
        job = job_time(fit, UNITS, GPUS, cost=cost, driver=fit.driver_run, size=size)
        efficiency = UNITS * cost / (GPUS * job.seconds)
        most = (cost + fit.overhead) / max(fit.driver_run, size / LINK)
        rows.append([name, duration(job.seconds), job.bound, f"{100 * efficiency:.0f} %", f"{most:,.0f}"])
    columns = ["work of a unit", f"{UNITS:,} units on {GPUS} GPUs", "bound by", "efficiency", "saturates at workers"]
    sentences = [
        f"Assumed: one worker a GPU, results as large as those of `winner`, {amount(UNITS * size)} in all, over a link",
        f"of {8 * LINK / 1e9:g} Gbit/s into the driver's machine. The driver takes {1 / fit.driver_run:,.0f} results a",
        f"second, the link {LINK / size:,.0f}: {'the driver' if fit.driver_run > size / LINK else 'the link'} is what",
        "saturates, and only where units are short. Make them longer, by more seeds a unit.",
    ]
    return f"{table(columns, rows)}\n\n{paragraph(sentences)}\n"


def pythia_part(numbers: dict[str, Any]) -> str:
    """Return what the model says of the public checkpoints of Pythia."""
    from joma.watch.engine_measures import FIXED_MEMORY, SIZES

    fit, rows, total_bytes, total_cost = fit_engine(numbers, "ray"), [], 0.0, 0.0
    for name, (layers, width, vocabulary) in PYTHIA.items():
        count, cost = parameters(layers, width, vocabulary), checkpoint_cost(numbers["checkpoint"], layers, width)
        read = CHECKPOINTS * bytes_read(layers, width, vocabulary)
        total_bytes, total_cost = total_bytes + read, total_cost + CHECKPOINTS * cost
        memory = FIXED_MEMORY + SIZES * 2 * count
        rows.append([name, f"{count:,}", amount(2 * count), amount(read), duration(cost), amount(memory)])
    columns = ["size", "parameters", "a checkpoint", f"read of {CHECKPOINTS}", "a core, each", "memory a unit"]
    jobs = {workers: pythia_job(fit, numbers, workers) for workers in WORKERS}
    times = [[str(workers), duration(job.seconds), job.bound] for workers, job in jobs.items()]
    results = CHECKPOINTS * len(PYTHIA) * numbers["checkpoint"]["result_bytes"]
    sentences = [
        f"Together {CHECKPOINTS * len(PYTHIA):,} checkpoints, {amount(total_bytes)} to read and",
        f"{total_cost / 3600:,.0f} core-hours; about {amount(results)} of measurements come back. Reading alone takes",
        f"{duration(total_bytes / READING)} at {amount(READING)}/s, the assumed rate of the hub or file system for all",
        f"workers together: it saturates at {total_cost / (total_bytes / READING):,.0f} workers of one core, if these",
        f"are as fast as the ones measured. A series of {CHECKPOINTS} has no more than {CHECKPOINTS} units at once.",
    ]
    by_workers = table(["workers", "all eight sizes", "mostly bound by"], times)
    return f"{table(columns, rows)}\n\n{paragraph(sentences)}\n\n{by_workers}\n"


PARTS = {"engines": engines_part, "check": check_part, "units": units_part, "pythia": pythia_part}


def page(text: str, numbers: dict[str, Any]) -> str:
    """Return the page with the generated parts as the numbers have them."""
    return with_generated_parts(text, {name: partial(part, numbers) for name, part in PARTS.items()})


def curves(numbers: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Return what the figure shows: hours over workers, for units of each cost and for Pythia."""
    fit, size = fit_engine(numbers, "ray"), numbers["transfer"]["bytes"]
    workers = [2**power for power in range(14)]
    hours = {
        name: [job_time(fit, UNITS, w, cost=cost, driver=fit.driver_run, size=size).seconds / 3600 for w in workers]
        for name, cost in COSTS.items()
    }
    pythia = [w for w in workers if w <= 1024]
    hours["Pythia"] = [pythia_job(fit, numbers, w).seconds / 3600 for w in pythia]
    return {name: [list(map(float, workers[: len(values)])), values] for name, values in hours.items()}


def draw(numbers: dict[str, Any]) -> Any:
    """Return the figure: time over workers."""
    from joma.drawing import canvas, theory

    figure, axes = canvas(1, 2, sharey=True)
    for index, (name, (workers, hours)) in enumerate(curves(numbers).items()):
        panel = axes[0, 1] if name == "Pythia" else axes[0, 0]
        theory(panel, workers, hours, 0 if name == "Pythia" else index, None if name == "Pythia" else f"{name} a unit")
    axes[0, 0].set(title=f"{UNITS:,} units on Ray", ylabel="hours")
    axes[0, 1].set(title=f"{CHECKPOINTS} checkpoints of eight Pythia sizes")
    for panel in axes.flat:
        panel.set(xscale="log", yscale="log", xlabel="workers")
    axes[0, 0].axvline(GPUS, color="0.6", linewidth=0.8)
    axes[0, 0].legend()
    return figure


def description(numbers: dict[str, Any]) -> str:
    """Return the values of the curves as text; the figure contains it."""
    values = {name: [f"{hour:.4g}" for hour in hours] for name, (_, hours) in curves(numbers).items()}
    return json.dumps(values, separators=(",", ":"))


def main() -> None:
    """Write the page and the figure."""
    from joma.drawing import style

    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), numbers), encoding="utf-8")
    with style():
        draw(numbers).savefig(FIGURE, metadata={"Date": None, "Description": description(numbers)})


if __name__ == "__main__":
    main()
