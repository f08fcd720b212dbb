"""The gradient flow of a one-layer Transformer: attention, values, and above them LayerNorm, an MLP and a head.

    z free, or z_ml = (W_Qᵀ u_m) · (W_Kᵀ e_l)             b = attention(z_q, x)
    p_l = W_Vᵀ e_l                                          f = W_Oᵀ Σ_l b_l p_l + u_q
    s = W_2ᵀ φ(W_1ᵀ LayerNorm(f)) + f                      outputs = W_Hᵀ s

All matrices are trained. The laws of W_V hold along this flow, whatever stands above f (`docs/value-path.md`).
`value_block` checks its arguments and returns a `ValueFlow`; `ValueFlow.solve` integrates it. The backward pass is
written out, and shares no code with the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from joma.arguments import InputError, flag, instance, real, scalar
from joma.theory.activations import Activation, named
from joma.theory.block_parts import layer_norm, layer_norm_backward, pack, unpack, weighted_samples
from joma.theory.factored import KeyLedger, key_ledger_rates
from joma.theory.integration import DEFAULT_SOLVER, Solver, Times, integrate
from joma.theory.invariants import AttentionLaw, Ledger, ledger_rates
from joma.theory.losses import Gradient

FREE, FACTORED = ("z",), ("W_Q", "W_K")
ABOVE = ("W_V", "W_O", "W_1", "W_2", "W_H")
AXES = {
    "z": ("query", "token"),
    "W_Q": ("dim", "head"),
    "W_K": ("dim", "head"),
    "W_V": ("dim", "value"),
    "W_O": ("value", "dim"),
    "W_1": ("dim", "hidden"),
    "W_2": ("hidden", "dim"),
    "W_H": ("dim", "output"),
}

Parameters = dict[str, np.ndarray]
Samples = Float[np.ndarray, "sample token"]
Embedded = Float[np.ndarray, "sample dim"]
Token = Float[np.ndarray, " token"]


@dataclass(frozen=True)
class ValueRates:
    """The learning rates of the flow.

    Attributes:
        rate_z: of the attention logits; with factored logits of W_K and W_Q.
        rate_v: of W_V.
        rate_above: of W_O and of all that stands above it.
    """

    rate_z: float = 1.0
    rate_v: float = 1.0
    rate_above: float = 1.0

    def __post_init__(self) -> None:
        """Check the rates when the object is created."""
        for name in ("rate_z", "rate_v"):
            scalar(name, getattr(self, name), above=0.0)
        scalar("rate_above", self.rate_above, low=0.0)

    def of(self, parameter: str) -> float:
        """Return the learning rate of a parameter.

        >>> ValueRates(rate_z=2.0).of("W_K")
        2.0
        """
        if parameter in (*FREE, *FACTORED):
            return self.rate_z
        return self.rate_v if parameter == "W_V" else self.rate_above


@dataclass(frozen=True, eq=False)
class ValueArchitecture:
    """The options of the flow besides its attention and its activation.

    Attributes:
        temperature: T of softmax attention.
        factored: whether the logits are products of queries and keys.
        norm: LayerNorm of f before the MLP. skip: a residual connection around the MLP.
        embedding: [U_C, u_1, ...] as columns, [dim, token + query]; the identity by default. Contextual columns that
            are not orthonormal break the laws.
    """

    temperature: float = 1.0
    factored: bool = False
    norm: bool = True
    skip: bool = True
    embedding: ArrayLike | None = None


DEFAULT_RATES, DEFAULT_ARCHITECTURE = ValueRates(), ValueArchitecture()


class ValueVelocity(NamedTuple):
    """Time derivatives of the parameters, and what the ledgers need: E[b], E[b (b · y)], −∂loss/∂z and p · ṗ/η_V."""

    parameters: Parameters
    b_bar: np.ndarray
    pull: np.ndarray
    zeta: np.ndarray
    growth: np.ndarray


@dataclass(frozen=True)
class ValueSolution:
    """The parameters at the requested times, up to the blow-up, if any (see `integration.Solution`)."""

    times: Times
    parameters: Parameters
    """By name, each with the time as leading axis."""
    p: Float[np.ndarray, "time token value"]
    k: Float[np.ndarray, "time token head"] | None
    z: Float[np.ndarray, "time query token"]
    ledger: Ledger
    """Of free logits and softmax attention, with value vectors in the place of weights; zero for other attentions."""
    keys: KeyLedger | None
    """Of factored logits and exp or softmax attention."""
    blow_up: float
    evaluations: int


@dataclass(frozen=True, eq=False)
class ValueFlow:
    """The coupled flow of all parameters; create it with `value_block`."""

    attention: AttentionLaw
    activation: Activation
    gradient: Gradient
    x: Samples
    query: Int[np.ndarray, " sample"]
    weight: Float[np.ndarray, " sample"]
    context: Float[np.ndarray, "dim token"]
    query_embedding: Float[np.ndarray, "dim query"]
    architecture: ValueArchitecture
    rates: ValueRates
    b_ref: Token
    """The mean of uniform attention: the reference of softmax's ledger."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the state."""
        return (*(FACTORED if self.architecture.factored else FREE), *ABOVE)

    def logits(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the attention logits [..., query, token], free or factored."""
        if not self.architecture.factored:
            return parameters["z"]
        return (self.query_embedding.T @ parameters["W_Q"]) @ np.swapaxes(self.context.T @ parameters["W_K"], -1, -2)

    def velocity(self, parameters: Mapping[str, np.ndarray]) -> ValueVelocity:
        """Return the time derivatives of the parameters, unchecked."""
        z, p, w_o = self.logits(parameters), self.context.T @ parameters["W_V"], parameters["W_O"]
        b = self.attention.weigh(z[self.query], self.x, self.architecture.temperature)
        mixed = b @ p
        f = mixed @ w_o + self.query_embedding.T[self.query]
        descent, f_gradient = self._above(parameters, f)
        mixed_gradient = f_gradient @ w_o.T
        p_descent, y = b.T @ mixed_gradient, mixed_gradient @ p.T
        zeta = np.zeros_like(z)
        np.add.at(zeta, self.query, self.attention.carry_back(y, b, self.x, self.architecture.temperature))
        descent |= {
            "W_O": mixed.T @ f_gradient,
            "W_V": self.context @ p_descent,
            **self._logit_descent(parameters, zeta),
        }
        return ValueVelocity(
            parameters={name: self.rates.of(name) * descent[name] for name in self.names},
            b_bar=self.weight @ b,
            pull=(b * (b * y).sum(axis=1, keepdims=True)).sum(axis=0),
            zeta=zeta,
            growth=(p * (self.context.T @ descent["W_V"])).sum(axis=1),
        )

    def _above(self, parameters: Mapping[str, np.ndarray], f: Embedded) -> tuple[Parameters, Embedded]:
        """Return the descent directions of what stands above f, and −∂loss/∂f with the samples' weights in it."""
        w_1, w_2, w_h = (parameters[name] for name in ("W_1", "W_2", "W_H"))
        mlp_input, deviation = layer_norm(f) if self.architecture.norm else (f, None)
        preactivation = mlp_input @ w_1
        hidden = self.activation.value(preactivation)
        stream = hidden @ w_2 + (f if self.architecture.skip else 0.0)
        g = self.weight[:, None] * self.gradient(stream @ w_h)
        stream_gradient = g @ w_h.T
        slope = (stream_gradient @ w_2.T) * self.activation.slope(preactivation)
        f_gradient = slope @ w_1.T
        if deviation is not None:
            f_gradient = layer_norm_backward(f_gradient, mlp_input, deviation)
        if self.architecture.skip:
            f_gradient = f_gradient + stream_gradient
        return {"W_1": mlp_input.T @ slope, "W_2": hidden.T @ stream_gradient, "W_H": stream.T @ g}, f_gradient

    def _logit_descent(self, parameters: Mapping[str, np.ndarray], zeta: np.ndarray) -> Parameters:
        if not self.architecture.factored:
            return {"z": zeta}
        q, k = self.query_embedding.T @ parameters["W_Q"], self.context.T @ parameters["W_K"]
        return {"W_Q": self.query_embedding @ (zeta @ k), "W_K": self.context @ (zeta.T @ q)}

    def solve(
        self, times: ArrayLike, start: Mapping[str, ArrayLike], *, solver: Solver = DEFAULT_SOLVER
    ) -> ValueSolution:
        """Integrate the flow, with its ledger.

        Args:
            times: as in `integrate`.
            start: the parameters at time 0 by name: W_V [dim, value], W_O [value, dim], W_1 [dim, hidden],
                W_2 [hidden, dim], W_H [dim, output], and z [query, token] or W_Q and W_K [dim, head].
            solver: method and tolerances.
        """
        begin = self._start(start)
        terms = np.zeros((3 if self.architecture.factored else 2, len(self.b_ref)))
        shapes = [part.shape for part in (*begin, terms)]

        def rhs(_: float, state: np.ndarray) -> np.ndarray:
            *matrices, _terms = unpack(state, shapes)
            parameters = dict(zip(self.names, matrices, strict=True))
            velocity = self.velocity(parameters)
            return pack(*velocity.parameters.values(), *self._ledger_rates(parameters, velocity))

        numbers = 2000 + len(self.x) * sum(part.size for part in begin) // 8
        solution = integrate(rhs, pack(*begin, terms), times, solver, numbers=numbers)
        *matrices, sums = unpack(solution.states, shapes)
        parameters = dict(zip(self.names, matrices, strict=True))
        none, factored = np.zeros_like(sums[:, 0]), self.architecture.factored
        return ValueSolution(
            solution.times,
            parameters,
            self.context.T @ parameters["W_V"],
            self.context.T @ parameters["W_K"] if factored else None,
            self.logits(parameters),
            Ledger(none, none, none) if factored else Ledger(sums[:, 0], sums[:, 1], none),
            KeyLedger(sums[:, 0], sums[:, 1], sums[:, 2], none) if factored and self.attention.power == 1 else None,
            solution.blow_up,
            solution.evaluations,
        )

    def _ledger_rates(self, parameters: Parameters, velocity: ValueVelocity) -> list[Token]:
        """Return the time derivatives of the ledger's terms: three of keys, or drift and gap."""
        normalised, zero = self.attention.normalised, np.zeros_like(self.b_ref)
        temperature = self.architecture.temperature if normalised else 1.0
        if self.architecture.factored:
            pull, z = velocity.pull if normalised else zero, self.logits(parameters)
            rate_k = self.rates.rate_z
            return [*key_ledger_rates(z, velocity.zeta, velocity.growth, pull, rate_k=rate_k, temperature=temperature)]
        if not normalised:
            return [zero, zero]
        p, p_dot = self.context.T @ parameters["W_V"], self.context.T @ velocity.parameters["W_V"]
        rates = {"rate_w": self.rates.rate_v, "rate_z": self.rates.rate_z}
        return [
            *ledger_rates(p, p_dot, velocity.b_bar, velocity.pull, temperature=temperature, b_ref=self.b_ref, **rates)
        ]

    def _start(self, start: Mapping[str, ArrayLike]) -> list[np.ndarray]:
        """Return the parameters in order, with shapes that fit each other and the data."""
        instance("start", start, Mapping, "give the parameters by name")
        if set(start) != set(self.names):
            got = ", ".join(sorted(map(str, start)))
            raise InputError("start", f"the parameters {', '.join(self.names)}", got, "name each of them")
        (dim, tokens), queries = self.context.shape, self.query_embedding.shape[1]
        sizes, arrays = {"dim": dim, "token": tokens, "query": queries}, []
        for name in self.names:
            array = real(name, start[name], ndim=2)
            expected = tuple(sizes.setdefault(axis, size) for axis, size in zip(AXES[name], array.shape, strict=True))
            if array.shape != expected:
                axes = ", ".join(AXES[name])
                raise InputError(name, f"[{axes}] of shape {expected}", array.shape, "match the other parameters")
            arrays.append(array)
        output = np.zeros((len(self.x), sizes["output"]))
        if np.shape(self.gradient(output)) != output.shape:
            raise InputError("gradient", f"[sample, output] of shape {output.shape}", "another", "match `x` and `W_H`")
        return arrays


def value_block(
    attention: str,
    activation: str | Activation,
    gradient: Gradient,
    x: ArrayLike,
    *,
    query: ArrayLike = 0,
    weight: ArrayLike | None = None,
    rates: ValueRates = DEFAULT_RATES,
    architecture: ValueArchitecture = DEFAULT_ARCHITECTURE,
) -> ValueFlow:
    """Set up the flow of a one-layer Transformer on weighted samples; `ValueFlow.solve` integrates it.

    Args:
        attention: a name of `invariants.ATTENTIONS`.
        activation: a smooth one of `activations.ACTIVATIONS`, or an `Activation`.
        gradient: −∂loss/∂outputs as a function of the outputs, both [sample, output]: one of `losses`, or your own.
        x: token frequencies of each sample, [sample, token]; softmax attention takes counts as well.
        query: the query token of each sample, counted from 0.
        weight: probability of each sample; equal ones by default.
        rates: learning rates.
        architecture: temperature, factored logits, LayerNorm, residual connection, embedding.

    Returns:
        A `ValueFlow`.

    >>> from joma.theory.losses import cross_entropy
    >>> flow = value_block("exp", "tanh", cross_entropy([0, 1]), x=[[0.7, 0.3], [0.2, 0.8]])
    >>> start = {name: np.eye(3, 2 if name == "W_H" else 3) for name in flow.names} | {"z": np.zeros((1, 2))}
    >>> path = flow.solve([0.0, 1.0], start)
    >>> growth = ((path.p[1] ** 2).sum(1) - (path.p[0] ** 2).sum(1)) / 2
    >>> bool(np.allclose(path.z[1, 0], growth, rtol=1e-9)), bool(np.abs(growth).min() > 1e-3)
    (True, True)
    """
    instance("rates", rates, ValueRates, "pass `ValueRates(rate_v=...)`")
    instance("architecture", architecture, ValueArchitecture, "pass `ValueArchitecture(norm=...)`")
    samples = weighted_samples(attention, gradient, x, query=query, weight=weight, embedding=architecture.embedding)
    phi = named(activation)
    if not phi.smooth:
        raise InputError("activation", "smooth", phi.name, "pass `activations.smoothed(activation, width)`")
    for name in ("factored", "norm", "skip"):
        flag(name, getattr(architecture, name))
    scalar("temperature", architecture.temperature, above=0.0)
    return ValueFlow(**samples._asdict(), activation=phi, architecture=architecture, rates=rates)
