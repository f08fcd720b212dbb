"""Do the MLP's weights predict attention in a language model trained on text? Theorem 1 outside its assumptions.

In the one-layer model the logits z and the context rows v are not parameters. Both are computed from its matrices, for
token types with e = √width · embedding:

    z_ql = (x_q W_Q + b_Q)·(e_l W_K + b_K)/√width,    x_q = e_q + mean position
    v_lk = e_l W_V W_O N W_1[:, k],                   N = (1 − 11ᵀ/width) diag(gain)

z is the logit between two types averaged over positions: it is bilinear, so that positions can be averaged first; the
key's mean position adds the same to every token, which softmax does not see. v is what a unit of attention on token l
adds to hidden unit k before its activation, as `U_Cᵀ w` is in the theory's block. N is the linear part of the
LayerNorm between attention and MLP. Its division by the standard deviation, one number for each position, is left
out; so are biases and positions, which add the same to v of every token, as a hidden bias would.

Theorem 1 for softmax attention, drift and gap taken as zero, with Z = Σ_q z_q:

    Z(t) − Z(0) = (κ/2) [Σ_k v_k² − b_ref Σ_k ‖v_k‖²]₀ᵗ

b_ref is the frequency of types, and Σ_k ‖v_k‖² is over all types, of which the most frequent are compared. For exp
attention the law is exact and is the first term alone; both laws are tried. κ, the ratio of two rates, is unknown under
Adam and with z made of products: one scale for each seed is fitted to all recorded steps of its training. Only the sum
over queries is predicted; for single queries the same prediction is tried as a further figure. As softmax does not see
a shift, the mean over tokens is subtracted from z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from joma.arguments import InputError, whole
from joma.drawing import band, canvas, letters, marker, theory
from joma.models.transformer import Decoder, Layer, Linear
from joma.probes.orthogonality import cosine_orthogonality
from joma.studies.text import language_training
from joma.studies.text.language_training import QUICK_RATE, FurtherMeasures, LanguageSetting, TextColumns, Variant
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_most, between
from joma.theory import invariants

DIMS = {"z": ("query", "token"), "z_all": ("token",), "squares": ("token",), "rest": (), "excess": ("vectors",)}
VECTORS = {"embedding": "embeddings e", "value": "value path e W_V W_O"}
LAWS = {
    "softmax": "Law for softmax, Σ v² − b S, against the logits",
    "exp": "Law for exp, Σ v² alone, against the logits",
}
SUMS = {"asked": "sum over the queries asked", "all": "sum over all types"}
TAIL = 0.025  # share of the permutation null outside of either bound


@dataclass(frozen=True)
class Config(LanguageSetting):
    """The setting of text, the model and its training, and how many of the most frequent token types are compared."""

    activation: str = "relu"
    rate: float = 1e-4
    tokens: int = 200
    queries: int = 50
    permutations: int = 999
    """Of the tokens of the prediction, for the null."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train the one-layer model, reading logits and value path at every recorded step, and compare them."""
    if config.heads != 1:
        raise InputError("heads", "1, as in the theory", config.heads, "leave it at 1")
    whole("permutations", config.permutations, low=1)
    text = language_training.read_text(config, context)
    tokens, queries = _most_frequent(text, config)
    measure = partial(read, tokens=torch.from_numpy(tokens), queries=torch.from_numpy(queries))
    trajectory = language_training.train(
        config,
        context,
        text,
        Variant(layers=1, activation=config.activation),
        rate=config.rate,
        label="invariant-text",
        further=FurtherMeasures(measure, DIMS),
    )
    others = np.setdiff1d(np.arange(text.types), tokens)
    counts = np.append(text.counts[tokens], text.counts[others].sum())
    rng = np.random.default_rng(context.seeds)
    laws = [compare(trajectory, counts, law, permutations=config.permutations, generator=rng) for law in LAWS]
    labels = {"vectors": list(VECTORS), "token": [text.names[token] for token in tokens]}
    merged = trajectory.drop_vars(["z", "z_all"]).merge(xr.concat(laws, xr.Variable("law", list(LAWS))))
    return merged.assign_coords(labels).transpose("seed", "step", ...)


def _most_frequent(text: TextColumns, config: Config) -> tuple[Int[np.ndarray, " token"], Int[np.ndarray, " query"]]:
    """Return the numbers of the most frequent types of the training text, and the first of them as queries."""
    occurring = int((text.counts > 0).sum())
    tokens = whole("tokens", config.tokens, low=3, high=occurring)
    ranked = np.argsort(-text.counts, kind="stable")[:tokens]
    return ranked, ranked[: whole("queries", config.queries, high=tokens)]


def read(model: Decoder, *, tokens: Int[Tensor, " token"], queries: Int[Tensor, " query"]) -> dict[str, Tensor]:
    """Compute logits and value path of a one-layer, one-head model, as the module's docstring defines them.

    Returns:
        Per seed `z` [query, token]; `z_all` [token], the sum over all types as queries; `squares` [token], Σ_k v_lk²,
        and `rest`, their sum over all other types; `excess` [embedding, value]: mean square cosine between tokens
        times dimension, 1 for random directions.
    """
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    attention = layer.attention
    assert attention.query is not None
    assert attention.key is not None
    embeddings = model.embedding.double() * (model.input_stage.scale or 1.0)
    encoding = model.position_encoding
    mean_position = 0.0 if encoding is None else encoding.double().mean(dim=1, keepdim=True)
    e = embeddings[:, tokens.to(embeddings.device)]
    key = _affine(e, attention.key) / math.sqrt(e.shape[-1])
    query = _affine(embeddings[:, queries.to(embeddings.device)] + mean_position, attention.query)
    mean_query = _affine((embeddings + mean_position).mean(dim=1, keepdim=True), attention.query)
    v = normed(value_path(embeddings, layer), layer) @ layer.lower.weight.double()
    all_squares = v.square().sum(dim=-1)
    squares = all_squares[:, tokens.to(embeddings.device)]
    excess = [cosine_orthogonality(vectors).excess for vectors in (e, value_path(e, layer))]
    return {
        "z": query @ key.mT,
        "z_all": ((mean_query * embeddings.shape[1]) @ key.mT)[:, 0],
        "squares": squares,
        "rest": all_squares.sum(dim=-1) - squares.sum(dim=-1),
        "excess": torch.stack(excess, dim=-1),
    }


def _affine(x: Float[Tensor, "seed row width"], linear: Linear) -> Float[Tensor, "seed row out"]:
    y = x @ linear.weight.double()
    return y if linear.bias is None else y + linear.bias.double()[:, None]


def value_path(e: Float[Tensor, "seed token width"], layer: Layer) -> Float[Tensor, "seed token width"]:
    """Return e W_V W_O: what a unit of attention on a token adds to the residual stream, without biases."""
    x = e @ layer.attention.value.weight.double()
    return x if layer.attention.projection is None else x @ layer.attention.projection.weight.double()


def normed(x: Float[Tensor, "seed token width"], layer: Layer) -> Float[Tensor, "seed token width"]:
    """Return x N: centred and times the gain of the norm after attention, but not divided by a standard deviation."""
    if layer.norm_placement != "post":
        return x
    gain = layer.norms[0].gain
    assert isinstance(gain, Tensor)
    return (x - x.mean(dim=-1, keepdim=True)) * gain.double()[:, None]


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
    query_change = change.sel(sum="asked", drop=True)
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


def at_end(run: xr.Dataset, law: str, name: str, null: str | None = None) -> xr.DataArray:
    """Return a measure of a law after the last step, per seed; less the upper bound of a null, if one is named."""
    last = run.sel(law=law).isel(step=-1)
    value = last[name].sel(sum="asked") if "sum" in last[name].dims else last[name]
    return value if null is None else value - last[null].sel(side="high")


def scale_ratio(run: xr.Dataset, law: str) -> xr.DataArray:
    """Return the best scale a third of the way, at the nearest recorded step, over that of the end, per seed."""
    scale = run.scale.sel(law=law)
    return scale.sel(step=float(scale.step[-1]) / 3, method="nearest") / scale.isel(step=-1)


def scale_loss(run: xr.Dataset, law: str) -> xr.DataArray:
    """Return how much more of the change the one scale of a seed explains than half of what each step's own would.

    Shares of the squared change: 1 − error² with the one scale, r² with the step's own best scale. Of a third of the
    way and the end the smaller difference (1 − error²) − r²/2 counts. No number is divided by, so that a scale near
    zero does no harm.
    """
    measures = run[["error", "correlation"]].sel(law=law, sum="asked")
    steps = [float(measures.step.sel(step=float(run.step[-1]) / 3, method="nearest")), float(run.step[-1])]
    at_steps = measures.sel(step=steps)
    explained, best = 1 - at_steps.error**2, at_steps.correlation**2
    return (explained - best / 2).min("step", skipna=False)


def _order_claims(law: str, label: str) -> tuple[Claim, ...]:
    """Return the claims about correlations: which tokens attention turns to."""
    return (
        Claim(
            f"correlation-{law}",
            f"On text the MLP's weights predict attention by Theorem 1's law for {label}, beyond chance.",
            partial(at_end, law=law, name="correlation", null="null"),
            above(0.0),
            kind="control",
            quantity="correlation over tokens, at the end, of the change of the logits summed over queries with the "
            "prediction, less the 97.5 % bound of its permutation null; interval over seeds",
            across="interval",
        ),
        Claim(
            f"beyond-frequency-{law}",
            f"On text the law for {label} predicts attention among tokens of like frequency.",
            partial(at_end, law=law, name="partial", null="partial_null"),
            above(0.0),
            kind="control",
            quantity="that correlation with log frequency regressed out of both sides, less the bound of its null; "
            "interval over seeds",
            across="interval",
        ),
        Claim(
            f"sum-{law}",
            f"On text the law for {label} predicts the sum over queries better than single queries.",
            lambda run: at_end(run, law, "correlation") - at_end(run, law, "each"),
            above(0.0),
            kind="control",
            quantity="correlation of the sum over queries less the mean one of single queries; interval over seeds",
            across="interval",
        ),
    )


def _size_claims(law: str, label: str) -> tuple[Claim, ...]:
    """Return the claims about how large the predicted change is, and with which scale."""
    return (
        Claim(
            f"error-{law}",
            f"On text the law for {label} predicts more than half of the logits' change.",
            partial(at_end, law=law, name="error"),
            at_most(0.5),
            kind="control",
            quantity="relative error at the end, with one scale for a seed's whole training; interval over seeds",
            across="interval",
        ),
        Claim(
            f"scale-{law}",
            f"On text one scale serves the law for {label} all along training.",
            partial(scale_loss, law=law),
            above(0.0),
            kind="control",
            quantity="share of the squared change explained with one scale, less half of that with the step's own best "
            "scale; the smaller of a third of the way and the end; interval over seeds",
            across="interval",
        ),
        Claim(
            f"scale-ratio-{law}",
            f"On text the best scale of the law for {label} stays the same within a factor of two.",
            partial(scale_ratio, law=law),
            between(0.5, 2.0),
            kind="check",
            quantity="best scale a third of the way over that of the end, each seed; ill-posed where the latter is "
            "near zero",
        ),
    )


CLAIMS = (
    *(claim for law in LAWS for claims in (_order_claims, _size_claims) for claim in claims(law, f"{law} attention")),
    *(
        Claim(
            f"orthogonal-{name}",
            f"On text {label} are nearly as orthogonal as random directions.",
            lambda run, name=name: run.excess.isel(step=-1).sel(vectors=name),
            at_most(2.0),
            kind="control",
            quantity="mean square cosine between tokens times dimension at the end, 1 for random directions; interval "
            "over seeds",
            across="interval",
        )
        for name, label in (("embedding", "token embeddings"), ("value", "tokens seen through the value path"))
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: what either law explains of the logits' change at the end."""
    parts = []
    for law in run.law.values.tolist():
        correlation, error = (float(at_end(run, law, name).mean()) for name in ("correlation", "error"))
        parts.append(f"the law for {law} attention correlates {correlation:.2f} at a relative error of {error:.2f}")
    null = float(at_end(run, "softmax", "null").sel(side="high").mean())
    return f"At the end {' and '.join(parts)} (chance: a correlation of {null:.2f}; no change: an error of 1)."


def draw_training(run: xr.Dataset) -> Figure:
    """Draw over training, for either law, correlations with their null and the error; and orthogonality."""
    figure, axes = canvas(2, 2, width=4.1, height=2.7)
    late = run.isel(step=slice(1, None))
    for panel, law in zip(axes[0], LAWS, strict=True):
        _draw_correlations(panel, late.sel(law=law))
        panel.set(title=LAWS[law], ylim=(-1, 1))
    for index, law in enumerate(LAWS):
        band(axes[1, 0], late.step, late.error.sel(law=law), index, f"law for {law}")
    axes[1, 0].axhline(1.0, color="0.5", linewidth=0.8, label="predicting no change")
    axes[1, 0].set(ylabel="relative error", title="Error of the prediction", ylim=(0, 2))
    for index, (name, label) in enumerate(VECTORS.items()):
        band(axes[1, 1], late.step, late.excess.sel(vectors=name), index, label)
    axes[1, 1].axhline(1.0, color="0.5", linewidth=0.8, label="random directions")
    axes[1, 1].set(ylabel="mean cosine² x dimension", title="How far tokens are from orthogonal", ylim=(0, None))
    for panel in axes.flat:
        # Explicit limits: the curves, from which they would be computed, are NaN where every seed diverged.
        panel.set(xlabel="step", xscale="log", xlim=(0.8, 1.2 * float(run.step[-1])))
    for panel in axes[1]:
        panel.legend()
    axes[0, 0].set_ylabel("correlation with the logits' change")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, title="upper panels")
    letters(axes)
    return figure


def _draw_correlations(panel: Axes, late: xr.Dataset) -> None:
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


def draw_tokens(run: xr.Dataset) -> Figure:
    """Draw each token's logit change against its prediction at the end, a row a law and a column a seed."""
    seeds = run.seed.values[:3]
    figure, axes = canvas(len(LAWS), len(seeds), width=3.2, height=2.8, sharey="col")
    for row, law in zip(axes, LAWS, strict=True):
        for panel, seed in zip(row, seeds, strict=True):
            _draw_pairs(panel, run.predicted.sel(law=law, seed=seed), run.moved.sel(law=law, seed=seed))
            panel.set_title(f"Law for {law}, seed {seed}, scale {float(run.fitted.sel(law=law, seed=seed)):.2g}")
        row[0].set_ylabel("change of Z")
    for panel in axes[-1]:
        panel.set_xlabel("predicted change of Z, times scale")
    letters(axes)
    return figure


def _draw_pairs(panel: Axes, predicted: xr.DataArray, change: xr.DataArray) -> None:
    """Draw one point a token, the line of equality, and the names of the five tokens that changed most."""
    panel.plot(predicted, change, **marker(1), alpha=0.6)
    limits = np.array([float(predicted.min()), float(predicted.max())])
    theory(panel, limits, limits, 0)
    for index in np.argsort(-np.abs(change.values))[:5]:
        point = (float(predicted[index]), float(change[index]))
        # matplotlib would read a dollar sign in a token as the start of a formula.
        name = str(change.token.values[index]).replace("$", r"\$")
        panel.annotate(name, point, xytext=(4, 2), textcoords="offset points", fontsize=7)


STUDY = Study(
    name="invariant-text",
    title="Do the MLP's weights predict attention in a language model?",
    source="JoMA, Theorem 1 (arXiv 2310.00535); our control on text",
    statement=(
        "Theorem 1 computes the attention logits from the MLP's lower weights alone, for orthonormal embeddings that "
        "are not trained, without LayerNorm, under gradient flow (JoMA, arXiv 2310.00535)."
    ),
    about=(
        "We train a one-layer language model, which meets none of these premises, and compare the change of its logits "
        "over the most frequent tokens with the law's prediction from the lower weights, multiplied by the value path. "
        "One scale for each seed is fitted, as the ratio of learning rates is unknown under Adam. Chance comes from "
        "permuting the tokens of the prediction; log frequency is also regressed out, since frequent tokens are "
        "trained more in every respect. Beside the law for softmax we test its first term alone, the law for exp "
        "attention."
    ),
    version=1,
    presets={
        "quick": Preset(
            Config(
                **language_training.quick_fields(steps=400, every=50),
                rate=QUICK_RATE,
                permutations=199,
            ),
            seeds=3,
            seconds=15,
        ),
        # On a GPU; the seconds on 2 cores are an estimate from the operations of a step.
        "paper": Preset(Config(**language_training.paper_fields()), seeds=3, seconds=75_000),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    inputs=language_training.inputs,
    figures={
        "training": Drawing(
            draw_training,
            "Top: correlation over tokens of the logits' change with the prediction of either law, and its controls; "
            "grey: 95 % of the correlations with permuted tokens. Bottom left: relative error with one scale for a "
            "seed's whole training. Bottom right: mean square cosine between tokens. Lines: mean over seeds. Bands: "
            "range over seeds.",
        ),
        "tokens": Drawing(
            draw_tokens,
            "One point for each token: the change of its logit, summed over queries and less the mean over tokens, "
            "against the prediction times the seed's scale, after training. The line is equality. A scale below 0 "
            "reverses the law. The five tokens that changed most are named.",
        ),
    },
)
