"""A toy study, for the tests of what surrounds studies: its config makes it diverge, fail or be interrupted."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from joma.arguments import InputError
from joma.drawing import canvas, measured, theory
from joma.files import checksum
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, near


@dataclass(frozen=True)
class Config:
    slope: float = 2.0
    points: int = 4
    levels: tuple[float, ...] = (1.0, 2.0)
    mode: str = "run"
    bold: bool = False
    names: tuple[str, ...] | None = None
    text: str = ""


calls: list[Config] = []


def run(config: Config, context: Context) -> xr.Dataset:
    calls.append(config)
    if config.mode == "crash":
        raise RuntimeError("a defect")
    if config.mode == "warn":
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
    if config.mode == "interrupt":
        raise KeyboardInterrupt
    if config.points < 2:
        raise InputError("points", "at least 2", config.points, "use more points")
    time = np.linspace(0, 1, config.points)
    seed = np.array(context.seeds)
    with context.progress.task("points", total=config.points) as work:
        work.advance(config.points)
    value = config.slope * time + 0.01 * seed[:, None]
    if config.mode == "nan":
        value[0] = np.nan
    trajectory = xr.Dataset({"value": (("seed", "time"), value)}, {"seed": seed, "time": time})
    return trajectory.assign(diverged=("seed", [7] + [-1] * (len(seed) - 1))) if config.mode == "lose" else trajectory


def end(trajectory: xr.Dataset) -> xr.DataArray:
    return trajectory.value.isel(time=-1)


def draw(trajectory: xr.Dataset) -> Figure:
    figure, axes = canvas()
    theory(axes[0, 0], trajectory.time, 2 * trajectory.time, label="theory")
    measured(axes[0, 0], trajectory.time, trajectory.value, label="measured")
    axes[0, 0].legend()
    return figure


STUDY = Study(
    name="toy",
    title="A line",
    source="Euclid",
    about="A line of slope two & a <check> that HTML is escaped.",
    version=1,
    presets={"quick": Preset(Config(), seeds=3, seconds=1), "paper": Preset(Config(points=50), seeds=5, seconds=2)},
    run=run,
    claims=(
        Claim("end", "The line ends at 2.", end, near(2.0, 0.05), "theorem", across="mean"),
        Claim("each", "Every seed ends above 2.", end, at_least(2.0), "figure"),
        Claim("later", "Decided at the paper preset only.", end, at_most(2.005), "reading", presets=("paper",)),
    ),
    figures={"line": Drawing(draw, "Theory as a line, measurement as points.")},
    inputs=lambda config: {"text_sha256": checksum(Path(config.text))} if config.text else {},
)
