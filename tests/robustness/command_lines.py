"""Hostile command lines of every command and every study, and what each of them must do.

Exit code 0, 1, 2 or 130; for 2 one message; no traceback; nothing printed but text. The lines are drawn from the
commands' own options and from the fields of every study's config, with values that no study accepts or can use.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from robustness.fork_server import Ending, Limits, Streams, preload, run_forked

LINES = 4000  # at scale 1
LONG, ESCAPE, NOT_UTF_8 = "a" * 300, "\x1b]0;title\x07\x1b[31mred\n\u202e", os.fsdecode(b"caf\xe9")
NUMBERS = (
    "0", "-0", "-1", "1", "2", "3.7", "0.5", "1e-320", "1e-9", "1e308", "-1e308", "nan", "-inf", "inf", "1e3", "0x10",
    "1_000", "١٢", "+5", " 5 ", "65536", "2147483648", "100000000", "1000000000000", "9223372036854775807",
    "1" + "0" * 30, "9" * 400,
)  # fmt: skip
WORDS = (
    "", " ", ",", "true", "False", "None", "null", "é", ESCAPE, "\n", "a" * 10_000, "--help", "-h", "-x", "=", "a=b",
    "..", "/dev/null", "/proc/self/mem", "{}", "[1]", "%s", "[bold]", "\0", NOT_UTF_8, "relu", "softmax", "linear",
    "bytes", "nobody/nothing", "no/such/folder", "held", "highest",
)  # fmt: skip
LISTS = (
    "1,2,,3", "1,1", "0,0", "-1,2", "1,2,3", "0.5,0.5", "nan,1", "1e308,1", "1,2,3,4,5,6,7,8", "relu,relu", "relu,tanh",
    ",".join(["1"] * 3000),
)  # fmt: skip
HOSTILE = (*NUMBERS, *WORDS, *LISTS)
PATHS = (
    "a-file", "a-fifo", "a-loop", "a-dangling-link", "read-only", "no-access", "a-file/below", "a-loop/below", ESCAPE,
    LONG, "/".join([LONG[:200]] * 30), "/dev/null", "/dev/null/below", "/dev/full", "/proc/x", "/proc/self/fd", "/sys",
    "", ".", "..", " ", "~", "a\0b", NOT_UTF_8, "stored", "stored/winner", "series", "[bold]x[/bold]", "-", "--",
    "read-only/below", "no-access/below", "runs",
)  # fmt: skip

# What makes each study small enough to run in about a second.
SMALL = {
    "invariance": "classes=3 distinct=2 common=2 dim=9 steps=10",
    "value-invariant": "classes=3 distinct=2 common=2 queries=2 values=2 head_width=2 hidden=3 steps=6 samples=4 "
    "length=3 batch=2 ladder_steps=6 until=0.1",
    "winner": "tokens=3 samples=6 steps=200 until=0.5 figure_3_steps=10",
    "sparse-dense": "figure_4_mu=1.3,2.4,3.6 figure_4_steps=50 until=0.05 components=2 draws=2 classes=3 distinct=2 "
    "common=2 units_steps=10",
    "ladder": "tokens=4 length=3 long_length=3 until=300 constant_until=20 records=20 shares=0,0.5 planted=1,0.6 "
    "draws=2 searches=1 sgd_steps=20 trained_steps=10 trained_probe=8 trained_batch=8",
    "critical-points": "tokens=3 components=2 starts=3 overlaps=0 mixtures=2 runs=2 clock=200 driven=relu "
    "context_tokens=3 samples=2 horizon=0.5 times=3",
    "cooccurrence": "samples=1000 trees=1 rhos=0.3,0.7 c=0,1 gaps=0.3,0.1",
    "alignment": "classes=4 children=2 latents=5,5 vocabulary=8 length=30 width=4 layers=2 hidden=5 batch=8 steps=6 "
    "records=3 controls=4",
    "scan-snap": "queries=1 classes=2 distinct=2 common=2 outputs=4 steps=1000 records=20 sweep=100,1000 "
    "shares=0.5,0.1",
    "hierarchy-order": "width=4 steps=12 batch=4 pool=5 probes=96 moments=4",
    "permutation": "width=8 length=4 vocabulary=6 sequences=2 inputs=8",
    "addition": "digits=1 layers=2 heads=2 width=8 batch=8 steps=6 every=3 warm_up=2 held=0.3 glance=10 "
    "probed=10 together=4",
    "position-emergence": "digits=1 layers=2 heads=2 width=8 batch=8 steps=4 warm_up=2 held=0.3 tokeniser=bytes "
    "length=6 windows=4 records=3 asked=12 probed=10 compared=5 nulls=4 widths=8,12",
    "pretrained": "layers=2 heads=2 width=16 length=16 batch=4 steps=12 every=5",
}
RELATED = {
    "polarise": "tokens=2 dim=2 records=10 loss_tokens=2 steps=20 until=20 targets=2 target_tokens=3 margin=2",
    "icl-regression": "spectrum=1.6,1,0.3 length=6 merged_heads=1 merged_until=5 drop_scales=1e-2,1e-3 "
    "separate_until=50 records=20 prompts=50 batch=8 probe=16 whole_steps=3 whole_batch=8 layers=1,2 layer_steps=3 "
    "covariances=30 searches=2 softmax_steps=3",
    "max-margin": "sequences=2 tokens=3 dim=5 length=20 late_length=30 steps=32 descent_steps=20 factor_length=3 "
    "late_factor_length=6",
    "rank-collapse": "tokens=12 dim=12 score_tokens=12 draws=4",
    "entropy-floor": "keys=2,20 norms=0.1,4 row_starts=2 sizes=3 spectral_norms=1,4 matrix_starts=8 width=8 hidden=8 "
    "layers=1 length=8 batch=4 steps=4 every=2 windows=2",
    "even-pairs": "lengths=2 until=20 records=20 trained_length=2 rates=0.5 steps=40",
    "markov-unigram": "length=4 width=3 batch=3 steps=4 inits=0.05,0.4 variants=long,wide long_length=5 wide_width=4 "
    "probe=4 records=2 reduced_until=20",
    "icl-autoregression": "dim=2 lengths=3,4 length=4 steps=3 batch=2 probe=10 searches=1 search_dim=2 records=3",
    "induction-phases": "length=12 batch=4 probe=4 lags=4 steps=20 adam_steps=20 parents_steps=20 oracle_chains=20 "
    "gradient_length=30 gradient_samples=3 full_steps=4 full_length=10 full_width=4 full_batch=2 full_rates=0.01",
    "panorama": "records=10 block_steps=20 overlap_steps=20 scan_steps=20 text_steps=10 text_width=4 addition_width=8 "
    "addition_batch=4 addition_steps=10",
}
SMALL |= RELATED
TEXT = "corpus=text.txt tokeniser=bytes width=4 hidden=4 length=4 batch=4 columns=2 steps=6 every=3 glance=20"
SMALL |= {
    "entropy-text": f"{TEXT} depths=1",
    "learning-rates": f"{TEXT} layers=1 rates=0.01",
    "activation-control": f"{TEXT} activations=relu",
    "bounce-control": f"{TEXT} depths=1 arms=held",
    "bounce-cause": f"{TEXT} arms=value-path,memorised attention_steps=2",
    "invariant-text": f"{TEXT} tokens=6 queries=3 permutations=5",
}


@dataclass(frozen=True)
class Line:
    """A command line and how it is run: as the arguments of `run_forked`."""

    args: tuple[str, ...]
    streams: Streams = dataclasses.field(default_factory=Streams)
    unprivileged: bool = False
    pictures: bool = False

    @property
    def text(self) -> str:
        """The line as Python code, to try it again."""
        shown = [argument if len(argument) < 400 else f"{argument[:60]}…" for argument in self.args]
        return f"{shown!r} {self.streams} {'unprivileged' if self.unprivileged else ''}"


def study_line(name: str, *changes: str, options: tuple[str, ...] = ()) -> Line:
    """Return the line that runs a small study, with further changes of its config."""
    sets = [*SMALL[name].split(), *changes]
    return Line(("run", name, "--seeds", "1", *itertools.chain(*(("--set", change) for change in sets)), *options))


def field_lines(draw: random.Random) -> Iterator[Line]:
    """Yield lines that set one field of a study's config, or two, to hostile values."""
    from joma.studies import load

    fields = [(name, field.name) for name in SMALL for field in dataclasses.fields(load(name).presets["quick"].config)]
    every = list(itertools.product(fields, HOSTILE))
    draw.shuffle(every)
    for (name, field), value in every:
        yield study_line(name, f"{field}={value}")
        (other, second), another = draw.choice(every)
        if other == name:
            yield study_line(name, f"{field}={value}", f"{second}={another}")


def option_lines(draw: random.Random) -> Iterator[Line]:
    """Yield lines of every command with hostile options, folders and words."""
    studies = [*SMALL]
    patterns = (*WORDS, r"step(?P<step>\d+)", "step(", r"(?P<step>.*)", "(" * 200, r"(?P<step>\d+)\w*\1")
    while True:
        word, value, path, name = (draw.choice(kind) for kind in (WORDS, HOSTILE, PATHS, studies))
        yield study_line(name, options=("--seeds", value))
        yield study_line(name, options=("--preset", value))
        yield study_line(name, options=("--out", path))
        yield study_line(name, options=(draw.choice(("--device", "--json", "--seeds", "--set", "--")), word))
        yield study_line("winner", options=("--set", word))
        yield study_line("winner", options=("--set", f"{word}={value}"))
        yield Line(("run", word, "--out", path))
        yield Line(("probe", path, "--out", draw.choice(PATHS)))
        yield Line(("probe", draw.choice(("series", word)), "--text", path))
        yield Line(("probe", "series", "--revisions", draw.choice((word, "step1", "step0")), value))
        yield Line(("probe", "series", "--pattern", draw.choice(patterns)))
        yield Line((draw.choice(("judge", "report")), path))
        yield Line((draw.choice(("judge", "report", "list", "verify", "probe", "run", word)), f"--{word}", value))
        yield Line((word, value))


def stream_lines(draw: random.Random) -> Iterator[Line]:
    """Yield lines whose output goes to a pipe that nobody reads, a full disk, or nowhere."""
    kinds = ("file", "pipe", "full", "closed")
    lines = [study_line(name) for name in SMALL]
    lines += [Line(("judge", "stored")), Line(("report", "stored")), Line(("probe", "series")), Line(("list",))]
    lines += [Line(("--help",)), Line(("run", "--help")), Line(("run", "nothing")), Line(("probe", "series", "--json"))]
    while True:
        line, streams = draw.choice(lines), Streams(draw.choice(kinds), draw.choice(kinds))
        yield dataclasses.replace(line, streams=streams)


def lines(count: int, seed: int) -> list[Line]:
    """Return `count` lines: three quarters about configs, the others about options, and a few about streams."""
    draw = random.Random(seed)
    kinds: list[Callable[[random.Random], Iterator[Line]]] = [field_lines, option_lines, stream_lines]
    counts = [count - count // 5 - count // 20, count // 5, count // 20]
    drawn = [line for kind, number in zip(kinds, counts, strict=True) for line in itertools.islice(kind(draw), number)]
    return [dataclasses.replace(line, unprivileged=draw.random() < 0.2, pictures=draw.random() < 0.1) for line in drawn]


def prepare(root: Path) -> None:
    """Make what command lines refer to: a text, a stored run, and a series of checkpoints with hostile names."""
    import torch
    from safetensors.torch import save_file

    template = root / "template"
    (template / "stored").mkdir(parents=True)
    (template / "a-file").write_text("some words\n")
    (template / "text.txt").write_text("some words that come again and some words that do not. " * 200)
    for index, name in enumerate(("step0", "step1", f"step2{ESCAPE}")):
        (template / "series" / name).mkdir(parents=True)
        weight = torch.randn(40, 8, generator=torch.Generator().manual_seed(index))
        tensors = {"wte.weight": weight, f"mlp.fc1{ESCAPE}[red].weight": weight[:9].clone()}
        save_file(tensors, template / "series" / name / "model.safetensors")
    patient = Limits(seconds=60, wait=300)
    ending = run_forked([*study_line("winner").args, "--out", "stored"], template, limits=patient, pictures=False)
    assert ending.code in (0, 1), ending


def furnish(folder: Path, template: Path, args: tuple[str, ...]) -> None:
    """Make in a line's folder what the line refers to."""
    folder.mkdir()
    text = " ".join(args)
    for path in template.iterdir():
        if path.name in text:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    if "a-fifo" in text:
        os.mkfifo(folder / "a-fifo")
    if "a-loop" in text:
        (folder / "a-loop").symlink_to("a-loop")
    if "a-dangling-link" in text:
        (folder / "a-dangling-link").symlink_to("nowhere")
    for name, mode in (("read-only", 0o555), ("no-access", 0)):
        if name in text:
            (folder / name).mkdir()
            (folder / name).chmod(mode)


def try_line(line: Line, root: Path, number: int, limits: Limits | None = None) -> tuple[Ending, str]:
    """Run one line in a new folder; return how it ended, and what is wrong with that, empty if nothing is."""
    folder = root / f"line{number}"
    furnish(folder, root / "template", line.args)
    try:
        options = {"streams": line.streams, "unprivileged": line.unprivileged, "pictures": line.pictures}
        ending = run_forked(line.args, folder, limits=limits, **options)
        return ending, fault(line, ending)
    finally:
        for path in folder.glob("no-access"):
            path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


def fault(line: Line, ending: Ending) -> str:
    """Return what is wrong with how a line ended, empty if nothing is."""
    raw = {char for char in ending.out + ending.err if not char.isprintable()} - {*"\n\u00a0\u2009\u202f"}
    wrong = {
        "did not end after Ctrl-C": ending.code is None,
        f"exit code {ending.code}": ending.code not in (0, 1, 2, 130, None),
        "exit code 130 without Ctrl-C": ending.code == 130 and not ending.interrupted,
        "a traceback": "Traceback" in ending.err + ending.out,
        f"control characters {raw!r} on the terminal": bool(raw),
    }
    if any(wrong.values()) or line.streams.err != "file":
        return ", ".join(problem for problem, is_so in wrong.items() if is_so)
    return _message_fault(line, ending)


def _message_fault(line: Line, ending: Ending) -> str:
    """Return what is wrong with what a line printed on standard error."""
    messages = [message for message in ending.err.splitlines() if not message.startswith("joma: warning: ")]
    if ending.code in (0, 1):
        return "a message beside a result" if messages else ""
    if ending.code == 130:
        return "" if any("interrupted" in message for message in messages) else "no line that says interrupted"
    if messages and re.match("[╭┌+]", messages[0]):
        return "" if sum(message.startswith(("╭", "┌")) for message in messages) == 1 else "several boxes"
    if not messages or not all(message.startswith("joma: ") for message in messages):
        return "no message that begins with joma:"
    several = line.args[:1] in (("judge",), ("report",))  # one for each run
    return "" if several or len(messages) == 1 else f"{len(messages)} messages"


def _try_numbered(task: tuple[int, Line, Path]) -> tuple[Line, Ending, str]:
    number, line, root = task
    return (line, *try_line(line, root, number))


def torture(scale: float) -> dict[str, int]:
    """Try `LINES` command lines, times `scale`, on two processes; every failing line is printed."""
    os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "COLUMNS": "120", "LC_ALL": "C.UTF-8"}
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    preload()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="joma-lines-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        prepare(root)
        seed = int(os.environ.get("TORTURE_SEED", "0"))
        tasks = [(number, line, root) for number, line in enumerate(lines(int(LINES * scale), seed))]
        with get_context("fork").Pool(2) as pool:
            for line, ending, problem in pool.imap_unordered(_try_numbered, tasks, chunksize=8):
                counts["command lines"] += 1
                counts[f"exit code {ending.code}"] += 1
                if problem:
                    counts["command lines that failed"] += 1
                    record = {"line": line.text, "problem": problem, "end": ending.err[-1500:], "s": ending.seconds}
                    print(json.dumps(record, ensure_ascii=True), flush=True)  # noqa: T201
    return dict(sorted(counts.items()))
