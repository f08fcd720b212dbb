"""Mutual attention of two tokens: how much the query for one of them attends to the other, relative to the start."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from joma.arguments import InputError
from joma.models.transformer import Decoder
from joma.probes.entropy import shannon_entropy
from joma.studies.hierarchy.hidden_tokens import FIRST_QUERY, TOKENS, Sequences


def attention_measure(held_out: Sequences) -> Callable[[Decoder, int], dict[str, Tensor]]:
    """Return a measure for `joma.train.Record`, averaged over held-out sequences.

    It returns the mutual `attention` [seed, layer, pair] and the `entropy` [seed, layer] of the queries' attention.
    """
    tokens, multiplicity = held_out.inputs()
    queries = F.one_hot(held_out.queries.long(), TOKENS).float()
    if not pair_average(torch.ones_like(queries), held_out.visible, queries).isfinite().all():
        expected = "enough that for any two tokens some sequence shows one and asks for the other"
        remedy = "draw more sequences, or ask for more or fewer tokens"
        raise InputError("probes", expected, len(held_out.visible[0]), remedy)

    @torch.no_grad()
    def measure(model: Decoder, _: int) -> dict[str, Tensor]:
        layers = model.activations(tokens, ["attention"], multiplicity=multiplicity)["attention"]
        rows = [weights[:, :, 0, FIRST_QUERY:, :FIRST_QUERY] for weights in layers]
        pairs = [pair_average(log_odds(layer), held_out.visible, queries) for layer in rows]
        entropy = [shannon_entropy(layer).mean(dim=(1, 2)) for layer in rows]
        return {"attention": torch.stack(pairs, dim=1), "entropy": torch.stack(entropy, dim=1)}

    return measure


def log_odds(weights: Float[Tensor, "*batch position"]) -> Float[Tensor, "*batch token"]:
    """Return `ln(a_m / a_start)` of attention weights whose first position is the start.

    In the first layer, without positional encoding, this is a difference of logits q·k/√d, which depends on the query
    and the token alone. In any layer it does not depend on how much attention the other tokens attract.

    >>> log_odds(torch.tensor([0.25, 0.5, 0.25]))
    tensor([0.6931, 0.0000])
    """
    logs = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    return logs[..., 1:] - logs[..., :1]


def pair_average(
    odds: Float[Tensor, "seed sample query token"],
    visible: Bool[Tensor, "seed sample token"],
    queries: Float[Tensor, "seed sample query token"],
) -> Float[Tensor, "seed pair"]:
    """Average the log-odds over all sequences in which one token of a pair is queried and the other is visible.

    Both directions count alike. A pair that never meets is NaN.

    Args:
        odds: log-odds of each query's attention to each token.
        visible: which tokens are visible.
        queries: the queried tokens, one-hot.
    """
    present = visible[:, :, None].expand_as(odds).float()
    total, count = (torch.einsum("zsqa,zsqm->zam", queries, values) for values in (odds * present, present))
    first, second = np.triu_indices(TOKENS, k=1)
    return ((total + total.mT) / (count + count.mT))[:, first, second]
