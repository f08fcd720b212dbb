"""One adaptive integrator for every flow of the package.

`integrate` is SciPy's `solve_ivp` with four additions: it stops at a blow-up and returns its time, it continues with an
implicit method where the explicit one needs too many evaluations, it ends within seconds, and its errors say what to
change. A flow is a right-hand side that is passed to it, and a `Solver` is the method with its tolerances.

Seconds are not measured, or the result would depend on the machine. Instead every evaluation counts as work, more of it
for larger states and for implicit methods, and the work is bounded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from joma.arguments import (
    InputError,
    check_size,
    choice,
    described,
    increasing,
    instance,
    real,
    scalar,
    short_reason,
    whole,
)

METHODS = {name: name for name in ("DOP853", "LSODA", "Radau")}
RESOLUTION = 1e6 * np.finfo(np.float64).eps  # a state whose e-folding time is below this fraction of t has blown up
# A unit of work takes about 50 to 100 µs on one core, so that this is 5 to 10 s.
MAX_WORK = 100_000
_MIN_EVALUATIONS = 500  # of large states, whose evaluations cost more than a unit each
_MIN_JACOBIANS = 4  # that must fit into the work that is left, or Radau does not take over
_STEPS_PER_EFOLDING = 0.01  # a longer step than 1/this e-foldings shows that the slope is rounding, not growth
_USUAL_TIMES = (1e-50, 1e50)
_REMEDY = (
    "Loosen `rtol` and `atol`, end `times` earlier, try `method` LSODA or Radau where the flow is stiff, round jumps"
    " of `rhs`, or raise `max_evaluations`."
)

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
        max_evaluations: evaluations of the right-hand side after which `IntegrationError` is raised. None leaves it
            to the size of the state: about as many as take 5 to 10 seconds on one core, 100,000 for small states.
    """

    method: str | None = None
    rtol: float = 1e-11
    atol: float = 1e-13
    bound: float = 1e100
    switch_after: int = 20_000
    max_evaluations: int | None = None

    def __post_init__(self) -> None:
        """Check the settings when the object is created."""
        if self.method is not None:
            choice("method", self.method, METHODS)
        for name in ("rtol", "atol", "bound"):
            scalar(name, getattr(self, name), above=0.0)
        whole("switch_after", self.switch_after)
        if self.max_evaluations is not None:
            whole("max_evaluations", self.max_evaluations)


DEFAULT_SOLVER = Solver()


@dataclass(frozen=True)
class Solution:
    """The states at the requested times; `times` ends before a blow-up, if there is one, and no state is NaN."""

    times: Times
    states: States
    blow_up: float
    """The time of the blow-up; infinite if there is none before the last requested time."""
    evaluations: int


def integrate(
    rhs: Rhs, y0: ArrayLike, times: ArrayLike, solver: Solver = DEFAULT_SOLVER, *, numbers: int = 0
) -> Solution:
    """Solve ẏ = rhs(t, y) from y(0) = y0, and stop where the solution blows up.

    A blow-up is where |y_i| passes the solver's `bound`, or where the e-folding time (1 + |y_i|)/|ẏ_i|
    falls below 2e-10 of t: the pole is then no further away than that.

    Close to a pole the flow can be stiff: the growing component makes others relax ever faster to their equilibrium.
    DOP853 then takes steps that are limited by stability, not by accuracy, and would need millions of them. So after
    `switch_after` evaluations Radau continues from the last state that DOP853 reached, unless the state is so large
    that a few Jacobians would take too long.

    Args:
        rhs: ẏ as a function of t and y, of the shape of y.
        y0: state at time 0, of any shape.
        times: the times at which the state is returned: not negative, increasing.
        solver: method and tolerances.
        numbers: how many numbers an evaluation of `rhs` computes, if more than those of the state; the bound on the
            evaluations depends on it.

    Returns:
        A `Solution`, with states [time, *y0.shape].

    Raises:
        IntegrationError: the solver gave up, or needed too many evaluations; it has the time that was reached.

    >>> solution = integrate(lambda t, y: y**2, 1.0, [0.0, 0.5, 2.0])  # y = 1/(1 − t)
    >>> solution.states.round(9), round(solution.blow_up, 9)
    (array([1., 2.]), 1.0)
    """
    if not callable(rhs):
        raise InputError("rhs", "a function of t and y", described(rhs), "pass a function")
    instance("solver", solver, Solver, "pass `Solver(method=...)`")
    start, grid = real("y0", y0), increasing("times", times)
    check_size("times", (grid.size, start.size))
    if solver.method in ("LSODA", "Radau"):  # they store a Jacobian
        check_size("y0", (start.size, start.size))
    if np.abs(start).max() >= solver.bound:
        raise InputError("y0", f"below `bound` = {solver.bound:g}", f"{np.abs(start).max():g}", "raise the bound")
    with np.errstate(all="ignore"):
        slope = np.asarray(rhs(0.0, start))
    if not np.isfinite(slope).all():
        raise InputError("rhs", "finite at the start", "an infinite or NaN slope", "check `y0` and the parameters")
    if grid[-1] == 0:
        return Solution(grid, start[None].copy(), math.inf, 1)
    implicit = solver.method in ("LSODA", "Radau")
    unit, cost = _time_unit(start, slope, grid), _Cost(start.size, numbers)
    counted = _CountedRhs(rhs, start.shape, unit, solver.max_evaluations, cost, implicit=implicit)
    reached, states, blow_up = _run(counted, start.ravel(), grid / unit, solver)
    return Solution(reached * unit, states.reshape(-1, *start.shape), blow_up * unit, counted.evaluations)


def _time_unit(start: np.ndarray, slope: np.ndarray, grid: Grid) -> float:
    """Return a power of two as the unit of time, in which the flow is neither so slow nor so fast that squares vanish.

    The solvers square slopes: at 1e-200 an error would seem to be zero. The unit is 1 for all usual flows, and dividing
    by it is exact.
    """
    with np.errstate(over="ignore"):
        efolding = ((1 + np.abs(start)) / np.maximum(np.abs(slope), 1e-308)).min()
    (low, high), scale = _USUAL_TIMES, min(float(efolding), float(grid[-1]))
    if low <= scale <= high:
        return 1.0
    unit = 2.0 ** math.floor(math.log2(max(scale, grid[-1] * 1e-290)))
    first = grid[grid > 0][0]
    if first / unit < 1e-290:
        got = f"{first:.3g} and {grid[-1]:.3g}"
        raise InputError("times", "within 290 orders of magnitude", got, "leave out the first or the last of them")
    return unit


class _Cost:
    """The work of one evaluation, with the solver's share of it, in units of that of a small state.

    The terms are fitted to measured times. Radau factorises a complex matrix of the size of the state, about once in
    ten evaluations.
    """

    def __init__(self, size: int, numbers: int) -> None:
        self.size = size
        self.explicit = 1 + max(size, numbers) / 2000
        self.implicit = 0.2 + self.explicit + size / 80 + (size / 250) ** 3


class _CountedRhs:
    """A right-hand side on flat states that counts its calls, up to a limit, and never returns infinity or NaN."""

    def __init__(
        self, rhs: Rhs, shape: tuple[int, ...], unit: float, max_evaluations: int | None, cost: _Cost, *, implicit: bool
    ) -> None:
        self.rhs, self.shape, self.unit, self.cost = rhs, shape, unit, cost
        self.evaluations, self.last_time = 0, 0.0
        self.is_bounded_by_work = max_evaluations is None
        self.limit = max_evaluations or self._affordable(cost.implicit if implicit else cost.explicit)

    def _affordable(self, cost: float) -> int:
        return max(_MIN_EVALUATIONS, int((MAX_WORK - self.evaluations * self.cost.explicit) / cost))

    def can_switch(self, after: int) -> bool:
        """Return whether Radau, after so many evaluations of DOP853, can compute a few Jacobians within the limit."""
        if not self.is_bounded_by_work:
            return True
        left = MAX_WORK - after * self.cost.explicit
        return left >= _MIN_JACOBIANS * self.cost.size * self.cost.implicit

    def switch(self) -> None:
        """Reduce the limit to what Radau can do in the work that is left."""
        if self.is_bounded_by_work:
            self.limit = self.evaluations + self._affordable(self.cost.implicit)

    def __call__(self, t: float, y: np.ndarray) -> np.ndarray:
        t = t * self.unit
        if self.evaluations == self.limit:
            raise IntegrationError(f"stalled at t = {t:.6g} after {self.limit} evaluations. {_REMEDY}", t)
        self.evaluations, self.last_time = self.evaluations + 1, t
        slope = np.asarray(self.rhs(t, y.reshape(self.shape)), dtype=np.float64)
        if slope.shape != self.shape:
            raise InputError("rhs", f"a function that returns arrays of shape {self.shape}", slope.shape, "match `y0`")
        # A trial step past a pole overflows. LSODA would accept NaN there; a huge number makes every method step back.
        return np.nan_to_num(self.unit * slope.ravel(), nan=1e150, posinf=1e150, neginf=-1e150)


_Event = Callable[[float, np.ndarray], float]


def _run(rhs: _CountedRhs, start: np.ndarray, grid: Grid, solver: Solver) -> tuple[Times, FlatStates, float]:
    """Return the times reached, the flat states there, and the time of the blow-up, with at most one switch."""
    method, end = solver.method or "DOP853", float(grid[-1])
    events: list[_Event] = [_BlowUpEvent(rhs, solver.bound)]
    if method == "DOP853" and rhs.can_switch(solver.switch_after):
        events.append(_SwitchEvent(rhs, solver.switch_after, end))
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        solve = partial(_solve, rhs, rtol=solver.rtol, atol=solver.atol)
        result = solve((0.0, end), start, method, t_eval=grid, events=events)
        reached, states = np.asarray(result.t), _flat_states(result.y, start)
        if len(events) == 2 and result.t_events[1].size:
            rhs.switch()
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


def _solve(rhs: _CountedRhs, *args: Any, **options: Any) -> Any:
    """Call `solve_ivp`; what fails inside it, such as the search for a blow-up or a Jacobian, gives up."""
    try:
        return solve_ivp(rhs, *args, **options)
    except InputError:
        raise
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as cause:
        message = f"gave up at t = {rhs.last_time:.6g}: {short_reason(cause)}. {_REMEDY}"
        raise IntegrationError(message, rhs.last_time) from cause


def _flat_states(y: ArrayLike, start: np.ndarray) -> FlatStates:
    """Return SciPy's states [state, time] as [time, state], also where no requested time was reached."""
    return np.asarray(y, dtype=np.float64).T.reshape(-1, start.size)


class _BlowUpEvent:
    """Positive before the blow-up, negative after it: a terminal event of `solve_ivp`.

    At rest the slope is rounding, and late enough even this seems to be growth within a fraction of t. But then the
    solver takes steps far longer than an e-folding time, which it never does near a pole.
    """

    terminal = True

    def __init__(self, rhs: _CountedRhs, bound: float) -> None:
        self.rhs, self.bound = rhs, bound
        self.step_start = self.step_end = 0.0

    def __call__(self, t: float, y: np.ndarray) -> float:
        if t > self.step_end:  # the end of a step; times before it are tried to locate the event
            self.step_start, self.step_end = self.step_end, t
        if not np.isfinite(y).all():  # between two steps: the interpolation overflows beyond the pole
            return -1.0
        size, slope = np.abs(y), np.abs(self.rhs(t, y))
        slope = np.maximum(slope, 1e-300)
        efolding = (1 + size) / slope
        growing = efolding > _STEPS_PER_EFOLDING * (self.step_end - self.step_start)
        return float(min(1 - size.max() / self.bound, efolding.min(where=growing, initial=math.inf) - RESOLUTION * t))


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
