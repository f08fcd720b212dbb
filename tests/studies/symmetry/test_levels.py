from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from addition_runs import random_models
from joma.drawing import canvas
from joma.studies.symmetry.levels import draw_levels, hidden_states


def test_levels_are_the_embeddings_and_the_output_of_each_layer():
    model, tokens = random_models("causal"), torch.tensor([[3, 10, 4, 11], [5, 10, 0, 11]])
    states = hidden_states(model, tokens)
    assert states.shape == (2, 3, 2, 4, 8)
    assert not states.requires_grad
    torch.testing.assert_close(states[:, 0], model.embedding.detach()[:, tokens])
    with torch.no_grad():
        torch.testing.assert_close(model.logits(states[:, -1]), model(tokens))


def test_every_level_is_a_labelled_curve_of_the_mean_over_seeds():
    values = xr.DataArray(
        [[[0.1, 0.2], [0.3, 0.6]], [[0.3, 0.4], [0.5, 0.8]]], dims=("seed", "step", "level"), coords={"step": [0, 9]}
    )
    _, axes = canvas()
    draw_levels(axes[0, 0], values)
    panel = axes[0, 0]
    assert (panel.get_xscale(), panel.get_xlabel()) == ("log", "step + 1")
    assert [line.get_label() for line in panel.lines] == ["embeddings", "layer 0"]
    for line, mean in zip(panel.lines, ([0.2, 0.4], [0.3, 0.7]), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1, 10])
        np.testing.assert_allclose(line.get_ydata(), mean)
