"""Products stay in float32, and the one by oneDNN is the plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.kernels.products import exact_products, thin_product


@given(st.integers(0, 999), st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.sampled_from([(), (2,)]))
def test_a_thin_product_is_the_plain_one(seed, rows, columns, block, batch):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*batch, rows, columns, generator=generator)
    x = torch.randn(*batch, columns, block, generator=generator)
    for matrix in (w, w.mT.contiguous().mT, w.double()):
        ours = thin_product(matrix, x.to(matrix.dtype))
        torch.testing.assert_close(ours.double(), w.double() @ x.double(), rtol=0, atol=1e-5)
        assert ours.dtype == matrix.dtype


@pytest.mark.parametrize("fails", [False, True])
def test_the_users_precision_is_set_back_even_after_an_error(fails):
    backend = torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        outside = backend.fp32_precision
        try:
            with exact_products(torch.device("cpu")):
                assert backend.fp32_precision == "ieee"
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert backend.fp32_precision == outside
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
