"""Averages over rows: the two ways to compute them agree, and unequal processes are weighted by their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from joma.watch import attention
from joma.watch.averages import RowSums, combine, means, row_sums
from joma.watch.distributed import Processes
from two_processes import Model, batch


def recorded(reduce: str, rows: torch.Tensor | str = "all") -> Any:
    model = Model()
    with torch.no_grad(), attention(model, reduce=reduce, rows=rows) as recording:
        model(batch(0))
    return recording


def test_sums_of_rows_give_the_same_means() -> None:
    rows = torch.ones(3, 9, dtype=torch.bool)
    rows[1, 4:] = False
    for mask in ("all", rows):
        layers, values = means(recorded("mean", mask))
        part = row_sums(recorded("none", mask))
        again, combined = combine(part, Processes())
        assert layers == again
        for name, expected in values.items():
            np.testing.assert_allclose(combined[name], expected, rtol=1e-5)
        assert part.counts.max() == (27 if isinstance(mask, str) else 22)


def test_passes_of_unequal_length_count_by_their_rows() -> None:
    model, measures = Model(), ["entropy", "relative_entropy", "effective_tokens", "largest_logit"]

    def recorded_passes(reduce: str) -> Any:
        with torch.no_grad(), attention(model, reduce=reduce, measures=measures) as recording:
            for rank in (0, 1):
                model(batch(rank))
                model.layers[0](torch.ones(2, 3, 8))  # a layer of its own, within the same pass
        return recording

    layers, values = means(recorded_passes("mean"))
    again, combined = combine(row_sums(recorded_passes("none")), Processes())
    assert layers == again == ["layers.0", "layers.1", "layers.0[1]"]
    for name in measures:
        np.testing.assert_allclose(values[name], combined[name], rtol=1e-5)


class Pair(Processes):
    """The first of two processes; `other` is what the second one has."""

    other: RowSums

    def gather(self, value: Any) -> list[Any]:
        return [value, (self.other.layers, self.other.sums.shape[2])]

    def total(self, values: np.ndarray) -> np.ndarray:
        return values + np.array(
            [[[[0.0, 0.0], [0.0, 10.0]], [[0.0] * 2] * 2], [[[0.0, 0.0], [0.0, 3.0]], [[0.0, 0.0], [0.0, 1.0]]]]
        )

    def largest(self, values: np.ndarray) -> np.ndarray:
        return np.maximum(values, np.array([[[-np.inf] * 2] * 2, [[-np.inf] * 2, [-np.inf, 5.0]]]))


def test_processes_that_saw_different_layers_are_combined() -> None:
    measures = ("entropy", "largest_logit")
    part = RowSums(measures, ["a"], np.array([[[2.0, 6.0]], [[1.0, -4.0]]]), np.array([[[2.0, 3.0]], [[2.0, 3.0]]]))
    pair = Pair(0, 2)
    object.__setattr__(pair, "other", RowSums(measures, ["b"], np.zeros((2, 1, 2)), np.zeros((2, 1, 2))))
    layers, values = combine(part, pair)
    assert layers == ["a", "b"]
    np.testing.assert_allclose(values["entropy"], [[1.0, 2.0], [np.nan, 10 / 3]])
    np.testing.assert_allclose(values["largest_logit"], [[1.0, -4.0], [np.nan, 5.0]])
