"""A small decoder for the tests of probes."""

from __future__ import annotations

import torch

from joma.models.transformer import Decoder, DecoderConfig


def decoder(seeds=(0,), dtype=torch.float64, **parts):
    """Return decoders of width 8 with 9 tokens, one for each seed; `parts` are fields of `DecoderConfig`."""
    config = DecoderConfig(**{"vocabulary": 9, "width": 8, "heads": 2, "length": 10, **parts})
    return Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in seeds], dtype=dtype)
