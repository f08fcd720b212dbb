"""The loop against plain torch loops one seed at a time, and against steps computed by hand."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joma import schedule
from joma.arguments import InputError
from joma.data.tokens import token_classes
from joma.models import ATTENTIONS, Block, BlockConfig
from joma.progress import Progress, Task
from joma.train import Compute, Optimiser, Record, Saving, cuda, fit
from joma.train.state import Training

STEPS = 15


def streams(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def learner(seeds, attention="softmax"):
    """A block on its own data for every seed, and its loss: cross entropy with hidden units as logits."""
    generators = streams(*seeds)
    x = token_classes("gaussian", classes=6, distinct=4, common=3, generators=generators).frequency
    block = Block(
        BlockConfig(tokens=7, hidden=6, attention=attention, activation="gelu", scale=0.5), generators=generators
    )

    def loss(model, step):
        h = model(x)
        return (h.logsumexp(-1) - h.diagonal(dim1=-2, dim2=-1)).mean(-1) * (1 + 0.1 * float(step))

    return block, loss


class Numbers(nn.Module):
    """One row of numbers for each seed."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.tensor(value, dtype=torch.float64)))


def recorded(model, _step):
    return {"w": model.w, "z": model.z, "slope": model.z.grad}


PLAIN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
DIMS = {"w": ("dim", "hidden"), "z": ("query", "token"), "slope": ("query", "token")}


@pytest.mark.parametrize("rule", [Optimiser("sgd", 0.3, {"z": 0.7}, 0.01), Optimiser("adam", 0.05, {"z": 0.02}, 0.01)])
@settings(max_examples=15)
@given(attention=st.sampled_from(sorted(ATTENTIONS)), seeds=st.lists(st.integers(0, 99), min_size=2, max_size=4))
def test_a_seed_trains_as_it_would_alone_in_a_plain_loop(rule, attention, seeds):
    block, loss = learner(seeds, attention)
    run = fit(block, loss, optimiser=rule, steps=STEPS, record=Record(recorded, dims=DIMS))
    for position, seed in enumerate(seeds):
        alone, own_loss = learner((seed,), attention)
        groups = [{"params": [alone.w], "lr": rule.rate}, {"params": [alone.z], "lr": rule.rates["z"]}]
        plain = PLAIN[rule.name](groups, weight_decay=rule.weight_decay)
        for step in range(STEPS + 1):
            plain.zero_grad()
            value = own_loss(alone, step)[0]
            value.backward()
            state = run.isel(seed=position, step=step)
            np.testing.assert_allclose(state.loss, value.item(), rtol=1e-12)
            np.testing.assert_allclose(state.w, alone.w[0].detach(), rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(state.z, alone.z[0].detach(), rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(state.slope, alone.z.grad[0], rtol=1e-10, atol=1e-12)
            plain.step()


def quadratic(model, _step) -> Any:
    return sum((p.flatten(1) ** 2).sum(-1) for p in model.parameters()) / 2


def test_sgd_is_the_formula():
    model = Numbers(p=[[1.0, -2.0], [3.0, 0.5]], q=[[[4.0]], [[-1.0]]])
    rule = Optimiser("sgd", 0.1, {"q": 0.3}, weight_decay=0.5)
    run = fit(model, quadratic, optimiser=rule, steps=4,
              record=Record(lambda m, _: {"p": m.p, "q": m.q[:, 0, 0]}, dims={"p": ("token",)}))  # fmt: skip
    factor = np.arange(5)
    np.testing.assert_allclose(run.p.values[1, :, 0], 3.0 * (1 - 0.1 * 1.5) ** factor, rtol=1e-14)
    np.testing.assert_allclose(run.q.values[0], 4.0 * (1 - 0.3 * 1.5) ** factor, rtol=1e-14)
    assert run.p.dims == ("seed", "step", "token")
    assert run.diverged.values.tolist() == [-1, -1]


def test_adam_is_the_formula():
    start, rate, decay = np.array([[1.0, -2.0], [3.0, 0.5]]), 0.1, 0.2
    run = fit(Numbers(p=start.tolist()), quadratic, optimiser=Optimiser("adam", rate, weight_decay=decay), steps=6,
              record=Record(lambda m, _: {"p": m.p}, dims={"p": ("token",)}))  # fmt: skip
    p, first, second = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step in range(1, 7):
        slope = (1 + decay) * p
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        p -= rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        np.testing.assert_allclose(run.p.values[:, step], p, rtol=1e-13)


@given(at=st.sets(st.integers(0, 12), min_size=1))
def test_records_at_the_steps_asked_for_alone(at):
    asked = []

    def record(model, step):
        asked.append(step)
        return {"p": model.p[:, 0]}

    run = fit(Numbers(p=[[1.0]]), quadratic, optimiser=Optimiser("sgd", 0.5), steps=12, record=Record(record, at=at))
    assert asked == sorted(at) == run.step.values.tolist()
    np.testing.assert_array_equal(run.p.values[0], 0.5 ** np.array(sorted(at)))


def test_the_steps_of_an_iterator_can_be_used_again():
    record = Record(at=iter((0, 2)))
    for _ in range(2):
        run = fit(Numbers(p=[[1.0]]), quadratic, optimiser=Optimiser("sgd", 0.5), steps=2, record=record)
        assert run.step.values.tolist() == [0, 2]


def explosive(model, _step):
    return (model.p**4).sum(-1) / 4


@pytest.mark.parametrize("rule", [Optimiser("sgd", 0.1), Optimiser("sgd", 0.1, weight_decay=0.1)])
def test_a_seed_that_diverges_is_frozen_and_the_others_go_on(rule):
    def measure(model, _step):
        return {"p": model.p, "count": torch.arange(len(model.p))}

    def record(*seeds):
        return Record(measure, dims={"p": ("token",)}, seeds=seeds)

    model = Numbers(p=[[0.5, 1.0], [30.0, 1.0], [1.2, 0.1]])
    run = fit(model, explosive, optimiser=rule, steps=30, record=record(4, 5, 6))
    step = int(run.diverged.sel(seed=5))
    assert 0 < step < 30
    assert run.diverged.sel(seed=[4, 6]).values.tolist() == [-1, -1]
    lost = run.sel(seed=5)
    assert np.isfinite(lost.loss.values[:step]).all()
    assert np.isnan(lost.loss.values[step:]).all()
    assert np.isnan(lost.p.values[step:]).all()
    assert lost["count"].values.tolist() == [1] * 31
    alone = fit(Numbers(p=[[0.5, 1.0], [1.2, 0.1]]), explosive, optimiser=rule, steps=30, record=record(4, 6))
    np.testing.assert_array_equal(run.p.sel(seed=[4, 6]).values, alone.p.values)


def test_a_frozen_seed_stays_where_it_was():
    def loss(model, step):
        wall = torch.tensor([0.0, torch.inf if step >= 3 else 0.0], dtype=torch.float64)
        return (model.p**2).sum(-1) / 2 + wall

    rule = Optimiser("adam", 0.1, weight_decay=0.1)
    model, short = Numbers(p=[[1.0], [1.0]]), Numbers(p=[[1.0], [1.0]])
    run = fit(model, loss, optimiser=rule, steps=8)
    fit(short, loss, optimiser=rule, steps=3)
    assert run.diverged.values.tolist() == [-1, 3]
    assert model.p[1].item() == short.p[1].item()
    assert model.p[0].item() < short.p[0].item()


def test_reports_each_update_as_progress():
    told = []

    class Tally(Task):
        def advance(self, amount=1):
            told.append(amount)

    class Told(Progress):
        @contextmanager
        def task(self, label, total):
            told.append((label, total))
            yield Tally()

    fit(Numbers(p=[[1.0]]), quadratic, optimiser=Optimiser(), steps=3, progress=partial(Told().task, "block"))
    assert told == [("block", 3), 1, 1, 1]


def test_what_was_done_earlier_is_skipped_in_the_progress(tmp_path):
    told = []

    class Tally(Task):
        def skip(self, amount):
            told.append(("skipped", amount))

        def advance(self, amount=1):
            told.append(amount)

    class Told(Progress):
        @contextmanager
        def task(self, label, total):  # noqa: ARG002
            yield Tally()

    def loss(model, step):
        if step == 3 and not told:
            raise RuntimeError("power cut")
        return quadratic(model, step)

    options = {"optimiser": Optimiser(), "steps": 4, "saving": Saving(tmp_path, [2])}
    with pytest.raises(RuntimeError):
        fit(Numbers(p=[[1.0]]), loss, **options)
    fit(Numbers(p=[[1.0]]), loss, progress=partial(Told().task, "block"), **options)
    assert told == [("skipped", 2), 1, 1]


@pytest.mark.parametrize("rule", [Optimiser("sgd", 0.1), Optimiser("adam", 0.1, restart=2)])
@pytest.mark.parametrize("start", [0, 4, 5])
def test_steps_on_trial_are_all_the_first_one_and_change_nothing(rule, start):
    """As they come before a step is captured on CUDA; here without one."""
    asked = []

    def loss(model, step):
        asked.append(int(step))
        model.seen.add_(1)
        return quadratic(model, step) * torch.tensor([1.0, torch.nan])

    model = Numbers(p=[[1.0], [2.0]])
    model.register_buffer("seen", torch.tensor(0))
    training = Training(model, loss, rule, Record(), Compute(compiled=False))
    training.prepare(start)
    before = {name: tensor.clone() for name, tensor in training.state().items()}
    with training._state_restored():
        for _ in range(cuda.TRIAL_STEPS):
            training._trial_step(start)
        assert int(training.step_number) == start + 1
        assert next(model.parameters())[0].item() != 1.0
    assert asked == [start] * 3
    assert all(tensor.equal(before[name]) for name, tensor in training.state().items())


def test_bfloat16_is_recorded_in_float32():
    model = Numbers(p=[[1.0], [2.0]]).bfloat16()
    run = fit(model, quadratic, optimiser=Optimiser("sgd", 0.5), steps=2, record=Record(lambda m, _: {"p": m.p[:, 0]}))
    assert run.p.dtype == run.loss.dtype == np.float32
    assert run.p.values.tolist() == [[1.0, 0.5, 0.25], [2.0, 1.0, 0.5]]


def test_no_steps_record_the_start():
    run = fit(Numbers(p=[[2.0]]), quadratic, optimiser=Optimiser(), steps=0, record=Record(at=schedule.every(5, 0)))
    assert run.loss.values.tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"optimiser": Optimiser(rates={"q": 0.1})}, "rates"),
        ({"steps": -1}, "steps"),
        ({"record": Record(at=[0, 9])}, "at"),
        ({"record": Record(at=[])}, "at"),
        ({"saving": Saving("unused", [-5])}, "saving.at"),
        ({"saving": Saving("unused", iter(["x"]))}, "saving.at"),
        ({"saving": Saving("unused", [1, 99])}, "saving.at"),
        ({"loss": lambda m, _: (m.p.detach() ** 2).sum(-1)}, "loss"),
        ({"record": Record(seeds=(0,))}, "seeds"),
        ({"record": Record(lambda m, _: {"p": m.p})}, "dims"),
        ({"record": Record(lambda m, _: {"p": m.p.mean()})}, "record"),
        ({"loss": lambda m, _: (m.p**2).sum()}, "loss"),
        ({"loss": lambda m, _: (m.p**2).sum(0)}, "loss"),
    ],
)
def test_bad_options_are_named(options, names):
    options = {"loss": quadratic, "optimiser": Optimiser(), "steps": 3, **options}
    with pytest.raises(InputError, match=f"`{names}`"):
        fit(Numbers(p=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), options.pop("loss"), **options)


FROZEN = Numbers(p=[[1.0]]).requires_grad_(False)


@pytest.mark.parametrize("model", [Numbers(), Numbers(p=1.0), Numbers(p=[1.0, 2.0], q=[1.0]), Numbers(p=[]), FROZEN])
def test_a_model_without_the_seed_axis_or_anything_to_train_is_refused(model):
    with pytest.raises(InputError, match="`model`"):
        fit(model, quadratic, optimiser=Optimiser(), steps=1)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"name": "sdg"}, "optimiser"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"rates": {"z": float("inf")}}, "rates"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_bad_optimisers_are_named(options, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        Optimiser(**options)


class EagerGraph:
    """A captured step that is run again instead of replayed; like a replay it overwrites one tensor of losses."""

    def __init__(self, training):
        self.training = training
        training.replayed_losses = torch.zeros(training.seeds, dtype=torch.float64)

    def replay(self):
        self.training._captured_step()
        self.training.replayed_losses.copy_(self.training.losses)


def test_what_replays_record_is_fetched_later_and_in_order():
    """A seed diverges at step 3, and the last step is not replayed."""

    def loss(model, step):
        infinite = (step == 3) & torch.tensor([False, True])
        return torch.where(infinite, torch.inf, (model.a**2).sum(-1) + step)

    def trained(*, replays):
        model = Numbers(a=[[1.0], [2.0]])
        record = Record(lambda model, _: {"a": model.a[:, 0]}, gradients=False)
        training = Training(model, loss, Optimiser("sgd", 0.1), record, Compute())
        training.throttle.count_step = lambda: None
        training.graph = EagerGraph(training) if replays else None
        for step in range(6):
            training.step(step, record=step in (0, 2, 4, 5), update=step < 5)
        return {name: torch.stack(values) for name, values in training.recorded.items()}, training.recorded_at

    (eager, eager_at), (replayed, replayed_at) = trained(replays=False), trained(replays=True)
    assert eager_at == replayed_at == [0, 2, 4, 5]
    for name in ("loss", "a"):
        torch.testing.assert_close(replayed[name], eager[name], rtol=0, atol=0, equal_nan=True)
        assert replayed[name][:, 1].isnan().tolist() == [False, False, True, True]


def test_a_measure_without_the_axis_of_seeds_is_refused_at_once_in_a_replay():
    record = Record(lambda model, _: {"a": model.a.sum()}, gradients=False)
    training = Training(Numbers(a=[[1.0]]), lambda model, _: model.a[:, 0], Optimiser("sgd", 0.1), record, Compute())
    training.throttle.count_step = lambda: None
    training.graph = EagerGraph(training)
    with pytest.raises(InputError, match="record"):
        training.step(0, record=True, update=True)
