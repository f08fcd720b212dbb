"""Watch a model in a training loop of your own: nanoGPT's attention, and one line in the loop."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import joma

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
TOKENS, LENGTH, WIDTH, HEADS = 16, 24, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.c_attn, self.c_proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ln_2, self.c_fc, self.c_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.lm_head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        return self.lm_head(self.h(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]))


def batch(size):
    """Noise, but every token equals the first one of its sequence with probability 2/3."""
    noise = torch.randint(TOKENS, (size, LENGTH))
    return torch.where(torch.rand(size, LENGTH) < 2 / 3, noise[:, :1], noise)


def log(scalars, step):  # instead, `log=` takes a SummaryWriter, `wandb`, `mlflow`, `trackio`, or a list of them
    print(f"step {step}: {scalars['attention_entropy/h.1']:.3f} nats in layer 1")


torch.manual_seed(0)
model = GPT()
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
recorder = joma.watch.Recorder(model, batch(8), at=20, measures=["entropy", "sink_mass"], log=log)
for step in range(161):
    recorder(step)  # probes at the steps that are due
    tokens = batch(32)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
print(recorder)
recorder.plot().savefig(OUT / "plain_loop.png")
