"""From JoMA's block to a language model of one layer: the same model, each premise of the block a switch.

    z = free, or (W_Q u_q) · (W_K e_l)         b = attention(z_q, x)
    f = Σ_l b_l e_l, or W_O Σ_l b_l W_V e_l    plus u_q with `residual`
    outputs = φ(w · f), or head · φ(w · f)     with `norm` w acts on LayerNorm(f), with `skip` f passes the MLP by

Without positional encodings a context is what it contains, so that one code path serves both kinds of contexts: the
frequencies of tokens that one query sees, and sequences in which every position is a query and sees those up to itself.
Many seeds are one model, as in `joma.models.block`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from joma import memory
from joma.arguments import InputError, described, instance
from joma.models.block import (
    ACTIVATIONS,
    ATTENTIONS,
    StoredAttention,
    check_contexts,
    embedding_columns,
    given_embeddings,
)
from joma.models.initialisation import COPIES
from joma.models.one_layer_config import OneLayerConfig
from joma.noise import check_generators

PARAMETERS = ("w", "z", "W_Q", "W_K", "W_V", "W_O", "upper", "head")  # each has its own random stream, in this order


class OneLayer(StoredAttention):
    """One layer of attention with everything that the block of Theorem 1 leaves out, each part a switch.

    Every seed draws each parameter from a stream of its own, which its generator seeds, in float64 and on the CPU: a
    seed's numbers depend neither on the other seeds nor on the device, and a switch changes no other parameter.

    Args:
        config: sizes and switches.
        generators: one for each seed.
        embeddings: those of the tokens and, with one query, of the query tokens as columns; columns of the identity if
            not given.
        dtype: of the parameters.

    Attributes:
        E: the embeddings as columns, [dim, column] if they are fixed and [seed, dim, column] if they are learned.
        w, z, W_Q, W_K, W_V, W_O, upper, head: the parameters as [seed, in, out], and z as [seed, query, token]; None
            where the switches call for none.
        b: attention of the last forward pass, [seed, row, token]; a row is a sample, or a position of a sample.

    >>> config = OneLayerConfig(tokens=5, outputs=5, hidden=7, positions="all", logits="product", norm=True)
    >>> model = OneLayer(config, generators=[torch.Generator().manual_seed(seed) for seed in range(3)])
    >>> model(torch.tensor([[0, 3, 3, 1]])).shape
    torch.Size([3, 1, 4, 5])
    """

    subject = "model"
    E: Tensor
    w: nn.Parameter
    z: nn.Parameter | None
    W_Q: nn.Parameter | None
    W_K: nn.Parameter | None
    W_V: nn.Parameter | None
    W_O: nn.Parameter | None
    upper: nn.Parameter | None
    head: nn.Parameter | None

    def __init__(
        self,
        config: OneLayerConfig,
        *,
        generators: Sequence[torch.Generator],
        embeddings: Float[Tensor, "dim column"] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        check_generators(generators)
        instance("config", config, OneLayerConfig, "pass `OneLayerConfig(tokens=..., outputs=...)`")
        self.config = config
        self.attention, self.activation = ATTENTIONS[config.attention], ACTIVATIONS[config.activation]
        embeddings, dim = given_embeddings(embeddings, config.dim, config.columns)
        shapes = config.shapes(dim)
        numbers = dim * config.columns + sum(math.prod(shape) for shape in shapes.values())
        needed = COPIES * len(generators) * numbers * dtype.itemsize
        memory.check("config", needed, "choose fewer tokens, hidden units or seeds")
        columns = embedding_columns(embeddings, config.dim, config.columns).to(dtype)
        if config.embeddings == "learned":
            self.E = nn.Parameter(columns.repeat(len(generators), 1, 1))
        else:
            self.register_buffer("E", columns.clone())
        draws = _draw(shapes, config, generators)
        for name in PARAMETERS:
            self.register_parameter(name, nn.Parameter(draws[name].to(dtype)) if name in draws else None)

    @property
    def U_C(self) -> Float[Tensor, "*seed dim token"]:
        """The embeddings e_l of the contextual tokens, as columns."""
        return self.E[..., : self.config.tokens]

    @property
    def u_q(self) -> Float[Tensor, "*seed dim query"]:
        """The embeddings of the queries, as columns."""
        return self.U_C if self.config.positions == "all" else self.E[..., self.config.tokens :]

    @property
    def v(self) -> Float[Tensor, "seed token hidden"]:
        """The weights of w in the basis of contextual tokens, `v_k = U_Cᵀ w_k`."""
        return self.U_C.mT @ self.w

    @property
    def query_vectors(self) -> Float[Tensor, "seed query head_width"]:
        """The queries W_Q u_q of product logits."""
        return self.u_q.mT @ _present("W_Q", self.W_Q, "logits='product'")

    @property
    def key_vectors(self) -> Float[Tensor, "seed token head_width"]:
        """The keys W_K e_l of product logits."""
        return self.U_C.mT @ _present("W_K", self.W_K, "logits='product'")

    @property
    def value_vectors(self) -> Float[Tensor, "seed token value"]:
        """The value vectors p_l = W_V e_l."""
        return self.U_C.mT @ _present("W_V", self.W_V, "values=...")

    @property
    def logits(self) -> Float[Tensor, "seed query token"]:
        """The attention logits of every query for every token: the parameter z, or products of queries and keys."""
        return self.query_vectors @ self.key_vectors.mT if self.z is None else self.z

    def attend(self, x: Tensor, query: Tensor | None = None) -> Float[Tensor, "seed ..."]:
        """Return b [seed, sample, token], or [seed, sample, position, token] with all positions.

        Args:
            x: with one query, the contexts as frequencies of tokens [sample, token] or [seed, sample, token]; with all
                positions, tokens [sample, position] or [seed, sample, position].
            query: with one query, the query token of each sample [sample] or [seed, sample]; None if there is only one.
        """
        rows, query = self._rows(x, query)
        return self._unflatten(self._attend(rows, query), x)

    def forward(self, x: Tensor, query: Tensor | None = None) -> Float[Tensor, "seed ..."]:
        """Return the outputs [seed, sample, output], or [seed, sample, position, output] with all positions.

        The arguments are those of `attend`. It stores b for `mean_attention` and, after the backward pass, `pull`.
        """
        rows, query = self._rows(x, query)
        b = self._store(self._attend(rows, query))
        f = b @ (self.U_C.mT if self.W_O is None else self.value_vectors @ self.W_O)
        if self.config.residual:
            f = f + self._select(self.u_q.mT, query)
        return self._unflatten(self._outputs(f), x)

    def _outputs(self, f: Float[Tensor, "seed row dim"]) -> Float[Tensor, "seed row output"]:
        """Return the outputs of the network above attention."""
        h = self.activation((F.layer_norm(f, f.shape[-1:]) if self.config.norm else f) @ self.w)
        if self.head is None:
            return h
        return (h if self.upper is None else f + h @ self.upper) @ self.head

    def _attend(self, x: Float[Tensor, "*seed row token"], query: Tensor | None) -> Float[Tensor, "seed row token"]:
        return self.attention(self._select(self.logits, query), x.to(self.w.dtype))

    def _select(self, table: Float[Tensor, "... query _"], query: Tensor | None) -> Float[Tensor, "... row _"]:
        """Return the table's line for the query of each row, exactly: a product with one-hot rows.

        The backward pass of an index would add in no fixed order on CUDA, and row by row on the CPU.
        """
        return table if query is None else _one_hot(query, table.shape[-2], table.dtype) @ table

    def _rows(self, x: Tensor, query: Tensor | None) -> tuple[Float[Tensor, "*seed row token"], Tensor | None]:
        """Return the frequencies of tokens that each row sees, and its query."""
        if self.config.positions == "one":
            check_contexts(x, query, self.logits)
            return x, query
        if query is not None:
            raise InputError("query", "left out with all positions", described(query), "the tokens are the queries")
        self._check_tokens(x)
        return prefix_frequencies(x, self.config.tokens, self.w.dtype).flatten(-3, -2), x.flatten(-2)

    def _unflatten(self, rows: Float[Tensor, "seed row _"], x: Tensor) -> Float[Tensor, "seed ..."]:
        return rows if self.config.positions == "one" else rows.unflatten(1, x.shape[-2:])

    def _check_tokens(self, tokens: Tensor) -> None:
        seeds, count = len(self.w), self.config.tokens
        if tokens.ndim < 2 or tokens.shape[:-2] not in ((), (seeds,)) or tokens.is_floating_point():
            expected = f"whole numbers [sample, position] or [seed, sample, position] of {seeds} seeds"
            raise InputError("x", expected, described(tokens), "give token numbers")
        # Values are checked on the CPU only: a GPU would have to be waited for.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= count:
                raise InputError("x", f"in [0, {count - 1}]", f"{low} to {high}", "raise `tokens`")


def prefix_frequencies(
    tokens: Int[Tensor, "*batch position"], count: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch position {count}"]:
    """Return the frequency of each of `count` tokens among the positions up to each position, itself included.

    >>> prefix_frequencies(torch.tensor([0, 1, 1, 1]), 2)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [0.3333, 0.6667],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    counts = _one_hot(tokens, count, dtype).cumsum(dim=-2)
    return counts / torch.arange(1, tokens.shape[-1] + 1, dtype=dtype, device=tokens.device)[:, None]


def _one_hot(tokens: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return one-hot rows; `F.one_hot` would wait for the GPU to check its input."""
    return (tokens[..., None] == torch.arange(count, device=tokens.device)).to(dtype)


def _draw(
    shapes: Mapping[str, tuple[int, int]], config: OneLayerConfig, generators: Sequence[torch.Generator]
) -> dict[str, Tensor]:
    """Return the initial values of the parameters, [seed, in, out], each from its own stream."""
    scales = dict.fromkeys(PARAMETERS, config.scale) | {"z": config.scale_z}
    scales |= dict.fromkeys(("W_Q", "W_K"), config.scale_qk) | dict.fromkeys(("W_V", "W_O"), config.scale_values)
    values: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for generator in generators:
        seeds = torch.randint(2**62, (len(PARAMETERS),), generator=generator).tolist()
        for name, seed in zip(PARAMETERS, seeds, strict=True):
            if name in shapes:
                stream = torch.Generator().manual_seed(seed)
                values[name].append(scales[name] * torch.randn(shapes[name], generator=stream, dtype=torch.float64))
    return {name: torch.stack(of_seeds) for name, of_seeds in values.items()}


def _present(name: str, parameter: nn.Parameter | None, option: str) -> nn.Parameter:
    if parameter is None:
        raise InputError("config", f"{option} for {name}", "no such parameter", "change the config", must="have")
    return parameter
