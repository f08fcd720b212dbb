"""The trained part of `icl-regression`: whole matrices, several layers and softmax attention, on sampled prompts.

All models of a seed see the same prompts, new ones at every step, and are measured on the same probe. Their loss there
is compared with that of gradient descent on the same prompts, so that most of the sampling error cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from joma import schedule
from joma.arguments import distinct, scalar, whole
from joma.studies.common_axes import NAMES, STEP, attention_axes
from joma.studies.related.icl_regression_flows import FlowConfig, gamma
from joma.studies.related.icl_regression_model import PromptAttention, PromptConfig, PromptSource
from joma.study import Arms, Context
from joma.theory import in_context
from joma.theory.in_context_descent import BestDescent, best_descent, descent_losses, sample_covariances
from joma.train import Optimiser, Record

PROBE = -1  # the step at which the probe is drawn: training has no such step
POPULATION = 2306_00297  # seed of the prompts that stand for the population, the same ones in every run
RECORDS = 20


@dataclass(frozen=True)
class TrainedConfig(FlowConfig):
    """The trained models and their prompts."""

    batch: int = 64
    """New prompts of each seed at every step of Adam."""
    probe: int = 2048
    """Prompts of each seed on which models are measured."""
    whole_heads: tuple[int, ...] = (1,)
    """Numbers of heads with which one layer is trained by SGD, from random matrices and with the other blocks zero."""
    whole_steps: int = 1000
    whole_batch: int = 256
    """New prompts of each seed at every step of SGD."""
    whole_rate: float = 0.02
    whole_scale: float = 0.05
    layers: tuple[int, ...] = (1, 2)
    layer_steps: int = 500
    layer_rate: float = 0.01
    layer_scale: float = 0.05
    covariances: int = 2000
    """Prompts that stand for the population where the best steps of gradient descent are searched for."""
    searches: int = 6
    label_noise: float = 1.0
    """Standard deviation of the labels' noise in prompts on which one more layer is trained; 0 leaves it out."""
    softmax_heads: tuple[int, ...] = (1, 2)
    softmax_steps: int = 500
    softmax_rate: float = 0.01
    softmax_scale: float = 0.1


def train(config: TrainedConfig, context: Context) -> xr.Dataset:
    """Train all models; return their losses on the probe, and what gradient descent reaches."""
    check(config)
    task = Task(config, context)
    parts = [_whole(config, context, task), _layers(config, context, task), _softmax(config, context, task)]
    return xr.merge([*parts, _noisy(config, context)] if config.label_noise else parts)


def check(config: TrainedConfig) -> None:
    """Raise `InputError` if the models cannot be trained with this config."""
    for name in ("whole_heads", "layers", "softmax_heads"):
        for number in distinct(name, getattr(config, name)):
            whole(name, number)
    for name in ("batch", "whole_batch", "covariances", "searches", "whole_steps", "layer_steps", "softmax_steps"):
        whole(name, getattr(config, name))
    whole("probe", config.probe, low=2)
    for name in ("whole_rate", "whole_scale", "layer_rate", "layer_scale", "softmax_rate", "softmax_scale"):
        scalar(name, getattr(config, name), above=0.0)
    scalar("label_noise", config.label_noise, low=0.0)


class Task:
    """The prompts of all models, and the trainings on them.

    Attributes:
        probe: the prompts on which models are measured.
        one_step: the loss of the best single step of gradient descent on the probe, [seed].

    Args:
        config, context: of the study.
        label_noise: standard deviation of the labels' noise.
    """

    def __init__(self, config: TrainedConfig, context: Context, *, label_noise: float = 0.0) -> None:
        self.config, self.context = config, context
        sizes = config.spectrum, config.length
        self.source = PromptSource(*sizes, context.seeds, context.device, label_noise=label_noise)
        self.probe = self.source.draw(PROBE, config.probe)
        self.one_step = self.descent_loss(np.diag(in_context.preconditioner(*sizes, label_noise))[None])

    @torch.no_grad()
    def descent_loss(self, steps: np.ndarray) -> np.ndarray:
        """Return the loss of steps of gradient descent [step, direction, direction] on the probe, [seed]."""
        losses = self.probe.losses(descent_model(steps, len(self.context.seeds)).to(self.context.device))
        return losses.double().mean(dim=-1).cpu().numpy()

    def fit(
        self,
        model: PromptConfig,
        blocks: Sequence[str],
        optimiser: Optimiser,
        steps: int,
        *,
        batch: int,
        label: str,
        axes: bool = False,
    ) -> xr.Dataset:
        """Train a model with each choice of trained blocks, all from the same start and on the same prompts.

        Returns:
            Over `blocks`, `seed` and `step`: the `probe_loss`, the `steps` of descent and the `rank_one` product that
            other blocks of a single layer add to them; with `axes` the common axes of softmax attention.
        """
        arms = Arms("blocks", list(blocks))
        probe = self.probe.repeat(len(blocks))

        def loss(model: PromptAttention, step: Tensor) -> Tensor:
            prompts = self.source.draw(step, batch).repeat(len(blocks))
            return prompts.losses(model).mean(dim=-1)

        @torch.no_grad()
        def measure(model: PromptAttention, _step: int) -> dict[str, Tensor]:
            values = {
                "probe_loss": probe.losses(model).double().mean(dim=-1),
                "steps": model.steps(),
                "rank_one": model.rank_one(),
            }
            if axes:
                heads = attention_axes(model.query_attention(probe.tokens), model.P[:, 0])
                values |= {name: heads[name].mean(dim=-1) for name in NAMES}
            return values

        generators = self.context.generators(f"icl-regression, {model.attention} weights", arms)
        return self.context.fit(
            PromptAttention(model, self.context.per_model(list(blocks)), generators=generators),
            loss,
            label=f"icl-regression, {label}",
            optimiser=optimiser,
            steps=steps,
            record=Record(
                measure,
                at=schedule.every(max(1, steps // RECORDS), steps),
                dims=dict.fromkeys(("steps", "rank_one"), ("layer", "row", "column")),
                gradients=False,
            ),
            arms=arms,
        )


def descent_model(steps: np.ndarray, seeds: int) -> PromptAttention:
    """Return layers of linear attention that make the given steps of gradient descent, the same in every seed."""
    config = PromptConfig(steps.shape[-1], layers=len(steps), scale=0.0, value=1.0)
    model = PromptAttention(config, "descent", generators=[torch.Generator() for _ in range(seeds)])
    with torch.no_grad():
        model.Q[:, :, 0, :-1, :-1] = -torch.from_numpy(steps).to(model.Q.dtype)
    return model


def _decaying(rate: float, steps: int) -> Optimiser:
    """Return Adam with a learning rate that falls to zero, so that no noise of single steps is left at the end.

    Several layers are polynomials of high degree in the prompt, and rare prompts have gradients of any size: hence the
    clipping.
    """
    return Optimiser("adam", rate, clip=1.0, schedules={"*": lambda step: 1 - step / steps})


def _whole(config: TrainedConfig, context: Context, task: Task) -> xr.Dataset:
    """Train one layer by SGD from the same random matrices: all blocks, or with the other blocks zero."""
    rows = []
    for heads in config.whole_heads:
        model = PromptConfig(len(config.spectrum), heads=heads, scale=config.whole_scale)
        trained = task.fit(
            model,
            ("descent", "whole"),
            Optimiser("sgd", config.whole_rate),
            config.whole_steps,
            batch=config.whole_batch,
            label=f"whole, {heads} heads",
        )
        last = trained.sel(blocks="whole", drop=True).isel(step=-1, layer=0)
        sizes = {name: np.sqrt((last[name] ** 2).sum(("row", "column"))) for name in ("steps", "rank_one")}
        share = sizes["rank_one"] / (sizes["rank_one"] + sizes["steps"])
        rows.append(xr.Dataset({"whole_loss": trained.probe_loss, "rank_one_share": share}))
    joined = xr.concat(rows, dim=xr.Variable("whole_heads", list(config.whole_heads)))
    joined = joined.rename(step="whole_step", blocks="whole_blocks").transpose("seed", ...)
    return joined.assign_coords(seed=list(context.seeds)).assign(one_step_loss=("seed", task.one_step))


def best_steps(config: TrainedConfig) -> tuple[dict[int, BestDescent], np.ndarray]:
    """Search for the best steps of gradient descent; return them by number, and the covariances of the search."""
    generator = np.random.default_rng(POPULATION)
    covariances = sample_covariances(config.spectrum, config.length, config.covariances, generator)
    best = {
        layers: best_descent(layers, covariances, config.spectrum, generator, starts=config.searches)
        for layers in sorted({*config.layers, *(layers - 1 for layers in config.layers if layers > 1)})
    }
    return best, covariances


def _layers(config: TrainedConfig, context: Context, task: Task) -> xr.Dataset:
    """Train layers of linear attention by Adam beside the best steps of descent: as such, or transforming x as well."""
    best, covariances = best_steps(config)
    rows = []
    for layers in config.layers:
        model = PromptConfig(len(config.spectrum), layers=layers, scale=config.layer_scale, value=1.0)
        optimiser = _decaying(config.layer_rate, config.layer_steps)
        label, kinds = f"{layers} layers", ("descent", "transform")
        curves = task.fit(model, kinds, optimiser, config.layer_steps, batch=config.batch, label=label)
        trained = curves.steps.sel(blocks="descent").isel(step=-1).values.astype(np.float64)
        reached = [_mean_loss(steps, covariances, config.spectrum) for steps in trained]
        previous = best[layers - 1].loss if layers > 1 else sum(config.spectrum) / 2
        rows.append(
            xr.Dataset(
                {
                    "descent_loss": ("seed", np.array(reached)),
                    "best_loss": best[layers].loss,
                    "previous_loss": previous,
                    "best_spread": float(np.ptp(best[layers].losses)),
                    "best_probe_loss": ("seed", task.descent_loss(best[layers].steps)),
                    "layer_loss": curves.probe_loss.transpose("seed", ...),
                },
                {"seed": list(context.seeds)},
            )
        )
    joined = xr.concat(rows, dim=xr.Variable("layers", list(config.layers)))
    return joined.rename(step="layer_step", blocks="layer_blocks").transpose("seed", ...)


def _mean_loss(steps: np.ndarray, covariances: np.ndarray, spectrum: tuple[float, ...]) -> float:
    """Return the mean loss of trained steps, NaN if their training diverged."""
    return float(descent_losses(steps, covariances, spectrum).mean()) if np.isfinite(steps).all() else float("nan")


def _softmax(config: TrainedConfig, context: Context, task: Task) -> xr.Dataset:
    """Train one layer of softmax attention by Adam; the model with most heads has the common axes."""
    rows, axes = [], xr.Dataset()
    for heads in config.softmax_heads:
        most = heads == max(config.softmax_heads)
        sizes = {"attention": "softmax", "scale": config.softmax_scale, "value": 1.0}
        model = PromptConfig(len(config.spectrum), heads=heads, **sizes)
        optimiser = _decaying(config.softmax_rate, config.softmax_steps)
        label, batch = f"softmax, {heads} heads", config.batch
        curves = task.fit(model, ("whole",), optimiser, config.softmax_steps, batch=batch, label=label, axes=most)
        trajectory = curves.isel(blocks=0)
        rows.append(trajectory.probe_loss.drop_vars("blocks"))
        axes = trajectory[list(NAMES)].drop_vars("blocks").rename(step=STEP) if most else axes
    losses = xr.concat(rows, dim=xr.Variable("softmax_heads", list(config.softmax_heads)))
    shorter = in_context.least_loss(config.spectrum, max(1, config.length - 1))
    losses = losses.rename(step="softmax_step").transpose("seed", ...)
    fields = {"softmax_loss": losses, "one_less_loss": shorter}
    return xr.merge([xr.Dataset(fields), axes]).assign_coords(seed=list(context.seeds))


def _noisy(config: TrainedConfig, context: Context) -> xr.Dataset:
    """Train one layer as descent on prompts with noisy labels; return its exact risk on such prompts.

    Beside it the risks of the optimum for these prompts and of the optimum for labels without noise.
    """
    sizes, noise = (config.spectrum, config.length), config.label_noise
    model = PromptConfig(len(config.spectrum), scale=config.layer_scale, value=1.0)
    optimiser, label = _decaying(config.layer_rate, config.layer_steps), "noisy labels"
    task = Task(config, context, label_noise=noise)
    curves = task.fit(model, ("descent",), optimiser, config.layer_steps, batch=config.batch, label=label)
    trained = curves.steps.isel(blocks=0, step=-1, layer=0).values.astype(np.float64)
    risks = [
        float(in_context.population_loss(step, *sizes, noise)) if np.isfinite(step).all() else np.nan
        for step in trained
    ]
    return xr.Dataset(
        {
            "noisy_loss": ("seed", np.array(risks)),
            "noisy_least_loss": in_context.least_loss(*sizes, noise),
            "noisy_clean_loss": float(in_context.population_loss(np.diag(gamma(config)), *sizes, noise)),
        },
        {"seed": list(context.seeds)},
    )
