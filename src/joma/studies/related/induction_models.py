"""The two models of the study `induction-phases`: two layers of attention, minimal and in full, for many seeds at once.

Both predict the next symbol at the last positions of a sequence. Every parameter has the seed as its leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from joma.noise import check_generators


class Prediction(NamedTuple):
    """What a model answers at the last positions, and the attention of its last layer there.

    Attributes:
        log_probability: of each symbol to be next, [seed, sample, query, symbol].
        attention: [seed, sample, query, key].
        first: attention of the first layer: to each lag, [seed, head, lag], or between all positions,
            [seed, sample, position, key].
    """

    log_probability: Tensor
    attention: Tensor
    first: Tensor


class Minimal(nn.Module):
    """Two layers of attention with nothing that induction does not need.

        w = softmax(r),    m_hs = Σ_δ w_hδ x_{s−δ},    score_ts = Σ_h x_{t+1−q_h}ᵀ A_h m_hs
        p_t = Σ_{s≤t} softmax(score)_ts x_s

    Symbols are one-hot. The first layer looks back by position alone, δ = 1 to `lags`; the second compares symbols. A
    head of the first layer serves one query, the symbol at lag q_h before the predicted one. Each seed draws `r` and
    `A` as `scale` times standard normals.

    Args:
        symbols, heads, lags: sizes k, H and D.
        generators: one for each seed.
        scale: standard deviation of the initial parameters.
        smoothing: ε; the prediction is (1 − ε) p + ε/k.
        dtype: of the parameters.

    >>> model = Minimal(3, 1, 4, generators=[torch.Generator().manual_seed(seed) for seed in range(2)])
    >>> queries = torch.ones(2, 1, dtype=torch.long)
    >>> model(torch.zeros(2, 5, 8, dtype=torch.long), queries, count=3).log_probability.shape
    torch.Size([2, 5, 3, 3])
    """

    def __init__(
        self,
        symbols: int,
        heads: int,
        lags: int,
        *,
        generators: Sequence[torch.Generator],
        scale: float = 0.05,
        smoothing: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_generators(generators)
        self.symbols, self.smoothing = symbols, smoothing
        shapes = (heads, lags), (heads, symbols, symbols)
        draws = [
            [scale * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
            for generator in generators
        ]
        self.r = nn.Parameter(torch.stack([r for r, _ in draws]))  # [seed, head, lag]
        self.A = nn.Parameter(torch.stack([a for _, a in draws]))  # [seed, head, symbol, symbol]

    @property
    def lag_weights(self) -> Float[Tensor, "seed head lag"]:
        """Attention w of the first layer to each lag, from 1 on."""
        return self.r.softmax(-1)

    def forward(
        self, tokens: Int[Tensor, "seed sample position"], queries: Int[Tensor, "seed head"], count: int
    ) -> Prediction:
        """Predict what follows each of the last `count` positions.

        Args:
            tokens: the sequences.
            queries: lag q_h of each seed and head, counted from the predicted symbol.
            count: number of positions.
        """
        length = tokens.shape[-1]
        x = F.one_hot(tokens, self.symbols).to(self.A.dtype)
        looked_up = _toeplitz(self.lag_weights, length)[:, None] @ x[:, :, None]  # m: [seed, sample, head, key, symbol]
        positions = torch.arange(length - count, length, device=tokens.device)
        asked = (positions + 1 - queries[..., None]).flatten(1)  # [seed, head · query]
        asking = x.gather(2, asked[:, None, :, None].expand(-1, x.shape[1], -1, self.symbols))
        asking = asking.unflatten(2, (queries.shape[1], count))
        scores = ((asking @ self.A[:, None]) @ looked_up.mT).sum(2)
        visible = torch.arange(length, device=tokens.device) <= positions[:, None]
        attention = scores.masked_fill(~visible, -math.inf).softmax(-1)
        probability = (1 - self.smoothing) * (attention @ x) + self.smoothing / self.symbols
        return Prediction(probability.log(), attention, self.lag_weights)


def _toeplitz(weights: Float[Tensor, "seed head lag"], length: int) -> Float[Tensor, "seed head key position"]:
    """Return the matrix that adds up what stood 1, 2, … positions earlier; nothing stood before the first one."""
    positions = torch.arange(length, device=weights.device)
    distance = positions[:, None] - positions
    padded = F.pad(weights, (1, max(0, length - 1 - weights.shape[-1])))  # distance 0 has no weight, nor have far ones
    return padded[..., distance.clamp_min(0)] * (distance > 0)


class AttentionOnly(nn.Module):
    """A decoder of attention layers alone, each with one head and a scalar bias for each relative position.

        x ← x + softmax(h W_Q (h W_K)ᵀ/√d + b_{t−s}) h W_V W_O,    h = x/rms(x),    logits = x/rms(x) W

    Embeddings start as standard normals, matrices as normals of standard deviation `scale`/√d, and biases at zero.

    Args:
        symbols, layers, width, length: sizes; sequences have at most `length` positions.
        generators: one for each seed.
        scale: of the initial matrices.
        dtype: of the parameters.

    >>> model = AttentionOnly(3, 2, 8, 16, generators=[torch.Generator().manual_seed(seed) for seed in range(2)])
    >>> model(torch.zeros(2, 5, 16, dtype=torch.long), count=4).log_probability.shape
    torch.Size([2, 5, 4, 3])
    """

    def __init__(
        self,
        symbols: int,
        layers: int,
        width: int,
        length: int,
        *,
        generators: Sequence[torch.Generator],
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_generators(generators)

        def parameter(*shape: int, scale: float) -> nn.Parameter:
            draws = [torch.randn(shape, generator=generator, dtype=dtype) for generator in generators]
            return nn.Parameter(scale * torch.stack(draws))

        small = scale * width**-0.5
        self.embedding = parameter(symbols, width, scale=1.0)
        self.W_Q, self.W_K, self.W_V, self.W_O = (parameter(layers, width, width, scale=small) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(len(generators), layers, length, dtype=dtype))
        self.head = parameter(width, symbols, scale=small)

    def forward(self, tokens: Int[Tensor, "seed sample position"], count: int) -> Prediction:
        """Predict what follows each of the last `count` positions."""
        width, length = self.embedding.shape[-1], tokens.shape[-1]
        one_hot = F.one_hot(tokens, self.embedding.shape[1]).to(self.embedding.dtype)
        x = one_hot @ self.embedding[:, None]
        positions = torch.arange(length, device=tokens.device)
        distance = positions[:, None] - positions
        layers, attentions = self.W_Q.shape[1], []
        for layer in range(layers):
            h = F.rms_norm(x, (width,))
            rows = slice(length - count, None) if layer == layers - 1 else slice(None)
            q, k, v = (h @ weight[:, None, layer] for weight in (self.W_Q, self.W_K, self.W_V))
            bias = self.bias[:, layer][:, distance[rows].clamp_min(0)]
            scores = q[:, :, rows] @ k.mT / math.sqrt(width) + bias[:, None]
            attention = scores.masked_fill(distance[rows] < 0, -math.inf).softmax(-1)
            attentions.append(attention)
            x = x[:, :, rows] + attention @ v @ self.W_O[:, None, layer]
        logits = F.rms_norm(x, (width,)) @ self.head[:, None]
        return Prediction(logits.log_softmax(-1), attentions[-1], attentions[0])


def causal(count: int, length: int, device: torch.device | str = "cpu") -> Bool[Tensor, "query key"]:
    """Return which keys each of the last `count` positions sees: itself and all before.

    >>> causal(2, 3).tolist()
    [[True, True, False], [True, True, True]]
    """
    positions = torch.arange(length, device=device)
    return positions <= positions[length - count :, None]
