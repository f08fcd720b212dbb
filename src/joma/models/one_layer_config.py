"""The sizes and switches of a one-layer model: the choices, and a config that is checked when it is created."""

from __future__ import annotations

from dataclasses import dataclass

from joma.arguments import InputError, choice, flag, scalar, whole
from joma.models.block import ACTIVATIONS, ATTENTIONS

SWITCHES: dict[str, dict[str, str]] = {
    "positions": {"one": "one query token sees the context", "all": "every position sees those up to itself"},
    "logits": {"free": "a parameter z [query, token]", "product": "(W_Q u_q) · (W_K e_l)"},
    "embeddings": {"fixed": "never trained", "learned": "trained, starting from the fixed ones"},
}


@dataclass(frozen=True)
class OneLayerConfig:
    """The sizes and switches of a one-layer model; by default it is JoMA's block with softmax attention.

    Attributes:
        tokens, outputs: numbers of contextual tokens M and of outputs: classes, or M to predict the next token.
        hidden: units of the MLP, with a head above them; with 0 the outputs are the units themselves.
        queries: number of query tokens. With all positions the queries are the tokens themselves: leave it out.
        dim: length of an embedding; by default just enough for orthonormal ones.
        positions, logits, embeddings: names of `SWITCHES`. attention, activation: of `ATTENTIONS`, `ACTIVATIONS`.
        head_width: length of queries and keys of product logits, `dim` if not given.
        values: length of value vectors W_V e_l; with 0 there is neither W_V nor W_O.
        residual: whether u_q is added. norm: LayerNorm of f, without gain or offset, before w.
        skip: whether f is added to the MLP's output, which `upper` maps to the length of f, before the head.
        scale: standard deviation of the initial w, `upper` and head. scale_z, scale_qk, scale_values: of z, of W_Q and
            W_K, and of W_V and W_O.
    """

    tokens: int
    outputs: int
    hidden: int = 0
    queries: int = 1
    dim: int | None = None
    positions: str = "one"
    logits: str = "free"
    embeddings: str = "fixed"
    attention: str = "softmax"
    activation: str = "linear"
    head_width: int | None = None
    values: int = 0
    residual: bool = True
    norm: bool = False
    skip: bool = False
    scale: float = 0.01
    scale_z: float = 0.01
    scale_qk: float = 0.1
    scale_values: float = 0.1

    def __post_init__(self) -> None:
        for name in ("tokens", "outputs", "hidden", "queries", "dim", "head_width", "values"):
            if (value := getattr(self, name)) is not None or name not in ("dim", "head_width"):
                object.__setattr__(self, name, whole(name, value, low=0 if name in ("hidden", "values") else 1))
        for name, table in {**SWITCHES, "attention": ATTENTIONS, "activation": ACTIVATIONS}.items():
            choice(name, getattr(self, name), table)
        for name in ("residual", "norm", "skip"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name in ("scale", "scale_z", "scale_qk", "scale_values"):
            scalar(name, getattr(self, name), low=0.0)
        if self.positions == "all" and self.queries != 1:
            raise InputError("queries", "left out with all positions", self.queries, "the tokens are the queries")
        if self.skip and not self.hidden:
            raise InputError("hidden", "at least 1 with `skip`", self.hidden, "give the MLP hidden units")

    @property
    def columns(self) -> int:
        """The number of embeddings: those of the tokens, and of the query tokens unless the queries are tokens."""
        return self.tokens + (self.queries if self.positions == "one" else 0)

    def shapes(self, dim: int) -> dict[str, tuple[int, int]]:
        """Return the shape of each parameter that the switches call for, without the seed's axis."""
        shapes = {"w": (dim, self.hidden or self.outputs)}
        if self.logits == "free":
            shapes["z"] = (self.queries if self.positions == "one" else self.tokens, self.tokens)
        else:
            shapes |= dict.fromkeys(("W_Q", "W_K"), (dim, self.head_width or dim))
        if self.values:
            shapes |= {"W_V": (dim, self.values), "W_O": (self.values, dim)}
        if self.skip:
            shapes["upper"] = (self.hidden, dim)
        if self.hidden:
            shapes["head"] = (dim if self.skip else self.hidden, self.outputs)
        return shapes
