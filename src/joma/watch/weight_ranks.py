"""The stable ranks of a model's weights: which ones to measure, several at once, sharded ones whole."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from joma.arguments import InputError
from joma.probes.rank import small_grams, stable_rank, stable_rank_from_gram
from joma.watch.blocks import WRAPPERS, all_modules, all_parameters
from joma.watch.distributed import Processes, full_weight, is_fsdp_wrapper, is_sharded

MAX_STACKED = 2**24  # elements that are copied at once to measure weights of the same shape together
SMALL_SIDE, SMALL_SIZE = 64, 2**17  # of a weight on a GPU whose Gram matrix is measured on the CPU
LOWER_MATRIX = (  # of an MLP, in GPT-NeoX, OPT, torch, Llama, Phi, GPT-2, BERT and ViT, OLMo, DistilBERT, T5
    r"(?:^|\.)(dense_h_to_4h|fc1|linear1|up_proj|gate_proj|gate_up_proj|c_fc|intermediate\.dense|ff_proj|lin1|wi|wi_[01]"
    r"|w1)\.weight$"
)


def select_weights(model: nn.Module, ranks: bool | str) -> tuple[str, ...]:
    """Return the names of the weights whose stable rank is to be measured."""
    if ranks is False:
        return ()
    matrices = {name: id(weight) for name, weight in _parameters(model).items() if weight.ndim == 2}
    if any(map(is_fsdp_wrapper, all_modules(model).values())):
        remedy = "use `fully_shard` (FSDP2), or `ranks=False`"
        warnings.warn(f"stable ranks are not measured: FSDP1 keeps weights in flat parameters; {remedy}.", stacklevel=4)
        return ()
    selected = tuple(name for name in matrices if re.search(LOWER_MATRIX if ranks is True else ranks, name))
    if selected:
        return selected
    if ranks is True:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return tuple(name for name, weight in matrices.items() if weight not in embeddings)
    known = ", ".join(list(matrices)[:6]) or "none"
    remedy = f"the matrices are {known} …"
    raise InputError("ranks", "a pattern that matches the name of a matrix", repr(ranks), remedy)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, without the parts that wrappers such as `torch.compile` add."""
    named = all_parameters(model)
    every = "\n".join(named)
    if not any(part in every for part in WRAPPERS):
        return named
    return {".".join(part for part in name.split(".") if part not in WRAPPERS): named[name] for name in named}


def _named(model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """Return parameters by name; to look a few up takes a fraction of the time of listing all."""
    try:
        return {name: _parameter(model, name) for name in names}
    except (KeyError, AttributeError):  # the names of wrapped modules lack the wrappers' parts
        return _parameters(model)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    *path, last = name.split(".")
    module: Any = model
    for part in path:
        module = module._modules[part]
    return module._parameters[last]


def stable_ranks(
    model: nn.Module, names: tuple[str, ...], processes: Processes | None = None
) -> Float[np.ndarray, " weight"]:
    """Return the stable rank of each named weight; several processes share the work.

    A sharded weight is gathered by all processes, one weight at a time, and measured by one of them.
    """
    processes = processes or Processes()
    ranks, whole = np.zeros(len(names)), {}
    parameters = _named(model, names)
    with processes.together():
        failure: Exception | None = None
        offloaded = next((name for name in names if parameters[name].is_meta), None)
        if offloaded is not None:
            remedy = "pass `ranks=False`"
            raise InputError("ranks", "of weights that are in memory", f"{offloaded}, which is offloaded", remedy)
        for index, name in enumerate(names):
            is_measured_here = index % processes.count == processes.rank
            parameter = parameters[name]
            if not is_sharded(parameter):
                whole |= {index: parameter.detach()} if is_measured_here else {}
                continue
            weight = full_weight(parameter)
            if is_measured_here and failure is None:
                try:
                    ranks[index] = float(stable_rank(weight))
                except Exception as error:  # raised after the last weight is gathered: the others wait for this process
                    failure = error
        if failure is not None:
            raise failure
        ranks[list(whole)] = _grouped_ranks(list(whole.values()))
    return processes.total(ranks)


def copied_together(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU, those of a dtype at once: each copy from a device waits for it."""
    copies: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = [tensors[index].reshape(-1) for index in indices]
        joined = (torch.cat(flat) if len(flat) > 1 else flat[0]).cpu()
        parts = joined.split([tensors[index].numel() for index in indices])
        copies |= {index: part.view(tensors[index].shape) for index, part in zip(indices, parts, strict=True)}
    return [copies[index] for index in range(len(tensors))]


def _grouped_ranks(weights: list[Tensor]) -> list[float]:
    """Return the stable rank of each weight; weights of one shape, or its transpose, are measured together.

    Everything is computed before the first result is awaited: on a GPU waiting costs more than the work.
    """
    groups: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        groups.setdefault((*sorted(weight.shape), weight.dtype, weight.device), []).append(index)
    measured: list[tuple[list[int], Tensor]] = []
    small: list[tuple[list[int], Tensor]] = []  # Gram matrices that are still on a GPU
    for group in groups.values():
        batch_size = max(1, MAX_STACKED // max(1, weights[group[0]].numel()))
        for start in range(0, len(group), batch_size):
            indices = group[start : start + batch_size]
            wide = [weights[index] for index in indices]
            wide = [weight if weight.shape[0] <= weight.shape[1] else weight.T for weight in wide]
            batch = torch.stack(wide) if len(wide) > 1 else wide[0]
            if not _is_small_on_gpu(batch):
                measured.append((indices, stable_rank(batch)))
            elif batch.dtype == torch.float64:  # whose squares may leave the range of float64
                measured.append((indices, stable_rank(batch.cpu())))
            else:
                small.append((indices, small_grams(batch)))
    grams = copied_together([gram for _, gram in small])
    measured += [(indices, stable_rank_from_gram(gram)) for (indices, _), gram in zip(small, grams, strict=True)]
    ranks = [0.0] * len(weights)
    for indices, batch in measured:
        for index, rank in zip(indices, batch.reshape(-1).tolist(), strict=True):
            ranks[index] = rank
    return ranks


def _is_small_on_gpu(weights: Float[Tensor, "*batch row column"]) -> bool:
    """Return whether the CPU, once it has the Gram matrices, takes less time than a GPU for forty small operations."""
    rows, columns = weights.shape[-2:]
    return weights.is_cuda and rows <= SMALL_SIDE and rows * columns <= SMALL_SIZE
