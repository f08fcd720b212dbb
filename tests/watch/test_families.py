"""`joma.watch.attention` on the families of models in `families.py`: the entropies of their own attention weights."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from joma.arguments import InputError
from joma.watch import attention
from joma.watch.recording import Recording
from watch.families import COPIES, EXACT, PARTIAL, WITHOUT_SDPA, WITHOUT_WEIGHTS, Family
from watch.family_weights import eager_entropies, run, token_rows
from watch.timm_models import TIMM
from watch.tiny_configs import normal, tiny_model

TOLERANCE = 1e-5  # nats
DOCS = Path(__file__).parents[2] / "docs"
ROWS_UNKNOWN = {  # families with layers of which the masks do not tell the padded rows
    "canine",  # attends to groups of characters
    "funnel",  # attends from pooled positions
    "lxmert",  # a mask of the text says nothing of the image
}


def implementations(model: Any) -> list[str]:
    """Return the implementations of attention that a model has on every machine."""
    return ["eager", "sdpa"] if model._supports_sdpa else ["eager"]


def watched(model: Any, family: Family) -> Recording:
    """Watch a pass of the model, whose output is the same bits as without the watcher."""
    before = run(model, family)[0]
    with attention(model, reduce="none") as seen:
        inside = run(model, family)[0]
    torch.testing.assert_close(inside, before, rtol=0, atol=0, equal_nan=True)
    return seen


def check_entropies(seen: Recording, family: Family, expected: list[torch.Tensor]) -> None:
    """Check that every attention of a pass is recorded, exactly in every row of a token and every head."""
    (recorded,) = seen.passes
    assert len(recorded) == len(expected)
    for layer, values in zip(recorded, expected, strict=True):
        rows = token_rows(family, len(values), values.shape[2])
        entropy = recorded[layer][:, :, : values.shape[2]]  # without queries that a model adds to fill a window
        if isinstance(rows, torch.Tensor) and layer not in seen.rows_unknown:
            assert entropy.transpose(1, 2)[~rows].isnan().all(), f"padded rows of {layer} count"
        elif isinstance(rows, slice) and family.inputs.keys() >= {
            "attention_mask",
            "pixel_values",
        }:  # tokens and patches
            rows = ~entropy.isnan().all(1)
            assert (~rows).sum() in (0, (family.inputs["attention_mask"] == 0).sum())
        assert entropy.shape == values.shape, layer
        difference = (entropy - values).abs().transpose(1, 2)[rows]
        assert difference.max() < TOLERANCE, layer


def check_family(name: str) -> None:
    """Check a family of `EXACT` with each implementation of attention that it has on every machine."""
    family = EXACT[name]
    model = tiny_model(name, family.model_class, **family.changes)
    expected = eager_entropies(model, family)
    assert max(entropy[entropy.isfinite()].std() for entropy in expected) > 0.03, "uniform attention hides errors"
    assert (name in WITHOUT_SDPA) == (not model._supports_sdpa)
    for implementation in implementations(model):
        model.set_attn_implementation(implementation)
        seen = watched(model, family)
        assert not seen.not_seen
        assert bool(seen.rows_unknown) == (name in ROWS_UNKNOWN)
        check_entropies(seen, family, expected)


def test_the_table_names_its_families() -> None:
    assert set(EXACT) >= COPIES | WITHOUT_SDPA
    assert len(EXACT) - len(COPIES) >= 60
    assert not set(EXACT) & (set(PARTIAL) | set(WITHOUT_WEIGHTS))


def test_the_page_on_families_is_that_of_the_table() -> None:
    page = runpy.run_path(str(DOCS / "make_families.py"))["page"]()
    assert (DOCS / "families.md").read_text(encoding="utf-8") == page, "run `make reference`"


def test_the_changelog_counts_the_families_of_the_table() -> None:
    text = " ".join((DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert f"{len(EXACT)} families of transformers and {len(TIMM)} models of timm agree" in text


@pytest.mark.parametrize("name", [name for name in EXACT if name not in COPIES])
@pytest.mark.filterwarnings("ignore::joma.watch.rows.RowsUnknown")
def test_every_attention_has_the_entropy_of_its_weights(name: str) -> None:
    check_family(name)


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.filterwarnings("ignore::joma.watch.rows.RowsUnknown")
@pytest.mark.filterwarnings("ignore::joma.watch.unseen.AttentionNotSeen")
def test_layers_without_weights_are_listed_beside_the_recorded_ones(name: str) -> None:
    family = PARTIAL[name]
    model = tiny_model(name.split(" (", maxsplit=1)[0], **family.changes)
    expected = eager_entropies(model, family)
    for implementation in implementations(model):
        model.set_attn_implementation(implementation)
        seen = watched(model, family)
        assert set(seen.not_seen) == set(family.not_seen)
        check_entropies(seen, family, expected)


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_models_without_weights_are_refused_by_name(name: str) -> None:
    family = WITHOUT_WEIGHTS[name]
    model = tiny_model(name.split(" (", maxsplit=1)[0], **family.changes)
    with pytest.raises(InputError, match=type(model).__name__), attention(model):
        run(model, family)


def test_a_model_with_lora_adapters_is_watched_like_its_base_model() -> None:
    peft = pytest.importorskip("peft")
    family = EXACT["llama"]
    model = tiny_model("llama", "LlamaForCausalLM")
    plain = watched(model, family)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)).eval()
    untrained = watched(adapted, family)
    assert list(untrained.passes[0]) == list(plain.passes[0]) == [f"model.layers.{index}.self_attn" for index in (0, 1)]
    for layer, entropy in plain.passes[0].items():
        assert torch.equal(untrained.passes[0][layer].nan_to_num(), entropy.nan_to_num())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter.add_(normal(*parameter.shape) if "lora_B" in name else 0.0)
    trained = watched(adapted, family)
    merged = adapted.merge_and_unload()
    merged.set_attn_implementation("eager")
    assert (trained.passes[0]["model.layers.1.self_attn"] - plain.passes[0]["model.layers.1.self_attn"]).nanmean() != 0
    check_entropies(trained, family, eager_entropies(merged, family))
