"""Theorem 1: the three laws along the coupled flow, and softmax's ledger along SGD, on random problems."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks import Row
from joma.theory.block_flow import Architecture, BlockFlow, Training, block
from joma.theory.invariants import ledger, predict, relative_error
from joma.theory.losses import cross_entropy, squared_error

PROBLEMS, KINKED, STEPS, SEED = 20, 2, 200, 0
SAMPLES, TOKENS, QUERIES, HIDDEN = 12, 6, 3, 5
SMOOTH = ("linear", "gelu", "silu", "tanh")


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    for attention in ("linear", "exp", "softmax"):
        law = "ledger" if attention == "softmax" else "law"
        worst = _worst_flow(attention, SMOOTH, PROBLEMS)
        what = f"Theorem 1, {attention}'s {law} along {PROBLEMS} flows, {QUERIES} queries, unequal rates"
        yield what, "≤ 1e-8", f"{worst:.1e}", worst <= 1e-8
    worst = max(_worst_flow(attention, ("relu", "leaky_relu"), KINKED) for attention in ("linear", "exp", "softmax"))
    what = f"Theorem 1, all three along {KINKED} flows each with kinks rounded over 1e-4"
    yield what, "≤ 1e-8", f"{worst:.1e}", worst <= 1e-8
    rng = np.random.default_rng(SEED)
    rates = np.geomspace(1e-3, 30, PROBLEMS)
    worst = max(_sgd_error(*_problem(rng, "softmax", (*SMOOTH, "relu"), rate=rate, steep=False)) for rate in rates)
    what = f"Theorem 1, softmax's ledger along {STEPS} steps of SGD, rates 1e-3 to 30"
    yield what, "≤ 1e-10", f"{worst:.1e}", worst <= 1e-10


def _problem(
    rng: np.random.Generator, attention: str, activations: tuple[str, ...], *, rate: float = 1.0, steep: bool = True
) -> tuple[BlockFlow, np.ndarray, np.ndarray, np.ndarray]:
    """Return a random flow and its start; `steep` allows a squared error, on which SGD with large steps diverges."""
    activation = activations[rng.integers(len(activations))]
    losses = [cross_entropy(rng.integers(HIDDEN, size=SAMPLES)), squared_error(rng.normal(size=(SAMPLES, HIDDEN)))]
    flow = block(
        attention,
        activation,
        losses[rng.integers(1 + steep)],
        rng.dirichlet(np.ones(TOKENS), size=SAMPLES),
        query=np.arange(SAMPLES) % QUERIES,
        weight=rng.dirichlet(np.full(SAMPLES, 3.0)),
        architecture=Architecture(
            embedding=np.linalg.qr(rng.normal(size=(TOKENS + QUERIES + 2, TOKENS + QUERIES)))[0],
            temperature=rng.uniform(0.4, 2.0),
        ),
        training=Training(
            rate_w=rate * rng.uniform(0.3, 3.0),
            rate_z=rate * rng.uniform(0.3, 3.0),
            rate_bias=rate * rng.uniform(0.0, 2.0),
        ),
    )
    w0 = 0.5 * rng.normal(size=(TOKENS + QUERIES + 2, HIDDEN))
    return flow, w0, 0.5 * rng.normal(size=(QUERIES, TOKENS)), 0.1 * rng.normal(size=HIDDEN)


def _worst_flow(attention: str, activations: tuple[str, ...], problems: int) -> float:
    """Return the largest error of the law over problems and times, relative to the change of the logits."""
    rng, worst = np.random.default_rng(SEED), 0.0
    for _ in range(problems):
        flow, w0, z0, bias0 = _problem(rng, attention, activations)
        path = flow.solve(np.linspace(0.0, 3.0, 13), w0, z0, bias0=bias0)
        total = (path.z**flow.attention.power).sum(axis=1)
        predicted = _predicted(flow, path.v, path.z[0]) - path.ledger.total
        worst = max(worst, float(relative_error(total, predicted, total[0]).max()))
    return worst


def _sgd_error(flow: BlockFlow, w: np.ndarray, z: np.ndarray, bias: np.ndarray) -> float:
    """Return the largest error of the ledger along SGD, whose step is the flow's velocity times 1."""
    v, logits, b_bar, pull = [flow.context.T @ w], [z], [], []
    for _ in range(STEPS):
        velocity = flow.velocity(w, z, bias)
        w, z, bias = w + velocity.w, z + velocity.z, bias + velocity.bias
        b_bar.append(velocity.b_bar)
        pull.append(velocity.pull)
        v.append(flow.context.T @ w)
        logits.append(z)
    rates = {"rate_w": flow.training.rate_w, "rate_z": flow.training.rate_z}
    steps = np.array(v), np.array(b_bar), np.array(pull)
    remainder = ledger(*steps, b_ref=flow.b_ref, temperature=flow.temperature, **rates)
    total = np.array(logits).sum(axis=1)
    return float(relative_error(total, _predicted(flow, np.array(v), logits[0]) - remainder.total, total[0]).max())


def _predicted(flow: BlockFlow, v: np.ndarray, z0: np.ndarray) -> np.ndarray:
    options = {"kappa": flow.training.kappa, "temperature": flow.temperature, "b_ref": flow.b_ref}
    return predict(flow.attention.name, v, v[0], z0, **options)
