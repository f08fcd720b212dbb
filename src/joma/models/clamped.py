"""A decoder whose attention entropy is clamped from some step on, while all its parameters continue to train.

Attention is softmax(β q·k/√d) with one inverse temperature β for each layer and seed. The greater β, the lower the
entropy: ∂H/∂ln β = −Var(ln p). Before every step a controller changes ln β by a damped step of Newton's method towards
the layer's target of mean entropy on a fixed batch. So what attention attends to is free, and how sparse it is on
average is not. On CUDA, where a captured step contains its controller, what is recorded at a step is measured before
that step's correction, on the CPU after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError
from joma.models.config import DecoderConfig
from joma.models.layers import QueryPositions, QueryScale
from joma.models.transformer import Decoder
from joma.tensors import as_whole

GAIN = 0.8  # share of the excess that a step is meant to remove: somewhat less than Newton's method would
MIN_SLOPE = 1e-3  # nats by ln β: below it attention is uniform or one-hot, and no temperature changes it
MAX_STEP = 0.2  # of ln β


class ClampedEntropyDecoder(Decoder):
    """A decoder that keeps the mean attention entropy of each layer at its value at a given step.

    Call `adapt` before every step with the mean of entropy and of its slope on a batch that is always the same. Up to
    `clamp_steps[s, l]` the target of layer l of seed s is that entropy, and β is 1; afterwards the target stays and β
    follows. β is no parameter, and no gradient passes through it.

    Args:
        config, generators, options: as for `Decoder`; attention must not be uniform.
        clamp_steps: [seed, layer], the step after which the entropy of each layer is clamped.

    >>> config = DecoderConfig(vocabulary=10, width=8)
    >>> generators = [torch.Generator().manual_seed(0)]
    >>> model = ClampedEntropyDecoder(config, generators=generators, clamp_steps=torch.zeros(1, config.layers).long())
    >>> ones = torch.ones(1, config.layers)
    >>> model.adapt(torch.tensor(0), 2.0 * ones, ones)  # the target
    >>> model.adapt(torch.tensor(1), 2.1 * ones, ones)
    >>> bool((model.log_scale > 0).all())  # too dense: β rises
    True
    """

    clamp_steps: Int[Tensor, "seed layer"]
    target: Float[Tensor, "seed layer"]
    log_scale: Float[Tensor, "seed layer"]  # ln β

    def __init__(
        self,
        config: DecoderConfig,
        *,
        generators: Sequence[torch.Generator],
        clamp_steps: ArrayLike | Tensor,
        **options: Any,
    ) -> None:
        super().__init__(config, generators=generators, **options)
        shape = (len(generators), config.layers)
        expected = f"whole numbers [seed, layer] of shape {shape}"
        remedy = "give the step after which the entropy of each layer is clamped"
        steps = as_whole("clamp_steps", clamp_steps, shape=shape, expected=expected, remedy=remedy)
        if config.attention == "uniform":
            got, remedy = "uniform attention", "use trained attention"
            raise InputError("config", "attention that is not uniform", got, remedy, must="have")
        self.register_buffer("clamp_steps", steps, persistent=False)
        self.register_buffer("target", torch.zeros(shape, dtype=self.embedding.dtype))
        self.register_buffer("log_scale", torch.zeros(shape, dtype=self.embedding.dtype))

    @torch.no_grad()
    def adapt(self, step: Tensor, entropy: Float[Tensor, "seed layer"], slope: Float[Tensor, "seed layer"]) -> None:
        """Update targets and temperatures before a step.

        Args:
            step: number of updates of the parameters so far.
            entropy: present mean entropy of each layer.
            slope: present mean of Var(ln p) of each layer, by which entropy falls for each unit of ln β.
        """
        entropy, free = entropy.to(self.target.dtype), step <= self.clamp_steps
        self.target.copy_(torch.where(free, entropy, self.target))
        change = GAIN * (entropy - self.target) / slope.to(entropy.dtype).clamp_min(MIN_SLOPE)
        self.log_scale.add_(change.clamp(-MAX_STEP, MAX_STEP))

    def _overrides(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        noise: Tensor | None,
        mask: Tensor,
        query_positions: QueryPositions,
    ) -> Sequence[QueryScale]:
        """Return for each layer the factor β of its queries."""
        del tokens, positions, noise, mask, query_positions
        return [QueryScale(scale) for scale in self.log_scale.exp().unbind(1)]
