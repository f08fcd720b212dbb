"""The pages in a real browser: each opens, each slider changes a picture, the keyboard suffices, nothing leaves."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest

import toy_study
from joma.lab import PAGES
from joma.study import execute

pytest.importorskip("playwright", reason="Playwright is not installed; `make check` installs it")
from playwright.sync_api import Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(BROWSERS)}")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 1000}
WAIT = 120_000  # milliseconds; the first page of a server imports torch
# Every visible element that reaches beyond the right edge, also inside of widgets, but for those in a box that scrolls.
OVERFLOWING = """() => {
  const inside = root => [...root.querySelectorAll("*")]
    .flatMap(e => e.shadowRoot ? [e, ...inside(e.shadowRoot)] : [e]);
  const above = e => e.parentElement ?? e.getRootNode().host;
  const boxes = "[style*=overflow-x], .katex-display, marimo-table, .cm-scroller";
  const scrolls = e => { for (; e; e = above(e)) if (e.matches(boxes)) return true; };
  return inside(document.body)
    .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(above(e)))
    .map(e => e.tagName + "." + e.className);
}"""
SOURCES = "() => [...document.querySelectorAll('img[alt]')].map(image => image.src)"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a server of all pages, in a folder with two runs."""
    folder = tmp_path_factory.mktemp("served")
    for slope in (1.0, 2.0):
        execute(toy_study.STUDY, out=folder / "runs", config=toy_study.Config(slope=slope))
    command = [sys.executable, "-m", "joma", "lab", "--no-browser", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder)
    try:
        document = ""
        while not document.endswith("}\n"):
            document += server.stdout.readline()
        yield json.loads(document)["url"]
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(address, browser):
    """A function that opens a page, and checks in the end that nothing left loopback and nothing went wrong."""
    contexts, hosts, problems = [], set(), []

    def open_page(name: str, viewport: dict[str, int] = DESK) -> Page:
        context = browser.new_context(viewport=viewport)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]) if "//" in request.url else None)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{address}&file={name.replace('-', '_')}.py")
        page.wait_for_selector("img[alt]", timeout=WAIT)
        page.wait_for_timeout(1000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert hosts == {address.removeprefix("http://").partition("?")[0].rstrip("/")}


@pytest.mark.parametrize("name", PAGES)
def test_every_slider_changes_a_picture_by_the_keyboard_alone(opened, name):
    page = opened(name)
    sliders = page.get_by_role("slider")
    assert sliders.count() >= (0 if name == "runs" else 1)
    for index in range(sliders.count()):
        before = page.evaluate(SOURCES)
        slider = sliders.nth(index)
        slider.focus()
        end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
        slider.press("ArrowLeft" if end else "ArrowRight")
        changed = f"before => ({SOURCES})().some((source, index) => source !== before[index])"
        page.wait_for_function(changed, arg=before, timeout=WAIT)


@pytest.mark.parametrize("name", PAGES)
def test_at_the_width_of_a_phone_nothing_overflows(opened, name):
    assert opened(name, PHONE).evaluate(OVERFLOWING) == []


@pytest.mark.parametrize("name", PAGES)
def test_formulas_are_rendered_and_the_code_can_be_unfolded_and_copied(opened, name):
    page = opened(name)
    assert page.locator(".katex").count() > 0
    assert page.locator(".katex-error").count() == 0
    page.get_by_role("button", name="Copy as Python").press("Enter")
    page.wait_for_selector(".cm-content")
    assert "import" in page.locator(".cm-content").first.inner_text()


def test_the_tree_is_trained_on_when_the_button_is_pressed(opened):
    page = opened("latent-tree")
    assert page.get_by_text("Nothing is trained yet").is_visible()
    page.get_by_role("button", name="Train on this tree").press("Enter")
    page.wait_for_selector("img[alt^='Gain of mutual attention']", timeout=WAIT)
    page.get_by_role("slider").first.press("ArrowRight")
    page.wait_for_selector("text=train again to follow them", timeout=WAIT)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("token-order", "NaN 1", "must be 3 to 6 letters from A to Z"),
        ("your-model", "/no/such/folder", "which is not a folder"),
        ("runs", "no/such/folder", "must be one with runs or sweeps below it"),
    ],
)
def test_bad_input_is_a_sentence_and_the_page_goes_on(opened, name, text, sentence):
    page = opened(name)
    box = page.get_by_role("textbox").first
    usual = box.input_value()
    box.fill(text)
    box.press("Enter")
    page.wait_for_selector(f"text={sentence}", timeout=WAIT)
    box.fill(usual)
    box.press("Enter")
    page.wait_for_selector("img[alt]", timeout=WAIT)
