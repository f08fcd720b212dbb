"""The trainings of the full model of the study `induction-phases`: attention layers alone, with Adam.

The arms are two layers at several learning rates, two layers in a world without a unigram to learn, and one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import schedule
from joma.arguments import distinct, positive, scalar, whole
from joma.studies.common_axes import NAMES, STEP
from joma.studies.related.induction_data import CHAIN, DOUBLY, WORLDS
from joma.studies.related.induction_models import AttentionOnly, Prediction, causal
from joma.studies.related.induction_training import InductionConfig, Task, mean_axes
from joma.studies.surprisal import mean_surprisal
from joma.study import Arms, Context
from joma.study.context import LabelledTraining
from joma.train import Optimiser, Record

RECORDS = 80
ONE_LAYER, NO_UNIGRAM = "one layer", "doubly stochastic"


@dataclass(frozen=True)
class FullArm:
    """One training of the full model: the world of its sequences, its number of layers and its learning rate."""

    name: str
    world: str
    layers: int
    rate: float


def full_arms(rates: Sequence[float]) -> list[FullArm]:
    """Return the arms at these learning rates, of which the first is judged.

    >>> [arm.name for arm in full_arms((0.005, 0.01))]
    ['two layers, 0.005', 'two layers, 0.01', 'doubly stochastic', 'one layer']
    """
    positive("full_rates", distinct("full_rates", rates), ndim=1)
    chains = [FullArm(two_layers(rate), CHAIN, 2, rate) for rate in rates]
    return [*chains, FullArm(NO_UNIGRAM, DOUBLY, 2, rates[0]), FullArm(ONE_LAYER, CHAIN, 1, rates[0])]


def two_layers(rate: float) -> str:
    """Return the name of the arm of two layers at a learning rate.

    >>> two_layers(0.005)
    'two layers, 0.005'
    """
    return f"two layers, {rate:g}"


class FullTask(Task):
    """The losses and measures of full models of equally many layers.

    Attributes:
        unigram, bayes: what these predictors answer on the probe, [model, sample, query, symbol].
    """

    def __init__(self, config: InductionConfig, context: Context, arms: Sequence[FullArm]) -> None:
        worlds = [WORLDS[arm.world] for arm in arms]
        super().__init__(context, worlds, symbols=config.symbols, length=config.full_length, probe=config.probe)
        self.layers, self.batch = arms[0].layers, whole("full_batch", config.full_batch)
        self.width, self.scale = (
            whole("full_width", config.full_width),
            scalar("full_scale", config.full_scale, low=0.0),
        )
        pairs = [self.references(world, probe) for world, probe in zip(worlds, self.probe, strict=True)]
        self.unigram, self.bayes = (torch.cat(parts).float() for parts in zip(*pairs, strict=True))
        self.visible = causal(self.count, self.length, context.device)

    def loss(self, model: AttentionOnly, step: Tensor) -> Float[Tensor, " model"]:
        """Return the loss of each model on the sequences of a step."""
        tokens, target = self.split(self.draw(step, self.batch))
        return mean_surprisal(model(tokens, self.count).log_probability, target)

    @torch.no_grad()
    def measure(self, model: AttentionOnly, _step: int) -> dict[str, Tensor]:
        """Return on the probe: the loss, distances from the predictors, two attentions, and the common axes.

        `previous` is the first layer's attention to the position before, and `match` the last layer's to the positions
        after the symbol that queries; both are means over rows.
        """
        tokens, target = self.split(self.probe)
        prediction = model(tokens, self.count)
        return {
            "probe_loss": mean_surprisal(prediction.log_probability, target),
            "from_unigram": _divergence(self.unigram, prediction),
            "from_bayes": _divergence(self.bayes, prediction),
            "previous": prediction.first.diagonal(-1, dim1=-2, dim2=-1).mean((-2, -1))
            if self.layers > 1
            else torch.zeros_like(target[:, 0, 0], dtype=prediction.attention.dtype),
            "match": _match(tokens, prediction.attention),
            **mean_axes(prediction.attention, model.W_O[:, -1], self.visible),
        }


def _divergence(reference: Tensor, prediction: Prediction) -> Float[Tensor, " model"]:
    """Return the mean of KL(reference ‖ model) over samples and positions, in nats."""
    excess = torch.special.xlogy(reference, reference) - reference * prediction.log_probability
    return excess.sum(-1).mean((-2, -1))


def _match(tokens: Tensor, attention: Float[Tensor, "model sample query key"]) -> Float[Tensor, " model"]:
    """Return the attention to keys whose previous symbol is the symbol that queries, as a mean over rows."""
    asking = tokens[..., -attention.shape[-2] :]
    previous = torch.cat([torch.full_like(tokens[..., :1], -1), tokens[..., :-1]], dim=-1)
    return (attention * (asking[..., None] == previous[..., None, :])).sum(-1).mean((-2, -1))


def train_full(config: InductionConfig, context: Context) -> xr.Dataset:
    """Train every arm; arms of equally many layers are one model.

    Returns:
        Over `arm`, `seed` and `full_step`: `full_loss`, `from_unigram`, `from_bayes`, `previous` and `match`; over
        `arm` and `seed` the losses of predictors that were not trained; and the common axes of the first arm.
    """
    steps, arms = whole("full_steps", config.full_steps), full_arms(config.full_rates)
    groups = [[arm for arm in arms if arm.layers == layers] for layers in (2, 1)]
    tasks = [FullTask(config, context, group) for group in groups]
    trainings = [_training(context, group, task, steps) for group, task in zip(groups, tasks, strict=True)]
    joined = xr.concat(context.fit_together(trainings), dim="arm").rename(step="full_step", probe_loss="full_loss")
    joined = joined.sel(arm=[arm.name for arm in arms])
    losses = xr.concat([task.baselines(config.smoothing) for task in tasks], dim="world").rename(world="arm")
    axes = joined[list(NAMES)].isel(arm=0, drop=True).rename(full_step=STEP)
    measures = joined[["full_loss", "from_unigram", "from_bayes", "previous", "match"]].astype(np.float32)
    baselines = {f"full_{name}": (("arm", "seed"), values.values) for name, values in losses.items()}
    return measures.assign(baselines).merge(axes)


def _training(context: Context, group: Sequence[FullArm], task: FullTask, steps: int) -> LabelledTraining:
    arms = Arms("arm", [arm.name for arm in group])
    sizes = task.symbols, task.layers, task.width, task.length
    generators = context.generators("full model, weights", arms)
    return LabelledTraining(
        AttentionOnly(*sizes, generators=generators, scale=task.scale),
        task.loss,
        label=f"full model, layers: {task.layers}",
        optimiser=Optimiser("adam", context.per_model([arm.rate for arm in group])),
        steps=steps,
        record=Record(task.measure, at=schedule.logarithmic(RECORDS, steps), gradients=False),
        arms=arms,
    )
