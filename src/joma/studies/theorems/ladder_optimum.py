"""The optimum of attention and weights together, for linear units that predict the next token at every position.

A finite sample would be memorised. So the targets are the exact probabilities of the next token, and the sample is
large: what is minimised is close to the loss on the population. The loss is flat along many directions: attention to a
token that is better not attended to at all has its optimum at infinity. There L-BFGS stops far from the optimum, and
Newton's method in a trust region, with the exact Hessian, arrives in tens of steps.
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from scipy.optimize import minimize
from torch import Tensor

from joma.arguments import whole
from joma.models.one_layer import OneLayer
from joma.studies.surprisal import expected_surprisal
from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_loss import FreeLogits, NextTokenLoss, ProductLogits
from joma.studies.theorems.ladder_task import Task, TrainedLadderConfig
from joma.study import Context

LOGITS = {"free": "all-free", "product": "all-product"}  # the arms whose models are optimised
LOSSES = {"free": FreeLogits, "product": ProductLogits}
SAMPLE = -2  # the step of the stream that the sample is drawn at
ITERATIONS = 300  # of Newton's method, at most
GRADIENT = 1e-6  # the norm of the gradient at which it stops


def optimum(config: TrainedLadderConfig, context: Context) -> xr.Dataset:
    """Minimise the loss over all parameters by Newton's method in float64, with free and with product logits.

    Returns:
        Over `seed` and `logits`: `trained_optimum_entropy` and `trained_optimum_loss` on the probe, as of trained arms,
        and `trained_optimum_gradient`, the norm of the gradient that is left.
    """
    with context.progress.task("ladder, optimum", total=len(LOGITS)) as progress:
        parts = []
        for logits in LOGITS:
            parts.append(_optimum(config, context, logits))
            progress.advance()
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


def _optimum(config: TrainedLadderConfig, context: Context, logits: str) -> xr.Dataset:
    task = Task(config, context, [ARMS[LOGITS[logits]]], dtype=torch.float64)
    sample = task.draw(SAMPLE, whole("trained_optimum", config.trained_optimum))
    tokens = task.inputs(sample)
    target = next_token_probabilities(task.worlds["overlap"], tokens)
    generators = context.generators("ladder, weights")
    model = OneLayer(task.model_config, generators=generators, dtype=torch.float64).to(context.device)
    for number in range(len(context.seeds)):
        _minimise(model, number, logits, NextTokenLoss(tokens[number].cpu().numpy(), target[number].cpu().numpy()))
    measured = task.measure(model, ITERATIONS)
    values = {
        "entropy": measured["entropy"],
        "loss": measured["probe_loss"],
        "gradient": _gradient_norm(model, tokens, target),
    }
    variables = {f"trained_optimum_{name}": ("seed", value.cpu().numpy()) for name, value in values.items()}
    return xr.Dataset(variables, {"seed": list(context.seeds)})


@torch.no_grad()
def _minimise(model: OneLayer, number: int, logits: str, loss: NextTokenLoss) -> None:
    """Give the seed of this number the parameters of least loss that are reached from its initial ones."""
    objective = LOSSES[logits](loss)
    parameters = [model.get_parameter(name)[number] for name in objective.names]
    start = np.concatenate([parameter.cpu().numpy().ravel() for parameter in parameters])
    options = {"gtol": GRADIENT, "maxiter": ITERATIONS}
    result = minimize(
        objective.gradient, start, jac=True, hess=objective.hessian, method="trust-exact", options=options
    )
    for parameter, values in zip(parameters, np.split(result.x, len(parameters)), strict=True):
        parameter.copy_(torch.as_tensor(values).view_as(parameter))


def _gradient_norm(
    model: OneLayer, tokens: Int[Tensor, "seed sample position"], target: Float[Tensor, "seed sample position token"]
) -> Float[Tensor, " seed"]:
    """Return the norm of each seed's gradient, of the model itself and not of the loss that was minimised."""
    with torch.enable_grad():
        loss = expected_surprisal(model(tokens), target).mean((-2, -1)).sum()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
    return torch.stack([gradient.square().flatten(1).sum(-1) for gradient in gradients]).sum(0).sqrt()
