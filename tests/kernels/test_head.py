"""Surprisal and its gradients, by each of its ways, against autograd through log_softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels import head as module
from joma.kernels.head import surprisal

WAYS = {
    "seed by seed": (module._seed_by_seed, module._gradients_seed_by_seed),
    "together": (module._together, module._gradients),
}


def parts(seed, types, scale):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, 4, 5), (2, 5, types), (2, types))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
    target = torch.randint(types, (2, 3, 4), generator=generator)
    above = torch.randn((2, 3, 4), generator=generator, dtype=torch.float64)
    return [own.requires_grad_() for own in drawn], target, above


def expected(x, weight, bias, target):
    logits = torch.einsum("skpw,swt->skpt", x, weight) + bias[:, None, None]
    return -logits.log_softmax(-1).gather(-1, target.expand(x.shape[:-1])[..., None])[..., 0]


@pytest.mark.parametrize("way", sorted(WAYS))
@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000), types=st.integers(1, 200), scale=st.sampled_from([0.1, 1.0, 30.0]), shared=st.booleans()
)
def test_value_and_gradients(way, seed, types, scale, shared):
    inputs, target, above = parts(seed, types, scale)
    target = target[0] if shared else target
    reference = expected(*inputs, target)
    slopes = torch.autograd.grad((reference * above).sum(), inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_choose", lambda _: WAYS[way])
        patch.setattr(module, "IN_CACHE", 2 * types)
        own = surprisal(*inputs, target)
        found = torch.autograd.grad((own * above).sum(), inputs)
        with torch.no_grad():
            torch.testing.assert_close(surprisal(*inputs, target), reference.detach(), rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-11)
    for one, other in zip(found, slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * scale)


def test_a_target_of_no_probability_costs_what_its_logit_says():
    x, weight = torch.ones(1, 1, 1, 1), torch.tensor([[[0.0, -500.0]]])
    assert surprisal(x, weight, torch.zeros(1, 2), torch.tensor([[1]])).item() == pytest.approx(500.0)
