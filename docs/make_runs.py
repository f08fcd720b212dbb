"""Write `docs/runs/README.md`, its pictures and the findings in the README from stored runs: `make runs-page`."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import xarray as xr

from joma.report.html import new_source
from joma.report.table import duration, spread
from joma.runs import Description, find_runs, open_run, read_claims, read_config
from joma.studies import STUDIES, load
from joma.study import Study
from joma.verdicts import KINDS, count_by_kind

FOLDER = Path(__file__).with_name("runs")
PAGE, PICTURES = FOLDER / "README.md", FOLDER / "pictures"
DPI = 100
HEAD = """# Runs at the papers' sizes

Trajectories, configs and claims of the studies, to be opened, judged and drawn without a GPU. Each was made by the
command that stands with it, on the commit that it names. This page is generated from them: `make runs-page`. The run
of `learning-rates` is an earlier one: the name of the folder of its text and its commit were filled in by hand. The six
runs of commit c1813c9df221 were made side by side on one GPU, so that most took longer than they do alone.

So that all fit into 15 MB, `python docs/store_runs.py RUN…` compresses their trajectories and rounds large variables to
14 binary digits (an error below 1e-4), or to as many as leave every verdict, every sentence of what came out and every
measured value the same to the digits that are printed. The attribute `rounded_to_bits` of a trajectory says which
variables are rounded. `joma run` itself rounds nothing.

    joma judge docs/runs             # every claim, and figures beside each run
    joma report docs/runs            # one HTML file

```python
run = joma.open_run("docs/runs/{example}")
```

In the commands `wikitext-2` is a folder with `train.txt`, `valid.txt` and `test.txt`; which copy of the text we used
is [deviation 15](../deviations.md).
"""
README = FOLDER.parents[1] / "README.md"
FINDINGS = ("entropy-text", "sparse-dense", "alignment")  # the studies that the README shows with their pictures
IN_WORDS = ("invariance",)  # those that it shows without
WHY = {  # the studies that answer the README's question, and what each is about
    "ladder": "Solved exactly, then trained",
    "bounce-cause": "On text",
    "value-invariant": "What attention follows instead",
}
QUESTION = """JoMA credits the nonlinear activation: with a linear one the winner takes all. Our studies say otherwise.
Where the loss reaches its least value, and the attention there is unique, entropy ends at that of this optimum, with
linear units too; it has bounced if it went below on the way ([docs/ladder.md](docs/ladder.md) has the proofs, for
linear units). This holds for one-layer models: two layers that learn addition come back although their loss has no
minimum ([docs/related/panorama.md](docs/related/panorama.md)). For text we changed a language model in {ways} ways, and
show what is left of attention's return ([docs/bounce-cause.md](docs/bounce-cause.md)). The law that ties attention
to weights is, in a Transformer, one about value vectors and not about the MLP, and what language models add to the
block breaks it ([docs/value-path.md](docs/value-path.md))."""
START, END = "<!-- findings: written by make runs-page -->", "<!-- end of findings -->"
NOT_STORED = {
    "pretrained": "needs checkpoints of OPT and Pythia from the hub",
}
# Fields that configs have got since a run was stored, with the value for what was computed then.
FORMER = {"value_path": False, "label_noise": 0.0}
COMMIT, SOURCE = re.compile(r"[0-9a-f]{40}"), "src/joma"


def commit_of(run: xr.Dataset) -> str:
    """Return the commit that a stored run was made on; with "-dirty" at its end, or "unknown", if none is that.

    A run on a copy of the files that lacks the newest history names an older commit, with changes; then it is the
    commit whose package is the one that ran, by its `source_tree`.
    """
    named, tree = run.attrs["git_commit"], run.attrs.get("source_tree")
    if COMMIT.fullmatch(named) or tree is None:
        return named
    commits = _git("log", "--full-history", "--format=%H", "--", SOURCE).split()
    return next((commit for commit in commits if tree_of(commit) == tree), named)


def tree_of(commit: str) -> str:
    """Return git's name for the package at a commit, which a run stores as `source_tree`."""
    return _git("rev-parse", f"{commit}:{SOURCE}")


def _git(*words: str) -> str:
    answer = subprocess.run(["git", "-C", str(README.parent), *words], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def command(path: Path) -> str:
    """Return the command that makes a stored run, from its config."""
    stored = read_config(path)
    study, preset = load(stored["study"]), stored["preset"]
    words = ["joma", "run", stored["study"], "--preset", preset]
    if open_run(path).attrs["device"].startswith("cuda"):
        words += ["--device", "cuda"]
    if len(stored["seeds"]) != study.presets[preset].seeds:
        words += ["--seeds", str(len(stored["seeds"]))]
    usual = json.loads(json.dumps(dataclasses.asdict(study.presets[preset].config)))
    former = {name: FORMER[name] for name in usual if name not in stored["config"]}
    for name, value in {**stored["config"], **former}.items():
        if name in usual and value != usual[name]:
            words += ["--set", f"{name}={_as_option(value)}"]
    return shlex.join(words)


def _as_option(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def paragraph(text: str) -> str:
    """Return a text as lines of at most 118 characters."""
    whole = " ".join(text.split()).replace(" %", "\0%")  # a number and its sign stay on one line
    return textwrap.fill(whole, 118, break_on_hyphens=False, break_long_words=False).replace("\0", " ")


def section(path: Path, pictures: str = PICTURES.name) -> Iterator[str]:
    """Yield the parts of the page about one run; `pictures` is their folder as seen from the page."""
    study, stored, run = load(path.parent.name), read_claims(path), open_run(path)
    seeds, commit = len(read_config(path)["seeds"]), commit_of(run)
    yield f"## {study.name}: {stored.description.title}"
    yield f"    {command(path)}"
    yield paragraph(cited(study.description(read_config(path)["preset"], "")))
    yield paragraph(f"**What came out.** {stored.description.outcome}")
    caption = next(iter(study.figures.values())).caption
    yield f"![{alt_text(study)}]({pictures}/{study.name}.png)"
    yield paragraph(caption)
    plural = "s" * (seeds > 1)
    short = f"{commit[:12]}{'-dirty' * commit.endswith('-dirty')}"
    yield paragraph(f"{seeds} seed{plural}, {_cost(path)}; commit {short}; stored in `{relative(path)}`.")
    yield "\n".join(claims_table(stored.claims))


def cited(about: Description) -> str:
    """Return what is claimed, with its source unless the statement itself cites every paper of it."""
    source = new_source(about)
    return f"{about.statement} ({source})" if source else about.statement


def relative(path: Path) -> str:
    """Return the folder of a run within the folder of runs."""
    return path.relative_to(FOLDER).as_posix()


def alt_text(study: Study) -> str:
    """Return what a picture shows for a reader who cannot see it."""
    return study.title.replace("[", "(").replace("]", ")")


def claims_table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of claims, by kind."""
    yield "| kind | claim | expected | measured | verdict |"
    yield "|---|---|---|---|---|"
    for kind in KINDS:
        for record in (record for record in records if record["kind"] == kind):
            reason = f": {record['reason']}" if record["reason"] else ""
            cells = (record["statement"], record["expected"], spread(record["measured"]), record["verdict"] + reason)
            yield f"| {kind} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def counts(paths: list[Path]) -> Iterator[str]:
    """Yield the lines of the table that counts verdicts by kind."""
    yield "| kind | what it is | hold | do not hold | not tested |"
    yield "|---|---|---|---|---|"
    records = [record for path in paths for record in read_claims(path).claims]
    for kind, by_verdict in count_by_kind(records).items():
        numbers = " | ".join(str(number) for number in by_verdict.values())
        yield f"| {kind} | {KINDS[kind]} | {numbers} |"  # pyright: ignore[reportArgumentType]


def costs(paths: list[Path]) -> Iterator[str]:
    """Yield the lines of the table of what is not stored at its full size, and what that would cost."""
    stored = {path.parent.name: path for path in paths}
    yield "| study | stored here | a full run |"
    yield "|---|---|---|"
    for name in STUDIES:
        preset = load(name).presets["paper"]
        full = f"{preset.seeds} seed{'s' * (preset.seeds > 1)}, about {duration(preset.seconds)} on 2 cores"
        if name not in stored:
            yield f"| {name} | not run: {NOT_STORED[name]} | {full} |"
        elif _is_reduced(stored[name]):
            yield f"| {name} | `{command(stored[name])}`, {_cost(stored[name])} | {full} |"


def _cost(path: Path) -> str:
    """Return how long a stored run took, and on what."""
    return f"{read_claims(path).wall_time:.0f} s on {open_run(path).attrs['device'].removeprefix('cuda: ')}"


def _is_reduced(path: Path) -> bool:
    """Return whether a stored run has fewer seeds or another config than its preset, the name of its text apart."""
    words = shlex.split(command(path))
    return "--seeds" in words or any(word.partition("=")[0] not in ("corpus", word) for word in words)


def page(paths: list[Path]) -> str:
    """Return the whole page."""
    example = relative(next(path for path in paths if path.parent.name == "entropy-text"))
    parts = [HEAD.format(example=example).rstrip(), "\n".join(counts(paths))]
    parts += ["What is not stored, or not at its full size, and what a full run costs:", "\n".join(costs(paths))]
    for path in paths:
        parts += section(path)
    return "\n\n".join(parts) + "\n"


def findings(paths: list[Path]) -> str:
    """Return the part of the README that shows what came out: pictures, a few sentences each, and counts by kind."""
    stored = {path.parent.name: path for path in paths}
    parts = [START]
    for name in FINDINGS:
        description = read_claims(stored[name]).description
        parts += [f"### {description.title}", paragraph(description.outcome)]
        parts.append(f"![{alt_text(load(name))}](docs/runs/pictures/{name}.png)")
    for name in IN_WORDS:
        description = read_claims(stored[name]).description
        parts += [f"### {description.title}", paragraph(description.outcome)]
    parts += [*why(stored), "Claims of all stored runs, by kind:", "\n".join(counts(paths)), END]
    return "\n\n".join(parts)


def why(stored: dict[str, Path]) -> Iterator[str]:
    """Yield what the README says about the return of attention: what each study came to, and a picture."""
    yield "### Why does attention become dense again?"
    ways = open_run(stored["bounce-cause"]).sizes["arm"] - 1 if "bounce-cause" in stored else "many"
    yield paragraph(QUESTION.format(ways=ways))
    for name, subject in WHY.items():
        if name in stored:
            yield paragraph(f"**{subject}** (`{name}`). {read_claims(stored[name]).description.outcome}")
    first = next(iter(WHY))
    if first in stored:
        yield f"![{alt_text(load(first))}](docs/runs/pictures/{first}.png)"


def with_findings(readme: str, paths: list[Path]) -> str:
    """Return the text of the README with its findings written anew."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{README} must have the lines {START!r} and {END!r}; put them back.")
    return before + findings(paths) + after


def in_order() -> list[Path]:
    """Return the stored runs in the order of the studies."""
    return sorted(find_runs(FOLDER), key=lambda path: list(STUDIES).index(path.parent.name))


def draw(path: Path) -> None:
    """Write the picture of a run: the first figure of its study, in 256 colours, which takes a third of the bytes."""
    from PIL import Image

    from joma.drawing import style

    study, drawn = load(path.parent.name), BytesIO()
    with style():
        next(iter(study.figures.values())).draw(open_run(path)).savefig(drawn, dpi=DPI)
    with Image.open(drawn) as picture:
        colours = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        colours.save(PICTURES / f"{study.name}.png", optimize=True)


def main() -> None:
    """Write the page and its pictures."""
    PICTURES.mkdir(exist_ok=True)
    paths = in_order()
    for path in paths:
        draw(path)
    PAGE.write_text(page(paths), encoding="utf-8")
    README.write_text(with_findings(README.read_text(encoding="utf-8"), paths), encoding="utf-8")


if __name__ == "__main__":
    main()
