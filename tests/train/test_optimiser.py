"""The update of a captured step, and clipping, against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joma.arguments import InputError
from joma.train import Optimiser, clip_gradients
from joma.train.optimiser import adam_update


@pytest.mark.parametrize("decoupled", [False, True])
@given(seed=st.integers(0, 1000), rate=st.floats(1e-6, 1.0), decay=st.floats(0, 1.0))
def test_adam_update_is_torchs_adam(decoupled, seed, rate, decay):
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(7, generator=generator, dtype=torch.float64))
    own, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    rule = (torch.optim.AdamW if decoupled else torch.optim.Adam)([p], lr=rate, weight_decay=decay)
    for step in range(1, 6):
        p.grad = torch.randn(7, generator=generator, dtype=torch.float64)
        moment = torch.tensor(float(step), dtype=torch.float64)
        adam_update(own, p.grad, m.detach(), v.detach(), step=moment, rate=rate, decay=decay, decoupled=decoupled)
        rule.step()
        torch.testing.assert_close(own, p.detach(), rtol=1e-12, atol=1e-12)


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), limit=st.floats(1e-3, 10.0))
def test_every_seed_is_clipped_as_torch_would_clip_it_alone(seed, limit):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4, 2), (3, 5), (3,))
    together = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    for own in together:
        own.grad = torch.randn(own.shape, generator=generator, dtype=torch.float64) * torch.tensor(
            [0.01, 1.0, 100.0], dtype=torch.float64
        ).view(-1, *(1,) * (own.ndim - 1))
    alone = [[nn.Parameter(torch.zeros_like(own[one])) for own in together] for one in range(3)]
    norms = []
    for one, parameters in enumerate(alone):
        for own, whole in zip(parameters, together, strict=True):
            assert whole.grad is not None
            own.grad = whole.grad[one].clone()
        norms.append(nn.utils.clip_grad_norm_(parameters, limit))
    torch.testing.assert_close(clip_gradients(together, limit), torch.stack(norms))
    for one, parameters in enumerate(alone):
        for own, whole in zip(parameters, together, strict=True):
            assert whole.grad is not None
            torch.testing.assert_close(whole.grad[one], own.grad)


def test_a_negative_limit_is_refused():
    with pytest.raises(InputError, match="`clip`"):
        Optimiser(clip=-1.0)
