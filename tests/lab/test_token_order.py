"""The page Token order: it runs as a script, its code gives its numbers, and a bad word is a sentence."""

from types import SimpleNamespace

import numpy as np
import pytest

from joma.arguments import InputError
from joma.drawing import png
from joma.lab import token_order as page
from lab_pages import run_as_script, run_code, run_page, widget


def settings(**changes):
    usual = {"word": "SPARSE", "order": [1, 0, 2, 3, 4, 5], "layers": 1, "encoding": "none", "mask": "causal"}
    return SimpleNamespace(**{**usual, **changes})


def test_the_page_runs_as_a_script_without_a_network(tmp_path):
    run_as_script("token-order", tmp_path)


@pytest.mark.parametrize("inputs", [settings(), settings(word="ABC", order=[1, 0, 2], layers=2, encoding="rotary")])
def test_the_code_to_copy_gives_the_numbers_of_the_page(inputs):
    names = run_page(page.app, inputs=inputs, trouble=None)
    copied = run_code(names["code"])
    np.testing.assert_array_equal(copied.moved.numpy(), names["moved"])
    np.testing.assert_array_equal(copied.gap.largest.numpy(), names["gap"])


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, False),
        ({"layers": 2}, True),
        ({"layers": 4, "mask": "full"}, False),
        ({"encoding": "sinusoidal", "mask": "full"}, True),
    ],
)
def test_the_sentence_says_what_the_proof_says(changes, moves):
    sentence = run_page(page.app, inputs=settings(**changes), trouble=None)["sentence"]
    assert ("does not move, but for rounding" in sentence) is not moves
    assert ("last letter moves, by" in sentence) is moves


def test_the_sliders_exchange_two_letters():
    widgets = {"layers": 1, "encoding": "none", "mask": "full", "word": "order", "first": 1, "second": 4}
    boxes = {name: widget(widgets.pop(name)) for name in ("encoding", "mask", "word")}
    names = run_page(page.app, **boxes, **{name: widget(value) for name, value in widgets.items()})
    assert names["inputs"].word == "ORDER"
    assert names["inputs"].order == [3, 1, 2, 0, 4]


@pytest.mark.parametrize("word", ["", "AB", "TOOLONGAWORD", "A1B", "ÄÖÜ", "NaN!"])
def test_a_bad_word_is_a_sentence_and_the_page_goes_on(word):
    with pytest.raises(InputError, match="`word` must be 3 to 6 letters from A to Z"):
        page.letters(word)
    boxes = {"word": widget(word), "encoding": widget("none"), "mask": widget("causal")}
    names = run_page(page.app, **boxes)
    assert names["inputs"] is None
    assert "type another word" in names["sentence"]


def test_the_picture_has_a_bar_for_each_letter():
    names = run_page(page.app, inputs=settings(), trouble=None)
    figure = page.draw(settings(), names["moved"], names["chances"], names["gap"])
    assert len(figure.axes[0].patches) == 6
    assert figure.axes[0].get_title().startswith("SPARSE → PSARSE")
    assert png(figure).startswith(b"\x89PNG")
