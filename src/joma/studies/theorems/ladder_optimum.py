"""The optimum of attention and weights together, for linear units that predict the next token at every position.

A finite sample would be memorised. So the targets are the exact probabilities of the next token, and the sample is
large: what is minimised is close to the loss on the population.
"""

from __future__ import annotations

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma.arguments import whole
from joma.models.one_layer import OneLayer
from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_task import Task, TrainedLadderConfig
from joma.studies.theorems.surprisal import expected_surprisal
from joma.study import Context

LOGITS = {"free": "all-free", "product": "all-product"}  # the arms whose models are optimised
SAMPLE = -2  # the step of the stream that the sample is drawn at
ITERATIONS, HISTORY = 300, 30  # of L-BFGS


def optimum(config: TrainedLadderConfig, context: Context) -> xr.Dataset:
    """Minimise the loss over all parameters by L-BFGS in float64, all seeds at once, with free and product logits.

    Returns:
        Over `seed` and `logits`: `trained_optimum_entropy` and `trained_optimum_loss` on the probe, as of trained arms,
        and `trained_optimum_gradient`, the norm of the gradient that is left.
    """
    parts = [_optimum(config, context, arm) for arm in LOGITS.values()]
    return xr.concat(parts, dim=xr.IndexVariable("logits", list(LOGITS))).transpose("seed", ...)


def next_token_probabilities(
    frequency: Float[Tensor, "seed label token"], token: Int[Tensor, "seed sample position"]
) -> Float[Tensor, "seed sample position token"]:
    """Return P[next token | tokens up to each position], if tokens are independent given a class that is uniform.

        P[l | prefix] = Σ_c P[c | prefix] P[l | c],    P[c | prefix] ∝ Π_j P[token_j | c]

    >>> frequency = torch.tensor([[[0.75, 0.25], [0.25, 0.75]]])
    >>> next_token_probabilities(frequency, torch.tensor([[[0, 1]]]))
    tensor([[[[0.6250, 0.3750],
              [0.5000, 0.5000]]]])
    """
    seeds, samples, positions = token.shape
    by_token = frequency.log().mT
    index = token.flatten(1)[..., None].expand(-1, -1, by_token.shape[-1])
    evidence = by_token.gather(1, index).view(seeds, samples, positions, -1).cumsum(-2)
    return evidence.softmax(-1) @ frequency[:, None]


def _optimum(config: TrainedLadderConfig, context: Context, arm: str) -> xr.Dataset:
    task = Task(config, context, [ARMS[arm]], dtype=torch.float64)
    sample = task.draw(SAMPLE, whole("trained_optimum", config.trained_optimum))
    tokens = task.inputs(sample)
    target = next_token_probabilities(task.worlds["overlap"], tokens)
    generators = context.generators("ladder, weights")
    model = OneLayer(task.model_config, generators=generators, dtype=torch.float64).to(context.device)
    solver = torch.optim.LBFGS(
        model.parameters(),
        max_iter=ITERATIONS,
        history_size=HISTORY,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        total = expected_surprisal(model(tokens), target).mean((-2, -1)).sum()
        total.backward()
        return total

    with torch.enable_grad():
        solver.step(loss)
        loss()
    gradient = sum((p.grad**2).flatten(1).sum(-1) for p in model.parameters() if p.grad is not None)
    measured = task.measure(model, ITERATIONS)
    values = {
        "entropy": measured["entropy"],
        "loss": measured["probe_loss"],
        "gradient": torch.as_tensor(gradient).sqrt(),
    }
    variables = {f"trained_optimum_{name}": ("seed", value.cpu().numpy()) for name, value in values.items()}
    return xr.Dataset(variables, {"seed": list(context.seeds)})
