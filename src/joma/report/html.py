"""Write the report of stored runs and probes: one HTML file with its styles and figures, which needs no other file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2
import xarray as xr
from markupsafe import Markup, escape

from joma.arguments import InputError
from joma.files import StorageError, exists, remove_leftovers, write_text
from joma.manifest import Manifest
from joma.report.overview import overview, run_counts
from joma.report.probe_page import data_url, environment, find_probes, read_probe
from joma.report.rows import by_kind, first_sentence, readable
from joma.report.sweep_section import read_section
from joma.runs import FIGURES, HIGHLIGHT, Description, check_run, find_runs, read_claims, read_config
from joma.stamp import now, provenance
from joma.sweeps import find_sweeps

SIZE = re.compile(rb"""<svg\b[^>]*?\s(width|height)="([\d.]+)pt"[^>]*?\s(width|height)="([\d.]+)pt\"""")
UNSEEN = re.compile(rb"<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
BLANK = re.compile(rb">\s+<")
COORDINATES = re.compile(rb'\b(?:d|x|y)="[^"]*"')
DIGITS = re.compile(rb"(\.\d\d)\d+")
PIXELS_PER_POINT = 4 / 3
ARXIV = re.compile(r"(?:arXiv[ :]|(?<![\w./])(?=\d{4}\.\d{5}(?!\d)))(\d{4}\.\d{4,5})")  # the fifth digit is since 2015
CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Report:
    """What `write_report` has written: the file, what is in it, and why other runs, probes and sweeps are not."""

    path: Path
    runs: int
    left_out: tuple[str, ...]
    probes: tuple[Path, ...] = ()
    sweeps: tuple[Path, ...] = ()


def write_report(out: Path, order: Sequence[str] = (), seen: dict[Path, dict[str, Any]] | None = None) -> Report:
    """Write `out/report.html` about the runs, sweeps and probes below `out`; damaged ones are only named on the page.

    Args:
        out: the folder that runs were stored under.
        order: names of studies, in the order in which their runs are shown; runs of other studies come after them.
        seen: what earlier calls read, by folder. It is not read again, and what this call reads is added to it. For a
            report that is written often while studies are run.

    Returns:
        The report's path, the number of runs, the probes and sweeps in it, and a message for each that is left out.
    """
    paths = find_runs(out)
    probe_paths = find_probes(out, excluded=paths)
    sweep_paths = find_sweeps(out)
    if not paths and not probe_paths and not sweep_paths:
        raise StorageError(f"no finished run below {out}; run `joma run --out {out}` first.")
    rank = {name: index for index, name in enumerate(order)}
    paths.sort(key=lambda path: rank.get(path.parent.name, len(rank)))  # stable: oldest first within a study
    seen = {} if seen is None else seen
    sections, left_out = _read_all(_section, paths, seen)
    probes, probes_left_out = _read_all(read_probe, probe_paths, seen)
    sweeps, sweeps_left_out = _read_all(_sweep, sweep_paths, seen)
    left_out += probes_left_out + sweeps_left_out
    if not sections and not probes and not sweeps:
        raise StorageError(f"no intact run below {out}: {left_out[0]}")
    content = {"sections": sections, "probes": probes, "sweeps": sweeps, "left_out": left_out, **overview(sections)}
    page = _template().render(**content, stamp=provenance(), now=now())
    remove_leftovers(out)
    write_text(out / "report.html", page)
    included = [tuple(item["path"] for item in items) for items in (probes, sweeps)]
    return Report((out / "report.html").resolve(), len(sections), tuple(left_out), *included)


def _read_all(
    read: Callable[[Path], dict[str, Any]], paths: Sequence[Path], seen: dict[Path, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the template shows of each folder, and a message for each that cannot be used."""
    left_out = []
    for path in paths:
        try:
            seen[path] = seen.get(path) or read(path)
        except (StorageError, InputError) as problem:  # such as a run that does not fit into memory
            left_out.append(str(problem))
    return [seen[path] for path in paths if path in seen], left_out


def _template() -> jinja2.Template:
    templates = environment()
    templates.filters |= {
        "marked_up": marked_up,
        "readable": readable,
        "new_source": new_source,
        "first_sentence": first_sentence,
    }
    return templates.get_template("template.html")


def marked_up(text: str) -> Markup:
    """Return text as HTML, with every arXiv number a link to its paper, and what stands in backticks as code.

    >>> marked_up("Theorem 2 (arXiv 2310.00535)")
    Markup('Theorem 2 (<a href="https://arxiv.org/abs/2310.00535">arXiv 2310.00535</a>)')
    >>> marked_up("`winner`, see 2306.00297")
    Markup('<code>winner</code>, see <a href="https://arxiv.org/abs/2306.00297">2306.00297</a>')
    """
    linked = ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">\g<0></a>', str(escape(text)))
    return Markup(CODE.sub(r"<code>\1</code>", linked))


def new_source(about: Description) -> str:
    """Return the source of a study's statement, or nothing if the statement itself cites every paper of it.

    >>> new_source(Description(statement="Attention falls (arXiv 2310.00535).", source="JoMA (arXiv 2310.00535)"))
    ''
    """
    papers = {*ARXIV.findall(about.source)}
    return "" if papers and papers <= {*ARXIV.findall(about.statement)} else about.source


def _section(path: Path) -> dict[str, Any]:
    """Return what the template shows of one run, all of it checked against the run's manifest."""
    manifest, trajectory = check_run(path)
    stored, config = read_claims(path), read_config(path)
    figures, highlight = _figures(path, manifest, stored.description), _highlight(path, manifest, stored.description)
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
        "groups": by_kind((claim, {}) for claim in stored.claims),
        "counts": run_counts(stored.claims),
        "highlight": highlight,
        "figures": figures,
        "missing": _missing(stored.description, {figure["name"] for figure in (*figures, highlight) if figure}),
        "attributes": dict(sorted(trajectory.attrs.items())),
        "variables": [(name, _dimensions(variable)) for name, variable in trajectory.items()],
    }


def _sweep(path: Path) -> dict[str, Any]:
    """Return what the template shows of a sweep, with its figure if one is drawn."""
    section = read_section(path)
    manifest: Manifest = section["manifest"]
    pictures = [name for name in manifest.files if name.endswith(".svg") and _is_complete(path / name)]
    return section | {"figure": _figure(manifest, pictures[0]) if pictures else None}


def _missing(description: Description, names: Collection[str]) -> list[str]:
    """Return the names of the pictures that the run should have and that are not among `names`."""
    expected = [*([HIGHLIGHT] if description.highlight else []), *(description.figures or ())]
    return [name for name in expected if name not in names]


def _dimensions(variable: xr.DataArray) -> str:
    return ", ".join(f"{name} {size}" for name, size in variable.sizes.items())


def _figures(path: Path, manifest: Manifest, description: Description) -> list[dict[str, str]]:
    """Return the figures that the manifest lists and that exist, in the order in which they are shown."""
    pictures = (f"{FIGURES}/{name}.svg" for name in description.figures or ())
    return [_figure(manifest, name) for name in pictures if name in manifest.files and _is_complete(path / name)]


def _is_complete(picture: Path) -> bool:
    return exists(picture) and exists(picture.with_suffix(".txt"))


def _figure(manifest: Manifest, name: str) -> dict[str, Any]:
    """Return the caption of a figure, its picture as a data URL, and its size in CSS pixels if the picture says it."""
    file = PurePosixPath(name)
    caption = manifest.read(str(file.with_suffix(".txt"))).decode("utf-8").strip()
    picture = manifest.read(name)
    return {"caption": caption, "image": data_url(compact(picture)), "name": file.stem, **_size(picture)}


def compact(picture: bytes) -> bytes:
    """Return an SVG picture without comments, metadata, blank space and digits below a hundredth of a point.

    >>> compact(b'<svg><!-- a line -->\\n <path d="M 1.234567 2\\nL 3 4" /></svg>')
    b'<svg><path d="M 1.23 2 L 3 4" /></svg>'
    """
    content = BLANK.sub(b"><", UNSEEN.sub(b"", picture))
    return COORDINATES.sub(lambda match: b" ".join(DIGITS.sub(rb"\1", match[0]).split()), content)


def _size(picture: bytes) -> dict[str, int]:
    """Return width and height of an SVG picture in CSS pixels, or nothing if they are not given in points."""
    match = SIZE.search(picture[:2000])
    if match is None:
        return {}
    sides = {match[1].decode(): float(match[2]), match[3].decode(): float(match[4])}
    return {name: round(PIXELS_PER_POINT * points) for name, points in sides.items()}


def _highlight(path: Path, manifest: Manifest, description: Description) -> dict[str, Any] | None:
    """Return the small picture of a run for the first screen, or None if it has none."""
    name = f"{FIGURES}/{HIGHLIGHT}.svg"
    if not description.highlight or name not in manifest.files or not _is_complete(path / name):
        return None
    return _figure(manifest, name)
