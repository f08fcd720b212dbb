"""Damaged files: the fast part, a damage or two of every stored file and those that once went unnoticed."""

import json
import warnings

import pytest

from joma.files import StorageError
from robustness import damage
from robustness.stored_folders import steady
from robustness.torture_damage import all_stored, damage_all
from robustness.trials import Stored, Tally, Trials

KINDS = (
    "a finished run",
    "a run of version 0.1.0",
    "a trained run",
    "a large run",
    "an interrupted training",
    "a probe's results",
    "a recording (recording.nc)",
    "a recording (trajectory.nc)",
    "a trained model",
    "a text in the cache",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with steady():
        yield tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def every(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a probe turns torch's fast path off and warns of it once
        return {stored.name: stored for stored in all_stored(folder)}


def failures_of(stored, file, damages, workspace, readers=None):
    tally = Tally()
    Trials(stored, tally, workspace).run(file, damages, readers)
    assert tally.counts["damages"] > 0
    return tally.failures


def test_every_kind_of_stored_folder_is_tried(every):
    assert tuple(every) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_by_name_or_changes_nothing(every, kind, tmp_path):
    tally = Tally()
    damage_all(every[kind], tally, tmp_path, scale=0.01)
    assert tally.counts["damages"] >= len(every[kind].files)
    assert tally.failures == []


def test_a_letter_of_the_preset_or_a_verdict_makes_no_other_result(every, tmp_path):
    stored = every["a finished run"]
    for name in ("config.json", "claims.json"):
        content = (stored.folder / stored.part / name).read_bytes()
        edits = [damage.replaced(f"{old} as {new}", content.replace(old, new)) for old, new in (
            (b'"quick"', b'"quicj"'), (b'"quick"', b'"paper"'), (b'"holds"', b'"does not hold"'), (b"2.01", b"2.02"),
        ) if old in content]  # fmt: skip
        assert edits
        assert failures_of(stored, f"{stored.part}/{name}", edits, tmp_path, ["open_run", "run", "report"]) == []


def test_the_preset_of_a_run_of_version_0_1_is_that_of_the_command(every, tmp_path):
    """Nothing vouches for it in such a run; another letter made every claim "not tested"."""
    stored = every["a run of version 0.1.0"]
    content = (stored.folder / stored.part / "config.json").read_bytes()
    edits = [damage.replaced(new, content.replace(b'"quick"', new.encode())) for new in ('"paper"', '"quicj"', '""')]
    assert failures_of(stored, f"{stored.part}/config.json", edits, tmp_path, ["run"]) == []


def test_hdf5_that_leads_elsewhere_or_needs_terabytes_is_refused_even_with_a_manifest_that_agrees(every, tmp_path):
    stored = every["a finished run"]
    hostile = list(damage.hostile_hdf5(tmp_path))
    assert len(hostile) == 8
    tally = Tally()
    Trials(stored, tally, tmp_path).run(f"{stored.part}/trajectory.nc", hostile, ["open_run"])
    assert tally.failures == []
    assert tally.counts["refused by name"] == 8
    assert failures_of(stored, f"{stored.part}/trajectory.nc", hostile[-1:], tmp_path, ["report", "joma judge"]) == []


def test_structure_that_sends_hdf5_round_in_circles_is_found_before_hdf5_reads_it(every, tmp_path):
    """A flipped bit in an object header made HDF5 run for ever; only numbers may be checked while they are read."""
    stored = every["a large run"]
    (file,) = stored.files
    content = (stored.folder / file).read_bytes()
    flips = [damage.replaced(f"bit 3 of byte {at}", content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
             for at in range(380, 460)]  # fmt: skip
    assert failures_of(stored, file, flips, tmp_path) == []


class TestTheHarnessItself:
    """A harness that cannot fail proves nothing."""

    @pytest.fixture
    def stored(self, tmp_path):
        (tmp_path / "stored").mkdir()
        (tmp_path / "stored" / "a.json").write_text(json.dumps({"value": 1}))
        return tmp_path / "stored"

    def failures(self, stored, reader, workspace):
        return failures_of(
            Stored("a value", stored, {"read": reader}), "a.json", [damage.replaced("2", b"2")], workspace
        )

    def test_another_result_fails(self, stored, tmp_path):
        (failure,) = self.failures(stored, lambda copy: {"text": (copy / "a.json").read_text()}, tmp_path)
        assert failure == "a value, a.json, 2, read: silently another result: text"

    def test_another_error_fails(self, stored, tmp_path):
        (failure,) = self.failures(
            stored, lambda copy: json.loads((copy / "a.json").read_text())["value"] and {}, tmp_path
        )
        assert "TypeError" in failure

    @pytest.mark.parametrize(("message", "count"), [("something is wrong", 1), ("{}/a.json is damaged", 0)])
    def test_a_refusal_without_the_name_fails(self, stored, tmp_path, message, count):
        def read(copy):
            if (copy / "a.json").read_bytes() == b"2":
                raise StorageError(message.format(copy))
            return {}

        assert len(self.failures(stored, read, tmp_path)) == count
