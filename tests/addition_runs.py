"""Runs and models for the tests of addition: a config that trains in a second, and a run with known results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xarray as xr

from joma.models.transformer import Decoder, DecoderConfig
from joma.studies.symmetry.addition import CLAIMS, KINDS, Config
from joma.studies.symmetry.addition_arms import REMOVED, all_arms
from joma.studies.symmetry.addition_measures import steps_to

SMALL = Config(
    digits=1, layers=2, heads=2, width=8, batch=8, steps=6, every=3, rate=1e-2, warm_up=2, held=0.3, glance=10,
    probed=10, together=4, arms=("none causal", "none full", "learned full", "attention all", "mlp 1", "both all"),
)  # fmt: skip
SINGLE_LAYER = {f"{part} {layer}" for part in REMOVED for layer in range(6)}  # arms of the paper preset


def random_models(mask: str, positions: str = "none", seeds: int = 2) -> Decoder:
    """Return untrained models of one-digit sums; the larger head makes the likeliest digits differ by position."""
    config = DecoderConfig(12, 8, 2, 2, length=6, mask=mask, positions=positions, activation="gelu")
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in range(seeds)])
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.mul_(3.0)
    return model


def ideal_run(**changes: dict[str, float]) -> xr.Dataset:
    """Return a run of the paper preset in which every claim holds, with five equal seeds.

    `accuracy` (at the end), `gain` (of the readout in layer 3) and `own` (the share of locations) change arms by name.
    """
    names, steps = list(all_arms(6)), np.arange(0, 3001, 250)
    ends = dict.fromkeys(names, 1.0) | {"none full": 0.05, "attention all": 0.001, "mlp all": 0.02, "both all": 0.001}
    ends |= dict.fromkeys(SINGLE_LAYER, 0.9)
    ends |= {"none causal": 0.9999, "attention 0": 0.999} | changes.get("accuracy", {})
    gain = dict.fromkeys(names, 0.5) | {"none full": 0.01} | changes.get("gain", {})
    share = {name: 1.0 if name == "none causal" else 0.4 for name in names} | changes.get("own", {})
    shape, rise = (len(names), 5, len(steps)), np.minimum(steps / 1250, 1.0)
    decodability = np.full((*shape, 7), 0.3)
    decodability[..., 4] += _by_arm(gain, names, 3)
    variables: dict[str, Any] = {
        "accuracy": (("arm", "seed", "step"), _by_arm(ends, names, 3) * rise * np.ones((1, 5, 1))),
        "decodability": (("arm", "seed", "step", "level"), decodability),
        "own": (
            ("arm", "seed", "step", "kind", "level", "higher"),
            np.ones((*shape, 2, 7, 7)) * _by_arm(share, names, 6),
        ),
        "similarity": (("location", "other"), np.zeros((11, 11))),
    }
    coordinates = {"arm": names, "seed": range(5), "step": steps, "kind": list(KINDS)}
    run = xr.Dataset(variables, coords=coordinates).assign(ceiling=0.053188, error=0.01, chance=1 / 11)
    run["steps_to_99"] = steps_to(run.accuracy, 0.99)
    return run


def _by_arm(values: dict[str, float], names: list[str], ndim: int) -> np.ndarray:
    """Return the values in the order of the names, along the first of `ndim` axes."""
    return np.array([values[name] for name in names]).reshape(-1, *[1] * (ndim - 1))


def verdicts(run: xr.Dataset, preset: str = "paper") -> dict[str, str]:
    """Return the verdict on every claim of addition, by its name."""
    return {claim.name: claim.judge(run, preset)["verdict"] for claim in CLAIMS}
