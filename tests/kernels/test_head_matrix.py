"""Weight and bias of a head as one padded matrix, compared with the two of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels.head_matrix import (
    COLUMN_MULTIPLE,
    ROW_MULTIPLE,
    half_copy,
    head_matrix,
    is_copy,
    with_ones,
    write_bias,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 1000), vocabulary=st.integers(1, 200), width=st.integers(1, 20))
@settings(max_examples=15)
def test_the_matrix_of_a_head_is_its_weight_and_its_bias_with_columns_of_probability_zero(
    dtype, seed, vocabulary, width
):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()
        for shape in ((2, 3, width), (2, width, vocabulary), (2, vocabulary))
    )
    matrix = head_matrix(weight, bias * torch.pi, dtype)
    assert matrix.shape[1] % ROW_MULTIPLE == matrix.shape[2] % COLUMN_MULTIPLE == 0
    assert is_copy(matrix, width)
    assert not is_copy(weight, width)
    logits = with_ones(x, matrix.shape[1], dtype).double() @ matrix.double()
    digits = 2.0 ** {torch.float64: -50, torch.bfloat16: -16, torch.float16: -18}[dtype]
    torch.testing.assert_close(
        logits[..., :vocabulary], x @ weight + bias[:, None] * torch.pi, rtol=digits, atol=20 * digits
    )
    assert logits.softmax(-1)[..., vocabulary:].eq(0).all()
    assert (matrix * 0.0).eq(0).all()  # its product with an excess of zero is zero


def test_the_bias_is_written_into_a_copy_and_changes_nothing_else():
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(2, 5, 70, generator=generator), torch.randn(2, 70, generator=generator)
    copy = half_copy(weight)
    write_bias(copy, bias, 5)
    assert copy.equal(head_matrix(weight, bias, torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has its own to say
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_matrix_has_both_parts_of_the_bias(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).cuda() for shape in ((2, 5, 70), (2, 70)))
    matrix = torch.compile(head_matrix)(weight, bias, dtype)
    assert matrix.equal(head_matrix(weight, bias, dtype))
    copy = half_copy(weight)
    write_bias(copy, bias, 5)
    assert copy.equal(head_matrix(weight, bias, torch.bfloat16))
    assert copy[:, 6, :70].ne(0).any()
