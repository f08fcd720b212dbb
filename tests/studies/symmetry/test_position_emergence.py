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
    READOUTS,
    STUDY,
    TASKS,
    Config,
    adjacency_above_null,
    draw_adjacency,
    draw_decodability,
    outcome,
    readout_gain,
    run,
    trained_readouts,
    untrained_readouts,
    validation_windows,
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


def ideal_run(**changes):
    """A run in which every claim holds, with the same numbers for every seed and at every step."""
    seeds, steps, levels, orders = 3, 2, 4, 5
    values = {"embedding": 0.04, "readout": 0.2, "score": 0.7, "first": 0.5, "null": 0.6} | changes
    shape = (2, seeds, steps, levels)
    decodability, scores = np.full(shape, values["readout"]), np.full(shape, values["score"])
    decodability[..., 0], scores[..., 0] = values["embedding"], values["first"]
    null = np.full((*shape, orders), values["null"])
    null[..., 1:] = 0.4
    variables = {
        "decodability": (("task", "seed", "step", "level"), decodability),
        "error": (("task", "seed", "step", "level"), np.full(shape, 0.01)),
        "adjacency": (("task", "seed", "step", "level"), scores),
        "null": (("task", "seed", "step", "level", "order"), null),
    }
    dims = ("task", "init", "width", "seed", "level")
    for name in READOUTS:
        trained = (null.max(-1) if name == "null" else variables[name][1])[:, None, None, :, 0]
        variables[f"random_{name}"] = (dims, np.tile(trained, (1, len(INITS), 2, 1, 1)))
    coordinates = {"task": list(TASKS), "seed": range(seeds), "step": [0, 9], "init": list(INITS), "width": [8, 16]}
    return xr.Dataset(variables, coords=coordinates).assign(chance=("task", [0.1, 0.04]))


def verdicts(run, preset="paper"):
    return {claim.name: claim.judge(run, preset)["verdict"] for claim in CLAIMS}


def test_both_tasks_are_measured_at_every_level_and_step(trajectory):
    sizes = {"task": 2, "seed": 2, "step": 3, "level": 3, "position": 6, "order": 4, "init": 3, "width": 2}
    assert dict(trajectory.sizes) == sizes
    np.testing.assert_allclose(trajectory.chance, [1 / 5, 1 / 6])
    assert int(trajectory.by_position.sel(task="addition", step=0).notnull().sum("position")[0, 0]) == 5
    assert bool((trajectory.decodability.isel(step=-1) != trajectory.decodability.isel(step=0)).any())


def test_accuracy_over_positions_is_the_accuracy(trajectory):
    np.testing.assert_allclose(trajectory.by_position.mean("position"), trajectory.decodability, rtol=1e-12)


def test_training_starts_from_the_untrained_model_of_the_same_width_and_init(trajectory):
    start, same = trajectory.isel(step=0), {"init": SMALL.init, "width": SMALL.width}
    for name in ("decodability", "error", "adjacency"):
        np.testing.assert_array_equal(start[name], trajectory[f"random_{name}"].sel(same))
    np.testing.assert_array_equal(start.null.max("order"), trajectory.random_null.sel(same))


@pytest.mark.parametrize("task", TASKS)
def test_an_untrained_model_has_the_init_and_width_of_its_label(trajectory, task):
    """One cell by hand: seed 1, weights as in GPT-2, width 12."""
    context = Context((0, 1))
    if task == "addition":
        tokens, types = sequences(addition_training.split_pairs(SMALL, context).test[:10], digits=1)[:, :-1], 12
    else:
        text = language_training.read_text(
            language_training.LanguageSetting(tokeniser="bytes", length=6, batch=4), context
        )
        tokens, types = text.valid[:1, :60].reshape(10, 6), text.types
    config = DecoderConfig(types, 12, 2, 2, activation="gelu", init="small")
    model = Decoder(config, generators=[torch.Generator().manual_seed(1)])
    with torch.no_grad():
        states = torch.stack(model.activations(tokens, ["residual"])["residual"])[:, 0]
    readouts = untrained_readouts(trajectory, task).sel(seed=1)
    np.testing.assert_allclose(readouts.decodability, position_decodability(states).accuracy, atol=1e-12)
    np.testing.assert_allclose(readouts.adjacency, adjacency(states[:, :5], nulls=4).score, atol=1e-9)


def test_validation_windows_have_the_full_length_and_are_in_order():
    text = language_training.read_text(
        language_training.LanguageSetting(tokeniser="bytes", length=7, batch=4, columns=3), Context((0,))
    )
    windows = validation_windows(text, 5)
    assert windows.shape == (5, 7)
    np.testing.assert_array_equal(windows.flatten(), text.valid[0, :35])
    with pytest.raises(InputError, match="smaller `length`"):
        validation_windows(replace(text, valid=text.valid[:, :7]), 5)
    with pytest.raises(InputError, match="at least 5 windows of 7 tokens to validate on, got 3"):
        validation_windows(replace(text, valid=text.valid[:, :8]), 5)  # one window in each of three columns


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_every_claim_can_hold(preset):
    assert set(verdicts(ideal_run(), preset).values()) == {"holds"}


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"embedding": 0.1}, {"embeddings-text"}),
        ({"readout": 0.03}, {f"{name}-{task}" for name in ("random", "trained") for task in TASKS}),
        ({"null": 0.71}, {f"adjacency-{name}-{task}" for name in ("random", "trained") for task in TASKS}),
        ({"first": 0.6}, {"adjacency-embeddings-text"}),
    ],
)
def test_every_claim_can_fail(change, failing):
    assert {name for name, verdict in verdicts(ideal_run(**change)).items() if verdict == "does not hold"} == failing


def test_every_untrained_layer_must_be_above_the_null_but_only_one_trained_layer():
    run = ideal_run()
    run.random_adjacency[{"init": list(INITS).index("small"), "width": -1, "level": 2}] = 0.55
    run.adjacency[{"step": -1, "level": [1, 3]}] = 0.55
    judged = verdicts(run)
    assert judged["adjacency-random-text"] == "does not hold"
    assert judged["adjacency-trained-text"] == "holds"
    np.testing.assert_allclose(adjacency_above_null(trained_readouts(run, "text"))[0], [-0.05, 0.1, -0.05])


def test_only_the_widest_untrained_model_with_weights_of_gpt_2_is_judged():
    run = ideal_run()
    run.random_adjacency[{"init": list(INITS).index("linear")}] = 0.55
    run.random_adjacency[{"width": 0}] = 0.55
    assert set(verdicts(run).values()) == {"holds"}


def test_the_readout_gain_is_the_last_layers_over_the_embeddings():
    run = ideal_run(embedding=0.1, readout=0.15)
    run.decodability[{"level": 2}] = 0.9
    np.testing.assert_allclose(readout_gain(trained_readouts(run, "text")), 0.05)
    np.testing.assert_allclose(readout_gain(untrained_readouts(run, "addition")), 0.05)


def test_a_gain_within_the_spread_of_seeds_is_undecided():
    run = ideal_run()
    run.decodability.loc[{"task": "text", "step": 9}] = 0.2
    run.decodability[{"task": 1, "step": -1, "level": -1}] = [0.19, 0.2, 0.23]
    (record,) = [claim.judge(run, "quick") for claim in CLAIMS if claim.name == "trained-text"]
    assert (record["verdict"], record["reason"][:9]) == ("not tested", "undecided")
    assert verdicts(run)["trained-addition"] == "holds"


def test_the_outcome_has_the_numbers_of_the_run():
    run = ideal_run()
    run.decodability[{"task": 1, "step": -1, "level": -1}] = [0.3, 0.4, 0.5]
    assert outcome(run) == (
        "In sums a readout of the last layer finds the position in 20 % of cases with the random weights of the widest "
        "model, and in 20 % after training (embeddings: 4 %, chance: 10 %); in text in 20 % and 40 % (embeddings: 4 %, "
        "chance: 4 %)."
    )


def test_every_claim_has_a_kind_a_short_statement_and_its_measure():
    assert all(len(claim.statement) <= 110 and claim.quantity for claim in CLAIMS)
    assert {claim.kind for claim in CLAIMS} == {"reading", "control", "check"}


def test_widths_are_sorted_and_repetitions_are_ignored(trajectory):
    xr.testing.assert_identical(run(replace(SMALL, widths=(12, 8, 12)), Context((0, 1))), trajectory)


LEVELS = ["embeddings", "layer 0", "layer 1"]


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def curve(axes, label):
    return next(np.asarray(line.get_ydata()) for line in axes.lines if line.get_label() == label)


def test_decodability_is_drawn_over_training_and_by_position(trajectory):
    figure = draw_decodability(trajectory)
    assert titles(figure) == [
        "(a)  Sums, during training", "(b)  Text, during training", "(c)  Sums, at the end", "(d)  Text, at the end",
    ]  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*LEVELS, "chance"]
    for column, task in enumerate(TASKS):
        over_training, by_position = figure.axes[column], figure.axes[2 + column]
        readouts = trajectory.sel(task=task).mean("seed")
        assert (over_training.get_xlabel(), by_position.get_xlabel()) == ("step + 1", "position")
        np.testing.assert_allclose(curve(over_training, "layer 1"), readouts.decodability.isel(level=2))
        expected = readouts.by_position.isel(level=2, step=-1).dropna("position")
        np.testing.assert_allclose(by_position.lines[2].get_ydata(), expected)
        np.testing.assert_array_equal(by_position.lines[2].get_xdata(), range(5 if task == "addition" else 6))
        for panel in (over_training, by_position):
            np.testing.assert_array_equal(curve(panel, "chance"), [float(readouts.chance)] * 2)
            assert panel.get_ylim()[0] == 0


def test_adjacency_is_drawn_over_training_and_by_width(trajectory):
    figure = draw_adjacency(trajectory)
    random = ["(c)  Sums, random weights", "(d)  Text, random weights"]
    assert titles(figure) == ["(a)  Sums, during training", "(b)  Text, during training", *random]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*LEVELS, "random orders, 95 %"]
    assert [text.get_text() for text in figure.axes[2].get_legend().get_texts()] == list(INITS)
    assert figure.axes[0].get_ylim() == (0.25, 1.12)
    for column, task in enumerate(TASKS):
        scores = trajectory.sel(task=task)
        np.testing.assert_allclose(curve(figure.axes[column], "layer 0"), scores.adjacency.isel(level=1).mean("seed"))
        panel, last = figure.axes[2 + column], scores.isel(level=-1).mean("seed")
        assert [label.get_text() for label in panel.get_xticklabels()] == ["8", "12"]
        for bars, init in zip(panel.containers, INITS, strict=True):
            np.testing.assert_allclose(bars.lines[0].get_ydata(), last.random_adjacency.sel(init=init))
        dotted = [line.get_ydata() for line in panel.lines if line.get_linestyle() == ":"]
        np.testing.assert_allclose(dotted, last.random_null.transpose("init", "width"))


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
def test_a_config_that_cannot_be_run_is_refused_by_field(change, named):
    with pytest.raises(InputError, match=f"`{named}`"):
        run(replace(SMALL, **change), Context((0,)))


def test_the_quick_preset_needs_no_download():
    assert load("position-emergence") is STUDY
    assert STUDY.presets["quick"].config.corpus == "python-reference"
