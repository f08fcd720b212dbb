"""Scan and Snap: attention turns from common to distinct tokens, and then freezes, if the decoder is the faster one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import softmax, wrightomega
from scipy.stats import rankdata

from joma import schedule
from joma.arguments import InputError, real, whole
from joma.data.tokens import SequenceClasses, sequence_classes
from joma.models.block import Block, BlockConfig
from joma.report.figure import canvas, letters, measured, theory
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, at_least, at_most, between, near
from joma.theory import flows
from joma.train import Optimiser, Record

ARMS = {"faster": 10.0, "equal": 1.0, "slower": 0.1}  # the decoder's rate over that of the attention logits
DECADE = 10.0  # the late phase is the last decade of the training
SCAN = (0.1, 0.25)  # the early phase, in units of the time of the transition
FAST = 10.0  # from this ratio of the rates on, the decoder is taken to be much the faster one

Frequency = Float[np.ndarray, "label token"]


@dataclass(frozen=True)
class Config:
    """One layer: softmax attention over the context, f divided by its norm, a linear decoder, all zero at first."""

    queries: int = 2
    classes: int = 4
    """Classes (next tokens) of each query."""
    distinct: int = 5
    """Tokens that occur in one class alone, for each class."""
    common: int = 5
    """Tokens that occur in every class."""
    share: float = 0.5
    """Part of a sequence that is common tokens."""
    variation: float = 0.5
    """By how much a common token's frequency differs between classes."""
    outputs: int = 64
    """Vocabulary of the decoder; the classes come first, the rest never follows."""
    rate_z: float = 0.1
    """Learning rate of the attention logits; the decoder's is 10, 1 and 0.1 times as large."""
    steps: int = 4000
    records: int = 80
    sweep: tuple[float, ...] = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
    """Ratios of the decoder's rate to that of the logits for which the flow's transition time is found."""

    @property
    def labels(self) -> int:
        """K, the number of classes in all."""
        return self.queries * self.classes


def run(config: Config, context: Context) -> xr.Dataset:
    """Train with a faster, an equal and a slower decoder, beside the integrated flow of the same data."""
    _check(config)
    data = sequence_classes(
        generators=context.seed_generators(),
        queries=config.queries,
        classes=config.classes,
        distinct=config.distinct,
        common=config.common,
        share=config.share,
        variation=config.variation,
    )
    arms = xr.IndexVariable("arm", list(ARMS))
    trained = xr.concat([_train(config, context, data, arm) for arm in ARMS], arms, join="exact")
    flow = xr.concat([_flow(config, context, data, arm, trained.step.values) for arm in ARMS], arms, join="exact")
    found = xr.merge([trained, flow.rename({name: f"{name}_flow" for name in flow})], join="exact")
    found["cooccurrence"] = (("seed", "label", "rank"), _own(data, data.frequency.numpy(), data.frequency.numpy()))
    found["gain"] = relative_gain(found.logit, found.cooccurrence)
    found["unit"] = found.step * xr.DataArray(_rates(config), dims="arm") / config.labels
    found["clock"] = (found.unit.dims, clock_exponent(found.unit.values, config.outputs))
    found["transition"] = ("arm", _transition(config, _rates(config)))
    found = found.assign(_sweep(config, context, data))
    return found.transpose("seed", "arm", "step", ..., missing_dims="ignore")


def _check(config: Config) -> None:
    whole("records", config.records, low=20)
    whole("steps", config.steps, low=1000)
    whole("distinct", config.distinct, low=2)
    real("rate_z", config.rate_z, ndim=0, low=1e-6, high=1e6)  # at 1e30 the flow takes minutes
    ratios = np.unique(real("sweep", config.sweep, ndim=1, low=1e-3, high=1e4))
    if (ratios >= FAST).sum() < 2:
        expected = f"ratios of which two or more are at least {FAST:g}"
        raise InputError("sweep", expected, config.sweep, "add some, for the power of η is measured among these")
    labels = whole("queries", config.queries) * whole("classes", config.classes, low=2)
    whole("outputs", config.outputs, low=labels)


def _rates(config: Config) -> Float[np.ndarray, " arm"]:
    return config.rate_z * np.array(list(ARMS.values()))


def _transition(config: Config, rate: np.ndarray) -> np.ndarray:
    """The paper's time of the transition, 2 K ln M/η, for decoders of these rates."""
    return 2 * np.log(config.outputs) * config.labels / rate


def _sweep(config: Config, context: Context, data: SequenceClasses) -> xr.Dataset:
    """When the flow's winning logits slow down, for many ratios of the two rates."""
    ratios, query = np.unique(config.sweep), data.query.numpy()
    paper = _transition(config, config.rate_z * ratios)
    found = np.empty((len(data.frequency), len(ratios)))
    with context.progress.task("scan-snap, flows", total=found.size) as work:
        for (seed, place), _ in np.ndenumerate(found):
            times = paper[place] * np.geomspace(1e-3, 3.0, 100)
            rates = {"rate_w": config.rate_z * ratios[place], "rate_z": config.rate_z}
            x = data.frequency[seed].numpy()
            z = flow(x, query, np.r_[0.0, times], outputs=config.outputs, **rates)[1:, query]
            winner = np.take_along_axis(z, _winner(data, x)[None, :, None], axis=2)[..., 0].mean(axis=1)
            found[seed, place] = slowing(xr.DataArray(winner, {"step": times}, "step"))
            work.advance()
    return xr.Dataset(
        {"sweep_slowing": (("seed", "ratio"), found), "sweep_transition": ("ratio", paper)},
        {"seed": list(context.seeds), "ratio": ratios},
    )


def _winner(data: SequenceClasses, x: Frequency) -> np.ndarray:
    """Each class's most frequent distinct token."""
    return np.where(data.distinct.numpy(), x, -1.0).argmax(axis=1)


def _train(config: Config, context: Context, data: SequenceClasses, arm: str) -> xr.Dataset:
    """Train all seeds from zero on the expected loss: logits of distinct tokens and attention to common ones."""
    x, query, labels = data.frequency.to(context.device), data.query.to(context.device), config.labels
    block = Block(
        BlockConfig(tokens=x.shape[-1], hidden=config.outputs, queries=config.queries, scale=0.0),
        generators=context.seed_generators(),
    )
    target = torch.arange(labels, device=context.device).expand(len(x), -1)
    shared = (~data.distinct.any(dim=0)).to(x)

    def loss(model: Block, _: torch.Tensor) -> torch.Tensor:
        f = F.normalize(model.attend(x, query), dim=-1) @ model.U_C.T
        h = f @ model.w
        return F.cross_entropy(h.mT, target, reduction="none").mean(dim=-1)

    found = context.fit(
        block,
        loss,
        optimiser=Optimiser("sgd", ARMS[arm] * config.rate_z, rates={"z": config.rate_z}),
        steps=config.steps,
        record=Record(
            lambda model, _: {"z": model.z, "common": model.attend(x, query) @ shared},
            at=schedule.logarithmic(config.records, config.steps),
            dims={"z": ("query", "token"), "common": ("label",)},
        ),
        label=f"scan-snap, decoder {arm}",
    )
    found["logit"] = (("seed", "step", "label", "rank"), _distinct(data, found.z.values))
    return found[["logit", "common", "loss", "diverged"]]


def _distinct(data: SequenceClasses, z: Float[np.ndarray, "seed step query token"]) -> np.ndarray:
    """Each class's distinct tokens' logits [seed, step, label, rank], the one that occurs most first."""
    of_class = np.moveaxis(z[:, :, data.query.numpy()], 1, 0)
    return np.moveaxis(np.stack([_own(data, one, data.frequency.numpy()) for one in of_class]), 0, 1)


def _own(data: SequenceClasses, values: np.ndarray, key: np.ndarray) -> Float[np.ndarray, "seed label rank"]:
    """Pick each class's distinct tokens from values [seed, label, token], in falling order of `key` among them."""
    labels, mask = len(data.query), data.distinct.numpy()
    shape = (len(values), labels, int(mask[0].sum()))
    own, order = values[:, mask].reshape(shape), np.argsort(-key[:, mask].reshape(shape), axis=-1)
    return np.take_along_axis(own, order, axis=-1)


def _flow(config: Config, context: Context, data: SequenceClasses, arm: str, times: np.ndarray) -> xr.Dataset:
    """The integrated flow of every seed, as `_train` records it."""
    query, shared = data.query.numpy(), ~data.distinct.any(dim=0).numpy()
    rates = {"rate_w": ARMS[arm] * config.rate_z, "rate_z": config.rate_z}
    z = np.stack([flow(x, query, times, outputs=config.outputs, **rates) for x in data.frequency.numpy()])
    weight = data.frequency.numpy()[:, None] * np.exp(z[:, :, query])
    common = weight[..., shared].sum(axis=-1) / weight.sum(axis=-1)
    return xr.Dataset(
        {
            "logit": (("seed", "step", "label", "rank"), _distinct(data, z)),
            "common": (("seed", "step", "label"), common),
        },
        {"seed": list(context.seeds), "step": times},
    )


def flow(
    x: Frequency, query: np.ndarray, times: np.ndarray, *, outputs: int, rate_w: float, rate_z: float
) -> Float[np.ndarray, "time query token"]:
    """Integrate the coupled flow of decoder v and attention logits z from zero; return z.

    With K equally likely classes of sequences x_n, query ψ(n) and target n:

        f_n = x_n ∘ exp(z_ψ(n)) / ‖·‖,    g_n = e_n − softmax(vᵀ f_n),    y_n = v g_n
        v̇ = (η_w/K) Σ_n f_n g_nᵀ,         ż_m = (η_z/K) Σ_{ψ(n) = m} f_n ∘ (y_n − f_n (f_n · y_n))
    """
    labels, target, queries = len(x), np.eye(len(x), outputs), int(query.max()) + 1

    def rhs(_: float, state: np.ndarray) -> np.ndarray:
        v, z = state[:, :outputs], state[:, outputs:].T
        f = x * np.exp(z[query])
        f /= np.linalg.norm(f, axis=1, keepdims=True)
        g = (target - softmax(f @ v, axis=1)) / labels
        y = g @ v.T
        z_dot = np.zeros_like(z)
        np.add.at(z_dot, query, f * (y - f * (f * y).sum(axis=1, keepdims=True)))
        return np.concatenate([rate_w * f.T @ g, rate_z * z_dot.T], axis=1)

    path = flows.integrate(rhs, np.zeros((x.shape[1], outputs + queries)), times, rtol=1e-7, atol=1e-9)
    return np.moveaxis(path.states[:, :, outputs:], 1, 2)


def decoder_margin(unit: np.ndarray, outputs: int) -> np.ndarray:
    """Return s, own logit less the others', of a decoder trained alone on orthogonal unit features.

        e^s + (M − 1) s = 1 + M u,    u = η_w t/K

    While attention hardly moves, every distinct logit is driven by the one clock B = κ (M − 1)/(2M) s²: it grows as
    t², and from u ≈ 2 ln M on as ln² t.

    >>> bool(np.isclose(decoder_margin(np.array(0.0), 64), 0.0))
    True
    """
    others = outputs - 1
    return np.asarray(np.log(others * np.real(wrightomega((1 + outputs * unit) / others - np.log(others)))))


def clock_exponent(unit: np.ndarray, outputs: int) -> np.ndarray:
    """Return d ln B/d ln t of that clock, 2 u ṡ/s; 2 at the start."""
    s = decoder_margin(unit, outputs)
    with np.errstate(invalid="ignore", divide="ignore"):
        exponent = 2 * unit * outputs / ((outputs - 1 + np.exp(s)) * s)
    return np.where(unit < 1e-9, 2.0, exponent)


def relative_gain(logit: xr.DataArray, cooccurrence: xr.DataArray) -> xr.DataArray:
    """Predict every distinct logit from that of the class's most frequent one: the relative gain.

    ż_l is proportional to f_l² with one factor for all distinct tokens of a class, so that

        e^{−2 z_l} = 1 − (P_l/P_1)² (1 − e^{−2 z_1})
    """
    square = (cooccurrence / cooccurrence.isel(rank=0)) ** 2
    left = square * xr.apply_ufunc(np.expm1, -2 * logit.isel(rank=0))
    with np.errstate(divide="ignore"):  # where e^{−2 z_1} is lost beside 1, nothing is left of it: z = ∞
        return xr.apply_ufunc(np.log1p, left) / -2


def winners(run: xr.Dataset, name: str = "logit") -> xr.DataArray:
    """The logit of each class's most frequent distinct token, averaged over classes: [seed, arm, step].

    NaN at all times where a seed was lost.
    """
    curve = run[name].isel(rank=0).mean("label", skipna=False)
    return curve.where(curve.notnull().all("step"))


def exponent(curve: xr.DataArray) -> xr.DataArray:
    """Local power of t, d ln z/d ln t, between neighbouring records; NaN where z has not moved yet.

    >>> t = xr.DataArray([1.0, 10.0, 100.0], dims="step", coords={"step": [1, 10, 100]})
    >>> exponent(t**2).values.round(9)
    array([2., 2.])
    """
    curve = curve.sel(step=curve.step > 0)
    time = np.log(curve.step.values)
    power = xr.apply_ufunc(np.log, curve.where(curve > 0)).diff("step") / xr.DataArray(np.diff(time), dims="step")
    return power.assign_coords(step=np.exp((time[1:] + time[:-1]) / 2))


def mean_exponent(curve: xr.DataArray, low: float, high: float) -> xr.DataArray:
    """The power of t that joins the first and the last record in [low, high]; two at least must be there."""
    part = curve.sel(step=slice(low, high))
    if part.sizes["step"] < 2:
        raise NotInRun(f"records from {low:g} to {high:g}")
    first, last = part.isel(step=0), part.isel(step=-1)
    return np.log(last / first) / np.log(part.step.values[-1] / part.step.values[0])


def slowing(curve: xr.DataArray) -> xr.DataArray:
    """The time at which the local power of t first falls to 1, interpolated in ln t; NaN if it never does."""
    power = exponent(curve)
    time = np.log(power.step.values)

    def first(row: np.ndarray) -> float:
        below = np.flatnonzero((row[1:] <= 1) & (row[:-1] > 1))
        if not below.size:
            return np.nan
        at = below[0]
        return float(np.exp(np.interp(1.0, row[[at + 1, at]], time[[at + 1, at]])))

    return xr.apply_ufunc(first, power, input_core_dims=[["step"]], vectorize=True)


def straightness(curve: xr.DataArray) -> xr.DataArray:
    """Residual of the best z = a + b ln t over that of the best z = a + b t, in the last decade: below 1 for a log."""
    late = curve.sel(step=curve.step >= curve.step[-1] / DECADE)
    time = late.step.values.astype(float)
    left = [_residual(np.log(time), late), _residual(time, late)]
    return left[0] / left[1]


def unevenness(curve: xr.DataArray) -> xr.DataArray:
    """Greatest over least growth per e-fold of time, dz/d ln t, in the last decade: 1 for a logarithm."""
    late = curve.sel(step=curve.step >= curve.step[-1] / DECADE)
    rate = late.diff("step") / xr.DataArray(np.diff(np.log(late.step.values)), dims="step")
    return rate.max("step") / rate.min("step")


def _residual(abscissa: np.ndarray, curve: xr.DataArray) -> xr.DataArray:
    basis, _ = np.linalg.qr(np.stack([np.ones_like(abscissa), abscissa], axis=1))

    def rest(row: np.ndarray) -> np.ndarray:
        return np.asarray(np.linalg.norm(row - (row @ basis) @ basis.T, axis=-1))

    return xr.apply_ufunc(rest, curve, input_core_dims=[["step"]])


def late_exponent(run: xr.Dataset, arm: str) -> xr.DataArray:
    """The power of t over the last decade of training, per seed."""
    end = float(run.step[-1])
    return mean_exponent(winners(run).sel(arm=arm), end / DECADE, end)


def scan_exponent(run: xr.Dataset) -> xr.DataArray:
    """The power of t in the scan phase of the faster decoder, per seed."""
    begin = float(run.transition.sel(arm="faster"))
    return mean_exponent(winners(run).sel(arm="faster"), SCAN[0] * begin, SCAN[1] * begin)


def spearman(run: xr.Dataset, arm: str) -> xr.DataArray:
    """Rank correlation of logit and co-occurrence over a class's distinct tokens at the end, least class, per seed."""
    end, size = run.logit.sel(arm=arm).isel(step=-1), run.sizes["rank"]
    gap = rankdata(end, axis=-1) - rankdata(run.cooccurrence, axis=-1)
    found = 1 - 6 * (gap**2).sum(axis=-1) / (size * (size**2 - 1))
    return xr.DataArray(found.min(axis=-1), dims="seed")


def gain_error(run: xr.Dataset, arm: str) -> xr.DataArray:
    """‖z − predicted‖/‖z‖ over the distinct tokens that are predicted, at the end, per seed."""
    end = run.sel(arm=arm).isel(step=-1, rank=slice(1, None))
    dims = ("label", "rank")
    error, size = ((own**2).sum(dims, skipna=False) for own in (end.logit - end.gain, end.logit))
    return np.sqrt(error / size)


def flow_distance(run: xr.Dataset) -> xr.DataArray:
    """Largest |z − flow|/(1 + |flow|) over arms, times and distinct tokens, per seed."""
    gap = abs(run.logit - run.logit_flow) / (1 + abs(run.logit_flow))
    return gap.max(("arm", "step", "label", "rank"), skipna=False)


def common_rise(run: xr.Dataset) -> xr.DataArray:
    """Largest rise of any class's attention to common tokens between two records, faster decoder, per seed."""
    return run.common.sel(arm="faster").diff("step").max(("step", "label"), skipna=False)


def common_left(run: xr.Dataset) -> xr.DataArray:
    """Attention to common tokens at the end over that at the start, largest over classes and arms, per seed."""
    return (run.common.isel(step=-1) / run.common.isel(step=0)).max(("label", "arm"), skipna=False)


def distinct_growth(run: xr.Dataset) -> xr.DataArray:
    """Least growth of any distinct logit between two records, faster decoder, per seed."""
    return run.logit.sel(arm="faster").diff("step").min(("step", "label", "rank"), skipna=False)


def sooner(run: xr.Dataset) -> xr.DataArray:
    """By how much later the equal decoder slows down than the faster one."""
    time = slowing(winners(run))
    return time.sel(arm="equal") / time.sel(arm="faster")


def later(run: xr.Dataset) -> xr.DataArray:
    """By how much later growth slows down for the next slower decoder, least over the arms, per seed."""
    time = slowing(winners(run))
    return xr.concat(
        [time.sel(arm="equal") / time.sel(arm="faster"), time.sel(arm="slower") / time.sel(arm="equal")], "pair"
    ).min("pair", skipna=False)


def sweep_power(run: xr.Dataset) -> xr.DataArray:
    """The power of the decoder's rate with which the flow's transition time falls, ratios of 10 and more, per seed."""
    fast = run.sweep_slowing.sel(ratio=slice(FAST, None))
    return xr.apply_ufunc(
        lambda row: np.polyfit(np.log(fast.ratio.values), np.log(row), 1)[0],
        fast,
        input_core_dims=[["ratio"]],
        vectorize=True,
    )


CLAIMS = (
    Claim(
        "common-falls",
        "Attention to common tokens falls: at the end over the start, for every class, query and ratio of rates.",
        common_left,
        at_most(0.999),
    ),
    Claim(
        "common-always",
        "Attention to common tokens never rises on the way, faster decoder (largest rise between two records).",
        common_rise,
        at_most(0.0),
    ),
    Claim(
        "distinct-grows",
        "Scan and Snap: the logit of every distinct token grows all the time, faster decoder (least growth).",
        distinct_growth,
        at_least(0.0),
    ),
    Claim(
        "order",
        "Among the distinct tokens of a class logits follow co-occurrence, faster decoder (Spearman, least class).",
        lambda run: spearman(run, "faster"),
        at_least(1.0),
    ),
    Claim(
        "order-slower",
        "The order follows co-occurrence where the decoder is the slower one, which the paper leaves out.",
        lambda run: spearman(run, "slower"),
        at_least(1.0),
    ),
    Claim(
        "relative-gain",
        "Relative gain: a distinct token's logit follows from the most frequent one's (relative error at the end).",
        lambda run: gain_error(run, "faster"),
        at_most(0.1),
    ),
    Claim("scan", "Scan: the winning logits first grow as t² (power of t).", scan_exponent, near(2.0, 0.2)),
    Claim(
        "snap",
        "Snap: with the faster decoder growth slows to logarithmic, power of t → 0 (over the last decade of steps).",
        lambda run: late_exponent(run, "faster"),
        at_most(0.5),
    ),
    Claim(
        "logarithm",
        "Snap: with the faster decoder z is, over the last decade of steps, straighter against ln t than against t "
        "(residual of the one over that of the other).",
        lambda run: straightness(winners(run).sel(arm="faster")),
        at_most(1.0),
    ),
    Claim(
        "steady",
        "Snap: with the faster decoder z gains, over the last decade of steps, as much in every e-fold of time, "
        "within a factor of 2 (greatest over least dz/d ln t).",
        lambda run: unevenness(winners(run).sel(arm="faster")),
        between(1.0, 2.0),
    ),
    Claim(
        "no-snap",
        "With the slower decoder z is, over the last decade of steps, straighter against t than against ln t.",
        lambda run: straightness(winners(run).sel(arm="slower")),
        at_least(1.0),
    ),
    Claim(
        "phase-time",
        "The phases change at about 2 K ln M/η: time at which the power of t falls to 1, over that, faster decoder.",
        lambda run: (slowing(winners(run)) / run.transition).sel(arm="faster"),
        between(0.5, 2.0),
    ),
    Claim(
        "phase-rate",
        "The phases change at a time that goes as 1/η of the decoder: for one ten times slower it is ten times later.",
        sooner,
        between(5.0, 20.0),
    ),
    Claim(
        "phase-later",
        "The slower the decoder, the longer growth stays faster than logarithmic (least ratio of the times at which "
        "the power of t falls to 1).",
        later,
        at_least(1.0),
    ),
    Claim(
        "phase-limit",
        "Where the decoder is 10 to 1,000 times as fast the time at which phases change goes as 1/η (power of η, "
        "integrated flow).",
        sweep_power,
        near(-1.0, 0.1),
    ),
    Claim(
        "flow",
        "SGD follows the flow of both layers (largest distance of a distinct logit over 1 + |z|, all arms).",
        flow_distance,
        at_most(0.02),
    ),
)


def draw_scan(run: xr.Dataset) -> Figure:
    """Draw how attention leaves the common tokens, one class's distinct logits, and their order."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    few = run.isel(step=slice(1, None, 6))
    for index, arm in enumerate(ARMS):
        share = run.common_flow.sel(arm=arm).mean(("label", "seed"))
        theory(axes[0, 0], run.step[1:], share[1:], index)
        measured(axes[0, 0], few.step, few.common.sel(arm=arm).mean("label"), index, f"decoder {arm}")
    axes[0, 0].set(xlabel="step", xscale="log", ylabel="attention to common tokens", title="Common tokens lose")
    axes[0, 0].legend(loc="lower left")
    one, dots = (part.sel(arm="faster").isel(seed=0, label=0) for part in (run, few))
    for rank in range(min(5, run.sizes["rank"])):
        theory(axes[0, 1], run.step[1:], one.logit_flow.isel(rank=rank)[1:], rank)
        look = f"P = {float(one.cooccurrence[rank]):.3f}"
        measured(axes[0, 1], dots.step, dots.logit.isel(rank=rank), rank, look)
    axes[0, 1].set(xlabel="step", xscale="log", ylabel="logit $z$", title="Distinct tokens gain, by co-occurrence")
    axes[0, 1].legend(loc="upper left")
    _draw_order(axes[0, 2], run.isel(step=-1))
    letters(axes)
    return figure


def _draw_order(panel: Axes, end: xr.Dataset) -> None:
    grid = np.linspace(0, 1, 101)
    theory(panel, grid, grid**2, 0, "$(P_l/P_1)^2$")
    part = (end.cooccurrence / end.cooccurrence.isel(rank=0)).isel(rank=slice(1, None))
    for index, arm in enumerate(ARMS):
        gain = end.logit.sel(arm=arm) / end.logit.sel(arm=arm).isel(rank=0)
        x, y = (np.ravel(each.transpose("seed", "label", "rank")) for each in (part, gain.isel(rank=slice(1, None))))
        measured(panel, x, y, index, arm, markersize=2.5, markeredgewidth=0.7)
    panel.set(xlabel="co-occurrence $P_l / P_1$", ylabel="logit $z_l / z_1$", title="Order at the end, all seeds")
    panel.legend(loc="lower right")


def draw_snap(run: xr.Dataset) -> Figure:
    """Draw the winning logits' growth, its local power of t, and when it falls to 1."""
    figure, axes = canvas(1, 3, width=3.4, height=2.9)
    few = run.isel(step=slice(20, None, 5))
    for index, arm in enumerate(ARMS):
        line = winners(run, "logit_flow").sel(arm=arm).mean("seed").isel(step=slice(12, None))
        theory(axes[0, 0], line.step, line, index)
        measured(axes[0, 0], few.step, winners(few).sel(arm=arm), index, f"decoder {arm}")
        power = exponent(winners(run).sel(arm=arm)).isel(step=slice(15, None, 4))
        scale = float(run.unit.sel(arm=arm)[-1] / run.step[-1])
        measured(axes[0, 1], power.step * scale, power, index)
    axes[0, 0].set(xlabel="step", xscale="log", yscale="log", ylabel="winning logits $z$", title="Growth")
    axes[0, 0].legend(loc="lower right")
    clock = run.clock.where(run.unit > 0.01)
    order = np.argsort(run.unit.values, axis=None)
    theory(
        axes[0, 1], run.unit.values.ravel()[order], clock.values.ravel()[order], 0, "orthogonal classes", color="0.5"
    )
    axes[0, 1].axhline(1.0, color="0.6", linewidth=0.8)
    axes[0, 1].set(
        xlabel="decoder's time $\\eta_w t / K$", xscale="log", ylabel="local power of $t$", title="From scan to snap"
    )
    axes[0, 1].legend(loc="lower left")
    _draw_times(axes[0, 2], run)
    letters(axes)
    return figure


def _draw_times(panel: Axes, run: xr.Dataset) -> None:
    theory(panel, run.ratio, run.sweep_slowing.mean("seed"), 0, "integrated flow")
    theory(panel, run.ratio, run.sweep_transition, 1, r"$2 K \ln M / \eta_w$")
    measured(panel, list(ARMS.values()), slowing(winners(run)), 2, "SGD")
    panel.set(xlabel=r"ratio of rates $\eta_w / \eta_z$", xscale="log", yscale="log", ylabel="steps until power 1")
    panel.set_title("When growth slows")
    panel.legend(loc="lower left")


STUDY = Study(
    name="scan-snap",
    title="Scan and snap: distinct tokens win, then attention freezes",
    source="Scan and Snap, Theorems 2 to 4 (arXiv 2305.16380)",
    about=(
        "One layer with softmax attention, normalisation of f and a linear decoder is trained by SGD from zero on "
        "classes of sequences with distinct and common tokens, with a decoder that is 10, 1 and 0.1 times as fast as "
        "the attention logits. Beside it: the flow of both layers, integrated; the paper's relation between the "
        "distinct tokens of a class, which takes the decoder to be infinitely faster; and the clock of a decoder whose "
        "classes have orthogonal features, z growing as t² and then as ln² t. Common tokens break that clock: they "
        "predict the classes against the rest of the vocabulary, so that distinct tokens gain little until the decoder "
        "has learned to leave the rest out. And growth slows down with a slower decoder too: later in steps, but "
        "sooner in the decoder's own time."
    ),
    version=3,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=20),
        "paper": Preset(Config(steps=30_000, records=120, outputs=128), seeds=20, seconds=340),
    },
    run=run,
    claims=CLAIMS,
    threads=1,
    figures={
        "scan": Drawing(
            draw_scan,
            "Lines: the integrated flow. Points: SGD; in (a) bars from least to greatest seed. (a) Share of attention "
            "that common tokens get, mean over classes; (b) logits of one class's distinct tokens, faster decoder, "
            "seed 0, by co-occurrence P; (c) final logits of the distinct tokens relative to the most frequent one of "
            "their class, all seeds and classes; the line is what an infinitely faster decoder and small logits give.",
        ),
        "snap": Drawing(
            draw_snap,
            "Bars from least to greatest seed. (a) Logit of each class's most frequent distinct token, mean over "
            "classes: integrated flow (lines) and SGD (points); (b) its local power of t in the decoder's own time, "
            "marks as in (a), beside the closed form for classes with orthogonal features; (c) step at which that "
            "power falls to 1 against the ratio of rates, beside the paper's order of magnitude.",
        ),
    },
)
