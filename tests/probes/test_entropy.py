import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.entropy import entropy


@given(st.integers(1, 9), st.floats(0, 60), st.integers(0, 1000))
def test_entropy_agrees_with_scipy(tokens, sharpness, seed):
    logits = sharpness * torch.randn(4, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = logits.softmax(-1)
    torch.testing.assert_close(entropy(p), torch.as_tensor(scipy.stats.entropy(p.numpy(), axis=-1)), rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy(p.mT, dim=-2), entropy(p))


@pytest.mark.parametrize("p", [[0.5, 0.6], [1.5, -0.5], [float("nan"), 1.0]])
def test_what_is_no_distribution_is_refused(p):
    with pytest.raises(InputError, match="softmax"):
        entropy(torch.tensor(p))
