"""What is measured by block in a probe: the same numbers as `watch.activations` and `watch.gradient_norms` give."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import joma
from joma.arguments import InputError
from joma.watch import ProbeFailed, Recorder, activations, gradient_norms
from joma.watch.block_values import Part, combine_blocks, hidden_parts
from joma.watch.distributed import Processes
from two_processes import Model, batch

OPTIONS: dict[str, Any] = {"at": 1, "ranks": False, "patience": 99}
LAYERS = r"layers\.\d+$"
VARIABLES = {
    "residual_rms",
    "residual_norm",
    "hidden_stable_rank",
    "hidden_participation_ratio",
    "attention_output_stable_rank",
    "attention_output_participation_ratio",
}


class Decoder(nn.Module):
    """Two blocks whose attention is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _warnings_given_already(monkeypatch: pytest.MonkeyPatch) -> None:
    from joma.watch import switches

    monkeypatch.setattr(switches, "_warned", {"fast path", "compiled"})


def test_norms_and_ranks_are_those_of_activations() -> None:
    model = Decoder().eval()
    recorder = Recorder(model, X, residual=True, activation_ranks=True, **OPTIONS)
    scalars = recorder(0)
    trajectory = recorder.dataset()
    assert set(trajectory.data_vars) >= VARIABLES
    with torch.no_grad(), activations(model) as states:
        model(X)
    expected = states.dataset().isel({"pass": 0})
    np.testing.assert_allclose(trajectory.residual_rms[0], expected.residual_rms, rtol=1e-6)
    for stream, name in (("hidden", "hidden"), ("attention", "attention_output")):
        for rank in ("stable_rank", "participation_ratio"):
            measured = trajectory[f"{name}_{rank}"][0]
            np.testing.assert_allclose(measured, expected[rank].sel(stream=stream), rtol=1e-6)
    for variable in VARIABLES:
        assert scalars[f"{variable}/layers.1"] == float(trajectory[variable].sel(block="encoder.layers.1")[0])


def test_gradients_are_read_after_backward_and_belong_to_the_next_probe() -> None:
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, batch(0), gradients=True, blocks=LAYERS, **OPTIONS)
    plain = Recorder(model, batch(0), gradients=True, blocks=LAYERS, **OPTIONS)
    assert not any("gradient" in key for key in recorder(0))  # nothing has been trained
    expected = []
    for step in (1, 2):
        model(batch(step)).square().mean().backward()
        expected.append(gradient_norms(model, blocks=LAYERS))
        plain(step)
        recorder.read_gradients(step)
        optimiser.step()
        optimiser.zero_grad()
        scalars = recorder(step)
        assert scalars["gradient_norm/layers.1"] == expected[-1]["layers.1"]
    for watching in (recorder, plain):
        measured = watching.dataset().gradient_norm.sel(step=[1, 2])
        for name in expected[0]:
            np.testing.assert_allclose(measured.sel(block=name), [norms[name] for norms in expected])
    assert recorder.dataset().gradient_norm.sel(step=0).isnull().all()
    with pytest.warns(ProbeFailed, match=r"measuring the gradients failed at step 3, .*call it after `loss.backward"):
        scalars = recorder(3)
    assert "attention_entropy/layers.0" in scalars
    assert not any("gradient" in key for key in scalars)


def test_only_due_steps_are_read() -> None:
    model = Model()
    recorder = Recorder(model, batch(0), gradients=True, blocks=LAYERS, **{**OPTIONS, "at": (0, 4)})
    model(batch(1)).sum().backward()
    recorder(0)
    for step, always, read in ((1, False, False), (2, True, True), (4, False, True)):
        recorder._read = {}
        recorder.read_gradients(step, always=always)
        assert bool(recorder._read) == read


def test_bad_blocks_are_named_before_training() -> None:
    with pytest.raises(InputError, match="`blocks` must be"):
        Recorder(Model(), batch(0), residual=True, blocks="nothing", **OPTIONS)


def test_processes_are_averaged_over_those_that_have_a_value() -> None:
    class Pair(Processes):
        def gather(self, value: Any) -> list[Any]:
            nothing = Part(0.0, 0.0)
            return [value, {"residual_norm": {"a": Part(9.0, 3.0), "c": nothing}, "extra": {"a": Part(1.0, 1.0)}}]

    parts = {"residual_norm": {"a": Part(1.0, 1.0), "b": Part(10.0, 2.0), "c": Part(0.0, 0.0)}}
    combined = combine_blocks(parts, Pair(0, 2))
    assert combined["extra"] == {"a": 1.0}
    assert (combined["residual_norm"]["a"], combined["residual_norm"]["b"]) == (2.5, 5.0)
    assert math.isnan(combined["residual_norm"]["c"])


def test_norms_are_means_over_the_tokens_of_all_passes_and_processes() -> None:
    model, batches = Decoder().eval(), (X, X[:1, :2] * 3)

    def parts_of(*inputs: torch.Tensor) -> Any:
        with torch.no_grad(), activations(model) as states:
            for x in inputs:
                model(x)
        return hidden_parts(states)

    class Pair(Processes):
        def gather(self, value: Any) -> list[Any]:
            return [value, parts_of(batches[1])]

    both = combine_blocks(parts_of(*batches), Processes()), combine_blocks(parts_of(batches[0]), Pair(0, 2))
    with torch.no_grad():
        outputs = torch.cat([model(x).flatten(0, 1) for x in batches])
        ranks = [float(joma.stable_rank(model(x).flatten(0, 1))) for x in batches]
    expected = {
        "residual_rms": outputs.square().mean().sqrt(),
        "residual_norm": outputs.norm(dim=-1).mean(),
        "hidden_stable_rank": np.mean(ranks),
    }
    for combined in both:
        for name, value in expected.items():
            np.testing.assert_allclose(combined[name]["encoder.layers.1"], value, rtol=1e-4)


def test_padding_does_not_count() -> None:
    class Masked(Decoder):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=attention_mask == 0)

    model, mask = Masked().eval(), torch.ones(2, 5)
    mask[1, 3:] = 0
    inputs = {"x": X, "attention_mask": mask}
    measured = {}
    for rows in ("masks", mask.bool(), "all"):
        recorder = Recorder(model, inputs, residual=True, rows=rows, **OPTIONS)
        recorder(0)
        measured[str(rows)] = recorder.dataset().residual_norm.values
    by_masks, given, all_rows = measured.values()
    np.testing.assert_array_equal(by_masks, given)
    assert not np.allclose(by_masks, all_rows)
    with torch.no_grad():
        lengths = model(**inputs).norm(dim=-1)
    np.testing.assert_allclose(by_masks[0, 1], lengths[mask.bool()].mean(), rtol=1e-5)
