"""The data-free laws of a head in the last model of the ladder of `value-invariant`: how far training leaves them.

Along gradient flow Δ = W_Q W_Qᵀ − W_K W_Kᵀ and Δ = W_V W_Vᵀ − W_Oᵀ W_O are constant, whatever network, loss and data
stand around the head (`joma.probes.balance`). Here W_Q, W_K, W_V and W_O are the matrices as they act; the model stores
the transposed ones.

With weight decay λ the flow has −λW in addition. Both terms of Δ then shrink at the rate 2λ besides what the loss does,
which cancels: Δ̇ = −2λΔ and Δ(t) = e^{−2λt} Δ(0).

A step of SGD with the learning rate η changes W to (1 − ηλ)W − ηG. The terms of first order in G cancel as they do
along the flow, so that a step changes Δ to (1 − ηλ)²Δ + η²(G_Q G_Qᵀ − G_K G_Kᵀ), exactly. In a fixed time 1/η steps are
made: the drift is of first order in η, and half the learning rate halves it. For this comparison both see the same loss
at the same time: at half the learning rate two steps are made on each minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from joma.arguments import scalar, whole
from joma.models.one_layer import OneLayer
from joma.probes.balance import head_drift, head_gram
from joma.studies.theorems.invariance_training import concat
from joma.studies.theorems.value_ladder import RUNGS, build_rung, rung_loss
from joma.studies.theorems.value_training import Config, arrays, rounding, shown_steps
from joma.study import Context, LabelledTraining
from joma.train import Optimiser, Record

RUNG = RUNGS[-1]
LAWS = {"query_key": ("W_Q", "W_K"), "value_output": ("W_V", "W_O")}
TRANSPOSED = ("W_Q", "W_K", "W_V")  # stored as [in, out]; `head_gram` takes [head_dim, width], as W_O is


@dataclass(frozen=True)
class HeadArm:
    """How the model is trained: the optimiser, whether weights decay, and the number of steps on each minibatch."""

    optimiser: str = "sgd"
    decayed: bool = False
    substeps: int = 1
    """Steps that are made on each minibatch; the learning rate is divided by it."""

    @property
    def label(self) -> str:
        """The label of the progress bar and of the folder of checkpoints."""
        return f"head, {self.optimiser}, {self.substeps} steps a minibatch{', decay' * self.decayed}"

    def rate(self, config: Config) -> float:
        """Return the learning rate."""
        return (config.rate if self.optimiser == "sgd" else config.adam_rate) / self.substeps

    def decay(self, config: Config) -> float:
        """Return the weight decay."""
        return config.decay if self.decayed else 0.0


ARMS = {
    "sgd": HeadArm(),
    "sgd half": HeadArm(substeps=2),
    "decay": HeadArm(decayed=True),
    "adam": HeadArm("adam"),
    "adamw": HeadArm("adamw", decayed=True),
}
BY_SGD = ("sgd", "sgd half")


class Terms(NamedTuple):
    """The two terms of a law over all steps, [step, seed, head_dim, head_dim]."""

    first: Tensor
    second: Tensor

    @property
    def difference(self) -> Tensor:
        """The matrix that gradient flow keeps."""
        return self.first - self.second


def optimiser_of(config: Config, arm: HeadArm) -> Optimiser:
    """Return the optimiser of an arm."""
    rate = scalar("rate" if arm.optimiser == "sgd" else "adam_rate", arm.rate(config), above=0.0)
    return Optimiser(arm.optimiser, rate, weight_decay=scalar("decay", arm.decay(config), low=0.0))


def _weights(model: OneLayer, _step: int) -> dict[str, Tensor]:
    return {name: model.get_parameter(name) for law in LAWS.values() for name in law}


DIMS = {"W_Q": ("dim", "head"), "W_K": ("dim", "head"), "W_V": ("dim", "value"), "W_O": ("value", "dim")}


def train_arm(config: Config, context: Context, arm: HeadArm) -> xr.Dataset:
    """Train one arm with all seeds at once; record the weights of the head at every step."""
    training = LabelledTraining(
        build_rung(config, context, RUNG),
        rung_loss(config, context, RUNG, substeps=arm.substeps),
        optimiser=optimiser_of(config, arm),
        steps=arm.substeps * whole("ladder_steps", config.ladder_steps),
        record=Record(_weights, dims=DIMS, gradients=False),
        label=arm.label,
        brief=True,
    )
    return context.fit_together([training])[0]


def terms(law: str, path: Mapping[str, np.ndarray]) -> Terms:
    """Return the terms of a law at every step, W_Q W_Qᵀ and W_K W_Kᵀ or W_V W_Vᵀ and W_Oᵀ W_O."""
    return Terms(*(head_gram(as_acting(name, path[name])) for name in LAWS[law]))


def as_acting(name: str, weight: np.ndarray) -> np.ndarray:
    """Return a stored weight as [..., head_dim, width]."""
    return np.swapaxes(weight, -1, -2) if name in TRANSPOSED else weight


def squared_steps(law: str, path: Mapping[str, np.ndarray], shrinkage: float) -> Tensor:
    """Return what the squares of the steps add to the matrix of a law in each step, [step, seed, head_dim, head_dim].

    A step is what a weight changes by besides its multiplication by `shrinkage`, which is 1 without weight decay.
    """
    steps = {name: weight[1:] - shrinkage * weight[:-1] for name, weight in path.items()}
    return terms(law, steps).difference


def matrix_from_steps(law: str, path: Mapping[str, np.ndarray], shrinkage: float) -> Tensor:
    """Return the matrix of a law at every step that follows from its start and from the squares of SGD's steps."""
    matrix = terms(law, {name: weight[:1] for name, weight in path.items()}).difference[0]
    matrices = [matrix]
    for added in squared_steps(law, path, shrinkage):
        matrix = shrinkage**2 * matrix + added
        matrices.append(matrix)
    return torch.stack(matrices)


def flow_factor(steps: int, *, rate: float, decay: float) -> Tensor:
    """Return e^{−2λt} at every step, by which weight decay multiplies the matrices of both laws along the flow."""
    return torch.exp(-2 * decay * rate * torch.arange(steps + 1, dtype=torch.float64))


def law_measures(law: str, path: Mapping[str, np.ndarray], *, rate: float, decay: float) -> dict[str, Tensor]:
    """Return how far training has left one law of a head at every step, [step, seed].

    Returns:
        `drift` of the probe, from a constant Δ; `drift_decayed`, the same from e^{−2λt} Δ(0); `drift_shifted`, that of
        the first term and of the second with its dimensions shifted by one, between which no law holds; `size`, the
        norm of Δ relative to that at the start; `residual`, what the squares of the steps leave over, relative to the
        largest entry of a term.
    """
    first, second = measured = terms(law, path)
    start = Terms(first[:1].expand_as(first), second[:1].expand_as(second))
    factor = flow_factor(len(first) - 1, rate=rate, decay=decay)[:, None, None, None]
    shifted, shifted_start = (matrix.roll((1, 1), (-2, -1)) for matrix in (second, start.second))
    left_over = (measured.difference - matrix_from_steps(law, path, 1 - rate * decay)).abs().amax((-2, -1))
    norms = torch.linalg.matrix_norm(measured.difference)
    return {
        "drift": head_drift(first, second, *start),
        "drift_decayed": head_drift(first, second, factor * start.first, factor * start.second),
        "drift_shifted": head_drift(first, shifted, start.first, shifted_start),
        "size": norms / norms[0],
        "residual": left_over / torch.stack(measured).abs().amax((0, 1, 3, 4)),
    }


def trial(config: Config, context: Context, arm: HeadArm) -> xr.Dataset:
    """Train one arm; return the measures of both laws at about fifty steps, and the loss. Diverged seeds are NaN."""
    trajectory = train_arm(config, context, arm)
    path, finite = arrays(trajectory)
    rate, decay, shown = arm.rate(config), arm.decay(config), shown_steps(config.ladder_steps)
    rows = [arm.substeps * step for step in shown]
    weights = {name: path[name] for name in DIMS}
    of_laws = [law_measures(law, weights, rate=rate, decay=decay) for law in LAWS]
    variables: dict[str, Any] = {
        f"head_{name}": (
            ("head_law", "ladder_step", "seed"),
            np.where(finite, np.stack([measures[name].numpy()[rows] for measures in of_laws]), np.nan),
        )
        for name in of_laws[0]
    }
    factor = flow_factor(max(rows), rate=rate, decay=decay).numpy()[rows]
    variables["head_factor"] = (("ladder_step",), factor)
    variables["head_loss"] = (("ladder_step", "seed"), np.where(finite, path["loss"][rows], np.nan))
    return xr.Dataset(variables, {"head_law": list(LAWS), "ladder_step": shown, "seed": trajectory.seed.values})


def check_heads(config: Config) -> None:
    """Report bad input before any training."""
    for arm in ARMS.values():
        optimiser_of(config, arm)


def heads(config: Config, context: Context) -> xr.Dataset:
    """Train all arms; a step of the result is one of the full learning rate, that is one minibatch."""
    trained = {}
    with context.progress.task("heads", total=len(ARMS)) as task:
        for name, arm in ARMS.items():
            trained[name] = trial(config, context, arm)
            task.advance()
    steps = config.ladder_steps * max(arm.substeps for arm in ARMS.values())
    bound = rounding(config, steps, config.batch * config.length)
    return concat(trained, "head_arm").assign(head_rounding=bound)
