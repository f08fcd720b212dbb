"""The table of what the theories predict."""

from collections import defaultdict

import pytest

from joma.studies.related.panorama_sources import MINIMA, SOURCES, STORED, TRAINED


def test_every_source_is_declared_once_with_a_reason():
    assert len(SOURCES) == len(STORED) + len(TRAINED)
    assert len({source.title for source in SOURCES.values()}) == len(SOURCES)
    for source in SOURCES.values():
        assert source.minimum in MINIMA
        assert source.reason


def test_families_have_several_members_whose_minimum_is_of_one_kind():
    families = defaultdict(list)
    for source in SOURCES.values():
        families[source.family].append(source)
    assert families.pop("")
    for members in families.values():
        assert len(members) > 1
        assert len({(source.minimum, source.from_ladder) for source in members}) == 1


@pytest.mark.parametrize(
    ("name", "by_rule", "by_units"),
    [("overlap", True, False), ("block-gelu", False, True), ("wikitext-linear", None, False), ("winner", False, False)],
)
def test_what_each_premise_predicts(name, by_rule, by_units):
    assert SOURCES[name].minimum_predicts is by_rule
    assert SOURCES[name].units_predict is by_units


def test_every_kind_of_minimum_has_both_kinds_of_units():
    """Otherwise the two explanations could not be told apart."""
    for minimum in MINIMA:
        assert {source.units for source in SOURCES.values() if source.minimum == minimum} == {"linear", "nonlinear"}
