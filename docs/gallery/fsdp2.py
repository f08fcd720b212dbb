"""Watch a model that FSDP2 shards over two processes: each probes its own batch, the result is of both."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import joma

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
WIDTH, LENGTH, PROCESSES = 32, 16, 2


def train(rank, rendezvous):
    """Train on one of the processes, all on this machine; `torchrun` starts them in earnest."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)  # the same weights on all processes
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, dropout=0.0) for _ in range(2)]
    model = nn.Sequential(*layers)
    for module in (*layers, model):
        fully_shard(module)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(rank)  # other data on each process
    recorder = joma.watch.Recorder(model, torch.randn(8, LENGTH, WIDTH, generator=random), at=10)
    for step in range(61):
        recorder(step)  # on every process: sharded weights are gathered one at a time
        x = torch.randn(16, LENGTH, WIDTH, generator=random)
        largest = x.gather(1, x[:, :, :1].argmax(1, keepdim=True).expand(-1, 1, WIDTH))
        loss = nn.functional.mse_loss(model(x), largest.expand_as(x))  # all look for the largest first coordinate
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    if rank == 0:  # all processes have the same numbers
        print(recorder)
        recorder.plot().savefig(OUT / "fsdp2.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"  # where the processes find each other
        torch.multiprocessing.start_processes(train, (rendezvous,), nprocs=PROCESSES, start_method="fork")
