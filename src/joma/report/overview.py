"""The report's first screen and its table of claims: what to show of all runs together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from joma.report.rows import by_kind
from joma.report.table import totals
from joma.verdicts import Verdict, count_by_kind

Section = Mapping[str, Any]  # what the template shows of one run

# The pictures of the first screen in their order, and the order in which outcomes are chosen for its sentences. There
# is one picture more than there are sentences: that of Figure 3 is used if another is missing.
PICTURES = ("Figure 2", "Figure 3", "Figure 4", "WikiText-2", "Table 1", "Permutation")
OUTCOMES = ("Figure 2", "Figure 4", "WikiText-2", "Table 1", "Permutation", "Figure 3")
MAX_OUTCOMES = 5


def main_runs(sections: Sequence[Section]) -> list[Section]:
    """Return one run of each study: the one of the largest preset, of these with most seeds, of these the newest.

    Args:
        sections: all runs, in the order of the report: by study, and then oldest first.
    """
    best: dict[str, tuple[tuple[int, int, int], Section]] = {}
    for index, section in enumerate(sections):
        preset = {"quick": 0, "paper": 2}.get(section["preset"], 1)
        key = (preset, section["seeds"], index)
        study = section["study"]
        best[study] = max(best.get(study, (key, section)), (key, section), key=lambda pair: pair[0])
    return [section for _, section in best.values()]


def overview(sections: Sequence[Section]) -> dict[str, Any]:
    """Return what the template shows above the sections: pictures, outcomes, and the claims by kind."""
    runs = main_runs(sections)
    anchors = {section["anchor"] for section in runs}
    claims = [(claim, {"link": section["anchor"], "study": section["study"]}) for section, claim in _claims(runs)]
    groups = by_kind(claims)
    return {
        "highlights": _in_order([section for section in runs if section["highlight"]], PICTURES),
        "outcomes": _outcomes(runs),
        "groups": [group for group in groups if group["kind"] != "check"],
        "checks": next((group for group in groups if group["kind"] == "check"), None),
        "verdicts": _verdicts([claim for claim, _ in claims if claim["kind"] != "check"]),
        "other_runs": [section for section in sections if section["anchor"] not in anchors],
    }


def run_counts(claims: Sequence[Mapping[str, Any]]) -> str:
    """Return how many claims of one run have each verdict, in words, by kind."""
    return totals(claims) or "no claims"


def _claims(runs: Sequence[Section]) -> Iterator[tuple[Section, Mapping[str, Any]]]:
    return ((section, claim) for section in runs for claim in section["claims"])


def _verdicts(claims: Sequence[Mapping[str, Any]]) -> dict[Verdict, int]:
    """Return how many of these claims have each verdict, whatever their kinds."""
    total: dict[Verdict, int] = {"holds": 0, "does not hold": 0, "not tested": 0}
    for counts in count_by_kind(claims).values():
        for verdict, count in counts.items():
            total[verdict] += count
    return total


def _outcomes(runs: Sequence[Section]) -> list[Section]:
    """Return the runs whose outcomes are shown first: those with a picture, then others in the order of the report."""
    with_outcome = [section for section in runs if section["about"].outcome]
    with_picture = _in_order([section for section in with_outcome if section["about"].highlight], OUTCOMES)
    others = [section for section in with_outcome if not section["about"].highlight]
    return [*with_picture, *others][:MAX_OUTCOMES]


def _in_order(sections: Sequence[Section], labels: Sequence[str]) -> list[Section]:
    """Return sections in the order of their pictures' labels; those with other labels come last."""
    rank = {label: index for index, label in enumerate(labels)}
    return sorted(sections, key=lambda section: rank.get(section["about"].highlight, len(rank)))
