"""What the models of the study `induction-phases` are trained and measured on, and their trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from joma import schedule
from joma.arguments import scalar, whole
from joma.studies.common_axes import attention_axes
from joma.studies.related.induction_data import Sequences, World, draw
from joma.studies.related.induction_models import Minimal, Prediction, causal
from joma.studies.surprisal import mean_surprisal
from joma.study import Arms, Context
from joma.theory import in_context_markov
from joma.train import Optimiser, Record

PROBE = -1  # the step of the stream at which the probe is drawn: training has no such step
INTERVAL = 10  # steps between two records of the minimal model


@dataclass(frozen=True)
class InductionConfig:
    """The sequences, the minimal model with its oracle, and the full model."""

    symbols: int = 3
    length: int = 48
    """Symbols in a context; the second half of them is judged by the symbol that follows."""
    batch: int = 64
    probe: int = 128
    """Sequences of each seed on which a model is measured."""
    lags: int = 12
    """The minimal model looks back by 1 to this many positions."""
    scale: float = 0.05
    """Standard deviation of the minimal model's initial parameters."""
    smoothing: float = 0.01
    """Share ε of the uniform distribution in the minimal model's prediction."""
    steps: int = 300
    rate: float = 2.0
    """Learning rate of SGD."""
    adam_steps: int = 100
    adam_rate: float = 0.05
    parents: tuple[int, ...] = (1, 2)
    """Lags of the parents where each symbol has several; the minimal model has a head for each."""
    parents_steps: int = 500
    oracle_chains: int = 4000
    """Chains of each seed over which the oracle is averaged."""
    gradient_length: int = 400
    gradient_samples: int = 64
    gradient_a: float = 0.05
    """The gradient is compared with the oracle at A = a I and uniform attention of the first layer."""
    full_steps: int = 0
    """Steps of the full model; 0 leaves it out."""
    full_rates: tuple[float, ...] = (0.005, 0.002, 0.01)
    """Learning rates of Adam; the first is judged."""
    full_length: int = 100
    full_width: int = 24
    full_batch: int = 32
    full_scale: float = 1.0
    """Standard deviation of the full model's initial matrices, times the square root of the width."""


class Task:
    """The sequences of some worlds, one after the other on the leading axis, each with all seeds.

    Attributes:
        worlds: by arm.
        queries: the lags of each model's parents, [model, head].
        probe: the sequences on which models are measured.
    """

    def __init__(self, context: Context, worlds: Sequence[World], *, symbols: int, length: int, probe: int) -> None:
        self.worlds, self.symbols = worlds, whole("symbols", symbols, low=2)
        self.length, self.count = whole("length", length, low=4), whole("length", length) // 2
        self.seeds = torch.tensor(context.seeds, device=context.device)
        self.queries = torch.tensor(context.per_model([world.parents for world in worlds]), device=context.device)
        self.probe = self.draw(PROBE, whole("probe", probe))

    def draw(self, step: Tensor | int, samples: int) -> list[Sequences]:
        """Return the sequences of each world at a step: contexts, and one symbol more."""
        sizes = {"symbols": self.symbols, "samples": samples, "length": self.length + 1}
        by_world = {world: draw(world, self.seeds, step, **sizes) for world in dict.fromkeys(self.worlds)}
        return [by_world[world] for world in self.worlds]

    def split(
        self, sequences: Sequence[Sequences]
    ) -> tuple[Int[Tensor, "model sample _"], Int[Tensor, "model sample _"]]:
        """Return contexts [model, sample, position], and what follows each position of their second half."""
        tokens = torch.cat([part.tokens for part in sequences])
        return tokens[..., :-1], tokens[..., -self.count :]

    def baselines(self, smoothing: float) -> xr.Dataset:
        """Return the losses over `world` and `seed` on the probe, of predictors that were not trained.

        `uniform_loss`; `unigram_loss`, smoothed like the minimal model's prediction; `bayes_loss`; and `kernel_loss` of
        the true law.
        """
        names = ("uniform_loss", "unigram_loss", "bayes_loss", "kernel_loss")
        losses: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for world, sequences in zip(self.worlds, self.probe, strict=True):
            unigram, bayes = self.references(world, sequences)
            target = sequences.tokens[..., -self.count :]
            smoothed = (1 - smoothing) * unigram + smoothing / self.symbols
            uniform = torch.full_like(unigram, 1 / self.symbols)
            predictions = uniform, smoothed, bayes, _true_law(world, sequences, self.count).double()
            for name, prediction in zip(losses, predictions, strict=True):
                losses[name].append(mean_surprisal(prediction.log(), target).cpu().numpy())
        return xr.Dataset({name: (("world", "seed"), np.stack(values)) for name, values in losses.items()})

    def references(self, world: World, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return what single symbols and what Bayes' rule predict in the second half, [seed, sample, query, symbol]."""
        tokens = sequences.tokens[..., :-1].cpu().numpy()
        unigram = in_context_markov.unigram(tokens, symbols=self.symbols)
        bayes = in_context_markov.bayes(tokens, symbols=self.symbols, parents=world.parents)
        device = sequences.tokens.device
        first, second = (torch.from_numpy(part[..., -self.count :, :]).to(device) for part in (unigram, bayes))
        return first, second


def _true_law(world: World, sequences: Sequences, count: int) -> Float[Tensor, "seed sample query symbol"]:
    """Return the probabilities of the symbols to come under the law of each sequence."""
    tokens, kernel = sequences.tokens, sequences.kernel
    targets = torch.arange(tokens.shape[-1] - count, tokens.shape[-1], device=tokens.device)
    symbols = kernel.shape[-1]
    state = torch.zeros_like(tokens[..., targets])
    for lag in world.parents:
        state = state * symbols + tokens[..., targets - lag]
    rows = kernel.flatten(2, -2)
    return rows.gather(2, state[..., None].expand(*state.shape, symbols))


def mean_axes(
    attention: Float[Tensor, "model sample query key"], weight: Tensor, visible: Bool[Tensor, "query key"]
) -> dict[str, Float[Tensor, " model"]]:
    """Return the common axes of each model, as means over samples."""
    stacked = weight[:, None].expand(-1, attention.shape[1], -1, -1)
    axes = attention_axes(attention, stacked, visible.expand_as(attention))
    return {name: values.mean(-1) for name, values in axes.items()}


class MinimalTask(Task):
    """The losses and measures of the minimal model."""

    def __init__(self, config: InductionConfig, context: Context, worlds: Sequence[World]) -> None:
        super().__init__(context, worlds, symbols=config.symbols, length=config.length, probe=config.probe)
        self.config = config
        self.visible = causal(self.count, self.length, context.device)

    def model(self, context: Context, arms: Arms) -> Minimal:
        """Return the model of all arms."""
        return Minimal(
            self.symbols,
            self.queries.shape[1],
            whole("lags", self.config.lags, high=self.length),
            generators=context.generators("minimal model, weights", arms),
            scale=scalar("scale", self.config.scale, low=0.0),
            smoothing=scalar("smoothing", self.config.smoothing, low=1e-6, high=0.5),
        )

    def predict(self, model: Minimal, sequences: Sequence[Sequences]) -> tuple[Prediction, Float[Tensor, " model"]]:
        """Return the prediction and the loss of each model."""
        tokens, target = self.split(sequences)
        prediction = model(tokens, self.queries, self.count)
        return prediction, mean_surprisal(prediction.log_probability, target)

    def loss(self, model: Minimal, step: Tensor) -> Float[Tensor, " model"]:
        """Return the loss of each model on the sequences of a step."""
        return self.predict(model, self.draw(step, self.config.batch))[1]

    @torch.no_grad()
    def measure(self, model: Minimal, _step: int) -> dict[str, Tensor]:
        """Return the loss on the probe, attention to the parents' lags, the diagonal of A, and the common axes."""
        prediction, loss = self.predict(model, self.probe)
        weight = model.lag_weights.gather(-1, (self.queries - 1)[..., None])[..., 0]
        diagonal = model.A.diagonal(dim1=-2, dim2=-1).mean(-1)
        # A stands for the map above attention, which the minimal model does not have.
        common = mean_axes(prediction.attention, model.A[:, 0], self.visible)
        return {"probe_loss": loss, "weight": weight, "diagonal": diagonal, "lag_weight": model.lag_weights, **common}


MINIMAL_DIMS = {"weight": ("head",), "diagonal": ("head",), "lag_weight": ("head", "lag")}


def train_minimal(
    config: InductionConfig, context: Context, worlds: Sequence[World], optimiser: Optimiser, steps: int
) -> tuple[xr.Dataset, xr.Dataset]:
    """Train the minimal model in some worlds of equally many parents; return the trajectory, and the baselines.

    The trajectory is over `world`, `seed`, `step`, `head` and `lag`.
    """
    names = [world.name for world in worlds]
    arms, task = Arms("world", names), MinimalTask(config, context, worlds)
    trajectory = context.fit(
        task.model(context, arms),
        task.loss,
        label=f"minimal model, {optimiser.name}, {', '.join(names)}",
        optimiser=optimiser,
        steps=steps,
        record=Record(task.measure, at=schedule.every(INTERVAL, steps), dims=MINIMAL_DIMS, gradients=False),
        arms=arms,
    )
    return trajectory, task.baselines(config.smoothing).assign_coords(world=names)
