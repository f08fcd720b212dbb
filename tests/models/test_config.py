"""What a decoder's config refuses, and the message that says why."""

from __future__ import annotations

import dataclasses
import math

import pytest

from decoder_formulas import JOMA
from joma.arguments import InputError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4}, "`heads` must be a divisor of the width 6, got 4; change one of them"),
        ({"heads": 2, "positions": "rotary", "length": 4}, "`width` must be even in each head with rotary.*got 3"),
        ({"positions": "learned"}, "`length` must be given with learned positions"),
        ({"norm": "rms"}, "`norm` must be one of pre, post, none, got 'rms'"),
        ({"mask": "casual"}, "did you mean 'causal'"),
        ({"attention": "linear"}, "`attention` must be one of trained, frozen, uniform"),
        ({"activation": "swish"}, "`activation` must be one of linear, relu"),
        ({"init": "xavier"}, "`init` must be one of linear, encoder, small"),
        ({"tied": True}, "`outputs` must be the vocabulary, 9, if tied, got 4; untie the head"),
        ({"residual": ((True, True),) * 2}, r"`residual` must be a bool, or a pair \(attention, mlp\) for each of 3"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), got 1.0"),
        ({"dropout": math.nan}, r"`dropout` must be in \[0, 1\)"),
        ({"sites": ("output",)}, "`sites` must be one of embedding, weights, attention, hidden, mlp"),
        ({"layers": 0}, "`layers` must be a whole number of at least 1"),
        ({"vocabulary": -3}, "`vocabulary` must be a whole number of at least 1"),
    ],
)
def test_bad_parts_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(JOMA, **changes)
