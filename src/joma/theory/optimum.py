"""The optimum of the block's cross entropy: softmax attention, and hidden units as the logits of the classes.

    b = x ∘ exp(z) / Σ_l x_l exp(z_l),    h_c = φ(Σ_l b_l v_lc),    loss = E[ln Σ_k exp(h_k) − h_c]

*Proved* for linear units (`docs/ladder.md`): if the tokens of a context are independent given its class and all
contexts have n tokens, uniform attention with v_lc = n ln P_c(l) + ln π_c attains the Bayes risk. If moreover n ≥ 2,
all P_c(l) > 0, and the log odds of two tokens differ, then every path on which the loss tends to the Bayes risk ends at
uniform attention. For other populations and activations, `block_optimum` searches for the optimum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import minimize
from scipy.special import softmax

from joma.arguments import InputError, check_size, in_range, instance, probabilities, real, scalar, whole, whole_array
from joma.theory.activations import Activation, named
from joma.theory.integration import DEFAULT_SOLVER, Solver, integrate
from joma.theory.populations import MAX_COUNT, Population, class_probabilities

START_SPREAD = 0.5  # standard deviation of the weights and logits at which searches start
MAX_ITERATIONS = 3000
LEAST_EXPONENT = -300.0  # of attention before it is normalised, far from where exp and its products vanish
TOLERANCE = 1e-10  # of the gradient's largest component, at which a search stops

Contexts = Float[np.ndarray, "context token"]
Weights = Float[np.ndarray, "token label"]
Logits = Float[np.ndarray, " token"]


class Optimum(NamedTuple):
    """The least loss that was reached, and where.

    Attributes:
        v: weights, [token, class]; for linear units, a number added to all classes of a token changes nothing.
        z: attention logits, [token], with mean 0.
        loss: cross entropy there, in nats.
        slope: largest component of the loss's gradient there.
        losses: the loss that the search from each start reached, [start].
    """

    v: np.ndarray
    z: np.ndarray
    loss: float
    slope: float
    losses: np.ndarray


class Descent(NamedTuple):
    """A path of the gradient flow: times [time], weights [time, token, class], logits [time, token], loss [time]."""

    times: np.ndarray
    v: np.ndarray
    z: np.ndarray
    loss: np.ndarray


class LossGradient(NamedTuple):
    """The loss and its gradients with respect to weights and logits."""

    loss: float
    v: np.ndarray
    z: np.ndarray


def naive_bayes(p: ArrayLike, length: int, prior: ArrayLike | None = None) -> Weights:
    """Return the weights that attain the Bayes risk under uniform attention, for contexts of one length.

        v_lc = n ln P_c(l) + ln π_c

    Args:
        p: P_c(l), probability of each token given the class, [class, token], all positive.
        length: number of tokens n of a context.
        prior: π_c, all positive; uniform by default.

    Returns:
        v, [token, class].

    >>> naive_bayes([[0.5, 0.5], [0.25, 0.75]], length=2).round(3)
    array([[-2.079, -3.466],
           [-2.079, -1.269]])
    """
    chance = probabilities("p", p, ndim=2)
    if (chance == 0).any():
        remedy = "the optimum is at infinity where a token does not occur in a class"
        raise InputError("p", "above 0 everywhere", "a probability of 0", remedy)
    return whole("length", length) * np.log(chance.T) + np.log(class_probabilities(prior, len(chance)))


def block_logits(x: ArrayLike, v: ArrayLike, z: ArrayLike) -> Float[np.ndarray, "context label"]:
    """Return the logits of the classes for each context.

        h_c = Σ_l x_l exp(z_l) v_lc / Σ_l x_l exp(z_l)

    Args:
        x: token frequencies, [context, token]; no context is empty.
        v: weights, [token, class].
        z: attention logits, [token].

    >>> block_logits([[0.5, 0.5]], v=[[1.0, 0.0], [0.0, 1.0]], z=[0.0, np.log(3)])
    array([[0.25, 0.75]])
    """
    frequency, weights = real("x", x, ndim=2, low=0.0), real("v", v, ndim=2)
    logits = _logits("z", z, frequency.shape[1], weights)
    with np.errstate(over="ignore", invalid="ignore"):
        totals = frequency.sum(axis=1)
        if not ((totals > 0) & np.isfinite(totals)).all():
            raise InputError("x", "rows with a positive sum", f"{totals.min():.6g}", "leave out empty contexts")
        h = _attend(frequency, logits) @ weights
    in_range("x`, `v`, `z", h)
    return h


def loss_gradient(
    world: Population, v: ArrayLike, z: ArrayLike, *, activation: str | Activation = "linear"
) -> LossGradient:
    """Return the block's cross entropy on a population, and its gradients.

        s_i = (P_i softmax(h_i) − J_i) φ'_i,    y_i = v s_i
        ∂loss/∂v = Σ_i b_i s_iᵀ,    ∂loss/∂z = Σ_i b_i ∘ (y_i − b_i · y_i)

    P_i is the probability of context i and J_i its joint probabilities with the classes.

    Args:
        world: contexts with their probabilities.
        v: weights, [token, class].
        z: attention logits, [token].
        activation: φ, a name of `activations.ACTIVATIONS`, or an `Activation`.

    >>> from joma.theory.populations import Source, population
    >>> p = [[0.5, 0.5], [0.25, 0.75]]
    >>> world = population([Source(p, length=3)])
    >>> point = loss_gradient(world, naive_bayes(p, 3), np.zeros(2))
    >>> bool(np.isclose(point.loss, world.bayes_risk)), bool(np.abs(point.v).max() < 1e-15)
    (True, True)
    """
    _check_population(world)
    weights, phi = _weights("v", v, world), _nonlinear(activation)
    logits = _logits("z", z, len(weights), weights)
    with np.errstate(over="ignore", invalid="ignore"):
        point = _loss_gradient(world.x, world.joint, weights, logits, phi)
    in_range("v`, `z", *point)
    return point


def planted(counts: ArrayLike, weight: ArrayLike, v: ArrayLike, z: ArrayLike) -> Population:
    """Return a population whose Bayes posterior is the block at (v, z): its optimum is where we put it.

        P(context i, c) = weight_i softmax(h(x_i))_c

    Args:
        counts: how often each token occurs in a context, [context, token].
        weight: probability of each context.
        v: weights of the planted block, [token, class].
        z: attention logits of the planted block, [token].

    >>> world = planted([[1, 0], [0, 1]], [0.5, 0.5], v=[[0.0, 0.0], [0.0, np.log(3)]], z=[0.0, 0.0])
    >>> world.posterior
    array([[0.5 , 0.5 ],
           [0.25, 0.75]])
    """
    number = whole_array("counts", counts, ndim=2, low=0, high=MAX_COUNT)
    chance = probabilities("weight", weight, ndim=1)
    if len(number) != len(chance) or not (number.sum(axis=1) > 0).all():
        expected = f"{len(chance)} rows of whole numbers, none empty"
        raise InputError("counts", expected, f"shape {number.shape}", "match `weight`")
    frequency = number / number.sum(axis=1, keepdims=True)
    posterior = softmax(block_logits(frequency, v, z), axis=1)
    possible = chance > 0
    return Population(number[possible], (chance[:, None] * posterior)[possible])


def block_optimum(
    world: Population,
    generator: np.random.Generator,
    *,
    starts: int = 4,
    activation: str | Activation = "linear",
) -> Optimum:
    """Search for the weights and logits of least cross entropy, by BFGS from random starts.

    The loss is not convex in (v, z) together, so that the result is the best of several searches and not proved to be
    the optimum, unless its loss is the Bayes risk. Where the optimum is at infinity, the search stops on the way.

    Args:
        world: contexts with their probabilities.
        generator: draws the starts, normal numbers of standard deviation 0.5.
        starts: number of searches.
        activation: φ, a name of `activations.ACTIVATIONS`, or an `Activation`.

    Returns:
        An `Optimum`.

    >>> from joma.theory.populations import Source, population
    >>> world = population([Source([[0.5, 0.5], [0.25, 0.75]], length=3)])
    >>> optimum = block_optimum(world, np.random.default_rng(0), starts=2)
    >>> bool(optimum.loss - world.bayes_risk < 1e-9), optimum.z.round(3) + 0.0
    (True, array([0., 0.]))
    """
    _check_population(world)
    instance("generator", generator, np.random.Generator, "pass `np.random.default_rng(seed)`")
    tokens, classes = world.counts.shape[1], world.joint.shape[1]
    x, joint, split, phi = world.x, world.joint, tokens * classes, _nonlinear(activation)

    def objective(state: np.ndarray) -> tuple[float, np.ndarray]:
        point = _loss_gradient(x, joint, state[:split].reshape(tokens, classes), state[split:], phi)
        return point.loss, np.append(point.v, point.z)

    options = {"gtol": TOLERANCE, "maxiter": MAX_ITERATIONS}
    shape = (whole("starts", starts), split + tokens)
    check_size("starts", shape)
    draws = START_SPREAD * generator.normal(size=shape)
    searches = [minimize(objective, start, jac=True, method="BFGS", options=options) for start in draws]
    best = min(searches, key=lambda search: search.fun)
    v, z = best.x[:split].reshape(tokens, classes), best.x[split:]
    slope, losses = float(np.abs(best.jac).max()), np.array([search.fun for search in searches])
    return Optimum(v, z - z.mean(), float(best.fun), slope, losses)


def gradient_flow(
    world: Population,
    times: ArrayLike,
    v0: ArrayLike,
    z0: ArrayLike,
    *,
    rate_z: float = 1.0,
    solver: Solver = DEFAULT_SOLVER,
) -> Descent:
    """Integrate the gradient flow of the block's cross entropy on a population.

        v̇ = −∂loss/∂v,    ż = −η_z ∂loss/∂z

    It is the flow of `block_flow.block` with linear units and without residual connection, ledger and biases, which
    makes it several times as fast where many populations are solved.

    Args:
        world: contexts with their probabilities.
        times: as in `integrate`.
        v0: weights at the start, [token, class].
        z0: attention logits at the start, [token].
        rate_z: η_z, learning rate of the logits; that of the weights is 1.
        solver: method and tolerances.

    Returns:
        A `Descent`.

    >>> from joma.theory.populations import Source, population
    >>> world = population([Source([[0.5, 0.5], [0.25, 0.75]], length=3)])
    >>> path = gradient_flow(world, [0.0, 200.0], v0=np.zeros((2, 2)), z0=np.zeros(2))
    >>> (path.loss - world.bayes_risk).round(4)
    array([0.0951, 0.    ])
    """
    _check_population(world)
    v, rate = _weights("v0", v0, world), scalar("rate_z", rate_z, low=0.0)
    shape, z, x, joint = v.shape, _logits("z0", z0, len(v), v), world.x, world.joint

    def at(state: np.ndarray) -> LossGradient:
        return _loss_gradient(x, joint, state[: v.size].reshape(shape), state[v.size :])

    def rhs(_: float, state: np.ndarray) -> np.ndarray:
        point = at(state)
        return np.append(-point.v, -rate * point.z)

    solution = integrate(rhs, np.append(v, z), times, solver, numbers=x.size)
    weights = solution.states[:, : v.size].reshape(-1, *shape)
    loss = np.array([at(state).loss for state in solution.states])
    return Descent(solution.times, weights, solution.states[:, v.size :], loss)


def _check_population(world: Population) -> None:
    instance("world", world, Population, "create it with `populations.population`")


def _weights(name: str, v: ArrayLike, world: Population) -> Weights:
    weights, shape = real(name, v, ndim=2), (world.counts.shape[1], world.joint.shape[1])
    if weights.shape != shape:
        raise InputError(name, f"[token, class] of shape {shape}", weights.shape, "match the population")
    return weights


def _logits(name: str, z: ArrayLike, tokens: int, v: Weights) -> Logits:
    logits = real(name, z, ndim=1)
    if logits.shape != (tokens,) or len(v) != tokens:
        got = f"shapes {logits.shape} and {v.shape}"
        raise InputError(f"{name}`, `v", f"[token] and [token, class] with {tokens} tokens", got, "match the contexts")
    return logits


def _attend(x: Contexts, z: Logits) -> Contexts:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exponent = z - z.max()
        if exponent.min() < LEAST_EXPONENT:  # a context may have no token near the largest logit: take its own largest
            present = np.where(x > 0.0, z, -np.inf)
            exponent = np.where(x > 0.0, present - present.max(axis=1, keepdims=True), -np.inf)
        unnormalised = x * np.exp(exponent)
    return unnormalised / unnormalised.sum(axis=1, keepdims=True)


def _nonlinear(activation: str | Activation) -> Activation | None:
    """Return the activation, or None if it is linear."""
    phi = named(activation)
    return None if phi.name == "linear" else phi


def _loss_gradient(
    x: Contexts,
    joint: Float[np.ndarray, "context label"],
    v: Weights,
    z: Logits,
    phi: Activation | None = None,
) -> LossGradient:
    b, weight = _attend(x, z), joint.sum(axis=1)
    preactivation = b @ v
    h = preactivation if phi is None else phi.value(preactivation)
    largest = h.max(axis=1, keepdims=True)
    exponential = np.exp(h - largest)
    partition = exponential.sum(axis=1, keepdims=True)
    # Differences of logits are taken before averages, or large ones would cancel; those of halves do not overflow.
    loss = float((2 * joint * (largest / 2 - h / 2)).sum() + weight @ np.log(partition[:, 0]))
    slope = (weight[:, None] / partition) * exponential - joint
    if phi is not None:
        slope = slope * phi.slope(preactivation)
    y = slope @ v.T
    return LossGradient(loss, b.T @ slope, (b * (y - (b * y).sum(axis=1, keepdims=True))).sum(axis=0))
