"""The levels of a decoder: level 0 is the embeddings, level n the output of the n-th layer."""

from __future__ import annotations

import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from torch import Tensor

from joma.drawing import band
from joma.models.transformer import Decoder


@torch.no_grad()
def hidden_states(
    model: Decoder, tokens: Int[Tensor, "sample position"]
) -> Float[Tensor, "seed level sample position width"]:
    """Return the hidden states at every level."""
    return torch.stack(model.activations(tokens, ["residual"])["residual"], dim=1)


def draw_levels(panel: Axes, values: xr.DataArray) -> None:
    """Draw values [seed, step, level] over training, on a logarithmic axis: one curve for each level."""
    for level in range(values.sizes["level"]):
        label = "embeddings" if level == 0 else f"layer {level - 1}"
        band(panel, values.step + 1, values.isel(level=level), level, label)
    panel.set(xscale="log", xlabel="step + 1")
