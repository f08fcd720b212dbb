"""Values and one softmax vector, both trained: the flow of L(V σ(a)), which ends with its weight on one token.

    y = V σ(a),    g = −∇L(y),        V̇_j = σ_j g,    ȧ_j = σ_j (V_j − y) · g

V_j is the value vector of token j and a its attention logits (the model of Varre, Rofin & Flammarion 2026, arXiv
2603.06248; what follows is derived in `docs/related/polarise.md`). It is the block of `block_flow` with softmax
attention, linear units and one sample.

If L depends on y through the margin m = c · y alone, g is along c. In the clock dτ = (−dL/dm) dt *all* such losses then
follow one orbit, that of L = −m, in the scores s_j = c · V_j and the logits:

    ds_j/dτ = ‖c‖² σ_j,    da_j/dτ = σ_j (s_j − m),    dm/dτ = Σ_j σ_j² (‖c‖² + (s_j − m)²) > 0

The margin only grows, so that attention is a function of the margin: it is the same for all of these losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import entr, expit, log_softmax, softmax

from joma.arguments import InputError, broadcast, in_range, instance, positive, real, scalar, whole
from joma.theory.block_parts import pack, unpack
from joma.theory.integration import DEFAULT_SOLVER, Solver, integrate

Token = Float[np.ndarray, " token"]
MAX_NORM = 1e100  # whose square is a number
Tokens = Float[np.ndarray, "*time token"]


@dataclass(frozen=True)
class Orbit:
    """The common orbit of all losses of the margin, at the requested points.

    Attributes:
        clock: τ.
        scores: s_j = c · V_j.
        logits: a_j.
        log_time: ln(1 + t), where t is the time at which the logistic loss ln(1 + e^−m) is here.
    """

    clock: Float[np.ndarray, " time"]
    scores: Float[np.ndarray, "time token"]
    logits: Float[np.ndarray, "time token"]
    log_time: Float[np.ndarray, " time"]

    @property
    def attention(self) -> np.ndarray:
        """Return σ(a), [time, token]."""
        return softmax(self.logits, axis=-1)

    @property
    def margin(self) -> np.ndarray:
        """Return m = Σ_j σ_j s_j, [time]."""
        return (self.attention * self.scores).sum(axis=-1)

    @property
    def entropy(self) -> np.ndarray:
        """Return the entropy of attention in nats, [time]."""
        return entr(self.attention).sum(axis=-1)

    @property
    def error(self) -> np.ndarray:
        """Return ε = 1 − max σ, [time], to full relative accuracy."""
        return np.sort(self.attention, axis=-1)[..., :-1].sum(axis=-1)


def orbit(
    scores: ArrayLike, logits: ArrayLike, clock: ArrayLike, *, norm: float = 1.0, solver: Solver = DEFAULT_SOLVER
) -> Orbit:
    """Return the common orbit of all losses of the margin c · y, at times τ of their common clock.

        ds_j/dτ = ‖c‖² σ_j,    da_j/dτ = σ_j (s_j − m),    m = Σ_j σ_j s_j

    For the constant gradient, L = −c · y, the clock is time itself. Value vectors follow from the scores:
    V_j(τ) = V_j(0) + c (s_j(τ) − s_j(0))/‖c‖².

    Args:
        scores: s(0) = c · V(0), [token].
        logits: a(0), [token].
        clock: the times τ at which the orbit is returned, as in `integrate`.
        norm: ‖c‖.
        solver: method and tolerances.

    >>> path = orbit([0.1, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 4.0, 40.0])
    >>> path.attention.round(3)
    array([[0.333, 0.333, 0.333],
           [0.375, 0.312, 0.312],
           [0.999, 0.001, 0.001]])
    """
    flow, grid = _Flow.of(scores, logits, norm, solver), _row("clock", clock)
    return flow.orbit(integrate(lambda _, state: flow.velocity(state)[0], flow.start, grid, solver).states)


def orbit_at_margins(
    scores: ArrayLike, logits: ArrayLike, margins: ArrayLike, *, norm: float = 1.0, solver: Solver = DEFAULT_SOLVER
) -> Orbit:
    """Return the common orbit of all losses of the margin at given margins, which never fall along it.

    The square loss ½(B − c · y)² stops at the margin B: its final attention is that of the orbit there. So it is, from
    small values, for ½‖y − y*‖² with c = y*, ‖c‖ = ‖y*‖ and the margin ‖y*‖².

    Args:
        scores, logits, norm, solver: as in `orbit`.
        margins: increasing, not below the margin at the start.

    >>> path = orbit_at_margins([0.1, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 10.0, 100.0])
    >>> path.entropy.round(3)
    array([1.097, 0.141, 0.002])
    """
    flow = _Flow.of(scores, logits, norm, solver)
    first, grid = flow.margin, np.atleast_1d(real("margins", margins, ndim=None))
    if grid.ndim != 1 or (grid[1:] <= grid[:-1]).any() or grid[0] < first:
        expected = f"one increasing row from {first:.6g}, the margin at the start,"
        raise InputError("margins", expected, f"from {grid.min():.6g}", "leave out smaller ones: margins only grow")

    def rhs(_: float, state: np.ndarray) -> np.ndarray:
        velocity, margin_rate = flow.velocity(state)
        return velocity / margin_rate

    return flow.orbit(integrate(rhs, flow.start, grid - first, solver).states)


class _Flow:
    """The flow of scores and logits in the clock τ, with the time of the logistic loss and the clock as states.

    Time is carried as ω = (1 + t)/(1 + e^m), which is of order 1 however large the margin is:

        dt/dτ = 1 + e^m,    dω/dτ = 1 − ω σ(m) dm/dτ
    """

    def __init__(self, scores: Token, logits: Token, square: float) -> None:
        self.square = square  # ‖c‖²
        self.shapes = [scores.shape, logits.shape, (1,), (1,)]
        self.margin = float(softmax(logits) @ scores)
        self.start = pack(scores, logits, np.array([expit(-self.margin)]), np.zeros(1))

    @classmethod
    def of(cls, scores: ArrayLike, logits: ArrayLike, norm: float, solver: Solver) -> _Flow:
        """Check the arguments of an orbit."""
        s, a = _start(scores, logits)
        _check_bound(solver, scores=s, logits=a)
        return cls(s, a, scalar("norm", norm, above=0.0, high=MAX_NORM) ** 2)

    def orbit(self, states: np.ndarray) -> Orbit:
        """Return flat states [time, state] as an orbit."""
        s, a, share, clock = unpack(states, self.shapes)
        margin = (softmax(a, axis=-1) * s).sum(axis=-1)
        with np.errstate(divide="ignore"):
            log_time = np.logaddexp(0.0, margin) + np.log(share[:, 0])
        return Orbit(clock[:, 0], s, a, np.where(clock[:, 0] > 0, np.maximum(log_time, 0.0), 0.0))

    def velocity(self, state: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the derivatives of a flat state and of the margin with respect to τ."""
        s, a, share, _clock = unpack(state, self.shapes)
        sigma = softmax(a)
        winner = a.argmax()
        relative = s - s[winner]
        mean = sigma @ relative
        centred = relative - mean  # s − m; of the winner it is Σ σ_j (s_w − s_j), without cancellation
        margin_rate = float((sigma**2 * (self.square + centred**2)).sum())
        share_rate = 1.0 - share * expit(s[winner] + mean) * margin_rate
        return pack(self.square * sigma, sigma * centred, share_rate, np.ones(1)), margin_rate


def _start(scores: ArrayLike, logits: ArrayLike) -> tuple[Token, Token]:
    """Return the checked scores and logits of at least two tokens."""
    s, a = real("scores", scores, ndim=1), real("logits", logits, ndim=1)
    if s.shape != a.shape or s.size < 2:
        got = f"{s.size} and {a.size}"
        raise InputError("scores`, `logits", "one number each for at least 2 tokens", got, "match the two")
    return s, a


def _check_bound(solver: Solver, **states: Token) -> None:
    """Check that states at time 0 have not blown up already."""
    bound = instance("solver", solver, Solver, "pass `Solver(method=...)`").bound
    for name, values in states.items():
        largest = float(np.abs(values).max())
        if largest >= bound:
            raise InputError(name, f"smaller than {bound:g}, the solver's `bound`", f"{largest:g}", "rescale them")


def _row(name: str, values: ArrayLike) -> Float[np.ndarray, " time"]:
    """Return the times at which a flow is asked for."""
    grid = np.atleast_1d(real(name, values, low=0.0))
    if grid.ndim != 1 or (grid[1:] <= grid[:-1]).any():
        raise InputError(name, "one increasing row", f"shape {grid.shape}", "sort them and drop repetitions")
    return grid


def late_error(clock: ArrayLike, tokens: int, *, norm: ArrayLike = 1.0) -> np.ndarray:
    """Return how much weight the losers have late on the orbit, ε = 1 − max σ.

        ε → 2(k − 1)/(k ‖c‖² τ²)

    Constant gradient: τ = t. Logistic loss: ‖c‖² τ ≈ ln t. For ½‖y − y*‖² from small values the orbit ends near τ = 1
    with ‖c‖ = ‖y*‖, so that ε_end ≈ 2(k − 1)/(k ‖y*‖²), which is small only if ‖y*‖² is much greater than 2.

    Args:
        clock: τ, positive.
        tokens: k, at least 2.
        norm: ‖c‖.

    Returns:
        The law, of the common shape of `clock` and `norm`. It is meant where it is much smaller than 1.

    >>> late_error([10.0, 100.0], 5)
    array([0.016  , 0.00016])
    """
    tau, length, count = positive("clock", clock), positive("norm", norm), whole("tokens", tokens, low=2)
    broadcast(clock=tau, norm=length)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        error = 2 * (count - 1) / count / (length * tau) ** 2
    in_range("clock`, `norm", error)
    return np.asarray(error)


def two_token_invariant(scores: ArrayLike, logits: ArrayLike, *, norm: float = 1.0) -> np.ndarray:
    """Return what the orbit of two tokens keeps constant.

        (s_1 − s_2)² − 4‖c‖² sinh²((a_1 − a_2)/2)

    With two tokens d = s_1 − s_2 and x = (a_1 − a_2)/2 obey ḋ = ‖c‖² tanh x and ẋ = d/(4 cosh² x), so that
    d ḋ = 4‖c‖² sinh x cosh x ẋ. Since 1/ε = 1 + e^{2|x|}, this is the law of `late_error` with all its corrections:
    the weight of the loser is a function of the difference of the scores.

    Args:
        scores, logits: of two tokens, [..., 2].
        norm: ‖c‖.

    >>> path = orbit([0.3, 0.1], [0.0, 0.2], [0.0, 5.0, 50.0])
    >>> two_token_invariant(path.scores, path.logits).round(6)
    array([-0.000134, -0.000134, -0.000134])
    """
    s, a = real("scores", scores), real("logits", logits)
    for name, values in (("scores", s), ("logits", a)):
        if values.shape[-1:] != (2,):
            raise InputError(name, "of two tokens, [..., 2]", f"shape {values.shape}", "put them on the last axis")
    broadcast(scores=s, logits=a)
    square = scalar("norm", norm, above=0.0, high=MAX_NORM) ** 2
    with np.errstate(over="ignore", invalid="ignore"):
        invariant = (s[..., 0] - s[..., 1]) ** 2 - 4 * square * np.sinh((a[..., 0] - a[..., 1]) / 2) ** 2
    in_range("scores`, `logits", invariant)
    return np.asarray(invariant)


def trained_gap(log_time: ArrayLike, tokens: int, *, norm: float = 1.0) -> np.ndarray:
    """Return the late gap of logits under the logistic loss if values are trained too: it grows as 2 ln ln t.

        a_winner − a_loser → 2 ln ln t + ln(k/(2‖c‖²))

    It is `late_error` at ‖c‖² τ = ln t, where each of the k − 1 losers has the same weight.

    Args:
        log_time: ln t, positive.
        tokens: k, at least 2.
        norm: ‖c‖.

    >>> trained_gap([10.0, 1000.0], 5).round(3)
    array([ 5.521, 14.732])
    """
    logarithm, count = positive("log_time", log_time), whole("tokens", tokens, low=2)
    return np.asarray(2 * np.log(logarithm) + np.log(count / 2) - 2 * np.log(scalar("norm", norm, above=0.0)))


def fixed_gap(scores: ArrayLike, log_time: ArrayLike) -> np.ndarray:
    """Return the late gaps of logits under the logistic loss if values are fixed: they grow as ln t.

        a_winner − a_j → ln t + ln(k (s_w − s_j)/(1 + e^{s_w})),    s_w the largest score

    Args:
        scores: s_j = c · V_j, [token]; the largest is unique.
        log_time: ln t.

    Returns:
        The gap of each token, of shape `log_time.shape + [token]`; −inf for the winner itself.

    >>> fixed_gap([1.0, 0.0, -1.0], 20.0).round(3)
    array([  -inf, 19.785, 20.478])
    """
    s, logarithm = real("scores", scores, ndim=1), real("log_time", log_time)
    if s.size < 2 or (s == s.max()).sum() > 1:
        raise InputError("scores", "of at least 2 tokens with one largest", f"{s.size} scores", "leave out ties")
    with np.errstate(over="ignore"):
        behind = s.size * (s.max() - s)
    in_range("scores", behind)
    with np.errstate(divide="ignore"):
        offset = np.log(behind) - np.logaddexp(0.0, s.max())
    return logarithm[..., None] + offset


def fixed_values(
    scores: ArrayLike, logits: ArrayLike, log_times: ArrayLike, *, solver: Solver = DEFAULT_SOLVER
) -> Float[np.ndarray, "time token"]:
    """Return the logits under the logistic loss of the margin if the values are fixed and attention alone is trained.

        ȧ_j = σ_j (s_j − m)/(1 + e^m),    integrated in ln(1 + t)

    Args:
        scores: s_j = c · V_j, constant, [token].
        logits: a(0), [token].
        log_times: ln(1 + t), as `times` in `integrate`.
        solver: method and tolerances.

    Returns:
        The logits at these times, [time, token].

    >>> logits = fixed_values([1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 20.0])
    >>> (logits[:, :1] - logits).round(3)
    array([[ 0.   ,  0.   ,  0.   ],
           [ 0.   , 19.785, 20.478]])
    """
    (s, a), grid = _start(scores, logits), _row("log_times", log_times)
    _check_bound(solver, logits=a)
    with np.errstate(over="ignore"):
        relative = s - s.max()
    in_range("scores", relative)

    def rhs(log_time: float, a: np.ndarray) -> np.ndarray:
        log_sigma = log_softmax(a)
        mean = np.exp(log_sigma) @ relative
        stretched = np.exp(log_time + log_sigma)  # (1 + t) σ_j, of order 1 for the losers
        winner = relative == 0.0
        # (1 + t) (s_w − m) from the losers' weights: with the winner's own weight the product would overflow
        lead = -(np.where(winner, 0.0, stretched) @ relative)
        pull = np.where(winner, np.exp(log_sigma) * lead, stretched * (relative - mean))
        return expit(-(s.max() + mean)) * pull

    return integrate(rhs, a, grid, solver).states
