"""The weights of attention heads in a checkpoint, by the names of its tensors and the sizes in its config.json.

`NAMES` says how architectures name the projections of an attention module and how they join them; `WITHOUT_ROTATION`
and `ROTATED` say which model types rotate queries and keys, which no weight tells. What stands in neither is named as
not measured, and never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from joma.probes.balance import Rotary
from joma.watch.configs import clipped
from joma.watch.series import LazyCheckpoint

Role = Literal["query", "key", "value", "output"]
INPUTS: tuple[Role, ...] = ("query", "key", "value")
JOINED, INTERLEAVED = "joined", "interleaved"  # [query; key; value] rows one after another, or head by head


class Names(NamedTuple):
    """How an architecture names the projections of an attention module.

    Attributes:
        inputs: the parts of the names that stand for queries, keys and values; one where all three are one matrix.
        outputs: the possible names of the output.
        order: of the rows of one matrix for all three.
        inner: the part of a module's name that the inputs have and the output does not, as a regular expression.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    order: str = ""
    inner: str = ""


NAMES = (
    Names(("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),  # Llama, OPT, GPT-J, Phi
    Names(("query", "key", "value"), ("output.dense",), inner=r"\.(?:self|attention)"),  # BERT, ViT
    Names(("q_lin", "k_lin", "v_lin"), ("out_lin",)),  # DistilBERT
    Names(("q", "k", "v"), ("o",)),  # T5
    Names(("c_attn",), ("c_proj",), JOINED),  # GPT-2, whose matrices are transposed, and nanoGPT
    Names(("qkv_proj",), ("o_proj",), JOINED),  # Phi-3
    Names(("in_proj",), ("out_proj",), JOINED),  # torch's MultiheadAttention
    Names(("query_key_value",), ("dense",), INTERLEAVED),  # GPT-NeoX and BLOOM
)
WITHOUT_ROTATION = frozenset(
    [
        "bert",
        "bloom",
        "camembert",
        "deit",
        "distilbert",
        "electra",
        "gpt2",
        "gpt_neo",
        "mt5",
        "opt",
        "roberta",
        "t5",
        "vit",
    ]
)
# The share of a head's dimensions that are rotated unless config.json says it; GPT-J's says it in dimensions.
ROTATED = {
    "gemma": 1.0,
    "gemma2": 1.0,
    "gpt_neox": 0.25,
    "gptj": 1.0,
    "granite": 1.0,
    "llama": 1.0,
    "mistral": 1.0,
    "mixtral": 1.0,
    "olmo": 1.0,
    "olmo2": 1.0,
    "olmoe": 1.0,
    "phi": 0.5,
    "phi3": 1.0,
    "qwen2": 1.0,
    "qwen2_moe": 1.0,
    "qwen3": 1.0,
    "qwen3_moe": 1.0,
    "stablelm": 0.25,
    "starcoder2": 1.0,
}
NEIGHBOURS = frozenset(["gptj"])  # rotate pairs of neighbouring dimensions
SHARES = ("partial_rotary_factor", "rotary_pct")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead")
NORM = re.compile(r"(?P<module>.+?)\.(?:q|k|query|key)_?(?:layer_?)?norm\b")
LEARNED_POSITIONS = re.compile(r"(?:^|\.)wpe\.weight$")  # of GPT-2 and nanoGPT
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


class NotNamed(Exception):
    """Why the heads of an attention module cannot be told apart, as a clause of a sentence."""


@dataclass(frozen=True)
class HeadWeights:
    """Where the weights of the heads of one attention module are.

    Attributes:
        name: the module.
        weights: the names of the matrices of queries, keys, values and output; the first three may be the same.
        biases: the names of the biases of queries, keys and values, those that are stored.
        order: of the rows of one matrix for the first three; empty for three matrices.
        transposed: whether matrices are stored as [in, out], as GPT-2 does.
        heads: the number of query heads.
        key_heads: the number of key heads, each of which `heads // key_heads` query heads share.
        head_dim: dimensions of a head.
        rotary: rotary positions of queries and keys.
        normed: whether queries or keys are normed, so that they have no law.
    """

    name: str
    weights: Mapping[Role, str]
    biases: Mapping[Role, str]
    order: str
    transposed: bool
    heads: int
    key_heads: int
    head_dim: int
    rotary: Rotary | None
    normed: bool

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of all its tensors."""
        return tuple(dict.fromkeys([*self.weights.values(), *self.biases.values()]))

    def roles_of(self, weight: str) -> list[Role]:
        """Return the roles of a matrix."""
        return [role for role, name in self.weights.items() if name == weight]

    def by_key_head(self, role: Role, matrix: Float[Tensor, "out in"]) -> Float[Tensor, "key_head head_dim columns"]:
        """Return the rows of a role for each key head; those of query heads that share it stand side by side.

        Args:
            role: what the rows are for; those of the output are the columns of its matrix.
            matrix: the weights as they act, [out, in]; a bias is a matrix of one column.
        """
        if role == "output":
            rows = matrix.T
        elif self.order == INTERLEAVED:
            rows = matrix.unflatten(0, (self.heads, 3, self.head_dim))[:, INPUTS.index(role)].flatten(0, 1)
        elif self.order == JOINED:
            sizes = [count * self.head_dim for count in (self.heads, self.key_heads, self.key_heads)]
            rows = matrix.split(sizes)[INPUTS.index(role)]
        else:
            rows = matrix
        return rows.unflatten(0, (self.key_heads, -1, self.head_dim)).transpose(1, 2).flatten(2)


def find_heads(checkpoint: LazyCheckpoint, fields: Mapping[str, Any]) -> tuple[list[HeadWeights], list[str]]:
    """Return the attention modules of a checkpoint whose heads can be told apart, and why others cannot.

    Args:
        checkpoint: the checkpoint, of which only names and shapes are read.
        fields: its config.json.
    """
    stored, modules, reasons = checkpoint.layout, [], {}
    taken: set[str] = set()
    normed = {match["module"] for match in map(NORM.match, stored) if match}
    learned = any(LEARNED_POSITIONS.search(name) for name in stored)
    for name, names, tensors in _candidates(stored):
        taken |= set(tensors.values())
        try:
            modules.append(_resolve(checkpoint, fields, names, tensors, module=name, learned=learned))
            modules[-1] = replace(modules[-1], normed=modules[-1].normed or name in normed)
        except NotNamed as reason:
            reasons.setdefault(str(reason), name)
    unnamed = [name for name in stored if name not in taken and _is_projection(name, checkpoint.shape(name))]
    if unnamed:
        reasons["its projections have no name that is known"] = unnamed[0]
    return modules, [f"{clipped(name, 80)}: {reason}" for reason, name in reasons.items()]


def _is_projection(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor may be a projection of attention, by its name and shape; tables of biases are none."""
    is_weight = name.endswith("weight") and not name.endswith("bias.weight")
    return is_weight and len(shape) == 2 and min(shape) > 1 and ATTENTION.search(name) is not None


def _candidates(stored: Mapping[str, str]) -> Iterator[tuple[str, Names, dict[Role, str]]]:
    """Yield each attention module with its names, and the tensors of its roles."""
    for names in NAMES:
        last = names.inputs[-1]
        ending = "_weight" if names.inputs == ("in_proj",) else ".weight"  # other layers have an in_proj.weight
        pattern = re.compile(rf"(?:(?P<module>.+?){names.inner}\.)?{last}{re.escape(ending)}")
        for tensor in stored:
            match = pattern.fullmatch(tensor)
            if match is None:
                continue
            module = match["module"] or ""
            start = tensor[: -len(last + ending)]
            tensors: dict[Role, str] = {
                role: f"{start}{part}{ending}" for role, part in zip(INPUTS, names.inputs * 3, strict=False)
            }
            prefix = f"{module}." if module else ""
            outputs = [f"{prefix}{output}.weight" for output in names.outputs]
            output = next((name for name in outputs if name in stored), None)
            if output is not None and all(name in stored for name in tensors.values()):
                tensors["output"] = output
                yield module, names, tensors


def _resolve(
    checkpoint: LazyCheckpoint,
    fields: Mapping[str, Any],
    names: Names,
    tensors: Mapping[Role, str],
    *,
    module: str,
    learned: bool,
) -> HeadWeights:
    """Return the weights of a module's heads; raise `NotNamed` if sizes or positions are not known."""
    if fields.get("clip_qkv"):
        raise NotNamed("queries, keys and values are clipped, so that no law holds")
    heads = next((fields[name] for name in HEADS if _is_count(fields.get(name))), None)
    if heads is None:
        raise NotNamed("its config.json does not say the number of heads")
    shapes: dict[Role, tuple[int, ...]] = {role: checkpoint.shape(name) for role, name in tensors.items()}
    if any(len(shape) != 2 for shape in shapes.values()):
        raise NotNamed("its projections are no matrices")
    transposed = names.inputs == ("c_attn",) and shapes["query"][0] < shapes["query"][1]
    key_heads, head_dim = _sizes(fields, heads, shapes, names, transposed=transposed)
    biases: dict[Role, str] = {role: re.sub(r"weight$", "bias", tensors[role]) for role in INPUTS}
    biases = {role: name for role, name in biases.items() if name in checkpoint.layout}
    rows = shapes["query"][1] if transposed else None
    if any(checkpoint.shape(name) != (rows or shapes[role][0],) for role, name in biases.items()):
        raise NotNamed("its biases do not fit its projections")
    return HeadWeights(
        name=module,
        weights=tensors,
        biases=biases,
        order=names.order,
        transposed=transposed,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        rotary=_rotary(fields, head_dim, names, learned=learned),
        normed=fields.get("position_embedding_type", "absolute") not in ("absolute", None),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _sizes(
    fields: Mapping[str, Any], heads: int, shapes: Mapping[Role, tuple[int, ...]], names: Names, *, transposed: bool
) -> tuple[int, int]:
    """Return the number of key heads and the dimensions of a head, which all shapes must agree on."""
    inner = shapes["output"][0 if transposed else 1]
    head_dim, remainder = divmod(inner, heads)
    rows = shapes["query"][1 if transposed else 0]
    key_rows = (rows - inner) // 2 if names.order else shapes["key"][0]
    key_heads = key_rows // max(head_dim, 1)
    expected = {INTERLEAVED: 3 * inner, JOINED: inner + 2 * key_rows}.get(names.order, inner)
    fits = not remainder and rows == expected and key_heads * head_dim == key_rows and key_heads > 0
    fits = fits and heads % key_heads == 0 and (names.order or shapes["value"][0] == key_rows)
    if not fits or fields.get("num_key_value_heads", key_heads) not in (key_heads, None):
        raise NotNamed(f"its shapes do not fit the {heads} heads that its config.json says")
    return key_heads, head_dim


def _rotary(fields: Mapping[str, Any], head_dim: int, names: Names, *, learned: bool) -> Rotary | None:
    """Return the rotary positions of a model, None if it has none; raise `NotNamed` if that is not known."""
    model_type = fields.get("model_type")
    known = names.inputs == ("in_proj",) or (names.inputs == ("c_attn",) and learned)
    if model_type is None and known:
        return None
    if not isinstance(model_type, str) or model_type not in WITHOUT_ROTATION | ROTATED.keys():
        what = "no model type" if model_type is None else f"the model type {clipped(repr(model_type), 40)}"
        raise NotNamed(f"{what} does not tell whether positions rotate its queries and keys")
    if model_type in WITHOUT_ROTATION:
        return None
    nested = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    places = [place for place in (nested, fields) if isinstance(place, Mapping)]
    shares = [place[name] for place in places for name in SHARES if isinstance(place.get(name), int | float)]
    share = shares[0] if shares else ROTATED[model_type]
    given = fields.get("rotary_dim")
    dims = int(given) if isinstance(given, int) else int(head_dim * share) if math.isfinite(share) else -1
    if dims % 2 or not 0 <= dims <= head_dim:
        raise NotNamed(f"{dims} of {head_dim} dimensions cannot be rotated in pairs")
    return Rotary(dims, model_type in NEIGHBOURS) if dims else None  # a quarter of three dimensions is none
