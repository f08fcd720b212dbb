"""The transformer of the study `markov-unigram`: binary symbols in, the logit of the next symbol out.

    x_n = s_n e + position_n,   y = x + attention(x) W_O,   z = y + ReLU(y W_1) W_2,   logit_n = ⟨a, z_n⟩ + b

With tied weights the head is the embedding, a = e. LayerNorm and further layers are switches. Many seeds are one model:
every parameter has the model as its leading axis, and whether weights are tied is a switch of each model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from joma.arguments import InputError, flag, whole
from joma.noise import check_generators

HIDDEN_FACTOR = 4  # hidden units of the MLP over the width, as in the authors' code
DTYPE = torch.float32


@dataclass(frozen=True)
class ChainTransformerConfig:
    """The sizes and switches of a `ChainTransformer`.

    Attributes:
        length: number of positions.
        width: length of an embedding.
        layers: number of layers of attention and MLP.
        norm: LayerNorm with a trained gain before attention, before the MLP and before the head.
    """

    length: int
    width: int = 8
    layers: int = 1
    norm: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "width", "layers"):
            whole(name, getattr(self, name))
        flag("norm", self.norm)


class ChainTransformer(nn.Module):
    """A causal transformer on binary symbols, for many models at once.

    Every model draws all its weights from its own generator as standard normals times its `scale`; the bias starts at
    zero, gains of LayerNorm at one.

    Args:
        config: sizes and switches.
        generators: one for each model.
        tied: whether a = e, for each model; `a` is then left as it was drawn.
        scale: standard deviation of the initial weights, for each model.
        dtype: of the parameters.

    >>> generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    >>> model = ChainTransformer(
    ...     ChainTransformerConfig(length=4), generators=generators, tied=[True] * 3, scale=[0.1] * 3
    ... )
    >>> model(torch.zeros(3, 5, 4)).shape
    torch.Size([3, 5, 4])
    """

    e: nn.Parameter
    a: nn.Parameter
    position: nn.Parameter
    W_QKV: nn.Parameter
    W_O: nn.Parameter
    W_1: nn.Parameter
    W_2: nn.Parameter
    tied: Bool[Tensor, "model 1"]
    causal: Bool[Tensor, "position position"]

    def __init__(
        self,
        config: ChainTransformerConfig,
        *,
        generators: Sequence[torch.Generator],
        tied: Sequence[bool],
        scale: Sequence[float],
        dtype: torch.dtype = DTYPE,
    ) -> None:
        super().__init__()
        check_generators(generators)
        if not len(generators) == len(tied) == len(scale):
            got = f"{len(generators)}, {len(tied)} and {len(scale)}"
            raise InputError("generators`, `tied`, `scale", "of one length", got, "give one of each for every model")
        self.config = config
        layers, width = config.layers, config.width
        hidden, width_3 = HIDDEN_FACTOR * width, 3 * width
        shapes = {
            "e": (width,),
            "a": (width,),
            "position": (config.length, width),
            "W_QKV": (layers, width, width_3),
            "W_O": (layers, width, width),
            "W_1": (layers, width, hidden),
            "W_2": (layers, hidden, width),
        }
        for name, shape in shapes.items():
            draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for generator in generators]
            scaled = [factor * draw for factor, draw in zip(scale, draws, strict=True)]
            self.register_parameter(name, nn.Parameter(torch.stack(scaled).to(dtype)))
        self.b = nn.Parameter(torch.zeros(len(generators), dtype=dtype))
        gains = torch.ones(len(generators), 2 * layers + 1, width, dtype=dtype)
        self.gain = nn.Parameter(gains) if config.norm else None
        self.register_buffer("tied", torch.tensor(list(tied))[:, None], persistent=False)
        causal = torch.ones(config.length, config.length, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)

    @property
    def head(self) -> Float[Tensor, "model width"]:
        """The head a, which is e where weights are tied."""
        return torch.where(self.tied, self.e, self.a)

    def forward(self, symbols: Float[Tensor, "model sample position"]) -> Float[Tensor, "model sample position"]:
        """Return the logit of the next symbol at each position; symbols are 0 or 1."""
        x = symbols[..., None] * self.e[:, None, None] + self.position[:, None]
        return (self.layers(x) @ self.head[:, None, :, None])[..., 0] + self.b[:, None, None]

    def layers(self, x: Float[Tensor, "model sample position width"]) -> Float[Tensor, "model sample position width"]:
        """Return the outputs z of all layers, after the last LayerNorm if there is one."""
        for layer in range(self.config.layers):
            # Fused attention: at 1,024 positions the weights of 20 models alone would take 11 GB.
            query, key, value = self._project(x, layer)
            y = x + _product(F.scaled_dot_product_attention(query, key, value, is_causal=True), self.W_O[:, layer])
            hidden = torch.relu(_product(self._normed(y, 2 * layer + 1), self.W_1[:, layer]))
            x = y + _product(hidden, self.W_2[:, layer])
        return self._normed(x, 2 * self.config.layers)

    def attention(self, symbols: Float[Tensor, "model sample position"]) -> Float[Tensor, "model sample query key"]:
        """Return the weights of the first layer's attention."""
        x = symbols[..., None] * self.e[:, None, None] + self.position[:, None]
        query, key, _ = self._project(x, 0)
        scores = query @ key.mT / math.sqrt(self.config.width)
        return scores.masked_fill(~self.causal, -math.inf).softmax(dim=-1)

    def _project(self, x: Tensor, layer: int) -> tuple[Tensor, ...]:
        """Return the queries, keys and values of a layer."""
        return _product(self._normed(x, 2 * layer), self.W_QKV[:, layer]).chunk(3, dim=-1)

    def _normed(self, x: Tensor, index: int) -> Tensor:
        if self.gain is None:
            return x
        return F.layer_norm(x, x.shape[-1:]) * self.gain[:, None, None, index]


def _product(x: Float[Tensor, "model sample position _"], weight: Float[Tensor, "model _ _"]) -> Tensor:
    """Return x times each model's matrix, as one product a model: batches of small products are slow."""
    return (x.flatten(1, 2) @ weight).unflatten(1, x.shape[1:3])


def unigram_hessian(
    model: ChainTransformer, p: Float[Tensor, " model"], q: Float[Tensor, " model"], *, positions: int
) -> Float[Tensor, "model width width"]:
    """Return the Hessian in e at e = 0 of each tied model, with all its other weights as they are.

    The formula is that of `joma.theory.markov.unigram_hessian`. One backward pass gives the Jacobians ∂z_n/∂x_m: the
    layers see the positions once for each n and each component of z_n.

    Args:
        model: the transformers.
        p, q: transition probabilities of each model's chain.
        positions: of how many positions n, evenly spaced, the mean is taken; all of them if there are no more.
    """
    length, width = model.config.length, model.config.width
    count = min(positions, length)
    queries = torch.linspace(0, length - 1, count, device=p.device).round().long()
    lag = queries[:, None] - torch.arange(length, device=p.device)
    correlation = 1 - p - q
    weights = (lag >= 0) * correlation[:, None, None] ** lag.clamp_min(0)
    x = model.position.detach()[:, None].repeat(1, count * width, 1, 1).requires_grad_()
    with torch.enable_grad():
        z = model.layers(x)
        by_query = z.unflatten(1, (count, width))[:, torch.arange(count, device=p.device), :, queries]
        (jacobian,) = torch.autograd.grad(by_query.diagonal(dim1=-2, dim2=-1).sum(), x)
    gain = torch.einsum("bnm,bnomi->boi", weights, jacobian.unflatten(1, (count, width))) / count
    states = z.detach()[:, 0, queries]
    centred = states - states.mean(dim=1, keepdim=True)
    spread = centred.mT @ centred / count
    share = p / (p + q)
    return (share * (1 - share))[:, None, None] * (spread - correlation[:, None, None] * (gain + gain.mT))
