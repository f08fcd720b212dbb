"""Watch a model that a Hugging Face Trainer trains: one callback, and its table and figure afterwards."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from joma.watch.hf import EntropyCallback

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
TOKENS, HALF = 12, 8


class Copies(torch.utils.data.Dataset):
    """Random tokens, twice in a row: to predict the second half, attention must find the first."""

    def __init__(self, count):
        self.halves = torch.randint(TOKENS, (count, HALF), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.halves)

    def __getitem__(self, index):
        tokens = self.halves[index].repeat(2)
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=TOKENS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=2 * HALF,
)
model = LlamaForCausalLM(config)
callback = EntropyCallback(at=20, measures=["entropy", "sink_mass"])  # every 20 steps
arguments = TrainingArguments(
    output_dir=str(OUT / "trainer"),
    max_steps=120,
    per_device_train_batch_size=32,
    learning_rate=5e-3,
    logging_steps=60,
    report_to="none",  # the callback logs wherever the Trainer logs: "tensorboard", "wandb", "mlflow", "trackio"
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Copies(1024), callbacks=[callback])
trainer.train()

print(callback.recorder)  # a table
print(callback.trajectory)  # the same numbers as an xarray.Dataset, with every head
callback.recorder.plot().savefig(OUT / "trainer.png")
