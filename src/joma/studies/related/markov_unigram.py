"""One layer on a binary Markov chain: does it stop at the stationary distribution, and what frees it?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from joma.arguments import scalar
from joma.studies.related import markov_unigram_figures as figures
from joma.studies.related.markov_unigram_measures import (
    above_kernel,
    basin,
    fate_is_predicted,
    from_unigram,
    is_stuck,
    least_curvature_before_departure,
    of_group,
    rate_error,
    reduced_error,
    starts,
    stuck_share,
)
from joma.studies.related.markov_unigram_training import VARIANTS, TrainingConfig, train
from joma.study import Claim, Context, Drawing, Preset, Study, at_least, at_most, below
from joma.theory import markov

TYING = ("tied", "untied")
SMALL_START = 1e-3  # of the reduced model where its rates are measured: they hold up to the square of it


@dataclass(frozen=True)
class Config(TrainingConfig):
    """The reduced model's flow, and a transformer trained on chains."""

    reduced_start: float = 0.5
    """Standard deviation of the starts from which the reduced model's flow is followed to its end."""
    reduced_until: float = 2000.0


def run(config: Config, context: Context) -> xr.Dataset:
    """Solve the reduced model's flow from random starts, and train all arms."""
    return xr.merge([train(config, context), _reduced(config, context)])


def _reduced(config: Config, context: Context) -> xr.Dataset:
    """Return growth rates near the unigram and the losses at the end, of the reduced model, over chain and tying."""
    scale = scalar("reduced_start", config.reduced_start, above=0.0)
    until = scalar("reduced_until", config.reduced_until, above=0.0)
    p, q = np.array(config.chains).T
    predicted_rate = np.stack([markov.unigram_rates(p, q, tied=tied) for tied in (True, False)], axis=-1)
    ends_at_unigram = np.stack([p + q > 1, np.zeros(len(p), dtype=bool)], axis=-1)
    entropy, rate = markov.unigram_entropy(p, q)[:, None], markov.entropy_rate(p, q)[:, None]
    cells = list(np.ndindex(predicted_rate.shape))
    rates, losses = [_rate(config.chains[chain], tied=tying == 0) for chain, tying in cells], []
    for generator in context.numpy_generators("reduced starts"):
        e, a, b = scale * generator.standard_normal((3, len(cells)))
        for number, (chain, tying) in enumerate(cells):
            (p_chain, q_chain), a0 = config.chains[chain], a[number] if tying else None
            path = markov.reduced_flow(p_chain, q_chain, [until], e0=e[number], a0=a0, b0=b[number])
            losses.append(path.loss[-1])
    dims, shape = ("seed", "chain", "tying"), (len(context.seeds), *predicted_rate.shape)
    return xr.Dataset(
        {
            "reduced_rate": (dims[1:], np.reshape(rates, shape[1:])),
            "reduced_rate_predicted": (dims[1:], predicted_rate),
            "reduced_loss": (dims, np.reshape(losses, shape)),
            "reduced_loss_predicted": (dims[1:], np.where(ends_at_unigram, entropy, rate)),
        },
        {"seed": list(context.seeds), "tying": list(TYING)},
    )


def _rate(chain: tuple[float, float], *, tied: bool) -> float:
    """Return the growth rate of e along the integrated flow, over one time constant from a small start."""
    predicted = float(markov.unigram_rates(*chain, tied=tied))
    growing = float(np.sign(markov.covariance(*chain))) * SMALL_START  # a along the growing direction
    time = 1 / abs(predicted)
    path = markov.reduced_flow(*chain, [time], e0=SMALL_START, a0=None if tied else growing)
    return float(np.log(path.e[-1] / SMALL_START) / time)


def _variant_claim(name: str, statement: str, *, stuck: bool, kind: str = "control") -> Claim:
    expected = at_least(0.75) if stuck else at_most(0.25)
    return Claim(
        name,
        statement,
        lambda run: stuck_share(run, name),
        expected,
        kind=kind,  # pyright: ignore[reportArgumentType]
        quantity=f"share of seeds at the unigram at the end, with {VARIANTS[name].about}; first chain, tied weights",
        across="mean",
        seeds=4,
    )


REDUCED_CLAIMS = (
    Claim(
        "rate",
        "Near the unigram the reduced model's embedding moves at the rate 2C if tied, and |C| if not.",
        rate_error,
        at_most(0.02),
        kind="control",
        quantity="largest relative error of the integrated flow's rate over a time constant, over chains",
    ),
    Claim(
        "reduced-ends",
        "From random starts the reduced model ends at H(π) if weights are tied and p + q > 1, else at the entropy "
        "rate.",
        reduced_error,
        at_most(1e-5),
        kind="control",
        quantity="largest distance of the loss from that value, over chains; starts for which it fails have measure "
        "zero",
    ),
)
TRAINED_CLAIMS = (
    Claim(
        "stuck",
        "SGD with tied weights stops at the unigram if p + q > 1.",
        from_unigram,
        at_most(0.005),
        kind="reading",
        quantity="largest |loss − H(π)| at the end, over chains with p + q > 1",
    ),
    Claim(
        "through",
        "SGD learns the transitions if weights are untied or p + q < 1.",
        above_kernel,
        at_most(0.01),
        kind="reading",
        quantity="largest excess of the loss over the entropy rate at the end, over these arms",
    ),
    Claim(
        "basin",
        "SGD leaves the unigram from large initial weights.",
        basin,
        at_least(0.5),
        kind="control",
        quantity="share of seeds stuck from the smallest start less that from the largest; tied weights, first chain",
        across="mean",
    ),
    Claim(
        "fate",
        "The Hessian at the unigram decides at the start whether SGD stays there.",
        fate_is_predicted,
        at_least(0.9),
        kind="control",
        quantity="share of tied arms that stay where its least eigenvalue is positive and leave where it is not; the "
        "bound is ours",
        across="mean",
    ),
    Claim(
        "adam",
        "Adam leaves the unigram, also with tied weights and p + q > 1.",
        lambda run: stuck_share(run, "adam"),
        at_most(0.25),
        kind="control",
        quantity="share of arms stuck at the end",
        across="mean",
    ),
    Claim(
        "saddle-first",
        "Adam leaves the unigram only after its other weights have turned it into a saddle.",
        least_curvature_before_departure,
        below(0.0),
        kind="control",
        quantity="least eigenvalue of the Hessian over 2|C|: its smallest value up to the first record past a quarter "
        "of the fall, largest over arms",
    ),
)
VARIANT_CLAIMS = (
    _variant_claim("deep-sgd", "A second layer does not free SGD from the unigram.", stuck=True),
    _variant_claim("deep", "Adam leaves the unigram with two layers.", stuck=False, kind="reading"),
    _variant_claim("decay", "Weight decay of 0.1 does not hold AdamW at the unigram.", stuck=False),
    _variant_claim("strong-decay", "Weight decay of 1 does not hold AdamW at the unigram.", stuck=False),
    _variant_claim("schedule", "A cosine schedule does not hold Adam at the unigram.", stuck=False),
    _variant_claim("long", "Long sequences do not hold Adam at the unigram.", stuck=False),
    _variant_claim("wide", "A wide model does not hold Adam at the unigram.", stuck=False),
    _variant_claim("norm", "LayerNorm does not hold Adam at the unigram.", stuck=False),
    _variant_claim("authors", "The authors' settings with LayerNorm end at the unigram.", stuck=True, kind="reading"),
    _variant_claim(
        "authors-simple", "The authors' settings without LayerNorm end at the unigram.", stuck=True, kind="reading"
    ),
    _variant_claim(
        "authors-usual-betas",
        "The authors' settings without LayerNorm, but Adam's usual second decay rate, do not end at the unigram.",
        stuck=False,
    ),
    _variant_claim(
        "authors-short", "The authors' settings without LayerNorm are still at the unigram after 400 steps.", stuck=True
    ),
    _variant_claim(
        "authors-patient", "The authors' settings lead away from the unigram in five times as many steps.", stuck=False
    ),
    _variant_claim(
        "authors-deep",
        "The authors' settings with two layers do not end at the unigram.",
        stuck=False,
        kind="reading",
    ),
)


def outcome(run: xr.Dataset) -> str:
    """Say what came out: how many models are stuck under SGD and Adam, from which starts, and in which variants."""
    tied = of_group(run, "sgd")
    stuck = is_stuck(tied.isel(arm=np.flatnonzero((tied.tied == 1) & (tied.p + tied.q > 1))))
    adam, by_start = is_stuck(of_group(run, "adam")), is_stuck(starts(run)).mean("seed")
    all_stuck = starts(run).init.values[by_start.values == 1]
    names = [name for name in VARIANTS if name in run.group.values]
    staying_start = f"Every one by SGD stops there if initial weights are at most {max(all_stuck, default=0):g}. "
    staying = [VARIANTS[name].about for name in names if float(stuck_share(run, name).mean()) > 0.5]
    sentence = (
        f"With tied weights and p + q > 1, {int(stuck.sum())} of {stuck.size} transformers trained by SGD stop at the "
        f"unigram, and {int(adam.sum())} of {adam.size} trained by Adam. "
        + staying_start * bool(all_stuck.size)
        + f"The Hessian at the start predicts {100 * float(fate_is_predicted(run).mean()):.0f} % of these ends."
    )
    return f"{sentence} Of {len(names)} variants these stay: {'; '.join(staying) or 'none'}." if names else sentence


STUDY = Study(
    name="markov-unigram",
    title="Tied weights stop at the unigram, until the other weights have made it a saddle",
    source="Makkuva et al. 2024 (arXiv 2402.04161)",
    statement=(
        "A one-layer transformer trained on a binary Markov chain may stop at the stationary distribution, although it "
        "can represent the transitions (Makkuva et al. 2024, arXiv 2402.04161). With tied embedding and head and "
        "p + q > 1 that point is a local minimum, untied it is a saddle; for p + q < 1 training gets through."
    ),
    about=(
        "We train transformers with one head and ReLU units on fresh chains, tied and untied, by SGD and by Adam. The "
        "loss is measured with the chain's true transitions in place of the next symbol. Beside them are the reduced "
        "model, which has the residual path alone and is solved by integration, and the Hessian in the embedding at "
        "the point that predicts π: it depends on all other weights, so that they can turn a minimum into a saddle. "
        "Variants ask what else may hold a model there: weight decay, schedule, length, width, LayerNorm, depth, and "
        "the settings of the authors' public code."
    ),
    version=2,
    presets={
        "quick": Preset(Config(), seeds=8, seconds=20),
        # Meant for a GPU; the seconds are from the steps of every arm on one core.
        "paper": Preset(
            Config(
                length=256,
                width=16,
                steps=5000,
                inits=(0.05, 0.1, 0.2, 0.3, 0.4),
                variants=tuple(VARIANTS),
                long_length=1024,
                wide_width=64,
            ),
            seeds=20,
            seconds=35_000,
        ),
    },
    run=run,
    claims=(*REDUCED_CLAIMS, *TRAINED_CLAIMS, *VARIANT_CLAIMS),
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "losses": Drawing(
            figures.draw_losses,
            "(a) to (c) Loss over training on three chains, mean over seeds; bands from the least to the greatest "
            "seed. Dotted lines: entropy of the stationary distribution (above) and entropy rate (below). (d) Share of "
            "seeds that SGD leaves at the unigram, by the scale of the initial weights; beside it the share for which "
            "the Hessian at the start has no negative eigenvalue.",
        ),
        "curvature": Drawing(
            figures.draw_curvature,
            "Least eigenvalue of the Hessian in the embedding at the unigram, over 2|C|: 1 for the residual path "
            "alone, a saddle below 0. (a) At the start of SGD, and where its loss ends between the entropy rate (0) "
            "and the unigram (1). (b) Along training by Adam, to the mark at which the model has left. (c) Where the "
            "losses of the variants end.",
        ),
    },
)
