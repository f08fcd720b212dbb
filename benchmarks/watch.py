"""What watching costs: a forward pass inside `joma.watch.attention` over a plain one, and a callback's share of a run.

On CUDA, where there is one, in bfloat16 and at the size of a Pythia-160M as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.timing import time_ratio
from benchmarks.training import synchronised
from joma.watch import Recorder, attention
from joma.watch.hf import EntropyCallback


def rows() -> Iterator[Row]:
    """Yield (what, asked, reached, met)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tiny model on several threads times little but their quarrel over the cores
    yield share()
    torch.set_num_threads(threads)
    yield forward("6 x 512, 2 x 512 tokens, CPU", _neox(6, 512, 8), 2, 512)
    if torch.cuda.is_available():
        pythia = _neox(12, 768, 12, vocabulary=50_304).to("cuda", torch.bfloat16)
        for batch, length in ((8, 512), (4, 2048)):
            yield forward(f"12 x 768, {batch} x {length}, CUDA, bf16", pythia, batch, length)
        yield share("cuda")


def forward(what: str, model: nn.Module, batch: int, length: int) -> Row:
    """The time of a forward pass inside the context over that of a plain one, in turn, each at its best."""
    device = next(model.parameters()).device
    tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def plain() -> None:
        model(input_ids=tokens, use_cache=False)

    def watched() -> None:
        with attention(model):
            plain()

    with torch.no_grad():
        ratio = time_ratio(watched, plain, repeats=7, clock=synchronised)
    return f"forward pass inside watch.attention over plain: {what}", "≤ 2.2 x", f"{ratio:.2f} x", ratio <= 2.2


def share(device: str = "cpu") -> Row:
    """The callback's share of a training of 1,000 steps, all its options at their default.

    On CUDA a probe like the first compiles our kernel beforehand, once a machine, and loads the model's own, which the
    first step would else do.
    """
    from transformers import Trainer, TrainingArguments

    class Timed(EntropyCallback):
        spent = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._time(super().on_train_begin, *args, **kwargs)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._time(super().on_step_end, *args, **kwargs)

        def _time(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            begun = synchronised()
            event(*args, **kwargs)
            self.spent += synchronised() - begun

    tokens = torch.randint(256, (256, 64), generator=torch.Generator().manual_seed(0))
    examples: list[dict[str, Tensor]] = [{"input_ids": each, "labels": each} for each in tokens]
    callback = Timed()
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=1000,
            per_device_train_batch_size=8,
            report_to=[],
            logging_steps=100,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = Trainer(model=_neox(2, 64, 4), args=args, train_dataset=examples, callbacks=[callback])  # pyright: ignore[reportArgumentType]
        for event in [type(each) for each in trainer.callback_handler.callbacks if "Printer" in type(each).__name__]:
            trainer.remove_callback(event)
        if device != "cpu":
            Recorder(trainer.model, {"input_ids": tokens[:4], "labels": tokens[:4]})(0)  # pyright: ignore[reportArgumentType]
        begun = synchronised()
        trainer.train()
        part = callback.spent / (synchronised() - begun)
    probes = callback.trajectory.sizes["step"]
    what = f"EntropyCallback: share of 1,000 steps of a GPT-NeoX, 2 x 64, {device}, {probes} probes"
    return what, "< 1 %", f"{100 * part:.2f} %", part < 0.01


def _neox(layers: int, width: int, heads: int, *, vocabulary: int = 256) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=2048,
    )
    return GPTNeoXForCausalLM(config).eval()
