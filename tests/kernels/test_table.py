"""Looking rows up, and the gradient of it, against torch's embedding."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from joma.kernels.table import lookup


@given(seed=st.integers(0, 1000), seeds=st.integers(1, 4), types=st.integers(1, 9), positions=st.integers(1, 5))
def test_rows_and_gradient_are_those_of_torchs_embedding(seed, seeds, types, positions):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(seeds * types, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    own = torch.randint(types, (seeds, 2, positions), generator=generator)
    rows = own + torch.arange(0, seeds * types, types)[:, None, None]
    above = torch.randn(seeds, 2, positions, 3, generator=generator, dtype=torch.float64)
    found, expected = lookup(rows, table), F.embedding(rows, table)
    assert found.equal(expected)
    slopes = [torch.autograd.grad((one * above).sum(), table)[0] for one in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=1e-12)
