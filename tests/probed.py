"""Known results of a probe, for the tests of its tables, figures and page."""

from __future__ import annotations

import numpy as np
import xarray as xr

from joma.watch.series import Fault

STEPS = [0, 1, 8, 100]
FAULT = Fault("misplaced", ("step9",), "the weights of step9 belong after step100", "download it again", ("step9",))


def series_data(layer_count: int = 2) -> xr.Dataset:
    """Return a series whose entropy falls to its minimum at step 8 and recovers; head 1 is 0.5 nats above head 0.

    Attention to the first token rises from 0.1 to 0.4, by 0.1 more in head 1 than in head 0.
    """
    course = np.array([3.0, 2.0, 1.0, 1.5])
    entropy = course[:, None, None] + 0.1 * np.arange(layer_count)[:, None] + np.array([-0.25, 0.25])
    sinks = np.array([0.1, 0.2, 0.3, 0.4])[:, None, None] + np.zeros((layer_count, 1)) + np.array([-0.05, 0.05])
    ranks = np.array([10.0, 6.0, 4.0, 5.0])[:, None] + np.arange(layer_count)
    variables = {
        "entropy": (("step", "layer", "head"), entropy),
        "sink_mass": (("step", "layer", "head"), sinks),
        "sink_mass_sd": (("step", "layer", "head"), 0.02 + 0 * sinks),
        "stable_rank": (("step", "weight"), ranks),
        "embedding_cosine": ("step", [0.2, 0.2, 0.25, 0.3]),
        "embedding_random": ("step", [0.2, 0.2, 0.2, 0.2]),
        "hidden_cosine": (("step", "depth"), np.array([0.4, 0.5, 0.6, 0.7])[:, None] + 0.01 * np.arange(3)),
        "bounce_p_value": ("layer", 0.02 + 0.01 * np.arange(layer_count)),
        "bounce_depth": ("layer", np.full(layer_count, 2.0)),
        "bounce_chance": ("layer", np.full(layer_count, 0.1)),
    }
    coordinates = {
        "step": STEPS,
        "checkpoint": ("step", [f"step{step}" for step in STEPS]),
        "layer": [f"h.{layer}.attn" for layer in range(layer_count)],
        "weight": [f"h.{layer}.mlp" for layer in range(layer_count)],
    }
    return xr.Dataset(variables, coordinates, {"source": "someone/model"})


def single_data() -> xr.Dataset:
    """Return the model at step 8 alone."""
    return series_data().isel(step=[2]).drop_vars(["bounce_p_value", "bounce_depth", "bounce_chance"])


def with_heads(data: xr.Dataset) -> xr.Dataset:
    """Return the data with head laws: drifts of 0.1 and 0.2, and of 0.6 between different heads, at the last step."""
    steps, layers = data.sizes["step"], data.sizes["layer"]
    course = np.linspace(0.5, 1.0, steps)[:, None, None] + np.zeros((layers, 2)) + np.array([-0.05, 0.05])
    variables = {}
    for law, value in (("query_key", 0.1), ("value_output", 0.2)):
        for ending, size in (("", value), ("_others", 0.6)):
            variables[f"{law}_imbalance{ending}"] = (("step", "module", "key_head"), size / 2 * course)
            if steps > 1:
                drift = np.where(np.arange(steps)[:, None, None] > 0, size * course, np.nan)
                variables[f"{law}_drift{ending}"] = (("step", "module", "key_head"), drift)
    names = {"module": [f"h.{layer}.attn" for layer in range(layers)], "key_head": [0, 1]}
    return data.assign(variables).assign_coords(names)
