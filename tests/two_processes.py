"""Two processes that train one model together over gloo on loopback; each writes what it has measured as JSON.

Run as `python two_processes.py PORT FOLDER`: one process imports everything, which takes most of the time, and forks
the other; all scenarios share this start. Both end by themselves after `LIMIT` seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

COUNT, LIMIT = 2, 100


class Layer(nn.Module):
    """Attention with two heads and an MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.fc2(F.relu(self.fc1(x)))


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * 3
        for layer in self.layers:
            x = layer(x)
        return x


def batch(rank: int) -> Tensor:
    """Return the batch of a process: the second one has fewer and shorter sequences."""
    shape = (3, 9) if rank == 0 else (1, 4)
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(rank))


def sharded() -> Model:
    """Return a model with `fully_shard` on each layer and on the whole."""
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def probed(recorder: Any, steps: int = 1) -> dict[str, Any]:
    """Return the scalars, the entropies, the ranks, the names and the warnings of a recorder's probes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scalars = [recorder(step) for step in range(steps)]
    messages = [str(warning.message) for warning in caught if "Probe" in warning.category.__name__]
    result: dict[str, Any] = {"scalars": scalars, "warnings": messages}
    if any(scalars):
        dataset = recorder.dataset()
        result |= {str(name): variable.values.tolist() for name, variable in dataset.variables.items()}
    return result


def one_rank_fails(rank: int) -> dict[str, Any]:
    """Probe three times; the first time the second process fails, the second time the first one does."""
    from joma.watch import Recorder

    failing = iter([1, 0, None])

    def forward(model: nn.Module, tokens: Tensor) -> None:
        if rank == next(failing):
            raise ValueError(f"no batch on {rank}")
        model(tokens)

    return probed(Recorder(DistributedDataParallel(Model()), batch(rank), at=1, forward=forward, ranks=False), steps=3)


def trained(rank: int, *, watched: bool) -> list[float]:
    """Return the parameters after four steps of FSDP2, with a probe after every backward pass and every step."""
    from joma.watch import Recorder

    model = sharded()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, batch(rank), at=1, patience=99)
    for step in range(4):
        optimiser.zero_grad()
        model(batch(rank + 2 * step)).square().mean().backward()
        if watched:
            recorder(2 * step)
        optimiser.step()
        if watched:
            recorder(2 * step + 1)
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()]).tolist()


def hugging_face(rank: int, folder: Path) -> dict[str, Any]:
    """Train with the Trainer, which wraps the model in DDP, and return the trajectory and the number of logs."""
    from transformers import Trainer, TrainingArguments

    from joma.watch.hf import EntropyCallback
    from tiny_models import neox

    torch.manual_seed(0)
    examples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(12, (16, 6))]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    callback = EntropyCallback(at=1, ranks=False)
    trainer = Trainer(model=neox(), args=arguments, train_dataset=examples, callbacks=[callback])  # type: ignore[arg-type]
    trainer.train()
    trajectory = callback.trajectory
    wrapped = type(trainer.model_wrapped).__name__
    del rank
    return {
        "wrapped": wrapped,
        "entropy": trajectory.entropy.values.tolist(),
        "layer": trajectory.layer.values.tolist(),
    }


def main(rank: int, port: str, folder: Path) -> None:
    """Run all scenarios and write their results."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(COUNT)}
    os.environ.update(address, LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    from joma.watch import Recorder

    logged: list[int] = []
    ddp = Recorder(DistributedDataParallel(Model()), batch(rank), patience=99, log=lambda _, step: logged.append(step))
    results = {
        "ddp": probed(ddp),
        "logged": logged,
        "fsdp": probed(Recorder(sharded(), batch(rank), patience=99)),
        "alone": probed(Recorder(Model(), batch(rank), patience=99)),
        "failing": one_rank_fails(rank),
        "trained": trained(rank, watched=False),
        "trained while watched": trained(rank, watched=True),
        "hugging face": hugging_face(rank, folder),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    from transformers import Trainer  # before the fork, for both processes

    from joma.watch import Recorder, hf

    loaded = (Trainer, Recorder, hf.EntropyCallback)
    second = os.fork()
    signal.alarm(LIMIT)
    main(0 if second else 1, sys.argv[1], Path(sys.argv[2]))
    if second:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
