"""What the study `max-margin` measures on its run."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.study import NotInRun

NEAR = 0.03  # relative distance of a slope from p̂ at which a path counts as converged
NEARLY_RANK_ONE = 0.03  # the second singular value over the first, and what its direction lacks of the fastest


def of_scores(run: xr.Dataset, name: str, scores: str) -> xr.DataArray:
    """Return a variable for one kind of scores."""
    return run[name].sel(scores=scores, drop=True)


def direction_error(run: xr.Dataset) -> xr.DataArray:
    """Return ‖dp/d ln t − p̂‖/‖p̂‖ over the second half of the path with equal scores, larger of both starts."""
    return of_scores(run, "half_slope_error", "equal").max("start", skipna=False)


def late_direction_error(run: xr.Dataset) -> xr.DataArray:
    """Return ‖dp/d ln t − p̂‖/‖p̂‖ at the end of the long path with equal scores, larger of both starts."""
    return of_scores(run, "slope_error", "equal").isel(length=-1, drop=True).max("start", skipna=False)


def trained_cosine(run: xr.Dataset) -> xr.DataArray:
    """Return the smaller cosine with p̂ that training reaches from both starts, of seeds that lose no sequence.

    The descent is on the loss above its infimum, which needs every best token: with a lost sequence it stalls.
    """
    complete = (of_scores(run, "selects_best", "equal") == 1).all("start")
    if not bool(complete.any()):
        raise NotInRun("seed that selects all best tokens")
    gap = run.trained_gap.isel(trained_length=-1, drop=True).max("start", skipna=False)
    return 1 - gap.isel(seed=np.flatnonzero(complete))


def global_share(run: xr.Dataset) -> xr.DataArray:
    """Return the share of starts from which the best token of every sequence is selected, free scores."""
    return of_scores(run, "selects_best", "free").mean("start")


def converged(run: xr.Dataset) -> xr.DataArray:
    """Return whether dp/d ln t is near p̂ over the second half of the path with free scores, per seed and start."""
    return of_scores(run, "half_slope_error", "free") <= NEAR


def locally_best(run: xr.Dataset) -> float:
    """Return the share of converged paths with free scores whose selected tokens are locally best."""
    settled = converged(run)
    if not bool(settled.any()):
        raise NotInRun("path with free scores that has converged")
    return float(of_scores(run, "locally_best", "free").where(settled).mean())


def late_convergence(run: xr.Dataset) -> xr.DataArray:
    """Return by how much the share of converged paths with free scores rises to the end of the long path."""
    late = of_scores(run, "slope_error", "free").isel(length=-1, drop=True) <= NEAR
    return late.mean("start") - converged(run).mean("start")


def frobenius_cosine(run: xr.Dataset) -> xr.DataArray:
    """Return the cosine of W with the solution of least Frobenius norm."""
    return run.matrix_cosine.sel(parameters="W", norm_kind="frobenius", drop=True)


def nuclear_share(run: xr.Dataset, name: str = "margin_share") -> xr.DataArray:
    """Return the margin of K Qᵀ over the largest among matrices of its nuclear norm."""
    return run[name].sel(parameters="K Q", norm_kind="nuclear", drop=True)


def nuclear_lead(run: xr.Dataset, name: str = "margin_share") -> xr.DataArray:
    """Return how much more of the largest nuclear margin K Qᵀ has than W."""
    return nuclear_share(run, name) - run[name].sel(parameters="W", norm_kind="nuclear", drop=True)


def nuclear_rise(run: xr.Dataset) -> xr.DataArray:
    """Return by how much the nuclear share of K Qᵀ rises along the long flow."""
    return run.nuclear_shares.isel(factor_path=-1, drop=True) - run.nuclear_shares.isel(factor_path=0, drop=True)


def late_nuclear_lead(run: xr.Dataset) -> xr.DataArray:
    """Return how much more of the largest nuclear margin K Qᵀ has than W, at the end of the long flow."""
    return nuclear_lead(run) + nuclear_rise(run)


def second_singular(run: xr.Dataset) -> xr.DataArray:
    """Return the second singular value of K Qᵀ over the first, along the long flow."""
    return run.singular.isel(order=1) / run.singular.isel(order=0)


def exponents(run: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the measured and the predicted power by which σ_2/σ_1 goes with σ_1, last interval of the long flow."""
    late = {"factor_path": slice(-2, None)}
    ratio, first = (
        xr.apply_ufunc(np.log, sizes.isel(late)) for sizes in (second_singular(run), run.singular.isel(order=0))
    )
    measured = ratio.diff("factor_path") / first.diff("factor_path")
    return measured.isel(factor_path=0, drop=True), run.exponent.isel(late).mean("factor_path")


def exponent_error(run: xr.Dataset) -> float:
    """Return the largest error of the predicted power, of the seeds that meet its premises in the last interval."""
    nearly = second_singular(run).isel(factor_path=-1, drop=True) < NEARLY_RANK_ONE
    nearly &= run.alignment.isel(factor_path=-2, drop=True) > 1 - NEARLY_RANK_ONE
    if not bool(nearly.any()):
        raise NotInRun("seed whose K Qᵀ stays nearly of rank one")
    measured, predicted = exponents(run)
    return float(abs(measured - predicted).where(nearly).max())


def certificate_gap(run: xr.Dataset) -> xr.DataArray:
    """Return the least nuclear norm less its lower bound, over the norm."""
    return (run.nuclear_norm - run.nuclear_bound) / run.nuclear_norm


def descent_ratio(run: xr.Dataset, scores: str) -> xr.DataArray:
    """Return the distance of gradient descent from the flow with half the steps over that with all, mean of starts.

    It is NaN if a model of either start diverged.
    """
    ratio = of_scores(run, "coarse_distance", scores) / of_scores(run, "descent_distance", scores)
    return ratio.mean("start", skipna=False)


def log_time_range(run: xr.Dataset, index: int) -> tuple[float, float]:
    """Return the smallest and the largest ln(1 + t) of all paths at one of their points."""
    log_time = run.log_time.isel(length=index)
    return float(np.min(log_time)), float(np.max(log_time))


def cosine_gaps(run: xr.Dataset) -> xr.DataArray:
    """Return 1 − cos(p, p̂) of the flow with equal scores, over the lengths at which training is compared."""
    return of_scores(run, "cosine_gap", "equal").sel(length=slice(run.trained_length[0], run.trained_length[-1]))


def relative_growth(run: xr.Dataset) -> xr.DataArray:
    """Return ‖p‖ over ‖p̂‖ ln(1 + t) of the flow with equal scores, which tends to 1; NaN at the start."""
    norm, log_time = of_scores(run, "norm", "equal"), of_scores(run, "log_time", "equal")
    return norm / of_scores(run, "svm_norm", "equal") / log_time.where(log_time > 0)


def slowest_path(run: xr.Dataset) -> xr.Dataset:
    """Return the path with free scores, of any seed and start, that selects its final tokens last."""
    free = run[["norm", "cosine_gap", "across", "last_switch"]].sel(scores="free", drop=True)
    free = free.stack(path=("start", "seed"))
    return free.isel(path=int(free.last_switch.argmax("path")))


def along(path: xr.Dataset) -> xr.DataArray:
    """Return the component of p along p̂; 0 where p is 0."""
    return (path.norm * (1 - path.cosine_gap)).fillna(0.0)
