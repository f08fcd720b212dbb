"""The page of a probe: every figure, table and line of the audit is on it, and nothing comes from outside."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from joma.files import DamagedFile
from joma.report.probe import save
from joma.report.probe_page import find_probes, quantities, read_probe, section
from joma.watch.series import Fault
from probed import FAULT, series_data, single_data

HOSTILE = '<script>alert("x")</script> & $\\alpha'
VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """The elements of a page: rows of tables, headings, images, and whatever names a resource."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.headings, self.images, self.resources, self.tags = [], [], [], [], []
        self.open = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.resources += [attributes[name] for name in ("src", "href", "data", "action") if name in attributes]
        if tag == "img":
            self.images.append(attributes)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data
        elif {"h1", "h2", "h3", "h4"} & {*self.open}:
            self.headings[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe")
    save(series_data().assign_attrs(tokens="8 sequences of 256 tokens"), [FAULT], path)
    return path


@pytest.fixture
def blank(monkeypatch):
    """Draw empty figures, for tests of anything else."""
    monkeypatch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(1, 1)))


def test_the_page_states_the_result_then_the_audit_then_each_measure(folder):
    text = (folder / "probe.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings == [
        "Attention entropy falls and recovers in 2 of 2 layers",
        "Entropy is 3.05 nats at the start, 1.05 at step 8, and 1.55 at the end",
        "The first token draws 40 % of attention at the end, and 10 % at the start",
        "The stable rank falls in 2 of 2 matrices",
        "Hidden vectors become more alike: cosine 0.41 to 0.71",
        "Where these numbers come from",
    ]
    assert "someone/model · 4 checkpoints, step 0 to 100 · 8 sequences of 256 tokens" in text
    assert text.index("belong after step100") < text.index("<figure>")
    assert ["misplaced", "the weights of step9 belong after step100; download it again.", "1"] in page.rows
    assert len(page.images) == 4
    for image, name in zip(page.images, ("1-entropy", "2-sink_mass", "3-stable_rank", "4-cosines"), strict=True):
        kind, content = image["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(content) == (folder / "figures" / f"{name}.svg").read_bytes()
        caption = (folder / "figures" / f"{name}.txt").read_text().strip()
        assert image["alt"].endswith(caption.replace("&", "&amp;"))


def test_tables_have_the_spread_over_heads(folder):
    rows = Page((folder / "probe.html").read_text(encoding="utf-8")).rows
    assert ["0", "h.0.attn", "2", "3 ± 0.3542.75 to 3.25", "1at 8", "3at 0", "1.5 ± 0.3541.25 to 1.75", "0.02"] in rows
    sinks = ["0.1 ± 0.07070.05 to 0.15", "0.1at 0", "0.4at 100", "0.4 ± 0.07070.35 to 0.45", "± 0.02"]
    assert ["0", "h.0.attn", "2", *sinks] in rows
    assert ["1", "h.1.mlp", "11", "5at 8", "11at 0", "6"] in rows
    assert ["1", "hidden vectors, depth 0", "0.4", "0.4at 0", "0.7at 100", "0.7"] in rows


def test_the_origin_lists_attributes_checkpoints_and_files(folder):
    rows = Page((folder / "probe.html").read_text(encoding="utf-8")).rows
    assert ["source", "someone/model"] in rows
    assert ["100", "step100"] in rows
    (trajectory,) = [row for row in rows if row[0] == "trajectory.nc"]
    assert trajectory[1] == f"{(folder / 'trajectory.nc').stat().st_size:,}"
    assert len(trajectory[2]) == 64


def test_nothing_on_the_page_comes_from_outside(folder):
    text = (folder / "probe.html").read_text(encoding="utf-8")
    page = Page(text)
    assert all(resource.startswith("data:") for resource in page.resources)
    assert not {"script", "link", "iframe", "object"} & {*page.tags}
    for outside in ("http://", "https://", "@import", "url("):
        assert outside not in text


@pytest.mark.usefixtures("blank")
def test_hostile_names_are_text(tmp_path):
    data = series_data().assign_attrs(source=HOSTILE, text=HOSTILE)
    data = data.assign_coords(
        layer=[HOSTILE, "h.1"], weight=["$x^$", HOSTILE], checkpoint=("step", [HOSTILE, "b", "c", "d"])
    )
    fault = Fault("identical", (HOSTILE, "other"), f"{HOSTILE} is a copy", f"remove {HOSTILE}")
    text = save(data, [fault], tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert ["identical", f"{HOSTILE} is a copy; remove {HOSTILE}.{HOSTILE}, other", "0"] in page.rows
    assert sum(HOSTILE in cell for row in page.rows for cell in row) >= 7


@pytest.mark.usefixtures("blank")
def test_one_model_without_faults(tmp_path):
    text = save(single_data(), [], tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings[0] == "Attention entropy is 1.05 nats on average, least in layer 0, head 0 (0.75)"
    assert "Audit: no fault was found in the series" in text
    assert "one model, step8" in text
    assert ["0", "h.0.attn", "2", "1 ± 0.3540.75 to 1.25"] in page.rows
    assert ["0", "token embeddings", "0.25"] in page.rows


@pytest.mark.usefixtures("blank")
@pytest.mark.parametrize(
    ("variable", "headings"),
    [
        ("stable_rank", ["The stable rank falls in 2 of 2 matrices"] * 2),
        ("embedding_cosine", ["Token embeddings become more alike: cosine 0.2 to 0.3"] * 2),
    ],
)
def test_what_was_not_measured_is_not_shown(variable, headings, tmp_path):
    text = save(series_data()[[variable]], [], tmp_path).read_text(encoding="utf-8")
    assert Page(text).headings[:-1] == headings


def test_a_layer_that_was_never_measured_has_dashes():
    data = series_data()
    data.entropy[:, 1] = np.nan
    table = section(data, [], {})["parts"][0]["table"]
    assert table["rows"][1] == ["1", "h.1.attn", "0", "–", "–", "–", "–", "0.03"]


def test_other_measures_are_labelled_by_their_attributes():
    data = series_data()
    data["distance"] = data.entropy.assign_attrs(
        units="tokens", long_name="attended distance", description="the mean distance to keys"
    )
    data["top_mass"] = data.sink_mass.assign_attrs(units="1", long_name="weight on the top keys")
    assert list(quantities(data)) == ["entropy", "sink_mass", "distance", "top_mass"]
    assert quantities(data)["distance"].axis == "attended distance / tokens"
    assert quantities(data)["top_mass"].axis == "weight on the top keys"
    captions = [part["figure"]["caption"] for part in section(data, [], {})["parts"]]
    assert captions[2].startswith("Attended distance, the mean distance to keys. (a) over the training")


@pytest.mark.usefixtures("blank")
def test_stored_probes_are_found_and_read_back(folder, tmp_path):
    assert find_probes(folder.parent)  # other tests may have stored theirs beside it
    for place in (tmp_path / "probe" / "a", tmp_path / "probe" / "a" / "of-123"):
        save(single_data(), [FAULT], place)
    (tmp_path / "empty").mkdir()
    folders = find_probes(tmp_path)
    assert folders == [tmp_path / "probe" / "a", tmp_path / "probe" / "a" / "of-123"]
    assert find_probes(tmp_path, excluded=folders[:1]) == folders[1:]
    content = read_probe(folders[0])
    assert content["title"] == "Attention entropy is 1.05 nats on average, least in layer 0, head 0 (0.75)"
    assert [part["figure"]["image"][:19] for part in content["parts"]] == ["data:image/svg+xml;"] * 4
    assert content["faults"][0]["left_out"] == 1


@pytest.mark.parametrize(
    "name", ["trajectory.nc", "audit.json", "probe.html", "figures/1-entropy.svg", "manifest.json"]
)
@pytest.mark.usefixtures("blank")
def test_damaged_results_are_found_and_refused_by_name(name, tmp_path):
    save(single_data(), [FAULT], tmp_path / "a")
    file = tmp_path / "a" / name
    file.write_bytes(file.read_bytes()[:-2])
    assert find_probes(tmp_path) == [tmp_path / "a"]
    with pytest.raises(DamagedFile, match=f"{name} is .*; run `joma probe` again"):
        read_probe(tmp_path / "a")


@pytest.mark.usefixtures("blank")
def test_an_interrupted_probe_is_refused(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("joma.report.probe.write_trajectory", full)
    with pytest.raises(OSError, match="No space"):
        save(single_data(), [], tmp_path)
    with pytest.raises(DamagedFile, match="was being probed when its writer was stopped"):
        read_probe(tmp_path)
