"""The norm of the gradient by block, of models on one device or sharded over several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from joma.arguments import InputError, StateError, instance
from joma.watch.blocks import find_blocks

EMBEDDING, OTHER = "embedding", "other"  # parameters outside the blocks
FSDP1 = "FullyShardedDataParallel"
_foreach_norm: Any = vars(torch)["_foreach_norm"]  # the norms of many tensors in a few kernels


def gradient_norms(model: nn.Module, *, blocks: str | None = None) -> dict[str, float]:
    """Return the L2 norm of the gradient of each block's parameters, and of the embeddings and the other parameters.

    Call it after `loss.backward()` and before `optimizer.zero_grad()`: before gradient clipping for the norms as they
    are, and after `scaler.unscale_(optimizer)` where a gradient scaler is used. The whole gradient has the norm √Σ n².
    The device is waited for once, whatever the number of parameters. Of sharded parameters (FSDP2, tensor parallelism)
    every rank gets the norm of the whole gradient, so that all ranks have to call it.

    Args:
        model: the module whose parameters have gradients.
        blocks: a regular expression for the names of the blocks, as in `joma.watch.activations`.

    Returns:
        The norms by the names of the blocks, "embedding" and "other"; NaN for a block without gradients.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
    >>> encoder(torch.randn(3, 1, 4)).square().mean().backward()
    >>> list(gradient_norms(encoder))
    ['layers.0', 'layers.1']
    """
    instance("model", model, nn.Module, "load it first")
    groups = _groups(model, blocks)
    names = list(dict.fromkeys(group for group, _ in groups))
    gradients = [(names.index(group), weight.grad) for group, weight in groups if weight.grad is not None]
    if not gradients:
        raise StateError("model", "has no gradients", "call it after `loss.backward()`, before `optimizer.zero_grad()`")
    with torch.no_grad():
        squares = [_total_squares(parts, len(names), sharding) for sharding, parts in _by_sharding(gradients)]
        norms = torch.stack([square.to(squares[0].device) for square in squares]).sum(dim=0).sqrt().tolist()
    defined = {index for index, _ in gradients}
    return {name: norms[index] if index in defined else float("nan") for index, name in enumerate(names)}


def _groups(model: nn.Module, blocks: str | None) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter once, with the name of its block, "embedding" or "other"; blocks come first."""
    owners: dict[int, str] = {}
    block_modules = find_blocks(model, blocks)
    for name, block in block_modules.items():
        for parameter in block.module.parameters():
            owners.setdefault(id(parameter), name or type(model).__name__)
    for module in model.modules():
        if FSDP1 in {kind.__name__ for kind in type(module).__mro__}:
            got = f"{FSDP1}, whose parameters are parts of flat ones"
            raise InputError("model", "whole, or sharded by `fully_shard`", got, "use `fully_shard` (FSDP2)")
        if "Embedding" in type(module).__name__:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), EMBEDDING)
    groups = [(owners.get(id(parameter), OTHER), parameter) for parameter in model.parameters()]
    order = {name or type(model).__name__: index for index, name in enumerate(block_modules)}
    return sorted(groups, key=lambda pair: order.get(pair[0], len(order) + (pair[0] == OTHER)))


def _by_sharding(gradients: list[tuple[int, Tensor]]) -> Iterator[tuple[tuple[Any, ...], list[tuple[int, Tensor]]]]:
    """Yield the local parts of the gradients, those together whose squares are summed over the same process groups."""
    parts: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
    for index, gradient in gradients:
        local: Any = gradient
        sharding: tuple[Any, ...] = ()
        if hasattr(local, "placements"):
            if any(placement.is_partial() for placement in local.placements):
                local = local.full_tensor()
            else:
                sharded = [dim for dim, placement in enumerate(local.placements) if not placement.is_replicate()]
                sharding, local = (local.device_mesh, *sharded), local.to_local()
        if local.is_sparse:
            local = local.coalesce().values()
        parts.setdefault(sharding, []).append((index, local))
    yield from parts.items()


def _total_squares(parts: list[tuple[int, Tensor]], count: int, sharding: tuple[Any, ...]) -> Tensor:
    """Return the sum of squares of each of `count` groups, over all ranks that hold a shard."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, part in parts:
        by_kind.setdefault((part.device, part.dtype), []).append((index, part))
    total = torch.zeros(count, dtype=torch.float64, device=parts[0][1].device)
    for (device, dtype), members in by_kind.items():
        precise = dtype if dtype == torch.float64 else torch.float32
        squares = torch.stack(_foreach_norm([part for _, part in members], 2, dtype=precise)).double().square()
        owners = torch.tensor([index for index, _ in members]).to(device, non_blocking=True)
        total += torch.zeros(count, dtype=torch.float64, device=device).index_add(0, owners, squares).to(total.device)
    for dim in sharding[1:]:
        torch.distributed.all_reduce(total, group=sharding[0].get_group(dim))
    return total
