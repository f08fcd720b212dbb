"""What the symmetry probes accept as hidden states, and how diverged seeds are set apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.probes.states import checked_states, floating, nan_where, split_diverged


def test_finite_states_are_returned_without_a_copy():
    states = torch.ones(2, 3, 4, 5)
    finite, diverged = split_diverged(states, axes=3)
    assert finite is states
    assert diverged.tolist() == [False, False]


@given(st.integers(0, 999), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.integers(1, 3))
def test_only_the_entry_with_the_value_is_set_apart(seed, value, axes):
    states = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    spoilt = states.clone()
    spoilt[1, 2, 0, 3] = value
    finite, diverged = split_diverged(spoilt, axes=axes)
    assert diverged.shape == states.shape[: 4 - axes]
    assert int(diverged.sum()) == 1
    assert torch.equal(finite[~diverged], states[~diverged])
    assert bool((finite[diverged] == 0).all())
    marked = nan_where(diverged, states)
    assert torch.equal(marked.isnan().flatten(-axes).all(-1), diverged)
    assert torch.equal(marked[~diverged], states[~diverged])


def test_the_graph_is_dropped():
    assert not checked_states(torch.ones(2, 3, 4, requires_grad=True), axes=3).requires_grad


@pytest.mark.parametrize(
    ("states", "axes", "positions"),
    [(torch.ones(3, 4), 3, 2), (torch.ones(2, 3, 4), 4, 2), (torch.ones(2, 1, 4), 3, 2), (torch.ones(2, 2, 4), 3, 3)],
)
def test_missing_axes_and_positions_are_named(states, axes, positions):
    with pytest.raises(InputError, match=rf"`states` must be \[\*lead.*at least {positions} positions"):
        checked_states(states, axes=axes, positions=positions)


def test_whole_numbers_are_refused():
    with pytest.raises(
        InputError, match=r"`x` must be numbers of a floating-point type, got torch\.int64 of shape \(2,\); give y"
    ):
        floating("x", [1, 2], "give y")
