"""The page on engines: its tables and figure are those of the stored measurements, and the model does what it says."""

import doctest
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from test_docs import load_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


make_scale, generated = load_script("make_scale"), load_script("generated")
NUMBERS = json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))


def test_the_page_and_the_figure_are_those_of_the_measurements():
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    assert [match[2] for match in generated.BLOCK.finditer(page)] == list(make_scale.PARTS)
    assert page == make_scale.page(page, NUMBERS)
    figure = (DOCS / "scale.svg").read_text(encoding="utf-8")
    assert make_scale.description(NUMBERS).replace('"', "&quot;") in figure.replace('"', "&quot;")


def test_other_measurements_make_another_page():
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    for part, key in (("checkpoint", "attention_seconds"), ("transfer", "bytes"), ("transfer", "unpack_seconds")):
        changed = json.loads(json.dumps(NUMBERS))
        changed[part][key] *= 3
        assert make_scale.page(page, changed) != page


def test_examples_of_the_script():
    assert doctest.testmod(make_scale).failed == 0
    assert doctest.testmod(generated).failed == 0


def test_links_of_the_page_lead_somewhere():
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (DOCS / target).exists(), target


@pytest.mark.parametrize(
    ("size", "published"),  # the table of parameters in Pythia's README
    [
        ("70M", 70_426_624),
        ("160M", 162_322_944),
        ("410M", 405_334_016),
        ("1B", 1_011_781_632),
        ("1.4B", 1_414_647_808),
        ("2.8B", 2_775_208_960),
        ("6.9B", 6_857_302_016),
        ("12B", 11_846_072_320),
    ],
)
def test_parameters_of_pythia_are_the_published_ones(size, published):
    assert make_scale.parameters(*make_scale.PYTHIA[size]) == published


def test_the_parameters_are_those_of_the_model_itself():
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.GPTNeoXConfig(**sizes, vocab_size=50, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert make_scale.parameters(3, 24, 50) == sum(counts.values())
    layers = sum(count for name, count in counts.items() if ".layers." in name)
    assert make_scale.layer_parameters(3, 24) == layers


SECONDS = st.floats(1e-3, 1e3)


@given(start=SECONDS, overhead=SECONDS, driver=SECONDS, counts=st.sets(st.integers(1, 1000), min_size=2, max_size=5))
def test_the_fit_recovers_the_line_that_times_lie_on(start, overhead, driver, counts):
    empty = [
        {"units": n, "workers": 1, "seconds": start + n * overhead, "driver_seconds": 2 + n * driver} for n in counts
    ]
    others = [{"units": 10, "workers": 2, "seconds": 0.0, "driver_seconds": 0.0}]
    numbers = {"ray": {"empty": empty + others}, "transfer": {"unpack_seconds": 0.25}}
    fit = make_scale.fit_engine(numbers, "ray")
    scale = start + max(counts) * overhead
    assert fit.start == pytest.approx(start, abs=1e-8 * scale)
    assert fit.overhead == pytest.approx(overhead, abs=1e-8 * scale)
    assert fit.driver == pytest.approx(driver, rel=1e-6, abs=1e-8)
    assert fit.driver_run == pytest.approx(fit.driver + 0.25)


@given(units=st.integers(1, 60), workers=st.integers(1, 12), cost=SECONDS, overhead=SECONDS)
def test_the_time_of_work_is_that_of_workers_that_take_the_next_unit(units, workers, cost, overhead):
    free = [0.0] * workers  # a simulation
    for _ in range(units):
        free.sort()
        free[0] += cost + overhead
    fit = make_scale.EngineFit(start=2.0, overhead=overhead, driver=0.0, driver_run=0.0)
    job = make_scale.job_time(fit, units, workers, cost=cost, driver=0.0)
    assert job.seconds == pytest.approx(2.0 + max(free))


@given(units=st.integers(1, 1000), workers=st.integers(1, 1000), driver=SECONDS, size=st.floats(1.0, 1e9))
def test_no_job_is_faster_than_its_driver_and_its_link(units, workers, driver, size):
    fit = make_scale.EngineFit(0.0, 0.01, driver, driver)
    job = make_scale.job_time(fit, units, workers, cost=0.1, driver=driver, size=size)
    floors = {
        "work": math.ceil(units / workers) * 0.11,
        "driver": units * driver,
        "link": units * size / make_scale.LINK,
    }
    assert job.seconds == pytest.approx(max(floors.values()))
    assert floors[job.bound] == max(floors.values())
