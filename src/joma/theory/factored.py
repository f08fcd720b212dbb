"""The ledger of key vectors: how keys grow beside values if attention logits are products of queries and keys.

Let z_ml = q_m · k_l with k_l = W_K e_l, fixed orthonormal embeddings e_l, and value vectors p_l = W_V e_l. Write
ζ_ml = −∂loss/∂z_ml, and y = −∂loss/∂b. Gradient flow gives, whatever the data, the loss and the network above,

    k_l · k̇_l = η_K Σ_m z_ml ζ_ml                      p_l · ṗ_l = η_V E[b_l y_l]

    linear:   Σ_m z_ml ζ_ml = E[b_l y_l]                          ‖k_l‖²/η_K − ‖p_l‖²/η_V is constant
    exp:      Σ_m ζ_ml = E[b_l y_l]                               a relation, the ledger below
    softmax:  Σ_m ζ_ml = (E[b_l y_l] − pull_l)/T                  likewise, with pull_l = E[b_l Σ_j b_j y_j]

The law of linear attention is that of `joma.theory.invariants` with the keys' coordinates in the place of the queries.
For exp and softmax attention no such quantity is constant: a key grows with its value in proportion to its logit. With
the mean z̄_l of z_ml over queries,

    ½‖k_l(t)‖² − ½‖k_l(0)‖² = level + spread + normalisation + step

    level' = (η_K/T η_V) z̄_l p_l · ṗ_l     spread' = η_K Σ_m (z_ml − z̄_l) ζ_ml     normalisation' = −(η_K/T) z̄_l pull_l

and `step` is what SGD's finite steps add. With one query `spread` is zero; with exp attention `normalisation` is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from joma.arguments import InputError, choice, in_range, positive, real, scalar
from joma.theory.invariants import ATTENTIONS

Vectors = Float[np.ndarray, "*lead token coordinate"]
Logits = Float[np.ndarray, "*lead query token"]
Tokens = Float[np.ndarray, "*lead token"]


@dataclass(frozen=True)
class KeyLedger:
    """The cumulative terms by which keys grow: ½‖k_l(t)‖² = ½‖k_l(0)‖² + level + spread + normalisation + step.

    `level`: values grew, in proportion to the mean logit of the token. `spread`: queries differ in their logits for
    the token. `normalisation`: softmax's weights sum to one. `step`: SGD's steps are finite (zero along the flow).
    """

    level: Tokens
    spread: Tokens
    normalisation: Tokens
    step: Tokens

    @property
    def total(self) -> np.ndarray:
        """Return level + spread + normalisation + step."""
        return self.level + self.spread + self.normalisation + self.step


def key_ledger(
    attention: str,
    k: ArrayLike,
    p: ArrayLike,
    zeta: ArrayLike,
    z: ArrayLike,
    *,
    pull: ArrayLike | None = None,
    rates: ArrayLike = (1.0, 1.0),
    temperature: float = 1.0,
) -> KeyLedger:
    """Return the terms by which SGD with finite steps made the keys grow, for exp or softmax attention.

    `½‖k(0)‖² + total` is ½‖k‖² to rounding at any step size, because Δk_l = η_K Σ_m ζ_ml q_m in one step; `step` is
    Σ_steps ½‖Δk_l‖².

    Args:
        attention: exp or softmax; the law of linear attention is `invariants.conserved`.
        k: key vectors before every step and after the last, [step + 1, ..., token, head].
        p: value vectors likewise, [step + 1, ..., token, value].
        zeta: −∂loss/∂z at each step, [step, ..., query, token].
        z: logits at each step, [step, ..., query, token].
        pull: E[b (b · y)] at each step, [step, ..., token]; softmax attention needs it.
        rates: η_K and η_V, the learning rates of keys and values.
        temperature: softmax's T.

    Returns:
        A `KeyLedger` of arrays [step + 1, ..., token], zero before the first step.

    >>> terms = key_ledger("exp", k=[[[0.0]], [[2.0]]], p=[[[1.0]], [[3.0]]], zeta=[[[2.0]]], z=[[[0.0]]])
    >>> terms.step[:, 0], terms.level[:, 0]
    (array([0., 2.]), array([0., 0.]))
    """
    names = {name: law for name, law in ATTENTIONS.items() if law.power == 1}
    law = choice("attention", attention, names)
    keys, values = _vectors("k", k), _vectors("p", p)
    if keys.shape[:-1] != values.shape[:-1]:
        raise InputError("p", f"of axes [step + 1, ..., token] {keys.shape[:-1]}", values.shape, "match `k`")
    push, logits = _logits("zeta", zeta, keys), _logits("z", z, keys)
    if push.shape != logits.shape:
        raise InputError("z", f"of the shape of `zeta`, {push.shape}", logits.shape, "match the queries of both")
    rate_k, rate_v = _rates(rates)
    divisor = scalar("temperature", temperature, above=0.0) if law.normalised else 1.0
    pulls = _pull(pull, keys) if law.normalised else np.zeros_like(keys[1:, ..., 0])
    with np.errstate(all="ignore"):
        radial = (values[:-1] * np.diff(values, axis=0)).sum(axis=-1)
        terms = key_ledger_rates(logits, push, radial / rate_v, pulls, rate_k=rate_k, temperature=divisor)
        step = 0.5 * (np.diff(keys, axis=0) ** 2).sum(axis=-1)
        sums = [np.concatenate([np.zeros_like(term[:1]), np.cumsum(term, axis=0)]) for term in (*terms, step)]
    in_range("k`, `p`, `zeta`, `z`, `pull`, `rates`, `temperature", *sums)
    return KeyLedger(*sums)


def key_ledger_rates(
    z: Logits, zeta: Logits, growth: Tokens, pull: Tokens, *, rate_k: float, temperature: float
) -> tuple[Tokens, Tokens, Tokens]:
    """Return the time derivatives of level, spread and normalisation, unchecked; `growth` is p_l · ṗ_l/η_V.

    >>> z = zeta = np.array([[1.0], [3.0]])
    >>> key_ledger_rates(z, zeta, np.ones(1), np.ones(1), rate_k=1.0, temperature=1.0)
    (array([2.]), array([2.]), array([-2.]))
    """
    mean = z.mean(axis=-2)
    spread = rate_k * ((z - mean[..., None, :]) * zeta).sum(axis=-2)
    return rate_k / temperature * mean * growth, spread, -rate_k / temperature * mean * pull


def _rates(rates: ArrayLike) -> tuple[float, float]:
    pair = positive("rates", rates, ndim=1)
    if pair.shape != (2,):
        raise InputError(
            "rates", "two numbers, η_K and η_V", f"{pair.size} of them", "give one for keys, one for values"
        )
    return float(pair[0]), float(pair[1])


def _vectors(name: str, value: ArrayLike) -> np.ndarray:
    array = real(name, value)
    if array.ndim < 3 or array.shape[0] < 2:
        remedy = "record every step and the end"
        raise InputError(name, "of axes [step + 1, ..., token, coordinate]", f"shape {array.shape}", remedy)
    return array


def _logits(name: str, value: ArrayLike, keys: np.ndarray) -> np.ndarray:
    array, (steps, *lead, tokens, _) = real(name, value), keys.shape
    if array.ndim != keys.ndim or (*array.shape[:-2], array.shape[-1]) != (steps - 1, *lead, tokens):
        expected = f"of axes [step, ..., query, token] with {steps - 1} steps and {tokens} tokens"
        raise InputError(name, expected, f"shape {array.shape}", "give one record for each step of `k`")
    return array


def _pull(value: ArrayLike | None, keys: np.ndarray) -> np.ndarray:
    if value is None:
        raise InputError("pull", "given for softmax attention", None, "record E[b (b · y)] at each step")
    array, expected = real("pull", value), (len(keys) - 1, *keys.shape[1:-1])
    if array.shape != expected:
        raise InputError("pull", f"of shape {expected}", array.shape, "give one record for each step of `k`")
    return array
