"""What `panorama` measures on the curves of all sources, and what it claims.

All of it was fixed before any curve was looked at but for two things that a review changed: claims with a p-value count
a family of models once, and worlds of the ladder do not count as evidence for the ladder's rule.

Fall, regain and the share regained are those of `ladder`, as are all thresholds: a fall is visible from 0.02 of the
largest entropy on, attention has come back if it regains a tenth of its fall, and a source is judged if it was trained
ten times as long as its attention took to move visibly, and its entropy falls visibly.

Time is divided by the *onset*, the first record at which the mean entropy over seeds has moved by 0.02 from its start.
It does not depend on how long a model was trained, as the share of the last step would, and needs no loss, which
runs do not store beside the three numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from joma.studies.common_axes import STEP
from joma.studies.entropy_return import fall, share_regained
from joma.studies.related.panorama_curves import split
from joma.studies.related.panorama_sources import SOURCES, Minimum, Source
from joma.studies.related.panorama_stored import stored_curves
from joma.studies.theorems.ladder_training import BOUNCE, PATIENCE, VISIBLE_FALL
from joma.study import Claim, NotInRun, above, at_least, at_most, below

SIGNIFICANCE = 0.05  # of labels that are dealt at random
CAN_CHANGE = 1e-6  # a stable rank this little above 1 is that of a single column or row


def curves(run: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the curves of all sources of a run, trained ones first, in the order in which they are declared."""
    present = {**split(run, "trained", member="seed"), **stored_curves(run)}
    return {name: present[name] for name in SOURCES if name in present}


def onset(curve: xr.Dataset) -> float:
    """Return the first step at which the mean entropy over seeds has moved visibly; NaN if it never does."""
    entropy = curve.axes_entropy.mean("seed")
    moved = abs(entropy - entropy.isel({STEP: 0})) >= VISIBLE_FALL
    return float(curve[STEP].where(moved).min())


def falls_first(curve: xr.Dataset) -> xr.DataArray:
    """Return which seeds have an entropy whose first visible change is a fall; one that never moves does not fall."""
    change = curve.axes_entropy - curve.axes_entropy.isel({STEP: 0}, drop=True)
    moved = abs(change) >= VISIBLE_FALL
    first = change.isel({STEP: moved.argmax(STEP)}, drop=True)
    return moved.any(STEP) & (first < 0)


def regained(curve: xr.Dataset) -> xr.DataArray:
    """Return the share of its fall that the entropy of each seed regains; 0 where it does not fall visibly."""
    return share_regained(curve.axes_entropy, STEP, visible=VISIBLE_FALL)


def rank_regained(curve: xr.Dataset) -> xr.DataArray:
    """Return the share of its fall that the logarithm of the stable rank regains; 0 where it does not fall visibly."""
    return share_regained(xr.ufuncs.log(ranks(curve)), STEP, visible=VISIBLE_FALL)


def ranks(curve: xr.Dataset) -> xr.DataArray:
    """Return the stable rank from the first record on at which the map is not zero: a map of zeros has no rank."""
    return curve.axes_rank.dropna(STEP, how="any")


def sink_growth(curve: xr.Dataset) -> float:
    """Return how much of what the most attended key could gain it has gained at the end, mean over seeds."""
    start, end = (curve.axes_sink.isel({STEP: index}) for index in (0, -1))
    return float(((end - start) / (1 - start)).mean("seed"))


def sink_correlation(curve: xr.Dataset) -> float:
    """Return the rank correlation of entropy and sink over the records, mean over seeds."""
    pairs = zip(curve.axes_entropy.values, curve.axes_sink.values, strict=True)
    return float(np.mean([np.corrcoef(rankdata(entropy), rankdata(sink))[0, 1] for entropy, sink in pairs]))


def falls_visibly(curve: xr.Dataset) -> bool:
    """Return whether entropy falls by 0.02 of its largest value, in the mean over seeds."""
    return float(fall(curve.axes_entropy, STEP).mean("seed")) >= VISIBLE_FALL


def is_judged(curve: xr.Dataset) -> bool:
    """Return whether entropy falls visibly, in the mean over seeds, and was trained for ten times its onset."""
    return falls_visibly(curve) and PATIENCE * onset(curve) <= float(curve[STEP][-1])


def comes_back(curve: xr.Dataset) -> bool:
    """Return whether entropy regains a tenth of its fall, in the mean over seeds."""
    return float(regained(curve).mean("seed")) >= BOUNCE


def judged(run: xr.Dataset, minimum: Minimum | None = None) -> dict[str, xr.Dataset]:
    """Return the curves that are judged, of sources of one kind of minimum if it is given."""
    return {
        name: curve
        for name, curve in curves(run).items()
        if is_judged(curve) and minimum in (None, SOURCES[name].minimum)
    }


def with_sink(run: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the curves that have a sink."""
    return {name: curve for name, curve in curves(run).items() if bool(np.isfinite(curve.axes_sink).all())}


def share_right(present: Mapping[str, xr.Dataset], predicts: Callable[[Source], bool | None]) -> float:
    """Return the share of curves whose return is predicted."""
    return float(np.mean([comes_back(curve) == predicts(SOURCES[name]) for name, curve in present.items()]))


def contested(run: xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the judged curves of which both premises predict something, without those of `ladder`."""
    return {
        name: curve
        for name, curve in judged(run).items()
        if SOURCES[name].minimum_predicts is not None and not SOURCES[name].from_ladder
    }


def minimum_lead(run: xr.Dataset) -> float:
    """Return the share of `contested` curves that the minimum predicts, less that which the activation predicts."""
    contest = contested(run)
    if not contest:
        raise NotInRun("source of which both premises say something, outside of the ladder")
    return share_right(contest, _by_minimum) - share_right(contest, _by_units)


def _by_minimum(source: Source) -> bool | None:
    return source.minimum_predicts


def _by_units(source: Source) -> bool:
    return source.units_predict


def label_p_value(values: ArrayLike, labels: ArrayLike) -> float:
    """Return how often labels that are dealt at random give as large a sum of ranks to those labelled true.

    Exact: all ways to deal the labels are counted. Values that are equal share their ranks.

    >>> label_p_value([0.1, 0.2, 0.8, 0.9], [False, False, True, True])  # one way of six
    0.16666666666666666
    """
    ranks, chosen = rankdata(np.asarray(values)), np.asarray(labels, dtype=bool)
    deals = np.array(list(combinations(range(len(ranks)), int(chosen.sum()))), dtype=int)
    return float((ranks[deals].sum(axis=-1) >= ranks[chosen].sum() - 1e-9).mean())


def by_family(values: Mapping[str, float], labels: Mapping[str, bool]) -> tuple[list[float], list[bool]]:
    """Return values and labels with one entry for each family and label: the mean over its members.

    Args:
        values, labels: by the name of their source.

    >>> growth = {"block": 0.4, "block-gelu": 0.6, "addition": 0.1}
    >>> by_family(growth, dict.fromkeys(growth, True))
    ([0.5, 0.1], [True, True])
    """
    groups: dict[tuple[str, bool], list[float]] = {}
    for name, value in values.items():
        groups.setdefault((SOURCES[name].family or name, labels[name]), []).append(value)
    return [float(np.mean(members)) for members in groups.values()], [label for _, label in groups]


def sink_p_value(run: xr.Dataset) -> float:
    """Return how often random labels would give families without a minimum as large sinks, by their growth."""
    growth = {name: sink_growth(curve) for name, curve in with_sink(run).items()}
    labels = {name: SOURCES[name].minimum == "none" for name in growth}
    if all(labels.values()) or not any(labels.values()):
        raise NotInRun("sink of sources both with a minimum and without one")
    return label_p_value(*by_family(growth, labels))


def rank_p_value(run: xr.Dataset) -> float:
    """Return how often random labels would give as much regained rank to families whose entropy comes back."""
    present = {name: curve for name, curve in judged(run).items() if _rank_can_change(curve)}
    labels = {name: comes_back(curve) for name, curve in present.items()}
    if all(labels.values()) or not any(labels.values()):
        raise NotInRun("source that comes back beside one that does not")
    shares = {name: float(rank_regained(curve).mean("seed")) for name, curve in present.items()}
    return label_p_value(*by_family(shares, labels))


def _rank_can_change(curve: xr.Dataset) -> bool:
    return float(curve.axes_rank.max()) > 1 + CAN_CHANGE


def share_falling_first(run: xr.Dataset) -> float:
    """Return the share of sources in which the entropy of every seed first falls."""
    return float(np.mean([bool(falls_first(curve).all()) for curve in curves(run).values()]))


def share_of_falling_rank(run: xr.Dataset) -> float:
    """Return the share of sources whose stable rank ends below its start, of those in which it can change."""
    means = [ranks(curve).mean("seed") for curve in curves(run).values() if _rank_can_change(curve)]
    return float(np.mean([float(mean[-1]) < float(mean[0]) for mean in means]))


def largest_sink_correlation(run: xr.Dataset) -> float:
    """Return the largest rank correlation of entropy and sink, of sources whose entropy falls visibly."""
    falling = [curve for curve in with_sink(run).values() if falls_visibly(curve)]
    return max(sink_correlation(curve) for curve in falling)


def _shares(run: xr.Dataset, minimum: Minimum) -> list[float]:
    """Return the mean share that each judged source of a kind of minimum regains, without the worlds of the ladder."""
    counted = {name: curve for name, curve in judged(run, minimum).items() if not SOURCES[name].from_ladder}
    if not counted:
        raise NotInRun(f"judged source outside of the ladder whose minimum is {minimum}")
    return [float(regained(curve).mean("seed")) for curve in counted.values()]


_REGAINED = "share of its fall that entropy regains, mean over seeds"
_JUDGED = "trained for ten times as long as entropy takes to move by 0.02"
CLAIMS = (
    Claim(
        "falls-first",
        "Attention first turns sparser in every model.",
        share_falling_first,
        at_least(1.0),
        kind="control",
        quantity="share of models in which the first change of entropy by 0.02 is a fall, in every seed",
    ),
    Claim(
        "no-minimum",
        "Where the loss has no minimum, attention does not come back.",
        lambda run: max(_shares(run, "none")),
        below(BOUNCE),
        kind="control",
        quantity=f"{_REGAINED}, largest over models without a minimum, {_JUDGED}",
    ),
    Claim(
        "dense-minimum",
        "Where the least loss has dense attention, attention comes back.",
        lambda run: min(_shares(run, "dense")),
        at_least(BOUNCE),
        kind="control",
        quantity=f"{_REGAINED}, least over models whose least loss is known to have dense attention, {_JUDGED}, "
        "without those of the study from which the rule comes",
    ),
    Claim(
        "activation",
        "Attention comes back with nonlinear units and does not with linear ones, in every model.",
        lambda run: share_right(judged(run), _by_units),
        at_least(1.0),
        kind="control",
        quantity=f"share of models of which this is true, {_JUDGED}; JoMA credits the activation",
    ),
    Claim(
        "rule-better",
        "The minimum of the loss predicts better than the activation where attention comes back.",
        minimum_lead,
        above(0.0),
        kind="control",
        quantity="share of models that the minimum predicts less that which the activation predicts; models of which "
        f"both say something, {_JUDGED}, without those of the study from which the rule comes",
    ),
    Claim(
        "sink-mirrors",
        "Where entropy falls, one key gains attention, in every model.",
        largest_sink_correlation,
        below(0.0),
        kind="control",
        quantity="rank correlation over training of entropy and the weight on the most attended key, mean over seeds, "
        "largest over models whose entropy falls by 0.02",
    ),
    Claim(
        "sink-no-minimum",
        "One key gains more attention where the loss has no minimum.",
        sink_p_value,
        at_most(SIGNIFICANCE),
        kind="control",
        quantity="how often random labels of the models would separate them as clearly, by the weight that the most "
        "attended key has gained at the end, of what it could gain; models of one family count once, by their mean",
    ),
    Claim(
        "rank-falls",
        "The stable rank of the map above attention ends below its start in every model.",
        share_of_falling_rank,
        at_least(1.0),
        kind="control",
        quantity="share of models, of those whose map has more than one row and column",
    ),
    Claim(
        "rank-follows",
        "Where entropy comes back, the stable rank of the map above attention comes back.",
        rank_p_value,
        at_most(SIGNIFICANCE),
        kind="control",
        quantity="how often random labels of the models would separate them as clearly, by the share of its fall that "
        f"the logarithm of the rank regains; models {_JUDGED}; those of one family and label count once, by their mean",
    ),
)
