"""The integrated flow of `scan-snap` against autograd, and its closed forms against other ways to compute them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from joma.data.tokens import sequence_classes
from joma.studies.hierarchy import decoder_flow
from joma.studies.hierarchy.distinct_tokens import by_frequency, distinct_logits
from joma.studies.hierarchy.growth_phases import local_exponent
from joma.theory.integration import integrate


@pytest.mark.parametrize("outputs", [3, 64, 1000])
def test_the_decoder_alone_follows_its_closed_form(outputs):
    """Train a decoder on one of K orthogonal unit features by its flow: ḣ = g/K; the clock is ∫ (1 − α) s dt/K."""
    labels, times = 4, np.geomspace(0.01, 1e4, 40)

    def rhs(_, state):
        a = np.exp(state[:outputs] - state[:outputs].max())
        g = np.eye(outputs)[0] - a / a.sum()
        return np.append(g, g @ state[:outputs]) / labels

    states = integrate(rhs, np.zeros(outputs + 1), np.r_[0.0, times]).states[1:]
    u = times / labels
    margin = decoder_flow.decoder_margin(u, outputs)
    np.testing.assert_allclose(margin, states[:, 0] - states[:, 1], rtol=1e-8)
    np.testing.assert_allclose((outputs - 1) / (2 * outputs) * margin**2, states[:, -1], rtol=1e-8)
    step = 1e-4
    ahead, behind = (np.log(decoder_flow.decoder_margin(u * np.exp(sign * step), outputs)) for sign in (1, -1))
    np.testing.assert_allclose(decoder_flow.clock_exponent(u, outputs), (ahead - behind) / step, rtol=1e-5)
    assert decoder_flow.clock_exponent(np.array(0.0), outputs) == 2


def test_the_flow_is_the_gradient_of_the_loss():
    """A short time of the flow moves the logits as autograd's gradients say: z ∝ t² from zero."""
    data = sequence_classes(generators=[torch.Generator().manual_seed(3)], classes=2, distinct=2, common=2)
    x, query, time = data.frequency[0], data.query, 1e-3
    z = torch.zeros(2, x.shape[1], dtype=torch.float64, requires_grad=True)
    v = torch.zeros(x.shape[1], 5, dtype=torch.float64, requires_grad=True)

    def loss():
        f = torch.nn.functional.normalize(x * z[query].exp(), dim=-1)
        return torch.nn.functional.cross_entropy(f @ v, torch.arange(4))

    (v_gradient,) = torch.autograd.grad(loss(), v, create_graph=True)
    v.data = -0.7 * v_gradient.detach()
    (z_gradient,) = torch.autograd.grad(loss(), z)  # to first order in v, hence ż = −η_z · gradient · t
    scale = 1e-6
    v.data *= scale
    (small_gradient,) = torch.autograd.grad(loss(), z)
    expected = -0.3 * small_gradient.numpy() / scale * time**2 / 2
    path = decoder_flow.logit_flow(x.numpy(), query.numpy(), np.array([0, time]), outputs=5, rate_w=0.7, rate_z=0.3)
    assert float(z_gradient.abs().max()) > 1e-3
    np.testing.assert_allclose(path[-1], expected, rtol=1e-2, atol=1e-13)


def test_the_flows_of_seeds_are_those_of_each_alone():
    data = sequence_classes(generators=[torch.Generator().manual_seed(seed) for seed in (3, 4)], classes=2, distinct=2)
    times, rates = np.array([0.0, 1.0, 30.0]), {"outputs": 6, "rate_w": 1.0, "rate_z": 0.1}
    both = decoder_flow.logit_flows(data, times, **rates)
    for seed in (0, 1):
        alone = decoder_flow.logit_flow(data.frequency[seed].numpy(), data.query.numpy(), times, **rates)
        np.testing.assert_array_equal(both[seed], alone)
    assert np.abs(both[0] - both[1]).max() > 1e-3


def test_theorem_3_holds_in_the_limit_of_a_fast_decoder():
    """The error of Theorem 3 is of first order in κ = η_z/η_w."""
    data = sequence_classes(generators=[torch.Generator().manual_seed(0)])
    cooccurrence = xr.DataArray(by_frequency(data, data.frequency.numpy())[0], dims=("label", "rank"))
    errors = []
    for kappa in (1e-2, 1e-3, 1e-4):
        z = decoder_flow.logit_flows(data, np.array([0.0, 3000.0]), outputs=64, rate_w=1.0, rate_z=kappa)
        logit = xr.DataArray(distinct_logits(data, z)[0, -1], dims=("label", "rank"))
        error = (logit - decoder_flow.relative_gain(logit, cooccurrence)).isel(rank=slice(1, None))
        errors.append(float(np.sqrt((error**2).sum() / (logit.isel(rank=slice(1, None)) ** 2).sum())))
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 10, rtol=0.15)
    assert errors[-1] < 1e-3


def test_the_transition_goes_as_one_over_the_rate():
    times = decoder_flow.transition_time(8, 64, np.array([0.1, 1.0]))
    np.testing.assert_allclose(times, [16 * np.log(64) / 0.1, 16 * np.log(64)], rtol=1e-12)


def test_unused_outputs_make_the_scan_steeper_than_a_square():
    """With as many outputs as classes the common tokens say nothing, and the power of t never exceeds 2."""
    data, times = sequence_classes(generators=[torch.Generator().manual_seed(0)]), np.geomspace(1, 50, 40)
    powers = {}
    for outputs in (8, 64):
        z = decoder_flow.logit_flows(data, np.r_[0, times], outputs=outputs, rate_w=1.0, rate_z=0.1)
        winner = distinct_logits(data, z[:, 1:])[0, ..., 0].mean(axis=-1)
        powers[outputs] = float(local_exponent(xr.DataArray(winner, {"step": times}, "step")).max())
    assert powers[8] <= 2
    assert powers[64] > 2.3
