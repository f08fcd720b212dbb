"""Predictions of `scan-snap`: the integrated flow of decoder and attention logits, and closed forms of its limits."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.special import softmax, wrightomega

from joma.data.tokens import SequenceClasses
from joma.theory.integration import Solver, integrate


def logit_flow(
    x: Float[np.ndarray, "label token"],
    query: np.ndarray,
    times: np.ndarray,
    *,
    outputs: int,
    rate_w: float,
    rate_z: float,
) -> Float[np.ndarray, "time query token"]:
    """Integrate the coupled flow of decoder v and attention logits z from zero; return z.

    With K equally likely classes of sequences x_n, query ψ(n) and target n:

        f_n = x_n ∘ exp(z_ψ(n)) / ‖·‖,    g_n = e_n − softmax(vᵀ f_n),    y_n = v g_n
        v̇ = (η_w/K) Σ_n f_n g_nᵀ,         ż_m = (η_z/K) Σ_{ψ(n) = m} f_n ∘ (y_n − f_n (f_n · y_n))
    """
    labels, target, queries = len(x), np.eye(len(x), outputs), int(query.max()) + 1

    def rhs(_: float, state: np.ndarray) -> np.ndarray:
        v, z = state[:, :outputs], state[:, outputs:].T
        f = x * np.exp(z[query])
        f /= np.linalg.norm(f, axis=1, keepdims=True)
        g = (target - softmax(f @ v, axis=1)) / labels
        y = g @ v.T
        z_dot = np.zeros_like(z)
        np.add.at(z_dot, query, f * (y - f * (f * y).sum(axis=1, keepdims=True)))
        return np.concatenate([rate_w * f.T @ g, rate_z * z_dot.T], axis=1)

    path = integrate(rhs, np.zeros((x.shape[1], outputs + queries)), times, Solver(rtol=1e-7, atol=1e-9))
    return np.moveaxis(path.states[:, :, outputs:], 1, 2)


def logit_flows(
    data: SequenceClasses, times: np.ndarray, *, outputs: int, rate_w: float, rate_z: float
) -> Float[np.ndarray, "seed time query token"]:
    """Integrate the flow of every seed's data; see `logit_flow`."""
    query = data.query.numpy()
    return np.stack(
        [logit_flow(x, query, times, outputs=outputs, rate_w=rate_w, rate_z=rate_z) for x in data.frequency.numpy()]
    )


def decoder_margin(u: np.ndarray, outputs: int) -> np.ndarray:
    """Return the margin s of a decoder trained alone on orthogonal unit features: its target's logit less the others'.

        e^s + (M − 1) s = 1 + M u,    u = η_w t/K, the decoder's own time

    While attention hardly moves, every distinct logit is driven by one clock, B = κ (M − 1)/(2M) s²: it grows as t²,
    and from u ≈ 2 ln M on as ln² t.

    >>> bool(np.isclose(decoder_margin(np.array(0.0), 64), 0.0))
    True
    """
    others = outputs - 1
    return np.asarray(np.log(others * np.real(wrightomega((1 + outputs * u) / others - np.log(others)))))


def clock_exponent(u: np.ndarray, outputs: int) -> np.ndarray:
    """Return d ln B/d ln t of the clock of `decoder_margin`, 2 u ṡ/s; it is 2 at the start."""
    s = decoder_margin(u, outputs)
    with np.errstate(invalid="ignore", divide="ignore"):
        exponent = 2 * u * outputs / ((outputs - 1 + np.exp(s)) * s)
    return np.where(u < 1e-9, 2.0, exponent)


def transition_time(labels: int, outputs: int, rate_w: np.ndarray) -> np.ndarray:
    """Return the paper's time of the transition, 2 K ln M/η_w, for K classes and M outputs."""
    return 2 * np.log(outputs) * labels / rate_w


def relative_gain(logit: xr.DataArray, cooccurrence: xr.DataArray) -> xr.DataArray:
    """Predict every distinct logit from that of the class's most frequent distinct token, by the relative gain.

    ż_l is proportional to f_l² with one factor for all distinct tokens of a class, so that

        e^{−2 z_l} = 1 − (P_l/P_1)² (1 − e^{−2 z_1})
    """
    square = (cooccurrence / cooccurrence.isel(rank=0)) ** 2
    shortfall = square * xr.apply_ufunc(np.expm1, -2 * logit.isel(rank=0))
    with np.errstate(divide="ignore"):  # where e^{−2 z_1} is rounded away beside 1, the prediction is z = ∞
        return xr.apply_ufunc(np.log1p, shortfall) / -2
