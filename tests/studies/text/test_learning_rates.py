"""Attention by learning rate: claims on curves whose shape is known, and the study on a small text."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.drawing import COLOURS
from joma.studies.text.entropy_bounce import MIN_BOUNCE
from joma.studies.text.learning_rates import (
    CLAIMS,
    COLLAPSE,
    STUDY,
    Config,
    add_bounces,
    best_rate,
    cost,
    draw_entropy,
    draw_layers,
    draw_rates,
    entropy_left,
    outcome,
    run,
    seed_slopes,
    turn_slope,
)
from joma.study import Context, NotInRun

SMALL = Config(
    tokeniser="bytes", width=8, hidden=8, batch=4, length=8, steps=6, every=2, layers=2, rates=(1e-2, 1e-4), glance=30
)  # fmt: skip
STEPS = np.arange(0, 1001, 20)
SHAPES = {
    "falls": lambda at, rate: 2.0 - np.minimum(at * rate, 1.0),
    "turns": lambda at, rate: 1.0 + abs(np.minimum(at * rate, 2.0) - 1.0),  # least at step 1 / rate
    "rises": lambda at, rate: 2.0 + np.minimum(at * rate, 1.0),
    "collapses": lambda at, rate: 2.0 * np.exp(-at * rate),
}


def run_with(shapes, losses, *, noise=0.01, seeds=3, layers=1):
    """A run whose entropy has a known shape at each rate, with the same noise at every point."""
    rng = np.random.default_rng(3)
    clean = np.array([SHAPES[name](STEPS, rate) for rate, name in shapes.items()])
    noisy = clean[:, None, :, None, None] + noise * rng.standard_normal((len(shapes), seeds, len(STEPS), layers, 1))
    entropy = xr.DataArray(noisy, dims=("rate", "seed", "step", "layer", "head"))
    loss = np.tile(np.array(losses, float)[:, None, None], (1, seeds, len(STEPS)))
    trajectory = xr.Dataset({"entropy": entropy, "valid_loss": (("rate", "seed", "step"), loss)})
    return add_bounces(trajectory.assign_coords(rate=[*shapes], seed=range(seeds), step=STEPS))


@pytest.fixture(scope="module")
def known():
    return run_with({1e-4: "falls", 2e-3: "turns", 4e-3: "turns", 1e-1: "collapses"}, [6.0, 5.0, 5.2, 6.5])


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def verdicts(trajectory, preset):
    return {claim.name: claim.judge(trajectory, preset)["verdict"] for claim in CLAIMS}


def test_only_what_falls_and_recovers_is_a_bounce():
    shapes = {0.001: "falls", 0.002: "turns", 0.003: "rises", 0.004: "collapses"}
    bounce = run_with(shapes, [5.0] * 4).bounce.mean("seed")
    np.testing.assert_allclose(bounce, [0, 0.5, 0, 0], atol=0.03)


def test_the_minimum_comes_sooner_as_one_over_the_rate(known):
    """Where entropy is least at step 1 / rate the slope is −1."""
    np.testing.assert_allclose(known.turn.sel(rate=[2e-3, 4e-3]).mean("seed"), [500, 250], atol=20)
    np.testing.assert_allclose(turn_slope(known), -1, atol=0.1)
    assert np.isnan(turn_slope(known.sel(rate=[1e-4, 2e-3, 1e-1])))


def two_layers(rates, turns):
    """A run of two layers: one only falls; the other has its minimum at step `turns` / rate, and recovers wholly."""
    rng = np.random.default_rng(1)
    falling = [2.5 - 0.9 * STEPS / 1000 for _ in rates]
    turning = [2.0 + 0.7 * abs(np.minimum(STEPS * rate / turns, 2.0) - 1.0) for rate in rates]
    clean = np.stack([falling, turning], axis=-1)[:, None, :, :, None]
    noisy = clean + 0.005 * rng.standard_normal((len(rates), 3, len(STEPS), 2, 1))
    entropy = xr.DataArray(noisy, dims=("rate", "seed", "step", "layer", "head"))
    loss = xr.zeros_like(entropy.isel(layer=0, head=0)) + 5.0
    trajectory = xr.Dataset({"entropy": entropy, "valid_loss": loss})
    return add_bounces(trajectory.assign_coords(rate=[*rates], seed=range(3), step=STEPS, layer=[0, 1], head=[0]))


def test_a_slope_is_measured_in_each_seed_and_only_where_every_seed_has_one(known):
    slopes = seed_slopes(known)
    assert slopes.sizes == {"seed": 3}
    for seed, slope in enumerate(slopes.values):
        assert slope == pytest.approx(turn_slope(known.isel(seed=[seed])), rel=1e-12)
    one_seed_bounces_once = known.copy(deep=True)
    one_seed_bounces_once.bounce.loc[{"rate": 4e-3, "seed": 1}] = 0.0
    with pytest.raises(NotInRun, match="second rate"):
        seed_slopes(one_seed_bounces_once)
    claim = next(claim for claim in CLAIMS if claim.name == "sooner")
    assert claim.judge(known, "paper")["verdict"] == "holds"
    later = known.assign(turn=1e6 / known.turn)  # the higher the rate, the later
    assert claim.judge(later, "paper")["verdict"] == "does not hold"


def test_the_outcome_names_the_rates_that_bounce(known):
    assert outcome(known) == (
        "Entropy, mean over layers, bounces by 5 % of its start or more at rates 0.002 and 0.004. The loss is least, "
        "5.00 nats, at rate 0.002; at 0.1 the sparsest layer keeps 0.3 % of its entropy."
    )
    assert "at none of the rates" in outcome(known.sel(rate=[1e-4, 1e-1]))
    alone = (
        "With one seed, which decides no claim that needs an interval over seeds: entropy, mean over layers, bounces"
    )
    assert outcome(known.isel(seed=[0])).startswith(alone)


def test_a_layer_that_bounces_is_seen_where_the_mean_hides_it():
    trajectory = two_layers((1e-4, 2e-4), turns=0.02)  # steps 200 and 100, of 1,000
    assert float(trajectory.layer_bounce.sel(layer=0).max()) == 0
    np.testing.assert_allclose(trajectory.layer_bounce.sel(layer=1), 0.7 / 2.7, atol=0.02)
    np.testing.assert_allclose(trajectory.layer_turn.sel(layer=1).mean("seed"), [200, 100], atol=20)
    judged = verdicts(trajectory, "paper")
    assert judged["bounces-1e-4"] == "does not hold"
    assert judged["layer-1e-4"] == judged["layer-sooner"] == "holds"
    np.testing.assert_allclose(turn_slope(trajectory, "layer_bounce", "layer_turn"), -1, atol=0.2)


def test_bounces_are_drawn_by_layer():
    trajectory = two_layers((1e-4, 2e-4), turns=0.02)
    sizes, turns, bar = draw_layers(trajectory).axes
    (image,) = sizes.images
    np.testing.assert_allclose(image.get_array(), trajectory.layer_bounce.mean("seed").transpose("layer", "rate"))
    assert [label.get_text() for label in sizes.get_xticklabels()] == ["0.0001", "0.0002"]
    assert bar.get_ylabel() == "bounce (share of the start)"
    falling, turning = turns.lines
    assert (falling.get_label(), turning.get_label()) == ("layer 0", "layer 1")
    assert not falling.get_xydata().size
    points = trajectory.layer_turn.sel(layer=1).stack(point=("rate", "seed"))
    np.testing.assert_allclose(turning.get_xydata(), np.stack([points.rate, points + 1], axis=-1))
    np.testing.assert_allclose(turns.get_xlim(), [0.7e-4, 2.8e-4])


def test_the_slope_has_an_intercept_for_each_layer():
    """Two layers with minima at 0.1/rate and 0.4/rate, at different rates: one line through all has another slope."""
    early, late = two_layers((1e-3, 2e-3, 4e-3), turns=0.1), two_layers((1e-3, 2e-3, 4e-3), turns=0.4)
    both = xr.concat([early.sel(layer=1), late.sel(layer=1)], "layer")
    both["layer_bounce"] = both.layer_bounce.where(
        (both.rate == 2e-3) | ((both.rate < 2e-3) == xr.DataArray([True, False], dims="layer"))
    )
    np.testing.assert_allclose(turn_slope(both, "layer_bounce", "layer_turn"), -1, atol=0.25)
    one_intercept = both[["layer_bounce", "layer_turn"]].isel(seed=0, drop=True).rename(layer="seed")
    assert turn_slope(one_intercept, "layer_bounce", "layer_turn") > -0.2


def test_claims_hold_on_the_expected_course_alone(known):
    only_falls = dict.fromkeys(("bounces-1e-4", "layer-1e-4"), "does not hold")
    assert verdicts(known, "paper") == {claim.name: "holds" for claim in CLAIMS} | only_falls
    assert best_rate(known) == 2e-3
    np.testing.assert_allclose(cost(known), 1.5)
    np.testing.assert_allclose(entropy_left(known).sel(rate=1e-1), 0, atol=0.02)


def test_claims_fail_where_nothing_bounces_or_collapses():
    judged = verdicts(run_with({2e-3: "turns", 4e-3: "falls", 5e-3: "falls"}, [6.0, 5.0, 5.01]), "paper")
    assert {name for name, verdict in judged.items() if verdict == "holds"} == {"bounces"}
    judged = verdicts(run_with({1e-3: "falls", 2e-3: "falls"}, [5.0, 5.0]), "paper")
    assert judged["bounces"] == judged["half-clock"] == judged["best"] == "does not hold"
    assert judged["sooner"] == "not tested"


def test_a_run_in_which_nothing_falls_is_drawn_without_turns(tmp_path):
    figure = draw_rates(run_with({1e-4: "rises", 1e-3: "rises"}, [5.0, 5.0]))
    assert not figure.axes[1].lines
    figure.savefig(tmp_path / "rates.svg")  # an empty panel has no limits of its own


def test_the_papers_rate_is_found_among_rounded_ones():
    trajectory = run_with({1e-4 * (1 + 1e-9): "falls", 1e-3: "turns"}, [5.0, 5.0])
    assert verdicts(trajectory, "paper")["bounces-1e-4"] == "does not hold"
    claim = next(claim for claim in CLAIMS if claim.name == "bounces-1e-4")
    assert claim.judge(trajectory, "paper")["measured"]["values"] == [0.0] * 3


def test_the_papers_rate_is_not_judged_where_it_was_not_trained(known):
    judged = verdicts(known.sel(rate=[2e-3, 1e-1]), "paper")
    assert judged["bounces-1e-4"] == "not tested"
    assert judged["sooner"] == "not tested"  # one of two rates bounces: there is no slope


def test_a_diverged_seed_has_learned_nothing_and_no_attention_that_collapsed(known):
    diverged = known.copy(deep=True)
    for name in ("entropy", "valid_loss"):
        diverged[name].loc[{"rate": 1e-1, "seed": 1, "step": slice(500, None)}] = np.nan
    assert np.isnan(entropy_left(diverged).sel(rate=1e-1, seed=1))
    assert verdicts(diverged, "paper")["collapse"] == "does not hold"
    assert np.isnan(cost(diverged).sel(seed=1))
    assert best_rate(diverged) == 2e-3
    (container,) = draw_rates(diverged).axes[2].containers
    np.testing.assert_allclose(container.lines[0].get_ydata(), [6.0, 5.0, 5.2, 6.5])  # mean of the other seeds


@pytest.mark.parametrize(
    ("rate", "names"),
    [(1e-4, {"bounces-1e-4", "layer-1e-4", "slow"}), (2e-3, {"best"})],
)
def test_what_a_seed_did_before_it_diverged_is_no_result(known, rate, names):
    """The stored bounce is that of the steps before, and 0 where there are too few of them."""
    for steps in (slice(20, None), slice(900, None)):
        diverged = known.copy(deep=True)
        diverged.entropy.loc[{"rate": rate, "seed": 1, "step": steps}] = np.nan
        diverged = add_bounces(diverged[["entropy", "valid_loss"]])
        for claim in CLAIMS:
            if claim.name in names:
                np.testing.assert_array_equal(np.isnan(claim.measure(diverged)), [False, True, False], claim.name)
                assert claim.judge(diverged, "paper")["verdict"] == "does not hold"


def test_rates_are_an_axis_in_order(trajectory):
    assert trajectory.rate.values.tolist() == [1e-4, 1e-2]
    assert trajectory.entropy.sel(rate=1e-2, seed=1).sizes == {"step": trajectory.sizes["step"], "layer": 2, "head": 1}
    fall = trajectory.valid_loss.isel(step=0) - trajectory.valid_loss.isel(step=-1)
    assert (fall.sel(rate=1e-2) > 10 * fall.sel(rate=1e-4)).all()


def test_a_seed_starts_alike_at_every_rate(trajectory):
    start = trajectory.isel(step=0)
    for name in ("entropy", "valid_loss", "loss"):
        np.testing.assert_allclose(start[name].sel(rate=1e-4), start[name].sel(rate=1e-2), rtol=1e-6)


def test_a_rate_does_not_depend_on_its_neighbours(trajectory):
    alone = run(replace(SMALL, rates=(1e-2,)), Context((1,))).valid_loss.sel(rate=1e-2, seed=1)
    np.testing.assert_allclose(alone, trajectory.valid_loss.sel(rate=1e-2, seed=1), rtol=1e-5)


def test_a_training_too_short_to_bounce_has_no_bounce(trajectory):
    assert "holds" not in {verdicts(trajectory, "paper")[name] for name in ("bounces", "sooner", "best")}


def test_entropy_is_drawn_by_layer_and_rate(trajectory):
    figure = draw_entropy(trajectory)
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "(a)  Entropy of layer 0",
        "(b)  Entropy of layer 1",
    ]
    for layer, panel in enumerate(figure.axes):
        curves = [line for line in panel.lines if len(line.get_xdata()) > 1]
        assert [line.get_label() for line in curves] == ["0.0001", "0.01"]
        for line, rate in zip(curves, (1e-4, 1e-2), strict=True):
            entropy = trajectory.entropy.sel(rate=rate).isel(layer=layer).mean(("head", "seed"))
            np.testing.assert_allclose(line.get_xydata(), np.stack([trajectory.step + 1, entropy], axis=-1))


def test_measures_are_drawn_against_the_rate(known):
    shares, turns, losses = draw_rates(known).axes
    bounce, left = (container.lines[0].get_xydata() for container in shares.containers)
    np.testing.assert_allclose(bounce, np.stack([known.rate, known.bounce.mean("seed")], axis=-1))
    np.testing.assert_allclose(left, np.stack([known.rate, entropy_left(known).mean("seed")], axis=-1))
    levels = {line.get_color(): line.get_ydata() for line in shares.lines if len({*line.get_ydata()}) == 1}
    assert (levels[COLOURS[0]][0], levels[COLOURS[1]][0]) == (MIN_BOUNCE, COLLAPSE)
    points = {line.get_label(): {*line.get_xdata()} for line in turns.lines}
    assert points == {"bounces": {2e-3, 4e-3}, "falls only": {1e-4, 1e-1}}
    (container,) = losses.containers
    np.testing.assert_allclose(container.lines[0].get_ydata(), [6.0, 5.0, 5.2, 6.5])
    assert {panel.get_xscale() for panel in (shares, turns, losses)} == {"log"}


@pytest.mark.parametrize(
    ("change", "name"),
    [({"rates": ()}, "rates"), ({"rates": (1e-3, -1e-3)}, "rates"), ({"rates": (0.0,)}, "rates"),
     ({"rates": (1e-3, 1e-3)}, "rates"), ({"layers": 0}, "layers"), ({"glance": 1}, "glance"),
     ({"glance": 5}, "corpus"), ({"activation": "step"}, "activation")],
)  # fmt: skip
def test_an_error_names_the_field(change, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_paper_preset_has_seven_rates_evenly_spaced_in_their_logarithm():
    config = STUDY.presets["paper"].config
    assert len(config.rates) == 7
    np.testing.assert_allclose(np.diff(np.log10(config.rates)), 4 / 6, atol=2e-3)
    assert (config.layers, config.rates[0], config.rates[-1]) == (5, 1e-6, 1e-2)
