"""Which premise makes attention come back? The optimum of the loss does, not the activation."""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from joma.studies.entropy_return import fall, share_regained
from joma.studies.theorems import (
    ladder_figures,
    ladder_flows,
    ladder_measures,
    ladder_training,
    ladder_training_figures,
    ladder_worlds,
)
from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_measures import arrived, arrived_cases, came_back
from joma.studies.theorems.ladder_task import TrainedLadderConfig
from joma.study import Context, Drawing, Preset, Study


@dataclass(frozen=True)
class Config(TrainedLadderConfig, ladder_flows.FlowConfig):
    """The worlds, the flows in them, the block that SGD trains along these flows, and the trained arms."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve the flows of all worlds for each seed, search for their optima, and train the block and the arms."""
    ladder_worlds.check(config)
    ladder_flows.check(config)
    rows: list[xr.Dataset] = []
    with context.progress.task("ladder, flows", total=2 * len(context.seeds)) as task:
        for seed in context.seeds:
            named = ladder_flows.solve_named(config, seed)
            task.advance()
            rows.append(xr.merge([named, ladder_flows.solve_cases(config, seed)]))
            task.advance()
    solved = xr.concat(rows, dim=xr.Variable("seed", list(context.seeds)))
    return xr.merge([solved, ladder_flows.train(config, context), ladder_training.train(config, context)])


def outcome(run: xr.Dataset) -> str:
    """Return what came out: how much attention regains by world, and how well the optimum predicts where it ends."""
    linear = run.entropy.sel(activation="linear")
    share, depth = (measure(linear, "time").mean("seed") for measure in (share_regained, fall))
    cases = arrived_cases(run, "random")
    distance = float(abs(cases.case_end - cases.case_optimum).mean())
    settled = int(cases.case_end.notnull().sum())
    returned = int((came_back(run) & arrived(run)).isel(case=run.family == "random").sum())
    shares = {world: f"{100 * float(share.sel(world=world)):.0f} %" for world in ("overlap", "lengths", "separable")}
    return (
        f"With linear units entropy falls by {100 * float(depth.sel(world='overlap')):.0f} % of its largest value, "
        f"ln M for M tokens. It regains {shares['overlap']} of that where tokens are independent given the class, "
        f"{shares['lengths']} where contexts have two lengths, and {shares['separable']} where tokens separate the "
        f"classes. Of {cases.case_end.size} data distributions drawn at random {settled} are trained to their optimum, "
        f"attention comes back in {returned} of them, and entropy ends {distance:.1g} ln M from the predicted one on "
        f"average. {ladder_training.outcome(run)}"
    )


STUDY = Study(
    name="ladder",
    title="Attention comes back to the optimum of the loss, with linear units too",
    source="JoMA, Theorems 2 and 4 (arXiv 2310.00535); the optimum is ours",
    statement=(
        "With a linear activation attention only concentrates (Theorem 2), and a nonlinear one brings it back (Theorem "
        "4): JoMA credits the activation with the return."
    ),
    about=(
        "The block with cross entropy, on all contexts of small data distributions (worlds) with their exact "
        "probabilities. If tokens are independent given the class, linear units under uniform attention hold the Bayes "
        "optimum (naive Bayes; the proof is in docs/ladder.md), so that attention which turned sparse on the way must "
        "come back. We solve the block's flow with linear and GELU units, cross entropy and a constant gradient, in "
        "worlds whose optimum has uniform attention, has sparser attention, or lies at infinity. In further worlds the "
        "optimum is searched for, or chosen beforehand (planted), and predicts where entropy ends and whether it comes "
        "back; worlds that have not arrived there are not judged. A block is trained by SGD along the flow. Beside it, "
        "models between this block and a one-layer language model are trained on sampled tokens, each with one premise "
        "switched."
    ),
    version=2,
    presets={
        "quick": Preset(
            Config(
                shares=(0.0, 0.1, 0.5),
                planted=(1.0, 0.8, 0.5),
                draws=3,
                searches=2,
                gelu_worlds=("overlap", "separable"),
                sgd_worlds=("overlap",),
                sgd_steps=4000,
            ),
            seeds=5,
            seconds=18,
        ),
        "paper": Preset(
            Config(
                draws=40,
                trained_arms=tuple(ARMS),
                trained_rates=(0.3, 1.0, 3.0),
                trained_steps=15_000,
                trained_optimum=4096,
            ),
            seeds=20,
            seconds=15_000,
        ),
    },
    run=run,
    claims=(*ladder_measures.CLAIMS, *ladder_training.CLAIMS),
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "gradients": Drawing(
            ladder_figures.draw_gradients,
            "Entropy of attention over time along the flow of the block; each line is one of up to eight seeds, points "
            "are their minima. With cross entropy it comes back where every token occurs in every class, with linear "
            "units as with GELU. It does not where tokens separate the classes, nor under a constant gradient.",
        ),
        "optima": Drawing(
            ladder_figures.draw_optima,
            "Linear units, cross entropy, one colour for each seed. Lines: the flow. Points: SGD. Dashed: entropy at "
            "the optimum, by a search over weights and logits that does not know the flow.",
        ),
        "predictions": Drawing(
            ladder_figures.draw_predictions,
            "Linear units, cross entropy. (a) Entropy at the end of the flow against that at the optimum; grey "
            "crosses: not arrived, still on the way or at another local optimum. (b) The return of attention against "
            "what the optimum and the first part of the path say about it. (c) The more contexts of one "
            "token, the sparser is the optimum: means over seeds, bars from the lowest to the highest.",
        ),
        "arms": Drawing(
            ladder_training_figures.draw_arms,
            "Models between the block and a one-layer language model, trained on sampled tokens: entropy of attention "
            "over the steps, one line for each seed, at the learning rate of the lowest loss. Titles: what is switched "
            "in the block, or back in the language model.",
        ),
        "speed": Drawing(
            ladder_training_figures.draw_speed,
            "Training at all positions. Lines: mean entropy of attention over seeds. Shaded: from the lowest to the "
            "highest seed. Dotted: entropy at the optimum, where it was computed.",
        ),
    },
)
