"""Compare what a law of Theorem 1 predicts for attention logits with what they do, over tokens and over training.

The law sees weights only by a square for each token: Σ_k v_k² of the MLP's lower weights, or ‖W_V e‖² of value vectors.
Chance comes from permuting the tokens of the prediction; log frequency is regressed out of both sides, since frequent
tokens are trained more in every respect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Int
from matplotlib.axes import Axes

from joma.drawing import band
from joma.study import Claim, above, at_most
from joma.theory import invariants

LAWS = {
    "softmax": "Law for softmax, Σ v² − b S, against the logits",
    "exp": "Law for exp, Σ v² alone, against the logits",
}
COMPARED = "asked"  # the label in stored runs of the sum over the queries that are compared
SUMS = {COMPARED: "sum over the compared queries", "all": "sum over all types"}
TAIL = 0.025  # share of the permutation null outside of either bound


def compare_laws(
    trajectory: xr.Dataset,
    counts: Int[np.ndarray, " tokens_and_rest"],
    *,
    permutations: int,
    generator: np.random.Generator,
) -> xr.Dataset:
    """Return what `compare` returns for every law, along the axis `law`."""
    options = {"permutations": permutations, "generator": generator}
    return xr.concat([compare(trajectory, counts, law, **options) for law in LAWS], xr.Variable("law", list(LAWS)))


def compare(
    trajectory: xr.Dataset,
    counts: Int[np.ndarray, " tokens_and_rest"],
    law: str,
    *,
    permutations: int,
    generator: np.random.Generator,
) -> xr.Dataset:
    """Compare the change of the logits with Theorem 1's prediction of it, over tokens.

    Args:
        trajectory: `z`, `z_all`, `squares` and `rest` of `read` over seed and step, from the first step on.
        counts: how often each token occurs in the text, and last all other types together.
        law: a name of `LAWS`.
        permutations: number of permutations of the prediction's tokens in the null.
        generator: draws the permutations.

    Returns:
        Over seed and step, NaN at the start: `correlation` with the change of either of `SUMS`; `each`, its mean over
        single queries; `by_frequency`, that of log frequency with the sum; `partial`, the prediction's once log
        frequency is regressed out of both; bounds `null` and `partial_null` under permutation; `scale`, the best one
        of each step; `error`, with the one best scale of the seed, `fitted`; a scale below 0 means that the law has the
        wrong sign. At the end, by token: `moved` and `predicted`.
    """
    sums = xr.concat([trajectory.z.sum("query"), trajectory.z_all], xr.Variable("sum", list(SUMS)))
    assert isinstance(sums, xr.DataArray)
    change = _centred_change(sums)
    query_change = change.sel(sum=COMPARED, drop=True)
    prediction = _centred(_predict(trajectory, counts, law))
    frequency = _centred(xr.DataArray(np.log(counts[:-1]), dims="token"))
    residuals = _regress_out(query_change, frequency), _regress_out(prediction, frequency)
    orders = generator.permuted(np.tile(np.arange(len(counts) - 1), (permutations, 1)), axis=1)
    scale = (query_change * prediction).sum(["step", "token"]) / (prediction**2).sum(["step", "token"])
    measures = {
        "correlation": _correlation(change, prediction),
        "each": _correlation(_centred_change(trajectory.z), prediction).mean("query"),
        "by_frequency": _correlation(query_change, frequency),
        "partial": _correlation(*residuals),
        "null": _null(query_change, prediction, orders),
        "partial_null": _null(*residuals, orders),
        "scale": (query_change * prediction).sum("token") / (prediction**2).sum("token"),
        "error": _error(query_change, scale * prediction),
    }
    measures = {name: measure.where(measure.step > measure.step[0]) for name, measure in measures.items()}
    final = {"moved": query_change.isel(step=-1, drop=True), "predicted": (scale * prediction).isel(step=-1, drop=True)}
    return xr.Dataset({**measures, **final, "fitted": scale})


def _centred(values: xr.DataArray) -> xr.DataArray:
    return values - values.mean("token")


def _centred_change(z: xr.DataArray) -> xr.DataArray:
    """Return the change since the first step less its mean over tokens, which softmax does not see."""
    return _centred(z - z.isel(step=0, drop=True))


def _predict(trajectory: xr.Dataset, counts: Int[np.ndarray, " tokens_and_rest"], law: str) -> xr.DataArray:
    """Return Theorem 1's prediction of the change of Σ_q z_q for κ = 1.

    The law depends on v only by Σ_k v_k² of each token and by the sum of these. So one hidden unit stands for all
    units, and one more token for all types that are not compared.
    """
    squares = trajectory.squares.transpose("seed", "step", "token").fillna(0.0).values
    rest = trajectory.rest.fillna(0.0).values
    v = np.sqrt(np.concatenate([squares, rest[..., None]], axis=-1))[..., None]
    b_ref = counts / counts.sum() if law == "softmax" else None
    prediction = invariants.predict(law, v, v[:, :1], np.zeros((1, len(counts))), b_ref=b_ref)[..., :-1]
    return xr.DataArray(prediction, trajectory.rest.coords, ("seed", "step", "token"))


def _regress_out(values: xr.DataArray, regressor: xr.DataArray) -> xr.DataArray:
    """Return the residuals of a linear regression over tokens, both sides centred."""
    return values - regressor * (values * regressor).sum("token") / (regressor**2).sum("token")


def _correlation(first: xr.DataArray, second: xr.DataArray) -> xr.DataArray:
    """Return the correlation over tokens; NaN for a diverged seed, whose values are constant."""
    pair = (first.fillna(0.0), second.fillna(0.0))
    return xr.apply_ufunc(invariants.correlation, *pair, input_core_dims=[["token"]] * 2)


def _error(change: xr.DataArray, prediction: xr.DataArray) -> xr.DataArray:
    arguments = (change.fillna(0.0), prediction.fillna(0.0), xr.zeros_like(change))
    return xr.apply_ufunc(invariants.relative_error, *arguments, input_core_dims=[["token"]] * 3)


def _null(change: xr.DataArray, prediction: xr.DataArray, orders: Int[np.ndarray, "permutation token"]) -> xr.DataArray:
    """Return the `TAIL` and 1 − `TAIL` quantiles of the correlation with the prediction's tokens permuted."""
    permuted = xr.DataArray(orders, dims=("permutation", "token"))
    bounds = []
    for step in range(change.sizes["step"]):
        correlation = _correlation(change.isel(step=step), prediction.isel(step=step).isel(token=permuted))
        bounds.append(correlation.quantile([TAIL, 1 - TAIL], "permutation", skipna=False))
    return xr.concat(bounds, "step").rename(quantile="side").assign_coords(side=["low", "high"])


def at_end(run: xr.Dataset, law: str, name: str, null: str | None = None, *, share: float = 1.0) -> xr.DataArray:
    """Return a measure of a law after a share of the training, per seed; less the upper bound of a null, if named.

    Of the recorded steps the nearest one counts.
    """
    last = run.sel(law=law).sel(step=share * float(run.step[-1]), method="nearest")
    value = last[name].sel(sum=COMPARED) if "sum" in last[name].dims else last[name]
    return value if null is None else value - last[null].sel(side="high")


def final_error(run: xr.Dataset, law: str) -> xr.DataArray:
    """Return the relative error at the end with the one best scale of the seed that is not negative, per seed.

    A negative scale reverses the law: what it explains does not count. The best scale from 0 on is then 0, which
    predicts no change and has an error of 1.
    """
    error = at_end(run, law, "error")
    reversed_law = (run.fitted.sel(law=law) < 0) & error.notnull()
    return error.where(~reversed_law, 1.0)


@dataclass(frozen=True)
class Source:
    """The weights that a law predicts from, for its claims.

    Attributes:
        name: their name in the plural.
        square: the square of each token that the law sees.
        prefix: of the names of claims.
        laws: selects from a run what `compare_laws` returned for these weights.
    """

    name: str
    square: str
    prefix: str
    laws: Callable[[xr.Dataset], xr.Dataset]


def law_claims(law: str, source: Source) -> tuple[Claim, ...]:
    """Return the claims about which tokens attention turns to, and by how much, as a law predicts it from weights."""
    by_law = f"by the law for {law} attention"
    return (
        Claim(
            f"{source.prefix}correlation-{law}",
            f"On text {source.name} predict attention {by_law}, beyond chance.",
            lambda run: at_end(source.laws(run), law, "correlation", "null"),
            above(0.0),
            kind="control",
            quantity="correlation over tokens, at the end, of the change of the logits summed over queries with the "
            f"prediction from {source.square}, less the 97.5 % bound of its permutation null; interval over seeds",
            across="interval",
        ),
        Claim(
            f"{source.prefix}beyond-frequency-{law}",
            f"On text {source.name} predict attention {by_law} among tokens of like frequency.",
            lambda run: at_end(source.laws(run), law, "partial", "partial_null"),
            above(0.0),
            kind="control",
            quantity="that correlation with log frequency regressed out of both sides, less the bound of its null; "
            "interval over seeds",
            across="interval",
        ),
        Claim(
            f"{source.prefix}error-{law}",
            f"On text {source.name} predict more than half of the logits' change {by_law}.",
            lambda run: final_error(source.laws(run), law),
            at_most(0.5),
            kind="control",
            quantity="relative error at the end, with one scale from 0 on for a seed's whole training; interval over "
            "seeds",
            across="interval",
        ),
    )


def draw_correlations(panel: Axes, late: xr.Dataset) -> None:
    """Draw the correlations of one law over training, with the range of its permutation null."""
    low, high = (late.null.sel(side=side).mean("seed") for side in ("low", "high"))
    panel.fill_between(late.step, low, high, color="0.88", label="95 % of permutations")
    curves = {label: late.correlation.sel(sum=name) for name, label in SUMS.items()}
    curves |= {
        "single queries, mean": late.each,
        "frequency regressed out": late.partial,
        "log frequency in place of the law": late.by_frequency,
    }
    for index, (label, curve) in enumerate(curves.items()):
        band(panel, late.step, curve, index, label)
    panel.axhline(0.0, color="0.3", linewidth=0.8)
