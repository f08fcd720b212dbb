"""The arms of the trained ladder: JoMA's block, a one-layer language model, and both with one premise switched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from joma.models.one_layer_config import OneLayerConfig

UNITS_SCALE, MLP_SCALE = 0.05, 0.2  # of the initial weights: of units that are the outputs, of an MLP and its head
HIDDEN, VALUES = 32, 20
REPEATED = 512  # sequences of a fixed batch


@dataclass(frozen=True)
class Arm:
    """One model of the ladder and how it is trained.

    Attributes:
        about: the title of its panel.
        rung: base, one-in (the base with one premise switched), two-in (two premises of it), top, one-out (the top with
            one switched back), or question (arms that ask why all positions bounce with product logits and not with
            free ones).
        switches: fields of `OneLayerConfig` that differ from the block's.
        optimiser, rate: the optimiser's name and its learning rate.
        speed: factor of the learning rate of the attention logits' parameters.
        world: `overlap` classes, which share their tokens, or `separable` ones.
        constant: whether the gradient at the outputs is constant, 1[k = class] − 1/C, in place of cross entropy's.
        last: whether the last position alone is trained.
        frozen_at: the step after which the weights w are frozen, at the arm's own rate; None for never.
        repeated: the number of sequences that every step reads again; 0 if sequences are drawn afresh at each step.
    """

    about: str
    rung: str
    switches: Mapping[str, Any] = field(default_factory=dict)
    optimiser: str = "sgd"
    rate: float = 0.5
    speed: float = 1.0
    world: str = "overlap"
    constant: bool = False
    last: bool = False
    frozen_at: int | None = None
    repeated: int = 0

    @property
    def all_positions(self) -> bool:
        """Whether every position predicts the next token; one query predicts the class."""
        return self.switches.get("positions") == "all"

    def model(self, *, tokens: int, classes: int) -> OneLayerConfig:
        """Return the sizes and switches of the model."""
        scale = MLP_SCALE if self.switches.get("hidden") else UNITS_SCALE
        outputs = tokens if self.all_positions else classes
        return OneLayerConfig(**{"tokens": tokens, "outputs": outputs, "scale": scale, **self.switches})


def _switched(arm: Arm, about: str, rung: str, switches: Mapping[str, Any] | None = None, **options: Any) -> Arm:
    return replace(arm, about=about, rung=rung, switches={**arm.switches, **(switches or {})}, **options)


BASE = Arm("the block", "base")
TOP = Arm(
    "the language model",
    "top",
    {
        "hidden": HIDDEN,
        "activation": "relu",
        "embeddings": "learned",
        "norm": True,
        "logits": "product",
        "positions": "all",
    },
    optimiser="adam",
    rate=3e-3,
)
ALL = _switched(BASE, "all positions: free", "question", {"positions": "all"}, optimiser="adam", rate=3e-3)
PRODUCT = {"logits": "product"}

ARMS: dict[str, Arm] = {
    "base": BASE,
    "constant": _switched(BASE, "constant gradient", "one-in", constant=True, rate=0.1),
    "separable": _switched(BASE, "separable classes", "one-in", world="separable"),
    "relu": _switched(BASE, "ReLU units", "one-in", {"activation": "relu"}),
    "mlp": _switched(BASE, "ReLU and a head", "one-in", {"activation": "relu", "hidden": HIDDEN}),
    "adam": _switched(BASE, "Adam", "one-in", optimiser="adam", rate=0.01),
    "norm": _switched(BASE, "LayerNorm", "one-in", {"norm": True}, rate=0.1),
    "embeddings": _switched(BASE, "learned embeddings", "one-in", {"embeddings": "learned"}),
    "product": _switched(BASE, "product logits", "one-in", PRODUCT),
    "values": _switched(BASE, "values", "one-in", {"values": VALUES, "scale_values": MLP_SCALE}),
    "positions": _switched(BASE, "all positions", "one-in", {"positions": "all"}),
    "repeated": _switched(BASE, "a fixed batch", "one-in", repeated=REPEATED),
    "constant-relu": _switched(
        BASE, "constant gradient, ReLU", "two-in", {"activation": "relu"}, constant=True, rate=0.1
    ),
    "separable-adam": _switched(BASE, "separable, Adam", "two-in", world="separable", optimiser="adam", rate=0.01),
    "separable-mlp": _switched(
        BASE, "separable, ReLU, head", "two-in", {"activation": "relu", "hidden": HIDDEN}, world="separable"
    ),
    "separable-repeated": _switched(BASE, "separable, fixed batch", "two-in", world="separable", repeated=REPEATED),
    "top": TOP,
    "top-linear": _switched(TOP, "linear units", "one-out", {"activation": "linear"}),
    "top-fixed": _switched(TOP, "fixed embeddings", "one-out", {"embeddings": "fixed"}),
    "top-no-norm": _switched(TOP, "no LayerNorm", "one-out", {"norm": False}),
    "top-sgd": _switched(TOP, "SGD", "one-out", optimiser="sgd", rate=0.3),
    "top-free": _switched(TOP, "free logits", "one-out", {"logits": "free"}),
    "top-one": _switched(TOP, "one query", "one-out", {"positions": "one"}),
    "all-free": ALL,
    "all-free-fast": _switched(ALL, "all positions: free, 10×", "question", speed=10.0),
    "all-product": _switched(ALL, "all positions: product", "question", PRODUCT),
    "all-product-slow": _switched(ALL, "all positions: product, 0.1×", "question", PRODUCT, speed=0.1),
    "all-frozen": _switched(ALL, "all positions: w frozen early", "question", speed=10.0, frozen_at=100),
    "all-rank-1": _switched(ALL, "all positions: rank 1", "question", {**PRODUCT, "head_width": 1}),
    "last-free": _switched(ALL, "last position: free", "question", last=True),
    "last-product": _switched(ALL, "last position: product", "question", PRODUCT, last=True),
    "top-free-fast": _switched(TOP, "model: free logits, 10×", "question", {"logits": "free"}, speed=10.0),
    "base-slow": _switched(BASE, "block: logits 0.1×", "question", speed=0.1),
}
