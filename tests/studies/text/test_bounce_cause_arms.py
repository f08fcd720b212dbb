"""The arms of `bounce-cause`: what each changes, which are refused, and which train as one model."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from joma.arguments import InputError
from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.text.bounce_cause_arms import ARMS, DROPOUTS, PARTS, UNCHANGED, group_arms, select_arms


def parameter_names(layers):
    config = DecoderConfig(vocabulary=5, width=4, layers=layers, length=3, positions="sinusoidal", norm="post")
    return [name for name, _ in Decoder(config, generators=[torch.Generator()]).named_parameters()]


@pytest.mark.parametrize("layers", [1, 2])
def test_every_parameter_but_those_of_norms_belongs_to_one_part(layers):
    for name in parameter_names(layers):
        parts = [part for part, patterns in PARTS.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        assert len(parts) == (0 if "norms" in name else 1), name


def test_every_pattern_matches_something():
    names = parameter_names(1)
    assert all(any(fnmatchcase(name, pattern) for name in names) for part in PARTS.values() for pattern in part)


def test_arms_differ_and_have_labels_of_their_own():
    for dropout in DROPOUTS:
        resolved = [replace(arm, dropout=arm.dropout or dropout) for arm in ARMS.values()]
        repeated = {name for name, arm in zip(ARMS, resolved, strict=True) if resolved.count(arm) > 1}
        assert repeated == {UNCHANGED, "linear", f"dropout-{dropout}", f"linear-dropout-{dropout}"}
    assert len({arm.label for arm in ARMS.values()}) == len(ARMS)
    assert all(set(arm.frozen) <= set(PARTS) for arm in ARMS.values())
    assert all(arm.frozen for arm in ARMS.values() if arm.later)


def test_the_unchanged_model_comes_first_and_has_the_settings_dropout():
    arms = select_arms(["linear", "memorised"], dropout="embedding", restart=True)
    assert [*arms] == [UNCHANGED, "linear", "memorised"]
    assert [arm.dropout for arm in arms.values()] == ["embedding", "embedding", "none"]
    assert [arm.restart for arm in arms.values()] == [True, True, False]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["vaule-path"], {}, "`arms` must be one of free, linear, .*'vaule-path'"),
        ([UNCHANGED], {}, "free, which is free here"),
        (["mlp", "mlp"], {}, "`arms` must be different values"),
        (["dropout-none"], {"dropout": "none"}, "dropout-none, which is free here"),
        (["linear", "linear-dropout-none"], {"dropout": "none"}, "linear-dropout-none, which is linear here"),
        (["one-adam"], {"restart": False}, "one-adam, which is free here"),
        ([], {"dropout": "everywhere"}, "`dropout_at` must be one of none, embedding, published"),
    ],
)
def test_arms_that_are_unknown_or_equal_are_refused(names, options, message):
    with pytest.raises(InputError, match=message):
        select_arms(names, **{"dropout": "embedding", "restart": True, **options})


def test_arms_of_one_kind_differ_in_what_is_frozen_and_in_their_positions_alone():
    names = [name for name in ARMS if name not in (UNCHANGED, "dropout-none", "linear-dropout-none")]
    groups = group_arms(select_arms(names, dropout="none", restart=True))
    assert sorted(name for group in groups for name in group) == sorted([UNCHANGED, *names])
    assert next(iter(groups[0])) == UNCHANGED
    for group in groups:
        same = {replace(arm, frozen=(), later=False, positions="none") for arm in group.values()}
        assert len(same) == 1
    kinds = [next(iter(group.values())).kind for group in groups]
    assert len({*kinds}) == len(kinds)
