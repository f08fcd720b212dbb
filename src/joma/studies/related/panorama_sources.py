"""The models that `panorama` puts on common axes, and what each theory predicts of them.

All of it was declared before any curve was looked at. `minimum` is the premise of what docs/ladder.md shows:
entropy ends at that of the least loss, and comes back if the path went below it.

    none    the least loss is at infinity, or there is none: nothing brings attention back
    dense   the least loss, attained or approached, has attention that is known and denser than the path to it
    open    a minimum may exist, but its attention is not known, or not determined: nothing is predicted

`units` is the premise of the rival explanation, JoMA's reading of its Theorems 2 and 4: attention comes back with
nonlinear units, and does not with linear ones.

Models of one `family` share their data and most of their design, and are no independent units of a statistical test.
The families were declared later, in a review of the claims with a p-value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Minimum = Literal["none", "dense", "open"]
Units = Literal["linear", "nonlinear"]
MINIMA: dict[Minimum, str] = {
    "none": "the loss has no minimum",
    "dense": "the least loss has dense attention",
    "open": "attention at the least loss is not known",
}


@dataclass(frozen=True)
class Source:
    """A model whose attention is trained, or whose flow is solved.

    Attributes:
        title: for the legend of a figure.
        minimum: of its loss.
        units: of its network above attention.
        reason: why its minimum is of this kind.
        from_ladder: whether it is of the study `ladder`, which suggested this premise, so that it cannot test it.
        family: the name that it shares with models which differ from it in one thing; "" for a model without relatives.
    """

    title: str
    minimum: Minimum
    units: Units
    reason: str
    from_ladder: bool = False
    family: str = ""

    @property
    def minimum_predicts(self) -> bool | None:
        """Whether attention comes back if the minimum of the loss decides; None where its attention is not known."""
        return None if self.minimum == "open" else self.minimum == "dense"

    @property
    def units_predict(self) -> bool:
        """Whether attention comes back by the activation alone."""
        return self.units == "nonlinear"


_SEPARABLE = "the classes' contexts are linearly independent, so that a separating direction lowers the loss for ever"
_TEXT = "a language model at all positions: contexts of every length, no closed form of the least loss"
_UNIFORM = "naive Bayes with uniform attention attains the Bayes risk (linear units) or is approached (GELU)"

TRAINED: dict[str, Source] = {
    "block": Source("JoMA's block, linear", "none", "linear", _SEPARABLE, family="block"),
    "block-gelu": Source("JoMA's block, GELU", "none", "nonlinear", _SEPARABLE, family="block"),
    "overlap": Source("overlapping classes, linear", "dense", "linear", _UNIFORM, from_ladder=True, family="overlap"),
    "overlap-gelu": Source(
        "overlapping classes, GELU", "dense", "nonlinear", _UNIFORM, from_ladder=True, family="overlap"
    ),
    "scan-snap": Source("Scan and Snap", "none", "linear", "every class has its distinct tokens, and a free decoder"),
    "text": Source("text, one layer", "open", "nonlinear", _TEXT, family="text"),
    "addition": Source(
        "addition", "none", "nonlinear", "the sum is a function of the context, and training has no weight decay"
    ),
}

STORED: dict[str, Source] = {
    "winner": Source("Theorem 2", "none", "linear", "a constant gradient: the loss falls without bound"),
    "sparse-dense": Source(
        "Theorem 4", "dense", "nonlinear", "the drive μ − v ends at v = μ; Theorem 4: the path there is sparser"
    ),
    "polarise": Source("value-softmax", "none", "linear", "one sample and the logistic loss, which has no minimum"),
    "even-pairs": Source("even pairs", "none", "linear", "the logistic loss of data that the layer separates"),
    "max-margin": Source("max-margin", "none", "linear", "fixed values: the loss falls as attention gets harder"),
    "icl-regression": Source(
        "in-context regression", "open", "linear", "the square loss of random tasks: softmax has no closed optimum"
    ),
    "markov-unigram": Source(
        "binary Markov chain", "open", "nonlinear", "the residual path alone attains the least loss, attention is idle"
    ),
    "induction-phases": Source(
        "in-context Markov chain", "open", "linear", "the minimum attends to matching positions: sparse, size unknown"
    ),
    "entropy-floor": Source("text, spectral norms", "open", "nonlinear", _TEXT, family="text"),
    "wikitext": Source("WikiText-2, ReLU", "open", "nonlinear", _TEXT, family="wikitext"),
    "wikitext-linear": Source("WikiText-2, linear", "open", "linear", _TEXT, family="wikitext"),
}

SOURCES = {**TRAINED, **STORED}
