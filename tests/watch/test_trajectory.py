"""The trajectory of probes that saw different layers and numbers of heads."""

from __future__ import annotations

import numpy as np

from joma.watch.collapse import Collapsed
from joma.watch.trajectory import Measurement, Probe, trajectory_dataset


def probe(step: int, layers: list[str], heads: int) -> Probe:
    values = np.arange(len(layers) * heads, dtype=float).reshape(len(layers), heads) + step
    measurement = Measurement(
        layers,
        {"entropy": values, "sink_mass": -values},
        np.array([step + 0.5]),
        {"residual_rms": {f"block {step}": 1.0 + step}},
    )
    return Probe(step, measurement, Collapsed(values % 2 == 0, np.array([step > 0])))


def test_layers_that_were_not_called_are_undefined() -> None:
    trajectory = trajectory_dataset([probe(0, ["a", "b"], 2), probe(8, ["c", "b"], 3)], ["w"])
    assert trajectory.layer.values.tolist() == ["a", "b", "c"]
    assert trajectory.entropy.sel(step=0, layer="b").values[:2].tolist() == [2, 3]
    assert trajectory.entropy.sel(step=8, layer="b").values.tolist() == [11, 12, 13]
    assert trajectory.entropy.isnull().sum() == 3 + 2 + 3
    assert trajectory.sink_mass.equals(-trajectory.entropy)
    assert trajectory.stable_rank.values.tolist() == [[0.5], [8.5]]
    assert trajectory.collapsed.sel(step=8, layer="b").values.tolist() == [False, True, False]
    assert trajectory.collapsed.sel(step=8, layer="a").values.tolist() == [False] * 3
    assert trajectory.rank_collapsed.values.tolist() == [[False], [True]]
    np.testing.assert_array_equal(trajectory.residual_rms, [[1.0, np.nan], [np.nan, 9.0]])
    assert trajectory.block.values.tolist() == ["block 0", "block 8"]
    assert "weight" not in trajectory_dataset([probe(0, ["a"], 1)], [])
