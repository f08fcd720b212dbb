"""Running a sweep: resumed, with failures that are kept, and the cost of what is left."""

import pytest

from joma.engine import Failure, Result
from joma.files import FolderLocked, lock
from joma.runs import open_run
from joma.sweep_execution import SweepRun, draw_claim
from joma.sweeps import Grid, open_sweep, read_sweep
from offered_studies import offer
from sweep_study import STUDY, InlineEngine, plan, sweep

GRID = Grid({"slope": [1.0, 2.0], "points": [1, 4]})  # one point is refused


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    offer(monkeypatch, {"toy": "sweep_study"})


def run(planned, **options):
    engine = InlineEngine()
    return SweepRun(planned, STUDY, **options).run(engine), engine.performed


def test_failed_units_are_kept_and_run_again_only_if_asked(tmp_path):
    planned = plan(tmp_path, GRID)
    result, performed = run(planned)
    assert performed == ["slope=1.0, points=1", "slope=1.0, points=4", "slope=2.0, points=1", "slope=2.0, points=4"]
    assert [result.state(unit) for unit in result.units] == ["failed", "finished", "failed", "finished"]
    assert "`points` must be at least 2" in result.failures[result.units[0].run]["message"]
    again, performed = run(plan(tmp_path, GRID))
    assert performed == []
    assert again.failures == result.failures
    _, performed = run(plan(tmp_path, GRID), retry_failed=True)
    assert performed == ["slope=1.0, points=1", "slope=2.0, points=1"]


@pytest.mark.parametrize("kind", ["lost", "interrupted"])
def test_lost_and_interrupted_units_are_always_run_again(tmp_path, kind):
    class Losing(InlineEngine):
        def results(self):
            *lost, last = self.units
            yield from (Result(unit, failure=Failure(kind, "its process died")) for unit in lost)
            self.units = [last]
            yield from super().results()

    planned = plan(tmp_path, Grid({"slope": [1.0, 2.0, 3.0]}))
    result = SweepRun(planned, STUDY).run(Losing())
    assert [result.state(unit) for unit in result.units] == ["failed" if kind == "lost" else "missing"] * 2 + [
        "finished"
    ]
    result, performed = run(plan(tmp_path, planned.plan))
    assert performed == ["slope=1.0", "slope=2.0"]
    assert result.failures == {}


def test_a_larger_grid_and_another_order_run_only_what_is_new(tmp_path):
    sweep(tmp_path, Grid({"slope": [1.0, 2.0]}))
    _, performed = run(plan(tmp_path, Grid({"slope": [3.0, 2.0, 1.0]})))
    assert performed == ["slope=3.0"]


def test_a_sweep_that_is_run_by_another_process_is_refused(tmp_path):
    planned = plan(tmp_path, GRID)
    with lock(planned.path), pytest.raises(FolderLocked):
        run(planned)


def test_an_interrupted_sweep_keeps_what_is_finished(tmp_path):
    class Interrupted(InlineEngine):
        def results(self):
            yield next(super().results())
            raise KeyboardInterrupt

    planned = plan(tmp_path, Grid({"slope": [1.0, 2.0, 3.0]}))
    with pytest.raises(KeyboardInterrupt):
        SweepRun(planned, STUDY).run(Interrupted())
    _, performed = run(plan(tmp_path, planned.plan))
    assert performed == ["slope=2.0", "slope=3.0"]


def test_the_cost_rests_on_the_preset_then_on_finished_units(tmp_path):
    sweep_run = SweepRun(plan(tmp_path, Grid({"slope": [1.0, 2.0, 3.0]}), seeds=6), STUDY)
    assert set(sweep_run.cost.seconds.values()) == {2.0}  # one second for three seeds
    assert sweep_run.cost.total(jobs=2) == 3.0
    assert "preset" in sweep_run.cost.basis
    stored = sweep(tmp_path, Grid({"slope": [1.0]}), seeds=6)
    sweep_run = SweepRun(plan(tmp_path, Grid({"slope": [1.0, 2.0, 3.0]}), seeds=6), STUDY)
    (claims,) = stored.finished.values()
    assert list(sweep_run.cost.seconds.values()) == [claims.wall_time] * 2
    assert sweep_run.cost.basis == "the 1 finished unit"


def test_the_figure_is_drawn_once_for_a_claim(tmp_path):
    result = sweep(tmp_path, GRID)
    picture = draw_claim(result)
    assert picture is not None
    assert picture.name == "1-end.svg"
    modified = picture.stat().st_mtime_ns
    assert draw_claim(read_sweep(result.path)) == picture
    assert picture.stat().st_mtime_ns == modified
    other = draw_claim(result, "each")
    assert other is not None
    assert not picture.exists()
    assert read_sweep(result.path).manifest.complete
    result.manifest.check()


def test_the_runs_are_those_of_single_executions(tmp_path):
    from joma.study import execute

    result = sweep(tmp_path / "sweep", Grid({"slope": [1.0, 2.0]}))
    data = open_sweep(result.path)
    for slope in (1.0, 2.0):
        config = type(STUDY.presets["quick"].config)(slope=slope)
        outcome = execute(STUDY, config=config, seeds=2, out=tmp_path / "single")
        assert outcome.path.name == result.units[int(slope) - 1].run
        assert (data.value.sel(slope=slope) == open_run(outcome.path).value).all()
