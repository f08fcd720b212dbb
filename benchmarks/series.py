"""Weight measures of a series of 100 checkpoints of a 50-million-parameter model: memory, and what a second run reads.

The checkpoints are 100 files of their own, in bfloat16 (102 MB each, 10 GB of disk while it runs): one model whose
matrices are scaled a little differently at every step. Set JOMA_BENCHMARK_CHECKPOINTS to take fewer.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import Row

COUNT = int(os.environ.get("JOMA_BENCHMARK_CHECKPOINTS", "100"))
WORDS, WIDTH, LAYERS = 50_304, 512, 8
SHAPES = {
    "query_key_value": ("attention.query_key_value.weight", (3 * WIDTH, WIDTH)),
    "dense": ("attention.dense.weight", (WIDTH, WIDTH)),
    "lower": ("mlp.dense_h_to_4h.weight", (4 * WIDTH, WIDTH)),
    "upper": ("mlp.dense_4h_to_h.weight", (WIDTH, 4 * WIDTH)),
}
MEASURE = """
import json, sys

import joma.watch.probing, joma.watch.audit
from benchmarks.memory import forget_peak, resident
from joma.watch.audit import audit_series
from joma.watch.probing import WEIGHTS
from joma.watch.series import Checkpoints, Store

forget_peak()
before = resident("VmRSS")
series, store = Checkpoints(sys.argv[1]), Store(sys.argv[2])
faults = audit_series(series, store=store).faults
measured = sum(isinstance(values, dict) for _, values in series.measure(WEIGHTS, store=store))
print(json.dumps([resident("VmHWM") - before, series.bytes_read, measured, len(faults)]))
"""


def write_series(folder: Path) -> int:
    """Write the checkpoints; return the bytes of their largest tensor."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {"gpt_neox.embed_in.weight": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"gpt_neox.layers.{layer}.{name}": shape for name, shape in SHAPES.values()}
    model = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for step in range(COUNT):
        path = folder / f"step{1000 * step}"
        path.mkdir()
        save_file({name: (w * (1 + 0.02 * step)).bfloat16() for name, w in model.items()}, path / "model.safetensors")
    return max(2 * weight.numel() for weight in model.values())


def rows() -> Iterator[Row]:
    """Yield (what, asked, reached, met)."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "series"
        folder.mkdir()
        largest = write_series(folder)
        told = [_measured(folder, Path(place) / "store") for _ in range(2)]
    (peak, read, count, faults), (_, again, _, _) = told
    ratio = peak / largest
    what = f"{COUNT} checkpoints, 50 M parameters: peak memory over the largest tensor"
    yield what, "< 3 x", f"{ratio:.2f} x", ratio < 3 and count == COUNT and not faults
    yield f"a second run over them reads (the first: {read / 2**20:.0f} MiB)", "0 bytes", f"{again} bytes", again == 0


def _measured(folder: Path, store: Path) -> list[int]:
    command = [sys.executable, "-c", MEASURE, str(folder), str(store)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # the matrices are too small for threads
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    return json.loads(done.stdout)
