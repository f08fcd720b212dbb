"""In-context linear regression with one layer of linear attention: the exact loss, its optimum, and its gradient flows.

A prompt has N examples x_i ~ N(0, Λ) with labels y_i = w·x_i + σ ε_i, and a query x_q; the task w ~ N(0, I) is new in
every prompt. Linear attention predicts w·x_q from the mean h of the examples:

    h = (1/N) Σ_i y_i x_i,    ŷ = hᵀ G x_q,    L(G) = ½ E(ŷ − w·x_q)² = ½ [tr(Gᵀ M G Λ) − 2 tr(Λ G Λ) + tr Λ]
    M = E[h hᵀ] = (1 + 1/N) Λ² + ((tr Λ + σ²)/N) Λ

Noise of variance σ² acts as σ² more of tr Λ. The optimum is G = Γ = M⁻¹ Λ, one step of preconditioned gradient descent
on the prompt's least squares (Zhang, Frei & Bartlett 2023, arXiv 2306.09927; Ahn et al. 2023, arXiv 2306.00297). How
gradient flow gets there depends on the parameters of G (Zhang, Singh, Latham & Saxe 2025, arXiv 2501.16265):

    merged keys and queries:    G = Σ_h u_h U_h            the loss falls once, abruptly
    separate ones:              G = Σ_h u_h K_hᵀ Q_h        with heads of rank one, from plateau to plateau

Λ is diagonal here, without loss of generality: its eigenvalues are `spectrum`. `docs/related/icl-regression.md` has the
derivations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from joma.arguments import InputError, broadcast, check_size, in_range, real, scalar, whole
from joma.theory.integration import Solver, integrate

SMALLEST, LARGEST = 1e-12, 1e12  # eigenvalues, so that no product of a few of them leaves the range of a double
DEFAULT_SOLVER = Solver("LSODA")  # late in the flow, directions that are learnt make it stiff

Spectrum = Float[np.ndarray, " direction"]
Matrix = Float[np.ndarray, "direction direction"]


class PlainStep(NamedTuple):
    """The best step of plain gradient descent, G = ηI: its learning rate η and its loss."""

    rate: float
    loss: float


class Path(NamedTuple):
    """A path of gradient flow.

    Attributes:
        times: [time].
        matrix: G, [time, direction, direction].
        loss: [time].
        conserved: what the flow does not change, [time, head] (merged) or [time, head, 2] (separate).
        parameters: by name, each [time, ...].
    """

    times: np.ndarray
    matrix: np.ndarray
    loss: np.ndarray
    conserved: np.ndarray
    parameters: dict[str, np.ndarray]


def second_moment(spectrum: ArrayLike, length: float, noise: float = 0.0) -> Spectrum:
    """Return the eigenvalues of M = E[h hᵀ], the second moment of a prompt's mean h.

        m_i = (1 + 1/N) λ_i² + ((Σ_j λ_j + σ²)/N) λ_i

    Args:
        spectrum: eigenvalues λ of the covariance of x, positive, in any order.
        length: number N of examples in a prompt, at least 1; infinity is allowed.
        noise: standard deviation σ of the labels' noise.

    >>> second_moment([1.0, 0.5], 3)
    array([1.83333333, 0.58333333])
    >>> second_moment([1.0, 0.5], np.inf)
    array([1.  , 0.25])
    """
    return _spectrum(spectrum) ** 2 + _sampling_spread(spectrum, length, noise)


def population_loss(
    matrix: ArrayLike, spectrum: ArrayLike, length: float, noise: float = 0.0
) -> Float[np.ndarray, "*batch"]:
    """Return the exact loss of ŷ = hᵀ G x_q, with a query whose label has no noise.

        L(G) = ½ [tr(Gᵀ M G Λ) − 2 tr(Λ G Λ) + tr Λ]

    A noisy query label adds σ²/2, whatever G is.

    Args:
        matrix: G, [..., direction, direction], in the basis of Λ's eigenvectors.
        spectrum, length, noise: as in `second_moment`.

    >>> population_loss(np.eye(2), [1.0, 0.5], 3)
    array(0.5625)
    """
    eigenvalues = _spectrum(spectrum)
    g = real("matrix", matrix)
    size = len(eigenvalues)
    if g.shape[-2:] != (size, size):
        raise InputError("matrix", f"[..., {size}, {size}], like `spectrum`", f"shape {g.shape}", "match their sizes")
    with np.errstate(over="ignore", invalid="ignore"):
        loss = _losses(g, eigenvalues, _sampling_spread(spectrum, length, noise))
    in_range("matrix`, `spectrum", loss)
    return loss


def preconditioner(spectrum: ArrayLike, length: float, noise: float = 0.0) -> Spectrum:
    """Return the eigenvalues γ of Γ = M⁻¹ Λ, the preconditioner of the best step of gradient descent.

        γ_i = 1 / ((1 + 1/N) λ_i + (Σ_j λ_j + σ²)/N)

    Args:
        spectrum, length, noise: as in `second_moment`.

    >>> preconditioner([1.0, 1.0], 3)  # N/(N + d + 1)
    array([0.5, 0.5])
    """
    return _spectrum(spectrum) / second_moment(spectrum, length, noise)


def least_loss(spectrum: ArrayLike, length: float, noise: float = 0.0) -> float:
    """Return the loss at the optimum Γ.

        L* = ½ Σ_i (λ_i − λ_i² γ_i)

    Args:
        spectrum, length, noise: as in `second_moment`.

    >>> round(least_loss([1.6, 1.0, 0.6, 0.3], 12), 6)
    0.490141
    """
    return float(plateaus(spectrum, length, noise)[-1])


def plain_step(spectrum: ArrayLike, length: float, noise: float = 0.0) -> PlainStep:
    """Return the best step of plain gradient descent from w = 0, G = ηI, and its loss.

        η = tr Λ² / tr(M Λ),    L = ½ [tr Λ − (tr Λ²)² / tr(M Λ)]

    If all eigenvalues are equal this is the optimum, and for Λ = I without noise η = N/(N + d + 1).

    Args:
        spectrum, length, noise: as in `second_moment`.

    >>> rate, loss = plain_step([1.6, 1.0, 0.6, 0.3], 12)
    >>> round(rate, 4), round(loss, 4)
    (0.5767, 0.5937)
    """
    eigenvalues, moment = _spectrum(spectrum), second_moment(spectrum, length, noise)
    rate = float((eigenvalues**2).sum() / (moment * eigenvalues).sum())
    return PlainStep(rate, float(shifted_risk(np.full(len(eigenvalues), rate), spectrum, length, noise)))


def plateaus(spectrum: ArrayLike, length: float, noise: float = 0.0) -> Float[np.ndarray, " plateau"]:
    """Return the losses L_0 … L_d at which the m directions of largest variance are learnt, and no other.

        L_m = ½ [Σ_i λ_i − Σ_{i ≤ m} λ_i² γ_i],    λ_1 ≥ λ_2 ≥ …

    They are the losses at fixed points of the separate flow: every set of learnt directions is one. If the ranks of all
    heads add up to R < d, training ends at L_R.

    Args:
        spectrum, length, noise: as in `second_moment`.

    >>> plateaus([0.3, 1.6, 0.6, 1.0], 12).round(6)
    array([1.75    , 1.117901, 0.754265, 0.563114, 0.490141])
    """
    eigenvalues = np.sort(_spectrum(spectrum))[::-1]
    # λ − λ²γ = (m − λ²) γ of a direction that is learnt, without cancellation where the optimum is nearly exact
    learnt = _sampling_spread(eigenvalues, length, noise) * preconditioner(eigenvalues, length, noise)
    unlearnt = np.append(np.cumsum(eigenvalues[::-1])[::-1], 0.0)
    return (np.append(0.0, np.cumsum(learnt)) + unlearnt) / 2


def growth_rate(spectrum: ArrayLike) -> float:
    """Return the rate at which a small merged start grows, along Λ².

        U̇ = u Λ²,  u̇ = ⟨Λ², U⟩:    rate ‖Λ²‖_F

    A start that is smaller by a factor of e falls 1/‖Λ²‖_F later.

    Args:
        spectrum: as in `second_moment`.

    >>> round(growth_rate([3.0, 2.0]), 4)  # √(3⁴ + 2⁴)
    9.8489
    """
    return float(np.sqrt((_spectrum(spectrum) ** 4).sum()))


def logistic(
    times: ArrayLike,
    start: ArrayLike,
    directions: int,
    length: float,
    *,
    variance: float = 1.0,
    noise: float = 0.0,
) -> np.ndarray:
    """Return q = c² along the merged flow with Λ = λI from u = c, U = (c/√d) I, so that G = (q/√d) I.

        q̇ = 2√d λ² q (1 − q/q_∞),    q = q_∞ / (1 + (q_∞/q_0 − 1) exp(−2√d λ² t)),    q_∞ = √d γ

    Args:
        times: at least 0.
        start: q_0, positive.
        directions: d, the dimension of x.
        length, noise: as in `second_moment`.
        variance: λ, the variance of x in every direction.

    Returns:
        q, of shape `times.shape + start.shape`.

    >>> logistic([0.0, 2.0, 20.0], 1e-3, directions=4, length=12).round(4).tolist()
    [0.001, 0.9583, 1.4118]
    """
    times, start = real("times", times, low=0.0), real("start", start, low=SMALLEST**2, high=LARGEST)
    dimension = whole("directions", directions, high=10**6)
    variance = scalar("variance", variance, low=SMALLEST, high=LARGEST)
    limit = np.sqrt(dimension) * preconditioner(np.full(dimension, variance), length, noise)[0]
    check_size("times`, `start", (*times.shape, *start.shape))
    times = times.reshape(times.shape + (1,) * start.ndim)
    with np.errstate(over="ignore", under="ignore"):
        return limit / (1 + (limit / start - 1) * np.exp(-2 * np.sqrt(dimension) * variance**2 * times))


def aligned_time(
    share: ArrayLike, spectrum: ArrayLike, length: float, start: float, noise: float = 0.0
) -> Float[np.ndarray, "*share direction"]:
    """Return when a head of the separate flow that is aligned with direction i has learnt a share of γ_i.

    From u = k = q = v along e_i, G = v³ e_i e_iᵀ, and with s = v/γ_i^{1/3}

        v̇ = λ_i² v² (1 − v³/γ_i),    t = λ_i⁻² γ_i^{−1/3} [F(s) − F(s_0)]
        F(s) = −1/s − ⅓ ln(1 − s) + ⅙ ln(1 + s + s²) − arctan((2s + 1)/√3)/√3

    For a small start this is about 1/(λ_i² v_0): directions of large variance are learnt first.

    Args:
        share: G_ii/γ_i, in (0, 1); ½ gives the half times.
        spectrum, length, noise: as in `second_moment`.
        start: v_0, positive; v_0³ is below every share of γ.

    Returns:
        The times, of shape `share.shape + (direction,)`.

    >>> aligned_time(0.5, [1.6, 1.0, 0.6, 0.3], 12, start=0.05).round(6)
    array([  7.391318,  19.052811,  53.237325, 214.172449])
    """
    eigenvalues, gamma = _spectrum(spectrum), preconditioner(spectrum, length, noise)
    shares, first = real("share", share), scalar("start", start, low=SMALLEST, high=LARGEST)
    if ((shares <= 0) | (shares >= 1)).any():
        raise InputError("share", "between 0 and 1, neither included", f"{shares.flat[0]:.6g}", "give such shares")
    check_size("share", (*shares.shape, *eigenvalues.shape))
    roots = np.cbrt(gamma)
    reached, begun = np.cbrt(shares)[..., None], first / roots
    unlearnt = (1 - shares[..., None]) / (1 + reached + reached**2)  # 1 − s, also where s rounds to 1
    gain = np.where(begun < 0.5, reached - begun, (1 - begun) - unlearnt)
    if (gain <= 0).any():
        expected = f"below {float((reached * roots).min()):.6g}, where the share is already learnt"
        raise InputError("start", expected, f"{first:.6g}", "start smaller or ask for a larger share")
    return _growth_time(begun, reached, gain, unlearnt) / (eigenvalues**2 * roots)


def _growth_time(begun: np.ndarray, reached: np.ndarray, gain: np.ndarray, unlearnt: np.ndarray) -> np.ndarray:
    """Return ∫ ds / (s² (1 − s³)) from `begun` to `reached` = `begun` + `gain` = 1 − `unlearnt`, term by term.

    Each term is the difference of its values at both ends, without cancellation.
    """
    logarithms = np.log1p(gain / unlearnt) / 3 + np.log1p(gain * (1 + reached + begun) / (1 + begun + begun**2)) / 6
    angle = np.arctan(2 * np.sqrt(3) * gain / (3 + (2 * reached + 1) * (2 * begun + 1)))
    return gain / (reached * begun) + logarithms - angle / np.sqrt(3)


def shifted_risk(
    gain: ArrayLike, spectrum: ArrayLike, length: float, noise: float = 0.0
) -> Float[np.ndarray, "*batch"]:
    """Return the loss of a diagonal G on prompts of another length, covariance or noise than it was trained on.

        ½ Σ_i [m_i g_i² λ_i − 2 g_i λ_i² + λ_i],    m = second_moment(spectrum, length, noise)

    With endless prompts, `length=np.inf`, this is ½ Σ_i λ_i (1 − g_i λ_i)²: what was trained on short prompts stays
    wrong.

    Args:
        gain: g, the diagonal of G, [..., direction].
        spectrum, length, noise: of the prompts on which it is tested.

    >>> gain = preconditioner([1.6, 1.0, 0.6, 0.3], 12)
    >>> [float(shifted_risk(gain, [1.6, 1.0, 0.6, 0.3], length).round(5)) for length in (12, 24, np.inf)]
    [0.49014, 0.32081, 0.15148]
    """
    eigenvalues, excess = _spectrum(spectrum), _sampling_spread(spectrum, length, noise)
    g = np.atleast_1d(real("gain", gain, low=-LARGEST, high=LARGEST))
    broadcast(gain=g, spectrum=eigenvalues)
    # The two squares cannot cancel each other, so that small risks keep their digits.
    return np.asarray((eigenvalues * (1 - g * eigenvalues) ** 2 + excess * g**2 * eigenvalues).sum(axis=-1) / 2)


def merged_flow(
    u: ArrayLike,
    U: ArrayLike,
    spectrum: ArrayLike,
    length: float,
    *,
    times: ArrayLike,
    noise: float = 0.0,
    solver: Solver = DEFAULT_SOLVER,
) -> Path:
    """Solve gradient flow on the exact loss with merged keys and queries, G = Σ_h u_h U_h.

        U̇_h = u_h D,    u̇_h = ⟨D, U_h⟩,    D = −∂L/∂G = (Λ − M G) Λ

    Each u_h² − ‖U_h‖² is conserved.

    Args:
        u: values at the start, [head].
        U: products of keys and queries at the start, [head, direction, direction].
        spectrum, length, noise: as in `second_moment`.
        times: at which the path is returned, not negative and increasing.
        solver: method and tolerances.

    >>> path = merged_flow([0.1], [0.05 * np.eye(4)], np.ones(4), 12, times=[0.0, 20.0])  # q_0 = 0.01
    >>> path.matrix[-1].diagonal().round(4)  # 12/(12 + 4 + 1)
    array([0.7059, 0.7059, 0.7059, 0.7059])
    """
    eigenvalues, moment = _spectrum(spectrum), second_moment(spectrum, length, noise)
    size = len(eigenvalues)
    values, products = _start("u", u, ndim=1), _start("U", U, ndim=3)
    heads = len(values)
    _check_shape("U", products, (heads, size, size))

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        value, product = state[:heads], state[heads:].reshape(heads, size, size)
        descent = _descent(np.tensordot(value, product, axes=1), eigenvalues, moment)
        return np.concatenate([product.reshape(heads, -1) @ descent.ravel(), np.outer(value, descent).ravel()])

    solution = integrate(slope, np.concatenate([values, products.ravel()]), times, solver)
    value = solution.states[:, :heads]
    product = solution.states[:, heads:].reshape(-1, heads, size, size)
    matrix = np.einsum("th,thij->tij", value, product)
    conserved = value**2 - (product**2).sum(axis=(-2, -1))
    loss = _losses(matrix, eigenvalues, _sampling_spread(spectrum, length, noise))
    return Path(solution.times, matrix, loss, conserved, {"u": value, "U": product})


def separate_flow(
    u: ArrayLike,
    K: ArrayLike,
    Q: ArrayLike,
    spectrum: ArrayLike,
    length: float,
    *,
    times: ArrayLike,
    noise: float = 0.0,
    solver: Solver = DEFAULT_SOLVER,
) -> Path:
    """Solve gradient flow on the exact loss with separate keys and queries, G = Σ_h u_h K_hᵀ Q_h.

        u̇_h = ⟨D, K_hᵀ Q_h⟩,    K̇_h = u_h Q_h Dᵀ,    Q̇_h = u_h K_h D,    D = −∂L/∂G = (Λ − M G) Λ

    Each u_h² − ‖K_h‖² and ‖K_h‖² − ‖Q_h‖² is conserved.

    Args:
        u: values at the start, [head].
        K, Q: keys and queries at the start, [head, rank, direction].
        spectrum, length, noise: as in `second_moment`.
        times: at which the path is returned, not negative and increasing.
        solver: method and tolerances.

    >>> first = [[[0.5, 0.0]]]  # a head of rank one along the first direction
    >>> path = separate_flow([0.5], first, first, [1.0, 0.5], 3, times=[0.0, 100.0])
    >>> path.matrix[-1].round(4)
    array([[0.5455, 0.    ],
           [0.    , 0.    ]])
    >>> path.loss[-1].round(4) == plateaus([1.0, 0.5], 3)[1].round(4)
    np.True_
    """
    eigenvalues, moment = _spectrum(spectrum), second_moment(spectrum, length, noise)
    values, keys, queries = _start("u", u, ndim=1), _start("K", K, ndim=3), _start("Q", Q, ndim=3)
    heads, shape = len(values), (len(values), keys.shape[1], len(eigenvalues))
    _check_shape("K", keys, shape)
    _check_shape("Q", queries, shape)
    ends = heads, heads + keys.size

    def parts(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        value, key, query = np.split(states, ends, axis=-1)
        return value, key.reshape(*states.shape[:-1], *shape), query.reshape(*states.shape[:-1], *shape)

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        value, key, query = parts(state)
        weighted = value[:, None, None] * key
        matrix = weighted.reshape(-1, shape[2]).T @ query.reshape(-1, shape[2])
        descent = _descent(matrix, eigenvalues, moment)
        forward = key @ descent
        change = value[:, None, None] * (query @ descent.T), value[:, None, None] * forward
        return np.concatenate([(forward * query).sum(axis=(1, 2)), *(part.ravel() for part in change)])

    start = np.concatenate([values, keys.ravel(), queries.ravel()])
    solution = integrate(slope, start, times, solver)
    value, key, query = parts(solution.states)
    matrix = np.einsum("th,thri,thrj->tij", value, key, query)
    squares = [value**2, *((part**2).sum(axis=(-2, -1)) for part in (key, query))]
    conserved = np.stack([squares[0] - squares[1], squares[1] - squares[2]], axis=-1)
    loss = _losses(matrix, eigenvalues, _sampling_spread(spectrum, length, noise))
    return Path(solution.times, matrix, loss, conserved, {"u": value, "K": key, "Q": query})


class RankOneSaddle(NamedTuple):
    """The point of the whole layer at which only the direction of largest variance is learnt, by the other blocks.

    Attributes:
        loss: L_1 of `plateaus`.
        escape_rate: the largest growth rate of a small deviation; not positive if the point is a local minimum.
        zero_rate: the growth rate, at zero, of the rank-one product that leads there; that of the merged product is
            `growth_rate`.
    """

    loss: float
    escape_rate: float
    zero_rate: float


def rank_one_saddle(spectrum: ArrayLike, length: float) -> RankOneSaddle:
    """Return how fast training of the whole matrices leaves the saddle at which one direction is learnt.

    The whole layer is ŷ = (1/N) Σ_i (p_x·x_i + p_y y_i)(x_iᵀ Q x_q + y_i q·x_q). The part that is odd in w has
    G = p_y Q + p_x qᵀ: the blocks p_x and q, which the theory sets to zero, add a product of rank one. At
    p_x = q = √γ_1 e_1, p_y = Q = 0 the loss is L_1. To second order, deviations of p_y, Q_11 and Q_jj, j ≥ 2, add

        ½ γ_1 λ_1 [E s² p_y² + 2 E(s Ŝ_11) p_y Q_11 + E Ŝ_11² Q_11² + Σ_j (λ_j²/N) Q_jj²] − p_y Σ_j λ_j² Q_jj

    with s = (1/N) Σ_i y_i²; all other deviations cost loss or nothing. The rate is the largest eigenvalue of minus this
    form's matrix.

    Args:
        spectrum: as in `second_moment`, of at least two directions.
        length: number N of examples in a prompt.

    >>> saddle = rank_one_saddle([1.6, 1.0, 0.6, 0.3], 12)
    >>> round(saddle.loss, 4), round(saddle.escape_rate, 4), saddle.zero_rate > 0
    (1.1179, 0.0628, True)
    """
    eigenvalues = np.sort(_spectrum(spectrum))[::-1]
    if len(eigenvalues) < 2:
        raise InputError("spectrum", "of at least two directions", len(eigenvalues), "give another eigenvalue")
    examples = scalar("length", length, low=1.0)
    first, rest, trace = eigenvalues[0], eigenvalues[1:], eigenvalues.sum()
    scale = preconditioner(eigenvalues, examples)[0] * first
    hessian = np.zeros((len(rest) + 2, len(rest) + 2))  # of p_y, Q_11, Q_22, …
    hessian[0, 0] = scale * (1 + 2 / examples) * (trace**2 + 2 * (eigenvalues**2).sum())
    hessian[1, 1] = scale * first**2 * (1 + 2 / examples)
    hessian[0, 1] = hessian[1, 0] = scale * first * (trace + 2 * first / examples)
    hessian[2:, 2:] = np.diag(scale * rest**2 / examples)
    hessian[0, 2:] = hessian[2:, 0] = -(rest**2)
    escape = -float(np.linalg.eigvalsh(hessian)[0])
    return RankOneSaddle(float(plateaus(eigenvalues, examples)[1]), escape, float(first**2))


def _spectrum(spectrum: ArrayLike) -> Spectrum:
    return real("spectrum", spectrum, ndim=1, low=SMALLEST, high=LARGEST)


def _start(name: str, value: ArrayLike, *, ndim: int) -> np.ndarray:
    return real(name, value, ndim=ndim, low=-LARGEST, high=LARGEST)


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InputError(name, f"of shape {shape}, like `u` and `spectrum`", array.shape, "match their sizes")


def _sampling_spread(spectrum: ArrayLike, length: float, noise: float) -> Spectrum:
    """Return m − λ², the part of `second_moment` that vanishes in endless prompts.

    m_i − λ_i² = (λ_i + Σ_j λ_j + σ²) λ_i / N
    """
    eigenvalues = _spectrum(spectrum)
    examples = float(real("length", length, ndim=0, low=1.0, finite=False))
    variance = scalar("noise", noise, low=0.0, high=LARGEST) ** 2
    return (eigenvalues + eigenvalues.sum() + variance) / examples * eigenvalues


def _descent(matrix: Matrix, eigenvalues: Spectrum, moment: Spectrum) -> Matrix:
    """Return −∂L/∂G = (Λ − M G) Λ."""
    descent = -moment[:, None] * matrix
    descent.flat[:: len(eigenvalues) + 1] += eigenvalues
    return descent * eigenvalues


def _losses(matrix: Float[np.ndarray, "*batch d d"], eigenvalues: Spectrum, spread: Spectrum) -> np.ndarray:
    """Return ½ Σ_ij λ_j [(λ_i G_ij − δ_ij)² + (m_i − λ_i²) G_ij²], a sum of squares, from `_sampling_spread`."""
    error = eigenvalues[:, None] * matrix - np.eye(len(eigenvalues))
    squares = error**2 + spread[:, None] * matrix**2
    return np.asarray(np.einsum("...ij,j->...", squares, eigenvalues) / 2)
