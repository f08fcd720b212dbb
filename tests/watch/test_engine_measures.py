"""A series on an engine: the same measurements, faults and warnings as one after another, and nothing twice."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.ray_cluster import two_nodes
from inline_engine import InlineEngine
from joma.arguments import InputError
from joma.engine import Failure, LocalEngine, RayEngine, Result
from joma.watch import Checkpoints, configs
from joma.watch.byte_ranges import NotFinite, Unreadable
from joma.watch.engine_measures import decode, encode
from joma.watch.probing import probe
from joma.watch.store import DamagedMeasurement, Store
from moved_models import moved
from tiny_models import neox

pytest.importorskip("transformers")
TEXT = "A text that every checkpoint of the series is run on, long enough for a few sequences. " * 4
STEPS = range(6)


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    with configs.quiet():
        for step in STEPS:
            moved(neox(), 0.03 * step).save_pretrained(folder / f"step{step}")
    return folder


@pytest.fixture
def damaged(series, tmp_path):
    """A series with a file that is cut short, a config that nobody knows, and weights that are not finite."""
    folder = tmp_path / "damaged"
    shutil.copytree(series, folder)
    file = folder / "step1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:4000])
    (folder / "step2" / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    model = moved(neox(), 0.03 * 4)
    model.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.data[0, 0] = float("nan")
    with configs.quiet():
        model.save_pretrained(folder / "step4")
    return folder


def same(result, expected):
    assert result.data.identical(expected.data)
    assert result.audit == expected.audit


def test_the_results_are_those_of_one_checkpoint_after_another(series, tmp_path):
    expected = probe(Checkpoints(series), text=TEXT)
    checkpoints, engine = Checkpoints(series), InlineEngine()
    same(probe(checkpoints, text=TEXT, engine=engine, store=Store(tmp_path)), expected)
    assert checkpoints.bytes_read == 0  # the workers read the weights
    assert len(engine.submitted) == 3 * len(STEPS)  # audit and weights together, then heads, then attention
    same(probe(Checkpoints(series), text=TEXT, engine=InlineEngine()), expected)  # without a store


def test_faults_are_those_of_one_checkpoint_after_another(damaged, tmp_path):
    expected = probe(Checkpoints(damaged), text=TEXT)
    assert [fault.kind for fault in expected.audit.faults] == ["unreadable", "not finite", "ignored", "not measured"]
    same(probe(Checkpoints(damaged), text=TEXT, engine=InlineEngine(), store=Store(tmp_path / "store")), expected)


def test_what_either_has_stored_the_other_finds(series, tmp_path):
    first = probe(Checkpoints(series), text=TEXT, engine=InlineEngine(), store=Store(tmp_path / "engine"))
    again = Checkpoints(series)
    same(probe(again, text=TEXT, store=Store(tmp_path / "engine")), first)
    assert again.bytes_read == 0
    probe(again, text=TEXT, store=Store(tmp_path / "here"))
    engine = InlineEngine()
    same(probe(again, text=TEXT, engine=engine, store=Store(tmp_path / "here")), first)
    assert engine.submitted == []


def test_a_killed_probe_measures_only_the_rest(series, tmp_path):
    class Killed(InlineEngine):
        def results(self):
            for count, result in enumerate(super().results()):
                if count == 3:
                    raise KeyboardInterrupt
                yield result

    with pytest.raises(KeyboardInterrupt):
        probe(Checkpoints(series), text=TEXT, engine=Killed(), store=Store(tmp_path))
    engine = InlineEngine()
    result = probe(Checkpoints(series), text=TEXT, engine=engine, store=Store(tmp_path))
    assert len(engine.submitted) == len(STEPS) - 3 + 2 * len(STEPS)
    same(result, probe(Checkpoints(series), text=TEXT))


def test_processes_of_this_machine_measure_to_the_same_bits(damaged, tmp_path):
    expected = probe(Checkpoints(damaged), text=TEXT)
    checkpoints = Checkpoints(damaged)
    with LocalEngine(jobs=2) as engine:
        same(probe(checkpoints, text=TEXT, engine=engine, store=Store(tmp_path / "store")), expected)
    assert checkpoints.bytes_read == 0


# Ray leaves pipes and files of its processes to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_machines_of_a_ray_cluster_measure_to_the_same_bits(damaged, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'joma[ray]'")
    expected = probe(Checkpoints(damaged), text=TEXT)
    with two_nodes() as cluster, RayEngine(cluster.address) as engine:
        same(probe(Checkpoints(damaged), text=TEXT, engine=engine, store=Store(tmp_path / "store")), expected)


SCRIPT = """
import sys
from joma.engine import LocalEngine
from joma.watch import Checkpoints
from joma.watch.probing import probe
from joma.watch.store import Store

if __name__ == "__main__":
    with LocalEngine(jobs=1) as engine:
        probe(Checkpoints(sys.argv[1]), engine=engine, store=Store(sys.argv[2]))
"""


def test_what_a_killed_process_has_stored_is_not_measured_again(series, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    driver = subprocess.Popen([sys.executable, tmp_path / "script.py", series, tmp_path / "store"])
    stored = iter(lambda: [*(tmp_path / "store").glob("weights-*.safetensors")], None)
    while driver.poll() is None and not next(stored):
        time.sleep(0.01)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    count, engine = len(next(stored)), InlineEngine()
    assert 1 <= count <= len(STEPS)
    same(probe(Checkpoints(series), engine=engine, store=Store(tmp_path / "store")), probe(Checkpoints(series)))
    again = [unit.arguments["address"]["name"] for unit in engine.submitted if "weights" in unit.name]
    assert len(again) == len(STEPS) - count


def test_a_damaged_measurement_is_measured_again_with_one_warning(series, tmp_path):
    first = probe(Checkpoints(series), text=TEXT, engine=InlineEngine(), store=Store(tmp_path))
    file = next(tmp_path.glob("weights-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    engine = InlineEngine()
    with pytest.warns(DamagedMeasurement) as caught:
        same(probe(Checkpoints(series), text=TEXT, engine=engine, store=Store(tmp_path)), first)
    assert (len(caught), len(engine.submitted)) == (1, 1)


def test_a_unit_that_fails_costs_its_checkpoint_alone(series):
    def lose(result: Result) -> Result:
        is_lost = result.unit.arguments["address"]["name"] == "step3"
        return (
            dataclasses.replace(result, value=None, failure=Failure("lost", "its worker was killed."))
            if is_lost
            else result
        )

    result = probe(Checkpoints(series), text=TEXT, engine=InlineEngine(lose))
    assert [str(fault) for fault in result.audit.faults] == [
        "`step3` must be a checkpoint that a worker can measure, got its worker was killed; "
        "run the same command again: finished checkpoints are kept."
    ]
    assert result.data.step.values.tolist() == [0, 1, 2, 4, 5]


def test_an_interrupted_unit_ends_the_probe(series):
    def interrupt(result: Result) -> Result:
        return dataclasses.replace(result, value=None, failure=Failure("interrupted", "interrupted"))

    with pytest.raises(KeyboardInterrupt):
        probe(Checkpoints(series), text=TEXT, engine=InlineEngine(interrupt))


def test_a_measurement_that_is_damaged_on_its_way_is_a_fault_and_is_not_stored(series, tmp_path):
    def damage(result: Result) -> Result:
        if result.unit.arguments["address"]["name"] == "step5":
            result.value[0]["sha256"] = "0" * 64
        return result

    result = probe(Checkpoints(series), text=TEXT, engine=InlineEngine(damage), store=Store(tmp_path))
    (fault,) = result.audit.faults
    assert (fault.kind, fault.left_out) == ("unreadable", ("step5",))
    assert "damaged on its way" in fault.message
    assert len([*tmp_path.glob("audit-*.safetensors")]) == len(STEPS) - 1


def test_a_folder_that_a_worker_lacks_is_one_line(series, monkeypatch):
    monkeypatch.setattr("joma.watch.checkpoint_units.platform.node", lambda: "node-7")
    monkeypatch.setattr("joma.watch.checkpoint_units.os.path.isdir", lambda _: False)
    with pytest.raises(InputError) as error:
        probe(Checkpoints(series), text=TEXT, engine=InlineEngine())
    assert "must be a folder on every machine that measures it, got no " in str(error.value)
    assert "on node-7" in str(error.value)


def test_weights_may_use_gpus_and_models_reserve_memory(series):
    engine = InlineEngine()
    probe(Checkpoints(series), text=TEXT, engine=engine, gpus=0.5)
    weights, heads, attention = (engine.submitted[index * len(STEPS) :][: len(STEPS)] for index in range(3))
    assert {(unit.needs.gpus, unit.needs.memory) for unit in weights} == {(0.5, 0)}
    assert {(unit.needs.gpus, unit.needs.memory) for unit in heads} == {(0.0, 0)}
    size = (series / "step0" / "model.safetensors").stat().st_size
    assert {(unit.needs.gpus, unit.needs.memory) for unit in attention} == {(0.0, (2 << 30) + 3 * size)}


DTYPES = st.sampled_from(["float64", "float32", "uint8", "int64"])


@given(st.dictionaries(st.text("abc_", min_size=1), arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0)), max_size=4))
def test_measurements_travel_without_loss(values):
    arrived = decode("step0", json.loads(json.dumps(encode(values))))
    assert arrived.keys() == values.keys()
    for name, value in values.items():
        assert arrived[name].dtype == value.dtype
        np.testing.assert_array_equal(arrived[name], value)


@pytest.mark.parametrize("kind", [InputError, Unreadable, NotFinite])
def test_errors_travel_as_what_they_are(kind):
    error = kind("step3", "finite weights", "NaN", "download it again", must="have")
    arrived = decode("step3", json.loads(json.dumps(encode(error))))
    assert type(arrived) is kind
    assert (str(arrived), arrived.problem, arrived.remedy) == (str(error), error.problem, error.remedy)
