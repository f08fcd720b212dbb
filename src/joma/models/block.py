"""The block of the theory, without approximation: attention, a residual connection, one layer of hidden units.

    b = attention(z_q, x),    f = U_C b + u_q,    h_k = φ(w_k · f + β_k)

Many seeds are one model: every parameter has the seed as its leading axis, and no number passes from one seed to
another. Theorem 1 does not hold with `norm`, `skip` or embeddings that are not orthonormal: these are its controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor, nn

from joma import memory
from joma.arguments import InputError, StateError, choice, instance, scalar, whole
from joma.kernels.gelu import gelu
from joma.models.initialisation import COPIES
from joma.noise import check_generators
from joma.tensors import as_floating

EMBEDDINGS_REMEDY = "give one column for each token, then each query"


def _linear(z: Tensor, x: Tensor) -> Tensor:
    return x * z


def _exp(z: Tensor, x: Tensor) -> Tensor:
    return x * z.exp()


def _softmax(z: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(z + x.log(), dim=-1)  # x exp(z) / Σ x exp(z), without overflow; a token with x = 0 gets 0


ATTENTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"linear": _linear, "exp": _exp, "softmax": _softmax}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda y: y,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,  # slope 0.01 below zero
    "gelu": gelu,  # the exact one, y Φ(y)
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class BlockConfig:
    """The sizes and switches of a block.

    Attributes:
        tokens, hidden: numbers of contextual tokens M_C and of hidden units K.
        queries: number of query tokens M_Q.
        dim: length of an embedding; by default just enough for orthonormal ones, M_C + M_Q.
        attention, activation: names of `ATTENTIONS` and `ACTIVATIONS`.
        temperature: T of softmax attention; the other two have none.
        residual: whether u_q is added. bias: whether there is a bias β.
        norm: LayerNorm of f, without gain or offset, before W. skip: the first K components of f are added to h,
            so that the loss depends on attention also past W. Both break the conservation law.
        scale: standard deviation of the initial `w` and `z`.
    """

    tokens: int
    hidden: int
    queries: int = 1
    dim: int | None = None
    attention: str = "softmax"
    activation: str = "linear"
    temperature: float = 1.0
    residual: bool = True
    bias: bool = False
    norm: bool = False
    skip: bool = False
    scale: float = 0.01

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "queries", "dim"):
            if (value := getattr(self, name)) is not None or name != "dim":
                object.__setattr__(self, name, whole(name, value))
        choice("attention", self.attention, ATTENTIONS)
        choice("activation", self.activation, ACTIVATIONS)
        scalar("scale", self.scale, low=0.0)
        scalar("temperature", self.temperature, above=0.0)
        if self.temperature != 1.0 and self.attention != "softmax":
            expected, remedy = f"1 with {self.attention} attention", "only softmax attention has a temperature"
            raise InputError("temperature", expected, self.temperature, remedy)


class StoredAttention(nn.Module):
    """A module that stores its attention b [seed, sample, token] in the forward pass, and b's gradient after it."""

    subject = "block"  # in the messages of errors

    def __init__(self) -> None:
        super().__init__()
        self.b: Tensor | None = None  # of the last forward pass, with its gradient after the backward pass

    def _store(self, b: Float[Tensor, "seed sample token"]) -> Float[Tensor, "seed sample token"]:
        if b.requires_grad:
            b.retain_grad()
        self.b = b
        return b

    def mean_attention(self, weight: Tensor | None = None) -> Float[Tensor, "seed token"]:
        """Return b̄ = E[b] over the samples of the last forward pass.

        `weight` [sample] or [seed, sample] gives the samples' probabilities; None means uniform.

        >>> block = Block(BlockConfig(tokens=2, hidden=1, scale=0.0), generators=[torch.Generator()])
        >>> h = block(torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64))
        >>> block.mean_attention()
        tensor([[0.7500, 0.2500]], dtype=torch.float64)
        """
        b = self._last_b().detach()
        return b.mean(dim=-2) if weight is None else (weight[..., None] * b).sum(dim=-2)

    def pull(self) -> Float[Tensor, "seed token"]:
        """Return E[b (y · b)] from the last backward pass, for the ledger's gap, with y = −∂loss/∂b of each sample.

        With the loss averaged over samples of weight p_i, ∂loss/∂b_i = −p_i y_i, so that the gradient already contains
        the weights. In a block y = Σ_k g_k h'_k v_k:

            pull = −Σ_i b_i (b_i · ∂loss/∂b_i)

        It contains the whole gradient of b, by every path, also those of `norm` and `skip`.
        """
        b = self._last_b()
        if b.grad is None:
            raise StateError(self.subject, "needs a backward pass first", "call `loss.sum().backward()`")
        values = b.detach()
        return -(values * (values * b.grad).sum(dim=-1, keepdim=True)).sum(dim=-2)

    def _last_b(self) -> Tensor:
        if self.b is None:
            raise StateError(self.subject, "needs a forward pass first", f"call the {self.subject} on some contexts")
        return self.b


class Block(StoredAttention):
    """The block of Theorem 1 for many seeds at once.

        linear: b = x ∘ z_q     exp: b = x ∘ exp(z_q)     softmax: b = x ∘ exp(z_q/T) / Σ_l x_l exp(z_ql/T)
        f = U_C b + u_q,   h_k = φ(w_k · f + β_k)

    Every seed draws `w` and then `z` from its own generator as `scale` times standard normals, on the CPU, so that its
    numbers do not depend on the other seeds or on the device. The bias β starts at zero.

    Args:
        config: sizes and switches.
        generators: one for each seed.
        embeddings: [U_C, u_1..u_{M_Q}] as columns, dim × (M_C + M_Q); by default columns of the identity.
        dtype: of the parameters.

    >>> config = BlockConfig(tokens=3, hidden=2)
    >>> block = Block(config, generators=[torch.Generator().manual_seed(seed) for seed in range(4)])
    >>> block(torch.full((5, 3), 1 / 3)).shape
    torch.Size([4, 5, 2])
    """

    U_C: Float[Tensor, "dim token"]
    u_q: Float[Tensor, "dim query"]

    def __init__(
        self,
        config: BlockConfig,
        *,
        generators: Sequence[torch.Generator],
        embeddings: Float[Tensor, "dim column"] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        check_generators(generators)
        instance("config", config, BlockConfig, "pass `BlockConfig(tokens=..., hidden=...)`")
        self.config, self.attention = config, ATTENTIONS[config.attention]
        self.activation = ACTIVATIONS[config.activation]
        tokens, hidden, queries, scale = int(config.tokens), int(config.hidden), int(config.queries), config.scale
        embeddings, dim = given_embeddings(embeddings, config.dim, tokens + queries)
        numbers = dim * (tokens + queries) + COPIES * len(generators) * (dim * hidden + queries * tokens)
        memory.check("config", numbers * dtype.itemsize, "choose fewer tokens, hidden units or seeds")
        columns = embedding_columns(embeddings, config.dim, tokens + queries).to(dtype)
        if config.skip and hidden > len(columns):
            raise InputError("hidden", f"at most dim = {len(columns)} with `skip`", hidden, "widen `dim`")
        self.register_buffer("U_C", columns[:, :tokens].contiguous())
        self.register_buffer("u_q", columns[:, tokens:].contiguous())
        shapes = (len(columns), hidden), (queries, tokens)
        draws = [
            [scale * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
            for generator in generators
        ]
        self.w = nn.Parameter(torch.stack([w for w, _ in draws]))  # [seed, dim, hidden]
        self.z = nn.Parameter(torch.stack([z for _, z in draws]))  # [seed, query, token]
        self.bias = nn.Parameter(torch.zeros(len(draws), hidden, dtype=dtype)) if config.bias else None

    @property
    def v(self) -> Float[Tensor, "seed token hidden"]:
        """The weights of the hidden units in the basis of contextual tokens, `v_k = U_Cᵀ w_k`."""
        return self.U_C.T @ self.w

    def attend(self, x: Float[Tensor, "*seed sample token"], query: Tensor | None = None) -> Tensor:
        """Return b [seed, sample, token] for contexts x [sample, token] or [seed, sample, token].

        `query` [sample] or [seed, sample] is the query token of each sample; it may be None if there is only one.
        """
        check_contexts(x, query, self.z)
        z = self.z if query is None else _query_logits(self.z, query)
        return self.attention(z / self.config.temperature, x.to(z.dtype))

    def forward(self, x: Float[Tensor, "*seed sample token"], query: Tensor | None = None) -> Tensor:
        """Return h [seed, sample, hidden], and store b for `mean_attention` and, after the backward pass, `pull`."""
        b = self._store(self.attend(x, query))
        f = b @ self.U_C.T
        if self.config.residual:
            f = f + (self.u_q[:, 0] if query is None else self.u_q.T[query])
        if self.config.norm:
            f = F.layer_norm(f, f.shape[-1:])
        y = f @ self.w
        h = self.activation(y if self.bias is None else y + self.bias[:, None])
        return h + f[..., : h.shape[-1]] if self.config.skip else h


def check_contexts(x: Tensor, query: Tensor | None, z: Float[Tensor, "seed query token"]) -> None:
    """Raise `InputError` unless contexts x and their query tokens fit the logits z in shape."""
    seeds, queries, tokens = z.shape
    if x.ndim < 2 or x.shape[-1] != tokens or x.shape[:-2] not in ((), (seeds,)):
        shape = f"[sample, token] or [seed, sample, token] with {tokens} tokens and {seeds} seeds"
        raise InputError("x", shape, f"shape {tuple(x.shape)}", "give each context as token frequencies")
    if query is None and queries > 1:
        raise InputError("query", f"given, one of {queries} for each sample", "None", "pass their indices")
    if query is not None and query.shape not in ((x.shape[-2],), (seeds, x.shape[-2])):
        got = f"shape {tuple(query.shape)} with x of shape {tuple(x.shape)}"
        raise InputError("query", "[sample] or [seed, sample]", got, "give one index for each sample")


def given_embeddings(embeddings: ArrayLike | Tensor | None, dim: int | None, columns: int) -> tuple[Tensor | None, int]:
    """Return the embeddings as a tensor, if any are given, and the dimension that they or the config have."""
    if embeddings is None:
        return None, int(dim or columns)
    expected = "floating [dim, column]"
    tensor = as_floating("embeddings", embeddings, expected=expected, remedy=EMBEDDINGS_REMEDY)
    return tensor, len(tensor) if tensor.ndim else int(dim or columns)


def embedding_columns(embeddings: Tensor | None, dim: int | None, columns: int) -> Tensor:
    """Return the embeddings as columns: those that are given, or else columns of the identity."""
    if embeddings is None:
        dim = columns if dim is None else int(dim)
        if dim < columns:
            remedy = "widen it or give `embeddings`"
            raise InputError("dim", f"at least {columns} for orthonormal embeddings", dim, remedy)
        return torch.eye(dim, columns, dtype=torch.float64)
    if embeddings.ndim != 2 or embeddings.shape[1] != columns or dim not in (None, len(embeddings)):
        expected = f"of shape ({'dim' if dim is None else dim}, {columns})"
        raise InputError("embeddings", expected, tuple(embeddings.shape), EMBEDDINGS_REMEDY)
    return embeddings


def _query_logits(z: Float[Tensor, "seed query token"], query: Int[Tensor, "*seed sample"]) -> Tensor:
    """Return the logits of each sample's query token, [seed, sample, token]."""
    if query.ndim == 1:
        return z[:, query]
    return z[torch.arange(len(z), device=z.device)[:, None], query]
