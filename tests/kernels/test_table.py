"""The lookup of rows and its gradient, compared with torch's embedding."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from joma.kernels.table import lookup


@given(seed=st.integers(0, 1000), seeds=st.integers(1, 4), vocabulary=st.integers(1, 9), positions=st.integers(1, 5))
def test_rows_and_gradient_are_those_of_torchs_embedding(seed, seeds, vocabulary, positions):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(seeds * vocabulary, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(vocabulary, (seeds, 2, positions), generator=generator)
    rows = tokens + torch.arange(0, seeds * vocabulary, vocabulary)[:, None, None]
    factors = torch.randn(seeds, 2, positions, 3, generator=generator, dtype=torch.float64)
    embedded, expected = lookup(rows, table), F.embedding(rows, table)
    assert embedded.equal(expected)
    gradient, expected_gradient = (
        torch.autograd.grad((values * factors).sum(), table)[0] for values in (embedded, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
