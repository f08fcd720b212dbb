"""The figure of the study `even-pairs`, drawn from its run."""

from __future__ import annotations

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import band, canvas, letters, measured, theory
from joma.studies.related.even_pairs_measures import boundary, fastest


def draw_phases(run: xr.Dataset) -> Figure:
    """Draw norms and loss of training, the norms of the flow, attention's error times ‖u‖², and parity."""
    figure, axes = canvas(2, 2, width=3.9, height=2.8)
    (left, right), (lower_left, lower_right) = axes
    _draw_training(left, run)
    _draw_flows(right, run)
    _draw_errors(lower_left, run)
    _draw_parity(lower_right, run)
    letters(axes)
    return figure


def _draw_training(panel: Axes, run: xr.Dataset) -> None:
    """Draw the norms and the loss over time of the fastest arm of even pairs, and the boundary of its phases."""
    arm = fastest(run).isel(step=slice(1, None))
    times = float(arm.rate) * arm.step.values
    for index, (name, label) in enumerate({"u_norm": "‖u‖", "w_norm": "‖W‖"}.items(), start=1):
        band(panel, times, arm[name], index, label)
    band(panel, times, 10 * arm.loss / arm.loss.isel(step=0), 3, "10 × loss / start")
    panel.axvline(float(boundary(run).sel(arm=arm.arm).mean()), color="0.5", linewidth=0.8)
    panel.set(xscale="log", xlabel="time (rate × step)", ylabel="norm", title="Attention first, then ‖u‖ ~ ln t")
    panel.legend(loc="upper left")


def _draw_flows(panel: Axes, run: xr.Dataset) -> None:
    """Draw the norms along the flow, one line for each world."""
    late = run.isel(time=slice(1, None))
    for index, max_length in enumerate(run.max_length.values):
        world = late.sel(max_length=max_length)
        theory(panel, late.time, world.flow_u_norm, index, f"length {max_length}", linestyle="-")
        theory(panel, late.time, world.flow_w_norm, index, linestyle="--")
    panel.set(xscale="log", xlabel="time", ylabel="‖u‖ (solid), ‖W‖ (dashed)")
    panel.set_title("‖W‖ goes on growing along the flow")
    panel.legend(loc="upper left", fontsize=7)


def _draw_errors(panel: Axes, run: xr.Dataset) -> None:
    """Draw the errors of attention times ‖u‖² along the flow."""
    late = run.isel(time=slice(1, None))
    square = late.flow_u_norm**2
    for index, max_length in enumerate(run.max_length.values):
        positive, negative = (
            (error * square).sel(max_length=max_length)
            for error in (late.flow_positive_error, late.flow_negative_error)
        )
        theory(panel, late.time, positive, index, f"length {max_length}", linestyle="-")
        theory(panel, late.time, negative, index, linestyle="--")
    panel.set(xscale="log", xlabel="time", ylabel="attention's error × ‖u‖²")
    panel.set_title("Attention's error falls as 1/‖u‖²")
    panel.legend(loc="upper left", fontsize=7)


def _draw_parity(panel: Axes, run: xr.Dataset) -> None:
    """Draw the accuracy of parity of each way to train, all sequences of length 2 and more."""
    accuracies = {
        "trained\ndirectly": fastest(run, "parity").accuracy,
        "chain,\neven pairs": fastest(run).chain_accuracy,
        "chain,\nall states": fastest(run, "chain").chain_accuracy,
        "chain,\nno ends": fastest(run, "decisions").chain_accuracy,
    }
    for place, accuracy in enumerate(accuracies.values()):
        measured(panel, [place], accuracy.expand_dims("place", axis=-1), 1)
    panel.axhline(0.5, color="0.5", linestyle=":", linewidth=0.8)
    panel.set_xticks(range(len(accuracies)), list(accuracies))
    panel.set(ylim=(0.4, 1.05), xlim=(-0.5, len(accuracies) - 0.5), ylabel="accuracy of parity")
    panel.set_title("Parity needs the chain, and its ends")
