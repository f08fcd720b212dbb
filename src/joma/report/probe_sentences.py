"""Say in a sentence what a probe has measured: headings that state a result, each from the data alone."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.report.probe_figures import Quantity, head_curves, is_single, measured_steps

SIGNIFICANCE = 0.05  # p-value of noise alone below which a layer is said to recover
UNCHANGED = 0.02  # relative change below which a mean is said to stay


def entropy_heading(data: xr.Dataset) -> str:
    """Return what attention entropy does over the training, or where it is least in one model."""
    entropy = measured_steps(data.entropy)
    if entropy.sizes["step"] == 1:
        least, where = extreme_head(entropy.isel(step=0), largest=False)
        return f"Attention entropy is {float(entropy.mean()):.3g} nats on average, least in {where} ({least:.3g})"
    mean = entropy.mean("head")
    count = int(mean.notnull().any("step").sum())
    change = _ends(mean)[1] - _ends(mean)[0]
    if (bounced := bounced_layers(data)) is None:
        return f"Attention entropy {_course(mean.mean('layer'), 'nats')}"
    if bounced:
        return f"Attention entropy falls and recovers in {bounced} of {count} {_plural('layer', count)}"
    falls = int((change < 0).sum())
    if 2 * falls >= count:
        return f"Attention entropy falls in {falls} of {count} {_plural('layer', count)}, without a clear recovery"
    return f"Attention entropy rises in {count - falls} of {count} {_plural('layer', count)}"


def bounced_layers(data: xr.Dataset) -> int | None:
    """Return in how many layers entropy falls by more than noise does and clearly rises again; None if not tested."""
    if "bounce_p_value" not in data or not data.bounce_p_value.notnull().any():
        return None
    falls = data.bounce_depth > data.bounce_chance
    return int(((data.bounce_p_value <= SIGNIFICANCE) & falls).sum())


def attention_heading(name: str, data: xr.Dataset, quantity: Quantity) -> str:
    """Return what one measure of attention does over the training, or where it is greatest in one model."""
    variable = measured_steps(data[name])
    mean = variable.mean(("layer", "head"))
    if name == "entropy" and mean.sizes["step"] > 1:
        least = int(np.argmin(mean.values))
        start, lowest, end = (f"{float(mean[index]):.3g}" for index in (0, least, -1))
        between = f", {lowest} at {data.attrs.get('unit', 'step')} {int(mean.step[least]):,}"
        has_minimum = 0 < least < mean.sizes["step"] - 1
        return f"Entropy is {start} nats at the start{between if has_minimum else ''}, and {end} at the end"
    if name == "sink_mass":
        return _sinks(variable, mean)
    label = _capital(quantity.label)
    if mean.sizes["step"] == 1:
        value, where = extreme_head(variable.isel(step=0), largest=True)
        return f"{label}: {_with_unit(float(mean[0]), quantity.unit)} on average, greatest in {where} ({value:.3g})"
    start, end = float(mean[0]), float(mean[-1])
    if _is_unchanged(start, end):
        return f"{label}: {_with_unit(end, quantity.unit)} at the start and at the end"
    return f"{label}: from {start:.3g} to {_with_unit(end, quantity.unit)}"


def _sinks(variable: xr.DataArray, mean: xr.DataArray) -> str:
    end = float(mean[-1])
    if mean.sizes["step"] == 1:
        value, where = extreme_head(variable.isel(step=0), largest=True)
        return f"The first token draws {100 * end:.0f} % of attention, most in {where} ({100 * value:.0f} %)"
    start = float(mean[0])
    if f"{100 * start:.0f} %" == f"{100 * end:.0f} %":
        return f"The first token draws {100 * end:.0f} % of attention at the end, as at the start"
    return f"The first token draws {100 * end:.0f} % of attention at the end, and {100 * start:.0f} % at the start"


def rank_heading(data: xr.Dataset) -> str:
    """Return what the stable rank of the MLPs' lower matrices does."""
    ranks = measured_steps(data.stable_rank)
    if ranks.sizes["step"] == 1:
        return f"The stable rank of the MLPs' lower matrices is {_range(ranks.values)}"
    start, end = _ends(ranks)
    falls, count = int((end < start).sum()), int(np.isfinite(end - start).sum())
    verb, number = ("falls", falls) if 2 * falls >= count else ("rises", count - falls)
    return f"The stable rank {verb} in {number} of {count} {_plural('matrix', count)}"


def head_heading(data: xr.Dataset, measure: str) -> str:
    """Return how far heads have left the laws of gradient flow, or how far they are from balance in one model."""
    parts = []
    for label, values, others in head_curves(data, measure):
        value, chance = _last_mean(values), _last_mean(others)
        between = "" if np.isnan(chance) else f" ({chance:.2g} between different heads)"
        parts.append(f"{value:.2g}{between} for {label}")
    what = "Drift from what gradient flow keeps of a head" if measure == "drift" else "Imbalance of heads"
    return f"{what}: {', '.join(parts)}"


def _last_mean(values: xr.DataArray) -> float:
    """Return the mean over layers and heads at the last step that was measured; NaN if none was."""
    known = measured_steps(values)
    return float(known.isel(step=-1).mean()) if known.sizes["step"] else float("nan")


def cosine_heading(data: xr.Dataset) -> str:
    """Return what the cosines between hidden vectors do, or those between embeddings if there are no others."""
    has_states = "hidden_cosine" in data
    what = "Hidden vectors" if has_states else "Token embeddings"
    curve = (data.hidden_cosine.mean("depth") if has_states else data.embedding_cosine).dropna("step")
    if not curve.size:
        return "Orthogonality"
    start, end = float(curve[0]), float(curve[-1])
    if is_single(data) or curve.size == 1:
        return f"{what} have a root mean square cosine of {end:.3g}"
    if _is_unchanged(start, end):
        return f"{what} stay as they were: cosine {end:.3g}"
    return f"{what} become {'more' if end > start else 'less'} alike: cosine {start:.3g} to {end:.3g}"


def extreme_head(values: xr.DataArray, *, largest: bool) -> tuple[float, str]:
    """Return the largest or the least value of [layer, head], and where it is."""
    array = values.transpose("layer", "head").values
    index = int(np.nanargmax(array) if largest else np.nanargmin(array))
    layer, head = divmod(index, array.shape[1])
    where = f"layer {layer}" + (f", head {head}" if array.shape[1] > 1 else "")
    return float(array[layer, head]), where


def _ends(variable: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last value along the steps that is no NaN; NaN if all are."""
    values = variable.transpose("step", ...).values
    known = ~np.isnan(values)
    first, last = known.argmax(axis=0), len(values) - 1 - known[::-1].argmax(axis=0)
    start, end = (np.take_along_axis(values, index[None], axis=0)[0] for index in (first, last))
    return start, end


def _is_unchanged(start: float, end: float) -> bool:
    return abs(end - start) <= UNCHANGED * max(abs(start), abs(end))


def _course(curve: xr.DataArray, unit: str) -> str:
    start, end = float(curve[0]), float(curve[-1])
    if _is_unchanged(start, end):
        return f"stays at {_with_unit(end, unit)}"
    return f"{'falls' if end < start else 'rises'} from {start:.3g} to {_with_unit(end, unit)}"


def _range(values: np.ndarray) -> str:
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _with_unit(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip()


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else {"layer": "layers", "matrix": "matrices"}[noun]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
