"""The documentation site: it builds without a warning, its links lead somewhere, and it needs no other host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

from joma.studies import STUDIES
from test_surface import reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
IN_A_BROWSER = pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(BROWSERS)}")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 800}
ASSETS = {"script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src", "link": "href"}
OUTSIDE = re.compile(r"^(https?:)?//")


class Page(HTMLParser):
    """A page of the site: its anchors, links, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in ASSETS and ASSETS[tag] in attributes and attributes.get("rel") not in ("canonical", "next", "prev"):
            self.assets.append(attributes[ASSETS[tag]])


class Site:
    """The built site, page by page."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def pages(self) -> dict[Path, Page]:
        return {path: Page(path) for path in sorted(self.folder.rglob("*.html"))}

    def broken(self, path: Path, link: str) -> bool:
        """Return whether a link within the site leads nowhere."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return False
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            return True
        return (
            bool(parts.fragment) and target in self.pages and unquote(parts.fragment) not in self.pages[target].anchors
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does, once for all processes of the tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (folder / "printed").exists():
            (command,) = re.findall(r"\$\(BIN\)/python (-m sphinx .*)", (ROOT / "Makefile").read_text())
            words = command.replace("build/docs", str(folder)).replace("build/doctrees", str(shared / "trees")).split()
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            (folder / "printed").write_text(done.stdout + done.stderr)
    return Site(folder)


def test_it_builds_without_a_warning(site):
    assert (site.folder / "printed").read_text() == ""


def test_every_link_within_the_site_leads_somewhere(site):
    links = [(path, link) for path, page in site.pages.items() for link in page.links]
    assert len(links) > 1000
    assert not [(path.name, link) for path, link in links if site.broken(path, link)]


def test_a_broken_link_is_noticed(site):
    index = site.folder / "index.html"
    assert site.broken(index, "no-such-page.html")
    assert site.broken(index, "notation.html#no-such-section")
    assert not site.broken(index, "notation.html")


def test_nothing_is_loaded_from_another_host(site):
    assets = [(path.name, asset) for path, page in site.pages.items() for asset in page.assets]
    assert assets
    assert not [(name, asset) for name, asset in assets if OUTSIDE.match(asset)]
    sheets = "\n".join(path.read_text(encoding="utf-8") for path in site.folder.rglob("*.css"))
    assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", sheets)


def test_every_public_name_has_its_place_in_the_reference(site):
    for module, values in reference.entries():
        anchors = site.pages[site.folder / "api" / f"{module}.html"].anchors
        assert {f"{module}.{name}" for name, _ in values} <= anchors


def test_every_study_has_a_page_with_its_claims(site):
    for name in STUDIES:
        text = (site.folder / "findings" / f"{name}.html").read_text(encoding="utf-8")
        assert f"joma run {name}" in text or "No run of" in text


@IN_A_BROWSER
def test_in_a_browser(site):
    """Every page fits a phone's screen and loads from files alone, without an error; the search finds a word."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    problems: list[str] = []
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport=PHONE)
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        page.on("request", lambda request: OUTSIDE.match(request.url) and problems.append(request.url))
        for path in site.pages:
            page.goto(path.as_uri())
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                problems.append(f"{path.relative_to(site.folder)} is {width} pixels wide")
        page.set_viewport_size(DESK)
        page.goto((site.folder / "search.html").as_uri() + "?q=salience")
        page.wait_for_selector("#search-results li a")
        browser.close()
    assert not problems
