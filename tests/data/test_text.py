"""Tokens against torchtext's rules written out one by one, splits against their definition, and the cache's faults."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.data import sources, text
from joma.data.sources import SPLITS, Piece, chunks, find
from joma.data.text import corpus, words
from joma.files import StorageError
from joma.progress import SILENT, Progress, Task

# torchtext.data.utils, version 0.18: each pattern is replaced in this order, line after line.
RULES = (
    (r"\'", " '  "),
    (r"\"", ""),
    (r"\.", " . "),
    (r"<br \/>", " "),
    (r",", " , "),
    (r"\(", " ( "),
    (r"\)", " ) "),
    (r"\!", " ! "),
    (r"\?", " ? "),
    (r"\;", " "),
    (r"\:", " "),
    (r"\s+", " "),
)

marks = st.sampled_from("'\".,()!?;: \n\r\t\v\x1c\x85\u2028\u3000\u200b")
breaks = st.sampled_from(
    ("<br />", "<BR />", "<br", " />", '<b"r />', '<br" />', "<br\n/>", "<br' />", "r ", "R ", "\r\n")
)
cased = st.sampled_from(
    ("The", "the", "İ", "ΑΣ", "Σ'Α", "Σ:", "ß", "K", "Ǆ", "漢字", "\U0001f600", "<unk>", "1 @,@ 000")
)
drawn_characters = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)
texts = st.lists(marks | breaks | cased | drawn_characters).map("".join)


def reference(content):
    """The tokens of a text by the rules, line after line as a file opened in text mode is read."""
    tokens = []
    for line in re.split("\r\n|\r|\n", content.removeprefix("\ufeff")):
        replaced = line.lower()
        for pattern, replacement in RULES:
            replaced = re.sub(pattern, replacement, replaced)
        tokens += replaced.split()
    return tokens


def vocabulary(tokens):
    """`build_vocab_from_iterator` with the special token `<unk>`."""
    ordered = sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    return ("<unk>", *(token for token, _ in ordered if token != "<unk>"))


def folder_of(folder, **splits):
    for split, content in splits.items():
        (folder / f"{split}.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def tokens(stream, types):
    return [types[number] for number in stream]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def scratch():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(texts)
@example('<br" />')
@example("ΑΣ\nΑ")
def test_words_are_torchtexts(content):
    assert words(content) == reference(content)


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


@settings(max_examples=60)
@given(train=texts, valid=texts, size=st.integers(1, 60))
@example(train="a <unk> b <unk> <unk>", valid="<unk> b c", size=60)
def test_a_corpus_is_torchtexts_vocabulary_over_its_tokens(train, valid, size):
    with scratch() as folder, pytest.MonkeyPatch().context() as patch:
        patch.setattr(text, "chunks", partial(chunks, size=size))
        patch.setattr(text, "BLOCK", 3)
        (folder / "text").mkdir()
        train += " word"
        drawn = corpus(folder_of(folder / "text", train=train, valid=valid), cache=folder / "cache")
        expected, types = reference(train), vocabulary(reference(train))
        assert drawn.types == types
        assert tokens(drawn.train, types) == expected
        assert tokens(drawn.valid, types) == [token if token in types else "<unk>" for token in reference(valid)]
        assert len(drawn.test) == 0
        assert drawn.frequencies().tolist() == [Counter(expected)[token] for token in types]


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
        found = find(folder, cache=folder, progress=SILENT)
        read = {split: [part.raw for part in chunks(found.pieces[split])] for split in SPLITS}
    bounds = [0, math.ceil(len(lines) * 8 / 10), math.ceil(len(lines) * 9 / 10), len(lines)]
    for split, first, last in zip(SPLITS, bounds, bounds[1:], strict=False):
        assert b"".join(read[split]) == b"".join(lines[first:last])
    assert found.size == sum(map(len, raws))


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
def test_a_text_without_lines_is_cut_by_bytes_where_no_token_is(contents):
    raws = [content.encode() for content in contents]
    sizes = [len(raw) for raw in raws]
    with scratch() as folder:
        for number, raw in enumerate(raws):
            (folder / f"{number}.txt").write_bytes(raw)
        found = find(folder, cache=folder, progress=SILENT)
        read = {split: b"".join(part.raw for part in chunks(found.pieces[split])) for split in SPLITS}
        parts = {split: [part.text for part in chunks(found.pieces[split])] for split in SPLITS}
    assert b"".join(read.values()) == b"".join(raws)  # nothing lost, nothing twice, no character cut
    assert len(read["train"]) >= 0.8 * sum(sizes)
    assert len(read["train"] + read["valid"]) >= 0.9 * sum(sizes)
    found_tokens = [token for split in SPLITS for part in parts[split] for token in words(part)]
    assert found_tokens == [token for content in contents for token in words(content)]


@pytest.mark.parametrize("tokeniser", text.TOKENISERS)
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", " ", ""])
def test_every_text_has_something_to_validate_on(tmp_path, tokeniser, end):
    (tmp_path / "a.txt").write_bytes(end.join(f"w{number:03d}" for number in range(200)).encode())
    drawn = corpus(tmp_path / "a.txt", tokeniser=tokeniser)
    counts = [len(getattr(drawn, split)) for split in SPLITS]
    assert min(counts) > 0
    if end or tokeniser == "bytes":
        np.testing.assert_allclose(np.array(counts) / sum(counts), [0.8, 0.1, 0.1], atol=0.01)


@pytest.mark.parametrize("lines", [1, 20])
def test_a_byte_order_mark_is_no_text(tmp_path, lines):
    content = "one two three four five six seven eight nine ten\n" * lines
    for name, mark in (("plain", ""), ("marked", "\ufeff")):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, whole=mark + content)
        (tmp_path / f"{name}-split").mkdir()
        folder_of(tmp_path / f"{name}-split", train=mark + content, valid=mark + "one")
    for suffix in ("", "-split"):
        plain, marked = (corpus(tmp_path / f"{name}{suffix}") for name in ("plain", "marked"))
        assert marked.types == plain.types
        joined = [np.concatenate([own.train, own.valid, own.test]).tolist() for own in (plain, marked)]
        assert joined[0] == joined[1]


@pytest.mark.parametrize("bad", [None, 5, True, 0.5, b"python-reference", ["a.txt"]])
def test_what_is_no_name_is_refused(bad):
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


def test_bytes_are_themselves(tmp_path):
    content = "Ünï\tcode \r\n\n漢字"
    drawn = corpus(folder_of(tmp_path, train=content, valid="<br />"), tokeniser="bytes")
    assert bytes(drawn.train.tolist()) == content.encode()
    assert bytes(drawn.valid.tolist()) == b"<br />"
    assert drawn.types == tuple(map(chr, range(256)))
    assert drawn.train.dtype == np.uint16
    assert drawn.frequencies().tolist() == [content.encode().count(byte) for byte in range(256)]


def test_large_vocabularies_take_four_bytes(tmp_path):
    drawn = corpus(folder_of(tmp_path, train=" ".join(f"w{number:05d}" for number in range(2**16)), valid="w65535"))
    assert drawn.train.dtype == np.uint32
    assert drawn.train.tolist() == list(range(1, 2**16 + 1))
    assert drawn.valid.tolist() == [2**16]


def test_the_embedded_corpus_says_nothing_twice():
    from pydoc_data.topics import topics

    drawn = corpus()
    paragraphs = {part.strip() for topic in topics.values() for part in re.split(r"\n\s*\n", topic)}
    said = Counter(token for paragraph in paragraphs for token in reference(paragraph))
    unknown = said.total() - sum(said[token] for token in drawn.types)
    counts = np.bincount(np.concatenate([drawn.train, drawn.valid]), minlength=len(drawn.types))
    assert counts.tolist() == [unknown, *(said[token] for token in drawn.types[1:])]
    assert 0.08 < len(drawn.valid) / said.total() < 0.12
    assert len(drawn.test) == 0
    assert drawn.name == "python-reference"


def test_the_embedded_corpus_validates_on_every_topics_end(tmp_path, monkeypatch):
    topics = {"b": "".join(f"b{line}\n" for line in range(25)), "a": "same\n\na0\n", "c": "same\n\nc0\n\nc0"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", SimpleNamespace(topics=topics))
    drawn = corpus(cache=tmp_path)
    assert tokens(drawn.train, drawn.types) == ["same", "a0", *(f"b{line}" for line in range(23)), "c0"]
    assert drawn.valid.tolist() == [0, 0]


@given(length=st.integers(0, 60), count=st.integers(1, 20), least=st.integers(1, 4))
def test_columns_are_batchify(length, count, least):
    stream = np.arange(length, dtype=np.uint16)
    made = text.Corpus(stream, stream, stream, ("<unk>",), "made", "0")
    if length // count < least:
        with pytest.raises(InputError, match=rf"at least {count * least} tokens.*got {length} in the valid split"):
            made.columns("valid", count, least=least)
        return
    batches = length // count
    expected = torch.arange(length).narrow(0, 0, batches * count).view(count, -1).t()
    columns = made.columns("valid", count, least=least)
    assert torch.equal(columns.t(), expected)
    assert columns.dtype == torch.int64


def test_streams_are_mapped_and_read_only(tmp_path):
    drawn = corpus(folder_of(tmp_path, train="a b a", valid="a"))
    assert isinstance(drawn.train, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        drawn.train[0] = 1
    with pytest.raises(AttributeError):
        drawn.name = "other"


def test_a_text_is_tokenised_once(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, train="a b a", valid="b")
    first = corpus(folder)
    with monkeypatch.context() as patch:
        patch.setattr(text, "_build", lambda *_: pytest.fail("tokenised again"))
        again = corpus(folder)
    assert (again.types, again.digest, again.train.tolist()) == (first.types, first.digest, first.train.tolist())
    assert corpus(folder, tokeniser="bytes").digest != first.digest
    assert corpus(folder_of(tmp_path, valid="a")).digest != first.digest


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def of_version(path, version):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))


DAMAGE = {
    "version": lambda kept: of_version(kept / "corpus.json", text.VERSION + 1),
    "list": lambda kept: (kept / "corpus.json").write_text("[]"),
    "empty": lambda kept: (kept / "corpus.json").write_text("{}"),
    "no json": lambda kept: (kept / "corpus.json").write_text("{"),
    "no about": lambda kept: (kept / "corpus.json").unlink(),
    "short": lambda kept: cut_short(kept / "train.bin"),
    "flipped": lambda kept: flip(kept / "valid.bin"),
    "missing": lambda kept: (kept / "test.bin").unlink(),
    "types": lambda kept: (kept / "types.json").write_text('["<unk>"]'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_again(tmp_path, cache, damage):
    (tmp_path / "text").mkdir()
    folder = folder_of(tmp_path / "text", train="a b a", valid="b c", test="a")
    first = corpus(folder)
    content = {split: getattr(first, split).tolist() for split in SPLITS}
    (kept,) = (cache / "text" / f"v{text.VERSION}").iterdir()
    files = {path.name: path.read_bytes() for path in kept.iterdir()}
    DAMAGE[damage](kept)
    again = corpus(folder)
    assert {split: getattr(again, split).tolist() for split in SPLITS} == content
    assert again.types == first.types
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == files  # and no temporary file besides


def test_versions_of_the_cache_live_side_by_side(tmp_path, cache, monkeypatch):
    folder = folder_of(tmp_path, train="a b a", valid="b")
    first = corpus(folder)
    monkeypatch.setattr(text, "VERSION", text.VERSION + 1)
    assert corpus(folder).digest == first.digest
    assert len(list((cache / "text").iterdir())) == 2


def test_many_at_once_agree(tmp_path):
    folder = folder_of(tmp_path, train="a b c " * 50_000, valid="b d")
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: corpus(folder), range(8)))
    assert all(one.train.tolist() == [1, 2, 3] * 50_000 and one.valid.tolist() == [2, 0] for one in drawn)


def test_progress_counts_every_byte(tmp_path, monkeypatch):
    class Counting(Progress, Task):
        done, total = 0, 0

        @contextmanager
        def task(self, label, total):
            assert label == f"tokenise {tmp_path.name}"
            self.total += total
            yield self

        def advance(self, amount=1):
            self.done += amount

    monkeypatch.setattr(text, "chunks", partial(chunks, size=4))
    counting = Counting()
    corpus(folder_of(tmp_path, train="a bc ü\n" * 3, valid="b d", test="e"), progress=counting)
    assert counting.done == counting.total == 3 * 8 + 3 + 1


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
    with pytest.raises(InputError, match=r"'python-reference', a file or folder.*not there; check the path"):
        corpus(path)


def test_unknown_tokenisers(tmp_path):
    with pytest.raises(InputError, match="one of basic_english, bytes, got 'byte'; did you mean 'bytes'"):
        corpus(tmp_path, tokeniser="byte")
    with pytest.raises(InputError, match="one of train, valid, test"):
        corpus().columns("validation", 2)
    with pytest.raises(InputError, match="`count`"):
        corpus().columns("valid", 0)


def test_words_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 100)
    with pytest.raises(InputError, match="no white space after byte 2"):
        list(chunks([Piece(b"a " + b"x" * 200, 0, 202)], size=10))


def test_a_file_that_shrinks_is_noticed():
    with pytest.raises(InputError, match="left alone while it is read"):
        list(chunks([Piece(b"a b", 0, 5)]))


def test_unreadable_files(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, train="a", valid="a")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"train\.txt \(Permission denied\); check the path and its permissions"):
        corpus(folder)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot keep text in .*: .*; .*JOMA_CACHE"):
        corpus(cache=tmp_path / "file")


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"No space left on device; free some space, or set JOMA_CACHE") as caught:
        corpus(folder_of(tmp_path, train="a", valid="a"))
    assert "--out" not in str(caught.value)


class Stream(list):
    """Rows of a split, with what the hub announces."""

    info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=2)})


@pytest.fixture
def hub(monkeypatch):
    """A module that stands for `datasets`; `found` is what it returns or raises."""
    module, calls = ModuleType("datasets"), []

    def load_dataset(name, config, *, streaming):
        calls.append((name, config, streaming))
        if isinstance(module.found, Exception):
            raise module.found
        return module.found

    module.load_dataset, module.calls = load_dataset, calls
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def rows(*lines):
    return Stream({"text": line} for line in lines)


def test_a_dataset_is_fetched_once(hub):
    hub.found = {"train": rows(" = A = \n", "", "b c\n"), "validation": rows("b"), "test": rows("c")}
    drawn = corpus("org/wiki:raw-v1")
    assert tokens(drawn.train, drawn.types) == ["=", "a", "=", "b", "c"]
    assert tokens(drawn.valid, drawn.types) == ["b"]
    assert drawn.name == "org/wiki:raw-v1"
    hub.found = ConnectionError("away")
    assert corpus("org/wiki:raw-v1").digest == drawn.digest
    assert hub.calls == [("org/wiki", "raw-v1", True)]


@pytest.mark.parametrize("lost", ["train.txt", "valid.txt", "dataset.json"])
def test_a_dataset_of_which_a_file_is_lost_is_fetched_again(hub, cache, lost):
    hub.found = {"train": rows("a b"), "validation": rows("b")}
    first = corpus("org/wiki:x")
    (file,) = (cache / "datasets").rglob(lost)
    file.unlink()
    assert corpus("org/wiki:x").digest == first.digest
    assert len(hub.calls) == 2
    if lost == "dataset.json":
        file.write_text("[]")
        assert corpus("org/wiki:x").digest == first.digest
    else:
        file.unlink()
        hub.found = ConnectionError("away")
        with pytest.raises(InputError, match=r"away.*check the name"):
            corpus("org/wiki:x")


def test_wikitext_is_asked_for_by_its_owner(hub):
    hub.found = {"train": rows("a b"), "validation": rows("b")}
    corpus("wikitext:wikitext-2-v1")
    corpus("Salesforce/wikitext:wikitext-2-v1")
    assert hub.calls == [("Salesforce/wikitext", "wikitext-2-v1", True)] * 2


def test_a_dataset_with_one_split_is_cut(hub):
    hub.found = {"train": rows(*(f"w{number}" for number in range(20)))}
    drawn = corpus("wiki:")
    assert [len(getattr(drawn, split)) for split in SPLITS] == [16, 2, 2]
    assert hub.calls == [("wiki", None, True)]


class Breaking(Stream):
    def __iter__(self):
        yield {"text": "a"}
        raise ConnectionError("lost on the way")


UNREACHED = {
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


@pytest.mark.parametrize("problem", UNREACHED)
def test_datasets_that_do_not_come(hub, cache, problem):
    hub.found, message = UNREACHED[problem]
    with pytest.raises(InputError, match=message) as caught:
        corpus("wiki:x")
    assert "\n" not in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"without the `datasets` package; install it with `pip install 'joma\[hf\]'`"):
        corpus("Salesforce/wikitext:wikitext-2-raw-v1")


@pytest.mark.skipif("JOMA_WIKITEXT" not in os.environ, reason="JOMA_WIKITEXT names no folder with WikiText-2")
def test_wikitext_2_is_torchtexts():
    folder = Path(os.environ["JOMA_WIKITEXT"])
    drawn = corpus(folder)
    assert [len(getattr(drawn, split)) for split in SPLITS] == [2_049_990, 214_417, 241_859]
    assert len(drawn.types) == 28_782
    valid = reference((folder / "valid.txt").read_text(encoding="utf-8"))
    known = set(drawn.types)
    assert tokens(drawn.valid, drawn.types) == [token if token in known else "<unk>" for token in valid]
    assert drawn.types == vocabulary(reference((folder / "train.txt").read_text(encoding="utf-8")))
