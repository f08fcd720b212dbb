"""Whether attention on text bounces: whether its entropy falls, and recovers by more than noise would."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from joma.drawing import COLOURS, MARKERS
from joma.probes.bounce import measure_bounce

SIGNIFICANCE = 0.01  # of a rise: how often noise alone may rise as clearly
MIN_BOUNCE = 0.05  # share of its start by which entropy must fall and recover for a bounce; the choice is ours

BOUNCE = f"the smaller of fall and recovery beyond chance, over the entropy at the start; 0 unless p ≤ {SIGNIFICANCE:g}"
P_VALUE = (
    "how often noise on a curve that never rises would rise as clearly; 1 unless entropy first falls by "
    f"{100 * MIN_BOUNCE:.0f} % of its start"
)


def bounces(entropy: xr.DataArray, *, each_layer: bool = False) -> xr.Dataset:
    """Measure the bounce of entropy [..., step, layer, head], mean over layers and heads, or of each layer.

        bounce = min(start − least, end − least − chance) / start,   0 unless p ≤ `SIGNIFICANCE`

    Where each of n layers is tested p must not exceed `SIGNIFICANCE`/n, so that noise alone makes a layer bounce in one
    of a hundred models.

    Returns:
        `bounce`, `least`, `turn` (the step of the minimum), `fall`, `recovery`, `chance` (the recovery of noise on a
        curve that never rises) and `p_value`, each over the other axes of entropy.
    """
    significance = SIGNIFICANCE / entropy.sizes["layer"] if each_layer else SIGNIFICANCE
    curve = entropy.mean("head" if each_layer else ("layer", "head")).transpose(..., "step")
    measured = measure_bounce(curve.step, curve)
    size = np.minimum(measured.depth, measured.recovery - measured.chance) / measured.start
    measures = {
        "bounce": np.where(measured.p_value <= significance, np.maximum(size, 0.0), 0.0),
        "least": measured.least,
        "turn": measured.step,
        "fall": measured.depth,
        "recovery": measured.recovery,
        "chance": measured.chance,
        "p_value": measured.p_value,
    }
    template = curve.isel(step=0, drop=True)
    return xr.Dataset({name: template.copy(data=values) for name, values in measures.items()})


def is_complete(entropy: xr.DataArray) -> xr.DataArray:
    """Return whether a model did not diverge: whether some layer has entropy at every step [..., step, layer, head].

    What is measured on the steps before a divergence is no result of a training. Layers that a model lacks are NaN.
    """
    return entropy.mean(("layer", "head")).notnull().all("step")


def bounce_p_value(entropy: xr.DataArray) -> xr.DataArray:
    """Return how often noise on a curve that never rises would rise as clearly as entropy, mean over layers and heads.

    It is 1 where entropy does not fall by `MIN_BOUNCE` of its start, or recovers from its minimum by no more than noise
    does: a curve that only rises is no bounce, nor is one that rises first and then falls. A seed that diverged is NaN.
    """
    measured = bounces(entropy)
    start = measured.least + measured.fall
    no_bounce = (measured.fall < MIN_BOUNCE * start) | (measured.recovery <= measured.chance)
    return measured.p_value.where(~no_bounce, 1.0).where(is_complete(entropy))


def mark_minimum(panel: Axes, curve: xr.DataArray, index: int) -> None:
    """Mark the minimum of the mean over seeds in the look of series number `index`, if it falls by `MIN_BOUNCE`."""
    mean = curve.mean("seed")
    if not mean.min() < (1 - MIN_BOUNCE) * mean.isel(step=0):
        return
    step = mean.idxmin("step")
    colour, shape = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    panel.plot(float(step) + 1, float(mean.sel(step=step)), shape, color=colour, markersize=6, zorder=3)
