"""The training of `bounce-cause`: what is frozen and when, and the measures, each beside an independent answer."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from joma.arguments import InputError
from joma.models.transformer import Decoder
from joma.studies.text.bounce_cause_arms import PARTS, select_arms
from joma.studies.text.bounce_cause_training import (
    STREAM,
    CauseSetting,
    check_setting,
    freeze_steps,
    measure,
    measure_windows,
    memorised_text,
    memorising_floor,
    train_arms,
    train_batches,
    variant,
    with_final_weights,
)
from joma.studies.text.language_training import TextColumns, decoder_config, read_text
from joma.study import Context

SMALL = CauseSetting(
    tokeniser="bytes",
    width=8,
    hidden=6,
    length=8,
    batch=4,
    steps=9,
    every=1,
    rate=2e-2,
    sgd_rate=0.5,
    dropout_at="none",
    memorised=2,
    attention_rate=1e-2,
    attention_steps=5,
    glance=60,
)
CONTEXT = Context((0, 3))


@pytest.fixture(scope="module")
def text():
    return read_text(SMALL, CONTEXT)


def arms_of(*names, **options):
    return select_arms(names, **{"dropout": SMALL.dropout_at, "restart": True, **options})


def first_model(text, arm):
    config = decoder_config(SMALL, variant(arm), text.types)
    positions = [arm.positions] * len(CONTEXT.seeds)
    return Decoder(config, generators=CONTEXT.generators(STREAM), positions=positions)


def frozen_part(name):
    return next((part for part, patterns in PARTS.items() if any(fnmatchcase(name, p) for p in patterns)), None)


def test_an_arm_freezes_its_parts_and_nothing_else(text):
    arms = arms_of("value-path", "mlp-embedding", "head", "no-positions", "query-key")
    (_,), models = train_arms(SMALL, CONTEXT, text, arms)
    start = first_model(text, arms["free"])
    for number, arm in enumerate(arms.values()):
        for name, parameter in models["free"].named_parameters():
            before = start.get_parameter(name)
            for seed in range(2):
                same = bool((parameter[2 * number + seed] == before[seed]).all())
                assert same == (frozen_part(name) in arm.frozen), (arm.label, name)


def test_parts_are_frozen_later_from_each_seeds_step_on(text):
    later = np.array([0, 4])
    group = {"mlp-later": arms_of("mlp-later")["mlp-later"]}
    assert freeze_steps(group, 9, CONTEXT, later)["mlp"].tolist() == [0, 4]
    models = {}
    for steps in (4, 9):
        setting = dataclasses.replace(SMALL, steps=steps)
        models[steps] = train_arms(setting, CONTEXT, text, group, later_steps=later)[1]["mlp-later"]
    start = first_model(text, group["mlp-later"])
    for name in ("layers.0.lower.weight", "layers.0.upper.bias"):
        after_4, after_9 = (models[steps].get_parameter(name) for steps in (4, 9))
        assert torch.equal(after_9[0], start.get_parameter(name)[0])  # seed 0 never trains
        assert torch.equal(after_9[1], after_4[1])  # seed 3 trains for four steps
        assert not torch.equal(after_9[1], start.get_parameter(name)[1])
    assert not torch.equal(models[9].embedding, models[4].embedding)


@pytest.mark.parametrize(
    "name", ["value-path", "mlp-embedding", "linear", "no-norm", "one-adam", "no-positions", "sgd"]
)
def test_an_arm_trains_as_by_pytorchs_own_optimisers(text, name):
    """The comparison has one seed, parameters without gradients where they are frozen, and a new Adam every epoch."""
    short = dataclasses.replace(text, train=text.train[:, : 8 * 4 + 1])  # an epoch of four windows
    setting, arms = dataclasses.replace(SMALL, clip=0.3), arms_of(name, "head")
    trajectories, _ = train_arms(setting, CONTEXT, short, arms)
    (trajectory,) = [group for group in trajectories if name in group.arm]
    model = first_model(short, arms[name])
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen_part(parameter_name) not in arms[name].frozen)
    seed, losses = 1, []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(setting.steps + 1):
        if step == 0 or (step % 4 == 0 and arms[name].restart):
            optimiser = torch.optim.Adam(trained, lr=setting.rate)
            optimiser = torch.optim.SGD(trained, lr=setting.sgd_rate) if name == "sgd" else optimiser
        tokens, targets = short.window(torch.tensor(step))
        loss = nn.functional.cross_entropy(model(tokens)[seed].flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(trained, 0.3))
        assert norm > 0.3  # so that all are clipped
        optimiser.step()
    np.testing.assert_allclose(trajectory.loss.sel(arm=name, seed=3), losses, rtol=3e-4)


def test_dropout_is_where_the_arm_says_and_the_same_in_every_arm_of_a_seed(text):
    arms = arms_of("dropout-embedding", "dropout-published", "linear-dropout-embedding")
    assert [variant(arm).sites[:1] for arm in arms.values()] == [(), *[("embedding",)] * 3]
    trajectories, _ = train_arms(dataclasses.replace(SMALL, steps=1), CONTEXT, text, arms)
    first = {str(name): group.loss.sel(arm=name).isel(step=0) for group in trajectories for name in group.arm.values}
    assert len({float(loss[0]) for loss in first.values()}) == 4
    without = first_model(text, arms["free"]).surprisal(*text.window(torch.tensor(0))).mean(dim=(1, 2)).detach()
    np.testing.assert_allclose(first["free"], without, rtol=1e-5)
    again, _ = train_arms(dataclasses.replace(SMALL, steps=1), CONTEXT, text, arms_of(dropout="embedding"))
    np.testing.assert_allclose(again[0].loss.sel(arm="free").isel(step=0), first["dropout-embedding"], rtol=1e-6)


def test_the_weights_are_not_those_of_other_studies_of_text(text):
    arm = arms_of()["free"]
    config = decoder_config(SMALL, variant(arm), text.types)
    others = Decoder(config, generators=CONTEXT.seed_generators()).embedding
    assert (first_model(text, arm).embedding != others).any(dim=2).all()


def test_the_measures_are_means_over_tokens_windows_and_rows(text):
    model = first_model(text, arms_of("depth-2")["depth-2"]).double()
    measures = measure(model, 0, text=text, half=False)
    loss, predicted, weights = 0.0, 0, []
    for column in text.valid:
        for first in range(0, len(column) - 1, 8):
            window = column[first : first + 9]
            log_probabilities = model(window[None, :-1])[:, 0].log_softmax(-1)
            loss = loss - log_probabilities.gather(-1, window[1:].expand(2, -1)[..., None]).sum(dim=(1, 2))
            predicted += len(window) - 1
            if len(window) == 9:
                weights.append(torch.stack(model.activations(window[None, :-1], ["attention"])["attention"], dim=1))
    attention = torch.cat(weights, dim=2)  # [seed, layer, window, head, query, key]
    entropy = -(attention * attention.clamp_min(1e-300).log()).sum(-1)
    apart = (torch.arange(8)[:, None] - torch.arange(8)).abs()
    expected = {
        "valid_loss": loss / predicted,
        "entropy": entropy.mean(dim=(2, 4)),
        "position_entropy": entropy.mean(dim=(1, 2, 3)),
        "distance": (attention * apart).sum(-1).mean(dim=(2, 3, 4)),
    }
    for name, values in expected.items():
        torch.testing.assert_close(measures[name], values, rtol=1e-9, atol=1e-9)


def test_loss_and_entropy_of_the_training_text_are_measured_without_dropout(text):
    model = first_model(text, arms_of(dropout="published")["free"])
    small = dataclasses.replace(text, train=text.train[:, : 8 * 3 + 1])
    measures = measure(model, 0, text=small, half=False)
    losses = [model.surprisal(*small.window(torch.tensor(step))).mean(dim=(1, 2)) for step in range(3)]
    torch.testing.assert_close(measures["train_loss"].float(), torch.stack(losses).mean(dim=0), rtol=1e-5, atol=0)
    all_tokens = small.train[:, :-1].reshape(-1, 8)
    (attention,) = model.activations(all_tokens, ["attention"])["attention"]
    entropy = torch.special.entr(attention).sum(-1).mean(dim=(1, 3))
    torch.testing.assert_close(measures["train_entropy"][:, 0].float(), entropy, rtol=1e-5, atol=0)


def test_a_large_training_text_is_sampled_evenly(text):
    batches = [tokens for tokens, _ in train_batches(text)]
    steps = [0, text.epoch // 4, text.epoch // 2, 3 * text.epoch // 4]
    assert len(batches) == 4
    assert all(tokens.equal(text.window(torch.tensor(step))[0]) for tokens, step in zip(batches, steps, strict=True))


def test_a_validation_text_without_a_full_window_is_refused(text):
    short = dataclasses.replace(text, valid=text.valid[:, :6])
    with pytest.raises(InputError, match="`corpus` must have validation columns of more than 8 tokens"):
        measure_windows(first_model(text, arms_of()["free"]), short.windows(), short)


def test_a_diverged_seed_leaves_the_measures_of_the_others_alone(text):
    model, expected = (first_model(text, arms_of()["free"]) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] = torch.nan
    measures = measure(model, 0, text=text, half=False)
    for name, values in measure(expected, 0, text=text, half=False).items():
        assert measures[name][0].isnan().any()
        torch.testing.assert_close(measures[name][1], values[1])


def columns_of(tokens, length):
    train = torch.tensor(tokens)
    return TextColumns(3, train, train, length, names=("a", "b", "c"), counts=np.ones(3, dtype=int))


@given(
    st.integers(1, 3).flatmap(
        lambda length: st.tuples(
            st.just(length),
            st.integers(1, 4).flatmap(
                lambda windows: st.lists(
                    st.lists(st.integers(0, 2), min_size=windows * length + 1, max_size=windows * length + 1),
                    min_size=1,
                    max_size=4,
                )
            ),
        )
    )
)
def test_the_floor_is_the_entropy_of_the_next_token_given_the_window_so_far(drawn):
    length, tokens = drawn
    text = columns_of(tokens, length)
    following = defaultdict(list)
    for column in tokens:
        for first in range(0, length * text.epoch, length):
            for end in range(1, length + 1):
                following[tuple(column[first : first + end])].append(column[first + end])
    nats, predicted = 0.0, 0
    for continuations in following.values():
        for token in continuations:
            nats -= math.log(continuations.count(token) / len(continuations))
            predicted += 1
    assert memorising_floor(text) == pytest.approx(nats / predicted, abs=1e-12)


def test_a_text_whose_windows_begin_differently_can_be_memorised_completely():
    assert memorising_floor(columns_of([[0, 1, 1, 2], [1, 0, 0, 2], [2, 0, 1, 0]], 3)) == 0.0
    assert memorising_floor(columns_of([[0, 1], [0, 2]], 1)) == pytest.approx(math.log(2))


def test_the_memorised_text_is_the_beginning_of_each_column(text):
    small = memorised_text(SMALL, text)
    assert small.epoch == 2
    assert small.train.equal(text.train[:, :17])
    assert small.valid is text.valid


def test_attention_alone_starts_from_the_final_model(text):
    _, models = train_arms(SMALL, CONTEXT, text, arms_of("head"))
    trained = models["free"]
    (alone,), _ = train_arms(SMALL, CONTEXT, text, {}, free=trained)
    assert alone.start.values.tolist() == ["end", "fresh"]
    final = measure(trained, SMALL.steps, text=text, half=False)
    np.testing.assert_allclose(alone.entropy.sel(start="end").isel(step=0), final["entropy"][:2], rtol=1e-5)
    different = abs(alone.entropy.sel(start="fresh").isel(step=0) - final["entropy"][:2].numpy())
    assert bool((different > 1e-4).all())
    assert bool((alone.loss.isel(step=0) != alone.loss.isel(step=-1)).all())


def test_only_queries_and_keys_of_the_copy_train(text):
    trained = first_model(text, arms_of()["free"])
    copy = Decoder(trained.config, generators=[torch.Generator().manual_seed(9) for _ in range(4)])
    drawn = {name: parameter.detach().clone() for name, parameter in copy.named_parameters()}
    with_final_weights(copy, trained, 2)
    for name, parameter in copy.named_parameters():
        is_attention = frozen_part(name) == "query-key"
        assert parameter.requires_grad == is_attention
        assert torch.equal(parameter[:2], trained.get_parameter(name))
        assert torch.equal(parameter[2:], drawn[name][2:] if is_attention else trained.get_parameter(name))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rate": -1.0}, "rate"),
        ({"sgd_rate": -1.0}, "sgd_rate"),
        ({"attention_rate": -1.0}, "attention_rate"),
        ({"attention_steps": -1}, "attention_steps"),
        ({"memorised": 0}, "memorised"),
        ({"memorised": 17}, "memorised"),
    ],
)
def test_a_setting_that_cannot_be_run_is_refused_by_field(text, changes, field):
    with pytest.raises(InputError, match=f"`{field}`"):
        check_setting(dataclasses.replace(SMALL, **changes), text, arms_of("memorised"))


def test_a_text_with_fewer_windows_than_are_memorised_is_refused(text):
    short = dataclasses.replace(text, train=text.train[:, : 8 + 1])
    check_setting(SMALL, short, arms_of())
    with pytest.raises(InputError, match="`memorised`"):
        check_setting(SMALL, short, arms_of("memorised"))
