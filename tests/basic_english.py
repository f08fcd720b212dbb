"""torchtext's tokeniser `basic_english` written out rule by rule, texts that try it, and folders of text."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

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


@contextmanager
def scratch():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
