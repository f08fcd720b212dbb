"""Training all seeds at once against a plain eager loop over seeds, at batch 128: the same mathematics.

On the CPU: width 256, 20 classes, 5 seeds. On CUDA, if there is a device: the whole of Table 1, and memory.
"""

import gc
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from benchmarks import Row
from benchmarks.timing import ceilings, synchronised
from joma.drawing import canvas, save, style, theory
from joma.models.transformer import Decoder
from joma.studies.hierarchy.alignment import (
    PUBLISHED,
    Config,
    decoder_config,
    draw_trees,
    merge_pads,
    run,
    train_cells,
)
from joma.study import Context
from joma.train import Compute, Optimiser, Record, fit

SMALL = Config(classes=(20,), children=(2,), latents=((10, 20),), controls=())
EAGER = Compute("high", compiled=False)
OUT = Path("runs/benchmarks")


def seconds_per_step(train: Callable[[int], object], steps: int) -> float:
    """Return the seconds that `train(count)` takes for each step, without those of its start."""
    seconds = []
    for count in (4, steps // 4, steps):  # the first one is a warm-up
        start = synchronised()
        train(count)
        seconds.append(synchronised() - start)
    return (seconds[2] - seconds[1]) / (steps - steps // 4)


def eager_seconds(config: Config, device: str, steps: int, classes: int, children: int) -> float:
    """Return the seconds for each step and seed of the eager loop: one seed, 128 full sequences, torch's Adam."""
    context = Context((0,))
    tree = draw_trees(config, context, classes, children)[0]
    model = Decoder(decoder_config(config, "trained", classes), generators=context.generators("weights")).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.rate, weight_decay=config.weight_decay)
    label = torch.randint(classes, (steps + 3, config.batch), generator=torch.Generator().manual_seed(0)).to(device)
    sequence = tree.sequence[0].to(device)
    start = synchronised()
    for step in range(steps + 3):
        if step == 3:  # the first three are a warm-up
            start = synchronised()
        optimiser.zero_grad()
        logits = model(sequence[label[step]])[0, :, -1]
        torch.nn.functional.cross_entropy(logits, label[step]).backward()
        optimiser.step()
    return (synchronised() - start) / steps


def joint_seconds(config: Config, device: str, steps: int, seeds: int, *, classes: int, children: int) -> float:
    """Return the seconds for each step and seed of our loop, which trains all seeds at once."""
    context = Context(tuple(range(seeds)), device)

    def train(count: int) -> None:
        train_cells(replace(config, steps=count, records=2), context, "trained", [(classes, children)])

    return seconds_per_step(train, steps) / (seeds * len(config.latents))


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    narrow = replace(SMALL, width=256)
    eager = eager_seconds(narrow, "cpu", 6, 20, 2)
    ratio = eager / joint_seconds(narrow, "cpu", 24, 5, classes=20, children=2)
    yield "a step and seed, 5 seeds, width 256, CPU: plain eager loop over ours", "≥ 5 x", f"{ratio:.1f} x", ratio >= 5
    yield interrupted()
    yield from costs("cpu", replace(SMALL, width=64), 16)
    if torch.cuda.is_available():
        yield from on_cuda()


def interrupted() -> Row:
    """Measure the time from Ctrl-C during `joma run` to its end, after the step in progress and a checkpoint."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "joma", "run", "alignment", "--out", out, "--set", "width=256"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not list(Path(out).glob("alignment/*/log.txt")):
            time.sleep(0.05)
        time.sleep(5.0)
        start = time.perf_counter()
        process.send_signal(signal.SIGINT)
        _, message = process.communicate()
        seconds = time.perf_counter() - start
        saved = list(Path(out).glob("alignment/*/checkpoints/*/*.sha256"))
    met = seconds <= 2 and process.returncode == 130 and bool(saved) and message.count("\n") == 1
    return "Ctrl-C in the midst of joma run alignment, width 256: until all is saved", "≤ 2 s", f"{seconds:.2f} s", met


def costs(device: str, config: Config, steps: int) -> Iterator[Row]:
    """Measure the cost of a step against seeds, width and length: rows without a target, and a log-log plot."""
    values_by_name = {
        "seeds": (1, 2, 5, 10, 20),
        "width": (config.width, 2 * config.width, 4 * config.width),
        "length": (10, 20, 30),
    }
    seconds: dict[str, list[float]] = {}
    for name, values in values_by_name.items():
        seconds[name] = [_cost(config, device, steps, **{name: value}) for value in values]
        listed = ", ".join(f"{value}: {1e3 * cost:.2f}" for value, cost in zip(values, seconds[name], strict=True))
        yield f"ms a step against {name}, {device} [{listed}]", "–", "in the plot", True
    with style():
        figure, axes = canvas(1, 3)
        for panel, (name, values) in zip(axes[0], values_by_name.items(), strict=True):
            theory(panel, values, np.array(seconds[name][0]) * np.array(values) / values[0], 1, "proportional")
            panel.plot(values, seconds[name], "o-", color="black", label="measured")
            panel.set(xlabel=name, ylabel="s a step, all seeds", xscale="log", yscale="log")
            panel.legend()
        save(figure, OUT / f"cost-{device}", caption="Cost of a training step against seeds, width and length.")


def _cost(config: Config, device: str, steps: int, *, seeds: int = 5, width: int = 0, length: int = 0) -> float:
    """Return the seconds for a step of all seeds, on random sequences of `length` tokens or, with 0, on the tree's."""
    config = replace(config, width=width or config.width)
    model, sequence = _model_and_sequence(config, Context(tuple(range(seeds)), device))
    if length:
        sequence = torch.randint(config.vocabulary, (seeds, 20, length), generator=torch.Generator().manual_seed(0))
        sequence = sequence.to(device)

    def train(count: int) -> None:
        record = Record(at=(0, count))
        fit(model, _loss(sequence), optimiser=Optimiser("adam", 1e-4), steps=count, record=record, compute=EAGER)

    return seconds_per_step(train, steps)


def _model_and_sequence(config: Config, context: Context) -> tuple[Decoder, Tensor]:
    """Return a decoder and the sequences of 20 classes with merged pads, for all seeds, on the context's device."""
    sequence = merge_pads(draw_trees(config, context, 20, 2)).sequence.to(context.device)
    model = Decoder(decoder_config(config, "trained", 20), generators=context.generators("weights"))
    return model.to(context.device), sequence


def _loss(sequence: Tensor) -> Callable[[Decoder, Tensor], Tensor]:
    """Return the mean surprisal of the classes after the last position, without multiplicities."""

    def loss(model: Decoder, _: Tensor) -> Tensor:
        label = torch.arange(sequence.shape[1], device=sequence.device)[:, None]
        return model.surprisal(sequence, label, last=1).mean(dim=(1, 2))

    return loss


def on_cuda() -> Iterator[Row]:
    """Measure the whole of Table 1 without its controls, against the eager loop, and the memory of a step."""
    eager = np.mean(
        [eager_seconds(Config(), "cuda", 60, classes, children) for classes in (20, 30) for children in (2, 3)]
    )
    start = synchronised()
    torch.cuda.reset_peak_memory_stats()
    table = run(replace(Config(), controls=()), Context(tuple(range(5)), "cuda"))
    seconds = synchronised() - start
    what = "Table 1: 8 cells x 5 seeds x 10,000 steps, compilation included"
    yield what, "≤ 110 s", f"{seconds:.1f} s", seconds <= 110
    least = table_floor(Config(), Context(tuple(range(5)), "cuda"))
    what = f"    least time of its steps at the card's ceilings, {least:.0f} s; ours over it"
    yield what, "–", f"{seconds / least:.2f} x", True
    ratio = float(eager * 40 * 10_000 / seconds)
    yield "Table 1: plain eager loop (its step timed) over ours", "≥ 20 x", f"{ratio:.1f} x", ratio >= 20
    yield from entries(table)
    yield from memory()
    yield from costs("cuda", SMALL, 400)


def table_floor(config: Config, context: Context) -> float:
    """Return the seconds that the steps of Table 1 take at the ceilings of the GPU, of all its cells and seeds.

    Adam reads parameter and moments and writes them (24 bytes); a copy in bf16 is written, and read by two products,
    and a gradient in bf16 is written and read (10). A weight costs 6 operations per token.
    """
    card, seconds = ceilings(), 0.0
    for classes in config.classes:
        for children in config.children:
            sequence = merge_pads(draw_trees(config, context, classes, children)).sequence
            models = len(config.latents) * len(context.seeds)
            parameters = models * decoder_config(config, "trained", classes).parameter_count
            tokens = sequence[0].numel()  # of one model
            seconds += config.steps * card.least_seconds(34 * parameters, 6 * tokens * parameters)
    return seconds


def entries(table: xr.Dataset) -> Iterator[Row]:
    """Compare the entries of the table, averaged over seeds, with the published ranges."""
    end = table.alignment.isel(step=-1).sel(arm="trained").mean("seed")
    for name in table.cell.values:
        for layer, (low, high) in PUBLISHED.items():
            value = float(end.sel(cell=name).isel(latent_layer=layer, layer=layer))
            yield f"{name}, s = {layer}: alignment", f"{low} to {high}", f"{value:.3f}", low <= value <= high


def memory() -> Iterator[Row]:
    """Measure the peak memory of a step against parameters, gradients, Adam's two moments and saved activations."""
    model, sequence = _model_and_sequence(SMALL, Context(tuple(range(5)), "cuda"))
    loss = _loss(sequence)
    saved: dict[int, int] = {}

    def note_size(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # the tensor itself would keep its graph alive, and with it the device's first stream

    with torch.autograd.graph.saved_tensors_hooks(note_size, lambda tensor: tensor):
        loss(model, torch.zeros(())).sum()
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    parameters = {storage.data_ptr(): storage.nbytes() for storage in storages}
    activations = sum(size for address, size in saved.items() if address not in parameters)
    floor = 4 * sum(parameters.values()) + activations
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - sum(parameters.values())
    fit(model, loss, optimiser=Optimiser("adam", 1e-5), steps=50, record=Record(at=(0, 50)), compute=EAGER)
    ratio = (torch.cuda.max_memory_allocated() - others) / floor
    yield "peak memory over parameters, gradients, moments and activations", "≤ 1.3 x", f"{ratio:.2f} x", ratio <= 1.3
