from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from addition_runs import SMALL, random_models
from joma.arguments import InputError
from joma.data import addition as data
from joma.models.transformer import Decoder
from joma.noise import key
from joma.studies.symmetry import addition_training
from joma.studies.symmetry.addition_arms import Arm, select_arms
from joma.study import Context
from joma.train import Record, fit


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_surprisal_is_that_of_every_prefix_in_a_pass_of_its_own(mask):
    model = random_models(mask, "learned")
    tokens = data.sequences(torch.tensor([[[3, 4], [9, 9]], [[1, 0], [5, 8]]]), digits=1)
    surprisal = addition_training.surprisal(model, tokens, 1)
    for digit, length in enumerate((4, 5)):
        log_p = model(tokens[..., :length])[:, :, -1].log_softmax(dim=-1)
        torch.testing.assert_close(surprisal[..., digit], -log_p.gather(-1, tokens[..., length : length + 1])[..., 0])


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_no_digit_is_an_input_of_its_own_prediction(mask):
    model, tokens = random_models(mask), data.encode(["3+4=07", "3+4=17"]).expand(2, 2, 6)
    first = addition_training.surprisal(model, tokens, 1)[..., 0]
    log_p = model(tokens[..., :4])[:, :, -1].log_softmax(dim=-1)
    torch.testing.assert_close(first, -torch.stack([log_p[:, 0, 0], log_p[:, 1, 1]], dim=1))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_exact_match_is_the_share_that_greedy_generation_gets_right(mask, monkeypatch):
    """A few pairs are trained on, so that some sums are right and some are not."""
    model = random_models(mask, "learned")
    tokens = data.sequences(torch.tensor([[3, 4], [9, 9], [1, 0], [5, 8]]), digits=1)

    def loss(model, step):
        del step
        return addition_training.surprisal(model, tokens[:3], 1).mean(dim=(1, 2))

    optimiser = addition_training.optimiser(replace(SMALL, steps=60, rate=2e-2))
    fit(model, loss, optimiser=optimiser, steps=60, record=Record(at=[0]))
    generated = tokens[:, :4].expand(2, 4, 4)
    with torch.no_grad():
        for _ in range(2):
            generated = torch.cat([generated, model(generated)[:, :, -1:].argmax(dim=-1)], dim=-1)
    expected = (generated == tokens).all(dim=-1).double().mean(dim=-1)
    assert 0 < float(expected.min()) < 1
    for max_tokens in (1, 1 << 13):  # one pair in a pass, and all in one
        monkeypatch.setitem(addition_training.MAX_TOKENS, "cpu", max_tokens)
        torch.testing.assert_close(addition_training.exact_match(model, tokens, 1), expected)


def test_the_learning_rate_rises_and_falls():
    factor = addition_training.optimiser(replace(SMALL, steps=100, warm_up=10)).schedules["*"]
    factors = [float(factor(torch.tensor(step))) for step in (0, 4, 50, 75, 100)]
    np.testing.assert_allclose(factors, [0.1, 0.5, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0], atol=1e-7)


def test_the_split_is_the_same_for_all_seeds_and_the_test_pairs_are_shuffled():
    pairs = addition_training.split_pairs(SMALL, Context((0, 1)))
    other = addition_training.split_pairs(SMALL, Context((7,)))
    assert torch.equal(pairs.train, other.train)
    assert torch.equal(pairs.test, other.test)
    plain = data.split(1, share=0.3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pairs.train, plain.train)
    assert not torch.equal(pairs.test, plain.test)
    assert sorted(pairs.test.tolist()) == plain.test.tolist()


def test_pairs_are_written_as_the_setting_says():
    pairs = torch.tensor([[12, 34]])
    setting = replace(SMALL, digits=2)
    assert data.decode(addition_training.encode_pairs(setting, pairs)) == ["12+34=046"]
    assert data.decode(addition_training.encode_pairs(replace(setting, reverse=True), pairs)) == ["12+34=640"]


def test_an_arm_trained_among_others_trains_as_it_would_alone(addition_run):
    """The single model, of one seed, has no residuals around attention by its config, and torch's own AdamW."""
    context = Context((1,))
    pairs = addition_training.split_pairs(SMALL, context)
    config = replace(addition_training.decoder_config(SMALL, Arm()), residual=((False, True),) * 2)
    model = Decoder(config, generators=context.seed_generators())
    adamw = torch.optim.AdamW(model.parameters(), lr=SMALL.rate, weight_decay=SMALL.weight_decay)
    expected = {}
    for step in range(SMALL.steps + 1):
        batch = data.draw(pairs.train, size=SMALL.batch, key=key(torch.tensor([1]), step))
        loss = addition_training.surprisal(model, data.sequences(batch, digits=1), 1).mean()
        expected[step] = float(loss.detach())
        rise, fall = (step + 1) / SMALL.warm_up, (1 + math.cos(math.pi * step / SMALL.steps)) / 2
        adamw.param_groups[0]["lr"] = SMALL.rate * min(rise, fall)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    losses = addition_run.loss.sel(arm="attention all", seed=1)
    np.testing.assert_allclose(losses, [expected[int(step)] for step in losses.step], rtol=1e-4)


@pytest.mark.parametrize("names", [("none full", "none causal"), ("rotary causal", "learned causal")])
def test_arms_of_several_kinds_do_not_train_as_one_model(names):
    context = Context((0,))
    train_pairs = addition_training.split_pairs(SMALL, context).train
    with pytest.raises(InputError, match="`arms` must be of one kind"):
        addition_training.train(SMALL, context, train_pairs, select_arms(names, 2), label="x", record=Record())


def test_at_least_as_many_pairs_are_held_out_as_the_readout_has_folds():
    addition_training.check_setting(replace(SMALL, held=5 / 55))
    with pytest.raises(InputError, match="at least 5 of 55 pairs"):
        addition_training.check_setting(replace(SMALL, held=4 / 55))
