"""The surprisal of targets, with the outputs of a model as logits."""

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
