"""Whether hidden states encode positions: a linear readout of the position, and the similarity of neighbours.

All axes before sample, position and width, such as seed and layer, are kept. All arithmetic is in float64. Where a
leading entry, such as a diverged seed, holds NaN or an infinity its results are NaN, and those of the others are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import scalar, whole
from joma.noise import check_generator
from joma.probes.states import checked_states, nan_where, split_diverged

MAX_NULLS = 10**6
TIE = 1e-9  # cosines that differ by less count as equal


@dataclass(frozen=True)
class PositionReadout:
    """How well a linear readout finds the position of a hidden state.

    Attributes:
        accuracy: share of states whose position is found, over states that the readout was not fitted to.
        spread: standard deviation of the accuracy over the folds.
        by_position: the accuracy for each true position.
        chance: 1 over the number of positions.
    """

    accuracy: Float[Tensor, "*lead"]
    spread: Float[Tensor, "*lead"]
    by_position: Float[Tensor, "*lead position"]
    chance: float


def position_decodability(states: ArrayLike | Tensor, *, folds: int = 5, ridge: float = 1e-3) -> PositionReadout:
    """Return the cross-validated accuracy with which a linear readout finds the position of a hidden state.

        position(x) = argmax_p  m_pᵀ S⁻¹ x − ½ m_pᵀ S⁻¹ m_p,    S = within + ridge · (tr total / width) · I

    m_p is the mean state at position p, `within` the covariance about these means, `total` that about the mean of all
    states: this is the linear discriminant, in closed form. (Regression on one-hot positions is as simple, but suffers
    from masking: where the means lie along a line, as they may for positions, it never predicts one in the middle.)
    Samples are assigned to folds in turn. The readout is fitted to all folds but one and tested on that one, so that no
    sequence is in both. Shifts, rotations and scales of the states change nothing.

    What a token itself reveals about its position is part of the accuracy: compare with the states before layer 1.

    Args:
        states: [*lead, sample, position, width], such as `Decoder.activations(...)["residual"]`, stacked over layers.
        folds: at least 2, at most the number of samples.
        ridge: strength of the regularisation, at least 1e-12.

    Returns:
        `PositionReadout`, each of shape [*lead]; NaN where the states hold NaN or an infinity.

    >>> generator = torch.Generator().manual_seed(0)
    >>> noise = torch.randn(2, 40, 6, 8, generator=generator)
    >>> noise[1] += 3 * torch.arange(6.0)[:, None] / 8**0.5
    >>> position_decodability(noise).accuracy.round(decimals=1)
    tensor([0.2000, 0.9000], dtype=torch.float64)
    """
    x, diverged = split_diverged(checked_states(states, axes=3).double(), axes=3)
    samples, positions, _ = x.shape[-3:]
    folds = whole("folds", folds, low=2, high=samples)
    ridge = scalar("ridge", ridge, low=1e-12)
    fold_of = torch.arange(samples, device=x.device) % folds
    truth = torch.arange(positions, device=x.device)
    correct = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    for fold in range(folds):
        scores = _discriminant(x[..., fold_of != fold, :, :], x[..., fold_of == fold, :, :], ridge)
        correct[..., fold_of == fold, :] = scores.argmax(dim=-1) == truth
    by_fold = [correct[..., fold_of == fold, :].double().mean(dim=(-1, -2)) for fold in range(folds)]
    by_position = nan_where(diverged, correct.double().mean(dim=-2))
    spread = nan_where(diverged, torch.stack(by_fold, dim=-1).std(dim=-1))
    return PositionReadout(by_position.mean(dim=-1), spread, by_position, 1 / positions)


def _discriminant(
    training: Float[Tensor, "*lead sample position width"],
    test: Float[Tensor, "*lead other position width"],
    ridge: float,
) -> Float[Tensor, "*lead other position score"]:
    """Return the score of every position for every test state."""
    shift = training.mean(dim=(-2, -3), keepdim=True)
    training, test = training - shift, test - shift
    means = training.mean(dim=-3)
    residual = (training - means[..., None, :, :]).flatten(-3, -2)
    within = residual.mT @ residual / residual.shape[-2]
    level = training.square().mean(dim=(-1, -2, -3))  # the trace of the total covariance over the width
    level = torch.where(level > 0, ridge * level, 1.0)[..., None]
    within.diagonal(dim1=-2, dim2=-1).add_(level)
    direction = torch.cholesky_solve(means.mT, torch.linalg.cholesky(within))
    offset = (means.mT * direction).sum(dim=-2) / 2
    return (test.flatten(-3, -2) @ direction).unflatten(-2, test.shape[-3:-1]) - offset[..., None, None, :]


@dataclass(frozen=True)
class Adjacency:
    """Whether neighbouring hidden vectors are more similar than others.

    Attributes:
        score: how often a neighbour is more similar than a position further away; ½ by chance.
        null: the same after each of several random orders of the positions.
        cosine: mean cosine of states at distance 1, 2, ....
    """

    score: Float[Tensor, "*lead"]
    null: Float[Tensor, "*lead null"]
    cosine: Float[Tensor, "*lead distance"]


def adjacency(states: ArrayLike | Tensor, *, nulls: int = 100, generator: torch.Generator | None = None) -> Adjacency:
    """Return how often a neighbouring hidden vector is more similar than a distant one, after arXiv 2501.00073.

        score = P[cos(h_i, h_j) > cos(h_i, h_k)] + ½ P[equal],    |i − j| = 1 < |i − k|

    over samples and all such i, j, k. In a causal model without positional encoding neighbours average over nearly the
    same tokens. Its score is therefore above ½ from the first layer on, even with random weights, where embeddings are
    small compared with what attention adds, as in GPT-2; it is near ½ where they are not (`docs/deviations.md`, 23).
    For the null the positions are permuted at random, each permutation applied to all samples at once, so that its
    spread is that of one fixed random order; its mean is ½.

    Args:
        states: [*lead, sample, position, width], at least 3 positions.
        nulls: number of random orders, at most a million.
        generator: on the CPU, draws the random orders; if not given, a new one with seed 0.

    Returns:
        `Adjacency`: score [*lead], null [*lead, null], cosine [*lead, distance]; NaN where the states hold NaN or an
        infinity.

    >>> walk = torch.randn(20, 12, 30, generator=torch.Generator().manual_seed(0)).cumsum(dim=-2)
    >>> neighbours = adjacency(walk)
    >>> bool(neighbours.score > 0.9), bool(neighbours.score > neighbours.null.max())
    (True, True)
    """
    x, diverged = split_diverged(checked_states(states, axes=3, positions=3).double(), axes=3)
    x = torch.nn.functional.normalize(x, dim=-1)
    nulls = whole("nulls", nulls, high=MAX_NULLS)
    generator = check_generator(generator)
    cosine, positions = x @ x.mT, x.shape[-2]
    null = []
    for _ in range(nulls):
        order = torch.randperm(positions, generator=generator).to(x.device)
        null.append(_neighbour_score(cosine[..., order[:, None], order]))
    means = cosine.mean(dim=-3)
    by_distance = [means.diagonal(offset=d, dim1=-2, dim2=-1).mean(dim=-1) for d in range(1, positions)]
    fields = _neighbour_score(cosine), torch.stack(null, dim=-1), torch.stack(by_distance, dim=-1)
    return Adjacency(*(nan_where(diverged, field) for field in fields))


def _neighbour_score(cosine: Float[Tensor, "*lead sample position position"]) -> Float[Tensor, "*lead"]:
    """Return how often a neighbour is more similar than a position further away; a tie counts as half."""
    position = torch.arange(cosine.shape[-1], device=cosine.device)
    distant = (position[:, None] - position).abs() > 1
    wins = cosine.new_zeros(cosine.shape[:-3])
    near = cosine.diagonal(offset=1, dim1=-2, dim2=-1)[..., None]
    for anchors in (slice(None, -1), slice(1, None)):  # the neighbour on the right, then that on the left
        difference = near - cosine[..., anchors, :]
        points = (difference > TIE).double() + (difference.abs() <= TIE).double() / 2
        wins += (points * distant[anchors]).sum(dim=(-1, -2)).mean(dim=-1)
    return wins / (distant[:-1].sum() + distant[1:].sum())
