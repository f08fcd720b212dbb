"""A small run of addition, trained once for all tests."""

from __future__ import annotations

import pytest
import xarray as xr

from addition_runs import SMALL
from joma.studies.symmetry import addition
from joma.study import Context


@pytest.fixture(scope="session")
def addition_run() -> xr.Dataset:
    """The run of `SMALL` with two seeds."""
    return addition.run(SMALL, Context((0, 1)))
