"""Watch a LightningModule that has no `forward`: the callback runs its `training_step`."""

import sys
from pathlib import Path

import lightning
import torch
from torch import nn

from joma.watch.lightning import EntropyCallback

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
WIDTH, LENGTH = 32, 12


class FindTheLargest(lightning.LightningModule):
    """An encoder that returns the largest number of a sequence: every position must look for it."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=64, batch_first=True, dropout=0.0)
        self.embed = nn.Linear(1, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.answer = nn.Linear(WIDTH, 1)

    def training_step(self, batch, _):
        (numbers,) = batch
        answers = self.answer(self.encoder(self.embed(numbers[..., None])))[..., 0]
        return nn.functional.mse_loss(answers, numbers.max(-1, keepdim=True).values.expand_as(answers))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0, verbose=False)
numbers = torch.utils.data.TensorDataset(torch.randn(64 * 150, LENGTH))
loader = torch.utils.data.DataLoader(numbers, batch_size=64)
callback = EntropyCallback(at=15, ranks="linear1")  # every 15 steps; stable ranks of the MLPs' first matrices
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    callbacks=[callback],
    logger=False,  # with any logger of Lightning, every probe is logged to it
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(FindTheLargest(), loader)

print(callback.recorder)
callback.recorder.plot().savefig(OUT / "lightning_module.png")
