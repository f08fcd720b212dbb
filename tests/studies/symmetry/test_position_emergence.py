from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.data.addition import sequences
from joma.models.transformer import INITS, Decoder, DecoderConfig
from joma.probes.position import adjacency, position_decodability
from joma.studies import load
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.position_emergence import (
    CLAIMS,
    RANDOM,
    STUDY,
    TASKS,
    Config,
    at_end,
    at_random,
    draw_adjacency,
    draw_decodability,
    neighbours,
    run,
    surely,
    windows,
)
from joma.studies.text import language_training
from joma.study import Context

SMALL = Config(
    digits=1, layers=2, heads=2, width=8, batch=8, steps=4, rate=1e-2, warm_up=2, held=0.3, tokeniser="bytes", length=6,
    windows=4, records=3, asked=12, probed=10, compared=5, nulls=4, widths=(8, 12),
)  # fmt: skip


@pytest.fixture(scope="module")
def trajectory():
    return run(SMALL, Context((0, 1)))


def made_up(**changes):
    """A run in which all that is said holds, with the same numbers for every seed and at every step."""
    seeds, steps, levels, orders = 3, 2, 4, 5
    values = {"embedding": 0.04, "readout": 0.2, "score": 0.7, "first": 0.5, "null": 0.6} | changes
    lead = (2, seeds, steps, levels)
    read, score = np.full(lead, values["readout"]), np.full(lead, values["score"])
    read[..., 0], score[..., 0] = values["embedding"], values["first"]
    null = np.full((*lead, orders), values["null"])
    null[..., 1:] = 0.4
    variables = {
        "decodability": (("task", "seed", "step", "level"), read),
        "error": (("task", "seed", "step", "level"), np.full(lead, 0.01)),
        "adjacency": (("task", "seed", "step", "level"), score),
        "null": (("task", "seed", "step", "level", "order"), null),
    }
    dims = ("task", "init", "width", "seed", "level")
    for name in RANDOM:
        own = (null.max(-1) if name == "null" else variables[name][1])[:, None, None, :, 0]
        variables[f"random_{name}"] = (dims, np.tile(own, (1, len(INITS), 2, 1, 1)))
    coordinates = {"task": list(TASKS), "seed": range(seeds), "step": [0, 9], "init": list(INITS), "width": [8, 16]}
    return xr.Dataset(variables, coords=coordinates).assign(chance=("task", [0.1, 0.04]))


def verdicts(made, preset="paper"):
    return {claim.name: claim.judge(made, preset)["verdict"] for claim in CLAIMS}


def test_both_tasks_are_measured_at_every_level_and_step(trajectory):
    sizes = {"task": 2, "seed": 2, "step": 3, "level": 3, "position": 6, "order": 4, "init": 3, "width": 2}
    assert dict(trajectory.sizes) == sizes
    np.testing.assert_allclose(trajectory.chance, [1 / 5, 1 / 6])
    assert int(trajectory.by_position.sel(task="addition", step=0).notnull().sum("position")[0, 0]) == 5
    assert bool((trajectory.decodability.isel(step=-1) != trajectory.decodability.isel(step=0)).any())


def test_accuracy_over_positions_is_the_accuracy(trajectory):
    np.testing.assert_allclose(trajectory.by_position.mean("position"), trajectory.decodability, rtol=1e-12)


def test_a_model_starts_as_the_untrained_one_of_its_kind(trajectory):
    """The trained model before its first step is that with random weights of the same law and width."""
    start, same = trajectory.isel(step=0), {"init": SMALL.init, "width": SMALL.width}
    for name in ("decodability", "error", "adjacency"):
        np.testing.assert_array_equal(start[name], trajectory[f"random_{name}"].sel(same))
    np.testing.assert_array_equal(start.null.max("order"), trajectory.random_null.sel(same))


@pytest.mark.parametrize("task", TASKS)
def test_untrained_models_are_what_they_are_called(trajectory, task):
    """One cell by hand: seed 1, weights as in GPT-2, width 12."""
    context = Context((0, 1))
    if task == "addition":
        tokens, types = sequences(addition_training.pairs(SMALL, context).test[:10], digits=1)[:, :-1], 12
    else:
        text = language_training.read_text(language_training.Setting(tokeniser="bytes", length=6, batch=4), context)
        tokens, types = text.valid[:1, :60].reshape(10, 6), text.types
    parts = DecoderConfig(types, 12, 2, 2, activation="gelu", init="small")
    model = Decoder(parts, generators=[torch.Generator().manual_seed(1)])
    with torch.no_grad():
        states = torch.stack(model.activations(tokens, ["residual"])["residual"])[:, 0]
    found = at_random(trajectory, task).sel(seed=1)
    np.testing.assert_allclose(found.decodability, position_decodability(states).accuracy, atol=1e-12)
    np.testing.assert_allclose(found.adjacency, adjacency(states[:, :5], nulls=4).score, atol=1e-9)


def test_windows_are_whole_and_in_order():
    text = language_training.read_text(
        language_training.Setting(tokeniser="bytes", length=7, batch=4, columns=3), Context((0,))
    )
    found = windows(text, 5)
    assert found.shape == (5, 7)
    np.testing.assert_array_equal(found.flatten(), text.valid[0, :35])
    with pytest.raises(InputError, match="smaller `length`"):
        windows(replace(text, valid=text.valid[:, :7]), 5)
    with pytest.raises(InputError, match="at least 5 windows of 7 tokens to validate on, got 3"):
        windows(replace(text, valid=text.valid[:, :8]), 5)  # one window in each of three columns


def test_all_that_is_said_can_hold():
    for preset in ("quick", "paper"):
        assert set(verdicts(made_up(), preset).values()) == {"holds"}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"embedding": 0.1}, {"embeddings-text"}),
        ({"readout": 0.08}, {f"{name}-{task}" for name in ("random", "trained") for task in TASKS}),
        ({"null": 0.71}, {f"adjacency-{name}-{task}" for name in ("random", "trained") for task in TASKS}),
        ({"first": 0.6}, {"adjacency-embeddings-text"}),
    ],
)
def test_what_is_wrong_is_seen(change, wrong):
    assert {name for name, verdict in verdicts(made_up(**change)).items() if verdict == "does not hold"} == wrong


def test_one_layer_decides_at_random_and_one_is_enough_when_trained():
    made = made_up()
    made.random_adjacency[{"init": list(INITS).index("small"), "width": -1, "level": 2}] = 0.55
    made.adjacency[{"step": -1, "level": [1, 3]}] = 0.55
    found = verdicts(made)
    assert found["adjacency-random-text"] == "does not hold"
    assert found["adjacency-trained-text"] == "holds"
    np.testing.assert_allclose(neighbours(at_end(made, "text"))[0], [-0.05, 0.1, -0.05])
    other = made_up()
    other.random_adjacency[{"init": list(INITS).index("linear")}] = 0.55  # neither this law is judged nor this width
    other.random_adjacency[{"width": 0}] = 0.55
    assert set(verdicts(other).values()) == {"holds"}


def test_better_is_counted_in_standard_errors():
    made = made_up(embedding=0.1, readout=0.15)
    np.testing.assert_allclose(surely(at_random(made, "text")), 0.05 / (0.01 * 2**0.5))


def test_the_widest_is_the_widest_in_whichever_order_widths_are_named(trajectory):
    made = run(replace(SMALL, widths=(12, 8, 12)), Context((0, 1)))
    xr.testing.assert_identical(made, trajectory)


@pytest.mark.parametrize("draw", [draw_decodability, draw_adjacency])
def test_it_is_drawn_from_the_dataset_alone(trajectory, draw):
    figure = draw(trajectory)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)", "(d)"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["embeddings", "layer 0", "layer 1"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"held": 0.0}, "held"),
        ({"digits": 4}, "digits"),
        ({"batch": 0}, "batch"),
        ({"rate": -1.0}, "rate"),
        ({"heads": 3}, "heads"),
        ({"length": 2}, "length"),
        ({"windows": 0}, "windows"),
        ({"compared": 0}, "compared"),
        ({"compared": -1}, "compared"),
        ({"widths": ()}, "widths"),
        ({"widths": (8, 0)}, "widths"),
        ({"widths": (9,)}, "widths"),
        ({"records": 1}, "records"),
        ({"probed": -1}, "probed"),
        ({"probed": 3}, "probed"),
        ({"probed": 4}, "probed"),
        ({"asked": 4}, "asked"),
        ({"nulls": 0}, "nulls"),
        ({"tokeniser": "words"}, "tokeniser"),
    ],
)
def test_bad_settings_are_named(change, named):
    with pytest.raises(InputError, match=f"`{named}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_it_is_registered():
    assert load("position-emergence") is STUDY
