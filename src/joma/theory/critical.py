"""Theorem 3's critical points: found from many starts, and classified by the eigenvalues of the flow's Jacobian.

The flow depends on `v` only through its norm and its products with the centres. So it is enough to search the span of
the centres and one direction orthogonal to it: every other critical point is one of those, rotated about the span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from joma.arguments import InputError, check_size, choice, in_range, instance, scalar, whole
from joma.theory.mixture import FLOWS, Unit
from joma.theory.moments import Values

Starts = Float[np.ndarray, "start axis"]


def jacobian(unit: Unit, v: ArrayLike) -> np.ndarray:
    """Return ∂v̇/∂v [..., token, token] of the plain flow: the Hessian of `objective`, symmetric.

        Σ_c a_c E[φ''(v·x + ξ) x xᵀ], with B_k = E[u^k φ''(r + nσu)] and e = v/n:
        Σ_c a_c ( B_0 x̄x̄ᵀ + σB_1 (x̄eᵀ + ex̄ᵀ) + σ²B_2 eeᵀ + (σ tilt/n)(1 − eeᵀ) )

    The B_k come from central differences: the result is accurate to about 1e-9.

    >>> jacobian(Unit.of("relu", [[1.0, 0.0]], [1.0]), [2.0, 0.0]).round(6) + 0.0
    array([[0.      , 0.      ],
           [0.      , 0.120985]])
    """
    array = Unit.check(unit).vectors(v)
    with np.errstate(all="ignore"):
        matrix = linearised(unit, array)[1]
    in_range("v`, `unit", matrix)
    return matrix


def linearised(
    unit: Unit, v: Float[np.ndarray, "*batch token"]
) -> tuple[Float[np.ndarray, "*batch token"], Float[np.ndarray, "*batch token token"]]:
    """Return v̇ and its Jacobian together, since both need the same moments; `v` is not checked.

    >>> linearised(Unit.of("linear", [[1.0, 0.0]], [1.0]), np.ones(2))[0]
    array([1., 0.])
    """
    norm, a, sigma = np.linalg.norm(v, axis=-1, keepdims=True), unit.weights, unit.sigma
    slope, tilt, b0, b1, b2 = unit.moments.curved(*unit.seen(v))
    e, across = v / norm, sigma * (tilt @ a)[..., None] / norm
    mixed = sigma * ((a * b1) @ unit.centres)[..., None] * e[..., None, :]
    axial = (sigma**2 * (b2 @ a)[..., None] - across)[..., None] * e[..., None] * e[..., None, :]
    between = np.einsum("...c,ci,cj->...ij", a * b0, unit.centres, unit.centres)
    isotropic = across[..., None] * np.eye(v.shape[-1])
    return (a * slope) @ unit.centres + across * v, between + mixed + mixed.mT + axial + isotropic


# Each of the next three functions takes v, the drive, its Jacobian, λ and the radius. It returns a field whose roots
# are the critical points, and the Jacobian of that field.
def _plain(_v: Values, drive: Values, jacobian: Values, _decay: float, _radius: float) -> tuple[Values, Values]:
    return drive, jacobian


def _decayed(v: Values, drive: Values, jacobian: Values, decay: float, _radius: float) -> tuple[Values, Values]:
    return drive - decay * v, jacobian - decay * np.eye(v.shape[-1])


def _sphere(v: Values, drive: Values, jacobian: Values, _decay: float, radius: float) -> tuple[Values, Values]:
    """Return the drive orthogonal to v plus a term along v that is zero only on the sphere, and the Jacobian."""
    norm = np.linalg.norm(v, axis=-1, keepdims=True)
    e, eye = v / norm, np.eye(v.shape[-1])
    along = (drive * e).sum(-1, keepdims=True)
    tangent, excess = drive - along * e, 1.0 - (norm / radius) ** 2
    outer = e[..., None] * e[..., None, :]
    turn = along[..., None] * (eye - outer) + e[..., None] * tangent[..., None, :]
    turned = jacobian - outer @ jacobian - turn / norm[..., None]
    return tangent + excess * v, turned + excess[..., None] * eye - 2 * (norm / radius)[..., None] ** 2 * outer


Residual = Callable[[Values, Values, Values, float, float], tuple[Values, Values]]
RESIDUALS: dict[str, Residual] = {"plain": _plain, "sphere": _sphere, "decayed": _decayed}


@dataclass(frozen=True)
class CriticalPoints:
    """The critical points of one flow, the highest objective first.

    Attributes:
        points: v [point, token]. A point off the span of the centres stands for all its rotations about the span.
        residual: ‖v̇‖ relative to the terms that cancel in it [point].
        eigenvalues: of the Jacobian, ascending [point, token]; of the tangent one on the sphere [point, token − 1].
        kind: `stable` (all eigenvalues negative), `unstable` (all positive), `saddle` (both) or `degenerate` (a zero).
        cosine: between v and each centre [point, component].
        value: the flow's objective [point].
    """

    points: Float[np.ndarray, "point token"]
    residual: Float[np.ndarray, " point"]
    eigenvalues: Float[np.ndarray, "point eigenvalue"]
    kind: tuple[str, ...]
    cosine: Float[np.ndarray, "point component"]
    value: Float[np.ndarray, " point"]

    def of_kind(self, kind: str) -> np.ndarray:
        """Return the indices of the points of that kind, the highest objective first."""
        return np.flatnonzero(np.array(self.kind, dtype=str) == kind)


@dataclass(frozen=True)
class _Problem:
    """One flow of one unit, as equations to solve."""

    unit: Unit
    flow: str
    decay: float
    radius: float

    def field(self, v: Values) -> tuple[Values, Values]:
        return RESIDUALS[self.flow](v, *linearised(self.unit, v), self.decay, self.radius)

    def starts(self, count: int, generator: np.random.Generator) -> Starts:
        """Return starts along random directions, the centres and their opposites, with norms that the flow can balance.

        A third of them first climb the objective and a third descend it, towards stable and unstable points: far from
        those, ‖field‖ has local minima that would catch most starts.
        """
        x, size = self.unit.centres, np.linalg.norm(self.unit.centres, axis=-1)
        directions = np.concatenate([x[size > 0], -x[size > 0], generator.normal(size=(count, x.shape[1]))])
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        largest = np.abs(self.unit.weights) @ (size + self.unit.sigma) / self.decay
        low, high = sorted((0.05 / self.unit.sigma, max(largest, 20.0 / self.unit.sigma)))
        norms = np.exp(generator.uniform(np.log(low), np.log(high), size=(len(directions), 1)))
        v = directions * (self.radius if self.flow == "sphere" else norms)
        return np.concatenate([v[::3], self.climbed(v[1::3], 1.0), self.climbed(v[2::3], -1.0)])

    def climbed(
        self, v: Float[np.ndarray, "start axis"], sign: float, steps: int = 40
    ) -> Float[np.ndarray, "start axis"]:
        """Follow the flow (`sign` 1) or its reverse (−1), with steps that grow while the objective improves."""
        value, step = self.value(v), np.full((len(v), 1), 0.1)
        for _ in range(steps):
            velocity = FLOWS[self.flow](self.unit.drive(v), v, self.decay)
            speed, norm = (np.linalg.norm(vector, axis=-1, keepdims=True) for vector in (velocity, v))
            trial = v + sign * step * norm * velocity / np.maximum(speed, 1e-100)  # a dead unit does not move
            if self.flow == "sphere":
                trial *= self.radius / np.linalg.norm(trial, axis=-1, keepdims=True)
            trial_value = self.value(trial)
            better = sign * (trial_value - value) > 0
            v, value = np.where(better[:, None], trial, v), np.where(better, trial_value, value)
            step = np.minimum(step * np.where(better, 1.5, 0.3)[:, None], 0.5)
        return v

    def value(self, v: Values) -> Values:
        """Return the objective that the flow climbs, unchecked."""
        mean = self.unit.moments.mean(*self.unit.seen(v)) @ self.unit.weights
        return mean - self.decay / 2 * (v**2).sum(-1) if self.flow == "decayed" else mean

    def relative(self, v: Float[np.ndarray, "point axis"]) -> Float[np.ndarray, " point"]:
        """Return ‖field‖ relative to the terms that cancel in it.

        Where all terms are tiny (a dead unit) the result is infinite, so that the point does not count as a root.
        """
        slope, tilt = self.unit.moments.slopes(*self.unit.seen(v))
        terms = np.abs(slope) * np.linalg.norm(self.unit.centres, axis=-1) + self.unit.sigma * np.abs(tilt)
        size, residual = terms @ np.abs(self.unit.weights), np.linalg.norm(self.field(v)[0], axis=-1)
        # Far below 1e-100 the squares inside a norm underflow.
        return np.divide(residual, size, out=np.full(len(v), np.inf), where=size > 1e-100)

    def describe(self, v: Float[np.ndarray, "point token"]) -> CriticalPoints:
        order = np.argsort(-self.value(v), kind="stable")
        v, decay = v[order], self.decay if self.flow == "decayed" else 0.0
        norm = np.linalg.norm(v, axis=-1, keepdims=True)
        drive, jacobian = linearised(self.unit, v)
        jacobian = jacobian - decay * np.eye(v.shape[-1])
        if self.flow == "sphere":
            tangent = np.linalg.qr(v[..., None], mode="complete").Q[..., 1:]
            along = (drive * v).sum(-1)[:, None, None] / norm[..., None] ** 2
            jacobian = tangent.mT @ jacobian @ tangent - along * np.eye(v.shape[-1] - 1)
        eigenvalues = np.linalg.eigvalsh((jacobian + jacobian.mT) / 2)
        centres = self.unit.centres / np.maximum(np.linalg.norm(self.unit.centres, axis=-1, keepdims=True), 1e-300)
        kinds = tuple(_kind(row) for row in eigenvalues)
        return CriticalPoints(v, self.relative(v), eigenvalues, kinds, (v / norm) @ centres.T, self.value(v))


def _kind(eigenvalues: Float[np.ndarray, " eigenvalue"]) -> str:
    if (np.abs(eigenvalues) <= 1e-6 * np.abs(eigenvalues).max(initial=0.0)).any():
        return "degenerate"
    if (eigenvalues < 0).all():
        return "stable"
    return "unstable" if (eigenvalues > 0).all() else "saddle"


def _span_and_normal(centres: Float[np.ndarray, "component token"]) -> Float[np.ndarray, "token axis"]:
    """Return an orthonormal basis of the span of the centres and, if there is one, of a direction orthogonal to it."""
    _, sizes, axes = np.linalg.svd(centres)
    rank = int((sizes > 1e-10 * sizes.max(initial=1e-300)).sum())
    return axes[: rank + 1].T


def _distinct(points: Float[np.ndarray, "point axis"]) -> Float[np.ndarray, "distinct axis"]:
    distinct: list[np.ndarray] = []
    for point in points:
        if all(np.linalg.norm(point - other) > 1e-5 * np.linalg.norm(point) for other in distinct):
            distinct.append(point)
    return np.array(distinct).reshape(-1, points.shape[1])


def _descend(field: Callable[[Values], tuple[Values, Values]], v: Starts, steps: int = 60) -> Starts:
    """Minimise ‖field‖² by Levenberg–Marquardt from all starts at once; a start that stops moving leaves the batch."""
    g, jacobian = field(v)
    v, damping, moving = v.copy(), np.full(len(v), 1e-2), np.ones(len(v), dtype=bool)
    tiny = 1e-6 * np.linalg.norm(v, axis=-1).min()  # the flows are undefined at v = 0, but decay leads towards it
    for _ in range(steps):
        j, norm = jacobian[moving], np.linalg.norm(v[moving], axis=-1)
        normal = j.mT @ j
        weight = damping[moving] * np.trace(normal, axis1=-2, axis2=-1) + 1e-200
        damped, gradient = normal + weight[:, None, None] * np.eye(v.shape[1]), j.mT @ g[moving][..., None]
        step = -np.linalg.solve(damped, gradient)[..., 0]
        length = np.linalg.norm(step, axis=-1)
        step *= np.minimum(1.0, 0.9 * norm / np.maximum(length, 1e-300))[:, None]
        trial_g, trial_jacobian = field(v[moving] + step)
        better = np.linalg.norm(trial_g, axis=-1) < np.linalg.norm(g[moving], axis=-1)
        active = np.flatnonzero(moving)
        v[active[better]] += step[better]
        g[active[better]], jacobian[active[better]] = trial_g[better], trial_jacobian[better]
        damping[active] = np.maximum(damping[active] * np.where(better, 0.1, 8.0), 1e-12)
        vanished = np.linalg.norm(v[active], axis=-1) < tiny
        moving[active] = (better | (length > 1e-9 * norm)) & (damping[active] < 1e8) & ~vanished
        if not moving.any():
            break
    return v


def critical_points(
    unit: Unit,
    *,
    generator: np.random.Generator,
    flow: str = "plain",
    decay: float = 0.1,
    radius: float = 1.0,
    starts: int = 64,
) -> CriticalPoints:
    """Find the critical points of Theorem 3's flow and classify their stability.

    Levenberg–Marquardt runs from `starts` random starts at once, in the span of the centres and one direction
    orthogonal to it; two thirds of the starts are first moved up or down the objective. Points whose relative residual
    is below 1e-9 are kept, once each. The search may miss points. On the sphere, if none is degenerate, the
    Euler characteristic is a check: Σ (−1)^(unstable directions) = 1 + (−1)^(tokens − 1).

    Args:
        unit: from `Unit.of`.
        generator: draws the starts.
        flow: `plain`, `sphere` (‖v‖ fixed at `radius`) or `decayed` (−λv).
        decay: λ > 0 of the decayed flow.
        radius: radius of the sphere.
        starts: number of random starts.

    Returns:
        `CriticalPoints`.

    >>> unit, generator = Unit.of("relu", [[2.0, 0.0]], [1.0]), np.random.default_rng(0)
    >>> critical = critical_points(unit, flow="sphere", generator=generator)
    >>> critical.kind, critical.points.round(6)
    (('stable', 'unstable'), array([[ 1.,  0.], [-1.,  0.]]))
    """
    choice("flow", flow, RESIDUALS)
    Unit.check(unit)
    instance("generator", generator, np.random.Generator, "pass `np.random.default_rng(seed)`")
    problem = _Problem(unit, flow, scalar("decay", decay, above=0.0), scalar("radius", radius, above=0.0))
    count = whole("starts", starts)
    check_size("starts", (count, *unit.centres.shape, unit.centres.shape[1]))
    with np.errstate(all="ignore"):  # a start that overflows is no root
        try:
            return _search(problem, count, generator)
        except (np.linalg.LinAlgError, OverflowError):
            expected, remedy = "of a size at which the flow can be computed", "rescale them"
            raise InputError("unit`, `decay`, `radius", expected, "an overflow", remedy) from None


def _search(problem: _Problem, starts: int, generator: np.random.Generator) -> CriticalPoints:
    """Search from random starts in the span of the centres, and describe the roots in the whole space."""
    unit = problem.unit
    basis = _span_and_normal(unit.centres)
    reduced = replace(problem, unit=replace(unit, centres=unit.centres @ basis))
    roots = _descend(reduced.field, reduced.starts(starts, generator))
    roots = roots[reduced.relative(roots) < 1e-9]
    if basis.shape[1] < basis.shape[0]:
        roots[:, -1] = np.abs(roots[:, -1])  # rotations about the span count as one point
    return problem.describe(_distinct(roots) @ basis.T)
