"""The parts of a decoder: the possible choices, and a config that is checked when it is created."""

from __future__ import annotations

from dataclasses import dataclass

from joma.arguments import InputError, choice, described, scalar, sequence, whole
from joma.models.block import ACTIVATIONS
from joma.models.initialisation import INITS

CHOICES: dict[str, dict[str, str]] = {
    "norm": {"pre": "x + f(norm(x)), and norm(x) at the end", "post": "norm(x + f(x))", "none": "x + f(x)"},
    "positions": {"none": "", "sinusoidal": "added", "learned": "added", "rotary": "queries and keys are rotated"},
    "mask": {"causal": "a position sees itself and earlier ones", "full": "every position sees every other"},
    "attention": {
        "trained": "softmax(q·k/√d)",
        "frozen": "W_Q and W_K keep their initial values",
        "uniform": "equal weights",
    },
}
SITES = ("embedding", "weights", "attention", "hidden", "mlp")  # of dropout; attention and mlp mean their outputs


@dataclass(frozen=True)
class DecoderConfig:
    """The parts of a decoder.

    Attributes:
        hidden: hidden units of an MLP, 4 width if not given. outputs: classes of the head, the vocabulary if not given.
        length: the maximum number of positions; needed with positional encodings.
        norm, positions, mask, attention: names of `CHOICES`. activation, init: names of `ACTIVATIONS`, `INITS`.
        residual: whether the input of attention and of the MLP is added to their output: one bool for all layers, or a
            pair (attention, MLP) for each layer.
        projection: whether attention's output passes through W_O.
        alike: whether all layers start as copies of the first one, as those of `torch.nn.TransformerEncoder` do.
        tied: whether the head is the transposed embedding, without bias.
        scale_embedding: whether embeddings are multiplied by √width.
        dropout: the probability at each of `sites`, names of `SITES`.
    """

    vocabulary: int
    width: int
    layers: int = 1
    heads: int = 1
    hidden: int | None = None
    outputs: int | None = None
    length: int | None = None
    norm: str = "pre"
    positions: str = "none"
    mask: str = "causal"
    attention: str = "trained"
    activation: str = "relu"
    init: str = "linear"
    alike: bool = False
    residual: bool | tuple[tuple[bool, bool], ...] = True
    projection: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    head_bias: bool = True
    tied: bool = False
    scale_embedding: bool = False
    dropout: float = 0.0
    sites: tuple[str, ...] = SITES

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "hidden", "outputs", "length"):
            if (value := getattr(self, name)) is not None or name in ("vocabulary", "width", "layers", "heads"):
                object.__setattr__(self, name, whole(name, value))
        for name, table in {**CHOICES, "activation": ACTIVATIONS, "init": INITS}.items():
            choice(name, getattr(self, name), table)
        for site in sequence("sites", self.sites, "names of sites"):
            choice("sites", site, dict.fromkeys(SITES))
        if self.width % self.heads:
            raise InputError("heads", f"a divisor of the width {self.width}", self.heads, "change one of them")
        if self.positions == "rotary" and (head_width := self.width // self.heads) % 2:
            raise InputError("width", "even in each head with rotary positions", head_width, "change width or heads")
        if self.positions != "none" and self.length is None:
            remedy = "give the maximum number of positions"
            raise InputError("length", f"given with {self.positions} positions", None, remedy)
        if self.tied and self.outputs not in (None, self.vocabulary):
            raise InputError("outputs", f"the vocabulary, {self.vocabulary}, if tied", self.outputs, "untie the head")
        if not isinstance(self.residual, bool):
            expected = f"a bool, or a pair (attention, mlp) for each of {self.layers} layers"
            pairs = sequence("residual", self.residual, expected)
            if len(pairs) != self.layers or any(len(sequence("residual", pair, expected)) != 2 for pair in pairs):
                raise InputError("residual", expected, described(self.residual), "give one pair for each layer")
        dropout = self.dropout if isinstance(self.dropout, float) else scalar("dropout", self.dropout)
        if not 0.0 <= dropout < 1.0:
            raise InputError("dropout", "in [0, 1)", self.dropout, "give the probability of dropping a number")

    @property
    def parameter_count(self) -> int:
        """The number of parameters of one seed, to within the few of biases and norms.

        >>> DecoderConfig(vocabulary=10, width=8, layers=2).parameter_count
        1696
        """
        hidden, outputs = self.hidden or 4 * self.width, self.outputs or self.vocabulary
        tables = self.vocabulary + (0 if self.tied else outputs) + (self.length or 0) * (self.positions != "none")
        return self.width * (tables + self.layers * (4 * self.width + 2 * hidden))
