"""Every study is declared whole."""

import pytest

from joma.arguments import InputError
from joma.studies import STUDIES, load


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_declared_completely(name):
    study = load(name)
    assert study.name == name
    assert {"quick", "paper"} <= set(study.presets)
    names = [claim.name for claim in study.claims]
    assert len(names) == len(set(names)) >= 2
    statements = [claim.statement for claim in study.claims]
    assert len(statements) == len(set(statements))
    # A report may show one statement without those before it, so that none may refer to another.
    dangling = ("So ", "Nor ", "And ", "They ", "It ", "That ", "These ", "Those ", "Then ", "The same ")
    assert not [statement for statement in statements if statement.startswith(dangling)]
    assert all(set(claim.presets) <= set(study.presets) for claim in study.claims)
    assert study.figures


def test_an_unknown_study_raises_an_error_with_the_nearest_name():
    with pytest.raises(InputError, match="did you mean 'winner'"):
        load("winer")
