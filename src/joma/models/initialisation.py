"""Initial values of a decoder's parameters: the distributions, by name, and the draw of each seed's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


class Init(NamedTuple):
    """The initial distribution of a weight [in, out] and of its bias.

    Attributes:
        scale: from (in, out) to the standard deviation of a normal distribution, or to the bound of a uniform one.
        normal: whether the weight is normal, or else uniform in [-scale, scale].
        bias: whether the bias is uniform in [-scale, scale], or else zero.
    """

    scale: Callable[[int, int], float]
    normal: bool = False
    bias: bool = False


_LINEAR, _FLAT = Init(lambda rows, _: rows**-0.5, bias=True), Init(lambda *_: 0.1)
COPIES = 2  # of every parameter while a model is created: those that the seeds draw, and all of them as one tensor
_STACKED = Init(lambda rows, columns: math.sqrt(6 / (rows + 3 * columns)))  # W_Q, W_K, W_V drawn as one matrix
_ROLES = ("embedding", "attention", "projection", "mlp", "head")
INITS: dict[str, dict[str, Init]] = {
    # The defaults of torch.nn.Linear and torch.nn.Embedding.
    "linear": dict.fromkeys(_ROLES, _LINEAR) | {"embedding": Init(lambda *_: 1.0, normal=True)},
    # The defaults of torch.nn.TransformerEncoderLayer; embedding and head within ±0.1.
    "encoder": dict(zip(_ROLES, (_FLAT, _STACKED, Init(_LINEAR.scale), _LINEAR, _FLAT), strict=True)),
    "small": dict.fromkeys(_ROLES, Init(lambda *_: 0.02, normal=True)),
}


@dataclass(frozen=True)
class ParameterDraw:
    """Draw parameters, each seed's numbers from the seed's generator, on the CPU and in float32 whatever the dtype.

    Attributes:
        inits: the distribution of each role, one of `INITS`.
        generators: one for each seed.
        dtype: of the parameters.
    """

    inits: Mapping[str, Init]
    generators: Sequence[torch.Generator]
    dtype: torch.dtype

    def __call__(self, role: str, *shape: int, bias: bool = False) -> nn.Parameter:
        """Return a weight [seed, in, out] of `shape` (in, out), or the bias [seed, out] of such a weight."""
        init, values = self.inits[role], torch.empty(len(self.generators), *shape[bias:])
        scale = init.scale(*shape)
        if bias and not init.bias:
            values.zero_()
        elif init.normal and not bias:
            self._fill(values, lambda row, generator: row.normal_(0.0, scale, generator=generator))
        else:
            self._fill(values, lambda row, generator: row.uniform_(-scale, scale, generator=generator))
        return nn.Parameter(values.to(self.dtype))

    def _fill(self, values: torch.Tensor, draw: Callable[[torch.Tensor, torch.Generator], object]) -> None:
        """Draw each row from its generator, once for generators in the same state: those of a seed in several arms."""
        first: dict[bytes, int] = {}
        for number, generator in enumerate(self.generators):
            earlier = first.setdefault(generator.get_state().numpy().tobytes(), number)
            if earlier == number:
                draw(values[number], generator)
            else:
                values[number] = values[earlier]
                generator.set_state(self.generators[earlier].get_state())
