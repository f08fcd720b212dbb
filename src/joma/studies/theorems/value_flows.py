"""The laws of `value-invariant` along gradient flow, from the same start and on the same data as the trained models."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.arguments import scalar
from joma.models.one_layer import OneLayer
from joma.studies.theorems.value_training import LAWS, RATES, Config, Data, ValueSetting, build, draw_data
from joma.study import Context
from joma.theory import invariants
from joma.theory.losses import cross_entropy
from joma.theory.value_flow import ValueArchitecture, ValueFlow, ValueRates, ValueSolution, value_block

TIMES = 26
NAMES = {"W_1": "w", "W_2": "upper", "W_H": "head"}  # in the model; the others have the same name


def make_flow(data: Data, seed: int, setting: ValueSetting, rates: tuple[float, float], dim: int) -> ValueFlow:
    """Return the gradient flow of a setting on the data of one seed."""
    x = data.x[seed].numpy()
    embedding = np.eye(dim, x.shape[1] + int(data.query.max()) + 1)
    return value_block(
        setting.attention,
        "gelu",
        cross_entropy(data.label.numpy()),
        x,
        query=data.query.numpy(),
        rates=ValueRates(*rates),
        architecture=ValueArchitecture(factored=setting.logits == "product", embedding=embedding),
    )


def start_of(model: OneLayer, flow: ValueFlow, seed: int) -> dict[str, np.ndarray]:
    """Return the model's parameters under the names of the flow."""
    return {name: model.get_parameter(NAMES.get(name, name))[seed].detach().numpy() for name in flow.names}


def violation(flow: ValueFlow, path: ValueSolution) -> np.ndarray:
    """Return how far the law of the flow is from holding at each time: the largest difference over tokens."""
    rates, attention = flow.rates, flow.attention.name
    if path.k is not None:
        keys = np.swapaxes(path.k, -1, -2)
        if path.keys is None:
            quantity = invariants.conserved("linear", path.p, keys, rate_w=rates.rate_v, rate_z=rates.rate_z)
        else:
            quantity = 0.5 * (path.k**2).sum(axis=-1) - path.keys.total
    elif attention == "softmax":
        kappa = rates.rate_z / rates.rate_v
        predicted = invariants.predict("softmax", path.p, path.p[0], path.z[0], kappa=kappa, b_ref=flow.b_ref)
        quantity = path.z.sum(axis=-2) - (predicted - path.ledger.total)
    else:
        quantity = invariants.conserved(attention, path.p, path.z, rate_w=rates.rate_v, rate_z=rates.rate_z)
    return np.abs(quantity - quantity[0]).max(axis=-1)


def flows(config: Config, context: Context) -> xr.Dataset:
    """Integrate every law at equal and at unequal rates; return violations and how much ‖p‖² changed, over time."""
    times = np.linspace(0.0, scalar("until", config.until, above=0.0), TIMES)
    data = draw_data(config, context, 1)
    shape = (len(context.seeds), len(LAWS), len(RATES), TIMES)
    violations, changes = np.full(shape, np.nan), np.full(shape, np.nan)
    with context.progress.task("flows", total=len(LAWS)) as task:
        for row, setting in enumerate(LAWS.values()):
            model = build(config, context, setting)
            for seed in range(len(context.seeds)):
                for arm, rates in enumerate(RATES.values()):
                    flow = make_flow(data, seed, setting, rates, config.dim)
                    path = flow.solve(times, start_of(model, flow, seed))
                    reached, squares = len(path.times), (path.p**2).sum(axis=-1)
                    violations[seed, row, arm, :reached] = violation(flow, path)
                    changes[seed, row, arm, :reached] = 0.5 * np.abs(squares - squares[0]).max(axis=-1)
            task.advance()
    dims = ("seed", "law", "rates", "time")
    coords = {"seed": list(context.seeds), "law": list(LAWS), "rates": list(RATES), "time": times}
    return xr.Dataset({"flow_violation": (dims, violations), "flow_change": (dims, changes)}, coords)
