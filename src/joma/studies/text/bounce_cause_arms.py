"""The arms of `bounce-cause`: what is changed about a language model whose attention turns sparse, then dense again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from joma.arguments import InputError, choice, distinct
from joma.models.config import SITES

UNCHANGED = "free"  # the label in stored runs
DROPOUTS: dict[str, tuple[str, ...]] = {"none": (), "embedding": ("embedding",), "published": SITES}
PARTS: dict[str, tuple[str, ...]] = {  # what can be frozen: patterns of the names of parameters
    "embedding": ("embedding",),
    "query-key": ("layers.*.attention.[qk]*",),
    "value": ("layers.*.attention.value.*",),
    "projection": ("layers.*.attention.projection.*",),
    "mlp": ("layers.*.lower.*", "layers.*.upper.*"),
    "head": ("head.*",),
}
VALUE_PATH = ("value", "projection")


@dataclass(frozen=True)
class Arm:
    """A model of one setting, and what of it does not train.

    Attributes:
        label: completes the sentence "Entropy recovers with …".
        frozen: names of `PARTS`, whose parameters keep their values.
        later: whether they train up to the step at which the entropy of the same seed of the unchanged model is least.
        positions: sinusoidal or none.
        dropout: a name of `DROPOUTS`; None for that of the setting.
        optimiser: a name of `joma.train.optimiser.OPTIMISERS`.
        restart: whether Adam starts afresh at every epoch, if it does so in the setting.
        memorised: whether the training text is a small part of the text, read again and again.
        layers, activation, norm: as of `Variant`.
    """

    label: str = field(compare=False)
    frozen: tuple[str, ...] = ()
    later: bool = False
    positions: str = "sinusoidal"
    dropout: str | None = None
    optimiser: str = "adam"
    restart: bool = True
    memorised: bool = False
    layers: int = 1
    activation: str = "relu"
    norm: str = "post"

    @property
    def kind(self) -> Arm:
        """What arms must have in common to be one model: all but what is frozen, and the positional encoding."""
        return replace(self, label="", frozen=(), later=False, positions="")


ARMS: dict[str, Arm] = {
    UNCHANGED: Arm("nothing changed"),
    "linear": Arm("a linear MLP", activation="linear"),
    "mlp": Arm("the MLP frozen at its start", frozen=("mlp",)),
    "no-norm": Arm("no LayerNorm", norm="none"),
    "one-adam": Arm("one Adam throughout", restart=False),
    "sgd": Arm("SGD instead of Adam", optimiser="sgd"),
    "dropout-none": Arm("no dropout", dropout="none"),
    "dropout-embedding": Arm("dropout on embeddings only", dropout="embedding"),
    "dropout-published": Arm("dropout as published", dropout="published"),
    "linear-dropout-none": Arm("a linear MLP and no dropout", activation="linear", dropout="none"),
    "linear-dropout-embedding": Arm(
        "a linear MLP and dropout on embeddings only", activation="linear", dropout="embedding"
    ),
    "linear-dropout-published": Arm("a linear MLP and dropout as published", activation="linear", dropout="published"),
    "value-path": Arm("W_V and W_O frozen at their start", frozen=VALUE_PATH),
    "value": Arm("W_V frozen at its start", frozen=("value",)),
    "projection": Arm("W_O frozen at its start", frozen=("projection",)),
    "query-key": Arm("W_Q and W_K frozen at their start", frozen=("query-key",)),
    "embedding": Arm("embeddings frozen at their start", frozen=("embedding",)),
    "head": Arm("the head frozen at its start", frozen=("head",)),
    "no-positions": Arm("no positional encoding", positions="none"),
    "value-path-embedding": Arm("W_V, W_O and embeddings frozen at their start", frozen=(*VALUE_PATH, "embedding")),
    "mlp-embedding": Arm("the MLP and embeddings frozen at their start", frozen=("mlp", "embedding")),
    "linear-value-path": Arm(
        "a linear MLP, and W_V and W_O frozen at their start", frozen=VALUE_PATH, activation="linear"
    ),
    "mlp-later": Arm("the MLP frozen from the minimum on", frozen=("mlp",), later=True),
    "value-path-later": Arm("W_V and W_O frozen from the minimum on", frozen=VALUE_PATH, later=True),
    "embedding-later": Arm("embeddings frozen from the minimum on", frozen=("embedding",), later=True),
    "head-later": Arm("the head frozen from the minimum on", frozen=("head",), later=True),
    "query-key-later": Arm("W_Q and W_K frozen from the minimum on", frozen=("query-key",), later=True),
    "depth-2": Arm("2 layers", layers=2),
    "depth-5": Arm("5 layers", layers=5),
    "depth-2-linear": Arm("2 layers with linear MLPs", layers=2, activation="linear"),
    "depth-2-value-path": Arm("2 layers, and W_V and W_O frozen at their start", layers=2, frozen=VALUE_PATH),
    "memorised": Arm("a text so small that it is memorised", dropout="none", restart=False, memorised=True),
}


def select_arms(names: Iterable[str], *, dropout: str, restart: bool) -> dict[str, Arm]:
    """Return the unchanged model and the arms of these names; an unknown name lists the known ones.

    Args:
        names: of `ARMS`, without the unchanged model, which is always trained.
        dropout: where the unchanged model has dropout, a name of `DROPOUTS`.
        restart: whether Adam starts afresh at every epoch in the unchanged model.

    >>> list(select_arms(["mlp", "dropout-none"], dropout="embedding", restart=True))
    ['free', 'mlp', 'dropout-none']
    """
    choice("dropout_at", dropout, DROPOUTS)
    arms: dict[str, Arm] = {}
    for name in (UNCHANGED, *distinct("arms", tuple(names), least=0)):
        arm = choice("arms", name, ARMS)
        arm = replace(arm, dropout=arm.dropout or dropout, restart=arm.restart and restart)
        equal = next((other for other, settings in arms.items() if settings == arm), None)
        if equal is not None:
            raise InputError("arms", "models that differ", f"{name}, which is {equal} here", f"leave {name} out")
        arms[name] = arm
    return arms


def group_arms(arms: Mapping[str, Arm]) -> list[dict[str, Arm]]:
    """Return the arms in groups of one kind, each of which trains as one model.

    >>> arms = select_arms(["linear", "mlp", "no-positions"], dropout="none", restart=True)
    >>> [list(group) for group in group_arms(arms)]
    [['free', 'mlp', 'no-positions'], ['linear']]
    """
    groups: dict[Arm, dict[str, Arm]] = {}
    for name, arm in arms.items():
        groups.setdefault(arm.kind, {})[name] = arm
    return list(groups.values())
