"""Loading of models and tokenising of text: complete weights, the model's tokenizer, and no code of the folder."""

import builtins
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from joma.arguments import InputError
from joma.data.text import corpus
from joma.watch import loading
from joma.watch.loading import default_text, encode, load, load_config, quiet
from joma.watch.weight_files import Unreadable
from tiny_models import neox

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path):
    with quiet():
        neox().save_pretrained(tmp_path / "series" / "step0")
    return tmp_path / "series" / "step0"


def word_tokenizer(words):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_model_is_loaded_without_its_head_in_float32_and_evaluation_mode(folder):
    state = load_file(folder / "model.safetensors")
    save_file(
        {name: weight.bfloat16() for name, weight in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    model = load(folder, "step0")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    loaded = model.state_dict()
    expected = {
        name.removeprefix("gpt_neox."): weight for name, weight in state.items() if name.startswith("gpt_neox.")
    }
    for name, weight in expected.items():
        assert torch.equal(loaded[name], weight.bfloat16().float())


def test_a_missing_weight_is_refused_but_a_missing_pooler_is_not(folder, tmp_path):
    state = load_file(folder / "model.safetensors")
    del state["gpt_neox.layers.0.attention.dense.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    message = r"`step0` must have all weights of the GPTNeoXModel .*, got no layers\.0\.attention\.dense\.weight;"
    with pytest.raises(Unreadable, match=message):
        load(folder, "step0")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng(), quiet():
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path / "bert")
        model = load(tmp_path / "bert", "bert")
    assert any(name.startswith("pooler.") for name in model.state_dict())


def test_checkpoints_may_share_the_config_of_their_parent_folder(folder):
    assert load_config(folder, "step0").hidden_size == 16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    with pytest.raises(Unreadable, match=r"`step0` must be a model with a config.json, got none; add it"):
        load_config(folder, "step0")
    (folder.parent / "config.json").write_text(json.dumps(config | {"hidden_size": 24}))
    assert load_config(folder, "step0").hidden_size == 24


def test_an_unknown_architecture_is_named_with_the_version_of_transformers(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    version = transformers.__version__.replace(".", r"\.")
    message = rf"`step0` must be a model that transformers can load, got .*against transformers {version}"
    with pytest.raises(Unreadable, match=message):
        load(folder, "step0")


def test_code_of_a_folder_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(Unreadable, match="an architecture with code of its own, which is never run"):
        load(folder, "step0")


def test_quiet_restores_the_settings_of_transformers():
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def fail_inside() -> None:
        with quiet():
            assert logging.get_verbosity() == logging.CRITICAL
            assert not logging.is_progress_bar_enabled()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_without_transformers_the_remedy_is_named(monkeypatch):
    real_import = builtins.__import__

    def without_transformers(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(InputError, match=r"`transformers` must be installed .*; run `pip install 'joma\[hf\]'`"):
        loading.transformers()


def test_the_default_text_is_the_beginning_of_the_embedded_corpus():
    text = default_text(1000)
    assert text.encode() == bytes(corpus(tokeniser="bytes").train[:1000].tolist())
    assert default_text().startswith(text)


def test_a_text_without_a_tokenizer_is_encoded_as_bytes_in_sequences_that_the_model_can_take(folder):
    text = "abcdefgh" * 20
    tokens = encode(text, folder, "step0", length=64, count=2)  # the model takes 32 positions
    assert tokens.shape == (4, 32)
    assert bytes(tokens.flatten().tolist()).decode() == text[:128]
    assert encode(text, folder, "step0", length=10, count=3).shape == (3, 10)
    assert encode("abc", folder, "step0", length=64, count=2).tolist() == [[97, 98, 99]]


def test_the_tokenizer_of_the_model_or_of_its_parent_folder_is_used(folder):
    with quiet():
        word_tokenizer({"<unk>": 0, "the": 1, "cat": 2}).save_pretrained(folder.parent)
    text = "the cat and the dog"
    assert encode(text, folder, "step0", length=8, count=4).tolist() == [[1, 2, 0, 1, 0]]
    with quiet():
        word_tokenizer({"<unk>": 0, "the": 7, "dog": 9}).save_pretrained(folder)
    assert encode(text, folder, "step0", length=8, count=4).tolist() == [[7, 0, 0, 7, 9]]


def test_what_cannot_be_encoded_is_named(folder, tmp_path):
    with pytest.raises(InputError, match="`text` must be at least two tokens long, got 1; give a longer text"):
        encode("a", folder, "step0", length=8, count=4)
    with quiet():
        neox(vocab_size=40).save_pretrained(tmp_path / "small")
        vit = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        vit.save_pretrained(tmp_path / "vit")
    with pytest.raises(Unreadable, match=r"with its tokenizer, got token 97 for a vocabulary of 40; add the tokenizer"):
        encode("aa", tmp_path / "small", "small", length=8, count=4)
    with pytest.raises(Unreadable, match="`vit` must be a language model, got one described by ViTConfig"):
        encode("abc", tmp_path / "vit", "vit", length=8, count=4)
