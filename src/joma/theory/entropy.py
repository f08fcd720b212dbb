"""The entropy of a distribution and of softmax, in nats: for the theory, and for the studies that use NumPy alone.

`joma.probes.entropy.shannon_entropy` is the same for tensors.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.special import entr


def shannon_entropy(p: Float[np.ndarray, "*batch token"]) -> Float[np.ndarray, "*batch"]:
    """Return the entropy H = −Σ p ln p of probabilities along the last axis, with 0 ln 0 = 0.

    >>> shannon_entropy(np.array([[0.5, 0.5], [1.0, 0.0]])).round(4)
    array([0.6931, 0.    ])
    """
    return np.asarray(entr(p).sum(axis=-1))


def entropy_of_drops(drop: Float[np.ndarray, "*batch token"]) -> Float[np.ndarray, "*batch"]:
    """Return the entropy of softmax(−drop), to full relative accuracy even where it is nearly 0.

        H = ln Σ_j e^{−d_j} + Σ_j p_j d_j

    Args:
        drop: d, by how much each logit lies below the largest of its row: at least 0, and 0 once.

    >>> entropy_of_drops(np.array([[0.0, 0.0], [0.0, 40.0]]))
    array([6.93147181e-01, 1.74182524e-16])
    """
    with np.errstate(under="ignore"):
        powers = np.exp(-drop)
        mean = (powers * drop).sum(axis=-1) / powers.sum(axis=-1)
        # log1p of all terms but the largest, so that the entropy of a nearly one-hot row keeps its digits.
        np.put_along_axis(powers, drop.argmin(axis=-1, keepdims=True), 0.0, axis=-1)
        return np.asarray(np.log1p(powers.sum(axis=-1)) + mean)
