"""The solved flows of the study `max-margin`, and what they tend to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from joma.studies.related.max_margin_data import ARMS, SCORES, STARTS, Sequences
from joma.theory.margins import (
    enforced_differences,
    margin_shares,
    max_margin,
    nuclear_max_margin,
    token_differences,
)
from joma.theory.token_selection import (
    VectorPath,
    attention_push,
    attention_weights,
    factor_path,
    outer_tokens,
    vector_flow,
    vector_path,
)

PARAMETERS = ("W", "K Q")
NORMS = ("frobenius", "nuclear")
RANK_TOLERANCE = 1e-4  # of the largest singular value, below which one counts as zero


def vector_paths(
    data: Sequences, p0: Float[np.ndarray, "start seed dim"], lengths: np.ndarray, last: int
) -> tuple[xr.Dataset, Float[np.ndarray, "arm seed length dim"]]:
    """Solve the flow of the attention vector over its length for every arm and seed.

    Args:
        data: tokens and scores.
        p0: p at the start, for each kind of start.
        lengths: at which the path is returned.
        last: index of the length at which claims are judged; later ones show late switches.

    Returns:
        What is measured on each path over (scores, start, seed), and the paths up to the index `last`.
    """
    results, paths = [], []
    for scores, start in ARMS:
        for x, g, first in zip(data.x, data.g[SCORES.index(scores)], p0[STARTS.index(start)], strict=True):
            path = vector_path(x, g, first, lengths)
            results.append(_measure(x, g, path, lengths, last))
            paths.append(path.p[: last + 1])
    shape = (len(SCORES), len(STARTS), len(data.x))
    dims = ("scores", "start", "seed")
    variables = {}
    for name, value in results[0].items():
        values = np.reshape([result[name] for result in results], (*shape, *np.shape(value)))
        # Single precision: curves are drawn, numbers over seeds are judged.
        variables[name] = ((*dims, "length"), values.astype(np.float32)) if np.ndim(value) else (dims, values)
    coords = {"scores": list(SCORES), "start": list(STARTS), "length": lengths}
    return xr.Dataset(variables, coords), np.reshape(paths, (len(ARMS), len(data.x), last + 1, -1))


def _measure(
    x: np.ndarray, g: np.ndarray, path: VectorPath, lengths: np.ndarray, last: int
) -> dict[str, np.ndarray | float]:
    """Return what is measured on one path: how it compares with the solution for the tokens that it selects."""
    choices = attention_weights(x, path.p).argmax(axis=-1)
    selected, half = choices[last], last // 2
    solution, late_solution = (max_margin(enforced_differences(x, g, choice)) for choice in (selected, choices[-1]))
    slope = (path.p[last] - path.p[half]) / (path.log_time[last] - path.log_time[half])
    return {
        "norm": np.linalg.norm(path.p, axis=-1),
        "log_time": path.log_time,
        "cosine_gap": cosine_gap(path.p, late_solution),
        "across": _largest_deviation(path.p, late_solution),
        "slope_error": np.append(np.nan, _slope_errors(path, late_solution)),
        "half_slope_error": float(relative_distance(slope, solution)),
        "svm_norm": float(np.linalg.norm(late_solution)),
        "selects_best": float((selected == g.argmax(axis=-1)).all()),
        "locally_best": float(is_locally_best(x, g, selected)),
        "last_switch": float(lengths[(choices != choices[-1]).any(axis=-1)].max(initial=0.0)),
    }


def _slope_errors(path: VectorPath, solution: np.ndarray) -> Float[np.ndarray, " interval"]:
    """Return ‖dp/d ln t − p̂‖/‖p̂‖ between points; infinite where ln t stays as it is, because the path switches."""
    rise = np.diff(path.log_time)
    error = np.linalg.norm(np.diff(path.p, axis=0) - rise[:, None] * solution, axis=-1) / np.linalg.norm(solution)
    return np.divide(error, rise, out=np.full_like(error, np.inf), where=rise > 0)


def is_locally_best(x: np.ndarray, g: np.ndarray, selected: np.ndarray) -> bool:
    """Return whether every token of higher score than the selected one of its sequence has a margin above 1.

    For scores that all differ this says that the selected tokens have higher scores than their support tokens.
    """
    margins = (x[np.arange(len(x)), selected][:, None] - x) @ max_margin(enforced_differences(x, g, selected))
    higher = g > np.take_along_axis(g, selected[:, None], axis=1)
    return bool((margins[higher] > 1).all())


def relative_distance(vectors: Float[np.ndarray, "*lead dim"], solution: Float[np.ndarray, " dim"]) -> np.ndarray:
    """Return ‖v − p̂‖/‖p̂‖.

    >>> relative_distance(np.array([[1.0, 1.0]]), np.array([1.0, 0.0]))
    array([1.])
    """
    return np.asarray(np.linalg.norm(vectors - solution, axis=-1) / np.linalg.norm(solution))


def cosine_gap(vectors: Float[np.ndarray, "*lead dim"], solution: Float[np.ndarray, " dim"]) -> np.ndarray:
    """Return 1 − cos of the angle with a solution, as half the squared distance of unit vectors; NaN for zero vectors.

    >>> cosine_gap(np.array([[0.0, 3.0]]), np.array([1.0, 0.0]))
    array([1.])
    """
    sizes = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = np.divide(vectors, sizes, out=np.full_like(vectors, np.nan), where=sizes > 0)
    return np.asarray(((unit - solution / np.linalg.norm(solution)) ** 2).sum(axis=-1) / 2)


def _largest_deviation(p: Float[np.ndarray, "length dim"], solution: np.ndarray) -> Float[np.ndarray, " length"]:
    """Return the path's component along its own largest deviation from the line of the solution."""
    unit = solution / np.linalg.norm(solution)
    deviations = p - (p @ unit)[:, None] * unit
    largest = deviations[np.linalg.norm(deviations, axis=-1).argmax()]
    return deviations @ largest / max(float(np.linalg.norm(largest)), np.finfo(np.float64).tiny)


def timed_flows(
    data: Sequences, p0: Float[np.ndarray, "start seed dim"], times: Float[np.ndarray, " time"]
) -> Float[np.ndarray, "arm seed time dim"]:
    """Return the attention vector of every arm and seed at the given times of gradient flow."""
    return np.stack(
        [
            np.stack(
                [
                    vector_flow(x, g, first, times)
                    for x, g, first in zip(data.x, data.g[SCORES.index(scores)], p0[STARTS.index(start)], strict=True)
                ]
            )
            for scores, start in ARMS
        ]
    )


def matrix_differences(x: np.ndarray, z: np.ndarray, g: np.ndarray) -> Float[np.ndarray, "constraint dim dim"]:
    """Return (best token less another) zᵀ for every sequence and every other token."""
    rows = token_differences(outer_tokens(x, z), g.argmax(axis=-1))
    return rows.reshape(-1, x.shape[-1], x.shape[-1])


def matrix_paths(
    data: Sequences, factors: Float[np.ndarray, "factor seed dim dim"], length: float, factor_lengths: np.ndarray
) -> xr.Dataset:
    """Solve the flows of W from zero, to one length, and of (K, Q), to several lengths, with equal scores.

    Returns:
        Over seeds: the margin shares of both at the (first) length; the cosines with the solutions of least Frobenius
        and nuclear norm; the nuclear share, two singular values and their exponent along the path of K Qᵀ; and the
        solution of least nuclear norm with its certificate.
    """
    results: list[dict[str, np.ndarray]] = []
    for x, z, g, k0, q0 in zip(data.x, data.z, data.g[0], *factors, strict=True):
        differences = matrix_differences(x, z, g)
        direct = vector_path(outer_tokens(x, z), g, np.zeros(x.shape[-1] ** 2), [length])
        factored = factor_path(x, z, g, k0, q0, lengths=factor_lengths)
        products = factored.k @ factored.q.transpose(0, 2, 1)
        first = direct.p[0].reshape(products[0].shape), products[0]
        exponents = np.transpose([rank_exponent(x, z, g, product) for product in products])
        results.append(
            {
                **_matrix_measures(first, differences),
                "matrix_log_time": np.array([direct.log_time[0], factored.log_time[0]]),
                "factor_log_time": factored.log_time,
                "nuclear_shares": np.array([margin_shares(product, differences)[1] for product in products]),
                "singular": np.stack([np.linalg.svd(product, compute_uv=False)[:2] for product in products]),
                **dict(zip(("exponent", "alignment"), exponents, strict=True)),
            }
        )
    along_path = dict.fromkeys(("factor_log_time", "nuclear_shares", "exponent", "alignment"), ("factor_path",))
    over: dict[str, tuple[str, ...]] = {**along_path, "singular": ("factor_path", "order")}
    dims = {name: over.get(name, ("parameters", "norm_kind")[: np.ndim(value)]) for name, value in results[0].items()}
    variables = {name: (("seed", *dims[name]), np.stack([result[name] for result in results])) for name in results[0]}
    coords = {"parameters": list(PARAMETERS), "norm_kind": list(NORMS), "factor_path": factor_lengths}
    return xr.Dataset(variables, coords)


def rank_exponent(
    x: np.ndarray, z: np.ndarray, g: np.ndarray, w: Float[np.ndarray, "row column"]
) -> tuple[float, float]:
    """Return the power of the largest singular value of K Qᵀ by which the second one departs from it.

        σ_2/σ_1 ∝ σ_1^(ρ − 1),    ρ = ‖(1 − u uᵀ) G (1 − v vᵀ)‖_op / uᵀ G v,    G = −∂loss/∂W

    u and v are the first singular vectors of W. The law holds where W is nearly of rank one and its second singular
    vectors have turned to the first ones of (1 − u uᵀ) G (1 − v vᵀ), whose direction grows fastest.

    Returns:
        ρ − 1, and the product of the two cosines between these pairs of vectors: 1 if they have turned.
    """
    push, _ = attention_push(np.einsum("itd,de,ie->it", x, w, z), g)
    slope = np.einsum("it,itd,ie->de", push, x, z)
    left, _, right = np.linalg.svd(w)
    inner = left.T @ slope @ right.T
    fastest_left, sizes, fastest_right = np.linalg.svd(inner[1:, 1:])
    return float(sizes[0] / inner[0, 0] - 1), float(abs(fastest_left[0, 0] * fastest_right[0, 0]))


def _matrix_measures(products: Sequence[np.ndarray], differences: np.ndarray) -> dict[str, np.ndarray]:
    least = max_margin(differences.reshape(len(differences), -1))
    nuclear = nuclear_max_margin(differences)
    sizes = np.linalg.svd(nuclear.w, compute_uv=False)
    cosines = [
        [1 - cosine_gap(product.ravel(), solution) for solution in (least, nuclear.w.ravel())] for product in products
    ]
    return {
        "margin_share": np.array([margin_shares(product, differences) for product in products]),
        "matrix_cosine": np.array(cosines),
        "nuclear_norm": np.array(nuclear.norm),
        "nuclear_bound": np.array(nuclear.bound),
        "nuclear_rank": np.array(float((sizes > RANK_TOLERANCE * sizes[0]).sum())),
    }
