"""Text: tokens a second on one core, and memory for a text as large as WikiText-103 (Linux).

The folder of WikiText-2 is that of the environment variable `JOMA_WIKITEXT`, or `../shared/data/wikitext-2`; where
neither is there, the embedded corpus takes its place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from joma.data.sources import EMBEDDED, SPLITS, chunks, find
from joma.data.text import Corpus, corpus
from joma.progress import SILENT

LARGE = 103_000_000  # tokens of WikiText-103's training split
MEASURE = """
import sys
from benchmarks.memory import resident
from joma.data.text import corpus
text = corpus(sys.argv[1], cache=sys.argv[2])
print(len(text.train), resident("VmHWM"))
"""


def rows() -> Iterator[tuple[str, str, str, bool]]:
    """Yield what is measured, what is asked, what is reached, and whether that is enough."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _wikitext(folder)
        speed, text = _speed(source, folder)
        sizes = ", ".join(f"{len(getattr(text, split)):,} {split}" for split in SPLITS)
        what = f"corpus, {text.name} ({len(text.types):,} types): tokens a second"
        yield what, "≥ 1e6", f"{speed:.2e}", speed >= 1e6
        if source.name.startswith("wikitext-2"):
            known = len(text.train) == 2_049_990 and len(text.types) == 28_782
            yield f"corpus, {sizes}", "torchtext's", "equal" if known else "different", known
        tokens, memory, seconds = _large(source, len(text.train), folder)
        yield f"corpus, {tokens:.3g} tokens in {seconds:.0f} s: memory, MiB", "< 1024", f"{memory:.0f}", memory < 1024


def _wikitext(folder: Path) -> Path:
    given = Path(os.environ.get("JOMA_WIKITEXT", Path(__file__).parents[2] / "shared/data/wikitext-2"))
    if given.is_dir():
        return given
    made = folder / "embedded"
    made.mkdir()
    for split in ("train", "valid"):
        (made / f"{split}.txt").write_bytes(_raw(EMBEDDED, split) * 32)
    return made


def _raw(source: str | Path, split: str) -> bytes:
    found = find(source, cache=Path(os.devnull), progress=SILENT)
    return b"".join(chunk.raw for chunk in chunks(found.pieces[split]))


def _speed(source: Path, folder: Path, repeats: int = 3) -> tuple[float, Corpus]:
    """Return tokens of all splits a second of processor time, from files to a mapped corpus, at best."""
    texts, times = [], []
    for number in range(repeats):
        begin = time.process_time()
        texts.append(corpus(source, cache=folder / f"cache-{number}"))
        times.append(time.process_time() - begin)
    return sum(len(getattr(texts[0], split)) for split in SPLITS) / min(times), texts[0]


def _large(source: Path, tokens: int, folder: Path) -> tuple[int, float, float]:
    """Repeat the training split to WikiText-103's size; return its tokens, the largest memory in MiB, and seconds."""
    made = folder / "large"
    made.mkdir()
    raw = _raw(source, "train")
    with (made / "train.txt").open("wb") as file:
        for _ in range(-(-LARGE // tokens)):
            file.write(raw)
    (made / "valid.txt").write_bytes(_raw(source, "valid"))
    begin = time.perf_counter()
    command = [sys.executable, "-c", MEASURE, str(made), str(folder / "cache-large")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    count, memory = map(int, done.stdout.split())
    return count, memory / 2**20, time.perf_counter() - begin
