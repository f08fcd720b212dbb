"""How far the heads of a checkpoint are from balance, and from the laws that gradient flow would keep.

Every attention matrix is read once, and one more time from the first checkpoint of a series, as far as its products do
not fit into memory. For a matrix of n rows and heads of d dimensions the products take n²d multiplications: for a width
of 1,024 about a tenth of the time of the stable ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from joma.probes.balance import head_drift, head_gram, head_imbalance
from joma.watch.byte_ranges import NotFinite, Unreadable
from joma.watch.checkpoint_ranks import check_finite, read_ahead
from joma.watch.configs import quiet, read_fields
from joma.watch.head_weights import HeadWeights, Role, find_heads
from joma.watch.series import LazyCheckpoint
from joma.watch.store import Measure, pack_names

LAWS: dict[str, tuple[Role, Role]] = {"query_key": ("query", "key"), "value_output": ("value", "output")}
OTHERS = "_others"  # ends the names of measures between different heads
MAX_KEPT = 2**24  # numbers of the first checkpoint's products that stay in memory: 128 MiB
HEADS, VERSION = "heads", 1

Grams = Mapping[Role, Float[Tensor, "key_head head_dim head_dim"]]


class ReferenceHeads:
    """The products of the first checkpoint of a series, to which the others are compared.

    Args:
        checkpoint: the first checkpoint.
    """

    def __init__(self, checkpoint: LazyCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._by_module: dict[str, Grams] = {}

    def grams(self, module: HeadWeights, shapes: Mapping[str, tuple[int, ...]]) -> Grams | None:
        """Return the products of the same module of the first checkpoint, or None if it has none, or NaN in them.

        Args:
            module: the module of a later checkpoint, whose config.json describes this one too.
            shapes: the shapes of its tensors.
        """
        if repr(module) in self._by_module:
            return self._by_module[repr(module)]
        if shapes != _shapes(self.checkpoint, module):
            return None
        try:
            grams = head_grams(self.checkpoint, module)
        except NotFinite:  # named where the first checkpoint itself is measured
            return None
        count = sum(gram.numel() for products in (*self._by_module.values(), grams) for gram in products.values())
        if count <= MAX_KEPT:
            self._by_module[repr(module)] = grams
        return grams


def _shapes(checkpoint: LazyCheckpoint, module: HeadWeights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a module, those that a checkpoint has."""
    return {name: checkpoint.shape(name) for name in module.stored if name in checkpoint.layout}


def heads_of(checkpoint: LazyCheckpoint) -> tuple[list[HeadWeights], list[str]]:
    """Return the attention modules of a checkpoint whose heads can be told apart, and why others cannot.

    Without a config.json, or with one that is refused, there are neither: that is named where the model is to be run.
    """
    fields = _fields(checkpoint)
    return ([], []) if fields is None else find_heads(checkpoint, fields)


def _fields(checkpoint: LazyCheckpoint) -> dict[str, Any] | None:
    """Return the config.json of a checkpoint; None if it cannot be read."""
    try:
        with quiet():
            folder = checkpoint.folder(weights=False)
        return read_fields(folder, checkpoint.name)
    except Unreadable:
        return None


def head_grams(checkpoint: LazyCheckpoint, module: HeadWeights) -> Grams:
    """Return W Wᵀ + b bᵀ of queries, keys, values and output, for each key head.

    At most two of the matrices are in memory. What is not finite is refused.
    """
    grams: dict[Role, Tensor] = {}
    names = list(dict.fromkeys(module.weights.values()))
    for name, stored in read_ahead(names, lambda name: checkpoint.tensor(name, torch.float32)):
        check_finite(checkpoint, name, stored)
        matrix = stored.T if module.transposed else stored
        for role in module.roles_of(name):
            bias_name = module.biases.get(role)
            column = None if bias_name is None else checkpoint.tensor(bias_name, torch.float32)[:, None]
            bias = None if column is None else module.by_key_head(role, column)
            rotary = module.rotary if role in LAWS["query_key"] else None
            grams[role] = head_gram(module.by_key_head(role, matrix), bias, rotary=rotary)
    return grams


def measure_heads(checkpoint: LazyCheckpoint, *, reference: ReferenceHeads | None = None) -> dict[str, np.ndarray]:
    """Measure the imbalance of each head, and its drift since the first checkpoint of the series.

    Returns:
        `module`, the names of the attention modules; [module, key_head] for either of `LAWS`, NaN where there is none;
        the same between the first term of a head and the second of another head, between which no law holds, under a
        name that ends with `OTHERS`; and `not_named`, what was not measured and why.
    """
    modules, reasons = heads_of(checkpoint)
    rows: dict[str, list[Tensor]] = {}
    for module in modules:
        grams = head_grams(checkpoint, module)
        measures = _imbalances(module, grams)
        if reference is not None:
            is_first = checkpoint.name == reference.checkpoint.name
            start = None if is_first else reference.grams(module, _shapes(checkpoint, module))
            measures |= _drifts(module, grams, start)
        for name, values in measures.items():
            rows.setdefault(name, []).append(values)
    normed = [module.name for module in modules if module.normed]
    if normed:
        reasons.append(f"{normed[0]}: norms or positions are applied to queries and keys, so that they have no law")
    names = {"module": [module.name for module in modules], "not_named": reasons}
    packed = {name: pack_names(values) for name, values in names.items() if values}
    return packed | {name: _table(values) for name, values in rows.items()}


def _imbalances(module: HeadWeights, grams: Grams) -> dict[str, Float[Tensor, " key_head"]]:
    """Return the imbalance of each head, and that between different heads."""
    return {
        f"{law}_imbalance{ending}": _nan(module) if is_missing else head_imbalance(*_pair(grams, law, shift))
        for law, ending, shift, is_missing in _comparisons(module)
    }


def _drifts(module: HeadWeights, grams: Grams, start: Grams | None) -> dict[str, Float[Tensor, " key_head"]]:
    """Return the drift of each head, and that between different heads; NaN without a start."""
    drifts = {}
    for law, ending, shift, is_missing in _comparisons(module):
        drifts[f"{law}_drift{ending}"] = (
            _nan(module)
            if is_missing or start is None
            else head_drift(*_pair(grams, law, shift), *_pair(start, law, shift))
        )
    return drifts


def _comparisons(module: HeadWeights) -> Iterator[tuple[str, str, int, bool]]:
    """Yield each law, the ending of the measure, which head supplies the second term, and whether there is no law."""
    for law in LAWS:
        has_law = law != "query_key" or not module.normed
        yield law, "", 0, not has_law
        yield law, OTHERS, 1, not has_law or module.key_heads < 2


def _pair(grams: Grams, law: str, shift: int) -> tuple[Tensor, Tensor]:
    """Return the two terms of a law, the second one that of the head `shift` before."""
    first, second = LAWS[law]
    return grams[first], grams[second].roll(shift, dims=0)


def _nan(module: HeadWeights) -> Float[Tensor, " key_head"]:
    """Return NaN for each key head."""
    return torch.full((module.key_heads,), torch.nan, dtype=torch.float64)


def _table(rows: Sequence[Float[Tensor, " _"]]) -> Float[np.ndarray, "module key_head"]:
    """Return rows of different lengths as a table, filled up with NaN."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values.numpy()
    return table


def heads_measure(first: LazyCheckpoint, address: Mapping[str, Any] | None) -> Measure:
    """Return the measure of the heads of a series, or of a single model.

    Args:
        first: the first sound checkpoint, to which the others are compared.
        address: where another process finds the first checkpoint; None for a single model, which has no drift.
    """
    config = json.dumps(_fields(first), sort_keys=True)  # which may lie above the folders of the checkpoints
    options = {"config": hashlib.sha256(config.encode()).hexdigest()}
    if address is None:
        return Measure(HEADS, VERSION, measure_heads, options)
    options["reference"] = first.identity
    function = partial(measure_heads, reference=ReferenceHeads(first))
    return Measure(HEADS, VERSION, function, options, {"reference": dict(address)})
