"""The curves that `panorama` takes from stored runs: those that studies recorded, and those that follow from weights.

`stored_axes.nc` beside this module holds them for the runs of docs/runs. `docs/make_axes.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr
from scipy.special import softmax

from joma.arguments import InputError
from joma.drawing import evenly_spaced
from joma.files import checksum
from joma.runs import find_runs, open_run
from joma.studies.common_axes import NAMES, STEP, axes_dataset
from joma.studies.related.panorama_curves import split, stack

PACKAGED = Path(__file__).with_name("stored_axes.nc")
PREFIX, MEMBER = "stored", "member"
MAX_RECORDS, MAX_MEMBERS = 64, 12  # of a source, so that the file stays small


class Reader(NamedTuple):
    """The study that a source is read from, the function from its run to the curve, and what it needs of the run."""

    study: str
    read: Callable[[xr.Dataset], xr.Dataset]
    needs: frozenset[str] = frozenset(NAMES)


def recorded(run: xr.Dataset) -> xr.Dataset:
    """Return the common axes that the run itself recorded."""
    return run[list(NAMES)].transpose("seed", STEP)


def single_unit(run: xr.Dataset) -> xr.Dataset:
    """Return the common axes of a block with one hidden unit by Theorem 1: attention is softmax(v²/2).

    Its weight is a single column, whose stable rank is 1.
    """
    v = run.trained.transpose("seed", "time", "token").values
    return axes_dataset(softmax(v**2 / 2, axis=-1)[..., None, :], v[..., None], run.time.values.tolist())


def language_model(run: xr.Dataset) -> xr.Dataset:
    """Return the common axes of a one-layer language model whose run stored its mean entropy in nats, and no sink.

    The mean over rows is divided by that of uniform attention. The rank is that of the MLP's lower weights.
    """
    entropy = run.entropy.isel(layer=0).mean("head").transpose("seed", "step")
    uniform = np.log(np.arange(1, language_length(run) + 1)).mean()
    rank = run.stable_rank.isel(layer=0).transpose("seed", "step")
    values = (entropy.values / uniform, np.full(entropy.shape, np.nan), rank.values)
    variables = {name: (("seed", STEP), array) for name, array in zip(NAMES, values, strict=True)}
    return xr.Dataset(variables, {STEP: run.step.values})


def language_length(run: xr.Dataset) -> int:
    """Return the number of tokens of a window, from the config that a run stores as an attribute."""
    return int(json.loads(run.attrs["config"])["length"])


WEIGHTS, ENTROPIES = frozenset({"trained"}), frozenset({"entropy", "stable_rank"})
READERS: dict[str, Reader] = {
    "winner": Reader("winner", single_unit, WEIGHTS),
    "sparse-dense": Reader("sparse-dense", single_unit, WEIGHTS),
    "polarise": Reader("polarise", recorded),
    "even-pairs": Reader("even-pairs", recorded),
    "max-margin": Reader("max-margin", recorded),
    "icl-regression": Reader("icl-regression", recorded),
    "markov-unigram": Reader("markov-unigram", recorded),
    "induction-phases": Reader("induction-phases", recorded),
    "entropy-floor": Reader("entropy-floor", recorded),
    "wikitext": Reader("entropy-text", lambda run: language_model(run.sel(depth=1)), ENTROPIES),
    "wikitext-linear": Reader(
        "activation-control", lambda run: language_model(run.sel(activation="linear")), ENTROPIES
    ),
}


def gather(folders: Iterable[Path]) -> xr.Dataset:
    """Return the curves of all sources that have a run in the folders, stacked; of several runs the last is taken.

    A run that lacks what its source needs is left out. The attribute `runs` names the runs.
    """
    runs = {path.parent.name: path for folder in folders for path in find_runs(folder)}
    curves = {}
    for name, reader in READERS.items():
        run = open_run(runs[reader.study]) if reader.study in runs else xr.Dataset()
        if reader.needs <= set(run.data_vars):
            curves[name] = thinned(reader.read(run).isel(seed=slice(MAX_MEMBERS)))
    if not curves:
        studies = sorted({reader.study for reader in READERS.values()})
        remedy = "name a folder such as docs/runs, or none for the curves that are packaged"
        raise InputError("runs", f"a folder with runs of {', '.join(studies)}", "no such run", remedy)
    names = sorted({f"{READERS[name].study}/{runs[READERS[name].study].name}" for name in curves})
    return stack(curves, PREFIX, member=MEMBER).astype(np.float32).assign_attrs(runs=", ".join(names))


def thinned(curve: xr.Dataset) -> xr.Dataset:
    """Return a curve with fewer records: evenly spaced ones, and those at which the entropy of a seed is least."""
    least = np.unique(curve.axes_entropy.argmin(STEP, skipna=False).values)
    spaced = evenly_spaced(curve.sizes[STEP], MAX_RECORDS - len(least))
    return curve.isel({STEP: sorted({*spaced, *least.tolist()})})


def stored(runs: str) -> xr.Dataset:
    """Return the stacked curves of a folder of runs, or the packaged ones if none is named."""
    if not runs:
        return open_run(PACKAGED, check=False).drop_attrs()
    folder = Path(runs)
    if not folder.is_dir():
        raise InputError("runs", "a folder of runs", runs, "name one, or none for the curves that are packaged")
    return gather([folder]).drop_attrs()


def inputs(runs: str) -> dict[str, str]:
    """Return what decides the stored curves besides the config: the packaged file, or the runs of the folder."""
    if not runs:
        return {"stored_axes_sha256": checksum(PACKAGED)}
    names = sorted(f"{path.parent.name}/{path.name}" for path in find_runs(Path(runs)))
    return {"stored_runs": ", ".join(names)}


def stored_curves(run: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the stored curves of a run by the name of their source."""
    return split(run, PREFIX, member=MEMBER)
