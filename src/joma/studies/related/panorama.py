"""All studies that train attention on common axes: where they agree, and which premise decides where they do not."""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from joma.studies.related import panorama_figures, panorama_measures, panorama_stored, panorama_training
from joma.studies.related.panorama_measures import (
    comes_back,
    contested,
    curves,
    judged,
    share_falling_first,
    share_right,
)
from joma.studies.related.panorama_training import TrainedConfig
from joma.study import Context, Drawing, Preset, Study


@dataclass(frozen=True)
class Config(TrainedConfig):
    """The models that are trained, and where the curves of the others come from."""

    runs: str = ""
    """A folder of runs from which the other curves are read; none for those that are packaged, of docs/runs."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Read the stored curves, and train the models whose studies store none."""
    panorama_training.check(config)
    stored = panorama_stored.stored(config.runs)
    return xr.merge([panorama_training.train(config, context), stored])


def outcome(run: xr.Dataset) -> str:
    """Return what came out: how many models fall first, come back, and are predicted by each premise."""
    present, counted = curves(run), judged(run)
    back = sum(comes_back(curve) for curve in counted.values())
    contest = contested(run)
    sentence = (
        f"Attention first turns sparser in {round(len(present) * share_falling_first(run))} of {len(present)} models. "
        f"Of {len(counted)} that are judged it comes back in {back}."
    )
    if not contest:
        return sentence
    by_minimum = round(len(contest) * share_right(contest, lambda source: source.minimum_predicts))
    by_units = round(len(contest) * share_right(contest, lambda source: source.units_predict))
    return (
        f"{sentence} There are {len(contest)} models, outside the study that suggested it, of which the minimum of the "
        f"loss predicts whether it does: rightly in {by_minimum}, and the activation in {by_units}."
    )


STUDY = Study(
    name="panorama",
    title="Neither the minimum of the loss nor the activation predicts in every model whether attention comes back",
    source="JoMA (arXiv 2310.00535), Scan and Snap (arXiv 2305.16380) and related work; the comparison is ours",
    statement=(
        "Theories of attention's training end differently: one key takes all (JoMA's Theorem 2, max-margin, "
        "value-softmax), attention freezes (Scan and Snap), or comes back (JoMA's Theorem 4). JoMA credits the return "
        "to nonlinear units."
    ),
    about=(
        "Entropy of attention, the weight on the most attended key and the stable rank of the first map above "
        "attention, of one model of every study that trains attention. JoMA's block, overlapping classes, Scan and "
        "Snap, text and addition are trained here; the others are read from stored runs. For each model it was "
        "declared before any curve was looked at whether its loss has no minimum, a least value with dense attention, "
        "or neither is known, and whether its units are linear: two premises that predict where attention comes back. "
        "Fall and return are measured as in the study ladder."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=4, seconds=15),
        "paper": Preset(
            Config(
                block_steps=40_000,
                overlap_steps=20_000,
                scan_steps=150_000,
                text_steps=3000,
                text_width=32,
                addition_digits=2,
                addition_layers=2,
                addition_width=64,
                addition_batch=64,
                addition_steps=3000,
                addition_rate=1e-3,
            ),
            seeds=8,
            seconds=300,
        ),
    },
    run=run,
    claims=panorama_measures.CLAIMS,
    outcome=outcome,
    threads=1,
    inputs=lambda config: panorama_stored.inputs(config.runs),
    exact_shards=False,
    figures={
        "axes": Drawing(panorama_figures.draw_axes, panorama_figures.CAPTIONS["axes"]),
        "returns": Drawing(panorama_figures.draw_returns, panorama_figures.CAPTIONS["returns"]),
    },
)
