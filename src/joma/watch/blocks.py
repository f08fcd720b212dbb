"""Find the blocks of a Transformer and the attention inside each, in models of any library.

The blocks are the members of the lists (`nn.ModuleList`, `nn.Sequential`) whose members contain attention: one list in
a decoder, two in an encoder-decoder, one for each stage of a Swin Transformer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from joma.arguments import InputError

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # left out of a module's name
ADAPTED = "base_model."  # where PEFT puts the model that it adapts
TUNED = "model."  # and in it, if the model's own layers are replaced, as for LoRA
LISTS = (nn.ModuleList, nn.Sequential)
_ATTENTION_CLASS = re.compile(r"(Attention|Attn|MHA)(?!.*(Output|Projection|Norm|Bias|Dropout)\d*$)")
_ATTENTION_NAME = re.compile(r"(^|_)(attn|attention|mha)$", re.IGNORECASE)
_SEQUENCE_FIRST = {f"transformers.models.{kind}.modeling_{kind}" for kind in ("fsmt", "xlnet")}


@dataclass(frozen=True)
class Block:
    """A block: its module, and the names and modules of the attention inside it."""

    module: nn.Module
    attention: Mapping[str, nn.Module]

    @property
    def widths(self) -> set[int]:
        """The sizes of the block's vectors of parameters, such as those of its normalisation: its width is one."""
        return {parameter.numel() for parameter in self.module.parameters() if parameter.ndim == 1}

    @property
    def is_sequence_first(self) -> bool:
        """Whether the block takes [token, batch, dim], as torch's modules do by default."""
        kinds = {base.__module__ for base in type(self.module).__mro__}
        return not kinds.isdisjoint(_SEQUENCE_FIRST) or any(
            getattr(module, "batch_first", True) is False for module in self.module.modules()
        )


def layer_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return for the name of each module of a model the name without the parts that wrappers add to it.

    Wrappers are those of `torch.compile`, activation checkpointing, FSDP, DDP, and PEFT.

    >>> layer_names(dict(nn.DataParallel(nn.Sequential(nn.Linear(1, 1))).named_modules()))
    {'': '', 'module': '', 'module.0': '0'}
    """
    every = "\n".join(modules)
    if "module" not in every and not any(part in every for part in (*WRAPPERS, ADAPTED)):
        return {name: name for name in modules}
    plain: dict[str, str] = {}
    for name in modules:
        above, _, part = name.rpartition(".")
        added = part in WRAPPERS or (part == "module" and _wraps_in_parallel(modules[above]))
        plain[name] = plain[above] if name and added else f"{plain.get(above, '')}.{part}".lstrip(".")
    if not any(_is_of_peft(module) for name, module in modules.items() if not plain[name]):
        return plain
    tuner = any(_is_of_peft(module) for name, module in modules.items() if plain[name] == ADAPTED.rstrip("."))
    prefix = ADAPTED + TUNED if tuner else ADAPTED
    return {name: layer.removeprefix(prefix) or layer for name, layer in plain.items()}


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def first_free(name: str, *taken: Container[str]) -> str:
    """Return `name`, or `name[1]`, `name[2]` … if it is taken.

    >>> first_free("layer", {"layer", "layer[1]"})
    'layer[2]'
    """
    label, index = name, 0
    while any(label in names for names in taken):
        index += 1
        label = f"{name}[{index}]"
    return label


def all_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return `dict(model.named_modules())`, in a tenth of the time: torch's generators call each other at every level.

    >>> shared = nn.ReLU()
    >>> list(all_modules(nn.Sequential(nn.Sequential(shared), nn.Linear(1, 1), shared)))
    ['', '0', '0.0', '1']
    """
    names = {model: ""}
    _name_children(model, "", names)
    return {name: module for module, name in names.items()}


def _name_children(module: nn.Module, prefix: str, names: dict[nn.Module, str]) -> None:
    """Add the modules inside a module to `names`, each with the first name that it has."""
    for child, inner in module._modules.items():
        if inner is not None and inner not in names:
            names[inner] = prefix + child
            if inner._modules:
                _name_children(inner, f"{prefix}{child}.", names)


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return `dict(model.named_parameters())`, in less time."""
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for path, module in all_modules(model).items():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                named[f"{path}.{name}" if path else name] = parameter
    return named


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by the names that `layer_names` gives them; of a wrapper and what it wraps, the latter."""
    modules = all_modules(model)
    return {layer: modules[name] for name, layer in layer_names(modules).items()}


def _wraps_in_parallel(module: nn.Module) -> bool:
    return isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)


def find_blocks(model: nn.Module, pattern: str | None = None, *, required: bool = True) -> dict[str, Block]:
    """Return the blocks of a model by name, in the order of its modules.

    Args:
        model: any module.
        pattern: a regular expression for the names of the blocks; of modules inside each other the outer one is taken.
        required: whether to raise an error if there are none.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
    >>> {name: list(block.attention) for name, block in find_blocks(encoder).items()}
    {'layers.0': ['layers.0.self_attn'], 'layers.1': ['layers.1.self_attn']}
    """
    tree = _Tree(named_modules(model))
    names = tree.in_lists() or tree.parents_of_attention() if pattern is None else _matching(tree.modules, pattern)
    if not names and required:
        got = f"{type(model).__name__}, whose lists are {tree.lists() or 'none'}"
        raise InputError("blocks", "a list of modules that contain attention", got, _suggestion(tree.modules))
    return {name: Block(tree.modules[name], tree.attention_inside(name)) for name in names}


def _matching(modules: Mapping[str, nn.Module], pattern: Any) -> list[str]:
    """Return the outermost modules whose names match, if they can be called."""
    try:
        expression = re.compile(pattern)
    except (TypeError, re.error) as cause:
        got = f"{pattern!r} ({cause})"
        raise InputError("blocks", "a regular expression", got, "correct it") from None
    matching = [name for name, module in modules.items() if name and _can_be_called(module) and expression.search(name)]
    if not matching:
        got = f"{pattern!r}, which matches no module with a forward"
        raise InputError("blocks", "a pattern that matches names of modules", got, _suggestion(modules))
    return _outermost(matching)


def _suggestion(modules: Mapping[str, nn.Module]) -> str:
    """Return the remedy: a pattern for the longest list of modules, or for a module, that this model has."""
    callable_names = [name for name, module in modules.items() if name and _can_be_called(module)]
    lists = Counter(name.rpartition(".")[0] for name in callable_names if name.rpartition(".")[2].isdigit())
    if lists:
        (longest, _), *_ = lists.most_common(1)
        return f"name them by a regular expression, such as `blocks=r'^{re.escape(f'{longest}.'.lstrip('.'))}\\d+$'`"
    if callable_names:
        known = ", ".join(callable_names[:6])
        return f"name one by a regular expression, such as `blocks=r'^{re.escape(callable_names[0])}$'`, of {known}"
    return "put the model into a module that calls it, and name it by a regular expression"


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the names that are not inside another one; outer names come first."""
    outermost: list[str] = []
    for name in names:
        if not any(_is_inside(name, outer) for outer in outermost):
            outermost.append(name)
    return outermost


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _can_be_called(module: nn.Module) -> bool:
    """Return whether a module has a forward: lists have none."""
    return type(module).forward is not nn.Module.forward


def _computes(module: nn.Module) -> bool:
    """Return whether a module can be called and has parameters, as attention does."""
    return _can_be_called(module) and any(True for _ in module.parameters())


class _Tree:
    """The modules of a model by name, which of them are attention, and the children of each."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        computing = [name for name, module in modules.items() if name and _computes(module)]
        self.by_class = [name for name in computing if _ATTENTION_CLASS.search(type(modules[name]).__name__)]
        self.by_name = [
            name for name in computing if modules[name]._modules and _ATTENTION_NAME.search(name.rpartition(".")[2])
        ]
        self.children: dict[str, list[str]] = {name: [] for name in modules}
        for name in modules:
            if name:
                self.children[name.rpartition(".")[0]].append(name)

    def attention_inside(self, name: str) -> dict[str, nn.Module]:
        """Return the innermost attention modules inside a module: outer ones often add the residual stream.

        They have the name of attention in their class, or else as their own name.
        """
        inside = [other for other in self.by_class if _is_inside(other, name)]
        inside = inside or [other for other in self.by_name if _is_inside(other, name)]
        innermost = [outer for outer in inside if not any(_is_inside(other, outer) for other in inside)]
        return {other: self.modules[other] for other in innermost}

    def in_lists(self) -> list[str]:
        """Return the members of the outermost lists with attention, or of lists inside them that have more members."""
        lists = {name: self._members(name) for name, module in self.modules.items() if isinstance(module, LISTS)}
        lists = {name: members for name, members in lists.items() if members}
        return [member for name in _outermost(lists) for member in self._longest(lists, name)]

    def _members(self, name: str) -> list[str]:
        """Return the members of a list that are blocks, [] if none contains attention.

        Of a Sequential these are the members with attention: others may be embeddings or a head. Of a ModuleList they
        are all that consist of modules: in a hybrid model some blocks have another mixer than attention.
        """
        children = [child for child in self.children[name] if _can_be_called(self.modules[child])]
        with_attention = [child for child in children if self.attention_inside(child)]
        if not with_attention or isinstance(self.modules[name], nn.Sequential):
            return with_attention
        return [child for child in children if self.modules[child]._modules]

    def _longest(self, lists: Mapping[str, list[str]], name: str) -> list[str]:
        """Return the members of a list, or those of the lists inside it if these are more and all contain attention.

        The blocks of a Swin Transformer are inside stages; the sublayers of a T5 block are no blocks, as some have no
        attention.
        """
        inner = _outermost(other for other in lists if _is_inside(other, name))
        members = [member for other in inner for member in self._longest(lists, other)]
        uniform = all(self.attention_inside(child) for other in inner for child in self.children[other])
        return members if uniform and len(members) > len(lists[name]) else lists[name]

    def parents_of_attention(self) -> list[str]:
        """Return the modules that directly hold attention, in a model that has no list of blocks."""
        parents = list(dict.fromkeys(name.rpartition(".")[0] for name in _outermost(self.by_class or self.by_name)))
        return parents if all(_can_be_called(self.modules[parent]) for parent in parents) else []

    def lists(self) -> str:
        """Return the lists of the model, for a message."""
        lists = []
        for name, module in self.modules.items():
            if isinstance(module, LISTS) and self.children[name]:
                classes = ", ".join(sorted({type(self.modules[child]).__name__ for child in self.children[name]}))
                lists.append(f"{name or 'itself'} ({len(self.children[name])} x {classes})")
        return "; ".join(lists[:4]) + (" …" if len(lists) > 4 else "")
