"""The figures of the study `value-invariant`, drawn from its run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from joma.drawing import COLOURS, LINES, canvas, letters, marker, measured

FLOOR = 1e-17  # an error of exactly zero is drawn here
LAW_NAMES = {
    "exp": "exp",
    "linear": "linear",
    "softmax": "softmax",
    "keys linear": "q·k, linear",
    "keys exp": "q·k, exp",
    "keys softmax": "q·k, softmax",
}
NETWORK_NAMES = {
    "units": "units",
    "norm": "LayerNorm",
    "head": "MLP\nand head",
    "skip": "residual\naround MLP",
    "all": "all",
}
WEIGHT_NAMES = {
    "value": "value law",
    "mlp": "JoMA's law, same model",
    "joma": "JoMA's law, no W_V",
}
BREAKER_NAMES = {
    "none": "none",
    "learned": "learned\nembed.",
    "overlap": "overlap",
    "adam": "Adam",
    "decay": "weight\ndecay",
}
RUNG_NAMES = {
    "block": "one\nquery",
    "positions": "all\npositions",
    "minibatch": "mini-\nbatch",
    "product": "q·k\nlogits",
    "learned": "learned\nembed.",
    "adam": "Adam",
}

ARM_NAMES = {
    "sgd": "SGD",
    "sgd half": "SGD, half the rate",
    "decay": "SGD, weight decay",
    "adam": "Adam",
    "adamw": "AdamW",
}
HEAD_LAWS = {  # what to see of each law, and its matrix
    "query_key": ("SGD keeps queries and keys in balance", "W_Q W_Qᵀ − W_K W_Kᵀ"),
    "value_output": ("… and values and W_O, Adam neither", "W_V W_Vᵀ − W_Oᵀ W_O"),
}


def draw_laws(run: xr.Dataset) -> Figure:
    """Draw the violations of the laws along the flow, and their errors along SGD without and with corrections."""
    figure, axes = canvas(1, 3, width=3.5, height=3.2)
    left, middle, right = axes[0]
    _draw_flows(left, run)
    for index, (law, label) in enumerate(LAW_NAMES.items()):
        error = run.sgd.sel(law=law, rates="equal").isel(step=slice(1, None, 5))
        measured(middle, error.step, error.sel(correction="none"), index, label)
        residual = run.sgd_residual.sel(law=law, rates="equal").isel(step=slice(1, None, 5))
        measured(right, residual.step, np.maximum(residual, FLOOR), index)
    bound = float(run.rounding)
    right.axhline(bound, color="black", linewidth=0.8, linestyle=":")
    right.annotate("bound of rounding", (0, bound), (3, 3), textcoords="offset points", fontsize=8)
    middle.set(title="SGD: values alone do not suffice", xlabel="step", ylabel="relative error", yscale="log")
    right.set(title="SGD: exact with all terms", xlabel="step", ylabel="what the law leaves over", yscale="log")
    right.set_ylim(FLOOR, 20 * bound)
    handles, labels = middle.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), title="attention")
    letters(axes)
    return figure


def _draw_flows(axes: Axes, run: xr.Dataset) -> None:
    for index, law in enumerate(LAW_NAMES):
        for line, rates in zip(LINES, run.rates.values, strict=False):
            violation = run.flow_violation.sel(law=law, rates=rates).mean("seed")[1:]
            axes.plot(violation.time, np.maximum(violation, FLOOR), color=COLOURS[index % len(COLOURS)], linestyle=line)
    change = run.flow_change.mean(("seed", "law", "rates"))[1:]
    axes.plot(change.time, change, color="grey", linewidth=2.5)
    axes.annotate("change of ½‖W_V e‖²", (float(change.time[-1]), float(change[-1])), (-4, -14), ha="right",
                  textcoords="offset points", fontsize=8, color="grey")  # fmt: skip
    axes.set(title="Gradient flow", xlabel="time", ylabel="change of the law's constant", yscale="log")
    axes.set_ylim(1e-17, 30)


def draw_above(run: xr.Dataset) -> Figure:
    """Draw the error of the value law and of JoMA's law by what stands above attention, one point for each seed."""
    figure, axes = canvas(1, 1, width=6.4, height=3.4)
    panel = axes[0, 0]
    for index, (name, label) in enumerate(WEIGHT_NAMES.items()):
        errors = run.above.isel(step=-1).sel(weights=name)
        _seeds(panel, errors, "network", NETWORK_NAMES, index=index, label=label, shift=0.24 * (index - 1))
    panel.set(title="The value law does not see what stands above attention", ylabel="relative error", yscale="log")
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_breakers(run: xr.Dataset) -> Figure:
    """Draw the error of the law with each breaker and on each rung, and the prediction's correlation."""
    figure, axes = canvas(1, 3, width=4.0, height=3.3)
    left, middle, right = axes[0]
    _seeds(left, run.broken.isel(step=-1), "breaker", BREAKER_NAMES, index=0)
    end = run.isel(ladder_step=-1)
    for index, (correction, label) in enumerate({"none": "values alone", "full": "with the ledger"}.items()):
        errors = end.ladder_error.sel(correction=correction)
        _seeds(middle, errors, "rung", RUNG_NAMES, index=index + 1, label=label, shift=0.24 * index - 0.12)
    _seeds(right, end.ladder_correlation, "rung", RUNG_NAMES, index=1)
    for panel in (left, middle):
        panel.set(ylabel="relative error of the value law", yscale="log", ylim=(1e-16, 100.0))
    middle.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    right.axhline(0.0, color="black", linewidth=0.8, linestyle=":")
    left.set(title="One premise broken")
    middle.set(title="From the block to a language model")
    right.set(title="Values and attention of a token", ylabel="correlation of changes over tokens", ylim=(-1.05, 1.05))
    middle.legend(loc="center right")
    letters(axes)
    return figure


def draw_heads(run: xr.Dataset) -> Figure:
    """Draw the drift from either law of a head over steps, and how the norm of its matrix changes with weight decay."""
    figure, axes = canvas(1, 3, width=3.5, height=3.2)
    left, middle, right = axes[0]
    thinned = run.isel(ladder_step=slice(5, None, 5))
    for panel, (law, (title, matrix)) in zip((left, middle), HEAD_LAWS.items(), strict=True):
        for index, (arm, label) in enumerate(ARM_NAMES.items()):
            drift = thinned.head_drift.sel(head_arm=arm, head_law=law)
            measured(panel, drift.ladder_step, drift, index, label)
        unrelated = thinned.head_drift_shifted.sel(head_arm="adam", head_law=law).mean("seed")
        panel.plot(unrelated.ladder_step, unrelated, color="grey", linestyle="--", linewidth=1.0)
        panel.set(title=title, xlabel="minibatch", ylabel=f"drift of {matrix}", yscale="log", ylim=(3e-5, 1.5))
    for index, arm in enumerate(ARM_NAMES):
        size = thinned.head_size.sel(head_arm=arm).mean("head_law")
        measured(right, size.ladder_step, size, index)
    factor = run.head_factor.sel(head_arm="decay")
    right.plot(factor.ladder_step, factor, color="black", linestyle="--", linewidth=1.0)
    right.set(title="Weight decay shrinks Δ as predicted", xlabel="minibatch", ylabel="‖Δ‖ / ‖Δ₀‖")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    letters(axes)
    return figure


def _seeds(
    axes: Axes,
    values: xr.DataArray,
    dim: str,
    names: Mapping[str, str],
    *,
    index: int,
    label: str | None = None,
    shift: float = 0.0,
) -> None:
    """Draw one point for each seed at each label of `dim`, the seeds side by side."""
    spread = np.linspace(-0.07, 0.07, values.sizes["seed"]) if values.sizes["seed"] > 1 else np.zeros(1)
    for place, name in enumerate(names):
        points = np.asarray(values.sel({dim: name}))
        points = np.where(points == 0, FLOOR, points)
        axes.plot(place + shift + spread, points, **marker(index), label=label if place == 0 else None)
    axes.set_xticks(range(len(names)), list(names.values()))
