"""Theorems 2 and 4: speed against an integrator, cost, memory, and the worst error against mpmath."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from functools import partial

import mpmath as mp
import numpy as np
from scipy.integrate import solve_ivp

from benchmarks import Row
from benchmarks.timing import time_ratio
from joma.theory import growth

_TIMES = np.linspace(0, 10, 200)
_START = 0.05  # the default of `growth.nonlinear`
processor_ratio = partial(time_ratio, repeats=3, clock=time.process_time)


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    mu = np.random.default_rng(0).uniform(0.5, 3, 100_000)
    ratio = _speed(mu)
    what = "growth.nonlinear, 1e5 x 200: speed per value over LSODA, 1e3 x 200"
    yield what, "≥ 10", f"{ratio:.0f}", ratio >= 10
    part, more_times = mu[::4], np.linspace(0, 10, 4 * _TIMES.size)
    for name, more in (("components", (mu, _TIMES)), ("times", (part, more_times))):
        ratio = processor_ratio(partial(growth.nonlinear, *more), partial(growth.nonlinear, part, _TIMES))
        yield f"growth.nonlinear: cost of 4 times as many {name}", "≤ 4.8", f"{ratio:.2f}", ratio <= 4.8
    extra = _memory(mu) / 2**20
    yield "growth.nonlinear, 1e5 x 200: memory beside the result, MiB", "≤ 64", f"{extra:.0f}", extra <= 64
    for function, error in (("linear", _linear_error), ("nonlinear", _nonlinear_error)):
        worst = max(map(error, *np.random.default_rng(1).uniform(-6, 6, (2, 200)), np.linspace(0, 1, 200)))
        what = f"growth.{function}: worst of 200 errors against mpmath, over 1 + |v̇| t"
        yield what, "≤ 1e-12", f"{worst:.1e}", bool(worst <= 1e-12)


def _speed(mu: np.ndarray) -> float:
    part = mu[:1000]

    def integrate() -> None:
        def flow(_: float, v: np.ndarray) -> np.ndarray:
            return (part - v) * np.exp(v**2 / 2)

        start = np.full(part.size, _START)
        solve_ivp(flow, (0, _TIMES[-1]), start, method="LSODA", t_eval=_TIMES, rtol=1e-12, atol=1e-12)

    return processor_ratio(integrate, lambda: growth.nonlinear(mu, _TIMES)) * mu.size / part.size


def _memory(mu: np.ndarray) -> int:
    """Return the peak memory in bytes, without the result."""
    tracemalloc.start()
    result = growth.nonlinear(mu, _TIMES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - result.nbytes


def _linear_error(delta: float, v0: float, share: float) -> float:
    """Return the error at `share` of the way from v0 to ±6.5, where the time is known in closed form."""
    delta, v0 = float(delta), float(v0)
    v = v0 + share * (np.copysign(6.5, delta) - v0)
    with mp.workdps(40):
        root = mp.sqrt(2)
        t = float(mp.sqrt(mp.pi / 2) * (mp.erf(v / root) - mp.erf(v0 / root)) / delta)
    speed = abs(delta) * np.exp(v**2 / 2)
    return float(abs(growth.linear(delta, t, v0) - v) / (1 + speed * t))


def _nonlinear_error(mu: float, v0: float, share: float) -> float:
    """Return the error where the gap has shrunk by up to exp(−40), with the time from a quadrature to 40 digits."""
    with mp.workdps(40):
        centre, start, drop = mp.mpf(float(mu)), mp.mpf(float(v0)), 40 * mp.mpf(float(share)) ** 3
        rest = mp.exp(-(centre**2) / 2)
        v = centre - (centre - start) * mp.exp(-drop)
        pieces = int(4 * abs(v - start)) + 1
        ends = [start + (v - start) * k / pieces for k in range(pieces + 1)]
        integral = mp.quad(lambda s: (mp.exp(-(s**2) / 2) - rest) / (centre - s), ends, method="gauss-legendre")
        t, v = float(rest * drop + integral), float(v)
    speed = abs(mu - v) * np.exp(v**2 / 2)
    return float(abs(growth.nonlinear(mu, t, v0) - v) / (1 + speed * t))
