"""Probing a series of checkpoints on the local engine: two workers over one, each with one thread.

The checkpoints are those of a small GPT-NeoX in half precision, 27 million parameters of which 19 are in its layers.
Workers are warm: each has probed a tiny series before, so that the import of transformers is not counted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import Row
from joma.engine import Engine, LocalEngine

COUNT = 8  # checkpoints
WIDTH, LAYERS, VOCABULARY = 512, 6, 8192
REPEATS = 2


def write_series(folder: Path, *, count: int = COUNT, width: int = WIDTH, layers: int = LAYERS) -> None:
    """Write checkpoints of a GPT-NeoX whose weights move along one direction."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from joma.watch.configs import quiet

    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    options: dict[str, Any] = {"num_attention_heads": 8, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **options)).half()
        moves = [0.002 * torch.randn_like(weight) for weight in model.parameters()]
        for step in range(count):
            model.save_pretrained(folder / f"step{step}")
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.add_(move)


def seconds_to_probe(folder: Path, engine: Engine) -> float:
    """Return the time of probing a series without a store."""
    from joma.watch import Checkpoints
    from joma.watch.probing import probe

    series = Checkpoints(folder)
    start = time.perf_counter()
    result = probe(series, engine=engine)
    seconds = time.perf_counter() - start
    assert result.audit.faults == (), result.audit.faults[0].message
    assert result.data.entropy.notnull().all()
    assert series.bytes_read == 0, "the workers read the weights"
    return seconds


def times_by_workers() -> dict[int, float]:
    """Return the shortest time of probing the series for one and for two workers, which take turns."""
    shortest = {1: float("inf"), 2: float("inf")}
    with tempfile.TemporaryDirectory() as temporary, LocalEngine(1) as single, LocalEngine(2) as double:
        large, tiny = Path(temporary) / "large", Path(temporary) / "tiny"
        write_series(large)
        write_series(tiny, count=6, width=16, layers=1)
        engines = {1: single, 2: double}
        for engine in engines.values():
            seconds_to_probe(tiny, engine)
        for _ in range(REPEATS):
            for workers, engine in engines.items():
                shortest[workers] = min(shortest[workers], seconds_to_probe(large, engine))
    return shortest


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    times = times_by_workers()
    ratio = times[1] / times[2]
    what = f"probing {COUNT} checkpoints of 27 M parameters on the local engine: one worker over two"
    yield what, "≥ 1.6 x", f"{ratio:.2f} x", ratio >= 1.6
    yield "    a checkpoint, one worker with one thread", "–", f"{times[1] / COUNT:.2f} s", True
