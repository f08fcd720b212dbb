"""The theory's block, exactly: one attention, a residual connection, one layer of hidden units.

    b = attention(z_q, x),    f = U_C b + u_q,    h_k = φ(w_k · f + β_k)

Many seeds are one model: every parameter has the seed as its leading axis, and no number passes from one seed to
another. Three switches break what Theorem 1 says is conserved: `norm`, `skip` and embeddings that are not orthonormal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from joma.arguments import InputError, choice, scalar, whole
from joma.kernels.gelu import gelu
from joma.noise import check_generators


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


class Block(nn.Module):
    """The block of Theorem 1 for many seeds at once.

        linear: b = x ∘ z_q     exp: b = x ∘ exp(z_q)     softmax: b = x ∘ exp(z_q/T) / Σ_l x_l exp(z_ql/T)
        f = U_C b + u_q,   h_k = φ(w_k · f + β_k)

    Every seed draws `w` and then `z` from its own generator as `scale` times standard normals, on the CPU, so that its
    numbers are the same whichever seeds stand beside it and wherever it is trained. The bias β starts at zero.

    Args:
        tokens, hidden: numbers of contextual tokens M_C and of hidden units K.
        generators: one for each seed.
        queries: number of query tokens M_Q.
        dim: length of an embedding; by default just enough for orthonormal ones, M_C + M_Q.
        attention, activation: names of `ATTENTIONS` and `ACTIVATIONS`.
        temperature: T of softmax attention; the other two have none.
        residual: whether u_q is added. bias: whether β is there at all.
        norm: LayerNorm of f, without gain or offset, before W. skip: the first K components of f are added to h,
            so that the loss sees the attention past W. Both break the conservation law.
        embeddings: [U_C, u_1..u_{M_Q}] as columns, dim × (M_C + M_Q); by default columns of the identity.
        scale: standard deviation of the initial `w` and `z`.

    >>> block = Block(tokens=3, hidden=2, generators=[torch.Generator().manual_seed(seed) for seed in range(4)])
    >>> block(torch.full((5, 3), 1 / 3)).shape
    torch.Size([4, 5, 2])
    """

    U_C: Float[Tensor, "dim token"]
    u_q: Float[Tensor, "dim query"]

    def __init__(
        self,
        *,
        tokens: int,
        hidden: int,
        generators: Sequence[torch.Generator],
        queries: int = 1,
        dim: int | None = None,
        attention: str = "softmax",
        activation: str = "linear",
        temperature: float = 1.0,
        residual: bool = True,
        bias: bool = False,
        norm: bool = False,
        skip: bool = False,
        embeddings: Float[Tensor, "dim column"] | None = None,
        scale: float = 0.01,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        tokens, hidden, queries = whole("tokens", tokens), whole("hidden", hidden), whole("queries", queries)
        check_generators(generators)
        self.attention = choice("attention", attention, ATTENTIONS)
        self.activation = choice("activation", activation, ACTIVATIONS)
        self.temperature = _temperature(temperature, attention)
        self.residual, self.norm, self.skip = residual, norm, skip
        scale = scalar("scale", scale, low=0.0)
        columns = _embeddings(embeddings, dim, tokens + queries).to(dtype)
        if skip and hidden > len(columns):
            raise InputError("hidden", f"at most dim = {len(columns)} with `skip`", hidden, "widen `dim`")
        self.register_buffer("U_C", columns[:, :tokens].contiguous())
        self.register_buffer("u_q", columns[:, tokens:].contiguous())
        shapes = (len(columns), hidden), (queries, tokens)
        draws = [[scale * torch.randn(s, generator=g, dtype=dtype) for s in shapes] for g in generators]
        self.w = nn.Parameter(torch.stack([w for w, _ in draws]))  # [seed, dim, hidden]
        self.z = nn.Parameter(torch.stack([z for _, z in draws]))  # [seed, query, token]
        self.bias = nn.Parameter(torch.zeros(len(draws), hidden, dtype=dtype)) if bias else None
        self.b: Tensor | None = None  # what the last forward pass attended to, with its gradient

    @property
    def v(self) -> Float[Tensor, "seed token hidden"]:
        """The hidden units' weights as contextual tokens see them, `v_k = U_Cᵀ w_k`."""
        return self.U_C.T @ self.w

    def attend(self, x: Float[Tensor, "*seed sample token"], query: Tensor | None = None) -> Tensor:
        """Return b [seed, sample, token] for contexts x [sample, token] or [seed, sample, token].

        `query` [sample] or [seed, sample] says which query token each sample has; None will do where there is one.
        """
        self._check(x, query)
        z = self.z if query is None else _rows(self.z, query)
        return self.attention(z / self.temperature, x.to(z.dtype))

    def forward(self, x: Float[Tensor, "*seed sample token"], query: Tensor | None = None) -> Tensor:
        """Return h [seed, sample, hidden]; b is kept, so that `pull` can be read after the backward pass."""
        b = self.attend(x, query)
        if b.requires_grad:
            b.retain_grad()
        self.b = b
        f = b @ self.U_C.T
        if self.residual:
            f = f + (self.u_q[:, 0] if query is None else self.u_q.T[query])
        if self.norm:
            f = F.layer_norm(f, f.shape[-1:])
        y = f @ self.w
        h = self.activation(y if self.bias is None else y + self.bias[:, None])
        return h + f[..., : h.shape[-1]] if self.skip else h

    def mean_attention(self, weight: Tensor | None = None) -> Float[Tensor, "seed token"]:
        """Return b̄ = E[b] over the last forward pass; `weight` [sample] or [seed, sample] sums to one, None is uniform.

        >>> block = Block(tokens=2, hidden=1, generators=[torch.Generator()], scale=0.0)
        >>> h = block(torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64))
        >>> block.mean_attention()
        tensor([[0.7500, 0.2500]], dtype=torch.float64)
        """
        b = self._kept().detach()
        return b.mean(dim=-2) if weight is None else (weight[..., None] * b).sum(dim=-2)

    def pull(self) -> Float[Tensor, "seed token"]:
        """Return E[b (Σ_k g_k h'_k v_k · b)], what the ledger's gap is made of, from the last backward pass.

        With the loss averaged over samples of weight p_i, ∂loss/∂b_i = −p_i Σ_k g_k h'_k v_k, so that the weights are
        in the gradient already:

            pull = −Σ_i b_i (b_i · ∂loss/∂b_i)

        With `norm` or `skip` it holds all that the loss sends back to b, whichever way it came.
        """
        b = self._kept()
        if b.grad is None:
            raise InputError("loss", "propagated back first", "no gradient of b", "call `loss.sum().backward()`")
        kept = b.detach()
        return -(kept * (kept * b.grad).sum(dim=-1, keepdim=True)).sum(dim=-2)

    def _kept(self) -> Tensor:
        if self.b is None:
            raise InputError("block", "run forward first", "no forward pass", "call the block on some contexts")
        return self.b

    def _check(self, x: Tensor, query: Tensor | None) -> None:
        seeds, queries, tokens = self.z.shape
        if x.ndim < 2 or x.shape[-1] != tokens or x.shape[:-2] not in ((), (seeds,)):
            shape = f"[sample, token] or [seed, sample, token] with {tokens} tokens and {seeds} seeds"
            raise InputError("x", shape, f"shape {tuple(x.shape)}", "give each context as token frequencies")
        if query is None and queries > 1:
            raise InputError("query", f"given, one of {queries} for each sample", "None", "pass their indices")
        if query is not None and query.shape not in ((x.shape[-2],), (seeds, x.shape[-2])):
            got = f"shape {tuple(query.shape)} beside x {tuple(x.shape)}"
            raise InputError("query", "[sample] or [seed, sample]", got, "give one index for each sample")


def _temperature(temperature: float, attention: str) -> float:
    value = scalar("temperature", temperature, low=0.0)
    if value == 0.0:
        raise InputError("temperature", "above 0", value, "give a positive number")
    if value != 1.0 and attention != "softmax":
        raise InputError("temperature", f"1 with {attention} attention", value, "only softmax attention has one")
    return value


def _embeddings(given: Tensor | None, dim: int | None, columns: int) -> Tensor:
    if given is None:
        dim = columns if dim is None else whole("dim", dim)
        if dim < columns:
            remedy = "widen it or give `embeddings`"
            raise InputError("dim", f"at least {columns}, or no embeddings are orthonormal", dim, remedy)
        return torch.eye(dim, columns, dtype=torch.float64)
    if given.ndim != 2 or given.shape[1] != columns or dim not in (None, len(given)):
        expected = f"of shape ({'dim' if dim is None else dim}, {columns})"
        raise InputError("embeddings", expected, tuple(given.shape), "give one column for each token, then each query")
    return given


def _rows(z: Float[Tensor, "seed query token"], query: Int[Tensor, "*seed sample"]) -> Tensor:
    """Pick every sample's own logits: [seed, sample, token]."""
    if query.ndim == 1:
        return z[:, query]
    return z[torch.arange(len(z), device=z.device)[:, None], query]
