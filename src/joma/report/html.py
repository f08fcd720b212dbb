"""Write the report of stored runs: one HTML file that contains its styles and figures and needs no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2
import xarray as xr

from joma.arguments import InputError
from joma.files import StorageError, exists, remove_leftovers, write_text
from joma.manifest import Manifest
from joma.report.table import number, spread
from joma.runs import FIGURES, Description, check_run, find_runs, read_claims, read_config
from joma.stamp import now, provenance

# The sign and the CSS class of each verdict.
VERDICTS = {"holds": ("✓", "yes"), "does not hold": ("✗", "no"), "not tested at this preset": ("–", "open")}


@dataclass(frozen=True)
class Report:
    """What `write_report` has written: the file, the number of runs in it, and why others are not."""

    path: Path
    runs: int
    left_out: tuple[str, ...]


def write_report(out: Path, order: Sequence[str] = ()) -> Report:
    """Write `out/report.html` about the finished runs below `out`. A damaged run is left out, and named on the page.

    Args:
        out: the folder that runs were stored under.
        order: names of studies, in the order in which their runs are shown; runs of other studies come after them.

    Returns:
        The report's path, the number of runs in it, and a message for each run that is left out.
    """
    paths = find_runs(out)
    if not paths:
        raise StorageError(f"no finished run below {out}; run `joma run --out {out}` first.")
    rank = {name: index for index, name in enumerate(order)}
    paths.sort(key=lambda path: rank.get(path.parent.name, len(rank)))  # stable: oldest first within a study
    sections, left_out = [], []
    for path in paths:
        try:
            sections.append(_section(path))
        except (StorageError, InputError) as problem:  # such as a run that does not fit into memory
            left_out.append(str(problem))
    if not sections:
        raise StorageError(f"no intact run below {out}: {left_out[0]}")
    content = {"sections": sections, "left_out": left_out, "totals": _totals(sections)}
    page = _template().render(**content, stamp=provenance(), now=now())
    remove_leftovers(out)
    write_text(out / "report.html", page)
    return Report((out / "report.html").resolve(), len(sections), tuple(left_out))


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"spread": spread, "number": number}
    environment.globals["verdicts"] = VERDICTS
    return environment.get_template("template.html")


def _section(path: Path) -> dict[str, Any]:
    """Return what the template shows of one run, all of it checked against the run's manifest."""
    manifest, trajectory = check_run(path)
    stored, config = read_claims(path), read_config(path)
    figures = _figures(path, manifest, stored.description)
    return {
        "anchor": f"{path.parent.name}-{path.name}",
        "study": config["study"],
        "about": stored.description,
        "path": path,
        "preset": config["preset"],
        "config": json.dumps(config["config"], indent=1),
        "seeds": len(config["seeds"]),
        "wall_time": stored.wall_time,
        "claims": stored.claims,
        "counts": {verdict: sum(claim["verdict"] == verdict for claim in stored.claims) for verdict in VERDICTS},
        "figures": figures,
        "missing": [name for name in stored.description.figures or () if name not in {f["name"] for f in figures}],
        "attributes": dict(sorted(trajectory.attrs.items())),
        "variables": [(name, _dimensions(variable)) for name, variable in trajectory.items()],
    }


def _dimensions(variable: xr.DataArray) -> str:
    return ", ".join(f"{name} {size}" for name, size in variable.sizes.items())


def _figures(path: Path, manifest: Manifest, description: Description) -> list[dict[str, str]]:
    """Return the figures that the manifest lists and that exist, in the order in which they are shown."""
    pictures = (f"{FIGURES}/{name}.svg" for name in description.figures or ())
    return [_figure(manifest, name) for name in pictures if name in manifest.files and _is_complete(path / name)]


def _is_complete(picture: Path) -> bool:
    return exists(picture) and exists(picture.with_suffix(".txt"))


def _figure(manifest: Manifest, name: str) -> dict[str, str]:
    """Return the caption of a figure, and its picture as a data URL."""
    file = PurePosixPath(name)
    caption = manifest.read(str(file.with_suffix(".txt"))).decode("utf-8").strip()
    image = base64.b64encode(manifest.read(name)).decode("ascii")
    return {"caption": caption, "image": f"data:image/svg+xml;base64,{image}", "name": file.stem}


def _totals(sections: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many claims of all runs have each verdict."""
    return {verdict: sum(section["counts"][verdict] for section in sections) for verdict in VERDICTS}
