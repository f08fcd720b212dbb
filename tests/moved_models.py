"""Models whose weights were moved along one random direction, as training moves them along a path."""

from typing import Any

import torch


def moved(model: Any, scale: float, seed: int = 1) -> Any:
    """Move the weights of the model by `scale` along the random direction of a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)
    return model
