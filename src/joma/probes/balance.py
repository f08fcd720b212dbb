"""What gradient flow keeps of a head, whatever the data and the loss, and how far training leaves it.

A head computes q = W_Q x, k = W_K x, v = W_V x and W_O v. Its logits q·k do not change if W_Q becomes A W_Q and W_K
becomes A⁻ᵀ W_K, nor its output if W_V becomes A W_V and W_O becomes W_O A⁻¹. So gradient flow, with one learning rate
for both matrices, keeps two symmetric matrices over the head's dimensions (Marcotte et al. 2025, arXiv 2506.06194):

    Δ = W_Q W_Qᵀ − W_K W_Kᵀ        Δ = W_V W_Vᵀ − W_Oᵀ W_O

- A bias is a further column of its matrix: b bᵀ is added. That of the output is not part of a law.
- If several query heads share a key head, their sum takes the place of one head's: Σ_h W_Qh W_Qhᵀ − W_K W_Kᵀ and
  W_V W_Vᵀ − Σ_h W_Ohᵀ W_Oh. This is the law of one head whose matrices stand side by side.
- With rotary positions the logits are qᵀ R k, and only an A that commutes with every rotation R leaves them. Of Δ there
  remains what commutes too: for each rotated pair of dimensions the trace of its block, and the block of the dimensions
  that are not rotated (Tran et al. 2026, arXiv 2606.17816, treat such heads). Values are not rotated.
- Norms of queries or keys break the first law, weights that are shared between the two matrices break either.
- One step of SGD adds exactly rate² (G_Q G_Qᵀ − G_K G_Kᵀ), with the gradients G. With weight decay λ it also multiplies
  Δ by (1 − rate·λ)²: Δ decays at the rate 2·rate·λ. This needs biases that decay as weights do; if they are exempt from
  weight decay, as is common, no such law holds. Adam keeps nothing of it.

With A and B for the two terms of Δ, both measures are at most 1 by the triangle inequality and do not depend on the
scale of the weights:

    imbalance   ‖A − B‖_F / (‖A‖_F + ‖B‖_F)                  0 for a balanced head; needs no start
    drift       ‖Δ − Δ₀‖_F / (‖A − A₀‖_F + ‖B − B₀‖_F)       0 under the law; 1 if one of the two moves alone

The drift is relative to how far the weights have moved, not to their size: a head that has hardly moved would otherwise
seem to obey the law. Matrices that move independently of each other have a drift near 1/√2, or less where both grow
alike for another reason, as by noise. So compare it with A and B of two different heads, between which no law holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from joma.arguments import InputError, whole
from joma.kernels.products import exact_products
from joma.probes.states import floating

Gram = Float[Tensor, "*batch head_dim head_dim"]


class Rotary(NamedTuple):
    """Which dimensions of a head are rotated by its positions, and in which pairs.

    Attributes:
        dims: the number of rotated dimensions, which are the first ones; even.
        interleaved: whether neighbours are pairs, as in GPT-J; otherwise dimension i and i + dims/2, as in Llama.
    """

    dims: int
    interleaved: bool = False

    @property
    def pairs(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """The first and the second dimension of each pair.

        >>> Rotary(4).pairs
        (tensor([0, 1]), tensor([2, 3]))
        >>> Rotary(4, interleaved=True).pairs
        (tensor([0, 2]), tensor([1, 3]))
        """
        order = torch.arange(self.dims)
        return (order[0::2], order[1::2]) if self.interleaved else (order[: self.dims // 2], order[self.dims // 2 :])


def head_gram(
    weight: ArrayLike | Tensor, bias: ArrayLike | Tensor | None = None, *, rotary: Rotary | None = None
) -> Tensor:
    """Return one term of a head's conserved matrix, W Wᵀ + b bᵀ, or what of it commutes with rotary positions.

    Args:
        weight: [*batch, head_dim, width], as it acts: W_Q, W_K, W_V, or the transposed W_O. Heads that share a key head
            stand side by side, [*batch, head_dim, heads·width].
        bias: [*batch, head_dim], or [*batch, head_dim, heads] of heads that stand side by side; none for W_O.
        rotary: the rotary positions of queries and keys.

    Returns:
        [*batch, head_dim, head_dim] in float64; NaN where the weights hold NaN.

    >>> head_gram([[1.0, 2.0], [0.0, 1.0]])
    tensor([[5., 2.],
            [2., 1.]], dtype=torch.float64)
    >>> head_gram([[1.0, 2.0], [0.0, 1.0]], rotary=Rotary(2))
    tensor([[3., 0.],
            [0., 3.]], dtype=torch.float64)
    """
    return _gram("weight", weight, bias, rotary)


def _gram(name: str, weight: ArrayLike | Tensor, bias: ArrayLike | Tensor | None, rotary: Rotary | None) -> Tensor:
    """Return `head_gram` of the argument of this name."""
    remedy = "pass the rows of one head"
    w = floating(name, weight, remedy).detach().double()
    if w.ndim < 2 or w.numel() == 0:
        raise InputError(name, "non-empty [*batch, head_dim, width]", f"shape {tuple(w.shape)}", remedy)
    with exact_products(w.device), torch.autocast(w.device.type, enabled=False):
        gram = w @ w.mT
        if bias is not None:
            b = _bias(bias, w)
            gram = gram + b @ b.mT
    return gram if rotary is None else commuting_part(gram, rotary)


def _bias(bias: ArrayLike | Tensor, weight: Tensor) -> Float[Tensor, "*batch head_dim heads"]:
    b = floating("bias", bias, "pass the biases of one head").detach().to(weight)
    b = b[..., None] if b.shape == weight.shape[:-1] else b
    if b.shape[:-1] != weight.shape[:-1]:
        expected = f"of shape {tuple(weight.shape[:-1])}, as the rows of `weight`"
        raise InputError("bias", expected, f"shape {tuple(b.shape)}", "pass the biases of the same head")
    return b


def commuting_part(matrix: Gram, rotary: Any) -> Gram:
    """Return what of a symmetric matrix commutes with the rotations: its mean over all R S Rᵀ.

    Of each rotated pair there remains the mean of its two diagonal entries, of the dimensions that are not rotated all;
    pairs rotate at different frequencies, so that nothing between them remains.
    """
    if not isinstance(rotary, Rotary):
        raise InputError("rotary", "a `joma.probes.Rotary` or None", repr(rotary), "pass Rotary(dims)")
    dims = whole("rotary.dims", rotary.dims, low=0, high=matrix.shape[-1])
    if dims % 2:
        raise InputError("rotary.dims", "even: dimensions are rotated in pairs", dims, "check the config of the model")
    first, second = Rotary(dims, rotary.interleaved).pairs
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    mean = (diagonal[..., first] + diagonal[..., second]) / 2
    part = torch.zeros_like(matrix)
    part[..., dims:, dims:] = matrix[..., dims:, dims:]
    part[..., first, first] = mean
    part[..., second, second] = mean
    return part


def head_balance(query: ArrayLike | Tensor, key: ArrayLike | Tensor, *, rotary: Rotary | None = None) -> Tensor:
    """Return the matrix that gradient flow keeps of a head: W_Q W_Qᵀ − W_K W_Kᵀ, or W_V W_Vᵀ − W_Oᵀ W_O.

    Args:
        query: W_Q [*batch, head_dim, width], as `head_gram` takes it; or W_V.
        key: W_K [*batch, head_dim, width]; or the transposed W_O.
        rotary: the rotary positions of queries and keys.

    >>> head_balance([[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]])
    tensor([[3., 0.],
            [0., 0.]], dtype=torch.float64)
    """
    first, second = _grams(query=_gram("query", query, None, rotary), key=_gram("key", key, None, rotary))
    return first - second


def head_imbalance(first: ArrayLike | Tensor, second: ArrayLike | Tensor) -> Tensor:
    """Return how far the two terms of a head's law are from equal: ‖A − B‖_F / (‖A‖_F + ‖B‖_F), from 0 to 1.

    Args:
        first: A, the `head_gram` of queries or values.
        second: B, the `head_gram` of keys or outputs.

    Returns:
        [*batch] in float64; NaN if both are zero.

    >>> head_imbalance(head_gram([[2.0]]), head_gram([[1.0]]))
    tensor(0.6000, dtype=torch.float64)
    """
    a, b = _grams(first=first, second=second)
    return _norm(a - b) / (_norm(a) + _norm(b))


def head_drift(
    first: ArrayLike | Tensor,
    second: ArrayLike | Tensor,
    first_start: ArrayLike | Tensor,
    second_start: ArrayLike | Tensor,
) -> Tensor:
    """Return how far training has left a head's law: ‖Δ − Δ₀‖_F / (‖A − A₀‖_F + ‖B − B₀‖_F), from 0 to 1.

    Args:
        first: A, the `head_gram` of queries or values.
        second: B, the `head_gram` of keys or outputs.
        first_start: A at the start.
        second_start: B at the start.

    Returns:
        [*batch] in float64; 0 where the law holds, NaN where neither term has changed.

    >>> start, left, right = (head_gram([[value]]) for value in (1.0, 2.0, 1.5))
    >>> head_drift(left, right, start, start)
    tensor(0.4118, dtype=torch.float64)
    """
    a, b, a0, b0 = _grams(first=first, second=second, first_start=first_start, second_start=second_start)
    moved, other = a - a0, b - b0
    return _norm(moved - other) / (_norm(moved) + _norm(other))


def _norm(matrix: Gram) -> Float[Tensor, "*batch"]:
    return torch.linalg.matrix_norm(matrix)


def _grams(**given: ArrayLike | Tensor) -> list[Tensor]:
    """Return products of weights in float64, all of the same shape, or raise `InputError`."""
    remedy = "pass what `head_gram` returns for matrices of the same head"
    grams = {name: floating(name, value, remedy).detach().double() for name, value in given.items()}
    (name, reference), *_ = grams.items()
    if reference.ndim < 2 or reference.shape[-1] != reference.shape[-2] or reference.numel() == 0:
        raise InputError(name, "[*batch, head_dim, head_dim]", f"shape {tuple(reference.shape)}", remedy)
    for other, gram in grams.items():
        if gram.shape != reference.shape:
            expected = f"of the same shape as `{name}`, {tuple(reference.shape)}"
            raise InputError(other, expected, f"shape {tuple(gram.shape)}", remedy)
    return list(grams.values())
