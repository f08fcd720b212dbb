"""One hostile weight file never ends a series: it is left out by name, and the others are measured as without it."""

import json
import shutil
import subprocess
import sys

import pytest

from robustness.torture_files import MUTATION_KINDS, check_mutation
from robustness.zoo import GoodSeries
from robustness.zoo_bins import HOSTILE_BINS, TENSORS, with_tensor
from robustness.zoo_safetensors import HOSTILE_SAFETENSORS, write_sound

CASES = [*HOSTILE_SAFETENSORS, *HOSTILE_BINS]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return GoodSeries(tmp_path_factory.mktemp("good"), write_sound)


LEFT_OUT = [hostile for hostile in CASES if hostile.outcome == "left out"]
MEASURED = [hostile for hostile in CASES if hostile.outcome == "measured"]


def test_hostile_checkpoints_are_left_out_by_name_and_the_others_are_measured(good):
    """All of them are in one series here; `make torture` puts each into a series of its own."""
    good.check_together(LEFT_OUT, seconds=60)


@pytest.mark.parametrize("hostile", MEASURED, ids=[hostile.name for hostile in MEASURED])
def test_an_unusual_but_sound_checkpoint_is_measured(good, hostile):
    good.check(hostile)


@pytest.mark.parametrize("kind", MUTATION_KINDS)
def test_a_damaged_file_is_refused_or_read_as_its_own_format_reads_it(good, tmp_path, kind):
    for seed in range(3):
        check_mutation(good, tmp_path / "copy", kind, seed)


def test_the_command_ends_with_exit_code_1_and_names_what_is_left_out(good, tmp_path):
    damages = {"step7": TENSORS["expanded tensor of 160 GB"], "step8": TENSORS["complex tensor"]}
    series = tmp_path / "series"
    shutil.copytree(good.template, series)
    for name, make in damages.items():
        shutil.copytree(good.sound, series / name)
        with_tensor(make, series / name)
    command = [sys.executable, "-m", "joma", "probe", str(series), "--out", str(tmp_path / "out"), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    faults = json.loads(result.stdout)["faults"]
    assert {name for fault in faults for name in fault["left_out"]} == set(damages)


def test_every_case_has_a_name_of_its_own():
    names = [hostile.name for hostile in CASES]
    assert len(set(names)) == len(names) > 90
