from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.studies.symmetry.addition_arms import ENCODED, all_arms, group_arms, select_arms


def test_there_are_29_arms():
    arms = all_arms(6)
    assert len(arms) == 29
    assert sum(arm.residual is None for arm in arms.values()) == 8
    removed = [arm.residual for arm in arms.values() if arm.residual is not None]
    assert len(set(removed)) == 21
    assert sorted(12 - sum(map(sum, residual)) for residual in removed) == [1] * 12 + [2] * 6 + [6] * 2 + [12]
    assert arms["mlp 4"].residual == ((True, True),) * 4 + ((True, False), (True, True))
    assert (arms["rotary full"].positions, arms["rotary full"].mask) == ("rotary", "full")


def test_encodings_are_all_but_none():
    assert sorted(ENCODED) == ["learned", "rotary", "sinusoidal"]


def test_arms_are_selected_by_name_in_the_order_of_the_table():
    assert list(select_arms(["mlp all", "none causal", "mlp all"], 2)) == ["none causal", "mlp all"]
    assert select_arms(None, 3) == all_arms(3)


@pytest.mark.parametrize(("names", "message"), [(["none diagonal"], "'none diagonal'"), ([], "at least one")])
def test_unknown_arms_and_no_arms_are_refused(names, message):
    with pytest.raises(InputError, match=f"`arms` must be .*{message}.*none causal"):
        select_arms(names, 2)


@given(st.lists(st.sampled_from(sorted(all_arms(3))), min_size=1), st.integers(1, 7))
def test_groups_contain_every_arm_once_and_can_train_as_one_model(names, max_size):
    arms = select_arms(names, 3)
    groups = list(group_arms(arms, max_size))
    assert sorted(name for group in groups for name in group) == sorted(set(names))
    assert all(len(group) <= max_size and len({arm.kind for arm in group.values()}) == 1 for group in groups)
    kinds = [(arm.positions == "rotary", arm.mask) for arm in arms.values()]
    assert len(groups) == sum(math.ceil(kinds.count(kind) / max_size) for kind in set(kinds))


def test_groups_of_a_kind_differ_in_size_by_at_most_1():
    single = {name: arm for name, arm in all_arms(6).items() if arm.residual is not None}
    assert [len(group) for group in group_arms(single, 6)] == [6, 5, 5, 5]
