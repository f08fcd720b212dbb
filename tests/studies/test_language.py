"""The text, the model and the measures that the studies of text share."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joma import noise
from joma.arguments import InputError
from joma.models.transformer import Decoder
from joma.probes.entropy import entropy
from joma.studies import language
from joma.studies.base import Context
from joma.studies.language import Setting, decoder, moments, read_text, train, validation

SMALL = Setting(width=8, hidden=8, length=8, batch=4, columns=3, steps=6, every=2, rate=1e-2, glance=60)
CONTEXT = Context((0, 4))


@pytest.fixture(scope="module")
def text():
    return read_text(SMALL, CONTEXT)


def model(text, setting=SMALL, layers=2, **changes):
    config = dataclasses.replace(decoder(setting, text.types, layers), **changes)
    return Decoder(config, generators=CONTEXT.generators())


def test_windows_are_read_in_order_and_the_epoch_begins_anew(text):
    stream = text.train
    for step in (0, 1, text.epoch - 1):
        tokens, target = text.window(torch.tensor(step))
        assert tokens.equal(stream[:, step * 8 : step * 8 + 8])
        assert target.equal(stream[:, step * 8 + 1 : step * 8 + 9])
    for one, other in zip(text.window(torch.tensor(text.epoch)), text.window(torch.tensor(0)), strict=True):
        assert one.equal(other)


def test_validation_windows_cover_every_prediction_once(text):
    tokens = [own for own, _ in text.windows()]
    pairs = sorted(
        tuple(pair) for own, aim in text.windows() for pair in torch.stack([own, aim], -1).reshape(-1, 2).tolist()
    )
    wanted = torch.stack([text.valid[:, :-1], text.valid[:, 1:]], dim=-1).reshape(-1, 2).tolist()
    assert pairs == sorted(tuple(pair) for pair in wanted)
    assert {own.shape[1] for own in tokens} == {8, (text.valid.shape[1] - 1) % 8}


def test_validation_is_the_mean_over_tokens_and_rows(text):
    own = model(text)
    found = validation(own, text)
    logits, told, weights = 0.0, 0, []
    for column in text.valid:
        for first in range(0, len(column) - 1, 8):
            part = column[first : first + 9]
            said = own(part[None, :-1])[:, 0].log_softmax(-1)
            logits = logits - said.gather(-1, part[1:].expand(2, -1)[..., None]).sum(dim=(1, 2))
            told += len(part) - 1
            if len(part) == 9:
                weights.append(torch.stack(own.activations(part[None, :-1], ("attention",))["attention"]))
    rows = entropy(torch.cat(weights, dim=2)).mean(dim=(2, 4)).transpose(0, 1)
    torch.testing.assert_close(found["valid_loss"].float(), logits / told, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["entropy"].float(), rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lost", [[1], [0, 1]])
def test_a_seed_that_was_lost_leaves_the_others_their_measures(text, lost):
    own, expected = model(text), validation(model(text), text)
    with torch.no_grad():
        for weight in own.parameters():
            weight[lost] = torch.nan
    found = validation(own, text)
    for name, values in expected.items():
        assert found[name][lost].isnan().all()
        rest = [seed for seed in (0, 1) if seed not in lost]
        torch.testing.assert_close(found[name][rest], values[rest])


def test_it_trains_as_pytorchs_own_parts_would(text):
    """Without dropout, against nn.TransformerEncoderLayer with the same start, torch's Adam made anew every epoch."""
    setting = dataclasses.replace(SMALL, dropout=0.0, steps=11, every=1, clip=0.1)
    short = dataclasses.replace(text, train=text.train[:, : 8 * 4 + 1])  # an epoch of four windows
    found = train(setting, CONTEXT, short, layers=1, label="x")
    start = model(text, setting, layers=1)
    layer = start.layers[0]
    plain = nn.TransformerEncoderLayer(8, 1, 8, dropout=0.0, batch_first=True)
    embedding, head = nn.Parameter(start.embedding[1].detach().clone()), nn.Linear(8, text.types)
    own = lambda part: (part.weight[1].detach().T, part.bias[1].detach())  # noqa: E731
    with torch.no_grad():
        joined = [
            torch.cat(parts)
            for parts in zip(
                *map(own, (layer.attention.query, layer.attention.key, layer.attention.value)), strict=True
            )
        ]
        plain.self_attn.in_proj_weight.copy_(joined[0])
        plain.self_attn.in_proj_bias.copy_(joined[1])
        pairs = ((plain.self_attn.out_proj, layer.attention.projection), (plain.linear1, layer.lower),
                 (plain.linear2, layer.upper), (head, start.head))  # fmt: skip
        for theirs, ours in pairs:
            weight, bias = own(ours)
            theirs.weight.copy_(weight)
            theirs.bias.copy_(bias)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    parameters = [embedding, *plain.parameters(), *head.parameters()]
    losses, norms = [], []
    for step in range(11):
        if step % 4 == 0:
            rule = torch.optim.Adam(parameters, lr=1e-2)
        tokens, target = short.window(torch.tensor(step))
        x = embedding[tokens] * 8**0.5 + start.positions[0]
        loss = nn.functional.cross_entropy(
            head(plain(x, src_mask=mask, is_causal=True)).flatten(0, 1), target.flatten()
        )
        rule.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        rule.step()
        losses.append(loss.item())
    assert min(norms) > 0.1  # so that all are clipped
    seen = found.loss.sel(seed=4).isel(step=slice(0, -1))
    assert seen.step.values.tolist() == list(range(11))
    np.testing.assert_allclose(seen, np.array(losses)[seen.step], rtol=2e-4)


def test_dropout_is_that_of_seed_and_step(text):
    own = model(text)
    tokens, target = text.window(torch.tensor(3))
    key = noise.key(torch.tensor(CONTEXT.seeds), 3)
    expected = own.surprisal(tokens, target, noise=key).mean(dim=(1, 2))
    found = train(SMALL, CONTEXT, text, layers=2, label="x")
    assert found.loss.dims == ("seed", "step")
    still = own.surprisal(tokens, target).mean(dim=(1, 2))
    assert (expected - still).abs().min() > 1e-4
    first = own.surprisal(*text.window(torch.tensor(0)), noise=noise.key(torch.tensor(CONTEXT.seeds), 0)).mean(
        dim=(1, 2)
    )
    np.testing.assert_allclose(found.loss.isel(step=0), first.detach(), rtol=1e-5)


@settings(max_examples=30)
@given(steps=st.integers(1, 10**5), every=st.integers(1, 5000))
def test_probes_come_every_so_often_and_before_that_at_logarithmic_steps(text, steps, every):
    found = moments(dataclasses.replace(SMALL, steps=steps, every=every), text)
    assert found == sorted({*found})
    assert {0, steps, *range(0, steps + 1, every)} <= {*found}
    assert len([step for step in found if step < every]) <= 12


@settings(max_examples=30)
@given(steps=st.integers(100, 10**5))
def test_by_default_probes_read_less_than_a_twentieth_of_what_training_does(text, steps):
    found = moments(dataclasses.replace(SMALL, steps=steps, every=None), text)
    read = len(found) * text.valid.numel() * language.FORWARD
    assert len(found) <= 3 or read <= 0.05 * steps * SMALL.batch * SMALL.length


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"corpus": "/no/such/folder"}, "corpus|source"),
        ({"batch": 10**6}, "corpus"),
        ({"length": 10**6}, "corpus"),
        ({"glance": 5}, "corpus"),
        ({"steps": 0}, "steps"),
        ({"every": 0}, "every"),
        ({"width": 7, "heads": 2}, "heads"),
    ],
)
def test_bad_settings_are_named(changes, argument):
    setting = dataclasses.replace(SMALL, **changes)
    with pytest.raises(InputError, match=f"`({argument})`"):
        train(setting, CONTEXT, read_text(setting, CONTEXT), layers=1, label="x")
