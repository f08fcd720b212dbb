"""The page Your model: it runs as a script, its code gives its numbers, and what cannot be read is a sentence."""

import numpy as np
import pytest

from joma.lab import your_model as page
from lab_pages import run_as_script, run_code, run_page, widget
from tiny_models import SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small model without a tokenizer, which reads bytes."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXModel

    path = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    GPTNeoXModel(GPTNeoXConfig(vocab_size=256, max_position_embeddings=64, **SIZES)).save_pretrained(path)
    return path


def test_the_page_runs_as_a_script_without_a_network(tmp_path):
    run_as_script("your-model", tmp_path)


def test_the_code_to_copy_gives_the_numbers_of_the_page(folder):
    names = run_page(page.app, source=widget(str(folder)), text=widget("Entropy bounces."))
    copied = run_code(names["code"])
    np.testing.assert_array_equal(copied.attention.entropy, names["attention"].entropy)
    assert copied.look.tokens == list("Entropy bounces.")
    assert dict(copied.weights.sizes) == {"batch": 1, "head": 1, "query": 16, "key": 16}


def test_the_code_for_the_toy_trains_it():
    code = page.TOY_CODE.format(toy={**page.TOY, "steps": 1}) + page.CODE.format(
        source="FOLDER", text="some text", length=8, layer=1, head=1
    ).replace("'FOLDER'", "folder")
    assert run_code(code).attention.sizes["layer"] == page.TOY["layers"]


@pytest.mark.parametrize(
    ("source", "text", "sentence"),
    [
        ("no such model", "some text", "`source` must be a folder or a repository"),
        ("/no/such/folder", "some text", "which is not a folder"),
        (None, "  ", "`text` must be a few words"),
    ],
)
def test_what_cannot_be_read_is_a_sentence_and_the_page_goes_on(folder, source, text, sentence):
    names = run_page(page.app, source=widget(source or str(folder)), text=widget(text))
    assert names["look"] is None
    assert sentence in names["sentence"]


def test_the_sentence_names_the_sparsest_head(folder):
    names = run_page(page.app, source=widget(str(folder)), text=widget("Entropy bounces."))
    entropy = names["attention"].entropy.values[0]
    layer, head = np.unravel_index(entropy.argmin(), entropy.shape)
    assert f"The sparsest is head {head} of layer {layer} ({entropy.min():.2f} nats)" in names["sentence"]
