"""A first look at a model: what is recorded is its own attention, and its tokens are those of its tokenizer."""

import json

import pytest
import torch

from joma.arguments import InputError
from joma.watch.first_look import look, open_model
from tiny_models import SIZES, textbook_entropy, with_large_weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TEXT = "Entropy bounces."


def save_model(path, **changes):
    """Save a model that reads bytes, with attention that is far from uniform; return it."""
    config = transformers.GPTNeoXConfig(vocab_size=256, max_position_embeddings=64, **{**SIZES, **changes})
    model = with_large_weights(transformers.GPTNeoXModel(config))
    model.save_pretrained(path)
    return model


def test_what_is_recorded_is_the_models_own_attention(tmp_path):
    model = save_model(tmp_path)
    model.set_attn_implementation("eager")
    tokens = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        weights = model(tokens, output_attentions=True).attentions
    result = look(open_model(tmp_path), TEXT)
    assert result.tokens == list(TEXT)
    for layer, expected in enumerate(weights):
        entropy = textbook_entropy(expected.double()).mean(dim=(0, 2))
        torch.testing.assert_close(
            torch.tensor(result.recording.entropy.values[0, layer]), entropy, rtol=1e-4, atol=1e-4
        )
        shown = torch.tensor(result.recording.maps(layer).values)
        torch.testing.assert_close(shown, expected.double(), rtol=1e-4, atol=1e-5)


def test_of_a_series_the_last_checkpoint_is_opened_or_the_one_that_is_named(tmp_path):
    for step in (0, 20, 3):
        save_model(tmp_path / f"step{step}")
    assert open_model(tmp_path).name == "step20"
    assert open_model(tmp_path, "step3").name == "step3"


def test_the_beginning_of_a_long_text_is_read(tmp_path):
    save_model(tmp_path)
    assert len(look(open_model(tmp_path), 50 * TEXT, length=10).tokens) == 10
    assert len(look(open_model(tmp_path), 50 * TEXT, length=500).tokens) == 64  # no more than the model's positions


def test_tokens_have_the_text_of_the_models_tokenizer(tmp_path):
    save_model(tmp_path)
    words = {"entropy": 0, "bounces": 1, "[UNK]": 2}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "added_tokens": [],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert look(open_model(tmp_path), "entropy bounces entropy").tokens == ["entropy", "bounces", "entropy"]


@pytest.mark.parametrize("text", ["", " \n", "a"])
def test_a_text_with_nothing_in_it_is_refused(text, tmp_path):
    save_model(tmp_path)
    with pytest.raises(InputError, match="`text` must be a few words"):
        look(open_model(tmp_path), text)


def test_a_model_that_does_not_exist_is_named():
    with pytest.raises(InputError, match="`source` must be a folder or a repository on the hub, got '/no/such/folder'"):
        open_model("/no/such/folder")
