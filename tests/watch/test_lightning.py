"""The callback in Lightning's Trainer, under both names of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import pytorch as lightning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import joma
from joma.arguments import InputError, StateError
from joma.watch.lightning import EntropyCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]
DATA = TensorDataset(
    torch.randn(12, 5, 8, generator=torch.Generator().manual_seed(0)),
    torch.arange(12.0)[:, None, None].expand(12, 5, 8),
)


def small_module(framework: Any) -> Any:
    """Return a small LightningModule of either package."""

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    return Module()


class KeepingLogger(lightning.loggers.CSVLogger):
    """A logger that keeps the metrics."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.logs: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logs.append((int(step or 0), dict(metrics)))


def fit(path: Path, callbacks: list[Any], framework: Any = lightning, **options: Any) -> tuple[Any, KeepingLogger]:
    logger = KeepingLogger(path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = framework.Trainer(max_steps=5, accelerator="cpu", logger=logger, callbacks=callbacks, **quiet, **options)
    module = small_module(framework)
    torch.manual_seed(4)
    trainer.fit(module, DataLoader(DATA, batch_size=4, shuffle=True))
    return module, logger


@pytest.fixture(autouse=True)
def _warnings_given_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joma.watch.switches, "_warned", {"fast path", "compiled"})


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_every_probe_reaches_the_loggers_at_its_step(name: str, tmp_path: Path) -> None:
    framework = pytest.importorskip(name)
    callback = EntropyCallback(at=(0, 1, 3))
    _, logger = fit(tmp_path, [callback], framework)
    trajectory = callback.trajectory
    assert trajectory.step.values.tolist() == [0, 1, 3, 5]
    assert trajectory.layer.values.tolist() == ["block.self_attn"]
    logged = {step: logs for step, logs in logger.logs if "attention_entropy/block.self_attn" in logs}
    assert sorted(logged) == [0, 1, 3, 5]
    for step, logs in logged.items():
        assert logs["attention_entropy/block.self_attn"] == pytest.approx(
            float(trajectory.entropy.sel(step=step).mean())
        )
    assert "stable_rank/block.linear1" in logged[0]
    callback.save(tmp_path / "watch.nc")
    assert joma.open_run(tmp_path / "watch.nc").entropy.equals(trajectory.entropy)


def test_training_ends_with_the_same_bits_and_accumulation_does_not_probe_twice(tmp_path: Path) -> None:
    callback = EntropyCallback(at=lambda _: True)
    plain, _ = fit(tmp_path, [], accumulate_grad_batches=2)
    watched, _ = fit(tmp_path, [callback], accumulate_grad_batches=2)
    assert callback.trajectory.step.values.tolist() == [0, 1, 2, 3, 4, 5]
    for expected, parameter in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_a_custom_batch_and_a_custom_forward(tmp_path: Path) -> None:
    training_flags = []

    def forward(module: nn.Module, batch: dict[str, Tensor]) -> object:
        training_flags.append(module.training)
        return module(batch["x"])

    fit(tmp_path, [EntropyCallback({"x": DATA[:3][0]}, forward=forward, at=(0, 2))])
    assert training_flags == [False] * 3


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"`options` must be one of at, .*, got 'rank'; did you mean 'ranks'"):
        EntropyCallback(rank=True)
    with pytest.raises(StateError, match="before training has begun"):
        _ = EntropyCallback().trajectory
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "joma.watch.lightning")
    monkeypatch.delattr(joma.watch, "lightning")
    with pytest.raises(InputError, match=r"pip install 'joma\[lightning\]'"):
        _ = joma.watch.lightning
