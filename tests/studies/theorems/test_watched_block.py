"""The watched block: its accounts balance, its training is that of a plain loop, and breakers are not explained."""

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.models import ACTIVATIONS
from joma.studies.surprisal import cross_entropy_by_row
from joma.studies.theorems.invariance_training import BREAKERS
from joma.studies.theorems.watched_block import WatchedBlock, _block, account, train
from joma.study import Context

ATTENTIONS = ("softmax", "exp", "linear")


def small(**changes):
    return WatchedBlock(**{"rates": (0.3, 0.6), "kappas": (0.5, 2.0), "steps": 30, "seeds": 2, **changes})


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ledger_explains_every_step_to_rounding(attention, activation):
    trajectory = train(small(attention=attention, activation=activation))
    for rate, kappa in ((0.3, 0.5), (0.6, 2.0)):
        balance = account(trajectory, attention, rate=rate, kappa=kappa)
        assert float(abs(balance.unexplained).max()) < 1e-12
        assert float(balance.error[-1].max()) > 1e-6  # without the ledger it does not balance
        terms = balance.drift + balance.gap + balance.finite_steps
        xr.testing.assert_allclose(balance.predicted - terms, balance.law, atol=1e-12)


@pytest.mark.parametrize("breaker", BREAKERS)
def test_what_breaks_the_law_is_not_explained(breaker):
    setting = small(attention="exp", activation="gelu", breaker=breaker, seeds=2)
    balance = account(train(setting), "exp", rate=0.6, kappa=2.0)
    assert float(balance["size"].sel(term="unexplained", step=30).min()) > 1e-3


def test_training_is_that_of_a_plain_loop():
    setting = small(attention="softmax", activation="gelu", rates=(0.3,), kappas=(2.0,), steps=12, seeds=2)
    trajectory = train(setting)
    block = _block(setting, Context((0, 1)).generators("weights"))
    x = torch.tensor(trajectory.x.values)
    for step in range(12):
        np.testing.assert_allclose(trajectory.z.isel(rate=0, kappa=0, step=step), block.z.detach(), rtol=1e-12)
        block.zero_grad()
        cross_entropy_by_row(block(x)).sum().backward()
        with torch.no_grad():
            block.w -= 0.3 * block.w.grad
            block.z -= 2.0 * 0.3 * block.z.grad
    np.testing.assert_allclose(
        trajectory.v.transpose("seed", "step", "token", "hidden", ...)[:, -1, ..., 0, 0], block.v.detach(), rtol=1e-12
    )


def test_pairs_of_rates_do_not_see_each_other():
    together = train(small(attention="exp"))
    alone = train(small(attention="exp", rates=(0.6,), kappas=(0.5,)))
    for name in ("v", "z", "loss"):
        one_pair = together[name].sel(rate=[0.6], kappa=[0.5]).transpose(*alone[name].dims)
        np.testing.assert_allclose(one_pair, alone[name], rtol=1e-10)


def test_a_training_that_diverges_says_so():
    trajectory = train(small(attention="exp", rates=(2.0,), kappas=(4.0,), steps=300, seeds=3))
    with pytest.raises(InputError, match=r"`rate` must be small enough to train with, got 2\.0; training diverged"):
        account(trajectory, "exp", rate=2.0, kappa=4.0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attention": "sofmax"}, "attention"),
        ({"activation": "swish"}, "activation"),
        ({"breaker": "dropout"}, "breaker"),
        ({"rates": (0.1, 0.1)}, "rates"),
        ({"kappas": (0.0,)}, "kappas"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_settings_are_named(changes, name):
    with pytest.raises(InputError, match=f"`{name}`"):
        small(**changes)
