"""Claims are counted by kind."""

from hypothesis import given
from hypothesis import strategies as st

from joma.verdicts import KINDS, count_by_kind, present_form

VERDICTS = ("holds", "does not hold", "not tested")


@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(VERDICTS)), max_size=20))
def test_every_claim_is_counted_once_under_its_own_kind(pairs):
    counts = count_by_kind({"kind": kind, "verdict": verdict} for kind, verdict in pairs)
    assert list(counts) == [kind for kind in KINDS if any(kind == present for present, _ in pairs)]
    for kind, by_verdict in counts.items():
        for verdict in VERDICTS:
            assert by_verdict[verdict] == pairs.count((kind, verdict))


def test_a_record_of_an_earlier_version_can_be_shown():
    stored = {"statement": "x", "verdict": "holds", "measured": {"mean": 1.0, "values": [1.0]}}
    record = present_form(stored)
    assert stored.items() <= (record | {"measured": stored["measured"]}).items()
    assert (record["kind"], record["reason"], record["measured"]["interval"]) == ("check", "", None)
    present = record | {"kind": "theorem", "reason": "few seeds", "measured": {"interval": [0.0, 2.0]}}
    assert present_form(present) == present
