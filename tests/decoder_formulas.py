"""A decoder's formulas in NumPy, position by position, and the decoders and configs that tests compare them with."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.special import erf, expit

from joma.models.transformer import CHOICES, INITS, Decoder, DecoderConfig

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


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def make(config, seeds=(0, 1), **changes):
    """Return a float64 decoder whose biases, gains and offsets are not at their initial values of 0 and 1."""
    model = Decoder(dataclasses.replace(config, **changes), generators=generators(*seeds), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            for values, seed in zip(parameter, seeds, strict=True):
                shift = torch.randn(values.shape, generator=generators(seed + 100)[0], dtype=torch.float64)
                values.add_(shift, alpha=0.3 if name.endswith(("bias", "gain", "offset")) else 0.0)
    return model


def draw_tokens(vocabulary, shape, seed=0):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def config_options(draw):
    """The options of a config: not the config itself, since the run-time checker may not draw inside a strategy."""
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pairs = st.tuples(*[st.tuples(st.booleans(), st.booleans())] * layers)
    tied = draw(st.booleans())
    choices = {name: draw(st.sampled_from(sorted(CHOICES[name]))) for name in CHOICES}
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
        **choices,
        **{name: draw(st.booleans()) for name in switches},
    }


def affine(p, name, x):
    return x @ p[f"{name}.weight"] + p.get(f"{name}.bias", 0.0)


def layer_norm(p, name, x):
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return unit * p[f"{name}.gain"] + p[f"{name}.offset"]


def rotate(x, position):
    """Return a query or key with its rotary position applied, by complex numbers."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def attention_weights(p, name, x, *, config, count):
    """Return the weights [head, query, key] of one sequence whose position j counts `count[j]` times."""
    length, part = len(x), config.width // config.heads
    weights = np.zeros((config.heads, length, length))
    for head in range(config.heads):
        units = slice(head * part, (head + 1) * part)
        for i in range(length):
            keys = [j for j in range(length) if count[j] > 0 and (j <= i or config.mask == "full")]
            scores = np.zeros(len(keys))
            if config.attention != "uniform":
                q, k = affine(p, f"{name}.query", x[i])[units], affine(p, f"{name}.key", x[keys])[:, units]
                if config.positions == "rotary":
                    q, k = rotate(q, i), np.array([rotate(row, j) for row, j in zip(k, keys, strict=True)])
                scores = k @ q / math.sqrt(part)
            w = count[keys] * np.exp(scores - scores.max(initial=-np.inf))
            weights[head, i, keys] = w / w.sum()
    return weights


def attend(p, name, x, weights, *, config, drop):
    """Return the output of attention with the given weights."""
    value, part = affine(p, f"{name}.value", x), config.width // config.heads
    mixed, dropped = np.zeros_like(value), drop("weights", weights)
    for head in range(config.heads):
        units = slice(head * part, (head + 1) * part)
        mixed[:, units] = dropped[head] @ value[:, units]
    return drop("attention", affine(p, f"{name}.projection", mixed) if config.projection else mixed)


def embed(p, tokens, config):
    """Return the embeddings with their positional encodings."""
    x = p["embedding"][tokens] * (math.sqrt(config.width) if config.scale_embedding else 1.0)
    if config.positions == "learned":
        x = x + p["positions"][: len(tokens)]
    if config.positions == "sinusoidal":
        for i in range(len(tokens)):
            for unit in range(config.width):
                angle = i / 10_000 ** (unit // 2 * 2 / config.width)
                x[i, unit] += math.cos(angle) if unit % 2 else math.sin(angle)
    return x


def no_drop(layer, site, x):  # noqa: ARG001
    return x


def formulas(model, seed, tokens, count=None, drop=no_drop):
    """Return logits and attention weights of one sequence under one seed; `drop(layer, site, x)` is called in order."""
    config, p = model.config, {name: parameter[seed].detach().numpy() for name, parameter in model.named_parameters()}
    count = np.ones(len(tokens)) if count is None else count
    x, weights = drop(0, "embedding", embed(p, tokens, config)), []
    for number in range(config.layers):
        name = f"layers.{number}"

        def layer_drop(site, y, number=number):
            return drop(number, site, y)

        def mlp(y, name=name, layer_drop=layer_drop):
            hidden = PHI[config.activation](affine(p, f"{name}.lower", y))
            return layer_drop("mlp", affine(p, f"{name}.upper", layer_drop("hidden", hidden)))

        def attention(y, name=name, layer_drop=layer_drop):
            weights.append(attention_weights(p, f"{name}.attention", y, config=config, count=count))
            return attend(p, f"{name}.attention", y, weights[-1], config=config, drop=layer_drop)

        pair = (config.residual,) * 2 if isinstance(config.residual, bool) else config.residual[number]
        for part, function in enumerate((attention, mlp)):
            y = function(layer_norm(p, f"{name}.norms.{part}", x) if config.norm == "pre" else x)
            x = x + y if pair[part] else y
            x = layer_norm(p, f"{name}.norms.{part}", x) if config.norm == "post" else x
    x = layer_norm(p, "norm", x) if config.norm == "pre" else x
    return (x @ p["embedding"].T if config.tied else affine(p, "head", x)), weights
