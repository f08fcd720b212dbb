"""The figures of the study `max-margin`, drawn from its run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from joma.drawing import COLOURS, bars, canvas, letters, measured, series, theory
from joma.studies.related.max_margin_measures import along, cosine_gaps, of_scores, relative_growth, slowest_path

MAX_SLOPE_ERROR = 1e4  # what is drawn of a switch, where p moves while ln t hardly does
NORM_LABELS = {"frobenius": "Frobenius norm", "nuclear": "nuclear norm"}


def draw_paths(run: xr.Dataset) -> Figure:
    """Draw two paths in their planes, all of them against ln t, and how far the slopes are from the solution."""
    figure, axes = canvas(1, 3, width=3.5, height=2.9)
    left, middle, right = axes[0]
    _draw_planes(left, run)
    _draw_growth(middle, run)
    _draw_slopes(right, run)
    letters(axes)
    return figure


def _draw_planes(panel: Axes, run: xr.Dataset) -> None:
    """Draw the path of equal scores, first seed, and the free path that settles last."""
    paths = {
        "equal scores, seed " + str(int(run.seed[0])): run.sel(scores="equal", start="zero").isel(seed=0),
        "free scores, the last to settle": slowest_path(run),
    }
    for index, (label, path) in enumerate(paths.items()):
        panel.plot(along(path), path.across, label=label, **series(index), marker=".", markersize=3, linewidth=1)
    panel.axhline(0.0, color="0.5", linewidth=0.8)
    panel.set(xlabel=r"component of $p$ along $\hat p$", ylabel="along its largest deviation")
    panel.set(title=r"Paths turn into the direction of $\hat p$")
    panel.legend(loc="upper right")
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + 0.35 * (high - low))


def _draw_growth(panel: Axes, run: xr.Dataset) -> None:
    """Draw ‖p‖ over ‖p̂‖ ln t of every path and of gradient descent."""
    growth = relative_growth(run).isel(length=slice(1, None)).stack(path=("start", "seed"))
    log_time = of_scores(run, "log_time", "equal").isel(length=slice(1, None)).stack(path=("start", "seed"))
    for path in range(growth.sizes["path"]):
        label = "flow, every seed and start" if path == 0 else None
        panel.plot(log_time.isel(path=path), growth.isel(path=path), color=COLOURS[5], linewidth=0.8, label=label)
    panel.axhline(1.0, color="black", linewidth=0.8)
    descent = of_scores(run, "descent_norm", "equal") / of_scores(run, "svm_norm", "equal")
    descent = descent.sel(start="zero", drop=True).isel(time=slice(3, None, 3))
    measured(panel, np.log1p(descent.time), descent / np.log1p(descent.time), 2, "gradient descent, zero start")
    panel.set(xscale="log", xlabel="ln(1 + t)", ylabel=r"$\Vert p \Vert \, / \, (\Vert \hat p \Vert \ln(1 + t))$")
    panel.set(title=r"$p$ grows as $\hat p \,\ln t$, equal scores")
    panel.legend(loc="best")


def _draw_slopes(panel: Axes, run: xr.Dataset) -> None:
    """Draw the distance of the slope dp/d ln t from the solution over the length of every path."""
    for index, scores in ((1, "equal"), (2, "free")):
        error = of_scores(run, "slope_error", scores).isel(length=slice(1, None)).stack(path=("start", "seed"))
        for path in range(error.sizes["path"]):
            label = f"{scores} scores" if path == 0 else None
            panel.plot(error.length, error.isel(path=path), color=COLOURS[index], linewidth=0.8, alpha=0.7, label=label)
    panel.set(xlabel="length of the path", ylabel=r"$\Vert dp/d\ln t - \hat p \Vert / \Vert \hat p \Vert$")
    panel.set(yscale="log", title=r"The slope tends to $\hat p$, after switches too")
    panel.set_ylim(top=MAX_SLOPE_ERROR)
    panel.legend(loc="upper right")


def draw_margins(run: xr.Dataset) -> Figure:
    """Draw the angle of p with the solution, the margins of W and K Qᵀ, and how slowly the latter gains."""
    figure, axes = canvas(1, 3, width=3.6, height=2.9)
    left, middle, right = axes[0]
    _draw_angle(left, run)
    _draw_shares(middle, run)
    _draw_gain(right, run)
    letters(axes)
    return figure


def _draw_angle(panel: Axes, run: xr.Dataset) -> None:
    """Draw 1 − cos(p, p̂) of the flow and of normalised gradient descent over the length of the path."""
    complete = (of_scores(run, "selects_best", "equal") == 1).all("start")
    run = run.isel(seed=np.flatnonzero(complete))
    gaps = cosine_gaps(run)
    for index, start in enumerate(run.start.values, start=1):
        flow = gaps.sel(start=start)
        theory(panel, flow.length, flow.mean("seed"), index, f"flow, {start} start, mean over seeds")
        trained = run.trained_gap.sel(start=start).isel(trained_length=slice(None, None, 2))
        measured(panel, trained.trained_length, trained, index, f"trained, {start} start, all seeds")
    length = gaps.length.values
    guide = float(gaps.isel(length=-1).mean()) * (length[-1] / length) ** 2
    panel.plot(length, guide, color="0.5", linewidth=1, linestyle=":", label="∝ 1/length²")
    panel.set(xscale="log", yscale="log", xlabel="length of the path", ylabel=r"$1 - \cos(p, \hat p)$")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set(title="The angle closes slowly")
    panel.legend(loc="lower left", fontsize=7)
    low, high = panel.get_ylim()
    panel.set_ylim(low / 30, high)


def _draw_shares(panel: Axes, run: xr.Dataset) -> None:
    """Draw the margin of both parametrisations as a share of the largest in each norm, flows beside trainings."""
    width = 0.36
    for index, (kind, label) in enumerate(NORM_LABELS.items(), start=1):
        place = np.arange(run.sizes["parameters"]) + (index - 1.5) * width
        mean, spread = bars(run.margin_share.sel(norm_kind=kind))
        panel.bar(place, mean, width=width, color=COLOURS[index], alpha=0.45, label=f"flow, {label}")
        panel.errorbar(place - width / 8, mean, yerr=spread, color=COLOURS[index], linestyle="none", capsize=2)
        trained = run.trained_share.sel(norm_kind=kind)
        measured(panel, place + width / 8, trained, index, f"trained, {label}")
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(run.sizes["parameters"]), ["$W$", "$K, Q$"])
    panel.set(ylim=(0.5, 1.25), ylabel="margin / largest margin")
    panel.set(title="Frobenius for $W$, nuclear for $K, Q$")
    panel.legend(loc="upper center", ncols=2, fontsize=6.5)


def _draw_gain(panel: Axes, run: xr.Dataset) -> None:
    """Draw what K Qᵀ lacks of the largest nuclear margin over ln t, every seed."""
    lacking = 1 - run.nuclear_shares
    for seed in range(run.sizes["seed"]):
        line = {"color": COLOURS[2], "linewidth": 0.9, "marker": ".", "label": "every seed" if seed == 0 else None}
        panel.plot(run.factor_log_time.isel(seed=seed), lacking.isel(seed=seed), **line)
    panel.set(xscale="log", yscale="log", xlabel="ln(1 + t)", ylabel="1 − share of nuclear margin")
    panel.set(title="$K, Q$ gain nuclear margin slowly")
    panel.legend(loc="lower left")
