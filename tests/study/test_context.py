"""Random streams by purpose, arms as an axis, and training that is saved by default."""

import itertools
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from joma.arguments import InputError
from joma.files import StorageError
from joma.study import Arms, Context, LabelledTraining
from joma.train import Optimiser, Record, cuda

ARMS = Arms("rate", ("low", "high"))


class Numbers(nn.Module):
    """One number for each model."""

    def __init__(self, values):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(values, dtype=torch.float64)[:, None])


def quadratic(model, step):
    del step
    return (model.p**2).sum(-1) / 2


def train(context, *, arms=None, loss=quadratic, values=(1.0, 2.0), label="a line"):
    record = Record(lambda model, _: {"p": model.p[:, 0]}, at=(0, 5, 10))
    optimiser = Optimiser("sgd", 0.1)
    return context.fit(Numbers(values), loss, label=label, optimiser=optimiser, steps=10, record=record, arms=arms)


@given(st.integers(0, 2**31), st.lists(st.text(max_size=8), min_size=2, max_size=4, unique=True))
def test_each_purpose_has_a_stream_of_its_own_which_starts_again(seed, purposes):
    context = Context((seed, seed + 1))

    def draws(purpose):
        return [torch.rand(50, generator=generator, dtype=torch.float64) for generator in context.generators(purpose)]

    for purpose in purposes:
        assert all(first.equal(second) for first, second in zip(draws(purpose), draws(purpose), strict=True))
    every = [draw for purpose in purposes for draw in draws(purpose)]
    for first, second in itertools.combinations(every, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.9
        assert not torch.isin(first, second).any()


def test_streams_of_numpy_differ_by_seed_and_purpose_and_start_again():
    contexts = Context((0, 1)), Context((1,))
    starts, data = ([stream.normal(size=5) for stream in contexts[0].numpy_generators(name)] for name in ("a", "b"))
    (again,) = contexts[1].numpy_generators("a")
    np.testing.assert_array_equal(again.normal(size=5), starts[1])
    assert len({values[0] for values in (*starts, *data)}) == 4


def test_streams_of_many_purposes_are_uncorrelated():
    draws = [
        torch.randn(4_000, generator=generator)
        for purpose in ("data", "weights", "chance", "Figure 3, data")
        for generator in Context((0, 1, 2)).generators(purpose)
    ]
    correlation = np.corrcoef(torch.stack(draws).numpy()) - np.eye(len(draws))
    assert abs(correlation).max() < 5 / np.sqrt(4_000)


def test_a_seeds_own_stream_is_that_of_its_number_and_alike_in_every_arm():
    first, *others = Context((7, 8)).seed_generators(ARMS)
    assert first.initial_seed() == 7
    assert [generator.initial_seed() for generator in others] == [8, 7, 8]
    seeds = [generator.initial_seed() for generator in Context((7, 8)).generators("weights", ARMS)]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_arms_become_an_axis_before_the_seeds():
    run = train(Context((4, 5)), arms=ARMS, values=(1.0, 2.0, 10.0, 20.0))
    assert dict(run.sizes) == {"rate": 2, "seed": 2, "step": 3}
    assert run.rate.values.tolist() == ["low", "high"]
    assert run.seed.values.tolist() == [4, 5]
    np.testing.assert_allclose(run.p.sel(step=10), np.array([[1.0, 2.0], [10.0, 20.0]]) * 0.9**10)
    np.testing.assert_array_equal(run.diverged, [[-1, -1], [-1, -1]])


def test_without_arms_seeds_have_their_labels():
    assert train(Context((4, 5))).seed.values.tolist() == [4, 5]


def test_training_is_saved_without_being_asked_and_resumes(tmp_path):
    context = Context((0, 1), checkpoints=tmp_path)

    def failing(model, step):
        if int(step) == 7:
            raise RuntimeError("power cut")
        return quadratic(model, step)

    with pytest.raises(RuntimeError):
        train(context, loss=failing, label="A line, 2 layers")
    (folder,) = tmp_path.iterdir()
    assert folder.name == "a-line-2-layers"
    assert sorted(file.name for file in folder.glob("*.safetensors")) == ["4.safetensors", "6.safetensors"]
    seen = []

    def counted(model, step):
        seen.append(int(step))
        return quadratic(model, step)

    resumed = train(context, loss=counted, label="A line, 2 layers")
    assert seen == [6, 7, 8, 9, 10]
    assert resumed.identical(train(Context((0, 1))))


def test_a_brief_training_is_saved_at_its_end_only(tmp_path):
    context = Context((0, 1), checkpoints=tmp_path)

    def loss(model, step):
        assert not list(tmp_path.rglob("*.safetensors"))
        return quadratic(model, step)

    options = {"optimiser": Optimiser("sgd", 0.1), "steps": 10, "brief": True}
    context.fit_together([LabelledTraining(Numbers((1.0, 2.0)), loss, label="a", **options)])
    assert [file.name for file in tmp_path.rglob("*.safetensors")] == ["10.safetensors"]


@pytest.mark.parametrize(
    "other",
    [{"run": "b"}, {"study": "toy, version 2"}, {}, {"run": "a", "study": "toy, version 1", "device": "x"}],
    ids=["run", "version", "none", "more"],
)
def test_checkpoints_of_another_run_are_refused(tmp_path, other):
    identity = {"run": "a", "study": "toy, version 1"}
    train(Context((0, 1), checkpoints=tmp_path, run=identity))
    train(Context((0, 1), checkpoints=tmp_path, run=identity))
    with pytest.raises(StorageError, match=r"a-line holds checkpoints of another run, which differs in"):
        train(Context((0, 1), checkpoints=tmp_path, run=other))


def test_checkpoints_of_another_training_of_the_same_run_are_refused(tmp_path):
    context = Context((0, 1), checkpoints=tmp_path, run={"run": "a"})
    train(context, label="relu")
    (tmp_path / "relu").rename(tmp_path / "linear")
    with pytest.raises(StorageError, match=r"linear holds checkpoints of another run, which differs in training"):
        train(context, label="linear")
    train(context, label="a b")
    with pytest.raises(StorageError, match="which differs in training"):  # the same folder, by its name
        train(context, label="A-B")


def trainings(*labels, loss=quadratic):
    """Return a training for each label, the second with arms."""
    record = Record(lambda model, _: {"p": model.p[:, 0]}, at=(0, 5, 10))
    shared = {"optimiser": Optimiser("sgd", 0.1), "steps": 10, "record": record}
    return [
        LabelledTraining(Numbers(values), loss, label=label, arms=arms, **shared)
        for label, (values, arms) in zip(labels, [((1.0, 2.0), None), ((1.0, 2.0, 10.0, 20.0), ARMS)], strict=True)
    ]


def test_together_each_has_its_arms_folder_and_trajectory(tmp_path):
    context = Context((4, 5), checkpoints=tmp_path, run={"run": "a"})
    plain, with_arms = context.fit_together(trainings("depth 1", "depth 2"))
    assert plain.identical(train(Context((4, 5))))
    assert with_arms.identical(train(Context((4, 5)), arms=ARMS, values=(1.0, 2.0, 10.0, 20.0)))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["depth-1", "depth-2"]

    untouched = partial(pytest.fail, "trained again")
    assert train(context, label="depth 1", loss=untouched).identical(plain)  # as if it had been trained alone
    again = context.fit_together(trainings("depth 1", "depth 2", loss=untouched))
    assert again[1].identical(with_arms)


def test_labels_of_one_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"`saving\.folder` must be a different one for each training"):
        Context((4, 5), checkpoints=tmp_path).fit_together(trainings("A b", "a-b"))
    assert not list(tmp_path.iterdir())


def test_labels_of_seeds_other_than_the_contexts_are_refused():
    record = Record(seeds=(7, 8))
    with pytest.raises(InputError, match=r"`record\.seeds` must be left out, got \(7, 8\)"):
        Context((0, 1)).fit(
            Numbers((1.0, 2.0)), quadratic, label="x", optimiser=Optimiser("sgd", 0.1), steps=1, record=record
        )


def test_on_cuda_pytorchs_compiler_is_loaded_while_the_study_prepares(monkeypatch):
    calls = []
    monkeypatch.setattr(cuda, "load_compiler", lambda: calls.append(1))
    Context((0,))
    assert not calls
    Context((0,), "cuda:1")
    assert calls == [1]


def test_the_compiler_is_loaded_once_and_in_the_background(monkeypatch):
    begun, go_on = [], threading.Event()

    def load():
        begun.append(threading.current_thread())
        go_on.wait(10)

    monkeypatch.setattr(cuda, "_load_compiler", load)
    cuda.load_compiler.cache_clear()
    try:
        thread = cuda.load_compiler()
        assert cuda.load_compiler() is thread
        assert thread.is_alive()
        assert not thread.daemon  # the process waits for it, so that its exit code is its own
        go_on.set()
        thread.join()
        assert begun == [thread]
    finally:
        cuda.load_compiler.cache_clear()


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_that_ends_waits_for_one_module_of_the_compiler_alone(monkeypatch, ends):
    imported, woken = [], []
    compiler = SimpleNamespace(AsyncCompile=SimpleNamespace(wakeup=lambda: woken.append(True)))
    monkeypatch.setattr(cuda, "import_module", lambda name: imported.append(name) or compiler)
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: not ends))
    cuda._load_compiler()
    assert list(dict.fromkeys(imported)) == list(cuda.COMPILER_MODULES[: 1 if ends else 3])
    assert woken == ([] if ends else [True])
