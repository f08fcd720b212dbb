"""The flows of the study `polarise`: losses on one orbit, targets of several lengths, values fixed or trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.special import expit, softmax

from joma.arguments import InputError, distinct, scalar, whole
from joma.theory import value_softmax
from joma.theory.block_flow import Architecture, BlockFlow, BlockSolution, block
from joma.theory.entropy import shannon_entropy
from joma.theory.integration import Solver
from joma.theory.invariants import predict
from joma.theory.losses import Gradient, constant, squared_error

SOLVER = Solver("DOP853", rtol=1e-10, atol=1e-10)  # with smaller tolerances rounding would decide the steps
RESTING = Solver(
    "LSODA", rtol=1e-9, atol=1e-10
)  # for parts that come to rest, or to a steady pace: steps then grow long
FIRST_TIME = 0.1  # of the records after time 0
TARGET_TIME = 400.0  # by which uniform attention over 10 tokens, the slowest, is at rest to e^−40


@dataclass(frozen=True)
class FlowConfig:
    """The values and logits at the start, the losses, and how far their flows are solved."""

    tokens: tuple[int, ...] = (2, 5, 20)
    """Numbers of tokens k of the flow with a constant gradient."""
    dim: int = 6
    """Length of a value vector."""
    norm: float = 1.3
    """‖c‖."""
    start: float = 0.05
    """Standard deviation of values and logits at the start."""
    until: float = 2000.0
    records: int = 40
    """Times at which a flow is recorded, evenly spaced in the logarithm."""
    loss_tokens: int = 5
    """Number of tokens of the flows with other losses, of the block that SGD trains, and of fixed values."""
    margin: float = 10.0
    """B of the square loss ½(B − c · y)²."""
    targets: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0)
    """Lengths ‖y*‖ of the square loss ½‖y − y*‖²."""
    target_tokens: int = 10
    target_start: float = 0.01
    """Standard deviation of the values at the start of that loss; its logits are 0."""


class Start(NamedTuple):
    """The state at time 0 and the direction of the loss."""

    values: Float[np.ndarray, "token dim"]
    logits: Float[np.ndarray, " token"]
    c: Float[np.ndarray, " dim"]

    @property
    def scores(self) -> Float[np.ndarray, " token"]:
        """Return s_j = c · V_j."""
        return self.values @ self.c


def check(config: FlowConfig) -> None:
    """Raise `InputError` if the flows cannot be solved with this config."""
    for count in distinct("tokens", config.tokens):
        whole("tokens", count, low=2)
    whole("loss_tokens", config.loss_tokens, low=2)
    whole("target_tokens", config.target_tokens, low=2)
    whole("dim", config.dim)
    whole("records", config.records, low=10)
    for name in ("norm", "start", "target_start"):
        scalar(name, getattr(config, name), above=0.0)
    scalar("until", config.until, low=10.0)
    if config.margin <= 10 * config.start * config.norm:
        expected = f"well above the margins at the start, {config.start * config.norm:.2g}"
        raise InputError("margin", expected, f"{config.margin:g}", "give a larger one")
    for target in distinct("targets", config.targets):
        scalar("targets", target, above=0.0)


def draw(generator: np.random.Generator, tokens: int, dim: int, *, norm: float, start: float) -> Start:
    """Draw values and logits as `start` times standard normals, and a direction c of length `norm`."""
    values, logits = start * generator.normal(size=(tokens, dim)), start * generator.normal(size=tokens)
    c = generator.normal(size=dim)
    return Start(values, logits, norm * c / np.linalg.norm(c))


def grid(config: FlowConfig) -> np.ndarray:
    """Return the recorded times, the first of which is 0."""
    return np.append(0.0, np.geomspace(FIRST_TIME, config.until, config.records))


def one_sample(gradient: Gradient, tokens: int) -> BlockFlow:
    """Return the package's flow of a softmax block with linear units on one sample that contains each token once."""
    uniform = np.full((1, tokens), 1 / tokens)
    return block("softmax", "linear", gradient, uniform, architecture=Architecture(residual=False))


def solve(flow: BlockFlow, start: Start, times: np.ndarray, solver: Solver = SOLVER) -> BlockSolution:
    """Integrate the flow; the query's embedding, which nothing reads, has weights 0."""
    no_query = np.zeros((1, start.values.shape[1]))
    return flow.solve(times, np.vstack([start.values, no_query]), start.logits[None], solver=solver)


def solve_constant(config: FlowConfig, generator: np.random.Generator) -> xr.Dataset:
    """Solve the flow with a constant gradient for each number of tokens, for one seed.

    Returns:
        Over `tokens`: `error`, ε = 1 − max σ, over `time`; `ledger`, the largest residual of the ledger of the logits;
        `gap`, the largest gap over the largest drift. `invariant`: the largest change of what two tokens keep
        constant, over the largest of its terms.
    """
    times = grid(config)
    rows: list[xr.Dataset] = []
    for tokens in config.tokens:
        start = draw(generator, tokens, config.dim, norm=config.norm, start=config.start)
        path = solve(one_sample(constant(start.c), tokens), start, times)
        logits, uniform = path.z[:, 0], np.full(tokens, 1 / tokens)
        prediction = predict("softmax", path.v, path.v[0], start.logits[None], b_ref=uniform) - path.ledger.total
        weights = np.sort(softmax(logits, axis=-1), axis=-1)
        rows.append(
            xr.Dataset(
                {
                    "error": ("time", weights[:, :-1].sum(axis=-1)),
                    "ledger": abs(logits - prediction).max(),
                    "gap": abs(path.ledger.gap).max() / abs(path.ledger.drift).max(),
                },
                {"time": times},
            )
        )
    two = draw(generator, 2, config.dim, norm=config.norm, start=config.start)
    solved = xr.concat(rows, dim=xr.Variable("tokens", list(config.tokens)))
    return solved.assign(invariant=_invariant_change(two, times))


def _invariant_change(start: Start, times: np.ndarray) -> float:
    """Return the largest change of the invariant of two tokens over the square of the difference of scores."""
    norm = float(np.linalg.norm(start.c))
    path = solve(one_sample(constant(start.c), 2), start, times)
    scores = path.v @ start.c
    invariant = value_softmax.two_token_invariant(scores, path.z[:, 0], norm=norm)
    return float(abs(invariant - invariant[0]).max() / np.ptp(scores, axis=-1).max() ** 2)


def solve_losses(config: FlowConfig, start: Start) -> xr.Dataset:
    """Solve the flows of three losses of the margin from one start, and their common orbit at the margins they pass.

    Returns:
        Over `loss` and `time`: `margin`, `entropy` and `orbit_entropy`.
    """
    times = grid(config)
    rows: list[xr.Dataset] = []
    for loss, slope in _slopes(config).items():
        path = solve(one_sample(_along(start.c, slope), config.loss_tokens), start, times, RESTING)
        attention = softmax(path.z[:, 0], axis=-1)
        margin = (attention * (path.v @ start.c)).sum(axis=-1)
        variables = {
            "margin": ("time", margin),
            "entropy": ("time", shannon_entropy(attention)),
            "orbit_entropy": ("time", orbit_entropy(start, margin)),
        }
        rows.append(xr.Dataset(variables, {"time": times, "loss": loss}))
    return xr.concat(rows, dim="loss")


def _slopes(config: FlowConfig) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return −dL/dm of each loss, as a function of the margin."""
    return {
        "constant": np.ones_like,
        "logistic": lambda margin: expit(-margin),
        "square": lambda margin: config.margin - margin,
    }


def _along(c: np.ndarray, slope: Callable[[np.ndarray], np.ndarray]) -> Gradient:
    """Return the gradient −∂L/∂y of a loss of the margin c · y."""
    return lambda y: slope(y @ c)[:, None] * c


def orbit_entropy(start: Start, margin: Float[np.ndarray, " time"]) -> Float[np.ndarray, " time"]:
    """Return the entropy of attention that the common orbit has at these margins, in any order."""
    first = float(softmax(start.logits) @ start.scores)
    increasing, inverse = np.unique(np.maximum(margin, first), return_inverse=True)
    norm = float(np.linalg.norm(start.c))
    orbit = value_softmax.orbit_at_margins(start.scores, start.logits, increasing, norm=norm, solver=RESTING)
    return orbit.entropy[inverse]


def solve_targets(config: FlowConfig, generator: np.random.Generator) -> xr.Dataset:
    """Solve the flow of ½‖y − y*‖² to its end for targets of several lengths and one direction, from small values.

    Returns:
        Over `target`: `final_entropy`, `final_distance` ‖y − y*‖/‖y*‖, and the `predicted_entropy` of the orbit at the
        margin ‖y*‖². `largest_entropy`: that of uniform attention.
    """
    start = draw(generator, config.target_tokens, config.dim, norm=1.0, start=config.target_start)
    start = start._replace(logits=np.zeros(config.target_tokens))
    rows = []
    for length in config.targets:
        target = start._replace(c=length * start.c)
        path = solve(
            one_sample(squared_error(target.c), config.target_tokens), target, np.array([TARGET_TIME]), RESTING
        )
        attention = softmax(path.z[-1, 0])
        rows.append(
            {
                "final_entropy": shannon_entropy(attention),
                "final_distance": np.linalg.norm(attention @ path.v[-1] - target.c) / length,
                "predicted_entropy": orbit_entropy(target, np.array([length**2]))[0],
            }
        )
    columns = {name: ("target", np.array([row[name] for row in rows])) for name in rows[0]}
    return xr.Dataset({**columns, "largest_entropy": np.log(config.target_tokens)}, {"target": list(config.targets)})


def solve_rates(config: FlowConfig, start: Start) -> xr.Dataset:
    """Solve the logistic loss with values trained and with values fixed, from one start, to the same late times.

    Returns:
        Over `point`: `log_time`, ln(1 + t); the mean gap of the winner's logit to the others, `trained_gap` and
        `fixed_gap`, and the laws of both, `trained_law` and `fixed_law`.
    """
    norm = float(np.linalg.norm(start.c))
    path = value_softmax.orbit(start.scores, start.logits, grid(config), norm=norm, solver=RESTING)
    late = np.maximum(path.log_time, np.finfo(float).tiny)  # ln t of time 0, which no law is about
    fixed = value_softmax.fixed_values(start.scores, start.logits, path.log_time, solver=RESTING)
    law = value_softmax.fixed_gap(start.scores, path.log_time)
    variables = {
        "log_time": path.log_time,
        "trained_gap": _mean_gap(path.logits),
        "fixed_gap": _mean_gap(fixed),
        "trained_law": value_softmax.trained_gap(late, len(start.scores), norm=norm),
        "fixed_law": np.mean(law, axis=-1, where=np.isfinite(law)),
    }
    return xr.Dataset({name: ("point", values) for name, values in variables.items()})


def _mean_gap(logits: Float[np.ndarray, "time token"]) -> Float[np.ndarray, " time"]:
    """Return the logit of the token that wins at the end less the mean of the others."""
    winner = int(logits[-1].argmax())
    return logits[:, winner] - np.delete(logits, winner, axis=-1).mean(axis=-1)
