"""Theorems 3 and 4: where the flow of one hidden unit stops, and how long the reduced flow follows the full one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from joma.arguments import InputError, choice, distinct, positive, real, whole
from joma.drawing import activation_name, canvas, letters, measured, theory
from joma.studies.theorems import flow_comparison
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most, near
from joma.theory.activations import ACTIVATIONS
from joma.theory.critical import CriticalPoints, critical_points
from joma.theory.integration import Solver, integrate
from joma.theory.mixture import FLOWS, Unit, theta, velocity
from joma.verdicts import Kind

Measure = Callable[[xr.Dataset], xr.DataArray]
KINDS = ("stable", "saddle", "unstable", "degenerate")
FATES = ("grew", "died", "stalled")
RECTIFIERS = ("relu", "leaky_relu", "gelu", "silu")
# A run grew if its norm rose by this factor. It died if the norm fell by it, or if the unit fires less than once in so
# many samples of every component.
GROWTH = 100.0


@dataclass(frozen=True)
class Config(flow_comparison.FlowConfig):
    """Mixtures for the critical points, runs of the plain ReLU flow, and the contexts of the full flow."""

    activations: tuple[str, ...] = ("linear", "relu", "leaky_relu", "gelu", "silu", "tanh")
    tokens: int = 10
    components: int = 4
    """Components of the mixture: one of positive weight, the others negative."""
    sigma: float = 0.5
    """Standard deviation of the noise along one direction; centres have length 1."""
    close: float = 0.9
    """Cosine from which a critical point counts as near a centre."""
    overlaps: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    """Share of their squared length that the centres have in common."""
    fate_tokens: int = 5
    fate_components: int = 3
    """Components, of any signs, of the mixtures in which runs of the plain ReLU flow are followed."""
    mixtures: int = 10
    runs: int = 5
    """Runs in each of these mixtures, from random starts."""
    clock: float = 3000.0
    """How long a run is followed, in ∫ dt/‖v‖."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Search for critical points, follow the plain ReLU flow and compare the flows, for each seed.

    Each of these parts draws from a random stream of its own, so that none depends on the others.
    """
    _check(config)
    parts = (_landscape, _overlaps, _fates, flow_comparison.compare)
    rows: list[xr.Dataset] = []
    with context.progress.task("critical points", total=len(parts) * len(context.seeds)) as task:
        for seed in context.seeds:
            results: list[xr.Dataset] = []
            for stream, part in enumerate(parts):
                results.append(part(config, np.random.default_rng([seed, stream])))
                task.advance()
            rows.append(xr.merge(results))
    return xr.concat(rows, dim=xr.Variable("seed", list(context.seeds)))


def _check(config: Config) -> None:
    flow_comparison.check(config)
    for name in distinct("activations", config.activations):
        choice("activations", name, ACTIVATIONS)
    for field, required in (("activations", {"linear", *RECTIFIERS, "tanh"}), ("driven", {"relu"})):
        if missing := required - {*getattr(config, field)}:
            got, remedy = f"no {', '.join(sorted(missing))}", "add what is missing: there are claims about it"
            raise InputError(field, ", ".join(sorted(required)), got, remedy, must="contain")
    for name in ("tokens", "components"):
        whole(name, getattr(config, name), low=2)
    for name in ("mixtures", "runs", "fate_tokens", "fate_components"):
        whole(name, getattr(config, name))
    for name in ("sigma", "clock"):
        positive(name, getattr(config, name), ndim=0)
    real("overlaps", distinct("overlaps", config.overlaps), ndim=1, low=0.0, high=0.99)
    real("close", config.close, ndim=0, low=-1.0, high=1.0)


def _mixture(config: Config, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return random vectors of length 1, [component + 1, token], and the components' weights, of which one is positive.

    The first vector is the part that centres can share; the others belong to one component each. The first weight is
    the positive one.
    """
    vectors = generator.normal(size=(config.components + 1, config.tokens))
    signs = np.full(config.components, -1.0 / (config.components - 1))
    signs[0] = 1.0
    weights = signs * generator.uniform(0.5, 1.5, config.components)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), weights


def _landscape(config: Config, generator: np.random.Generator) -> xr.Dataset:
    """Find the critical points of every flow in one mixture, for every activation."""
    vectors, weights = _mixture(config, generator)
    shape = len(FLOWS), len(config.activations)
    count, cosine, defect = np.zeros((*shape, len(KINDS))), np.full(shape, np.nan), np.zeros(shape[1])
    near_centre = np.zeros(shape)
    for column, activation in enumerate(config.activations):
        unit = Unit.of(activation, vectors[1:], weights, sigma=config.sigma)
        for row, flow in enumerate(FLOWS):
            points = critical_points(unit, flow=flow, decay=config.decay, starts=config.starts, generator=generator)
            count[row, column] = [len(points.of_kind(kind)) for kind in KINDS]
            stable = points.cosine[points.of_kind("stable"), 0]
            near_centre[row, column] = (stable >= config.close).any()
            cosine[row, column] = stable[0] if stable.size else np.nan
            if flow == "sphere":
                defect[column] = _euler_defect(points)
    dims = ("flow", "activation")
    return xr.Dataset(
        {
            "count": ((*dims, "kind"), count),
            "near": (dims, near_centre),
            "cosine": (dims, cosine),
            "euler_defect": ("activation", defect),
        },
        {"flow": list(FLOWS), "activation": list(config.activations), "kind": list(KINDS)},
    )


def _euler_defect(points: CriticalPoints) -> float:
    """Return how far the sum of the indices on a sphere is from its Euler characteristic; NaN if one is degenerate."""
    if "degenerate" in points.kind:
        return np.nan
    indices = (-1.0) ** (points.eigenvalues > 0).sum(-1)
    return float(abs(indices.sum() - 1 - (-1) ** points.eigenvalues.shape[1]))


def _overlaps(config: Config, generator: np.random.Generator) -> xr.Dataset:
    """Find the best stable direction on the unit sphere, and its cosine with the positive centre, for each overlap."""
    names = [*config.driven, "linear"]
    cosine = np.full((len(names), len(config.overlaps)), np.nan)
    linear = np.zeros(len(config.overlaps))
    vectors, weights = _mixture(config, generator)
    for column, overlap in enumerate(config.overlaps):
        centres = np.sqrt(overlap) * vectors[0] + np.sqrt(1 - overlap) * vectors[1:]
        centres /= np.linalg.norm(centres, axis=-1, keepdims=True)
        mean = weights @ centres
        linear[column] = centres[0] @ mean / np.linalg.norm(mean)
        for row, activation in enumerate(names):
            unit = Unit.of(activation, centres, weights, sigma=config.sigma)
            points = critical_points(unit, flow="sphere", starts=config.starts, generator=generator)
            stable = points.of_kind("stable")
            cosine[row, column] = points.cosine[stable[0], 0] if stable.size else np.nan
    values = {"overlap_cosine": (("unit", "overlap"), cosine), "overlap_linear": ("overlap", linear)}
    return xr.Dataset(values, {"unit": names, "overlap": list(config.overlaps)})


def _fates(config: Config, generator: np.random.Generator) -> xr.Dataset:
    """Return the share of runs of the plain ReLU flow that grow, die or do neither."""
    fates = [_follow(config, generator) for _ in range(config.mixtures)]
    grew, died = (np.concatenate(flags) for flags in zip(*fates, strict=True))
    share = [grew.mean(), died.mean(), (~grew & ~died).mean()]
    return xr.Dataset({"fate_share": ("fate", share)}, {"fate": list(FATES)})


def _follow(config: Config, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw one mixture; return for each of its runs whether it grew and whether it died (`GROWTH`).

    ReLU's drive F has degree 0, so that under the clock ∫ dt/‖v‖ the direction e has a flow of its own,
    ė = F − (F·e)e, and d ln‖v‖ = F·e. Neither growth to infinity nor death in finite time ends the integration.
    """
    centres = generator.normal(size=(config.fate_components, config.fate_tokens))
    unit = Unit.of("relu", centres, generator.normal(size=config.fate_components), sigma=config.sigma)
    start = generator.normal(size=(config.runs, config.fate_tokens))
    start /= np.linalg.norm(start, axis=-1, keepdims=True)

    def rhs(_: float, state: np.ndarray) -> np.ndarray:
        # The direction is normalised again, or rounding errors would grow where v dies.
        e = state[:, :-1] / np.linalg.norm(state[:, :-1], axis=-1, keepdims=True)
        drive = velocity(unit, e)
        along = (drive * e).sum(-1, keepdims=True)
        return np.concatenate([drive - along * e, along], axis=-1)

    initial_state = np.concatenate([start, np.zeros((config.runs, 1))], axis=-1)
    end = integrate(rhs, initial_state, [config.clock], Solver("LSODA", rtol=1e-5, atol=1e-7)).states[-1]
    grew = end[:, -1] >= np.log(GROWTH)
    firing = theta("relu", end[:, :-1] @ centres.T, 1.0, config.sigma)[0]  # P[φ' = 1] in each component
    return grew, ~grew & ((end[:, -1] <= -np.log(GROWTH)) | (firing < 1 / GROWTH).all(-1))


def share_near(flow: str, *activations: str) -> Measure:
    """Return the measure: the share of activations that have a stable critical point near the positive centre."""
    return lambda run: run.near.sel(flow=flow, activation=list(activations)).mean("activation")


def best_cosine(flow: str, activation: str) -> Measure:
    """Return the measure: the best stable point's cosine with the positive centre."""
    return lambda run: run.cosine.sel(flow=flow, activation=activation)


NEAR = "with a stable point whose cosine with the positive centre is at least 0.9"
LIFE = "share of the full flow's life within 10 % of it, least over activations; the bounds are ours"


def _has_stable_point(name: str, statement: str, kind: Kind, measure: Measure, which: str) -> Claim:
    return Claim(
        name,
        statement,
        measure,
        at_least(0.9),
        kind=kind,
        quantity=f"share of {which}; the bounds are ours",
        across="interval",
    )


def _follows(name: str, statement: str, approximation: str, full: str, setting: str = "overlapping") -> Claim:
    measure = flow_comparison.followed_by(approximation, full, setting)
    return Claim(name, statement, measure, at_least(0.9), kind="control", quantity=LIFE, across="interval")


def _bounces(name: str, statement: str, full: str, setting: str = "overlapping") -> Claim:
    measure, quantity = (
        flow_comparison.largest_rise(full, setting),
        "entropy regained after its minimum, in nats; the bound is ours",
    )
    return Claim(name, statement, measure, at_least(0.01), kind="control", quantity=quantity, across="interval")


LANDSCAPE_CLAIMS = (
    _has_stable_point(
        "plain",
        "A nonlinear activation creates a stable point near a centre.",
        "reading",
        share_near("plain", *RECTIFIERS),
        f"ReLU, leaky ReLU, GELU and SiLU {NEAR}, plain flow",
    ),
    _has_stable_point(
        "unit-norm",
        "With weights of length 1 there is a stable point near a centre.",
        "control",
        share_near("sphere", *RECTIFIERS),
        f"ReLU, leaky ReLU, GELU and SiLU {NEAR}",
    ),
    _has_stable_point(
        "decayed",
        "With weight decay there is a stable point near a centre.",
        "control",
        share_near("decayed", *RECTIFIERS),
        f"ReLU, leaky ReLU, GELU and SiLU {NEAR}",
    ),
    _has_stable_point(
        "tanh",
        "With weights of length 1 tanh has a stable point near a centre.",
        "control",
        share_near("sphere", "tanh"),
        f"runs {NEAR}",
    ),
    Claim(
        "nonlinear",
        "ReLU's stable direction is nearer to the centre than that of a linear unit.",
        lambda run: best_cosine("sphere", "relu")(run) - best_cosine("sphere", "linear")(run),
        above(0.0),
        kind="control",
        quantity="cosine with the positive centre, ReLU less linear, weights of length 1",
        across="interval",
    ),
    Claim(
        "overlap",
        "ReLU's stable direction is near the centre even if the centres overlap strongly.",
        lambda run: run.overlap_cosine.sel(unit="relu").isel(overlap=-1),
        at_least(0.9),
        kind="control",
        quantity="cosine with the positive centre at the largest overlap, weights of length 1",
        across="interval",
    ),
    Claim(
        "fates",
        "Without a constraint ReLU's weights grow or die.",
        lambda run: run.fate_share.sel(fate="stalled"),
        at_most(0.05),
        kind="control",
        quantity="share of runs that do neither",
        across="interval",
    ),
    Claim(
        "cosine",
        "With weights of length 1 ReLU's stable direction has a cosine of 0.98 with the positive centre.",
        best_cosine("sphere", "relu"),
        near(0.98, 0.02),
        kind="check",
        quantity="against a constant of our own",
        across="mean",
    ),
    Claim(
        "cosine-decayed",
        "With weight decay ReLU's stable direction has a cosine of 0.98 with the positive centre.",
        best_cosine("decayed", "relu"),
        near(0.98, 0.02),
        kind="check",
        quantity="against a constant of our own",
        across="mean",
    ),
    Claim(
        "complete",
        "No critical point of the sphere was missed.",
        lambda run: run.euler_defect.max("activation"),
        at_most(0.0),
        kind="check",
        quantity="distance of the sum of their indices from the sphere's Euler characteristic",
    ),
)
FLOW_CLAIMS = (
    Claim(
        "folded",
        "Theorem 1: folding attention into the MLP leaves the flow unchanged.",
        flow_comparison.folded_distance,
        at_most(1e-6),
        kind="theorem",
        quantity="largest distance from the full flow, relative to its largest size so far, in all settings",
    ),
    _follows("averaged", "Theorem 3's averaged drive follows the full flow.", "averaged", "plain"),
    _follows(
        "averaged-disjoint",
        "Theorem 3's averaged drive follows the full flow, with disjoint centres.",
        "averaged",
        "plain",
        "disjoint",
    ),
    _follows("reduced", "Theorem 4's flow follows the full one.", "reduced at rest", "plain"),
    _follows(
        "reduced-start",
        "Theorem 4's flow, with the μ of the start, follows the full one.",
        "reduced at the start",
        "plain",
    ),
    _follows(
        "reduced-decayed", "Theorem 4's flow follows the full one, with weight decay.", "reduced at rest", "decayed"
    ),
    _follows(
        "reduced-decayed-start",
        "Theorem 4's flow, with the μ of the start, follows the full one with weight decay.",
        "reduced at the start",
        "decayed",
    ),
    _follows(
        "reduced-disjoint",
        "Theorem 4's flow follows the full one, with disjoint centres.",
        "reduced at rest",
        "plain",
        "disjoint",
    ),
    _follows(
        "reduced-near",
        "Theorem 4's flow follows the full one from a start near a centre.",
        "reduced at rest",
        "plain",
        "near",
    ),
    _follows(
        "reduced-near-decayed",
        "Theorem 4's flow follows the full one from a start near a centre, with weight decay.",
        "reduced at rest",
        "decayed",
        "near",
    ),
    _bounces("bounce", "The full flow's attention turns dense again.", "plain"),
    _bounces("bounce-decayed", "The full flow's attention turns dense again, with weight decay.", "decayed"),
    _bounces(
        "bounce-disjoint",
        "The full flow's attention turns dense again, with disjoint centres and weight decay.",
        "decayed",
        "disjoint",
    ),
    _bounces(
        "bounce-near",
        "The full flow's attention turns dense again from a start near a centre, with weight decay.",
        "decayed",
        "near",
    ),
)
CLAIMS = (*LANDSCAPE_CLAIMS, *FLOW_CLAIMS)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: where there are stable points, and how long the reduced flow follows the full one."""
    stable = {flow: float(share_near(flow, *RECTIFIERS)(run).mean()) for flow in FLOWS}
    follows = {
        name: float(flow_comparison.followed_by("reduced at rest", "plain", name)(run).mean())
        for name in flow_comparison.SETTINGS
    }
    folded = float(flow_comparison.folded_distance(run).max())
    return (
        f"A stable point near the positive centre exists for {100 * stable['plain']:.0f} % of the plain flows, "
        f"{100 * stable['sphere']:.0f} % of those with weights of length 1 and {100 * stable['decayed']:.0f} % with "
        f"weight decay. Theorem 4's flow stays within 10 % of the full one for {100 * follows['overlapping']:.1f} % of "
        f"its life, {100 * follows['disjoint']:.1f} % with disjoint centres and {100 * follows['near']:.1f} % from a "
        f"start near one; folding attention into the MLP is exact to {folded:.0e}."
    )


def draw_landscape(run: xr.Dataset) -> Figure:
    """Draw how many stable points each flow has, where ReLU's runs end, and how near a centre the stable points are."""
    figure, axes = canvas(1, 3, width=3.4, height=3.0)
    left, middle, right = axes[0]
    position = np.arange(run.sizes["activation"])
    labels = {"plain": "plain", "sphere": "unit norm", "decayed": "weight decay"}
    for index, (flow, label) in enumerate(labels.items()):
        stable = run["count"].sel(flow=flow, kind="stable")
        measured(left, position + 0.2 * (index - 1), stable, index, label)
    left.set_xticks(position, [activation_name(name) for name in run.activation.values], rotation=30)
    left.set(ylabel="stable critical points", title="Stable points need a constraint", ylim=(-0.2, None))
    left.legend()
    measured(middle, np.arange(len(FATES)), run.fate_share, 0)
    middle.set_xticks(np.arange(len(FATES)), FATES)
    middle.set(
        ylabel="share of runs", title="Without one ReLU's weights grow or die", xlim=(-0.5, 2.5), ylim=(-0.05, 1.05)
    )
    theory(right, run.overlap, run.overlap_linear.mean("seed"), 0, "linear, closed form")
    for index, name in enumerate(run.unit.values):
        shift = 0.012 * (index - (run.sizes["unit"] - 1) / 2)
        measured(right, run.overlap + shift, run.overlap_cosine.sel(unit=name), index, activation_name(name))
    right.set(
        xlabel="overlap of the centres",
        ylabel="cosine with the positive centre",
        title="Overlap pulls the stable point away",
    )
    right.legend(loc="lower left")
    letters(axes)
    return figure


STUDY = Study(
    name="critical-points",
    title="A unit stops near a centre only under a constraint, and the full flow leaves Theorem 4's early",
    source="JoMA, Theorems 3 and 4 (arXiv 2310.00535)",
    statement=(
        "A nonlinear activation creates a critical point near one of the centres of the contexts (after Theorem 3). "
        "Near it, and with attention folded into the MLP, the weights follow v̇ = (μ − v) ∘ exp(v²/2) (Theorem 4). "
        "The bounce of attention is derived from this flow."
    ),
    about=(
        "We search Theorem 3's flow of one hidden unit for critical points: as it stands, with weights of length 1, "
        "and with weight decay. Then the block's full coupled flow (exp attention, constant gradients, contexts from a "
        "mixture) is solved beside three approximations: attention folded into the MLP (Theorem 1), the drive averaged "
        "under uniform attention (Theorem 3), and Theorem 4's flow about a stable point μ. The centres overlap "
        "(cosines 0.87 to 0.996) or share no token, and the weights start small or near a centre."
    ),
    version=2,
    presets={
        "quick": Preset(Config(), seeds=3, seconds=21),
        "paper": Preset(
            Config(
                tokens=30,
                components=6,
                starts=96,
                mixtures=30,
                samples=100,
                times=61,
                driven=("relu", "gelu", "silu", "tanh"),
            ),
            seeds=10,
            seconds=180,
        ),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    figures={
        "landscape": Drawing(
            draw_landscape,
            "Points: means over seeds, with bars from the lowest to the highest. (a) Stable critical points found, by "
            "flow and activation. (b) What becomes of runs of the plain ReLU flow: weights a hundred times as long "
            "(grew), a hundredth or a silent unit (died), neither (stalled). (c) Cosine of the stable direction of "
            "length 1 with the positive centre, as the centres come to share a part; the line is the linear "
            "activation's closed form.",
        ),
        "parting": Drawing(
            flow_comparison.draw_parting,
            "Overlapping centres. Left: the three largest weights of the full flow (points), the averaged flow (thick "
            "lines) and Theorem 4's reduced flow (thin lines). Middle: distance from the full flow relative to its "
            "largest size so far, mean over seeds; the horizontal line is at 10 %, and curves end where the full flow "
            "blows up. Right: entropy of the full flow's attention (points) and of the reduced one (lines).",
        ),
        "settings": Drawing(
            flow_comparison.draw_settings,
            "Points: means over seeds, with bars from the lowest to the highest, least over activations. (a) Share of "
            "the full flow's life in which each approximation is within 10 % of it. (b) The same with weight decay. "
            "(c) Largest rise of the full flow's entropy above its minimum so far.",
        ),
    },
)
