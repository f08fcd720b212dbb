"""What one may ask of attention's rows: entropy, weights, sinks, distances and logits, without the attention matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, choice, described, distinct, sequence, whole
from joma.kernels.entropy_blocks import visible_keys
from joma.kernels.entropy_choice import PRECISIONS, entropy_rows
from joma.kernels.entropy_scores import Rows, Scores
from joma.kernels.summary_blocks import chosen_scores
from joma.kernels.summary_choice import summary_sums
from joma.probes.attention_call import AttentionCall, Batches, batches, names_as_given, nth, one_name

if TYPE_CHECKING:
    import xarray as xr

MAX_TOP = 16

Sinks = int | Sequence[int] | Tensor


class Measure(NamedTuple):
    """What a measure is: its unit, its label in figures, one line about it, and how rows are combined."""

    unit: str
    label: str
    description: str
    reduction: str = "mean"  # or "maximum", over the rows that are defined


MEASURES = {
    "entropy": Measure("nat", "entropy", "the entropy of the weights"),
    "effective_tokens": Measure("tokens", "effective tokens", "exp(entropy): as many equal weights have this entropy"),
    "relative_entropy": Measure("1", "relative entropy", "entropy over ln(visible keys), its largest possible value"),
    "largest_weight": Measure("1", "largest weight", "the largest weight of the row"),
    "top_mass": Measure("1", "weight on the top keys", "the weight on the heaviest keys, as many as `top` says"),
    "sink_mass": Measure("1", "weight on the sinks", "the weight on the keys `sinks`, the first if not given"),
    "distance": Measure("tokens", "attended distance", "the mean distance between a query and the keys it attends to"),
    "largest_logit": Measure("1", "largest logit", "the largest score before the softmax", "maximum"),
}
_FIELDS = {  # of `Rows`, by measure
    "entropy": "entropy",
    "largest_weight": "largest",
    "top_mass": "top_mass",
    "distance": "distance",
    "largest_logit": "largest_logit",
}
_ENTROPY_ALONE = {"entropy", "effective_tokens", "relative_entropy", "largest_weight"}


class AttentionSummary(Mapping[str, Tensor]):
    """Measures of each query's attention, by name: `summary["entropy"]` or `summary.entropy`.

    Each is a tensor [*batch, head, query], NaN where all keys are hidden.

    >>> summary = attention_summary(torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4, 8), measures=["entropy", "sink_mass"])
    >>> list(summary), summary.sink_mass[0, 0]
    (['entropy', 'sink_mass'], tensor([0.2500, 0.2500, 0.2500, 0.2500]))
    >>> summary
    AttentionSummary of 1 x 2 x 4 rows
    entropy             1.386 nat  mean
    sink_mass            0.25      mean
    """

    entropy: Tensor
    effective_tokens: Tensor
    relative_entropy: Tensor
    largest_weight: Tensor
    top_mass: Tensor
    sink_mass: Tensor
    distance: Tensor
    largest_logit: Tensor

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = dict(rows)
        self.__dict__.update(self._rows)

    def __getitem__(self, name: str) -> Tensor:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> Tensor:  # only for names that are not there
        present = ", ".join(self.__dict__.get("_rows", ()))
        raise AttributeError(f"the summary has no {name!r}; it has {present}", name=name, obj=self)

    def __repr__(self) -> str:
        shape = next(iter(self._rows.values())).shape
        lines = [f"AttentionSummary of {' x '.join(map(str, shape))} rows"]
        for name, values in self._rows.items():
            measure = MEASURES[name]
            value = float(reduce_rows(name, values.flatten()))
            lines.append(f"{name:<16} {value:>8.4g} {measure.unit.replace('1', ''):<6} {measure.reduction}".rstrip())
        return "\n".join(lines)

    def dataset(self) -> xr.Dataset:
        """Return the measures as a labelled Dataset, with dims batch, head and query as far as there are any."""
        import xarray as xr  # takes longer than torch's own tensors need

        axes = next(iter(self._rows.values())).ndim
        names = [f"batch_{n}" for n in range(axes - 2, 1, -1)] + ["batch", "head", "query"]
        variables = {}
        for name, values in self._rows.items():
            attributes = {"units": MEASURES[name].unit, "long_name": MEASURES[name].description}
            variables[name] = (names[len(names) - axes :], values.cpu().numpy(), attributes)
        return xr.Dataset(variables)


def attention_summary(
    query: ArrayLike | Tensor,
    key: ArrayLike | Tensor,
    *,
    measures: Sequence[str] | None = None,
    causal: bool | None = None,
    mask: ArrayLike | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "highest",
    top: int = 8,
    sinks: Sinks = 0,
    softcap: float | None = None,
    sink_logits: ArrayLike | Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    is_causal: bool | None = None,
    attn_mask: ArrayLike | Tensor | None = None,
) -> AttentionSummary:
    """Return what one may ask of each row of attention, in one pass over the keys and without the attention matrix.

        p_i = softmax_j(s_ij),    s_ij = score_mod(cap(scale · q_i·k_j)) + bias_ij,    cap(s) = c · tanh(s / c)

    Args:
        query: [*batch, head, query, dim]; this and all others up to `precision` as for `attention_entropy`.
        key: [*batch, head, key, dim].
        measures: names from the table below; all of them if not given.
        causal: whether query i sees only keys 0 to i.
        mask: True where a key is visible, or a bias.
        scale: 1/√dim if not given.
        enable_gqa: whether several heads of `query` may share a head of `key`.
        precision: "highest" or "high".
        top: how many of the heaviest keys `top_mass` counts, 1 to 16.
        sinks: the keys whose weight is `sink_mass`: a number, several numbers, or an integer tensor that broadcasts to
            [*batch, head, query], one key for each row. Negative numbers count from the last key. A key that is hidden
            from a row has no weight there, 0. A number out of range gives NaN if the tensor is on a GPU, and is refused
            otherwise.
        softcap: c, the limit of the scores in models that cap them; no cap if not given.
        sink_logits: [head], one more logit in the denominator of each row, as GPT-OSS learns it. It counts as a key
            for the entropy, and takes weight from the keys: these sum to less than 1, in `top_mass` too, and the rest
            is at no distance, 0.
        score_mod: a function of a score and the numbers of its batch, head, query and key, as in FlexAttention.
        is_causal, attn_mask: torch's names of `causal` and `mask`.

    Returns:
        The measures, each [*batch, head, query]:

        - `entropy` in nats, and `effective_tokens`, its exponential;
        - `relative_entropy`, over the logarithm of the number of visible keys; NaN where only one is visible;
        - `largest_weight`, `top_mass` on the heaviest keys, `sink_mass` on chosen keys;
        - `distance`, Σ_j p_ij |position of i − j|: query i has position i if causal, else i + keys − queries where
          there are more keys than queries, as with a cache;
        - `largest_logit`, max_j s_ij.

    >>> query, key = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    >>> summary = attention_summary(query, key, is_causal=True)
    >>> summary.effective_tokens, summary.distance
    (tensor([[[1., 2., 3., 4.]]]), tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]]))
    """
    causal = one_name(("causal", "is_causal"), (causal, is_causal))
    mask = one_name(("mask", "attn_mask"), (mask, attn_mask))
    options = {"scale": scale, "enable_gqa": enable_gqa, "softcap": softcap}
    call = AttentionCall(
        query, key, mask, False if causal is None else causal, **options, sink_logits=sink_logits, score_mod=score_mod
    )
    with names_as_given(is_causal=is_causal, attn_mask=attn_mask):
        return AttentionSummary(summary_rows(call, check_measures(measures), top=top, sinks=sinks, precision=precision))


def check_measures(measures: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of measures as a tuple, all of them for None; an unknown name lists the known ones.

    >>> check_measures(["distance", "entropy"])
    ('distance', 'entropy')
    """
    if measures is None:
        return tuple(MEASURES)
    names = [measures] if isinstance(measures, str) else sequence("measures", measures, "a list of names")
    if not names:
        raise InputError("measures", "at least one name", "none", f"choose from {', '.join(MEASURES)}")
    for name in names:
        choice("measures", name, MEASURES)
    return tuple(distinct("measures", names))


def reduce_rows(measure: str, rows: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return the mean, or for logits the maximum, of a measure over the rows that are defined; NaN if none is.

    >>> rows = torch.tensor([1.0, 3.0, torch.nan])
    >>> reduce_rows("largest_logit", rows), reduce_rows("entropy", rows)
    (tensor(3.), tensor(2.))
    """
    if MEASURES[measure].reduction == "mean":
        return rows.nanmean(dim=dim)
    undefined = rows.isnan()
    return rows.masked_fill(undefined, -torch.inf).amax(dim=dim).masked_fill(undefined.all(dim=dim), torch.nan)


def summary_rows(
    call: AttentionCall,
    measures: Sequence[str],
    *,
    top: int = 8,
    sinks: Sinks = 0,
    precision: str = "highest",
) -> dict[str, Tensor]:
    """Return the measures by name, each [*batch, head, query]; the arguments as in `attention_summary`.

    >>> call = AttentionCall(logits=torch.zeros(1, 1, 2, 4))
    >>> summary_rows(call, ["largest_weight"])["largest_weight"]
    tensor([[[0.2500, 0.2500]]])
    """
    choice("precision", precision, PRECISIONS)
    top, wanted, split = whole("top", top, low=1, high=MAX_TOP), set(measures), batches(call)
    chosen = _sink_keys(sinks, split) if "sink_mass" in wanted else None
    plain = split.sink_logits is None and wanted <= _ENTROPY_ALONE and all(scores.plain for scores in split.scores)
    if plain:
        largest = "largest_weight" in wanted
        parts = [entropy_rows(scores, PRECISIONS[precision], largest=largest) for scores in split.scores]
    else:
        top, distance = top if "top_mass" in wanted else 0, "distance" in wanted
        sink = chosen[0] if isinstance(chosen, list) and len(chosen) == 1 else None
        parts = [summary_sums(scores, precision, top, distance=distance, sink=sink) for scores in split.scores]
    joined = {
        name: split.join([getattr(part, field) for part in parts])
        for name, field in _FIELDS.items()
        if name in wanted or name == "entropy"
    }
    if chosen is not None:
        joined["sink_mass"] = split.join(_sink_mass(split, parts, chosen))
    if split.sink_logits is not None:
        _add_sink_logits(joined, split, parts)
    if "relative_entropy" in wanted:
        joined["relative_entropy"] = _relative_entropy(joined["entropy"], split, parts)
    if "effective_tokens" in wanted:
        joined["effective_tokens"] = joined["entropy"].exp()
    return {name: joined[name] for name in measures}


def _relative_entropy(entropy: Tensor, split: Batches, parts: list[Rows]) -> Tensor:
    """Return entropy over the logarithm of the number of visible keys; a sink logit is one more key."""
    if split.sink_logits is None and split.scores and split.scores[0].mask is None and parts[0].visible is None:
        scores = split.scores[0]
        lengths = scores.query.shape[2], scores.key.shape[2]
        return entropy / _log_lengths(lengths, scores.causal, entropy.dtype, entropy.device)
    counts = [
        visible_keys(scores) if part.visible is None else part.visible
        for scores, part in zip(split.scores, parts, strict=True)
    ]
    return entropy / _log_visible(split.join(counts) + (split.sink_logits is not None), entropy.dtype)


def _log_visible(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest possible entropy of each row; NaN, not 0, for a row that sees one key."""
    return visible.to(dtype).log().masked_fill(visible <= 1, torch.nan)


@lru_cache(maxsize=8)
def _log_lengths(lengths: tuple[int, int], causal: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the same by query alone, for scores without a mask: equal in all layers of a model."""
    query, key = (torch.zeros((), device=device).expand(1, 1, length, 1) for length in lengths)
    return _log_visible(visible_keys(Scores(query, key, None, causal, 1.0))[0, 0], dtype)


def _add_sink_logits(rows: dict[str, Tensor], split: Batches, parts: list[Rows]) -> None:
    """Change the rows for one more logit σ in the denominator: the keys keep the share w of the weight.

    w = Σ_j exp(s_j) / (Σ_j exp(s_j) + exp(σ)),    H = −w ln w − (1 − w) ln(1 − w) + w H(keys)
    """
    log_sum = split.join([cast(Tensor, part.log_sum) for part in parts])
    difference = log_sum - cast(Tensor, split.sink_logits)
    share, rest = difference.sigmoid(), (-difference).sigmoid()
    rows["entropy"] = torch.special.entr(share) + torch.special.entr(rest) + share * rows["entropy"]
    for name in ("largest_weight", "top_mass", "sink_mass", "distance"):
        if name in rows:
            rows[name] = share * rows[name]


class _RowSinks(NamedTuple):
    """A sink key for each row, and which of the numbers were out of range; broadcast without copies."""

    keys: Tensor
    outside: Tensor


def _sink_keys(sinks: Any, split: Batches) -> list[int] | _RowSinks:
    """Return the numbers of the sink keys, counted from the first."""
    keys = split.keys
    if not split.scores:
        return []
    if not isinstance(sinks, Tensor) or sinks.ndim == 0:
        items = sequence("sinks", sinks, "key numbers") if isinstance(sinks, list | tuple) else [sinks]
        if not items:
            raise InputError("sinks", "at least one key number", "none", "leave `sink_mass` out of the measures")
        numbers = [whole("sinks", item, low=-keys, high=keys - 1) % keys for item in items]
        return list(dict.fromkeys(numbers))
    remedy = f"give key numbers from {-keys} to {keys - 1}, one for each row"
    if sinks.is_floating_point() or sinks.is_complex() or sinks.dtype == torch.bool:
        raise InputError("sinks", "whole numbers", sinks.dtype, remedy)
    outside = (sinks < -keys) | (sinks >= keys)
    if sinks.is_cpu and bool(outside.any()):  # on a GPU one would have to wait for the answer
        raise InputError("sinks", f"in [{-keys}, {keys - 1}]", f"{int(sinks.min())} to {int(sinks.max())}", remedy)
    rows = sinks.detach().to(split.query.device, torch.int64).remainder(keys), outside.to(split.query.device)
    try:
        rows = [tensor.expand(split.shape) for tensor in rows]
    except RuntimeError:
        expected = f"a shape that broadcasts to {tuple(split.shape)}"
        raise InputError("sinks", expected, described(sinks), remedy, must="have") from None
    same = not split.reversed or sinks.shape[-1] == 1  # for all queries, so that their order does not matter
    return _RowSinks(*(tensor if same else tensor.flip(-1) for tensor in rows))


def _sink_mass(split: Batches, parts: list[Rows], sinks: list[int] | _RowSinks) -> list[Tensor]:
    """Return the weight of the sinks; of each, rounding may give no more than the largest weight."""
    masses = []
    for n, (scores, part) in enumerate(zip(split.scores, parts, strict=True)):
        if part.sink_mass is not None:
            masses.append(part.sink_mass)
            continue
        keys = sinks if isinstance(sinks, list) else [nth(sinks.keys[..., None], n)[..., 0]]
        log_sum, largest = cast(Tensor, part.log_sum), cast(Tensor, part.largest)
        weights = [torch.minimum((chosen_scores(scores, key) - log_sum).exp(), largest) for key in keys]
        mass = weights[0] if len(weights) == 1 else torch.stack(weights).sum(dim=0).clamp(max=1)
        if isinstance(sinks, _RowSinks):
            mass = mass.masked_fill(nth(sinks.outside[..., None], n)[..., 0], torch.nan)
        masses.append(mass)
    return masses
