"""Config.json files drawn at random: each gives a model of bounded size or one line that names what is wrong."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joma.arguments import InputError
from joma.watch.configs import compare_configs, load_config
from joma.watch.loading import build_skeleton
from joma.watch.series import LazyCheckpoint
from joma.watch.weight_files import ByteCounter
from robustness.zoo import Outcome, run_apart

ARCHITECTURES = ("gpt_neox", "gpt2", "opt", "llama", "mistral", "qwen2", "bert", "t5", "gpt_neo", "mixtral", "albert")
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "n_embd": 16,
    "d_model": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "n_head": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 256,
}
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 31, 1 << 20, 1 << 24, 1 << 31, 10**12, 10**30, -(10**30)),
    *(0.0, 0.5, -1.5, 1e-300, 1e300, float("inf"), -float("inf")),
    *(None, True, False, "", "16", "gelu", "no such thing", "\x1b[31m", "é" * 1000),
    *([], [1], [[1]], ["full_attention"], [["global", 10**9]], [[["global", "local"], 10**9]]),
    *({}, {"a": 1}, {"rope_type": "dynamic", "factor": -2}, {"rope_type": "yarn"}, {"model_type": "gpt2"}),
)
BATCH, SECONDS, MEMORY = 25, 20, 3 << 30


def draw(generator: random.Random) -> dict[str, Any]:
    """Draw the fields of a config.json: those of an architecture, some of them replaced, and some that it lacks."""
    import transformers

    model_type = generator.choice(ARCHITECTURES)
    fields = json.loads(json.dumps(transformers.CONFIG_MAPPING[model_type]().to_dict(), default=str))
    fields = {key: value for key, value in fields.items() if value is not None} | {"model_type": model_type}
    fields |= {key: value for key, value in SIZES.items() if key in fields}
    names = [*fields, *SIZES, "rope_scaling", "rope_theta", "layer_types", "attention_types", "per_layer_config"]
    for _ in range(generator.randint(1, 3)):
        fields[generator.choice(names)] = generator.choice(VALUES)
    return fields


def problems(seeds: range) -> Iterator[str]:
    """Yield what went wrong with the drawn configs: an error of another kind, or more than a few seconds."""
    for seed in seeds:
        fields, start = draw(random.Random(seed)), time.process_time()
        try:
            _build(fields)
        except InputError as error:
            if "\n" in str(error) or len(str(error)) > 1000:
                yield f"{seed}: {str(error)!r}"
        except Exception as error:
            yield f"{seed}: {type(error).__name__} ({error}) for {fields}"
        if (seconds := time.process_time() - start) > SECONDS / 4:
            yield f"{seed}: {seconds:.1f} s for {fields}"


def _build(fields: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        config = load_config(Path(folder), "step0")
        list(compare_configs({"step0": config, "step1": config}))
        checkpoint = LazyCheckpoint("step0", 0, entries=dict, folder=lambda _: Path(folder), counter=ByteCounter())
        vars(checkpoint).update(files={}, layout={f"weight{i}": "" for i in range(30)})
        build_skeleton(checkpoint, config)


def check(seeds: range) -> None:
    """Raise AssertionError if any config of the drawn ones ends in anything but a model or one line."""
    result = run_apart(lambda: Outcome({}, tuple(problems(seeds))), seconds=SECONDS, memory=MEMORY)
    assert not result.problem, f"seeds {seeds}: {result.problem}"
    assert not result.faults, "\n".join(result.faults)


def torture(scale: float) -> dict[str, int]:
    """Draw configs in batches, each in a process with limits."""
    batches, failures = max(1, round(40 * scale)), []
    list(problems(range(3 * BATCH)))  # what is imported here need not be imported in every process
    for batch in range(batches):
        try:
            check(range(BATCH * batch, BATCH * (batch + 1)))
        except AssertionError as problem:
            failures.append(str(problem))
    if failures:
        raise AssertionError("\n".join(failures))
    return {"configs drawn at random": BATCH * batches}
