"""Write the curves that the study `panorama` reads from the stored runs: `python docs/make_axes.py [FOLDER…]`.

Without folders those of `docs/runs` are taken. Of several runs of one study the last one counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import xarray as xr

from joma.files import write_bytes
from joma.studies.related.panorama_stored import PACKAGED, gather

FOLDER = Path(__file__).with_name("runs")


def content(curves: xr.Dataset) -> bytes:
    """Return the curves as the content of a compressed netCDF-4 file."""
    options = {"zlib": True, "complevel": 9, "shuffle": True}
    return bytes(curves.to_netcdf(engine="h5netcdf", encoding=dict.fromkeys(curves.data_vars, options)))


def main(folders: list[str]) -> None:
    """Write the packaged file and print what it holds."""
    curves = gather([Path(folder) for folder in folders] or [FOLDER])
    write_bytes(PACKAGED, content(curves))
    sys.stdout.write(f"{PACKAGED}: {PACKAGED.stat().st_size:,} bytes; {curves.attrs['runs']}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
