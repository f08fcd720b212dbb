from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from joma.arguments import InputError
from joma.studies.text.learning_rates import (
    CLAIMS,
    LEAST,
    STUDY,
    Config,
    best,
    bounces,
    cost,
    draw_entropy,
    draw_layers,
    draw_rates,
    hastening,
    kept,
    measured_in,
    run,
)
from joma.study import Context

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


def made_up(shapes, losses, *, noise=0.01, seeds=3, layers=1):
    """A run whose entropy has a known shape at each rate, with the same noise at every point."""
    rng = np.random.default_rng(3)
    clean = np.array([SHAPES[name](STEPS, rate) for rate, name in shapes.items()])
    noisy = clean[:, None, :, None, None] + noise * rng.standard_normal((len(shapes), seeds, len(STEPS), layers, 1))
    entropy = xr.DataArray(noisy, dims=("rate", "seed", "step", "layer", "head"))
    loss = np.tile(np.array(losses, float)[:, None, None], (1, seeds, len(STEPS)))
    made = xr.Dataset({"entropy": entropy, "valid_loss": (("rate", "seed", "step"), loss)})
    made = made.assign_coords(rate=[*shapes], seed=range(seeds), step=STEPS)
    return measured_in(made)


@pytest.fixture(scope="module")
def known():
    return made_up({1e-4: "falls", 2e-3: "turns", 4e-3: "turns", 1e-1: "collapses"}, [6.0, 5.0, 5.2, 6.5])


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def verdicts(made, preset):
    return {claim.name: claim.judge(made, preset)["verdict"] for claim in CLAIMS}


def test_only_what_falls_and_comes_back_is_a_bounce():
    shapes = {0.001: "falls", 0.002: "turns", 0.003: "rises", 0.004: "collapses"}
    found = made_up(shapes, [5.0] * 4).bounce.mean("seed")
    np.testing.assert_allclose(found, [0, 0.5, 0, 0], atol=0.03)


def test_a_fall_is_worth_no_more_than_its_return():
    """From 2 down to 1 and back to 1.3: the lesser, the return, counts, less what noise makes of it."""
    at = np.arange(40)
    curve = np.where(at < 20, 2 - at / 20, 1 + 0.3 * (at - 20) / 19)
    entropy = xr.DataArray(curve[None, :, None, None], dims=("seed", "step", "layer", "head"), coords={"step": at})
    found = bounces(entropy)
    assert float(found.turn[0]) == 20
    np.testing.assert_allclose(found.recovery, 0.3)
    np.testing.assert_allclose(found.bounce, (found.recovery - found.chance) / 2)


def test_the_minimum_comes_sooner_as_one_over_the_rate(known):
    """Where entropy is least at step 1 / rate the slope is −1."""
    np.testing.assert_allclose(known.turn.sel(rate=[2e-3, 4e-3]).mean("seed"), [500, 250], atol=20)
    np.testing.assert_allclose(hastening(known), -1, atol=0.1)
    assert np.isnan(hastening(known.sel(rate=[1e-4, 2e-3, 1e-1])))


def apart(rates, turns):
    """A run of two layers: one falls to the end; the other is least at step `turns` / rate, its recovery as large."""
    rng = np.random.default_rng(1)
    falls = [2.5 - 0.9 * STEPS / 1000 for _ in rates]
    comes = [2.0 + 0.7 * abs(np.minimum(STEPS * rate / turns, 2.0) - 1.0) for rate in rates]
    clean = np.stack([falls, comes], axis=-1)[:, None, :, :, None]
    entropy = xr.DataArray(clean + 0.005 * rng.standard_normal((len(rates), 3, len(STEPS), 2, 1)),
                           dims=("rate", "seed", "step", "layer", "head"))  # fmt: skip
    loss = xr.zeros_like(entropy.isel(layer=0, head=0)) + 5.0
    made = xr.Dataset({"entropy": entropy, "valid_loss": loss})
    return measured_in(made.assign_coords(rate=[*rates], seed=range(3), step=STEPS, layer=[0, 1], head=[0]))


def test_a_layer_that_comes_back_is_seen_where_the_mean_hides_it():
    made = apart((1e-4, 2e-4), turns=0.02)  # steps 200 and 100, of 1,000
    assert float(made.layer_bounce.sel(layer=0).max()) == 0
    np.testing.assert_allclose(made.layer_bounce.sel(layer=1), 0.7 / 2.7, atol=0.02)
    np.testing.assert_allclose(made.layer_turn.sel(layer=1).mean("seed"), [200, 100], atol=20)
    found = verdicts(made, "paper")
    assert found["bounces-1e-4"] == "does not hold"
    assert found["layer-1e-4"] == found["layer-sooner"] == "holds"
    np.testing.assert_allclose(hastening(made, "layer_bounce", "layer_turn"), -1, atol=0.2)
    assert draw_layers(made).axes


def test_layers_have_levels_of_their_own():
    """Two layers whose minima are at 0.1/rate and 0.4/rate, at other rates each: through all points it is no slope."""
    one, other = apart((1e-3, 2e-3, 4e-3), turns=0.1), apart((1e-3, 2e-3, 4e-3), turns=0.4)
    both = xr.concat([one.sel(layer=1), other.sel(layer=1)], "layer")
    both["layer_bounce"] = both.layer_bounce.where(
        (both.rate == 2e-3) | ((both.rate < 2e-3) == xr.DataArray([True, False], dims="layer"))
    )
    np.testing.assert_allclose(hastening(both, "layer_bounce", "layer_turn"), -1, atol=0.25)
    one_level = both[["layer_bounce", "layer_turn"]].isel(seed=0, drop=True).rename(layer="seed")
    assert hastening(one_level, "layer_bounce", "layer_turn") > -0.2


def test_claims_hold_on_the_expected_course_alone(known):
    expected = {claim.name: "holds" for claim in CLAIMS} | dict.fromkeys(
        ("bounces-1e-4", "layer-1e-4"),
        "does not hold",  # it only falls
    )
    assert verdicts(known, "paper") == expected
    assert best(known) == 2e-3
    np.testing.assert_allclose(cost(known), 1.5)
    np.testing.assert_allclose(kept(known).sel(rate=1e-1), 0, atol=0.02)


def test_claims_fail_where_nothing_bounces_or_collapses():
    found = verdicts(made_up({2e-3: "turns", 4e-3: "falls", 5e-3: "falls"}, [6.0, 5.0, 5.01]), "paper")
    assert {name for name, verdict in found.items() if verdict == "holds"} == {"bounces"}
    flat = verdicts(made_up({1e-3: "falls", 2e-3: "falls"}, [5.0, 5.0]), "paper")
    assert flat["bounces"] == flat["sooner"] == flat["best"] == "does not hold"


def test_a_run_in_which_nothing_falls_is_drawn(tmp_path):
    draw_rates(made_up({1e-4: "rises", 1e-3: "rises"}, [5.0, 5.0])).savefig(tmp_path / "rates.svg")


def test_the_papers_rate_is_found_among_rounded_ones():
    made = made_up({1e-4 * (1 + 1e-9): "falls", 1e-3: "turns"}, [5.0, 5.0])
    assert verdicts(made, "paper")["bounces-1e-4"] == "does not hold"
    claim = next(claim for claim in CLAIMS if claim.name == "bounces-1e-4")
    assert claim.judge(made, "paper")["measured"]["values"] == [0.0] * 3


def test_the_papers_rate_is_not_judged_where_it_was_not_trained(known):
    found = verdicts(known.sel(rate=[2e-3, 1e-1]), "paper")
    assert found["bounces-1e-4"] == "not tested at this preset"
    assert found["sooner"] == "does not hold"  # one rate of two bounces: nothing was left out


def test_a_seed_lost_has_collapsed_and_learned_nothing(known):
    lost = known.copy(deep=True)
    for name in ("entropy", "valid_loss"):
        lost[name].loc[{"rate": 1e-1, "seed": 1, "step": slice(500, None)}] = np.nan
    assert float(kept(lost).sel(rate=1e-1, seed=1)) == 0
    assert float(cost(lost).sel(seed=1)) == np.inf
    assert best(lost) == 2e-3
    assert len(draw_rates(lost).axes) == len(draw_entropy(lost).axes) + 2 == 3


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
    alone = run(replace(SMALL, rates=(1e-2,)), Context((1,)))
    own = alone.valid_loss.sel(rate=1e-2, seed=1)
    np.testing.assert_allclose(own, trajectory.valid_loss.sel(rate=1e-2, seed=1), rtol=1e-5)


def test_it_is_judged_and_drawn_from_the_dataset_alone(trajectory, known):
    assert "holds" not in {verdicts(trajectory, "paper")[name] for name in ("bounces", "sooner", "best")}
    for made, layers in ((trajectory, 2), (known, 1)):
        assert len(draw_entropy(made).axes) == layers
        assert len(draw_rates(made).axes) == 3


@pytest.mark.parametrize(
    ("change", "name"),
    [({"rates": ()}, "rates"), ({"rates": (1e-3, -1e-3)}, "rates"), ({"rates": (0.0,)}, "rates"),
     ({"rates": (1e-3, 1e-3)}, "rates"), ({"layers": 0}, "layers"), ({"glance": 1}, "glance"),
     ({"glance": 5}, "corpus"), ({"activation": "step"}, "activation")],
)  # fmt: skip
def test_bad_config(change, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_presets_hold_the_papers_rates():
    paper, quick = (STUDY.presets[name].config for name in ("paper", "quick"))
    assert len(paper.rates) == 7
    np.testing.assert_allclose(np.diff(np.log10(paper.rates)), 4 / 6, atol=2e-3)
    assert (paper.layers, paper.steps, paper.rates[0], paper.rates[-1]) == (5, 58_560, 1e-6, 1e-2)
    assert quick.corpus == "python-reference"
    assert 0 < LEAST < 1
