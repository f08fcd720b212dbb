"""The callback in Lightning's Trainer, under both names of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning import pytorch as lightning
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import joma
from joma.arguments import InputError, StateError
from joma.watch import ProbeFailed
from joma.watch.lightning import EntropyCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
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


def fit(
    path: Path, callbacks: list[Any], framework: Any = lightning, *, module: Any = None, **options: Any
) -> tuple[Any, KeepingLogger]:
    logger = KeepingLogger(path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = framework.Trainer(max_steps=5, accelerator="cpu", logger=logger, callbacks=callbacks, **quiet, **options)
    module = small_module(framework) if module is None else module
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


class StepOnly(lightning.LightningModule):
    """A module without `forward`, which logs and counts in its steps; `manual` optimises by itself."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not manual
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.loss = torchmetrics.MeanMetric()
        self.calls: list[tuple[bool, bool]] = []
        self.results: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
        loss = F.mse_loss(self.block(batch[0]), batch[1])
        self.loss(loss.detach())
        self.log("loss", loss)
        self.log_dict({"again": loss, "index": float(batch_idx)})
        self.logger.log_metrics({"direct": loss.item()}, step=len(self.calls))
        if not self.automatic_optimization:
            optimiser = self.optimizers()
            optimiser.zero_grad()
            self.manual_backward(loss)
            optimiser.step()
        return loss

    def on_train_end(self) -> None:
        self.results.append(float(self.loss.compute()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class WithValidation(StepOnly):
    """A module with manual optimisation and a step that does not optimise."""

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.block(batch[0]), batch[1])


def fit_module(path: Path, module: Any, callbacks: list[Any]) -> KeepingLogger:
    logger = KeepingLogger(path)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=logger, callbacks=callbacks, log_every_n_steps=1, **quiet
    )
    trainer.fit(module, DataLoader(DATA, batch_size=4))
    return logger


def test_a_module_without_forward_runs_its_training_step_and_logs_nothing_in_it(tmp_path: Path) -> None:
    plain, watched, callback = StepOnly(), StepOnly(), EntropyCallback(at=1)
    expected = fit_module(tmp_path, plain, []).logs
    logged = fit_module(tmp_path, watched, [callback]).logs
    assert callback.trajectory.step.values.tolist() == [0, 1, 2, 3]
    assert np.isfinite(callback.trajectory.entropy).all()
    probes = [logs for logs in logged if any("attention_entropy" in key for key in logs[1])]
    others = [(step, logs) for step, logs in logged if (step, logs) not in probes]
    assert len(probes) == 4
    assert [logs for _, logs in others] == [logs for _, logs in expected]
    assert watched.results == plain.results  # the metric of the training has not counted the probes
    assert watched.calls.count((False, False)) == 4
    assert watched.calls.count((True, True)) == 3
    for parameter, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert "log" not in vars(watched)


def test_manual_optimisation_never_steps_in_a_probe(tmp_path: Path) -> None:
    plain, watched = StepOnly(manual=True), StepOnly(manual=True)
    fit_module(tmp_path, plain, [])
    message = r"a probe failed at step 0, .*: `module` must be one that can be run without training it.*pass `forward="
    with pytest.warns(ProbeFailed, match=message) as caught:
        fit_module(tmp_path, watched, [EntropyCallback(at=1)])
    assert len([warning for warning in caught if warning.category is ProbeFailed]) == 1
    for parameter, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(parameter, other)
    callback, validated = EntropyCallback(at=1), WithValidation(manual=True)
    fit_module(tmp_path, validated, [callback])
    assert callback.trajectory.step.values.tolist() == [0, 1, 2, 3]
    assert validated.calls == [(True, True)] * 3
    for parameter, other in zip(plain.parameters(), validated.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_forward_that_does_not_take_the_batch_is_not_called(tmp_path: Path) -> None:
    class TwoInputs(StepOnly):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            raise AssertionError(f"needs two arguments, not {x} and {scale}")

    module, callback = TwoInputs(), EntropyCallback(at=1)
    fit_module(tmp_path, module, [callback])
    assert module.calls.count((False, False)) == 4


def test_what_fails_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    def forward(module: nn.Module, batch: Any) -> None:
        raise RuntimeError(f"no such batch for {type(module).__name__}: {len(batch)}")

    module = StepOnly()
    with pytest.warns(ProbeFailed, match="no such batch"):
        fit_module(tmp_path, module, [EntropyCallback(forward=forward, at=1)])
    assert len(module.calls) == 3
    with pytest.warns(ProbeFailed, match="preparing the probes failed at step 0, .*`ranks` must be a pattern"):
        fit_module(tmp_path, StepOnly(), [EntropyCallback(ranks="nothing", at=1)])
    with pytest.raises(RuntimeError, match="no such batch"):
        fit_module(tmp_path, StepOnly(), [EntropyCallback(forward=forward, at=1, strict=True)])


def test_gradients_and_keys_reach_tensorboard(tmp_path: Path) -> None:
    logger = lightning.loggers.TensorBoardLogger(tmp_path, name="", version="")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callback = EntropyCallback(at=2, gradients=True, residual=True, blocks="^block$", summary=True)
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", logger=logger, callbacks=[callback], **quiet)
    trainer.fit(small_module(lightning), DataLoader(DATA, batch_size=4))
    logger.experiment.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    for key in ("attention_entropy/block.self_attn", "stable_rank/block", "residual_rms/block"):
        assert [event.step for event in events.Scalars(key)] == [0, 2, 3]
    assert [event.step for event in events.Scalars("gradient_norm/block")] == [2, 3]
    norms = callback.trajectory.gradient_norm.sel(block="block")
    assert np.isnan(norms.values[0])
    assert (norms.values[1:] > 0).all()


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


def test_the_mask_in_a_batch_of_three_counts(tmp_path):
    class Masked(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            return self.block(x, src_key_padding_mask=padding)

        def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            return F.mse_loss(self(batch[0], batch[1]), batch[2])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    padding = torch.arange(5).expand(12, 5) >= 2
    data = DataLoader(TensorDataset(DATA.tensors[0], padding, DATA.tensors[1]), batch_size=4)
    callback = EntropyCallback(at=[0], ranks=False)
    trainer = lightning.Trainer(
        max_steps=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    module = Masked()
    trainer.fit(module, data)
    with torch.no_grad(), joma.watch.attention(module.eval()) as seen:
        module(DATA.tensors[0][:4], padding[:4])
    np.testing.assert_allclose(callback.trajectory.entropy[0].values, seen.entropy[0].values, atol=1e-6)
    assert float(callback.trajectory.entropy[0].max()) <= np.log(2) + 1e-6  # two tokens of five are real


def test_a_module_without_attention_is_told_so(tmp_path: Path) -> None:
    class Plain(lightning.LightningModule):
        """A module of linear layers, which calls them in its step."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 8)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.mse_loss(self.outer(self.inner(batch[0]).relu()), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    message = "`model` must compute attention in its forward pass, got Plain, of which no module was called that may"
    with pytest.warns(ProbeFailed, match=message):
        fit(tmp_path, [EntropyCallback()], module=Plain())
