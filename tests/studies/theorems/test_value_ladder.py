"""The ladder: what each rung changes, its loss against a loop over positions, and the law on its exact rungs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from joma.arguments import InputError
from joma.studies.theorems import value_ladder
from joma.studies.theorems.value_ladder import (
    RUNGS,
    build_rung,
    check_ladder,
    draw_batches,
    draw_sequences,
    ladder,
    rung_loss,
    train_rung,
)
from joma.studies.theorems.value_training import Config, arrays, rounding
from joma.study import Context

SMALL = Config(
    classes=3, distinct=3, common=2, queries=2, values=3, head_width=2, hidden=4, samples=6, length=4, batch=2,
    ladder_steps=25,
)  # fmt: skip
CONTEXT = Context((0, 1))
BY_NAME = {rung.name: rung for rung in RUNGS}


def test_each_rung_changes_one_premise_of_the_rung_before():
    for lower, upper in pairwise(RUNGS):
        changed = {name for name, value in vars(upper).items() if value != getattr(lower, name)} - {"name"}
        assert len(changed) == 1
        assert all(getattr(upper, name) for name in changed)


@pytest.mark.parametrize("name", ["positions", "minibatch"])
def test_the_loss_is_the_mean_surprisal_of_the_next_token(name):
    """Each position alone: the model on the tokens up to it must predict the one after it."""
    rung, step = BY_NAME[name], 3
    model, token = build_rung(SMALL, CONTEXT, rung), draw_sequences(SMALL, CONTEXT)
    loss = rung_loss(SMALL, CONTEXT, rung)(model, torch.tensor(step))
    for seed in (0, 1):
        chosen = draw_batches(SMALL, CONTEXT)[seed, step] if name == "minibatch" else torch.arange(SMALL.samples)
        surprisals = []
        for sequence in token[seed][chosen]:
            for position in range(SMALL.length):
                prefix = sequence[None, : position + 1]
                output = model(prefix)[seed, 0, -1]
                surprisals.append(functional.cross_entropy(output, sequence[position + 1]))
        torch.testing.assert_close(loss[seed], torch.stack(surprisals).mean())


def test_with_one_query_the_whole_context_predicts_the_last_token():
    model, token = build_rung(SMALL, CONTEXT, RUNGS[0]), draw_sequences(SMALL, CONTEXT)
    loss = rung_loss(SMALL, CONTEXT, RUNGS[0])(model, torch.tensor(0))
    counts = functional.one_hot(token[..., :-1], SMALL.tokens).double().mean(dim=-2)
    outputs = model(counts)
    expected = [functional.cross_entropy(outputs[seed], token[seed, :, -1]) for seed in (0, 1)]
    torch.testing.assert_close(loss, torch.stack(expected))


@pytest.fixture(scope="module")
def small():
    return ladder(SMALL, CONTEXT)


def test_the_law_is_exact_on_three_rungs_and_on_no_other(small):
    full, exact = small.ladder_error.sel(correction="full"), ["block", "positions", "minibatch"]
    bound = rounding(SMALL, SMALL.ladder_steps, SMALL.samples * SMALL.length)
    assert float(small.ladder_residual.sel(rung=exact).max()) <= bound
    assert float(full.isel(ladder_step=-1).sel(rung=["product", "learned", "adam"]).min()) > 0.01


@pytest.mark.parametrize("name", ["block", "minibatch", "adam"])
def test_correlation_is_that_of_the_changes(name, monkeypatch, small):
    """Of Σ_m z with the growth of ‖p‖² less frequency times its sum, both recorded in the same training."""
    paths = []
    monkeypatch.setattr(value_ladder, "arrays", lambda trajectory: paths.append(arrays(trajectory)) or paths[-1])
    correlation = train_rung(SMALL, CONTEXT, BY_NAME[name]).correlation
    (path, finite), token = paths[0], draw_sequences(SMALL, CONTEXT)
    assert finite.all()
    for seed in (0, 1):
        logits, squares = path["z"][:, seed].sum(axis=-2), (path["p"][:, seed] ** 2).sum(axis=-1)
        prefixes = [
            sequence[: end + 1]
            for sequence in token[seed, :, :-1]
            for end in (range(SMALL.length) if BY_NAME[name].all_positions else [SMALL.length - 1])
        ]
        frequency = np.mean([np.bincount(prefix, minlength=SMALL.tokens) / len(prefix) for prefix in prefixes], axis=0)
        growth = squares[-1] - squares[0]
        expected = np.corrcoef(logits[-1] - logits[0], growth - frequency * growth.sum())[0, 1]
        assert float(correlation.isel(step=-1, seed=seed)) == pytest.approx(expected, abs=1e-9)
    assert not small.ladder_correlation.isel(ladder_step=-1).isnull().any()


def test_a_seed_is_the_same_alone_and_among_others(small):
    alone = train_rung(SMALL, Context((1,)), BY_NAME["minibatch"])
    together = small.sel(rung="minibatch", seed=1).ladder_loss
    np.testing.assert_allclose(alone.loss.sel(seed=1), together, rtol=1e-10)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"batch": 7}, "batch"), ({"length": 0}, "length"), ({"samples": 0}, "batch"), ({"rate": 0.0}, "rate"),
     ({"adam_rate": -1.0}, "adam_rate"), ({"hidden": 0}, "hidden"), ({"values": 0}, "values")],
)  # fmt: skip
def test_bad_configs_are_named(changes, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        check_ladder(replace(SMALL, **changes), CONTEXT)
