"""One padded batch through every front end: the same mean entropies, those of the sequences one by one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from joma.watch import Recorder, attention, hf, lightning
from watch.test_rows_models import decoder, encoder_decoder, pad, sequences, sides_call
from watch.test_rows_models import mask as padding_mask

PARTS = sequences([2, 7, 4])
BATCHES = {
    "decoder": {"input_ids": pad(PARTS, "right"), "attention_mask": padding_mask(PARTS, "right")},
    "encoder-decoder": sides_call([2, 7], [5, 3], "labels", "right")[0],
}
MODELS = {"decoder": lambda: decoder("neox"), "encoder-decoder": lambda: encoder_decoder("t5")}


class Wrapped(LightningModule):
    """A module without `forward`: its training step calls the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.model(**batch).logits.sum() * 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the examples of a batch, for a data loader that does not change them."""
    return [{name: values[index] for name, values in batch.items()} for index in range(len(batch["input_ids"]))]


def by_trainer(model: nn.Module, batch: dict[str, Tensor], path: Path) -> np.ndarray:
    callback = hf.EntropyCallback(at=(0,), ranks=False)
    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        str(path), max_steps=1, per_device_train_batch_size=len(batch["input_ids"]), learning_rate=0.0, **options
    )
    examples = [{"labels": example["input_ids"], **example} for example in rows_of(batch)]
    Trainer(model, arguments, train_dataset=examples, callbacks=[callback]).train()
    return callback.trajectory.entropy.sel(step=0).values


def by_lightning(model: nn.Module, batch: dict[str, Tensor], path: Path) -> np.ndarray:
    callback = lightning.EntropyCallback(at=(0,), ranks=False)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": path}
    loader = DataLoader(rows_of(batch), batch_size=len(batch["input_ids"]))  # type: ignore[arg-type]
    LightningTrainer(max_steps=1, callbacks=[callback], **options).fit(Wrapped(model), loader)
    return callback.trajectory.entropy.sel(step=0).values


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", BATCHES)
def test_every_front_end_counts_the_same_rows(kind: str, tmp_path: Path) -> None:
    model, batch = copy.deepcopy(MODELS[kind]()), BATCHES[kind]
    with torch.no_grad(), attention(model) as recording:
        model(**batch)
    expected = recording.entropy.isel({"pass": 0}).values
    recorder = Recorder(model, batch, ranks=False)
    recorder(0)
    entropies = {
        "Recorder": recorder.dataset().entropy.sel(step=0).values,
        "Trainer": by_trainer(model, batch, tmp_path),
        "Lightning": by_lightning(model, batch, tmp_path),
    }
    for name, entropy in entropies.items():
        np.testing.assert_allclose(entropy, expected, atol=1e-6, rtol=0, err_msg=name)
    with torch.no_grad(), attention(model, rows="all") as recording:
        model(**batch)
    assert np.abs(recording.entropy.isel({"pass": 0}).values - expected).max() > 0.1, "padding makes a difference"
