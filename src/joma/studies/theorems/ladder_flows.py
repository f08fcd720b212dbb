"""The block's flow in every world of `ladder`, the optimum that it should reach, and the same block trained by SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from joma import schedule
from joma.arguments import InputError, choice, distinct, scalar, whole
from joma.models.block import Block, BlockConfig
from joma.probes.entropy import shannon_entropy
from joma.studies.theorems.ladder_worlds import (
    KINDS,
    WORLDS,
    World,
    WorldConfig,
    named_worlds,
    planted_worlds,
    random_worlds,
    relative_entropy,
    short_worlds,
)
from joma.study import Arms, Context
from joma.theory.block_flow import Architecture, Training, block
from joma.theory.integration import Solver
from joma.theory.losses import Gradient, constant, soft_cross_entropy
from joma.theory.optimum import block_optimum, gradient_flow, loss_gradient, naive_bayes
from joma.theory.populations import Population
from joma.train import Optimiser, Record

ACTIVATIONS = ("linear", "gelu")
EARLY = 0.9  # share of the loss's fall after which the rest of the path is predicted
SOLVER = Solver("LSODA", rtol=1e-6, atol=1e-8)  # entropies to 1e-7
FAMILIES = ("shares", "planted", "random")
STREAMS = (
    "worlds",
    "start",
    "families",
    "searches",
    "GELU searches",
)  # of random numbers, each independent of the others


@dataclass(frozen=True)
class FlowConfig(WorldConfig):
    """Where the flows start, how long they run, and how the block is trained along them."""

    rate: float = 0.5
    """Learning rate of the weights in SGD; the flows are recorded at multiples of it."""
    rate_z: float = 4.0
    """Learning rate of the attention logits, relative to that of the weights."""
    start_v: float = 0.05
    """Standard deviation of the weights at the start."""
    start_z: float = 0.01
    """Standard deviation of the attention logits at the start."""
    until: float = 3e4
    constant_until: float = 100.0
    """With the constant gradient weights grow without bound, and attention is on one or two tokens long before."""
    records: int = 120
    """Times at which a flow is recorded, evenly spaced in the logarithm."""
    searches: int = 4
    """Starts of the search for an optimum."""
    gelu_worlds: tuple[str, ...] = WORLDS
    """Worlds that are solved with GELU units too."""
    sgd_worlds: tuple[str, ...] = ("overlap", "separable", "lengths")
    """Worlds in which the block is trained by SGD."""
    sgd_steps: int = 6000


def check(config: FlowConfig) -> None:
    """Raise `InputError` if the flows cannot be solved with this config."""
    for name in ("rate", "rate_z", "until", "constant_until"):
        scalar(name, getattr(config, name), above=0.0)
    for name in ("start_v", "start_z"):
        scalar(name, getattr(config, name), low=0.0)
    whole("records", config.records, low=10)
    whole("searches", config.searches)
    for name in ("gelu_worlds", "sgd_worlds"):
        for world in distinct(name, getattr(config, name)):
            choice(name, world, dict.fromkeys(WORLDS))
    if not 1 <= whole("sgd_steps", config.sgd_steps) <= config.until / config.rate:
        got, remedy = config.sgd_steps, "train for a shorter time than the flows are solved"
        raise InputError("sgd_steps", f"at most until/rate = {config.until / config.rate:g}", got, remedy)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return the random stream of a seed for a name of `STREAMS`."""
    return np.random.default_rng([seed, STREAMS.index(purpose)])


def steps(config: FlowConfig) -> tuple[int, ...]:
    """Return the steps of SGD whose times are recorded, up to the end of the flows."""
    total = round(config.until / config.rate)
    return schedule.listed((*schedule.logarithmic(config.records, total), config.sgd_steps), total)


def start(config: FlowConfig, seed: int, tokens: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights [token, class] and logits [token] at the start, the same for all flows of a seed."""
    stream = generator(seed, "start")
    v = config.start_v * stream.normal(size=(tokens, classes))
    return v, config.start_z * stream.normal(size=tokens)


def solve_named(config: FlowConfig, seed: int) -> xr.Dataset:
    """Solve the flows of the named worlds for one seed, with both gradients and both activations.

    Returns:
        Over `world`, `activation` and `time`: the `entropy` of attention divided by ln M with cross entropy; over
        `constant_time` that with the constant gradient, `constant_entropy`. Of linear units and cross entropy: `loss`
        over `time` and the final `weight` over `token` and `label`. Of each optimum: `optimum_loss`,
        `optimum_entropy`, and the `bayes_risk`; of *overlap* also the `naive_bayes` weights and their loss. NaN for
        GELU units in worlds that are not solved with them.
    """
    worlds, p = named_worlds(config, generator(seed, "worlds"))
    streams = {"linear": generator(seed, "searches"), "gelu": generator(seed, "GELU searches")}
    rows = [
        xr.merge([_solve_world(config, seed, name, worlds[name]), _search(config, name, worlds[name], streams)])
        for name in WORLDS
    ]
    target = naive_bayes(p, config.length)
    uniform = loss_gradient(worlds["overlap"], target, np.zeros(config.tokens)).loss
    return xr.concat(rows, dim=xr.Variable("world", list(WORLDS))).assign(
        naive_bayes=(("token", "label"), target), naive_bayes_loss=uniform
    )


def _search(config: FlowConfig, name: str, world: Population, streams: dict[str, np.random.Generator]) -> xr.Dataset:
    """Return the Bayes risk, and loss and entropy at the optimum of each activation that is solved."""
    loss, entropy = np.full((2, len(ACTIVATIONS)), np.nan)
    for row, activation in enumerate(ACTIVATIONS):
        if activation == "linear" or name in config.gelu_worlds:
            optimum = block_optimum(world, streams[activation], starts=config.searches, activation=activation)
            loss[row], entropy[row] = optimum.loss, relative_entropy(optimum.z)
    return xr.Dataset(
        {
            "bayes_risk": world.bayes_risk,
            "optimum_loss": ("activation", loss),
            "optimum_entropy": ("activation", entropy),
        }
    )


def _solve_world(config: FlowConfig, seed: int, name: str, world: Population) -> xr.Dataset:
    times = config.rate * np.array(steps(config))
    constant_times = np.append(0.0, np.geomspace(config.constant_until / 1e3, config.constant_until, config.records))
    posterior = world.posterior
    path = gradient_flow(world, times, *_start_of(config, seed, world), rate_z=config.rate_z, solver=SOLVER)
    shape = (len(ACTIVATIONS), config.records + 1)
    entropy, driven = np.full((len(ACTIVATIONS), len(times)), np.nan), np.full(shape, np.nan)
    entropy[ACTIVATIONS.index("linear")] = relative_entropy(path.z)
    for row, activation in enumerate(ACTIVATIONS):
        if activation == "linear" or name in config.gelu_worlds:
            push = constant(posterior - 1 / posterior.shape[1])
            driven[row] = _block_entropy(config, seed, world, activation=activation, gradient=push, at=constant_times)
    if name in config.gelu_worlds:
        pull = soft_cross_entropy(posterior)
        row = ACTIVATIONS.index("gelu")
        entropy[row] = _block_entropy(config, seed, world, activation="gelu", gradient=pull, at=times)
    return xr.Dataset(
        {
            "entropy": (("activation", "time"), entropy),
            "constant_entropy": (("activation", "constant_time"), driven),
            "loss": ("time", path.loss),
            "weight": (("token", "label"), path.v[-1]),
        },
        {"activation": list(ACTIVATIONS), "time": times, "constant_time": constant_times},
    )


def _start_of(config: FlowConfig, seed: int, world: Population) -> tuple[np.ndarray, np.ndarray]:
    return start(config, seed, world.counts.shape[1], world.joint.shape[1])


def _block_entropy(
    config: FlowConfig,
    seed: int,
    world: Population,
    *,
    activation: str,
    gradient: Gradient,
    at: Float[np.ndarray, " time"],
) -> Float[np.ndarray, " time"]:
    """Return the entropy of attention along the flow of the block, without residual connection."""
    v, z = _start_of(config, seed, world)
    flow = block(
        "softmax",
        activation,
        gradient,
        world.x,
        weight=world.weight,
        training=Training(rate_z=config.rate_z),
        architecture=Architecture(residual=False),
    )
    w = np.concatenate([v, np.zeros((1, v.shape[1]))])  # 0 for the query: without `residual` it plays no part
    return relative_entropy(flow.solve(at, w, z[None], solver=SOLVER).z[:, 0])


def solve_cases(config: FlowConfig, seed: int) -> xr.Dataset:
    """Solve the flow of linear units in every world of the three families, and predict its end, for one seed.

    Returns:
        The variables of `_predict` over `case`, whose coordinates are the `family` and the `setting` in it: a share of
        contexts of one token, a planted entropy, or the number of a random world.
    """
    stream, searches = generator(seed, "families"), generator(seed, "searches")
    _, p = named_worlds(config, generator(seed, "worlds"))
    worlds = [*short_worlds(config, p), *planted_worlds(config, stream), *random_worlds(config, stream)]
    settings = [*config.shares, *config.planted, *range(config.draws)]
    sizes = (len(config.shares), len(config.planted), config.draws)
    families = [name for name, size in zip(FAMILIES, sizes, strict=True) for _ in range(size)]
    cases = xr.concat([_predict(config, seed, world, searches) for world in worlds], dim="case")
    return cases.assign_coords(family=("case", families), setting=("case", np.array(settings, dtype=np.float64)))


def _predict(config: FlowConfig, seed: int, world: World, searches: np.random.Generator) -> xr.Dataset:
    """Solve the flow in one world, and find its optimum: the planted one, or else by a search.

    Returns:
        Entropies of attention, divided by ln M: at the `case_start`, the least up to the time at which the loss has
        made most of its fall (`case_early`), the least of all (`case_least`), at the `case_end`, and at the optimum
        (`case_optimum`). The loss at the start and at the end, less that of the optimum: `case_fall`, `case_excess`.
        The gradient at the optimum (`case_slope`), and the kind of world by its number in `KINDS`.
    """
    contexts = world.population
    times = config.rate * np.array(steps(config))
    path = gradient_flow(contexts, times, *_start_of(config, seed, contexts), rate_z=config.rate_z, solver=SOLVER)
    if world.planted is None:
        optimum = block_optimum(contexts, searches, starts=config.searches)
        logits, least_loss, slope = optimum.z, optimum.loss, optimum.slope
    else:
        logits, least_loss, slope = world.planted, contexts.bayes_risk, 0.0
    entropy, excess = relative_entropy(path.z), path.loss - least_loss
    early = int((excess <= (1 - EARLY) * excess[0]).argmax())
    numbers = {
        "start": entropy[0],
        "early": entropy[: early + 1].min(),
        "least": entropy.min(),
        "end": entropy[-1],
        "optimum": float(relative_entropy(logits)),
        "fall": excess[0],
        "excess": excess[-1],
        "slope": slope,
        "kind": KINDS.index(world.kind),
    }
    return xr.Dataset({f"case_{name}": number for name, number in numbers.items()})


def train(config: FlowConfig, context: Context) -> xr.Dataset:
    """Train blocks with linear units by SGD on the populations of some worlds, from the starts of the flows.

    Returns:
        `sgd_entropy` of attention divided by ln M, over `seed`, `sgd_world` and `sgd_time`.
    """
    worlds, arms = [_named(config, seed) for seed in context.seeds], Arms("sgd_world", config.sgd_worlds)
    x, joint = _padded([world[name] for name in arms.labels for world in worlds])
    x, joint = x.to(context.device), joint.to(context.device)
    block_config = BlockConfig(tokens=config.tokens, hidden=config.classes, residual=False, scale=0.0)
    model = Block(block_config, generators=context.generators("ladder along the flow, weights", arms))
    set_start(model, config, context.models(arms))
    trajectory = context.fit(
        model,
        population_loss(x, joint),
        label="ladder along the flow",
        optimiser=Optimiser("sgd", config.rate, rates={"z": config.rate * config.rate_z}),
        steps=config.sgd_steps,
        record=Record(
            lambda model, _: {"entropy": shannon_entropy(model.z[:, 0].softmax(-1))},
            at=[step for step in steps(config) if step <= config.sgd_steps],
        ),
        arms=arms,
    )
    entropy = trajectory.entropy / np.log(config.tokens)
    entropy = entropy.rename(step="sgd_time").assign_coords(sgd_time=config.rate * entropy.step.values)
    return xr.Dataset({"sgd_entropy": entropy.transpose("seed", "sgd_world", "sgd_time")})


def set_start(model: Block, config: FlowConfig, seeds: Sequence[int]) -> None:
    """Set the weights of the tokens and the logits of each model to the start of its seed's flows."""
    starts = [start(config, seed, config.tokens, config.classes) for seed in seeds]
    with torch.no_grad():
        model.w[:, : config.tokens] = torch.from_numpy(np.stack([v for v, _ in starts]))
        model.z[:, 0] = torch.from_numpy(np.stack([z for _, z in starts]))


def population_loss(
    x: Float[Tensor, "*model context token"], joint: Float[Tensor, "model context label"]
) -> Callable[[Block, Tensor], Tensor]:
    """Return the loss of a step: the cross entropy on all contexts x, where P(context, class) is `joint`."""
    weight = joint.sum(-1)

    def loss(model: Block, _step: Tensor) -> Tensor:
        h = model(x)
        return (weight * h.logsumexp(-1) - (joint * h).sum(-1)).sum(-1)

    return loss


def _named(config: FlowConfig, seed: int) -> dict[str, Population]:
    return named_worlds(config, generator(seed, "worlds"))[0]


def _padded(
    worlds: list[Population],
) -> tuple[Float[Tensor, "model context token"], Float[Tensor, "model context label"]]:
    """Return frequencies and joint probabilities of all worlds; short ones repeat a context with probability 0."""
    size = max(len(world.counts) for world in worlds)
    rows = [np.minimum(np.arange(size), len(world.counts) - 1) for world in worlds]
    x = np.stack([world.x[row] for world, row in zip(worlds, rows, strict=True)])
    joint = np.stack(
        [
            np.where(np.arange(size)[:, None] < len(world.counts), world.joint[row], 0.0)
            for world, row in zip(worlds, rows, strict=True)
        ]
    )
    return torch.from_numpy(x), torch.from_numpy(joint)
