"""The value law: Theorem 1 is about the first trained linear map after attention, which in a Transformer is W_V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from joma.arguments import whole
from joma.studies.theorems import value_figures
from joma.studies.theorems.invariance_training import concat
from joma.studies.theorems.value_flows import flows
from joma.studies.theorems.value_heads import BY_SGD, check_heads, heads
from joma.studies.theorems.value_ladder import check_ladder, ladder
from joma.studies.theorems.value_training import (
    ABOVE,
    BREAKERS,
    LAWS,
    Config,
    ValueSetting,
    build,
    draw_data,
    optimiser,
    rounding,
    trial,
)
from joma.study import Claim, Context, Drawing, NotInRun, Preset, Study, above, at_least, at_most, below

FLOW_ERROR = 1e-8  # what an integrator with relative tolerance 1e-11 may leave along a flow
LAW_TOLERANCE = 0.01  # a law holds up to 1 % of what there was to predict, as in `invariance`


def run(config: Config, context: Context) -> xr.Dataset:
    """Integrate the flows, train every setting and the ladder, and compare all with the value law."""
    settings = list(dict.fromkeys([*LAWS.values(), *ABOVE.values(), *_without_values(), *BREAKERS.values()]))
    for setting in settings:  # bad input is reported before any training
        build(config, context, setting)
        optimiser(config, context, setting)
    whole("steps", config.steps)
    check_ladder(config, context)
    check_heads(config)
    result = flows(config, context)
    trials: dict[ValueSetting, xr.Dataset] = {}
    with context.progress.task("value-invariant", total=len(settings)) as task:
        for setting in settings:
            trials[setting] = trial(config, context, setting)
            task.advance()
    result = xr.merge([result, _errors(trials), ladder(config, context), heads(config, context)], join="exact")
    result = result.transpose("seed", "step", "ladder_step", ..., missing_dims="ignore")
    rows = draw_data(config, context, 1).x.shape[1]
    return result.assign(
        rounding=rounding(config, config.steps, rows),
        ladder_rounding=rounding(config, config.ladder_steps, config.samples * config.length),
        rate=config.rate,
    )


def _without_values() -> list[ValueSetting]:
    return [_of_jomas_block(setting) for setting in ABOVE.values()]


def _of_jomas_block(setting: ValueSetting) -> ValueSetting:
    """Return the setting without W_V and W_O, where JoMA's law is about the first trained map after attention."""
    return replace(setting, values=False, unequal=False)


def _errors(trials: dict[ValueSetting, xr.Dataset]) -> xr.Dataset:
    """Return the errors of all settings as variables of the run."""

    def equal(setting: ValueSetting, name: str) -> xr.DataArray:
        return trials[setting][name].sel(rates="equal", drop=True)

    above_laws = {
        "value": {name: equal(setting, "value").sel(correction="full", drop=True) for name, setting in ABOVE.items()},
        "mlp": {name: equal(setting, "mlp") for name, setting in ABOVE.items()},
        "joma": {name: equal(_of_jomas_block(setting), "mlp") for name, setting in ABOVE.items()},
    }
    broken = {name: equal(setting, "value").sel(correction="full", drop=True) for name, setting in BREAKERS.items()}
    residuals = {
        "value": {name: equal(setting, "value_residual") for name, setting in ABOVE.items()},
        "mlp": {name: equal(setting, "mlp_residual") for name, setting in ABOVE.items()},
        "joma": {name: equal(_of_jomas_block(setting), "mlp_residual") for name, setting in ABOVE.items()},
    }
    in_laws = {"sgd": "value", "sgd_residual": "value_residual", "loss": "loss"}
    return xr.Dataset(
        {
            **{
                name: concat({law: trials[setting][source] for law, setting in LAWS.items()}, "law")
                for name, source in in_laws.items()
            },
            "above": concat({name: concat(parts, "network") for name, parts in above_laws.items()}, "weights"),
            "broken": concat(broken, "breaker"),
            "above_residual": concat({name: concat(parts, "network") for name, parts in residuals.items()}, "weights"),
        }
    )


def worst(values: xr.DataArray) -> xr.DataArray:
    """Return the largest value of each seed; NaN where one of its trainings diverged."""
    return values.max([dim for dim in values.dims if dim != "seed"], skipna=False)


def at_end(values: xr.DataArray, **labels: Any) -> xr.DataArray:
    """Return the largest value of each seed after the last step, selected by label."""
    return worst(values.isel({_step_dim(values): -1}).sel(labels))


def has_diverged(run: xr.Dataset) -> xr.DataArray:
    """Return, per seed, whether one of its trainings diverged."""
    errors = {name: run[name] for name in ("sgd", "above", "broken", "ladder_error", "head_drift")}
    ends = {name: worst(values.isel({_step_dim(values): -1}, drop=True)) for name, values in errors.items()}
    return xr.Dataset(ends).to_array().isnull().any("variable")


def _step_dim(values: xr.DataArray) -> str:
    return "ladder_step" if "ladder_step" in values.dims else "step"


IN_FLOW = "largest change over tokens, times, and rates (1, 1) and (0.6, 1.7); 3 queries, LayerNorm, MLP, head above"
IN_SGD = (
    "what the law with SGD's steps leaves over its largest term, in units of the bound of rounding; largest over steps"
)
RELATIVE = "‖measured − predicted‖ / ‖measured − start‖ over tokens, at the end"
FLOW_CLAIMS = {
    "exp": "With exp attention Σ_m z_m/η_z − ½‖W_V e‖²/η_V stays constant along gradient flow.",
    "linear": "With linear attention ½Σ_m z_m²/η_z − ½‖W_V e‖²/η_V stays constant along gradient flow.",
    "softmax": "With softmax attention Σ_m z_m follows the value law with all its terms along gradient flow.",
    "keys linear": "With logits q·k and linear attention ‖W_K e‖²/η_K − ‖W_V e‖²/η_V stays constant.",
    "keys exp": "With logits q·k and exp attention keys grow by the key law with all its terms.",
    "keys softmax": "With logits q·k and softmax attention keys grow by the key law with all its terms.",
}
SGD_CLAIMS = {
    "exp": "SGD departs from the value law of exp attention only by the squares of its steps.",
    "linear": "SGD departs from the value law of linear attention only by the squares of its steps.",
    "softmax": "With drift, gap and step terms the value law is exact along SGD, softmax attention.",
    "keys linear": "SGD departs from the law of keys and values only by the squares of its steps.",
    "keys exp": "With all its terms the key law is exact along SGD, exp attention.",
    "keys softmax": "With all its terms the key law is exact along SGD, softmax attention.",
}
NETWORKS = {
    "units": "only hidden units",
    "norm": "a LayerNorm",
    "head": "an MLP and a head",
    "skip": "a residual around the MLP",
    "all": "LayerNorm, residual, MLP and head",
}
BREAKING = {
    "learned": "Learned embeddings break the value law.",
    "overlap": "Embeddings that are not orthogonal break the value law.",
    "adam": "Adam in place of SGD breaks the value law.",
    "decay": "Weight decay breaks the value law.",
}
PREMISES = {
    "block": "with one query and all data per step",
    "positions": "with every position a query",
    "minibatch": "with minibatches",
    "product": "with logits q·k",
    "learned": "with learned embeddings",
    "adam": "with Adam",
}
EXACT_RUNGS = ("block", "positions", "minibatch")


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _flow_claim(law: str) -> Claim:
    return Claim(
        f"flow-{_slug(law)}",
        FLOW_CLAIMS[law],
        lambda run: worst(run.flow_violation.sel(law=law)),
        at_most(FLOW_ERROR),
        kind="theorem",
        quantity=IN_FLOW,
    )


def _sgd_claim(law: str) -> Claim:
    return Claim(
        f"sgd-{_slug(law)}",
        SGD_CLAIMS[law],
        lambda run: worst(run.sgd_residual.sel(law=law)) / run.rounding,
        at_most(1.0),
        kind="theorem",
        quantity=f"{IN_SGD} and rates",
    )


def _above_claims(network: str) -> tuple[Claim, ...]:
    value = Claim(
        f"value-{network}",
        f"The value law holds with {NETWORKS[network]} above attention.",
        lambda run: worst(run.above_residual.sel(network=network, weights="value")) / run.rounding,
        at_most(1.0),
        kind="theorem",
        quantity=f"{IN_SGD}; exp attention",
    )
    mlp = Claim(
        f"mlp-{network}",
        f"In a Transformer, JoMA's law of the MLP fails with {NETWORKS[network]} above attention.",
        lambda run: at_end(run.above, network=network, weights="mlp"),
        at_least(LAW_TOLERANCE),
        kind="control",
        quantity=f"{RELATIVE}, with the squares of SGD's steps; exp attention, weights w·W_O W_V e in the place of w·e",
        across="interval",
    )
    return value, mlp


def _joma_claim(network: str) -> Claim:
    holds = network in ("units", "head")
    return Claim(
        f"joma-{network}",
        f"Without W_V, JoMA's law {'holds' if holds else 'fails'} with {NETWORKS[network]} above attention.",
        lambda run: (
            worst(run.above_residual.sel(network=network, weights="joma")) / run.rounding
            if holds
            else at_end(run.above, network=network, weights="joma")
        ),
        at_most(1.0) if holds else at_least(LAW_TOLERANCE),
        kind="theorem" if holds else "control",
        quantity=f"{IN_SGD}; exp attention" if holds else f"{RELATIVE}, with the squares of SGD's steps; exp attention",
        across="every" if holds else "interval",
    )


def _breaker_claim(breaker: str) -> Claim:
    return Claim(
        f"breaks-{breaker}",
        BREAKING[breaker],
        lambda run: at_end(run.broken, breaker=breaker),
        at_least(LAW_TOLERANCE),
        kind="control",
        quantity=f"{RELATIVE}, with the squares of the steps; exp attention, everything above",
        across="interval",
    )


def _rung_claims(rung: str) -> tuple[Claim, ...]:
    exact = rung in EXACT_RUNGS
    law = Claim(
        f"ladder-{rung}",
        f"Towards a language model, the value law {'holds' if exact else 'fails'} {PREMISES[rung]}.",
        lambda run: (
            worst(run.ladder_residual.sel(rung=rung)) / run.ladder_rounding
            if exact
            else at_end(run.ladder_error, rung=rung, correction="full")
        ),
        at_most(1.0) if exact else at_least(LAW_TOLERANCE),
        kind="theorem" if exact else "control",
        quantity=f"{IN_SGD}; softmax attention" if exact else f"{RELATIVE}, with softmax's ledger",
        across="every" if exact else "interval",
    )
    error = Claim(
        f"informative-{rung}",
        f"Towards a language model, values predict Σ_m z better than no change, {PREMISES[rung]}.",
        lambda run: at_end(run.ladder_error, rung=rung, correction="none"),
        below(1.0),
        kind="control",
        quantity=f"{RELATIVE}, by softmax's law from ½‖W_V e‖² alone; predicting no change has 1",
        across="interval",
    )
    correlation = Claim(
        f"correlated-{rung}",
        f"Towards a language model, values predict which tokens draw attention, {PREMISES[rung]}.",
        lambda run: at_end(run.ladder_correlation, rung=rung),
        above(0.0),
        kind="control",
        quantity="correlation over tokens of the change of Σ_m z with the one that softmax's law predicts from value "
        "vectors: growth of ½‖W_V e‖² less frequency times total growth; at the end",
        across="interval",
    )
    return law, error, correlation


PLAIN_SGD = Claim(
    "sgd-uncorrected",
    "Without any correction, the value laws of exp and linear attention hold within 1 % along SGD.",
    lambda run: worst(run.sgd.isel(step=-1).sel(law=["exp", "linear"], rates="equal", correction="none")),
    at_most(LAW_TOLERANCE),
    kind="control",
    quantity=f"{RELATIVE}, equal rates, larger of both attentions",
)
NOT_KEYS = Claim(
    "keys-no-law",
    "With logits q·k and exp or softmax attention, ‖W_K e‖² does not follow ‖W_V e‖².",
    lambda run: (
        run.sgd.isel(step=-1)
        .sel(law=["keys exp", "keys softmax"], rates="equal", correction="none")
        .min("law", skipna=False)
    ),
    at_least(LAW_TOLERANCE),
    kind="control",
    quantity=f"{RELATIVE}, from the law of linear attention; smaller of both attentions",
    across="interval",
)


def half_rate_order(run: xr.Dataset) -> xr.DataArray:
    """Return how far the order in the learning rate of the drift of a head's laws is from 1; larger of both laws."""
    full, half = (run.head_drift.isel(ladder_step=-1).sel(head_arm=arm) for arm in BY_SGD)
    return worst(abs(np.log2(full / half) - 1))


def _head_steps_claim(name: str, statement: str, arms: tuple[str, ...], quantity: str) -> Claim:
    return Claim(
        name,
        statement,
        lambda run: worst(run.head_residual.sel(head_arm=list(arms))) / run.head_rounding,
        at_most(1.0),
        kind="theorem",
        quantity=f"{quantity}; {IN_SGD} and both laws, one-layer language model",
    )


IN_HEAD = "‖Δ − Δ₀‖ over how far its two terms have moved, at the end"
HEAD_CLAIMS = (
    _head_steps_claim(
        "head-squares",
        "SGD leaves the two laws of a head only by the squares of its steps.",
        BY_SGD,
        "Δ = W_Q W_Qᵀ − W_K W_Kᵀ and W_V W_Vᵀ − W_Oᵀ W_O",
    ),
    Claim(
        "head-half-rate",
        "Half the learning rate halves the drift of SGD from the laws of a head.",
        half_rate_order,
        at_most(0.5),
        kind="theorem",
        quantity=f"distance from 1 of log₂ of the ratio of the drifts; a drift is {IN_HEAD}; larger of both laws",
    ),
    _head_steps_claim(
        "head-decay",
        "With weight decay λ, a step of SGD shrinks the matrices of a head's laws by (1 − ηλ)².",
        ("decay",),
        "Δ less what the squares of the steps add",
    ),
    Claim(
        "head-adam",
        "Adam leaves the two laws of a head.",
        lambda run: run.head_drift.isel(ladder_step=-1).sel(head_arm="adam").min("head_law", skipna=False),
        at_least(LAW_TOLERANCE),
        kind="control",
        quantity=f"{IN_HEAD}; smaller of both laws",
        across="interval",
    ),
    Claim(
        "head-adam-kept",
        "Adam stays nearer to the laws of a head than terms that do not belong together.",
        lambda run: at_end(run.head_drift / run.head_drift_shifted, head_arm="adam"),
        below(1.0),
        kind="control",
        quantity=f"{IN_HEAD}, relative to that of one term and the other with its dimensions shifted; larger of both "
        "laws",
        across="interval",
    ),
)


CLAIMS = (
    *(_flow_claim(law) for law in LAWS),
    *(_sgd_claim(law) for law in LAWS),
    PLAIN_SGD,
    NOT_KEYS,
    *(claim for network in ABOVE for claim in _above_claims(network)),
    *(_joma_claim(network) for network in ABOVE),
    *(_breaker_claim(breaker) for breaker in BREAKING),
    *(claim for rung in PREMISES for claim in _rung_claims(rung)),
    *HEAD_CLAIMS,
)


Measure = Callable[[xr.Dataset], xr.DataArray | float]


def _of_every_seed(measure: Measure) -> Measure:
    """Return the measure; it raises `NotInRun` where a seed has none: a training that diverged refutes no law."""

    def checked(run: xr.Dataset) -> xr.DataArray | float:
        values = measure(run)
        if np.isnan(values).any():
            raise NotInRun("finite value in every seed: a training or a flow diverged")
        return values

    return checked


def outcome(run: xr.Dataset) -> str:
    """Say what came out: the exact laws, what breaks them, and the two ends of the ladder."""
    flow, exact = float(run.flow_violation.max()), float(run.sgd_residual.max())
    mlp, broken = at_end(run.above, network="all", weights="mlp"), run.broken.isel(step=-1).drop_sel(breaker="none")
    low, high = (float(bound) for bound in (broken.mean("seed").min(), broken.mean("seed").max()))
    ends = run.isel(ladder_step=-1, rung=[0, -1]).mean("seed")
    first, last = ends.ladder_error.sel(correction="none").values
    first_correlation, last_correlation = ends.ladder_correlation.values
    drift_sgd, drift_adam = (100 * run.head_drift.isel(ladder_step=-1).sel(head_arm=arm) for arm in ("sgd", "adam"))
    diverged = int(has_diverged(run).sum())
    missing = f" Trainings of {diverged} of {run.sizes['seed']} seeds diverged, and are left out." if diverged else ""
    return (
        f"The value laws predict attention logits to {flow:.0e} along gradient flow and, with SGD's steps counted, to "
        f"{exact:.0e} in trained models; JoMA's law of the MLP's weights is off by {float(mlp.mean()):.2g} times their "
        "change there. "
        f"Learned or overlapping embeddings, Adam and weight decay break the value law by {low:.2g} to {high:.2g} "
        "times the change. From the block to a language model, the error of what value vectors alone predict goes from "
        f"{first:.2g} to {last:.2g} times the change, its correlation from {first_correlation:.2f} to "
        f"{last_correlation:.2f}. In that language model SGD leaves the data-free laws of a head by at most "
        f"{float(drift_sgd.max()):.1f} % of how far their terms move, Adam by {float(drift_adam.min()):.0f} to "
        f"{float(drift_adam.max()):.0f} %.{missing}"
    )


STUDY = Study(
    name="value-invariant",
    title="In a Transformer, attention follows the value vectors, not the MLP",
    source="ours, after JoMA's Theorem 1 (arXiv 2310.00535); docs/value-path.md",
    statement=(
        "JoMA's Theorem 1 reads attention logits off the MLP's weights. Its proof is about the first trained linear "
        "map after attention, and in a Transformer that is W_V: with fixed orthonormal embeddings e, what the theorem "
        "says of the MLP's weights holds of ½‖W_V e‖², whatever network stands above."
    ),
    about=(
        "We integrate the gradient flow of a one-layer Transformer (W_V, W_O, LayerNorm, an MLP with a residual, a "
        "head, cross entropy) with free logits and with logits that are products of queries and keys, and train the "
        "same models by SGD. Then we change what stands above attention, break each premise alone, and climb from the "
        "block to a one-layer language model, one premise at a time. In that model we follow what gradient "
        "flow keeps of any head, W_Q W_Qᵀ − W_K W_Kᵀ and W_V W_Vᵀ − W_Oᵀ W_O, under SGD, weight decay and Adam."
    ),
    version=2,
    presets={
        "quick": Preset(Config(until=2.0), seeds=5, seconds=14),
        "paper": Preset(Config(steps=1500, ladder_steps=1500, until=20.0), seeds=10, seconds=140),
    },
    run=run,
    claims=tuple(replace(claim, measure=_of_every_seed(claim.measure)) for claim in CLAIMS),
    outcome=outcome,
    threads=1,
    exact_shards=False,
    figures={
        "laws": Drawing(
            value_figures.draw_laws,
            "(a) Largest change of each law's constant along gradient flow, at equal (solid) and unequal (dashed) "
            "rates; mean over seeds; the grey line is the change of ½‖W_V e‖². (b) Error of the laws along SGD, "
            "predicted from the value vectors alone. (c) What the squares of SGD's steps and the ledgers leave, over "
            "the largest term of each law; the dotted line is the bound of rounding. Points: mean over seeds; bars: "
            "least to greatest seed.",
        ),
        "above": Drawing(
            value_figures.draw_above,
            "Error of three laws after training by what stands above attention, exp attention, squares of SGD's steps "
            "counted: the value law, JoMA's law of the MLP's weights in the same model, and JoMA's law in a model "
            "without W_V. One point for each seed.",
        ),
        "breakers": Drawing(
            value_figures.draw_breakers,
            "(a) Error of the value law with one premise broken at a time. (b) From the block to a one-layer language "
            "model, each rung with one more change: error of Σ_m z predicted from the value vectors alone and with "
            "softmax's ledger. (c) Correlation of the predicted with the true change of Σ_m z. One point a seed.",
        ),
        "heads": Drawing(
            value_figures.draw_heads,
            "What gradient flow keeps of any head, in a one-layer language model. (a), (b) Drift from each law: "
            "‖Δ − Δ₀‖ over how far its two terms have moved; the dashed line is Adam's for terms that do not belong "
            "together. (c) Norm of Δ relative to the start, mean of both laws; dashed: e^{−2λt}, as along gradient "
            "flow with weight decay λ. Points: mean over seeds; bars: least to greatest seed.",
        ),
    },
)
