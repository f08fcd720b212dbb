"""The one-layer model compared with the block, and with plain formulas that walk over samples and positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError, StateError
from joma.models import ACTIVATIONS, ATTENTIONS, Block, BlockConfig, OneLayer, OneLayerConfig
from joma.models.one_layer import PARAMETERS, prefix_frequencies

TOKENS, OUTPUTS, QUERIES, SAMPLES, LENGTH = 5, 3, 2, 4, 6
SCALES = {"scale": 0.7, "scale_z": 0.8, "scale_qk": 0.6, "scale_values": 0.5}
ALL_ON = OneLayerConfig(
    tokens=TOKENS,
    outputs=TOKENS,
    hidden=7,
    positions="all",
    logits="product",
    embeddings="learned",
    activation="gelu",
    head_width=3,
    values=4,
    norm=True,
    skip=True,
    **SCALES,
)


def streams(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@st.composite
def configs(draw):
    """Every combination of the switches."""
    positions, hidden = draw(st.sampled_from(["one", "all"])), draw(st.sampled_from([0, 7]))
    return OneLayerConfig(
        tokens=TOKENS,
        outputs=OUTPUTS,
        hidden=hidden,
        queries=draw(st.sampled_from([1, QUERIES])) if positions == "one" else 1,
        dim=draw(st.sampled_from([None, 9])),
        positions=positions,
        logits=draw(st.sampled_from(["free", "product"])),
        embeddings=draw(st.sampled_from(["fixed", "learned"])),
        attention=draw(st.sampled_from(sorted(ATTENTIONS))),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        head_width=draw(st.sampled_from([None, 3])),
        values=draw(st.sampled_from([0, 4])),
        residual=draw(st.booleans()),
        norm=draw(st.booleans()),
        skip=draw(st.booleans()) if hidden else False,
        **SCALES,
    )


def contexts(config, seed, seeds=None):
    """Return sequences [sample, position], or [seed, sample, position] of their own for each seed, and queries."""
    rng = torch.Generator().manual_seed(seed)
    leading = (SAMPLES,) if seeds is None else (seeds, SAMPLES)
    sequences = torch.randint(TOKENS, (*leading, LENGTH), generator=rng)
    return sequences, torch.randint(config.queries, leading, generator=rng)


def arguments(config, sequences, query):
    """Return what the model is called with: tokens for all positions, or else frequencies and queries."""
    if config.positions == "all":
        return (sequences,)
    x = F.one_hot(sequences, TOKENS).double().mean(-2)
    return (x, None if config.queries == 1 else query)


def weights_by_position(config, scores):
    """Return the attention weight of each position of one context of scores [position]."""
    if config.attention == "softmax":
        return torch.softmax(scores, -1)
    return (scores.exp() if config.attention == "exp" else scores) / len(scores)


def reference(config, parameters, embeddings, context, query):
    """Return the outputs of one seed for one query, with one score, one weight and one value for each position."""
    e, u = embeddings[:, context].T, query
    if config.logits == "free":
        scores = parameters["z"][context] if config.positions == "one" else parameters["z"][context[-1], context]
    else:
        scores = (e @ parameters["W_K"]) @ (u @ parameters["W_Q"])
    weights = weights_by_position(config, scores)
    f = weights @ (e @ parameters["W_V"] @ parameters["W_O"] if config.values else e)
    f = f + u if config.residual else f
    normed = (f - f.mean()) / (f.var(correction=0) + 1e-5).sqrt() if config.norm else f
    h = ACTIVATIONS[config.activation](normed @ parameters["w"])
    if not config.hidden:
        return h
    return (f + h @ parameters["upper"] if config.skip else h) @ parameters["head"]


def reference_outputs(model, seed, sequences, query):
    """Return the outputs of the reference for one seed, walking over its samples and, for all positions, prefixes."""
    config = model.config
    parameters = {name: getattr(model, name)[seed] for name in PARAMETERS if getattr(model, name) is not None}
    embeddings = model.E[seed] if config.embeddings == "learned" else model.E
    if config.positions == "all":
        return torch.stack(
            [
                torch.stack(
                    [
                        reference(config, parameters, embeddings, sequence[: end + 1], embeddings[:, sequence[end]])
                        for end in range(LENGTH)
                    ]
                )
                for sequence in sequences
            ]
        )
    outputs = []
    for sequence, q in zip(sequences, query, strict=True):
        of_query = parameters | ({"z": parameters["z"][q]} if config.logits == "free" else {})
        outputs.append(reference(config, of_query, embeddings, sequence, embeddings[:, TOKENS + q]))
    return torch.stack(outputs)


@given(config=configs(), seed=st.integers(0, 2**31))
def test_outputs_and_gradients_are_those_of_a_plain_reference(config, seed):
    model = OneLayer(config, generators=streams(seed, seed + 1))
    sequences, query = contexts(config, seed, seeds=2)
    outputs = model(*arguments(config, sequences, query))
    expected = torch.stack([reference_outputs(model, s, sequences[s], query[s]) for s in range(2)])
    torch.testing.assert_close(outputs, expected, rtol=1e-11, atol=1e-12)
    direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = (torch.autograd.grad((direction * y).sum(), parameters) for y in (outputs, expected))
    for name, gradient, of_reference in zip(names, *gradients, strict=True):
        torch.testing.assert_close(gradient, of_reference, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: n + text)


@given(
    attention=st.sampled_from(sorted(ATTENTIONS)),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    options=st.fixed_dictionaries({"residual": st.booleans(), "norm": st.booleans()}),
    queries=st.sampled_from([1, QUERIES]),
    seed=st.integers(0, 2**31),
)
def test_without_switches_it_is_the_block(attention, activation, options, queries, seed):
    options = {"tokens": TOKENS, "queries": queries, "attention": attention, "activation": activation, **options}
    block = Block(BlockConfig(hidden=OUTPUTS, scale=0.7, **options), generators=streams(seed, seed + 1))
    model = OneLayer(OneLayerConfig(outputs=OUTPUTS, **options), generators=streams(0, 1))
    with torch.no_grad():
        model.w.copy_(block.w)
        model.z.copy_(block.z)
    x, query = arguments(model.config, *contexts(model.config, seed, seeds=2))
    outputs = [module(x, query) for module in (block, model)]
    assert torch.equal(*outputs)
    for h in outputs:
        (h**2).mean().backward()
    for name in ("w", "z"):
        torch.testing.assert_close(getattr(model, name).grad, getattr(block, name).grad, rtol=1e-12, atol=1e-14)
    assert torch.equal(model.v, block.v)
    torch.testing.assert_close(model.pull(), block.pull(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.mean_attention(), block.mean_attention(), rtol=1e-12, atol=0)


@given(config=configs(), seeds=st.lists(st.integers(0, 999), min_size=2, max_size=4, unique=True))
def test_a_seed_has_the_same_numbers_alone_and_among_others(config, seeds):
    together = OneLayer(config, generators=streams(*seeds))
    call = arguments(config, *contexts(config, 3))
    for position, seed in enumerate(seeds):
        alone = OneLayer(config, generators=streams(seed))
        for name, parameter in alone.named_parameters():
            assert torch.equal(parameter[0], together.get_parameter(name)[position])
        torch.testing.assert_close(alone(*call)[0], together(*call)[position], rtol=1e-12, atol=1e-13)


SWITCHED = {
    "hidden": {"hidden": 9},
    "positions": {"positions": "one"},
    "logits": {"logits": "free"},
    "embeddings": {"embeddings": "fixed"},
    "activation": {"activation": "linear"},
    "values": {"values": 0},
    "norm": {"norm": False},
    "skip": {"skip": False},
}


@pytest.mark.parametrize("switch", SWITCHED)
def test_a_switch_changes_no_parameter_that_it_does_not_reshape(switch):
    before = dict(OneLayer(replace(ALL_ON, dim=9), generators=streams(5)).named_parameters())
    switched = OneLayer(replace(ALL_ON, dim=9, **SWITCHED[switch]), generators=streams(5))
    same = {
        name: parameter
        for name, parameter in switched.named_parameters()
        if name != "E" and name in before and parameter.shape == before[name].shape
    }
    assert {"logits": "w", "hidden": "W_Q"}.get(switch, "w") in same
    for name, parameter in same.items():
        assert torch.equal(parameter, before[name])


def test_parameters_are_standard_normals_times_their_scale():
    config = OneLayerConfig(tokens=90, outputs=95, hidden=99, values=97, logits="product", skip=True, **SCALES)
    model = OneLayer(config, generators=streams(0, 1))
    free = OneLayer(replace(config, logits="free", queries=93), generators=streams(0, 1))
    expected = {"w": 0.7, "upper": 0.7, "head": 0.7, "W_Q": 0.6, "W_K": 0.6, "W_V": 0.5, "W_O": 0.5}
    for name, scale in expected.items():
        assert float(getattr(model, name).std().detach()) == pytest.approx(scale, rel=0.02)  # over 16,000 numbers
    assert free.z is not None
    assert float(free.z.std().detach()) == pytest.approx(0.8, rel=0.02)
    drawn = [
        parameter.detach()[0].flatten()[:9] / scale
        for parameter, scale in zip((getattr(model, name) for name in expected), expected.values(), strict=True)
    ]
    assert len({tuple(values.tolist()) for values in drawn}) == len(expected)  # no two share a stream


def test_learned_embeddings_start_from_the_fixed_ones_and_float32_rounds_float64():
    basis = torch.linalg.qr(torch.randn(9, 9, generator=streams(0)[0], dtype=torch.float64))[0][:, :TOKENS]
    learned, fixed = (
        OneLayer(replace(ALL_ON, embeddings=kind), generators=streams(1, 2), embeddings=basis)
        for kind in ("learned", "fixed")
    )
    tokens = contexts(ALL_ON, 0)[0]
    torch.testing.assert_close(learned(tokens), fixed(tokens), rtol=1e-13, atol=1e-14)
    assert "E" not in dict(fixed.named_parameters())
    rounded = OneLayer(ALL_ON, generators=streams(1, 2), embeddings=basis, dtype=torch.float32)
    assert all(
        torch.equal(parameter, learned.get_parameter(name).float()) for name, parameter in rounded.named_parameters()
    )
    assert rounded(tokens).dtype == torch.float32


def backward(model, call, seed):
    """Propagate a smooth loss with a nonlinear dependence on the outputs."""
    target = torch.randn(model(*call).shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ((model(*call) - target) ** 2).sum(-1).flatten(1).mean(-1).sum().backward()


@given(config=configs(), seed=st.integers(0, 2**31))
def test_values_grow_and_logits_pull_as_the_value_path_says(config, seed):
    """Section 8 of the theory: p_l · ṗ_l = E[b_l y_l], and Σ_m ż_ml is that less `pull` for softmax attention."""
    config = replace(config, embeddings="fixed", values=4, logits="free")
    model = OneLayer(config, generators=streams(seed, seed + 1))
    backward(model, arguments(config, *contexts(config, seed, seeds=2)), seed)
    p_dot = -(model.U_C.mT @ model.W_V.grad)
    growth = (model.value_vectors * p_dot).sum(-1)
    z_dot = -model.z.grad
    moved = {
        "linear": lambda: (model.z * z_dot).sum(1),
        "exp": lambda: z_dot.sum(1),
        "softmax": lambda: z_dot.sum(1) + model.pull(),
    }[config.attention]()
    torch.testing.assert_close(moved, growth, rtol=1e-8, atol=1e-10)


@given(config=configs(), seed=st.integers(0, 2**31))
def test_keys_grow_as_values_do_with_linear_attention_and_product_logits(config, seed):
    config = replace(config, embeddings="fixed", values=4, logits="product", attention="linear")
    model = OneLayer(config, generators=streams(seed))
    backward(model, arguments(config, *contexts(config, seed, seeds=1)), seed)
    of_keys = (model.key_vectors * (model.U_C.mT @ model.W_K.grad)).sum(-1)
    of_values = (model.value_vectors * (model.U_C.mT @ model.W_V.grad)).sum(-1)
    torch.testing.assert_close(of_keys, of_values, rtol=1e-8, atol=1e-10)


def test_attention_of_every_position_is_causal_and_sums_to_one():
    model, (tokens, _) = OneLayer(ALL_ON, generators=streams(0)), contexts(ALL_ON, 4)
    b = model.attend(tokens).detach()[0]
    np.testing.assert_allclose(b.sum(-1), 1.0, rtol=1e-13)
    for sample, position in np.ndindex(SAMPLES, LENGTH):
        seen = set(tokens[sample, : position + 1].tolist())
        assert {int(token) for token in b[sample, position].nonzero()} == seen


@given(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=8))
def test_prefix_frequencies_count_the_positions_up_to_each(tokens):
    frequencies = prefix_frequencies(torch.tensor(tokens), TOKENS).numpy()
    for end in range(len(tokens)):
        counts = np.bincount(tokens[: end + 1], minlength=TOKENS)
        np.testing.assert_allclose(frequencies[end], counts / (end + 1), rtol=1e-15)


@pytest.mark.parametrize(
    ("options", "call", "names"),
    [
        ({}, (torch.ones(SAMPLES, LENGTH),), "x"),
        ({}, (torch.zeros(3, SAMPLES, LENGTH, dtype=torch.long),), "x"),
        ({}, (torch.full((SAMPLES, LENGTH), TOKENS),), "x"),
        ({}, (torch.zeros(SAMPLES, LENGTH, dtype=torch.long), torch.zeros(SAMPLES)), "query"),
        ({"positions": "one"}, (torch.ones(SAMPLES, TOKENS + 1),), "x"),
        ({"positions": "one", "queries": 2}, (torch.ones(SAMPLES, TOKENS),), "query"),
    ],
)
def test_bad_contexts_are_named(options, call, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        OneLayer(replace(ALL_ON, **options), generators=streams(0))(*call)


def test_what_the_switches_leave_out_is_named():
    plain = OneLayer(OneLayerConfig(tokens=TOKENS, outputs=OUTPUTS), generators=streams(0))
    for read in (lambda: plain.value_vectors, lambda: plain.key_vectors, lambda: plain.query_vectors):
        with pytest.raises(InputError, match="`config` must have"):
            read()
    with pytest.raises(StateError, match="`model` needs a forward pass first"):
        plain.mean_attention()


def test_sizes_beyond_memory_are_refused_before_anything_is_allocated():
    with pytest.raises(InputError, match=r"`config` must be small enough for this machine's memory, got a size of .*B"):
        OneLayer(OneLayerConfig(tokens=10**8, outputs=1), generators=[torch.Generator()])


def test_embeddings_that_cannot_be_orthonormal_are_refused():
    with pytest.raises(InputError, match="`dim`"):
        OneLayer(replace(ALL_ON, dim=TOKENS - 1), generators=streams(0))
    with pytest.raises(InputError, match="`embeddings`"):
        OneLayer(ALL_ON, generators=streams(0), embeddings=torch.eye(TOKENS + 1))
