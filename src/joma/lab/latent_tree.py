# A cell shows its last expression, which is therefore not unused.
# pyright: reportUnusedExpression=false
"""Page *Latent tree*: a latent tree, the co-occurrence of its tokens by Theorem 5, and training that follows it."""

import marimo

app = marimo.App(width="medium", app_title="Latent tree")

with app.setup(hide_code=True):
    from types import SimpleNamespace
    from typing import Any

    import marimo as mo
    import numpy as np

    from joma import drawing
    from joma.data.trees import HBLT
    from joma.lab import presenting
    from joma.studies.hierarchy import association, hidden_tokens, hierarchy_order
    from joma.study import Context
    from joma.theory import hierarchy

    SHAPES = {"2 · 2 · 2 · 2": (2, 2, 2, 2), "2 · 2 · 4": (2, 2, 4), "4 · 4": (4, 4), "2 · 8": (2, 8)}
    TRAINING: dict[str, Any] = {"width": 16, "steps": 150, "pool": 150, "probes": 192, "moments": 15, "rate": 6e-3}
    SEEDS = (0, 1, 2)
    CODE = """\
from joma.data.trees import HBLT
from joma.studies.hierarchy import hidden_tokens, hierarchy_order
from joma.study import Context
from joma.theory import hierarchy

tree = HBLT.regular({branching}, p0=[0.5, 0.5], p_child={p_child}, rho={rho!r})
cooccurrence = hierarchy.cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho)  # row l, column m: P[l | m]
height = tree.depth - hierarchy.common_depth(tree.parents)
"""
    TRAINING_CODE = """
config = hierarchy_order.Config(**{training})
run = hierarchy_order.train_on_tree(config, Context(seeds={seeds}), tree, {layers}, label="lab")
run = run.merge(hidden_tokens.predictions(tree))  # gain of mutual attention beside co-occurrence, by pair
"""


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Tokens of a latent tree, and the order in which attention learns them

    A class sits at the root, latents in the levels below, and 16 tokens at the leaves. Each node copies its parent with
    probability $(1+\rho)/2$. Two tokens whose lowest common ancestor stands at height $H$ above them, in a tree of
    depth $L$, then occur together with (Theorem 5)

    $$\mathbb{P}[l \mid m] = \frac12\, \frac{1 + \rho^{2H} - 2\rho^{L-1}\rho_0}{1 - \rho^{L-1}\rho_0}$$

    so that a *low* common ancestor means *often together*, as long as all branches are alike. $\rho_0$ is the mean of
    the branch's bias $p_{\beta|0}$: a negative one makes its tokens common. Training should find the pairs that occur
    together first.
    """)
    return


@app.cell(hide_code=True)
def _():
    shape = mo.ui.dropdown(SHAPES, value="2 · 2 · 2 · 2", label="Children at each level")
    layers = mo.ui.dropdown({"1 layer": 1, "2 layers": 2, "3 layers": 3}, value="1 layer", label="Train a decoder of")
    mo.hstack([shape, layers], justify="start", wrap=True, gap=1.5)
    return layers, shape


@app.cell(hide_code=True)
def _():
    rho = mo.ui.slider(0.3, 0.97, 0.01, value=0.85, label=r"correlation along an edge $\rho$", show_value=True)
    first = mo.ui.slider(-0.9, 0.9, 0.05, value=0.8, label="bias of the first branch", show_value=True)
    others = mo.ui.slider(-0.9, 0.9, 0.05, value=0.8, label="bias of the others", show_value=True)
    mo.hstack([rho, first, others], justify="start", wrap=True, gap=2)
    return first, others, rho


@app.cell(hide_code=True)
def _(first, layers, others, rho, shape):
    inputs = SimpleNamespace(
        branching=tuple(shape.value),
        p_child=[[float(first.value), -0.2]] + [[float(others.value), -0.2]] * (shape.value[0] - 1),
        rho=float(rho.value),
        layers=int(layers.value),
    )
    return (inputs,)


@app.function(hide_code=True)
def solve(inputs):
    """Return the tree, the co-occurrence of its tokens, and the height of each pair's lowest common ancestor."""
    tree = HBLT.regular(inputs.branching, p0=[0.5, 0.5], p_child=inputs.p_child, rho=inputs.rho)
    return SimpleNamespace(
        tree=tree,
        cooccurrence=hierarchy.cooccurrence_matrix(tree.parents, tree.p0, tree.p_child, tree.rho),
        height=tree.depth - hierarchy.common_depth(tree.parents),
    )


@app.function(hide_code=True)
def train(inputs):
    """Train a decoder that answers which hidden tokens occur, and return each pair's gain of mutual attention."""
    tree = solve(inputs).tree
    config, context = hierarchy_order.Config(**TRAINING), Context(seeds=SEEDS)
    trained = hierarchy_order.train_on_tree(config, context, tree, inputs.layers, label="lab")
    return trained.merge(hidden_tokens.predictions(tree))


@app.cell(hide_code=True)
def _(inputs):
    solution = solve(inputs)
    code = CODE.format(branching=inputs.branching, p_child=inputs.p_child, rho=inputs.rho)
    code += TRAINING_CODE.format(training=TRAINING, seeds=SEEDS, layers=inputs.layers)
    return code, solution


@app.function(hide_code=True)
@drawing.style()
def draw(solution):
    """Draw the tree, the matrix of co-occurrence, and co-occurrence by the height of the common ancestor."""
    figure, axes = drawing.fixed_canvas(1, 3, width=3.75, height=3.1)
    draw_tree(axes[0, 0], solution.tree)
    matrix = axes[0, 1]
    image = matrix.imshow(solution.cooccurrence, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    matrix.set(title="Co-occurrence P[l | m]", xlabel="given token m", ylabel="token l", xticks=[], yticks=[])
    matrix.grid(visible=False)
    figure.colorbar(image, ax=matrix, fraction=0.046, ticks=[0, 0.5, 1])
    right, pairs = axes[0, 2], ~np.eye(len(solution.height), dtype=bool)
    heights = np.unique(solution.height[pairs])
    groups = [solution.cooccurrence[pairs & (solution.height == height)] for height in heights]
    means = np.array([group.mean() for group in groups])
    reach = np.stack([means - [group.min() for group in groups], [group.max() for group in groups] - means])
    right.errorbar(heights, means, yerr=np.maximum(reach, 0), capsize=3, **{**drawing.marker(1), "linestyle": "-"})
    right.set(title="P[l | m]: mean, least and greatest", xlabel="height of the common ancestor", ylim=(0, 1.02))
    right.set_xticks(heights, [*map(str, heights[:-1]), f"{heights[-1]}: root"])
    return figure


@app.function(hide_code=True)
def draw_tree(panel, tree):
    """Draw the nodes of a tree from the root down, each above the middle of its children."""
    parents = np.asarray(tree.parents)
    depth, place = np.zeros(len(parents)), np.zeros(len(parents))
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    place[depth == tree.depth] = np.arange(tree.tokens)
    for node in range(len(parents) - tree.tokens - 1, -1, -1):
        place[node] = place[parents == node].mean()
    for node in range(1, len(parents)):
        panel.plot(place[[node, parents[node]]], -depth[[node, parents[node]]], color="0.6", linewidth=1, zorder=1)
    for level in range(tree.depth + 1):
        nodes, colour = depth == level, drawing.COLOURS[min(tree.depth - level, len(drawing.COLOURS) - 1)]
        panel.plot(place[nodes], -depth[nodes], "o", color=colour, markersize=7 if level else 10, zorder=2)
    panel.set(title="Class, latents, 16 tokens", xticks=[], yticks=[], ylim=(-tree.depth - 0.4, 0.4))
    panel.spines[:].set_visible(False)
    panel.grid(visible=False)


@app.function(hide_code=True)
def describe(solution):
    """Say how often pairs of each height occur together, and for how many tokens low ancestors mean more often."""
    pairs = ~np.eye(len(solution.height), dtype=bool)
    heights = np.unique(solution.height[pairs])
    given = np.stack([by_token(solution, height) for height in heights])
    values = ", ".join(f"{row.mean():.2f} at height {height}" for height, row in zip(heights, given, strict=True))
    falls, tokens = int((np.diff(given, axis=0) < 0).all(axis=0).sum()), given.shape[1]
    return f"Mean co-occurrence is {values}. It falls with the height for {falls} of {tokens} given tokens."


@app.function(hide_code=True)
def by_token(solution, height):
    """Return the mean co-occurrence of each given token with the tokens that it is joined to at this height."""
    joined = (solution.height == height) & ~np.eye(len(solution.height), dtype=bool)
    return np.where(joined, solution.cooccurrence, 0.0).sum(axis=0) / joined.sum(axis=0)


@app.cell(hide_code=True)
def _(solution):
    sentence = describe(solution)
    mo.vstack([presenting.picture(draw(solution), sentence), mo.md(sentence)])
    return (sentence,)


@app.cell(hide_code=True)
def _():
    trained, set_trained = mo.state(None)
    return set_trained, trained


@app.cell(hide_code=True)
def _(inputs, set_trained):
    start = mo.ui.button(
        label="Train on this tree (about a second)", on_click=lambda _: set_trained((inputs, train(inputs)))
    )
    start
    return


@app.function(hide_code=True)
@drawing.style()
def draw_training(run):
    """Draw the gain of mutual attention by height over training, and its end against co-occurrence."""
    figure, axes = drawing.canvas(1, 2, width=5.2, height=2.9)
    curves = association.mean_by_height(run.gain, run.height)
    for index, level in enumerate(curves.level.values):
        drawing.band(axes[0, 0], run.step, curves.sel(level=level), index, f"joined at height {level}")
        pairs = run.isel(pair=(run.height == level).values)
        drawing.measured(axes[0, 1], pairs.cooccurrence, pairs.gain.isel(step=-1).mean("seed"), index)
    axes[0, 0].set(title="Who is attended to first", xlabel="step", ylabel="gain of mutual attention / nats")
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high + 0.5 * (high - low))  # room for the legend
    axes[0, 0].legend(loc="upper left", ncols=2)
    axes[0, 1].set(title="At the end, pair by pair", xlabel="co-occurrence P[l | m], Theorem 5", ylabel="gain / nats")
    return figure


@app.cell(hide_code=True)
def _(inputs, trained):
    mo.stop(trained() is None, mo.md("*Nothing is trained yet.*"))
    _used, _run = trained()
    _stale = "" if _used == inputs else " The sliders have moved since: train again to follow them."
    _alt = "Gain of mutual attention of the pairs of each height over training, and at its end against co-occurrence."
    mo.vstack(
        [
            presenting.picture(draw_training(_run), _alt),
            mo.md(f"Lines: mean over {len(SEEDS)} seeds; bands: lowest to highest.{_stale}"),
        ]
    )
    return


@app.cell(hide_code=True)
def _(code):
    presenting.copy_as_python(code)
    return


@app.cell(hide_code=True)
def _():
    presenting.read_on(
        functions="joma.theory.hierarchy.cooccurrence_matrix joma.data.trees.HBLT "
        "joma.studies.hierarchy.hierarchy_order.train_on_tree",
        documents="docs/notation.md docs/deviations.md",
        study="cooccurrence hierarchy-order",
    )
    return


if __name__ == "__main__":
    app.run()
