"""How recordings and recorders show themselves, on models: maps against eager weights, figures, tables."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from joma.arguments import InputError, StateError
from joma.probes.entropy import shannon_entropy
from joma.watch import Recorder, attention
from tiny_models import DECODERS, TOKENS, CausalBlock, random_normal, with_large_weights
from watch.families import EXACT
from watch.family_weights import eager_weights, run, token_rows
from watch.tiny_configs import tiny_model

PADDED = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maps_are_the_weights_that_eager_attention_returns(family: str, implementation: str) -> None:
    model, names = DECODERS[family]()
    with_large_weights(model)
    model.set_attn_implementation(implementation)
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED}
    plain = model(**inputs).logits
    with attention(model, maps=True) as seen:
        model(**{**inputs, "input_ids": 9 - TOKENS})  # the last pass counts
        assert torch.equal(model(**inputs).logits, plain)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model.double()(**inputs, output_attentions=True).attentions
    rows = PADDED.bool()[:, None, :, None].expand_as(matrices[0])  # of a padded query, eager weights may differ
    for index, matrix in enumerate(matrices):
        maps = seen.maps(names.format(index))
        assert maps.shape == matrix.shape
        np.testing.assert_allclose(maps.values[rows], matrix[rows], atol=2e-5)
        np.testing.assert_allclose(maps.sum("key"), 1.0, atol=1e-9)
        window = seen.maps(index, 1, queries=slice(2, 5), keys=slice(0, 4))
        np.testing.assert_array_equal(window, maps[:, [1], 2:5, :4])


# Soft-capping, learned sinks, ALiBi, relative positions, biases of T5, masks of −10³⁸, windows, cross attention.
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bloom", "mpt", "deberta", "t5", "codegen", "swin", "bart"])
def test_maps_of_other_families_are_the_weights_that_they_return(name: str) -> None:
    family = EXACT[name]
    model = tiny_model(name, family.model_class, **family.changes)
    weights = eager_weights(model, family)
    with attention(model, reduce="none", rows="all", maps=True) as seen:
        run(model, family)
    (entropies,) = seen.passes
    assert len(entropies) == len(weights)
    for (layer, entropy), matrix in zip(entropies.items(), weights, strict=True):
        maps = torch.as_tensor(seen.maps(layer).values)
        assert maps.shape == matrix.shape
        defined = ~entropy.isnan()
        assert torch.equal(~maps.isnan().any(-1), defined)
        rows = token_rows(family, len(matrix), matrix.shape[2])
        difference = (maps - matrix).abs().where(defined[..., None], 0.0).transpose(1, 2)[rows]
        assert difference.max() < 1e-5, layer
        if not family.learned_sinks:
            torch.testing.assert_close(shannon_entropy(maps[defined]), entropy[defined].double(), atol=1e-5, rtol=0)


def test_a_cache_shows_the_last_query_and_all_keys() -> None:
    model, names = DECODERS["llama"]()
    with_large_weights(model)
    with attention(model, maps=True) as seen, torch.no_grad():
        past = model(input_ids=TOKENS[:, :6], use_cache=True).past_key_values
        model(input_ids=TOKENS[:, 6:], past_key_values=past)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(input_ids=TOKENS, output_attentions=True).attentions
    maps = seen.maps(names.format(1), tokens=[list("abcdefg"), list("hijklmn")])
    np.testing.assert_allclose(maps, matrices[1][:, :, 6:], atol=2e-5)
    assert maps.query_token.values.tolist() == [["g"], ["n"]]


def test_training_is_the_same_with_maps_and_nothing_is_kept_without() -> None:
    block = CausalBlock(nn.functional.scaled_dot_product_attention)
    x = random_normal(2, 5, 8)
    block(x).sum().backward()
    expected = copy.deepcopy([parameter.grad for parameter in block.parameters()])
    block.zero_grad()
    with attention(block, maps=True) as seen:
        block(x).sum().backward()
    assert all(torch.equal(a.grad, b) for a, b in zip(block.parameters(), expected, strict=True))
    np.testing.assert_allclose(seen.maps(0), block.matrix(x).detach().double(), atol=1e-6)
    with attention(block) as without:
        block(x)
    with pytest.raises(StateError, match=r"attention\(model, maps=True\)"):
        without.maps(0)
    with attention(block, maps=100) as small:
        block(x)
    with pytest.raises(InputError, match="watch with maps=640 to keep all layers"):
        small.maps(0)


def test_a_recording_draws_entropy_sinks_and_a_map() -> None:
    model, _ = DECODERS["gpt2"]()
    with attention(with_large_weights(model), measures=["entropy", "sink_mass"], maps=True) as seen, torch.no_grad():
        model(input_ids=TOKENS)
    figure = seen.plot()
    figure.savefig(io.BytesIO())
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), seen.dataset().entropy[0])
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), seen.dataset().sink_mass[0].mean("head"))
    picture = seen.plot_map(1, 2, batch=1, tokens=list("abcdefg"), keys=slice(0, 5))
    picture.savefig(io.BytesIO())
    np.testing.assert_allclose(picture.axes[0].images[0].get_array(), seen.maps(1, 2, keys=slice(0, 5))[1, 0])
    assert [label.get_text() for label in picture.axes[0].get_xticklabels()] == list("abcde")
    for arguments, name in (({"head": 4}, "head"), ({"batch": 2}, "batch"), ({"head": True}, "head")):
        with pytest.raises(InputError, match=f"`{name}`"):
            seen.plot_map(0, **arguments)


def test_the_table_of_a_recording_counts_rows() -> None:
    model, names = DECODERS["opt"]()
    with attention(with_large_weights(model), rows=PADDED) as seen, torch.no_grad():
        assert repr(seen) == "Attention of OPTForCausalLM: no forward pass recorded yet"
        model(input_ids=TOKENS, attention_mask=PADDED)
        model(input_ids=TOKENS, attention_mask=PADDED)
    lines = repr(seen).splitlines()
    assert lines[0] == "Attention of OPTForCausalLM: 2 passes, 2 layers"
    entropy = seen.entropy.sel(layer=names.format(0)).mean("pass").values
    spread = [f"{entropy.mean():.3f}", "±", f"{entropy.std(ddof=1):.3f}"]
    assert lines[2].split() == [names.format(0), "4", *spread, f"{entropy.min():.3f}", "24"]
    assert "<td>24</td>" in seen._repr_html_()


def test_passes_of_unequal_length_count_by_their_rows_in_table_and_figure() -> None:
    model, names = DECODERS["opt"]()
    with_large_weights(model)

    def recorded(reduce: str) -> Any:
        with attention(model, reduce=reduce, measures=["entropy", "sink_mass"]) as seen, torch.no_grad():
            for length in (7, 2):
                model(input_ids=TOKENS[:, :length])
        return seen

    seen, rows = recorded("mean"), recorded("none")
    assert repr(seen) == repr(rows)
    entropy = rows.entropy.mean(["pass", "batch", "query"])
    assert f"{float(entropy.sel(layer=names.format(1)).mean()):.3f} ±" in repr(seen)
    figures = [recording.plot().axes[0].images[0].get_array() for recording in (seen, rows)]
    np.testing.assert_allclose(*figures, rtol=1e-5)
    assert seen.dataset().sizes["pass"] == 2


def test_a_recorder_draws_itself_and_has_a_table() -> None:
    block = CausalBlock(nn.functional.scaled_dot_product_attention)
    recorder = Recorder(block, random_normal(2, 5, 8), at=10)
    assert repr(recorder) == "Recorder of CausalBlock: no probe yet"
    for step in range(21):
        recorder(step)
    assert repr(recorder).startswith("Recorder of CausalBlock: 3 probes, steps 0 to 20\n  layer")
    assert "<table>" in recorder._repr_html_()
    figure = recorder.plot()
    figure.savefig(io.BytesIO())
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), recorder.dataset().entropy[:, 0].mean("head"))


def test_watching_does_not_import_matplotlib() -> None:
    script = "import sys, joma; joma.watch.attention, joma.watch.Recorder; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
