"""The report in a real browser: links, themes, print, a phone's width, the keyboard, and what a screen reader needs."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import xarray as xr
from matplotlib.figure import Figure

from joma.drawing import canvas
from joma.report.html import write_report
from joma.report.probe import save as save_probe
from joma.study import Claim, Drawing, Highlight, Preset, Study, above, at_least, at_most, execute
from joma.verdicts import KINDS
from probed import FAULT, series_data
from toy_study import Config

pytest.importorskip("playwright", reason="Playwright is not installed; `make check` installs it")
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(BROWSERS)}")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 800}
LONG = "A sentence about attention that is long enough to be broken into several lines on a narrow screen"

# Every visible text whose colour is nearly that of the nearest opaque background behind it.
INVISIBLE = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    const root = getComputedStyle(document.documentElement).backgroundColor;
    return matchMedia("print").matches ? [255, 255, 255] : rgb(root);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(walker.currentNode.data.trim());
  }
  return found;
}"""
# Every visible element that reaches beyond the right edge, but for those in a box that scrolls by itself.
OVERFLOWING = """() => [...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility() && !e.closest(".scroll, .unseen, .skip, thead"))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className)"""


def picture(run: xr.Dataset, panels: int):
    figure, axes = canvas(1, panels)
    for panel in axes.flat:
        panel.plot(run.step, run.value.mean("seed"))
    return figure


def study(name: str, label: str = "") -> Study:
    """Return a study with claims of every kind, and a figure that is too wide for a phone."""
    expected = {
        "theorem": at_most(10),
        "figure": at_least(10),
        "reading": above(0),
        "control": at_most(1e-6),
        "check": above(0),
    }
    claims = [
        Claim(
            kind, f"{LONG} of a {kind}.", lambda run: run.value.isel(step=-1), expected[kind], kind, f"{LONG}, in nats"
        )
        for kind in KINDS
    ]
    claims.append(
        Claim("untested", "Decided elsewhere.", lambda run: run.value.mean(), at_most(1), "figure", presets=("paper",))
    )
    return Study(
        name=name,
        title=f"What {name} shows",
        source="Theorem 4 (arXiv 2310.00535)",
        about=LONG,
        version=1,
        presets={"quick": Preset(Config(), 3, 1.0)},
        run=lambda _, context: xr.Dataset(
            {"value": (("seed", "step"), [[seed + 0.5 * step for step in range(4)] for seed in context.seeds])},
            {"seed": list(context.seeds), "step": range(4)},
        ),
        claims=tuple(claims),
        statement=LONG,
        outcome=lambda run: f"The mean of {name} is {float(run.value.mean()):.3g}.",
        highlight=Highlight(label, lambda run: picture(run, 1), f"{label} rises.") if label else None,
        figures={"wide": Drawing(lambda run: picture(run, 3), "Three panels.")} if label == "Figure 3" else {},
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for name, label in (("invariance", "Figure 2"), ("winner", "Figure 3"), ("ladder", "")):
        execute(study(name, label), out=out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(9, 3)))
        save_probe(series_data(), [FAULT], out / "probe" / "model")
    return write_report(out).path


@pytest.fixture(scope="module", params=["report", "probe"])
def either_page(report, request):
    """The report of the runs, then the page of a probe."""
    return report if request.param == "report" else report.parent / "probe" / "model" / "probe.html"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(report, browser):
    """A function that opens a page, and checks in the end that nothing else was fetched and nothing went wrong."""
    contexts, pages, requests, problems = [], {}, [], []

    def open_page(path: Path = report, **options):
        context = browser.new_context(offline=True, **{"viewport": DESK, **options})
        contexts.append(context)
        page = context.new_page()
        pages[path.as_uri()] = page
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert {url for url in requests if not url.startswith("data:")} == {*pages}


def test_it_opens_with_every_picture(opened):
    page = opened()
    assert "claims" in page.title()
    sizes = page.eval_on_selector_all("img", "images => images.map(image => [image.complete, image.naturalWidth])")
    assert len(sizes) == 2 + 1 + 4
    assert all(complete and width > 100 for complete, width in sizes)


def test_every_link_leads_somewhere(opened):
    page = opened()
    links = page.eval_on_selector_all("a", "links => links.map(link => link.getAttribute('href'))")
    inside = [link[1:] for link in links if link.startswith("#")]
    assert len(inside) > 15
    assert page.evaluate("names => names.filter(name => !document.getElementById(name))", inside) == []
    assert {link for link in links if not link.startswith("#")} == {"https://arxiv.org/abs/2310.00535"}
    page.click(".highlights a >> nth=1")
    assert page.evaluate("document.querySelector(':target h2').textContent") == "What winner shows"
    assert abs(page.evaluate("document.querySelector(':target').getBoundingClientRect().top")) < 100


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "unfolded"])
def test_nothing_has_to_be_scrolled_sideways(opened, either_page, size, folded):
    page = opened(either_page, viewport=size)
    if not folded:
        page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.evaluate(OVERFLOWING) == []


def test_on_a_phone_figures_keep_their_size_and_words_stay_whole(opened, either_page):
    page = opened(either_page, viewport=PHONE)
    widths = page.eval_on_selector_all("figure img", "images => images.map(i => [i.clientWidth, i.naturalWidth])")
    assert widths
    assert all(shown >= min(natural, 500) for shown, natural in widths)
    lines = """cells => cells.map(cell => { const range = document.createRange(); range.selectNodeContents(cell);
      return range.getClientRects().length; })"""
    assert page.eval_on_selector_all(".audit .verdict", lines) == [1]  # the kind of the fault is one word


def test_the_first_screen_has_the_pictures_and_the_outcome(opened):
    page = opened()
    bottoms = page.eval_on_selector_all(
        ".highlights a, .outcomes li", "elements => elements.map(element => element.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) == 2 + 3
    assert max(bottoms) < DESK["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_no_text_is_invisible(opened, either_page, scheme, media):
    page = opened(either_page, color_scheme=scheme)
    page.emulate_media(media=media, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate(INVISIBLE) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark" and media == "screen")


def test_a_text_that_cannot_be_seen_would_be_found(opened):
    page = opened()
    page.evaluate("document.querySelector('.lead').style.color = '#f0f0f0'")
    assert len(page.evaluate(INVISIBLE)) == 1


def test_links_on_the_first_screen_lead_to_the_parts(opened):
    page = opened()
    links = page.get_by_role("navigation", name="Parts of the report").get_by_role("link")
    assert links.all_text_contents() == ["The claims by kind", "The studies", "Probed models"]
    for link in links.all():
        link.click()
        assert abs(page.evaluate("document.querySelector(':target').getBoundingClientRect().top")) < 100


def test_print_shows_every_claim_and_no_controls(opened):
    page = opened()
    page.check("#show-no")
    page.emulate_media(media="print")
    shown = page.eval_on_selector_all(
        ".overview .claim", "rows => rows.filter(row => row.getClientRects().length).length"
    )
    assert shown == 3 * (len(KINDS) + 1)
    assert not page.is_visible(".filter")
    assert not page.is_visible(".origin")
    assert len(page.pdf(format="A4")) > 10_000


@pytest.mark.parametrize(
    ("choice", "verdicts"),
    [("all", {"✓ holds", "✗ does not hold", "– not tested"}), ("no", {"✗ does not hold"}), ("open", {"– not tested"})],
)
def test_the_table_can_be_narrowed_without_javascript(opened, choice, verdicts):
    page = opened(java_script_enabled=False)
    page.check(f"#show-{choice}")
    rows = page.locator(".overview > .kind > .claims .claim .verdict")
    shown = [
        text.partition("decided")[0].strip() for row in rows.all() if row.is_visible() for text in [row.text_content()]
    ]
    assert {*shown} == verdicts
    kinds = [heading.is_visible() for heading in page.locator(".overview > .kind > h3").all()]
    assert kinds == {"all": [True] * 4, "no": [False, True, False, True], "open": [False, True, False, False]}[choice]


def test_details_open_by_keyboard_and_focus_is_seen(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    reached, outlines = [], []
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        reached.append(page.evaluate("document.activeElement.tagName"))
        outlines.append(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert {*outlines} == {"solid"}
    expected = page.evaluate("document.querySelectorAll('a[href]:not(details *), summary').length")
    assert sum(tag in ("A", "SUMMARY") for tag in reached) == expected - 1  # without the skip link
    page.focus("summary >> nth=0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector('details').open")


def test_a_screen_reader_finds_its_way(opened, either_page):
    page = opened(either_page)
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("[...document.images].filter(image => !image.alt.trim()).length") == 0
    levels = page.eval_on_selector_all("h1, h2, h3, h4, h5, h6", "headings => headings.map(h => Number(h.tagName[1]))")
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.locator("main").count() == 1
    assert page.evaluate("[...document.querySelectorAll('th')].filter(th => !th.scope).length") == 0
    ids = page.eval_on_selector_all("[id]", "elements => elements.map(element => element.id)")
    assert len(ids) == len({*ids})


def test_parts_of_the_report_have_names(opened):
    page = opened()
    assert [page.locator(name).count() for name in ("body > header", "body > footer")] == [1, 1]
    assert page.evaluate("[...document.querySelectorAll('svg')].filter(s => !s.getAttribute('aria-label')).length") == 0
    unlabelled = "[...document.querySelectorAll('input')].filter(input => !input.labels.length).length"
    assert page.evaluate(unlabelled) == 0
    labelled = page.eval_on_selector_all("[aria-labelledby]", "all => all.map(e => e.getAttribute('aria-labelledby'))")
    assert page.evaluate("names => names.filter(name => !document.getElementById(name))", labelled) == []
    assert page.get_by_role("navigation").count() == 3


def test_a_picture_of_a_claim_is_read_aloud(opened):
    label = opened().locator("#kind-control svg").first.get_attribute("aria-label")
    assert re.fullmatch(r"3 seeds from 1.5 to 3.5; expected ≤ 1e-06, logarithmic axis", label)
