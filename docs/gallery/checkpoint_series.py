"""Study a training afterwards, from its saved checkpoints: audit and measure them all, and write a page about them."""

import sys
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from joma.report.probe import save
from joma.watch import Checkpoints
from joma.watch.probing import probe

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
TEXT = "the cat sat on the mat, the dog sat on the log, and the cat saw the dog. " * 40
LENGTH, STEPS, SAVED = 32, 80, (0, 5, 10, 20, 40, 80)

torch.manual_seed(0)
config = GPTNeoXConfig(
    vocab_size=256,  # bytes: without a tokenizer beside the weights, a probe reads its text byte by byte
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPTNeoXForCausalLM(config)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
text = torch.tensor(list(TEXT.encode()))
for step in range(STEPS + 1):
    if step in SAVED:
        model.save_pretrained(OUT / "series" / f"checkpoint-{step}")
    start = torch.randint(len(text) - LENGTH, (16, 1))
    tokens = text[start + torch.arange(LENGTH)]
    optimiser.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimiser.step()

series = Checkpoints(OUT / "series")  # a folder here, or a repository of the Hugging Face hub with its revisions
result = probe(series, text=TEXT)
for fault in result.audit.faults:  # such as a checkpoint whose weights are NaN, or that two steps share
    print(fault)
print(result.data.entropy.mean("head").to_pandas().round(3))  # a row per step, a column per layer
page = save(result.data, result.audit.faults, OUT / "probe")  # tables and figures on one page, and the data
print(f"written: {page}; the shell has the same: joma probe {series.source}")
