"""Training on text: a step compared with a plain PyTorch loop, the cost of probes, and on a GPU the lower bound.

The text is WikiText-2 if `JOMA_WIKITEXT` or `../shared/data/wikitext-2` has it, else the embedded one.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.timing import ceilings, synchronised
from joma import noise
from joma.models.transformer import Decoder, DecoderConfig
from joma.runs import find_runs, open_run
from joma.studies.text import entropy_text
from joma.studies.text.entropy_text import Config
from joma.studies.text.language_training import TextColumns, Variant, decoder_config, read_text, record_steps, validate
from joma.study import Context
from joma.train import Compute, Optimiser, Record
from joma.train.cuda import matmul_precision
from joma.train.state import Training

SEEDS = (0, 1, 2)
STORED = Path("docs/runs/entropy-text")
TARGETS = {1: 0.5, 10: 1.4}  # ms per step and seed on an H200, by number of layers


class Seconds(NamedTuple):
    """Seconds per step and seed of the plain loop and of ours, and seconds per probe and seed."""

    plain: float
    ours: float
    probe: float


def paper_config() -> Config:
    """Return the paper's setting, on WikiText-2 if it is on this machine."""
    folder = Path(os.environ.get("JOMA_WIKITEXT", "../shared/data/wikitext-2"))
    return Config(corpus=str(folder) if folder.is_dir() else "python-reference", every=1_000)


class Plain(nn.Module):
    """One seed of the model, built from PyTorch's own modules."""

    def __init__(self, config: Config, types: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(config.width, config.heads, config.hidden, config.dropout, batch_first=True)
        self.embedding, self.dropout = nn.Embedding(types, config.width), nn.Dropout(config.dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, types)
        generators = [torch.Generator().manual_seed(0)]
        model = Decoder(decoder_config(config, Variant(layers), types), generators=generators)
        assert model.position_encoding is not None
        self.register_buffer("positions", model.position_encoding[0])
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.positions
        return self.head(self.encoder(self.dropout(x), mask=self.mask, is_causal=True))


def plain_step(config: Config, text: TextColumns, layers: int) -> Callable[[int], None]:
    """Return a function that makes one step of the plain eager loop, with one seed."""
    model = Plain(config, text.types, layers).to(text.train.device)
    adam = torch.optim.Adam(model.parameters(), lr=config.rate)

    def step(number: int) -> None:
        tokens, targets = text.window(torch.tensor(number, device=text.train.device))
        adam.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        adam.step()

    return step


def our_step(config: Config, text: TextColumns, layers: int) -> tuple[Callable[[int], None], Decoder]:
    """Return a function that makes one step of our loop, with all seeds, and their model."""
    context, seeds = Context(SEEDS, str(text.train.device)), torch.tensor(SEEDS, device=text.train.device)
    model = Decoder(decoder_config(config, Variant(layers), text.types), generators=context.seed_generators())

    def loss(model: Decoder, step: Tensor) -> Tensor:
        tokens, targets = text.window(step)
        return model.surprisal(tokens, targets, noise=noise.key(seeds, step)).mean(dim=(1, 2))

    optimiser = Optimiser("adam", config.rate, clip=config.clip, restart=text.epoch)
    training = Training(model.to(seeds.device), loss, optimiser, Record(), Compute(config.precision))
    training.prepare(0)
    return lambda number: training.step(number, record=False, update=True), model


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    config = paper_config()
    text = read_text(config, Context(SEEDS))
    for layers in (1, 2):
        seconds = time_steps(config, text, layers)
        ratio = seconds.plain / seconds.ours
        what = f"a step and seed on text, {layers} layer(s), CPU: plain eager loop over ours"
        yield f"{what} ({1e3 * seconds.ours:.0f} ms)", "≥ 1 x", f"{ratio:.2f} x", ratio >= 1
        for name, policy in (("default policy", replace(config, every=None)), ("every 1,000 steps", config)):
            share = probe_share(policy, text, seconds)
            target, met = ("< 5 %", share < 0.05) if policy.every is None else ("–", True)
            what = f"probing, {layers} layer(s), CPU, {name}: share of the training time"
            yield what, target, f"{100 * share:.1f} %", met
    yield quick_probes()
    if torch.cuda.is_available():
        yield from on_cuda(config)


def time_steps(config: Config, text: TextColumns, layers: int) -> Seconds:
    """Return the shortest of four steps of each loop, which take turns, and the time of a probe."""
    (ours, model), plain = our_step(config, text, layers), plain_step(config, text, layers)
    shortest = {"ours": float("inf"), "plain": float("inf")}
    for number in range(4):
        for name, step, seeds in (("ours", ours, len(SEEDS)), ("plain", plain, 1)):
            start = time.perf_counter()
            step(number)
            shortest[name] = min(shortest[name], (time.perf_counter() - start) / seeds)
    part = replace(text, valid=text.valid[:, : 20 * text.length + 1])
    with torch.no_grad():
        start = time.perf_counter()
        validate(model, part)
        probe = (time.perf_counter() - start) * text.valid.numel() / part.valid.numel() / len(SEEDS)
    return Seconds(shortest["plain"], shortest["ours"], probe)


def probe_share(config: Config, text: TextColumns, seconds: Seconds) -> float:
    """Return the share of probes in the training time."""
    return len(record_steps(config, text)) * seconds.probe / (config.steps * seconds.ours)


def quick_probes() -> Row:
    """Return the share of probes in the quick preset of `entropy-text`."""
    config = entropy_text.STUDY.presets["quick"].config
    text = read_text(config, Context(SEEDS))
    share = probe_share(config, text, time_steps(config, text, 1))
    what = f"probing, entropy-text at quick, {len(record_steps(config, text))} times: share of the training time"
    return what, "–", f"{100 * share:.1f} %", True


def on_cuda(config: Config) -> Iterator[Row]:
    """Yield milliseconds per step and seed, three seeds at once, and their ratio to the lower bound of the GPU."""
    text = read_text(config, Context(SEEDS, "cuda"))
    card = ceilings()
    yield (
        f"the card's ceilings: {card.bandwidth / 1e12:.2f} TB/s, {card.products / 1e12:.0f} TFLOP/s in bf16",
        "–",
        "",
        True,
    )
    for layers, target in TARGETS.items():
        seconds, model = time_cuda_step(config, text, layers)
        moved, operations = work(model.config, config, text.types)
        floor = card.least_seconds(moved, operations)
        ms = 1e3 * seconds / len(SEEDS)
        what = f"a step and seed on text, {layers} layer(s), three seeds, CUDA"
        yield what, f"≤ {target} ms", f"{ms:.3f} ms", ms <= target
        least = f"{moved / 1e9:.2f} GB, {operations / 1e9:.0f} GFLOP a step: {1e3 * floor:.2f} ms at the ceilings"
        yield f"    {least}; ours over it", "–", f"{seconds / floor:.2f} x", True
    models = (decoder_config(config, Variant(layers), text.types) for layers in config.depths)
    least = config.steps * sum(card.least_seconds(*work(model, config, text.types)) for model in models)
    what = f"the whole figure, depths {config.depths}: least time of its steps at the ceilings"
    yield what, "–", f"{least:.0f} s", True
    for name, seconds in stored_seconds():
        yield f"    stored run {name}; over the least time", "–", f"{seconds:.0f} s, {seconds / least:.1f} x", True


def stored_seconds() -> Iterator[tuple[str, float]]:
    """Yield the stored runs of the whole figure that were made on CUDA, and the seconds that they took."""
    for path in find_runs(STORED, depth=1):
        attributes = open_run(path).attrs
        if attributes["device"].startswith("cuda"):
            yield path.name, float(attributes["wall_time_s"])


def time_cuda_step(config: Config, text: TextColumns, layers: int) -> tuple[float, Decoder]:
    """Return the seconds of a step of all seeds, mean over 300 after 20 to warm up, and the model."""
    with matmul_precision(Compute(config.precision)):
        step, model = our_step(config, text, layers)
        for number in range(20):
            step(number)
        start = synchronised()
        for number in range(300):
            step(number)
        return (synchronised() - start) / 300, model


def work(sizes: DecoderConfig, config: Config, types: int) -> tuple[float, float]:
    """Return the bytes that one step of all seeds must move, and its operations.

    Adam reads parameter and moments and writes them (24 bytes). The gradient of the embedding is written, and read for
    its norm and by Adam (12). Of a weight in products there is a copy in bf16 that two products read and Adam writes,
    and a gradient in bf16 (12 too). Logits in bf16 are written, turned into their gradient and read by two products
    (10). A weight in a product costs 6 operations per token.
    """
    tokens = config.batch * config.length * len(SEEDS)
    parameters, embedding = len(SEEDS) * sizes.parameter_count, len(SEEDS) * types * sizes.width
    return 36 * parameters + 10 * tokens * types, 6 * tokens / len(SEEDS) * (parameters - embedding)
