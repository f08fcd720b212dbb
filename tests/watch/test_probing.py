"""Probing of checkpoints: every measurement against the model itself, and faults that cost only what they must."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fake_hub import REPOSITORY, serve
from joma.arguments import InputError
from joma.files import StorageError
from joma.probes.entropy import shannon_entropy
from joma.probes.orthogonality import cosine_orthogonality
from joma.watch import Checkpoints, audit, configs, probing, weight_files
from joma.watch.probing import EMBEDDING, _natural_order, measure_weights, probe
from joma.watch.store import Store
from joma.watch.weight_ranks import LOWER_MATRIX
from moved_models import moved
from tiny_models import neox

transformers = pytest.importorskip("transformers")
TEXT = "The attention of a model is measured on this text, which is long enough for a few sequences. " * 8


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    with configs.quiet():
        for step in range(7):
            moved(neox(), 0.03 * step).save_pretrained(folder / f"step{step}")
    return folder


def test_every_measurement_against_the_model_itself(series):
    result = probe(Checkpoints(series), text=TEXT)
    assert result.audit.faults == ()
    assert result.data.step.values.tolist() == list(range(7))
    sizes = {"step": 7, "layer": 2, "head": 2, "weight": 2, "module": 2, "key_head": 2, "depth": 3}
    assert dict(result.data.sizes) == sizes
    tokens = torch.tensor(list(TEXT.encode())[: 23 * 32]).reshape(23, 32)  # in sequences of the maximum length
    model = moved(neox(), 0.03 * 5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(tokens, output_attentions=True, output_hidden_states=True)
    maps = torch.stack(out.attentions)  # [layer, batch, head, query, key]
    measured = result.data.sel(step=5)
    np.testing.assert_allclose(measured.entropy, shannon_entropy(maps).mean(dim=(1, 3)), atol=2e-5)
    expected = [cosine_orthogonality(state.flatten(0, 1)).root_mean_square for state in out.hidden_states]
    np.testing.assert_allclose(measured.hidden_cosine, torch.stack(expected), rtol=1e-4)
    for index, layer in enumerate(model.gpt_neox.layers):
        values = torch.linalg.svdvals(layer.mlp.dense_h_to_4h.weight.detach().double())
        assert float(measured.stable_rank[index]) == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=1e-3)
    embedding = model.gpt_neox.embed_in.weight.detach().double()
    unit = embedding / embedding.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T)[~torch.eye(256, dtype=torch.bool)]
    assert float(measured.embedding_cosine) == pytest.approx(float(cosines.square().mean().sqrt()), rel=1e-5)
    assert float(measured.embedding_random) == pytest.approx(0.25)


def test_every_measure_of_attention_and_its_spread_against_the_matrices(series):
    measures = ["sink_mass", "distance", "relative_entropy", "largest_logit", "largest_weight"]
    data = probe(Checkpoints(series, revisions=["step5"]), text=TEXT, measures=measures).data.isel(step=0)
    assert set(data) >= {"entropy", *measures, *(f"{name}_sd" for name in ("entropy", *measures))}
    tokens = torch.tensor(list(TEXT.encode())[: 23 * 32]).reshape(23, 32)
    model = moved(neox(), 0.03 * 5)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = torch.stack(model(tokens, output_attentions=True).attentions).double()
    entropy, position = shannon_entropy(maps), torch.arange(32.0, dtype=torch.float64)
    rows = {
        "entropy": entropy,
        "sink_mass": maps[..., 0],
        "largest_weight": maps.amax(-1),
        "distance": (maps * (position[:, None] - position).abs()).sum(-1),
        "relative_entropy": (entropy / (position + 1).log())[..., 1:],  # the first query sees one key
    }
    for name, values in rows.items():
        np.testing.assert_allclose(data[name], values.mean(dim=(1, 3)), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(data[f"{name}_sd"], values.mean(dim=3).std(dim=1), rtol=2e-3, atol=1e-5)
    assert data.attrs["tokens"] == "23 sequences of 32 tokens"
    assert data.largest_logit.notnull().all()
    assert data.distance.attrs == {
        "units": "tokens",
        "long_name": "attended distance",
        "description": "the mean distance between a query and the keys it attends to",
    }


def test_an_unknown_measure_is_refused_before_anything_is_read(series):
    checkpoints = Checkpoints(series)
    with pytest.raises(InputError, match=r"`measures` must be one of entropy, .*, got 'entropie'"):
        probe(checkpoints, measures=["entropie"])
    assert checkpoints.bytes_read == 0


def test_the_fall_and_recovery_of_entropy_is_measured_by_layer(series):
    data = probe(Checkpoints(series), text=TEXT).data
    curve = data.entropy.mean("head")
    np.testing.assert_allclose(data.bounce_recovery, curve.isel(step=-1) - curve.min("step"))
    np.testing.assert_allclose(data.bounce_depth, curve.isel(step=0) - curve.min("step"))
    assert ((data.bounce_p_value > 0) & (data.bounce_p_value <= 1)).all()


def test_a_second_probe_reads_nothing_and_returns_the_same(series, tmp_path):
    store = Store(tmp_path)
    first = probe(Checkpoints(series), text=TEXT, store=store)
    again = Checkpoints(series)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.ByteSource, "read", None)
        patch.setattr(probing, "load", None)
        second = probe(again, text=TEXT, store=store)
    assert again.bytes_read == 0
    assert second.data.identical(first.data)
    other = probe(again, text=TEXT[10:], store=store)
    assert not other.data.entropy.equals(first.data.entropy)
    assert other.data.stable_rank.equals(first.data.stable_rank)


def test_a_changed_config_is_measured_again(tmp_path):
    with configs.quiet():
        neox().save_pretrained(tmp_path / "model")
    series, store = Checkpoints(tmp_path / "model"), Store(tmp_path / "store")
    before = probe(series, text=TEXT, store=store).data
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    after = probe(series, text=TEXT, store=store).data
    assert (before.sizes["head"], after.sizes["head"]) == (2, 4)


def test_bad_checkpoints_are_named_and_the_others_are_measured(tmp_path):
    with configs.quiet():
        for step in (0, 1, 2, 3, 4):
            moved(neox(), 0.03 * step).save_pretrained(tmp_path / f"step{step}")
        neox(hidden_size=8).save_pretrained(tmp_path / "step5")
    file = tmp_path / "step1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:4000])
    (tmp_path / "step2" / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    result = probe(Checkpoints(tmp_path, revisions=[f"step{step}" for step in (0, 1, 2, 3, 4, 5, 9)]), text=TEXT)
    kinds = {fault.checkpoints: fault.kind for fault in result.audit.faults}
    assert kinds == {
        ("step9",): "unknown",
        ("step1",): "unreadable",
        ("step5",): "architecture",
        ("step2",): "not measured",
    }
    assert result.audit.incomplete
    assert result.data.step.values.tolist() == [0, 2, 3, 4]
    assert result.data.entropy.isnull().all(("layer", "head")).values.tolist() == [False, True, False, False]
    assert result.data.stable_rank.notnull().all()


def save_as_bin(model, folder):
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def test_a_bin_file_is_measured_like_safetensors(series, tmp_path):
    save_as_bin(moved(neox(), 0.03 * 5), tmp_path / "step5")
    (tmp_path / "step6").mkdir()
    torch.save({"w": torch.ones(2), "x": tmp_path}, tmp_path / "step6" / "pytorch_model.bin")
    result = probe(Checkpoints(tmp_path), text=TEXT)
    assert [fault.kind for fault in result.audit.faults] == ["unreadable"]
    expected = probe(Checkpoints(series, revisions=["step5"]), text=TEXT).data
    np.testing.assert_allclose(result.data.entropy, expected.entropy, atol=1e-6)
    np.testing.assert_allclose(result.data.stable_rank, expected.stable_rank, rtol=1e-6)


def test_a_weight_that_the_audit_did_not_sample_is_checked(series, tmp_path):
    shutil.copytree(series, tmp_path / "series")
    file = tmp_path / "series" / "step3" / "model.safetensors"
    state = load_file(file)
    state["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"][7, 3] = torch.inf
    save_file(state, file, metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "SAMPLED_TENSORS", 2)
        result = probe(Checkpoints(tmp_path / "series"), text=TEXT)
    (fault,) = [fault for fault in result.audit.faults if "finite" in fault.message]
    assert (fault.kind, fault.checkpoints) == ("not finite", ("step3",))
    assert "NaN or infinities in gpt_neox.layers.1.mlp.dense_h_to_4h.weight" in fault.message
    assert fault.left_out == ("step3",)
    assert result.data.step.values.tolist() == [0, 1, 2, 4, 5, 6]
    assert result.data.isel(step=slice(1, None)).notnull().all().to_array().all()  # drift starts from the first step


def test_a_file_in_the_way_of_the_store_is_named(series, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        probe(Checkpoints(series), text=TEXT, store=Store(tmp_path / "file" / "measures"))


def test_a_model_without_attention_has_its_weights_measured(tmp_path):
    config = transformers.MambaConfig(vocab_size=256, hidden_size=8, num_hidden_layers=1, state_size=4)
    with configs.quiet():
        transformers.MambaModel(config).save_pretrained(tmp_path / "mamba")
    result = probe(Checkpoints(tmp_path / "mamba"), text=TEXT)
    (fault,) = result.audit.faults
    assert (fault.kind, fault.checkpoints, fault.left_out) == ("not measured", ("mamba",), ())
    assert "`mamba` must be a model with attention to watch, got MambaModel" in fault.message
    assert "entropy" not in result.data
    assert float(result.data.embedding_cosine[0]) > 0


def test_a_model_whose_attention_is_seen_in_part_says_so(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    options = {"intermediate_size": 16, "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 1, "vocab_size": 256}
    config = transformers.JambaConfig(
        **sizes, **options, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, pad_token_id=0
    )
    with torch.random.fork_rng(), configs.quiet():
        transformers.JambaModel(config).save_pretrained(tmp_path / "jamba")
    result = probe(Checkpoints(tmp_path / "jamba"), text=TEXT)
    assert result.data.layer.values.tolist() == ["layers.1.self_attn"]
    heads, fault = result.audit.faults
    assert (heads.kind, heads.loses_data) == ("ignored", False)
    assert "the head laws of jamba are not measured at layers.1.self_attn: the model type 'jamba'" in heads.message
    assert (fault.kind, fault.left_out, fault.loses_data) == ("partly measured", (), True)
    assert "jamba is measured in part: attention was not recorded of layers.0.mamba (" in fault.message


def test_an_encoder_with_a_decoder_reads_the_text_on_both_sides(tmp_path):
    config = transformers.T5Config(vocab_size=256, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with torch.random.fork_rng(), configs.quiet():
        transformers.T5Model(config).save_pretrained(tmp_path / "t5")
    result = probe(Checkpoints(tmp_path / "t5"), text=TEXT)
    assert result.audit.faults == ()
    kinds = [name.rsplit(".", 1)[1] for name in result.data.layer.values]
    assert kinds == ["SelfAttention", "EncDecAttention", "SelfAttention"]
    assert result.data.entropy.notnull().all()


def test_a_model_that_refuses_the_text_has_its_weights_measured(series, monkeypatch):
    class Picky(torch.nn.Module):
        config = None

        def forward(self, **inputs):
            raise TypeError(f"no use for {sorted(inputs)}")

    monkeypatch.setattr(probing, "load", lambda *_: Picky())
    result = probe(Checkpoints(series), text=TEXT)
    (fault,) = result.audit.faults
    assert "must be a model that runs on tokens, got Picky (no use for ['input_ids'" in fault.message
    assert result.data.stable_rank.notnull().all()


def test_missing_weights_are_not_replaced_by_random_ones(series, tmp_path):
    (tmp_path / "step0").mkdir()
    state = load_file(series / "step3" / "model.safetensors")
    renamed = {name.replace("layers.1.attention", "layers.1.attend"): value for name, value in state.items()}
    save_file(renamed, tmp_path / "step0" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "step0" / "config.json").write_text((series / "step3" / "config.json").read_text())
    result = probe(Checkpoints(tmp_path), text=TEXT)
    (fault,) = result.audit.faults
    assert "that its config.json describes, got no layers.1.attention.dense.bias and 3 more missing" in fault.message
    assert "entropy" not in result.data


def test_an_encoder_without_its_pooler_is_run(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng(), configs.quiet():
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=256)).save_pretrained(tmp_path)
    assert probe(Checkpoints(tmp_path), text=TEXT).audit.faults == ()


def test_where_nothing_is_sound_the_cause_is_named(tmp_path):
    torch.save({"w": torch.ones(2), "x": tmp_path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        InputError, match=r"pytorch_model.bin` must contain tensors only, .*; convert it to safetensors"
    ):
        probe(Checkpoints(tmp_path), text=TEXT)


def test_weights_without_a_config_are_measured_anyway(series, tmp_path):
    (tmp_path / "step0").mkdir()
    save_file(load_file(series / "step3" / "model.safetensors"), tmp_path / "step0" / "model.safetensors")
    result = probe(Checkpoints(tmp_path), text=TEXT)
    (fault,) = result.audit.faults
    assert "a model with a config.json" in fault.message
    expected = probe(Checkpoints(series, revisions=["step3"]), text=TEXT).data
    np.testing.assert_array_equal(result.data.stable_rank, expected.stable_rank)


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    with configs.quiet():
        neox().save_pretrained(tmp_path / "step0")
    config = json.loads((tmp_path / "step0" / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Model"}}
    (tmp_path / "step0" / "config.json").write_text(json.dumps(config))
    (tmp_path / "step0" / "mine.py").write_text("raise SystemExit('it was run')")
    result = probe(Checkpoints(tmp_path), text=TEXT)
    heads, fault = result.audit.faults
    assert "the model type 'mine' does not tell" in heads.message
    assert "an architecture with code of its own, which is never run" in fault.message


@pytest.mark.parametrize("text", ["", " \n", "a"])
def test_a_text_shorter_than_two_tokens_is_refused(series, text):
    with pytest.raises(InputError, match=r"`text` must be at least two tokens long, got .*; give a longer text"):
        probe(Checkpoints(series), text=text)


def test_a_vocabulary_too_small_for_bytes_needs_its_tokenizer(tmp_path):
    with configs.quiet():
        neox(vocab_size=40).save_pretrained(tmp_path / "model")
    (fault,) = probe(Checkpoints(tmp_path / "model"), text=TEXT).audit.faults
    assert "a model with its tokenizer" in fault.message


def test_a_series_on_the_hub_is_probed_by_byte_ranges(series, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    expected = probe(Checkpoints(series, revisions=["step1", "step5"]), text=TEXT).data
    with serve(series) as hub:
        remote = Checkpoints(REPOSITORY, endpoint=hub.endpoint, revisions=["step1", "step5", "step99"])
        result = probe(remote, text=TEXT, store=Store(tmp_path / "store"))
        assert [fault.kind for fault in result.audit.faults] == ["unknown"]
        assert result.data.drop_attrs().identical(expected.drop_attrs())
        served = hub.served
        probe(remote, text=TEXT, store=Store(tmp_path / "store"))
        assert hub.served == served  # the config is in the hub's cache by now


@pytest.mark.parametrize(
    ("kind", "lower"),
    [
        ("GPTNeoX", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"),
        ("OPT", "model.decoder.layers.0.fc1.weight"),
        ("GPT2", "transformer.h.0.mlp.c_fc.weight"),
        ("Llama", "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_architectures_name_their_lower_matrices_and_embeddings(kind, lower):
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    other = {"OPT": {"ffn_dim": 16, "word_embed_proj_dim": 8}, "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2}}
    small = {key: value for key, value in sizes.items() if kind != "GPT2" or key in ("vocab_size", "pad_token_id")}
    config = getattr(transformers, f"{kind}Config")(**small, **other.get(kind, {"intermediate_size": 16}))
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    with torch.random.fork_rng():
        state = getattr(transformers, name)(config).state_dict()
    assert lower in [name for name in state if re.search(LOWER_MATRIX, name)]
    (embedding,) = [name for name in state if EMBEDDING.search(name)]
    assert state[embedding].shape[0] == 64


def test_layers_come_in_their_natural_order():
    names = [f"layers.{i}.attention" for i in range(12)]
    assert sorted(sorted(names), key=_natural_order) == names


def test_of_a_large_embedding_only_evenly_spaced_spans_are_read(tmp_path):
    table = torch.randn(10_000, 32, generator=torch.Generator().manual_seed(0))
    save_file({"wte.weight": table}, tmp_path / "model.safetensors")
    series = Checkpoints(tmp_path)
    starts = [(10_000 - 256) * span // 7 for span in range(8)]
    expected = cosine_orthogonality(torch.cat([table[start : start + 256] for start in starts]))
    assert float(measure_weights(series[0])["embedding_cosine"]) == pytest.approx(
        float(expected.root_mean_square), rel=1e-6
    )
    assert series.bytes_read < table.nbytes / 2


def test_weights_of_another_kind_of_model_are_named(tmp_path):
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (only,) = Checkpoints(tmp_path)
    with pytest.raises(InputError, match="must have weights with the names of a Transformer's, got a …"):
        measure_weights(only)
    with pytest.raises(InputError, match="of which nothing can be measured"):
        probe(Checkpoints(tmp_path), text=TEXT)


def measured(result, leave_out):
    """Return the numbers of each checkpoint but one; what is computed over the series is left out."""
    data = result.data.drop_vars([name for name in result.data if str(name).startswith("bounce_")])
    return data.where(data.checkpoint != leave_out, drop=True)


@pytest.mark.parametrize("step", [0, 2])
def test_a_hostile_config_changes_no_other_checkpoint_wherever_it_stands(series, tmp_path, step):
    for name in ("step0", "step1", "step2"):
        shutil.copytree(series / name, tmp_path / name)
    expected = probe(Checkpoints(tmp_path), text=TEXT)
    file = tmp_path / f"step{step}" / "config.json"
    fields = json.loads(file.read_text())
    for changes, kind in (({"max_position_embeddings": 8}, "architecture"), ({"vocab_size": 0}, "not measured")):
        file.write_text(json.dumps(fields | changes))
        result = probe(Checkpoints(tmp_path), text=TEXT)
        assert [(fault.kind, fault.checkpoints) for fault in result.audit.faults] == [(kind, (f"step{step}",))]
        assert result.audit.incomplete
        assert result.data.entropy.sel(step=step).isnull().all()
        assert result.data.stable_rank.equals(expected.data.stable_rank)
        assert measured(result, f"step{step}").equals(measured(expected, f"step{step}"))


def test_a_forward_pass_that_is_not_finite_is_not_averaged(series, tmp_path):
    shutil.copytree(series, tmp_path / "series")
    file = tmp_path / "series" / "step6" / "model.safetensors"
    state = load_file(file)
    state["gpt_neox.layers.0.attention.query_key_value.bias"][1] = torch.nan  # of one head's query
    save_file(state, file)
    result = probe(Checkpoints(tmp_path / "series"), text=TEXT)
    (fault,) = result.audit.faults
    assert (fault.kind, fault.checkpoints, fault.left_out) == ("not finite", ("step6",), ())
    assert "finite forward pass, got NaN or infinities in the attention entropy of layers.0.attention" in fault.message
    assert result.data.entropy.isnull().all(("layer", "head")).values.tolist() == [False] * 6 + [True]
    assert result.data.stable_rank.notnull().all()


def test_a_model_that_prints_or_exits_is_a_fault(series, monkeypatch, capfd):
    class Leaving(torch.nn.Module):
        config = None

        def forward(self, **inputs):
            print(sorted(inputs))  # noqa: T201
            raise SystemExit(0)

    monkeypatch.setattr(probing, "load", lambda *_: Leaving())
    (fault,) = probe(Checkpoints(series), text=TEXT).audit.faults
    assert "must be a model that runs on tokens, got Leaving (0)" in fault.message
    assert capfd.readouterr() == ("", "")

    class Interrupted(Leaving):
        def forward(self, **_):
            raise KeyboardInterrupt

    monkeypatch.setattr(probing, "load", lambda *_: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        probe(Checkpoints(series), text=TEXT)


def test_a_config_that_the_checkpoints_share_is_part_of_what_is_stored(tmp_path):
    with configs.quiet():
        neox().save_pretrained(tmp_path / "series" / "step0")
    shared = tmp_path / "series" / "config.json"
    (tmp_path / "series" / "step0" / "config.json").rename(shared)
    series, store = Checkpoints(tmp_path / "series"), Store(tmp_path / "store")
    assert probe(series, text=TEXT, store=store).data.sizes["head"] == 2
    shared.write_text(json.dumps(json.loads(shared.read_text()) | {"num_attention_heads": 4}))
    assert probe(series, text=TEXT, store=store).data.sizes["head"] == 4


def test_a_text_that_never_ends_is_refused():
    with pytest.raises(InputError, match="`text` must be a file of at most 100 MB, got /dev/zero, which has more"):
        probing.read_text(Path("/dev/zero"))
