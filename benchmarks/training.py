"""Training many seeds at once beside a plain eager loop, seed after seed, at batch 128: the same mathematics.

On the CPU: width 256, 20 classes, 5 seeds. On CUDA, where there is one: the whole of Table 1, and memory.
"""

import gc
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from benchmarks import Row
from joma.models.transformer import Decoder
from joma.report.figure import canvas, save, style, theory
from joma.studies.hierarchy.alignment import PUBLISHED, Config, _collapsed, _decoder, _trained, _trees, run
from joma.study import Context
from joma.train import Optimiser, fit

SMALL = Config(classes=(20,), children=(2,), latents=((10, 20),), controls=())
OUT = Path("runs/benchmarks")


def synchronised() -> float:
    """The time, after all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def plain(config: Config, device: str, steps: int, classes: int, children: int) -> float:
    """Seconds a step and seed of the eager loop: one seed, 128 whole sequences, torch's own Adam."""
    context = Context((0,))
    tree = _trees(config, context, classes, children)[0]
    model = Decoder(_decoder(config, "trained", classes), generators=context.generators()).to(device)
    rule = torch.optim.Adam(model.parameters(), lr=config.rate, weight_decay=config.weight_decay)
    label = torch.randint(classes, (steps + 3, config.batch), generator=torch.Generator().manual_seed(0)).to(device)
    sequence = tree.sequence[0].to(device)
    for step in range(steps + 3):
        if step == 3:
            begun = synchronised()
        rule.zero_grad()
        logits = model(sequence[label[step]])[0, :, -1]
        torch.nn.functional.cross_entropy(logits, label[step]).backward()
        rule.step()
    return (synchronised() - begun) / steps  # pyright: ignore[reportPossiblyUnboundVariable]


def together(config: Config, device: str, steps: int, seeds: int, *, classes: int, children: int) -> float:
    """Seconds a step and seed of the loop with the seed axis, once it is warm."""
    config = replace(config, steps=steps, records=2)
    took = []
    for count in (4, steps // 4, steps):  # the first one only warms up
        begun = synchronised()
        _trained(replace(config, steps=count), Context(tuple(range(seeds)), device), "trained", classes, children)
        took.append(synchronised() - begun)
    return (took[2] - took[1]) / (steps - steps // 4) / (seeds * len(config.latents))


def rows() -> Iterator[Row]:
    """Yield (what, asked, reached, met)."""
    narrow = replace(SMALL, width=256)
    slow, fast = plain(narrow, "cpu", 6, 20, 2), together(narrow, "cpu", 24, 5, classes=20, children=2)
    ratio = slow / fast
    yield "a step and seed, 5 seeds, width 256, CPU: plain eager loop over ours", "≥ 5 x", f"{ratio:.1f} x", ratio >= 5
    yield interrupted()
    yield from costs("cpu", Config(**vars(replace(SMALL, width=64))), 16)
    if torch.cuda.is_available():
        yield from on_cuda()


def interrupted() -> Row:
    """From Ctrl-C in the midst of `joma run` to its end, everything saved; it waits for the step that is under way."""
    with tempfile.TemporaryDirectory() as out:
        joma = [sys.executable, "-m", "joma", "run", "alignment", "--out", out, "--set", "width=256"]
        process = subprocess.Popen(joma, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not list(Path(out).glob("alignment/*/log.txt")):
            time.sleep(0.05)
        time.sleep(5.0)
        begun = time.perf_counter()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        took = time.perf_counter() - begun
        saved = list(Path(out).glob("alignment/*/checkpoints/*/*.sha256"))
    met = took <= 2 and process.returncode == 130 and bool(saved) and said.count("\n") == 1
    return "Ctrl-C in the midst of joma run alignment, width 256: until all is saved", "≤ 2 s", f"{took:.2f} s", met


def costs(device: str, config: Config, steps: int) -> Iterator[Row]:
    """The cost of a step against seeds, width and length: rows without a number to reach, and a log-log plot."""
    axes_of = {
        "seeds": (1, 2, 5, 10, 20),
        "width": (config.width, 2 * config.width, 4 * config.width),
        "length": (10, 20, 30),
    }
    found: dict[str, list[float]] = {}
    for name, values in axes_of.items():
        found[name] = [_cost(config, device, steps, **{name: value}) for value in values]
        told = ", ".join(f"{value}: {1e3 * cost:.2f}" for value, cost in zip(values, found[name], strict=True))
        yield f"ms a step against {name}, {device} [{told}]", "–", "in the plot", True
    with style():
        figure, axes = canvas(1, 3)
        for panel, (name, values) in zip(axes[0], axes_of.items(), strict=True):
            theory(panel, values, np.array(found[name][0]) * np.array(values) / values[0], 1, "proportional")
            panel.plot(values, found[name], "o-", color="black", label="measured")
            panel.set(xlabel=name, ylabel="s a step, all seeds", xscale="log", yscale="log")
            panel.legend()
        save(figure, OUT / f"cost-{device}", caption="Cost of a training step against seeds, width and length.")


def _cost(config: Config, device: str, steps: int, *, seeds: int = 5, width: int = 0, length: int = 0) -> float:
    """Seconds a step of all seeds on sequences of `length` tokens without merging, or on the tree's own."""
    config = replace(config, width=width or config.width)
    context = Context(tuple(range(seeds)), device)
    data = _collapsed(_trees(config, context, 20, 2))
    sequence = data.sequence.to(device)
    if length:
        sequence = torch.randint(config.vocabulary, (seeds, 20, length), generator=torch.Generator().manual_seed(0))
        sequence = sequence.to(device)
    model = Decoder(_decoder(config, "trained", 20), generators=context.generators()).to(device)

    def loss(model: Decoder, _: Tensor) -> Tensor:
        label = torch.arange(sequence.shape[1], device=sequence.device)[:, None]
        return model.surprisal(sequence, label, last=1).mean(dim=(1, 2))

    took = []
    for count in (4, steps // 4, steps):  # the first one only warms up
        begun = synchronised()
        fit(
            model, loss, optimiser=Optimiser("adam", 1e-4), steps=count, at=(0, count), compiled=False, precision="high"
        )
        took.append(synchronised() - begun)
    return (took[2] - took[1]) / (steps - steps // 4)


def on_cuda() -> Iterator[Row]:
    """The whole of Table 1 without its controls, against the plain loop; and the memory that it takes."""
    slow = np.mean([plain(Config(), "cuda", 60, classes, children) for classes in (20, 30) for children in (2, 3)])
    begun = synchronised()
    torch.cuda.reset_peak_memory_stats()
    table = run(replace(Config(), controls=()), Context(tuple(range(5)), "cuda"))
    took = synchronised() - begun
    yield "Table 1: 8 cells x 5 seeds x 10,000 steps", "≤ 150 s", f"{took:.0f} s", took <= 150
    ratio = float(slow * 40 * 10_000 / took)
    yield "Table 1: plain eager loop (its step timed) over ours", "≥ 20 x", f"{ratio:.1f} x", ratio >= 20
    yield from entries(table)
    yield from memory()
    yield from costs("cuda", SMALL, 400)


def entries(table: xr.Dataset) -> Iterator[Row]:
    """The table's own entries, mean over seeds, beside the published ranges."""
    end = table.alignment.isel(step=-1).sel(arm="trained").mean("seed")
    for name in table.cell.values:
        for layer, (low, high) in PUBLISHED.items():
            value = float(end.sel(cell=name).isel(latent_layer=layer, layer=layer))
            yield f"{name}, s = {layer}: alignment", f"{low} to {high}", f"{value:.3f}", low <= value <= high


def memory() -> Iterator[Row]:
    """Peak memory of a step against parameters, gradients, Adam's two moments and what one forward pass saves."""
    context = Context(tuple(range(5)), "cuda")
    data = _collapsed(_trees(SMALL, context, 20, 2))
    sequence = data.sequence.to("cuda")
    model = Decoder(_decoder(SMALL, "trained", 20), generators=context.generators()).to("cuda")
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # the tensor itself would hold its own graph, and that the device's first stream

    def loss(model: Decoder, _: Tensor) -> Tensor:
        label = torch.arange(sequence.shape[1], device=sequence.device)[:, None]
        return model.surprisal(sequence, label, last=1).mean(dim=(1, 2))

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss(model, torch.zeros(())).sum()
    parameters = {own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in model.parameters()}
    activations = sum(size for place, size in saved.items() if place not in parameters)
    floor = 4 * sum(parameters.values()) + activations
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - sum(parameters.values())
    fit(model, loss, optimiser=Optimiser("adam", 1e-5), steps=50, at=(0, 50), compiled=False, precision="high")
    ratio = (torch.cuda.max_memory_allocated() - others) / floor
    yield "peak memory over parameters, gradients, moments and activations", "≤ 1.3 x", f"{ratio:.2f} x", ratio <= 1.3
