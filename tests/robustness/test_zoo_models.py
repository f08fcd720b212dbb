"""Hostile models inside a good series: a few of each kind here, all of them in `make torture`."""

import pytest

from robustness.zoo import GoodSeries
from robustness.zoo_models import hostile_configs, hostile_tokenizers, hostile_weights, write_with_tokenizer

pytest.importorskip("transformers")
FEW = {
    "config: a pipe",
    "config: a secret",
    "config: objects in objects",
    "config: code",
    "config: more heads",
    "config: ten million layers",
    "config: an attention kernel",
    "weights: nan in an attention",
    "weights: NaN after all attention",
    "tokenizer: other words",
    "tokenizer: an expression that backtracks",
}
HOSTILES = [*hostile_configs(), *hostile_weights(), *hostile_tokenizers()]
CHOSEN = [hostile for hostile in HOSTILES if hostile.name in FEW]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return GoodSeries(tmp_path_factory.mktemp("good"), write_with_tokenizer)


def test_the_zoo_is_large_and_the_chosen_ones_are_in_it():
    names = [hostile.name for hostile in HOSTILES]
    assert len(names) == len({*names}) > 150
    assert {*names} >= FEW


@pytest.mark.parametrize("hostile", CHOSEN, ids=lambda hostile: hostile.name)
def test_a_hostile_checkpoint_changes_no_other(good, hostile):
    good.check(hostile)
