"""The step from Theorem 3 to Theorem 4: the full coupled flow, its approximations, and when each departs from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.arguments import InputError, choice, distinct, positive, real, whole
from joma.drawing import activation_name, canvas, letters, measured, theory
from joma.probes.entropy import shannon_entropy
from joma.theory import flows, growth
from joma.theory.activations import ACTIVATIONS
from joma.theory.block_flow import Architecture, BlockFlow, Training, block
from joma.theory.critical import critical_points
from joma.theory.integration import Solver, integrate
from joma.theory.losses import constant
from joma.theory.mixture import Unit, fixed_centre, velocity

# The approximations: Theorem 1, Theorem 3, and Theorem 4 with its centre fixed at the start or at a stable point.
LADDER = ("folded", "averaged", "reduced at the start", "reduced at rest")
FULL = ("plain", "decayed")
# Where the contexts' centres lie and the weights begin. Overlapping centres share all tokens (cosines of about 0.9), of
# disjoint ones each token is in one only. The start is small and equal as in Figure 4, or of length 1 towards the
# centre of positive weight.
SETTINGS = {
    "overlapping": "overlapping centres",
    "disjoint": "disjoint centres",
    "near": "disjoint centres, start near one",
}
TOLERANCE = 0.1  # relative distance from the full flow up to which an approximation follows it
START = 0.05  # every component of the small start, as in Figure 4
MAX_EVALUATIONS = 500_000  # of a full flow: at the tight tolerance, kinks of ReLU need a few ten thousand
BLOW_UP = 4.0  # a weight this large counts as blown up: by its attention, exp(v²/2), the pole is 1e-4 of time away

Vectors = Float[np.ndarray, "time token"]


@dataclass(frozen=True)
class FlowConfig:
    """The contexts and activations of the full flow, and the times at which it is compared."""

    driven: tuple[str, ...] = ("relu", "tanh")
    """Activations of the full flow."""
    decay: float = 0.1
    """Weight decay of the decayed flows."""
    starts: int = 18
    """Random starting points of the search for critical points."""
    context_weights: tuple[float, ...] = (0.5, -0.25, -0.25)
    """a_c of the mixture that the contexts are drawn from."""
    context_tokens: int = 6
    context_sigma: float = 0.15
    """Scale of noise uniform in a ball, about centres uniform in [0.5, 1.5]: frequencies stay positive. With disjoint
    centres a token that is not in a centre has no noise either."""
    samples: int = 8
    """Contexts of each component; half of them mirror the others, so that their mean is the centre."""
    horizon: float = 10.0
    times: int = 121


def check(config: FlowConfig) -> None:
    """Raise `InputError` if the comparison cannot be made with this config."""
    for name in distinct("driven", config.driven):
        choice("driven", name, ACTIVATIONS)
    for name in ("context_tokens", "times", "samples"):
        whole(name, getattr(config, name), low=2)
    if config.samples % 2:
        raise InputError(
            "samples", "even", config.samples, "give an even number: half of the contexts mirror the others"
        )
    whole("starts", config.starts)
    for name in ("decay", "horizon", "context_sigma"):
        positive(name, getattr(config, name), ndim=0)
    if real("context_weights", config.context_weights, ndim=1).max() <= 0:
        remedy = "give at least one component a_c = E[g | c] P[c] > 0: without one the unit has no stable point"
        raise InputError("context_weights", "positive somewhere", config.context_weights, remedy)
    if config.context_tokens < len(config.context_weights):
        expected = f"at least {len(config.context_weights)}, the number of components"
        remedy = "use more tokens: disjoint centres need one each"
        raise InputError("context_tokens", expected, config.context_tokens, remedy)
    if config.context_sigma * np.sqrt(config.context_tokens + 2) > 0.5:
        remedy = "lower it, or use fewer tokens: the ball of noise has radius σ√(tokens + 2), and centres begin at 0.5"
        raise InputError("context_sigma", "small enough for frequencies ≥ 0", config.context_sigma, remedy)


@dataclass(frozen=True)
class _FullFlow:
    """One full flow: an activation with or without decay, and the contexts that it is driven by."""

    activation: str
    name: str
    decay: float
    unit: Unit
    x: Float[np.ndarray, "component sample token"]

    def start(self, setting: str) -> Float[np.ndarray, " token"]:
        """Return the weights at time 0 of a name of `SETTINGS`."""
        centre = self.unit.centres[self.unit.weights.argmax()]
        return centre / np.linalg.norm(centre) if setting == "near" else np.full(centre.size, START)

    def block(self) -> BlockFlow:
        """Return the block's flow on the contexts."""
        components, samples, tokens = self.x.shape
        size = np.abs(self.unit.weights)
        sign, share = np.sign(self.unit.weights), size / size.sum()
        return block(
            "exp",
            self.activation,
            constant(np.repeat(sign * size.sum(), samples)[:, None]),
            self.x.reshape(components * samples, tokens),
            weight=np.repeat(share / samples, samples),
            training=Training(weight_decay=self.decay),
            architecture=Architecture(residual=False, kink_width=1e-2),
        )

    def averaged(
        self, times: Float[np.ndarray, " time"], start: Float[np.ndarray, " token"]
    ) -> Float[np.ndarray, "alive token"]:
        """Integrate Theorem 3's drive, averaged over noise under uniform attention, times the folded attention.

        The path ends where it blows up.
        """

        def rhs(_: float, v: np.ndarray) -> np.ndarray:
            return velocity(self.unit, v) * np.exp(v**2 / 2) - self.decay * v

        return integrate(rhs, start, times, Solver("LSODA", rtol=1e-7, atol=1e-9, bound=BLOW_UP)).states

    def stable_point(self, starts: int, generator: np.random.Generator) -> tuple[float, Float[np.ndarray, " token"]]:
        """Return the rate and centre μ of the best stable point: of the decayed flow, or with ‖v‖ = 1 if decay is 0."""
        flow, decay = ("decayed", self.decay) if self.decay else ("sphere", 1.0)
        critical = critical_points(self.unit, flow=flow, decay=decay, starts=starts, generator=generator)
        centre = critical.points[critical.of_kind("stable")[0]]
        rate, _ = fixed_centre(self.unit, centre, flow=flow, decay=decay)
        return float(rate), centre


def compare(config: FlowConfig, generator: np.random.Generator) -> xr.Dataset:
    """Solve the full coupled flow and its approximations: Theorem 1's folded, 3's averaged and 4's reduced flow.

    Returns:
        Over the `setting`, `driven` activations, `full` flows, `time` and `token`: the weights of the full flow
        (`coupled`) and of each `approximation` on the `ladder`, the `entropy` of attention, when an approximation has
        `parted`, and the largest `centre_cosine` between two centres.
    """
    components, tokens = len(config.context_weights), config.context_tokens
    overlapping = generator.uniform(0.5, 1.5, size=(components, tokens))
    noise = _ball(generator, (components, config.samples // 2, tokens))
    mirrored = config.context_sigma * np.concatenate([noise, -noise], axis=1)
    in_centre = np.arange(tokens) % components == np.arange(components)[:, None]
    disjoint = np.sqrt(components) * in_centre * overlapping  # of about the same length
    contexts = {
        "overlapping": overlapping[:, None] + mirrored,
        "disjoint": disjoint[:, None] + in_centre[:, None] * mirrored,
    }
    rows = [_solve_setting(config, name, contexts.get(name, contexts["disjoint"]), generator) for name in SETTINGS]
    compared = xr.concat(rows, dim="setting").assign_coords(setting=list(SETTINGS))
    return compared.assign(parted=parting_time(compared))


def _solve_setting(
    config: FlowConfig, setting: str, x: Float[np.ndarray, "component sample token"], generator: np.random.Generator
) -> xr.Dataset:
    """Solve all activations and full flows on the contexts x, whose means are the centres."""
    centres, decays, rows = x.mean(axis=1), {"plain": 0.0, "decayed": config.decay}, []
    for activation in config.driven:
        unit = Unit.of(activation, centres, config.context_weights, sigma=config.context_sigma, noise="ball")
        full_flows = [_FullFlow(activation, name, decays[name], unit, x) for name in FULL]
        rows.append(xr.concat([_solve(config, full, setting, generator) for full in full_flows], dim="full"))
    compared = xr.concat(rows, dim="driven").assign_coords(driven=list(config.driven), full=list(FULL))
    direction = centres / np.linalg.norm(centres, axis=-1, keepdims=True)
    return compared.assign(centre_cosine=np.triu(direction @ direction.T, 1).max())


def _ball(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return points uniform in a ball, of unit variance along every axis."""
    normal, tokens = generator.normal(size=shape), shape[-1]
    radius = np.sqrt(tokens + 2) * generator.random((*shape[:-1], 1)) ** (1 / tokens)
    return radius * normal / np.linalg.norm(normal, axis=-1, keepdims=True)


def _solve(config: FlowConfig, full: _FullFlow, setting: str, generator: np.random.Generator) -> xr.Dataset:
    """Solve one full flow and its approximations, with the logits that Theorem 4 assumes at the start: z = v²/2."""
    times = config.horizon * np.linspace(0, 1, config.times) ** 2  # dense early, where approximations part
    flow, start = full.block(), full.start(setting)
    w0 = np.append(start, 0.0)[:, None]  # 0 for the query: without `residual` it plays no part
    rtol = 1e-7 if full.decay else 1e-10  # without decay folding is exact, and that is measured
    solver = Solver(rtol=rtol, atol=rtol / 100, bound=BLOW_UP, max_evaluations=MAX_EVALUATIONS)
    z0 = start[None] ** 2 / 2
    coupled = flow.solve(times, w0, z0, solver=replace(solver, bound=BLOW_UP**2 / 2))  # its logits, v²/2, are states
    rate, centre = full.stable_point(config.starts, generator)
    start_rate, start_centre = fixed_centre(full.unit, start, flow=full.name, decay=full.decay)
    ladder = {
        "folded": flow.solve_folded(times, w0, z0, solver=solver).v[:, :, 0],
        "averaged": full.averaged(times, start),
        "reduced at rest": growth.nonlinear(centre, rate * times, start),
        "reduced at the start": np.zeros((0, len(centre))),
    }
    if np.isfinite(start_centre).all():  # integrated, as it can lie too far away for the closed form
        reduced = flows.nonlinear(start_centre, float(start_rate) * times, start, solver=Solver("LSODA", rtol=1e-8))
        ladder["reduced at the start"] = reduced.states
    entropy = shannon_entropy(torch.from_numpy(coupled.z[:, 0]).softmax(-1)).numpy()
    return xr.Dataset(
        {
            "coupled": (("time", "token"), _padded(coupled.v[:, :, 0], len(times))),
            "entropy": ("time", np.append(entropy, np.full(len(times) - len(entropy), np.nan))),
            "approximation": (
                ("ladder", "time", "token"),
                np.stack([_padded(ladder[name], len(times)) for name in LADDER]),
            ),
            "entropy_reduced": ("time", growth.attention_entropy(ladder["reduced at rest"])),
            "centre": ("token", centre),
            "rate": rate,
            "start_rate": start_rate,
        },
        {"time": times, "ladder": list(LADDER)},
    )


def _padded(path: Float[np.ndarray, "known token"], length: int) -> Vectors:
    """Extend the path to `length` times by infinity: it ends where the flow blows up."""
    return np.concatenate([path, np.full((length - len(path), path.shape[1]), np.inf)])


def distance(run: xr.Dataset) -> xr.DataArray:
    """Return ‖v − full‖ over the largest ‖full‖ so far, for each approximation; NaN once the full flow has blown up."""
    alive = np.isfinite(run.coupled).all("token")
    full = run.coupled.where(alive, 0.0)
    size = np.sqrt((full**2).sum("token"))
    scale = _accumulate(np.maximum, size)
    return (np.sqrt(((run.approximation - full) ** 2).sum("token")) / scale).where(alive)


def _accumulate(extreme: np.ufunc, values: xr.DataArray) -> xr.DataArray:
    """Return the running maximum or minimum over time."""
    axes = [["time"]]
    return xr.apply_ufunc(extreme.accumulate, values, input_core_dims=axes, output_core_dims=axes, kwargs={"axis": -1})


def lifetime(run: xr.Dataset) -> xr.DataArray:
    """Return the last recorded time before the full flow's blow-up, or the horizon."""
    return run.time.where(np.isfinite(run.coupled).all("token")).max("time")


def parting_time(run: xr.Dataset) -> xr.DataArray:
    """Return when an approximation is first more than 10 % off, or the end of the full flow's life if it never is."""
    return run.time.where(distance(run) > TOLERANCE).min("time").fillna(lifetime(run))


def share_followed(run: xr.Dataset) -> xr.DataArray:
    """Return the share of the full flow's life in which an approximation follows it, until it is 10 % off."""
    return run.parted / lifetime(run)


def followed_by(approximation: str, full: str, setting: str = "overlapping") -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the share of the full flow's life that an approximation follows, least over activations."""
    labels = {"ladder": approximation, "full": full, "setting": setting}
    return lambda run: share_followed(run).sel(labels).min("driven")


def folded_distance(run: xr.Dataset) -> xr.DataArray:
    """Return the largest relative distance of the folded flow from the full one without decay, per seed."""
    gap = distance(run).sel(ladder="folded", full="plain")
    return gap.max([dim for dim in gap.dims if dim != "seed"])


def largest_rise(full: str, setting: str = "overlapping") -> Callable[[xr.Dataset], xr.DataArray]:
    """Return the measure: the largest rise of a full flow's attention entropy above its minimum so far, in nats."""

    def measure(run: xr.Dataset) -> xr.DataArray:
        entropy = run.entropy.sel(full=full, setting=setting)
        return (entropy - _accumulate(np.fmin, entropy)).max(("time", "driven"))

    return measure


def draw_parting(run: xr.Dataset) -> Figure:
    """Draw the full flow beside its approximations: components, distance and entropy, with overlapping centres."""
    figure, axes = canvas(run.sizes["driven"], 3, width=3.4, height=2.6)
    for panels, activation in zip(axes, run.driven.values, strict=True):
        driven = run.sel(driven=activation, setting="overlapping")
        _draw_components(panels[0], driven.sel(full="plain").isel(seed=0))
        panels[0].set_title(f"{activation_name(activation)}: the weights part")
        _draw_distance(panels[1], driven)
        panels[1].set_title(f"{activation_name(activation)}: distance from the full flow")
        _draw_entropy(panels[2], driven)
        panels[2].set_title(f"{activation_name(activation)}: entropy of attention")
    options = {"title": "entropy of attention", "loc": "outside lower right", "ncols": 4}  # no panel has room for it
    figure.legend(*axes[0, 2].get_legend_handles_labels(), **options)
    letters(axes)
    return figure


def draw_settings(run: xr.Dataset) -> Figure:
    """Draw how long each approximation follows the full flow, and how far its entropy comes back, in each setting."""
    figure, axes = canvas(1, 3, width=3.6, height=2.9)
    position = np.arange(len(SETTINGS))
    for panel, full in zip(axes[0], FULL, strict=False):
        share = share_followed(run).sel(full=full).min("driven")
        for index, name in enumerate(LADDER):
            measured(panel, position + 0.14 * (index - 1.5), share.sel(ladder=name), index, name)
        panel.set(ylabel="share of the full flow's life", ylim=(-0.05, 1.35))
        panel.legend(ncols=2, loc="upper center", columnspacing=1.0)
    axes[0, 0].set_title("How long each flow is followed")
    axes[0, 1].set_title("The same with weight decay")
    for index, full in enumerate(FULL):
        gained = xr.concat([largest_rise(full, name)(run) for name in SETTINGS], dim="setting")
        measured(axes[0, 2], position + 0.14 * (index - 0.5), gained, index, full)
    axes[0, 2].set(ylabel="entropy regained / nats", title="How far attention comes back")
    axes[0, 2].legend(loc="upper left")
    for panel in axes[0]:
        panel.set_xticks(position, ["overlapping", "disjoint", "disjoint,\nstart near"])
    letters(axes)
    return figure


def _draw_components(panel: Axes, run: xr.Dataset) -> None:
    """Draw the three weights that get largest: the full flow as points, two of its approximations as lines."""
    thinned = run.isel(time=slice(None, None, 6))
    for index, token in enumerate(_largest(run)):
        measured(panel, thinned.time, thinned.coupled.isel(token=token), index, f"token {token}")
        for name, width in (("averaged", 1.5), ("reduced at rest", 0.8)):
            path = run.approximation.sel(ladder=name).isel(token=token)
            theory(panel, run.time, path.where(abs(path) < 4), index, linewidth=width)
    panel.set(xlabel="time", ylabel="weight $v$, seed 0", ylim=(-2.5, 2.5))
    panel.legend(loc="lower left")


def _largest(run: xr.Dataset, count: int = 3) -> list[int]:
    """Return the tokens whose weights get largest, the largest first."""
    size = abs(run.coupled.where(np.isfinite(run.coupled))).max("time")
    return [int(token) for token in np.argsort(-size.values)[:count]]


def _draw_distance(panel: Axes, run: xr.Dataset) -> None:
    gap = distance(run).sel(full="plain")
    for index, name in enumerate(LADDER):
        curve = gap.sel(ladder=name)
        mean = curve.where(np.isfinite(curve)).mean("seed").where(lambda value: value > 1e-12)
        theory(panel, run.time, mean, index, name)
    panel.axhline(TOLERANCE, color="black", linewidth=0.7)
    panel.set(xlabel="time", ylabel="relative distance", yscale="log")
    panel.legend(loc="center right")


def _draw_entropy(panel: Axes, run: xr.Dataset) -> None:
    thinned = run.isel(time=slice(None, None, 8))
    for index, (full, label) in enumerate({"plain": "", "decayed": ", weight decay"}.items()):
        theory(panel, run.time, run.entropy_reduced.sel(full=full).mean("seed"), index, f"reduced{label}")
        alive = thinned.entropy.sel(full=full).notnull().all("seed")
        measured(panel, thinned.time[alive], thinned.entropy.sel(full=full)[:, alive], index, f"full{label}")
    panel.set(xlabel="time", ylabel="attention entropy / nats")
