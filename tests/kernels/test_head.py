"""Surprisal and its gradients, computed in both ways, compared with autograd through log_softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels import head
from joma.kernels.head import surprisal

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

PASSES = {
    "by seed": (head._forward_by_seed, head._backward_by_seed),
    "at once": (head._forward_at_once, head._backward_at_once),
}


def draw_inputs(seed, vocabulary, scale):
    """Input, weight and bias of a head; targets; and factors of the surprisals in a scalar to differentiate."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, 4, 5), (2, 5, vocabulary), (2, vocabulary))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes]
    target = torch.randint(vocabulary, (2, 3, 4), generator=generator)
    factors = torch.randn((2, 3, 4), generator=generator, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in inputs], target, factors


def by_log_softmax(x, weight, bias, target):
    logits = torch.einsum("skpw,swt->skpt", x, weight) + bias[:, None, None]
    return -logits.log_softmax(-1).gather(-1, target.expand(x.shape[:-1])[..., None])[..., 0]


@pytest.mark.parametrize("way", sorted(PASSES))
@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    vocabulary=st.integers(1, 200),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    shared=st.booleans(),
)
def test_value_and_gradients(way, seed, vocabulary, scale, shared):
    inputs, target, factors = draw_inputs(seed, vocabulary, scale)
    target = target[0] if shared else target
    expected = by_log_softmax(*inputs, target)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_passes", lambda *_: PASSES[way])
        patch.setattr(head, "CACHED_LOGITS", 2 * vocabulary)
        nats = surprisal(*inputs, target)
        gradients = torch.autograd.grad((nats * factors).sum(), inputs)
        with torch.no_grad():
            torch.testing.assert_close(surprisal(*inputs, target), expected.detach(), rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(nats, expected, rtol=1e-12, atol=1e-11)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10 * scale)


def test_a_target_of_vanishing_probability_costs_the_difference_of_the_logits():
    x, weight = torch.ones(1, 1, 1, 1), torch.tensor([[[0.0, -500.0]]])
    assert surprisal(x, weight, torch.zeros(1, 2), torch.tensor([[1]])).item() == pytest.approx(500.0)


@cuda
@pytest.mark.parametrize("vocabulary", [1_024, 5_003, 28_782])
def test_the_kernel_is_exact_up_to_the_rounding_of_half_precision(vocabulary):
    inputs, target, factors = draw_inputs(3, vocabulary, 1.0)
    inputs = [tensor.detach().to("cuda", torch.bfloat16).float().requires_grad_() for tensor in inputs]
    target, factors = target.cuda(), factors.cuda()
    expected = by_log_softmax(*(tensor.double() for tensor in inputs), target)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), inputs)
    with torch.autocast("cuda", torch.bfloat16):
        nats = surprisal(*inputs, target)
    gradients = torch.autograd.grad((nats * factors).sum(), inputs)
    torch.testing.assert_close(nats.double(), expected, rtol=0, atol=0.1)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0.05)


@cuda
def test_the_kernel_gives_what_the_compiled_pass_gives():
    (x, weight, bias), target, _ = draw_inputs(4, 3_000, 1.0)
    arguments = [tensor.detach().float().cuda() for tensor in (x.flatten(1, 2), weight, bias)]
    target = target.flatten(1).cuda()
    options = {"dtype": torch.bfloat16, "gradients": True}
    by_kernel = head._forward_by_kernel(*arguments, target, **options)
    compiled = torch.compile(head._forward_at_once)(*arguments, target, **options)
    torch.testing.assert_close(
        by_kernel[0], compiled[0], rtol=0, atol=2e-2
    )  # logits are rounded before the bias is added
    torch.testing.assert_close(by_kernel[3].float(), compiled[3].float(), rtol=0, atol=2e-2)
    assert not by_kernel[3][..., 3_000:].any()
