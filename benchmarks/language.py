"""Training on text: a step beside a plain PyTorch loop of the same model, what probing costs, and the GPU's own floor.

The text is WikiText-2 where `JOMA_WIKITEXT` or `../shared/data/wikitext-2` has it, else the embedded one.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.training import synchronised
from joma import noise
from joma.models.transformer import Decoder
from joma.studies.text import entropy_text, language_training
from joma.study import Context
from joma.train import Optimiser
from joma.train.loop import _products, _Training

SEEDS = (0, 1, 2)
ASKED = {1: 0.5, 10: 1.4}  # ms a step and seed on an H200, by layers


def setting() -> language_training.Setting:
    """The paper's, on WikiText-2 where it is at hand."""
    place = Path(os.environ.get("JOMA_WIKITEXT", "../shared/data/wikitext-2"))
    return language_training.Setting(corpus=str(place) if place.is_dir() else "python-reference", every=1_000)


class Plain(nn.Module):
    """The model in PyTorch's own parts, one seed of it."""

    def __init__(self, own: language_training.Setting, types: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(own.width, own.heads, own.hidden, own.dropout, batch_first=True)
        self.embedding, self.dropout = nn.Embedding(types, own.width), nn.Dropout(own.dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(own.width, types)
        model = Decoder(language_training.decoder(own, types, layers), generators=[torch.Generator().manual_seed(0)])
        assert model.positions is not None
        self.register_buffer("positions", model.positions[0])
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(own.length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.positions
        return self.head(self.encoder(self.dropout(x), mask=self.mask, is_causal=True))


def plain(own: language_training.Setting, text: language_training.Text, layers: int) -> Callable[[int], None]:
    """A step of the plain eager loop of one seed."""
    model = Plain(own, text.types, layers).to(text.train.device)
    rule = torch.optim.Adam(model.parameters(), lr=own.rate)

    def step(number: int) -> None:
        tokens, target = text.window(torch.tensor(number, device=text.train.device))
        rule.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), own.clip)
        rule.step()

    return step


def together(
    own: language_training.Setting, text: language_training.Text, layers: int
) -> tuple[Callable[[int], None], Decoder]:
    """A step of all seeds in our loop, and their model."""
    context, seeds = Context(SEEDS, str(text.train.device)), torch.tensor(SEEDS, device=text.train.device)
    model = Decoder(language_training.decoder(own, text.types, layers), generators=context.generators()).to(
        seeds.device
    )

    def loss(model: Decoder, step: Tensor) -> Tensor:
        tokens, target = text.window(step)
        return model.surprisal(tokens, target, noise=noise.key(seeds, step)).mean(dim=(1, 2))

    rule = Optimiser("adam", own.rate, clip=own.clip, restart=text.epoch)
    training = _Training(model, loss, rule, lambda *_: {}, precision=own.precision, compiled=True, dynamic=False)
    training.prepare(0)
    return lambda number: training.step(number, record=False, update=True), model


def rows() -> Iterator[Row]:
    """Yield (what, asked, reached, met)."""
    own = setting()
    text = language_training.read_text(own, Context(SEEDS))
    for layers in (1, 2):
        ratio, ours, probe = beside(own, text, layers)
        what = f"a step and seed on text, {layers} layer(s), CPU: plain eager loop over ours ({1e3 * ours:.0f} ms)"
        yield what, "≥ 1 x", f"{ratio:.2f} x", ratio >= 1
        yield from probing(own, text, layers, ours=ours, probe=probe)
    yield from quick()
    if torch.cuda.is_available():
        yield from on_cuda(own)


def beside(own: language_training.Setting, text: language_training.Text, layers: int) -> tuple[float, float, float]:
    """Seconds a step and seed of the plain loop over ours, taken in turn, each at its best; ours; and of a probe."""
    (ours, model), theirs = together(own, text, layers), plain(own, text, layers)
    best = {"ours": float("inf"), "theirs": float("inf")}
    for number in range(4):
        for name, step, models in (("ours", ours, len(SEEDS)), ("theirs", theirs, 1)):
            begun = time.perf_counter()
            step(number)
            best[name] = min(best[name], (time.perf_counter() - begun) / models)
    few = replace(text, valid=text.valid[:, : 20 * text.length + 1])
    with torch.no_grad():
        begun = time.perf_counter()
        language_training.validation(model, few)
        probe = (time.perf_counter() - begun) * text.valid.numel() / few.valid.numel() / len(SEEDS)
    return best["theirs"] / best["ours"], best["ours"], probe


def probing(
    own: language_training.Setting, text: language_training.Text, layers: int, *, ours: float, probe: float
) -> Iterator[Row]:
    """What probing takes of the training time, by the policy that is the default on the CPU, and every 1,000 steps."""
    for name, policy in (("default policy", replace(own, every=None)), ("every 1,000 steps", own)):
        share = len(language_training.moments(policy, text)) * probe / (own.steps * ours)
        asked, met = ("< 5 %", share < 0.05) if policy.every is None else ("–", True)
        yield f"probing, {layers} layer(s), CPU, {name}: share of the training time", asked, f"{100 * share:.1f} %", met


def quick() -> Iterator[Row]:
    """The share of probing in the quick preset of `entropy-text`, as it runs."""
    config = entropy_text.STUDY.presets["quick"].config
    text = language_training.read_text(config, Context(SEEDS))
    _, ours, probe = beside(config, text, 1)
    share = len(language_training.moments(config, text)) * probe / (config.steps * ours)
    yield "probing, entropy-text at quick, 31 times: share of the training time", "–", f"{100 * share:.1f} %", True


def on_cuda(own: language_training.Setting) -> Iterator[Row]:
    """Milliseconds a step and seed, three seeds together, beside what its bytes and operations cost at the ceilings."""
    text = language_training.read_text(own, Context(SEEDS, "cuda"))
    bandwidth, products = ceilings()
    yield f"the card's ceilings: {bandwidth / 1e12:.2f} TB/s, {products / 1e12:.0f} TFLOP/s in bf16", "–", "", True
    for layers, asked in ASKED.items():
        with _products(own.precision):
            step, model = together(own, text, layers)
            for number in range(20):
                step(number)
            begun = synchronised()
            for number in range(300):
                step(number)
            took = (synchronised() - begun) / 300
        moved, operations = work(model, own, text.types)
        floor = moved / bandwidth + operations / products
        ms = 1e3 * took / len(SEEDS)
        yield (
            f"a step and seed on text, {layers} layer(s), three seeds, CUDA",
            f"≤ {asked} ms",
            f"{ms:.3f} ms",
            ms <= asked,
        )
        words = f"{moved / 1e9:.2f} GB, {operations / 1e9:.0f} GFLOP a step: {1e3 * floor:.2f} ms at the ceilings"
        yield f"    {words}; ours over it", "–", f"{took / floor:.2f} x", True


def work(model: Decoder, own: language_training.Setting, types: int) -> tuple[float, float]:
    """Bytes and operations that one step of all seeds must move and do.

    Adam reads parameter, gradient and moments and writes all but the gradient (28 bytes); gradients are written, and
    read for their norm (8); weights are read and written as bf16 (6). Logits of bf16 are written, read for their sum,
    turned into their excess and read by two products (12). A weight in a product costs 6 operations a token.
    """
    tokens = own.batch * own.length * len(SEEDS)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.embedding.numel()
    moved = 36 * parameters + 6 * (parameters - embedding) + 12 * tokens * types
    return moved, 6 * tokens / len(SEEDS) * (parameters - embedding)


def ceilings() -> tuple[float, float]:
    """Bytes a second of a copy of 2 GiB, and operations a second of a product of 8,192 x 8,192 in bf16."""
    big = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    found = []
    for call, amount in ((big.clone, 2.0 * big.numel()), (lambda: square @ square, 2.0 * 8192**3)):
        call()
        begun = synchronised()
        for _ in range(20):
            call()
        found.append(20 * amount / (synchronised() - begun))
    return found[0], found[1]
