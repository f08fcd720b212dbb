"""Probe a model or a series of checkpoints: an audit, then entropy of attention, stable rank, orthogonality, bounce.

Weights are read tensor by tensor; for entropy and hidden states one whole model at a time is loaded and run on a text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma.arguments import InputError
from joma.probes.bounce import measure_bounce
from joma.probes.orthogonality import cosine_orthogonality
from joma.probes.rank import stable_rank
from joma.progress import SILENT, Progress
from joma.watch.audit import DIVERGED, Audit, audit
from joma.watch.loading import ONLY_WEIGHTS, default_text, encode, load, quiet
from joma.watch.recorder import LOWER
from joma.watch.sdpa import attention
from joma.watch.series import Checkpoint, Checkpoints, Fault, Measure, Store
from joma.watch.weight_files import Unreadable

EMBEDDING = re.compile(  # the token embedding, as the architectures name it
    r"(?:^|\.)(embed_in|embed_tokens|wte|word_embeddings|tok_embeddings|token_embedding|tok_emb|embeddings|shared)\.weight$"
)
LENGTH, SEQUENCES = 256, 8  # of the text that models are run on
RUNS, ROWS = 8, 256  # embeddings whose cosines are taken: so many runs, evenly spaced, of so many rows


@dataclass(frozen=True)
class Probed:
    """What came out: labelled measures over training, and what is wrong with the series."""

    data: xr.Dataset
    audit: Audit


def probe(
    series: Checkpoints,
    *,
    text: str | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> Probed:
    """Audit a series and measure its sound checkpoints; a model is a series of one.

    For every checkpoint: the stable rank ‖W‖_F²/‖W‖₂² of each MLP's lower matrix, the cosines between token embeddings
    and between hidden vectors at each depth, and the entropy of attention by layer and head on `text`; over the series,
    whether the entropy of each layer bounces. What cannot be measured is among the audit's faults.

    Args:
        series: the checkpoints.
        text: what models are run on; the beginning of the embedded corpus if not given.
        store: where measures are kept, so that a second run reads nothing again.
        progress: where to show how far it is.

    Returns:
        `Probed`: `data` with dims step, layer, head, weight and depth, and `audit`.
    """
    if text is not None and not text.strip():
        raise InputError("text", "at least two tokens long", "none", "give a longer text")
    faults = list(audit(series, store=store, progress=progress).faults)
    found: dict[str, dict[str, np.ndarray]] = {}
    measures = [WEIGHTS]
    out = Audit(tuple(faults)).left_out
    for first in [one for one in series if one.name not in out][:1]:
        try:
            measures.append(_running(first, default_text() if text is None else text))
        except Unreadable as problem:
            faults.append(dataclasses.replace(Fault.told("not run", series.source, problem), left_out=()))
    for measure in measures:
        for checkpoint, values in series.measure(measure, store=store, leave_out=out, progress=progress):
            if isinstance(values, InputError):
                faults.append(dataclasses.replace(Fault.told("not measured", checkpoint.name, values), left_out=()))
            else:
                found.setdefault(checkpoint.name, {"step": np.array(checkpoint.step)}).update(values)
    if not found:
        got = f"{series.source}, of which nothing can be measured ({faults[-1].said})"
        raise InputError("source", "a series with a sound checkpoint", got, faults[-1].remedy)
    return Probed(_assembled(series, found), Audit(tuple(_merged(faults))))


def read_text(file: Path) -> str:
    """The text of a file, for `probe`."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as cause:
        raise InputError("text", "a file that can be read", f"{file} ({cause.strerror})", "check the path") from None
    except UnicodeDecodeError:
        raise InputError(
            "text", "a file of UTF-8 text", f"{file}, which is none", "convert it, or give another"
        ) from None


def weights(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Stable ranks of the lower matrices of the MLPs, and the cosines between token embeddings.

    One matrix at a time is in memory; of the embeddings, evenly spaced runs of rows are read.
    """
    lower = [name for name in checkpoint.names() if re.search(LOWER, name) and len(checkpoint.shape(name)) == 2]
    lower.sort(key=_natural)
    ranks = [float(stable_rank(_finite(checkpoint, name, checkpoint.tensor(name, torch.float32)))) for name in lower]
    found = {"weight": _words(lower), "stable_rank": np.array(ranks)} if lower else {}
    embeddings = [name for name in checkpoint.names() if EMBEDDING.search(name) and len(checkpoint.shape(name)) == 2]
    if embeddings:
        cosines = cosine_orthogonality(_finite(checkpoint, embeddings[0], _rows(checkpoint, embeddings[0])))
        found["embedding_cosine"] = cosines.root_mean_square.numpy()
        found["embedding_random"] = cosines.random.numpy()
    if not lower and not embeddings:
        known = ", ".join(checkpoint.names()[:4])
        remedy = "read them yourself with `Checkpoint.tensor`"
        raise Unreadable(checkpoint.name, "weights of a Transformer, by their names", f"{known} …", remedy)
    return found


def _finite(checkpoint: Checkpoint, name: str, values: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
    """The values, unless some are no numbers: the audit has looked at a few of them only."""
    if not bool(values.isfinite().all()):
        raise Unreadable(checkpoint.name, "weights that are finite", f"NaN or infinities in {name}", DIVERGED)
    return values


WEIGHTS = Measure("weights", 3, weights, {"runs": RUNS, "rows": ROWS})


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _rows(checkpoint: Checkpoint, name: str) -> Float[Tensor, "row dim"]:
    """Evenly spaced runs of rows: few reads, and few bytes, of a matrix that may be the largest of all."""
    height, width = checkpoint.shape(name)
    runs = min(RUNS, -(-height // ROWS))
    rows = min(ROWS, height // runs)
    starts = np.linspace(0, height - rows, runs).astype(int)
    parts = [checkpoint.part(name, int(start) * width, int(start + rows) * width) for start in starts]
    return torch.cat(parts).float().reshape(-1, width)


def _running(first: Checkpoint, text: str) -> Measure:
    """The measure that runs each model on `text`, with tokens by the first sound checkpoint's tokenizer."""
    with quiet():
        tokens = encode(text, first.folder(weights=False), first.name, length=LENGTH, count=SEQUENCES)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    options = {"tokens": digest, "shape": list(tokens.shape)}
    return Measure("attention", 1, lambda checkpoint: running(checkpoint, tokens), options)


def running(checkpoint: Checkpoint, tokens: Int[Tensor, "sequence position"]) -> dict[str, np.ndarray]:
    """Entropy of attention by layer and head, and cosines between hidden vectors at each depth, on `tokens`.

    An encoder with a decoder reads them on both sides; it has no one line of hidden vectors.
    """
    with quiet():
        model = load(checkpoint.folder(), checkpoint.name)
    tokens = tokens.to(next((own.device for own in model.parameters()), tokens.device))
    given = {"input_ids": tokens, "output_hidden_states": True}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = tokens
    try:
        with torch.no_grad(), attention(model) as seen:
            states = getattr(model(**given), "hidden_states", None)
    except Exception as problem:  # the code of any model may refuse the call, each in its own words
        wanted = "with attention to watch" if isinstance(problem, InputError) else "that runs on tokens alone"
        got = f"{type(model).__name__} ({shorten(str(problem), 200, placeholder=' …')})"
        raise Unreadable(checkpoint.name, f"a model {wanted}", got, f"try another {ONLY_WEIGHTS}") from None
    entropy = seen.entropy.mean("pass")
    found = {"layer": _words(entropy.layer.values), "entropy": entropy.transpose("layer", "head").values}
    if states:
        cosines = [cosine_orthogonality(state.flatten(0, 1)).root_mean_square for state in states]
        found["hidden_cosine"] = torch.stack(cosines).numpy()
    return found


def _words(names: Iterable[str]) -> np.ndarray:
    """Names as an array that safetensors can keep."""
    return np.frombuffer(json.dumps([str(name) for name in names]).encode(), dtype=np.uint8).copy()


DIMS = {
    "entropy": ("layer", "head"),
    "stable_rank": ("weight",),
    "embedding_cosine": (),
    "embedding_random": (),
    "hidden_cosine": ("depth",),
}


def _assembled(series: Checkpoints, found: Mapping[str, Mapping[str, np.ndarray]]) -> xr.Dataset:
    """One Dataset over the steps; nan where a checkpoint was measured in part."""
    parts, ordered = [], sorted(found.items(), key=lambda item: int(item[1]["step"]))
    for _, values in ordered:
        named = {dim: json.loads(values[dim].tobytes()) for dim in ("layer", "weight") if dim in values}
        variables = {key: (dims, values[key]) for key, dims in DIMS.items() if key in values}
        parts.append(xr.Dataset(variables, named).expand_dims(step=[int(values["step"])]))
    data = xr.merge(parts, join="outer", compat="no_conflicts")
    data = data.assign_coords(checkpoint=("step", [name for name, _ in ordered]))
    names = {dim: sorted(data.get_index(dim), key=_natural) for dim in ("layer", "weight") if dim in data.dims}
    return _bounces(data.sel(names)).assign_attrs(source=series.source)


def _bounces(data: xr.Dataset) -> xr.Dataset:
    """Add how far each layer's entropy, the mean over its heads, falls and comes back, beside what noise would do."""
    if "entropy" not in data or data.sizes["step"] < 2:
        return data
    found = measure_bounce(data.step.values, data.entropy.mean("head").transpose("layer", "step").values)
    return data.assign({f"bounce_{name}": ("layer", values) for name, values in found._asdict().items()})


def _merged(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Faults that say the same of several checkpoints, as one."""

    def same(fault: Fault) -> tuple[str, str, str]:
        said = fault.said.replace(fault.checkpoints[0], "")
        return fault.kind, said, fault.remedy

    for (kind, _, remedy), group in groupby(faults, key=same):
        alike = list(group)
        if len(alike) == 1:
            yield alike[0]
            continue
        names = tuple(name for fault in alike for name in fault.checkpoints)
        left_out = tuple(name for fault in alike for name in fault.left_out)
        yield Fault(kind, names, f"{alike[0].said}, and so for {len(alike) - 1} more", remedy, left_out)
