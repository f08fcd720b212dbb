"""Surprisal and its gradients, computed in both ways, compared with autograd through log_softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels import head
from joma.kernels.head import surprisal
from joma.kernels.head_matrix import half_copy, head_matrix
from joma.train.packed import leading_part

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


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), vocabulary=st.integers(1, 200), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_a_copy_has_the_surprisals_and_the_gradients_of_its_weight(seed, vocabulary, scale):
    (x, weight, bias), target, factors = draw_inputs(seed, vocabulary, scale)
    expected = by_log_softmax(x, weight, bias, target)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), (x, weight, bias))
    copy = head_matrix(weight.detach(), torch.zeros_like(bias), torch.float64).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_passes", lambda *_: PASSES["at once"])
        nats = surprisal(x, copy, bias, target)
        gradients = torch.autograd.grad((nats * factors).sum(), (x, copy, bias))
    torch.testing.assert_close(nats, expected, rtol=1e-12, atol=1e-11)
    gradients = (gradients[0], leading_part(gradients[1], weight), gradients[2])
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10 * scale)


def test_a_pass_without_gradients_computes_few_logits_at_a_time(monkeypatch):
    inputs, target, _ = draw_inputs(5, 40, 1.0)
    sizes, excess = [], head._excess

    def noted(logits, *arguments, **options):
        sizes.append(logits.numel())
        return excess(logits, *arguments, **options)

    monkeypatch.setattr(head, "_passes", lambda *_: PASSES["at once"])
    monkeypatch.setattr(head, "_excess", noted)
    monkeypatch.setattr(head, "MAX_LOGITS", 5 * 2 * 64)
    with torch.no_grad():
        torch.testing.assert_close(surprisal(*inputs, target), by_log_softmax(*inputs, target))
    assert sizes == [5 * 2 * 64, 5 * 2 * 64, 2 * 2 * 64]


@cuda
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has its own to say
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("vocabulary", [1_024, 5_003, 28_782, 70_001])
def test_the_kernel_is_exact_up_to_the_rounding_of_half_precision(vocabulary, copied):
    inputs, target, factors = draw_inputs(3, vocabulary, 1.0)
    inputs = [tensor.detach().to("cuda", torch.bfloat16).float().requires_grad_() for tensor in inputs]
    target, factors = target.cuda(), factors.cuda()
    expected = by_log_softmax(*(tensor.double() for tensor in inputs), target)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), inputs)
    if copied:
        inputs[1] = half_copy(inputs[1].detach()).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        nats = surprisal(*inputs, target)
        gradients = torch.autograd.grad((nats * factors).sum(), inputs)
        with torch.no_grad():
            assert surprisal(*inputs, target).equal(nats)
    torch.testing.assert_close(nats.double(), expected, rtol=0, atol=0.1)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.is_contiguous()
        part = leading_part(gradient, expected_gradient).to(expected_gradient.dtype)
        torch.testing.assert_close(part, expected_gradient, rtol=0, atol=0.05)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 1_088, 20_032, 28_800, 32_768, 32_832, 100_032])
@pytest.mark.parametrize("write", [False, True])
def test_the_kernel_gives_what_its_plain_twin_gives(dtype, columns, write):
    from joma.kernels import head_triton

    generator = torch.Generator().manual_seed(columns)
    logits = (5 * torch.randn(3, 7, columns, generator=generator)).cuda().to(dtype)
    logits[..., -50:] = max(-1e30, torch.finfo(dtype).min / 2)
    logits[1, 2, 3] = torch.nan
    target = torch.randint(columns - 50, (3, 7), generator=generator).cuda()
    expected_excess, excess = logits.clone(), logits.clone()
    expected = head.plain_excess(expected_excess, target, write=write)
    nats = head_triton.excess(excess, target, write=write)
    torch.testing.assert_close(nats, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(excess.float(), expected_excess.float(), rtol=1e-2, atol=1e-5, equal_nan=True)
    if write:
        assert not excess[0, :, -50:].any()
