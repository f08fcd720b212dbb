"""Measuring the weights of 100 checkpoints of a 50-million-parameter model: memory, and what a second run reads.

The checkpoints are 100 separate files in bfloat16 (102 MB each, 10 GB of disk during the benchmark): the same model
with its matrices scaled differently at every step. Set JOMA_BENCHMARK_CHECKPOINTS for fewer.
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
VOCABULARY, WIDTH, LAYERS = 50_304, 512, 8
SHAPES = {
    "attention.query_key_value.weight": (3 * WIDTH, WIDTH),
    "attention.dense.weight": (WIDTH, WIDTH),
    "mlp.dense_h_to_4h.weight": (4 * WIDTH, WIDTH),
    "mlp.dense_4h_to_h.weight": (WIDTH, 4 * WIDTH),
}
SCRIPT = """
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
    """Write the checkpoints, and return the size of their largest tensor in bytes."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {"gpt_neox.embed_in.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"gpt_neox.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    model = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for step in range(COUNT):
        path = folder / f"step{1000 * step}"
        path.mkdir()
        scale = 1 + 0.02 * step
        weights = {name: (weight * scale).bfloat16() for name, weight in model.items()}
        save_file(weights, path / "model.safetensors")
    return max(2 * weight.numel() for weight in model.values())


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "series"
        folder.mkdir()
        largest = write_series(folder)
        first, second = (_measure(folder, Path(temporary) / "store") for _ in range(2))
    (peak, read, count, faults), (_, again, _, _) = first, second
    ratio = peak / largest
    what = f"{COUNT} checkpoints, 50 M parameters: peak memory over the largest tensor"
    yield what, "< 3 x", f"{ratio:.2f} x", ratio < 3 and count == COUNT and not faults
    yield f"a second run over them reads (the first: {read / 2**20:.0f} MiB)", "0 bytes", f"{again} bytes", again == 0


def _measure(folder: Path, store: Path) -> list[int]:
    """Return peak memory, bytes read, number of measured checkpoints and number of faults of a new process."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(store)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the matrices are too small for threads
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(process.stdout)
