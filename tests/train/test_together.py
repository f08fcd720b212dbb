"""Trainings side by side: the same bits as each alone, through kills, Ctrl-C, errors and divergence.

On the CPU they run one after the other; `turns` makes them take turns as on CUDA, without streams.
"""

import os
import signal
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from joma.arguments import InputError
from joma.files import FolderLocked, StorageError
from joma.progress import Progress, Task
from joma.train import Compute, Job, Optimiser, Record, Saving, fit, fit_together, loop
from joma.train.checkpoint import CheckpointStore
from joma.train.state import Training

OPTIMISERS = (Optimiser("adam", 0.05, clip=0.5), Optimiser("sgd", 0.1), Optimiser("adamw", 0.02, weight_decay=0.1))
SAVE_STEPS = (3, 6)


@pytest.fixture(params=["one after the other", "in turns"])
def turns(request, monkeypatch):
    """Return whether trainings take turns."""
    in_turns = request.param == "in turns"
    monkeypatch.setattr(loop, "_interleaves", lambda _: in_turns)
    return in_turns


@pytest.fixture
def in_turns(monkeypatch):
    monkeypatch.setattr(loop, "_interleaves", lambda _: True)


class Layers(nn.Module):
    """Two layers for each of two seeds, in float32."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.lower = nn.Parameter(torch.randn(2, 4, 5 + number, generator=generator))
        self.upper = nn.Parameter(torch.randn(2, 5 + number, 3, generator=generator))


INPUTS = torch.randn(10, 4, generator=torch.Generator().manual_seed(9))


def squares(model, step):
    """A loss that depends on the step."""
    outputs = torch.relu(INPUTS.roll(int(step)) @ model.lower) @ model.upper
    return outputs.square().mean((1, 2)) * (1 + 0.1 * step)


def raising_at(step):
    def loss(model, now):
        if int(now) == step:
            raise RuntimeError("power cut")
        return squares(model, now)

    return loss


def pressing_at(step):
    """A loss that presses Ctrl-C in a step."""

    def loss(model, now):
        if int(now) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return squares(model, now)

    return loss


def job(number, steps, *, loss=squares, folder=None, **options):
    """Return the training `number`; its checkpoints are in a folder of that name in `folder`."""
    record = Record(lambda model, _: {"norm": model.lower.norm(dim=1)}, range(0, steps + 1, 2), {"norm": ("hidden",)})
    saving = None
    if folder is not None:
        saving = Saving(folder / str(number), [step for step in SAVE_STEPS if step <= steps])
    optimiser = OPTIMISERS[number % len(OPTIMISERS)]
    return Job(Layers(number), loss, optimiser=optimiser, steps=steps, record=record, saving=saving, **options)


def alone(training):
    """Train by `fit`."""
    return fit(**vars(training))


def assert_same(trained, expected):
    """Compare trajectories and final parameters, to the bit; each is a job and its trajectory."""
    for (first, first_run), (second, second_run) in zip(trained, expected, strict=True):
        assert first_run.identical(second_run)
        for name, parameter in first.model.named_parameters():
            assert parameter.equal(second.model.get_parameter(name))


def expected_of(lengths):
    jobs = [job(number, steps) for number, steps in enumerate(lengths)]
    return [(training, alone(training)) for training in jobs]


@pytest.mark.parametrize("lengths", [(), (7,), (9, 9), (4, 0, 9, 6), (1, 8, 8)])
@pytest.mark.usefixtures("turns")
def test_each_training_has_the_bits_that_it_has_alone(lengths):
    jobs = [job(number, steps) for number, steps in enumerate(lengths)]
    assert_same(zip(jobs, fit_together(jobs), strict=True), expected_of(lengths))


def test_one_step_of_each_is_made_in_turn(turns):
    models = []

    def noted(number):
        def loss(model, step):
            models.append((number, int(step)))
            return squares(model, step)

        return loss

    fit_together([job(number, steps, loss=noted(number)) for number, steps in enumerate((1, 3, 2))])
    one_after_the_other = [(number, step) for number, steps in enumerate((1, 3, 2)) for step in range(steps + 1)]
    by_step = sorted(one_after_the_other, key=lambda pair: pair[1])
    assert models == (by_step if turns else one_after_the_other)


@pytest.mark.usefixtures("turns")
def test_a_seed_that_diverges_touches_no_other_training():
    def exploding(model, step):
        return squares(model, step) * torch.tensor([1.0, torch.nan if step >= 3 else 1.0])

    jobs = [job(0, 8), job(1, 8, loss=exploding), job(2, 8)]
    runs = fit_together(jobs)
    assert [run.diverged.values.tolist() for run in runs] == [[-1, -1], [-1, 3], [-1, -1]]
    expected = expected_of((8, 8, 8))
    assert_same([(jobs[0], runs[0]), (jobs[2], runs[2])], [expected[0], expected[2]])
    assert jobs[1].model.lower[0].equal(expected[1][0].model.lower[0])


def checkpoints(folder):
    """Return the content of every file of checkpoints, by path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


LENGTHS = (2, 9, 8)  # in the order of the jobs


def test_after_a_kill_the_finished_are_loaded_and_the_others_resume(turns, tmp_path):
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    jobs = [job(number, steps, folder=torn) for number, steps in enumerate(LENGTHS)]
    jobs[1] = job(1, LENGTHS[1], loss=raising_at(7), folder=torn)
    with pytest.raises(RuntimeError, match="power cut"):
        fit_together(jobs)
    reached = {path.stem for path in (torn / "2").glob("*.safetensors")}
    assert reached == ({"6", "7"} if turns else set())  # saved when the other failed, or not begun
    models = []

    def noted(number):
        def loss(model, step):
            models.append((number, int(step)))
            return squares(model, step)

        return loss

    again = [job(number, steps, loss=noted(number), folder=torn) for number, steps in enumerate(LENGTHS)]
    runs = fit_together(again)
    assert sorted(models) == [*((1, step) for step in range(6, 10)), *((2, step) for step in range(7 * turns, 9))]
    assert_same(zip(again, runs, strict=True), expected_of(LENGTHS))
    for number, steps in enumerate(LENGTHS):
        alone(job(number, steps, folder=whole))
    assert checkpoints(torn) == checkpoints(whole)


@pytest.mark.usefixtures("turns")
def test_of_finished_trainings_no_step_is_made_and_no_bar_opened(tmp_path):
    first = fit_together([job(number, steps, folder=tmp_path) for number, steps in enumerate(LENGTHS)])
    fail = {"loss": raising_at(0), "progress": partial(pytest.fail, "opened")}
    again = fit_together([job(number, steps, folder=tmp_path, **fail) for number, steps in enumerate(LENGTHS)])
    assert all(run.identical(loaded) for run, loaded in zip(first, again, strict=True))


@pytest.mark.parametrize("press", [0, 3, 5, 8])
@pytest.mark.usefixtures("in_turns")
def test_ctrl_c_saves_every_training_at_the_step_it_has_reached(tmp_path, press):
    jobs = [job(number, steps, folder=tmp_path) for number, steps in enumerate(LENGTHS)]
    jobs[1] = job(1, LENGTHS[1], loss=pressing_at(press), folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit_together(jobs)
    saved = [CheckpointStore(tmp_path / str(number)).load() for number in range(3)]
    # The first has made the step, and is finished after its last one; the third has not begun it.
    steps = [None if checkpoint is None else checkpoint.step for checkpoint in saved]
    assert steps == [min(press + 1, 2), press + 1, press or None]
    again = [job(number, steps, folder=tmp_path) for number, steps in enumerate(LENGTHS)]
    assert_same(zip(again, fit_together(again), strict=True), expected_of(LENGTHS))


def test_ctrl_c_one_after_the_other_ends_the_present_one_and_begins_no_other(tmp_path):
    jobs = [job(0, 9, folder=tmp_path, loss=pressing_at(4)), job(1, 9, folder=tmp_path, loss=raising_at(0))]
    with pytest.raises(KeyboardInterrupt):
        fit_together(jobs)
    assert sorted(checkpoints(tmp_path)) == [f"0/{step}.safetensors{end}" for step in (3, 5) for end in ("", ".sha256")]


@pytest.mark.usefixtures("in_turns")
def test_ctrl_c_without_checkpoints_ends_after_whole_steps():
    jobs = [job(0, 9), job(1, 9, loss=pressing_at(2))]
    with pytest.raises(KeyboardInterrupt):
        fit_together(jobs)
    for number, training in enumerate(jobs):
        stopped = job(number, 3)
        alone(stopped)
        assert training.model.lower.equal(stopped.model.lower)


@pytest.mark.usefixtures("in_turns")
def test_an_error_of_the_disk_while_others_are_saved_keeps_the_first_error_as_context(tmp_path, monkeypatch):
    save = CheckpointStore.save

    def refuse(self, step, tensors, **options):
        if step == 5:
            raise StorageError("the disk is full.")
        save(self, step, tensors, **options)

    monkeypatch.setattr(CheckpointStore, "save", refuse)
    with pytest.raises(StorageError, match="disk is full") as caught:
        fit_together([job(0, 9, loss=raising_at(5), folder=tmp_path), job(1, 9, folder=tmp_path)])
    assert str(caught.value.__context__) == "power cut"


@pytest.mark.usefixtures("turns")
def test_every_folder_is_locked_until_the_last_training_ends(tmp_path):
    def loss(model, step):
        for number in range(2):
            with pytest.raises(FolderLocked):
                alone(job(number, LENGTHS[number], folder=tmp_path))
        return squares(model, step)

    fit_together([job(0, LENGTHS[0], folder=tmp_path), job(1, LENGTHS[1], folder=tmp_path, loss=loss)])
    alone(job(0, LENGTHS[0], folder=tmp_path))


@pytest.mark.usefixtures("turns")
def test_an_unusable_checkpoint_is_refused_before_anything_is_trained(tmp_path):
    alone(job(1, 9, folder=tmp_path))
    before = checkpoints(tmp_path)
    with pytest.raises(StorageError, match="another run, which differs in steps"):
        fit_together([job(0, 9, folder=tmp_path, loss=raising_at(0)), job(1, 8, folder=tmp_path)])
    assert checkpoints(tmp_path) == before


@pytest.mark.usefixtures("turns")
def test_each_has_its_own_precision_in_its_turn():
    seen = []

    def noted(model, step):
        seen.append((len(model.lower[0, 0]), torch.get_float32_matmul_precision()))
        return squares(model, step)

    outside = torch.get_float32_matmul_precision()
    fit_together([job(number, 3, loss=noted, compute=Compute(name)) for number, name in enumerate(("high", "highest"))])
    assert set(seen) == {(5, "high"), (6, "highest")}
    assert torch.get_float32_matmul_precision() == outside


def test_each_has_its_own_bar(turns):
    told = []

    class Tally(Task):
        def __init__(self, label):
            self.label = label

        def advance(self, amount=1):
            told.append((self.label, amount))

    class Told(Progress):
        @contextmanager
        def task(self, label, total):
            told.append((label, "opened", total))
            yield Tally(label)
            told.append((label, "closed"))

    fit_together([job(number, 2, progress=partial(Told().task, label)) for number, label in enumerate("ab")])
    by_label = {label: [event[1:] for event in told if event[0] == label] for label in "ab"}
    assert by_label == {label: [("opened", 2), (1,), (1,), ("closed",)] for label in "ab"}
    assert told.index(("b", "opened", 2)) == (1 if turns else 4)


@pytest.mark.usefixtures("in_turns")
def test_all_are_prepared_before_the_first_step(monkeypatch):
    """A capture waits for the whole device, and Ctrl-C ends it at once."""
    events, prepare = [], Training.prepare

    def noted(training, start):
        events.append("prepared")
        prepare(training, start)

    def loss(model, step):
        events.append("step")
        return squares(model, step)

    monkeypatch.setattr(Training, "prepare", noted)
    fit_together([job(number, 1, loss=loss) for number in range(3)])
    assert events == ["prepared"] * 3 + ["step"] * 6


@pytest.mark.usefixtures("in_turns")
def test_steps_are_prepared_made_and_saved_on_the_trainings_own_stream(monkeypatch, tmp_path):
    """With names in place of streams: each is current in all that its training does, and left in between."""
    current, seen = [], []

    @contextmanager
    def on_stream(training):
        current.append(training.model)
        yield
        current.pop()

    def noted(method):
        def call(training, *args, **options):
            seen.append(current == [training.model])
            return method(training, *args, **options)

        return call

    monkeypatch.setattr(Training, "on_stream", on_stream)
    for name in ("prepare", "step", "report"):
        monkeypatch.setattr(Training, name, noted(getattr(Training, name)))
    save = CheckpointStore.save
    monkeypatch.setattr(
        CheckpointStore, "save", lambda *args, **options: (seen.append(len(current) == 1), save(*args, **options))
    )
    with pytest.raises(KeyboardInterrupt):
        fit_together([job(0, 2, folder=tmp_path), job(1, 9, folder=tmp_path, loss=pressing_at(4))])
    assert len(seen) > 15
    assert all(seen)


@pytest.mark.parametrize(
    ("jobs", "names"),
    [
        (lambda _: [job(0, 2)] * 2, "jobs"),
        (lambda folder: [job(0, 2, folder=folder), job(0, 2, folder=folder / "0" / "..")], r"saving\.folder"),
        (lambda _: [job(0, 2, loss=raising_at(0)), job(1, -1)], "steps"),
    ],
)
@pytest.mark.usefixtures("turns")
def test_bad_jobs_are_named_before_anything_is_trained(tmp_path, jobs, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        fit_together(jobs(tmp_path))
    assert not checkpoints(tmp_path)


def test_only_cuda_runs_trainings_side_by_side():
    assert not loop._interleaves(torch.device("cpu"))
    assert loop._interleaves(torch.device("cuda", 0))
