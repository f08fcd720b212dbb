"""The names that others rely on: every call of the contract works, old keyword names included."""

import inspect

import numpy as np
import pytest
import torch

import joma
from joma.theory import growth, hierarchy, invariants, mixture

MU, DELTA = [1.0, 1.5, 2.0], [0.9, 0.7, -0.3]


def parameters(function):
    return inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("function", "first"), [(growth.linear, DELTA), (growth.nonlinear, MU), (growth.softmax_nonlinear, MU)]
)
def test_times_are_given_by_place_by_name_and_by_the_old_name(function, first):
    expected = function(first, [0.1, 0.5])
    assert expected.shape == (2, 3)
    np.testing.assert_array_equal(function(first, times=[0.1, 0.5]), expected)
    np.testing.assert_array_equal(function(first, t=[0.1, 0.5]), expected)
    with pytest.raises(ValueError, match="`t` must be left out where `times` is given"):
        function(first, t=0.1, times=0.1)


def test_defaults_of_the_contract():
    assert parameters(growth.linear)["v0"].default == 0.0
    assert parameters(growth.blow_up_time)["v0"].default == 0.0
    assert parameters(growth.nonlinear)["v0"].default == 0.05
    assert parameters(growth.softmax_nonlinear)["v0"].default == 0.05
    assert parameters(growth.softmax_nonlinear)["temperature"].default == 2.0
    assert parameters(growth.attention_entropy)["temperature"].default == 2.0
    assert parameters(mixture.theta)["sigma"].default == 1.0
    assert list(parameters(hierarchy.cooccurrence))[:4] == ["height", "depth", "rho", "rho0"]
    names = list(parameters(invariants.predict))
    assert names == ["attention", "v", "v0", "z0", "kappa", "temperature", "b_ref"]
    options = [parameters(invariants.predict)[name] for name in names[4:]]
    assert [(option.kind, option.default) for option in options] == [
        (inspect.Parameter.KEYWORD_ONLY, 1.0),
        (inspect.Parameter.KEYWORD_ONLY, 1.0),
        (inspect.Parameter.KEYWORD_ONLY, None),
    ]


def test_closed_forms_answer_as_the_contract_says():
    assert growth.blow_up_time(DELTA).shape == growth.linear_limit(DELTA).shape == (3,)
    assert np.isposinf(growth.linear(DELTA, 10.0)[0])
    assert np.isneginf(growth.linear(DELTA, 10.0)[2])
    theta_1, theta_2 = mixture.theta("relu", 0.3, 1.2)
    assert 0 < theta_1 < 1.2
    assert theta_2 > 0
    assert 0 < hierarchy.cooccurrence(1, 4, 0.8, 0.7) < 1
    np.testing.assert_allclose(growth.attention_entropy([0.0, 0.0]), np.log(2))


def test_probes_and_watchers_are_where_the_contract_says():
    query = torch.randn(1, 2, 4, 8)
    assert joma.attention_entropy(query, query, causal=True, mask=None, scale=None).shape == (1, 2, 4)
    assert joma.stable_rank(torch.randn(3, 5, 4)).shape == (3,)
    assert callable(joma.watch.attention)
    assert callable(joma.watch.hf.EntropyCallback)
    assert callable(joma.watch.lightning.EntropyCallback)
    assert callable(joma.watch.Recorder)
    assert callable(joma.watch.Checkpoints)
    assert callable(joma.open_run)
