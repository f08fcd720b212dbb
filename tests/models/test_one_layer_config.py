"""The config of a one-layer model: shapes that follow from the switches, and messages that name bad options."""

from __future__ import annotations

import pytest

from joma.arguments import InputError
from joma.models import OneLayerConfig


def test_the_switches_decide_which_parameters_there_are():
    block = OneLayerConfig(tokens=5, outputs=3, queries=2)
    assert block.columns == 7
    assert block.shapes(7) == {"w": (7, 3), "z": (2, 5)}
    language = OneLayerConfig(
        tokens=5, outputs=5, hidden=6, positions="all", logits="product", head_width=2, values=4, skip=True
    )
    assert language.columns == 5
    assert language.shapes(9) == {
        "w": (9, 6),
        "W_Q": (9, 2),
        "W_K": (9, 2),
        "W_V": (9, 4),
        "W_O": (4, 9),
        "upper": (6, 9),
        "head": (9, 5),
    }
    assert OneLayerConfig(tokens=5, outputs=3, hidden=6, positions="all").shapes(5) == {
        "w": (5, 6),
        "z": (5, 5),
        "head": (6, 3),
    }


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"positions": "some"}, "positions"),
        ({"logits": "factored"}, "logits"),
        ({"embeddings": "given"}, "embeddings"),
        ({"attention": "sofmax"}, "attention"),
        ({"activation": "swish"}, "activation"),
        ({"hidden": -1}, "hidden"),
        ({"hidden": 0, "skip": True}, "hidden"),
        ({"values": -1}, "values"),
        ({"head_width": 0}, "head_width"),
        ({"tokens": 0}, "tokens"),
        ({"queries": 2}, "queries"),
        ({"scale_qk": -1.0}, "scale_qk"),
    ],
)
def test_bad_options_are_named(options, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        OneLayerConfig(**{"tokens": 5, "outputs": 3, "hidden": 7, "positions": "all", **options})
