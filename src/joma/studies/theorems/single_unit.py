"""A block with one hidden unit, as in Theorems 2 and 4, trained by SGD and compared with its flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xarray as xr
from torch import Tensor

from joma.models.block import Block
from joma.probes.entropy import shannon_entropy
from joma.study import Arms, Context
from joma.train import Optimiser, Record


def train(
    context: Context,
    block: Block,
    loss: Callable[[Block, Tensor], Tensor],
    *,
    rate: float,
    steps: int,
    at: Iterable[int],
    label: str,
    arms: Arms | None = None,
) -> xr.Dataset:
    """Train a block with one hidden unit and one query by SGD.

    Args:
        context, block, loss, steps, label, arms: as for `Context.fit`.
        rate: learning rate of weights and logits.
        at: the steps at which to record.

    Returns:
        Over `seed`, `step` and the arms: the weights `trained` by `token`, and the `entropy` of attention, softmax(z).
    """

    def measure(model: Block, _step: int) -> dict[str, Tensor]:
        return {"trained": model.v[..., 0], "entropy": shannon_entropy(model.z[:, 0].softmax(-1))}

    record = Record(measure, at=at, dims={"trained": ("token",)})
    sgd = Optimiser("sgd", rate)
    trajectory = context.fit(block, loss, optimiser=sgd, steps=steps, record=record, label=label, arms=arms)
    return trajectory[["trained", "entropy"]]


def distance(v: xr.DataArray, flow: xr.DataArray) -> xr.DataArray:
    """Return |v − flow| / (1 + |flow|): absolute where the weights are small, relative where they are large.

    >>> distance(xr.DataArray([0.1, 21.0]), xr.DataArray([0.0, 19.0])).values
    array([0.1, 0.1])
    """
    return abs(v - flow) / (1 + abs(flow))
