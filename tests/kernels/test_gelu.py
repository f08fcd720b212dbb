"""The quick GELU against torch's own, and its slope against the derivative in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from joma.kernels.gelu import Quick, gelu


@given(st.lists(st.floats(-60, 60), min_size=1, max_size=20))
def test_it_is_gelu_within_the_error_of_the_series(values):
    y = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    found = Quick.apply(y)
    within = 7.6e-8 * np.maximum(1, np.abs(values))
    assert (np.abs(found.detach().numpy() - values * stats.norm.cdf(values)) <= within).all()
    (slope,) = torch.autograd.grad(found.sum(), y)
    expected = stats.norm.cdf(values) + np.array(values) * stats.norm.pdf(values)
    np.testing.assert_allclose(slope, expected, rtol=0, atol=7.6e-8)


def test_half_precision_is_rounded_once():
    y = torch.linspace(-8, 8, 4001).bfloat16().requires_grad_()
    found = Quick.apply(y)
    assert found.dtype == torch.bfloat16
    exact = torch.nn.functional.gelu(y.detach().double())
    assert (found.detach().double() - exact).abs().le(2.0**-8 * exact.abs() + 1e-6).all()
    found.sum().backward()
    assert y.grad is not None
    assert y.grad.dtype == torch.bfloat16


def test_eagerly_and_in_full_precision_it_is_torchs_own():
    y = torch.linspace(-3, 3, 101)
    assert gelu(y).equal(torch.nn.functional.gelu(y))


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has its own to say
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_on_cuda_it_is_the_quick_one():
    y = torch.linspace(-8, 8, 4096, device="cuda").bfloat16()
    found = torch.compile(gelu)(y)
    assert (found.double() - torch.nn.functional.gelu(y.double())).abs().max() <= 2.0**-8 * 8
