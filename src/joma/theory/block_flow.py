"""The gradient flow of the whole block: lower weights, attention logits and hidden biases, coupled (Theorem 1).

`block` checks its arguments and returns a `BlockFlow`; `BlockFlow.solve` integrates it.

Kinks. Where φ' jumps (ReLU) the flow is a differential inclusion: its solutions, Filippov's, may slide along a
kink, and an explicit method then chatters across it with ever smaller steps. So `block` rounds the kink over a stated
width (`activations.smoothed`) and integrates with LSODA, whose implicit side sees an ordinary stiff problem. As the
width goes to zero the solution tends to Filippov's, with an error of the order of the width. Theorem 1 holds for every
activation, hence for the rounded one too, to the integrator's tolerance. Smooth activations are integrated with
DOP853.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from joma.arguments import InputError, flag, instance, probabilities, real, scalar
from joma.theory.activations import Activation, named, smoothed
from joma.theory.block_parts import layer_norm, layer_norm_backward, pack, unpack, weighted_samples
from joma.theory.integration import DEFAULT_SOLVER, Solution, Solver, Times, integrate
from joma.theory.invariants import AttentionLaw, Ledger, ledger_rates, predict
from joma.theory.losses import Gradient

Samples = Float[np.ndarray, "sample token"]
Weight = Float[np.ndarray, "dim hidden"]
Logits = Float[np.ndarray, "query token"]
Bias = Float[np.ndarray, " hidden"]
Token = Float[np.ndarray, " token"]


@dataclass(frozen=True)
class Training:
    """How the parameters of the block are trained.

    Attributes:
        rate_w: η_w, learning rate of the lower weights.
        rate_z: η_z, learning rate of the attention logits; 0 freezes them.
        rate_bias: learning rate of the hidden biases; 0 freezes them.
        weight_decay: weight decay of all parameters, multiplied by the learning rate of each (breaks Theorem 1).
    """

    rate_w: float = 1.0
    rate_z: float = 1.0
    rate_bias: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check the rates when the object is created."""
        scalar("rate_w", self.rate_w, above=0.0)
        for name in ("rate_z", "rate_bias", "weight_decay"):
            scalar(name, getattr(self, name), low=0.0)

    @property
    def kappa(self) -> float:
        """Return κ = η_z/η_w."""
        return self.rate_z / self.rate_w


@dataclass(frozen=True, eq=False)
class Architecture:
    """The options of the block besides its attention and its activation.

    Attributes:
        temperature: T of softmax attention.
        residual: whether the query's embedding is added to f.
        embedding: U = [U_C, u_1, ...], [dim, token + query]; the identity by default. Columns that are not orthonormal
            break Theorem 1.
        layer_norm: whether f is normalised before the lower weights (breaks Theorem 1).
        skip: a fixed matrix [dim, hidden] that adds skipᵀf to the hidden units that the loss sees (breaks Theorem 1).
        kink_width: width over which the kinks of the activation are rounded, in units of the preactivation; the
            error of the solution is about as large.
    """

    temperature: float = 1.0
    residual: bool = True
    embedding: ArrayLike | None = None
    layer_norm: bool = False
    skip: ArrayLike | None = None
    kink_width: float = 1e-4


DEFAULT_TRAINING, DEFAULT_ARCHITECTURE = Training(), Architecture()


class Velocity(NamedTuple):
    """Time derivatives of the block's state, and two averages for the ledger: E[b] and E[b (b · ∂(−loss)/∂b)]."""

    w: np.ndarray
    z: np.ndarray
    bias: np.ndarray
    b_bar: np.ndarray
    pull: np.ndarray


@dataclass(frozen=True)
class BlockSolution:
    """The block's state at the requested times, up to the blow-up, if any (see `Solution`)."""

    times: Times
    w: Float[np.ndarray, "time dim hidden"]
    v: Float[np.ndarray, "time token hidden"]
    z: Float[np.ndarray, "time query token"]
    bias: Float[np.ndarray, "time hidden"]
    ledger: Ledger
    """Softmax's ledger along the flow; zero for the other attentions, whose law is exact without it."""
    blow_up: float
    evaluations: int


class _Start(NamedTuple):
    """The state at time 0, checked."""

    w: Weight
    z: Logits
    bias: Bias


@dataclass(frozen=True, eq=False)
class BlockFlow:
    """The coupled flow of the block's lower weights, attention logits and hidden biases; create it with `block`.

        f = U_C b(z_q, x) + u_q,    h = φ(wᵀf + bias),    y = −∂loss/∂b = U_Cᵀ Σ_k g_k h'_k w_k

        ẇ_k = η_w E[g_k h'_k f],    ż_m = η_z E[1(q = m) (∂b/∂z)ᵀ y],    biaṡ_k = η_bias E[g_k h'_k]

    The weights w live in the embedding space, where each option that breaks Theorem 1 changes one term:
    `layer_norm` puts LayerNorm(f) before w, `skip` lets the loss see h + skipᵀf, an `embedding` whose columns are not
    orthonormal mixes tokens, and `weight_decay` shrinks w, z and bias at their own learning rates.
    """

    attention: AttentionLaw
    activation: Activation
    gradient: Gradient
    x: Samples
    query: Int[np.ndarray, " sample"]
    weight: Float[np.ndarray, " sample"]
    context: Float[np.ndarray, "dim token"]
    query_embedding: Float[np.ndarray, "dim query"]
    temperature: float
    residual: bool
    layer_norm: bool
    skip: Weight | None
    training: Training
    b_ref: Token
    """The mean of uniform attention: the default reference of softmax's ledger."""
    method: str

    def velocity(self, w: Weight, z: Logits, bias: Bias) -> Velocity:
        """Return the time derivatives of the state, unchecked."""
        b = self.attention.weigh(z[self.query], self.x, self.temperature)
        f = b @ self.context.T
        if self.residual:
            f = f + self.query_embedding.T[self.query]
        mlp_input, deviation = layer_norm(f) if self.layer_norm else (f, None)
        preactivation = mlp_input @ w + bias
        output = self.activation.value(preactivation)
        g = self.weight[:, None] * self.gradient(output if self.skip is None else output + f @ self.skip)
        slope = g * self.activation.slope(preactivation)
        f_gradient = slope @ w.T
        if deviation is not None:
            f_gradient = layer_norm_backward(f_gradient, mlp_input, deviation)
        if self.skip is not None:
            f_gradient = f_gradient + g @ self.skip.T
        y = f_gradient @ self.context
        z_dot = np.zeros_like(z)
        np.add.at(z_dot, self.query, self.attention.carry_back(y, b, self.x, self.temperature))
        training = self.training
        return Velocity(
            w=training.rate_w * (mlp_input.T @ slope - training.weight_decay * w),
            z=training.rate_z * (z_dot - training.weight_decay * z),
            bias=training.rate_bias * (slope.sum(axis=0) - training.weight_decay * bias),
            b_bar=self.weight @ b,
            pull=(b * (b * y).sum(axis=1, keepdims=True)).sum(axis=0),
        )

    def solve(
        self,
        times: ArrayLike,
        w0: ArrayLike,
        z0: ArrayLike,
        *,
        bias0: ArrayLike = 0.0,
        b_ref: ArrayLike | None = None,
        solver: Solver = DEFAULT_SOLVER,
    ) -> BlockSolution:
        """Integrate the coupled flow.

        Args:
            times: as in `integrate`.
            w0: lower weights at the start, [dim, hidden]; with the default embedding the rows are v0, then w·u_q.
            z0: attention logits at the start, [query, token].
            bias0: hidden biases at the start.
            b_ref: reference of softmax's ledger, [token]; `flow.b_ref` by default.
            solver: method and tolerances; if it names no method, LSODA is used for activations with kinks, and DOP853
                for the others.
        """
        start, ledger_reference = self._start(w0, z0, bias0), self._reference(b_ref)
        no_ledger = np.zeros(len(ledger_reference))
        shapes = [part.shape for part in (*start, no_ledger, no_ledger)]

        def rhs(_: float, state: np.ndarray) -> np.ndarray:
            w, z, bias, _drift, _gap = unpack(state, shapes)
            velocity = self.velocity(w, z, bias)
            return pack(velocity.w, velocity.z, velocity.bias, *self._ledger_rates(w, velocity, ledger_reference))

        state, numbers = pack(*start, no_ledger, no_ledger), self._numbers(start)
        solution = integrate(rhs, state, times, self._solver(solver), numbers=numbers)
        return self._solution(solution, unpack(solution.states, shapes))

    def solve_folded(
        self,
        times: ArrayLike,
        w0: ArrayLike,
        z0: ArrayLike,
        *,
        bias0: ArrayLike = 0.0,
        solver: Solver = DEFAULT_SOLVER,
    ) -> BlockSolution:
        """Integrate the flow with attention folded into the MLP: z is not a state but Theorem 1's function of v.

            v̇ = η_w E[g h' x] ∘ exp(z0 + (κ/2)(Σ_k v_k² − Σ_k v0_k²))

        For exp attention and one query the solution equals that of `solve`, unless an option breaks Theorem 1. The
        arguments are those of `solve`.
        """
        if self.attention.name != "exp":
            raise InputError("attention", "'exp' for the folded flow", repr(self.attention.name), "use `solve`")
        start = self._start(w0, z0, bias0)
        if len(start.z) != 1:
            remedy = "only the sum over queries is fixed: use `solve`"
            raise InputError("z0", "the logits of one query, [1, token]", f"{len(start.z)} queries", remedy)
        shapes = [start.w.shape, start.bias.shape]

        def logits(w: np.ndarray) -> np.ndarray:
            v, v0 = self.context.T @ w, self.context.T @ start.w
            return predict("exp", v, v0, start.z, kappa=self.training.kappa)[..., None, :]

        def rhs(_: float, state: np.ndarray) -> np.ndarray:
            w, bias = unpack(state, shapes)
            velocity = self.velocity(w, logits(w), bias)
            return pack(velocity.w, velocity.bias)

        state, numbers = pack(start.w, start.bias), self._numbers(start)
        solution = integrate(rhs, state, times, self._solver(solver), numbers=numbers)
        w, bias = unpack(solution.states, shapes)
        no_ledger = np.zeros((len(w), len(self.b_ref)))
        z = logits(w) if len(w) else np.empty((0, *start.z.shape))
        return self._solution(solution, [w, z, bias, no_ledger, no_ledger])

    def _numbers(self, start: _Start) -> int:
        """Return how many numbers a velocity computes; those of matrix products count less, and calls of NumPy too."""
        (dim, hidden), samples = start.w.shape, len(self.x)
        return 2000 + samples * (3 * self.x.shape[1] + 2 * dim + 4 * hidden + dim * hidden // 8)

    def _solver(self, solver: Solver) -> Solver:
        solver = instance("solver", solver, Solver, "pass `Solver(method=...)`")
        return solver if solver.method else replace(solver, method=self.method)

    def _start(self, w0: ArrayLike, z0: ArrayLike, bias0: ArrayLike) -> _Start:
        w, z, bias = real("w0", w0, ndim=2), real("z0", z0, ndim=2), real("bias0", bias0)
        dim, hidden = self.context.shape[0], w.shape[1]
        if len(w) != dim:
            raise InputError("w0", f"of axes [{dim} dimensions, hidden]", f"shape {w.shape}", "match the embedding")
        if z.shape != (queries_tokens := (self.query_embedding.shape[1], self.context.shape[1])):
            raise InputError("z0", f"[query, token] of shape {queries_tokens}", z.shape, "match `query` and `x`")
        if self.skip is not None and self.skip.shape != w.shape:
            raise InputError("w0", f"of the shape of `skip`, {self.skip.shape}", w.shape, "match the two")
        if bias.shape not in ((), (hidden,)):
            raise InputError("bias0", f"one number, or one for each of {hidden} hidden units", bias.shape, "match `w0`")
        shape = np.shape(self.gradient(np.zeros((len(self.x), hidden))))
        if shape != (len(self.x), hidden):
            raise InputError("gradient", f"[sample, hidden] of shape {(len(self.x), hidden)}", shape, "match `x`, `w0`")
        return _Start(w, z, np.broadcast_to(bias, (hidden,)))

    def _reference(self, b_ref: ArrayLike | None) -> Token:
        checked = self.b_ref if b_ref is None else probabilities("b_ref", b_ref, ndim=1)
        if checked.shape != self.b_ref.shape:
            raise InputError("b_ref", f"of {len(self.b_ref)} tokens", checked.shape, "match `x`")
        return checked

    def _ledger_rates(self, w: Weight, velocity: Velocity, b_ref: Token) -> tuple[Token, Token]:
        if not self.attention.normalised:
            return np.zeros_like(b_ref), np.zeros_like(b_ref)
        v, v_dot = self.context.T @ w, self.context.T @ velocity.w
        return ledger_rates(
            v,
            v_dot,
            velocity.b_bar,
            velocity.pull,
            rate_w=self.training.rate_w,
            rate_z=self.training.rate_z,
            temperature=self.temperature,
            b_ref=b_ref,
        )

    def _solution(self, solution: Solution, parts: Sequence[np.ndarray]) -> BlockSolution:
        w, z, bias, drift, gap = parts
        v, ledger = self.context.T @ w, Ledger(drift, gap, np.zeros_like(gap))
        return BlockSolution(solution.times, w, v, z, bias, ledger, solution.blow_up, solution.evaluations)


def block(
    attention: str,
    activation: str | Activation,
    gradient: Gradient,
    x: ArrayLike,
    *,
    query: ArrayLike = 0,
    weight: ArrayLike | None = None,
    training: Training = DEFAULT_TRAINING,
    architecture: Architecture = DEFAULT_ARCHITECTURE,
) -> BlockFlow:
    """Set up the coupled flow of the block on weighted samples; `BlockFlow.solve` integrates it.

    Args:
        attention: a name of `invariants.ATTENTIONS`.
        activation: a name of `activations.ACTIVATIONS`, or an `Activation`.
        gradient: g = −∂loss/∂h, a function from h to g, both [sample, hidden]: `losses.constant`,
            `losses.cross_entropy`, `losses.squared_error`, or your own.
        x: token frequencies of each sample, [sample, token]; softmax attention takes counts as well.
        query: the query token of each sample, counted from 0.
        weight: probability of each sample; equal ones by default.
        training: learning rates and weight decay.
        architecture: temperature, residual connection, embedding, and the other options of `Architecture`.

    Returns:
        A `BlockFlow`.

    >>> from joma.theory.losses import constant
    >>> flow = block("exp", "linear", constant(1.0), x=[[0.6, 0.4]], training=Training(rate_z=2.0))
    >>> path = flow.solve([0.0, 0.5], w0=np.zeros((3, 1)), z0=np.zeros((1, 2)))
    >>> bool(np.allclose(path.z[:, 0], path.v[:, :, 0] ** 2, atol=1e-10))  # z = (κ/2) v²
    True
    """
    instance("training", training, Training, "pass `Training(rate_w=...)`")
    instance("architecture", architecture, Architecture, "pass `Architecture(temperature=...)`")
    samples = weighted_samples(attention, gradient, x, query=query, weight=weight, embedding=architecture.embedding)
    phi, skip = named(activation), architecture.skip
    return BlockFlow(
        **samples._asdict(),
        activation=smoothed(phi, architecture.kink_width),
        temperature=scalar("temperature", architecture.temperature, above=0.0),
        residual=flag("residual", architecture.residual),
        layer_norm=flag("layer_norm", architecture.layer_norm),
        skip=None if skip is None else real("skip", skip, ndim=2),
        training=training,
        method="DOP853" if phi.smooth else "LSODA",
    )
