"""Text: tokens per second on one core, and the memory for a text as large as WikiText-103 (Linux).

WikiText-2 is read from the folder that the environment variable `JOMA_WIKITEXT` names, or `../shared/data/wikitext-2`.
If neither exists, the embedded corpus is used instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import Row
from joma.data.sources import EMBEDDED, SPLITS, chunks, find
from joma.data.text import Corpus, corpus
from joma.progress import SILENT

LARGE = 103_000_000  # tokens of the training split of WikiText-103
SCRIPT = """
import sys
from benchmarks.memory import resident
from joma.data.text import corpus
text = corpus(sys.argv[1], cache=sys.argv[2])
print(len(text.train), resident("VmHWM"))
"""


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _wikitext(folder)
        speed, text = _speed(source, folder)
        what = f"corpus, {text.name} ({len(text.types):,} types): tokens a second"
        yield what, "≥ 1e6", f"{speed:.2e}", speed >= 1e6
        if source.name.startswith("wikitext-2"):
            sizes = ", ".join(f"{len(getattr(text, split)):,} {split}" for split in SPLITS)
            equal = len(text.train) == 2_049_990 and len(text.types) == 28_782
            yield f"corpus, {sizes}", "torchtext's", "equal" if equal else "different", equal
        tokens, memory, seconds = _large(source, len(text.train), folder)
        yield f"corpus, {tokens:.3g} tokens in {seconds:.0f} s: memory, MiB", "< 1024", f"{memory:.0f}", memory < 1024


def _wikitext(folder: Path) -> Path:
    """Return the folder of WikiText-2, or write the embedded corpus 32 times over to `folder` and return that."""
    wikitext = Path(os.environ.get("JOMA_WIKITEXT", Path(__file__).parents[2] / "shared/data/wikitext-2"))
    if wikitext.is_dir():
        return wikitext
    embedded = folder / "embedded"
    embedded.mkdir()
    for split in ("train", "valid"):
        (embedded / f"{split}.txt").write_bytes(_raw(EMBEDDED, split) * 32)
    return embedded


def _raw(source: str | Path, split: str) -> bytes:
    text = find(source, cache=Path(os.devnull), progress=SILENT)
    return b"".join(chunk.raw for chunk in chunks(text.pieces[split]))


def _speed(source: Path, folder: Path, repeats: int = 3) -> tuple[float, Corpus]:
    """Return the corpus, and the tokens of all splits per second of processor time in the fastest of the repeats."""
    texts, times = [], []
    for number in range(repeats):
        start = time.process_time()
        texts.append(corpus(source, cache=folder / f"cache-{number}"))
        times.append(time.process_time() - start)
    return sum(len(getattr(texts[0], split)) for split in SPLITS) / min(times), texts[0]


def _large(source: Path, tokens: int, folder: Path) -> tuple[int, float, float]:
    """Tokenise a text of WikiText-103's size; return its number of tokens, the peak memory in MiB, and the seconds.

    The text is the training split of `source`, which has `tokens` tokens, repeated. It is tokenised in a process of
    its own, whose peak is that of the tokeniser.
    """
    large = folder / "large"
    large.mkdir()
    raw = _raw(source, "train")
    with (large / "train.txt").open("wb") as file:
        for _ in range(-(-LARGE // tokens)):
            file.write(raw)
    (large / "valid.txt").write_bytes(_raw(source, "valid"))
    start = time.perf_counter()
    command = [sys.executable, "-c", SCRIPT, str(large), str(folder / "cache-large")]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    count, memory = map(int, process.stdout.split())
    return count, memory / 2**20, time.perf_counter() - start
