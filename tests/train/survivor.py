"""Train a small model, be killed at random moments, go on, and end with the bits of a run that was never killed.

Run by `test_survival.py` in a process of its own: `python survivor.py FOLDER KILLS`. Every life is a forked process, so
that only the first pays for importing torch. The last line printed is a JSON document.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from joma.train import Optimiser, Record, Saving, fit

STEPS = 400


class Model(nn.Module):
    """Two layers, three seeds, float32."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(0.3 * torch.randn(3, 8, 16, generator=generator))
        self.b = nn.Parameter(0.3 * torch.randn(3, 16, 4, generator=generator))


def train(folder):
    """Minibatches by step from a fixed pool; Adam, clipping and a record every 20 steps."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(50, 32, 8, generator=generator), torch.randint(4, (50, 32), generator=generator)

    def loss(model, step):
        h = torch.relu(x[step % 50] @ model.a) @ model.b
        target = y[step % 50].expand(3, -1)
        return nn.functional.cross_entropy(h.mT, target, reduction="none").mean(-1)

    model = Model()
    run = fit(
        model,
        loss,
        optimiser=Optimiser("adam", 0.01, weight_decay=1e-3, clip=0.5),
        steps=STEPS,
        record=Record(lambda model, _: {"a": model.a}, at=range(0, STEPS + 1, 20), dims={"a": ("row", "column")}),
        saving=Saving(folder, range(0, STEPS, 7)),
    )
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {**parameters, "loss": torch.tensor(run.loss.values), "recorded": torch.tensor(run.a.values)}


def live(folder, result):
    """One life in a process of its own."""
    child = os.fork()
    if child == 0:
        torch.save(train(folder), result)
        os._exit(0)
    return child


def main(folder, kills):
    """Kill `kills` lives, each at a random moment, then let one end; compare."""
    whole, torn = folder / "whole.pt", folder / "torn.pt"
    begun = time.monotonic()
    os.waitpid(live(folder / "whole", whole), 0)
    length = time.monotonic() - begun
    chance, killed = random.Random(0), 0
    while killed < kills:
        child = live(folder / "torn", torn)
        time.sleep(chance.uniform(0, 1.5 * length / kills))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if torn.exists():  # it got to the end before it could be killed: begin again
            torn.unlink()
            for file in (folder / "torn").iterdir():
                file.unlink()
    os.waitpid(live(folder / "torn", torn), 0)
    first, second = (torch.load(file, weights_only=True) for file in (whole, torn))
    same = {name: bool(torch.equal(first[name], second[name])) for name in first}
    print(json.dumps({"killed": killed, "same": same, "files": sorted(os.listdir(folder / "torn"))}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
