"""Several steps of preconditioned gradient descent on a prompt's own least squares, and the best of them.

From w_0 = 0 on ½N⁻¹ Σ_i (w·x_i − y_i)², whose gradient is Ŝ(w − w*) with Ŝ = (1/N) Σ_i x_i x_iᵀ,

    w_{k+1} = w_k − A_k Ŝ (w_k − w*),    w* − w_L = E_L w*,    E_L = (I − A_{L−1} Ŝ) … (I − A_0 Ŝ)
    loss = ½ E tr(E_Lᵀ Λ E_L)

What L layers of linear attention can compute (Ahn et al. 2023, arXiv 2306.00297). For L = 1 the best A_0 is Γ of
`joma.theory.in_context`. For more layers there is no closed form: `best_descent` searches on sampled covariances Ŝ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import minimize

from joma.arguments import InputError, check_size, in_range, instance, real, whole
from joma.theory.in_context import LARGEST, SMALLEST, preconditioner

START_SPREAD = 0.3  # standard deviation of the logarithm of the step sizes at which searches start
MAX_ITERATIONS = 2000

Steps = Float[np.ndarray, "step direction direction"]
Covariances = Float[np.ndarray, "prompt direction direction"]


class BestDescent(NamedTuple):
    """The best steps that were reached.

    Attributes:
        steps: A_0 … A_{L−1}, [step, direction, direction].
        loss: their mean loss on the covariances.
        slope: largest component of the loss's gradient there.
        losses: what the search from each start reached, [start].
    """

    steps: np.ndarray
    loss: float
    slope: float
    losses: np.ndarray


def sample_covariances(
    spectrum: ArrayLike, length: int, count: int, generator: np.random.Generator
) -> Float[np.ndarray, "prompt direction direction"]:
    """Return Ŝ = (1/N) Σ_i x_i x_iᵀ of `count` prompts, x_i ~ N(0, diag(spectrum)).

    Args:
        spectrum: eigenvalues of the covariance of x, positive.
        length: number N of examples in a prompt.
        count: number of prompts.
        generator: source of the random numbers.

    >>> covariances = sample_covariances([2.0, 1.0], 5, 20_000, np.random.default_rng(0))
    >>> covariances.mean(axis=0).round(1) + 0.0
    array([[2., 0.],
           [0., 1.]])
    """
    eigenvalues = real("spectrum", spectrum, ndim=1, low=SMALLEST, high=LARGEST)
    examples, prompts = whole("length", length), whole("count", count)
    instance("generator", generator, np.random.Generator, "pass `np.random.default_rng(seed)`")
    check_size("count`, `length", (prompts, examples, len(eigenvalues)))
    x = np.sqrt(eigenvalues) * generator.normal(size=(prompts, examples, len(eigenvalues)))
    return np.matmul(x.transpose(0, 2, 1), x) / examples


def descent_losses(steps: ArrayLike, covariances: ArrayLike, spectrum: ArrayLike) -> Float[np.ndarray, " prompt"]:
    """Return the loss of steps of preconditioned gradient descent on each prompt, averaged over tasks and queries.

        ½ tr(E_Lᵀ Λ E_L),    E_L = (I − A_{L−1} Ŝ) … (I − A_0 Ŝ)

    Args:
        steps: A, [step, direction, direction].
        covariances: Ŝ, [prompt, direction, direction].
        spectrum: eigenvalues λ of the covariance of the query.

    >>> descent_losses([[[0.5]], [[0.5]]], [[[1.0]], [[2.0]]], [1.0])  # half of the error is left, or nothing
    array([0.03125, 0.     ])
    """
    matrices, prompts, eigenvalues = _checked(steps, covariances, spectrum)
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.broadcast_to(np.eye(len(eigenvalues)), prompts.shape)
        for step in matrices:
            errors = errors - step @ (prompts @ errors)
        losses = (eigenvalues[:, None] * errors**2).sum(axis=(1, 2)) / 2
    in_range("steps`, `covariances", losses)
    return losses


def best_descent(
    layers: int, covariances: ArrayLike, spectrum: ArrayLike, generator: np.random.Generator, *, starts: int = 3
) -> BestDescent:
    """Search for the steps of preconditioned gradient descent with the least mean loss, by L-BFGS from several starts.

    Args:
        layers: number L of steps, at least 1.
        covariances: Ŝ of the prompts on which the loss is averaged, [prompt, direction, direction].
        spectrum: eigenvalues λ of the covariance of the query.
        generator: source of the starts: the best single step of endless prompts times a random factor for each step.
        starts: number of searches.

    >>> generator = np.random.default_rng(0)
    >>> covariances = sample_covariances([1.0, 1.0], 4, 50_000, generator)
    >>> best_descent(1, covariances, [1.0, 1.0], generator).steps.round(2) + 0.0  # N/(N + d + 1)
    array([[[0.57, 0.  ],
            [0.  , 0.57]]])
    """
    count, searches = whole("layers", layers, high=100), whole("starts", starts, high=10**4)
    instance("generator", generator, np.random.Generator, "pass `np.random.default_rng(seed)`")
    eigenvalues = real("spectrum", spectrum, ndim=1, low=SMALLEST, high=LARGEST)
    size = len(eigenvalues)
    _, prompts, _ = _checked(np.zeros((count, size, size)), covariances, eigenvalues)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = _loss_gradient(flat.reshape(count, size, size), prompts, eigenvalues)
        return loss, gradient.ravel()

    options = {"maxiter": MAX_ITERATIONS, "ftol": 1e-14, "gtol": 1e-9}
    results = []
    for _ in range(searches):
        factors = np.exp(START_SPREAD * generator.normal(size=count))
        start = factors[:, None, None] * np.diag(preconditioner(eigenvalues, size + 1))
        results.append(minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options=options))
    best = min(results, key=lambda result: result.fun)
    losses = np.array([float(result.fun) for result in results])
    in_range("covariances", losses)
    return BestDescent(best.x.reshape(count, size, size), float(best.fun), float(np.abs(best.jac).max()), losses)


def _checked(
    steps: ArrayLike, covariances: ArrayLike, spectrum: ArrayLike
) -> tuple[Steps, Covariances, Float[np.ndarray, " direction"]]:
    matrices, prompts = real("steps", steps, ndim=3), real("covariances", covariances, ndim=3)
    eigenvalues = real("spectrum", spectrum, ndim=1, low=SMALLEST, high=LARGEST)
    size = len(eigenvalues)
    for name, array in {"steps": matrices, "covariances": prompts}.items():
        if array.shape[1:] != (size, size):
            raise InputError(name, f"[…, {size}, {size}], like `spectrum`", f"shape {array.shape}", "match their sizes")
    check_size("covariances", prompts.shape)
    return matrices, prompts, eigenvalues


def _loss_gradient(
    steps: Steps, prompts: Covariances, eigenvalues: Float[np.ndarray, " direction"]
) -> tuple[float, Steps]:
    """Return the mean loss and its gradient with respect to each step, by going back through the steps."""
    products, errors = [], np.broadcast_to(np.eye(len(eigenvalues)), prompts.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for step in steps:
            products.append(prompts @ errors)
            errors = errors - step @ products[-1]
        loss = float((eigenvalues[:, None] * errors**2).sum() / 2 / len(prompts))
        back, gradient = eigenvalues[:, None] * errors, np.empty_like(steps)
        for index in reversed(range(len(steps))):
            gradient[index] = -np.einsum("pij,pkj->ik", back, products[index]) / len(prompts)
            back = back - prompts @ (steps[index].T @ back)
    return loss, gradient
