"""Shards of seeds: a run that is joined from them is the run that was never split, whatever happens on the way."""

import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import toy_study
from joma import files, open_run, stamp
from joma.arguments import InputError
from joma.files import DamagedFile, FolderLocked, StorageError, lock
from joma.report.html import write_report
from joma.runs import find_runs
from joma.study import Arms, Claim, Context, Preset, Study, at_most, execute, judge
from joma.study.shards import check_splits, join_shards, shard_of, split_seeds, train_shard
from joma.train import Optimiser, Record
from joma.transport import pack, unpack

ARMS = Arms("arm", ("slow", "fast"))
COUNT = 5


@dataclass(frozen=True)
class Config:
    steps: int = 12
    diverging: int = -1
    """The seed that diverges in the midst of the training."""
    leak: str = ""
    """What depends on all seeds, where nothing may."""
    die_at: int = -1
    """The step at which the process dies, in a child process only."""


may_die = False


@pytest.fixture(scope="module", autouse=True)
def _quick_storage():
    """Neither wait for the disk nor ask git for the commit: both take most of the time, and no test is about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_flush", lambda _: None)
        patch.setattr(stamp, "_commit", lambda: "unknown")
        yield


def run(config: Config, context: Context) -> xr.Dataset:
    """Train x ← x − rate (x − target) for two rates, and add one variable of each kind that studies have."""
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.stack([torch.randn(3, generator=g) for g in context.generators("x", ARMS)]))
    target = torch.tensor(context.models(ARMS))[:, None] / 7
    diverging = torch.tensor(context.models(ARMS)) == config.diverging

    def loss(model, step):
        if may_die and int(step) == config.die_at:
            os._exit(9)
        value = (model.x - target).square().sum(-1)
        return torch.where(diverging & (step >= 6), torch.inf, 1.0) * value

    trajectory = context.fit(
        model,
        loss,
        label="points",
        optimiser=Optimiser("sgd", context.per_model((0.01, 0.1))),
        steps=config.steps,
        record=Record(lambda model, _: {"x": model.x}, dims={"x": ("axis",)}),
        arms=ARMS,
    )
    seeds = np.array(context.seeds)
    extra = {
        "even": ("seed", seeds % 2 == 0),
        "place": ("seed", [f"place {seed}" for seed in seeds]),
        "constant": ("axis", np.array([0.5, np.nan, 2.0], dtype=np.float32)),
        "sum": ((), float(seeds.sum()) if config.leak == "sum" else 1.0),
        "rank": (("kind", "seed"), np.stack([seeds, -seeds]).astype(np.int32)),
    }
    trajectory = trajectory.assign(extra).assign_coords(axis=["a", "bb", "c"])
    if config.leak == "name":
        trajectory = trajectory.rename(sum=f"sum of {len(seeds)}")
    return trajectory.assign_attrs({"first": str(seeds[0])} if config.leak == "attribute" else {"note": "a note"})


STUDY = Study(
    name="points",
    title="Points",
    source="Euclid",
    about="Points move.",
    version=1,
    presets={"quick": Preset(Config(), seeds=COUNT, seconds=1)},
    run=run,
    claims=(Claim("ends", "It ends small.", lambda run: run.loss.isel(step=-1).max("arm"), at_most(9.0), "check"),),
    outcome=lambda run: f"{run.sizes['seed']} seeds.",
)


def train_all(split: Sequence[Sequence[int]], out: Path, study: Study = STUDY, config: Config | None = None) -> None:
    for seeds in split:
        train_shard(study, seeds, seed_count=sum(map(len, split)), out=out, config=config)


@functools.cache
def unsplit(count: int = COUNT, config: Config | None = None) -> Path:
    """Return the folder of a run that was never split."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return execute(STUDY, out=tempfile.mkdtemp(), seeds=count, config=config).path


def assert_same(path: Path, expected: Path) -> None:
    """Assert that two runs are the same, but for when and how long they ran."""
    run, other = open_run(path), open_run(expected)
    assert list(run.variables) == list(other.variables)
    assert (list(run.coords), run.sizes) == (list(other.coords), other.sizes)
    for name, variable in run.variables.items():
        twin = other.variables[name]
        assert (variable.dims, variable.dtype, variable.attrs) == (twin.dims, twin.dtype, twin.attrs)
        if variable.dtype == object:
            assert variable.values.tolist() == twin.values.tolist()
        else:
            assert variable.values.tobytes() == twin.values.tobytes()
    timed = {"created", "wall_time_s"}
    assert {**run.attrs, **dict.fromkeys(timed)} == {**other.attrs, **dict.fromkeys(timed)}
    claims, others = (
        [line for line in (folder / "claims.json").read_text().splitlines() if "wall_time_s" not in line]
        for folder in (path, expected)
    )
    assert claims == others
    unlisted = {"trajectory.nc", "manifest.json", "claims.json", "log.txt"}
    contents = [
        {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name not in unlisted}
        for folder in (path, expected)
    ]
    without_checkpoints = [{name: b for name, b in of_run.items() if "safetensors" not in name} for of_run in contents]
    assert without_checkpoints[0] == without_checkpoints[1]
    assert path.name == expected.name


def in_child(action: Callable[[], object]) -> int:
    """Perform an action in a child process; return its exit code."""
    child = os.fork()
    if not child:
        try:
            action()
        except BaseException:  # the child must not run the rest of the tests
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@given(count=st.integers(1, 500), shards=st.integers(1, 50))
def test_seeds_are_split_evenly_and_in_order(count, shards):
    split = split_seeds(count, shards)
    assert [seed for seeds in split for seed in seeds] == list(range(count))
    sizes = [len(seeds) for seeds in split]
    assert len(split) == min(shards, count)
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


@settings(max_examples=8)
@given(bounds=st.sets(st.integers(1, COUNT - 1)), order=st.randoms(use_true_random=False))
def test_any_split_gives_the_run_that_was_never_split(tmp_path_factory, bounds, order):
    out = tmp_path_factory.mktemp("runs")
    split = [tuple(range(low, high)) for low, high in pairwise([0, *sorted(bounds), COUNT])]
    train_all(order.sample(split, len(split)), out)
    outcome = join_shards(STUDY, split, out=out)
    assert not outcome.reused
    assert_same(outcome.path, unsplit())
    assert not (outcome.path / "shards").exists()
    shutil.rmtree(out)


def test_claims_and_figures_are_those_of_the_whole_run(tmp_path):
    study = toy_study.STUDY
    whole = execute(study, out=tmp_path / "whole")
    split = split_seeds(3, 2)
    train_all(split, tmp_path, study)
    joined = join_shards(study, split, out=tmp_path)
    assert_same(joined.path, whole.path)
    assert joined.claims == whole.claims
    assert joined.wall_time == float(open_run(joined.path).attrs["wall_time_s"])


def test_the_wall_time_is_the_sum_and_the_provenance_is_that_of_the_shards(tmp_path):
    split = split_seeds(COUNT, 2)
    train_all(split, tmp_path)
    shards = [shard_of(STUDY, seeds, seed_count=COUNT, out=tmp_path) for seeds in split]
    for index, shard in enumerate(shards):
        trajectory = open_run(shard.path)
        (shard.path / "manifest.json").unlink()
        stamp = {**trajectory.attrs, "torch_version": f"9.{index}"}
        shard.save(trajectory, device=f"cuda:{index}: card", wall_time=1.5 + index, stamp=stamp)
    outcome = join_shards(STUDY, split, out=tmp_path)
    attributes = open_run(outcome.path).attrs
    assert outcome.wall_time == 4.0
    assert (attributes["device"], attributes["torch_version"]) == ("cuda:0: card, cuda:1: card", "9.0, 9.1")
    assert "0-2 (1.5 s), 3-4 (2.5 s)" in (outcome.path / "log.txt").read_text()


@pytest.mark.parametrize("step", [0, 3, 7, 12])
def test_a_shard_that_is_killed_resumes(tmp_path, monkeypatch, step):
    config, split = Config(die_at=step), split_seeds(COUNT, 2)
    monkeypatch.setattr(f"{__name__}.may_die", True)
    for seeds in split:
        assert (
            in_child(lambda seeds=seeds: train_shard(STUDY, seeds, seed_count=COUNT, out=tmp_path, config=config)) == 9
        )
    monkeypatch.setattr(f"{__name__}.may_die", False)
    with pytest.raises(StorageError, match=r"lacks the shards of seeds 0-2, 3-4; train them"):
        join_shards(STUDY, split, out=tmp_path, config=config)
    train_all(split, tmp_path, config=config)
    assert_same(join_shards(STUDY, split, out=tmp_path, config=config).path, unsplit(config=config))


def test_joining_survives_death_before_any_of_its_writes_and_removals(tmp_path, monkeypatch):
    split = split_seeds(COUNT, 2)
    train_all(split, tmp_path / "trained")
    deaths = 0
    for name in ("replace", "rmdir"):
        for survived in range(20):
            out = tmp_path / f"{name} {survived}"
            shutil.copytree(tmp_path / "trained", out)
            calls, original = iter(range(survived)), getattr(os, name)

            def dying(*args, calls=calls, original=original, **options):
                if next(calls, None) is None:
                    os._exit(9)
                return original(*args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, dying)
                code = in_child(lambda out=out: join_shards(STUDY, split, out=out))
            deaths += code == 9
            assert_same(join_shards(STUDY, split, out=out).path, unsplit())
            assert not (shard_of(STUDY, (0, 1, 2), seed_count=COUNT, out=out).path.parent).exists()
            if code == 0:
                break
        else:
            pytest.fail("it never came to its end")
    assert deaths >= 6  # config, trajectory, two manifests, claims, and the folders of shards


def test_a_trained_shard_is_not_trained_again_but_checked(tmp_path):
    split = split_seeds(COUNT, 2)
    train_all(split, tmp_path)
    never = replace(STUDY, run=lambda *_: pytest.fail("trained again"))
    train_all(split, tmp_path, never)
    path = shard_of(STUDY, split[1], seed_count=COUNT, out=tmp_path).path
    content = bytearray((path / "trajectory.nc").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "trajectory.nc").write_bytes(content)
    for attempt in (lambda: train_all(split, tmp_path, never), lambda: join_shards(STUDY, split, out=tmp_path)):
        with pytest.raises(DamagedFile, match=rf"shards/3-4/trajectory\.nc is altered .*; delete {path} to") as error:
            attempt()
        assert error.value.file == path / "trajectory.nc"
    shutil.rmtree(path)
    train_all(split, tmp_path)
    assert_same(join_shards(STUDY, split, out=tmp_path).path, unsplit())


def test_a_missing_shard_and_one_in_the_wrong_place_are_named(tmp_path):
    split = split_seeds(4, 4)
    train_all(split[:-1], tmp_path)  # of three seeds
    with pytest.raises(StorageError, match="lacks the shards of seeds 0-0, 1-1, 2-2, 3-3"):
        join_shards(STUDY, split, out=tmp_path)
    shards = [shard_of(STUDY, seeds, seed_count=3, out=tmp_path) for seeds in split[:-1]]
    shutil.rmtree(shards[2].path)
    shutil.copytree(shards[1].path, shards[2].path)
    with pytest.raises(DamagedFile, match=r"shards/2-2/config\.json is that of another shard"):
        join_shards(STUDY, split[:-1], out=tmp_path)


@pytest.mark.parametrize("shards", [2, 5])
def test_seeds_that_diverge_in_one_shard_leave_the_others_alone(tmp_path, shards):
    config, split = Config(diverging=3), split_seeds(COUNT, shards)
    train_all(split, tmp_path, config=config)
    with pytest.warns(UserWarning, match="points: seeds 3 diverged"):
        outcome = join_shards(STUDY, split, out=tmp_path, config=config)
    assert_same(outcome.path, unsplit(config=config))
    assert (open_run(outcome.path).diverged >= 0).sel(seed=3).all()
    assert "seeds 3 diverged" in (outcome.path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("leak", "what"), [("sum", "`sum`"), ("name", "names of variables"), ("attribute", "attributes")]
)
def test_results_that_depend_on_all_seeds_are_refused(tmp_path, leak, what):
    config, split = Config(leak=leak), split_seeds(COUNT, 2)
    train_all(split, tmp_path, config=config)
    with pytest.raises(InputError, match=f"points, whose {what} differ between shards.* run it without shards"):
        join_shards(STUDY, split, out=tmp_path, config=config)
    assert all(shard_of(STUDY, seeds, seed_count=COUNT, out=tmp_path, config=config).is_trained for seeds in split)


def test_a_study_whose_bits_depend_on_the_batch_is_split_on_cuda_only(tmp_path):
    study = replace(STUDY, exact_shards=False)
    check_splits(study, "cuda:3")
    with pytest.raises(InputError, match="points on cpu, where PyTorch's kernels round differently"):
        train_all(split_seeds(2, 2), tmp_path, study)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seeds", [(), (0, 2), (-1, 0), (4, 5), (1, 0)])
def test_seeds_that_are_no_shard_are_refused(tmp_path, seeds):
    with pytest.raises(InputError, match="`seeds` must be consecutive seeds from 0 to 4"):
        train_shard(STUDY, seeds, seed_count=5, out=tmp_path)
    with pytest.raises(InputError, match="`split` must be all seeds from 0, in order"):
        join_shards(STUDY, [(0,), (2,)], out=tmp_path)


def test_each_lock_guards_its_own_work(tmp_path):
    """A run is locked by who joins it and a shard by who trains it: neither keeps other shards from training."""
    split = split_seeds(COUNT, 2)
    first, second = (shard_of(STUDY, seeds, seed_count=COUNT, out=tmp_path) for seeds in split)
    with lock(first.path):
        with pytest.raises(FolderLocked):
            train_shard(STUDY, first.seeds, seed_count=COUNT, out=tmp_path)
        train_shard(STUDY, second.seeds, seed_count=COUNT, out=tmp_path)
    with lock(first.whole.path):
        train_shard(STUDY, first.seeds, seed_count=COUNT, out=tmp_path)
        with pytest.raises(FolderLocked):
            join_shards(STUDY, split, out=tmp_path)
    with lock(first.path):  # by a process that looks whether it is trained
        path = join_shards(STUDY, split, out=tmp_path).path
        assert [folder.name for folder in (path / "shards").iterdir()] == ["0-2"]
    assert join_shards(STUDY, split, out=tmp_path).reused
    assert not (path / "shards").exists()


def test_a_joined_run_needs_no_shards(tmp_path, monkeypatch):
    split = split_seeds(COUNT, 2)
    train_all(split, tmp_path)
    path = join_shards(STUDY, split, out=tmp_path).path
    before = sorted(path.rglob("*"))
    assert train_shard(STUDY, split[0], seed_count=COUNT, out=tmp_path) == path
    assert execute(STUDY, out=tmp_path).reused
    # Joined between the first look and the lock.
    answers = iter([False, True])
    monkeypatch.setattr("joma.study.shards.Shard.is_joined", property(lambda _: next(answers)))
    assert train_shard(STUDY, split[0], seed_count=COUNT, out=tmp_path) == path
    assert sorted(file for file in path.rglob("*") if file.name != "shards") == before


def test_a_run_that_is_finished_without_its_shards_removes_them(tmp_path):
    train_shard(STUDY, (0,), seed_count=COUNT, out=tmp_path)
    assert_same(execute(STUDY, out=tmp_path).path, unsplit())
    assert not list(tmp_path.glob("*/*/shards"))


def test_no_reader_takes_a_shard_for_a_run(tmp_path):
    path = train_shard(STUDY, (0, 1), seed_count=COUNT, out=tmp_path)
    run = path.parents[1]
    for folder in (tmp_path, tmp_path / "points", run, run / "shards", path):
        assert [each for depth in range(5) for each in find_runs(folder, depth)] == []
    with pytest.raises(StorageError, match="holds some seeds of a run"):
        judge(STUDY, path)
    execute(toy_study.STUDY, out=tmp_path)
    assert write_report(tmp_path).runs == 1


def test_bad_input_leaves_no_folders(tmp_path):
    config = toy_study.Config(points=1)
    with pytest.raises(InputError, match="at least 2"):
        train_shard(toy_study.STUDY, (0, 1), seed_count=3, out=tmp_path / "runs", config=config)
    assert list(tmp_path.iterdir()) == []


def test_shards_travel_without_a_shared_file_system(tmp_path):
    split = split_seeds(COUNT, 3)
    for worker, seeds in enumerate(split):
        sent = pack(train_shard(STUDY, seeds, seed_count=COUNT, out=tmp_path / f"worker {worker}"))
        place = shard_of(STUDY, seeds, seed_count=COUNT, out=tmp_path / "driver").path
        assert unpack(sent, place)
        assert not unpack(sent, place)
    assert_same(join_shards(STUDY, split, out=tmp_path / "driver").path, unsplit())
