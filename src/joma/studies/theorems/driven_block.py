"""A block that is fed the drive of Theorem 2 (constant) or of Theorem 4 (μ − v) as its gradient, trained by SGD.

This is an Euler integration of the two theorems, attention and weights apart: it shows that they solve the dynamics,
not that a nonlinear activation has such a drive (`real_units`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import schedule
from joma.arguments import whole
from joma.models.block import Block, BlockConfig
from joma.studies.theorems import single_unit
from joma.study import Arms, Context
from joma.theory import growth

DRIVES = Arms("drive", ("linear", "nonlinear"))
LINEAR_SHARE = 0.98  # of the blow-up time that SGD follows with the constant drive
# Shares of the blow-up time at which the closed form with the constant drive is drawn: ever denser towards it.
LINE_SHARES = np.concatenate([np.linspace(0, 0.95, 96), 1 - np.geomspace(0.05, 1e-7, 80)[1:]])


@dataclass(frozen=True)
class DriveConfig:
    """The targets of the driven block, its start, and how long and in which steps it is trained."""

    v0: float = 0.05
    components: int = 6
    """Components of the targets of the driven block and of the counted draws."""
    until: float = 4.0
    """Time until which the block is driven towards its targets, in steps of the learning rate `rate`."""
    rate: float = 1e-3


def train(config: DriveConfig, context: Context) -> xr.Dataset:
    """Train a block whose gradient is the theorems' drive: constant (μ) as in Theorem 2, or μ − v as in Theorem 4.

    Its hidden unit is linear, attention is exp, its logits are free, and each context is a single token. The logits
    begin at v0²/2, where Theorem 1 puts them for this v0. With the constant drive the time of each seed is scaled, so
    that it ends just before its blow-up.
    """
    tokens, steps = whole("components", config.components, low=2), round(config.until / config.rate)
    uniform = [torch.rand(tokens, generator=stream, dtype=torch.float64) for stream in context.seed_generators()]
    mu = torch.stack([0.5 + 2.5 * draw for draw in uniform])
    blow_up = growth.blow_up_time(mu.numpy(), config.v0).min(axis=-1)
    block_config = BlockConfig(tokens=tokens, hidden=1, attention="exp", residual=False, scale=0.0)
    block = Block(block_config, generators=context.seed_generators(DRIVES))
    with torch.no_grad():
        block.w[:, :tokens] = config.v0
        block.z[:] = config.v0**2 / 2
    x, target = torch.eye(tokens, dtype=torch.float64).to(context.device), mu.to(context.device)
    clock = torch.as_tensor(LINEAR_SHARE * blow_up / config.until)[:, None].to(context.device)

    def loss(model: Block, _step: Tensor) -> Tensor:
        _, v = model.v[..., 0].detach().chunk(2)
        return -(torch.cat([clock * target, target - v]) * model(x)[..., 0]).sum(dim=-1)

    trajectory = single_unit.train(
        context,
        block,
        loss,
        rate=config.rate,
        steps=steps,
        at=schedule.every(max(1, steps // 160), steps),
        label="sparse-dense",
        arms=DRIVES,
    )
    return _with_closed_forms(config, trajectory, mu.numpy(), blow_up)


def _with_closed_forms(
    config: DriveConfig,
    trajectory: xr.Dataset,
    mu: Float[np.ndarray, "seed token"],
    blow_up: Float[np.ndarray, " seed"],
) -> xr.Dataset:
    """Return the driven blocks beside the closed forms of Theorems 2 and 4, each with the entropy of its attention."""
    times = trajectory.step.values * config.rate
    trajectory = trajectory.rename(step="time").assign_coords(time=times)
    predicted = np.moveaxis(growth.nonlinear(mu, times, config.v0), 0, 1)
    linear, nonlinear = (trajectory.sel(drive=name, drop=True) for name in DRIVES.labels)
    linear_times = LINEAR_SHARE * blow_up[:, None] * times / times[-1]
    line_times = blow_up[:, None] * LINE_SHARES
    at_steps, line = (
        np.stack([growth.linear(drive, t, config.v0) for drive, t in zip(mu, seed_times, strict=True)])
        for seed_times in (linear_times, line_times)
    )
    over_time = ("seed", "time", "token")
    return nonlinear.assign(
        {
            "mu": (("seed", "token"), mu),
            "predicted": (over_time, predicted),
            "entropy_predicted": (over_time[:2], growth.attention_entropy(predicted)),
            "linear_trained": linear.trained,
            "linear_entropy": linear.entropy,
            "linear_time": (over_time[:2], linear_times),
            "linear_predicted": (over_time, at_steps),
            "blow_up": ("seed", blow_up),
            "linear_line": (("seed", "share", "token"), line),
            "linear_line_entropy": (("seed", "share"), growth.attention_entropy(line)),
        }
    ).assign_coords(share=LINE_SHARES)


def distance(run: xr.Dataset, trained: str, predicted: str) -> xr.DataArray:
    """Return a driven block's largest distance from its closed form over 1 + |v|, per seed; NaN if it diverged."""
    return single_unit.distance(run[trained], run[predicted]).max(("token", "time"), skipna=False)
