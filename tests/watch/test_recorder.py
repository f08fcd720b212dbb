"""The recorder: when it probes, what it records, what it must not change, and when it warns."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import joma
from joma import schedule
from joma.arguments import InputError, StateError
from joma.watch import EntropyCollapse, ProbeFailed, RankCollapse, Recorder
from joma.watch.probe_options import check_options

NO_WARNINGS = {"patience": 10**6}


class Model(nn.Module):
    """Causal attention with two heads; `sharpness` scales the logits of the second: 0 is uniform attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.mlp = nn.Linear(8, 12, bias=False)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(5)
        self.sharpness = 0.0

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.drop(self.norm(self.embed(tokens) + (0 if shift is None else shift)))
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2) * torch.tensor([1.0, self.sharpness]).view(2, 1, 1)
        return self.mlp(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2))


TOKENS = torch.tensor([[0, 1, 2, 3, 4], [4, 2, 0, 5, 1]])


@given(total=st.integers(0, 400), count=st.integers(2, 30), start=st.integers(0, 3))
def test_the_steps_of_the_policy_are_probed_and_no_others(total: int, count: int, start: int) -> None:
    policy = schedule.logarithmic(count, total)
    recorder = Recorder(Model(), TOKENS, at=policy, ranks=False, **NO_WARNINGS)
    recorder.probe = lambda step, **_: {"step": step}  # type: ignore[method-assign]
    probed = [recorder(step).get("step") for step in range(start, total + 1)]
    assert [step for step in probed if step is not None] == [step for step in policy if step >= start]


def test_a_skipped_step_is_probed_at_the_next_call() -> None:
    recorder = Recorder(Model(), TOKENS, at=(0, 5, 20), ranks=False, **NO_WARNINGS)
    for step in (0, 3, 7, 9, 25):
        recorder(step)
    assert recorder.dataset().step.values.tolist() == [0, 7, 25]
    assert recorder(25) == {}
    assert recorder.probe(25) == {}
    with pytest.warns(ProbeFailed, match=r"a probe failed at step 3, .*: `step` must be after the last probe, at 25"):
        assert recorder.probe(3) == {}


@pytest.mark.parametrize("at", [None, 2, (0, 5), lambda _: True])
def test_a_step_that_is_no_number_is_named_whatever_is_due(at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside the tests
    recorder = Recorder(Model(), TOKENS, at=at, **NO_WARNINGS)
    for first in (True, False):
        for call in (recorder, recorder.probe, recorder.read_gradients):
            for step, got in (
                (2.5, "2.5"),
                ("3", "'3'"),
                (TOKENS, r"a Tensor of .* \(2, 5\)"),
                (True, "True"),
                (-1, "-1"),
            ):
                message = rf"^`step` must be a whole number of at least 0, got {got}; give .*\.$"
                with pytest.raises(InputError, match=message):
                    call(step)
        if first:
            recorder(np.int64(0))
    assert recorder(8.0)


def test_the_trajectory_is_labelled_and_uniform_attention_has_its_known_entropy(tmp_path: Path) -> None:
    model = Model()
    recorder = Recorder(model, TOKENS, at=lambda _: True, **NO_WARNINGS)
    first = recorder(0)
    with torch.no_grad():
        model.mlp.weight.copy_(torch.eye(12, 8))
    recorder(1)
    trajectory = recorder.dataset()
    assert dict(trajectory.sizes) == {"step": 2, "layer": 1, "head": 2, "weight": 1}
    uniform = math.lgamma(6) / 5  # the mean of ln 1 … ln 5
    np.testing.assert_allclose(trajectory.entropy.sel(layer="Model", head=1), uniform, rtol=1e-5)
    np.testing.assert_allclose(trajectory.effective_tokens.sel(layer="Model", head=1), 3.0, rtol=1e-5)
    np.testing.assert_allclose(trajectory.stable_rank.sel(weight="mlp.weight", step=1), 8.0, rtol=1e-3)
    keys = {"attention_entropy/Model", "attention_entropy_min/Model", "stable_rank/mlp"}
    assert set(first) == keys
    assert first["attention_entropy_min/Model"] == trajectory.entropy.sel(step=0).min()
    assert first["attention_entropy/Model"] == pytest.approx(float(trajectory.entropy.sel(step=0).mean()))
    recorder.save(tmp_path / "deep" / "watch.nc")
    again = joma.open_run(tmp_path / "deep" / "watch.nc")
    assert again.drop_attrs().identical(trajectory.drop_attrs())
    stored, running = (text.partition("+")[0] for text in (again.attrs["torch_version"], torch.__version__))
    assert stored == running  # builds for CUDA add a suffix to `torch.__version__`, and not to the package's metadata


def test_a_probe_changes_no_flags_gradients_statistics_or_random_numbers() -> None:
    model = Model().train()
    model.norm.eval()
    model(TOKENS).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model.mlp.weight.grad.clone()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Recorder(model, TOKENS, **NO_WARNINGS)(0)
    assert torch.equal(torch.rand(3), expected)
    assert (model.training, model.drop.training, model.norm.training) == (True, True, False)
    assert torch.equal(model.mlp.weight.grad, gradient)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.forward = lambda _: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        Recorder(model, TOKENS, strict=True, **NO_WARNINGS)(0)
    assert (model.training, model.drop.training, model.norm.training) == (True, True, False)


def test_every_kind_of_batch_and_a_custom_forward() -> None:
    model, shift = Model(), torch.full((2, 5, 8), 0.3)
    batches = [(TOKENS, shift), [TOKENS, shift], {"tokens": TOKENS, "shift": shift}]
    scalars = [Recorder(model, batch, **NO_WARNINGS)(0) for batch in batches]
    custom = Recorder(model, TOKENS, forward=lambda model, tokens: model(tokens, shift), **NO_WARNINGS)(0)
    assert scalars == [custom] * 3
    assert Recorder(model, TOKENS, **NO_WARNINGS)(0) != custom
    rows = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]])
    recorder = Recorder(model, TOKENS, rows=rows, **NO_WARNINGS)
    recorder(0)
    expected = (2 * math.log(5) + math.log(4)) / 3
    assert float(recorder.dataset().entropy.sel(head=1)[0, 0]) == pytest.approx(expected, rel=1e-5)


def test_a_collapse_of_entropy_gives_one_warning_with_layer_and_head() -> None:
    model = nn.ModuleDict({"inner": Model()})
    recorder = Recorder(model, TOKENS, at=lambda _: True, ranks=False, patience=2, forward=lambda m, b: m["inner"](b))
    low = [False, True, False, True, True, True, False, True, True]
    given = []
    for step, sharp in enumerate(low):
        model["inner"].sharpness = 300.0 if sharp else 0.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder(step)
        given += [(step, warning) for warning in caught]
    ((step, warning),) = given
    assert step == 4
    assert issubclass(warning.category, EntropyCollapse)
    message = r"attention entropy has collapsed in 1 head of 1 layer \(lowest \S+ nats: layer inner, head 1\), step 4"
    assert re.fullmatch(message, str(warning.message))
    collapsed = recorder.dataset().collapsed.sel(layer="inner", head=1)
    assert collapsed.values.tolist() == [False, False, False, False, True, True, False, False, True]
    assert not recorder.dataset().collapsed.sel(head=0).any()


def test_a_collapse_of_rank_gives_one_warning_and_none_for_a_weight_that_began_low() -> None:
    model = Model()
    model.thin = nn.Linear(1, 4)
    recorder = Recorder(model, TOKENS, at=lambda _: True, patience=2, floor=0.0)
    recorder(0)
    with torch.no_grad():
        model.mlp.weight.copy_(torch.outer(torch.arange(12.0), torch.arange(8.0)))
    recorder(1)
    with pytest.warns(RankCollapse, match=r"has collapsed in 1 weight \(lowest 1, from \d.*: mlp\), step 2"):
        recorder(2)
    recorder(3)
    assert recorder.dataset().rank_collapsed.sel(weight="mlp.weight").values.tolist() == [False, False, True, True]


def test_a_number_is_an_interval_in_steps() -> None:
    recorder = Recorder(Model(), TOKENS, at=4, ranks=False, **NO_WARNINGS)
    assert [step for step in range(10) if recorder(step)] == [0, 4, 8]


def test_options_are_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside the tests
    bad = {
        "at": [0, -1, 2.5, True, "often", object(), [1, -2], []],
        "precision": ["low", 3],
        "measures": ["entrpy", ["entropy", "entropy"], 3],
        "top": [0, 17],
        "sinks": ["first", 0.5, torch.tensor([0.5]), [[0]]],
        "ranks": ["(", None, 3],
        "rows": ["x"],
        "floor": [-1.0],
        "patience": [0],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(InputError, match=f"`{name}` must be"):
                Recorder(Model(), TOKENS, **{name: value})
            with pytest.raises(InputError, match=f"`{name}` must be"):
                check_options({name: value})
    with pytest.raises(InputError, match=r"`model` must be a `torch.nn.Module`, got str"):
        Recorder("gpt2", TOKENS)
    valid = {"at": 100, "ranks": "mlp", "precision": "high", "forward": None}
    assert check_options(valid) == valid


def test_a_diverged_model_is_recorded_without_a_warning() -> None:
    model = Model()
    model.sharpness = math.nan
    recorder = Recorder(model, TOKENS, at=1, ranks=False)
    model.embed.weight.data.fill_(math.nan)
    assert all(math.isnan(value) for value in recorder(0).values())
    assert recorder.dataset().entropy.isnull().all()


def test_bad_input_is_named() -> None:
    model = Model()
    model.norm = nn.Identity()
    with pytest.raises(InputError, match="`batch` must be sequences of at least two tokens, got 1"):
        Recorder(model, TOKENS[:, :1], ranks=False, strict=True)(0)
    with pytest.raises(InputError, match="`model` must compute attention, got Linear"):
        Recorder(nn.Linear(2, 2), torch.zeros(1, 2), strict=True)(0)
    message = (
        "got Model, of which no module was called that may; let `forward` call the model in this thread; of a model"
    )
    with pytest.raises(InputError, match=f"`model` must compute attention in its forward pass, {message}"):
        Recorder(model, TOKENS, forward=lambda model, batch: model.embed(batch), strict=True)(0)
    with pytest.raises(StateError, match="`recorder` has no probe yet; call it at a step that is due"):
        Recorder(model, TOKENS).dataset()
    failing = Recorder(nn.Linear(2, 2), torch.zeros(1, 2), ranks=False)
    with pytest.warns(ProbeFailed):
        failing(0)
    with pytest.raises(StateError, match="`recorder` has no probe that succeeded; see the warning `ProbeFailed`"):
        failing.dataset()
    with pytest.raises(InputError, match="`patience`"):
        Recorder(model, TOKENS, patience=0)
    with pytest.raises(InputError, match="`step` must be a whole number"):
        Recorder(model, TOKENS).probe(-1)
    with pytest.raises(InputError, match="`distributed` must be given inside a process group"):
        Recorder(model, TOKENS, distributed=True)


def test_a_failing_probe_is_one_warning_per_cause_and_is_tried_again() -> None:
    model, causes = Model(), iter(["shape 3", "shape 4", "other", "", "shape 5", "memory", "stop"])

    def forward(model: nn.Module, tokens: Tensor) -> object:
        cause = next(causes)
        if cause == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if cause == "stop":
            raise KeyboardInterrupt
        if cause:
            raise RuntimeError(cause)
        return model(tokens)

    recorder = Recorder(model, TOKENS, at=1, forward=forward, ranks=False, **NO_WARNINGS)
    messages = []
    for step in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scalars = recorder(step)
        assert bool(scalars) == (step == 3)
        assert all(warning.category is ProbeFailed for warning in caught)
        messages.append([str(warning.message) for warning in caught])
    assert [len(given) for given in messages] == [1, 0, 1, 0, 0, 1]
    assert messages[0][0] == (
        "a probe failed at step 0, and training goes on: RuntimeError: shape 3; give `forward=`, a function of the "
        "model and the batch, or a `batch` that the model takes."
    )
    assert messages[5][0].endswith("Tried to allocate 20.00 GiB; give a smaller `batch`.")
    assert recorder.dataset().step.values.tolist() == [3]
    with pytest.raises(KeyboardInterrupt):
        recorder(6)


def test_a_policy_that_raises_does_not_end_the_training() -> None:
    recorder = Recorder(Model(), TOKENS, at=lambda step: 1 // (step - 1) > 0, ranks=False, **NO_WARNINGS)
    with pytest.warns(ProbeFailed, match=r"the function `at` failed at step 1, .* ZeroDivisionError"):
        assert recorder(1) == {}
    assert recorder(2) != {}


def test_scalars_go_to_the_logger_and_a_logger_that_raises_is_one_warning() -> None:
    logged: list[tuple[int, dict[str, float]]] = []

    def log(scalars: dict[str, float], step: int) -> None:
        logged.append((step, dict(scalars)))
        scalars.clear()
        if step:
            raise OSError("disk full")

    recorder = Recorder(Model(), TOKENS, at=1, log=log, **NO_WARNINGS)
    first = recorder(0)
    with pytest.warns(ProbeFailed, match="logging a probe failed at step 1, .*disk full; check the logger"):
        second = recorder(1)
    assert recorder(2)
    assert logged[:2] == [(0, first), (1, second)]
    assert recorder.dataset().sizes["step"] == 3


def test_a_summary_has_one_value_for_each_layer_and_one_stable_rank() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Model(), Model()])})

    def forward(model: nn.Module, tokens: Tensor) -> None:
        for layer in model["layers"]:
            layer(tokens)

    recorder = Recorder(model, TOKENS, ranks="mlp|embed", summary=True, forward=forward, **NO_WARNINGS)
    scalars = recorder(0)
    kinds = ("attention_entropy", "stable_rank")
    assert set(scalars) == {f"{kind}/layers.{layer}" for kind in kinds for layer in (0, 1)}
    ranks = recorder.dataset().stable_rank.sel(weight=["layers.1.embed.weight", "layers.1.mlp.weight"])
    assert scalars["stable_rank/layers.1"] == pytest.approx(float(ranks.mean()))


def test_every_measure_is_recorded_and_logged() -> None:
    model, names = Model(), ("entropy", "effective_tokens", "top_mass", "sink_mass", "largest_logit")
    recorder = Recorder(model, TOKENS, measures=names, top=2, sinks=(0, 1), ranks=False, **NO_WARNINGS)
    scalars = recorder(0)
    logged = {name.split("/")[0] for name in scalars}
    assert logged == {
        f"attention_{name}" for name in ("entropy", "entropy_min", "top_mass", "sink_mass", "largest_logit")
    }
    trajectory = recorder.dataset()
    assert set(names) <= set(trajectory.data_vars)
    keys = np.arange(1, 6)  # visible to each query of the uniform head
    np.testing.assert_allclose(trajectory.top_mass.sel(head=1)[0, 0], np.minimum(2 / keys, 1).mean(), rtol=1e-5)
    np.testing.assert_allclose(trajectory.sink_mass.sel(head=1)[0, 0], np.minimum(2 / keys, 1).mean(), rtol=1e-5)
    assert float(trajectory.largest_logit.sel(head=1)[0, 0]) == pytest.approx(0.0, abs=1e-6)
    assert scalars["attention_largest_logit/Model"] == float(trajectory.largest_logit.max())
    only = Recorder(model, TOKENS, measures="effective_tokens", ranks=False, **NO_WARNINGS)
    assert list(only(0)) == ["attention_effective_tokens/Model"]
    assert not only.dataset().collapsed.any()


def test_an_offloaded_model_is_probed_without_its_ranks() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    accelerate.cpu_offload(model, execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    scalars = [Recorder(each, TOKENS, ranks=False, at=1, **NO_WARNINGS)(0) for each in (plain, model)]
    assert scalars[0] == scalars[1] != {}
    with pytest.warns(ProbeFailed, match=r"`ranks` must be of weights that are in memory, got mlp\.weight, .*False`"):
        assert Recorder(model, TOKENS, at=1)(0) == {}
