"""The arms of addition: positional encodings, masks, and residual connections that are removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from joma.arguments import InputError, choice, whole
from joma.models.transformer import CHOICES

REMOVED = {
    "attention": (False, True),
    "mlp": (True, False),
    "both": (False, False),
}  # residual connections that are left: (attention, MLP)
ALL_LAYERS = "all"
BASELINE = "none causal"
ENCODED = tuple(name for name in CHOICES["positions"] if name != "none")


@dataclass(frozen=True)
class Arm:
    """A decoder's positional encoding, its mask, and its residual connections (attention, MLP) in each layer."""

    positions: str = "none"
    mask: str = "causal"
    residual: tuple[tuple[bool, bool], ...] | None = None

    @property
    def kind(self) -> tuple[bool, str]:
        """What arms must have in common to be one model: whether the encoding is rotary (or added), and the mask."""
        return self.positions == "rotary", self.mask


def all_arms(layers: int) -> dict[str, Arm]:
    """Return all arms by name: encoding x mask, and without encoding under a causal mask, residuals removed.

        "none causal", …, "rotary full"; "attention 0", …, "mlp all", "both all": what is removed and in which layer

    >>> len(all_arms(6)), all_arms(2)["mlp 1"].residual
    (29, ((True, True), (True, False)))
    """
    targets = [*range(whole("layers", layers)), ALL_LAYERS]
    table = {
        f"{positions} {mask}": Arm(positions, mask) for positions in CHOICES["positions"] for mask in CHOICES["mask"]
    }
    for part, left in REMOVED.items():
        for target in targets:
            residual = tuple(left if target in (layer, ALL_LAYERS) else (True, True) for layer in range(layers))
            table[f"{part} {target}"] = Arm(residual=residual)
    return table


def select_arms(names: Iterable[str] | None, layers: int) -> dict[str, Arm]:
    """Return the arms of these names, all if None, in the order of `all_arms`; an unknown name lists the known ones."""
    table = all_arms(layers)
    wanted = set(table) if names is None else {*names}
    for name in sorted(wanted):
        choice("arms", name, table)
    if not wanted:
        raise InputError("arms", "at least one name", "none", f"choose from {', '.join(table)}")
    return {name: arm for name, arm in table.items() if name in wanted}


def group_arms(arms: Mapping[str, Arm], max_size: int) -> Iterator[dict[str, Arm]]:
    """Yield groups of at most `max_size` arms of one kind, which can train as one model; sizes differ by at most 1.

    >>> arms = select_arms(["none full", "none causal", "mlp 0", "mlp all"], layers=1)
    >>> [list(group) for group in group_arms(arms, 2)]
    [['none causal', 'mlp 0'], ['mlp all'], ['none full']]
    """
    by_kind: dict[tuple[bool, str], dict[str, Arm]] = {}
    for name, arm in arms.items():
        by_kind.setdefault(arm.kind, {})[name] = arm
    for members in by_kind.values():
        for names in np.array_split(list(members), -(-len(members) // max_size)):
            yield {str(name): members[str(name)] for name in names}
