"""The decoder against its formulas in NumPy, position by position, and against torch's own modules, seed by seed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import erf, expit
from torch import nn

from joma import noise
from joma.arguments import InputError
from joma.models.transformer import CHOICES, INITS, SITES, Decoder, DecoderConfig

PHI = {
    "linear": lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "gelu": lambda y: y * (1 + erf(y / np.sqrt(2))) / 2,
    "silu": lambda y: y * expit(y),
    "tanh": np.tanh,
}
# The hierarchy table's decoder, and the one of the WikiText figure, at small sizes.
JOMA = DecoderConfig(
    vocabulary=9, width=6, layers=3, hidden=7, outputs=4, norm="post", projection=False, attention_bias=False
)
WIKITEXT = DecoderConfig(
    vocabulary=11,
    width=6,
    layers=2,
    hidden=6,
    length=12,
    norm="post",
    positions="sinusoidal",
    scale_embedding=True,
    dropout=0.2,
    init="encoder",
)


def streams(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def make(config, seeds=(0, 1), **changes):
    """A float64 decoder whose biases, gains and offsets are not at their special start."""
    model = Decoder(dataclasses.replace(config, **changes), generators=streams(*seeds), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            for own, seed in zip(parameter, seeds, strict=True):
                shift = torch.randn(own.shape, generator=streams(seed + 100)[0], dtype=torch.float64)
                own.add_(shift, alpha=0.3 if name.endswith(("bias", "gain", "offset")) else 0.0)
    return model


def sequences(vocabulary, shape, seed=0):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def arrays(model, seed):
    return {name: parameter[seed].detach().numpy() for name, parameter in model.named_parameters()}


# ---- the formulas ----


def affine(p, name, x):
    return x @ p[f"{name}.weight"] + p.get(f"{name}.bias", 0.0)


def layer_norm(p, name, x):
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return unit * p[f"{name}.gain"] + p[f"{name}.offset"]


def turned(x, position):
    """Rotary positions as complex numbers."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def attend(p, name, x, *, config, count, drop, seen_by_layer):
    """One sequence; position `j` counts `count[j]` times."""
    length, part = len(x), config.width // config.heads
    value = affine(p, f"{name}.value", x)
    mixed, seen = np.zeros_like(value), np.zeros((config.heads, length, length))
    for head in range(config.heads):
        own = slice(head * part, (head + 1) * part)
        for i in range(length):
            keys = [j for j in range(length) if count[j] > 0 and (j <= i or config.mask == "full")]
            scores = np.zeros(len(keys))
            if config.attention != "uniform":
                q, k = affine(p, f"{name}.query", x[i])[own], affine(p, f"{name}.key", x[keys])[:, own]
                if config.positions == "rotary":
                    q, k = turned(q, i), np.array([turned(row, j) for row, j in zip(k, keys, strict=True)])
                scores = k @ q / math.sqrt(part)
            w = count[keys] * np.exp(scores - scores.max(initial=-np.inf))
            seen[head, i, keys] = w / w.sum()
    seen_by_layer.append(seen)
    dropped = drop("weights", seen)
    for head in range(config.heads):
        own = slice(head * part, (head + 1) * part)
        mixed[:, own] = dropped[head] @ value[:, own]
    return drop("attention", affine(p, f"{name}.projection", mixed) if config.projection else mixed)


def no_drop(layer, site, x):  # noqa: ARG001
    return x


def formulas(model, seed, tokens, count=None, drop=no_drop):
    """Logits and attention weights of one sequence under one seed; `drop` is called in order."""
    config, p = model.config, arrays(model, seed)
    count = np.ones(len(tokens)) if count is None else count
    x = p["embedding"][tokens] * (math.sqrt(config.width) if config.scale_embedding else 1.0)
    if config.positions == "learned":
        x = x + p["positions"][: len(tokens)]
    if config.positions == "sinusoidal":
        for i in range(len(tokens)):
            for unit in range(config.width):
                angle = i / 10_000 ** (unit // 2 * 2 / config.width)
                x[i, unit] += math.cos(angle) if unit % 2 else math.sin(angle)
    x, seen = drop(0, "embedding", x), []
    for number in range(config.layers):
        name = f"layers.{number}"

        def own_drop(site, y, number=number):
            return drop(number, site, y)

        def mlp(y, name=name, own_drop=own_drop):
            hidden = PHI[config.activation](affine(p, f"{name}.lower", y))
            return own_drop("mlp", affine(p, f"{name}.upper", own_drop("hidden", hidden)))

        def attention(y, name=name, own_drop=own_drop):
            return attend(p, f"{name}.attention", y, config=config, count=count, drop=own_drop, seen_by_layer=seen)

        pair = (config.residual,) * 2 if isinstance(config.residual, bool) else config.residual[number]
        for part, function in enumerate((attention, mlp)):
            y = function(layer_norm(p, f"{name}.norms.{part}", x) if config.norm == "pre" else x)
            x = x + y if pair[part] else y
            x = layer_norm(p, f"{name}.norms.{part}", x) if config.norm == "post" else x
    x = layer_norm(p, "norm", x) if config.norm == "pre" else x
    return (x @ p["embedding"].T if config.tied else affine(p, "head", x)), seen


@st.composite
def parts(draw):
    """The options of a config: not the config itself, since the run-time checker may not draw inside a strategy."""
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pairs = st.tuples(*[st.tuples(st.booleans(), st.booleans())] * layers)
    tied = draw(st.booleans())
    named = {name: draw(st.sampled_from(sorted(CHOICES[name]))) for name in CHOICES}
    switches = ("projection", "attention_bias", "mlp_bias", "head_bias", "scale_embedding")
    return {
        "vocabulary": 7,
        "width": heads * draw(st.sampled_from([2, 4])),
        "layers": layers,
        "heads": heads,
        "hidden": draw(st.sampled_from([None, 3])),
        "outputs": None if tied else draw(st.sampled_from([None, 5])),
        "length": 6,
        "activation": draw(st.sampled_from(sorted(PHI))),
        "init": draw(st.sampled_from(sorted(INITS))),
        "residual": draw(st.booleans() | pairs),
        "tied": tied,
        **named,
        **{name: draw(st.booleans()) for name in switches},
    }


@settings(max_examples=40)
@given(options=parts(), seed=st.integers(0, 1000), own=st.booleans(), length=st.integers(1, 6))
def test_logits_and_attention_are_the_formulas(options, seed, own, length):
    model = make(config := DecoderConfig(**options), (seed, seed + 1))
    tokens = sequences(7, (2, 3, length) if own else (3, length), seed)
    logits = model(tokens).detach().numpy()
    weights = [w.detach().numpy() for w in model.activations(tokens, ["attention"])["attention"]]
    for which in range(2):
        for sample in range(3):
            expected, seen = formulas(model, which, (tokens[which] if own else tokens)[sample].numpy())
            np.testing.assert_allclose(logits[which, sample], expected, rtol=1e-11, atol=1e-12)
            for layer in range(config.layers):
                np.testing.assert_allclose(weights[layer][which, sample], seen[layer], rtol=1e-11, atol=1e-13)


@settings(max_examples=25)
@given(options=parts(), seed=st.integers(0, 1000))
def test_the_last_positions_alone(options, seed):
    model, tokens = make(DecoderConfig(**options), (seed,)), sequences(7, (3, 5), seed)
    whole = model(tokens)
    for count in (1, 3, 5):
        last = model(tokens, last=count)
        assert last.shape == (1, 3, count, whole.shape[-1])
        torch.testing.assert_close(last, whole[:, :, -count:], rtol=1e-12, atol=1e-13)


@settings(max_examples=40)
@given(options=parts(), seed=st.integers(0, 1000), lengths=st.lists(st.integers(2, 5), min_size=1, max_size=4))
def test_sequences_in_a_row_are_as_each_alone(options, seed, lengths):
    model = make(DecoderConfig(**options), (seed, seed + 1))
    alone = [sequences(7, (3, length), seed + n) for n, length in enumerate(lengths)]
    for last in (0, 2):
        together = model(torch.cat(alone, dim=1), last=last, lengths=lengths)
        expected = torch.cat([model(tokens, last=last) for tokens in alone], dim=2)
        torch.testing.assert_close(together, expected, rtol=1e-11, atol=1e-12)


@settings(max_examples=25)
@given(
    options=parts(),
    seed=st.integers(0, 1000),
    names=st.lists(st.sampled_from(["none", "sinusoidal", "learned"]), min_size=1, max_size=3),
)
def test_every_seed_may_have_an_encoding_of_its_own(options, seed, names):
    """Numbers and slopes of each seed are those of a model that has its encoding alone."""
    config = DecoderConfig(**options | {"positions": "none", "length": 5})
    seeds, tokens = range(seed, seed + len(names)), sequences(7, (3, 5), seed)
    model = Decoder(config, generators=streams(*seeds), positions=names, dtype=torch.float64)
    together = model(tokens)
    together.square().sum().backward()
    for place, (own, name) in enumerate(zip(seeds, names, strict=True)):
        alone = Decoder(dataclasses.replace(config, positions=name), generators=streams(own), dtype=torch.float64)
        expected = alone(tokens)
        torch.testing.assert_close(together[[place]], expected, rtol=1e-11, atol=1e-12)
        expected.square().sum().backward()
        for key, parameter in alone.named_parameters():
            if parameter.grad is None:  # frozen
                assert model.get_parameter(key).grad is None
                continue
            torch.testing.assert_close(model.get_parameter(key).grad[[place]], parameter.grad, rtol=1e-9, atol=1e-10)
        if name != "learned" and "learned" in names:
            assert not model.positions[place].any()
            assert not model.positions.grad[place].any()


def test_all_else_starts_the_same_whatever_the_encoding():
    config = {"vocabulary": 5, "width": 4, "layers": 2, "heads": 2, "length": 3}
    models = [
        Decoder(DecoderConfig(**config, positions=name), generators=streams(0, 1)) for name in CHOICES["positions"]
    ]
    for key, first in models[0].named_parameters():
        assert all(model.get_parameter(key).equal(first) for model in models)


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
        Decoder(DecoderConfig(vocabulary=5, width=4, **config), generators=streams(0, 1), positions=names)


def test_lengths_that_do_not_fit_are_named():
    model = make(JOMA)
    with pytest.raises(InputError, match=r"`lengths` must add up to 5, got \(2, 2\)"):
        model(sequences(7, (3, 5)), lengths=(2, 2))
    with pytest.raises(InputError, match="`last` must be at most the length of each sequence, got 2 for lengths 1, 4"):
        model(sequences(7, (3, 5)), last=2, lengths=(1, 4))
    with pytest.raises(InputError, match="`last` must be a whole number of at least 0"):
        model(sequences(7, (3, 5)), last=-1)


# ---- torch's own modules ----


def encoder(model, seed):
    """The seed's weights in torch's modules: embedding, layers, final norm or identity, head."""
    config, p = model.config, {name: value[seed].detach() for name, value in model.named_parameters()}
    layers = []
    for number in range(config.layers):
        own = {name.removeprefix(f"layers.{number}."): value for name, value in p.items()}
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.heads,
            config.hidden,
            dropout=0.0,
            activation=config.activation,
            batch_first=True,
            norm_first=config.norm == "pre",
            dtype=torch.float64,
        )
        stacked = torch.cat([own[f"attention.{part}.weight"].T for part in ("query", "key", "value")])
        biases = torch.cat([own[f"attention.{part}.bias"] for part in ("query", "key", "value")])
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": stacked,
                "self_attn.in_proj_bias": biases,
                "self_attn.out_proj.weight": own["attention.projection.weight"].T,
                "self_attn.out_proj.bias": own["attention.projection.bias"],
                "linear1.weight": own["lower.weight"].T,
                "linear1.bias": own["lower.bias"],
                "linear2.weight": own["upper.weight"].T,
                "linear2.bias": own["upper.bias"],
                "norm1.weight": own["norms.0.gain"],
                "norm1.bias": own["norms.0.offset"],
                "norm2.weight": own["norms.1.gain"],
                "norm2.bias": own["norms.1.offset"],
            }
        )
        layers.append(layer)
    embedding = nn.Embedding.from_pretrained(p["embedding"].clone(), freeze=False)
    head = nn.Linear(config.width, config.outputs or config.vocabulary, dtype=torch.float64)
    head.load_state_dict({"weight": p["head.weight"].T, "bias": p["head.bias"]})
    norm = nn.Identity()
    if config.norm == "pre":
        norm = nn.LayerNorm(config.width, dtype=torch.float64)
        norm.load_state_dict({"weight": p["norm.gain"], "bias": p["norm.offset"]})
    return nn.ModuleDict({"embedding": embedding, "layers": nn.ModuleList(layers), "norm": norm, "head": head})


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_forward_and_gradients_are_those_of_torch_encoder_layers(norm, mask, activation):
    config = DecoderConfig(vocabulary=9, width=8, layers=2, heads=2, hidden=5, norm=norm, mask=mask, init="encoder")
    model = make(config, activation=activation)
    tokens, target = sequences(9, (2, 3, 5)), sequences(9, (2, 3, 5), 1)
    logits = model(tokens)
    losses = nn.functional.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none").view(2, -1).mean(1)
    losses.sum().backward()
    future = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if mask == "causal" else None
    for seed in range(2):
        other = encoder(model, seed)
        x = other["embedding"](tokens[seed])
        for layer in other["layers"]:
            x = layer(x, src_mask=future)
        expected = other["head"](other["norm"](x))
        torch.testing.assert_close(logits[seed], expected, rtol=0, atol=1e-12)
        nn.functional.cross_entropy(expected.flatten(0, 1), target[seed].flatten()).backward()
        own = {name: parameter.grad[seed] for name, parameter in model.named_parameters()}
        pairs = [(own["embedding"], other["embedding"].weight.grad), (own["head.weight"], other["head"].weight.grad.T)]
        for number, layer in enumerate(other["layers"]):
            attention, name = layer.self_attn, f"layers.{number}"
            for third, part in enumerate(("query", "key", "value")):
                stacked = attention.in_proj_weight.grad[8 * third : 8 * third + 8].T
                pairs.append((own[f"{name}.attention.{part}.weight"], stacked))
                biases = attention.in_proj_bias.grad[8 * third : 8 * third + 8]
                pairs.append((own[f"{name}.attention.{part}.bias"], biases))
            pairs.append((own[f"{name}.attention.projection.weight"], attention.out_proj.weight.grad.T))
            pairs.append((own[f"{name}.lower.weight"], layer.linear1.weight.grad.T))
            pairs.append((own[f"{name}.upper.bias"], layer.linear2.bias.grad))
            pairs.append((own[f"{name}.norms.0.gain"], layer.norm1.weight.grad))
            pairs.append((own[f"{name}.norms.1.offset"], layer.norm2.bias.grad))
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "rotary", "heads": 2, "norm": "pre", "activation": "silu"},
        {"positions": "learned", "norm": "none", "tied": True, "activation": "gelu"},
        {"attention": "uniform", "mask": "full", "activation": "tanh"},
    ],
)
def test_gradients_by_differences(changes):
    config = DecoderConfig(vocabulary=4, width=4, hidden=3, length=3, norm="post", init="encoder", dropout=0.2)
    model = make(config, **changes)
    tokens, count = sequences(4, (2, 3)), torch.tensor([[1, 2, 1], [0, 3, 1]])
    names = [name for name, _ in model.named_parameters()]

    def logits(*values):
        options = {"multiplicity": count, "noise": noise.key(torch.tensor([0, 1]), 3)}
        everywhere = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (tokens,), options)
        return everywhere[:, count > 0]

    values = [parameter.detach().requires_grad_() for parameter in model.parameters()]
    assert torch.autograd.gradcheck(logits, values)


# ---- seeds ----


def trained(seeds, steps, dtype):
    """Adam on next-token prediction with dropout at every site."""
    model = Decoder(WIKITEXT, generators=streams(*seeds), dtype=dtype)
    rule = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        tokens = torch.stack([sequences(11, (4, 8), 1000 * seed + step) for seed in seeds])
        rule.zero_grad()
        logits = model(tokens[..., :-1], noise=noise.key(torch.tensor(seeds), step))
        nn.functional.cross_entropy(logits.flatten(0, 2), tokens[..., 1:].flatten()).mul(len(seeds)).backward()
        rule.step()
    return dict(model.named_parameters())


def test_a_seed_alone_trains_as_it_does_among_others():
    """The biases of keys are left out: softmax does not see them, and Adam turns their rounding errors into steps."""
    together, alone = trained((5, 0, 9), 20, torch.float64), trained((9,), 20, torch.float64)
    for name in alone:
        if not name.endswith("key.bias"):
            torch.testing.assert_close(together[name][2], alone[name][0], rtol=0, atol=1e-10)


@settings(max_examples=20)
@given(options=parts(), seeds=st.lists(st.integers(0, 99), min_size=2, max_size=4, unique=True))
def test_no_number_passes_between_seeds(options, seeds):
    config, tokens = DecoderConfig(**options), sequences(7, (3, 4))
    models = make(config, seeds), make(config, seeds[-1:])
    logits = [model(tokens) for model in models]
    torch.testing.assert_close(logits[0][-1:], logits[1], rtol=0, atol=1e-12)
    logits[0][-1].square().sum().backward()
    logits[1].square().sum().backward()
    for many, one in zip(*(model.parameters() for model in models), strict=True):
        assert many[-1:].equal(one)
        if many.grad is not None and one.grad is not None:
            scale = 1 + one.grad.abs().max().item()
            torch.testing.assert_close(many.grad[-1:], one.grad, rtol=0, atol=1e-12 * scale)
            assert not many.grad[:-1].any()


def test_a_seed_starts_at_the_same_point_in_every_precision():
    single = Decoder(WIKITEXT, generators=streams(3))
    double = Decoder(WIKITEXT, generators=streams(3), dtype=torch.float64)
    assert {parameter.dtype for parameter in single.parameters()} == {torch.float32}
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert a.double().equal(b)


# ---- how it starts ----


def test_linear_start_is_that_of_torch_linear_and_embedding():
    model = Decoder(DecoderConfig(vocabulary=200, width=100, hidden=300), generators=streams(0, 1))
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        theirs = {
            "layers.0.lower": nn.Linear(100, 300),
            "layers.0.upper": nn.Linear(300, 100),
            "layers.0.attention.key": nn.Linear(100, 100),
            "head": nn.Linear(100, 200),
        }
        assert stats.kstest(model.embedding.detach().flatten().numpy(), "norm").pvalue > 0.01
    finally:
        torch.random.set_rng_state(generator)
    assert_alike(model, theirs)


def test_encoder_start_is_that_of_torch_encoder_layer():
    config = DecoderConfig(vocabulary=50, width=100, hidden=200, norm="post", init="encoder")
    model = Decoder(config, generators=streams(0, 1))
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        layer = nn.TransformerEncoderLayer(100, 1, 200)
    finally:
        torch.random.set_rng_state(generator)
    for part in ("query", "key", "value"):
        linear = getattr(model.layers[0].attention, part)
        assert_same_distribution(linear.weight, layer.self_attn.in_proj_weight)
        assert not linear.bias.any()
    theirs = {"attention.projection": layer.self_attn.out_proj, "lower": layer.linear1, "upper": layer.linear2}
    assert_alike(model.layers[0], theirs)
    for table in (model.embedding, model.head.weight):
        assert stats.kstest(table.detach().flatten().numpy(), "uniform", args=(-0.1, 0.2)).pvalue > 0.01
    assert not model.head.bias.any()


@pytest.mark.parametrize("init", ["linear", "encoder", "small"])
def test_layers_that_start_alike_are_copies_of_the_first_and_nothing_else_starts_otherwise(init):
    own, other = (
        Decoder(dataclasses.replace(WIKITEXT, layers=3, init=init, alike=alike), generators=streams(0, 1))
        for alike in (True, False)
    )
    first = dict(own.layers[0].named_parameters())
    for layer, apart in zip(own.layers[1:], other.layers[1:], strict=True):
        for name, value in layer.named_parameters():
            assert torch.equal(value, first[name])
            assert value.data_ptr() != first[name].data_ptr()
        assert not torch.equal(apart.lower.weight, first["lower.weight"])
    rest = {name: value for name, value in other.named_parameters() if not name.startswith(("layers.1", "layers.2"))}
    for name, value in rest.items():
        assert torch.equal(value, own.get_parameter(name))


def assert_alike(model, theirs):
    for name, linear in theirs.items():
        mine = model.get_submodule(name)
        assert_same_distribution(mine.weight, linear.weight)
        assert_same_distribution(mine.bias, linear.bias)


def assert_same_distribution(mine, theirs):
    mine, theirs = mine.detach().flatten().numpy(), theirs.detach().flatten().numpy()
    if not theirs.any():
        assert not mine.any()
        return
    assert stats.ks_2samp(mine, theirs).pvalue > 0.01
    assert abs(mine).max() == pytest.approx(abs(theirs).max(), rel=0.05)


# ---- switches ----


def test_frozen_attention_has_no_gradient_and_changes_nothing_else():
    models = [make(JOMA, attention=attention) for attention in ("trained", "frozen")]
    for model in models:
        model(sequences(9, (3, 5)), last=1).square().sum().backward()
    frozen = set()
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert a.equal(b)
        if b.grad is None:
            frozen.add(name)
        else:
            assert a.grad.equal(b.grad)
    assert frozen == {f"layers.{number}.attention.{part}.weight" for number in range(3) for part in ("query", "key")}


def test_uniform_attention_starts_as_its_trained_twin():
    uniform, full = make(JOMA, attention="uniform"), make(JOMA)
    own = dict(full.named_parameters())
    for name, parameter in uniform.named_parameters():
        assert parameter.equal(own[name])
    assert len(own) == len(list(uniform.parameters())) + 6
    weights = uniform.activations(sequences(9, (2, 4)), ["attention"])["attention"][1]
    expected = torch.tensor([[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]).double()
    torch.testing.assert_close(weights, expected.expand(2, 2, 1, 4, 4), rtol=1e-7, atol=0)


def test_activations_are_named_by_layer():
    model, tokens = make(JOMA), sequences(9, (3, 5))
    kept = model.activations(tokens)
    assert [tuple(value.shape) for value in kept["attention"]] == [(2, 3, 1, 5, 5)] * 3
    assert [tuple(value.shape) for value in kept["hidden"]] == [(2, 3, 5, 7)] * 3
    assert [tuple(value.shape) for value in kept["residual"]] == [(2, 3, 5, 6)] * 4
    assert kept["residual"][0].equal(model.embedding[:, tokens])
    assert model.logits(kept["residual"][-1]).equal(model(tokens))
    upper, norm = model.layers[2].upper, model.layers[2].norms[1]
    assert kept["residual"][3].equal(norm(upper(kept["hidden"][2]) + model_before_mlp(model, kept)))
    assert set(model.activations(tokens, ["hidden"])) == {"hidden"}


def model_before_mlp(model, kept):
    layer, x = model.layers[2], kept["residual"][2]
    return layer.norms[0](x + (kept["attention"][2] @ layer.attention.value(x)[:, :, None])[:, :, 0])


def shuffled(tokens, seed):
    order = torch.randperm(tokens.shape[-1] - 1, generator=torch.Generator().manual_seed(seed))
    return torch.cat([tokens[..., order], tokens[..., -1:]], dim=-1)


@pytest.mark.parametrize("positions", sorted(CHOICES["positions"]))
@pytest.mark.parametrize("mask", sorted(CHOICES["mask"]))
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("norm", sorted(CHOICES["norm"]))
def test_who_tells_the_order(positions, mask, layers, norm):
    """Without positions, a full mask or a single causal layer cannot tell the order of the earlier tokens."""
    config = DecoderConfig(vocabulary=20, width=8, layers=layers, heads=2, length=8, norm=norm, positions=positions)
    model, tokens = make(config, mask=mask), torch.arange(16).view(2, 8)
    change = (model(shuffled(tokens, 1), last=1) - model(tokens, last=1)).abs().max()
    if positions == "none" and (mask == "full" or layers == 1):
        assert change < 1e-12
    else:
        assert change > 1e-3


def test_rotary_attention_knows_distances_alone():
    config = DecoderConfig(vocabulary=5, width=8, heads=2, length=9, positions="rotary", mask="full")
    weights = make(config).activations(torch.full((1, 9), 3), ["attention"])["attention"][0].log()
    ratio = weights[..., 1:] - weights[..., :-1]  # of neighbouring keys, [.., query, key]
    torch.testing.assert_close(ratio[..., 1:, 1:], ratio[..., :-1, :-1], rtol=0, atol=1e-12)
    assert ratio.abs().max() > 1e-2


# ---- multiplicities ----


def padded(lengths, length, vocabulary, seed):
    """Sequences with the last token of the vocabulary before them, and the same with that padding as one token."""
    width = max(lengths) + 1
    full = torch.full((len(lengths), length), vocabulary - 1)
    short = torch.full((len(lengths), width), vocabulary - 1)
    count = torch.zeros(len(lengths), width, dtype=torch.int64)
    for sample, own in enumerate(lengths):
        tokens = sequences(vocabulary - 1, (own,), seed + sample).sort().values
        full[sample, length - own :], short[sample, width - own :] = tokens, tokens
        count[sample, width - own :], count[sample, width - own - 1] = 1, length - own
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
    target = sequences(4, (2, len(lengths)), seed)
    logits = models[0](full, last=1), models[1](short, last=1, multiplicity=count.to(dtype))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-12)
    for values in logits:
        nn.functional.cross_entropy(values.flatten(0, 2), target.flatten()).backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-12)
    hidden = [
        model.activations(tokens, ["hidden"], multiplicity=own)["hidden"]
        for model, tokens, own in zip(models, (full, short), (None, count), strict=True)
    ]
    for a, b in zip(*hidden, strict=True):
        there = (count > 0)[None, :, :, None]
        torch.testing.assert_close(b.where(there, -torch.inf).amax(2), a.amax(2), rtol=0, atol=1e-12)


def test_each_seed_has_its_own_multiplicities():
    model = make(JOMA)
    tables = [padded(lengths, 8, 9, seed)[1:] for seed, lengths in enumerate(([2, 5], [5, 1]))]
    tokens, count = (torch.stack(parts) for parts in zip(*tables, strict=True))
    logits = model(tokens, multiplicity=count)
    for seed, (own, times) in enumerate(tables):
        torch.testing.assert_close(logits[seed], model(own, multiplicity=times)[seed], rtol=0, atol=1e-13)


@settings(max_examples=20)
@given(options=parts(), seed=st.integers(0, 1000), count=st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_multiplicities_are_the_formulas(options, seed, count):
    model, tokens = make(DecoderConfig(**options), (seed,)), sequences(7, (1, 5), seed)
    count = np.array([max(count[0], 1), *count[1:], 1.0])
    logits = model(tokens, multiplicity=torch.tensor(count)[None]).detach().numpy()
    expected, _ = formulas(model, 0, tokens[0].numpy(), count)
    np.testing.assert_allclose(logits[0, 0], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", sorted(CHOICES["mask"]))
def test_a_sample_without_any_position_disturbs_no_other(mask):
    models, tokens = [make(JOMA, mask=mask) for _ in range(2)], sequences(9, (3, 4))
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
@given(options=parts(), seed=st.integers(0, 1000), last=st.integers(0, 1), bits=st.lists(st.booleans(), min_size=64))
def test_every_seed_may_have_residual_connections_of_its_own(options, seed, last, bits):
    config, tokens = DecoderConfig(**options), sequences(7, (3, 5), seed)
    switches = torch.tensor(bits)[: 2 * config.layers * 2].view(2, config.layers, 2)
    model = make(config, (seed, seed + 1))
    switched = Decoder(config, generators=streams(0, 1), residual=switches, dtype=torch.float64)
    model.residual_scale = switched.residual_scale
    together = model(tokens, last=last)
    for one in range(2):
        own = tuple((bool(a), bool(b)) for a, b in switches[one])
        alone = make(config, (seed + one,), residual=own)(tokens, last=last)
        torch.testing.assert_close(together[one], alone[0], rtol=1e-12, atol=1e-12)


def test_residual_switches_of_another_shape_are_refused():
    with pytest.raises(InputError, match="`residual`"):
        Decoder(JOMA, generators=[torch.Generator()], residual=torch.ones(2, JOMA.layers, 2))


# ---- surprisal ----


@settings(max_examples=20)
@given(options=parts(), seed=st.integers(0, 1000), last=st.integers(0, 1), own=st.booleans())
def test_surprisal_is_minus_the_logarithm_of_the_targets_probability(options, seed, last, own):
    model, tokens = make(DecoderConfig(**options), (seed, seed + 1)), sequences(7, (3, 5), seed)
    logits = model(tokens, last=last)
    shape = logits.shape[own is False : 3]
    target = torch.randint(logits.shape[-1], shape, generator=torch.Generator().manual_seed(seed))
    expected = -logits.log_softmax(-1).gather(-1, target.expand(logits.shape[:3])[..., None])[..., 0]
    torch.testing.assert_close(model.surprisal(tokens, target, last=last), expected, rtol=1e-12, atol=1e-12)


# ---- dropout ----


@settings(max_examples=20)
@given(options=parts(), seed=st.integers(0, 1000), sites=st.sets(st.sampled_from(SITES)), step=st.integers(0, 10**6))
def test_dropout_acts_at_its_sites_with_the_masks_of_seed_and_step(options, seed, sites, step):
    config = DecoderConfig(**options, dropout=0.3, sites=tuple(sorted(sites)))
    model, tokens = make(config, (seed, seed + 5)), sequences(7, (1, 4), seed)
    key = noise.key(torch.tensor([seed, seed + 5]), step)
    logits = model(tokens, noise=key).detach().numpy()
    for which in range(2):

        def drop(layer, site, x, which=which):
            if site not in sites:
                return x
            own = key if site == "embedding" else noise.split(key, config.layers)[layer]
            number = SITES.index(site)
            return noise.dropout(torch.tensor(x)[None], 0.3, key=own[:, which : which + 1], site=number)[0].numpy()

        expected, _ = formulas(model, which, tokens[0].numpy(), drop=drop)
        np.testing.assert_allclose(logits[which, 0], expected, rtol=1e-11, atol=1e-12)


def test_dropout_needs_a_key_and_keeps_the_mean():
    model, tokens = make(WIKITEXT, (0,), sites=("embedding",)), sequences(11, (2, 6))
    still = model.final_states(tokens, watched=(kept := {"residual": []}))
    assert still.equal(model.final_states(tokens))
    drawn = []
    for step in range(400):
        model.final_states(tokens, noise=noise.key(torch.tensor([0]), step), watched=(own := {"residual": []}))
        drawn.append(own["residual"][0].detach())
    x, drops = kept["residual"][0].detach(), torch.stack(drawn)
    score = (drops.mean(0) - x) / (x.abs() * math.sqrt(0.2 / 0.8 / 400))
    assert score.abs().max() < 4.5
    assert score.std() == pytest.approx(1.0, abs=0.25)


def test_values_are_never_looked_at_off_the_cpu():
    """The meta device has none: a forward or backward pass that waits for the device would fail."""
    model = Decoder(WIKITEXT, generators=streams(0, 1)).to("meta")
    key = noise.key(torch.arange(2, device="meta"), torch.tensor(3, device="meta"))
    tokens = torch.zeros(4, 7, dtype=torch.int64, device="meta")
    logits = model(tokens, noise=key, multiplicity=torch.ones(4, 7, device="meta"))
    logits.sum().backward()
    assert logits.shape == (2, 4, 7, 11)


@pytest.mark.parametrize("tokens", [[[[11]], [[0]]], [[[0]], [[-1]]]])
def test_where_values_are_not_looked_at_a_strange_token_still_reads_no_other_seed(tokens):
    with pytest.raises(IndexError):
        Decoder._embed(torch.tensor(tokens), make(WIKITEXT).embedding)


# ---- bad input ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4}, "`heads` must be a divisor of the width 6, got 4; change one of them"),
        ({"heads": 2, "positions": "rotary", "length": 4}, "`width` must be even in each head with rotary.*got 3"),
        ({"positions": "learned"}, "`length` must be given with learned positions"),
        ({"norm": "rms"}, "`norm` must be one of pre, post, none, got 'rms'"),
        ({"mask": "casual"}, "did you mean 'causal'"),
        ({"attention": "linear"}, "`attention` must be one of trained, frozen, uniform"),
        ({"activation": "swish"}, "`activation` must be one of linear, relu"),
        ({"init": "xavier"}, "`init` must be one of linear, encoder, small"),
        ({"tied": True}, "`outputs` must be the vocabulary, 9, if tied, got 4; untie the head"),
        ({"residual": ((True, True),) * 2}, r"`residual` must be a bool, or a pair \(attention, mlp\) for each of 3"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), got 1.0"),
        ({"dropout": math.nan}, r"`dropout` must be in \[0, 1\)"),
        ({"sites": ("output",)}, "`sites` must be one of embedding, weights, attention, hidden, mlp"),
        ({"layers": 0}, "`layers` must be a whole number of at least 1"),
        ({"vocabulary": -3}, "`vocabulary` must be a whole number of at least 1"),
    ],
)
def test_bad_parts(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(JOMA, **changes)


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
def test_bad_calls(call, message):
    with pytest.raises(InputError, match=message):
        call(make(WIKITEXT))
