"""The text, the model, the training and the measures that the studies of text share."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joma import noise
from joma.arguments import InputError
from joma.commands.parsing import config_with
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.entropy import shannon_entropy
from joma.studies import load
from joma.studies.text import language_training
from joma.studies.text.language_training import (
    FORWARD_SHARE,
    FurtherMeasures,
    LanguageSetting,
    TextColumns,
    Variant,
    decoder_config,
    inputs,
    layer_entropy,
    read_text,
    record_steps,
    train,
    validate,
)
from joma.study import Context, Preset, execute

SMALL = LanguageSetting(width=8, hidden=8, length=8, batch=4, columns=3, steps=6, every=2, glance=60)
RATE = 1e-2
CONTEXT = Context((0, 4))
STUDIES = ("entropy-text", "learning-rates", "activation-control", "bounce-control", "bounce-cause", "invariant-text")


@pytest.fixture(scope="module")
def text():
    return read_text(SMALL, CONTEXT)


def build_model(text, setting=SMALL, variant=None):
    config = decoder_config(setting, Variant(2) if variant is None else variant, text.types)
    return Decoder(config, generators=CONTEXT.seed_generators())


def train_one_layer(text, **changes):
    return train(dataclasses.replace(SMALL, **changes), CONTEXT, text, Variant(1), rate=RATE, label="x")


def test_windows_are_read_in_order_and_the_epoch_begins_anew(text):
    for step in (0, 1, text.epoch - 1):
        tokens, targets = text.window(torch.tensor(step))
        assert tokens.equal(text.train[:, step * 8 : step * 8 + 8])
        assert targets.equal(text.train[:, step * 8 + 1 : step * 8 + 9])
    next_epoch, first_epoch = (text.window(torch.tensor(step)) for step in (text.epoch, 0))
    assert next_epoch[0].equal(first_epoch[0])
    assert next_epoch[1].equal(first_epoch[1])


def test_validation_windows_cover_every_prediction_once(text):
    windows = [*text.windows()]
    pairs = [pair for window in windows for pair in torch.stack(window, dim=-1).reshape(-1, 2).tolist()]
    expected = torch.stack([text.valid[:, :-1], text.valid[:, 1:]], dim=-1).reshape(-1, 2).tolist()
    assert sorted(pairs) == sorted(expected)
    assert {tokens.shape[1] for tokens, _ in windows} == {8, (text.valid.shape[1] - 1) % 8}


def test_validation_is_the_mean_over_tokens_and_rows(text):
    model = build_model(text)
    measures = validate(model, text)
    loss, predicted, attention = 0.0, 0, []
    for column in text.valid:
        for first in range(0, len(column) - 1, 8):
            window = column[first : first + 9]
            log_probabilities = model(window[None, :-1])[:, 0].log_softmax(-1)
            loss = loss - log_probabilities.gather(-1, window[1:].expand(2, -1)[..., None]).sum(dim=(1, 2))
            predicted += len(window) - 1
            if len(window) == 9:
                attention.append(torch.stack(model.activations(window[None, :-1], ("attention",))["attention"]))
    entropy = shannon_entropy(torch.cat(attention, dim=2)).mean(dim=(2, 4)).transpose(0, 1)
    torch.testing.assert_close(measures["valid_loss"].float(), loss / predicted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(measures["entropy"].float(), entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [0, 3, 6])
def test_the_window_of_the_authors_figures_is_one_of_the_first_column(text, monkeypatch, number):
    model = build_model(text)
    assert "window_entropy" not in validate(model, text)  # a column has 59 tokens: 7 windows
    monkeypatch.setattr(language_training, "AUTHORS_WINDOW", number)
    attention = model.activations(text.valid[:1, 8 * number : 8 * number + 8], ("attention",))["attention"]
    expected = torch.stack([shannon_entropy(layer)[:, 0].mean(dim=2) for layer in attention], dim=1)
    torch.testing.assert_close(validate(model, text)["window_entropy"].float(), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(language_training, "AUTHORS_WINDOW", 7)
    assert "window_entropy" not in validate(model, text)


@pytest.mark.parametrize("diverged", [[1], [0, 1]])
def test_a_diverged_seed_leaves_the_measures_of_the_others_alone(text, diverged):
    model, expected = build_model(text), validate(build_model(text), text)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[diverged] = torch.nan
    measures = validate(model, text)
    others = [seed for seed in (0, 1) if seed not in diverged]
    for name, values in expected.items():
        assert measures[name][diverged].isnan().all()
        torch.testing.assert_close(measures[name][others], values[others])


class Plain(nn.Module):
    """The model in PyTorch's own parts, with the first weights of one seed. nn.TransformerEncoder copies layers."""

    def __init__(self, model, seed, layers):
        super().__init__()
        layer = model.layers[0]
        types, width = model.embedding.shape[1:]
        encoder_layer = nn.TransformerEncoderLayer(width, 1, 8, dropout=0.0, batch_first=True)
        self.embedding = nn.Parameter(model.embedding[seed].detach().clone())
        self.head = nn.Linear(width, types)
        attention = encoder_layer.self_attn
        heads = [layer.attention.query, layer.attention.key, layer.attention.value]
        with torch.no_grad():
            attention.in_proj_weight.copy_(torch.cat([part.weight[seed].T for part in heads]))
            attention.in_proj_bias.copy_(torch.cat([part.bias[seed] for part in heads]))
            pairs = (
                (attention.out_proj, layer.attention.projection),
                (encoder_layer.linear1, layer.lower),
                (encoder_layer.linear2, layer.upper),
                (self.head, model.head),
            )
            for theirs, ours in pairs:
                theirs.weight.copy_(ours.weight[seed].T)
                theirs.bias.copy_(ours.bias[seed])
        self.encoder = nn.TransformerEncoder(encoder_layer, layers, enable_nested_tensor=False)
        self.register_buffer("positions", model.position_encoding[0])

    def forward(self, tokens):
        x = self.embedding[tokens] * self.embedding.shape[1] ** 0.5 + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(x, mask=mask, is_causal=True))


@pytest.mark.parametrize("layers", [1, 3])
def test_it_trains_as_pytorchs_own_parts_do(text, layers):
    """The comparison has no dropout, the same initial weights, and a new torch.optim.Adam at every epoch."""
    setting = dataclasses.replace(SMALL, dropout=0.0, steps=11, every=1, clip=0.1)
    short = dataclasses.replace(text, train=text.train[:, : 8 * 4 + 1])  # an epoch of four windows
    trajectory = train(setting, CONTEXT, short, Variant(layers), rate=RATE, label="x")
    plain = Plain(build_model(text, setting, Variant(layers)), seed=1, layers=layers)
    losses, norms = [], []
    for step in range(11):
        if step % 4 == 0:
            adam = torch.optim.Adam(plain.parameters(), lr=RATE)
        tokens, targets = short.window(torch.tensor(step))
        loss = nn.functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))
        adam.step()
        losses.append(loss.item())
    assert min(norms) > 0.1  # so that all are clipped
    ours = trajectory.loss.sel(seed=4).isel(step=slice(0, -1))
    assert ours.step.values.tolist() == list(range(11))
    np.testing.assert_allclose(ours, losses, rtol=2e-4)


@pytest.mark.parametrize("alike", [True, False])
def test_layers_start_alike_unless_each_is_drawn_by_itself(text, alike):
    model = build_model(text, variant=Variant(2, alike=alike))
    first, second = (layer.lower.weight for layer in model.layers)
    assert torch.equal(first, second) == alike


def test_dropout_depends_on_seed_and_step(text):
    model, (tokens, targets) = build_model(text), text.window(torch.tensor(0))
    key = noise.key(torch.tensor(CONTEXT.seeds), 0)
    with_dropout = model.surprisal(tokens, targets, noise=key).detach()
    without = model.surprisal(tokens, targets).detach()
    trajectory = train(SMALL, CONTEXT, text, Variant(2), rate=RATE, label="x")
    assert trajectory.loss.dims == ("seed", "step")
    np.testing.assert_allclose(trajectory.loss.isel(step=0), with_dropout.mean(dim=(1, 2)), rtol=1e-5)
    assert ((with_dropout - without).abs().mean(dim=(1, 2)) > 1e-2).all()  # token by token: means may happen to agree


def test_further_measures_are_recorded_by_name(text):
    further = FurtherMeasures(lambda model: {"embedding": model.embedding[:, :3]}, {"embedding": ("type", "width")})
    trajectory = train(SMALL, CONTEXT, text, Variant(1), rate=RATE, label="x", further=further)
    start = build_model(text, variant=Variant(1)).embedding[:, :3].detach()
    assert trajectory.embedding.dims == ("seed", "step", "type", "width")
    np.testing.assert_array_equal(trajectory.embedding.isel(step=0), start)


def test_several_rates_are_an_axis(text):
    rates = train(SMALL, CONTEXT, text, Variant(1), rate=[1e-3, RATE], label="x")
    alone = train_one_layer(text)
    assert rates.rate.values.tolist() == [1e-3, RATE]
    np.testing.assert_allclose(rates.valid_loss.sel(rate=RATE), alone.valid_loss, rtol=1e-6)
    assert (rates.valid_loss.sel(rate=1e-3).isel(step=-1) > alone.valid_loss.isel(step=-1)).all()


@settings(max_examples=30)
@given(steps=st.integers(1, 10**5), every=st.integers(1, 5000))
def test_probes_come_every_so_often_and_before_that_at_logarithmic_steps(text, steps, every):
    at = record_steps(dataclasses.replace(SMALL, steps=steps, every=every), text)
    assert at == sorted({*at})
    assert {0, steps, *range(0, steps + 1, every)} <= {*at}
    assert len([step for step in at if step < every]) <= 12


@settings(max_examples=30)
@given(steps=st.integers(100, 10**5))
def test_by_default_probes_read_less_than_a_twentieth_of_what_training_does(text, steps):
    at = record_steps(dataclasses.replace(SMALL, steps=steps, every=None), text)
    read = len(at) * text.valid.numel() * FORWARD_SHARE
    assert len(at) <= 3 or read <= 0.05 * steps * SMALL.batch * SMALL.length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "/no/such/folder"}, "`corpus`"),
        ({"batch": 10**6}, "`corpus`.* a smaller `batch` than 1000000"),
        ({"columns": 10**6}, "`corpus`.* a smaller `columns` than 1000000"),
        ({"length": 10**6}, "`corpus`"),
        ({"glance": 5}, "`corpus` must have validation columns of more than 8 tokens, got 5;.* a greater `glance`"),
        ({"steps": 0}, "`steps`"),
        ({"every": 0}, "`every`"),
        ({"width": 7, "heads": 2}, "`heads`"),
        ({"precision": "exact"}, "`precision`"),
    ],
)
def test_an_error_names_the_field_and_what_helps(changes, message):
    setting = dataclasses.replace(SMALL, **changes)
    with pytest.raises(InputError, match=message):
        train_one_layer(read_text(setting, CONTEXT), **changes)


@pytest.mark.parametrize("name", STUDIES)
def test_another_text_under_the_same_name_is_another_run(tmp_path, name):
    study, file = load(name), tmp_path / "a.txt"
    tiny = {"corpus": str(file), "width": 4, "hidden": 4, "length": 4, "batch": 2, "columns": 1, "steps": 1, "every": 1}
    tiny |= {"depths": (1,), "rates": (1e-3,), "activations": ("relu",), "tokens": 3, "queries": 1, "permutations": 1}
    config = study.presets["quick"].config
    fields = {field.name for field in dataclasses.fields(config)}
    config = dataclasses.replace(config, **{field: value for field, value in tiny.items() if field in fields})
    study = dataclasses.replace(study, presets={"quick": Preset(config, 1, 1.0)}, claims=(), figures={})
    outcomes = []
    for content in ("a b c d\n" * 30, "a b c d\n" * 30, "a b c e\n" * 30):
        file.write_text(content)
        outcomes.append(execute(study, out=tmp_path / "runs"))
    assert [outcome.reused for outcome in outcomes] == [False, True, False]
    assert outcomes[0].path == outcomes[1].path != outcomes[2].path


def test_a_run_is_known_by_the_content_of_its_text(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("one two")
    sources = ("python-reference", tmp_path / "a.txt", tmp_path / "folder")
    embedded, file, folder = [inputs(LanguageSetting(corpus=str(source)))["text_sha256"] for source in sources]
    assert file == folder != embedded


@pytest.mark.parametrize("source", ["Salesforce/wikitext:wikitext-2-v1", "/no/such/folder", "", "a\0b"])
def test_a_text_that_is_not_on_this_machine_has_no_checksum(source):
    assert inputs(LanguageSetting(corpus=source)) == {}


def test_a_folder_without_text_has_no_checksum(tmp_path):
    assert inputs(LanguageSetting(corpus=str(tmp_path))) == {}


@pytest.mark.parametrize("name", STUDIES)
def test_the_paper_presets_read_wikitext_for_the_authors_steps(name):
    config = load(name).presets["paper"].config
    steps = {"bounce-control": 20_000, "bounce-cause": 30_000}.get(name, 58_560)  # these train many arms
    assert (config.corpus, config.steps) == ("Salesforce/wikitext:wikitext-2-v1", steps)
    assert (config.width, config.hidden, config.heads, config.length, config.batch) == (200, 200, 1, 35, 20)


@pytest.mark.parametrize(("name", "field"), [("learning-rates", "rate"), ("activation-control", "activation"),
                                             ("invariant-text", "alike")])  # fmt: skip
def test_a_study_has_no_field_that_it_does_not_use(name, field):
    assert field not in {known.name for known in dataclasses.fields(load(name).presets["quick"].config)}
    with pytest.raises(InputError, match=field):
        config_with(load(name), "quick", (f"{field}=1",))


def test_one_adam_throughout_can_be_chosen(text):
    """With `restart=False` training is the same in the first epoch and differs from the second epoch on."""
    short = dataclasses.replace(text, train=text.train[:, : 8 * 2 + 1])  # an epoch of two windows
    choices = [config_with(load("entropy-text"), "quick", (f"restart={value}",)).restart for value in (True, False)]
    assert choices == [True, False]
    restarted, throughout = [train_one_layer(short, restart=restart, every=1).valid_loss for restart in choices]
    first_epoch = slice(0, 2)
    np.testing.assert_array_equal(restarted.sel(step=first_epoch), throughout.sel(step=first_epoch))
    assert (restarted.sel(step=3) != throughout.sel(step=3)).all()


def test_the_slope_of_entropy_is_its_change_by_a_factor_of_all_scores():
    config = DecoderConfig(vocabulary=9, width=8, layers=2, length=6, positions="sinusoidal", init="encoder")
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in (0, 1)], dtype=torch.float64)
    tokens = torch.randint(9, (5, 6), generator=torch.Generator().manual_seed(3))
    entropy, slope = layer_entropy(model, tokens)
    for number in range(2):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in changed.layers[number].attention.query.parameters():
                parameter.mul_(np.exp(1e-6))
        difference = (entropy - layer_entropy(changed, tokens)[0])[:, number] / 1e-6
        torch.testing.assert_close(slope[:, number], difference, rtol=1e-4, atol=1e-8)
        weights = model.activations(tokens, ["attention"])["attention"][number]
        by_hand = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean(dim=(1, 2, 3))
        torch.testing.assert_close(entropy[:, number], by_hand, rtol=1e-12, atol=0)


def test_sampled_windows_are_full_and_evenly_spaced():
    valid = torch.arange(2 * 23).reshape(2, 23)
    text = TextColumns(50, torch.zeros(2, 30, dtype=torch.long), valid, 5, names=(), counts=np.zeros(50, dtype=int))
    assert text.sample_windows(4)[:, 0].tolist() == [0, 10, 23, 33]
    assert len(text.sample_windows(100)) == 8
    assert text.sample_windows(4).shape == (4, 5)
    assert TextColumns(50, text.train, valid[:, :3], 5, names=(), counts=text.counts).sample_windows(4).shape == (0, 5)
