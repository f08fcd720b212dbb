"""The coupled block's gradient flow, and the reduced flows of Theorems 2 and 4, through one adaptive integrator.

`integrate` is SciPy's `solve_ivp` with four additions: it stops at a blow-up and says when, it goes on with an implicit
method where the explicit one needs too many evaluations, it never runs for ever, and it fails with a message that says
what to do. Every flow here is a right-hand side handed to it.

Kinks. Where φ' jumps (ReLU) the flow is a differential inclusion: its solutions, Filippov's, may slide along a
kink, and an explicit method then chatters across it with ever smaller steps. So `block` rounds the kink over a stated
`width` (`activations.smoothed`) and integrates with LSODA, whose implicit side sees an ordinary stiff problem. As the
width goes to zero the solution tends to Filippov's, with an error of the order of the width. Theorem 1 holds for every
activation, hence for the rounded one too, to the integrator's tolerance. Smooth activations are integrated with
DOP853.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.special import softmax

from joma.arguments import InputError, broadcast, choice, probabilities, real, scalar, whole
from joma.theory.activations import Activation, named, smoothed
from joma.theory.invariants import ATTENTIONS, Attention, Ledger, ledger_rates, predict, reference

METHODS = {name: name for name in ("DOP853", "LSODA", "Radau")}
RESOLUTION = 1e6 * np.finfo(np.float64).eps  # a state that multiplies within this part of t has blown up
LAYER_NORM_EPSILON = 1e-5  # PyTorch's default

Rhs = Callable[[float, np.ndarray], np.ndarray]
Gradient = Callable[[np.ndarray], np.ndarray]

Times = Float[np.ndarray, " time"]
Path = Float[np.ndarray, "time *state"]
Samples = Float[np.ndarray, "sample token"]
Outputs = Float[np.ndarray, "sample hidden"]
Embedded = Float[np.ndarray, "sample dim"]
Weight = Float[np.ndarray, "dim hidden"]
Logits = Float[np.ndarray, "query token"]
Bias = Float[np.ndarray, " hidden"]
Token = Float[np.ndarray, " token"]


class IntegrationError(RuntimeError):
    """The integrator could not go on, and not because the solution blew up.

    Attributes:
        time: the last time at which the right-hand side was evaluated.
    """

    def __init__(self, message: str, time: float) -> None:
        super().__init__(message)
        self.time = time


class Options(TypedDict, total=False):
    """What every flow passes on to `integrate`."""

    method: str
    rtol: float
    atol: float
    bound: float
    switch_after: int
    max_evaluations: int


@dataclass(frozen=True)
class Solution:
    """States at the times asked for, up to the blow-up, if any: `times` is cut there, and nothing is ever NaN."""

    times: Times
    states: Path
    blow_up: float
    """The time of blow-up, infinite if there was none before the last time."""
    evaluations: int


def integrate(
    rhs: Rhs,
    y0: ArrayLike,
    times: ArrayLike,
    *,
    method: str = "DOP853",
    rtol: float = 1e-11,
    atol: float = 1e-13,
    bound: float = 1e100,
    switch_after: int = 20_000,
    max_evaluations: int = 1_000_000,
) -> Solution:
    """Solve ẏ = rhs(t, y) from y(0) = y0, and stop where the solution blows up.

    A blow-up is where |y_i| passes `bound`, or where 1 + |y_i| divided by |ẏ_i|, the time in which a component
    multiplies, falls under 2e-10 of t: what is left to the pole is then no longer than that.

    Close to a pole the flow can be stiff: the growing component makes others relax ever faster to their equilibrium.
    DOP853 then takes steps that are limited by stability, not by accuracy, and would need millions of them. So after
    `switch_after` evaluations Radau continues from the last state that DOP853 reached.

    Args:
        rhs: ẏ as a function of t and y, of the shape of y.
        y0: state at time 0, of any shape.
        times: where the state is wanted: not negative, increasing.
        method: a name of `METHODS`; LSODA and Radau are for stiff flows.
        rtol: relative tolerance of a step.
        atol: absolute tolerance of a step.
        bound: size of a component that counts as blown up.
        switch_after: evaluations of `rhs` after which Radau takes over from DOP853. The other methods are never left.
        max_evaluations: of `rhs`; more raise `IntegrationError`.

    Returns:
        A `Solution`, with states [time, *y0.shape].

    >>> solution = integrate(lambda t, y: y**2, 1.0, [0.0, 0.5, 2.0])  # y = 1/(1 − t)
    >>> solution.states.round(9), round(solution.blow_up, 9)
    (array([1., 2.]), 1.0)
    """
    start, grid = real("y0", y0), _grid(times)
    scheme = choice("method", method, METHODS)
    bound = scalar("bound", bound, above=0.0)
    if np.abs(start).max() >= bound:
        raise InputError("y0", f"below `bound` = {bound:g}", f"{np.abs(start).max():g}", "raise the bound")
    counted = _Counted(rhs, start.shape, whole("max_evaluations", max_evaluations))
    switch = _Switch(counted, whole("switch_after", switch_after), grid[-1]) if scheme == "DOP853" else None
    with np.errstate(all="ignore"):
        slope = np.asarray(rhs(0.0, start))
    if not np.isfinite(slope).all():
        raise InputError("rhs", "finite at the start", "an infinite or NaN slope", "check `y0` and the parameters")
    if grid[-1] == 0:
        return Solution(grid, start[None].copy(), math.inf, 1)
    relative, absolute = scalar("rtol", rtol, above=0.0), scalar("atol", atol, above=0.0)
    with warnings.catch_warnings(record=True) as said, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        events = [_BlowUp(counted, bound), *([switch] if switch else [])]
        solve = partial(solve_ivp, counted, rtol=relative, atol=absolute)
        result = solve((0.0, grid[-1]), start.ravel(), scheme, t_eval=grid, events=events)
        reached, states = np.asarray(result.t), np.asarray(result.y, dtype=np.float64).T
        if switch and result.t_events[1].size:
            scheme, now, state = "Radau", result.t_events[1][0], result.y_events[1][0]
            rest = grid[grid > now]
            result = solve((now, grid[-1]), state, scheme, t_eval=rest, events=events[:1])
            reached = np.concatenate([reached, result.t])
            states = np.concatenate([states, np.asarray(result.y, dtype=np.float64).T.reshape(-1, start.size)])
    if not result.success:
        causes = "; ".join(str(cause).rstrip(".") for cause in (result.message, *(one.message for one in said)))
        raise IntegrationError(f"{scheme} gave up at t = {counted.last:.6g}: {causes}. {_REMEDY}", counted.last)
    poles = result.t_events[0]
    blow_up = float(poles[0]) if poles.size else math.inf
    return Solution(reached, states.reshape(-1, *start.shape), blow_up, counted.evaluations)


_REMEDY = "Loosen `rtol` and `atol`, try `method` LSODA or Radau where the flow is stiff, and round jumps of `rhs`."


class _Counted:
    """A right-hand side on flat states that counts its calls, up to a limit, and never returns infinity or NaN."""

    def __init__(self, rhs: Rhs, shape: tuple[int, ...], limit: int) -> None:
        self.rhs, self.shape, self.limit = rhs, shape, limit
        self.evaluations, self.last = 0, 0.0

    def __call__(self, t: float, y: np.ndarray) -> np.ndarray:
        if self.evaluations == self.limit:
            raise IntegrationError(f"stalled at t = {t:.6g} after {self.limit} evaluations. {_REMEDY}", t)
        self.evaluations, self.last = self.evaluations + 1, t
        slope = np.asarray(self.rhs(t, y.reshape(self.shape)), dtype=np.float64)
        if slope.shape != self.shape:
            raise InputError("rhs", f"a function to arrays of shape {self.shape}", slope.shape, "match `y0`")
        # A trial step past a pole overflows. LSODA would accept NaN there; a huge number makes every method step back.
        return np.nan_to_num(slope.ravel(), nan=1e150, posinf=1e150, neginf=-1e150)


class _BlowUp:
    """Positive before the blow-up, negative after it: a terminal event of `solve_ivp`."""

    terminal = True

    def __init__(self, rhs: _Counted, bound: float) -> None:
        self.rhs, self.bound = rhs, bound

    def __call__(self, t: float, y: np.ndarray) -> float:
        size, slope = np.abs(y), np.abs(self.rhs(t, y))
        slope = np.maximum(slope, 1e-150)
        return float(min(1 - size.max() / self.bound, ((1 + size) / slope).min() - RESOLUTION * t))


class _Switch:
    """Zero at the end of the first step after `limit` evaluations, positive before: a terminal event of `solve_ivp`."""

    terminal = True

    def __init__(self, rhs: _Counted, limit: int, end: float) -> None:
        self.rhs, self.limit, self.end = rhs, limit, end
        self.time = math.inf

    def __call__(self, t: float, _y: np.ndarray) -> float:
        if math.isinf(self.time) and self.rhs.evaluations >= self.limit and t < self.end:
            self.time = t
        return 1.0 if math.isinf(self.time) else self.time - t


def _grid(times: ArrayLike) -> np.ndarray:
    grid = np.atleast_1d(real("times", times, low=0.0))
    if grid.ndim != 1 or (np.diff(grid) <= 0).any():
        raise InputError("times", "one increasing row", f"shape {grid.shape}", "sort them and drop repetitions")
    return grid


def linear(delta: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.0, **options: Unpack[Options]) -> Solution:
    """Integrate Theorem 2's flow: linear activation, one hidden unit, constant gradient.

        v̇ = Δ ∘ exp(v²/2)

    `growth.linear` is its closed form. All components stop at the first blow-up.

    Args:
        delta: salience Δ of each token.
        times: as in `integrate`.
        v0: start, broadcast against `delta`.
        options: as in `integrate`.

    Returns:
        A `Solution`, with states [time, *token].

    >>> round(linear([0.9, 0.7], times=9.0).blow_up, 6)  # sqrt(π/2)/0.9
    1.392571
    """
    salience, start = _together(delta=delta, v0=v0)
    return integrate(lambda _, v: salience * np.exp(v**2 / 2), start, times, **options)


def nonlinear(mu: ArrayLike, times: ArrayLike, v0: ArrayLike = 0.05, **options: Unpack[Options]) -> Solution:
    """Integrate Theorem 4's flow: nonlinear activation near a centre μ, attention folded in.

        v̇ = (μ − v) ∘ exp(v²/2)

    `growth.nonlinear` inverts its quadrature.

    Args:
        mu: centre, one component a token.
        times: as in `integrate`.
        v0: start, broadcast against `mu`.
        options: as in `integrate`.

    Returns:
        A `Solution`, with states [time, *token].

    >>> nonlinear([1.0, 2.0], times=50.0).states.round(9)
    array([[1., 2.]])
    """
    centre, start = _together(mu=mu, v0=v0)
    return integrate(lambda _, v: (centre - v) * np.exp(v**2 / 2), start, times, **options)


def softmax_nonlinear(
    mu: ArrayLike,
    times: ArrayLike,
    v0: ArrayLike = 0.05,
    *,
    temperature: float = 2.0,
    **options: Unpack[Options],
) -> Solution:
    """Integrate Theorem 4's flow with normalised attention.

        v̇ = (μ − v) ∘ softmax(v²/T)

    `growth.softmax_nonlinear` has it by a change of time.

    Args:
        mu: centre, [..., token]; softmax is over the last axis.
        times: as in `integrate`.
        v0: start, broadcast against `mu`.
        temperature: T.
        options: as in `integrate`.

    Returns:
        A `Solution`, with states [time, ..., token].

    >>> softmax_nonlinear([1.0, 2.0], times=200.0).states.round(6)
    array([[1., 2.]])
    """
    centre, start = _together(mu=mu, v0=v0)
    heat = scalar("temperature", temperature, above=0.0)
    return integrate(lambda _, v: (centre - v) * softmax(v**2 / heat, axis=-1), start, times, **options)


def _together(**arrays: ArrayLike) -> list[np.ndarray]:
    checked = {name: np.atleast_1d(real(name, array)) for name, array in arrays.items()}
    shape = broadcast(**checked)
    return [np.broadcast_to(array, shape) for array in checked.values()]


def constant(g: ArrayLike) -> Gradient:
    """Return the constant gradient g = −∂loss/∂h, broadcast to [sample, hidden].

    >>> constant(2.0)(np.zeros((1, 2)))
    array([[2., 2.]])
    """
    value = real("g", g)
    return lambda output: _fitted("g", value, output)


def cross_entropy(label: ArrayLike) -> Gradient:
    """Return the gradient of cross entropy where the hidden units are the logits: g = 1(k = label) − softmax(h)_k.

    Args:
        label: class of each sample, [sample].

    >>> cross_entropy([1])(np.zeros((1, 2)))
    array([[-0.5,  0.5]])
    """
    classes = np.array([whole("label", one, low=0) for one in real("label", label, ndim=1)])

    def gradient(output: Outputs) -> Outputs:
        if len(classes) != len(output) or classes.max() >= output.shape[1]:
            expected = f"{len(output)} classes under {output.shape[1]}"
            raise InputError("label", expected, f"{len(classes)}, up to {classes.max()}", "match samples and units")
        return np.eye(output.shape[1])[classes] - softmax(output, axis=1)

    return gradient


def squared_error(target: ArrayLike) -> Gradient:
    """Return the gradient of ½‖h − target‖²: g = target − h.

    Args:
        target: broadcast to [sample, hidden].

    >>> squared_error([[1.0, 2.0]])(np.ones((1, 2)))
    array([[0., 1.]])
    """
    aim = real("target", target)
    return lambda output: _fitted("target", aim, output) - output


def _fitted(name: str, value: np.ndarray, output: Outputs) -> Outputs:
    try:
        return np.broadcast_to(value, output.shape)
    except ValueError:
        expected = f"broadcastable to [sample, hidden] {output.shape}"
        raise InputError(name, expected, f"shape {value.shape}", "match `x` and `w0`") from None


class Velocity(NamedTuple):
    """Time derivatives of the block's state, with what the ledger needs: E[b] and E[b (b · ∂(−loss)/∂b)]."""

    w: np.ndarray
    z: np.ndarray
    bias: np.ndarray
    b_bar: np.ndarray
    pull: np.ndarray


@dataclass(frozen=True)
class BlockSolution:
    """The block's state at the times asked for, up to the blow-up, if any (see `Solution`)."""

    times: Times
    w: Float[np.ndarray, "time dim hidden"]
    v: Float[np.ndarray, "time token hidden"]
    z: Float[np.ndarray, "time query token"]
    bias: Float[np.ndarray, "time hidden"]
    ledger: Ledger
    """Softmax's ledger along the flow; zero for the other attentions, whose law has no remainder."""
    blow_up: float
    evaluations: int


@dataclass(frozen=True)
class BlockFlow:
    """The coupled flow of the block's lower weights, attention logits and hidden biases; `block` makes one.

        f = U_C b(z_q, x) + u_q,    h = φ(wᵀf + bias),    y = −∂loss/∂b = U_Cᵀ Σ_k g_k h'_k w_k

        ẇ_k = η_v E[g_k h'_k f],    ż_m = η_z E[1(q = m) (∂b/∂z)ᵀ y],    biaṡ_k = η_bias E[g_k h'_k]

    The weights w live in the embedding space, so that whatever breaks Theorem 1 has its place in the formula:
    `layer_norm` puts LayerNorm(f) before w, `skip` lets the loss see h + skipᵀf, an `embedding` whose columns are not
    orthonormal mixes tokens, and `weight_decay` shrinks w, z and bias at their own rates.
    """

    attention: Attention
    activation: Activation
    gradient: Gradient
    x: Samples
    query: Int[np.ndarray, " sample"]
    weight: Float[np.ndarray, " sample"]
    context: Float[np.ndarray, "dim token"]
    asking: Float[np.ndarray, "dim query"]
    temperature: float
    rate_v: float
    rate_z: float
    rate_bias: float
    residual: bool
    layer_norm: bool
    skip: Weight | None
    weight_decay: float
    b_ref: Token
    method: str

    def velocity(self, w: Weight, z: Logits, bias: Bias) -> Velocity:
        """Return the time derivatives of the state, unchecked."""
        b = self.attention.weigh(z[self.query], self.x, self.temperature)
        f = b @ self.context.T
        if self.residual:
            f = f + self.asking.T[self.query]
        seen, deviation = _normalise(f) if self.layer_norm else (f, None)
        before = seen @ w + bias
        output = self.activation.value(before)
        g = self.weight[:, None] * self.gradient(output if self.skip is None else output + f @ self.skip)
        slope = g * self.activation.slope(before)
        back = slope @ w.T
        if deviation is not None:
            back = _normalise_back(back, seen, deviation)
        if self.skip is not None:
            back = back + g @ self.skip.T
        y = back @ self.context
        z_dot = np.zeros_like(z)
        np.add.at(z_dot, self.query, self.attention.carry_back(y, b, self.x, self.temperature))
        return Velocity(
            w=self.rate_v * (seen.T @ slope - self.weight_decay * w),
            z=self.rate_z * (z_dot - self.weight_decay * z),
            bias=self.rate_bias * (slope.sum(axis=0) - self.weight_decay * bias),
            b_bar=self.weight @ b,
            pull=(b * (b * y).sum(axis=1, keepdims=True)).sum(axis=0),
        )

    def solve(
        self, times: ArrayLike, w0: ArrayLike, z0: ArrayLike, *, bias0: ArrayLike = 0.0, **options: Unpack[Options]
    ) -> BlockSolution:
        """Integrate the coupled flow.

        Args:
            times: as in `integrate`.
            w0: lower weights at the start, [dim, hidden]; with the default embedding the rows are v0, then w·u_q.
            z0: attention logits at the start, [query, token].
            bias0: hidden biases at the start.
            options: as in `integrate`; the method is the flow's own by default.
        """
        w, z, bias = self._start(w0, z0, bias0)
        token = np.zeros(len(self.b_ref))
        shapes = [part.shape for part in (w, z, bias, token, token)]

        def rhs(_: float, state: np.ndarray) -> np.ndarray:
            w, z, bias, _drift, _gap = _unpack(state, shapes)
            rate = self.velocity(w, z, bias)
            return _pack(rate.w, rate.z, rate.bias, *self._ledger_rates(w, rate))

        options.setdefault("method", self.method)
        solution = integrate(rhs, _pack(w, z, bias, token, token), times, **options)
        return self._solution(solution, _unpack(solution.states, shapes))

    def solve_folded(
        self, times: ArrayLike, w0: ArrayLike, z0: ArrayLike, *, bias0: ArrayLike = 0.0, **options: Unpack[Options]
    ) -> BlockSolution:
        """Integrate the flow with attention folded into the MLP: z is not a state but Theorem 1's function of v.

            v̇ = η_v E[g h' x] ∘ exp(z0 + (κ/2)(Σ_k v_k² − Σ_k v0_k²))

        The same solution as `solve` for exp attention and one query, unless a switch breaks the law. Arguments as
        there.
        """
        if self.attention.name != "exp":
            raise InputError("attention", "exp, to be folded in", repr(self.attention.name), "use `solve`")
        w, z, bias = self._start(w0, z0, bias0)
        if len(z) != 1:
            remedy = "only the sum over queries is fixed: use `solve`"
            raise InputError("z0", "the logits of one query, [1, token]", f"{len(z)} queries", remedy)
        shapes = [w.shape, bias.shape]

        def logits(now: np.ndarray) -> np.ndarray:
            v, v0 = self.context.T @ now, self.context.T @ w
            return predict("exp", v, v0, z, kappa=self.rate_z / self.rate_v)[..., None, :]

        def rhs(_: float, state: np.ndarray) -> np.ndarray:
            now, bias = _unpack(state, shapes)
            rate = self.velocity(now, logits(now), bias)
            return _pack(rate.w, rate.bias)

        options.setdefault("method", self.method)
        solution = integrate(rhs, _pack(w, bias), times, **options)
        path, biases = _unpack(solution.states, shapes)
        nothing = np.zeros((len(path), len(self.b_ref)))
        return self._solution(solution, [path, logits(path), biases, nothing, nothing])

    def _start(self, w0: ArrayLike, z0: ArrayLike, bias0: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        w, z, bias = real("w0", w0, ndim=2), real("z0", z0, ndim=2), real("bias0", bias0)
        dim, hidden = self.context.shape[0], w.shape[1]
        if len(w) != dim:
            raise InputError("w0", f"of axes [{dim} dimensions, hidden]", f"shape {w.shape}", "match the embedding")
        if z.shape != (queries_tokens := (self.asking.shape[1], self.context.shape[1])):
            raise InputError("z0", f"[query, token] of shape {queries_tokens}", z.shape, "match `query` and `x`")
        if self.skip is not None and self.skip.shape != w.shape:
            raise InputError("w0", f"of the shape of `skip`, {self.skip.shape}", w.shape, "match the two")
        if bias.shape not in ((), (hidden,)):
            raise InputError("bias0", f"one number or {hidden}", f"shape {bias.shape}", "give one for each hidden unit")
        sent = np.shape(self.gradient(np.zeros((len(self.x), hidden))))
        if sent != (len(self.x), hidden):
            raise InputError("gradient", f"[sample, hidden] of shape {(len(self.x), hidden)}", sent, "match `x`, `w0`")
        return w, z, np.broadcast_to(bias, (hidden,))

    def _ledger_rates(self, w: Weight, rate: Velocity) -> tuple[np.ndarray, np.ndarray]:
        if not self.attention.normalised:
            return np.zeros_like(self.b_ref), np.zeros_like(self.b_ref)
        rates = {"rate_v": self.rate_v, "rate_z": self.rate_z, "temperature": self.temperature}
        v, v_dot = self.context.T @ w, self.context.T @ rate.w
        return ledger_rates(v, v_dot, rate.b_bar, rate.pull, b_ref=self.b_ref, **rates)

    def _solution(self, solution: Solution, parts: Sequence[np.ndarray]) -> BlockSolution:
        w, z, bias, drift, gap = parts
        v, book = self.context.T @ w, Ledger(drift, gap, np.zeros_like(gap))
        return BlockSolution(solution.times, w, v, z, bias, book, solution.blow_up, solution.evaluations)


def block(
    attention: str,
    activation: str | Activation,
    gradient: Gradient,
    x: ArrayLike,
    *,
    query: ArrayLike = 0,
    weight: ArrayLike | None = None,
    embedding: ArrayLike | None = None,
    temperature: float = 1.0,
    rate_v: float = 1.0,
    rate_z: float = 1.0,
    rate_bias: float = 0.0,
    residual: bool = True,
    layer_norm: bool = False,
    skip: ArrayLike | None = None,
    weight_decay: float = 0.0,
    b_ref: ArrayLike | None = None,
    width: float = 1e-4,
) -> BlockFlow:
    """Set up the coupled flow of the block on weighted samples; `BlockFlow.solve` integrates it.

    Args:
        attention: a name of `invariants.ATTENTIONS`.
        activation: a name of `activations.ACTIVATIONS`, or an `Activation`.
        gradient: g = −∂loss/∂h, a function of h to an array, both [sample, hidden]: `constant`, `cross_entropy`,
            `squared_error`, or your own.
        x: token frequencies of each sample, [sample, token].
        query: the query token of each sample, counted from 0.
        weight: probability of each sample; equal ones by default.
        embedding: U = [U_C, u_1, ...], [dim, token + query]; the identity by default.
        temperature: T of softmax.
        rate_v: η_v, rate of the lower weights.
        rate_z: η_z, rate of the attention logits; 0 freezes them.
        rate_bias: rate of the hidden biases; 0 freezes them.
        residual: whether the query's embedding is added to f.
        layer_norm: whether f is normalised before w (breaks Theorem 1).
        skip: a fixed matrix [dim, hidden] through which the loss sees f past w (breaks Theorem 1).
        weight_decay: of all weights (breaks Theorem 1).
        b_ref: reference of softmax's ledger; `invariants.reference(x, weight)` by default.
        width: over which the kinks of the activation are rounded, in units of the preactivation; the solution is off
            by about as much.

    Returns:
        A `BlockFlow`.

    >>> flow = block("exp", "linear", constant(1.0), x=[[0.6, 0.4]], rate_z=2.0)
    >>> path = flow.solve([0.0, 0.5], w0=np.zeros((3, 1)), z0=np.zeros((1, 2)))
    >>> bool(np.allclose(path.z[:, 0], path.v[:, :, 0] ** 2, atol=1e-10))  # z = (κ/2) v²
    True
    """
    kind, frequency = choice("attention", attention, ATTENTIONS), real("x", x, ndim=2, low=0.0)
    if kind.normalised and not (frequency.sum(axis=1) > 0).all():
        raise InputError("x", "positive somewhere in every sample", "a row of zeros", "drop empty contexts")
    asked, phi = _queries(query, len(frequency)), named(activation)
    context, asking = _embedding(embedding, frequency.shape[1], asked)
    usual = reference(frequency, weight)
    share = np.full(len(frequency), 1 / len(frequency)) if weight is None else probabilities("weight", weight)
    fixed = usual if b_ref is None else probabilities("b_ref", b_ref, ndim=1)
    if fixed.shape != frequency.shape[1:]:
        raise InputError("b_ref", f"of {frequency.shape[1]} tokens", fixed.shape, "match `x`")
    return BlockFlow(
        attention=kind,
        activation=smoothed(phi, width),
        gradient=gradient,
        x=frequency,
        query=asked,
        weight=share,
        context=context,
        asking=asking,
        temperature=scalar("temperature", temperature, above=0.0),
        rate_v=scalar("rate_v", rate_v, above=0.0),
        rate_z=scalar("rate_z", rate_z, low=0.0),
        rate_bias=scalar("rate_bias", rate_bias, low=0.0),
        residual=residual,
        layer_norm=layer_norm,
        skip=None if skip is None else real("skip", skip, ndim=2),
        weight_decay=scalar("weight_decay", weight_decay, low=0.0),
        b_ref=fixed,
        method="DOP853" if phi.smooth else "LSODA",
    )


def _queries(query: ArrayLike, samples: int) -> Int[np.ndarray, " sample"]:
    index = real("query", query, low=0.0)
    if index.shape not in ((), (samples,)) or (index != np.round(index)).any():
        raise InputError("query", f"one whole number or {samples}", repr(query), "give one for each sample")
    return np.broadcast_to(index, (samples,)).astype(np.int64)


def _embedding(embedding: ArrayLike | None, tokens: int, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    columns = tokens + 1 + int(query.max())
    u = np.eye(columns) if embedding is None else real("embedding", embedding, ndim=2)
    if u.shape[1] < columns:
        remedy = "give a column for each token, then one for each query"
        raise InputError("embedding", f"of at least {columns} columns", f"shape {u.shape}", remedy)
    return u[:, :tokens], u[:, tokens:]


def _normalise(f: Embedded) -> tuple[Embedded, Float[np.ndarray, "sample 1"]]:
    """Return LayerNorm(f), without its learned scale and shift, and the deviation that it divided by."""
    deviation = np.sqrt(f.var(axis=1, keepdims=True) + LAYER_NORM_EPSILON)
    return (f - f.mean(axis=1, keepdims=True)) / deviation, deviation


def _normalise_back(back: Embedded, seen: Embedded, deviation: Float[np.ndarray, "sample 1"]) -> Embedded:
    along = (back * seen).mean(axis=1, keepdims=True)
    return (back - back.mean(axis=1, keepdims=True) - seen * along) / deviation


def _pack(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.ravel() for part in parts])


def _unpack(states: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    parts = np.split(states, ends, axis=-1)
    return [part.reshape(*states.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
