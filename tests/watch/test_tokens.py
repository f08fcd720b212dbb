"""Tokens of a text: the tokenizer that the checkpoints share, bytes without one, and faults of those that disagree."""

import json
import os

import pytest

from joma.arguments import InputError
from joma.data.text import corpus
from joma.watch import tokens
from joma.watch.configs import quiet
from joma.watch.tokens import default_text, encode
from joma.watch.weight_files import Unreadable

transformers = pytest.importorskip("transformers")
TEXT = "the cat and the dog"


def config(**changes):
    return transformers.GPTNeoXConfig(
        **{"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 32} | changes
    )


@pytest.fixture
def folders(tmp_path):
    names = ("step0", "step1", "step2")
    for name in names:
        (tmp_path / name).mkdir()
    return {name: tmp_path / name for name in names}


def save_tokenizer(folder, words):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with quiet():
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def rows(text, folders, *, length=8, count=4, **changes):
    result, faults = encode(text, folders, config(**changes), length=length, count=count)
    return result.tolist(), [(fault.kind, fault.checkpoints) for fault in faults]


def test_the_default_text_is_the_beginning_of_the_embedded_corpus():
    text = default_text(1000)
    assert text.encode() == bytes(corpus(tokeniser="bytes").train[:1000].tolist())
    assert default_text().startswith(text)


def test_a_text_without_a_tokenizer_is_encoded_as_bytes_in_sequences_that_the_model_can_take(folders):
    text = "abcdefgh" * 20
    sequences, faults = encode(text, folders, config(), length=64, count=2)  # the model takes 32 positions
    assert sequences.shape == (4, 32)
    assert faults == []
    assert bytes(sequences.flatten().tolist()).decode() == text[:128]
    assert len(rows(text, folders, length=10, count=3)[0]) == 3
    assert rows("abc", folders, length=64, count=2) == ([[97, 98, 99]], [])


def test_the_tokenizer_of_a_checkpoint_or_of_the_series_is_used(folders, tmp_path):
    save_tokenizer(tmp_path, {"<unk>": 0, "the": 1, "cat": 2})
    assert rows(TEXT, folders) == ([[1, 2, 0, 1, 0]], [])
    for folder in folders.values():
        save_tokenizer(folder, {"<unk>": 0, "the": 7, "dog": 9})
    assert rows(TEXT, folders) == ([[7, 0, 0, 7, 9]], [])


def test_checkpoints_without_a_tokenizer_take_that_of_another(folders):
    save_tokenizer(folders["step2"], {"<unk>": 0, "the": 1, "cat": 2})
    assert rows(TEXT, folders) == ([[1, 2, 0, 1, 0]], [])


def test_a_tokenizer_that_differs_is_a_fault_wherever_it_is(folders):
    for name, folder in folders.items():
        save_tokenizer(folder, {"<unk>": 0, "the": 5 if name == "step0" else 1, "cat": 2})
    assert rows(TEXT, folders) == ([[1, 2, 0, 1, 0]], [("tokenizer", ("step0",))])


def test_other_files_with_the_same_tokens_are_no_fault(folders):
    for folder in folders.values():
        save_tokenizer(folder, {"<unk>": 0, "the": 1, "cat": 2})
    file = folders["step1"] / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 77}))
    assert rows(TEXT, folders) == ([[1, 2, 0, 1, 0]], [])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"tokenizer_class": 3}'),
        ("tokenizer_config.json", b'{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'),
    ],
)
def test_a_hostile_tokenizer_is_a_fault_of_its_checkpoint_alone(folders, file, content):
    for folder in folders.values():
        save_tokenizer(folder, {"<unk>": 0, "the": 1, "cat": 2})
    (folders["step0"] / "mine.py").write_text("raise SystemExit('it was run')")
    (folders["step0"] / file).write_bytes(content)
    assert rows(TEXT, folders) == ([[1, 2, 0, 1, 0]], [("tokenizer", ("step0",))])


def test_what_is_no_file_is_refused(folders):
    for folder in folders.values():
        save_tokenizer(folder, {"<unk>": 0, "the": 1, "cat": 2})
    os.mkfifo(folders["step0"] / "chat_template.jinja")
    (folders["step1"] / "tokenizer.json").unlink()
    (folders["step1"] / "tokenizer.json").mkdir()
    _, faults = encode(TEXT, folders, config(), length=8, count=4)
    assert [fault.message for fault in faults] == [
        "`step0/chat_template.jinja` must be a file, got something else",
        "`step1/tokenizer.json` must be a file, got a folder",
    ]


@pytest.mark.parametrize("closed", [False, True])
def test_a_tokenizer_that_panics_is_a_fault_without_a_traceback(folders, capfd, closed):
    for folder in folders.values():
        save_tokenizer(folder, {"<unk>": 0, "the": 1, "cat": 2})
    file = folders["step1"] / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(([a-z ])+)+[0-9]"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": split}))
    stream = os.dup(2)
    try:
        if closed:
            os.close(2)
        assert rows(TEXT * 3, folders)[1] == [("tokenizer", ("step1",))]
    finally:
        os.dup2(stream, 2)
        os.close(stream)
    assert capfd.readouterr().err == ""


def test_what_is_not_a_panic_still_reaches_the_terminal(capfd):
    with tokens._without_panics():
        os.write(2, b"a line of another thread\n")
    assert capfd.readouterr().err == "a line of another thread\n"


def test_a_file_that_is_too_large_is_not_read(folders, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_BYTES", 10)
    save_tokenizer(folders["step0"], {"<unk>": 0, "the": 1})
    sequences, (fault,) = encode("aa", folders, config(), length=8, count=4)
    assert sequences.tolist() == [[97, 97]]  # the others have none
    assert "`step0/tokenizer.json` must be a file of at most 10 B" in fault.message


def test_what_cannot_be_encoded_is_named(folders):
    with pytest.raises(InputError, match="`text` must be at least two tokens long, got 1; give a longer text"):
        rows("a", folders)
    with pytest.raises(Unreadable, match=r"with its tokenizer, got token 97 for a vocabulary of 40; add the tokenizer"):
        rows("aa", folders, vocab_size=40)
    vit = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(Unreadable, match="`step0` must be a language model, got one described by ViTConfig"):
        encode("abc", folders, vit, length=8, count=4)
    for folder in folders.values():
        save_tokenizer(folder, {"<unk>": 0, "the": 300})
    with pytest.raises(Unreadable, match="got token 300 for a vocabulary of 256"):
        rows(TEXT, folders)
    with pytest.raises(
        Unreadable, match="`step0` must encode the text as two tokens or more, got 1; give a longer text"
    ):
        rows("cat", folders)
