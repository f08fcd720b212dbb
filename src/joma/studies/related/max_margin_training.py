"""Training of attention alone, by the one loop: vectors, matrices, and keys with queries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from joma.studies import common_axes
from joma.study import Arms, Context
from joma.train import Optimiser, Record

SCALE = 1e12  # of the loss, so that every gradient is clipped to the norm 1: all steps have the same length
LEAST_LOSS = math.log1p(math.exp(-1.0))  # where every sequence attends to a token of score 1
_SIGMA = 1 / (1 + math.e)  # σ(−1)


class AttentionVector(nn.Module):
    """Attention over the tokens of a sequence with logits x_it · p; the leading axis of p is arms times seeds."""

    def __init__(self, p: Float[Tensor, "model dim"]) -> None:
        super().__init__()
        self.p = nn.Parameter(p.clone())

    def forward(
        self, x: Float[Tensor, "seed sequence token dim"], z: Tensor | None = None
    ) -> Float[Tensor, "model sequence token"]:
        """Return the logarithm of attention for tokens that all arms share. There are no queries."""
        del z
        p = self.p.unflatten(0, (-1, len(x)))  # one product for each seed, with the vectors of all arms
        logits = (x.flatten(1, 2) @ p.permute(1, 2, 0)).permute(2, 0, 1)
        return torch.log_softmax(logits.reshape(-1, *x.shape[1:3]), dim=-1)


class AttentionMatrix(nn.Module):
    """Attention with logits x_itᵀ W z_i."""

    def __init__(self, w: Float[Tensor, "model dim query"]) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    @property
    def product(self) -> Float[Tensor, "model dim query"]:
        """W."""
        return self.w

    def forward(
        self, x: Float[Tensor, "model sequence token dim"], z: Float[Tensor, "model sequence query"]
    ) -> Float[Tensor, "model sequence token"]:
        """Return the logarithm of attention."""
        query = z @ self.product.mT  # W z_i
        return torch.log_softmax((x @ query[..., None])[..., 0], dim=-1)


class AttentionFactors(AttentionMatrix):
    """Attention with logits x_itᵀ K Qᵀ z_i."""

    def __init__(self, k: Float[Tensor, "model dim rank"], q: Float[Tensor, "model query rank"]) -> None:
        nn.Module.__init__(self)
        self.k, self.q = nn.Parameter(k.clone()), nn.Parameter(q.clone())

    @property
    def product(self) -> Float[Tensor, "model dim query"]:
        """W = K Qᵀ."""
        return self.k @ self.q.mT


def logistic_loss(log_attention: Float[Tensor, "model sequence token"], g: Tensor) -> Float[Tensor, " model"]:
    """Return (1/n) Σ_i ln(1 + exp(−f_i)), f_i = Σ_t q_it g_it, for scores g of the shape of attention.

    >>> logistic_loss(torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[1.0, -1.0]]]))
    tensor([0.6931])
    """
    return F.softplus(-(log_attention.exp() * g).sum(dim=-1)).mean(dim=-1)


def log_excess(log_attention: Float[Tensor, "model sequence token"], g: Tensor) -> Float[Tensor, " model"]:
    """Return the logarithm of the loss above its infimum, for scores of at most 1 that each sequence attains.

        ln (1/n) Σ_i ln(1 + exp(−f_i)) − ln(1 + 1/e),    f_i = 1 − e_i,    e_i = Σ_t q_it (1 − g_it)

    Its gradient has the direction of the loss's and does not vanish. Nothing cancels, however small e_i is.

    >>> log_excess(torch.tensor([[[0.0, -90.0]]], dtype=torch.float64), torch.tensor([[[1.0, 0.0]]]))  # ln σ(−1) − 90
    tensor([-91.3133], dtype=torch.float64)
    """
    missing = (log_attention.exp() * (1 - g)).sum(dim=-1)
    return torch.log1p(torch.expm1(missing) * _SIGMA).mean(dim=-1).log()


def tensors(context: Context, *arrays: np.ndarray) -> list[Tensor]:
    """Return arrays as float64 tensors on the device of the run."""
    return [torch.from_numpy(np.ascontiguousarray(array)).double().to(context.device) for array in arrays]


def descend(
    context: Context,
    arms: Arms,
    data: tuple[Tensor, Tensor, Tensor],
    *,
    rate: float,
    steps: int,
    at: Sequence[int],
) -> xr.Dataset:
    """Train attention vectors by plain gradient descent; the variable `trained` is p over (arm, seed, step, dim).

    Args:
        context: seeds, device and checkpoints.
        arms: labels of the arms, which are the leading axis together with seeds.
        data: tokens [seed, sequence, token, dim], scores [model, sequence, token], p at the start [model, dim].
        rate: learning rate.
        steps: number of steps.
        at: steps at which to record.
    """
    x, g, p0 = data
    return context.fit(
        AttentionVector(p0),
        lambda model, _: logistic_loss(model(x), g),
        label=f"max-margin, descent, {steps} steps",
        optimiser=Optimiser("sgd", rate),
        steps=steps,
        record=Record(lambda model, _: {"trained": model.p}, at=at, dims={"trained": ("dim",)}, gradients=False),
        arms=arms,
    )


def descend_normalised(
    context: Context,
    model: nn.Module,
    data: tuple[Tensor, Tensor | None, Tensor],
    *,
    length: float,
    steps: int,
    at: Sequence[int],
    label: str,
    arms: Arms | None = None,
) -> xr.Dataset:
    """Train attention by steps of equal length along −∇loss, for scores of at most 1 that each sequence attains.

    Args:
        context: seeds, device and checkpoints.
        model: an `AttentionVector`, `AttentionMatrix` or `AttentionFactors`.
        data: tokens [seed, sequence, token, dim], queries [seed, sequence, dim], scores [model, sequence, token].
        length: of all steps together.
        steps: number of steps.
        at: steps at which to record.
        label: name of the training.
        arms: given if the leading axis is arms times seeds.

    Returns:
        The trajectory with `vector` over (seed, step, dim), or with `matrix` over (seed, step, row, column) and the
        common axes of attention and W.
    """
    x, z, g = data

    def measure(model: nn.Module, _: int) -> dict[str, Tensor]:
        if isinstance(model, AttentionVector):
            return {"vector": model.p}
        assert isinstance(model, AttentionMatrix)
        product = model.product
        return {"matrix": product, **common_axes.attention_axes(model(x, z).exp(), product)}

    return context.fit(
        model,
        lambda model, _: SCALE * log_excess(model(x, z), g),
        label=f"max-margin, {label}, normalised",
        optimiser=Optimiser("sgd", length / steps, clip=1.0),
        steps=steps,
        record=Record(measure, at=at, dims={"vector": ("dim",), "matrix": ("row", "column")}, gradients=False),
        arms=arms,
    )
