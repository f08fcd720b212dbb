"""Theorem 5: in a latent tree, tokens that share a low ancestor occur together most often."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from scipy.special import ndtri

from joma.arguments import distinct, real, whole
from joma.data.trees import HBLT
from joma.drawing import canvas, letters, measured, theory
from joma.study import Claim, Context, Drawing, Preset, Study, above, at_most, near
from joma.theory import hierarchy

# Eight tokens at depth 4, unevenly branching: their common ancestors are at heights 1, 2 and 3, and the root.
SHAPE = ((2,), (2, 1), (2, 1, 2), (1, 2, 2, 1, 2))
DEPTH = len(SHAPE)
P0 = [0.2, 0.3, 0.5]
BIASES = {
    "equal": [[0.9, 0.4, 0.2], [-0.1, 0.4, 0.6]],  # p_{β|0}(c) of the two branches: ρ_0 = 0.4 in both
    "unequal": [[0.9, 0.9, 0.9], [-0.9, -0.9, -0.9]],  # a rare branch and a common one
}
FOLLOWED = 1  # a token of the rare branch; its common ancestors with other tokens are at every height
BINARY = (1, 2, 2, 2)  # children at each depth, for the limit: one child of the root, and heights 1 to 3 below it
LIMIT_GAP = 1e-8  # 1 − ρ at which the closed form is compared with its limit
PAIR = ("token", "given")


@dataclass(frozen=True)
class Config:
    """The parameters at which trees are sampled, and the number of samples."""

    samples: int = 50_000
    """Sequences for each seed and each value of a parameter."""
    trees: int = 10
    """Random trees for each seed, of at most 12 tokens and 20 nodes, whose states are enumerated."""
    rhos: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
    """Values of ρ at which the tree with equal ρ_0 is sampled."""
    rho: float = 0.9
    """Value of ρ at which equal and unequal ρ_0 are compared."""
    c: tuple[float, ...] = (0.0, 1.0, 4.0)
    """Ratios (1 − ρ_0)/(1 − ρ) at which the approach to the limit is sampled."""
    gaps: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)
    """Values of 1 − ρ at which that approach is sampled."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Sample the trees and enumerate random trees for each seed; add the closed form and its limit."""
    predicted, seeds = _predict(config), []
    with context.progress.task("cooccurrence", total=len(context.seeds)) as task:
        for generator in context.seed_generators():
            seeds.append(_sample(config, generator))
            task.advance()
    return predicted.merge(xr.concat(seeds, dim=xr.Variable("seed", list(context.seeds))))


def _predict(config: Config) -> xr.Dataset:
    """Compute the closed form at every sampled parameter and on finer grids, and the limits."""
    rhos, c, gaps = _grids(config)
    fine_rho, fine_gap, fine_c = np.linspace(0.01, 0.99, 50), np.geomspace(1e-4, 0.5, 60), np.linspace(0, 4, 17)
    height = np.arange(1, DEPTH)
    return xr.Dataset(
        {
            "common_height": (PAIR, DEPTH - hierarchy.common_depth(_tree("equal", 0.5).parents)),
            "closed": (("rho", *PAIR), np.stack([_closed_form(_tree("equal", rho)) for rho in rhos])),
            "curve": (("fine_rho", *PAIR), np.stack([_closed_form(_tree("equal", rho)) for rho in fine_rho])),
            "compared": (("bias", *PAIR), np.stack([_closed_form(_tree(bias, config.rho)) for bias in BIASES])),
            "approach": (("c", "fine_gap", "height"), _near_limit(height, fine_gap[:, None], c[:, None, None])),
            "reached": (("fine_c", "height"), _near_limit(height, LIMIT_GAP, fine_c[:, None])),
            "limit": (("fine_c", "height"), hierarchy.cooccurrence_limit(height, DEPTH, fine_c[:, None])),
        },
        {
            "rho": rhos,
            "bias": list(BIASES),
            "c": c,
            "gap": gaps,
            "height": height,
            "fine_rho": fine_rho,
            "fine_gap": fine_gap,
            "fine_c": fine_c,
        },
    )


def _sample(config: Config, generator: torch.Generator) -> xr.Dataset:
    """Sample the trees of the config, and enumerate random trees, with the generator of one seed."""
    rhos, ratios, gaps = _grids(config)
    samples, tree_count = whole("samples", config.samples, low=1000), whole("trees", config.trees)
    counts = np.stack([_count_pairs(_tree("equal", rho), samples, generator) for rho in rhos])
    compared = np.stack([_count_pairs(_tree(bias, config.rho), samples, generator) for bias in BIASES])
    approach = np.array(
        [[_frequency_by_height(_chain(gap, ratio), samples, generator) for gap in gaps] for ratio in ratios]
    )
    trees = [HBLT.random(generator=generator) for _ in range(tree_count)]
    return xr.Dataset(
        {
            "occurrences": (("rho", "given"), np.diagonal(counts, axis1=1, axis2=2)),
            "frequency": (("rho", *PAIR), _conditional(counts)),
            "compared_frequency": (("bias", *PAIR), _conditional(compared)),
            "approach_frequency": (("c", "gap", "height"), approach),
            "nodes": ("tree", np.array([tree.parents.size for tree in trees])),
            "error": ("tree", np.array([np.abs(_closed_form(tree) - _enumerate(tree)).max() for tree in trees])),
        }
    )


def _grids(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `rhos`, `c` and `gaps` of the config, checked."""
    for name in ("rhos", "c", "gaps"):
        distinct(name, getattr(config, name))
    rhos = real("rhos", list(config.rhos), ndim=1, low=0.0, high=0.99)
    gaps = real("gaps", list(config.gaps), ndim=1, low=1e-3, high=1.0)
    c = real("c", list(config.c), ndim=1, low=0.0, high=2 / gaps.max())  # ρ_0 = 1 − c (1 − ρ) is at least −1
    return rhos, c, gaps


def _tree(bias: str, rho: float) -> HBLT:
    return HBLT(SHAPE, P0, BIASES[bias], rho)


def _chain(gap: float, ratio: float) -> HBLT:
    return HBLT.regular(BINARY, p0=[1.0], p_child=[[1 - ratio * gap]], rho=1 - gap)


def _closed_form(tree: HBLT) -> np.ndarray:
    return hierarchy.cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho)


def _enumerate(tree: HBLT) -> np.ndarray:
    return hierarchy.enumerate_cooccurrence(tree.parents, tree.p0, tree.p_child, tree.rho)


def _near_limit(height: np.ndarray, gap: np.ndarray | float, ratio: np.ndarray) -> np.ndarray:
    """Return P[l | m] at 1 − ρ = `gap` and 1 − ρ_0 = `ratio * gap`."""
    return hierarchy.cooccurrence(height, DEPTH, gap, ratio * gap, complement=True)


def _count_pairs(tree: HBLT, samples: int, generator: torch.Generator) -> np.ndarray:
    """Sample sequences and count those with both tokens `l` and `m`, [l, m]; on the diagonal, those with one token."""
    token = tree.sample(samples, generator=generator).token.numpy().astype(np.float64)
    return token.T @ token


def _conditional(counts: np.ndarray) -> np.ndarray:
    """Return the frequency of `l` among the sequences with `m`, [..., l, m]."""
    return counts / np.diagonal(counts, axis1=-2, axis2=-1)[..., None, :]


def _frequency_by_height(tree: HBLT, samples: int, generator: torch.Generator) -> np.ndarray:
    """Return the sampled frequency of `l` given `m`, all pairs of a height pooled, for heights 1 to DEPTH − 1."""
    counts = _count_pairs(tree, samples, generator)
    heights = DEPTH - hierarchy.common_depth(tree.parents)
    given = np.broadcast_to(np.diagonal(counts), counts.shape)
    return np.array([counts[heights == h].sum() / given[heights == h].sum() for h in range(1, DEPTH)])


def profile(values: xr.DataArray, common_height: xr.DataArray) -> xr.DataArray:
    """Average over all ordered pairs of each height, along a new axis `level`; the last level is the root."""
    parts = [values.where(common_height == height).mean(PAIR) for height in range(1, DEPTH + 1)]
    return xr.concat(parts, dim=xr.Variable("level", np.arange(1, DEPTH + 1)))


def scores(run: xr.Dataset, *, pooled: bool = False) -> xr.DataArray:
    """Return each pair's distance from the closed form in standard errors, over `seed` and `pair` (at every ρ).

    `pooled` takes all seeds' sequences as one sample: with more seeds the test is sharper, and the number of pairs
    from which the largest distance is picked stays the same.
    """
    trials, hits = run.occurrences, run.frequency * run.occurrences
    if pooled:
        trials, hits = (count.reduce(np.sum, "seed", keepdims=True) for count in (trials, hits))
    z = (hits - trials * run.closed) / (trials * run.closed * (1 - run.closed)) ** 0.5
    pair_scores = z.transpose("seed", "rho", *PAIR).values[..., run.common_height.values > 0]
    return xr.DataArray(pair_scores.reshape(len(pair_scores), -1), dims=("seed", "pair"))


def rise(run: xr.Dataset) -> xr.DataArray:
    """Return the largest rise of the sampled frequency from one height to the next, per seed."""
    return profile(run.compared_frequency.sel(bias="equal"), run.common_height).diff("level").max("level")


def companions(run: xr.Dataset, values: xr.DataArray) -> xr.DataArray:
    """Average over the tokens whose common ancestor with the followed token is at each level."""
    return profile(values.isel(given=[FOLLOWED]), run.common_height.isel(given=[FOLLOWED]))


def reversal(run: xr.Dataset) -> xr.DataArray:
    """Return the frequency with which the other branch's tokens occur with the followed token, less its sibling's."""
    frequency = companions(run, run.compared_frequency.sel(bias="unequal"))
    return frequency.sel(level=DEPTH) - frequency.sel(level=1)


def limit_distance(run: xr.Dataset) -> float:
    """Return the largest distance of P[l|m] near ρ = ρ_0 = 1 from 1 − H/(L−1+c)."""
    return float(abs(run.reached - run.limit).max())


def slides_distance(run: xr.Dataset) -> xr.DataArray:
    """Return the distance of P[l|m] near ρ = ρ_0 = 1 from 1 − H/L, the largest over heights, for each c."""
    return abs(run.reached - (1 - run.height / DEPTH)).max("height")


CLAIMS = (
    Claim(
        "enumeration",
        "Theorem 5 gives the exact probability that two tokens occur together.",
        lambda run: run.error.max("tree"),
        at_most(1e-12),
        kind="theorem",
        quantity="largest distance of the closed form from the sum over all states, over the pairs of random trees",
    ),
    Claim(
        "sampled",
        "Sampled sequences have the frequencies of Theorem 5.",
        lambda run: abs(scores(run, pooled=True)).max("pair"),
        at_most(4.0),
        kind="theorem",
        quantity="largest distance in standard errors, over pairs and ρ, all seeds together; by chance above 4 in 2 % "
        "of runs",
    ),
    Claim(
        "chance",
        "Our samples scatter about Theorem 5 as independent draws do.",
        lambda run: (scores(run) ** 2).mean("pair") ** 0.5,
        near(1.0, 0.25),
        kind="check",
        quantity="root mean square distance of a seed, in standard errors",
        across="mean",
    ),
    Claim(
        "order",
        "Tokens that share a lower ancestor occur together more often, if all branches are equally frequent.",
        rise,
        at_most(0.0),
        kind="reading",
        quantity="largest rise of the sampled frequency from one height to the next, equal ρ_0",
    ),
    Claim(
        "reversal",
        "With a rare and a common branch the order is reversed.",
        reversal,
        above(0.0),
        kind="control",
        quantity="sampled frequency of the other branch's tokens less that of the sibling, unequal ρ_0",
        across="interval",
    ),
    Claim(
        "limit",
        "As ρ and ρ_0 tend to 1, the probability tends to 1 − H/(L − 1 + c).",
        limit_distance,
        at_most(1e-6),
        kind="check",
        quantity="largest distance at 1 − ρ = 1e-8, c = (1 − ρ_0)/(1 − ρ) from 0 to 4",
    ),
    Claim(
        "slides",
        "The slides' limit 1 − H/L is reached for ρ_0 = ρ.",
        lambda run: float(slides_distance(run).sel(fine_c=1.0)),
        at_most(1e-6),
        kind="reading",
        quantity="largest distance over heights at 1 − ρ = 1e-8, c = 1",
    ),
    Claim(
        "slides-any",
        "The slides' limit 1 − H/L is reached for every ρ_0.",
        lambda run: float(slides_distance(run).max()),
        at_most(1e-6),
        kind="control",
        quantity="largest distance over heights at 1 − ρ = 1e-8, c from 0 to 4",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Return what came out: the distances from Theorem 5, and the frequencies by height."""
    error, largest = float(run.error.max()), float(abs(scores(run, pooled=True)).max())
    equal = profile(run.compared_frequency.sel(bias="equal"), run.common_height).mean("seed")
    unequal = companions(run, run.compared_frequency.sel(bias="unequal")).mean("seed")
    return (
        f"Theorem 5 equals the sum over all states to {error:.0e}, and sampled frequencies depart from it by at most "
        f"{largest:.1f} standard errors: given a token, its sibling occurs in {100 * float(equal[0]):.0f} % of the "
        f"sequences and a token joined to it at the root in {100 * float(equal[-1]):.0f} %. With a rare and a common "
        f"branch these are {100 * float(unequal[0]):.0f} % and {100 * float(unequal[-1]):.0f} %."
    )


def draw_agreement(run: xr.Dataset) -> Figure:
    """Draw closed form and frequencies over ρ, the enumeration's distance, and the quantiles of the scores."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    left, middle, right = axes[0]
    curve, frequency = profile(run.curve, run.common_height), profile(run.frequency, run.common_height)
    for index, level in enumerate(range(1, DEPTH + 1)):
        label = f"height {level}" if level < DEPTH else "the root"
        theory(left, run.fine_rho, curve.sel(level=level), index)
        measured(left, run.rho, frequency.sel(level=level), index, label)
    left.set(xlabel="correlation ρ of an edge", ylabel="P[l | m]", title="Joined low, often together")
    left.legend(loc="upper left")
    theory(middle, [run.nodes.min(), run.nodes.max()], [1e-12, 1e-12], 1, "allowed")
    error = np.maximum(run.error, np.finfo(float).eps / 4)  # so that exact agreement is on the logarithmic axis too
    measured(middle, run.nodes.values.ravel(), error.values.ravel(), 0, "a random tree")
    middle.set(xlabel="nodes of the tree", ylabel="largest |closed form − sum|", yscale="log")
    middle.set_title("The closed form is exact")
    middle.xaxis.get_major_locator().set_params(integer=True)
    middle.legend(loc="upper left", bbox_to_anchor=(0, 0.9))
    ranked = np.sort(scores(run).values, axis=-1)
    share = (np.arange(ranked.shape[-1]) + 0.5) / ranked.shape[-1]
    ranks = np.unique(np.linspace(0, ranked.shape[-1] - 1, 25).astype(int))
    theory(right, [-3, 3], [-3, 3], 0, "normal distribution")
    measured(right, ndtri(share)[ranks], xr.DataArray(ranked[:, ranks], dims=("seed", "rank")), 1, "pairs")
    right.set(xlabel="normal quantile", ylabel="distance / standard error", title="What is left is chance")
    right.legend(loc="upper left")
    letters(axes)
    return figure


def draw_limits(run: xr.Dataset) -> Figure:
    """Draw the approach to ρ = ρ_0 = 1 for the ratios c, and the limit over c."""
    figure, axes = canvas(1, 2, width=4.2, height=2.9)
    left, right = axes[0]
    middle_height = 2
    for index, c in enumerate(run.c.values):
        theory(left, run.fine_gap, run.approach.sel(c=c, height=middle_height), index)
        measured(left, run.gap, run.approach_frequency.sel(c=c, height=middle_height), index, f"c = {c:g}")
    left.set(xlabel="1 − ρ", ylabel="P[l | m]", xscale="log", ylim=(0.2, 0.9))
    left.set_title(f"The limit depends on c (height {middle_height}, depth {DEPTH})")
    left.legend(loc="upper center", ncols=3)
    for index, height in enumerate(run.height.values):
        theory(right, run.fine_c, run.limit.sel(height=height), index)
        measured(right, run.fine_c[::2], run.reached.sel(height=height)[::2], index, f"height {height}")
    for c, label in ((0.0, "$1 - H/(L-1)$"), (1.0, "$1 - H/L$")):
        right.axvline(c, color="0.5", linewidth=0.8, zorder=0)
        right.text(c + 0.06, 0.99, label, fontsize=8, va="top")
    right.set(xlabel="$c = (1 - ρ_0)/(1 - ρ)$", ylabel="P[l | m] at ρ → 1", ylim=(0, 1))
    right.set_title("The slides' 1 − H/L is the case c = 1")
    right.legend(loc="lower right")
    letters(axes)
    return figure


def draw_order(run: xr.Dataset) -> Figure:
    """Draw the matrix of a tree, predicted and sampled, and one token's companions for equal and unequal ρ_0."""
    figure, axes = canvas(1, 3, width=3.3, height=2.9)
    matrices = {
        "Predicted co-occurrence": run.compared.sel(bias="equal"),
        "Sampled co-occurrence, seed 0": run.compared_frequency.sel(bias="equal").isel(seed=0),
    }
    for panel, (title, matrix) in zip(axes[0], matrices.items(), strict=False):
        image = panel.imshow(matrix, cmap="Greys", vmin=0, vmax=1)
        panel.grid(visible=False)
        panel.set(xlabel="given token m", ylabel="token l", title=title)
        figure.colorbar(image, ax=panel, label="P[l | m]")
    right, level = axes[0, 2], np.arange(1, DEPTH + 1)
    for index, bias in enumerate(BIASES):
        theory(right, level, companions(run, run.compared.sel(bias=bias)), index)
        frequency = companions(run, run.compared_frequency.sel(bias=bias))
        measured(right, level, frequency.transpose("seed", "level"), index, f"{bias} $ρ_0$")
    right.set_xticks(level, [*map(str, level[:-1]), "root"])
    right.set(xlabel="height of the common ancestor", ylabel=f"P[l | token {FOLLOWED}]", ylim=(0, 1))
    right.set_title("A rare branch reverses the order")
    right.legend(loc="lower left")
    letters(axes)
    return figure


STUDY = Study(
    name="cooccurrence",
    title="In a latent tree, tokens with a low common ancestor occur together",
    source="JoMA, Theorem 5 (arXiv 2310.00535) and its slides",
    statement=(
        "In a binary latent tree with given correlations, the probability that token l occurs, given token m, is a "
        "function of the height H of their lowest common ancestor (Theorem 5). Tokens joined low in the tree occur "
        "together most often, so their "
        "attention is learned first. The slides give 1 − H/L as the limit for strong correlations."
    ),
    about=(
        "We compare the closed form with the exact sum over all states of random trees, and with the frequencies of "
        "sampled sequences. We follow it to its limit for several ways in which ρ and ρ_0 tend to 1. One tree has "
        "equally frequent branches first, and then a rare and a common one."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=6),
        "paper": Preset(Config(samples=1_000_000, trees=50), seeds=20, seconds=280),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    figures={
        "agreement": Drawing(
            draw_agreement,
            "Lines: closed form. Points: sampled frequencies, with bars from the lowest to the highest seed. "
            "(a) Probability of a token given another, by the height of their lowest common ancestor, equal ρ_0. "
            "(b) Distance of the closed form from the sum over all states; each point is a random tree. (c) Quantiles "
            "of the distances between samples and closed form, over all pairs and ρ; chance alone follows the line.",
        ),
        "limits": Drawing(
            draw_limits,
            "(a) The approach to ρ = ρ_0 = 1 for several ratios c. Lines: closed form. Points: sampled frequencies, "
            "with bars from the lowest to the highest seed. (b) Lines: the limit 1 − H/(L − 1 + c). Points: the closed "
            "form at 1 − ρ = 1e-8.",
        ),
        "order": Drawing(
            draw_order,
            "Probability of each token given each other one in a tree with equal ρ_0: (a) closed form, (b) sampled. "
            "(c) How often other tokens occur with one token, by the height of their common ancestor. Lines: closed "
            "form. Points: sampled, with bars from the lowest to the highest seed. With a rare and a common branch, "
            "the tokens joined at the root occur most often.",
        ),
    },
)
