"""How the laws of `scan-snap` come true as their premises are met: a much faster decoder, and rare common tokens.

Everything here is measured on the integrated flow, from zero to `END` times the paper's time of the transition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xarray as xr

from joma.data.tokens import SequenceClasses
from joma.studies.hierarchy.decoder_flow import decoder_margin, logit_flows, relative_gain, transition_time
from joma.studies.hierarchy.distinct_tokens import by_frequency, distinct_logits
from joma.studies.hierarchy.growth_phases import (
    SCAN,
    local_exponent,
    mean_exponent,
    relative_error,
    slowing_time,
    winning_logits,
)

BEGIN, END, RECORDS = 1e-3, 50.0, 160  # the times of the records, in units of the transition's


class Rates(NamedTuple):
    """Learning rates of the decoder and of the attention logits, and the number of the decoder's outputs."""

    decoder: float
    logits: float
    outputs: int


def flow_measures(data: SequenceClasses, rates: Rates) -> xr.Dataset:
    """Integrate the flow of every seed and return what the laws say of it, each [seed].

    Returns:
        `slowing`: the time at which the winning logits' power of t falls to 1, in units of the transition's;
        `scan`: their power of t in the scan phase; `gain_error`: the relative error of the relative gain at the end;
        `clock_distance`: the largest distance of their local power of t from that of the closed form `decoder_margin`.
    """
    (transition,) = transition_time(len(data.query), rates.outputs, np.array([rates.decoder]))
    units = np.geomspace(BEGIN, END, RECORDS)
    flow = logit_flows(
        data, np.r_[0.0, transition * units], outputs=rates.outputs, rate_w=rates.decoder, rate_z=rates.logits
    )
    logits = xr.DataArray(distinct_logits(data, flow[:, 1:]), {"step": units}, ("seed", "step", "label", "rank"))
    cooccurrence = xr.DataArray(by_frequency(data, data.frequency.numpy()), dims=("seed", "label", "rank"))
    last, winners = logits.isel(step=-1, drop=True), winning_logits(xr.Dataset({"logit": logits}))
    return xr.Dataset(
        {
            "slowing": slowing_time(winners),
            "scan": mean_exponent(winners, *SCAN),
            "gain_error": relative_error(last, relative_gain(last, cooccurrence)),
            "clock_distance": abs(local_exponent(winners) - local_exponent(clock(rates.outputs))).max(
                "step", skipna=False
            ),
        }
    )


def clock(outputs: int) -> xr.DataArray:
    """Return s² of `decoder_margin` over time: how the winning logits grow if both premises are met, up to a factor.

    >>> bool(clock(64).isel(step=0) < clock(64).isel(step=-1))
    True
    """
    units = np.geomspace(BEGIN, END, RECORDS)
    return xr.DataArray(decoder_margin(2 * np.log(outputs) * units, outputs) ** 2, {"step": units}, ("step",))


def clock_values(outputs: int) -> dict[str, float]:
    """Return `slowing` and `scan` of the closed form, the values that `flow_measures` tends to."""
    curve = clock(outputs)
    return {"clock_slowing": float(slowing_time(curve)), "clock_scan": float(mean_exponent(curve, *SCAN))}


def stack(measures: Mapping[float, xr.Dataset], dim: str) -> xr.Dataset:
    """Stack the measures of several flows along `dim`, whose coordinate is the mapping's keys; names get `dim` first.

    >>> flows = {10.0: xr.Dataset({"scan": ("seed", [2.1])}), 100.0: xr.Dataset({"scan": ("seed", [2.0])})}
    >>> stack(flows, "ratio").ratio_scan.values
    array([[2.1, 2. ]])
    """
    stacked = xr.concat(list(measures.values()), xr.IndexVariable(dim, list(measures)))
    return stacked.rename({name: f"{dim}_{name}" for name in stacked.data_vars}).transpose("seed", dim)


def largest_step(error: xr.DataArray, dim: str) -> xr.DataArray:
    """Return the largest ratio of an error to the one before it along `dim`: below 1 if it falls at every step.

    >>> float(largest_step(xr.DataArray([0.4, 0.2, 0.02], dims="ratio"), "ratio"))
    0.5
    """
    before, after = error.isel({dim: slice(None, -1)}), error.isel({dim: slice(1, None)})
    return (after / before.values).max(dim, skipna=False)
