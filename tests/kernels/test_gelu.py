"""The fast GELU compared with torch's, and its gradient with the derivative in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from joma.kernels.gelu import FastGelu, gelu


@given(st.lists(st.floats(-60, 60), min_size=1, max_size=20))
def test_it_is_gelu_within_the_error_of_the_series(values):
    y = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    fast = FastGelu.apply(y)
    tolerance = 7.6e-8 * np.maximum(1, np.abs(values))
    assert (np.abs(fast.detach().numpy() - values * stats.norm.cdf(values)) <= tolerance).all()
    (gradient,) = torch.autograd.grad(fast.sum(), y)
    expected = stats.norm.cdf(values) + np.array(values) * stats.norm.pdf(values)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=7.6e-8)


def test_half_precision_is_rounded_once():
    y = torch.linspace(-8, 8, 4001).bfloat16().requires_grad_()
    fast = FastGelu.apply(y)
    assert fast.dtype == torch.bfloat16
    exact = torch.nn.functional.gelu(y.detach().double())
    assert (fast.detach().double() - exact).abs().le(2.0**-8 * exact.abs() + 1e-6).all()
    fast.sum().backward()
    assert y.grad is not None
    assert y.grad.dtype == torch.bfloat16


def test_without_compilation_it_is_torchs_own():
    y = torch.linspace(-3, 3, 101)
    assert gelu(y).equal(torch.nn.functional.gelu(y))


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has warnings of its own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_on_cuda_it_is_the_fast_one():
    y = torch.linspace(-8, 8, 4096, device="cuda").bfloat16()
    compiled = torch.compile(gelu)(y)
    assert (compiled.double() - torch.nn.functional.gelu(y.double())).abs().max() <= 2.0**-8 * 8
