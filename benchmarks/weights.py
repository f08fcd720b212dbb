"""Measuring the weights of one checkpoint beside reading it: 24 layers of width 1,024 in bfloat16, 0.8 GB.

Before every read the file's pages are dropped from the cache of the system, so that they come from the disk. The time
of measuring is that beyond reading: of a call whose bytes come from memory. On a CPU the arithmetic of `stable_rank`
bounds it: random matrices, the hardest, take 32 products with 16 vectors, 4.3 GFLOP for 8 MB; trained ones with a
direction that stands out take half. There is a target for a GPU alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import Row
from benchmarks.timing import synchronised
from joma.watch import checkpoint_ranks
from joma.watch.probing import measure_weights
from joma.watch.series import Checkpoints

VOCABULARY, WIDTH, LAYERS = 50_304, 1024, 24
SHAPES = {
    "attention.query_key_value.weight": (3 * WIDTH, WIDTH),
    "attention.dense.weight": (WIDTH, WIDTH),
    "mlp.dense_h_to_4h.weight": (4 * WIDTH, WIDTH),
    "mlp.dense_4h_to_h.weight": (WIDTH, 4 * WIDTH),
}
REPEATS = 3


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    with tempfile.TemporaryDirectory() as temporary:
        file = write_checkpoint(Path(temporary))
        size, medium = file.stat().st_size, medium_of(file)
        series = Checkpoints(temporary)
        measure_weights(series[0])  # loads what only the first call loads
        before = series.bytes_read
        measure_weights(series[0])
        part = series.bytes_read - before
        reading = best_time(lambda: read_whole(file), before=lambda: drop_pages(file))
        cold = best_time(lambda: measure_weights(series[0]), before=lambda: drop_pages(file))
        warm = best_time(lambda: measure_weights(series[0]))
        share = share_of_ranks(lambda: measure_weights(series[0]))
    rate = size / reading / 1e6
    what = f"reading a checkpoint of {size / 1e6:.0f} MB from {medium}: {rate:.0f} MB/s"
    yield what, "–", f"{reading:.2f} s", True
    what = f"measuring its weights, {part / 1e6:.0f} MB of them: from the disk {cold:.2f} s, from memory"
    yield what, "–", f"{warm:.2f} s", True
    gpu = torch.cuda.is_available()
    what = f"measuring a checkpoint's weights over reading it, on a {'GPU' if gpu else 'CPU'}"
    yield what, "≤ 1 x" if gpu else "–", f"{warm / reading:.2f} x", warm <= reading or not gpu
    yield f"    of which in `stable_rank`, for {LAYERS} matrices", "–", f"{100 * share:.0f} %", True


def share_of_ranks(measure: Callable[[], object]) -> float:
    """Return the share of the time of a call that is spent in `stable_rank`."""
    seconds, original = 0.0, checkpoint_ranks.stable_rank

    def timed(weight: Tensor) -> Tensor:
        nonlocal seconds
        start = synchronised()
        rank = original(weight)
        seconds += synchronised() - start
        return rank

    checkpoint_ranks.stable_rank = timed
    try:
        start = synchronised()
        measure()
        return seconds / (synchronised() - start)
    finally:
        checkpoint_ranks.stable_rank = original


def write_checkpoint(folder: Path) -> Path:
    """Write the checkpoint, and return its file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"gpt_neox.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    shapes |= {f"{name}.weight": (VOCABULARY, WIDTH) for name in ("gpt_neox.embed_in", "embed_out")}
    weights = {name: (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()}
    file = folder / "model.safetensors"
    save_file(weights, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that are not yet written cannot be dropped
    return file


def drop_pages(file: Path) -> None:
    """Drop the pages of a file from the cache of the system."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_whole(file: Path) -> None:
    """Read all bytes of a file into one buffer."""
    buffer = bytearray(1 << 24)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def medium_of(file: Path) -> str:
    """Return the device and the file system that a file is on."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    device, _, kind = max(
        (mount for mount in mounts if str(file).startswith(mount[1])), key=lambda mount: len(mount[1])
    )
    return f"{device} ({kind})"


def best_time(call: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> float:
    """Return the shortest time of a few calls; `before` is called before each and not timed."""
    times = []
    for _ in range(REPEATS):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
