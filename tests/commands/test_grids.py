"""`--grid` is parsed as `--set` is, and what cannot be swept is refused by name."""

import pytest

import toy_study
from joma.arguments import InputError
from joma.commands.grids import parse_plan
from joma.sweeps import Draws, Grid, Range


def parsed(*grids, changes=(), random=None, seed=0):
    return parse_plan(toy_study.STUDY, "quick", grids, changes=changes, random=random, seed=seed)


def test_values_have_the_types_of_their_fields():
    config, plan = parsed("slope=1,2.5", "bold=true,False", "levels=1,2;3", "mode=run", changes=["points=7"])
    assert config.points == 7
    assert plan == Grid({"slope": [1.0, 2.5], "bold": [True, False], "levels": [(1.0, 2.0), (3.0,)], "mode": ["run"]})
    assert [type(value) for value in plan.values["slope"]] == [float, float]


def test_random_points_come_from_ranges_and_lists():
    _, plan = parsed("slope=0.1:10:log", "points=2:9", "mode=a,b", random=5, seed=3)
    assert plan == Draws({"slope": Range(0.1, 10.0, True), "points": Range(2, 9), "mode": ["a", "b"]}, 5, 3)


@pytest.mark.parametrize(
    ("grids", "options", "expected"),
    [
        ((), {}, "--grid"),
        (("slope",), {}, "KEY=VALUES"),
        (("slop=1,2",), {}, "slope"),
        (("slope=",), {}, "values between commas"),
        (("slope=1,,2",), {}, "values between commas"),
        (("slope=1,2,1.0",), {}, "different values"),
        (("slope=1", "slope=2"), {}, "slope twice"),
        (("slope=1,2",), {"changes": ["slope=3"]}, "--set slope"),
        (("slope=1:2",), {}, "--random N"),
        (("slope=1:2:cubic",), {"random": 2}, "low:high:log"),
        (("slope=2:1",), {"random": 2}, "low < high"),
        (("points=1:2",), {"random": 3}, "--random"),
    ],
)
def test_what_cannot_be_swept_is_refused_by_name(grids, options, expected):
    with pytest.raises(InputError) as problem:
        parsed(*grids, **options)[1].points()
    assert expected in str(problem.value)


def test_a_value_of_the_wrong_type_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        parsed("points=2,many")
    assert stop.value.code == 2
    assert "many" in capsys.readouterr().err
