"""The study of Theorem 1: its laws at any rate, and numbers of Figure 2 from an independent derivation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import legend, series, title
from joma.arguments import InputError
from joma.studies.theorems.invariance import (
    ACTIVATIONS,
    ATTENTIONS,
    BREAKERS,
    BROKEN,
    CORRECTIONS,
    NAMES,
    STUDY,
    TOKEN_KINDS,
    BlockSetting,
    Config,
    overlapping,
    run,
    trial,
    worst,
)
from joma.study import Context

SMALL = Config(classes=4, distinct=3, common=2, dim=8, steps=40)


@pytest.fixture(scope="module")
def small():
    return run(SMALL, Context((0, 1)))


# The numbers below come from two derivations that share no code with this package.
def test_figure_2_linear_units():
    final = trial(Config(), Context((0, 1, 2)), BlockSetting("softmax", "linear")).isel(step=-1)
    gaussian, random = final.sel(kind="gaussian"), final.sel(kind="random", seed=0)
    assert gaussian.correlation.sel(seed=0) == pytest.approx(0.9955, abs=5e-5)
    assert gaussian.error.sel(seed=0, correction="none") == pytest.approx(7.96, abs=5e-3)
    assert gaussian.error.sel(seed=0, correction="gap") == pytest.approx(0.006, abs=5e-4)
    assert 0.9865 <= float(gaussian.correlation.min()) <= float(gaussian.correlation.max()) <= 0.9965
    errors = gaussian.error.sel(correction="none")
    assert 6.85 <= float(errors.min()) <= float(errors.max()) <= 8.05
    assert random.correlation == pytest.approx(0.982, abs=5e-4)
    assert random.error.sel(correction="none") == pytest.approx(2.42, abs=5e-3)
    assert random.error.sel(correction="gap") == pytest.approx(0.0025, abs=5e-5)
    assert float(final.error.sel(correction="step").max()) < 1e-13


def test_figure_2_relu_units():
    compared = trial(Config(), Context((0,)), BlockSetting("softmax", "relu"))
    final = compared.isel(step=-1, seed=0).sel(kind="gaussian")
    assert final.correlation == pytest.approx(0.980, abs=5e-4)
    assert final.error.sel(correction="none") == pytest.approx(3.83, abs=5e-3)
    assert final.error.sel(correction="gap") == pytest.approx(0.003, abs=5e-4)


@settings(max_examples=25)
@given(
    setting=st.builds(BlockSetting, st.sampled_from(ATTENTIONS), st.sampled_from(ACTIVATIONS)),
    rates=st.tuples(st.floats(0.01, 2.0), st.floats(0.01, 2.0)),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 9999),
)
def test_the_finite_step_law_is_exact_at_any_rates(setting, rates, temperature, seed):
    config = replace(SMALL, rate=rates[0], rate_z=rates[1], temperature=temperature)
    compared = trial(config, Context((seed,)), setting)
    assert float(compared.error.sel(correction="step").max()) < 1e-10
    if setting.attention == "softmax":
        assert float(compared.logit_sum.max()) < 1e-12


@pytest.mark.parametrize("attention", ["exp", "linear"])
def test_sgd_departs_from_the_flows_law_in_proportion_to_the_rate(attention):
    def departure(rate, steps):
        config = replace(SMALL, rate=rate, rate_z=rate, steps=steps)
        return trial(config, Context((0,)), BlockSetting(attention, "gelu")).error.isel(step=-1).sel(correction="none")

    np.testing.assert_allclose(departure(0.2, 100) / departure(0.1, 200), 2.0, rtol=0.02)


@pytest.mark.parametrize("breaker", BREAKERS)
@pytest.mark.parametrize("attention", ["exp", "linear"])
def test_each_breaker_breaks_the_law(attention, breaker):
    broken = trial(SMALL, Context((0, 1)), replace(BROKEN, attention=attention, breaker=breaker))
    assert float(broken.error.isel(step=-1).sel(correction="step").min()) > 0.01


def test_a_breaker_of_no_strength_breaks_nothing():
    for breaker, config in {"overlap": replace(SMALL, overlap=0.0), "decay": replace(SMALL, decay=0.0)}.items():
        unbroken = trial(config, Context((0,)), replace(BROKEN, breaker=breaker))
        assert float(unbroken.error.sel(correction="step").max()) < 1e-10


def test_a_seed_is_the_same_alone_and_among_others(small):
    alone = run(SMALL, Context((1,))).sel(seed=1)
    for name in ("correlation", "loss", "law", "predicted", "broken"):
        np.testing.assert_allclose(alone[name], small[name].sel(seed=1).transpose(*alone[name].dims), atol=1e-9)


def test_every_setting_is_in_the_trajectory_and_judged(small):
    assert small.error.dims[:2] == ("seed", "step")
    assert small.sizes["attention"] * small.sizes["activation"] * small.sizes["kind"] == 18
    assert not any(small[name].isnull().any() for name in ("error", "size", "loss", "law", "predicted", "broken"))
    verdicts = {claim.name: claim.judge(small, "quick")["verdict"] for claim in STUDY.claims}
    for name in ("ledger", "sum", "finite-steps"):
        assert verdicts[name] == "holds"
    baseline = small.error.sel(attention="exp", activation="gelu", correction="step")
    np.testing.assert_array_equal(small.broken.sel(breaker="none"), baseline)


def test_sizes_of_the_ledgers_terms_are_relative_to_the_movement(small):
    selected = small.sel(attention="softmax", activation="gelu", kind="random", seed=1)
    corrections = selected.predicted.transpose("correction", "token").values
    moved = np.linalg.norm(selected.law - selected.predicted.sel(correction="none")) / float(
        selected.error.isel(step=-1).sel(correction="none")
    )
    sizes = np.linalg.norm(np.diff(corrections, axis=0), axis=-1) / moved
    np.testing.assert_allclose(selected["size"].isel(step=-1), sizes, rtol=1e-9)


def test_figure_2_is_drawn_with_its_corrections_and_its_scatter(small):
    left, middle, right = STUDY.figures["figure-2"].draw(small).axes
    assert legend(left) == ["Gaussian tokens", "random tokens"]
    assert legend(middle) == [CORRECTIONS[name] for name in ("none", "drift", "gap")]
    assert middle.get_yscale() == "log"
    assert middle.texts[0].get_text().startswith(CORRECTIONS["step"])
    softmax = small.sel(attention="softmax", activation="linear", kind="gaussian")
    step, error = series(middle)["ẑ"][-1]
    assert error == pytest.approx(float(softmax.error.sel(correction="none", step=step).mean("seed")))
    agreement, uncorrected, corrected = right.lines
    np.testing.assert_array_equal(agreement.get_xdata(), agreement.get_ydata())
    assert len(uncorrected.get_xdata()) == softmax.sizes["token"] * softmax.sizes["seed"]
    np.testing.assert_allclose(corrected.get_ydata(), corrected.get_xdata(), atol=1e-12)


def test_laws_are_drawn_for_every_attention_activation_and_kind_of_tokens(small):
    panels = STUDY.figures["laws"].draw(small).axes
    pairs = [(kind, attention) for kind in TOKEN_KINDS for attention in ATTENTIONS]
    for panel, (kind, attention) in zip(panels, pairs, strict=True):
        assert title(panel).endswith(f"{attention} attention, {NAMES[kind]} tokens")
        means = series(panel)
        assert list(means) == [NAMES[activation] for activation in ACTIVATIONS]
        step, error = means["GELU"][0]
        expected = small.error.sel(attention=attention, activation="gelu", kind=kind, correction="none", step=step)
        assert error == pytest.approx(float(expected.mean("seed")))
    assert [panel.get_xlabel() for panel in panels] == [""] * 3 + ["step"] * 3
    assert legend(panels[2]) == [NAMES[activation] for activation in ACTIVATIONS]


def test_breakers_are_drawn_one_series_each(small):
    panels = STUDY.figures["breakers"].draw(small).axes
    assert [title(panel) for panel in panels] == ["(a)  Gaussian tokens", "(b)  random tokens"]
    assert legend(panels[1]) == list(BREAKERS.values())
    for panel, kind in zip(panels, TOKEN_KINDS, strict=True):
        assert (panel.get_xlabel(), panel.get_yscale()) == ("step", "log")
        step, error = series(panel)["Adam"][-1]
        assert error == pytest.approx(float(small.broken.sel(breaker="adam", kind=kind, step=step).mean("seed")))


def test_a_diverged_seed_is_nan_and_never_skipped():
    config = replace(SMALL, rate=10.0, rate_z=10.0)
    compared = trial(config, Context((0, 1, 2)), BlockSetting("exp", "linear"))
    assert compared.error.sel(kind="random", seed=2).isnull().all()
    assert float(compared.error.sel(kind="gaussian", correction="step").max()) < 1e-8
    np.testing.assert_array_equal(np.isnan(worst(compared.error)), [False, False, True])
    with pytest.raises(InputError, match=r"`rate`.*diverged"):
        trial(replace(SMALL, rate=1e6, rate_z=1e6), Context((0,)), BlockSetting("exp", "linear"))


def test_seeds_and_kinds_of_tokens_of_which_all_diverged_stay_in_the_trajectory():
    compared = trial(replace(SMALL, rate=10.0, rate_z=10.0), Context((2,)), BlockSetting("exp", "linear"))
    assert compared.kind.values.tolist() == list(TOKEN_KINDS)
    assert compared.seed.values.tolist() == [2]
    np.testing.assert_array_equal(compared.loss.isnull().all(("step", "seed")), [False, True])


@given(columns=st.integers(1, 6), cosine=st.floats(0, 1))
def test_overlapping_embeddings_have_one_cosine(columns, cosine):
    U = overlapping(columns + 2, columns, cosine)
    expected = (1 - cosine) * torch.eye(columns, dtype=torch.float64) + cosine
    torch.testing.assert_close(U.T @ U, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate_z": -0.1}, "rate_z"),
        ({"rate": float("nan")}, "rate"),
        ({"temperature": 0.0}, "temperature"),
        ({"dim": 5}, "dim"),
        ({"dim": 6}, "dim"),
        ({"overlap": 1.5}, "overlap"),
        ({"decay": -1.0}, "weight_decay"),
        ({"classes": 9}, "hidden"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_configs_are_named_before_any_training(changes, name, monkeypatch):
    monkeypatch.setattr(Context, "fit", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **changes), Context((0,)))
