"""One warning a probe, whatever the number of heads; each head and weight is warned of once."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from joma.watch.collapse import CollapseDetector, EntropyCollapse, RankCollapse

LAYERS = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
SHORT = {name: name[6:14] for name in LAYERS}


def detector(patience: int = 2) -> CollapseDetector:
    return CollapseDetector(floor=0.05, rank_floor=1.1, patience=patience)


def test_many_heads_are_one_warning_with_the_lowest() -> None:
    watch, entropy = detector(), np.full((3, 4), 1.0)
    entropy[0, 1:] = [0.04, 0.02, 0.03]
    entropy[2, 3] = 0.0123
    assert not watch.heads(0, LAYERS, entropy, SHORT).any()
    expected = (
        r"^attention entropy has collapsed in 4 heads of 2 layers \(lowest 0.012 nats: layer layers.2, head 3\), st"
    )
    with pytest.warns(EntropyCollapse, match=expected + r"ep 400$"):
        collapsed = watch.heads(400, LAYERS, entropy, SHORT)
    np.testing.assert_array_equal(collapsed, entropy < 0.05)
    entropy[1, 0] = 0.0
    watch.heads(500, LAYERS, entropy, SHORT)
    with pytest.warns(EntropyCollapse, match=r"in 1 head of 1 layer .*, step 600; 5 in all$"):
        watch.heads(600, LAYERS, entropy, SHORT)


@given(low=arrays.arrays(bool, (12, 2, 3)), patience=st.integers(1, 4))
def test_heads_collapse_after_patience_low_probes_in_a_row(low: np.ndarray, patience: int) -> None:
    watch, ever = detector(patience), np.zeros((2, 3), dtype=bool)
    for step in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            collapsed = watch.heads(step, LAYERS[:2], np.where(low[step], 0.01, 2.0), SHORT)
        expected = low[max(0, step - patience + 1) : step + 1].all(axis=0) & (step + 1 >= patience)
        np.testing.assert_array_equal(collapsed, expected)
        assert len(caught) == bool((expected & ~ever).any())
        ever |= expected


def test_weights_that_began_low_are_left_out_and_a_quiet_process_does_not_warn() -> None:
    watch = detector(patience=1)
    names, short = ["a.weight", "b.weight", "c.weight"], {f"{name}.weight": name for name in "abc"}
    assert not watch.weights(0, names, np.array([5.0, 1.05, 3.0]), short).any()
    with pytest.warns(
        RankCollapse, match=r"^stable rank has collapsed in 2 weights \(lowest 1.01, from 5: a\), step 8$"
    ):
        collapsed = watch.weights(8, names, np.array([1.01, 1.0, 1.02]), short)
    assert collapsed.tolist() == [True, False, True]
    quiet = detector(patience=1)
    assert quiet.heads(0, LAYERS[:1], np.zeros((1, 2)), SHORT, quiet=True).all()
    quiet.weights(0, names, np.full(3, 5.0), short, quiet=True)
    assert quiet.weights(1, names, np.ones(3), short, quiet=True).all()
    assert not detector(1).heads(0, LAYERS[:1], np.full((1, 2), np.nan), SHORT).any()
