"""Tokens against torchtext's rules written out one by one, and a cache that is damaged or cannot be written."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basic_english import folder_of, reference, scratch, texts, tokens, vocabulary
from joma.arguments import InputError
from joma.data import text
from joma.data.sources import SPLITS, chunks
from joma.data.text import corpus, words
from joma.files import StorageError
from joma.manifest import MANIFEST, read_manifest, write_manifest
from joma.progress import Progress, Task


@given(texts)
@example('<br" />')
@example("ΑΣ\nΑ")
def test_words_are_those_of_torchtext(content):
    assert words(content) == reference(content)


@settings(max_examples=60)
@given(train=texts, valid=texts, size=st.integers(1, 60))
@example(train="a <unk> b <unk> <unk>", valid="<unk> b c", size=60)
def test_vocabulary_and_tokens_are_those_of_torchtext(train, valid, size):
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


def test_byte_tokens_are_the_bytes_of_the_text(tmp_path):
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


@given(length=st.integers(0, 60), count=st.integers(1, 20), least=st.integers(1, 4))
def test_columns_are_the_transpose_of_batchify(length, count, least):
    stream = np.arange(length, dtype=np.uint16)
    numbers = text.Corpus(stream, stream, stream, ("<unk>",), "numbers", "0")
    if length // count < least:
        with pytest.raises(InputError, match=rf"at least {count * least} tokens.*got {length} in the valid split"):
            numbers.columns("valid", count, least=least)
        return
    batches = length // count
    expected = torch.arange(length).narrow(0, 0, batches * count).view(count, -1).t()
    columns = numbers.columns("valid", count, least=least)
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


def flip_text(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def with_identity(folder, **changes):
    manifest = read_manifest(folder)
    write_manifest(folder, {**manifest.identity, **changes}, manifest.files)


DAMAGE = {
    "version": lambda folder: with_identity(folder, version=text.VERSION + 1),
    "another text": lambda folder: with_identity(folder, digest="0" * 64),
    "other numbers": lambda folder: flip_text(folder / MANIFEST, "<u2", "<u4"),
    "leftover": lambda folder: (cut_short(folder / "train.bin"), (folder / ".joma-train-x.bin").write_text("half")),
    "list": lambda folder: (folder / MANIFEST).write_text("[]"),
    "empty": lambda folder: (folder / MANIFEST).write_text("{}"),
    "no json": lambda folder: (folder / MANIFEST).write_text("{"),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "short": lambda folder: cut_short(folder / "train.bin"),
    "flipped": lambda folder: flip(folder / "valid.bin"),
    "missing": lambda folder: (folder / "test.bin").unlink(),
    "types": lambda folder: (folder / "types.json").write_text('["<unk>"]'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_again(tmp_path, cache, damage):
    (tmp_path / "text").mkdir()
    source = folder_of(tmp_path / "text", train="a b a", valid="b c", test="a")
    first = corpus(source)
    content = {split: getattr(first, split).tolist() for split in SPLITS}
    (folder,) = (cache / "text" / f"v{text.VERSION}").iterdir()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGE[damage](folder)
    again = corpus(source)
    assert {split: getattr(again, split).tolist() for split in SPLITS} == content
    assert again.types == first.types
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files  # and no temporary file is left


def test_versions_of_the_cache_have_different_folders(tmp_path, cache, monkeypatch):
    folder = folder_of(tmp_path, train="a b a", valid="b")
    first = corpus(folder)
    monkeypatch.setattr(text, "VERSION", text.VERSION + 1)
    assert corpus(folder).digest == first.digest
    assert len(list((cache / "text").iterdir())) == 2


def test_the_same_text_can_be_tokenised_many_times_at_once(tmp_path):
    folder = folder_of(tmp_path, train="a b c " * 50_000, valid="b d")
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: corpus(folder), range(8)))
    assert all(text.train.tolist() == [1, 2, 3] * 50_000 and text.valid.tolist() == [2, 0] for text in drawn)


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


def test_unknown_tokenisers(tmp_path):
    with pytest.raises(InputError, match="one of basic_english, bytes, got 'byte'; did you mean 'bytes'"):
        corpus(tmp_path, tokeniser="byte")
    with pytest.raises(InputError, match="one of train, valid, test"):
        corpus().columns("validation", 2)
    with pytest.raises(InputError, match="`count`"):
        corpus().columns("valid", 0)


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


@pytest.mark.skipif("JOMA_WIKITEXT" not in os.environ, reason="JOMA_WIKITEXT names no folder with WikiText-2")
def test_wikitext_2_has_the_tokens_of_torchtext():
    folder = Path(os.environ["JOMA_WIKITEXT"])
    drawn = corpus(folder)
    assert [len(getattr(drawn, split)) for split in SPLITS] == [2_049_990, 214_417, 241_859]
    assert len(drawn.types) == 28_782
    valid = reference((folder / "valid.txt").read_text(encoding="utf-8"))
    known = set(drawn.types)
    assert tokens(drawn.valid, drawn.types) == [token if token in known else "<unk>" for token in valid]
    assert drawn.types == vocabulary(reference((folder / "train.txt").read_text(encoding="utf-8")))
