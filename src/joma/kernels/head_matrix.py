"""The head of a language model as one matrix: weight, bias and padding, for products on tensor cores.

    x W + b = [x, 1, 1, 0 …] H,    H = [W; b₁; b₂; 0 …],    b₁ the leading 8 binary digits of b,  b₂ = b − b₁

Both sides of H are multiples that suit the tensor cores. Columns beyond the vocabulary have a bias so low that their
probability is zero, so that whoever reads the logits needs neither the bias nor the size of the vocabulary. The bias
has two rows: one in half precision would lose what small learning rates add to it.

A training loop may keep H as its copy of the weight in half precision. Then a step casts neither the weight nor its
gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from joma.kernels.gpu import compiled_on_cuda

COLUMN_MULTIPLE, ROW_MULTIPLE = 64, 8
BIAS_ROWS = 2
CUT = {torch.float32: (torch.int32, 16), torch.float64: (torch.int64, 45)}  # how many of the digits b₁ lacks

Weight = Float[Tensor, "seed width vocabulary"]
Bias = Float[Tensor, "seed vocabulary"]
Matrix = Float[Tensor, "seed row column"]


def head_matrix(weight: Weight, bias: Bias, dtype: torch.dtype) -> Matrix:
    """Return H.

    >>> head_matrix(torch.ones(1, 5, 70), torch.zeros(1, 70), torch.bfloat16).shape
    torch.Size([1, 8, 128])
    """
    width, vocabulary = weight.shape[1:]
    columns, lowest = -vocabulary % COLUMN_MULTIPLE, max(-1e30, torch.finfo(dtype).min / 2)
    first, second = _bias_parts(bias, dtype)
    first, second = F.pad(first, (0, columns), value=lowest), F.pad(second, (0, columns))
    matrix = torch.cat([F.pad(weight.to(dtype), (0, columns)), torch.stack([first, second], dim=1)], dim=1)
    return F.pad(matrix, (0, 0, 0, -(width + BIAS_ROWS) % ROW_MULTIPLE))


def half_copy(weight: Weight) -> Matrix:
    """Return H in bfloat16 with this weight, which is its leading part, and a bias of zeros."""
    return head_matrix(weight, torch.zeros_like(weight[:, 0]), torch.bfloat16)


def is_copy(weight: Weight | Matrix, width: int) -> bool:
    """Return whether a weight for inputs of this width is a matrix H: that has rows for the bias too.

    >>> weight = torch.ones(1, 5, 64)
    >>> is_copy(weight, 5), is_copy(half_copy(weight), 5)
    (False, True)
    """
    return weight.shape[1] > width


@torch.no_grad()
def write_bias(matrix: Matrix, bias: Bias, width: int) -> None:
    """Write both parts of the bias into H, in place, for a weight of this width.

    H is not marked as changed: a step may read it twice before its backward pass, and both times this writes the same.
    """
    rows = matrix.data[:, width : width + BIAS_ROWS, : bias.shape[-1]]
    compiled_on_cuda(_write_parts, matrix)(rows, bias)


def with_ones(x: Float[Tensor, "seed sample width"], rows: int, dtype: torch.dtype) -> Float[Tensor, "seed sample row"]:
    """Return [x, 1, 1, 0 …], as wide as a matrix H of so many rows.

    >>> with_ones(torch.zeros(1, 1, 3), 8, torch.float32)
    tensor([[[0., 0., 0., 1., 1., 0., 0., 0.]]])
    """
    width = x.shape[-1]
    return F.pad(F.pad(x.to(dtype), (0, BIAS_ROWS), value=1.0), (0, rows - width - BIAS_ROWS))


def _write_parts(rows: Float[Tensor, "seed 2 vocabulary"], bias: Bias) -> None:
    rows.copy_(torch.stack(_bias_parts(bias, rows.dtype), dim=1))


def _bias_parts(bias: Bias, dtype: torch.dtype) -> tuple[Bias, Bias]:
    """Return b₁ and b₂.

    The digits are cut off in the bits: a compiler leaves out a cast to half precision and back. They are as few in any
    dtype, since TF32 products round float32 numbers.
    """
    if bias.dtype not in CUT:
        return bias.to(dtype), torch.zeros_like(bias, dtype=dtype)
    integers, cut = CUT[bias.dtype]
    first = ((bias.view(integers) >> cut) << cut).view(bias.dtype)
    return first.to(dtype), (bias - first).to(dtype)
