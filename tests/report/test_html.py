"""What the report shows of stored runs: sections, tables, figures; and that it needs no other file."""

from __future__ import annotations

import base64
import html
import os
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from joma.drawing import canvas
from joma.drawing import save as save_figure
from joma.files import StorageError, write_text
from joma.report.html import _size, compact, write_report
from joma.report.probe import save as save_probe
from joma.runs import HIGHLIGHT, TRAJECTORY, Description, Run, StoredClaims, finish, reopen
from joma.verdicts import KINDS
from probed import FAULT, series_data

STUDIES = {
    "winner": {"title": "A winner", "source": "Theorem 2", "about": "Which token wins & <why>."},
    "ladder": {"title": "A ladder", "source": "Theorem 5", "about": "Steps."},
}
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><title>{}</title></svg>'


class Page(HTMLParser):
    """The text of an HTML page by element: rows of tables, headings, paragraphs, and attributes that link."""

    def __init__(self, path):
        super().__init__()
        self.rows, self.headings, self.links, self.images, self.stack = [], [], [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if tag == "img":
            self.images.append(attributes)
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("h2", "h3"):
            self.headings.append("")
        self.stack.append(tag)

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data):
        if {"td", "th"} & {*self.stack}:
            self.rows[-1][-1] += data
        elif {"h2", "h3"} & {*self.stack}:
            self.headings[-1] += data


def claim(verdict, statement="It holds.", values=(1.0, 3.0), *, across="every", kind="theorem", reason=""):
    measured = {"mean": np.mean(values), "sd": np.std(values), "min": min(values), "max": max(values)}
    measured |= {"values": list(values), "interval": None}
    return {
        "name": "c", "kind": kind, "statement": statement, "quantity": "nats", "expected": "≥ 1", "low": 1.0,
        "high": None, "measured": measured, "across": across, "verdict": verdict, "reason": reason,
    }  # fmt: skip


def store(out, study="winner", name="abc", *, preset="quick", claims=None, figures=(), age=0, **description):
    """Write a finished run, `age` seconds old."""
    path = out / study / name
    run = Run(out, study, 1, {"slope": 2.5}, [0, 1])
    run.begin(preset)
    trajectory = xr.Dataset({"entropy": (("seed", "step"), np.zeros((2, 5))), "level": 1.0})
    run.save(trajectory, device="cpu", wall_time=12.34)
    run.path.rename(path)
    for stem, caption in figures:
        write_text(path / "figures" / f"{stem}.svg", SVG.format(stem))
        write_text(path / "figures" / f"{stem}.txt", f"{caption}\n")
    shown = [name for name, _ in figures if name != HIGHLIGHT]
    stored = Description(**{**STUDIES.get(study, {}), **description}, figures=shown)
    finish(path, StoredClaims(claims or [claim("holds")], stored, 12.34))
    time = (path / TRAJECTORY).stat().st_mtime - age
    os.utime(path / TRAJECTORY, (time, time))
    return path


def report(out):
    written = write_report(out, list(STUDIES))
    assert written.path == (out / "report.html").resolve()
    return Page(written.path), written.runs


def test_a_folder_without_finished_runs_is_refused(tmp_path):
    (tmp_path / "winner" / "abc").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"no finished run below .*; run `joma run --out"):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_runs_are_in_the_order_of_studies_and_then_oldest_first(tmp_path):
    store(tmp_path, "ladder", "d")
    store(tmp_path, "unknown", "e")
    store(tmp_path, "winner", "new", age=10)
    store(tmp_path, "winner", "old", age=100)
    page, count = report(tmp_path)
    assert count == 4
    assert page.headings[-7:] == [
        "A winner", "Theorems: 1 holds", "A winner", "Theorems: 1 holds", "A ladder", "Theorems: 1 holds", "unknown",
        "Theorems: 1 holds",
    ][-7:]  # fmt: skip
    listed = page.source[page.source.index('<ul class="studies">') :]
    order = [listed.index(f'href="#{anchor}"') for anchor in ("winner-old", "winner-new", "ladder-d", "unknown-e")]
    assert order == sorted(order)
    assert all(f'id="{link[1:]}"' in page.source for link in page.links if link.startswith("#"))


@pytest.mark.parametrize(
    ("statement", "source", "shown"),
    [
        ("One token wins (arXiv 2310.00535).", "JoMA, Theorem 2 (arXiv 2310.00535)", False),
        ("One token wins (arXiv 2310.00535).", "after arXiv 2310.00535 and arXiv 2305.16380", True),
        ("One token wins.", "JoMA, Theorem 2 (arXiv 2310.00535)", True),
        ("One token wins.", "ours", True),
    ],
)
def test_a_paper_is_cited_once_beside_a_statement(tmp_path, statement, source, shown):
    store(tmp_path, statement=statement, source=source)
    page, _ = report(tmp_path)
    assert ("<cite>" in page.source) == shown
    assert page.source.count('<a href="https://arxiv.org/abs/2310.00535">') == (statement + source).count("2310") - (
        not shown
    )


def test_verdicts_are_counted_by_kind(tmp_path):
    verdicts = ("holds", "holds", "does not hold", "not tested")
    store(tmp_path, claims=[claim(verdict) for verdict in verdicts])
    store(
        tmp_path, "ladder", claims=[claim("does not hold"), claim("holds", kind="check"), claim("holds", kind="figure")]
    )
    page, _ = report(tmp_path)
    assert "Theorems: 2 hold, 2 do not, 1 not tested" in page.headings
    assert "Figures and tables: 1 holds" in page.headings
    assert "Checks: 1 holds" in page.headings
    assert "what does not hold (2)" in page.source
    assert "12.3&nbsp;s; theorem: 2 hold, 1 does not, 1 not tested</span>" in page.source
    assert "12.3&nbsp;s; theorem: 1 does not hold; figure: 1 holds; check: 1 holds</span>" in page.source


def test_claims_show_expected_and_measured_values_and_the_verdict(tmp_path):
    claims = [
        claim("holds", "Every seed."),
        claim("does not hold", "The mean.", across="mean"),
        claim("not tested", "One seed.", values=(0.123456,), reason="needs 2 seeds"),
    ]
    store(tmp_path, claims=claims)
    page, _ = report(tmp_path)
    rows = [row for row in page.rows if row[0].startswith(("Every seed.", "The mean.", "One seed."))]
    expected = [
        ["Every seed.nats", "✓ holds", "2 ± 11 to 3 over 2 seeds; judged by every seed", "expected ≥ 1"],
        ["The mean.nats", "✗ does not hold", "2 ± 11 to 3 over 2 seeds; judged by the mean", "expected ≥ 1"],
        ["One seed.nats", "– not testedneeds 2 seeds", "0.1235", "expected ≥ 1"],
    ]
    linked = [[f"{cells[0]} · winner", *cells[1:]] for cells in expected]
    assert rows == linked + expected
    assert page.source.count('<svg class="dots"') == 6


def test_checks_are_folded_away_and_every_other_kind_is_not(tmp_path):
    store(tmp_path, claims=[claim("holds", f"A {kind}.", kind=kind) for kind in KINDS])
    page, _ = report(tmp_path)
    open_part, *folded = page.source.split("<details")
    assert {kind for kind in KINDS if f"A {kind}." in open_part} == {*KINDS} - {"check"}
    assert "A check." in folded[0]


def test_a_record_of_an_earlier_version_is_shown(tmp_path):
    absent = ("kind", "quantity", "low", "high", "reason")
    record = {name: value for name, value in claim("not tested at this preset").items() if name not in absent}
    del record["measured"]["interval"]
    store(tmp_path, claims=[record])
    page, _ = report(tmp_path)
    assert "Checks: 1 not tested" in page.headings
    assert "decided at another preset only" in page.source


def test_the_first_screen_has_the_pictures_and_the_outcome(tmp_path):
    figures = [(HIGHLIGHT, "Attention comes back."), ("1-line", "A line.")]
    store(tmp_path, figures=figures, highlight="Figure 3", outcome="It wins by 3 %.", statement="One token wins.")
    store(tmp_path, "ladder", outcome="It climbs.")
    page, _ = report(tmp_path)
    first = page.source[: page.source.index('id="claims"')]
    assert [image["alt"] for image in page.images] == ["Attention comes back.", "A line."]
    assert '<a href="#winner-abc"><img' in first
    words = " ".join(re.sub("<[^>]*>", " ", first).split(" "))
    assert '<li><a href="#winner-abc">A winner</a>' in first
    assert "Figure 3: It wins by 3\N{NO-BREAK SPACE}%." in words
    assert '<li><a href="#ladder-abc">A ladder</a>' in first
    assert re.search(r"A ladder\s+It climbs\.", words)
    section = page.source[page.source.index('<section class="study" id="winner-abc"') :]
    places = [
        section.index(text)
        for text in ("A winner", "One token wins.", "Which token", "A line.", "It wins by", "<table")
    ]
    assert places == sorted(places)


def test_a_run_whose_small_picture_is_missing_has_none_on_the_first_screen(tmp_path):
    path = store(tmp_path, figures=[(HIGHLIGHT, "Seen.")], highlight="Figure 3", outcome="It wins.")
    (path / "figures" / f"{HIGHLIGHT}.svg").unlink()
    page, _ = report(tmp_path)
    assert page.images == []
    assert '<nav class="highlights"' not in page.source
    assert "Figure 3: It wins." in page.source


def test_a_label_that_the_title_begins_with_is_not_repeated(tmp_path):
    store(tmp_path, highlight="A winner", outcome="It wins.")
    page, _ = report(tmp_path)
    assert page.source.count("It wins.") == 2  # on the first screen and in its section
    assert "A winner: It wins." not in page.source


def test_the_picture_and_the_claims_are_of_the_largest_preset(tmp_path):
    for name, preset, age in (("a", "paper", 100), ("b", "quick", 10)):
        figures = [(HIGHLIGHT, f"At {preset}.")]
        claims = [claim("holds", f"Said at {preset}.")]
        options = {"highlight": "Figure 3", "outcome": f"Out at {preset}."}
        store(tmp_path, "winner", name, preset=preset, age=age, claims=claims, figures=figures, **options)
    page, _ = report(tmp_path)
    assert [image["alt"] for image in page.images] == ["At paper."]
    overview = page.source[: page.source.index('<ul class="studies">')]
    assert "Said at paper." in overview
    assert "Out at paper." in overview
    assert "Said at quick." not in overview
    assert "Out at quick." not in overview
    assert '<a href="#winner-b">winner, preset quick, 2 seeds</a>: theorem: 1 holds' in overview


def test_sources_link_to_arxiv_and_are_escaped(tmp_path):
    store(tmp_path, source="<i> (arXiv 2310.00535) and arXiv:2402.05969")
    page, _ = report(tmp_path)
    assert "&lt;i&gt; (<a" in page.source
    papers = [link for link in page.links if link.startswith("https:")]
    assert papers == ["https://arxiv.org/abs/2310.00535", "https://arxiv.org/abs/2402.05969"]


def test_pictures_have_the_size_that_they_say():
    picture = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" height="150.75pt" width="300pt">'
    assert _size(picture) == {"width": 400, "height": 201}
    assert _size(SVG.encode()) == {}


def test_figures_are_in_the_stored_order_and_a_tenth_comes_last(tmp_path):
    names = [f"{index}-figure" for index in range(1, 11)]
    store(tmp_path, figures=[(name, name) for name in names])
    page, _ = report(tmp_path)
    assert [image["alt"] for image in page.images] == names


def test_figures_are_inside_the_page_with_their_captions(tmp_path):
    store(tmp_path, figures=[("1-line", 'A "line" & <more>.'), ("2-points", "Points.")])
    page, _ = report(tmp_path)
    assert [image["alt"] for image in page.images] == ['A "line" & <more>.', "Points."]
    for image, stem in zip(page.images, ("1-line", "2-points"), strict=True):
        kind, content = image["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(content).decode() == SVG.format(stem)


def test_a_compact_picture_has_the_same_elements_at_the_same_places(tmp_path):
    figure, axes = canvas()
    axes[0, 0].plot([0, 1, 2], [0.1, 1 / 3, 0.2], "o-", label="a - b")
    axes[0, 0].legend(title="Title")
    save_figure(figure, tmp_path / "1-line", caption="A line.")
    picture = (tmp_path / "1-line.svg").read_bytes()
    smaller = compact(picture)
    assert len(smaller) < 0.95 * len(picture)
    before, after = ([*ElementTree.fromstring(content).iter()] for content in (picture, smaller))
    before = [element for element in before if "metadata" not in element.tag and "w3.org/2000/svg" in element.tag]
    assert [element.tag for element in before] == [element.tag for element in after]
    number = r"-?\d+\.?\d*"
    for first, second in zip(before, after, strict=True):
        assert first.attrib.keys() == second.attrib.keys()
        for name, text in first.attrib.items():
            rests = [re.sub(number, "", attribute).split() for attribute in (text, second.attrib[name])]
            assert rests[0] == rests[1]
            values = [
                [float(value) for value in re.findall(number, coordinates)]
                for coordinates in (text, second.attrib[name])
            ]
            assert values[0] == pytest.approx(values[1], abs=0.01)
            assert values[0] == values[1] or name in ("d", "x", "y")


def test_the_page_needs_no_other_file(tmp_path):
    store(tmp_path, figures=[("1-line", "A line.")])
    page, _ = report(tmp_path)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert "<script" not in page.source
    assert "@import" not in page.source
    assert "url(" not in page.source


def test_text_of_studies_and_claims_is_escaped(tmp_path):
    store(tmp_path, claims=[claim("holds", "a < b & <b>bold</b>")])
    page, _ = report(tmp_path)
    assert "Which token wins &amp; &lt;why&gt;." in page.source
    assert "a &lt; b &amp; &lt;b&gt;bold&lt;/b&gt;" in page.source


def test_config_contents_and_provenance_are_listed(tmp_path):
    path = store(tmp_path)
    page, _ = report(tmp_path)
    assert "&#34;slope&#34;: 2.5" in page.source
    assert ["entropy", "seed 2, step 5"] in page.rows
    assert ["level", "scalar"] in page.rows
    assert ["device", "cpu"] in page.rows
    assert f"Stored in {path};" in page.source


def test_a_damaged_run_is_left_out_and_named_on_the_page(tmp_path):
    figures = [("1-line", "A line.")]
    path = store(tmp_path, figures=figures)
    sound = store(tmp_path, "ladder", "sound")
    for name in (TRAJECTORY, "config.json", "claims.json", "figures/1-line.svg", "figures/1-line.txt"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(b"other")
        written = write_report(tmp_path)
        assert written.runs == 1
        assert len(written.left_out) == 1
        assert f"{path / name} is " in written.left_out[0]
        page = Page(written.path)
        assert page.headings[0] == "Runs and probes that are left out"
        assert html.escape(str(path / name)) in page.source
        assert "A line." not in page.source
        (path / name).write_bytes(content)
    assert write_report(tmp_path).left_out == ()
    shutil.rmtree(sound)
    (path / TRAJECTORY).write_bytes(b"other")
    with pytest.raises(StorageError, match="altered"):
        write_report(tmp_path)


def test_what_was_read_before_is_not_read_again_unless_that_is_wanted(tmp_path):
    path, seen = store(tmp_path), {}
    assert write_report(tmp_path, seen=seen).runs == 1
    store(tmp_path, "ladder")
    (path / TRAJECTORY).write_bytes(b"other")
    assert (write_report(tmp_path, seen=seen).runs, len(seen)) == (2, 2)
    shutil.rmtree(tmp_path / "ladder")
    assert write_report(tmp_path, seen=seen).runs == 1  # what is gone is not shown
    store(tmp_path, "ladder")
    assert len(write_report(tmp_path).left_out) == 1


def test_a_figure_that_the_manifest_does_not_list_is_not_shown(tmp_path):
    path = store(tmp_path, figures=[("1-line", "A line.")])
    write_text(tmp_path / "winner" / "secret.svg", SVG.format("secret"))
    write_text(tmp_path / "winner" / "secret.txt", "Secret.")
    reopen(path)
    finish(path, StoredClaims([claim("holds")], Description(figures=["../../secret", "1-line"]), 1.0))
    page, _ = report(tmp_path)
    assert [image["alt"] for image in page.images] == ["A line."]
    assert "Not drawn: ../../secret." in page.source


@pytest.mark.parametrize("suffix", [".svg", ".txt"])
def test_a_missing_figure_is_named_with_the_command_that_draws_it(tmp_path, suffix):
    path = store(tmp_path, figures=[("1-line", "A line."), ("2-points", "Points.")])
    (path / "figures" / f"1-line{suffix}").unlink()
    page, _ = report(tmp_path)
    assert [image["alt"] for image in page.images] == ["Points."]
    assert f"Not drawn: 1-line. <code>joma judge {path}</code> draws them." in page.source


def test_a_missing_picture_of_the_first_screen_is_named_too(tmp_path):
    path = store(tmp_path, figures=[(HIGHLIGHT, "Seen."), ("1-line", "A line.")], highlight="Figure 3")
    assert "Not drawn" not in report(tmp_path)[0].source
    (path / "figures" / f"{HIGHLIGHT}.svg").unlink()
    assert f"Not drawn: {HIGHLIGHT}. <code>joma judge {path}</code> draws them." in report(tmp_path)[0].source


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """Two probes below the folder of the runs, with empty figures."""
    monkeypatch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(1, 1)))
    for place in ("probe/model-a", "probe/model-b/of-123"):
        data = series_data().assign_attrs(source=f"someone/<{place}>")
        save_probe(data, [FAULT], tmp_path / place)
    return [tmp_path / "probe" / "model-a", tmp_path / "probe" / "model-b" / "of-123"]


def test_probes_come_after_the_studies(probed, tmp_path):
    store(tmp_path, figures=[("1-line", "A line.")])
    written = write_report(tmp_path)
    assert (written.runs, list(written.probes), written.left_out) == (1, probed, ())
    page = Page(written.path)
    start = page.headings.index("Probed models")
    assert page.headings[start - 2 : start] == ["A winner", "Theorems: 1 holds"]
    assert page.headings[start + 1] == "Attention entropy falls and recovers in 2 of 2 layers"
    assert page.headings.count("Attention entropy falls and recovers in 2 of 2 layers") == 2
    assert len(page.images) == 1 + 2 * 4
    assert page.rows.count(["misplaced", f"{FAULT.message}; download it again.", "1"]) == 2
    assert "someone/&lt;probe/model-a&gt; · 4 checkpoints, step 0 to 100" in page.source
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert all(f'id="{link[1:]}"' in page.source for link in page.links if link.startswith("#"))


def test_a_report_of_probes_alone(probed, tmp_path):
    written = write_report(tmp_path)
    assert (written.runs, len(written.probes)) == (0, len(probed))
    page = Page(written.path)
    assert page.headings[0] == "Probed models"
    assert "This report tests" not in page.source


@pytest.mark.parametrize("name", [TRAJECTORY, "audit.json", "probe.html", "manifest.json"])
def test_a_damaged_probe_is_left_out_and_named_on_the_page(name, probed, tmp_path):
    file = probed[0] / name
    file.write_bytes(file.read_bytes()[:-3])
    written = write_report(tmp_path)
    assert list(written.probes) == probed[1:]
    (problem,) = written.left_out
    assert str(file) in problem
    page = Page(written.path)
    assert page.headings[0] == "Runs and probes that are left out"
    assert html.escape(str(file)) in page.source
    shutil.rmtree(probed[1])
    with pytest.raises(StorageError, match="no intact run below"):
        write_report(tmp_path)
