"""The WikiText-2 figure: on real text attention turns sparse and then dense again, and deeper models learn more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import xarray as xr

from joma.arguments import distinct, whole
from joma.studies.entropy_return import recovery
from joma.studies.text import language_training
from joma.studies.text.entropy_bounce import P_VALUE, SIGNIFICANCE, bounce_p_value
from joma.studies.text.entropy_text_figures import draw_entropy, draw_highlight, draw_learning, draw_paper
from joma.studies.text.language_training import QUICK_RATE, LayeredSetting, Variant
from joma.studies.text.published_curves import (
    FALL_STEPS,
    PUBLISHED_LOSS,
    PUBLISHED_LOSS_103,
    distance_of_means,
    distances,
    early_fall,
    has_attributes,
    leave_one_out,
    like_published,
    loss_tolerance,
    on_wikitext,
    on_wikitext103,
    published,
    published_entropy,
)
from joma.study import (
    Claim,
    Context,
    Drawing,
    Highlight,
    NotInRun,
    Preset,
    Study,
    at_most,
    below,
    near,
    select,
)
from joma.verdicts import Kind

WIKITEXT103 = "wikitext-103"  # the preset
AUTHORS_LAYOUT = {"columns": 10, "length": 35}  # of the validation text, of which the authors show one window


@dataclass(frozen=True)
class Config(LayeredSetting):
    """The setting of text, the model and its training, and the numbers of layers that are trained."""

    activation: str = "relu"
    rate: float = 1e-4
    depths: tuple[int, ...] = (1, 2, 5, 10)


def run(config: Config, context: Context) -> xr.Dataset:
    """Train a model of each depth, all seeds at once."""
    depths = [whole("depths", depth) for depth in distinct("depths", config.depths)]
    text = language_training.read_text(config, context)
    variants = {f"entropy-text, {depth} layers": Variant(depth, config.activation, config.alike) for depth in depths}
    trajectories = language_training.train_variants(config, context, text, variants, rate=config.rate)
    axis = xr.DataArray(depths, dims="depth", name="depth")
    trajectory = xr.concat(trajectories, axis, join="outer", combine_attrs="drop")
    layout = {"columns": text.valid.shape[0], "length": text.length, "glance": config.glance or 0}
    return trajectory.assign_attrs(types=text.types, tokens=int(text.counts.sum()), epoch=text.epoch, **layout)


def _comparable(run: xr.Dataset, depth: int) -> xr.Dataset:
    """Select one depth of a run on WikiText-2; `NotInRun` on any other text, of which no curves were published."""
    if not on_wikitext(run):
        raise NotInRun("WikiText-2")
    return select(run, depth=depth)


def best_loss(run: xr.Dataset, depth: int) -> xr.DataArray:
    """Return the least validation loss on WikiText-2, per seed; NaN for a seed that diverged."""
    return _comparable(run, depth).valid_loss.min("step", skipna=False)


def best_loss_103(run: xr.Dataset, depth: int) -> xr.DataArray:
    """Return the least validation loss on WikiText-103, per seed, NaN if diverged; `NotInRun` on any other text."""
    if not on_wikitext103(run):
        raise NotInRun("WikiText-103")
    return select(run, depth=depth).valid_loss.min("step", skipna=False)


def text_entropy(run: xr.Dataset, depth: int) -> xr.DataArray:
    """Return the entropy over the whole validation text of WikiText-2; `NotInRun` where only a part was read."""
    trajectory = _comparable(run, depth)
    if not has_attributes(run, {"glance": 0}):
        raise NotInRun("entropy over the whole validation text")
    return trajectory.entropy


def window_entropy(run: xr.Dataset, depth: int) -> xr.DataArray:
    """Return the entropy in the window of WikiText-2 that the authors show; `NotInRun` where it was not read."""
    trajectory = _comparable(run, depth)
    if "window_entropy" not in trajectory or not has_attributes(run, AUTHORS_LAYOUT):
        raise NotInRun("entropy in the authors' window")
    return trajectory.window_entropy


ENTROPIES = {
    "curve": (text_entropy, "over the whole validation text"),
    "window": (window_entropy, "in the authors' window"),
}
CLAIM_KINDS: Mapping[str, Kind] = {"curve": "control", "window": "figure"}  # curves of the window alone were published


def seed_distances(run: xr.Dataset, depth: int, where: str) -> xr.DataArray:
    """Return the distance of each seed from the authors' curves, as `published_curves.distances` defines it."""
    return distances(ENTROPIES[where][0](run, depth), depth)


def mean_distance(run: xr.Dataset, depth: int, where: str) -> float:
    """Return the distance of the mean over seeds from the authors' mean."""
    return distance_of_means(ENTROPIES[where][0](run, depth), depth)


def one_layer_fall(run: xr.Dataset, where: str) -> xr.DataArray:
    """Return how far the entropy of the one-layer model falls within `FALL_STEPS`, per seed."""
    return early_fall(ENTROPIES[where][0](run, 1).isel(layer=0).mean("head"))


def one_layer_recovery(run: xr.Dataset, where: str) -> xr.DataArray:
    """Return how far the entropy of the one-layer model recovers from its minimum by the end, per seed."""
    return recovery(ENTROPIES[where][0](run, 1).isel(layer=0).mean("head"), "step")


def largest_rise(run: xr.Dataset) -> xr.DataArray:
    """Return the largest rise of the least validation loss from one depth to the next, per seed; below 0 if none.

    NaN for a seed that diverged at any depth. `NotInRun` where there is one depth only.
    """
    if run.sizes["depth"] < 2:
        raise NotInRun("second depth")
    best = run.valid_loss.sortby("depth").min("step", skipna=False)
    return best.diff("depth").max("depth", skipna=False)


def _layers(depth: int) -> str:
    return "1 layer" if depth == 1 else f"{depth} layers"


_PREDICTED = "expected: where the mean of three further runs of the authors would lie with 95 % probability"


def _loss_claim(depth: int) -> Claim:
    return Claim(
        f"loss-{depth}",
        f"With {_layers(depth)} the least validation loss on WikiText-2 agrees with the published one.",
        partial(best_loss, depth=depth),
        like_published(published().valid_loss.sel(depth=depth).min("step")),
        kind="figure",
        quantity=f"least validation loss along training in nats, mean over seeds; {_PREDICTED}",
        across="mean",
        presets=("paper",),
        seeds=3,
    )


def _loss_claim_103(depth: int, value: float) -> Claim:
    return Claim(
        f"wikitext-103-loss-{depth}",
        f"With {_layers(depth)} the least validation loss on WikiText-103 agrees with the published one.",
        partial(best_loss_103, depth=depth),
        near(value, round(loss_tolerance(), 4)),
        kind="figure",
        quantity="least validation loss along training in nats, mean over seeds; the tolerance is the largest of those "
        "on WikiText-2, since no single runs were published",
        across="mean",
        presets=(WIKITEXT103,),
        seeds=3,
    )


def _bounce_claims(where: str) -> tuple[Claim, ...]:
    """Return the claims that the one-layer model falls and recovers as far as the authors' does."""
    place, prefix = ENTROPIES[where][1], "" if where == "curve" else f"{where}-"
    curve = published_entropy(1).isel(layer=0)
    authors = {"fall": early_fall(curve), "recovery": recovery(curve, "step")}
    rows = (
        ("fall", one_layer_fall, f"turns as sparse as published within {FALL_STEPS:,} steps, {place}"),
        ("recovery", one_layer_recovery, f"becomes as dense again as published, {place}"),
    )
    return tuple(
        Claim(
            f"{prefix}{name}",
            f"With 1 layer attention {statement}.",
            partial(measure, where=where),
            like_published(authors[name]),
            kind=CLAIM_KINDS[where],
            quantity=f"{name} of entropy in nats, mean over seeds; {_PREDICTED}",
            across="mean",
            presets=("paper",),
            seeds=3,
        )
        for name, measure, statement in rows
    )


def _curve_claims(where: str, depth: int) -> tuple[Claim, Claim]:
    """Return the claims that entropy follows the published curves, seed by seed and in its mean over seeds."""
    place, largest = ENTROPIES[where][1], round(float(leave_one_out(depth).max()), 4)
    return (
        Claim(
            f"{where}-{depth}",
            f"With {_layers(depth)} entropy {place} is as near to the authors' runs as they are to each other.",
            partial(seed_distances, depth=depth, where=where),
            at_most(largest),
            kind=CLAIM_KINDS[where],
            quantity="distance in nats of each seed from the mean of two of the authors' three runs, mean over steps "
            "and layers; expected: the largest distance of one of their runs from the other two",
            across="interval",
            presets=("paper",),
            seeds=3,
        ),
        Claim(
            f"mean-{where}-{depth}",
            f"With {_layers(depth)} mean entropy {place} is as near to the authors' mean as their runs are.",
            partial(mean_distance, depth=depth, where=where),
            at_most(largest),
            kind="check",
            quantity="distance in nats of our mean over seeds from the authors', mean over steps and layers; expected: "
            "the largest distance of one of their runs from the other two. Means scatter less than single runs, and "
            "this measure was chosen after a run was seen",
            presets=("paper",),
            seeds=3,
        ),
    )


CLAIMS = (
    Claim(
        "bounce",
        "With 1 layer attention on text turns sparse, then dense again.",
        lambda run: bounce_p_value(select(run, depth=1).entropy.isel(layer=[0])),
        at_most(SIGNIFICANCE),
        kind="reading",
        quantity=f"{P_VALUE}, each seed",
        presets=("quick", "paper", WIKITEXT103),
    ),
    Claim(
        "deeper",
        "Deeper models reach a lower validation loss.",
        largest_rise,
        below(0.0),
        kind="reading",
        quantity="least validation loss less that of the next shallower model, in nats, largest over depths, interval "
        "over seeds",
        across="interval",
        presets=("quick", "paper", WIKITEXT103),
    ),
    *(_loss_claim(depth) for depth in PUBLISHED_LOSS),
    *(_loss_claim_103(depth, value) for depth, value in PUBLISHED_LOSS_103.items()),
    *(claim for where in ENTROPIES for claim in _bounce_claims(where)),
    *(claim for where in ENTROPIES for depth in PUBLISHED_LOSS for claim in _curve_claims(where, depth)),
)


def _mean_sizes(curve: xr.DataArray) -> tuple[float, float]:
    """Return fall and recovery of a curve, means over seeds."""
    return float(early_fall(curve).mean()), float(recovery(curve, "step").mean())


def outcome(run: xr.Dataset) -> str:
    """Return what came out: fall and recovery of the one-layer model, and the least losses, beside the authors'."""
    compared = on_wikitext(run)
    text = "" if compared else f"On a text of {int(run.attrs.get('tokens', 0)):,} tokens that is not WikiText-2, "
    losses = _least_losses(run, compared=compared)
    if 1 not in run.depth:
        return _sentence(f"{text}{losses}")
    in_window = compared and "window_entropy" in run and has_attributes(run, AUTHORS_LAYOUT)
    curve = (run.window_entropy if in_window else run.entropy).sel(depth=1).isel(layer=0).mean("head")
    sizes = "by {:.2f} nats and recovers by {:.2f}".format(*_mean_sizes(curve))
    theirs = " (authors: {:.2f} and {:.2f})".format(*_mean_sizes(published_entropy(1).isel(layer=0)))
    where = ", in the authors' window," * in_window
    return _sentence(f"{text}with 1 layer{where} entropy falls {sizes}{theirs * in_window}; {losses}")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _least_losses(run: xr.Dataset, *, compared: bool) -> str:
    """Return the least validation losses in words, beside the published ones where there are any."""
    depths = [int(depth) for depth in run.depth]
    losses = [float(run.valid_loss.sel(depth=depth).min("step").mean()) for depth in depths]
    listed = f"{_listed([f'{loss:.3f}' for loss in losses])} nats with {_listed([str(depth) for depth in depths])} "
    text = f"the least validation loss is {listed}{'layer' if depths == [1] else 'layers'}"
    if compared and set(depths) <= set(PUBLISHED_LOSS):
        text += f" (published: {_listed([f'{PUBLISHED_LOSS[depth]:.3f}' for depth in depths])})"
    return text


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


STUDY = Study(
    name="entropy-text",
    title="Attention on text turns sparse, then dense again",
    source="JoMA, the WikiText-2 figure (arXiv 2310.00535); the curves of the authors' own runs",
    statement=(
        "In language models trained on WikiText-2 attention becomes sparse early in training and dense again later, "
        "and deeper models reach a lower validation loss (JoMA, arXiv 2310.00535)."
    ),
    about=(
        "We train Transformers of several depths on text in the authors' setting and record the entropy of attention "
        "over the validation text, layer by layer, and the validation loss. On WikiText-2 both are compared with "
        "the authors' own three runs, and the thresholds come from how far these lie from each other. As in their "
        "code, Adam starts afresh at every epoch and all layers start as copies of one. The quick preset trains small "
        "models on the embedded text, of which nothing was published."
    ),
    version=3,
    presets={
        "quick": Preset(
            Config(**language_training.quick_fields(steps=800, every=50), rate=QUICK_RATE, depths=(1, 2)),
            seeds=3,
            seconds=40.0,
        ),
        "paper": Preset(Config(**language_training.paper_fields()), seeds=3, seconds=500_000.0),
        # Not run yet. As many steps as on WikiText-2: the slides do not say how many. The seconds are an estimate.
        WIKITEXT103: Preset(
            Config(**language_training.paper_fields(corpus="Salesforce/wikitext:wikitext-103-v1")),
            seeds=3,
            seconds=4_000_000.0,
            title="Attention on WikiText-103",
        ),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    highlight=Highlight(
        "WikiText-2",
        draw_highlight,
        "Attention entropy of the one-layer model along training: ours as a line, on WikiText-2 that of the authors as "
        "dots, both in their window of the validation text.",
    ),
    figures={
        "paper": Drawing(
            draw_paper,
            "Attention entropy of each layer and validation loss along training, one column for each depth. Lines: "
            "means over seeds. Bands: range over seeds. On WikiText-2 the top row shows the authors' three runs, the "
            "row below it ours in the same window of the validation text; in the bottom row points are the authors' "
            "losses.",
        ),
        "entropy": Drawing(
            draw_entropy,
            "Attention entropy of each layer over the validation text. Lines and bands: mean and range over our seeds. "
            "Dots and thin lines, on WikiText-2: mean and range of the authors' three runs, of one window.",
        ),
        "learning": Drawing(
            draw_learning,
            "(a) Validation loss; thin lines mark its least mean over seeds. (b) Stable rank of the lower weights "
            "of the first MLP. Lines and bands: mean and range over seeds.",
        ),
    },
    threads=1,
    exact_shards=False,
    inputs=language_training.inputs,
)
