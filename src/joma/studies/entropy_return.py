"""How far the entropy of attention falls, and how far it comes back: one definition for all studies.

A noisy curve always comes back a little: `joma.probes.bounce` tests whether its recovery is more than noise.
"""

from __future__ import annotations

import xarray as xr


def fall(entropy: xr.DataArray, dim: str) -> xr.DataArray:
    """Return the entropy at the start less its minimum along `dim`; NaN where the training diverged.

    >>> float(fall(xr.DataArray([2.0, 0.5, 1.0], dims="step"), "step"))
    1.5
    """
    return entropy.isel({dim: 0}, drop=True) - entropy.min(dim, skipna=False)


def recovery(entropy: xr.DataArray, dim: str) -> xr.DataArray:
    """Return the entropy at the end less its minimum along `dim`; NaN where the training diverged.

    >>> float(recovery(xr.DataArray([2.0, 0.5, 1.0], dims="step"), "step"))
    0.5
    """
    return entropy.isel({dim: -1}, drop=True) - entropy.min(dim, skipna=False)


def share_regained(entropy: xr.DataArray, dim: str, *, visible: float = 0.0) -> xr.DataArray:
    """Return the recovery as a share of the fall; 0 where entropy falls by less than `visible`.

    >>> round(float(share_regained(xr.DataArray([2.0, 0.5, 1.0], dims="step"), "step")), 3)
    0.333
    """
    fallen = fall(entropy, dim)
    return (recovery(entropy, dim) / fallen).where(~(fallen < visible), 0.0)
