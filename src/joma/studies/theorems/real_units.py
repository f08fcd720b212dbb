"""Does attention turn dense again without Theorem 4's drive? Blocks with real hidden units, trained on token classes.

A block bounces if the entropy of its attention ends above its minimum over training by more than that of any block with
linear units does, for which Theorem 2 predicts that entropy only falls, and by more than 1 % of its fall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import schedule
from joma.arguments import scalar, whole
from joma.data.tokens import token_classes
from joma.drawing import activation_name
from joma.models.block import ACTIVATIONS, ATTENTIONS, Block, BlockConfig
from joma.probes.entropy import shannon_entropy
from joma.studies import entropy_return
from joma.studies.surprisal import cross_entropy_by_row
from joma.study import Arms, Claim, Context, above, at_most
from joma.train import Optimiser, Record

KINDS_OF_ATTENTION = ("softmax", "exp")
NULL = "linear"
VISIBLE = 0.01  # share of its fall that entropy must regain for a bounce that one can see
UNITS = {name: activation_name(name) for name in (NULL, "relu", "gelu", "silu", "tanh")}
TOKENS = ("gaussian", "random")
AXES = ("attention", "units", "tokens")
RECORDS = 100
STEP = "unit_step"


@dataclass(frozen=True)
class UnitsConfig:
    """The blocks with real units: Figure 2's setting, with as many hidden units as classes."""

    classes: int = 20
    distinct: int = 10
    common: int = 10
    units_steps: int = 6000
    units_rate: float = 0.05
    units_temperature: float = 0.5
    """Of softmax attention."""


class UnitsBlock(Block):
    """Blocks with every attention and every kind of unit as one model: its leading axis is attention, units, rest."""

    def __init__(self, config: BlockConfig, *, temperature: float, generators: Sequence[torch.Generator]) -> None:
        super().__init__(config, generators=generators)
        self.temperature = temperature
        self.attention, self.activation = self.mixed_attention, self.mixed_activation

    def mixed_attention(self, z: Tensor, x: Tensor) -> Tensor:
        """Return b for logits z and contexts x: the first half by softmax attention, the other by exp attention."""
        (z_softmax, z_exp), (x_softmax, x_exp) = z.chunk(2), x.chunk(2)
        return torch.cat(
            [ATTENTIONS["softmax"](z_softmax / self.temperature, x_softmax), ATTENTIONS["exp"](z_exp, x_exp)]
        )

    def mixed_activation(self, y: Tensor) -> Tensor:
        """Apply each kind of unit to its part of y."""
        parts = y.unflatten(0, (len(KINDS_OF_ATTENTION), len(UNITS), -1)).unbind(1)
        return torch.stack([ACTIVATIONS[name](part) for name, part in zip(UNITS, parts, strict=True)], 1).flatten(0, 2)


def train(config: UnitsConfig, context: Context) -> xr.Dataset:
    """Train every attention with every kind of unit on both kinds of tokens by SGD on the classes' cross entropy.

    Returns:
        Over `seed`, `unit_step`, `attention`, `units` and `tokens`: the entropy of attention by its logits alone
        (`units_entropy`) and on the classes' contexts (`units_entropy_contexts`), and `units_loss`.
    """
    steps, rate = whole("units_steps", config.units_steps), scalar("units_rate", config.units_rate, above=0.0)
    temperature = scalar("units_temperature", config.units_temperature, above=0.0)
    arms = Arms("arm", range(len(KINDS_OF_ATTENTION) * len(UNITS) * len(TOKENS)))
    x = _contexts(config, context).to(context.device)
    block_config = BlockConfig(tokens=x.shape[-1], hidden=x.shape[-2], attention="exp")
    generators = context.generators("real units, weights", arms)

    def loss(model: Block, _step: Tensor) -> Tensor:
        """Cross entropy: sample i is class i, and hidden unit k is the logit of class k."""
        return cross_entropy_by_row(model(x))

    def measure(model: Block, _step: int) -> dict[str, Tensor]:
        all_tokens, b = torch.ones_like(x[:, :1]), model.attend(x)
        return {
            "entropy": shannon_entropy(_normalised(model.attend(all_tokens)[:, 0])),
            "entropy_contexts": shannon_entropy(_normalised(b)).mean(-1),
        }

    trajectory = context.fit(
        UnitsBlock(block_config, temperature=temperature, generators=generators),
        loss,
        optimiser=Optimiser("sgd", rate),
        steps=steps,
        record=Record(measure, at=schedule.every(max(1, steps // RECORDS), steps)),
        arms=arms,
        label="real units",
    )
    return _unstack(trajectory[["entropy", "entropy_contexts", "loss"]])


def _unstack(trajectory: xr.Dataset) -> xr.Dataset:
    """Split the arms into their axes."""
    labels = zip(*product(KINDS_OF_ATTENTION, UNITS, TOKENS), strict=True)
    arms = {axis: ("arm", list(names)) for axis, names in zip(AXES, labels, strict=True)}
    split = trajectory.drop_vars("arm").assign_coords(arms).set_index(arm=AXES).unstack("arm")
    split = split.reindex(attention=list(KINDS_OF_ATTENTION), units=list(UNITS), tokens=list(TOKENS))
    return split.rename({str(name): f"units_{name}" for name in split} | {"step": STEP}).transpose("seed", ...)


def _contexts(config: UnitsConfig, context: Context) -> Float[Tensor, "model label token"]:
    """Return the token frequencies of every class; all attentions and units have the same data."""
    data = [
        token_classes(
            kind,
            generators=context.generators("real units, data"),
            classes=config.classes,
            distinct=config.distinct,
            common=config.common,
        )
        for kind in TOKENS
    ]
    return torch.cat([classes.frequency for classes in data]).repeat(len(KINDS_OF_ATTENTION) * len(UNITS), 1, 1)


def _normalised(b: Tensor) -> Tensor:
    return b / b.sum(-1, keepdim=True)


def recovery(entropy: xr.DataArray) -> xr.DataArray:
    """Return the recovery of each block's entropy over training, in nats."""
    return entropy_return.recovery(entropy, STEP)


def null_recovery(entropy: xr.DataArray) -> xr.DataArray:
    """Return the largest recovery of the blocks with linear units, over seeds and tokens, for each attention."""
    return recovery(entropy).sel(units=NULL, drop=True).max(("seed", "tokens"))


def share_regained(entropy: xr.DataArray) -> xr.DataArray:
    """Return the share of its fall that each block's entropy has regained at the end."""
    return entropy_return.share_regained(entropy, STEP)


def linear_return(run: xr.Dataset) -> xr.DataArray:
    """Return the largest share of its fall that the entropy of a seed's linear blocks regains."""
    return share_regained(run.units_entropy).sel(units=NULL).max(("attention", "tokens"), skipna=False)


def bounced(entropy: xr.DataArray) -> xr.DataArray:
    """Return whether each nonlinear block recovers visibly, and by more than every block with linear units."""
    gained, share = recovery(entropy).drop_sel(units=NULL), share_regained(entropy).drop_sel(units=NULL)
    return (gained > null_recovery(entropy)) & (share > VISIBLE)


def share_bounced(attention: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the share of a seed's nonlinear blocks that bounce, over units and kinds of tokens."""
    return lambda run: bounced(run.units_entropy).sel(attention=attention).mean(("units", "tokens"))


def excess(run: xr.Dataset) -> xr.DataArray:
    """Return the mean recovery of a seed's nonlinear blocks less that of its linear ones, in nats."""
    by_unit = recovery(run.units_entropy).mean(("attention", "tokens"), skipna=False)
    return by_unit.drop_sel(units=NULL).mean("units", skipna=False) - by_unit.sel(units=NULL, drop=True)


CLAIMS = (
    *(
        Claim(
            f"units-{attention}",
            f"Most blocks with nonlinear units and {attention} attention turn dense again, more than any linear one.",
            share_bounced(attention),
            above(0.5),
            kind="control",
            quantity="share of blocks whose entropy regains over 1 % of its fall, and more than any linear block's",
            across="interval",
        )
        for attention in KINDS_OF_ATTENTION
    ),
    Claim(
        "units-nonlinear",
        "Trained attention comes back further with nonlinear than with linear units.",
        excess,
        above(0.0),
        kind="control",
        quantity="entropy at the end less its minimum, in nats: mean of the nonlinear less that of the linear blocks",
        across="interval",
    ),
    Claim(
        "units-linear",
        "With linear units, trained attention only gets sparser.",
        linear_return,
        at_most(VISIBLE),
        kind="control",
        quantity="largest share of its fall that the entropy of a seed's linear blocks regains; 1 % can be seen",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out of the real units: how many turn dense again, and how many by more than linear ones."""
    visible, clear = share_regained(run.units_entropy) > VISIBLE, bounced(run.units_entropy)
    nonlinear, linear = visible.drop_sel(units=NULL), visible.sel(units=NULL)
    return (
        f"In blocks trained without that drive attention turns dense again in {int(nonlinear.sum())} of "
        f"{nonlinear.size} with nonlinear units, and in {int(linear.sum())} of {linear.size} with linear ones: it "
        f"regains over {100 * VISIBLE:.0f} % of its fall. It does so by more than in any linear block with the same "
        f"attention in {int(clear.sum())}."
    )
