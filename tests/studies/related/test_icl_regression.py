"""The study of in-context regression: its verdicts, its config, and that seeds do not depend on each other."""

from dataclasses import replace

import numpy as np
import pytest

from config_fields import Fields
from joma.arguments import InputError
from joma.studies.related import icl_regression
from joma.studies.related.icl_regression import STUDY, Config, outcome, run
from joma.study import Context
from studies.related.icl_regression_run import SMALL, small_run

TINY = replace(SMALL, separate_until=50.0, merged_until=5.0, drop_scales=(1e-2, 1e-3), whole_steps=3, layer_steps=3,
               softmax_steps=3, layers=(1, 2), prompts=50, covariances=30, probe=16)  # fmt: skip
CHANGES = {
    "spectrum": (1.5, 0.8, 0.3), "length": 9, "merged_heads": (2,), "merged_scale": 2e-3, "merged_until": 6.0,
    "drop_scales": (1e-2, 1e-4), "heads": 2, "low_rank": 2, "separate_scale": 0.03, "separate_until": 60.0,
    "records": 21, "aligned_start": 0.06, "noise": 0.6, "prompts": 60, "batch": 9, "probe": 17, "whole_heads": (2,),
    "whole_steps": 4, "whole_batch": 9, "whole_rate": 0.03, "whole_scale": 0.06, "layers": (1,), "layer_steps": 4,
    "layer_rate": 0.02, "layer_scale": 0.06, "label_noise": 0.7, "covariances": 31, "searches": 3,
    "softmax_heads": (1, 3), "softmax_steps": 4, "softmax_rate": 0.02, "softmax_scale": 0.2,
}  # fmt: skip
FIELDS = Fields(icl_regression, TINY, CHANGES)
EXACT = ("logistic", "drop-law", "abrupt", "stairs", "order", "low-rank", "half-times", "conserved", "shift", "noise")


def test_exact_claims_hold_in_a_small_run_too():
    records = {claim.name: claim.judge(small_run(), "quick") for claim in STUDY.claims}
    assert {name: records[name]["verdict"] for name in EXACT} == dict.fromkeys(EXACT, "holds")
    assert records["not-consistent"]["measured"]["min"] > 0


def test_every_claim_has_a_short_statement_and_a_quantity():
    assert {claim.kind for claim in STUDY.claims} == {"theorem", "reading", "control", "check"}
    for claim in STUDY.claims:
        assert len(claim.statement) <= 120, claim.name
        assert claim.quantity, claim.name


def test_the_outcome_states_the_plateaus_and_the_best_steps():
    text = outcome(small_run())
    assert "wait at 100 % of the plateaus" in text
    assert f"(best: {float(small_run().best_loss[-1]):.3f})" in text


def test_seeds_do_not_depend_on_their_neighbours():
    alone = run(SMALL, Context((2,)))
    for name in (
        "separate_loss",
        "merged_loss",
        "whole_loss",
        "layer_loss",
        "softmax_loss",
        "noisy_loss",
        "shift_sampled",
    ):
        np.testing.assert_allclose(alone[name][0], small_run()[name].sel(seed=2), rtol=1e-3, err_msg=name)


def test_the_representative_model_has_the_common_axes():
    for name in ("axes_entropy", "axes_sink", "axes_rank"):
        assert small_run()[name].dims == ("seed", "axes_step")
        assert bool((small_run()[name] > 0).all())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spectrum", (1.0, 1.0)), ("spectrum", (1.0,)), ("length", 0), ("low_rank", 3), ("drop_scales", (1e-3,)),
        ("prompts", 1), ("layers", (0,)), ("whole_rate", 0.0), ("aligned_start", 0.0), ("softmax_heads", (1, 1)),
        ("label_noise", -1.0),
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"`{name}` must"):
        run(replace(TINY, **{name: value}), Context((0,)))


def test_every_field_is_changed():
    FIELDS.assert_all_are_changed()


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_field_changes_the_run(name):
    FIELDS.assert_changes_the_run(name)


def test_the_same_config_gives_the_same_run():
    FIELDS.assert_repeats()


def test_the_presets_are_those_of_one_config():
    assert {type(preset.config) for preset in STUDY.presets.values()} == {Config}
