"""Tiny models of timm, which imports torchvision for names that its models do not need."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from watch.tiny_configs import with_spread_weights

PARTS = (
    "torchvision torchvision.datasets torchvision.models torchvision.models.feature_extraction torchvision.ops "
    "torchvision.ops.misc torchvision.transforms torchvision.transforms.functional"
)


class _StandIn(ModuleType):
    """A module that has every name, each an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (nn.Module,), {})


class _AnyAttribute(type):
    """The type of classes that have every attribute, such as the members of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@contextmanager
def _torchvision() -> Iterator[None]:
    """Put a stand-in for torchvision in its place, if it cannot be imported; transformers must not see it later."""
    try:
        import torchvision  # noqa: F401

        yield
        return
    except (ImportError, RuntimeError):
        pass
    for name in PARTS.split():
        module = sys.modules[name] = _StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
    for name in PARTS.split()[1:]:
        package, _, last = name.rpartition(".")
        setattr(sys.modules[package], last, sys.modules[name])
    try:
        yield
    finally:
        for name in PARTS.split():
            del sys.modules[name]


def timm_model(name: str, **options: Any) -> nn.Module:
    """Return a tiny model of timm, by its name or its class, with weights that make attention far from uniform."""
    if "timm" not in sys.modules:
        import transformers  # noqa: F401  (it looks for torchvision when it is imported)

        with _torchvision():
            import timm  # noqa: F401
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if "." in name:
            module, _, last = name.rpartition(".")
            package = importlib.import_module(f"timm.models.{module}")
            create = getattr(package, last)
            if "cfg" in options:
                options["cfg"] = getattr(package, f"{last}Cfg")(**options["cfg"])
        else:
            create = partial(sys.modules["timm"].create_model, name)
        model = create(num_classes=0, **options)
    return with_spread_weights(model).eval()


def set_fused(model: nn.Module, fused: bool) -> None:
    """Let every attention call SDPA, or compute its own weights."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4}
STAGES = {"embed_dims": (16, 32), "depths": (1, 1), "num_heads": (2, 4)}
TNT = {"inner_dim": 8, "num_heads_inner": 2, "num_heads_outer": 4}
TIMM = {  # the options of tiny models; images are 32 x 32, or as `img_size` says
    "beit_base_patch16_224": VIT,
    "crossvit_tiny_240": {
        **{"img_size": 32, "img_scale": (1.0, 1.0), "patch_size": (8, 16), "embed_dim": (16, 32)},
        **{"depth": ((1, 1, 0),), "num_heads": (2, 4), "mlp_ratio": (2, 2, 1)},
    },
    "deit3_small_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "deit_tiny_patch16_224": VIT,
    "eva02_tiny_patch14_224": VIT,
    "flexivit_small": VIT,
    "gcvit.GlobalContextVit": {
        **{"img_size": 32, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16, "window_ratio": (16, 16)},
    },
    "hiera.Hiera": {
        **{"img_size": (32, 32), "embed_dim": 16, "num_heads": 2, "stages": (1, 1), "q_pool": 1},
        **{"patch_stride": (4, 4), "mask_unit_size": (4, 4)},
    },
    "levit_128s": {"img_size": 64, "embed_dim": (16, 32), "num_heads": (2, 4), "depth": (1, 1), "key_dim": 8},
    "maxvit_tiny_tf_224": {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1), "stem_width": 8},
    "mvitv2.MultiScaleVit": {
        **{"img_size": 32, "cfg": {"depths": (1, 1), "embed_dim": (8, 16), "num_heads": (1, 2)}},
    },
    "nest.Nest": {
        **{"img_size": 32, "patch_size": 2, "num_levels": 2, "embed_dims": (16, 32), "num_heads": (2, 4)},
        "depths": (1, 1),
    },
    "pit_ti_224": {
        **{"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (8, 8), "depth": (1, 1), "heads": (2, 4)},
    },
    "pvt_v2_b0": {**STAGES, "sr_ratios": (2, 1), "mlp_ratios": (2, 2)},
    "samvit_base_patch16": {**VIT, "window_size": 2, "global_attn_indexes": (1,)},
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "tnt_s_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, **TNT},
    "twins_svt_small": {**STAGES, "img_size": 32, "depths": (2, 2), "sr_ratios": (2, 1), "wss": (2, 2)},
    "visformer_tiny": {"img_size": 32, "init_channels": 8, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2},
    "vit_base_patch16_siglip_224": {**VIT, "global_pool": "avg"},
    "vit_relpos_small_patch16_224": VIT,
    "vit_tiny_patch16_224": VIT,
    "volo.VOLO": {
        **{"layers": (1, 1), "img_size": 32, "embed_dims": (16, 32), "num_heads": (2, 4), "mlp_ratio": 2.0},
        **{"downsamples": (True, False), "outlook_attention": (True, False), "post_layers": None},
    },
}
AXES = {  # of weights that are not [batch, head, query, key]
    "hiera.Hiera": "bhn",
    "nest.Nest": "bhn",
    "samvit_base_patch16": "(bh)",
    "volo.VOLO": "bhn",
}
PARTIAL = {  # the options, the layers that are not seen, and why
    "cait_xxs24_224": (VIT, ["blocks.0.attn", "blocks.1.attn"], "heads are mixed after the softmax"),
    "convit_tiny": ({**VIT, "local_up_to_layer": 1}, ["blocks.0.attn"], "a sum of two softmaxes"),
    "davit_tiny": (STAGES, ["stages.0.blocks.0.1.attn", "stages.1.blocks.0.1.attn"], "channels attend to channels"),
    "xcit_nano_12_p16_224": (
        {**VIT, "img_size": 64, "patch_size": 16},
        ["blocks.0.attn", "blocks.1.attn"],
        "channels attend to channels",
    ),
}
WITHOUT_WEIGHTS = {
    "coat_tiny": ({"img_size": 32}, "linear attention"),
    "edgenext_xx_small": ({}, "channels attend to channels"),
    "mlp_mixer.MlpMixer": ({"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}, "no attention"),
    "mobilevitv2_050": ({}, "linear attention"),
    "poolformer_s12": ({}, "no attention"),
}
