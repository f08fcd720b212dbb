"""The exact part of `icl-regression`: flows from random and aligned starts, and the risk of sampled prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from scipy.interpolate import CubicSpline

from joma.arguments import InputError, distinct, positive, scalar, whole
from joma.study import Context
from joma.theory import in_context
from joma.theory.in_context import Path
from joma.theory.integration import Solver

FORMS = ("rank one", "full rank", "low rank")
DENSE = 2000  # times at which a separate flow is solved, evenly spaced in the logarithm
FIRST_TIME = 0.1
SHARES = np.linspace(0.05, 0.95, 19)  # of what an aligned head learns, at which its time is stored
LONG = 32  # times the length of training
CHUNK = 2**20  # random numbers that a sample of prompts draws at once
# Starts are as small as 1e-5, and the absolute tolerance is far below them.
PRECISE = Solver("LSODA", rtol=1e-11, atol=1e-15, max_evaluations=10**6)
FLOW_ERROR = 1000 * PRECISE.rtol  # judged of what is exact along a flow: a thousand steps may each err by the tolerance


@dataclass(frozen=True)
class FlowConfig:
    """The task, and the starts of the flows on its exact loss."""

    spectrum: tuple[float, ...] = (1.6, 1.0, 0.6, 0.3)
    """Eigenvalues of the covariance of x, from the largest to the smallest."""
    length: int = 12
    """Examples in a prompt."""
    merged_heads: tuple[int, ...] = (1, 8)
    merged_scale: float = 1e-3
    merged_until: float = 40.0
    drop_scales: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    """Sizes of the starts along Λ², from the largest to the smallest."""
    heads: int = 4
    """Heads of rank one; beside them one head of full rank and one of a lower rank are trained."""
    low_rank: int = 2
    separate_scale: float = 0.002
    separate_until: float = 1e5
    records: int = 100
    """Times at which the loss along a flow is stored."""
    aligned_start: float = 0.05
    noise: float = 0.5
    """Standard deviation of the labels' noise, for the risk of prompts with noise."""
    prompts: int = 20_000
    """Prompts of each seed on which a risk is sampled."""


def check(config: FlowConfig) -> None:
    """Raise `InputError` if the flows cannot be solved with this config."""
    spectrum = positive("spectrum", config.spectrum, ndim=1)
    if len(spectrum) < 2 or (np.diff(spectrum) >= 0).any():
        remedy = "sort them and leave out repetitions"
        raise InputError("spectrum", "two or more decreasing eigenvalues", config.spectrum, remedy)
    for heads in distinct("merged_heads", config.merged_heads):
        whole("merged_heads", heads)
    for name in ("length", "heads"):
        whole(name, getattr(config, name))
    whole("prompts", config.prompts, low=2)
    whole("records", config.records, low=10)
    whole("low_rank", config.low_rank, high=len(spectrum) - 1)
    for name in ("merged_scale", "merged_until", "separate_scale", "noise"):
        scalar(name, getattr(config, name), above=0.0)
    scalar("separate_until", config.separate_until, above=10 * FIRST_TIME)
    scales = positive("drop_scales", config.drop_scales, ndim=1)
    if len(scales) < 2 or (np.diff(scales) >= 0).any():
        raise InputError("drop_scales", "two or more decreasing sizes", config.drop_scales, "sort them")


def gamma(config: FlowConfig) -> Float[np.ndarray, " direction"]:
    """Return what training should learn in each direction."""
    return in_context.preconditioner(config.spectrum, config.length)


def solve(config: FlowConfig, context: Context) -> xr.Dataset:
    """Solve all flows and sample all risks; those from random starts for each seed."""
    check(config)
    streams = [context.numpy_generators(f"icl-regression, {purpose}") for purpose in ("starts", "prompts")]
    rows: list[xr.Dataset] = []
    with context.progress.task("icl-regression, flows", total=len(context.seeds)) as task:
        for starts, prompts in zip(*streams, strict=True):
            parts = [_merged(config, starts), _separate(config, starts), sampled_risks(config, prompts)]
            rows.append(xr.merge(parts))
            task.advance()
    solved = xr.concat(rows, dim=xr.Variable("seed", list(context.seeds)))
    return xr.merge([solved, _constants(config), _logistic(config), _drops(config), _aligned(config)])


def _constants(config: FlowConfig) -> xr.Dataset:
    """Return the closed forms that are drawn and compared with."""
    spectrum, length = np.array(config.spectrum), config.length
    lengths = np.unique(np.geomspace(max(1, length // 4), LONG * length, 25).round())
    risk = [in_context.shifted_risk(gamma(config), spectrum, n) for n in lengths]
    best = [in_context.least_loss(spectrum, n) for n in lengths]
    saddle, step = in_context.rank_one_saddle(spectrum, length), in_context.plain_step(spectrum, length)
    return xr.Dataset(
        {
            "spectrum": ("direction", spectrum),
            "gamma": ("direction", gamma(config)),
            "plateau_loss": ("plateau", in_context.plateaus(spectrum, length)),
            "length": length,
            "low_rank": config.low_rank,
            "plain_rate": step.rate,
            "plain_loss": step.loss,
            "escape_rate": saddle.escape_rate,
            "risk": ("test_length", np.array(risk)),
            "least_risk": ("test_length", np.array(best)),
            "endless_risk": float(in_context.shifted_risk(gamma(config), spectrum, np.inf)),
            "reversed_risk": float(in_context.shifted_risk(gamma(config), spectrum[::-1], length)),
        },
        {"test_length": lengths, "plateau": np.arange(len(spectrum) + 1)},
    )


def half_time(path: Path, least: float, share: float = 0.5) -> float:
    """Return when the loss has made a share of its fall to `least`, between records by a straight line."""
    fallen = (path.loss[0] - path.loss) / (path.loss[0] - least)
    return float(np.interp(share, np.maximum.accumulate(fallen), path.times))


def _merged(config: FlowConfig, generator: np.random.Generator) -> xr.Dataset:
    """Solve merged flows from random starts, one for each number of heads."""
    size, least = len(config.spectrum), in_context.least_loss(config.spectrum, config.length)
    times = np.append(0.0, np.geomspace(min(FIRST_TIME, config.merged_until / 100), config.merged_until, DENSE))
    stored = _stored(config, len(times))
    losses, drifts, halves = [], [], []
    for heads in config.merged_heads:
        u = config.merged_scale * generator.normal(size=heads)
        U = config.merged_scale * generator.normal(size=(heads, size, size)) / np.sqrt(size)
        path = in_context.merged_flow(u, U, config.spectrum, config.length, times=times, solver=PRECISE)
        losses.append(path.loss)
        drifts.append(abs(path.conserved - path.conserved[0]).max())
        halves.append(half_time(path, least))
    return xr.Dataset(
        {
            "merged_loss": (("merged_heads", "merged_time"), np.stack(losses)[:, stored]),
            "merged_excess": ("merged_heads", np.stack(losses)[:, -1] - least),
            "merged_drift": ("merged_heads", np.array(drifts)),
            "merged_half_time": ("merged_heads", np.array(halves)),
        },
        {"merged_heads": list(config.merged_heads), "merged_time": times[stored]},
    )


def _stored(config: FlowConfig, count: int) -> Int[np.ndarray, " record"]:
    return np.unique(np.linspace(0, count - 1, config.records).round().astype(int))


def _separate(config: FlowConfig, generator: np.random.Generator) -> xr.Dataset:
    """Solve separate flows from random starts: heads of rank one, one head of full rank, one of a lower rank."""
    size, scale = len(config.spectrum), config.separate_scale
    times = np.append(0.0, np.geomspace(FIRST_TIME, config.separate_until, DENSE))
    shapes = {"rank one": (config.heads, 1), "full rank": (1, size), "low rank": (1, config.low_rank)}
    paths = []
    for heads, rank in shapes.values():
        u, K, Q = (scale * generator.normal(size=shape) for shape in (heads, *2 * [(heads, rank, size)]))
        paths.append(in_context.separate_flow(u, K, Q, config.spectrum, config.length, times=times, solver=PRECISE))
    stored = _stored(config, len(times))
    losses = np.stack([path.loss for path in paths])
    shares = np.stack([path.matrix.diagonal(axis1=1, axis2=2) for path in paths]) / gamma(config)
    return xr.merge(
        [
            xr.Dataset(
                {
                    "separate_loss": (("form", "separate_time"), losses[:, stored].astype(np.float32)),
                    "separate_end": ("form", losses[:, -1]),
                    "separate_drift": ("form", np.array([abs(p.conserved - p.conserved[0]).max() for p in paths])),
                    "learnt": (("separate_time", "direction"), shares[0][stored].astype(np.float32)),
                    "learnt_time": (("form", "direction"), _crossing_times(shares, times)),
                },
                {"form": list(FORMS), "separate_time": times[stored]},
            ),
            _plateau_visits(config, losses, times),
        ]
    )


def _crossing_times(shares: Float[np.ndarray, "form time direction"], times: np.ndarray) -> np.ndarray:
    """Return when each direction has learnt half of its γ, and infinity where it never does."""
    reached = shares >= 0.5
    return np.where(reached.any(axis=1), times[reached.argmax(axis=1)], np.inf)


def _plateau_visits(config: FlowConfig, losses: Float[np.ndarray, "form time"], times: np.ndarray) -> xr.Dataset:
    """Return, at the record nearest each plateau between the first and the last, the loss's distance and slope."""
    inner = in_context.plateaus(config.spectrum, config.length)[1:-1]
    after = losses[:, 1:]
    slopes = abs(np.gradient(after, np.log(times[1:]), axis=1))
    nearest = abs(after[:, None] - inner[:, None]).argmin(axis=2)
    rows = np.arange(len(losses))[:, None]
    return xr.Dataset(
        {
            "visit_distance": (("form", "inner_plateau"), abs(after[rows, nearest] - inner)),
            "visit_slope": (("form", "inner_plateau"), slopes[rows, nearest]),
        },
        {"form": list(FORMS), "inner_plateau": np.arange(1, len(inner) + 1)},
    )


def _logistic(config: FlowConfig) -> xr.Dataset:
    """Compare the merged flow with white inputs, from an isotropic start, with the logistic law."""
    size = len(config.spectrum)
    c, limit = config.merged_scale, np.sqrt(size) * in_context.preconditioner(np.ones(size), config.length)[0]
    half = max(1.0, np.log(limit / c**2)) / (2 * np.sqrt(size))
    times = np.linspace(0.0, 3 * half, 200)
    U = c / np.sqrt(size) * np.eye(size)
    path = in_context.merged_flow([c], [U], np.ones(size), config.length, times=times, solver=PRECISE)
    law = in_context.logistic(times, c**2, size, config.length)
    return xr.Dataset({"logistic_error": float(abs(path.matrix[:, 0, 0] * np.sqrt(size) - law).max())})


def _drops(config: FlowConfig) -> xr.Dataset:
    """Solve merged flows from starts along Λ² of several sizes, and return when the loss has fallen by which share."""
    spectrum, rate = np.array(config.spectrum), in_context.growth_rate(config.spectrum)
    least, shares = in_context.least_loss(spectrum, config.length), (0.1, 0.5, 0.9)
    rows = []
    for scale in config.drop_scales:
        end = 2 * max(0.0, -np.log(scale)) / rate + config.merged_until
        times = np.append(0.0, np.geomspace(0.01 / rate, end, 8 * DENSE))
        U = scale * np.diag(spectrum**2) / rate
        path = in_context.merged_flow([scale], [U], spectrum, config.length, times=times, solver=PRECISE)
        rows.append([half_time(path, least, share) for share in shares])
    return xr.Dataset(
        {"drop_time": (("drop_scale", "share"), np.array(rows)), "growth_rate": rate},
        {"drop_scale": list(config.drop_scales), "share": list(shares)},
    )


def _aligned(config: FlowConfig) -> xr.Dataset:
    """Solve the separate flow of a head that is aligned with each direction, and return the half times of all."""
    spectrum, start = np.array(config.spectrum), scalar("aligned_start", config.aligned_start, above=0.0)
    predicted = in_context.aligned_time(0.5, spectrum, config.length, start)
    halves = []
    for direction, time in enumerate(predicted):
        window = time * np.linspace(0.9, 1.1, 201)
        head = start * np.eye(len(spectrum))[None, direction : direction + 1]
        path = in_context.separate_flow([start], head, head, spectrum, config.length, times=window, solver=PRECISE)
        halves.append(_root(window, path.matrix[:, direction, direction] / gamma(config)[direction] - 0.5))
    return xr.Dataset(
        {
            "half_time": ("direction", np.array(halves)),
            "half_time_predicted": ("direction", predicted),
            "aligned_time": (
                ("aligned_share", "direction"),
                in_context.aligned_time(SHARES, spectrum, config.length, start),
            ),
        },
        {"aligned_share": SHARES},
    )


def _root(times: np.ndarray, values: np.ndarray) -> float:
    """Return the zero of a curve, by a cubic spline; NaN if it has none."""
    roots = CubicSpline(times, values).roots(extrapolate=False)
    return float(roots[0]) if len(roots) else float("nan")


def sampled_risks(config: FlowConfig, generator: np.random.Generator) -> xr.Dataset:
    """Return the exact risk and that of sampled prompts with its standard error: longer ones, and some with noise.

    The longer prompts are answered by the optimum of the training length, those with noise by their own optimum.
    """
    spectrum, length = np.array(config.spectrum), config.length
    noisy = in_context.preconditioner(spectrum, length, config.noise)
    cases = {
        "shift": (gamma(config), 2 * length, 0.0, config.prompts),
        "long": (gamma(config), LONG * length, 0.0, max(2, config.prompts // 10)),
        "noise": (noisy, length, config.noise, config.prompts),
    }
    results = {"long_least": in_context.least_loss(spectrum, LONG * length)}
    for name, (gain, examples, noise, count) in cases.items():
        losses = _prompt_losses(gain, spectrum, examples, noise, count=count, generator=generator)
        exact = float(in_context.shifted_risk(gain, spectrum, examples, noise))
        error = losses.std(ddof=1) / np.sqrt(len(losses))
        results |= {f"{name}_exact": exact, f"{name}_sampled": losses.mean(), f"{name}_error": error}
    return xr.Dataset(results)


def _prompt_losses(
    gain: np.ndarray,
    spectrum: np.ndarray,
    length: int,
    noise: float,
    *,
    count: int,
    generator: np.random.Generator,
) -> Float[np.ndarray, " prompt"]:
    """Return the loss of ŷ = hᵀ diag(gain) x_q on sampled prompts, averaged over the query exactly."""
    losses, size = [], len(spectrum)
    chunk = max(1, CHUNK // (length * size))
    for first in range(0, count, chunk):
        prompts = min(chunk, count - first)
        w = generator.normal(size=(prompts, size))
        x = np.sqrt(spectrum) * generator.normal(size=(prompts, length, size))
        y = np.einsum("pnd,pd->pn", x, w) + noise * generator.normal(size=(prompts, length))
        h = np.einsum("pn,pnd->pd", y, x) / length
        losses.append((h * gain - w) ** 2 @ spectrum / 2)
    return np.concatenate(losses)
