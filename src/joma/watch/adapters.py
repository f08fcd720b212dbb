"""Merge a LoRA adapter into its base model, tensor by tensor: W + (α / r) B A, as peft's `merge_and_unload()` does.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. Only what is needed is read of base
and adapter, so that a merged checkpoint is read like any other. Options that change more than this formula are refused
by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from joma.watch.byte_ranges import StoredTensor, Unreadable, check_memory
from joma.watch.step_names import read_steps
from joma.watch.weight_files import INDEX, SINGLE, ByteCounter, FileEntry, WeightFile

if TYPE_CHECKING:
    from joma.watch.series import LazyCheckpoint

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
MERGED = "merged weights"  # in the place of a file's name
PREFIX = "base_model.model."  # of every tensor in an adapter
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.default)?(\.weight)?")
WRAPPERS = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
LITERAL = re.compile(r"[\w.^-]+")  # a pattern that cannot take long
MERGE_REMEDY = "merge it with `model.merge_and_unload()` of peft, save the result and give its folder"
# Options that do not change what a trained adapter computes, besides those that `LoraConfig` holds.
HARMLESS = frozenset(
    [
        "auto_mapping",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",  # the shapes tell
        "rank_pattern",  # idem
        "runtime_config",
        "target_modules",
        "task_type",
    ]
)
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # of `init_lora_weights`; others change the base


@dataclass(frozen=True)
class LoraConfig:
    """What an adapter_config.json decides.

    Attributes:
        base: the name or the path of the base model, as the adapter states it.
        revision: its revision on the hub.
        alpha: α, which is divided by the rank r, or by √r if `use_rslora`.
        alpha_pattern: other values of α, by a regular expression of the module's name.
        use_rslora: whether updates are scaled by α / √r.
        fan_in_fan_out: whether weights are stored as [in, out], as by the Conv1D of GPT-2.
    """

    base: str | None
    revision: str | None
    alpha: float
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    fan_in_fan_out: bool

    @classmethod
    def from_fields(cls, fields: Any, name: str) -> LoraConfig:
        """Check the fields of an adapter_config.json; refuse by name what is more than a sum of two matrices."""
        label = f"{name}/{ADAPTER_CONFIG}"
        if not isinstance(fields, dict):
            raise Unreadable(label, "a JSON object", f"a {type(fields).__name__}", "download it again")
        kind, start = fields.get("peft_type"), fields.get("init_lora_weights", True)
        known = HARMLESS | {"peft_type", "init_lora_weights", "base_model_name_or_path", "lora_alpha"}
        options = sorted(key for key, value in fields.items() if value and key not in known | set(cls._options()))
        if kind != "LORA":
            raise _refusal(name, "an adapter of the type LORA", f"the type {kind!r:.40}")
        if options:
            raise _refusal(name, "a LoRA adapter that adds a product of two matrices", f"one with {options[0][:40]}")
        if start not in PLAIN_STARTS:
            raise _refusal(name, "a LoRA adapter of an unchanged base", f"one that started from {start!r:.40}")
        alphas = {"lora_alpha": fields.get("lora_alpha"), **_table(fields.get("alpha_pattern"), label)}
        for key, alpha in alphas.items():
            if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
                raise Unreadable(label, "numbers for α", f"{alpha!r:.40} for {key[:40]}", "check it", must="have")
        base, revision = (fields.get(key) for key in ("base_model_name_or_path", "revision"))
        return cls(
            base if isinstance(base, str) and base.strip() and "\0" not in base else None,
            revision if isinstance(revision, str) and revision else None,
            float(alphas.pop("lora_alpha")),
            {key: float(alpha) for key, alpha in alphas.items()},
            bool(fields.get("use_rslora")),
            bool(fields.get("fan_in_fan_out")),
        )

    @staticmethod
    def _options() -> tuple[str, ...]:
        return ("revision", "alpha_pattern", "use_rslora", "fan_in_fan_out")

    def alphas(self, modules: Sequence[str]) -> dict[str, float]:
        """Return α for each module: that of the first pattern that matches the end of its name."""
        alphas = dict.fromkeys(modules, self.alpha)
        for pattern, alpha in reversed(list(self.alpha_pattern.items())):
            expression = rf"(?P<step>)(?:.*\.)?(?:{pattern})"
            if LITERAL.fullmatch(pattern):
                matches = [re.fullmatch(expression, module) for module in modules]
            else:  # in a process of its own: a pattern from outside may never end
                matches = read_steps(modules, expression)
            alphas |= {module: alpha for module, match in zip(modules, matches, strict=True) if match is not None}
        return alphas


def _table(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise Unreadable(label, "a table as `alpha_pattern`", f"a {type(value).__name__}", "check it", must="have")
    return dict(value or {})


def _refusal(name: str, expected: str, got: str) -> Unreadable:
    return Unreadable(name, expected, got, MERGE_REMEDY)


def is_adapter(names: Collection[str]) -> bool:
    """Return whether the files of a checkpoint are an adapter, without a full model beside it."""
    return ADAPTER_CONFIG in names and not any(name in names for name in (*SINGLE, *INDEX))


def adapter_file(entries: Mapping[str, FileEntry], name: str) -> FileEntry:
    """Return the file with an adapter's tensors; safetensors are preferred."""
    for file in ADAPTER_FILES:
        if file in entries:
            return entries[file]
    remedy = "download it again or leave it out"
    raise Unreadable(name, f"an adapter with {' or '.join(ADAPTER_FILES)}", "none of them", remedy)


def missing_base(name: str, config: LoraConfig) -> Unreadable:
    """Return the error of an adapter whose base model is not at hand."""
    got = f"the base {config.base!r:.200}, which is no folder here" if config.base else "no base in its config"
    remedy = f"give the base as `--base` (in Python `Checkpoints(..., base=...)`), or {MERGE_REMEDY}"
    return Unreadable(name, "an adapter whose base model is at hand", got, remedy)


@dataclass
class _Update:
    """The change of one weight: its factors A [r, in] and B [out, r], by their names in the file."""

    factors: dict[str, str] = field(default_factory=dict)
    transposed: bool = False
    scale: float = 1.0


class MergedWeights(WeightFile):
    """The weights of a base model with an adapter merged into them; they are computed when they are read.

    Args:
        adapter: the adapter's file.
        config: its config.
        base: the base model.
        name: the checkpoint's name in error messages.
    """

    def __init__(self, adapter: WeightFile, config: LoraConfig, base: LazyCheckpoint, name: str) -> None:
        super().__init__(adapter.source, ByteCounter())  # nothing is read but by `adapter` and `base`
        self.adapter, self.config, self.base, self.checkpoint = adapter, config, base, name
        self.updates: dict[str, _Update] = {}
        self.replaced: dict[str, str] = {}  # the names of whole tensors in the adapter, by the tensors they replace

    def find_tensors(self) -> dict[str, StoredTensor]:
        """Return dtype and shape of each merged tensor; those that change are in float32 at least."""
        modules: dict[str, _Update] = {}
        for stored in self.adapter.names():
            name = stored.removeprefix(PREFIX)
            match = FACTOR.fullmatch(name)
            if match:
                factor = match["factor"]
                modules.setdefault(match["module"], _Update(transposed=bool(match["embedding"]))).factors[factor] = (
                    stored
                )
            elif ".lora_" in name or "token_adapter" in name:
                raise _refusal(self.checkpoint, "a LoRA adapter that adds a product of two matrices", name)
            elif ".original_module." not in name:
                plain = WRAPPERS.sub("", name)
                self.replaced[self._base_name(plain) or plain] = stored
        if not modules and not self.replaced:
            raise _refusal(self.checkpoint, "an adapter with LoRA factors", "none")
        tensors = {name: self._unchanged(name) for name in {*self.base.names(), *self.replaced}}
        alphas = self.config.alphas(list(modules))
        for module, update in modules.items():
            name = self._base_name(f"{module}.weight")
            if name is None:
                raise _refusal(self.checkpoint, f"an adapter of {self.base.name}", f"{module}, which it lacks")
            self.updates[name] = self._checked(module, update, tensors[name], alphas[module])
            dtype = torch.promote_types(tensors[name].dtype, torch.float32)
            tensors[name] = StoredTensor(dtype, tensors[name].shape, 0)
        self._check_orientation()
        return tensors

    def _unchanged(self, name: str) -> StoredTensor:
        if name in self.replaced:
            return StoredTensor(self.adapter.dtype(self.replaced[name]), self.adapter.shape(self.replaced[name]), 0)
        return StoredTensor(self.base.files[self.base.layout[name]].dtype(name), self.base.shape(name), 0)

    def _base_name(self, name: str) -> str | None:
        """Return the name of a tensor in the base, which may have been saved with or without the prefix of a head."""
        names = self.base.layout
        if name in names:
            return name
        similar = [other for other in names if other.endswith(f".{name}") or name.endswith(f".{other}")]
        return similar[0] if len(similar) == 1 else None

    def _checked(self, module: str, update: _Update, weight: StoredTensor, alpha: float) -> _Update:
        """Complete an update by its scale and its orientation; refuse factors that do not fit the weight."""
        shapes = {factor: self.adapter.shape(stored) for factor, stored in update.factors.items()}
        (rank, inputs), (outputs, columns) = ((*shapes.get(factor, ()), 0, 0)[:2] for factor in "AB")
        fits = {
            False: (outputs, inputs) == weight.shape,
            True: (inputs, outputs) == weight.shape,
        }
        is_matrix = all(len(shape) == 2 for shape in shapes.values()) and len(shapes) == 2
        if not is_matrix or rank != columns or rank < 1 or not any(fits.values()):
            got = f"factors {list(shapes.values())} for {module} of {list(weight.shape)}"
            raise _refusal(self.checkpoint, "an adapter of matrices that fit its base", got)
        if not weight.dtype.is_floating_point:
            raise _refusal(self.checkpoint, "an adapter of a base in floating point", f"{weight.dtype} for {module}")
        update.transposed = fits[True] if not all(fits.values()) else update.transposed or self.config.fan_in_fan_out
        update.scale = alpha / (math.sqrt(rank) if self.config.use_rslora else rank)
        return update

    def _check_orientation(self) -> None:
        """Refuse square weights of unknown orientation: where others contradict `fan_in_fan_out`, it may be wrong."""
        linear = {name: update for name, update in self.updates.items() if ".weight" in update.factors["A"]}
        square = [name for name in linear if len({*self._unchanged(name).shape}) == 1]
        others = {update.transposed for name, update in linear.items() if name not in square}
        if square and others - {self.config.fan_in_fan_out}:
            got = f"`fan_in_fan_out` {self.config.fan_in_fan_out}, against the shapes, for the square {square[0]}"
            raise _refusal(self.checkpoint, "an adapter that says how its weights are stored", got)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return the values `start` to `stop` of a flattened merged tensor."""
        update, stored = self.tensors[name], self.updates.get(name)
        values = self._plain_part(name, start, stop)
        if stored is None or start == stop:
            return values
        width = update.shape[1]
        first, last = start // width, -(-stop // width)
        change = self._rows(stored, first, last).flatten()[start - first * width : stop - first * width]
        return values.to(update.dtype) + change.to(update.dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a merged tensor, in float32 if it was stored with less, or converted to `dtype`."""
        merged = self.tensors[name]
        check_memory(f"{self.checkpoint}: {name}", 2 * merged.count * merged.dtype.itemsize)
        source, stored = (self.adapter, self.replaced[name]) if name in self.replaced else (self.base, name)
        update = self.updates.get(name)
        if update is None:
            return source.tensor(stored, dtype)
        values = source.tensor(stored, merged.dtype)
        values += self._rows(update, 0, merged.shape[0]).to(merged.dtype)
        return values if dtype is None else values.to(dtype)

    def _plain_part(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.replaced:
            return self.adapter.part(self.replaced[name], start, stop)
        return self.base.part(name, start, stop)

    def _rows(self, update: _Update, first: int, last: int) -> Float[Tensor, "row column"]:
        """Return the rows `first` to `last` of (α / r) B A, or of its transpose."""
        a, b = (self.adapter.tensor(update.factors[factor], torch.float32) for factor in "AB")
        product = a.T[first:last] @ b.T if update.transposed else b[first:last] @ a
        return product * update.scale
