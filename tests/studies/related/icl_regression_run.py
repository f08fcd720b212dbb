"""A small run of `icl-regression`, shared by the tests of its modules."""

from functools import cache

import xarray as xr

from joma.studies.related.icl_regression import Config, run
from joma.study import Context

SMALL = Config(
    spectrum=(1.6, 0.8, 0.3),
    length=8,
    merged_heads=(1,),
    merged_until=20.0,
    drop_scales=(1e-3, 1e-4, 1e-5),
    heads=3,
    low_rank=1,
    separate_scale=0.02,
    separate_until=1e4,
    records=20,
    prompts=300,
    batch=8,
    probe=64,
    whole_steps=12,
    whole_batch=8,
    layer_steps=12,
    covariances=100,
    searches=2,
    softmax_steps=12,
)  # fmt: skip


@cache
def small_run() -> xr.Dataset:
    """Return the run of the small config with three seeds."""
    return run(SMALL, Context((0, 1, 2)))
