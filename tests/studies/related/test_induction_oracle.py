"""The oracle's averages, and autograd beside them."""

import numpy as np

from joma.studies.related.induction_data import CHAIN, DOUBLY, LAG_2, WORLDS, World
from joma.studies.related.induction_oracle import dependence, gradient
from joma.studies.related.induction_training import InductionConfig
from joma.study import Context

CONFIG = InductionConfig(lags=5, oracle_chains=1500, gradient_length=200, gradient_samples=24)


def test_the_dependence_is_largest_at_the_parent():
    """c of lag 1, 2 and 3 as from 200,000 chains sampled apart: 0.0983, −0.0039 and 0.0194, less 1 % for ε = 0.01."""
    traces = dependence(CONFIG, Context((0, 1, 2)), [WORLDS[name] for name in (CHAIN, LAG_2, DOUBLY)]).isel(head=0)
    mean = traces.mean("seed")
    np.testing.assert_allclose(mean.sel(world=CHAIN)[:3], [0.0973, -0.0035, 0.0192], atol=4e-3)
    np.testing.assert_allclose(mean.sel(world=LAG_2)[[0, 2, 4]], 0.0, atol=1e-12)
    np.testing.assert_allclose(mean.sel(world=LAG_2)[[1, 3]], mean.sel(world=CHAIN)[:2], atol=1e-12)
    assert traces.argmax("lag").values.tolist() == [[0] * 3, [1] * 3, [0] * 3]


def test_every_parent_has_its_own_dependence():
    traces = dependence(CONFIG, Context((0,)), [World("parents", (1, 3))])
    assert traces.argmax("lag").values.tolist() == [[[0, 2]]]


def test_autograd_agrees_with_both_laws():
    run = gradient(CONFIG, Context((0, 1)))
    assert float(run.gradient_a_error.max()) < 1e-12
    correlation = np.corrcoef(run.gradient.mean("seed"), run.gradient_predicted.mean("seed"))[0, 1]
    assert correlation > 0.99
    np.testing.assert_allclose(run.gradient.sum("lag"), 0.0, atol=1e-12)  # a softmax has no gradient along (1, …, 1)


def test_the_law_for_long_contexts_is_approached_as_they_grow():
    errors = []
    for length in (50, 800):
        run = gradient(InductionConfig(gradient_length=length, gradient_samples=48), Context((0, 1)))
        errors.append(float(abs(run.gradient_a.mean() / run.gradient_a_predicted.mean() - 1)))
    assert errors[1] < errors[0]
