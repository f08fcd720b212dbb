"""The oracle of the study `induction-phases`: the dependence at each lag, and autograd's gradient beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from joma import noise
from joma.arguments import whole
from joma.studies.related.induction_data import CHAIN, WORLDS, World, draw, draw_kernels
from joma.studies.related.induction_models import Minimal
from joma.studies.related.induction_training import InductionConfig
from joma.studies.surprisal import mean_surprisal
from joma.study import Context
from joma.theory.in_context_markov import context_dependence, lag_dependence, saddle_gradients

ORACLE, GRADIENT = -2, -3  # the steps of the stream at which chains and sequences are drawn: training has none of them
CHUNK = 1000  # chains whose windows are in memory at once
ROWS = 16  # sequences of each seed that are differentiated at once


def dependence(config: InductionConfig, context: Context, worlds: Sequence[World]) -> xr.DataArray:
    """Return c_δ = tr C_δ over `world`, `seed`, `head` and `lag`, averaged over chains of these worlds."""
    chains = whole("oracle_chains", config.oracle_chains)
    values = np.stack([_traces(config, context, world, chains) for world in worlds])
    return xr.DataArray(values, {"world": [world.name for world in worlds]}, ("world", "seed", "head", "lag"))


def _traces(config: InductionConfig, context: Context, world: World, chains: int) -> np.ndarray:
    """Return c_δ [seed, head, lag]; a head's query is the symbol at its parent's lag."""
    key = noise.key(torch.tensor(context.seeds), ORACLE)
    kernels = _normalised(draw_kernels(world, key, symbols=config.symbols, samples=chains))
    lags = range(1, config.lags + 1)
    traces = [
        [
            np.trace(
                lag_dependence(
                    kernels[:, first : first + CHUNK],
                    lags,
                    parents=world.parents,
                    query=parent,
                    smoothing=config.smoothing,
                ),
                axis1=-2,
                axis2=-1,
            )
            for first in range(0, chains, CHUNK)
        ]
        for parent in world.parents
    ]
    return np.stack([np.concatenate(parts, axis=1).mean(axis=1) for parts in traces], axis=1)


def gradient(config: InductionConfig, context: Context) -> xr.Dataset:
    """Return the minimal model's gradients near A = 0 in long contexts of chains, beside the oracle's.

    Over `seed` and `lag`: `gradient`, −∂L/∂r by autograd at A = aI; `gradient_predicted`, the oracle's for long
    contexts, averaged over the very same chains; over `seed`: `gradient_a` and `gradient_a_predicted`, the means of
    the diagonal of −∂L/∂A at A = 0; and `gradient_a_error`, the largest distance of −∂L/∂A from the oracle's for
    contexts of this length, as a share of the largest entry.
    """
    samples, length = (
        whole("gradient_samples", config.gradient_samples),
        whole("gradient_length", config.gradient_length),
    )
    seeds, lags = torch.tensor(context.seeds), range(1, config.lags + 1)
    sizes = {"symbols": config.symbols, "samples": samples, "length": length + 1}
    sequences = draw(WORLDS[CHAIN], seeds, GRADIENT, **sizes)
    first_layer, _ = _autograd(config, sequences.tokens, config.gradient_a)
    _, second_layer = _autograd(config, sequences.tokens, 0.0)
    options = {"query": 1, "smoothing": config.smoothing}
    long = lag_dependence(_normalised(sequences.kernel), lags, **options).mean(axis=1)
    finite = np.stack(
        [
            context_dependence(tokens, lags, symbols=config.symbols, first=length - length // 2, **options)
            for tokens in sequences.tokens.numpy()
        ]
    )
    uniform = np.full(config.lags, 1 / config.lags)
    product = config.gradient_a * np.eye(config.symbols)
    predicted, exact = (saddle_gradients(matrices, uniform, product) for matrices in (long, finite))
    error = np.abs(second_layer - exact.second_layer).max((-2, -1)) / np.abs(second_layer).max((-2, -1))
    return xr.Dataset(
        {
            "gradient": (("seed", "lag"), first_layer),
            "gradient_predicted": (("seed", "lag"), predicted.first_layer),
            "gradient_a": ("seed", _mean_diagonal(second_layer)),
            "gradient_a_predicted": ("seed", _mean_diagonal(predicted.second_layer)),
            "gradient_a_error": ("seed", error),
        }
    )


def _autograd(config: InductionConfig, tokens: Tensor, a: float) -> tuple[np.ndarray, np.ndarray]:
    """Return −∂L/∂r [seed, lag] and −∂L/∂A [seed, symbol, symbol] at A = aI and r = 0, in float64."""
    generators = [torch.Generator() for _ in tokens]
    options = {"scale": 0.0, "smoothing": config.smoothing, "dtype": torch.float64}
    model = Minimal(config.symbols, 1, config.lags, generators=generators, **options)
    with torch.no_grad():
        model.A.add_(a * torch.eye(config.symbols, dtype=torch.float64))
    queries, count = torch.ones(len(tokens), 1, dtype=torch.long), (tokens.shape[-1] - 1) // 2
    for rows in tokens.split(ROWS, dim=1):
        log_probability = model(rows[..., :-1], queries, count).log_probability
        loss = mean_surprisal(log_probability, rows[..., -count:]) * (rows.shape[1] / tokens.shape[1])
        loss.sum().backward()
    first_layer, second_layer = (_negative_gradient(parameter) for parameter in (model.r, model.A))
    return first_layer[:, 0], second_layer[:, 0]


def _negative_gradient(parameter: Tensor) -> np.ndarray:
    assert parameter.grad is not None
    return -parameter.grad.numpy()


def _mean_diagonal(matrices: np.ndarray) -> np.ndarray:
    return np.diagonal(matrices, axis1=-2, axis2=-1).mean(axis=-1)


def _normalised(kernel: Tensor) -> np.ndarray:
    """Return laws in float64 whose rows sum to 1 in that precision too."""
    law = kernel.double().numpy()
    return law / law.sum(axis=-1, keepdims=True)
