"""The callback in a Trainer: what it logs, what it records, and that it does not change the training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import IterableDataset
from torch.utils.tensorboard import SummaryWriter
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

import joma
from joma.arguments import InputError, StateError
from joma.watch import ProbeFailed, Recorder
from joma.watch.hf import EntropyCallback, _calling_trainer

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
EXAMPLES = [
    {"input_ids": tokens, "attention_mask": (torch.arange(6) < 6 - index % 3).long(), "labels": tokens}
    for index, tokens in enumerate(torch.randint(12, (16, 6), generator=torch.Generator().manual_seed(0)))
]


def model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=12, max_position_embeddings=8, hidden_dropout=dropout, attention_dropout=dropout, **SIZE
    )
    return GPTNeoXForCausalLM(config)


class Listener(TrainerCallback):
    """A logger in place of TensorBoard and the like, which keeps the logs."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        del args, control, kwargs
        self.logs.append((state.global_step, dict(logs)))


def trainer(path: Path, callbacks: list[TrainerCallback], *, steps: int = 5, data: Any = EXAMPLES) -> Trainer:
    args = TrainingArguments(
        output_dir=str(path),
        max_steps=steps,
        per_device_train_batch_size=4,
        report_to=[],
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        learning_rate=1e-2,
    )
    built = Trainer(model=model(), args=args, train_dataset=data, callbacks=callbacks)
    built.remove_callback(
        next(type(other) for other in built.callback_handler.callbacks if "Printer" in type(other).__name__)
    )
    return built


def test_every_probe_reaches_every_log_at_its_step(tmp_path: Path) -> None:
    before, after, callback = Listener(), Listener(), EntropyCallback(at=(0, 1, 3))
    built = trainer(tmp_path, [before, callback, after])
    built.train()
    names = {f"attention_entropy{kind}/layers.{layer}" for kind in ("", "_min") for layer in (0, 1)}
    for logged in (before.logs, after.logs, [(record["step"], record) for record in built.state.log_history]):
        probes = {step: logs for step, logs in logged if names <= set(logs)}
        assert sorted(probes) == [0, 1, 3, 5]
        for step, logs in probes.items():
            probe = callback.trajectory.sel(step=step)
            for layer in probe.layer.values:
                number = layer.split(".")[2]
                assert logs[f"attention_entropy/layers.{number}"] == pytest.approx(
                    float(probe.entropy.sel(layer=layer).mean())
                )
            for weight in probe.weight.values:
                assert logs[f"stable_rank/layers.{weight.split('.')[2]}"] == float(probe.stable_rank.sel(weight=weight))
        assert any("loss" in logs for _, logs in logged)
    assert callback.trajectory.sizes["head"] == 2
    assert len(np.unique(callback.trajectory.entropy.isel(layer=0, head=0))) == 4
    callback.save(tmp_path / "watch.nc")
    assert joma.open_run(tmp_path / "watch.nc").entropy.equals(callback.trajectory.entropy)


def test_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    models = []
    for callbacks in ([], [EntropyCallback(at=lambda _: True)]):
        built = trainer(tmp_path, callbacks)  # seeds the global generators
        built.train()
        models.append(built.model)
    for plain, watched in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain, watched)


def test_a_probe_computes_no_loss_that_it_does_not_read(tmp_path: Path) -> None:
    class LabelledModel(GPTNeoXForCausalLM):
        """A user's own model, which may do anything with its labels."""

    trajectories = []
    cases: list[tuple[type[nn.Module], dict[str, Any], bool]] = [
        (GPTNeoXForCausalLM, {}, False),
        (LabelledModel, {}, True),
        (GPTNeoXForCausalLM, {"forward": lambda model, batch: model(**batch)}, True),
    ]
    for kind, options, has_labels in cases:
        callback = EntropyCallback(at=(0,), **options)
        built = trainer(tmp_path, [callback], steps=1)
        built.model.__class__ = kind
        built.train()
        assert callback.recorder is not None
        assert ("labels" in callback.recorder.batch) == has_labels
        assert ("use_cache" in callback.recorder.batch) != has_labels
        trajectories.append(callback.trajectory)
    assert all(trajectory.equals(trajectories[0]) for trajectory in trajectories)


def test_the_default_probe_batch_is_the_first_examples_without_their_padding(tmp_path: Path) -> None:
    callback = EntropyCallback(at=(0,), ranks=False)
    built = trainer(tmp_path, [], steps=1)
    built.add_callback(callback)
    start = model()
    built.train()
    batch = {name: torch.stack([example[name] for example in EXAMPLES[:4]]) for name in EXAMPLES[0]}
    recorder = Recorder(start, batch, rows=batch["attention_mask"], ranks=False)
    recorder(0)
    trajectory = callback.trajectory.sel(step=[0])
    np.testing.assert_allclose(trajectory.entropy, recorder.dataset().entropy, rtol=1e-6)
    given = EntropyCallback({name: value[:2] for name, value in batch.items()}, at=(0,), ranks=False)
    trainer(tmp_path, [given], steps=1).train()
    assert not np.allclose(given.trajectory.sel(step=0).entropy, trajectory.entropy.isel(step=0))


def test_a_failing_probe_does_not_end_the_training(tmp_path: Path) -> None:
    def forward(model: nn.Module, batch: Any) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {type(model).__name__}, {len(batch)} arguments")

    callback = EntropyCallback(forward=forward, at=1)
    built = trainer(tmp_path, [callback], steps=3)
    with pytest.warns(ProbeFailed, match="a probe failed at step 0, .* give a smaller `batch`") as caught:
        built.train()
    assert built.state.global_step == 3
    assert len([warning for warning in caught if warning.category is ProbeFailed]) == 1


def test_keys_reach_tensorboard_and_the_console_gets_one_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = SummaryWriter(str(tmp_path / "events"))
    callback = EntropyCallback(at=2, measures=["entropy", "sink_mass"], gradients=True, summary=True)
    built = trainer(tmp_path, [callback, TensorBoardCallback(writer), PrinterCallback()], steps=3)
    built.train()
    writer.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    kinds = ("attention_entropy", "attention_sink_mass", "stable_rank", "gradient_norm")
    for key in (f"train/{kind}/layers.{layer}" for kind in kinds for layer in (0, 1)):
        steps = [0, 2, 3] if "gradient" not in key else [2, 3]
        assert [event.step for event in events.Scalars(key)] == steps
    lines = [line for line in capsys.readouterr().out.splitlines() if "attention" in line]
    assert len(lines) == 3
    assert all("attention_entropy" in line and "layers" not in line and len(line) < 200 for line in lines)
    assert any("attention_entropy/layers.1" in record for record in built.state.log_history)
    assert not any("on_log" in vars(other) for other in built.callback_handler.callbacks)


class Stop(TrainerCallback):
    """End the training at a step, as `EarlyStoppingCallback` does, after all other callbacks have been called."""

    def __init__(self, event: str, step: int) -> None:
        setattr(self, event, self.stop)
        self.step = step

    def stop(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, kwargs
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_epoch_end"])
def test_the_last_step_is_probed_if_the_training_ends_early(
    tmp_path: Path, event: str, recwarn: pytest.WarningsRecorder
) -> None:
    callback = EntropyCallback(at=(0, 2), gradients=True)
    built = trainer(tmp_path, [callback, Stop(event, 4)], steps=9)
    built.train()
    assert built.state.global_step == 4
    assert callback.trajectory.step.values.tolist() == [0, 2, 4]
    assert not [warning for warning in recwarn if warning.category is ProbeFailed]


def test_the_best_model_is_not_probed_for_the_last(tmp_path: Path) -> None:
    callback = EntropyCallback(at=(0, 2), ranks=False)
    built = trainer(tmp_path, [callback], steps=3)
    built.train()
    built.args.load_best_model_at_end, built.state.best_model_checkpoint = True, str(tmp_path)
    built.state.global_step = 7
    callback.on_train_end(built.args, built.state, built.control)
    assert callback.trajectory.step.values.tolist() == [0, 2, 3]


def test_a_second_training_begins_a_new_trajectory(tmp_path: Path) -> None:
    callback = EntropyCallback(at=(0,), ranks=False)
    built = trainer(tmp_path, [callback], steps=2)
    built.train()
    built.train()
    assert callback.trajectory.step.values.tolist() == [0, 2]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from EXAMPLES * 8


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`options` must be one of at, .*, got 'evry'"):
        EntropyCallback(evry=3)
    with pytest.raises(StateError, match="`EntropyCallback` has no trajectory before training has begun; train first"):
        _ = EntropyCallback().trajectory
    streamed = EntropyCallback()
    with pytest.warns(ProbeFailed, match="`batch` must be given for a streamed training set"):
        trainer(tmp_path, [streamed], data=Stream(), steps=2).train()
    with pytest.raises(StateError, match="`EntropyCallback` could not prepare its probes; see the warning"):
        _ = streamed.trajectory
    with pytest.raises(InputError, match="`batch` must be given for a streamed training set"):
        trainer(tmp_path, [EntropyCallback(strict=True)], data=Stream(), steps=2).train()
    batch = {name: value[None] for name, value in EXAMPLES[0].items()}
    callback = EntropyCallback(batch, ranks=False)
    trainer(tmp_path, [callback], data=Stream(), steps=2).train()
    assert callback.trajectory.step.values.tolist() == [0, 2]
    with pytest.raises(StateError, match=r"must be called by a `transformers.Trainer`; use `joma.watch.Recorder`"):
        _calling_trainer()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    monkeypatch.delitem(sys.modules, "joma.watch.hf")
    monkeypatch.delattr(joma.watch, "hf")
    with pytest.raises(InputError, match=r"pip install 'joma\[hf\]'"):
        _ = joma.watch.hf


def test_the_trainers_own_losses_are_logged_as_without_the_callback(tmp_path: Path) -> None:
    losses = []
    for callbacks in ([], [EntropyCallback(at=(0, 2, 4), ranks=False)]):
        built = trainer(tmp_path, [*callbacks], steps=6)
        built.train()
        history = built.state.log_history
        losses.append([(record["step"], record["loss"]) for record in history if "loss" in record])
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == [2, 4, 6]
