"""Two processes over gloo: the numbers of all rows together, names of the plain model, and failures in step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import joma
from joma.watch import Recorder, attention
from joma.watch.distributed import Processes, unwrap
from two_processes import COUNT, LIMIT, Model, batch

TESTS = Path(__file__).parents[1]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run the two processes and return what they measured."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(TESTS / "two_processes.py"), port, str(folder)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT + 20, check=False)
    assert process.returncode == 0, process.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(COUNT)]


def expected_entropy() -> np.ndarray:
    """Return the mean entropy over the rows of both batches, from the plain model, [layer, head]."""
    rows = []
    for rank in range(COUNT):
        model = Model()
        with torch.no_grad(), attention(model, reduce="none") as recording:
            model(batch(rank))
        entropy = recording.entropy.isel({"pass": 0}).transpose("layer", "head", "batch", "query").values
        rows.append(entropy.reshape(*entropy.shape[:2], -1))
    return np.concatenate(rows, axis=-1).mean(axis=-1)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_processes_have_the_numbers_of_all_rows_and_the_names_of_the_plain_model(
    kind: str, results: Results
) -> None:
    for result in results:
        probe = result[kind]
        assert probe["warnings"] == []
        assert probe["layer"] == ["layers.0", "layers.1"]
        assert probe["weight"] == ["layers.0.fc1.weight", "layers.1.fc1.weight"]
        np.testing.assert_allclose(probe["entropy"][0], expected_entropy(), rtol=1e-5)
        ranks = [float(joma.stable_rank(layer.fc1.weight)) for layer in Model().layers]
        np.testing.assert_allclose(probe["stable_rank"][0], ranks, rtol=1e-6)
        assert probe["scalars"] == results[0][kind]["scalars"]
    assert [result["logged"] for result in results] == [[0], []]


def test_a_plain_model_is_measured_by_each_process_alone(results: Results) -> None:
    for rank, result in enumerate(results):
        recorder = Recorder(Model(), batch(rank), patience=99)
        recorder(0)
        np.testing.assert_allclose(result["alone"]["entropy"], recorder.dataset().entropy, rtol=1e-6)
    assert not np.allclose(results[0]["alone"]["entropy"], results[1]["alone"]["entropy"])


def test_if_one_process_fails_all_skip_the_probe_and_the_first_one_warns(results: Results) -> None:
    first, second = (result["failing"] for result in results)
    assert [bool(scalars) for scalars in first["scalars"]] == [False, False, True]
    assert first["scalars"] == second["scalars"]
    assert first["step"] == second["step"] == [2]
    assert "failed at step 0, and training goes on: process 1 failed: ValueError: no batch on 1" in first["warnings"][0]
    assert "failed at step 1, and training goes on: ValueError: no batch on 0" in first["warnings"][1]
    assert len(first["warnings"]) == 2
    assert second["warnings"] == []


def test_a_sharded_training_ends_with_the_same_bits(results: Results) -> None:
    start = torch.cat([parameter.detach().flatten() for parameter in Model().parameters()])
    for result in results:
        assert result["trained"] == result["trained while watched"]
        assert not np.allclose(result["trained"], start)


def test_the_trainer_of_hugging_face_measures_on_both_processes(results: Results) -> None:
    first, second = (result["hugging face"] for result in results)
    assert first["wrapped"] == "DistributedDataParallel"
    assert first == second
    assert not any("module" in layer for layer in first["layer"])
    assert np.shape(first["entropy"])[0] == 3
    assert np.isfinite(first["entropy"]).all()


def test_wrappers_are_looked_through() -> None:
    model = nn.Linear(2, 2)
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(model)) is model
    nested = nn.ModuleDict({"module": model})
    assert unwrap(nested) is nested


def test_one_process_alone_needs_no_group() -> None:
    alone = Processes()
    assert alone.gather(3) == [3]
    np.testing.assert_array_equal(alone.total(np.arange(3.0)), np.arange(3.0))
    np.testing.assert_array_equal(alone.largest(np.arange(3.0)), np.arange(3.0))
    with pytest.raises(KeyError), alone.together():
        raise KeyError("x")
