"""The norms of gradients are one quantity in every front end: of the whole accumulated batch, before clipping.

A step of every training here sees all examples, so that its gradient does not depend on their order.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from lightning import pytorch as lightning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import joma.watch.hf
import joma.watch.lightning
from joma.probes.summary import MEASURES
from joma.watch import ProbeFailed, Recorder
from joma.watch.hidden_states import RANKS

STEPS, EXAMPLES, RATE = 5, 8, 0.5
MAX_NORM = 0.1  # far below the norms, so that every step is clipped
AT = (0, 2)  # and the last step, which is not due by itself
OPTIONS: dict[str, Any] = {"at": AT, "gradients": True, "ranks": False}
_random = torch.Generator().manual_seed(0)
X, Y = torch.randn(EXAMPLES, 5, 8, generator=_random), 10 * torch.randn(EXAMPLES, 5, 8, generator=_random)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::joma.watch.AttentionSwitched"),
]


class Layers(nn.Module):
    """Two blocks; with labels the result is a dictionary with a loss, as a Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        kwargs = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, **kwargs) for _ in range(2)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x if labels is None else {"loss": F.mse_loss(x, labels), "logits": x}


class Module(lightning.LightningModule):
    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.layers, self.fused = Layers(), fused

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, fused=self.fused)


def expected_norms(*, clipped: bool = True) -> dict[int, list[float]]:
    """Return the norms of each block's gradient at each step of full-batch descent in float64, by autograd alone."""
    model, x, y = Layers().double(), X.double(), Y.double()
    norms: dict[int, list[float]] = {0: [math.nan, math.nan]}
    for step in range(1, STEPS + 1):
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        squares = [gradient.square().sum() for gradient in gradients]
        half = len(squares) // 2  # both blocks have the same parameters
        norms[step] = [torch.stack(part).sum().sqrt().item() for part in (squares[:half], squares[half:])]
        factor = min(1.0, MAX_NORM / math.hypot(*norms[step])) if clipped else 1.0
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * factor * gradient)
    return norms


def check(norms: xr.DataArray, *, clipped: bool = True) -> None:
    """Compare the norms at their steps with those in float64."""
    expected = expected_norms(clipped=clipped)
    for step in norms.step.values.tolist():
        np.testing.assert_allclose(norms.sel(step=step).values, expected[step], rtol=1e-4, err_msg=f"step {step}")


def train_in_a_loop(accumulate: int, scale: float = 1.0) -> xr.DataArray:
    model = Layers()
    recorder = Recorder(model, {"x": X}, **OPTIONS)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    recorder(0)
    for step in range(1, STEPS + 1):
        for x, y in zip(X.chunk(accumulate), Y.chunk(accumulate), strict=True):
            (scale * F.mse_loss(model(x), y) / accumulate).backward()
        recorder.read_gradients(step, always=step == STEPS, scale=scale)
        for parameter in model.parameters():
            parameter.grad /= scale
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimiser.step()
        optimiser.zero_grad()
        recorder(step)
    recorder.probe(STEPS, gradients=False)
    return recorder.dataset().gradient_norm


def train_with_trainer(
    path: Path, accumulate: int, *others: TrainerCallback, max_norm: float = MAX_NORM, kind: type[Trainer] = Trainer
) -> tuple[xr.DataArray, Trainer]:
    model, callback = Layers(), joma.watch.hf.EntropyCallback({"x": X}, **OPTIONS)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    args = TrainingArguments(
        output_dir=str(path),
        max_steps=STEPS,
        per_device_train_batch_size=EXAMPLES // accumulate,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=max_norm,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data: Any = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    constant = torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)
    trainer = kind(
        model=model, args=args, train_dataset=data, callbacks=[*others, callback], optimizers=(optimiser, constant)
    )
    trainer.train()
    return callback.trajectory.gradient_norm, trainer


def train_with_lightning(path: Path, accumulate: int, *, fused: bool = False, **options: Any) -> xr.DataArray:
    callback = joma.watch.lightning.EntropyCallback({"x": X}, forward=lambda module, batch: module(**batch), **OPTIONS)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"gradient_clip_val": MAX_NORM, "max_steps": STEPS, **options}
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
        logger=False,
        default_root_dir=path,
        **options,
        **quiet,
    )
    trainer.fit(Module(fused=fused), DataLoader(TensorDataset(X, Y), batch_size=EXAMPLES // accumulate))
    return callback.trajectory.gradient_norm


@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_front_end_has_the_norms_of_the_whole_batch_before_clipping(tmp_path: Path, accumulate: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProbeFailed)
        by_trainer, _ = train_with_trainer(tmp_path, accumulate)
        trajectories = [by_trainer, train_in_a_loop(accumulate), train_with_lightning(tmp_path, accumulate)]
    for norms in trajectories:
        assert norms.step.values.tolist() == [0, 2, STEPS]
        check(norms)


def test_the_last_step_of_lightning_is_known_from_its_epochs_too(tmp_path: Path) -> None:
    norms = train_with_lightning(tmp_path, 4, max_steps=-1, max_epochs=STEPS)
    assert norms.step.values.tolist() == [0, 2, STEPS]
    check(norms)


def test_a_trainer_that_does_not_clip_is_read_and_its_clipping_is_left_as_it_was(tmp_path: Path) -> None:
    norms, trainer = train_with_trainer(tmp_path, 4, max_norm=0.0)
    check(norms, clipped=False)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


class Stop(TrainerCallback):
    """End the training at a step, before the callbacks after it are called."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, kwargs
        control.should_training_stop = state.global_step >= 4


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_training_that_ends_early_gives_no_warning_and_no_norm_at_its_end(tmp_path: Path, accumulate: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProbeFailed)
        norms, _ = train_with_trainer(tmp_path, accumulate, Stop())
    assert norms.step.values.tolist() == [0, 2, 4]
    check(norms.sel(step=[0, 2]))
    assert np.isnan(norms.sel(step=4)).all()


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


class ScalingTrainer(Trainer):
    """A Trainer that scales its gradients as for float16, while it computes in float32."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.scaler = scaler()
        accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(accelerator._optimizers[0].optimizer)


class Scaling(MixedPrecision):
    """The precision of Lightning that scales gradients, without float16."""

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


def test_the_factor_of_a_gradient_scaler_is_divided_by(tmp_path: Path) -> None:
    check(train_in_a_loop(4, scale=1024.0))
    norms, _ = train_with_trainer(tmp_path, 4, kind=ScalingTrainer)
    check(norms)
    check(train_with_lightning(tmp_path, 4, plugins=[Scaling("16-mixed", "cpu", scaler=scaler())]))
    options = {"plugins": [Scaling("16-mixed", "cpu", scaler=scaler())], "gradient_clip_val": None}
    check(train_with_lightning(tmp_path, 4, fused=True, **options), clipped=False)


def test_norms_that_were_read_for_another_step_do_not_count() -> None:
    model = Layers()
    recorder = Recorder(model, {"x": X}, **{**OPTIONS, "at": 1})
    F.mse_loss(model(X), Y).backward()
    recorder.read_gradients(1)
    model.zero_grad()
    assert not any("gradient" in key for key in recorder(2, gradients=False))


@pytest.mark.parametrize("summary", [False, True])
def test_every_front_end_logs_the_same_keys_at_every_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: bool
) -> None:
    logged: list[dict[str, float]] = []
    options = {"log": lambda scalars, _: logged.append(scalars), "summary": summary, "measures": list(MEASURES)}
    for name, value in {**options, "ranks": "weight$", "residual": True, "activation_ranks": True}.items():
        monkeypatch.setitem(OPTIONS, name, value)
    train_in_a_loop(4)
    train_with_trainer(tmp_path, 4)
    train_with_lightning(tmp_path, 4)
    assert len(logged) == 9
    first, *_ = logged
    for index, scalars in enumerate(logged):  # there is no gradient before the training
        gradients = [] if index % 3 == 0 else ["gradient_norm/layers.0", "gradient_norm/layers.1"]
        assert list(scalars) == [*first, *gradients]
    attention = [f"attention_{name}" for name in MEASURES if name != "effective_tokens"]
    streams = [f"{stream}_{rank}" for stream in ("hidden", "attention_output") for rank in RANKS]
    kinds = [*attention, "residual_rms", "residual_norm", *streams]
    expected = {f"{kind}/layers.{layer}" for kind in kinds for layer in (0, 1)}
    weights = ("",) if summary else (".in_proj_weight", ".out_proj", ".linear1", ".linear2")
    expected |= {f"stable_rank/layers.{layer}{weight}" for layer in (0, 1) for weight in weights}
    expected |= set() if summary else {f"attention_entropy_min/layers.{layer}" for layer in (0, 1)}
    assert set(first) == expected
