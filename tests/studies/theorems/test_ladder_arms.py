"""The arms of the trained ladder: each differs from the block or from the language model in one premise."""

from dataclasses import fields

import pytest

from joma.models import OneLayerConfig
from joma.studies.theorems.ladder_arms import ALL, ARMS, BASE, TOP, Arm

DATA = {"tokens": 6, "classes": 3}
PARTS = {"activation", "hidden", "embeddings", "norm", "logits", "positions", "values"}  # premises of the model
TRAINING = {"optimiser", "world", "constant", "speed", "last", "frozen_at", "repeated"}  # and of its training
# With a head the activation acts on an MLP; frozen weights are watched with the fast logits that they drive.
TOGETHER = {"mlp": {"activation", "hidden"}, "all-frozen": {"speed", "frozen_at"}, "last-product": {"logits", "last"},
            "top-free-fast": {"logits", "speed"}, "all-product-slow": {"logits", "speed"},
            "constant-relu": {"constant", "activation"}, "separable-adam": {"world", "optimiser"},
            "separable-mlp": {"world", "activation", "hidden"},
            "separable-repeated": {"world", "repeated"}}  # fmt: skip


def premises(arm: Arm, start: Arm) -> set[str]:
    """Return the premises in which two arms differ."""
    first, second = arm.model(**DATA), start.model(**DATA)
    parts = {name for name in PARTS if getattr(first, name) != getattr(second, name)}
    return parts | {name for name in TRAINING if getattr(arm, name) != getattr(start, name)}


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_differs_in_one_premise(name):
    arm = ARMS[name]
    start = TOP if name.startswith("top") else ALL if name.startswith(("all", "last")) else BASE
    differences = premises(arm, start)
    if arm is start:
        assert not differences
    elif name in TOGETHER:
        assert differences == TOGETHER[name]
    elif name == "all-rank-1":
        assert differences == {"logits"}
        assert arm.model(**DATA).head_width == 1
    else:
        assert len(differences) == 1


def test_the_ends_of_the_ladder_are_the_block_and_a_language_model():
    block, language = BASE.model(**DATA), TOP.model(**DATA)
    assert block == OneLayerConfig(tokens=6, outputs=3, scale=0.05)
    assert (language.outputs, language.positions, language.activation, language.norm) == (6, "all", "relu", True)
    assert {arm.rung for arm in ARMS.values()} == {"base", "one-in", "two-in", "top", "one-out", "question"}


def test_every_premise_of_the_top_is_switched_back_in_some_arm():
    switched = set().union(*(premises(arm, TOP) for arm in ARMS.values() if arm.rung == "one-out"))
    assert switched == {"activation", "embeddings", "norm", "optimiser", "logits", "positions"}
    assert {field.name for field in fields(Arm)} > TRAINING
