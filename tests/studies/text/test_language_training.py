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
from joma.cli import config_with
from joma.models.transformer import Decoder
from joma.probes.entropy import shannon_entropy
from joma.studies import load
from joma.studies.text import language_training
from joma.studies.text.language_training import Setting, decoder, inputs, moments, read_text, train, validation
from joma.study import Context, Preset, execute

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
    rows = shannon_entropy(torch.cat(weights, dim=2)).mean(dim=(2, 4)).transpose(0, 1)
    torch.testing.assert_close(found["valid_loss"].float(), logits / told, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["entropy"].float(), rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [0, 3, 6])
def test_the_window_that_is_shown_is_one_of_the_first_column(text, monkeypatch, number):
    own = model(text)
    assert "window_entropy" not in validation(own, text)  # a column is 59 tokens long: 7 windows
    monkeypatch.setattr(language, "WINDOW", number)
    weights = own.activations(text.valid[:1, 8 * number : 8 * number + 8], ("attention",))["attention"]
    expected = torch.stack([shannon_entropy(one)[:, 0].mean(dim=2) for one in weights], dim=1)
    torch.testing.assert_close(validation(own, text)["window_entropy"].float(), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(language, "WINDOW", 7)
    assert "window_entropy" not in validation(own, text)


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


@pytest.mark.parametrize("layers", [1, 3])
def test_it_trains_as_pytorchs_own_parts_would(text, layers):
    """Without dropout, against nn.TransformerEncoder with the same start, torch's Adam made anew every epoch.

    The encoder is given one layer and copies it.
    """
    setting = dataclasses.replace(SMALL, dropout=0.0, steps=11, every=1, clip=0.1)
    short = dataclasses.replace(text, train=text.train[:, : 8 * 4 + 1])  # an epoch of four windows
    found = train(setting, CONTEXT, short, layers=layers, label="x")
    start = model(text, setting, layers=layers)
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
    plain = nn.TransformerEncoder(plain, layers, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    parameters = [embedding, *plain.parameters(), *head.parameters()]
    losses, norms = [], []
    for step in range(11):
        if step % 4 == 0:
            rule = torch.optim.Adam(parameters, lr=1e-2)
        tokens, target = short.window(torch.tensor(step))
        x = embedding[tokens] * 8**0.5 + start.positions[0]
        loss = nn.functional.cross_entropy(head(plain(x, mask=mask, is_causal=True)).flatten(0, 1), target.flatten())
        rule.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        rule.step()
        losses.append(loss.item())
    assert min(norms) > 0.1  # so that all are clipped
    seen = found.loss.sel(seed=4).isel(step=slice(0, -1))
    assert seen.step.values.tolist() == list(range(11))
    np.testing.assert_allclose(seen, np.array(losses)[seen.step], rtol=2e-4)


def test_layers_start_alike_unless_they_are_drawn_apart(text):
    for alike in (True, False):
        own = model(text, dataclasses.replace(SMALL, alike=alike))
        first, second = (layer.lower.weight for layer in own.layers)
        assert torch.equal(first, second) == alike


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
    read = len(found) * text.valid.numel() * language_training.FORWARD
    assert len(found) <= 3 or read <= 0.05 * steps * SMALL.batch * SMALL.length


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"corpus": "/no/such/folder"}, "corpus"),
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


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"batch": 10**6}, "a smaller `batch` than 1000000"),
        ({"columns": 10**6}, "a smaller `columns` than 1000000"),
        ({"glance": 5}, "a greater `glance`"),
    ],
)
def test_the_remedy_names_the_key_that_helps(changes, remedy):
    setting = dataclasses.replace(SMALL, **changes)
    with pytest.raises(InputError, match=remedy):
        train(setting, CONTEXT, read_text(setting, CONTEXT), layers=1, label="x")


STUDIES = ("entropy-text", "learning-rates", "activation-control", "bounce-control", "invariant-text")


@pytest.mark.parametrize("study", STUDIES)
def test_another_text_under_the_same_name_is_another_run(tmp_path, study):
    own, file = load(study), tmp_path / "a.txt"
    tiny = {"corpus": str(file), "width": 4, "hidden": 4, "length": 4, "batch": 2, "columns": 1, "steps": 1, "every": 1}
    narrow = {"depths": (1,), "rates": (1e-3,), "activations": ("relu",), "tokens": 3, "queries": 1, "permutations": 1}
    config = own.presets["quick"].config
    known = {field.name for field in dataclasses.fields(config)}
    config = dataclasses.replace(config, **tiny, **{key: value for key, value in narrow.items() if key in known})
    bare = dataclasses.replace(own, presets={"quick": Preset(config, 1, 1.0)}, claims=(), figures={})
    outcomes = []
    for content in ("a b c d\n" * 30, "a b c d\n" * 30, "a b c e\n" * 30):
        file.write_text(content)
        outcomes.append(execute(bare, out=tmp_path / "runs"))
    assert [one.reused for one in outcomes] == [False, True, False]
    assert outcomes[0].path == outcomes[1].path != outcomes[2].path


def test_the_text_of_a_run_is_its_content(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("one two")
    places = ("python-reference", tmp_path / "a.txt", tmp_path / "folder")
    embedded, file, folder = [inputs(Setting(corpus=str(place)))["text_sha256"] for place in places]
    assert file == folder != embedded


@pytest.mark.parametrize("bad", ["Salesforce/wikitext:wikitext-2-v1", "/no/such/folder", "", "a\0b"])
def test_nothing_is_said_of_a_text_that_is_not_at_hand(bad):
    assert inputs(Setting(corpus=bad)) == {}


def test_nothing_is_said_of_a_text_that_cannot_be_read(tmp_path):
    assert inputs(Setting(corpus=str(tmp_path))) == {}  # a folder without text


def test_papers_text_is_one_that_the_hub_knows():
    for study in STUDIES:
        assert load(study).presets["paper"].config.corpus == "Salesforce/wikitext:wikitext-2-v1"


def test_one_adam_throughout_can_be_asked_for(text):
    """By `--set restart=False`; it is the same within the first epoch, and another training from the second on."""
    short = dataclasses.replace(text, train=text.train[:, : 8 * 2 + 1])  # an epoch of two windows
    asked = [config_with(load("entropy-text"), "quick", (f"restart={value}",)).restart for value in (True, False)]
    assert asked == [True, False]
    afresh, throughout = [
        train(dataclasses.replace(SMALL, restart=restart, every=1), CONTEXT, short, layers=1, label="x").valid_loss
        for restart in asked
    ]
    early = slice(0, 2)
    np.testing.assert_array_equal(afresh.sel(step=early), throughout.sel(step=early))
    assert (afresh.sel(step=3) != throughout.sel(step=3)).all()
