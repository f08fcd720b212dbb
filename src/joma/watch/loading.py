"""Load models from checkpoints with transformers; nothing but their weights and their checked config is used.

The model is built on the meta device first, which takes no memory: a config.json that describes more than the weight
files hold, or than the machine has memory for, is refused before a weight is read.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from joma import memory
from joma.watch.configs import ONLY_WEIGHTS, clipped, loading_errors, quiet, transformers
from joma.watch.series import LazyCheckpoint
from joma.watch.weight_files import Unreadable, WeightFile

POOLER = "pooler."  # an encoder's pooler follows all attention, and pretrained models often come without its weights
PARAMETERS = 64  # parameters that a model may have for each stored tensor; files store some of them together
MAPPED = ".safetensors"  # files of this kind are memory-mapped, others are read
FEW = 1000  # parameters that any model may have
# Buffers that older versions of transformers stored; models compute them now.
COMPUTED_BUFFER = re.compile(r"(^|\.)(inv_freq|position_ids|token_type_ids|masked_bias|(attn|attention)\.bias)$")
CONFIG_REMEDY = f"check its config.json against the names of its weights {ONLY_WEIGHTS}"


def load(checkpoint: LazyCheckpoint, config: Any) -> nn.Module:
    """Load the model of a checkpoint without its head, in float32 and evaluation mode.

    Args:
        checkpoint: the checkpoint; weights on the hub are downloaded.
        config: its config, as `load_config` returns it.
    """
    skeleton = build_skeleton(checkpoint, config)
    with quiet():
        folder = checkpoint.folder()
    # The base of an adapter may be on the hub, and is read tensor by tensor; all other files are local by now.
    state = dict(_read_weights(checkpoint, folder)) if checkpoint.is_adapter else {}
    with loading_errors(checkpoint.name):
        state = state or dict(_read_weights(checkpoint, folder))
        options = {"config": copy.deepcopy(config), "state_dict": state, "output_loading_info": True}
        model, info = type(skeleton).from_pretrained(None, **options)
    kind = f"all weights of the {type(model).__name__} that its config.json describes"
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(POOLER))
    if missing:  # transformers has initialised them at random
        raise Unreadable(checkpoint.name, kind, f"no {_enumerate(missing, ' missing')}", CONFIG_REMEDY, must="have")
    unexpected = sorted(key for key in info["unexpected_keys"] if _in_model(key, model))
    if unexpected:  # transformers has left them out
        got = f"also {_enumerate(unexpected)}"
        raise Unreadable(checkpoint.name, kind.replace("all", "only", 1), got, CONFIG_REMEDY, must="have")
    return model.float().eval()


def _enumerate(keys: list[str], verb: str = "") -> str:
    return clipped(keys[0]) + (f" and {len(keys) - 1} more{verb}" if len(keys) > 1 else "")


def _in_model(key: str, model: Any) -> bool:
    """Return whether a stored name belongs to the model without its head, and is no buffer that is computed anew."""
    prefix = f"{model.base_model_prefix}."
    in_base = key.startswith(prefix) or key.split(".", maxsplit=1)[0] in dict(model.named_children())
    return in_base and not COMPUTED_BUFFER.search(key)


def build_skeleton(checkpoint: LazyCheckpoint, config: Any) -> Any:
    """Build the model that `config` describes on the meta device; refuse it if it is too large for file or machine."""
    stored = len(checkpoint.names())
    with ExitStack() as stack:
        stack.enter_context(loading_errors(checkpoint.name))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_at_most(FEW + PARAMETERS * stored, stored, checkpoint.name))
        skeleton = transformers().AutoModel.from_config(copy.deepcopy(config))
    values = sum(parameter.numel() for parameter in skeleton.parameters())
    needed = values * torch.float32.itemsize + sum(buffer.nbytes for buffer in skeleton.buffers())
    needed += sum(_bytes(weights) for file, weights in checkpoint.files.items() if not file.endswith(MAPPED))
    memory.check(checkpoint.name, needed, f"use a machine with more memory, or leave it out {ONLY_WEIGHTS}")
    return skeleton


def _bytes(weights: WeightFile) -> int:
    """Return the size of the tensors of a weight file."""
    return sum(math.prod(weights.shape(name)) * weights.dtype(name).itemsize for name in weights.names())


@contextmanager
def _at_most(limit: int, stored: int, name: str) -> Iterator[None]:
    """Stop the construction of modules inside the block when they have more than `limit` parameters."""
    count = 0

    def add(module: nn.Module, key: str, parameter: Tensor | None) -> None:  # noqa: ARG001 (the hook's signature)
        nonlocal count
        count += 1
        if count > limit:
            got = f"more than {limit:,} tensors for the {stored:,} that are stored"
            raise Unreadable(name, "a model of its size, by its config.json", got, CONFIG_REMEDY)

    handle = torch_module.register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _read_weights(checkpoint: LazyCheckpoint, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by name; safetensors files are memory-mapped, so that memory holds the model once."""
    from safetensors import safe_open

    for file, weights in checkpoint.files.items():
        names = [name for name in weights.names() if checkpoint.layout[name] == file]
        if file.endswith(MAPPED):
            with safe_open(folder / file, framework="pt") as content:
                tensors = [(name, content.get_tensor(name)) for name in names]
        else:
            tensors = [(name, weights.tensor(name)) for name in names]
        for name, tensor in tensors:
            if name.endswith(".weight") and not tensor.is_floating_point():
                got = f"{tensor.dtype} for {clipped(name)}"
                raise Unreadable(
                    checkpoint.name, "weights in floating point", got, f"convert it {ONLY_WEIGHTS}", must="have"
                )
            yield name, tensor
