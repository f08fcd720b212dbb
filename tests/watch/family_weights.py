"""The oracle of the families: the entropies of the attention weights that a model returns with eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from joma.probes.entropy import shannon_entropy
from watch.families import Family

HEADS = 4


def run(model: Any, family: Family, **options: Any) -> Any:
    """Return the model's output for the inputs of its family; random draws, as in masked autoencoders, are the same."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return model(**family.inputs, **options)


def eager_weights(model: Any, family: Family) -> list[Tensor]:
    """Return the weights of each attention, in the order of the calls."""
    if family.weights == ("softmaxes",):
        with results_of_softmax() as weights:
            run(model, family)
        return weights
    output = run(model, family, output_attentions=True)
    fields = chain.from_iterable(_field(output, names) for names in family.weights)
    return [matrix for matrix in fields if matrix is not None]


def eager_entropies(model: Any, family: Family) -> list[Tensor]:
    """Return the entropies [batch, head, query] in float64 of each attention, in the order of the calls."""
    weights = eager_weights(model, family)
    return [three_axes(_row_entropy(matrix, family), family.axes) for matrix in weights]


def _field(output: Any, names: str) -> list[Tensor]:
    """Return the weights of a field of the output, or of several as `Family` says."""
    parts = [list(_get(output, name) or ()) for name in names.replace("|", "+").split("+")]
    if "|" in names:
        return [torch.cat(matrices, dim=-1) for matrices in zip(*parts, strict=True)]
    return list(chain.from_iterable(zip(*parts, strict=True)))


def _get(output: Any, name: str) -> Any:
    if name.startswith("softmax("):
        return [logits.softmax(-1) for logits in _get(output, name[8:-1])]
    *path, last = name.split(".")
    return (attrgetter(".".join(path))(output) if path else output).get(last)


@contextmanager
def results_of_softmax() -> Iterator[list[Tensor]]:
    """Keep what softmaxes of more than two axes return; `F.softmax` calls the method of tensors."""
    results: list[Tensor] = []

    def keeping(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*args: Any, **kwargs: Any) -> Tensor:
            weights = softmax(*args, **kwargs)
            results.extend([weights] if weights.ndim > 2 else [])
            return weights

        return keep

    with (
        patch.object(torch, "softmax", keeping(torch.softmax)),
        patch.object(Tensor, "softmax", keeping(Tensor.softmax)),
    ):
        yield results


def _row_entropy(weights: Tensor, family: Family) -> Tensor:
    """Return the entropy of each row; NaN for a row of zeros, which is a padded one."""
    weights = weights.double()
    if family.learned_sinks:
        weights = torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0)], dim=-1)
    return shannon_entropy(weights.masked_fill(weights.sum(-1, keepdim=True) == 0, torch.nan))


def three_axes(entropy: Tensor, axes: str) -> Tensor:
    """Return the entropy with axes batch, head, query; blocks of a sequence count as batch."""
    if axes == "(bh)":
        return entropy.unflatten(0, (-1, HEADS))
    if axes == "bhn" and entropy.ndim == 4:
        entropy = entropy.transpose(1, 2)
    return entropy.flatten(0, -3)


def token_rows(family: Family, batch: int, queries: int) -> Tensor | slice:
    """Return the rows [batch, query] that are tokens, by the masks of the family's inputs."""
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = family.inputs.get(name)
        if mask is not None and mask.numel() == batch * queries:
            return mask.reshape(batch, queries).bool()
        if mask is not None and mask.shape[1] == queries:
            return mask.repeat_interleave(batch // len(mask), dim=0).bool()
        if mask is not None and name.startswith("decoder") and (batch, queries) == (len(mask), 3 * mask.shape[1]):
            return mask.repeat(1, 3).bool()  # ProphetNet's tokens and predictions
    return slice(None)
