import dataclasses
import json
import os

import numpy as np
import pytest

import toy_study
from joma import open_run
from joma.arguments import InputError
from joma.files import DamagedFile, FolderLocked, StorageError, checksum, lock
from joma.manifest import read_manifest, write_manifest
from joma.runs import Description, check_run, find_runs, read_claims, reopen, write_trajectory
from joma.study import Drawing, at_least, execute, judge
from toy_study import STUDY, Config


def verdicts(outcome):
    return {claim["name"]: claim["verdict"] for claim in outcome.claims}


def test_a_run_is_stored_judged_and_drawn(tmp_path):
    outcome = execute(STUDY, out=tmp_path)
    assert verdicts(outcome) == {"end": "holds", "each": "holds", "later": "not tested"}
    assert outcome.failed == 0
    names = {str(path.relative_to(outcome.path)) for path in outcome.path.rglob("*") if path.is_file()}
    figures = {f"figures/1-line{suffix}" for suffix in (".svg", ".txt")}  # no PDF at quick
    assert names == {"config.json", "trajectory.nc", "claims.json", "manifest.json", "log.txt"} | figures
    np.testing.assert_allclose(open_run(outcome.path).value.isel(time=-1), [2.0, 2.01, 2.02])


def test_a_finished_run_is_not_run_again(tmp_path):
    first = execute(STUDY, out=tmp_path)
    calls = len(toy_study.calls)
    second = execute(STUDY, out=tmp_path)
    assert len(toy_study.calls) == calls
    assert second.reused
    assert second.claims == first.claims
    assert not execute(STUDY, out=tmp_path, seeds=2).reused
    assert not execute(STUDY, out=tmp_path, config=Config(slope=3.0)).reused


def changed(**options):
    """The toy study with its first claim changed."""
    first, *others = STUDY.claims
    return dataclasses.replace(STUDY, claims=(dataclasses.replace(first, **options), *others))


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"expected": at_least(3.0)}, "does not hold"),
        ({"statement": "The line ends where it should."}, "holds"),
        ({"across": "every"}, "holds"),
        ({"presets": ("quick",)}, "not tested"),
        ({"seeds": 3}, "not tested"),
        ({"name": "last"}, "holds"),
    ],
)
def test_a_finished_run_is_judged_anew_where_its_claims_were_others(tmp_path, options, verdict):
    first = execute(STUDY, preset="paper", out=tmp_path, seeds=2)
    calls = len(toy_study.calls)
    other = changed(**options)
    second = execute(other, preset="paper", out=tmp_path, seeds=2)
    assert len(toy_study.calls) == calls
    assert (second.path, second.reused, second.wall_time) == (
        first.path,
        True,
        pytest.approx(first.wall_time, abs=1e-3),
    )
    assert [claim["verdict"] for claim in second.claims] == [verdict, *[claim["verdict"] for claim in first.claims[1:]]]
    assert read_claims(second.path).claims == second.claims
    assert "judged again" in (second.path / "log.txt").read_text()
    assert execute(other, preset="paper", out=tmp_path, seeds=2).claims == second.claims
    assert (second.path / "log.txt").read_text().count("judged again") == 1  # the same claims are not judged again


def test_a_run_is_judged_from_what_is_stored_at_the_preset_that_it_was_run_at(tmp_path):
    first = execute(STUDY, preset="paper", out=tmp_path)
    for file in (first.path / "figures").iterdir():
        file.rename(file.with_stem("1-old"))
    for name in ("mine.svg", "1-line-mine.svg", "2024-mine.svg"):
        (first.path / "figures" / name).touch()
    (first.path / "figures" / "3-folder.svg").mkdir()
    calls = len(toy_study.calls)
    again = judge(STUDY, first.path)
    assert len(toy_study.calls) == calls
    assert (again.claims, again.preset, again.reused) == (first.claims, "paper", True)
    assert {file.name for file in (first.path / "figures").iterdir()} == {
        "1-line.svg",
        "1-line.pdf",
        "1-line.txt",
        "mine.svg",
        "1-line-mine.svg",
        "2024-mine.svg",
        "3-folder.svg",
    }


def test_a_stored_run_that_lacks_what_is_measured_is_named_and_kept(tmp_path):
    path = execute(STUDY, out=tmp_path).path
    write_trajectory(path / "trajectory.nc", open_run(path).rename(value="worth"))
    with pytest.raises(StorageError, match=r"trajectory\.nc is .*altered since it was written"):
        judge(STUDY, path)
    identity = read_manifest(path).identity
    write_manifest(path, identity, ["config.json", "trajectory.nc"])  # as if the run had been written like this
    with pytest.raises(
        StorageError, match=f"{path.name} lacks what toy is judged by .*value.*; delete it to run it again"
    ):
        judge(STUDY, path)
    assert "worth" in open_run(path)


def test_a_run_that_was_killed_while_it_was_judged_is_judged_not_trained_again(tmp_path):
    first = execute(STUDY, out=tmp_path)
    calls = len(toy_study.calls)
    for finish in (lambda: execute(STUDY, out=tmp_path), lambda: judge(STUDY, first.path)):
        reopen(first.path)
        (first.path / "claims.json").unlink()
        assert finish().claims == first.claims
        assert len(toy_study.calls) == calls
        assert read_claims(first.path).claims == first.claims


@pytest.mark.parametrize("name", ["claims.json", "figures/1-line.svg", "figures/1-line.txt"])
def test_judging_writes_damaged_claims_and_figures_anew(tmp_path, name):
    outcome = execute(STUDY, out=tmp_path)
    file = outcome.path / name
    before = file.read_bytes()
    file.write_bytes(b"{}")
    with pytest.raises(DamagedFile, match=f"{name} is cut short or altered .*`joma judge {outcome.path}`"):
        execute(STUDY, out=tmp_path)
    assert judge(STUDY, outcome.path).claims == outcome.claims
    assert file.read_bytes() == before
    assert execute(STUDY, out=tmp_path).claims == outcome.claims


@pytest.mark.parametrize("name", ["trajectory.nc", "config.json", "manifest.json"])
def test_what_judging_cannot_write_anew_is_restored_or_run_again(tmp_path, name):
    path = execute(STUDY, out=tmp_path).path
    (path / name).write_bytes((path / name).read_bytes()[:-20])
    for attempt in (lambda: execute(STUDY, out=tmp_path), lambda: judge(STUDY, path)):
        with pytest.raises(StorageError, match=name) as error:
            attempt()
        assert "joma judge" not in str(error.value)
        assert "to run it again" in str(error.value)


def test_a_changed_preset_makes_no_failure_a_pass(tmp_path):
    path = execute(STUDY, preset="paper", out=tmp_path).path
    file = path / "config.json"
    file.write_text(file.read_text().replace('"paper"', '"paver"'))
    for read in (lambda: judge(STUDY, path), lambda: execute(STUDY, preset="paper", out=tmp_path)):
        with pytest.raises(DamagedFile, match=r"config\.json is altered"):
            read()


def test_the_preset_of_a_stored_run_is_that_which_it_was_run_at(tmp_path):
    options = {"out": tmp_path, "seeds": 2, "config": Config()}
    execute(STUDY, preset="quick", **options)
    for study in (STUDY, changed(statement="Another.")):
        again = execute(study, preset="paper", **options)
        assert (again.preset, again.reused) == ("quick", True)


def test_judging_makes_no_run_younger(tmp_path):
    old, new = (execute(STUDY, out=tmp_path, seeds=seeds).path for seeds in (1, 2))
    os.utime(old / "trajectory.nc", (0, 0))
    judge(STUDY, old)
    assert find_runs(tmp_path) == [old, new]


@pytest.mark.parametrize("removed", [(".svg",), (".svg", ".pdf")])
def test_figures_of_an_earlier_judging_are_removed_though_the_process_died_meanwhile(tmp_path, removed):
    path = execute(
        dataclasses.replace(STUDY, figures={"old": STUDY.figures["line"]}), preset="paper", out=tmp_path
    ).path
    reopen(path)
    for suffix in removed:
        (path / "figures" / f"1-old{suffix}").unlink()
    judge(STUDY, path)
    assert sorted(file.name for file in (path / "figures").iterdir()) == ["1-line.pdf", "1-line.svg", "1-line.txt"]
    check_run(path)


def test_a_trajectory_that_is_altered_while_it_is_judged_is_not_made_a_good_one(tmp_path):
    path = execute(STUDY, out=tmp_path).path

    def draw(trajectory):
        content = bytearray((path / "trajectory.nc").read_bytes())
        content[-1] ^= 1
        (path / "trajectory.nc").write_bytes(content)
        return toy_study.draw(trajectory)

    judge(dataclasses.replace(STUDY, figures={"line": Drawing(draw, "A line.")}), path)
    with pytest.raises(DamagedFile, match=r"trajectory\.nc is altered"):
        check_run(path)


def test_judging_a_folder_that_does_not_exist_makes_none(tmp_path):
    with pytest.raises(StorageError, match=r"no run at .*nowhere"):
        judge(STUDY, tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_version_is_not_judged(tmp_path):
    path = execute(STUDY, out=tmp_path).path
    before = (path / "claims.json").read_bytes()
    with pytest.raises(StorageError, match=r"version 1, where toy, version 2 is judged; run it again"):
        judge(dataclasses.replace(STUDY, version=2), path)
    assert (path / "claims.json").read_bytes() == before
    with lock(path), pytest.raises(FolderLocked):
        judge(STUDY, path)


def test_an_unfinished_run_is_run_anew(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        execute(STUDY, out=tmp_path, config=Config(mode="interrupt"))
    outcome = execute(STUDY, out=tmp_path)
    (outcome.path / "manifest.json").unlink()
    assert not execute(STUDY, out=tmp_path).reused


def test_claims_are_decided_at_their_presets_only(tmp_path):
    outcome = execute(STUDY, preset="paper", out=tmp_path)
    assert verdicts(outcome)["later"] == "does not hold"
    assert outcome.failed == 1
    measured = outcome.claims[2]["measured"]
    np.testing.assert_allclose(measured["values"], 2 + 0.01 * np.arange(5))
    np.testing.assert_allclose(measured["sd"], np.std(np.arange(5), ddof=1) * 0.01)


def test_nan_never_holds_and_stays_valid_json(tmp_path):
    outcome = execute(STUDY, out=tmp_path, config=Config(mode="nan"))
    assert verdicts(outcome)["end"] == verdicts(outcome)["each"] == "does not hold"
    record = json.loads((outcome.path / "claims.json").read_text())
    assert record["claims"][0]["measured"]["values"][0] is None


def test_diverged_seeds_are_warned_of_and_logged(tmp_path):
    with pytest.warns(UserWarning, match="toy: seeds 0 diverged: their loss was not finite"):
        outcome = execute(STUDY, out=tmp_path, config=Config(mode="lose"))
    assert "seeds 0 diverged" in (outcome.path / "log.txt").read_text()


def test_a_sentence_with_nan_is_no_outcome(tmp_path):
    for value, expected in (("nan", ""), ("2", "The line ends at 2 (nano).")):
        study = dataclasses.replace(STUDY, outcome=lambda _, value=value: f"The line ends at {value} (nano).")
        path = execute(study, out=tmp_path / value).path
        assert read_claims(path).description.outcome == expected


def test_a_figure_that_diverged_seeds_prevent_is_left_out_with_a_warning(tmp_path):
    def draw(_):
        raise ValueError("Data cannot be log-scaled")

    study = dataclasses.replace(STUDY, figures={"broken": Drawing(draw, "No line."), **STUDY.figures})
    with pytest.raises(ValueError, match="log-scaled"):  # nothing diverged: a defect of the study
        execute(study, out=tmp_path / "intact")
    with (
        pytest.warns(UserWarning, match="seeds 0 diverged"),
        pytest.warns(UserWarning, match="figure 1-broken is not drawn, seeds diverged"),
    ):
        outcome = execute(study, out=tmp_path / "diverged", config=Config(mode="lose"))
    assert [claim["name"] for claim in outcome.claims] == ["end", "each", "later"]
    assert {file.stem for file in (outcome.path / "figures").iterdir()} == {"2-line"}


def test_a_run_describes_itself_and_a_changed_title_is_stored_without_a_new_run(tmp_path):
    path = execute(STUDY, out=tmp_path).path
    assert read_claims(path).description == Description("A line", "Euclid", about=STUDY.about, figures=["1-line"])
    calls = len(toy_study.calls)
    again = execute(dataclasses.replace(STUDY, title="A straight line"), out=tmp_path)
    assert len(toy_study.calls) == calls
    assert (again.path, again.reused) == (path, True)
    assert read_claims(path).description.title == "A straight line"


def test_a_run_that_version_0_1_stored_is_judged_again_not_trained_again(tmp_path):
    outcome = execute(STUDY, out=tmp_path)
    calls, file = len(toy_study.calls), outcome.path / "claims.json"
    content = json.loads(file.read_text())
    del content["description"]
    for claim in content["claims"]:
        claim["said"] = claim.pop("statement")
    content["trajectory_sha256"] = checksum(outcome.path / "trajectory.nc")
    for read in (lambda: execute(STUDY, out=tmp_path), lambda: judge(STUDY, outcome.path)):
        file.write_text(json.dumps(content))
        (outcome.path / "manifest.json").unlink()
        assert read().claims == outcome.claims
        assert read_claims(outcome.path).claims == outcome.claims
    assert len(toy_study.calls) == calls


def test_another_text_of_the_same_name_is_another_run(tmp_path):
    text = tmp_path / "text"
    text.write_text("one")
    config = Config(text=str(text))
    first = execute(STUDY, out=tmp_path, config=config)
    assert execute(STUDY, out=tmp_path, config=config).reused
    text.write_text("two")
    second = execute(STUDY, out=tmp_path, config=config)
    assert not second.reused
    assert second.path != first.path


@pytest.mark.parametrize("file", ["config.json", "claims.json"])
def test_json_of_another_kind_is_named(tmp_path, file):
    path = execute(STUDY, out=tmp_path).path
    (path / file).write_text("[]")
    with pytest.raises(StorageError, match=f"{file} is (not what a run writes|cut short or altered)"):
        execute(STUDY, out=tmp_path)


def test_the_folder_of_one_study_is_no_place_for_another(tmp_path):
    execute(STUDY, out=tmp_path)
    with pytest.raises(StorageError, match="holds the runs of one study; choose the folder above it"):
        execute(STUDY, out=tmp_path / "toy")


def test_another_process_that_holds_the_run_is_named(tmp_path):
    path = execute(STUDY, out=tmp_path).path
    with lock(path), pytest.raises(FolderLocked, match=str(path)):
        execute(STUDY, out=tmp_path)


def test_a_damaged_finished_run_is_named_and_kept(tmp_path):
    path = execute(STUDY, out=tmp_path).path
    file = path / "trajectory.nc"
    file.write_bytes(file.read_bytes()[:-100])
    size = file.stat().st_size
    with pytest.raises(StorageError, match="cut short or altered"):
        execute(STUDY, out=tmp_path)
    assert file.stat().st_size == size


def test_a_trajectory_is_kept_where_judging_it_refuses_its_input(tmp_path):
    def refuse(_):
        raise InputError("times", "increasing", "1, 0", "sort them")

    with pytest.raises(InputError, match="sort them"):
        execute(changed(measure=refuse), out=tmp_path)
    calls = len(toy_study.calls)
    assert verdicts(execute(STUDY, out=tmp_path))["end"] == "holds"
    assert len(toy_study.calls) == calls


def test_an_unusable_folder_is_found_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    calls = len(toy_study.calls)
    with pytest.raises(StorageError, match="Not a directory"):
        execute(STUDY, out=tmp_path / "file")
    assert len(toy_study.calls) == calls


@pytest.mark.parametrize("options", [{"preset": "quik"}, {"seeds": 0}])
def test_bad_options(tmp_path, options):
    with pytest.raises(InputError):
        execute(STUDY, out=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_stored_preset_that_the_study_no_longer_has_is_named(tmp_path):
    config = STUDY.presets["paper"].config
    execute(STUDY, preset="paper", out=tmp_path, seeds=2)
    without = dataclasses.replace(STUDY, presets={"quick": STUDY.presets["quick"]})
    with pytest.raises(InputError, match="`preset` must be one of quick, got 'paper'"):
        execute(without, out=tmp_path, seeds=2, config=config)
