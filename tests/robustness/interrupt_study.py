"""A study for the tests of Ctrl-C: a small training run, with one long call of C at a place that a test chooses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import nn

from joma.study import Claim, Context, Drawing, Preset, Study, at_least
from joma.train import Optimiser, checkpoint

FOREVER = 2**31 - 1  # iterations: about a quarter of an hour
LONG_STEP = 5


@dataclass(frozen=True)
class LongCall:
    """One call of C, in which Python handles no signals; the files `call-began` and `call-ended` say how far it is.

    Attributes:
        place: where it is made: in `run`, `step`, `save` or `draw`; nowhere if empty.
        iterations: how long it lasts.
        folder: where the files are.
    """

    place: str = ""
    iterations: int = 0
    folder: str = ""

    def make(self, place: str) -> None:
        """Make the call if this is its place and it was not made before."""
        began, ended = (Path(self.folder) / name for name in ("call-began", "call-ended"))
        if place == self.place and not began.exists():
            began.touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", self.iterations)
            ended.touch()


long_call = LongCall()


@dataclass(frozen=True)
class Config:
    steps: int = 40
    width: int = 16


class Model(nn.Module):
    def __init__(self, seeds: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(seeds, width, width, generator=generator) / width**0.5)


def loss(model: Model, step: torch.Tensor) -> torch.Tensor:
    if int(step) == LONG_STEP:
        long_call.make("step")
    batch = torch.randn(8, model.weight.shape[-1], generator=torch.Generator().manual_seed(int(step)))
    return (batch @ model.weight - batch.roll(1, -1)).square().mean(dim=(1, 2))


def write_slowly(path: Path, content: bytes) -> None:
    long_call.make("save")
    WRITE_BYTES(path, content)


WRITE_BYTES = checkpoint.write_bytes


def run(config: Config, context: Context) -> xr.Dataset:
    long_call.make("run")
    checkpoint.write_bytes = write_slowly
    model = Model(len(context.seeds), config.width)
    optimiser = Optimiser("adam", 0.01)
    return context.fit(model, loss, label="training", optimiser=optimiser, steps=config.steps)


def draw(trajectory: xr.Dataset) -> Figure:
    long_call.make("draw")
    figure = Figure((1, 1))  # without text, which would take most of the run's time
    axes = figure.subplots()
    axes.plot(trajectory.step, trajectory.loss.T)
    axes.set_axis_off()
    return figure


STUDY = Study(
    name="interrupted",
    title="A small training run",
    source="none",
    about="A small training run.",
    version=1,
    presets={"quick": Preset(Config(), seeds=2, seconds=1)},
    run=run,
    claims=(Claim("falls", "The loss is positive.", lambda run: run.loss.isel(step=-1), at_least(0.0), "check"),),
    threads=1,
    figures={"loss": Drawing(draw, "The loss.")},
)
