"""The floor of attention's entropy beside the theory, and the norms of logits by their definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.entropy import attention_entropy
from joma.probes.floor import entropy_floor, logit_norms
from joma.theory.entropy_floor import row_floor


@given(st.floats(0, 500), st.integers(1, 1000))
def test_the_floor_is_that_of_the_theory(norm, keys):
    floor = entropy_floor(torch.tensor([norm], dtype=torch.float64), torch.tensor(keys))
    np.testing.assert_allclose(floor.numpy(), row_floor([norm], keys), rtol=1e-12)  # norm times rounding


def test_types_and_shapes():
    assert entropy_floor(torch.ones(2, 3), torch.arange(1, 4)).shape == (2, 3)
    assert entropy_floor(torch.ones(3), 2).dtype == torch.float32
    assert entropy_floor(torch.tensor([5.0]), 1).item() == 0.0
    assert entropy_floor([0.0, np.inf], 4).tolist() == [pytest.approx(np.log(4)), 0.0]


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3), st.booleans())
def test_no_row_of_attention_is_below_its_floor(seed, exponent, causal):
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(2, 7, 4, generator=generator, dtype=torch.float64) * np.exp(exponent) for _ in range(2))
    norms = logit_norms(query, key, causal=causal)
    for head in range(2):
        for row in range(7):
            seen = row + 1 if causal else 7
            logits = (query[head, row] @ key[head, :seen].T / 2).numpy()
            assert float(norms[head, row]) == pytest.approx(float(np.linalg.norm(logits - logits.mean())), abs=1e-9)
    keys = torch.arange(1, 8) if causal else torch.tensor(7)
    assert bool((attention_entropy(query, key, causal=causal) >= entropy_floor(norms, keys) - 1e-12).all())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: entropy_floor([-1.0], 3), "logit_norm"),
        (lambda: entropy_floor([1.0], 0), "keys"),
        (lambda: logit_norms(torch.ones(2, 3), torch.ones(2, 4)), "key"),
        (lambda: logit_norms(torch.ones(2, 3), torch.ones(2, 3), scale=float("nan")), "scale"),
    ],
)
def test_bad_input_is_refused_by_name(call, name):
    with pytest.raises(InputError, match=f"`{name}` must"):
        call()
