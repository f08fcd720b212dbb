"""The cost of watching: of a forward pass inside `joma.watch.attention`, and of a callback during training.

With CUDA also in bfloat16 and at the size of Pythia-160M.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.timing import synchronised, time_ratio
from joma.probes.summary import MEASURES
from joma.watch import Recorder, attention
from joma.watch.hf import EntropyCallback


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tiny model on several threads would time mostly their contention
    yield callback_share()
    torch.set_num_threads(threads)
    yield forward_ratio("6 x 512, 2 x 512 tokens, CPU", _neox(6, 512, 8), 2, 512)
    yield measures_ratio("6 x 512, 2 x 512 tokens, CPU", _neox(6, 512, 8), 2, 512)
    if torch.cuda.is_available():
        pythia = _neox(12, 768, 12, vocabulary=50_304).to("cuda", torch.bfloat16)
        for batch, length in ((8, 512), (4, 2048)):
            yield forward_ratio(f"12 x 768, {batch} x {length}, CUDA, bf16", pythia, batch, length)
        yield measures_ratio("12 x 768, 4 x 2048, CUDA, bf16", pythia, 4, 2048)
        yield callback_share("cuda")


def forward_ratio(what: str, model: nn.Module, batch: int, length: int) -> Row:
    """Measure the time of a forward pass inside the context relative to a plain one."""
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


def measures_ratio(what: str, model: nn.Module, batch: int, length: int) -> Row:
    """Measure the time of a watched forward pass with all measures relative to one with entropy alone."""
    device = next(model.parameters()).device
    tokens = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def watched(measures: Sequence[str]) -> None:
        with attention(model, measures=measures):
            model(input_ids=tokens, use_cache=False)

    with torch.no_grad():
        every, alone = partial(watched, tuple(MEASURES)), partial(watched, ("entropy",))
        ratio = time_ratio(every, alone, repeats=7, clock=synchronised)
    target, met = ("≤ 1.6 x", ratio <= 1.6) if device.type == "cuda" else ("–", True)
    return f"watch.attention, all measures over entropy alone: {what}", target, f"{ratio:.2f} x", met


class TimedCallback(EntropyCallback):
    """The callback with default options; `seconds` is the time that it has taken so far."""

    seconds = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._time(super().on_train_begin, *args, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._time(super().on_step_end, *args, **kwargs)

    def _time(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Add the time of an event; only a probe leaves work on the device, for which the clock waits."""
        before, start = self._probes(), synchronised()
        event(*args, **kwargs)
        end = perf_counter()
        self.seconds += (synchronised() if self._probes() > before else end) - start

    def _probes(self) -> int:
        return 0 if self.recorder is None else len(self.recorder._probes)


def callback_share(device: str = "cpu") -> Row:
    """Measure the callback's share of the time of a training of 1,000 steps.

    On CUDA a probe before the training compiles our kernel, once per machine, and loads the model's kernels; otherwise
    the first probe would include both.
    """
    tokens = torch.randint(256, (256, 64), generator=torch.Generator().manual_seed(0))
    callback = TimedCallback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, tokens, callback, device)
        if device != "cpu":
            Recorder(trainer.model, {"input_ids": tokens[:4], "labels": tokens[:4]})(0)
        start = synchronised()
        trainer.train()
        share = callback.seconds / (synchronised() - start)
    probes = callback.trajectory.sizes["step"]
    what = f"EntropyCallback: share of 1,000 steps of a GPT-NeoX, 2 x 64, {device}, {probes} probes"
    return what, "< 1 %", f"{100 * share:.2f} %", share < 0.01


def _trainer(folder: str, tokens: Tensor, callback: EntropyCallback, device: str) -> Any:
    """Return a silent Trainer of a small GPT-NeoX."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    args = TrainingArguments(
        output_dir=folder,
        max_steps=1000,
        per_device_train_batch_size=8,
        report_to=[],
        logging_steps=100,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )
    examples: Any = [{"input_ids": sequence, "labels": sequence} for sequence in tokens]
    trainer = Trainer(model=_neox(2, 64, 4), args=args, train_dataset=examples, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    return trainer


def _neox(layers: int, width: int, heads: int, *, vocabulary: int = 256) -> Any:
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
