"""Check every theorem against an independent solution: what `joma verify` runs.

A check is data: a statement, what it is compared with, the allowed error, and the function that measures the error.
Closed forms are compared with integrated flows, quadrature, enumeration and trained models, which share no code with
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import numpy as np
from scipy.integrate import quad
from scipy.stats import norm

from joma.progress import SILENT, Progress
from joma.theory import flows, growth, hierarchy, invariants, mixture
from joma.theory.activations import Activation, named
from joma.theory.block_flow import Architecture, BlockFlow, BlockSolution, Training, block
from joma.theory.losses import cross_entropy
from joma.verdicts import Verdict


@dataclass(frozen=True)
class Check:
    """A statement, the independent solution that it is compared with (`against`), and the allowed error."""

    theorem: str
    statement: str
    against: str
    tolerance: float
    error: Callable[[], float]


@dataclass(frozen=True)
class Result:
    """The result of a check, with the measured error."""

    theorem: str
    statement: str
    against: str
    tolerance: float
    error: float
    verdict: Verdict


def verify(progress: Progress = SILENT) -> list[Result]:
    """Run every check and return the results; a check whose error is NaN does not hold."""
    results = []
    with progress.task("verify", total=len(CHECKS)) as task:
        for check in CHECKS:
            error = float(check.error())
            verdict: Verdict = "holds" if error <= check.tolerance else "does not hold"
            results.append(Result(check.theorem, check.statement, check.against, check.tolerance, error, verdict))
            task.advance()
    return results


@cache
def _problem(attention: str, activation: str) -> tuple[BlockFlow, BlockSolution]:
    """Return the flow of a block with three queries, unequal learning rates and cross entropy, and its solution."""
    rng = np.random.default_rng(0)
    x, query = rng.dirichlet(np.ones(6), size=12), np.arange(12) % 3
    temperature = 0.7 if attention == "softmax" else 1.0
    gradient = cross_entropy(np.arange(12) % 4)
    training, architecture = Training(rate_w=0.8, rate_z=1.3), Architecture(temperature=temperature)
    flow = block(attention, activation, gradient, x, query=query, training=training, architecture=architecture)
    w0, z0 = 0.5 * rng.normal(size=(9, 4)), 0.5 + 0.3 * rng.normal(size=(3, 6))
    return flow, flow.solve(np.linspace(0, 8, 9), w0, z0)


def _conserved(attention: str, activation: str) -> float:
    flow, path = _problem(attention, activation)
    rates = {"rate_w": flow.training.rate_w, "rate_z": flow.training.rate_z}
    conserved = invariants.conserved(attention, path.v, path.z, **rates)
    scale = max(np.abs(path.z - path.z[0]).max(), np.abs(conserved[0]).max())
    return float(np.abs(conserved - conserved[0]).max() / scale)


def _ledger() -> float:
    flow, path = _problem("softmax", "gelu")
    options = {"kappa": flow.training.kappa, "temperature": flow.temperature, "b_ref": flow.b_ref}
    predicted = invariants.predict("softmax", path.v, path.v[0], path.z[0], **options) - path.ledger.total
    total = path.z.sum(axis=1)
    return float(np.abs(predicted - total).max() / np.abs(total - total[0]).max())


def _trained_ledger() -> float:
    """Train the block in torch by SGD with large steps; prediction minus ledger must give its logits to rounding."""
    import torch

    from joma.models.block import Block, BlockConfig
    from joma.train import Optimiser, Record, fit

    generators = [torch.Generator().manual_seed(0)]
    x = torch.rand(10, 5, generator=generators[0], dtype=torch.float64)
    target = torch.arange(10) % 4
    model = Block(BlockConfig(tokens=5, hidden=4, activation="gelu", temperature=0.5, scale=0.3), generators=generators)
    run = fit(
        model,
        lambda model, _: torch.nn.functional.cross_entropy(model(x)[0], target).reshape(1),
        optimiser=Optimiser("sgd", 1.5, rates={"z": 0.7}),
        steps=200,
        record=Record(
            lambda model, _: {"v": model.v, "z": model.z, "b": model.mean_attention(), "pull": model.pull()},
            dims={"v": ("token", "hidden"), "z": ("query", "token"), "b": ("token",), "pull": ("token",)},
        ),
    ).isel(seed=0)
    b_ref = invariants.reference(x.numpy())
    v, z = run.v.values, run.z.values
    rates = {"rate_w": 1.5, "rate_z": 0.7, "temperature": 0.5}
    remainder = invariants.ledger(v, run.b.values[:-1], run.pull.values[:-1], b_ref=b_ref, **rates)
    predicted = invariants.predict("softmax", v, v[0], z[0], kappa=0.7 / 1.5, temperature=0.5, b_ref=b_ref)
    total = z.sum(axis=1)
    return float(np.abs(predicted - remainder.total - total).max() / np.abs(total - total[0]).max())


def _linear() -> float:
    rng = np.random.default_rng(1)
    delta, v0 = rng.uniform(-1, 1, size=30), rng.uniform(-1, 1, size=30)
    times = np.linspace(0, 0.98 * growth.blow_up_time(delta, v0).min(), 20)
    integrated = flows.linear(delta, times, v0).states
    return float((np.abs(integrated - growth.linear(delta, times, v0)) / (1 + np.abs(integrated))).max())


def _blow_up() -> float:
    rng = np.random.default_rng(2)
    problems = [(rng.uniform(-2, 2, size=4), rng.uniform(-1, 1, size=4)) for _ in range(20)]
    errors = [flows.linear(delta, 1e3, v0).blow_up / growth.blow_up_time(delta, v0).min() - 1 for delta, v0 in problems]
    return float(np.abs(errors).max())


def _theta(activation: str) -> float:
    """Return the largest error of θ1 and θ2, relative to 1 + |θ|, against quadrature of their definitions."""
    rng = np.random.default_rng(3)
    arguments = zip(rng.normal(0, 2, 12), rng.uniform(0.3, 3, 12), rng.uniform(0.3, 2, 12), strict=True)
    errors = [
        abs(_moment(named(activation), r, size, sigma, power) - theta) / (1 + abs(theta))
        for r, size, sigma in arguments
        for power, theta in enumerate(mixture.theta(activation, r, size, sigma))
    ]
    return float(np.max(errors))


def _moment(phi: Activation, r: float, size: float, sigma: float, power: int) -> float:
    """Return ∫ φ'(y) (y−r)^power p((y−r)/‖v‖) dy by adaptive quadrature, split at the kinks."""
    support = 40 * sigma * size

    def integrand(y: float) -> float:
        return float(phi.slope(np.asarray(y)) * (y - r) ** power * norm.pdf((y - r) / size, scale=sigma))

    edges = sorted({r - support, r, r + support, *(kink for kink in phi.kinks if abs(kink - r) < support)})
    return sum(quad(integrand, *panel, epsabs=1e-12, epsrel=1e-12, limit=400)[0] for panel in pairwise(edges))


def _nonlinear() -> float:
    rng = np.random.default_rng(4)
    mu, v0 = rng.uniform(-2.5, 2.5, size=40), rng.uniform(-2.5, 2.5, size=40)
    times = np.linspace(0, 6, 15)
    return float(np.abs(flows.nonlinear(mu, times, v0).states - growth.nonlinear(mu, times, v0)).max())


def _softmax_nonlinear() -> float:
    mu, times = np.random.default_rng(5).uniform(1, 4, size=10), np.linspace(0, 60, 13)
    integrated = flows.softmax_nonlinear(mu, times, temperature=3.0).states
    return float(np.abs(integrated - growth.softmax_nonlinear(mu, times, temperature=3.0)).max())


def _tree() -> float:
    """Return the largest error of the closed form for trees with uneven branching, against a sum over all states."""
    rng, worst = np.random.default_rng(6), 0.0
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 6]
    for _ in range(5):
        p0, p_child = rng.dirichlet(np.ones(3)), rng.uniform(-1, 1, size=(2, 3))
        tree = (parents, p0, p_child, rng.uniform(0, 1))
        worst = max(worst, np.abs(hierarchy.cooccurrence_matrix(*tree) - hierarchy.enumerate_cooccurrence(*tree)).max())
    return float(worst)


def _tree_limit() -> float:
    """Return the difference of co-occurrence at 1 − ρ = 1e-9 from its limit, for several c; it is of order 1 − ρ."""
    c, gap = np.array([0.0, 0.5, 1.0, 3.0]), 1e-9
    height, depth = np.arange(1, 6)[:, None], 6
    probability = hierarchy.cooccurrence(height, depth, gap, c * gap, complement=True)
    return float(np.abs(probability - hierarchy.cooccurrence_limit(height, depth, c)).max())


def _bounce() -> float:
    """Return the difference of the least entropy along Theorem 4's solution from that of the integrated flow."""
    mu, times = [1.0, 1.5, 2.0, 2.5, 3.0], np.linspace(0, 3, 3001)
    exact, integrated = growth.nonlinear(mu, times), flows.nonlinear(mu, times).states
    return float(abs(growth.attention_entropy(exact).min() - growth.attention_entropy(integrated).min()))


FLOW = "the coupled flow, integrated (DOP853, 3 queries, unequal rates)"
CHECKS = (
    Check("1", "linear: Σz²/η_z − Σv²/η_w is constant (GELU)", FLOW, 1e-8, partial(_conserved, "linear", "gelu")),
    Check("1", "exp: Σz/η_z − Σv²/(2η_w) is constant (tanh)", FLOW, 1e-8, partial(_conserved, "exp", "tanh")),
    Check("1", "softmax: Σ_l z_l of a query is constant (SiLU)", FLOW, 1e-8, partial(_conserved, "softmax", "silu")),
    Check("1", "softmax: prediction less drift and gap is z (GELU)", FLOW, 1e-8, _ledger),
    Check("1", "softmax: with the step term, z along SGD", "a torch block, steps of 1.5", 1e-10, _trained_ledger),
    Check("2", "√(π/2)[erf(v/√2) − erf(v0/√2)] = Δt", "the flow, integrated", 1e-8, _linear),
    Check("2", "the winner's blow-up time", "the flow's blow-up event", 1e-8, _blow_up),
    *(
        Check("3", f"θ1 and θ2 for {name}", "quadrature of their definitions", 1e-9, partial(_theta, name))
        for name in ("linear", "relu", "leaky_relu", "gelu", "silu", "tanh")
    ),
    Check("4", "v from the inverted quadrature", "the flow, integrated", 1e-9, _nonlinear),
    Check("4", "softmax-normalised v by the change of time", "the flow, integrated", 1e-8, _softmax_nonlinear),
    Check("4", "least entropy before the bounce", "the flow, integrated", 1e-9, _bounce),
    Check("5", "P[l|m] of every pair, root-joined ones too", "enumeration of all states", 1e-12, _tree),
    Check("5", "the limit 1 − H/(L−1+c)", "P[l|m] at 1 − ρ = 1e-9", 1e-7, _tree_limit),
)
