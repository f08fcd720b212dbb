"""Splits against their definition, chunks against the rules of the tokeniser, and sources that cannot be read."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from basic_english import folder_of, reference, scratch, texts, tokens
from joma.arguments import InputError
from joma.data import sources, text
from joma.data.sources import SPLITS, DamagedDownload, Piece, chunks, find
from joma.data.text import corpus, words
from joma.manifest import MANIFEST
from joma.progress import SILENT


@given(content=texts, size=st.integers(1, 40))
@example(content="a <br />b", size=5)
@example(content='a <br" />b', size=6)
def test_the_borders_of_chunks_change_nothing(content, size):
    raw = content.removeprefix("\ufeff").encode()
    parts = list(chunks([Piece(raw, 0, len(raw))], size=size))
    assert b"".join(part.raw for part in parts) == raw
    assert "".join(part.text for part in parts) == raw.decode()
    assert [token for part in parts for token in words(part.text)] == reference(content)


@given(content=st.lists(st.text("abcr\" '.", max_size=30)).map("\n".join), size=st.integers(40, 80))
def test_chunks_are_bounded(content, size):
    raw = content.encode()
    assert max((len(part.raw) for part in chunks([Piece(raw, 0, len(raw))], size=size)), default=0) <= size + 31


@settings(max_examples=40)
@given(
    contents=st.lists(
        st.lists(st.sampled_from(["one", "two three", "", "ü", "\n", "\r", "\r\n"])), min_size=1, max_size=4
    ),
    ends=st.data(),
)
@example(contents=[["a", "b\r", "\nc", "d", "e", "f"]], ends=None)
def test_one_text_is_cut_by_lines(contents, ends):
    end = st.sampled_from(["", "\n", "\r", "\r\n"])
    draw = (lambda _: "\r") if ends is None else ends.draw
    raws = [(draw(end).join(lines) + draw(end)).encode() for lines in contents]
    lines = [line for raw in raws for line in raw.splitlines(keepends=True)]
    assume(len(lines) >= 5)
    with scratch() as folder, pytest.MonkeyPatch().context() as patch:
        patch.setattr(sources, "CHUNK", 5)
        for number, raw in enumerate(raws):
            (folder / f"{number}.txt").write_bytes(raw)
        source = find(folder, cache=folder, progress=SILENT)
        read = {split: [chunk.raw for chunk in chunks(source.pieces[split])] for split in SPLITS}
    bounds = [0, math.ceil(len(lines) * 8 / 10), math.ceil(len(lines) * 9 / 10), len(lines)]
    for split, first, last in zip(SPLITS, bounds, bounds[1:], strict=False):
        assert b"".join(read[split]) == b"".join(lines[first:last])
    assert source.size == sum(map(len, raws))


@settings(max_examples=60)
@given(
    contents=st.lists(
        st.lists(st.sampled_from(["one", "ü", "漢字", "<br />", " ", "  ", "\t", "r ", "ab"])).map(
            lambda parts: "".join(parts) + "\t"  # so that white space is left wherever a cut may fall
        ),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
@example(contents=["x" * 30 + "<br />ab\t"])
@example(contents=["one two three four five six seven eight nine ten\t"])
def test_a_text_without_lines_is_cut_by_bytes_between_tokens(contents):
    raws = [content.encode() for content in contents]
    sizes = [len(raw) for raw in raws]
    with scratch() as folder:
        for number, raw in enumerate(raws):
            (folder / f"{number}.txt").write_bytes(raw)
        source = find(folder, cache=folder, progress=SILENT)
        read = {split: b"".join(chunk.raw for chunk in chunks(source.pieces[split])) for split in SPLITS}
        parts = {split: [chunk.text for chunk in chunks(source.pieces[split])] for split in SPLITS}
    assert b"".join(read.values()) == b"".join(raws)  # every byte once
    assert len(read["train"]) >= 0.8 * sum(sizes)
    assert len(read["train"] + read["valid"]) >= 0.9 * sum(sizes)
    read_tokens = [token for split in SPLITS for part in parts[split] for token in words(part)]
    assert read_tokens == [token for content in contents for token in words(content)]


@pytest.mark.parametrize("tokeniser", text.TOKENISERS)
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", " ", ""])
def test_every_text_has_a_validation_split(tmp_path, tokeniser, end):
    (tmp_path / "a.txt").write_bytes(end.join(f"w{number:03d}" for number in range(200)).encode())
    drawn = corpus(tmp_path / "a.txt", tokeniser=tokeniser)
    counts = [len(getattr(drawn, split)) for split in SPLITS]
    assert min(counts) > 0
    if end or tokeniser == "bytes":
        np.testing.assert_allclose(np.array(counts) / sum(counts), [0.8, 0.1, 0.1], atol=0.01)


@pytest.mark.parametrize("lines", [1, 20])
def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path, lines):
    content = "one two three four five six seven eight nine ten\n" * lines
    for name, mark in (("plain", ""), ("marked", "\ufeff")):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, all=mark + content)
        (tmp_path / f"{name}-split").mkdir()
        folder_of(tmp_path / f"{name}-split", train=mark + content, valid=mark + "one")
    for suffix in ("", "-split"):
        plain, marked = (corpus(tmp_path / f"{name}{suffix}") for name in ("plain", "marked"))
        assert marked.types == plain.types
        joined = [np.concatenate([text.train, text.valid, text.test]).tolist() for text in (plain, marked)]
        assert joined[0] == joined[1]


@pytest.mark.parametrize("bad", [None, 5, True, 0.5, b"python-reference", ["a.txt"]])
def test_a_source_that_is_no_name_or_path_is_refused(bad):
    with pytest.raises(InputError, match="`corpus` must be 'python-reference', a file"):
        corpus(bad)


def test_a_file_is_a_folder_of_one(tmp_path):
    content = "".join(f"line {number}\n" for number in range(25))
    (tmp_path / "lines.txt").write_text(content)
    drawn = corpus(tmp_path / "lines.txt")
    assert [len(getattr(drawn, split)) for split in SPLITS] == [40, 6, 4]
    assert tokens(drawn.train[:4], drawn.types) == ["line", "0", "line", "1"]
    assert drawn.name == "lines.txt"
    assert drawn.digest == corpus(tmp_path).digest


@pytest.mark.parametrize("names", ["wiki.{}.tokens", "wiki.{}.raw", "{}.txt", "some.{}.txt"])
def test_the_names_of_splits(tmp_path, names):
    for split in SPLITS:
        (tmp_path / names.format(split)).write_text(f"{split} a")
    (tmp_path / "README.txt").write_text("not of the corpus")
    drawn = corpus(tmp_path)
    assert drawn.types == ("<unk>", "a", "train")
    assert [getattr(drawn, split).tolist() for split in SPLITS] == [[2, 1], [0, 1], [0, 1]]


def test_no_paragraph_of_the_embedded_corpus_occurs_twice():
    from pydoc_data.topics import topics

    drawn = corpus()
    paragraphs = {part.strip() for topic in topics.values() for part in re.split(r"\n\s*\n", topic)}
    expected = Counter(token for paragraph in paragraphs for token in reference(paragraph))
    unknown = expected.total() - sum(expected[token] for token in drawn.types)
    counts = np.bincount(np.concatenate([drawn.train, drawn.valid]), minlength=len(drawn.types))
    assert counts.tolist() == [unknown, *(expected[token] for token in drawn.types[1:])]
    assert 0.08 < len(drawn.valid) / expected.total() < 0.12
    assert len(drawn.test) == 0
    assert drawn.name == "python-reference"


def test_the_last_lines_of_every_topic_of_the_embedded_corpus_are_for_validation(tmp_path, monkeypatch):
    topics = {"b": "".join(f"b{line}\n" for line in range(25)), "a": "same\n\na0\n", "c": "same\n\nc0\n\nc0"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", SimpleNamespace(topics=topics))
    drawn = corpus(cache=tmp_path)
    assert tokens(drawn.train, drawn.types) == ["same", "a0", *(f"b{line}" for line in range(23)), "c0"]
    assert drawn.valid.tolist() == [0, 0]


BAD = {
    "binary": ({"train": b"\x7fELF\2\1\0\0", "valid": "a"}, r"train\.txt with a NUL at byte 6.*text file"),
    "late binary": ({"train": b"a b\n" * 9 + b"\0", "valid": "a"}, r"NUL at byte 36"),
    "UTF-8": ({"train": "a", "valid": b"caf\xe9 au lait"}, r"valid\.txt with byte 0xe9 at 3.*iconv"),
    "cut UTF-8": ({"train": "a b ü".encode()[:-1], "valid": "a"}, r"byte 0xc3 at 4 \(unexpected end of data\)"),
    "empty": ({"train": "", "valid": "a"}, "with tokens to train on.*give a longer text"),
    "blank": ({"train": ' \n;\n"\n', "valid": "a"}, "with tokens to train on.*give a longer text"),
    "no valid": ({"train": "a", "test": "a"}, "one train, one valid and at most one test.*train.txt, test.txt"),
    "two": ({"train": "a", "wiki.train": "a", "valid": "a"}, r"train\.txt, wiki\.train\.txt, valid\.txt"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_folders(tmp_path, monkeypatch, bad):
    content, message = BAD[bad]
    monkeypatch.setattr(text, "chunks", partial(chunks, size=4))
    with pytest.raises(InputError, match=message) as caught:
        corpus(folder_of(tmp_path, **content))
    assert "\n" not in str(caught.value)


def test_a_folder_without_text(tmp_path):
    with pytest.raises(InputError, match=r"without a \.txt file; add one"):
        corpus(tmp_path)


@pytest.mark.parametrize("path", ["nowhere/text.txt", "", "python-referense", "/dev/null", "a\0b"])
def test_missing_paths(path):
    with pytest.raises(InputError, match=r"'python-reference', a file or folder.*does not exist; check the path"):
        corpus(path)


def test_words_that_are_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(sources, "MAX_WORD", 100)
    with pytest.raises(InputError, match="no white space after byte 2"):
        list(chunks([Piece(b"a " + b"x" * 200, 0, 202)], size=10))


def test_a_file_that_shrinks_is_noticed():
    with pytest.raises(InputError, match="left unchanged while it is read"):
        list(chunks([Piece(b"a b", 0, 5)]))


def test_unreadable_files(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, train="a", valid="a")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"train\.txt \(Permission denied\); check the path and its permissions"):
        corpus(folder)


class Stream(list):
    """Rows of a split, with what the hub announces."""

    info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=2)})


@pytest.fixture
def hub(monkeypatch):
    """Replace the module `datasets`: `load_dataset` returns or raises `hub.answer` and lists its `hub.calls`."""
    module, calls = ModuleType("datasets"), []

    def load_dataset(name, config, *, streaming):
        calls.append((name, config, streaming))
        if isinstance(module.answer, Exception):
            raise module.answer
        return module.answer

    module.load_dataset, module.calls = load_dataset, calls
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def rows(*lines):
    return Stream({"text": line} for line in lines)


def test_a_dataset_is_downloaded_once(hub):
    hub.answer = {"train": rows(" = A = \n", "", "b c\n"), "validation": rows("b"), "test": rows("c")}
    drawn = corpus("org/wiki:raw-v1")
    assert tokens(drawn.train, drawn.types) == ["=", "a", "=", "b", "c"]
    assert tokens(drawn.valid, drawn.types) == ["b"]
    assert drawn.name == "org/wiki:raw-v1"
    hub.answer = ConnectionError("away")
    assert corpus("org/wiki:raw-v1").digest == drawn.digest
    assert hub.calls == [("org/wiki", "raw-v1", True)]


def damage(file, kind):
    """Remove a file, cut it short, or flip a bit in the middle of it."""
    content = file.read_bytes()
    file.unlink()
    if kind != "missing":
        middle = len(content) // 2
        file.write_bytes(content[:middle] if kind == "cut" else content[:middle] + b"#" + content[middle + 1 :])


@pytest.mark.parametrize("kind", ["missing", "cut", "flipped"])
@pytest.mark.parametrize("name", ["train.txt", "valid.txt", MANIFEST])
def test_a_damaged_dataset_is_named_and_downloaded_again(hub, cache, name, kind):
    hub.answer = {"train": rows("a b"), "validation": rows("b")}
    first = corpus("org/wiki:x")
    (file,) = (cache / "datasets").rglob(name)
    damage(file, kind)
    (file.parent / ".joma-train-x.txt").write_text("half")
    with nullcontext() if (name, kind) == (MANIFEST, "missing") else pytest.warns(DamagedDownload, match=name):
        assert corpus("org/wiki:x").digest == first.digest
    assert len(hub.calls) == 2
    assert sorted(path.name for path in file.parent.iterdir()) == [MANIFEST, "train.txt", "valid.txt"]
    assert corpus("org/wiki:x").digest == first.digest
    assert len(hub.calls) == 2


def test_a_damaged_dataset_that_cannot_be_downloaded_again_is_refused(hub, cache):
    hub.answer = {"train": rows("a b"), "validation": rows("b")}
    corpus("org/wiki:x")
    (file,) = (cache / "datasets").rglob("train.txt")
    damage(file, "flipped")
    hub.answer = ConnectionError("away")
    with pytest.warns(DamagedDownload, match="altered"), pytest.raises(InputError, match=r"away.*check the name"):
        corpus("org/wiki:x")


def test_a_dataset_that_version_0_1_0_downloaded_is_used(hub, cache):
    hub.answer = {"train": rows("a b"), "validation": rows("b")}
    first = corpus("org/wiki:x")
    (manifest,) = (cache / "datasets").rglob(MANIFEST)
    manifest.unlink()
    record = manifest.with_name("dataset.json")
    record.write_text(json.dumps({"dataset": "org/wiki:x", "files": ["train.txt", "valid.txt"]}))
    assert corpus("org/wiki:x").digest == first.digest
    assert len(hub.calls) == 1
    damage(manifest.with_name("valid.txt"), "cut")
    with pytest.warns(DamagedDownload, match=r"valid\.txt"):
        corpus("org/wiki:x")
    manifest.unlink()
    for content in ("[]", "{}", '{"files": ["nowhere.txt"]}'):
        record.write_text(content)
        assert corpus("org/wiki:x").digest == first.digest
        manifest.unlink()
    assert len(hub.calls) == 5


def test_wikitext_is_requested_with_its_owner(hub):
    hub.answer = {"train": rows("a b"), "validation": rows("b")}
    corpus("wikitext:wikitext-2-v1")
    corpus("Salesforce/wikitext:wikitext-2-v1")
    assert hub.calls == [("Salesforce/wikitext", "wikitext-2-v1", True)] * 2


def test_a_dataset_with_one_split_is_cut(hub):
    hub.answer = {"train": rows(*(f"w{number}" for number in range(20)))}
    drawn = corpus("wiki:")
    assert [len(getattr(drawn, split)) for split in SPLITS] == [16, 2, 2]
    assert hub.calls == [("wiki", None, True)]


class Breaking(Stream):
    def __iter__(self):
        yield {"text": "a"}
        raise ConnectionError("lost on the way")


UNAVAILABLE = {
    "network": (ConnectionError("Couldn't reach\n'wiki' on the Hub"), r"Couldn't reach 'wiki' on the Hub"),
    "unknown": (FileNotFoundError("Dataset 'wiki' doesn't exist on the Hub"), "doesn't exist"),
    "config": (ValueError("BuilderConfig 'x' not found"), "BuilderConfig 'x' not found"),
    "half": (
        {"train": Breaking(), "validation": rows("a")},
        "lost on the way.*check the name, OWNER/NAME:CONFIG, and the network",
    ),
    "column": ({"train": Stream([{"content": "a", "id": 1}])}, "column `text`, got 'wiki:x' with content, id"),
    "split": ({"dev": rows("a")}, r"split `train`, got 'wiki:x' with \['dev'\]"),
}


@pytest.mark.parametrize("problem", UNAVAILABLE)
def test_datasets_that_cannot_be_downloaded(hub, cache, problem):
    hub.answer, message = UNAVAILABLE[problem]
    with pytest.raises(InputError, match=message) as caught:
        corpus("wiki:x")
    assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"without the `datasets` package; install it with `pip install 'joma\[hf\]'`"):
        corpus("Salesforce/wikitext:wikitext-2-raw-v1")
