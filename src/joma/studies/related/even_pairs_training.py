"""The layer of the study `even-pairs`: its flow on all sequences, and the same layer trained by gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from joma import schedule
from joma.arguments import distinct, scalar, whole
from joma.models.block import Block, BlockConfig
from joma.studies.common_axes import NAMES, STEP, attention_axes
from joma.study import Arms, Context
from joma.theory.even_pairs import (
    MAX_LENGTH,
    Sequences,
    all_sequences,
    pair_attention,
    pair_flow,
    pair_margins,
    pair_start,
    pair_svm,
    parity_by_chain,
    parity_by_pairs,
    phase_boundary,
)
from joma.theory.integration import Solver
from joma.theory.invariants import correlation, predict, relative_error
from joma.train import Optimiser, Record

SOLVER = Solver("DOP853", rtol=1e-8, atol=1e-10, max_evaluations=20_000)  # the default is meant for smaller worlds
FIRST_TIME = 0.1  # of the flow's records after time 0
TASKS = ("pairs", "parity", "chain", "decisions")
ZERO, RANDOM = "zero", "random"


@dataclass(frozen=True)
class WorldConfig:
    """The lengths of the sequences, the flows, and the layers that are trained."""

    lengths: tuple[int, ...] = (4, 6)
    """Largest lengths of the worlds in which the flow is solved."""
    until: float = 1e5
    records: int = 100
    """Times at which a flow, and steps at which a training is recorded, evenly spaced in the logarithm."""
    trained_length: int = 4
    """Largest length in training."""
    rates: tuple[float, ...] = (0.02, 0.1, 0.5)
    """Learning rates; the last is that of parity and of the chains, and it reaches the latest times."""
    start: float = 0.01
    """Standard deviation of weights and logits at a random start."""
    steps: int = 12_000


class Arm(NamedTuple):
    """What one model is trained on, from where, and how fast."""

    task: str
    start: str
    rate: float

    @property
    def label(self) -> str:
        """Return the name of the arm in the trajectory."""
        return f"{self.task} {self.start} {self.rate:g}"


def check(config: WorldConfig) -> None:
    """Raise `InputError` if the flows cannot be solved, or the layers not be trained, with this config."""
    for length in distinct("lengths", config.lengths):
        whole("lengths", length, low=2, high=MAX_LENGTH)
    whole("trained_length", config.trained_length, low=2, high=MAX_LENGTH)
    for rate in distinct("rates", config.rates):
        scalar("rates", rate, above=0.0)
    scalar("start", config.start, above=0.0)
    scalar("until", config.until, low=10.0)
    whole("records", config.records, low=20)
    whole("steps", config.steps, low=20)


def arms(config: WorldConfig) -> list[Arm]:
    """Return the arms: even pairs at every rate from zero and from random starts, then the other tasks."""
    pairs = [Arm("pairs", start, rate) for start in (ZERO, RANDOM) for rate in config.rates]
    return [*pairs, *(Arm(task, RANDOM, config.rates[-1]) for task in TASKS[1:])]


def targets(task: str, world: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the label and the weight of each sequence in a task."""
    label = world.even if task == "parity" else world.even_pair
    weights = {"chain": world.chain_weight, "decisions": world.decision_weight}
    return label, weights.get(task, world.weight)


def solve(config: WorldConfig, max_length: int) -> xr.Dataset:
    """Solve the flow of even pairs from zero in one world.

    Returns:
        Over `time`: `flow_loss`, `flow_least_margin`, `flow_u_norm`, `flow_w_norm`, `flow_positive_error`,
        `flow_negative_error` (`attention_errors`). At the end: `flow_svm_norm` ‖û‖ and `flow_cosine` of u with û.
        `flow_boundary`, the time at which all answers are right. `theorem_1_correlation` and `theorem_1_error`:
        correlation and relative error of the logits that Theorem 1 predicts without its ledger; `theorem_1_residual`:
        the error with it. `decisions_speed`: the largest velocity at zero if no chain's end is in the data.
    """
    world = all_sequences(max_length)
    times = np.append(0.0, np.geomspace(FIRST_TIME, config.until, config.records))
    flow, (w0, z0) = pair_flow(world, world.even_pair), pair_start(world)
    path = flow.solve(times, w0, z0, solver=SOLVER)
    u, logits = path.v[..., 0], path.z
    states = [measure(world, *state) for state in zip(u, logits, strict=True)]
    columns = {f"flow_{name}": ("time", np.array([state[name] for state in states])) for name in states[0]}
    svm = pair_svm(world, world.even_pair, logits[-1])
    prediction = predict("softmax", path.v, path.v[0], z0, b_ref=flow.b_ref)
    total, ledger = logits.sum(axis=1), path.ledger.total
    speed = pair_flow(world, world.even_pair, world.decision_weight).velocity(w0, z0, np.zeros(1))
    numbers = {
        "flow_svm_norm": np.linalg.norm(svm),
        "flow_cosine": cosine(svm, u[-1]),
        "flow_boundary": phase_boundary(times, columns["flow_least_margin"][1]),
        "theorem_1_correlation": correlation(total[-1], prediction[-1]),
        "theorem_1_error": relative_error(total[-1], prediction[-1], total[0]),
        "theorem_1_residual": relative_error(total[-1], (prediction - ledger)[-1], total[0]),
        "decisions_speed": max(abs(speed.w).max(), abs(speed.z).max()),
    }
    return xr.Dataset({**columns, **numbers}, {"time": times})


def measure(world: Sequences, u: Float[np.ndarray, " token"], logits: Float[np.ndarray, "query token"]) -> dict:
    """Return the loss, the least margin, the norms of u and W, and the errors of attention, for even pairs."""
    margins = pair_margins(world, world.even_pair, u, logits)
    positive, negative = attention_errors(world, pair_attention(world, logits))
    return {
        "loss": world.weight @ np.logaddexp(0.0, -margins),
        "least_margin": margins.min(),
        "u_norm": np.linalg.norm(u),
        "w_norm": np.linalg.norm(logits),
        "positive_error": positive,
        "negative_error": negative,
    }


def attention_errors(world: Sequences, attention: Float[np.ndarray, "sample token"]) -> tuple[float, float]:
    """Return ε of even pairs, 1 less their weight on the first token, and that weight of odd pairs; both are means.

    Sequences of one symbol, whose attention is 1 always, are left out.
    """
    first = attention[np.arange(len(attention)), world.first]
    positive, negative = (world.even_pair > 0) & (world.length > 1), world.even_pair < 0
    return float((1 - first[positive]).mean()), float(first[negative].mean())


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; NaN if one of them is not finite or zero."""
    lengths = [abs(vector).max() for vector in (first, second)]
    if not all(np.isfinite(length) and length > 0 for length in lengths):
        return np.nan
    first, second = (vector / length for vector, length in zip((first, second), lengths, strict=True))
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def train(config: WorldConfig, context: Context) -> xr.Dataset:
    """Train all arms as one block, and evaluate the trained layers on all sequences.

    Returns:
        Over `arm`, `seed` and `step`: `loss`, `least_margin`, `u_norm`, `w_norm`; over `arm` and `seed` the
        evaluation of `_evaluate`; the numbers on common axes of the last arm of even pairs; `task`, `start` and `rate`
        of each arm.
    """
    world, members = all_sequences(config.trained_length), arms(config)
    axis = Arms("arm", [arm.label for arm in members])
    label, weight = (
        torch.from_numpy(np.stack(context.per_model(columns))).to(context.device)
        for columns in zip(*(targets(arm.task, world) for arm in members), strict=True)
    )
    x, last = (torch.from_numpy(array).to(context.device) for array in (world.present, world.last))
    model = _block(config, context, members, axis, world)

    def sequence_margins(model: Block) -> Tensor:
        return label * model(x, last)[..., 0]

    def record(model: Block, _: int) -> dict[str, Tensor]:
        with torch.no_grad():
            margins = sequence_margins(model).masked_fill(weight == 0, torch.inf)
            axes = attention_axes(model.attend(x, last), model.v, (x > 0).expand(len(margins), -1, -1))
        norms = {"u_norm": model.v.flatten(1).norm(dim=1), "w_norm": model.z.flatten(1).norm(dim=1)}
        return {"least_margin": margins.amin(dim=1), **norms, **axes}

    trajectory = context.fit(
        model,
        lambda model, _: (weight * F.softplus(-sequence_margins(model))).sum(dim=-1),
        optimiser=Optimiser("sgd", context.per_model([arm.rate for arm in members])),
        steps=config.steps,
        record=Record(record, at=schedule.logarithmic(config.records, config.steps)),
        label="even-pairs",
        arms=axis,
    )
    diverged = torch.from_numpy(trajectory.diverged.values.ravel() >= 0)  # in the order of arms, then seeds
    final = [
        parameter.detach().cpu().masked_fill(diverged.view(-1, *(1,) * (parameter.ndim - 1)), torch.nan).numpy()
        for parameter in (model.v[..., 0], model.z)
    ]
    representative = Arm("pairs", RANDOM, config.rates[-1]).label
    axes = trajectory[list(NAMES)].sel(arm=representative, drop=True).rename(step=STEP)
    coordinates = {name: ("arm", [getattr(arm, name) for arm in members]) for name in Arm._fields}
    evaluated = _evaluate(world, members, context, *final)
    return xr.merge([trajectory.drop_vars([*NAMES, "diverged"]), axes, evaluated]).assign_coords(coordinates)


def _block(config: WorldConfig, context: Context, members: list[Arm], axis: Arms, world: Sequences) -> Block:
    """Return the softmax block of all arms and seeds, without a residual connection; some arms start at zero."""
    sizes = BlockConfig(world.tokens, 1, queries=world.tokens, residual=False, scale=config.start)
    model = Block(sizes, generators=context.generators("weights", axis))
    zero = torch.tensor(context.per_model([arm.start == ZERO for arm in members]))
    with torch.no_grad():
        model.w[zero] = 0.0
        model.z[zero] = 0.0
    return model


def _evaluate(
    world: Sequences,
    members: list[Arm],
    context: Context,
    u: Float[np.ndarray, "model token"],
    logits: Float[np.ndarray, "model query token"],
) -> xr.Dataset:
    """Evaluate trained layers on all sequences of lengths 2 and more; NaN for a layer that has diverged.

    Returns:
        Over `arm` and `seed`: `accuracy` in the task itself; `chain_accuracy` and `pairs_accuracy`, that of parity by
        each chain of thought if the layer's answers are taken for even pairs; `svm_norm` and `cosine` of the SVM of
        the final attention outputs, NaN where no direction separates them. `length_accuracy`: accuracy in the task
        over `length`.
    """
    rows = [
        _evaluate_layer(world, arm.task, *state)
        for arm, state in zip(context.per_model(members), zip(u, logits, strict=True), strict=True)
    ]
    shape = (len(members), len(context.seeds))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    variables = {
        name: (("arm", "seed", "length")[: 1 + values.ndim], values.reshape(*shape, *values.shape[1:]))
        for name, values in columns.items()
    }
    coordinates = {
        "arm": [arm.label for arm in members],
        "seed": list(context.seeds),
        "length": np.arange(1, world.max_length + 1),
    }
    return xr.Dataset(variables, coordinates)


def _evaluate_layer(world: Sequences, task: str, u: np.ndarray, logits: np.ndarray) -> dict[str, np.ndarray | float]:
    """Evaluate one trained layer."""
    label, _ = targets(task, world)
    if not (np.isfinite(u).all() and np.isfinite(logits).all()):
        names = ("accuracy", "chain_accuracy", "pairs_accuracy", "svm_norm", "cosine")
        return {**dict.fromkeys(names, np.nan), "length_accuracy": np.full(world.max_length, np.nan)}
    margins = pair_margins(world, label, u, logits)
    odd_pair, several = margins * label < 0, world.length > 1
    right = [chain(world, odd_pair) == (world.even < 0) for chain in (parity_by_chain, parity_by_pairs)]
    separates = task != "parity" and (margins > 0).all()
    svm = pair_svm(world, label, logits) if separates else np.full_like(u, np.nan)
    return {
        "accuracy": float((margins > 0)[several].mean()),
        "chain_accuracy": float(right[0][several].mean()),
        "pairs_accuracy": float(right[1][several].mean()),
        "svm_norm": float(np.linalg.norm(svm)),
        "cosine": cosine(svm, u),
        "length_accuracy": np.array([(margins > 0)[world.length == n].mean() for n in range(1, world.max_length + 1)]),
    }
