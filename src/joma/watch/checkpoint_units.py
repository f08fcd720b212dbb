"""The unit of work that measures one checkpoint of a series, in whatever process an engine chose for it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from joma.arguments import InputError
from joma.engine import Output
from joma.progress import Progress
from joma.watch.audit import SKETCH
from joma.watch.byte_ranges import Unreadable
from joma.watch.checkpoint_heads import HEADS, ReferenceHeads, measure_heads
from joma.watch.configs import load_config
from joma.watch.engine_measures import encode
from joma.watch.probing import WEIGHTS, measure_attention
from joma.watch.series import Checkpoints, LazyCheckpoint, measure_or_refuse
from joma.watch.store import Measure


def measure_checkpoint(
    out: Path,  # noqa: ARG001 (nothing is written: measurements are small, and are returned)
    progress: Progress,  # noqa: ARG001 (whoever submits units counts them)
    *,
    address: Mapping[str, Any],
    measures: Sequence[Mapping[str, Any]],
) -> Output:
    """Measure one checkpoint; the value holds an outcome for each measure up to the first error, which ends the unit.

    Args:
        out: not used.
        progress: not used.
        address: where the checkpoint is, from `Checkpoints.address`.
        measures: the name and the arguments of each measure.
    """
    outcomes: list[dict[str, Any]] = []
    try:
        checkpoint = open_checkpoint(**address)
        for fields in measures:
            outcomes.append(encode(measure_or_refuse(find_measure(**fields), checkpoint)))
    except InputError as error:
        outcomes.append(encode(error))
    return Output(outcomes)


def open_checkpoint(
    *,
    source: str,
    is_local: bool,
    name: str,
    is_listed: bool,
    endpoint: str | None,
    base: str | None,
    identity: str,
) -> LazyCheckpoint:
    """Return the checkpoint at an address, read lazily; refuse one that is not here, or not the same.

    Args:
        source: the folder of the series, or its repository on the hub.
        is_local: whether it is a folder.
        name: the revision or the subfolder.
        is_listed: whether it is one of several; otherwise the folder itself is the model.
        endpoint: the URL of the hub.
        base: the base model of an adapter.
        identity: its `portable_identity`, where the unit was made.
    """
    machine = platform.node() or "this machine"
    if is_local and not os.path.isdir(source):
        remedy = "use a file system that all machines share, copy the folder to each, or name a repository of the hub"
        raise Unreadable(name, "a folder on every machine that measures it", f"no {source} on {machine}", remedy)
    series = Checkpoints(source, revisions=[name] if is_listed else None, endpoint=endpoint, base=base)
    (checkpoint,) = (each for each in series if each.name == name)
    if checkpoint.portable_identity != identity:
        got = f"files of other sizes or times in {source} on {machine}" if is_local else "a revision that has changed"
        remedy = "copy it with its times, as `rsync -a` does" if is_local else "run the same command again"
        raise Unreadable(name, "the checkpoint that was to be measured", got, remedy)
    return checkpoint


def find_measure(
    name: str,
    *,
    tokens: Sequence[Sequence[int]] | None = None,
    measures: Sequence[str] = (),
    reference: Mapping[str, Any] | None = None,
) -> Measure:
    """Return the measure of this name.

    That of attention needs the tokens and the names of what is measured, that of heads the address of the first
    checkpoint of a series.
    """
    if name == HEADS:
        start = None if reference is None else ReferenceHeads(open_checkpoint(**reference))
        return Measure(name, 0, partial(measure_heads, reference=start))
    if tokens is None:
        return {measure.name: measure for measure in (SKETCH, WEIGHTS)}[name]
    function = partial(_run_model, tokens=torch.tensor(tokens), measures=measures)
    return Measure(name, 0, function)  # the number of the version matters where results are stored


def _run_model(checkpoint: LazyCheckpoint, *, tokens: torch.Tensor, measures: Sequence[str]) -> dict[str, np.ndarray]:
    config = load_config(checkpoint.folder(weights=False), checkpoint.name)
    return measure_attention(checkpoint, config, tokens, measures)
