"""Depth without skip connections: attention cubes what distinguishes the tokens, and MLPs do not stop that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float

from joma.arguments import distinct, scalar, whole
from joma.studies.related import rank_collapse_figures
from joma.studies.related.rank_collapse_measures import (
    bound_ratio,
    decade_slope,
    error_slope,
    leading_error,
    median_order,
    order,
    paper_ratio,
    residual_ratio,
    survivors,
)
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_least, at_most, between, near
from joma.theory import rank_collapse
from joma.theory.rank_collapse import Tokens

ARMS = ("attention", "skip", "MLP", "strong MLP")
DIAMETER, RELATIVE, RMS, BOUND = "diameter", "relative", "rms", "bound"


@dataclass(frozen=True)
class Config:
    """Stacks of attention with random weights, and one layer on inputs of several sizes."""

    tokens: int = 32
    dim: int = 32
    layers: int = 6
    """At least 3."""
    scale: float = 0.3
    """Standard deviation of the input's entries."""
    expansion: int = 4
    """Hidden units of an MLP over `dim`."""
    strength: float = 10.0
    """Factor of the strong MLP's output, of which He's initialisation is 1."""
    sizes: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4)
    """Sizes ε of the residuals εR of one layer."""
    score_scales: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    """Factors of W ~ N(0, 1)/d in stacks on inputs N(0, 1)."""
    score_tokens: int = 32
    """Tokens and dimensions of these stacks."""
    score_layers: int = 8
    draws: int = 20
    """How many of these stacks each seed draws."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Propagate tokens through the stacks, seed by seed: a stack of the paper's size fills a processor's cache."""
    sizes = distinct("sizes", config.sizes, least=2)
    scales = distinct("score_scales", config.score_scales, least=2)
    stacks = [_stacks(config, generator) for generator in context.numpy_generators("stacks")]
    layers = [_one_layer(config, generator) for generator in context.numpy_generators("one layer")]
    scores = [_scaled_scores(config, generator) for generator in context.numpy_generators("scores")]
    depth = ("seed", "arm", "layer")
    return xr.Dataset(
        {
            **{f"log10_{name}": (depth, _stacked(stacks, name)) for name in (RMS, RELATIVE)},
            "bound_ratio": (("seed", "arm", "depth"), _stacked(stacks, BOUND).astype(np.float32)),
            "leading_along": (("seed", "depth"), _stacked(stacks, "leading")),
            **{name: (("seed", "size"), _stacked(layers, name)) for name in ("log10_output", "error", "paper_ratio")},
            "log10_scored": (("seed", "score_scale", "draw"), np.stack(scores).astype(np.float32)),
        },
        {
            "seed": list(context.seeds),
            "arm": list(ARMS),
            "layer": np.arange(config.layers + 1),
            "depth": np.arange(1, config.layers + 1),
            "size": sizes,
            "score_scale": scales,
        },
    )


def _stacked(parts: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.stack([part[name] for part in parts])


def _draw_layer(generator: np.random.Generator, dim: int) -> Float[np.ndarray, "2 dim dim"]:
    """Return W and V of a layer, N(0, 1)/√d."""
    return generator.normal(size=(2, dim, dim)) / np.sqrt(dim)


def _stacks(config: Config, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Propagate one input through the four stacks, which have the same weights; sizes over arms and layers."""
    tokens, dim = whole("tokens", config.tokens, low=2), whole("dim", config.dim)
    hidden = whole("expansion", config.expansion) * dim
    strength = scalar("strength", config.strength, above=0.0)
    start = rank_collapse.split(scalar("scale", config.scale, above=0.0) * generator.normal(size=(tokens, dim)))
    states, history, bounds, leading = dict.fromkeys(ARMS, start), [[_log10_sizes(start)] * len(ARMS)], [], []
    for _ in range(whole("layers", config.layers, low=3)):
        w, v = _draw_layer(generator, dim)
        lower = generator.normal(size=(dim, hidden)) * np.sqrt(2 / dim)
        upper = generator.normal(size=(hidden, dim)) / np.sqrt(hidden)
        before, outputs = states, {name: rank_collapse.attend(state, w, v) for name, state in states.items()}
        states = {
            "attention": outputs["attention"],
            "skip": rank_collapse.add(before["skip"], outputs["skip"]),
            "MLP": rank_collapse.relu_mlp(outputs["MLP"], lower, upper),
            "strong MLP": rank_collapse.relu_mlp(outputs["strong MLP"], lower, strength * upper),
        }
        history.append([_log10_sizes(state) for state in states.values()])
        norms = [np.sqrt(np.linalg.eigvalsh(weight.T @ weight)[-1]) for weight in (w, v)]
        bounds.append([_bound_ratio(before[name], outputs[name], *norms) for name in ARMS])
        leading.append(_distance(rank_collapse.leading_term(before["attention"], w, v), outputs["attention"]))
    sizes = np.moveaxis(np.array(history), 0, -1)  # [arm, size, layer]
    return {RMS: sizes[:, 0], RELATIVE: sizes[:, 1], BOUND: np.array(bounds).T, "leading": np.array(leading)}


def _log10_sizes(state: Tokens) -> list[float]:
    """Return log₁₀ of the residuals' root mean square entry and of their share in the tokens."""
    return [float(state.log_rms) / np.log(10), float(state.log_relative) / np.log(10)]


def _bound_ratio(before: Tokens, after: Tokens, w_norm: float, v_norm: float) -> float:
    """Return the diameter after attention over its bound, from logarithms: both may be below the least double."""
    if np.isneginf(after.log_diameter):  # the bound may be 0 too
        return 0.0
    return float(np.exp(after.log_diameter - rank_collapse.log_diameter_bound(before.log_diameter, w_norm, v_norm)))


def _distance(leading: Tokens, exact: Tokens) -> float:
    """Return the relative error of the leading term, Frobenius norms."""
    ratio = np.exp(leading.log_norm - exact.log_norm)
    return float(np.linalg.norm(ratio * leading.direction - exact.direction))


def _one_layer(config: Config, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return, for each size ε, the residual of one layer on εR, the leading term's error, and the paper's bound."""
    x, (w, v) = generator.normal(size=(config.tokens, config.dim)), _draw_layer(generator, config.dim)
    w = w / np.sqrt(config.dim)  # so that inputs of size 1 have scores of size 1
    outputs, errors, ratios = [], [], []
    for size in config.sizes:
        tokens = rank_collapse.split(scalar("sizes", size, above=0.0) * x)
        after = rank_collapse.attend(tokens, w, v)
        outputs.append(float(after.log_rms) / np.log(10))
        errors.append(_distance(rank_collapse.leading_term(tokens, w, v), after))
        bound = rank_collapse.norm_bound(tokens.residual, w, v)
        ratios.append(float(rank_collapse.mixed_norm(after.residual) / bound))
    return {"log10_output": np.array(outputs), "error": np.array(errors), "paper_ratio": np.array(ratios)}


def _scaled_scores(config: Config, generator: np.random.Generator) -> Float[np.ndarray, "score_scale draw"]:
    """Return log₁₀ of the residual at the end of stacks whose scores are scaled up; all scales share their weights."""
    width, draws = whole("score_tokens", config.score_tokens, low=2), whole("draws", config.draws)
    scales = np.array([scalar("score_scales", scale, above=0.0) for scale in config.score_scales])
    tokens = rank_collapse.split(np.tile(generator.normal(size=(draws, width, width)), (len(scales), 1, 1, 1)))
    for _ in range(whole("score_layers", config.score_layers)):
        w, v = generator.normal(size=(2, draws, width, width))
        tokens = rank_collapse.attend(tokens, scales[:, None, None, None] * w / width, v / np.sqrt(width))
    return tokens.log_rms / np.log(10)


CLAIMS = (
    Claim(
        "cubic",
        "A layer of attention without a skip connection cubes small residuals.",
        decade_slope,
        near(3.0, 0.01),
        kind="control",
        quantity="slope of log residual out over log residual in, between the two smallest inputs",
    ),
    Claim(
        "leading",
        "The output's residual is R W C V, with its coefficient.",
        leading_error,
        at_most(1e-6),
        kind="control",
        quantity="relative distance of one layer's residual from this term, input of size 0.001, W ~ N(0, 1)/d",
    ),
    Claim(
        "leading-order",
        "The relative error of the cubic term R W C V is of second order.",
        error_slope,
        near(2.0, 0.1),
        kind="control",
        quantity="slope of the log error over log size of the input, between sizes 0.01 and 0.001",
    ),
    Claim(
        "doubly",
        "Without skip connections residuals vanish doubly exponentially with depth.",
        lambda run: order(run, "attention", 4),
        between(2.8, 3.1),
        kind="reading",
        quantity="ln r₄ / ln r₃ of the root mean square residual r after layers 4 and 3; the limit is 3, if each layer "
        "cubes it, and the bounds are ours",
    ),
    Claim(
        "bound",
        "One layer's residual stays below the bound of Dong, Cordonnier and Loukas.",
        paper_ratio,
        at_most(1.0),
        kind="theorem",
        quantity="largest residual over its bound 4 ‖W‖₁ ‖V‖ ‖R‖³ in the norm √(‖·‖₁ ‖·‖_∞); form cited from memory",
    ),
    Claim(
        "diameter",
        "The tokens' diameter Δ after attention is at most ‖V‖ Δ tanh(‖W‖ Δ²/4).",
        bound_ratio,
        at_most(1 + 1e-6),
        kind="theorem",
        quantity="largest diameter over this bound of ours, over layers and stacks, spectral norms",
    ),
    Claim(
        "skip",
        "With skip connections residuals do not vanish.",
        lambda run: residual_ratio(run, "skip", "rms", 6),
        between(0.8, 1.5),
        kind="reading",
        quantity="root mean square residual after 6 layers over that of the input",
    ),
    Claim(
        "mlp",
        "MLPs after attention stop the collapse.",
        lambda run: residual_ratio(run, "MLP", "rms", 4),
        at_least(0.1),
        kind="reading",
        quantity="root mean square residual after 4 layers over that of the input; MLPs of He's scale, no skip",
    ),
    Claim(
        "mlp-strong",
        "MLPs ten times as strong stop the collapse.",
        lambda run: residual_ratio(run, "strong MLP", "relative", 6),
        at_least(0.1),
        kind="reading",
        quantity="share of the residual in the tokens' norm after 6 layers over that of the input",
    ),
    Claim(
        "mlp-cubes",
        "With MLPs of He's scale each layer still cubes the residual.",
        lambda run: order(run, "MLP", 4),
        between(2.8, 3.1),
        kind="control",
        quantity="ln r₄ / ln r₃ of the root mean square residual r",
    ),
    Claim(
        "small-scores",
        "Stacks with scores of unit scale all collapse.",
        lambda run: survivors(run, 1.0),
        at_most(0.0),
        kind="control",
        quantity="share of stacks with W ~ N(0, 1)/d on inputs N(0, 1) whose residual after all layers is above 0.1",
    ),
    Claim(
        "large-scores",
        "Where scores are 16 times as large, some stacks do not collapse.",
        lambda run: survivors(run, 16.0),
        above(0.0),
        kind="control",
        quantity="share of stacks whose root mean square residual after all layers is above 0.1",
        across="interval",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the order of the collapse, and what skips, MLPs and large scores change."""
    last = int(run.layer[-1])
    residual = {arm: 10 ** float(run.log10_rms.sel(arm=arm, layer=3).median()) for arm in ("attention", "MLP")}
    strong = [
        10 ** float(run.log10_relative.sel(arm="strong MLP", layer=layer).median()) for layer in (3, min(6, last))
    ]
    share = 100 * float(survivors(run, float(run.score_scale[-1])).mean())
    return (
        f"After three layers the median residual is {residual['attention']:.0e} without skip connections, "
        f"{residual['MLP']:.0e} with MLPs too, and the last layer raises it to the power "
        f"{median_order(run, 'attention'):.2f}. With skip connections it is "
        f"{float(residual_ratio(run, 'skip', 'rms', last).mean()):.2f} "
        f"of the input's after {last} layers. MLPs ten times as strong delay the collapse: the residual is "
        f"{strong[0]:.2g} of the tokens' norm after three layers, {strong[1]:.0e} after {min(6, last)}. With scores "
        f"{float(run.score_scale[-1]):g} times as large {share:.0f} % of the stacks do not collapse."
    )


STUDY = Study(
    name="rank-collapse",
    title="Attention without skip connections cubes what distinguishes the tokens; MLPs do not stop it",
    source="Dong, Cordonnier and Loukas (arXiv 2103.03404)",
    statement=(
        "Stacked attention without skip connections and MLPs makes all tokens equal, doubly exponentially in depth; "
        "skip connections and MLPs stop that (Dong, Cordonnier and Loukas, arXiv 2103.03404)."
    ),
    about=(
        "Tokens with random entries pass through layers softmax(X W Xᵀ) X V with fresh random weights; nothing is "
        "trained. Their mean and their residuals are carried apart, so that residuals keep their digits at any size. "
        "Beside attention alone stand skip connections, MLPs of He's scale and MLPs ten times as strong, all with the "
        "same weights. One layer is compared with the cubic term that we derive and with two bounds. In further stacks "
        "the scores are scaled up."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=3),
        "paper": Preset(Config(tokens=512, dim=256, layers=12, draws=10), seeds=100, seconds=300),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    figures={
        "depth": Drawing(
            rank_collapse_figures.draw_depth,
            "(a) Share of the residuals in the tokens' norm: its negative decimal logarithm over depth, on a "
            "logarithmic axis; the dotted line triples with each layer. Points: median over seeds, bars from the "
            "least to the greatest seed; seeds whose tokens are equal to rounding have no point. (b) One layer on "
            "residuals of size ε: the exact output, and the cubic law through the smallest of them, where the cubic "
            "term's error is least. (c) Relative error of the cubic "
            "term; the dotted line is ε². (d) Residual at the end of stacks whose scores are scaled up: every point "
            "is one stack; the line is the median.",
        ),
    },
)
