"""Write the report of stored runs: one HTML file that contains its styles and figures and needs no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import xarray as xr

from joma.files import StorageError, write_text
from joma.report.table import number, spread
from joma.runs import find_runs, now, open_run, provenance, read_claims, read_config

# The sign and the CSS class of each verdict.
VERDICTS = {"holds": ("✓", "yes"), "does not hold": ("✗", "no"), "not tested at this preset": ("–", "open")}


def write_report(out: Path, order: Sequence[str] = ()) -> tuple[Path, int]:
    """Write `out/report.html` about the finished runs below `out`.

    Args:
        out: the folder that runs were stored under.
        order: names of studies, in the order in which their runs are shown; runs of other studies come after them.

    Returns:
        The report's path and the number of runs in it.
    """
    paths = find_runs(out)
    if not paths:
        raise StorageError(f"no finished run below {out}; run `joma run --out {out}` first.")
    rank = {name: index for index, name in enumerate(order)}
    paths.sort(key=lambda path: rank.get(path.parent.name, len(rank)))  # stable: oldest first within a study
    sections = [_section(path) for path in paths]
    page = _template().render(sections=sections, totals=_totals(sections), stamp=provenance(), now=now())
    target = out / "report.html"
    write_text(target, page)
    return target.resolve(), len(sections)


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"spread": spread, "number": number}
    environment.globals["verdicts"] = VERDICTS
    return environment.get_template("template.html")


def _section(path: Path) -> dict[str, Any]:
    """Return what the template shows of one run."""
    stored, config = read_claims(path), read_config(path)
    trajectory = open_run(path)
    return {
        "anchor": f"{path.parent.name}-{path.name}",
        "study": path.parent.name,
        "about": stored.description,
        "path": path,
        "preset": config["preset"],
        "config": json.dumps(config["config"], indent=1),
        "seeds": len(config["seeds"]),
        "wall_time": stored.wall_time,
        "claims": stored.claims,
        "counts": {verdict: sum(claim["verdict"] == verdict for claim in stored.claims) for verdict in VERDICTS},
        "figures": [_figure(file) for file in _figure_files(path / "figures", stored.description.figures)],
        "attributes": dict(sorted(trajectory.attrs.items())),
        "variables": [(name, _dimensions(variable)) for name, variable in trajectory.items()],
    }


def _dimensions(variable: xr.DataArray) -> str:
    return ", ".join(f"{name} {size}" for name, size in variable.sizes.items())


def _figure_files(folder: Path, names: Sequence[str] | None) -> list[Path]:
    """Return the pictures in the stored order; those of version 0.1.0 by the number that their names begin with."""
    if names is None:
        return sorted(folder.glob("*.svg"), key=lambda file: (int(file.stem.partition("-")[0]), file.stem))
    return [file for name in names if (file := folder / f"{name}.svg").exists()]


def _figure(file: Path) -> dict[str, str]:
    """Return the caption of a figure, and its picture as a data URL."""
    caption = file.with_suffix(".txt").read_text(encoding="utf-8").strip()
    image = base64.b64encode(file.read_bytes()).decode("ascii")
    return {"caption": caption, "image": f"data:image/svg+xml;base64,{image}", "name": file.stem}


def _totals(sections: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many claims of all runs have each verdict."""
    return {verdict: sum(section["counts"][verdict] for section in sections) for verdict in VERDICTS}
