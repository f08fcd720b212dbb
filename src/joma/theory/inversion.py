"""The flow v̇ = (μ − v) exp(v²/2) solved for v at any time, by inverting its quadrature (Theorem 4).

Write w = |μ − v| for the gap. The sign of μ − v never changes. A trajectory has two parts.

*Outer part.* t = ∫ exp(−v²/2)/w dw, summed by Gauss-Legendre over short panels. From the nearer end of a panel, a
*knot*, the Taylor series of the flow guesses v; the time that the guess takes, again by Gauss-Legendre, leaves a
residual of time; the same series, applied for that residual, corrects the guess. Nothing is iterated.

*Inner part*, w small. With the singularity taken out, t = exp(−μ²/2) [ln(w0/w) + S(w0) − S(w)] with an entire S, so
that q = w exp(S(w)) decays exactly as exp(−λt), λ = exp(μ²/2). The gap is a power series in q, and ln w follows from
ln q even when w is far below the rounding of μ.

Panels are as wide as possible while both w and exp(v²/2) change little over a panel: uniform in w, then geometric.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from joma.arguments import broadcast, real, scalar

# exp(v²/2) and exp(−v²/2) are both ordinary doubles up to here.
LARGEST = 37.0

# Under the clock of softmax attention exp(v²/2) times the rounding of a time in two parts must stay below 1e-10.
LARGEST_NORMALISED = 10.0

# With these the error of either part is a few roundings of v and t; benchmarks/growth.py measures it.
_PANEL = 0.25
_INNER = 1 / 16
_ORDER = 16
_NODES, _WEIGHTS = (np.polynomial.legendre.leggauss(5) + np.array([[1.0], [0.0]])) / 2

# The number of values computed at once, such that temporaries stay in the processor's cache whatever the problem.
_BLOCK = 2**16

# The clock of softmax attention: the number of cells in which a root is bracketed, the largest number of Newton steps
# (at worst bisections), and the error below which the next step is the last, since each step squares the error.
_CELLS = 512
_STEPS = 80
_NEAR = 1e-9
_ROUNDING = 4e-15


def stretch(temperature: float) -> float:
    """Return √(2/T): in the weights u = v √(2/T), softmax(v²/T) is softmax(u²/2)."""
    return float(np.sqrt(2 / scalar("temperature", temperature, above=0.0)))


def components(
    mu: ArrayLike, v0: ArrayLike, factor: float = 1.0, *, largest: float = LARGEST
) -> tuple[Float[np.ndarray, "*component"], Float[np.ndarray, "*component"]]:
    """Check the centres and starts, and return both multiplied by `factor` and broadcast together."""
    bound = largest / factor
    centre, start = real("mu", mu, low=-bound, high=bound), real("v0", v0, low=-bound, high=bound)
    shape = broadcast(mu=centre, v0=start)
    return np.broadcast_to(factor * centre, shape), np.broadcast_to(factor * start, shape)


@dataclass(frozen=True)
class Table:
    """A block of components, each with the times at which it passes its knots, and its inner series.

    A time has two parts, to be added: a double, and its rounding error.
    """

    mu: Float[np.ndarray, " component"]
    v0: Float[np.ndarray, " component"]
    side: Float[np.ndarray, " component"]  # sign of μ − v0; 0 where the component is at rest at μ
    knot: Float[np.ndarray, "knot component"]  # v at the knots of the outer part
    time: Float[np.ndarray, "2 knot component"]  # when v is at each knot
    switch: Float[np.ndarray, "2 knot component"]  # when the next knot is nearer; the last: the inner part
    inner_time: Float[np.ndarray, "2 component"]  # when the inner series has q = exp(log_q)
    inner_drop: Float[np.ndarray, " component"]  # ln(w0/q) then
    log_q: Float[np.ndarray, " component"]
    rate: Float[np.ndarray, " component"]  # λ
    series: Float[np.ndarray, "order component"]  # w/q in powers of q


@np.errstate(under="ignore")
def tabulate(mu: Float[np.ndarray, " component"], v0: Float[np.ndarray, " component"]) -> Table:
    """Compute the knots and times of each component's outer part, and the series of its inner part."""
    side = np.sign(mu - v0)
    scale = _scale(mu, v0)
    inner = _INNER / scale
    # A component at rest has no gap. Any positive number will do, since side = 0 removes it from every formula.
    w0 = np.where(side == 0, inner, np.abs(mu - v0))
    inner = np.minimum(inner, w0)
    count = _panels(mu, v0)
    first, last = _coordinate(scale * w0), _coordinate(scale * inner)
    along = np.linspace(0, 1, 2 * count + 1)[:, None]
    gap = np.clip(_from_coordinate(first + (last - first) * along) / scale, inner, w0)
    gap[0], gap[-1] = w0, inner
    time = _accumulate(_durations(mu, side, gap))
    knot = mu - side * gap[:-1:2]
    knot[0] = v0
    entire = _entire(mu, side, inner)
    return Table(
        mu=mu,
        v0=v0,
        side=side,
        knot=knot,
        time=time[:, :-1:2].copy(),
        switch=time[:, 1::2].copy(),
        inner_time=time[:, -1],
        inner_drop=np.log(w0 / inner) - entire,
        log_q=np.log(inner) + entire,
        rate=np.exp(mu**2 / 2),
        series=_inner_series(side * mu, side**2),
    )


def _scale(mu: np.ndarray, v0: np.ndarray) -> np.ndarray:
    """Return the inverse of the distance over which exp(v²/2) changes by a fixed factor, anywhere between v0 and μ."""
    return 1 + np.maximum(np.abs(mu), np.abs(v0))


def _panels(mu: np.ndarray, v0: np.ndarray) -> int:
    """Return how many panels the longest of the outer parts needs."""
    longest = _coordinate(np.maximum(_scale(mu, v0) * np.abs(mu - v0), _INNER)) - _coordinate(np.asarray(_INNER))
    return max(1, int(np.ceil(longest.max() / _PANEL)))


def _coordinate(x: np.ndarray) -> np.ndarray:
    """Map a scaled gap to the variable in which panels are equal: x above 1, 1 + ln x below."""
    return np.where(x > 1, x, 1 + np.log(np.minimum(x, 1)))


def _from_coordinate(p: np.ndarray) -> np.ndarray:
    return np.where(p > 1, p, np.exp(np.minimum(p, 1) - 1))


def _durations(
    mu: Float[np.ndarray, " component"],
    side: Float[np.ndarray, " component"],
    gap: Float[np.ndarray, "point component"],
) -> Float[np.ndarray, "piece component"]:
    """Return the time ∫ exp(−v²/2)/w dw that each piece between two gaps takes."""
    width = (gap[:-1] - gap[1:]) / gap[1:]  # relative, since 1/w may overflow
    total = np.zeros_like(width)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        ratio = 1 + node * width
        total += weight * np.exp(-((mu - side * gap[1:] * ratio) ** 2) / 2) / ratio
    return total * width


def _accumulate(durations: Float[np.ndarray, "piece component"]) -> Float[np.ndarray, "2 point component"]:
    """Return the running sum from 0, and the running sum of the rounding errors of its additions."""
    total = np.concatenate([np.zeros_like(durations[:1]), np.cumsum(durations, axis=0)])
    added = total[1:] - total[:-1]
    error = (total[:-1] - (total[1:] - added)) + (durations - added)
    return _renormalise(total, np.concatenate([np.zeros_like(error[:1]), np.cumsum(error, axis=0)]))


def _renormalise(time: np.ndarray, rest: np.ndarray) -> Float[np.ndarray, "2 ..."]:
    """Return the two parts such that the first is the double nearest to their sum."""
    total = time + rest
    return np.stack([total, rest - (total - time)])


def _entire(mu: np.ndarray, side: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return S(w) = ∫₀ʷ (exp(±μs − s²/2) − 1)/s ds, for w in the inner part."""
    s = np.multiply.outer(_NODES, w)
    return _WEIGHTS / _NODES @ np.expm1(side * mu * s - (side * s) ** 2 / 2)


def _inner_series(
    slope: Float[np.ndarray, " component"], square: Float[np.ndarray, " component"]
) -> Float[np.ndarray, "order component"]:
    """Return the coefficients of w/q in powers of q, from q dw/dq = w exp(−slope·w + square·w²/2)."""
    gap = np.zeros((_ORDER + 1, slope.size))
    growth = np.zeros((_ORDER, slope.size))
    exponent = np.zeros((_ORDER, slope.size))
    gap[1], growth[0] = 1, 1
    for n in range(1, _ORDER):
        powers = np.arange(1, n + 1)[:, None]
        exponent[n] = -slope * gap[n] + square / 2 * (gap[1:n] * gap[n - 1 : 0 : -1]).sum(axis=0)
        growth[n] = (powers * exponent[1 : n + 1] * growth[n - 1 :: -1]).sum(axis=0) / n
        gap[n + 1] = (gap[1 : n + 1] * growth[n:0:-1]).sum(axis=0) / n
    return gap[1:]


def evaluate(
    table: Table, t: Float[np.ndarray, " time"], rest: Float[np.ndarray, " time"] | None = None
) -> tuple[Float[np.ndarray, "time component"], Float[np.ndarray, "time component"]]:
    """Return v and the drop ln(w0/w) of the logarithm of the gap at the times `t`, or `t + rest`, in any order."""
    index = _locate(table.switch[0], t) if rest is None else _locate_finely(table.switch, _renormalise(t, rest))
    size = table.mu.size
    with np.errstate(over="ignore", under="ignore"):
        v, drop = _inner(table, t, rest)
        outer = np.flatnonzero(index < table.switch.shape[1])
        row, column = np.divmod(outer, size)
        knot = index.ravel()[outer] * size + column
        elapsed = t[row] - table.time[0].ravel()[knot]
        if rest is not None:
            elapsed += rest[row] - table.time[1].ravel()[knot]
        mu, v0 = table.mu[column], table.v0[column]
        v_outer = _outer(mu, table.knot.ravel()[knot], elapsed)
    v.ravel()[outer] = v_outer
    drop.ravel()[outer] = -np.log1p((v0 - v_outer) / (mu - v0))
    return v, drop


def _locate(
    switch: Float[np.ndarray, "knot component"], t: Float[np.ndarray, " time"]
) -> Int[np.ndarray, "time component"]:
    """Return how many of each component's switches lie at or before each time, in one pass over both."""
    order = np.argsort(t, kind="stable")
    return _count(np.searchsorted(t[order], switch), order)


def _locate_finely(
    switch: Float[np.ndarray, "2 knot component"], t: Float[np.ndarray, "2 time"]
) -> Int[np.ndarray, "time component"]:
    """Return the same as `_locate`, where switches of one component may differ in their second part only."""
    both = np.concatenate([switch.reshape(2, -1), t], axis=1)
    order = np.lexsort(both[::-1])
    is_time = order >= switch[0].size
    before = np.empty(order.size, dtype=np.int64)
    before[order] = np.cumsum(is_time)
    return _count(before[: switch[0].size].reshape(switch[0].shape), order[is_time] - switch[0].size)


def _count(
    before: Int[np.ndarray, "knot component"], order: Int[np.ndarray, " time"]
) -> Int[np.ndarray, "time component"]:
    """Return how many switches each time has passed, given how many of the sorted times lie before each switch."""
    size = before.shape[1]
    arrivals = np.bincount((before * size + np.arange(size)).ravel(), minlength=(order.size + 1) * size)
    index = np.empty((order.size, size), dtype=np.int64)
    index[order] = np.cumsum(arrivals.reshape(-1, size)[:-1], axis=0)
    return index


def _inner(
    table: Table, t: Float[np.ndarray, " time"], rest: Float[np.ndarray, " time"] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate the inner series at all times; earlier times give its first value, which `evaluate` overwrites."""
    decay = t[:, None] - table.inner_time[0]
    if rest is not None:
        decay += rest[:, None] - table.inner_time[1]
    np.maximum(decay, (table.switch[:, -1] - table.inner_time).sum(axis=0), out=decay)
    decay *= table.rate
    q = np.exp(table.log_q - decay)
    ratio = np.zeros_like(q)
    for coefficient in table.series[::-1]:
        ratio *= q
        ratio += coefficient
    drop = decay
    drop += table.inner_drop
    drop -= np.log(ratio)
    q *= ratio
    q *= table.side
    return np.subtract(table.mu, q, out=q), drop


def _outer(
    mu: Float[np.ndarray, " value"], knot: Float[np.ndarray, " value"], elapsed: Float[np.ndarray, " value"]
) -> Float[np.ndarray, " value"]:
    """Return v after the (signed) times `elapsed` from the knots, at most about half a panel."""
    guess = _displacement(mu, knot, elapsed)
    inverse_speed = np.zeros_like(guess)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        v = knot + node * guess
        inverse_speed += weight * np.exp(-(v**2) / 2) / (mu - v)
    v = knot + guess
    return v + _displacement(mu, v, elapsed - inverse_speed * guess)


def _displacement(
    mu: Float[np.ndarray, " value"], v: Float[np.ndarray, " value"], elapsed: Float[np.ndarray, " value"]
) -> Float[np.ndarray, " value"]:
    """Return the displacement of the flow in a time, by its Taylor series to the third order."""
    gap = mu - v
    product = v * gap
    x = np.exp(v**2 / 2) * elapsed
    third = (2 * product**2 - 4 * product + gap**2 + 1) / 3
    return gap * x * (1 + x / 2 * (product - 1 + x * third))


def pieces(
    mu: Float[np.ndarray, " component"], v0: Float[np.ndarray, " component"], times: int
) -> Iterator[tuple[slice, Table]]:
    """Yield the slice and the table of each block of components; a block at `times` times fits into the cache."""
    size = max(1, _BLOCK // max(min(times, _BLOCK), 2 * _panels(mu, v0)))
    for start in range(0, mu.size, size):
        block = slice(start, start + size)
        yield block, tabulate(mu[block], v0[block])


def chunks(
    table: Table, t: Float[np.ndarray, " time"], rest: Float[np.ndarray, " time"] | None = None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield slices of the times `t`, or `t + rest`, each with v and the drop of the log gap there."""
    size = max(1, _BLOCK // table.mu.size)
    for start in range(0, t.size, size):
        part = slice(start, start + size)
        yield part, *evaluate(table, t[part], None if rest is None else rest[part])


def partition(
    tables: Sequence[Table], tau: Float[np.ndarray, "2 time"]
) -> tuple[Float[np.ndarray, " time"], Float[np.ndarray, " time"]]:
    """Return ∫₀^τ Z dτ' and Z = Σ exp(v²/2) at τ, over all components.

    Since d ln w/dτ = −exp(v²/2), the integral is the sum of the drops of ln w: no further quadrature.
    """
    elapsed, z = np.zeros_like(tau[0]), np.zeros_like(tau[0])
    for table in tables:
        for part, v, drop in chunks(table, *tau):
            elapsed[part] += drop.sum(axis=1)
            z[part] += np.exp(v**2 / 2).sum(axis=1)
    return elapsed, z


def clock(tables: Sequence[Table], t: Float[np.ndarray, " time"]) -> Float[np.ndarray, "2 time"]:
    """Return the τ at which ∫₀^τ Z dτ' = t, for the clock dt = Z dτ of softmax attention, by bracketed Newton steps.

    It is returned in two parts: where Z is large, τ changes by less than its rounding while t changes visibly.
    """
    cells = grid(tables)
    cell_times, z = partition(tables, cells)
    cell = np.maximum(np.searchsorted(cell_times, t, side="right") - 1, 0)
    missing = np.maximum(t - cell_times[cell], 0)
    after = np.minimum(cell + 1, cell_times.size - 1)
    base, rest = cells[:, cell]
    # In the last, endless cell, Z is at least the number of components, since exp(v²/2) ≥ 1.
    endless = missing / sum(table.mu.size for table in tables)
    width = np.where(after > cell, (cells[:, after] - cells[:, cell]).sum(axis=0), endless)
    low, high = rest, rest + width
    rest = rest + np.minimum(missing / z[cell], width)
    for _ in range(_STEPS):
        elapsed, z = partition(tables, np.stack([base, rest]))
        missing = t - elapsed
        low, high = np.where(missing >= 0, rest, low), np.where(missing <= 0, rest, high)
        step = rest + missing / z
        step = np.where((step < low) | (step > high), (low + high) / 2, step)
        rest = step
        if (np.abs(missing) <= _NEAR + _ROUNDING * t).all():
            break
    return np.stack([base, rest])


def grid(tables: Sequence[Table]) -> Float[np.ndarray, "2 time"]:
    """Return sorted times between which no component moves by much: 0 and those of the tables, thinned evenly."""
    times = np.concatenate([np.hstack([table.switch.reshape(2, -1), table.inner_time]) for table in tables], axis=1)
    times = times[:, np.lexsort(times[::-1])]
    columns = np.linspace(0, times.shape[1] - 1, min(times.shape[1], _CELLS)).astype(int)
    return np.concatenate([np.zeros((2, 1)), times[:, columns]], axis=1)
