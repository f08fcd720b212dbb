"""In-context linear regression: linear attention learns a step of gradient descent, in one fall or in a staircase."""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from joma.studies.related import icl_regression_figures as figures
from joma.studies.related import icl_regression_flows as flows
from joma.studies.related import icl_regression_training as training
from joma.studies.related.icl_regression_measures import CLAIMS, is_behind, is_waiting, relative_width, seen
from joma.study import Context, Drawing, Preset, Study


@dataclass(frozen=True)
class Config(training.TrainedConfig):
    """The task, the flows on its exact loss, and the models that are trained on sampled prompts."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve the flows, sample the risks, and train the models."""
    training.check(config)
    return xr.merge([flows.solve(config, context), training.train(config, context)])


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the staircase, the fall, the seeds that wait at the saddle, and the layers."""
    best, transformed = run.best_loss, run.layer_loss.sel(layer_blocks="transform").isel(layer_step=-1)
    transformed = (transformed - run.best_probe_loss).mean("seed") + best
    deepest = int(run.layers[-1])
    return (
        f"Heads of rank one wait at {100 * float(seen(run, 'rank one').mean()):.0f} % of the plateaus, one head of "
        f"full rank at {100 * float(seen(run, 'full rank').mean()):.0f} %. With merged keys and queries the fall takes "
        f"{float(relative_width(run)[-1]):.2f} of its half time from the smallest start. From random whole matrices "
        f"{int(is_waiting(run).sum())} of {run.sizes['seed']} seeds end at the first plateau, and "
        f"{int(is_behind(run).sum())} nearer to it than to the optimum. {deepest} layers reach a loss of "
        f"{float(run.descent_loss.isel(layers=-1).mean()):.3f} as steps of descent (best: "
        f"{float(best[-1]):.3f}) and {float(transformed[-1]):.3f} if they transform x as well."
    )


STUDY = Study(
    name="icl-regression",
    title="Linear attention learns a step of gradient descent, in one fall or in a staircase",
    source="Zhang, Frei & Bartlett (arXiv 2306.09927); Ahn et al. (2306.00297); Zhang et al. (2501.16265)",
    statement=(
        "Trained on prompts of random linear regressions, a layer of linear attention ends at one step of "
        "preconditioned gradient descent on the prompt's least squares (2306.09927), and L layers can make L steps "
        "(2306.00297). With keys and queries merged the loss falls once, abruptly; with separate ones of rank one it "
        "goes from plateau to plateau and learns the principal components one by one (2501.16265)."
    ),
    about=(
        "The loss of linear attention on these prompts is known exactly, with noise in the labels too, and with it the "
        "optimum, the plateaus, the time of the fall and the times of the steps. We integrate gradient flow on this "
        "loss from random starts and from starts for which there is a closed form, and sample the risk on longer and "
        "noisy prompts. On sampled prompts we train whole matrices by SGD, with all blocks or with those that the "
        "theory uses; one to three layers by Adam, beside the best steps of gradient descent, which a search finds; "
        "one layer on noisy labels; and softmax attention."
    ),
    version=1,
    presets={
        "quick": Preset(Config(), seeds=5, seconds=18),
        "paper": Preset(
            Config(
                spectrum=(1.6, 1.2, 0.9, 0.68, 0.51, 0.38, 0.29, 0.22, 0.16, 0.12),
                length=40,
                merged_heads=(1, 2),
                merged_until=5000.0,
                heads=10,
                low_rank=5,
                separate_until=3e5,
                whole_heads=(1, 2, 8),
                whole_steps=2000,
                whole_batch=128,
                layers=(1, 2, 3),
                layer_steps=2000,
                searches=3,
                softmax_heads=(1, 2, 8),
                softmax_steps=2000,
            ),
            seeds=50,
            seconds=2200,
        ),
    },
    run=run,
    claims=CLAIMS,
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "flows": Drawing(
            figures.draw_flows,
            "Gradient flow on the exact loss; thin lines are seeds, up to eight. (a) Loss; dotted: the plateaus. (b) "
            "What heads of rank one have learnt of each direction. (c) Aligned heads, in the colours of (b). Lines: "
            "closed form. Points: half times of the integrated flow. (d) Risk of the optimum on prompts of other "
            "lengths.",
        ),
        "trained": Drawing(
            figures.draw_trained,
            "Trained on sampled prompts, losses paired with those of gradient descent on the same prompts. (a) One "
            "layer by SGD from random matrices, each seed with and without the blocks that the theory leaves out; "
            "dotted: the plateaus. (b) Layers of linear attention by Adam beside the best steps. Bars: least to "
            "greatest seed. (c) Softmax attention by Adam.",
        ),
    },
)
