"""Probe a model or a series of checkpoints: audit it, then measure attention, stable rank and orthogonality.

Weights are read one tensor at a time; for entropy and hidden states one model at a time is loaded and run on a text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from joma.arguments import InputError
from joma.engine import Engine
from joma.memory import readable
from joma.probes.bounce import measure_bounce
from joma.probes.orthogonality import cosine_orthogonality
from joma.probes.summary import MEASURES, check_measures
from joma.progress import SILENT, Progress
from joma.watch.audit import NOT_FINITE_REMEDY, SKETCH, Audit, audit_sketches
from joma.watch.byte_ranges import NotFinite
from joma.watch.checkpoint_heads import LAWS, OTHERS, heads_measure
from joma.watch.checkpoint_ranks import check_finite, stable_ranks
from joma.watch.configs import (
    ONLY_WEIGHTS,
    clipped,
    compare_configs,
    computed_fields,
    is_failure,
    load_config,
    quiet,
    reason,
)
from joma.watch.engine_measures import EngineMeasures
from joma.watch.loading import load
from joma.watch.recording import Recording
from joma.watch.series import Checkpoints, Fault, LazyCheckpoint
from joma.watch.store import Measure, Store, pack_names
from joma.watch.tokens import default_text, encode
from joma.watch.unseen import describe
from joma.watch.watching import attention
from joma.watch.weight_files import Unreadable
from joma.watch.weight_ranks import LOWER_MATRIX

EMBEDDING = re.compile(  # the token embedding, as the architectures name it
    r"(?:^|\.)(embed_in|embed_tokens|wte|word_embeddings|tok_embeddings|token_embedding|tok_emb|embeddings|shared)\.weight$"
)
MAX_TEXT = 10**8  # bytes; the models are run on the beginning only
DEFAULT_MEASURES = ("entropy", "sink_mass")
BOTH = ("batch", "query")  # the axes of rows
HEAD_MEASURES = ("imbalance", "drift")
NAMED = ("layer", "weight", "module")  # axes with names along them
LENGTH, SEQUENCES = 256, 8  # tokens per sequence, and sequences, of the text that models are run on
SPANS, SPAN_ROWS = 8, 256  # evenly spaced spans of rows that are sampled of an embedding, and rows in each


@dataclass(frozen=True)
class ProbeResult:
    """Labelled measurements over the training, and the faults of the series."""

    data: xr.Dataset
    audit: Audit


def probe(
    series: Checkpoints,
    *,
    measures: str | Sequence[str] = DEFAULT_MEASURES,
    text: str | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
    engine: Engine | None = None,
    gpus: float = 0.0,
) -> ProbeResult:
    """Audit a series and measure its sound checkpoints; a single model is a series of one.

    For each checkpoint: the stable rank ‖W‖_F²/‖W‖₂² of each MLP's lower matrix, the imbalance of each head and its
    drift from what gradient flow would keep, the cosines between token embeddings and between hidden vectors at each
    depth, and the measures of attention by layer and head on `text`, each with its standard deviation over the
    sequences (`entropy_sd`). Over the series: whether the entropy of each layer bounces.
    What cannot be measured is reported among the audit's faults.

    Args:
        series: the checkpoints.
        measures: names of `joma.probes.summary.MEASURES`; the entropy is always measured.
        text: the text that models are run on; by default the beginning of the embedded corpus.
        store: where measurements are kept, so that a second call reads nothing again.
        progress: where to show the progress.
        engine: where checkpoints are measured, each in a unit of its own whose worker reads the weights; by default one
            after another in this process. The results are the same, to the bit with as many threads.
        gpus: GPUs that a unit uses while it measures weights, also a part of one; models are run on processors.

    Returns:
        `ProbeResult`: `data` with dims step, layer, head, weight, module, key_head and depth, and `audit`.
    """
    if text is not None and not text.strip():
        raise InputError("text", "at least two tokens long", "none", "give a longer text")
    names = ("entropy", *(name for name in check_measures(measures) if name != "entropy"))
    measured = _here(series, store, progress)
    if engine is not None:
        measured = EngineMeasures(engine, series, store=store, progress=progress, gpus=gpus).measure
    faults = list(audit_sketches(series, measured(SKETCH, also=(WEIGHTS,))).faults)
    left_out = set(Audit(tuple(faults)).left_out)
    measurements: dict[str, dict[str, np.ndarray]] = {}

    def run(measure: Measure, leave_out: Collection[str]) -> None:
        for checkpoint, values in measured(measure, leave_out=leave_out):
            if isinstance(values, NotFinite):
                faults.append(Fault.from_error("not finite", checkpoint.name, values, left_out=measure is WEIGHTS))
            elif isinstance(values, InputError):
                faults.append(Fault.from_error("not measured", checkpoint.name, values, left_out=False))
            else:
                measurements.setdefault(checkpoint.name, {"step": np.array(checkpoint.step)}).update(values)
                faults.extend(_not_seen(checkpoint.name, values))

    run(WEIGHTS, left_out)
    left_out |= Audit(tuple(faults)).left_out
    sound = [checkpoint for checkpoint in series if checkpoint.name in measurements]
    if sound:
        address = series.address(sound[0]) if len(sound) > 1 else None
        run(heads_measure(sound[0], address), set(series.names).difference(measurements))
    attention_measure, disagreements = _attention_measure(series, left_out, names, text)
    faults += disagreements
    left_out |= {name for fault in disagreements for name in fault.checkpoints}
    if attention_measure is not None:
        run(attention_measure, left_out)
    if not measurements:
        got = f"{series.source}, of which nothing can be measured ({faults[-1].message})"
        raise InputError("source", "a series with a sound checkpoint", got, faults[-1].remedy)
    data = _combine(measurements).assign_attrs(_origin(series, text, attention_measure))
    return ProbeResult(data, Audit(tuple(_merge_faults(faults))))


def _here(series: Checkpoints, store: Store | None, progress: Progress) -> Callable[..., Iterator[tuple[Any, Any]]]:
    """Return the function that measures one checkpoint after another in this process; `also` is measured later."""

    def measured(measure: Measure, *, leave_out: Collection[str] = (), also: object = ()) -> Any:  # noqa: ARG001
        return series.measure(measure, store=store, leave_out=leave_out, progress=progress)

    return measured


def _not_seen(name: str, values: Mapping[str, np.ndarray]) -> Iterator[Fault]:
    """Yield a fault for what was not measured of a model: measures of the rest must not pass for those of all."""
    for description in json.loads(values["not_seen"].tobytes()) if "not_seen" in values else ():
        message = f"{name} is measured in part: attention was not recorded of {description}"
        yield Fault("partly measured", (name,), message, "read its measures as those of the layers that are listed")
    for description in json.loads(values["not_named"].tobytes()) if "not_named" in values else ():
        remedy = "use `joma.probes.head_gram` with the weights of a head"
        yield Fault("ignored", (name,), f"the head laws of {name} are not measured at {description}", remedy)


def _origin(series: Checkpoints, text: str | None, measure: Measure | None) -> dict[str, str]:
    """Return what was measured and on which text, for the attributes of the data."""
    origin = {"source": series.source, "unit": series.unit}
    if series.bases:
        origin["base"] = ", ".join(series.bases)
    if measure is not None:
        sequences, length = measure.options["shape"]
        origin["tokens"] = f"{sequences} sequence{'s' * (sequences != 1)} of {length} tokens"
        origin["tokens_sha256"] = measure.options["tokens"]
        is_given = text is not None
        origin["text"] = f"given, {len(text):,} characters" if is_given else "the beginning of the embedded corpus"
    return origin


def read_text(file: Path) -> str:
    """Read the text of a file, for `probe`."""
    try:
        with file.open("rb") as opened:  # /dev/zero never ends
            content = opened.read(MAX_TEXT + 1)
        if len(content) > MAX_TEXT:
            raise InputError("text", f"a file of at most {readable(MAX_TEXT)}", f"{file}, which has more", "cut it")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as cause:
        raise InputError("text", "a readable file", f"{file} ({cause.strerror})", "check the path") from None
    except UnicodeDecodeError:
        got = f"{file}, which is not UTF-8"
        raise InputError("text", "a file of UTF-8 text", got, "convert it, or give another") from None


def measure_weights(checkpoint: LazyCheckpoint) -> dict[str, np.ndarray]:
    """Measure the stable ranks of the MLPs' lower matrices and the cosines between token embeddings.

    Two matrices at a time are in memory; of the embeddings only evenly spaced spans of rows are read.
    """
    matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    lower = sorted((name for name in matrices if re.search(LOWER_MATRIX, name)), key=_natural_order)
    ranks = stable_ranks(checkpoint, lower, partial(check_finite, checkpoint))
    values = {"weight": pack_names(lower), "stable_rank": np.array(ranks)} if lower else {}
    embeddings = [name for name in matrices if EMBEDDING.search(name)]
    if embeddings:
        rows = _sample_rows(checkpoint, embeddings[0])
        check_finite(checkpoint, embeddings[0], rows)
        cosines = cosine_orthogonality(rows)
        values["embedding_cosine"] = cosines.root_mean_square.numpy()
        values["embedding_random"] = cosines.random.numpy()
    if not lower and not embeddings:
        got = f"{', '.join(checkpoint.names()[:4])} …"
        remedy = "read them yourself with `joma.watch.Checkpoints`"
        raise Unreadable(checkpoint.name, "weights with the names of a Transformer's", got, remedy, must="have")
    return values


WEIGHTS = Measure("weights", 3, measure_weights, {"runs": SPANS, "rows": SPAN_ROWS}, uses_gpu=True)


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _sample_rows(checkpoint: LazyCheckpoint, name: str) -> Float[Tensor, "row dim"]:
    """Read evenly spaced spans of rows: few reads and few bytes of what may be the largest matrix."""
    height, width = checkpoint.shape(name)
    spans = min(SPANS, -(-height // SPAN_ROWS))
    rows = min(SPAN_ROWS, height // spans)
    starts = np.linspace(0, height - rows, spans).astype(int)
    parts = [checkpoint.part(name, int(start) * width, int(start + rows) * width) for start in starts]
    return torch.cat(parts).float().reshape(-1, width)


def _attention_measure(
    series: Checkpoints, left_out: Collection[str], names: Sequence[str], text: str | None
) -> tuple[Measure | None, list[Fault]]:
    """Return the measure that runs each model on `text`, and the faults of the checkpoints that it cannot measure.

    The models must agree on what they compute, and on the tokens of the text; without any model there is no measure.
    """
    folders: dict[str, Path] = {}
    configs: dict[str, Any] = {}
    faults: list[Fault] = []
    for checkpoint in series:
        if checkpoint.name not in left_out:
            try:
                with quiet():
                    folders[checkpoint.name] = checkpoint.folder(weights=False)
                configs[checkpoint.name] = load_config(folders[checkpoint.name], checkpoint.name)
            except Unreadable as error:
                faults.append(Fault.from_error("not measured", checkpoint.name, error, left_out=False))
    faults += compare_configs(configs)
    excluded = {name for fault in faults for name in fault.checkpoints}
    agreeing = {name: folder for name, folder in folders.items() if name not in excluded}
    if not agreeing:
        return None, faults
    config = configs[next(iter(agreeing))]
    try:
        content = default_text() if text is None else text
        tokens, disagreements = encode(content, agreeing, config, length=LENGTH, count=SEQUENCES)
    except Unreadable as error:
        return None, [*faults, Fault.from_error("not run", series.source, error, left_out=False)]
    options = {"tokens": _digest(tokens.numpy().tobytes()), "shape": list(tokens.shape), "measures": list(names)}
    options["config"] = _digest(json.dumps(computed_fields(config), sort_keys=True).encode())

    def function(checkpoint: LazyCheckpoint) -> dict[str, np.ndarray]:
        return measure_attention(checkpoint, configs[checkpoint.name], tokens, names)

    arguments = {"tokens": tokens.tolist(), "measures": list(names)}
    return Measure("attention", 3, function, options, arguments), [*faults, *disagreements]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def measure_attention(
    checkpoint: LazyCheckpoint, config: Any, tokens: Int[Tensor, "sequence position"], measures: Sequence[str]
) -> dict[str, np.ndarray]:
    """Measure attention by layer and head, and the cosines between hidden vectors at each depth.

    An encoder-decoder reads `tokens` on both sides; its hidden vectors form two sequences of depths and are left out.
    `measures` begin with the entropy, which is finite for every query.
    """
    model = load(checkpoint, config)
    tokens = tokens.to(next((parameter.device for parameter in model.parameters()), tokens.device))
    inputs = {"input_ids": tokens, "output_hidden_states": True}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    try:
        with quiet(), torch.no_grad(), attention(model, measures=measures, reduce="none") as recording:
            output = model(**inputs)
        rows = recording.dataset().mean("pass")
        _check_recording(checkpoint, recording, output)
    except NotFinite:
        raise
    except BaseException as error:  # a model may refuse the call with any error
        if not is_failure(error):
            raise
        expected = "a model with attention to watch" if isinstance(error, InputError) else "a model that runs on tokens"
        got = f"{type(model).__name__} ({reason(error)})"
        raise Unreadable(checkpoint.name, expected, got, f"try another {ONLY_WEIGHTS}") from None
    values = {"layer": pack_names(rows.layer.values), **_by_layer_and_head(rows)}
    if recording.not_seen:
        values["not_seen"] = pack_names([clipped(describe(recording.not_seen), 400)])
    if states := getattr(output, "hidden_states", None):
        cosines = [cosine_orthogonality(state.flatten(0, 1)).root_mean_square for state in states]
        values["hidden_cosine"] = torch.stack(cosines).numpy()
    return values


def _by_layer_and_head(rows: xr.Dataset) -> dict[str, np.ndarray]:
    """Return each measure [layer, head] over all rows, and its standard deviation over the sequences."""
    values = {}
    for name, variable in rows.data_vars.items():
        is_mean = MEASURES[str(name)].reduction == "mean"
        total, by_sequence = (variable.mean(dims) if is_mean else variable.max(dims) for dims in (BOTH, "query"))
        values[str(name)] = total.transpose("layer", "head").values
        if rows.sizes["batch"] > 1:
            values[f"{name}_sd"] = by_sequence.std("batch", ddof=1).transpose("layer", "head").values
    return values


def _check_recording(checkpoint: LazyCheckpoint, rows: Recording, output: Any) -> None:
    """Raise an error unless everything that the model computed is finite.

    A mean over the finite rows or heads would look like any other.
    """
    parts = output.values() if isinstance(output, Mapping) else output
    tensors = [part for value in parts for part in (value if isinstance(value, tuple) else (value,))]
    layers = [layer for layers in rows.passes for layer, entropy in layers.items() if not entropy.isfinite().all()]
    states = [part for part in tensors if isinstance(part, Tensor) and not part.isfinite().all()]
    if layers or states:
        where = f"the attention entropy of {layers[0]}" if layers else "its hidden vectors"
        expected = "a finite forward pass"
        raise NotFinite(checkpoint.name, expected, f"NaN or infinities in {where}", NOT_FINITE_REMEDY, must="have")


DIMS = {
    **{f"{name}{suffix}": ("layer", "head") for name in MEASURES for suffix in ("", "_sd")},
    "stable_rank": ("weight",),
    **{f"{law}_{name}{end}": ("module", "key_head") for law in LAWS for name in HEAD_MEASURES for end in ("", OTHERS)},
    "embedding_cosine": (),
    "embedding_random": (),
    "hidden_cosine": ("depth",),
}


def _combine(measurements: Mapping[str, Mapping[str, np.ndarray]]) -> xr.Dataset:
    """Combine the measurements into one Dataset over the steps; NaN for what a checkpoint lacks."""
    parts, in_order = [], sorted(measurements.items(), key=lambda item: int(item[1]["step"]))
    for _, values in in_order:
        names = {dim: json.loads(values[dim].tobytes()) for dim in NAMED if dim in values}
        variables = {key: (dims, values[key]) for key, dims in DIMS.items() if key in values}
        part = xr.Dataset(variables, names)
        part = part.assign_coords(key_head=np.arange(part.sizes["key_head"])) if "key_head" in part.dims else part
        parts.append(part.expand_dims(step=[int(values["step"])]))
    data = xr.merge(parts, join="outer", compat="no_conflicts")
    data = data.assign_coords(checkpoint=("step", [name for name, _ in in_order]))
    names = {
        dim: sorted(data.get_index(dim), key=_natural_order)
        for dim in ("layer", "weight", "module")
        if dim in data.dims
    }
    for name in set(MEASURES).intersection(data):
        measure = MEASURES[name]
        data[name].attrs.update(units=measure.unit, long_name=measure.label, description=measure.description)
    return _with_bounces(data.sel(names))


def _with_bounces(data: xr.Dataset) -> xr.Dataset:
    """Add how far the entropy of each layer, the mean over its heads, falls and recovers, and the p-value of noise."""
    if "entropy" not in data or data.sizes["step"] < 2:
        return data
    bounce = measure_bounce(data.step.values, data.entropy.mean("head").transpose("layer", "step").values)
    return data.assign({f"bounce_{name}": ("layer", values) for name, values in bounce._asdict().items()})


def _merge_faults(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Merge neighbouring faults that differ in the checkpoint only."""

    def key(fault: Fault) -> tuple[str, str, str]:
        return fault.kind, fault.message.replace(fault.checkpoints[0], ""), fault.remedy

    for (kind, _, remedy), group in groupby(faults, key=key):
        similar = list(group)
        if len(similar) == 1:
            yield similar[0]
            continue
        checkpoints = tuple(name for fault in similar for name in fault.checkpoints)
        left_out = tuple(name for fault in similar for name in fault.left_out)
        message = f"{similar[0].message}, and so for {len(similar) - 1} more"
        yield Fault(kind, checkpoints, message, remedy, left_out)
