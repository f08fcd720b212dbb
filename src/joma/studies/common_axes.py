"""Three numbers that every study which trains attention can record, so that their runs can stand on common axes.

The study `panorama` draws them. A study records them for one of its models, over its own steps or times:

    axes_entropy   entropy of a row of attention over ln(number of keys that the row sees), mean over rows: 1 is uniform
    axes_sink      weight that the most attended key receives, mean over rows: 1 if all rows attend to one and the same
    axes_rank      stable rank of the first trained linear map after attention: ‖W‖_F² / ‖W‖_2²
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from joma.probes.entropy import shannon_entropy
from joma.probes.rank import stable_rank

NAMES = ("axes_entropy", "axes_sink", "axes_rank")
STEP = "axes_step"


def attention_axes(
    attention: Float[Tensor, "*batch query key"],
    weight: Float[Tensor, "*batch row column"],
    visible: Bool[Tensor, "*batch query key"] | None = None,
) -> dict[str, Float[Tensor, "*batch"]]:
    """Return the three numbers of attention weights and of the map above them, for each leading index.

    Args:
        attention: weights; each row sums to 1.
        weight: the first trained linear map that attention's output goes through.
        visible: which keys a row sees, all if not given. Rows that see one key have no entropy and are left out.

    >>> axes = attention_axes(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.eye(3))
    >>> [round(float(axes[name]), 3) for name in NAMES]
    [0.5, 0.75, 3.0]
    """
    seen = torch.ones_like(attention, dtype=torch.bool) if visible is None else visible
    keys = seen.sum(dim=-1)
    several = (keys > 1).to(attention.dtype)
    relative = shannon_entropy(attention) / keys.clamp_min(2).to(attention.dtype).log()
    received = (attention * several[..., None]).sum(dim=-2) / several.sum(dim=-1, keepdim=True)
    values = ((relative * several).sum(dim=-1) / several.sum(dim=-1), received.amax(dim=-1), stable_rank(weight))
    return dict(zip(NAMES, values, strict=True))


def axes_dataset(
    attention: Float[np.ndarray, "seed step query key"], weight: Float[np.ndarray, "seed step row column"], times: list
) -> xr.Dataset:
    """Return the three numbers of a solved flow over `seed` and `axes_step`; seeds have no labels yet.

    >>> axes_dataset(np.full((1, 2, 1, 4), 0.25), np.ones((1, 2, 3, 1)), [0.0, 1.0]).axes_entropy.values
    array([[1., 1.]])
    """
    axes = attention_axes(torch.from_numpy(attention), torch.from_numpy(weight))
    variables = {name: (("seed", STEP), values.numpy()) for name, values in axes.items()}
    return xr.Dataset(variables, {STEP: list(times)})
