"""Theorem 1: quantities of the attention logits z and the lower weights v that training does not change.

Let v[token, hidden] be the context rows of the lower layer, z[query, token] the logits, η_w and η_z their learning
rates, and κ = η_z/η_w. Gradient flow keeps constant, for each contextual token,

    linear:   Σ_m z_m²/η_z − Σ_k v_k²/η_w
    exp:      Σ_m z_m/η_z − Σ_k v_k²/(2η_w)

whatever the data, loss, activation, width and hidden biases. Softmax attention keeps Σ_l z_ml for each query m, and
Z = Σ_m z_m obeys a law with a remainder, the `Ledger`:

    Z(t) − Z(0) = (κ/2T) [Σ_k v_k² − b_ref Σ_k ‖v_k‖²]₀ᵗ − drift(t) − gap(t) − step(t)

Only the sum over queries is fixed by the weights. A single z_m is not predicted, unless there is one query.

The laws are about the first trained linear map after attention. In JoMA's block that is the MLP's lower layer. In a
Transformer it is the value matrix, and nothing is asked of what stands above it (`docs/value-path.md`). With fixed
orthonormal embeddings e_l of the tokens, every function of this module then holds with

    v := p_l = W_V e_l, the value vectors [token, value],          rate_w := η_V

If the logits are products z_ml = q_m · k_l of queries and keys k_l = W_K e_l, the law of linear attention holds for the
coordinates of the keys in the place of the queries: z := the key vectors as [head, token], rate_z := η_K. That is
‖k_l‖²/η_K − ‖p_l‖²/η_V is constant. For products with exp or softmax attention see `joma.theory.factored`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from joma.arguments import SUM_ERROR, InputError, aligned, broadcast, choice, in_range, probabilities, real, scalar

Weights = Float[np.ndarray, "*lead token hidden"]
Tokens = Float[np.ndarray, "*lead token"]
Reference = Float[np.ndarray, "*reference token"]
Increments = Float[np.ndarray, "step *rest"]
Sums = Float[np.ndarray, "step+1 *rest"]


@dataclass(frozen=True)
class AttentionLaw:
    """One kind of attention: b(z, x), the backward pass from a gradient y = ∂/∂b to one of z, and its law.

    The law is d/dt Σ_m z_m^power = (power/2)(κ/T) d/dt Σ_k v_k², minus a normalisation term if `normalised`.
    """

    name: str
    power: int
    normalised: bool
    weigh: Callable[[np.ndarray, np.ndarray, float], np.ndarray]
    carry_back: Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]


def _linear(z: Tokens, x: Tokens, _temperature: float) -> Tokens:
    return x * z


def _linear_back(y: Tokens, _b: Tokens, x: Tokens, _temperature: float) -> Tokens:
    return x * y


def _exp(z: Tokens, x: Tokens, _temperature: float) -> Tokens:
    return x * np.exp(z)


def _exp_back(y: Tokens, b: Tokens, _x: Tokens, _temperature: float) -> Tokens:
    return b * y


def _softmax(z: Tokens, x: Tokens, temperature: float) -> Tokens:
    score = np.where(x > 0, z / temperature, -np.inf)  # only tokens that occur set the maximum
    b = x * np.exp(score - score.max(axis=-1, keepdims=True))
    return b / b.sum(axis=-1, keepdims=True)


def _softmax_back(y: Tokens, b: Tokens, _x: Tokens, temperature: float) -> Tokens:
    return b * (y - (b * y).sum(axis=-1, keepdims=True)) / temperature


ATTENTIONS: dict[str, AttentionLaw] = {
    "linear": AttentionLaw("linear", 2, False, _linear, _linear_back),
    "exp": AttentionLaw("exp", 1, False, _exp, _exp_back),
    "softmax": AttentionLaw("softmax", 1, True, _softmax, _softmax_back),
}


@dataclass(frozen=True)
class Ledger:
    """The cumulative terms that softmax's prediction leaves out: Z(t) = predict(...) − drift − gap − step.

    `drift`: E[b] moved away from the reference. `gap`: b and the gradient are not independent. `step`: SGD's steps
    are finite (zero along the flow).
    """

    drift: Tokens
    gap: Tokens
    step: Tokens

    @property
    def total(self) -> np.ndarray:
        """Return drift + gap + step."""
        return self.drift + self.gap + self.step


def predict(
    attention: str,
    v: ArrayLike,
    v0: ArrayLike,
    z0: ArrayLike,
    *,
    kappa: float = 1.0,
    temperature: float = 1.0,
    b_ref: ArrayLike | None = None,
) -> np.ndarray:
    """Predict the attention logits, summed over queries, from the lower weights alone (Theorem 1).

        linear:   Σ_m z_m² = Σ_m z0_m² + κ [Σ_k v_k² − Σ_k v0_k²]                                    exact
        exp:      Σ_m z_m  = Σ_m z0_m + (κ/2) [Σ_k v_k² − Σ_k v0_k²]                                 exact
        softmax:  Σ_m z_m  ≈ Σ_m z0_m + (κ/2T) [Σ_k (v_k² − v0_k²) − b_ref Σ_k (‖v_k‖² − ‖v0_k‖²)]

    Softmax's is exact once a `Ledger` is subtracted.

    Args:
        attention: a name of `ATTENTIONS`.
        v: weights now, [..., token, hidden], context rows only; or value vectors, [..., token, value].
        v0: weights at the start, of the same last two axes.
        z0: logits at the start, [..., query, token]; or, for linear attention, key vectors, [..., head, token].
        kappa: η_z/η_w, the ratio of the learning rates; η_z/η_V or η_K/η_V for value vectors.
        temperature: T of softmax; the others have none.
        b_ref: softmax's fixed reference [..., token], which sums to 1: see `reference`. The others need none.

    Returns:
        Σ_m z_m², or Σ_m z_m, of shape [..., token]; leading axes broadcast.

    >>> predict("exp", v=[[1.0, 2.0], [0.0, 1.0]], v0=[[0.0, 0.0], [0.0, 0.0]], z0=[[0.1, 0.2]])
    array([2.6, 0.7])
    """
    law = choice("attention", attention, ATTENTIONS)
    weights, start, logits = _weights("v", v), _weights("v0", v0), _logits("z0", z0)
    if weights.shape[-2:] != start.shape[-2:]:
        raise InputError("v0", f"of [token, hidden] {weights.shape[-2:]}", start.shape[-2:], "give the start of `v`")
    _same_tokens("z0", logits, weights)
    kappa = scalar("kappa", kappa, low=0.0)
    fixed, divisor = None, 1.0
    if law.normalised:
        fixed, divisor = _reference("b_ref", b_ref, weights), scalar("temperature", temperature, above=0.0)
    broadcast(z0=logits[..., 0, :], v=weights[..., 0], v0=start[..., 0])
    with np.errstate(all="ignore"):
        total = (logits**law.power).sum(axis=-2)
        growth = (weights**2).sum(axis=-1) - (start**2).sum(axis=-1)
        if fixed is not None:
            growth = growth - fixed * growth.sum(axis=-1, keepdims=True)
        prediction = total + 0.5 * law.power * (kappa / divisor) * growth
    in_range("v`, `v0`, `z0`, `kappa`, `temperature", prediction)
    return prediction


def conserved(attention: str, v: ArrayLike, z: ArrayLike, *, rate_w: float = 1.0, rate_z: float = 1.0) -> np.ndarray:
    """Return the quantity that the flow keeps constant (Theorem 1), for any number of queries and any learning rates.

        linear:   Σ_m z_m²/η_z − Σ_k v_k²/η_w        for each token
        exp:      Σ_m z_m/η_z − Σ_k v_k²/(2η_w)      for each token
        softmax:  Σ_l z_ml                           for each query

    Args:
        attention: a name of `ATTENTIONS`.
        v: weights, [..., token, hidden], context rows only; or value vectors, [..., token, value].
        z: logits, [..., query, token]; or, for linear attention, key vectors, [..., head, token].
        rate_w: η_w, learning rate of the weights; η_V for value vectors.
        rate_z: η_z, learning rate of the logits; η_K for key vectors.

    Returns:
        An array [..., token], or [..., query] for softmax; leading axes broadcast.

    >>> conserved("linear", v=[[1.0, 2.0]], z=[[3.0], [1.0]], rate_z=2.0)
    array([0.])
    """
    law = choice("attention", attention, ATTENTIONS)
    weights, logits = _weights("v", v), _logits("z", z)
    _same_tokens("z", logits, weights)
    rate_w, rate_z = scalar("rate_w", rate_w, above=0.0), scalar("rate_z", rate_z, above=0.0)
    if law.normalised:
        with np.errstate(all="ignore"):
            sums = logits.sum(axis=-1)
        in_range("z", sums)
        return sums
    broadcast(z=logits[..., 0, :], v=weights[..., 0])
    with np.errstate(all="ignore"):
        total, squares = (logits**law.power).sum(axis=-2), (weights**2).sum(axis=-1)
        quantity = total / rate_z - 0.5 * law.power * squares / rate_w
    in_range("v`, `z`, `rate_w`, `rate_z", quantity)
    return quantity


def ledger(
    v: ArrayLike,
    b_bar: ArrayLike,
    pull: ArrayLike,
    *,
    b_ref: ArrayLike,
    rate_w: float = 1.0,
    rate_z: float = 1.0,
    temperature: float = 1.0,
) -> Ledger:
    """Return the terms that softmax's prediction leaves out along plain SGD, exact for any step size (Theorem 1).

        drift = (κ/T) Σ_s (b̄ − b_ref) Σ_k ⟨v_k, Δv_k⟩
        gap   = (η_z/T) Σ_s (pull − b̄ Σ_k ⟨v_k, Δv_k⟩/η_w)
        step  = (κ/2T) Σ_s [Σ_k Δv_k² − b_ref Σ_k ‖Δv_k‖²]

    `predict(...) − drift − gap − step` is Σ_m z_m to rounding, because Δv_k = η_w E[g_k h'_k b] in one step. The
    `b_bar` and `pull` of a step must come from its minibatch; E is over all samples of it, whatever their query.

    Args:
        v: weights, or value vectors, before every step and after the last, [step + 1, ..., token, hidden].
        b_bar: E[b] at each step, [step, ..., token].
        pull: E[b (b · Σ_k g_k h'_k v_k)] at each step, [step, ..., token]; the inner sum is −∂loss/∂b.
        rate_w: η_w, learning rate of the weights.
        rate_z: η_z, learning rate of the logits.
        temperature: softmax's T.
        b_ref: the fixed reference, [..., token].

    Returns:
        A `Ledger` of arrays [step + 1, ..., token], zero before the first step.

    >>> remainder = ledger(v=[[[0.0], [0.0]], [[1.0], [3.0]]], b_bar=[[0.5, 0.5]], pull=[[0.0, 0.0]],
    ...                    b_ref=[0.5, 0.5])
    >>> remainder.step[-1]
    array([-2.,  2.])
    """
    path = _weights("v", v)
    if path.ndim < 3 or path.shape[0] < 2:
        raise InputError("v", "of axes [step + 1, ..., token, hidden]", path.shape, "record every step and the end")
    b_bar, pull = _per_step("b_bar", b_bar, path), _per_step("pull", pull, path)
    rates = {"rate_w": rate_w, "rate_z": rate_z, "temperature": temperature}
    rates = {name: scalar(name, rate, above=0.0) for name, rate in rates.items()}
    fixed = _reference("b_ref", b_ref, path)
    with np.errstate(all="ignore"):
        v_step = np.diff(path, axis=0)
        drift, gap = ledger_rates(path[:-1], v_step, b_bar, pull, b_ref=fixed, **rates)
        squares = (v_step**2).sum(axis=-1)
        scale = np.divide(0.5 * rates["rate_z"], rates["rate_w"] * rates["temperature"])
        step = scale * (squares - fixed * squares.sum(axis=-1, keepdims=True))
        sums = [_running_sum(term) for term in (drift, gap, step)]
    in_range("v`, `b_bar`, `pull`, `rate_w`, `rate_z`, `temperature", *sums)
    return Ledger(*sums)


def finite_steps(attention: str, v: ArrayLike, z: ArrayLike, *, kappa: float = 1.0) -> np.ndarray:
    """Return what SGD's finite steps add to `predict` for linear and exp attention; for softmax see `Ledger.step`.

    In every step Σ_m z_m Δz_m = κ Σ_k v_k Δv_k (linear) or Σ_m Δz_m = κ Σ_k v_k Δv_k (exp) holds exactly, so that

        linear: predict(...) − Σ_m z_m² = Σ_steps (κ Σ_k Δv_k² − Σ_m Δz_m²)
        exp:    predict(...) − Σ_m z_m  = (κ/2) Σ_steps Σ_k Δv_k²

    Args:
        attention: linear or exp.
        v: weights, or value vectors, before every step and after the last, [step + 1, ..., token, hidden].
        z: logits likewise, [step + 1, ..., query, token]; or, for linear attention, key vectors, [..., head, token].
        kappa: η_z/η_w.

    Returns:
        The running sums, [step + 1, ..., token], zero before the first step.

    >>> finite_steps("exp", v=[[[0.0]], [[1.0]], [[3.0]]], z=[[[0.0]], [[0.0]], [[1.0]]])[:, 0]
    array([0. , 0.5, 2.5])
    """
    law = choice("attention", attention, {name: law for name, law in ATTENTIONS.items() if not law.normalised})
    path, logits = _weights("v", v), _logits("z", z)
    _same_tokens("z", logits, path)
    if path.shape[0] != logits.shape[0]:
        raise InputError("z", f"of {path.shape[0]} steps", logits.shape[0], "record both at every step and at the end")
    ratio = scalar("kappa", kappa, low=0.0)
    broadcast(v=path[..., 0], z=logits[..., 0, :])
    with np.errstate(all="ignore"):
        increments = 0.5 * law.power * ratio * (np.diff(path, axis=0) ** 2).sum(axis=-1)
        if law.power == 2:
            increments = increments - (np.diff(logits, axis=0) ** 2).sum(axis=-2)
        sums = _running_sum(increments)
    in_range("v`, `z`, `kappa", sums)
    return sums


def ledger_rates(
    v: Weights,
    v_dot: Weights,
    b_bar: Tokens,
    pull: Tokens,
    *,
    rate_w: float,
    rate_z: float,
    temperature: float,
    b_ref: Reference,
) -> tuple[Tokens, Tokens]:
    """Return d(drift)/dt and d(gap)/dt of the softmax ledger (Theorem 1).

        drift' = (κ/2T)(b̄ − b_ref) dS/dt,  S = Σ_k ‖v_k‖²,  dS/dt = 2 Σ_k ⟨v_k, v̇_k⟩
        gap'   = (η_z/T)(pull − b̄ Σ_k ⟨v_k, v̇_k⟩/η_w)

    The flow integrates them. SGD sums them, with Δv for v̇. The arguments are those of `ledger`, unchecked.

    >>> v, b = np.ones((1, 1)), np.ones(1)
    >>> ledger_rates(v, v, b, b, rate_w=2.0, rate_z=1.0, temperature=1.0, b_ref=0 * b)
    (array([0.5]), array([0.5]))
    """
    radial = (v * v_dot).sum(axis=(-2, -1))[..., None]
    drift = np.divide(rate_z, rate_w * temperature) * (b_bar - b_ref) * radial
    gap = rate_z / temperature * (pull - b_bar * radial / rate_w)
    return drift, gap


def reference(x: ArrayLike, weight: ArrayLike | None = None) -> np.ndarray:
    """Return b_ref, the reference of the softmax prediction: the mean of uniform attention.

        b_ref = E[x / Σ_l x_l]

    That is E[x] where x are frequencies. Counts give the same: softmax attention does not see the size of a row either.

    Args:
        x: token frequencies or counts, [sample, token]; samples without tokens are left out.
        weight: probability of each sample; equal ones by default.

    >>> reference([[1.0, 3.0], [2.0, 0.0]])
    array([0.625, 0.375])
    """
    frequency = _frequencies("x", x)
    share = np.full(len(frequency), 1 / len(frequency)) if weight is None else probabilities("weight", weight, ndim=1)
    if share.shape != frequency.shape[:1]:
        raise InputError("weight", f"one for each of {len(frequency)} samples", share.shape, "match `x`")
    mean = share @ frequency
    if not mean.sum() > 0:
        raise InputError("x", "positive somewhere", "zeros only", "give the tokens' frequencies")
    return mean / mean.sum()


def folded_gain(v: ArrayLike, v0: ArrayLike, z0: ArrayLike, *, kappa: float = 1.0) -> np.ndarray:
    """Return the factor by which attention, folded into the MLP, multiplies each token (exp attention, one query).

        exp(z) = exp(z0 + (κ/2)(Σ_k v_k² − Σ_k v0_k²)),    so that    v̇ = η_w E[g h' x] ∘ exp(z)

    Args:
        v: weights now, [..., token, hidden].
        v0: weights at the start.
        z0: logits of the one query at the start, [..., 1, token].
        kappa: η_z/η_w.

    Returns:
        An array [..., token].

    >>> folded_gain(v=[[2.0], [0.0]], v0=[[0.0], [0.0]], z0=[[0.0, 0.0]])
    array([7.3890561, 1.       ])
    """
    queries = _logits("z0", z0).shape[-2]
    if queries != 1:
        remedy = "only the sum over queries is fixed: integrate the block's flow instead"
        raise InputError("z0", "the logits of one query, [..., 1, token]", f"{queries} queries", remedy)
    with np.errstate(over="ignore", under="ignore"):
        gain = np.exp(predict("exp", v, v0, z0, kappa=kappa))
    in_range("v`, `v0`, `z0`, `kappa", gain)
    return gain


def correlation(z: ArrayLike, z_hat: ArrayLike) -> np.ndarray:
    """Return the zero-mean, normalised correlation of z and ẑ over tokens, which ignores offset and scale.

        ⟨z − mean z, ẑ − mean ẑ⟩ / (‖z − mean z‖ ‖ẑ − mean ẑ‖)

    It can be near 1 where the prediction is many times too large: report `relative_error` with it.

    Args:
        z: measured, [..., token].
        z_hat: predicted, [..., token].

    Returns:
        An array of the leading axes; NaN where either side is constant, so that the correlation is undefined.

    >>> correlation([1.0, 2.0], [10.0, 20.0]).round(12)
    np.float64(1.0)
    """
    measured, predicted = aligned(z=z, z_hat=z_hat)
    (measured,), (predicted,) = _rescaled(measured), _rescaled(predicted)
    cosine = (_unit(measured) * _unit(predicted)).sum(axis=-1)
    return np.asarray(np.clip(cosine, -1.0, 1.0))


def relative_error(z: ArrayLike, z_hat: ArrayLike, z0: ArrayLike) -> np.ndarray:
    """Return the error of the prediction relative to the true change, over tokens.

        ‖z − ẑ‖ / ‖z − z(0)‖

    Predicting no change has error 1.

    Args:
        z: measured, [..., token].
        z_hat: predicted, [..., token].
        z0: measured at the start, [..., token].

    Returns:
        An array of the leading axes; where z has not moved, 0 for a perfect prediction and infinity otherwise.

    >>> relative_error([1.0, 2.0], [1.0, 3.0], [0.0, 2.0])
    array(1.)
    """
    measured, predicted, start = _rescaled(*aligned(z=z, z_hat=z_hat, z0=z0))
    error, change = np.linalg.norm(measured - predicted, axis=-1), np.linalg.norm(measured - start, axis=-1)
    return np.divide(error, change, out=np.where(error > 0, np.inf, 0.0), where=change > 0)


def _rescaled(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays with each row divided by a power of two, which is exact, where squares would overflow or vanish."""
    largest = np.max([np.abs(array).max(axis=-1, keepdims=True) for array in arrays], axis=0)
    usual = (largest == 0) | ((largest > 1e-100) & (largest < 1e100))
    if usual.all():
        return list(arrays)
    exponent = np.where(usual, 0, np.frexp(largest)[1])
    return [np.ldexp(array, -exponent) for array in arrays]


def _weights(name: str, value: ArrayLike) -> np.ndarray:
    array = real(name, value)
    if array.ndim < 2:
        raise InputError(name, "of axes [..., token, hidden]", f"shape {array.shape}", "add the hidden axis")
    return array


def _logits(name: str, value: ArrayLike) -> np.ndarray:
    array = real(name, value)
    if array.ndim < 2:
        raise InputError(name, "of axes [..., query, token]", f"shape {array.shape}", "add the query axis, `z[None]`")
    return array


def _same_tokens(name: str, logits: np.ndarray, weights: np.ndarray) -> None:
    if logits.shape[-1] != weights.shape[-2]:
        expected = f"of {weights.shape[-2]} tokens, [..., query, token]"
        raise InputError(name, expected, f"shape {logits.shape}", "match the token axis of `v`, [..., token, hidden]")


def _per_step(name: str, value: ArrayLike, path: np.ndarray) -> np.ndarray:
    array, expected = real(name, value), (path.shape[0] - 1, *path.shape[1:-1])
    if array.shape != expected:
        raise InputError(name, f"of shape {expected}", array.shape, "give one record for each step of `v`")
    return array


def _reference(name: str, value: ArrayLike | None, weights: np.ndarray) -> np.ndarray:
    if value is None:
        raise InputError(name, "given for softmax attention", None, "pass `reference(x)`")
    array = probabilities(name, value)
    if array.shape[-1:] != weights.shape[-2:-1]:
        raise InputError(name, f"of {weights.shape[-2]} tokens", f"shape {array.shape}", "match the token axis of `v`")
    broadcast(**{name: array, "v": weights[..., 0]})
    return array


def _frequencies(name: str, value: ArrayLike) -> np.ndarray:
    """Return rows divided by their sums; rows of zeros, and rows that sum to 1 up to rounding, stay to the bit."""
    rows = real(name, value, ndim=2, low=0.0)
    with np.errstate(over="ignore"):
        sums = rows.sum(axis=1, keepdims=True)
    in_range(name, sums)
    return np.divide(rows, sums, out=rows.copy(), where=(sums > 0) & (abs(sums - 1) > SUM_ERROR))


def _unit(z: Tokens) -> Tokens:
    """Return z − mean z, scaled to norm 1 over tokens; NaN where z is constant up to rounding."""
    centred = z - z.mean(axis=-1, keepdims=True)
    size = np.linalg.norm(centred, axis=-1, keepdims=True)
    varies = size > 4 * np.finfo(np.float64).eps * np.linalg.norm(z, axis=-1, keepdims=True)
    return np.divide(centred, size, out=np.full(z.shape, np.nan), where=varies)


def _running_sum(increments: Increments) -> Sums:
    return np.concatenate([np.zeros_like(increments[:1]), np.cumsum(increments, axis=0)])
