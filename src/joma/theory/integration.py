"""One adaptive integrator for every flow of the package.

`integrate` is SciPy's `solve_ivp` with four additions: it stops at a blow-up and returns its time, it continues with an
implicit method where the explicit one needs too many evaluations, it never runs forever, and its errors say what to
change. A flow is a right-hand side that is passed to it, and a `Solver` is the method with its tolerances.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from joma.arguments import InputError, choice, real, scalar, whole

METHODS = {name: name for name in ("DOP853", "LSODA", "Radau")}
RESOLUTION = 1e6 * np.finfo(np.float64).eps  # a state whose e-folding time is below this fraction of t has blown up
_REMEDY = "Loosen `rtol` and `atol`, try `method` LSODA or Radau where the flow is stiff, and round jumps of `rhs`."

Rhs = Callable[[float, np.ndarray], np.ndarray]
Times = Float[np.ndarray, " time"]
States = Float[np.ndarray, "time *state"]
FlatStates = Float[np.ndarray, "time state"]
Grid = Float[np.ndarray, " requested"]


class IntegrationError(RuntimeError):
    """The integrator could not continue, and not because the solution blew up.

    Attributes:
        time: the last time at which the right-hand side was evaluated.
    """

    def __init__(self, message: str, time: float) -> None:
        super().__init__(message)
        self.time = time


@dataclass(frozen=True)
class Solver:
    """The method of integration and its tolerances.

    Attributes:
        method: a name of `METHODS`; LSODA and Radau are for stiff flows. None leaves the choice to the flow;
            DOP853 is used if the flow has no preference.
        rtol: relative tolerance of a step.
        atol: absolute tolerance of a step.
        bound: size of a component that counts as blown up.
        switch_after: evaluations of the right-hand side after which Radau takes over from DOP853. The other methods
            are used to the end.
        max_evaluations: evaluations of the right-hand side after which `IntegrationError` is raised.
    """

    method: str | None = None
    rtol: float = 1e-11
    atol: float = 1e-13
    bound: float = 1e100
    switch_after: int = 20_000
    max_evaluations: int = 1_000_000

    def __post_init__(self) -> None:
        """Check the settings when the object is created."""
        if self.method is not None:
            choice("method", self.method, METHODS)
        for name in ("rtol", "atol", "bound"):
            scalar(name, getattr(self, name), above=0.0)
        for name in ("switch_after", "max_evaluations"):
            whole(name, getattr(self, name))


DEFAULT_SOLVER = Solver()


@dataclass(frozen=True)
class Solution:
    """The states at the requested times; `times` ends before a blow-up, if there is one, and no state is NaN."""

    times: Times
    states: States
    blow_up: float
    """The time of the blow-up; infinite if there is none before the last requested time."""
    evaluations: int


def integrate(rhs: Rhs, y0: ArrayLike, times: ArrayLike, solver: Solver = DEFAULT_SOLVER) -> Solution:
    """Solve ẏ = rhs(t, y) from y(0) = y0, and stop where the solution blows up.

    A blow-up is where |y_i| passes the solver's `bound`, or where the e-folding time (1 + |y_i|)/|ẏ_i|
    falls below 2e-10 of t: the pole is then no further away than that.

    Close to a pole the flow can be stiff: the growing component makes others relax ever faster to their equilibrium.
    DOP853 then takes steps that are limited by stability, not by accuracy, and would need millions of them. So after
    `switch_after` evaluations Radau continues from the last state that DOP853 reached.

    Args:
        rhs: ẏ as a function of t and y, of the shape of y.
        y0: state at time 0, of any shape.
        times: the times at which the state is returned: not negative, increasing.
        solver: method and tolerances.

    Returns:
        A `Solution`, with states [time, *y0.shape].

    >>> solution = integrate(lambda t, y: y**2, 1.0, [0.0, 0.5, 2.0])  # y = 1/(1 − t)
    >>> solution.states.round(9), round(solution.blow_up, 9)
    (array([1., 2.]), 1.0)
    """
    start, grid = real("y0", y0), _grid(times)
    if np.abs(start).max() >= solver.bound:
        raise InputError("y0", f"below `bound` = {solver.bound:g}", f"{np.abs(start).max():g}", "raise the bound")
    with np.errstate(all="ignore"):
        slope = np.asarray(rhs(0.0, start))
    if not np.isfinite(slope).all():
        raise InputError("rhs", "finite at the start", "an infinite or NaN slope", "check `y0` and the parameters")
    if grid[-1] == 0:
        return Solution(grid, start[None].copy(), math.inf, 1)
    counted = _CountedRhs(rhs, start.shape, solver.max_evaluations)
    reached, states, blow_up = _run(counted, start.ravel(), grid, solver)
    return Solution(reached, states.reshape(-1, *start.shape), blow_up, counted.evaluations)


def _grid(times: ArrayLike) -> Grid:
    grid = np.atleast_1d(real("times", times, low=0.0))
    if grid.ndim != 1 or (np.diff(grid) <= 0).any():
        raise InputError("times", "one increasing row", f"shape {grid.shape}", "sort them and drop repetitions")
    return grid


class _CountedRhs:
    """A right-hand side on flat states that counts its calls, up to a limit, and never returns infinity or NaN."""

    def __init__(self, rhs: Rhs, shape: tuple[int, ...], limit: int) -> None:
        self.rhs, self.shape, self.limit = rhs, shape, limit
        self.evaluations, self.last_time = 0, 0.0

    def __call__(self, t: float, y: np.ndarray) -> np.ndarray:
        if self.evaluations == self.limit:
            raise IntegrationError(f"stalled at t = {t:.6g} after {self.limit} evaluations. {_REMEDY}", t)
        self.evaluations, self.last_time = self.evaluations + 1, t
        slope = np.asarray(self.rhs(t, y.reshape(self.shape)), dtype=np.float64)
        if slope.shape != self.shape:
            raise InputError("rhs", f"a function that returns arrays of shape {self.shape}", slope.shape, "match `y0`")
        # A trial step past a pole overflows. LSODA would accept NaN there; a huge number makes every method step back.
        return np.nan_to_num(slope.ravel(), nan=1e150, posinf=1e150, neginf=-1e150)


_Event = Callable[[float, np.ndarray], float]


def _run(rhs: _CountedRhs, start: np.ndarray, grid: Grid, solver: Solver) -> tuple[Times, FlatStates, float]:
    """Return the times reached, the flat states there, and the time of the blow-up, with at most one switch."""
    method, end = solver.method or "DOP853", float(grid[-1])
    events: list[_Event] = [_BlowUpEvent(rhs, solver.bound)]
    if method == "DOP853":
        events.append(_SwitchEvent(rhs, solver.switch_after, end))
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        solve = partial(solve_ivp, rhs, rtol=solver.rtol, atol=solver.atol)
        result = solve((0.0, end), start, method, t_eval=grid, events=events)
        reached, states = np.asarray(result.t), _flat_states(result.y, start)
        if method == "DOP853" and result.t_events[1].size:
            method, now, state = "Radau", result.t_events[1][0], result.y_events[1][0]
            result = solve((now, end), state, method, t_eval=grid[grid > now], events=events[:1])
            reached = np.concatenate([reached, result.t])
            states = np.concatenate([states, _flat_states(result.y, start)])
    if not result.success:
        messages = [result.message, *(str(warning.message) for warning in caught)]
        causes = "; ".join(message.rstrip(".") for message in messages)
        raise IntegrationError(f"{method} gave up at t = {rhs.last_time:.6g}: {causes}. {_REMEDY}", rhs.last_time)
    poles = result.t_events[0]
    return reached, states, float(poles[0]) if poles.size else math.inf


def _flat_states(y: ArrayLike, start: np.ndarray) -> FlatStates:
    """Return SciPy's states [state, time] as [time, state], also where no requested time was reached."""
    return np.asarray(y, dtype=np.float64).T.reshape(-1, start.size)


class _BlowUpEvent:
    """Positive before the blow-up, negative after it: a terminal event of `solve_ivp`."""

    terminal = True

    def __init__(self, rhs: _CountedRhs, bound: float) -> None:
        self.rhs, self.bound = rhs, bound

    def __call__(self, t: float, y: np.ndarray) -> float:
        size, slope = np.abs(y), np.abs(self.rhs(t, y))
        slope = np.maximum(slope, 1e-150)
        return float(min(1 - size.max() / self.bound, ((1 + size) / slope).min() - RESOLUTION * t))


class _SwitchEvent:
    """Zero at the end of the first step after `limit` evaluations, positive before: a terminal event of `solve_ivp`."""

    terminal = True

    def __init__(self, rhs: _CountedRhs, limit: int, end: float) -> None:
        self.rhs, self.limit, self.end = rhs, limit, end
        self.time = math.inf

    def __call__(self, t: float, _y: np.ndarray) -> float:
        if math.isinf(self.time) and self.rhs.evaluations >= self.limit and t < self.end:
            self.time = t
        return 1.0 if math.isinf(self.time) else self.time - t
