"""The study of the entropy floor: its verdicts, its labels, and its config."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.common_axes import NAMES
from joma.studies.related import entropy_floor
from joma.studies.related.entropy_floor import STUDY, Config, outcome, run
from joma.study import Context

SMALL = Config(
    keys=(2, 20), norms=(0.1, 4.0), row_starts=2, sizes=(3,), spectral_norms=(1.0, 4.0), matrix_starts=8, width=8,
    hidden=8, layers=1, length=8, batch=4, steps=4, every=2, windows=2,
)  # fmt: skip
CHANGES = {
    "keys": (2, 5), "norms": (1.0, 3.0), "row_starts": 3, "sizes": (4,), "spectral_norms": (1.0, 3.0),
    "matrix_starts": 9, "width": 16, "hidden": 9, "heads": 1, "layers": 2, "length": 9, "batch": 5, "steps": 5,
    "every": 1, "rates": (1e-3, 1e-2), "clip": 0.1, "windows": 3,
}  # fmt: skip
FIELDS = Fields(entropy_floor, SMALL, CHANGES)


@pytest.fixture(scope="module")
def trajectory():
    return run(replace(SMALL, width=16, length=16, steps=60, every=10), Context((0, 1, 2)))


def test_what_is_proved_holds(trajectory):
    records = {claim.name: claim.judge(trajectory, "quick") for claim in STUDY.claims}
    theorems = {name for name, record in records.items() if record["kind"] == "theorem"}
    assert theorems == {"tight", "peaks", "mean-floor", "never-below", "weight-bound"}
    for name in (*theorems, "identity", "converged"):
        assert records[name]["verdict"] == "holds", name


def test_labels(trajectory):
    assert trajectory.arm.values.tolist() == ["plain", "σReparam"]
    assert trajectory.entropy.dims == ("arm", "rate", "seed", "step", "layer")
    for name in NAMES:
        assert trajectory[name].dims == ("seed", "axes_step")
        assert trajectory[name].notnull().all()
    np.testing.assert_array_equal(trajectory.row_keys[:17], [*range(1, 17), 1])
    assert (trajectory.row_entropy <= np.log(trajectory.row_keys) + 1e-12).all()


def test_the_outcome_has_the_numbers(trajectory):
    least = float(trajectory.entropy.isel(rate=-1).sel(arm="plain").mean(("seed", "layer")).min())
    assert f"to {least:.2f} nats, with σReparam" in outcome(trajectory)


def test_statements_are_short_and_kinds_are_known():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "reading", "control", "check"}
    assert all(len(claim.statement) <= 115 and claim.quantity for claim in STUDY.claims)


@pytest.mark.parametrize(
    "change",
    [{"keys": (1,)}, {"norms": (0.0,)}, {"row_starts": 0}, {"sizes": (1,)}, {"spectral_norms": (0.0,)},
     {"matrix_starts": 0}, {"width": 0}, {"heads": 3}, {"layers": 0}, {"length": 0}, {"batch": 0}, {"steps": 0},
     {"every": 0}, {"rates": (0.0,)}, {"rates": (0.1, 0.1)}, {"clip": -1.0}, {"windows": 0}],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        run(replace(SMALL, **change), Context((0,)))


def test_another_text_gives_another_run_and_another_identity(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij klmnop\n" * 500)
    changed = replace(SMALL, corpus=str(tmp_path / "text.txt"))
    assert STUDY.inputs(changed) != STUDY.inputs(SMALL)
    assert not run(changed, Context((0,))).identical(FIELDS.baseline)


def test_every_field_is_changed_below():
    assert {*CHANGES, "corpus"} == set(Config.__dataclass_fields__)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()
