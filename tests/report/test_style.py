"""The colours of the pages: text can be read on every background in every theme."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

import joma.report

CSS = (Path(joma.report.__path__[0]) / "style.css").read_text(encoding="utf-8")
TEXT, BACKGROUNDS = ("ink", "soft", "yes", "no", "open", "link"), ("paper", "tint")
MARKS = ("yes", "no", "open", "ink")  # dots and bars, on the page and on the band
MIN_TEXT, MIN_GRAPHICS = 4.5, 3.0  # contrast that WCAG 2.2 asks of text and of graphics


def themes():
    """Return the colours of each theme by name, as they are in effect: dark and print change the light ones."""
    palettes = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{([^}]*)\}", CSS)]
    light, dark, paper = palettes
    return {"light": light, "dark": light | dark, "print": light | paper, "print while dark": light | dark | paper}


def luminance(colour):
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the grey that just fails


@pytest.mark.parametrize("theme", themes())
def test_text_can_be_read(theme):
    colours = themes()[theme]
    ratios = {pair: contrast(*(colours[name] for name in pair)) for pair in product(TEXT, BACKGROUNDS)}
    assert not {pair: ratio for pair, ratio in ratios.items() if ratio < MIN_TEXT}


@pytest.mark.parametrize("theme", themes())
def test_dots_stand_out_from_the_band(theme):
    colours = themes()[theme]
    ratios = {pair: contrast(*(colours[name] for name in pair)) for pair in product(MARKS, ("paper", "band"))}
    ratios[("edge", "paper")] = contrast(colours["edge"], colours["paper"])
    assert not {pair: ratio for pair, ratio in ratios.items() if ratio < MIN_GRAPHICS}


def test_every_theme_has_every_colour():
    used = {*re.findall(r"var\(--(\w+)\)", CSS)}
    assert all(used <= {*colours} for colours in themes().values())
