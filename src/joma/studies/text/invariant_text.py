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

In a Transformer the first trained linear map after attention is not the MLP's lower layer but W_V. The same laws are
tried with ‖e_l W_V‖² in place of Σ_k v_lk² (`value_law`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from joma.studies.text import language_training, value_law
from joma.studies.text.language_training import QUICK_RATE, FurtherMeasures, LanguageSetting, TextColumns, Variant
from joma.studies.text.law_comparison import (
    COMPARED,
    LAWS,
    Source,
    at_end,
    compare_laws,
    draw_correlations,
    final_error,
    law_claims,
)
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_most, between

DIMS = {"z": ("query", "token"), "z_all": ("token",), "squares": ("token",), "rest": (), "excess": ("vectors",)}
NAMED = 5  # the tokens that changed most, whose points are named
NAME_WIDTH, NAME_HEIGHT = 0.25, 0.06  # of a token's name, as a share of the points' range
VECTORS = {"embedding": "embeddings e", "value": "value path e W_V W_O"}


@dataclass(frozen=True)
class Config(LanguageSetting):
    """The setting of text, the model and its training, and how many of the most frequent token types are compared."""

    activation: str = "relu"
    rate: float = 1e-4
    tokens: int = 200
    queries: int = 50
    permutations: int = 999
    """Of the tokens of the prediction, for the null."""
    value_path: bool = True
    """Whether the law of the value path is tested too."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Train the one-layer model, reading logits and value path at every recorded step, and compare them."""
    if config.heads != 1:
        raise InputError("heads", "1, as in the theory", config.heads, "leave it at 1")
    whole("permutations", config.permutations, low=1)
    text = language_training.read_text(config, context)
    tokens, queries = _most_frequent(text, config)
    indices = {"tokens": torch.from_numpy(tokens), "queries": torch.from_numpy(queries)}
    measure, dims = partial(read, **indices), DIMS
    if config.value_path:
        measure, dims = partial(read_both, **indices), DIMS | value_law.DIMS
    trajectory = language_training.train(
        config,
        context,
        text,
        Variant(layers=1, activation=config.activation),
        rate=config.rate,
        label="invariant-text",
        further=FurtherMeasures(measure, dims),
    )
    others = np.setdiff1d(np.arange(text.types), tokens)
    counts = np.append(text.counts[tokens], text.counts[others].sum())
    options = {"permutations": config.permutations, "generator": np.random.default_rng(context.seeds)}
    laws = compare_laws(trajectory, counts, **options)
    if config.value_path:
        value_laws = compare_laws(value_law.as_squares(trajectory), counts, **options)
        laws = laws.merge(value_laws.rename({name: f"{value_law.PREFIX}{name}" for name in value_laws.data_vars}))
    labels = {"vectors": list(VECTORS), "token": [text.names[token] for token in tokens]}
    merged = trajectory.drop_vars(["z", "z_all"]).merge(laws)
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


def read_both(model: Decoder, *, tokens: Int[Tensor, " token"], queries: Int[Tensor, " query"]) -> dict[str, Tensor]:
    """Return what `read` does, and the squares of the value vectors."""
    return read(model, tokens=tokens, queries=queries) | value_law.read(model, tokens=tokens)


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
    measures = run[["error", "correlation"]].sel(law=law, sum=COMPARED)
    steps = [float(measures.step.sel(step=float(run.step[-1]) / 3, method="nearest")), float(run.step[-1])]
    at_steps = measures.sel(step=steps)
    explained, best = 1 - at_steps.error**2, at_steps.correlation**2
    return (explained - best / 2).min("step", skipna=False)


SOURCE = Source("the MLP's weights", "Σ_k v_k²", "", lambda run: run)


def _further_claims(law: str) -> tuple[Claim, ...]:
    """Return the claims about single queries and about the scale."""
    return (
        Claim(
            f"sum-{law}",
            f"On text the law for {law} attention predicts the sum over queries better than single queries.",
            lambda run: at_end(run, law, "correlation") - at_end(run, law, "each"),
            above(0.0),
            kind="control",
            quantity="correlation of the sum over queries less the mean one of single queries; interval over seeds",
            across="interval",
        ),
        Claim(
            f"scale-{law}",
            f"On text one scale serves the law for {law} attention all along training.",
            partial(scale_loss, law=law),
            above(0.0),
            kind="control",
            quantity="share of the squared change explained with one scale, less half of that with the step's own best "
            "scale; the smaller of a third of the way and the end; interval over seeds",
            across="interval",
        ),
        Claim(
            f"scale-ratio-{law}",
            f"On text the best scale of the law for {law} attention stays the same within a factor of two.",
            partial(scale_ratio, law=law),
            between(0.5, 2.0),
            kind="check",
            quantity="best scale a third of the way over that of the end, each seed; ill-posed where the latter is "
            "near zero",
        ),
    )


CLAIMS = (
    *(claim for law in LAWS for claim in (*law_claims(law, SOURCE), *_further_claims(law))),
    *(claim for law in LAWS for claim in value_law.claims(law)),
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
        correlation, error = (
            float(values.mean()) for values in (at_end(run, law, "correlation"), final_error(run, law))
        )
        parts.append(f"{correlation:.2f} (law for {law} attention, relative error {error:.2f})")
    null = float(at_end(run, "softmax", "null").sel(side="high").mean())
    sentence = (
        "At the end the prediction from the MLP's weights correlates with the change of the logits by "
        f"{' and '.join(parts)}; chance is {null:.2f}, and predicting no change has an error of 1."
    )
    return f"{sentence} {value_law.outcome(run)}".rstrip()


def draw_training(run: xr.Dataset) -> Figure:
    """Draw over training, for either law, correlations with their null and the error; and orthogonality.

    A run with the value path has a row of its correlations more.
    """
    late = run.isel(step=slice(1, None))
    sources = [late, value_law.as_laws(late)] if value_law.is_in(run) else [late]
    figure, axes = canvas(len(sources) + 1, 2, width=4.1, height=2.7)
    for row, (source, titles) in zip(axes, zip(sources, (LAWS, value_law.TITLES), strict=False), strict=False):
        for panel, law in zip(row, LAWS, strict=True):
            draw_correlations(panel, source.sel(law=law))
            panel.set(title=titles[law], ylim=(-1, 1))
        row[0].set_ylabel("correlation with the logits' change")
    error, orthogonality = axes[-1]
    _draw_errors(error, sources)
    for index, (name, label) in enumerate(VECTORS.items()):
        band(orthogonality, late.step, late.excess.sel(vectors=name), index, label)
    orthogonality.axhline(1.0, color="0.5", linewidth=0.8, label="random directions")
    orthogonality.set(ylabel="mean cosine² × dimension", title="How far tokens are from orthogonal", ylim=(0, None))
    for panel in axes.flat:
        # Explicit limits: the curves, from which they would be computed, are NaN where every seed diverged.
        panel.set(xlabel="step", xscale="log", xlim=(0.8, 1.2 * float(run.step[-1])))
    error.legend(loc="lower left")  # where no error is: predicting no change has an error of 1
    orthogonality.legend()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, title="upper panels")
    letters(axes)
    return figure


def _draw_errors(panel: Axes, sources: Sequence[xr.Dataset]) -> None:
    """Draw the relative errors of both laws, from the MLP's weights and from value vectors."""
    for number, (source, label) in enumerate(zip(sources, ("law for {}", "{}, from value vectors"), strict=False)):
        for index, law in enumerate(LAWS):
            band(panel, source.step, source.error.sel(law=law), 2 * number + index, label.format(law))
    panel.axhline(1.0, color="0.5", linewidth=0.8, label="predicting no change")
    panel.set(ylabel="relative error", title="Error of the prediction", ylim=(0, 2))


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
    """Draw one point a token, the line of equality, and names that do not overlap of the tokens that changed most."""
    panel.plot(predicted, change, **marker(1), alpha=0.6)
    limits = np.array([float(predicted.min()), float(predicted.max())])
    theory(panel, limits, limits, 0)
    for index in _apart(predicted.values, change.values, np.argsort(-np.abs(change.values))[:NAMED]):
        point = (float(predicted[index]), float(change[index]))
        # matplotlib would read a dollar sign in a token as the start of a formula.
        name = str(change.token.values[index]).replace("$", r"\$")
        panel.annotate(name, point, xytext=(4, 2), textcoords="offset points", fontsize=7)


def _apart(
    x: Float[np.ndarray, " token"], y: Float[np.ndarray, " token"], candidates: Int[np.ndarray, " candidate"]
) -> list[int]:
    """Return those candidates, in their order, whose names would not lie over that of an earlier one.

    >>> _apart(np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.99, 0.0]), np.array([0, 1, 2]))
    [0, 2]
    """
    chosen: list[int] = []
    width, height = (share * float(np.ptp(values)) for values, share in ((x, NAME_WIDTH), (y, NAME_HEIGHT)))
    for index in candidates.tolist():
        if all(abs(x[index] - x[other]) > width or abs(y[index] - y[other]) > height for other in chosen):
            chosen.append(index)
    return chosen


STUDY = Study(
    name="invariant-text",
    title="In a language model the MLP's weights do not predict attention beyond token frequency",
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
        "attention. In a Transformer the first trained map after attention is that to the value vectors: we also "
        "predict from their growth, which asks nothing of the layers above."
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
    exact_shards=False,
    inputs=language_training.inputs,
    figures={
        "training": Drawing(
            draw_training,
            "Top: correlation over tokens of the logits' change with the prediction of either law, and its controls; "
            "grey: 95 % of the correlations with permuted tokens. Below it, where they were measured, the same laws "
            "with the squares of value vectors. Bottom left: relative error with one scale for a seed's whole "
            "training. Bottom right: mean square cosine between tokens. Lines: mean over seeds. Bands: range over "
            "seeds.",
        ),
        "tokens": Drawing(
            draw_tokens,
            "One point for each token: the change of its logit, summed over queries and less the mean over tokens, "
            "against the prediction times the seed's scale, after training. The line is equality. A scale below 0 "
            "reverses the law. Of the five tokens that changed most, those are named whose names do not overlap.",
        ),
    },
)
