"""The lookup of rows and its gradient, compared with torch's embedding."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from joma.kernels import table as table_module
from joma.kernels.table import MAX_POSITIONS, MAX_ROWS, fits, lookup


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


def test_on_the_cpu_torchs_own_gradient_is_used():
    assert not fits(torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(4, 5))


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "used"),
    [
        (torch.float32, MAX_ROWS + 1, True),
        (torch.float64, MAX_ROWS + 1, False),
        (torch.float64, MAX_ROWS, True),
    ],
)
def test_double_precision_is_not_added_up_by_the_kernel_which_adds_in_single(monkeypatch, dtype, vocabulary, used):
    monkeypatch.setattr(table_module, "TRITON", True)
    with FakeTensorMode():  # tensors without values, of a device that may be missing
        rows, table = (
            torch.empty(2, 3, 5, dtype=torch.long, device="cuda"),
            torch.empty(2 * vocabulary, 4, device="cuda"),
        )
        assert fits(rows, table.to(dtype)) == used


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("vocabulary", "positions", "width"), [(600, 7, 3), (28_782, 700, 200), (5_000, 1_500, 130)])
def test_the_kernel_adds_up_what_torch_adds_up(vocabulary, positions, width):
    generator = torch.Generator().manual_seed(positions)
    frequent = torch.rand((3, 1, positions), generator=generator).square() * vocabulary  # some rows are read often
    rows = (frequent.long() + torch.arange(0, 3 * vocabulary, vocabulary)[:, None, None]).cuda()
    table = torch.randn(3 * vocabulary, width, generator=generator).cuda().requires_grad_()
    factors = torch.randn(3, 1, positions, width, generator=generator).cuda()
    assert vocabulary > MAX_ROWS
    assert fits(rows, table)
    assert not fits(rows.expand(3, MAX_POSITIONS, -1), table)
    gradients = [torch.autograd.grad((lookup(rows, table) * factors).sum(), table)[0] for _ in range(2)]
    expected = torch.autograd.grad((F.embedding(rows, table.double()) * factors).sum(), table)[0]
    assert gradients[0].equal(gradients[1])
    torch.testing.assert_close(gradients[0], expected, rtol=1e-5, atol=1e-5)
