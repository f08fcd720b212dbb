import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fake_hub import REPOSITORY, serve
from joma.arguments import InputError
from joma.watch import Checkpoints, weight_files
from joma.watch.series import Fault, Measure, Store, _compiled, _ordered
from joma.watch.weight_files import Unreadable

PYTHIA = [0, *(2**k for k in range(10)), *range(1000, 144_000, 1000)]
OLMO = [(0, 0), (1000, 5), (2000, 9), (90_000, 398), (90_500, 400)]


def series(folder, steps, name="step{}", size=6):
    for step in steps:
        path = folder / name.format(step)
        path.mkdir(parents=True)
        save_file({"w": torch.full((size,), float(step)), "m": torch.ones(2, 3)}, path / "model.safetensors")
    return folder


def total(checkpoint):
    return {"total": checkpoint.tensor("w").numpy().sum(keepdims=True)}


TOTAL = Measure("total", 1, total)


@pytest.mark.parametrize(
    "names",
    [
        [f"step{step}" for step in PYTHIA],
        [f"checkpoint-{step}" for step in range(500, 12_000, 500)],
        [f"step{step}-tokens{tokens}B" for step, tokens in OLMO],
        [f"stage1-step{step}-tokens{tokens}B" for step, tokens in OLMO],
        [f"global_step{step}" for step in PYTHIA],
    ],
)
@given(order=st.randoms(use_true_random=False))
def test_known_series_come_in_training_order_whatever_the_order_of_their_names(names, order: random.Random):
    shuffled = [*names, "main", "stage2-ingredient1-step1000-tokens5B"]
    order.shuffle(shuffled)
    members, without = _ordered(shuffled, _compiled(None), None)
    assert [name for _, name in members] == names
    assert set(without) == {"main", "stage2-ingredient1-step1000-tokens5B"}
    assert [step for step, _ in members] == sorted(int(re.search(r"\d+(?=$|-tokens)", name)[0]) for name in names)


def test_folders_are_read_lazily_and_in_order(tmp_path):
    found = Checkpoints(series(tmp_path, [8, 0, 1000, 64]))
    assert found.steps == (0, 8, 64, 1000)
    assert len(found) == 4
    assert found.bytes_read == 0
    assert [one.step for one in found] == [0, 8, 64, 1000]
    assert found.bytes_read == 0
    assert found[-1].tensor("w").tolist() == [1000.0] * 6
    assert [one.name for one in found[1:3]] == ["step8", "step64"]
    assert found[0].names() == ("m", "w")
    assert found[0].shape("m") == (2, 3)
    with pytest.raises(InputError, match=r"`name` must be a tensor of step0, got 'x'; see `names\(\)`"):
        found[0].tensor("x")


def test_a_pattern_chooses_and_orders(tmp_path):
    series(tmp_path, [3, 20], "run-a-{}")
    series(tmp_path, [1, 5], "run-b-{}")
    assert Checkpoints(tmp_path, pattern=r"run-b-(?P<step>\d+)").steps == (1, 5)
    assert Checkpoints(tmp_path, pattern=r"run-.-(?P<step>\d+)").steps == (1, 3, 5, 20)
    for pattern, message in {"run-(": "a regular expression", r"run-b-(\d+)": "with a group `step`"}.items():
        with pytest.raises(InputError, match=message):
            Checkpoints(tmp_path, pattern=pattern)
    series(tmp_path, [3], "run-b-{}")
    with pytest.raises(InputError, match=r"run-a-3 and run-b-3 for step 3"):
        Checkpoints(tmp_path, pattern=r"run-.-(?P<step>\d+)")


def test_revisions_choose_and_unknown_ones_are_faults(tmp_path):
    series(tmp_path, [0, 1, 2])
    series(tmp_path, [7], "final{}")
    found = Checkpoints(tmp_path, revisions=["step2", "step0", "step99", "final7"])
    assert found.steps == (0, 2)
    assert [(fault.kind, fault.checkpoints) for fault in found.faults] == [
        ("unknown", ("step99",)),
        ("unordered", ("final7",)),
    ]
    assert "choose among final7, step0, step1, step2" in found.faults[0].remedy
    assert Checkpoints(tmp_path, revisions=["final7"]).steps == (0,)
    with pytest.raises(InputError, match="a series with the revisions step99"):
        Checkpoints(tmp_path, revisions=["step99"])


def test_a_model_folder_is_a_series_of_one(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (only,) = Checkpoints(tmp_path)
    assert only.tensor("w").tolist() == [1, 1, 1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a series with checkpoints named by their step"):
        Checkpoints(tmp_path / "empty")


def test_a_second_run_reads_nothing_and_a_changed_file_is_read_again(tmp_path):
    found, store = Checkpoints(series(tmp_path / "s", range(5))), Store(tmp_path / "store")
    first = [values["total"].item() for _, values in found.measure(TOTAL, store=store)]
    assert first == [0, 6, 12, 18, 24]
    again = Checkpoints(tmp_path / "s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.Bytes, "read", None)
        assert [values["total"].item() for _, values in again.measure(TOTAL, store=store)] == first
    assert again.bytes_read == 0
    save_file({"w": torch.ones(6)}, tmp_path / "s" / "step3" / "model.safetensors")
    assert [values["total"].item() for _, values in again.measure(TOTAL, store=store)] == [0, 6, 12, 6, 24]
    assert 0 < again.bytes_read < 400
    newer = Measure("total", 2, lambda one: {"total": one.tensor("w").numpy()[:1]})
    assert [values["total"].item() for _, values in again.measure(newer, store=store)] == [0, 1, 2, 1, 4]


def test_an_interrupted_series_goes_on_where_it_was(tmp_path):
    found, store = Checkpoints(series(tmp_path / "s", range(6))), Store(tmp_path / "store")
    seen = []

    def breaking(checkpoint):
        seen.append(checkpoint.step)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return total(checkpoint)

    measure = Measure("total", 1, breaking)
    with pytest.raises(KeyboardInterrupt):
        list(found.measure(measure, store=store))
    assert len(list(found.measure(measure, store=store))) == 6
    assert seen == [0, 1, 2, 3, 3, 4, 5]


def test_a_broken_record_in_the_store_is_measured_again(tmp_path):
    found, store = Checkpoints(series(tmp_path / "s", [1])), Store(tmp_path / "store")
    list(found.measure(TOTAL, store=store))
    (file,) = (tmp_path / "store").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    ((_, values),) = found.measure(TOTAL, store=store)
    assert values["total"].item() == 6


def test_what_cannot_be_read_comes_as_its_error_and_the_rest_is_measured(tmp_path):
    found = Checkpoints(series(tmp_path, range(4)))
    file = tmp_path / "step2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    results = [values for _, values in found.measure(TOTAL, leave_out=["step0"])]
    assert isinstance(results[1], Unreadable)
    assert "`step2/model.safetensors`" in str(results[1])
    assert [values["total"].item() for values in (results[0], results[2])] == [6, 18]


def test_hub_revisions_are_read_by_ranges(tmp_path):
    series(tmp_path, [0, 512, 4], size=200_000)
    with serve(tmp_path) as hub:
        found = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert found.steps == (0, 4, 512)
        assert found[2].tensor("m").tolist() == [[1.0] * 3] * 2
        assert found[1].part("w", 100, 103).tolist() == [4.0] * 3
        assert hub.served == found.bytes_read == 2 * weight_files.HEAD + 24 + 12
        assert torch.equal(found[2].tensor("w"), torch.full((200_000,), 512.0))
        assert found[0].identity != found[1].identity == found[1].identity


def test_a_second_run_over_the_hub_fetches_no_file(tmp_path):
    series(tmp_path / "hub", [0, 1, 2])
    store = Store(tmp_path / "store")
    with serve(tmp_path / "hub") as hub:
        first = [
            values["total"] for _, values in Checkpoints(REPOSITORY, endpoint=hub.endpoint).measure(TOTAL, store=store)
        ]
        served = hub.served
        assert served > 0
        again = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        np.testing.assert_equal([values["total"] for _, values in again.measure(TOTAL, store=store)], first)
        assert (hub.served, again.bytes_read) == (served, 0)


def test_a_bin_on_the_hub_is_downloaded_into_its_cache(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub" / "step1").mkdir(parents=True)
    torch.save({"w": torch.arange(5)}, tmp_path / "hub" / "step1" / "pytorch_model.bin")
    with serve(tmp_path / "hub") as hub:
        (only,) = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert only.tensor("w").tolist() == [0, 1, 2, 3, 4]
        assert list((tmp_path / "cache").iterdir())


def test_what_the_hub_refuses_is_named(tmp_path):
    series(tmp_path, [0, 1])
    with serve(tmp_path) as hub:
        with pytest.raises(InputError, match=r"'someone/other', which is no folder and no public repository"):
            Checkpoints("someone/other", endpoint=hub.endpoint)
        with pytest.raises(InputError, match="no name of a repository either; check the spelling"):
            Checkpoints("no such/folder/here", endpoint=hub.endpoint)
        found = Checkpoints(REPOSITORY, endpoint=hub.endpoint, revisions=["step1", "step7"])
        assert found.faults[0].checkpoints == ("step7",)
        hub.ranges = False
        with pytest.raises(Unreadable, match=r"`step1/model\.safetensors` must be served in parts, got status 200"):
            found[0].part("w", 2, 3)
        assert isinstance(found.faults[0], Fault)
    with pytest.raises(InputError, match=r"does not answer \(.*\); check the network, or give the folder"):
        Checkpoints(REPOSITORY, endpoint=hub.endpoint)


def test_a_file_that_ends_early_on_the_hub_is_named(tmp_path):
    series(tmp_path, [0], size=100_000)
    with serve(tmp_path) as hub:
        (only,) = Checkpoints(REPOSITORY, endpoint=hub.endpoint)
        assert only.names() == ("m", "w")
        file = tmp_path / "step0" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100_000])
        with pytest.raises(Unreadable, match=r"step0/model\.safetensors"):
            only.tensor("w")


def test_one_revision_may_be_given_by_its_name_and_no_name_is_no_folder(tmp_path):
    series(tmp_path, [0, 3, 7])
    assert Checkpoints(tmp_path, revisions="step3").names == ("step3",)
    for source in ("", "  "):
        with pytest.raises(InputError, match=r"`source` must be a folder or a repository, got no name; write `\.`"):
            Checkpoints(source)
