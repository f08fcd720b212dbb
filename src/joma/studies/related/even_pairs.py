"""Even pairs: attention makes the sequences separable, then the linear layer grows; parity by a chain of thought."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from joma.studies.related import even_pairs_figures, even_pairs_training
from joma.studies.related.even_pairs_measures import (
    attention_growth,
    boundary,
    boundary_loss,
    boundary_spread,
    distance_from_flow,
    fastest,
    late_slope,
    log_growth,
    loss_power,
    polarised_change,
    square_growth,
)
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, between


@dataclass(frozen=True)
class Config(even_pairs_training.WorldConfig):
    """All binary sequences up to a length, the flow on them, and the layers trained on them."""


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve the flow in each world, and train layers on even pairs, parity and the states of chains of thought."""
    even_pairs_training.check(config)
    with context.progress.task("even-pairs, flows", total=len(config.lengths)) as task:
        flows: list[xr.Dataset] = []
        for max_length in config.lengths:
            flows.append(even_pairs_training.solve(config, max_length))
            task.advance()
    solved = xr.concat(flows, dim=xr.Variable("max_length", list(config.lengths)))
    trained = even_pairs_training.train(config, context)
    return xr.merge([solved, trained]).assign(trained_length=config.trained_length)


PHASES = (
    Claim(
        "phase-1",
        "Attention makes all sequences separable while the loss is still above half of its start.",
        boundary_loss,
        at_least(0.5),
        kind="reading",
        quantity="loss over its start when all margins first are positive; least over learning rates and starts",
    ),
    Claim(
        "step-size",
        "Learning rates from 0.02 to 0.5, from zero or from a small start, end the first phase at the same time.",
        boundary_spread,
        at_most(0.05),
        kind="control",
        quantity="latest over earliest time (rate × step) at which all margins are positive, less 1; the bound is ours",
    ),
    Claim(
        "log-growth",
        "In the second phase the linear layer grows as ln t, at the rate of the max-margin vector.",
        log_growth,
        between(0.8, 1.1),
        kind="reading",
        quantity="d‖u‖/d ln t over ‖û‖, the SVM of the final attention outputs, over the last 1.5 decades, of the "
        "layer trained up to one length; the bounds are ours",
    ),
    Claim(
        "margin-direction",
        "The linear layer points along the max-margin direction of the attention outputs.",
        lambda run: fastest(run).cosine,
        at_least(0.97),
        kind="reading",
        quantity="cosine of u with the SVM direction at the end, of the layer trained up to one length; the bound is "
        "ours",
    ),
    Claim(
        "loss-power",
        "In the second phase the loss falls as 1/t.",
        loss_power,
        between(-1.3, -1.0),
        kind="reading",
        quantity="d ln loss/d ln t over the last 1.5 decades; the power is approached as 1/ln t only",
    ),
    Claim(
        "attention-stable",
        "In the second phase attention's logits are stable.",
        attention_growth,
        at_most(0.1),
        kind="reading",
        quantity="d‖W‖/d ln t over the last 1.5 decades; the paper's rule for step sizes is not known to us, and the "
        "bound is ours",
    ),
    Claim(
        "polarise",
        "In the second phase attention's error times ‖u‖² hardly changes.",
        polarised_change,
        at_most(0.2),
        kind="control",
        quantity="largest over smallest mean error of even pairs times ‖u‖², less 1, over the last two decades of the "
        "flow; largest over the maximum lengths, and the bound is ours",
    ),
    Claim(
        "square-growth",
        "In the second phase ‖u‖² at least doubles over two decades of time.",
        square_growth,
        at_least(2.0),
        kind="control",
        quantity="‖u‖² at the end over that two decades before, along the flow; least over the maximum lengths",
    ),
    Claim(
        "flow",
        "Gradient descent from zero follows the flow.",
        distance_from_flow,
        at_most(0.02),
        kind="check",
        quantity="largest relative distance of ‖u‖ from the flow's at the smallest learning rate; the bound is the "
        "smallest rate of the presets, the order of the distance",
    ),
    Claim(
        "ledger",
        "Theorem 1's law for softmax attention holds for this layer, with all its terms.",
        lambda run: float(run.theorem_1_residual.max(skipna=False)),
        at_most(10 * even_pairs_training.SOLVER.rtol),
        kind="theorem",
        quantity="relative error of Σ_m W_m predicted from u with drift and gap, at the end of the flow; largest over "
        "the maximum lengths; the bound is ten times the integrator's relative tolerance",
    ),
)
PARITY = (
    Claim(
        "parity-direct",
        "One layer that is trained on parity directly gets only half of the sequences right.",
        lambda run: fastest(run, "parity").accuracy,
        between(0.4, 0.6),
        kind="reading",
        quantity="accuracy on all sequences of lengths 2 and more; the bounds are ours",
    ),
    Claim(
        "parity-chain",
        "A layer that is trained on even pairs solves parity by a chain of thought.",
        lambda run: np.minimum(fastest(run).chain_accuracy, fastest(run).pairs_accuracy),
        at_least(1.0),
        kind="reading",
        quantity="accuracy on all sequences of lengths 2 and more; the lower of two chains",
    ),
    Claim(
        "chain-trained",
        "A layer that is trained on all states of the chains of thought solves parity.",
        lambda run: fastest(run, "chain").chain_accuracy,
        at_least(1.0),
        kind="reading",
        quantity="accuracy on all sequences of lengths 2 and more, every state of the chain made by the layer itself",
    ),
    Claim(
        "ends-needed",
        "Without the ends of the chains in the data, the zero start is a stationary point.",
        lambda run: float(run.decisions_speed.max()),
        at_most(1e-12),
        kind="theorem",
        quantity="largest velocity of u and W at zero; derived in our documents",
    ),
    Claim(
        "decisions-alone",
        "A layer that is trained without the ends of the chains solves parity from every small random start.",
        lambda run: fastest(run, "decisions").chain_accuracy,
        at_least(1.0),
        kind="control",
        quantity="accuracy on all sequences of lengths 2 and more, every state of the chain made by the layer itself",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the two phases, how fast attention still grows, and parity."""
    times = boundary(run)
    longest = run.isel(max_length=-1)
    power = float(late_slope(np.log(longest.flow_loss), "time"))
    accuracy = {task: float(fastest(run, task).accuracy.mean()) for task in ("parity", "decisions")}
    return (
        f"All sequences up to length {int(run.trained_length)} are separable at time {float(times.min()):.1f} to "
        f"{float(times.max()):.1f}. After that ‖u‖ grows at {float(log_growth(run).mean()):.2f} of the SVM's rate and "
        f"‖W‖ by {float(attention_growth(run).mean()):.2f} per ln t. Up to length {int(longest.max_length)} the loss "
        f"of the flow falls as t^{power:.2f} by time {float(run.time[-1]):g}. Parity trained directly is right in "
        f"{100 * accuracy['parity']:.0f} % of sequences, by a chain of thought of the layer for even pairs in "
        f"{100 * float(fastest(run).chain_accuracy.mean()):.0f} %, by one trained on all states of the chains in "
        f"{100 * float(fastest(run, 'chain').chain_accuracy.mean()):.0f} %."
    )


STUDY = Study(
    name="even-pairs",
    title="Even pairs: attention first, then the linear layer, and attention never quite stops",
    source="Huang, Liang & Yang 2025 (arXiv 2505.00926); the second phase of attention is ours",
    statement=(
        "A one-layer Transformer trained by gradient descent to say whether the first and the last symbol of a "
        "sequence are equal has two phases: attention grows and makes the sequences separable; then attention is "
        "stable, the linear layer grows as ln t towards a max-margin direction, and the loss falls as 1/t. Parity "
        "needs a chain of thought, at inference or in training (arXiv 2505.00926, abstract)."
    ),
    about=(
        "All binary sequences up to a length, each length with the same weight, so that nothing is sampled. The layer "
        "is the softmax block with one hidden unit and one query for each last token. We solve its flow from zero, and "
        "train it by gradient descent with three learning rates from zero and from small random starts. Parity is "
        "trained directly; and by a chain of thought that shortens a sequence by one symbol at each decision about an "
        "even pair, with a layer trained on even pairs, one trained on all states of all chains, and one trained "
        "without the ends of the chains."
    ),
    version=2,
    presets={
        "quick": Preset(Config(), seeds=4, seconds=12),
        "paper": Preset(Config(lengths=(4, 6, 8, 12), trained_length=6, steps=60_000), seeds=5, seconds=240),
    },
    run=run,
    claims=(*PHASES, *PARITY),
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "phases": Drawing(
            even_pairs_figures.draw_phases,
            "Even pairs. (a) Norms of the linear layer and of attention's logits, and the loss, over time, trained "
            "with the largest learning rate; the vertical line is where all answers are right. (b) The same norms "
            "along the flow for each maximum length. (c) Attention's error times ‖u‖² along the flow levels off; "
            "solid: even pairs, dashed: odd pairs. (d) Accuracy of parity: bars from the lowest to the highest seed.",
        ),
    },
)
