"""The step from Theorem 3 to Theorem 4: the full coupled flow beside the reduced one, and where they part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.arguments import InputError, choice, positive, real, whole
from joma.probes.entropy import shannon_entropy
from joma.report.figure import canvas, letters, measured, theory
from joma.theory import flows, growth
from joma.theory.activations import ACTIVATIONS
from joma.theory.critical import critical_points
from joma.theory.mixture import Unit, fixed_centre, velocity

# Theorem 1, Theorem 3, and Theorem 4 with its centre frozen at the start or at a stable point
LADDER = ("folded", "averaged", "reduced at the start", "reduced at rest")
FULL = ("plain", "decayed")
PARTED = 0.1  # relative distance
START = 0.05  # of every component, as in Figure 4
BLOWN_UP = 4.0  # a weight whose attention, exp(v²/2), leaves 1e-4 of time to the pole, and no step but tiny ones

Vectors = Float[np.ndarray, "time token"]


@dataclass(frozen=True)
class Config:
    """Contexts and activations of the full flow."""

    driven: tuple[str, ...] = ("relu", "tanh")
    """Activations of the full flow."""
    decay: float = 0.1
    starts: int = 18
    """Of the search for critical points."""
    context_weights: tuple[float, ...] = (0.5, -0.25, -0.25)
    """a_c of the mixture that the contexts are drawn from."""
    context_tokens: int = 6
    context_sigma: float = 0.15
    """Of noise uniform in a ball, about centres uniform in [0.5, 1.5]: frequencies stay positive."""
    samples: int = 16
    """Of each component, half of them mirror images of the others, so that their mean is the centre."""
    horizon: float = 10.0
    times: int = 121


def check(config: Config) -> None:
    """Refuse a config that the comparison cannot be made with."""
    for name in config.driven:
        choice("driven", name, ACTIVATIONS)
    for name in ("context_tokens", "times", "samples"):
        whole(name, getattr(config, name), low=2)
    whole("starts", config.starts)
    for name in ("decay", "horizon", "context_sigma"):
        positive(name, getattr(config, name), ndim=0)
    if real("context_weights", config.context_weights, ndim=1).max() <= 0:
        remedy = "give at least one component a_c = E[g | c] P[c] > 0: without one a unit has nowhere to rest"
        raise InputError("context_weights", "positive somewhere", config.context_weights, remedy)
    if config.context_sigma * np.sqrt(config.context_tokens + 2) > 0.5:
        remedy = "lower it, or use fewer tokens: the ball of noise has radius σ√(tokens + 2), and centres begin at 0.5"
        raise InputError("context_sigma", "small enough for frequencies ≥ 0", config.context_sigma, remedy)


@dataclass(frozen=True)
class _Case:
    """One full flow: an activation with or without decay, and the contexts that it sees."""

    activation: str
    full: str
    decay: float
    unit: Unit
    x: Float[np.ndarray, "component sample token"]

    def block(self) -> tuple[flows.BlockFlow, np.ndarray, np.ndarray]:
        """The block on the contexts, with the start at which Theorem 4's flow is its own: z = v²/2."""
        components, samples, tokens = self.x.shape
        size = np.abs(self.unit.weights)
        flow = flows.block(
            "exp",
            self.activation,
            flows.constant(np.repeat(np.sign(self.unit.weights) * size.sum(), samples)[:, None]),
            self.x.reshape(components * samples, tokens),
            weight=np.repeat(size / size.sum() / samples, samples),
            residual=False,
            weight_decay=self.decay,
            width=1e-2,
        )
        w0 = np.append(np.full(tokens, START), 0.0)[:, None]  # no weight on the query, which the block leaves out
        return flow, w0, np.full((1, tokens), START**2 / 2)

    def averaged(self, times: Float[np.ndarray, " time"]) -> Vectors:
        """Theorem 3's drive, averaged over noise under uniform attention, times the folded attention."""

        def rhs(_: float, v: np.ndarray) -> np.ndarray:
            return velocity(self.unit, v) * np.exp(v**2 / 2) - self.decay * v

        start = np.full(self.x.shape[-1], START)
        return flows.integrate(rhs, start, times, method="LSODA", rtol=1e-7, atol=1e-9, bound=BLOWN_UP).states

    def stable_point(self, starts: int, generator: np.random.Generator) -> tuple[float, Float[np.ndarray, " token"]]:
        """Rate and centre μ of the best stable point: of the decayed flow, or of unit norm where nothing decays."""
        flow, decay = ("decayed", self.decay) if self.decay else ("sphere", 1.0)
        found = critical_points(self.unit, flow=flow, decay=decay, starts=starts, generator=generator)
        centre = found.points[found.of_kind("stable")[0]]
        rate, _ = fixed_centre(self.unit, centre, flow=flow, decay=decay)
        return float(rate), centre


def compare(config: Config, generator: np.random.Generator) -> xr.Dataset:
    """The full coupled flow beside Theorem 1's folded, Theorem 3's averaged and Theorem 4's reduced one."""
    components, tokens, sigma = len(config.context_weights), config.context_tokens, config.context_sigma
    centres = generator.uniform(0.5, 1.5, size=(components, tokens))
    noise = _ball(generator, (components, config.samples // 2, tokens))
    x = centres[:, None] + sigma * np.concatenate([noise, -noise], axis=1)
    columns = []
    for activation in config.driven:
        unit = Unit.of(activation, centres, config.context_weights, sigma=sigma, noise="ball")
        rates = {"plain": 0.0, "decayed": config.decay}
        cases = [_Case(activation, full, rates[full], unit, x) for full in FULL]
        columns.append(xr.concat([_compared(config, case, generator) for case in cases], dim="full"))
    compared = xr.concat(columns, dim="driven").assign_coords(driven=list(config.driven), full=list(FULL))
    return compared.assign(parted=parting_time(compared))


def _ball(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Points uniform in a ball, of unit variance along every axis."""
    normal, tokens = generator.normal(size=shape), shape[-1]
    radius = np.sqrt(tokens + 2) * generator.random((*shape[:-1], 1)) ** (1 / tokens)
    return radius * normal / np.linalg.norm(normal, axis=-1, keepdims=True)


def _compared(config: Config, case: _Case, generator: np.random.Generator) -> xr.Dataset:
    """One full flow with the steps of the ladder beside it."""
    times = np.linspace(0, config.horizon, config.times)
    flow, w0, z0 = case.block()
    coupled = flow.solve(times, w0, z0, rtol=1e-7, atol=1e-9, bound=BLOWN_UP**2 / 2)  # its logits, v²/2, are states
    folded = flow.solve_folded(times, w0, z0, rtol=1e-7, atol=1e-9, bound=BLOWN_UP)
    rate, centre = case.stable_point(config.starts, generator)
    start = np.full(len(centre), START)
    start_rate, start_centre = fixed_centre(case.unit, start, flow=case.full, decay=case.decay)
    ladder = {
        "folded": folded.v[:, :, 0],
        "averaged": case.averaged(times),
        "reduced at rest": growth.nonlinear(centre, rate * times, start),
        "reduced at the start": np.zeros((0, len(centre))),
    }
    if np.isfinite(start_centre).all():  # integrated, as it can lie too far away for the closed form
        reduced = flows.nonlinear(start_centre, float(start_rate) * times, start, method="LSODA", rtol=1e-8)
        ladder["reduced at the start"] = reduced.states
    attention = shannon_entropy(torch.from_numpy(coupled.z[:, 0]).softmax(-1)).numpy()
    return xr.Dataset(
        {
            "coupled": (("time", "token"), _padded(coupled.v[:, :, 0], len(times))),
            "entropy": ("time", np.append(attention, np.full(len(times) - len(attention), np.nan))),
            "approximation": (
                ("ladder", "time", "token"),
                np.stack([_padded(ladder[step], len(times)) for step in LADDER]),
            ),
            "entropy_reduced": ("time", growth.attention_entropy(ladder["reduced at rest"])),
            "centre": ("token", centre),
            "rate": rate,
            "start_rate": start_rate,
        },
        {"time": times, "ladder": list(LADDER)},
    )


def _padded(path: Float[np.ndarray, "known token"], length: int) -> Vectors:
    """Infinite where the path has ended, as at a blow-up."""
    return np.concatenate([path, np.full((length - len(path), path.shape[1]), np.inf)])


def distance(run: xr.Dataset) -> xr.DataArray:
    """‖v − full‖ over the largest ‖full‖ so far, for each step of the ladder; NaN once the full flow has blown up."""
    alive = np.isfinite(run.coupled).all("token")
    full = run.coupled.where(alive, 0.0)
    size = np.sqrt((full**2).sum("token"))
    scale = _so_far(np.maximum, size)
    return (np.sqrt(((run.approximation - full) ** 2).sum("token")) / scale).where(alive)


def _so_far(extreme: np.ufunc, values: xr.DataArray) -> xr.DataArray:
    axes = [["time"]]
    return xr.apply_ufunc(extreme.accumulate, values, input_core_dims=axes, output_core_dims=axes, kwargs={"axis": -1})


def life(run: xr.Dataset) -> xr.DataArray:
    """The last time recorded before the full flow's blow-up, or the horizon."""
    return run.time.where(np.isfinite(run.coupled).all("token")).max("time")


def parting_time(run: xr.Dataset) -> xr.DataArray:
    """When an approximation is first 10 % off; the end of the full flow's life if it never is."""
    return run.time.where(distance(run) > PARTED).min("time").fillna(life(run))


def followed(run: xr.Dataset) -> xr.DataArray:
    """Share of the full flow's life before an approximation is 10 % off."""
    return run.parted / life(run)


def followed_by(step: str, full: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: how much of the full flow's life that step of the ladder follows, least over activations."""
    return lambda run: followed(run).sel(ladder=step, full=full).min("driven")


def recovery(run: xr.Dataset) -> xr.DataArray:
    """How far the entropy of the full flow's attention rises above its least value so far, in nats, at most."""
    left = run.entropy.sel(full="plain")
    return (left - _so_far(np.fmin, left)).max(("time", "driven"))


def draw_parting(run: xr.Dataset) -> Figure:
    """Draw the full flow beside its approximations: components, distance and entropy, with and without decay."""
    figure, axes = canvas(run.sizes["driven"], 3, width=3.4, height=2.6)
    gap = distance(run).sel(full="plain")
    for row, activation in enumerate(run.driven.values):
        left, middle, right = axes[row]
        one = run.sel(driven=activation, full="plain").isel(seed=0)
        few = one.isel(time=slice(None, None, 6))
        for index, token in enumerate(_largest(one)):
            measured(left, few.time, few.coupled.isel(token=token), index, f"token {token}")
            for step, width in (("averaged", 1.5), ("reduced at rest", 0.8)):
                path = one.approximation.sel(ladder=step).isel(token=token)
                theory(left, run.time, path.where(abs(path) < 4), index, linewidth=width)
        left.set(xlabel="time", ylabel="weight $v$", title=f"{activation}, seed 0", ylim=(-2.5, 2.5))
        left.legend(loc="lower left")
        for index, step in enumerate(LADDER):
            curve = gap.sel(driven=activation, ladder=step)
            mean = curve.where(np.isfinite(curve)).mean("seed").where(lambda value: value > 1e-12)
            theory(middle, run.time, mean, index, step)
        middle.axhline(PARTED, color="black", linewidth=0.7)
        middle.set(xlabel="time", ylabel="relative distance", yscale="log", title=f"{activation}, from the full flow")
        middle.legend(loc="center right")
        _draw_entropy(right, run.sel(driven=activation))
        right.set_title(f"{activation}, entropy")
    letters(axes)
    return figure


def _largest(one: xr.Dataset) -> list[int]:
    """The tokens whose weights get largest, the largest first."""
    size = abs(one.coupled.where(np.isfinite(one.coupled))).max("time")
    return [int(token) for token in np.argsort(-size.values)[:3]]


def _draw_entropy(panel: Axes, one: xr.Dataset) -> None:
    few = one.isel(time=slice(None, None, 8))
    for index, (full, label) in enumerate({"plain": "", "decayed": ", weight decay"}.items()):
        theory(panel, one.time, one.entropy_reduced.sel(full=full).mean("seed"), index, f"reduced{label}")
        alive = few.entropy.sel(full=full).notnull().all("seed")
        measured(panel, few.time[alive], few.entropy.sel(full=full)[:, alive], index, f"full{label}")
    panel.set(xlabel="time", ylabel="attention entropy / nats")
    panel.legend(loc="lower left")
