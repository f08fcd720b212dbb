"""The figure of the study `polarise`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import band, canvas, letters, marker, measured, theory

POINTS = 20  # of a flow in a panel, about
LAWS = {"fixed": (lambda log_time: log_time, "ln t"), "trained": (lambda log_time: 2 * np.log(log_time), "2 ln ln t")}


def draw_orbit(run: xr.Dataset) -> Figure:
    """Draw entropy over the margin, the law of the losers' weight, final entropies, and the two rates of the lead."""
    figure, axes = canvas(2, 2, width=3.9, height=2.8)
    (left, right), (lower_left, lower_right) = axes
    _draw_margins(left, run)
    for index, tokens in enumerate(run.tokens.values):
        ratio = (run.error / run.law).sel(tokens=tokens).isel(time=slice(1, None))
        band(right, ratio.time, ratio, index, f"{tokens} tokens")
    right.axhline(1.0, color="0.5", linewidth=0.8)
    right.set(
        xscale="log", yscale="log", xlim=(1.0, None), ylim=(0.5, None), xlabel="time", ylabel="losers' weight / law"
    )
    right.set_title("The losers' weight falls as 1/t²")
    right.legend()
    _draw_targets(lower_left, run)
    _draw_rates(lower_right, run)
    letters(axes)
    return figure


def _draw_margins(panel: Axes, run: xr.Dataset) -> None:
    """Draw entropy over the margin for each loss and for SGD, seed 0."""
    first = run.isel(seed=0)
    # The orbit is known at the margins that any of the flows passes: together they show its bend.
    margin = np.concatenate([first.margin.values.ravel(), first.sgd_margin.values])
    entropy = np.concatenate([first.orbit_entropy.values.ravel(), first.sgd_orbit.values])
    order = np.argsort(margin)
    theory(panel, margin[order], entropy[order], 0, "orbit")
    for index, loss in enumerate(run.loss.values, start=1):
        flow = first.sel(loss=loss).isel(time=_thinned(run.sizes["time"]))
        panel.plot(flow.margin, flow.entropy, **marker(index), label=f"{loss} loss" if loss != "constant" else "−c·y")
    shown = _thinned(run.sgd_margin.shape[-1])
    panel.plot(first.sgd_margin[shown], first.sgd_entropy[shown], **marker(4), label="logistic, SGD")
    panel.set(xscale="symlog", xlabel="margin c · y", ylabel="entropy / nats", title="All losses share one orbit")
    panel.legend()


def _thinned(records: int) -> slice:
    """Return about `POINTS` of the records, all of them if there are fewer."""
    return slice(None, None, max(1, records // POINTS))


def _draw_targets(panel: Axes, run: xr.Dataset) -> None:
    """Draw the final entropy of the square loss over the length of the target."""
    theory(panel, run.target, run.predicted_entropy.mean("seed"), 0, "orbit, mean over seeds")
    measured(panel, run.target, run.final_entropy, 1, "flow of ½‖y − y*‖²")
    panel.axhline(float(run.largest_entropy.mean()), color="0.5", linestyle=":", linewidth=0.8, label="uniform")
    panel.set(xscale="log", yscale="log", xlabel="length of the target ‖y*‖", ylabel="final entropy / nats")
    panel.set_title("Square loss: only large targets polarise")
    panel.legend(loc="lower left")


def _draw_rates(panel: Axes, run: xr.Dataset) -> None:
    """Draw the lead of the winner's logit over ln t with fixed and with trained values, and the two laws."""
    late = run.isel(point=slice(1, None))
    last = late.isel(seed=0, point=-1)
    log_times = np.geomspace(2.0, max(4.0, float(last.log_time)), 200)  # the laws are curves between the records
    for index, (name, (growth, label)) in enumerate(LAWS.items(), start=1):
        offset = float(last[f"{name}_law"] - growth(last.log_time))
        theory(panel, log_times, growth(log_times) + offset, index, f"law, {label}")
        for seed in range(run.sizes["seed"]):
            one_seed = late.isel(seed=seed, point=_thinned(late.sizes["point"]))
            name_once = f"{name} values" if seed == 0 else None
            panel.plot(one_seed.log_time, one_seed[f"{name}_gap"], **marker(index), label=name_once, markersize=3)
    panel.set(xscale="log", yscale="log", xlim=(1.0, None), ylim=(0.3, None), xlabel="ln(1 + t)")
    panel.set(ylabel="winner's logit − mean of others", title="Trained values slow the logits down")
    panel.legend()
