"""Attention that is trained alone selects tokens like a support vector machine (Tarzanagh et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from joma import schedule
from joma.arguments import InputError, positive, scalar, whole
from joma.studies import common_axes
from joma.studies.related import max_margin_figures
from joma.studies.related.max_margin_data import (
    ARMS,
    SCORES,
    STARTS,
    Sequences,
    check_dim,
    factor_starts,
    sequences,
    starts,
)
from joma.studies.related.max_margin_flows import (
    NORMS,
    PARAMETERS,
    cosine_gap,
    matrix_differences,
    matrix_paths,
    timed_flows,
    vector_paths,
)
from joma.studies.related.max_margin_measures import (
    NEAR,
    NEARLY_RANK_ONE,
    certificate_gap,
    descent_ratio,
    direction_error,
    exponent_error,
    frobenius_cosine,
    global_share,
    late_convergence,
    late_direction_error,
    late_nuclear_lead,
    locally_best,
    log_time_range,
    nuclear_lead,
    nuclear_rise,
    nuclear_share,
    of_scores,
    trained_cosine,
)
from joma.studies.related.max_margin_training import (
    AttentionFactors,
    AttentionMatrix,
    AttentionVector,
    descend,
    descend_normalised,
    tensors,
)
from joma.study import Arms, Claim, Context, Drawing, Preset, Study, above, at_least, at_most, below, near
from joma.theory.margins import enforced_differences, margin_shares, max_margin
from joma.theory.token_selection import attention_weights

INTERVALS = 16  # of a path between records, up to the length at which claims are judged
LATE_INTERVALS = 8  # between records after it
DESCENT_RECORDS = 20
FACTOR_RECORDS = 4  # of the path of (K, Q)


@dataclass(frozen=True)
class Config:
    """Sequences of random tokens, how far their flows are followed, and how attention is trained on them."""

    sequences: int = 4
    tokens: int = 5
    dim: int = 20
    """At least sequences · (tokens − 1), so that every selection of tokens has a margin."""
    length: float = 160.0
    """Length of the path of p, and of W, at which claims are judged."""
    late_length: float = 400.0
    """Length to which the path of p is followed, for late switches."""
    matrix_sequences: int = 3
    matrix_tokens: int = 4
    matrix_dim: int = 8
    factor_scale: float = 1e-3
    """Standard deviation of the entries of K and Q at the start."""
    factor_length: float = 20.0
    """Length of the path of (K, Q) at which claims are judged."""
    late_factor_length: float = 160.0
    """Length to which the flow of (K, Q) is followed."""
    steps: int = 3200
    """Steps of normalised gradient descent along each path; a multiple of 16."""
    descent_steps: int = 4000
    """Steps of plain gradient descent; the run is repeated with half as many steps of twice the rate."""
    descent_rate: float = 0.5


# The max-margin vector of 20 sequences is longer: paths of this length reach the times of those of the preset quick.
PAPER = Config(
    sequences=20,
    tokens=10,
    dim=256,
    length=400.0,
    late_length=1000.0,
)


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve the flows of p, W and (K, Q), train all three, and compare them with the support vector machines."""
    _check(config)
    data = sequences(context, "sequences", (config.sequences, config.tokens, config.dim))
    matrix_sizes = config.matrix_sequences, config.matrix_tokens, config.matrix_dim
    matrix_data, p0 = sequences(context, "matrix sequences", matrix_sizes), starts(context, config.dim)
    factors = factor_starts(context, config.matrix_dim, config.factor_scale)
    late = np.linspace(config.length, config.late_length, LATE_INTERVALS + 1)[1:]
    lengths = np.concatenate([np.linspace(0.0, config.length, INTERVALS + 1), late])
    flows, paths = vector_paths(data, p0, lengths, INTERVALS)
    factor_lengths = np.geomspace(config.factor_length, config.late_factor_length, FACTOR_RECORDS)
    parts = [
        flows,
        matrix_paths(matrix_data, factors, config.length, factor_lengths),
        _descent(config, context, data, p0),
        _normalised_vectors(config, context, data, p0, paths[: len(STARTS)]),
        _normalised_matrices(config, context, matrix_data, factors),
    ]
    return xr.merge([part.assign_coords(seed=list(context.seeds)) for part in parts])


def _check(config: Config) -> None:
    """Check what the samplers and the training loop do not."""
    for name in ("length", "factor_length", "factor_scale", "descent_rate"):
        positive(name, getattr(config, name), ndim=0)
    scalar("late_length", config.late_length, above=config.length)
    scalar("late_factor_length", config.late_factor_length, above=config.factor_length)
    vectors = whole("sequences", config.sequences) * (whole("tokens", config.tokens, low=2) - 1)
    check_dim("dim", config.dim, vectors)
    matrix_tokens = whole("matrix_tokens", config.matrix_tokens, low=2)
    check_dim(
        "matrix_dim", config.matrix_dim, max(whole("matrix_sequences", config.matrix_sequences), matrix_tokens - 1)
    )
    if whole("steps", config.steps, low=INTERVALS) % INTERVALS:
        raise InputError("steps", f"a multiple of {INTERVALS}", config.steps, "round it: paths are compared as often")
    if whole("descent_steps", config.descent_steps, low=10) % 2:
        raise InputError("descent_steps", "even", config.descent_steps, "the run is repeated with half as many")


def _descent(config: Config, context: Context, data: Sequences, p0: np.ndarray) -> xr.Dataset:
    """Train p by plain gradient descent with all steps and with half of them, and compare it with the flow in time."""
    half = config.descent_steps // 2
    at = schedule.logarithmic(DESCENT_RECORDS, half)
    times = 2 * config.descent_rate * np.array(at)
    flow = timed_flows(data, p0, times)
    arms = Arms("arm", [f"{scores} scores, {start} start" for scores, start in ARMS])
    g = np.concatenate([data.g[SCORES.index(scores)] for scores, _ in ARMS])
    first = np.concatenate([p0[STARTS.index(start)] for _, start in ARMS])
    x, g, first = tensors(context, data.x, g, first)
    runs = {
        substeps: descend(
            context,
            arms,
            (x, g, first),
            rate=2 * config.descent_rate / substeps,
            steps=substeps * half,
            at=[substeps * step for step in at],
        ).trained.values
        for substeps in (2, 1)
    }
    shape, dims = (len(SCORES), len(STARTS), len(context.seeds)), ("scores", "start", "seed")
    size = 1 + np.linalg.norm(flow, axis=-1)
    distance = {
        substeps: (np.linalg.norm(trained - flow, axis=-1) / size).max(axis=-1) for substeps, trained in runs.items()
    }
    norm = np.linalg.norm(runs[2], axis=-1)
    return xr.Dataset(
        {
            "descent_distance": (dims, distance[2].reshape(shape)),
            "coarse_distance": (dims, distance[1].reshape(shape)),
            "descent_norm": ((*dims, "time"), norm.reshape(*shape, -1)),
        },
        {"time": times},
    )


def _normalised_vectors(
    config: Config, context: Context, data: Sequences, p0: np.ndarray, paths: np.ndarray
) -> xr.Dataset:
    """Train p with equal scores by steps of one length, from both starts, and compare it with the path of the flow."""
    at = schedule.every(config.steps // INTERVALS, config.steps)
    x, g, first = tensors(context, data.x, np.concatenate([data.g[0]] * len(STARTS)), np.concatenate(list(p0)))
    trained = descend_normalised(
        context,
        AttentionVector(first),
        (x, None, g),
        length=config.length,
        steps=config.steps,
        at=at,
        label="vector",
        arms=Arms("start", list(STARTS)),
    ).vector.values
    gap = [
        [_cosine_gaps(x, g, path) for x, g, path in zip(data.x, data.g[0], of_start, strict=True)]
        for of_start in trained
    ]
    distance = np.linalg.norm(trained - paths, axis=-1) / (1 + np.linalg.norm(paths, axis=-1))
    dims = ("start", "seed", "trained_length")
    variables = {"trained_gap": (dims, np.array(gap)), "path_distance": (dims, distance[..., 1:])}
    return xr.Dataset(
        variables, {"start": list(STARTS), "trained_length": config.length * np.array(at[1:]) / config.steps}
    )


def _cosine_gaps(x: np.ndarray, g: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Return 1 − cos(p, p̂) after the start of a trained path, p̂ that of the tokens which it selects."""
    selected = attention_weights(x, path[-1]).argmax(axis=-1)
    return cosine_gap(path[1:], max_margin(enforced_differences(x, g, selected)))


def _normalised_matrices(config: Config, context: Context, data: Sequences, factors: np.ndarray) -> xr.Dataset:
    """Train W from zero and (K, Q) by steps of one length; the common axes are those of (K, Q)."""
    x, z, g, k, q = tensors(context, data.x, data.z, data.g[0], *factors)
    models = {
        "W": (AttentionMatrix(0 * k), config.length, [config.steps]),
        "K Q": (AttentionFactors(k, q), config.factor_length, schedule.every(config.steps // INTERVALS, config.steps)),
    }
    shares, trained = [], None
    for label, (model, length, at) in models.items():
        trained = descend_normalised(context, model, (x, z, g), length=length, steps=config.steps, at=at, label=label)
        products = trained.matrix.isel(step=-1).values
        shares.append(
            [
                margin_shares(product, matrix_differences(*sample))
                for product, *sample in zip(products, data.x, data.z, data.g[0], strict=True)
            ]
        )
    assert trained is not None
    axes = trained[list(common_axes.NAMES)].rename(step=common_axes.STEP)
    dims = ("seed", "parameters", "norm_kind")
    coords = {"parameters": list(PARAMETERS), "norm_kind": list(NORMS)}
    return axes.merge(xr.Dataset({"trained_share": (dims, np.moveaxis(np.array(shares), 0, 1))}, coords))


SLOPE = "‖dp/d ln t − p̂‖/‖p̂‖"
FLOW_CLAIMS = (
    Claim(
        "direction",
        "The attention vector grows as p̂ ln t, with p̂ the max-margin vector of the selected tokens.",
        direction_error,
        at_most(NEAR),
        kind="control",
        quantity=f"{SLOPE} over the second half of the path, equal scores, larger of both starts; p̂ has margins "
        "over tokens of lower score only",
    ),
    Claim(
        "direction-late",
        "Late on its path the attention vector grows as p̂ ln t.",
        late_direction_error,
        at_most(NEAR),
        kind="control",
        quantity=f"{SLOPE} between the last two points of the long path, equal scores, larger of both starts",
    ),
    Claim(
        "best",
        "Where one token of each sequence has score 1 and the others 0, attention selects it.",
        lambda run: of_scores(run, "selects_best", "equal").min("start"),
        at_least(1.0),
        kind="control",
        quantity="1 if the token with most attention is the best one in every sequence, from both starts, else 0",
    ),
    Claim(
        "lost",
        "Where attention does not select a token of score 1, the other sequences carry it away.",
        lambda run: of_scores(run, "locally_best", "equal").min("start"),
        at_least(1.0),
        kind="control",
        quantity="1 if the best token trails the selected one by more than 1 on p̂ of the other sequences, wherever "
        "it is not selected, from both starts, equal scores, else 0",
    ),
    Claim(
        "local",
        "Paths that have converged select locally best tokens, with scores above those of their support tokens.",
        locally_best,
        at_least(1.0),
        kind="control",
        quantity=f"share of converged paths, free scores, every seed and start; converged is {SLOPE} ≤ {NEAR:g}",
    ),
    Claim(
        "not-global",
        "Attention does not always select the best tokens.",
        global_share,
        below(1.0),
        kind="reading",
        quantity="share of paths that select the best token of every sequence, free scores, mean over seeds and starts",
        across="mean",
        seeds=5,
    ),
    Claim(
        "late",
        "With free scores some paths switch tokens late: more of them grow as p̂ ln t further on.",
        late_convergence,
        above(0.0),
        kind="control",
        quantity="share of converged paths at the end of the long path, less that where claims are judged; mean over "
        "seeds and starts",
        across="mean",
    ),
    Claim(
        "frobenius",
        "A trained attention matrix W tends to the max-margin matrix of least Frobenius norm.",
        frobenius_cosine,
        at_least(0.998),
        kind="reading",
        quantity="cosine of W at the end of the flow with that matrix, a limit at a finite time; the bound is ours",
    ),
    Claim(
        "nuclear",
        "Trained keys and queries reach 96 % of the largest margin among matrices of their product's nuclear norm.",
        nuclear_share,
        at_least(0.96),
        kind="control",
        quantity="margin of K Qᵀ at the end of the flow over the largest; the start is small and random, not aligned",
    ),
    Claim(
        "nuclear-above-w",
        "Keys and queries have more of the largest nuclear margin than a matrix W that is trained itself.",
        nuclear_lead,
        above(0.0),
        kind="control",
        quantity="share of K Qᵀ less share of W, at the ends of their flows",
    ),
    Claim(
        "nuclear-rises",
        "Where keys and queries lack nuclear margin, they gain it slowly as the flow goes on.",
        nuclear_rise,
        above(0.0),
        kind="control",
        quantity="share of the largest nuclear margin at the end of the long flow, less that where claims are judged",
    ),
    Claim(
        "nuclear-late",
        "Late in the flow keys and queries have more of the largest nuclear margin than W.",
        late_nuclear_lead,
        above(0.0),
        kind="control",
        quantity="share of K Qᵀ at the end of the long flow, less share of W",
    ),
    Claim(
        "rank-one",
        "While K Qᵀ is nearly of rank one, its second singular value departs as the power ρ − 1 of the first.",
        exponent_error,
        at_most(NEARLY_RANK_ONE),
        kind="control",
        quantity="largest error of that power over the last interval of the long flow, seeds with σ_2/σ_1 below 0.03 "
        "and along the fastest direction; one number, and the bound is what the law neglects",
    ),
    Claim(
        "certificate",
        "The least nuclear norm is proved by duality.",
        certificate_gap,
        at_most(1e-6),
        kind="check",
        quantity="norm less its lower bound, over the norm",
    ),
)
TRAINING_CLAIMS = (
    Claim(
        "trained",
        "Plain gradient descent on the attention vector follows the flow within 5 %.",
        lambda run: run.descent_distance.max(("scores", "start"), skipna=False),
        at_most(0.05),
        kind="check",
        quantity="largest ‖p − flow‖ / (1 + ‖flow‖) over times, scores and starts",
    ),
    Claim(
        "first-order",
        "Halving the step of gradient descent halves its distance from the flow.",
        lambda run: descent_ratio(run, "equal"),
        near(2.0, 0.2),
        kind="check",
        quantity="that distance with half as many steps, over that with all steps; equal scores, mean of both starts",
    ),
    Claim(
        "trained-direction",
        "Attention vectors trained by normalised gradient descent point along p̂.",
        trained_cosine,
        at_least(0.998),
        kind="control",
        quantity="cosine with p̂ at the end of training, equal scores, smaller of both starts; seeds whose flow selects "
        "all best tokens",
    ),
    Claim(
        "trained-nuclear",
        "Keys and queries trained by normalised gradient descent reach 96 % of the largest nuclear margin.",
        lambda run: nuclear_share(run, "trained_share"),
        at_least(0.96),
        kind="control",
        quantity="margin of K Qᵀ at the end of training over the largest among matrices of its nuclear norm",
    ),
    Claim(
        "trained-nuclear-above-w",
        "Trained keys and queries have more of the largest nuclear margin than a trained W.",
        lambda run: nuclear_lead(run, "trained_share"),
        above(0.0),
        kind="control",
        quantity="share of K Qᵀ less share of W, both trained by normalised gradient descent",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the slope, how often the best tokens are selected, and the margins of W and of K Qᵀ."""
    low, high = log_time_range(run, INTERVALS)
    error, best = 100 * float(direction_error(run).max()), 100 * float(global_share(run).mean())
    share = nuclear_share(run)
    return (
        f"At ln t of {low:.0f} to {high:.0f}, dp/d ln t is within {error:.1f} % of the max-margin vector with equal "
        f"scores; with free scores {best:.0f} % of the paths select the best token of every sequence. Keys and queries "
        f"reach {_percent(share)} % of the largest nuclear margin (trained: "
        f"{_percent(nuclear_share(run, 'trained_share'))} %), W itself {_percent(share - nuclear_lead(run))} %."
    )


def _percent(values: xr.DataArray) -> str:
    """Return the range of shares over seeds in per cent."""
    return f"{100 * float(values.min()):.1f} to {100 * float(values.max()):.1f}"


STUDY = Study(
    name="max-margin",
    title="Attention trained alone selects tokens like a support vector machine",
    source="Tarzanagh et al. 2023 (arXiv 2306.13596, 2308.16898); Sheen et al. 2024 (arXiv 2403.08699)",
    statement=(
        "If attention is trained alone, its vector p goes to infinity in the direction of the hard-margin support "
        "vector machine that separates one token of each sequence from the others; these tokens are locally, not "
        "always globally, the best (Tarzanagh, Li, Zhang & Oymak 2023; Tarzanagh, Li, Thrampoulidis & Oymak 2023). To "
        "train the matrix W gives the least Frobenius norm, and to train keys and queries the least nuclear norm of "
        "their product: with vanishing regularisation, and by gradient flow from an aligned start (Sheen et al. 2024)."
    ),
    about=(
        "Sequences of random unit tokens have fixed scores: one token 1 and the others 0 (equal), or uniform (free). "
        "We solve the gradient flow of p over the length of its path, to times such as e^70, and compare its slope in "
        "ln t with the max-margin vector; likewise for W, and for keys and queries from a small random start. All "
        "three are trained as well: p by plain gradient descent beside its flow, and p, W, K and Q by steps of one "
        "length."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=10, seconds=15),
        "paper": Preset(PAPER, seeds=50, seconds=300),
    },
    run=run,
    claims=(*FLOW_CLAIMS, *TRAINING_CLAIMS),
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "paths": Drawing(
            max_margin_figures.draw_paths,
            "(a) Two paths of p in the plane of p̂ and of their largest deviation from it; points are equally spaced "
            "along the path up to the length at which claims are judged. (b) Length of p over that of p̂ ln t, equal "
            "scores: it tends to 1 for every seed and start. Points: plain gradient descent, bars from least to "
            "greatest seed. (c) Relative distance of the slope dp/d ln t from p̂ of the tokens selected at the end, "
            "every seed and start; it is huge where a path switches tokens, since ln t hardly changes meanwhile.",
        ),
        "margins": Drawing(
            max_margin_figures.draw_margins,
            "(a) Angle between p and p̂, equal scores, seeds that select all best tokens. Lines: flow. Points: "
            "normalised gradient descent, bars from least to greatest seed. (b) Least margin of W and of K Qᵀ as a "
            "share of the largest margin among matrices of the same Frobenius or nuclear norm. Bars: flow. Points: "
            "normalised gradient descent. Error bars: least to greatest seed. (c) What K Qᵀ lacks of the largest "
            "nuclear margin along the flow, every seed.",
        ),
    },
)
