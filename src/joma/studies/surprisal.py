"""The surprisal of targets: one definition for all studies.

The outputs of a model are logits. `joma.kernels.head.surprisal` is the same for a language model, without keeping them.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def surprisal(outputs: Float[Tensor, "*rows output"], target: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Return −ln q of the target of each row, q = softmax(outputs).

    >>> import torch
    >>> surprisal(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.6931])
    """
    return outputs.logsumexp(dim=-1) - outputs.gather(-1, target[..., None]).squeeze(-1)


def expected_surprisal(
    outputs: Float[Tensor, "*rows output"], probability: Float[Tensor, "*rows output"]
) -> Float[Tensor, "*rows"]:
    """Return −Σ_k p_k ln q_k of each row, q = softmax(outputs), where targets have the probabilities p.

    >>> import torch
    >>> expected_surprisal(torch.zeros(1, 2), torch.tensor([[0.25, 0.75]]))
    tensor([0.6931])
    """
    return outputs.logsumexp(dim=-1) - (probability * outputs).sum(dim=-1)


def cross_entropy_by_row(outputs: Float[Tensor, "*batch output output"]) -> Float[Tensor, "*batch"]:
    """Return the mean of −ln q over the rows, where the target of row i is output i: as many samples as classes.

    >>> import torch
    >>> cross_entropy_by_row(torch.zeros(2, 2))
    tensor(0.6931)
    """
    return (outputs.logsumexp(dim=-1) - outputs.diagonal(dim1=-2, dim2=-1)).mean(dim=-1)


def mean_surprisal(
    log_probability: Float[Tensor, "*model sample query symbol"], target: Int[Tensor, "*model sample query"]
) -> Float[Tensor, "*model"]:
    """Return the mean of −ln q of the targets over samples and queries, from the logarithms of q themselves.

    >>> import torch
    >>> mean_surprisal(torch.full((1, 1, 2, 4), 0.25).log(), torch.tensor([[[0, 3]]]))
    tensor([1.3863])
    """
    return -log_probability.gather(-1, target[..., None])[..., 0].mean((-2, -1))
