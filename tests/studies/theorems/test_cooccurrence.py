"""The study of Theorem 5: its verdicts, that each claim can fail, and that drawing only draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.data.trees import HBLT
from joma.studies.theorems import cooccurrence as study
from joma.study import Context
from joma.theory import hierarchy

SMALL = study.Config(samples=20_000, trees=3)


@pytest.fixture(scope="module")
def run() -> xr.Dataset:
    return study.run(SMALL, Context((0, 1, 2)))


def verdicts(run: xr.Dataset) -> dict[str, str]:
    return {claim.name: claim.judge(run, "quick")["verdict"] for claim in study.CLAIMS}


def test_every_claim_is_decided_and_only_the_unconditional_limit_fails(run):
    found = verdicts(run)
    assert found.pop("slides-any") == "does not hold"
    assert set(found.values()) == {"holds"}


def test_the_unconditional_limit_fails_by_the_distance_between_the_limits(run):
    # Largest at c = 4, height 3 of depth 4: |1 − 3/7 − (1 − 3/4)|; at c = 0 it is 1/4.
    assert study.slides_distance(run).max() == pytest.approx(3 / 4 - 3 / 7, abs=1e-7)
    assert study.slides_distance(run).sel(fine_c=0.0) == pytest.approx(1 / 4, abs=1e-7)


@pytest.mark.parametrize(
    ("claim", "spoil"),
    [
        ("enumeration", lambda run: run.assign(error=run.error + 2e-12)),
        ("sampled", lambda run: run.assign(frequency=run.frequency + 0.02)),
        ("chance", lambda run: run.assign(occurrences=2 * run.occurrences)),
        ("chance", lambda run: run.assign(occurrences=run.occurrences / 2)),
        ("order", lambda run: run.assign(compared_frequency=1 - run.compared_frequency)),
        ("reversal", lambda run: run.assign(compared_frequency=1 - run.compared_frequency)),
        ("limit", lambda run: run.assign(reached=run.reached + 1e-5)),
        ("slides", lambda run: run.assign(reached=run.reached + 1e-5)),
    ],
)
def test_a_claim_fails_on_a_run_that_contradicts_it(run, claim, spoil):
    assert verdicts(spoil(run))[claim] == "does not hold"


@pytest.mark.parametrize("bias", study.BIASES)
def test_the_study_trees_closed_form_is_their_enumeration(run, bias):
    tree = HBLT(study.SHAPE, study.P0, study.BIASES[bias], SMALL.rho)
    exact = hierarchy.enumerate_cooccurrence(tree.parents, tree.p0, tree.p_child, tree.rho)
    np.testing.assert_allclose(run.compared.sel(bias=bias), exact, rtol=1e-12)


def test_followed_tokens_companions_are_the_theorems_values(run):
    # ρ = 0.9, L = 4, one class in effect: the branches are independent, so the root-joined value is P[l] itself.
    k, rare, common = 0.9**3, 0.9, -0.9
    expected = [(1 + 0.9 ** (2 * h) - 2 * k * rare) / (2 * (1 - k * rare)) for h in (1, 2, 3)] + [(1 - k * common) / 2]
    found = study.companions(run, run.compared.sel(bias="unequal"))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert study.reversal(run).mean() == pytest.approx(expected[3] - expected[0], abs=0.02)


def test_approach_is_sampled_where_the_line_says(run):
    exact = hierarchy.cooccurrence([1, 2, 3], 4, run.gap.values[:, None], 0.0, complement=True)
    np.testing.assert_allclose(run.approach_frequency.sel(c=0.0).mean("seed"), exact, atol=0.04)
    line = run.approach.sel(c=1.0, height=1).interp(fine_gap=0.1)
    assert float(line) == pytest.approx(float(hierarchy.cooccurrence(1, 4, 0.9, 0.9)), abs=1e-4)


def test_pooling_is_counting_all_seeds_together(run):
    hits = (run.frequency * run.occurrences).sum("seed").values
    trials = run.occurrences.sum("seed").values[:, None, :]
    chance = run.closed.values
    apart = ~np.eye(8, dtype=bool)
    z = ((hits - trials * chance)[:, apart]) / np.sqrt((trials * chance * (1 - chance))[:, apart])
    found = study.scores(run, pooled=True)
    np.testing.assert_allclose(np.sort(found.values.ravel()), np.sort(z.ravel()), rtol=1e-9)
    assert found.shape == (1, 7 * 8 * 7)


def test_a_seed_does_not_depend_on_its_neighbours(run):
    alone = study.run(SMALL, Context((2,)))
    xr.testing.assert_identical(alone.isel(seed=0), run.sel(seed=2))


def test_drawing_only_draws(run, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("recomputed")

    monkeypatch.setattr(HBLT, "sample", refuse)
    for name in ("cooccurrence", "cooccurrence_matrix", "enumerate_cooccurrence", "cooccurrence_limit"):
        monkeypatch.setattr(hierarchy, name, refuse)
    for drawing in study.STUDY.figures.values():
        panels = [axes for axes in drawing.draw(run).axes if axes.get_label() != "<colorbar>"]
        assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
        assert sum(bool(axes.get_legend()) for axes in panels) >= 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"samples": 10}, "`samples`"),
        ({"trees": 0}, "`trees`"),
        ({"rho": 1.5}, "`rho`"),
        ({"rhos": (0.5, np.nan)}, "`rhos`"),
        ({"rhos": ()}, "`rhos`"),
        ({"c": (-1.0,)}, "`c`"),
        ({"c": (10.0,)}, "`c`"),
        ({"gaps": (0.0,)}, "`gaps`"),
    ],
)
def test_bad_settings_are_named(change, word):
    with pytest.raises(InputError, match=word):
        study.run(replace(SMALL, **change), Context((0,)))
