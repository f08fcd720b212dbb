"""The section of a sweep in the report: verdicts over the points, the units, and those that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from joma.report.table import count_text, number
from joma.sweeps.joined import claims_dataset
from joma.sweeps.points import Grid, Range
from joma.sweeps.store import Sweep, SweepUnit, read_sweep, value_label
from joma.verdicts import KINDS, Verdict

MAX_UNITS = 1000  # rows of the table of units; a page with more would take long to show
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "not tested")


def verdict_counts(verdicts: np.ndarray) -> dict[Verdict, int]:
    """Return how often each verdict occurs; points without a run have none."""
    return {verdict: int((verdicts == verdict).sum()) for verdict in VERDICTS}


def claim_rows(data: xr.Dataset) -> list[dict[str, str]]:
    """Return a row for each claim of a sweep: what it says, the range of its means over the points, its verdicts."""
    rows = []
    for name in data.claim.values:
        claim = data.sel(claim=name)
        means = claim.measured.values[np.isfinite(claim.measured.values)]
        rows.append(
            {
                "kind": str(claim.kind.item()),
                "claim": str(claim.statement.item()),
                "name": str(name),
                "expected": str(claim.expected.item()),
                "measured": _extent(means),
                "verdicts": count_text(verdict_counts(claim.verdict.values)),
            }
        )
    return sorted(rows, key=lambda row: list(KINDS).index(row["kind"]))  # type: ignore[arg-type]


def _extent(means: np.ndarray) -> str:
    """Return the least and the greatest of some numbers as text."""
    if not means.size:
        return "–"
    low, high = number(float(means.min())), number(float(means.max()))
    return low if low == high else f"{low} to {high}"


def read_section(path: Path) -> dict[str, Any]:
    """Return what the template shows of a sweep but for its figure, all of it checked as it is read."""
    sweep = read_sweep(path)
    descriptions = [stored.description for stored in sweep.finished.values()]
    states = [sweep.state(unit) for unit in sweep.units]
    data = claims_dataset(sweep)
    return {
        "anchor": f"sweep-{sweep.study}-{path.name}",
        "study": sweep.study,
        "title": descriptions[0].title if descriptions else sweep.study,
        "path": path,
        "preset": sweep.preset,
        "seeds": sweep.seeds,
        "keys": sweep.plan.keys,
        "plan": _plan(sweep),
        "fixed": json.dumps(sweep.fixed, indent=1),
        "states": {state: states.count(state) for state in ("finished", "failed", "missing") if state in states},
        "claims": claim_rows(data),
        "counts": count_text(verdict_counts(data.verdict.values)),
        "units": [_unit_row(sweep, unit) for unit in sweep.units[:MAX_UNITS]],
        "left_out": max(0, len(sweep.units) - MAX_UNITS),
        "failures": sweep.failed_units,
        "manifest": sweep.manifest,
    }


def _plan(sweep: Sweep) -> list[tuple[str, str]]:
    """Return each key with the values that it has, as text."""
    if isinstance(sweep.plan, Grid):
        return [(key, "; ".join(map(value_label, values))) for key, values in sweep.plan.values.items()]
    return [(key, _source(source)) for key, source in sweep.plan.sources.items()]


def _source(source: Any) -> str:
    if isinstance(source, Range):
        return f"{source.low} to {source.high}, {'log-uniform' if source.logarithmic else 'uniform'}"
    return "; ".join(map(value_label, source))


def _unit_row(sweep: Sweep, unit: SweepUnit) -> dict[str, Any]:
    """Return a row of the table of units: its point, its state, its verdicts and how long it took."""
    labels = [value_label(value) for value in unit.point.values()]
    stored = sweep.finished.get(unit.run)
    if stored is None:
        return {"labels": labels, "state": sweep.state(unit), "verdicts": "", "seconds": ""}
    verdicts = np.array([claim["verdict"] for claim in stored.claims])
    counts = count_text(verdict_counts(verdicts))
    return {"labels": labels, "state": "finished", "verdicts": counts, "seconds": f"{stored.wall_time:.1f}"}
