"""The flow and the trained model are one: equal gradients from one start, by code that shares nothing."""

from __future__ import annotations

import numpy as np
import pytest
from torch.nn import functional

from joma.studies.theorems.value_flows import NAMES, flows, make_flow, start_of, violation
from joma.studies.theorems.value_training import LAWS, Config, build, draw_data
from joma.study import Context

SMALL = Config(classes=3, distinct=3, common=2, queries=2, values=3, head_width=2, hidden=4, scale=0.8, until=2.0)
CONTEXT = Context((0, 1))


@pytest.mark.parametrize("law", LAWS)
def test_velocity_of_the_flow_is_the_gradient_of_the_model(law):
    setting, data = LAWS[law], draw_data(SMALL, CONTEXT, 2)
    model = build(SMALL, CONTEXT, setting)
    outputs = model(data.x, data.query)
    loss = functional.cross_entropy(outputs.flatten(0, 1), data.label.repeat(4), reduction="none")
    loss.unflatten(0, (4, -1)).mean(-1).sum().backward()
    for seed in (0, 1):
        flow = make_flow(data, seed, setting, (0.6, 1.7), SMALL.dim)
        velocity = flow.velocity(start_of(model, flow, seed)).parameters
        for name in flow.names:
            expected = -flow.rates.of(name) * model.get_parameter(NAMES.get(name, name)).grad[seed].numpy()
            np.testing.assert_allclose(velocity[name], expected, atol=1e-14, rtol=1e-10, err_msg=name)


@pytest.fixture(scope="module")
def small():
    return flows(SMALL, CONTEXT)


def test_every_law_holds_along_the_flow_while_values_grow(small):
    assert small.flow_violation.dims == ("seed", "law", "rates", "time")
    assert float(small.flow_violation.max()) <= 1e-8
    assert float(small.flow_change.isel(time=-1).min()) > 1e-3
    assert list(small.law.values) == list(LAWS)


def test_a_law_at_the_wrong_rates_is_violated():
    setting, data = LAWS["exp"], draw_data(SMALL, CONTEXT, 1)
    flow = make_flow(data, 0, setting, (0.6, 1.7), SMALL.dim)
    path = flow.solve([0.0, 2.0], start_of(build(SMALL, CONTEXT, setting), flow, 0))
    assert violation(flow, path).max() <= 1e-8
    assert violation(make_flow(data, 0, setting, (1.0, 1.0), SMALL.dim), path).max() > 1e-3
