"""Answers of the interactive pages: time from the move of a slider in a browser to the changed picture on the page."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import Row
from joma.lab import PAGES

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOVES, TARGET = 9, 0.2
RUNS = Path(__file__).parents[1] / "docs" / "runs"

# Note when a key is pressed; note when a picture of the page has changed and can be shown.
CLOCK = """() => {
  window.pressed = null; window.answers = [];
  document.addEventListener("keydown", () => { window.pressed = performance.now(); }, true);
  const sources = new Map();
  const look = () => document.querySelectorAll("img[alt]").forEach((picture, index) => {
    const before = sources.get(index);
    sources.set(index, picture.src);
    if (before === undefined || before === picture.src || window.pressed === null) return;
    const pressed = window.pressed;
    picture.decode().then(() => window.answers.push(performance.now() - pressed));
  });
  look();
  new MutationObserver(look).observe(document.body,
    {subtree: true, childList: true, attributes: true, attributeFilter: ["src"]});
}"""


@contextmanager
def served() -> Iterator[str]:
    """Serve the pages while the block runs; yield their address."""
    command = [sys.executable, "-m", "joma", "lab", "--no-browser", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        document = ""
        while not document.endswith("}\n"):
            document += server.stdout.readline()
        yield json.loads(document)["url"]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def answer_times(page: Any, slider: Any) -> list[float]:
    """Return the seconds after which the picture had changed, for several moves of one slider by the keyboard."""
    slider.focus()
    at_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    keys, times = ("ArrowLeft", "ArrowRight") if at_end else ("ArrowRight", "ArrowLeft"), []
    for move in range(MOVES):
        page.evaluate("window.answers = []")
        slider.press(keys[move % 2])
        page.wait_for_function("window.answers.length > 0", timeout=20_000)
        times.append(page.evaluate("window.answers[0]") / 1000)
        page.wait_for_timeout(100)
    return times


def rows() -> Iterator[Row]:
    """Yield for each page the slowest slider's median time from its move to the changed picture."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        yield "pages of the lab", f"≤ {TARGET} s", "no browser here", True
        return
    from playwright.sync_api import sync_playwright

    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name in PAGES:
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(f"{url}&file={name.replace('-', '_')}.py")
            if name == "runs":
                page.get_by_role("textbox").first.fill(str(RUNS))
                page.get_by_role("textbox").first.press("Enter")
            page.wait_for_selector("img[alt]", timeout=120_000)
            page.wait_for_timeout(1000)
            page.evaluate(CLOCK)
            times = [median(answer_times(page, slider)) for slider in page.get_by_role("slider").all()]
            slowest = max(times)
            what = f"{name}: slowest of {len(times)} sliders, from its move to the new picture"
            yield what, f"≤ {TARGET} s", f"{slowest:.3f} s", slowest <= TARGET
            page.close()
        browser.close()
