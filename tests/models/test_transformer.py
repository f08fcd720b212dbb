"""The decoder compared with its formulas in NumPy, position by position, and with itself seed by seed."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from decoder_formulas import JOMA, WIKITEXT, config_options, draw_tokens, formulas, generators, make
from joma import noise
from joma.arguments import InputError
from joma.kernels import head
from joma.models.transformer import CHOICES, SITES, Decoder, DecoderConfig, Layer


@settings(max_examples=40)
@given(options=config_options(), seed=st.integers(0, 1000), by_seed=st.booleans(), length=st.integers(1, 6))
def test_logits_and_attention_are_the_formulas(options, seed, by_seed, length):
    model = make(config := DecoderConfig(**options), (seed, seed + 1))
    tokens = draw_tokens(7, (2, 3, length) if by_seed else (3, length), seed)
    logits = model(tokens).detach().numpy()
    weights = [w.detach().numpy() for w in model.activations(tokens, ["attention"])["attention"]]
    for index in range(2):
        for sample in range(3):
            sequence = (tokens[index] if by_seed else tokens)[sample].numpy()
            expected, expected_weights = formulas(model, index, sequence)
            np.testing.assert_allclose(logits[index, sample], expected, rtol=1e-11, atol=1e-12)
            for layer in range(config.layers):
                by_layer = weights[layer][index, sample], expected_weights[layer]
                np.testing.assert_allclose(*by_layer, rtol=1e-11, atol=1e-13)


@settings(max_examples=25)
@given(options=config_options(), seed=st.integers(0, 1000))
def test_the_last_positions_are_those_of_all(options, seed):
    model, tokens = make(DecoderConfig(**options), (seed,)), draw_tokens(7, (3, 5), seed)
    everywhere = model(tokens)
    for count in (1, 3, 5):
        last = model(tokens, last=count)
        assert last.shape == (1, 3, count, everywhere.shape[-1])
        torch.testing.assert_close(last, everywhere[:, :, -count:], rtol=1e-12, atol=1e-13)


@settings(max_examples=40)
@given(options=config_options(), seed=st.integers(0, 1000), lengths=st.lists(st.integers(2, 5), min_size=1, max_size=4))
def test_packed_sequences_give_the_logits_of_each_alone(options, seed, lengths):
    model = make(DecoderConfig(**options), (seed, seed + 1))
    alone = [draw_tokens(7, (3, length), seed + number) for number, length in enumerate(lengths)]
    for last in (0, 2):
        packed = model(torch.cat(alone, dim=1), last=last, lengths=lengths)
        expected = torch.cat([model(tokens, last=last) for tokens in alone], dim=2)
        torch.testing.assert_close(packed, expected, rtol=1e-11, atol=1e-12)


@settings(max_examples=25)
@given(
    options=config_options(),
    seed=st.integers(0, 1000),
    names=st.lists(st.sampled_from(["none", "sinusoidal", "learned"]), min_size=1, max_size=3),
)
def test_every_seed_may_have_a_different_encoding(options, seed, names):
    """Logits and gradients of each seed are those of a model that has this encoding alone."""
    config = DecoderConfig(**options | {"positions": "none", "length": 5})
    seeds, tokens = range(seed, seed + len(names)), draw_tokens(7, (3, 5), seed)
    model = Decoder(config, generators=generators(*seeds), positions=names, dtype=torch.float64)
    together = model(tokens)
    together.square().sum().backward()
    for index, (single, name) in enumerate(zip(seeds, names, strict=True)):
        alone = Decoder(dataclasses.replace(config, positions=name), generators=generators(single), dtype=torch.float64)
        expected = alone(tokens)
        torch.testing.assert_close(together[[index]], expected, rtol=1e-11, atol=1e-12)
        expected.square().sum().backward()
        for key, parameter in alone.named_parameters():
            if parameter.grad is None:  # frozen
                assert model.get_parameter(key).grad is None
                continue
            torch.testing.assert_close(model.get_parameter(key).grad[[index]], parameter.grad, rtol=1e-9, atol=1e-10)
        if name != "learned" and "learned" in names:
            assert not model.positions[index].any()
            assert not model.positions.grad[index].any()


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        ({"length": 5}, ["none", "rotary"], "`positions` must be one of none, sinusoidal, learned"),
        ({"length": 5}, ["none"], "`positions` must be one for each of 2 seeds, got 1"),
        ({}, ["none", "learned"], "`config` must have a length and no rotary positions"),
        ({"length": 5, "positions": "rotary"}, ["none", "none"], "`config` must have a length and no rotary positions"),
    ],
)
def test_bad_encodings_of_seeds_are_named(config, names, message):
    with pytest.raises(InputError, match=message):
        Decoder(DecoderConfig(vocabulary=5, width=4, **config), generators=generators(0, 1), positions=names)


def test_bad_lengths_are_named():
    model = make(JOMA)
    with pytest.raises(InputError, match=r"`lengths` must add up to 5, got \(2, 2\)"):
        model(draw_tokens(7, (3, 5)), lengths=(2, 2))
    with pytest.raises(InputError, match="`last` must be at most the length of each sequence, got 2 for lengths 1, 4"):
        model(draw_tokens(7, (3, 5)), last=2, lengths=(1, 4))
    with pytest.raises(InputError, match="`last` must be a whole number of at least 0"):
        model(draw_tokens(7, (3, 5)), last=-1)


# ---- seeds ----


def trained(seeds, steps, dtype):
    """Return the parameters after training next-token prediction by Adam, with dropout at every site."""
    model = Decoder(WIKITEXT, generators=generators(*seeds), dtype=dtype)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        tokens = torch.stack([draw_tokens(11, (4, 8), 1000 * seed + step) for seed in seeds])
        optimiser.zero_grad()
        logits = model(tokens[..., :-1], noise=noise.key(torch.tensor(seeds), step))
        nn.functional.cross_entropy(logits.flatten(0, 2), tokens[..., 1:].flatten()).mul(len(seeds)).backward()
        optimiser.step()
    return dict(model.named_parameters())


def test_a_seed_alone_trains_as_it_does_with_others():
    """The biases of keys are left out: softmax does not see them, and Adam turns their rounding errors into steps."""
    together, alone = trained((5, 0, 9), 20, torch.float64), trained((9,), 20, torch.float64)
    for name in alone:
        if not name.endswith("key.bias"):
            torch.testing.assert_close(together[name][2], alone[name][0], rtol=0, atol=1e-10)


@settings(max_examples=20)
@given(options=config_options(), seeds=st.lists(st.integers(0, 99), min_size=2, max_size=4, unique=True))
def test_no_number_passes_between_seeds(options, seeds):
    config, tokens = DecoderConfig(**options), draw_tokens(7, (3, 4))
    models = make(config, seeds), make(config, seeds[-1:])
    logits = [model(tokens) for model in models]
    torch.testing.assert_close(logits[0][-1:], logits[1], rtol=0, atol=1e-12)
    logits[0][-1].square().sum().backward()
    logits[1].square().sum().backward()
    for many, single in zip(*(model.parameters() for model in models), strict=True):
        assert many[-1:].equal(single)
        if many.grad is not None and single.grad is not None:
            scale = 1 + single.grad.abs().max().item()
            torch.testing.assert_close(many.grad[-1:], single.grad, rtol=0, atol=1e-12 * scale)
            assert not many.grad[:-1].any()


# ---- activations ----


def test_activations_are_named_by_layer():
    model, tokens = make(JOMA), draw_tokens(9, (3, 5))
    activations = model.activations(tokens)
    assert [tuple(value.shape) for value in activations["attention"]] == [(2, 3, 1, 5, 5)] * 3
    assert [tuple(value.shape) for value in activations["hidden"]] == [(2, 3, 5, 7)] * 3
    assert [tuple(value.shape) for value in activations["residual"]] == [(2, 3, 5, 6)] * 4
    assert activations["residual"][0].equal(model.embedding[:, tokens])
    assert model.logits(activations["residual"][-1]).equal(model(tokens))
    upper, norm = model.layers[2].upper, model.layers[2].norms[1]
    assert activations["residual"][3].equal(norm(upper(activations["hidden"][2]) + before_last_mlp(model, activations)))
    assert set(model.activations(tokens, ["hidden"])) == {"hidden"}


def before_last_mlp(model, activations):
    """Return the residual stream between attention and MLP of the last layer."""
    layer, x = model.layers[2], activations["residual"][2]
    return layer.norms[0](x + (activations["attention"][2] @ layer.attention.value(x)[:, :, None])[:, :, 0])


# ---- what a training loop may compile ----


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_last_layer_with_one_query_a_sequence_is_not_compiled(monkeypatch, last):
    """Its hooks run all the same, since whoever watches the model relies on them."""
    model = make(DecoderConfig(vocabulary=5, width=4, layers=2))
    calls, hooked = [], []

    def compiled(layer, *arguments, **options):
        calls.append(layer)
        return nn.Module._call_impl(layer, *arguments, **options)

    for layer in model.layers:
        monkeypatch.setattr(layer, "_compiled_call_impl", functools.partial(compiled, layer))
        layer.register_forward_hook(lambda layer, *_: hooked.append(layer))
    model(draw_tokens(5, (3, 4)), last=last)
    assert calls == list(model.layers)[: 1 if last == 1 else 2]
    assert hooked == list(model.layers)


def test_all_layers_are_compiled_and_their_matrices_read_by_products_alone():
    model = make(WIKITEXT)
    compiled, products = model.compiled_modules(), model.product_weights()
    assert [*model.layers] == [module for module in compiled if isinstance(module, Layer)]
    matrices = {name for name, parameter in model.layers.named_parameters(prefix="layers") if parameter.ndim == 3}
    assert set(products) == matrices
    for name, (module, attribute, _) in products.items():
        assert getattr(module, attribute) is model.get_parameter(name)


def with_padded_head(**options):
    """Return a model, and its logits before the head's weight became its padded copy, for five tokens."""
    model = make(DecoderConfig(vocabulary=1100, width=8, **options))
    tokens = torch.randint(1100, (2, 5), generator=torch.Generator().manual_seed(0))
    logits, (module, name, copy) = model(tokens).detach(), model.product_weights()["head.weight"]
    setattr(module, name, nn.Parameter(copy(getattr(module, name).detach()).to(logits.dtype)))
    return model, tokens, logits


@pytest.mark.parametrize("bias", [False, True])
def test_a_padded_copy_of_the_head_gives_the_logits_and_the_surprisals_of_its_weight(monkeypatch, bias):
    monkeypatch.setattr(head, "_passes", lambda _: (head._forward_at_once, head._backward_at_once))
    model, tokens, logits = with_padded_head(head_bias=bias)
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=2e-2)
    expected = -logits.log_softmax(-1).gather(-1, tokens.expand(logits.shape[:-1])[..., None])[..., 0]
    torch.testing.assert_close(model.surprisal(tokens, tokens), expected, rtol=0, atol=2e-2)


def test_a_loss_may_read_a_padded_copy_of_the_head_more_than_once(monkeypatch):
    monkeypatch.setattr(head, "_passes", lambda _: (head._forward_at_once, head._backward_at_once))
    model, tokens, _ = with_padded_head()
    model.surprisal(tokens, tokens).sum().backward()
    parameters = dict(model.named_parameters())
    single = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    model.zero_grad()
    (model.surprisal(tokens, tokens) + model.surprisal(tokens, tokens) + 0 * model(tokens).sum()).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, 2 * single[name])


# ---- multiplicities ----


def padded(lengths, length, vocabulary, seed):
    """Return sequences padded in front by the last token, the same with one token as padding, and multiplicities."""
    width = max(lengths) + 1
    full = torch.full((len(lengths), length), vocabulary - 1)
    short = torch.full((len(lengths), width), vocabulary - 1)
    count = torch.zeros(len(lengths), width, dtype=torch.int64)
    for sample, tail in enumerate(lengths):
        tokens = draw_tokens(vocabulary - 1, (tail,), seed + sample).sort().values
        full[sample, length - tail :], short[sample, width - tail :] = tokens, tokens
        count[sample, width - tail :], count[sample, width - tail - 1] = 1, length - tail
    return full, short, count


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    attention=st.sampled_from(sorted(CHOICES["attention"])),
    dtype=st.sampled_from([torch.int64, torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_padding_as_one_token_of_its_multiplicity_is_exact(lengths, attention, dtype, seed):
    models = [make(JOMA, (seed, seed + 1), attention=attention) for _ in range(2)]
    full, short, count = padded(lengths, 8, 9, seed)
    target = draw_tokens(4, (2, len(lengths)), seed)
    logits = models[0](full, last=1), models[1](short, last=1, multiplicity=count.to(dtype))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-12)
    for values in logits:
        nn.functional.cross_entropy(values.flatten(0, 2), target.flatten()).backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-12)
    hidden = [
        model.activations(tokens, ["hidden"], multiplicity=multiplicity)["hidden"]
        for model, tokens, multiplicity in zip(models, (full, short), (None, count), strict=True)
    ]
    for a, b in zip(*hidden, strict=True):
        present = (count > 0)[None, :, :, None]
        torch.testing.assert_close(b.where(present, -torch.inf).amax(2), a.amax(2), rtol=0, atol=1e-12)


def test_each_seed_may_have_different_multiplicities():
    model = make(JOMA)
    tables = [padded(lengths, 8, 9, seed)[1:] for seed, lengths in enumerate(([2, 5], [5, 1]))]
    tokens, count = (torch.stack(parts) for parts in zip(*tables, strict=True))
    logits = model(tokens, multiplicity=count)
    for seed, (seed_tokens, seed_count) in enumerate(tables):
        expected = model(seed_tokens, multiplicity=seed_count)[seed]
        torch.testing.assert_close(logits[seed], expected, rtol=0, atol=1e-13)


@settings(max_examples=20)
@given(options=config_options(), seed=st.integers(0, 1000), count=st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_multiplicities_are_the_formulas(options, seed, count):
    model, tokens = make(DecoderConfig(**options), (seed,)), draw_tokens(7, (1, 5), seed)
    count = np.array([max(count[0], 1), *count[1:], 1.0])
    logits = model(tokens, multiplicity=torch.tensor(count)[None]).detach().numpy()
    expected, _ = formulas(model, 0, tokens[0].numpy(), count)
    np.testing.assert_allclose(logits[0, 0], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", sorted(CHOICES["mask"]))
def test_a_sample_without_any_position_changes_no_other(mask):
    models, tokens = [make(JOMA, mask=mask) for _ in range(2)], draw_tokens(9, (3, 4))
    count = torch.tensor([[1, 2, 1, 1], [0, 0, 0, 0], [0, 0, 3, 1]])
    logits = models[0](tokens, last=1, multiplicity=count)[:, [0, 2]]
    others = models[1](tokens[[0, 2]], last=1, multiplicity=count[[0, 2]])
    torch.testing.assert_close(logits, others, rtol=0, atol=1e-13)
    logits.square().sum().backward()
    others.square().sum().backward()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


# ---- residual connections seed by seed ----


@settings(max_examples=20)
@given(
    options=config_options(),
    seed=st.integers(0, 1000),
    last=st.integers(0, 1),
    bits=st.lists(st.booleans(), min_size=64),
)
def test_every_seed_may_have_different_residual_connections(options, seed, last, bits):
    config, tokens = DecoderConfig(**options), draw_tokens(7, (3, 5), seed)
    switches = torch.tensor(bits)[: 2 * config.layers * 2].view(2, config.layers, 2)
    model = make(config, (seed, seed + 1))
    switched = Decoder(config, generators=generators(0, 1), residual=switches, dtype=torch.float64)
    model.residual_scale = switched.residual_scale
    together = model(tokens, last=last)
    for index in range(2):
        residual = tuple((bool(a), bool(b)) for a, b in switches[index])
        alone = make(config, (seed + index,), residual=residual)(tokens, last=last)
        torch.testing.assert_close(together[index], alone[0], rtol=1e-12, atol=1e-12)


def test_residual_switches_of_another_shape_are_refused():
    with pytest.raises(InputError, match="`residual`"):
        Decoder(JOMA, generators=[torch.Generator()], residual=torch.ones(2, JOMA.layers, 2))


# ---- surprisal ----


@settings(max_examples=20)
@given(options=config_options(), seed=st.integers(0, 1000), last=st.integers(0, 1), by_seed=st.booleans())
def test_surprisal_is_minus_log_probability_of_the_target(options, seed, last, by_seed):
    model, tokens = make(DecoderConfig(**options), (seed, seed + 1)), draw_tokens(7, (3, 5), seed)
    logits = model(tokens, last=last)
    shape = logits.shape[not by_seed : 3]
    target = torch.randint(logits.shape[-1], shape, generator=torch.Generator().manual_seed(seed))
    expected = -logits.log_softmax(-1).gather(-1, target.expand(logits.shape[:3])[..., None])[..., 0]
    torch.testing.assert_close(model.surprisal(tokens, target, last=last), expected, rtol=1e-12, atol=1e-12)


# ---- dropout ----


@settings(max_examples=20)
@given(
    options=config_options(),
    seed=st.integers(0, 1000),
    sites=st.sets(st.sampled_from(SITES)),
    step=st.integers(0, 10**6),
)
def test_dropout_applies_at_its_sites_with_the_masks_of_seed_and_step(options, seed, sites, step):
    config = DecoderConfig(**options, dropout=0.3, sites=tuple(sorted(sites)))
    model, tokens = make(config, (seed, seed + 5)), draw_tokens(7, (1, 4), seed)
    key = noise.key(torch.tensor([seed, seed + 5]), step)
    logits = model(tokens, noise=key).detach().numpy()
    for index in range(2):

        def drop(layer, site, x, index=index):
            if site not in sites:
                return x
            site_key = key if site == "embedding" else noise.split(key, config.layers)[layer]
            seed_key, number = site_key[:, index : index + 1], SITES.index(site)
            return noise.dropout(torch.tensor(x)[None], 0.3, key=seed_key, site=number)[0].numpy()

        expected, _ = formulas(model, index, tokens[0].numpy(), drop=drop)
        np.testing.assert_allclose(logits[index, 0], expected, rtol=1e-11, atol=1e-12)


def test_dropout_needs_a_key_and_keeps_the_mean():
    model, tokens = make(WIKITEXT, (0,), sites=("embedding",)), draw_tokens(11, (2, 6))
    undropped = {"residual": []}
    assert model.final_states(tokens, watched=undropped).equal(model.final_states(tokens))
    embedded = []
    for step in range(400):
        watched = {"residual": []}
        model.final_states(tokens, noise=noise.key(torch.tensor([0]), step), watched=watched)
        embedded.append(watched["residual"][0].detach())
    x, drops = undropped["residual"][0].detach(), torch.stack(embedded)
    score = (drops.mean(0) - x) / (x.abs() * math.sqrt(0.2 / 0.8 / 400))
    assert score.abs().max() < 4.5
    assert score.std() == pytest.approx(1.0, abs=0.25)


# ---- bad input ----


def test_values_are_never_read_except_on_the_cpu():
    """The meta device has no values: a forward or backward pass that waits for the device would fail."""
    model = Decoder(WIKITEXT, generators=generators(0, 1)).to("meta")
    key = noise.key(torch.arange(2, device="meta"), torch.tensor(3, device="meta"))
    tokens = torch.zeros(4, 7, dtype=torch.int64, device="meta")
    logits = model(tokens, noise=key, multiplicity=torch.ones(4, 7, device="meta"))
    logits.sum().backward()
    assert logits.shape == (2, 4, 7, 11)


@pytest.mark.parametrize("tokens", [[[[11]], [[0]]], [[[0]], [[-1]]]])
def test_a_token_outside_the_vocabulary_reads_no_other_seed(tokens):
    """On CUDA the values of tokens are not checked: the lookup itself must fail."""
    with pytest.raises(IndexError):
        Decoder._embed(torch.tensor(tokens), make(WIKITEXT).embedding)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model(torch.zeros(4, dtype=torch.int64)), "`tokens` must be whole numbers"),
        (lambda model: model(torch.zeros(2, 4)), "`tokens` must be whole numbers.*got torch.float32"),
        (lambda model: model(torch.zeros(3, 2, 4, dtype=torch.int64)), "of 2 seeds, got.*3, 2, 4"),
        (lambda model: model(torch.zeros(2, 0, dtype=torch.int64)), "`tokens` must have 1 to"),
        (lambda model: model(torch.zeros(1, 13, dtype=torch.int64)), "have 1 to 12 positions, got 13; cut them"),
        (lambda model: model(torch.tensor([[0, 11]])), r"`tokens` must be in \[0, 10\], got 0 to 11"),
        (lambda model: model(torch.tensor([[0, -1]])), r"`tokens` must be in \[0, 10\], got -1 to 0"),
        (
            lambda model: model(torch.tensor([[0, 1]]), multiplicity=torch.ones(2, 2)),
            r"`multiplicity` must be shaped like the tokens, got \(2, 2\) for tokens \(1, 2\)",
        ),
        (
            lambda model: model(torch.tensor([[0, 1]]), noise=noise.key(torch.tensor([0]), 0)),
            "`key` must be of 2 seeds, like x, got 1",
        ),
        (lambda model: model.activations(torch.tensor([[0]]), ["attn"]), "`names` must be one of attention, hidden"),
        (lambda model: Decoder(model.config, generators=[]), "`generators` must be one torch.Generator for each seed"),
    ],
)
def test_bad_calls_are_named(call, message):
    with pytest.raises(InputError, match=message):
        call(make(WIKITEXT))


@pytest.mark.parametrize("sizes", [{"width": 10**8}, {"width": 8, "layers": 10**12}, {"width": 8, "hidden": 10**15}])
def test_sizes_beyond_memory_are_refused_before_anything_is_allocated(sizes):
    with pytest.raises(InputError, match=r"`config` must be small enough for this machine's memory, got a size of .*B"):
        Decoder(DecoderConfig(vocabulary=10, **sizes), generators=[torch.Generator()])


def test_the_count_of_parameters_is_right_but_for_biases_and_norms():
    config = DecoderConfig(7, 8, 2, hidden=5, outputs=3, length=6, positions="learned", norm="none")
    bare = {"attention_bias": False, "mlp_bias": False, "head_bias": False}
    model = Decoder(dataclasses.replace(config, **bare), generators=[torch.Generator()])
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameter_count
