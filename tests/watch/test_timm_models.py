"""`joma.watch.attention` on models of timm: the entropies of their weights, fused or not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.arguments import InputError
from joma.probes.entropy import shannon_entropy
from joma.watch import attention
from watch.family_weights import results_of_softmax, three_axes
from watch.timm_models import AXES, PARTIAL, TIMM, WITHOUT_WEIGHTS, set_fused, timm_model
from watch.tiny_configs import normal

TOLERANCE = 1e-5  # nats


def image(options: dict[str, Any]) -> Tensor:
    """Return two images of the size that a model takes."""
    size = options.get("img_size", 32)
    size = size if isinstance(size, int) else size[0]
    return normal(2, 3, size, size)


def watched_entropies(model: nn.Module, pixels: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return the entropies that are recorded in a pass, and the layers that are not seen."""
    before = model(pixels)
    with attention(model, reduce="none") as seen:
        assert torch.equal(model(pixels), before)
    return list(seen.passes[0].values()), list(seen.not_seen)


def own_entropies(model: nn.Module, pixels: Tensor, axes: str) -> list[Tensor]:
    """Return the entropies of the weights that a model computes itself."""
    set_fused(model, False)
    with results_of_softmax() as weights:
        model(pixels)
    return [three_axes(shannon_entropy(matrix.double()), axes) for matrix in weights]


@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_every_attention_has_the_entropy_of_its_weights(name: str) -> None:
    model, pixels = timm_model(name, **TIMM[name]), image(TIMM[name])
    expected = own_entropies(model, pixels, AXES.get(name, "bh"))
    assert max(entropy.std() for entropy in expected) > 0.005, "uniform attention hides errors"
    for fused in (True, False):
        set_fused(model, fused)
        recorded, not_seen = watched_entropies(model, pixels)
        assert not not_seen
        for entropy, values in zip(recorded, expected, strict=True):
            torch.testing.assert_close(entropy.double(), values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.filterwarnings("ignore::joma.watch.unseen.AttentionNotSeen")
@torch.no_grad()
def test_layers_without_weights_are_listed(name: str) -> None:
    options, expected, _ = PARTIAL[name]
    recorded, not_seen = watched_entropies(timm_model(name, **options), image(options))
    assert recorded
    assert not_seen == expected


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
@torch.no_grad()
def test_models_without_weights_are_refused_by_name(name: str) -> None:
    options, _ = WITHOUT_WEIGHTS[name]
    model = timm_model(name, **options)
    with pytest.raises(InputError, match=type(model).__name__), attention(model):
        model(image({"img_size": 64, **options}))


def test_the_stand_in_for_torchvision_does_not_stay() -> None:
    timm_model("vit_tiny_patch16_224", **TIMM["vit_tiny_patch16_224"])
    module = sys.modules.get("torchvision")
    assert module is None or type(module).__name__ == "module"
