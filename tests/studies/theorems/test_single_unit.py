"""Training of a block with one hidden unit: against SGD by hand, and the distance from a flow."""

import numpy as np
import torch
import xarray as xr

from joma.models.block import Block, BlockConfig
from joma.probes.entropy import shannon_entropy
from joma.studies.theorems import single_unit
from joma.study import Context


def block(seeds):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return Block(BlockConfig(tokens=3, hidden=1, attention="exp", scale=0.3), generators=generators)


def loss(model, _step):
    return -model(torch.eye(3, dtype=torch.float64))[..., 0].mean(dim=-1)


def test_it_records_weights_and_entropy_of_plain_sgd():
    """With h = Σ_l v_l exp(z_l) x_l + w·u and one context a token, ∂v = exp(z)/3 and ∂z = v exp(z)/3."""
    seeds, rate = (0, 1), 0.1
    trajectory = single_unit.train(Context(seeds), block(seeds), loss, rate=rate, steps=4, at=(0, 2, 4), label="unit")
    model = block(seeds)
    v, z = model.v.detach()[..., 0], model.z.detach()[:, 0]
    weights, entropy = [v], [shannon_entropy(z.softmax(-1))]
    for _ in range(4):
        v, z = v + rate * z.exp() / 3, z + rate * v * z.exp() / 3
        weights.append(v)
        entropy.append(shannon_entropy(z.softmax(-1)))
    assert trajectory.trained.dims == ("seed", "step", "token")
    np.testing.assert_allclose(trajectory.trained, torch.stack(weights[::2], dim=1), atol=1e-14)
    np.testing.assert_allclose(trajectory.entropy, torch.stack(entropy[::2], dim=1), atol=1e-14)


def test_distance_is_symmetric_in_sign_and_zero_on_the_flow():
    flow = xr.DataArray([-3.0, 0.0, 3.0])
    np.testing.assert_allclose(single_unit.distance(flow + 0.4, flow), [0.1, 0.4, 0.1])
    np.testing.assert_array_equal(single_unit.distance(flow, flow), 0)
