"""Small tables of what was recorded, for a terminal and for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
import xarray as xr

from joma.terminal import printable

FIRST, LAST = 4, 3  # layers that a table shows at either end
MAX_NAME = 44  # characters
MAX_LISTED = 2  # layers that were not seen, each with its reason
_UNDEFINED = "NaN"  # where no value is finite


class Summary(NamedTuple):
    """A table with a title above it and notes below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def main_measure(data: xr.Dataset) -> str | None:
    """Return the measure that a table or figure shows first: entropy, or another one by layer and head; or None."""
    by_head = [str(name) for name, variable in data.data_vars.items() if {"layer", "head"} <= set(variable.dims)]
    return "entropy" if "entropy" in by_head else next(iter(by_head), None)


def quantity(variable: xr.DataArray) -> str:
    """Return the name of a measure and its unit, as the label of an axis or a column.

    >>> quantity(xr.DataArray(0.0, name="entropy", attrs={"units": "nat"}))
    'entropy / nats'
    """
    name, unit = str(variable.attrs.get("long_name", variable.name)).replace("_", " "), variable.attrs.get("units", "1")
    return name if unit == "1" else f"{name} / {'nats' if unit == 'nat' else unit}"


def by_layer_and_head(variable: xr.DataArray) -> xr.DataArray:
    """Return the mean over everything but layer and head."""
    return variable.mean([dim for dim in variable.dims if dim not in ("layer", "head")]).transpose("layer", "head")


def summarise_recording(
    model: str, data: xr.Dataset | None, rows: Mapping[str, int], not_seen: Mapping[str, str]
) -> Summary:
    """Return the table of a recording: for each layer its heads, its entropy with the spread over heads, its rows.

    Args:
        model: the name of the model's class.
        data: what `Recording.dataset` returns, or None if there is no forward pass yet.
        rows: the number of rows that were counted, by layer.
        not_seen: why nothing was recorded, by layer.
    """
    notes = _list_not_seen(not_seen)
    if data is None:
        return Summary(f"Attention of {model}: no forward pass recorded yet", (), (), notes)
    passes, layers = data.sizes["pass"], data.sizes["layer"]
    title = f"Attention of {model}: {_count(passes, 'pass', 'es')}, {_count(layers, 'layer')}"
    measure = data[main_measure(data)]
    values = by_layer_and_head(measure).values
    records = []
    for layer, heads in zip(map(str, data.layer.values), values, strict=True):
        number, spread, least = _over_heads(heads[_heads_of(heads[None])])
        records.append((_name(layer), number, spread, least, str(rows.get(layer, "–"))))
    notes = _list_undefined("over all rows", {"head": _undefined_heads(values[:, None], 0)}) + notes
    return Summary(title, ("layer", "heads", quantity(measure), "least", "rows"), _ends(records), notes)


def summarise_trajectory(model: str, data: xr.Dataset | None) -> Summary:
    """Return the table of a recorder: the entropy of each layer at the first and at the last probe, and stable ranks.

    Args:
        model: the name of the model's class.
        data: what `Recorder.dataset` returns, or None if there is no probe yet.
    """
    if data is None:
        return Summary(f"Recorder of {model}: no probe yet", (), ())
    first, last = int(data.step[0]), int(data.step[-1])
    several = data.sizes["step"] > 1
    steps = f"steps {first} to {last}" if several else f"step {first}"
    title = f"Recorder of {model}: {_count(data.sizes['step'], 'probe')}, {steps}"
    columns: tuple[str, ...] = ()
    records = []
    undefined: dict[str, tuple[int, int]] = {}
    name = main_measure(data)
    if name is not None:
        ends = (f"at step {last}",) if several else ()
        columns = ("layer", "heads", f"{quantity(data[name])} at step {first}", *ends, "least")
        values = data[name].transpose("layer", "step", "head").values
        for layer, probes in zip(map(str, data.layer.values), values, strict=True):
            heads = _heads_of(probes)
            _, start, _ = _over_heads(probes[0][heads])
            number, end, least = _over_heads(probes[-1][heads])
            records.append((_name(layer), number, *((start, end) if several else (end,)), least))
        undefined["head"] = _undefined_heads(values, -1)
    notes = []
    if "stable_rank" in data:
        ranks = data.stable_rank.transpose("step", "weight").values
        weights = _count(data.sizes["weight"], "weight")
        ends = f", {_range(ranks[-1])} at step {last}" if several else ""
        notes.append(f"stable rank of {weights}: {_range(ranks[0])} at step {first}{ends}")
        undefined["weight"] = (int((~np.isfinite(ranks[-1])).sum()), ranks.shape[1])
    return Summary(title, columns, _ends(records), notes + _list_undefined(f"at step {last}", undefined))


def as_text(summary: Summary) -> str:
    """Return the table as lines of plain text, in which every character is printable."""
    lines = [summary.title]
    if summary.rows:
        cells = [list(map(printable, row)) for row in (summary.columns, *summary.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
            lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(map(printable, lines[:1])) + "".join(f"\n{line}" for line in lines[1:]) + _text_of_notes(summary)


def _text_of_notes(summary: Summary) -> str:
    return "".join(f"\n{printable(note)}" for note in summary.notes)


def as_html(summary: Summary) -> str:
    """Return the table as HTML for a notebook, escaped, without styles or other files of its own."""
    parts = [f"<p><b>{_html(summary.title)}</b></p>"]
    if summary.rows:
        head = "".join(f"<th>{_html(column)}</th>" for column in summary.columns)
        body = "".join(f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>" for row in summary.rows)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    parts += [f"<p>{_html(note)}</p>" for note in summary.notes]
    return f"<div>{''.join(parts)}</div>"


def _html(text: str) -> str:
    return escape(printable(text))


def _heads_of(probes: np.ndarray) -> np.ndarray:
    """Return which of the heads [probe, head] a layer has: those with a value in any probe, or all if none has one.

    Where layers have different numbers of heads, the others are NaN in every probe.
    """
    heads = np.asarray(np.isfinite(probes).any(axis=0))
    return heads if heads.any() else ~heads


def _undefined_heads(values: np.ndarray, probe: int) -> tuple[int, int]:
    """Return how many heads of all layers [layer, probe, head] have no finite value in a probe, and how many are."""
    heads = [probes[probe][_heads_of(probes)] for probes in values]
    return sum(int((~np.isfinite(layer)).sum()) for layer in heads), sum(map(len, heads))


def _list_undefined(where: str, counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a note of what is NaN or infinite, of each kind how many of how many; none if everything is finite."""
    parts = [f"{number} of {_count(total, kind)}" for kind, (number, total) in counts.items() if number]
    return [f"NaN or infinite {where}: {', '.join(parts)}"] if parts else []


def _over_heads(heads: np.ndarray) -> tuple[str, str, str]:
    """Return the number of heads, mean ± standard deviation over those with a finite value, and the least, as text."""
    defined = heads[np.isfinite(heads)]
    if not defined.size:
        return str(heads.size), _UNDEFINED, _UNDEFINED
    mean = f"{defined.mean():.3f}"
    spread = f"{mean} ± {defined.std(ddof=1):.3f}" if defined.size > 1 else mean
    return str(heads.size), spread, f"{defined.min():.3f}"


def _range(values: np.ndarray) -> str:
    defined = values[np.isfinite(values)]
    if not defined.size:
        return _UNDEFINED
    low, high = f"{defined.min():.3g}", f"{defined.max():.3g}"
    return low if low == high else f"{low} to {high}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _name(name: str) -> str:
    """Return a name of at most `MAX_NAME` characters: its end tells layers apart."""
    return name if len(name) <= MAX_NAME else f"…{name[-MAX_NAME + 1 :]}"


def _ends(records: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return all records if they are few, else the first and the last ones with a line of dots between."""
    if len(records) <= FIRST + LAST + 1:
        return list(records)
    dots = [f"… {len(records) - FIRST - LAST} more", *[""] * (len(records[0]) - 1)]
    return [*records[:FIRST], dots, *records[-LAST:]]


def _list_not_seen(not_seen: Mapping[str, str]) -> list[str]:
    notes = [f"not seen: {_name(layer)} ({reason})" for layer, reason in list(not_seen.items())[:MAX_LISTED]]
    if len(not_seen) > MAX_LISTED:
        notes.append(f"not seen: {len(not_seen) - MAX_LISTED} more, listed in `.not_seen`")
    return notes
