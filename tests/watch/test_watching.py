"""`joma.watch.attention` on small blocks: which calls it records, how it groups them, and that it leaves no trace."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import product

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as bound_at_import
from torch.utils.checkpoint import checkpoint

from joma.arguments import InputError, StateError
from joma.watch import attention, switches
from tiny_models import (
    TOKENS,
    CausalBlock,
    PlainAttention,
    opt_decoder,
    random_normal,
    textbook_entropy,
    with_large_weights,
)


@pytest.fixture(autouse=True)
def _warnings_given_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_warned", {"fast path", "compiled"})


def hook_counts(model: nn.Module) -> list[tuple[int, ...]]:
    """Return how many hooks of each kind each module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return [tuple(len(getattr(module, kind)) for kind in kinds) for module in model.modules()]


def leave_by_error(model: nn.Module, *inputs: Tensor) -> None:
    """Leave the context by an error, which must come out unchanged."""

    def fail() -> None:
        with attention(model):
            assert any(any(counts) for counts in hook_counts(model))
            if inputs:
                model(*inputs)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()


@pytest.mark.parametrize(
    "attend", [bound_at_import, F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention]
)
def test_a_call_is_recorded_under_any_name_of_the_function(attend: Callable[..., Tensor]) -> None:
    block = with_large_weights(CausalBlock(attend))
    x = random_normal(3, 6, 8)
    with attention(block, reduce="none") as recording:
        inside = block(x)
    assert torch.equal(inside, block(x))
    torch.testing.assert_close(recording.passes[0]["CausalBlock"], textbook_entropy(block.matrix(x)), atol=2e-5, rtol=0)


def test_calls_are_numbered_within_a_pass_and_heads_may_differ() -> None:
    twice, wide = (
        with_large_weights(CausalBlock(bound_at_import, times=2)),
        with_large_weights(CausalBlock(bound_at_import, heads=4)),
    )
    model = nn.Sequential(twice, wide, twice)
    with attention(model) as recording:
        model(random_normal(1, 4, 8))
        model(random_normal(1, 4, 8))
    assert recording.entropy.layer.values.tolist() == ["0", "0[1]", "1", "0[2]", "0[3]"]
    assert recording.entropy.sizes == {"pass": 2, "layer": 5, "head": 4}
    assert recording.entropy.notnull().sum("head").values.tolist() == [[2, 2, 4, 2, 2]] * 2
    assert recording.entropy.identical(recording.dataset().entropy)


def test_submodules_called_one_by_one_make_one_pass() -> None:
    model = nn.ModuleDict({"a": CausalBlock(bound_at_import), "b": CausalBlock(bound_at_import)})
    with attention(model) as recording:
        for seed in (0, 1):
            model["b"](model["a"](random_normal(1, 4, 8, seed=seed)))
    assert [list(layers) for layers in recording.passes] == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 2, 5, 4)])
def test_inputs_with_fewer_or_more_axes(shape: tuple[int, ...]) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, 2 * x, x, attn_mask=mask)

    x, mask = random_normal(*shape), random_normal(*shape[:-2], 5, 5, seed=1)
    with attention(Bare(), reduce="none") as recording:
        Bare()(x, mask)  # another object: not watched
        assert not recording.passes
    model = Bare()
    with attention(model, reduce="none") as recording:
        model(x, mask)
    expected = textbook_entropy((x @ (2 * x).transpose(-1, -2) / 2 + mask).softmax(-1))
    heads = shape[-3] if len(shape) > 4 else 1
    torch.testing.assert_close(recording.passes[0]["Bare"], expected.reshape(-1, heads, 5), atol=2e-5, rtol=0)


def test_gradients_are_the_same_bits_and_checkpointed_layers_are_recorded_once() -> None:
    model = with_large_weights(CausalBlock(bound_at_import))
    x = random_normal(2, 6, 8)
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    for reentrant, backward in product((False, True), (Tensor.backward, torch.autograd.backward)):
        model.zero_grad()
        with attention(model) as recording:
            start = x.clone().requires_grad_()
            backward(checkpoint(model, start, use_reentrant=reentrant).square().sum())
        assert len(recording.passes) == 1
        assert not recording.passes[0]["CausalBlock"].requires_grad
        assert all(
            torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), plain, strict=True)
        )


def test_dropout_draws_the_same_random_numbers_inside() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    model, x = Dropped(), random_normal(1, 2, 6, 4)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with attention(model, reduce="none") as recording:
        assert torch.equal(model(x), plain)
    expected = textbook_entropy((x @ x.transpose(-1, -2) / 2).softmax(-1))
    torch.testing.assert_close(recording.passes[0]["Dropped"], expected, atol=2e-5, rtol=0)


def test_no_hook_or_mode_remains_even_after_an_error() -> None:
    model, _ = opt_decoder()
    before = hook_counts(model)
    for raised in (RuntimeError, KeyboardInterrupt):

        def fail(*_: object, raised: type[BaseException] = raised) -> None:
            raise raised("in a layer")

        with attention(model) as recording:
            handle = model.model.decoder.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(raised):
                model(input_ids=TOKENS)
            handle.remove()
            model(input_ids=TOKENS)
        assert list(recording.passes[-1]) == [f"model.decoder.layers.{index}.self_attn" for index in (0, 1)]
        assert hook_counts(model) == before
    leave_by_error(model)
    assert hook_counts(model) == before
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch._C._is_torch_function_mode_enabled()


def test_contexts_nest_on_a_model_and_its_submodule() -> None:
    model = nn.Sequential(CausalBlock(bound_at_import), nn.MultiheadAttention(8, 2, batch_first=True))
    with_large_weights(model).train()

    def call() -> None:
        x = model[0](random_normal(1, 4, 8))
        model[1](x, x, x)

    with attention(model) as outer:
        with attention(model) as inner, attention(model[1], reduce="none") as part:
            call()
        call()
    assert len(outer.passes) == 2
    assert len(inner.passes) == len(part.passes) == 1
    for layer, values in inner.passes[0].items():
        assert torch.equal(values, outer.passes[0][layer])
    torch.testing.assert_close(part.passes[0]["MultiheadAttention"].mean((0, 2)), outer.passes[0]["1"])
    assert not torch._C._is_torch_function_mode_enabled()


def test_a_model_without_attention_is_an_error_at_the_end_of_the_context() -> None:
    model = nn.Linear(2, 2)
    message = "`model` must compute attention, got Linear, which does not; call the model itself"
    with pytest.raises(InputError, match=message), attention(model):
        model(torch.zeros(1, 2))
    leave_by_error(model, torch.zeros(1, 2))  # the error at the end does not hide another one
    with attention(model) as recording:
        pass
    with pytest.raises(StateError, match="`recording` has no forward pass; call"):
        recording.dataset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    model, query = PlainAttention(), random_normal(2, 3, 6, 4)
    with attention(model) as recording:
        model(query, query)
        torch.set_default_dtype(dtype)
        try:
            model(query, query)
        finally:
            torch.set_default_dtype(torch.float32)
    first, second = recording.entropy.values
    assert (first == second).all()


@pytest.mark.parametrize("lengths", [(4, 9), (6, 6)])
def test_a_causal_bias_is_recorded_like_its_matrix(lengths: tuple[int, int]) -> None:
    model, query, key = PlainAttention(), random_normal(2, 3, lengths[0], 4), random_normal(2, 3, lengths[1], 4)
    for bias in (causal_lower_right(*lengths), causal_upper_left(*lengths)):
        with attention(model, reduce="none") as recording:
            inside = model(query, key, bias)
            model(query, key, bias._materialize())
        assert torch.equal(inside, model(query, key, bias))
        entropy, expected = (layers["PlainAttention"] for layers in recording.passes)
        torch.testing.assert_close(entropy, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("shapes", [((1, 3), (2, 3)), ((2, 1), (2, 3)), ((3,), (2, 3))])
def test_queries_that_broadcast_are_recorded(shapes: tuple[tuple[int, ...], ...]) -> None:
    model, query, key = PlainAttention(), random_normal(*shapes[0], 4, 5), random_normal(*shapes[1], 6, 5)
    with attention(model, reduce="none") as recording:
        model(query, key)
    p = (query @ key.mT / 5**0.5).softmax(-1)
    torch.testing.assert_close(recording.passes[0]["PlainAttention"], textbook_entropy(p), atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8)])
def test_an_empty_batch_is_recorded(shape: tuple[int, ...]) -> None:
    model, query = PlainAttention(), torch.zeros(shape)
    with attention(model) as recording, attention(model, reduce="none") as rows:
        assert model(query, query).shape == shape
    assert recording.entropy.isnull().all()
    assert rows.passes[0]["PlainAttention"].shape == shape[:-1]


def test_a_call_that_cannot_be_measured_proceeds_with_one_warning() -> None:
    model, query = PlainAttention(), random_normal(3, 2, 5, 4)
    plain = torch.vmap(model)(query, query)
    ragged = torch.nested.nested_tensor(
        [random_normal(5, 2, 4), random_normal(3, 2, 4)], layout=torch.jagged
    ).transpose(1, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attention(model) as empty:
            outputs = [torch.vmap(model)(query, query) for _ in range(2)]
        with attention(model) as recording:
            assert model(ragged, ragged).is_nested
            model(query, query)
    assert all(torch.equal(output, plain) for output in outputs)
    messages = [str(warning.message) for warning in caught]  # torch also warns of nested tensors
    first, second = (message for message in messages if message.startswith("attention that cannot be measured"))
    assert first.startswith("attention that cannot be measured is not recorded: `query` must be a plain tensor")
    assert ("one inside vmap" in first, "a nested one; pad it" in second) == (True, True)
    with pytest.raises(InputError, match="one inside vmap"):
        empty.dataset()
    assert recording.entropy.notnull().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_wrong_type_of_model_or_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))
    with pytest.raises(InputError, match="`model` must be free of TorchScript, got Sequential; watch the original"):
        attention(scripted).__enter__()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside the tests
    with pytest.raises(InputError, match=r"`model` must be a `torch.nn.Module`, got str 'gpt2'; load it first"):
        attention("gpt2").__enter__()  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"`rows` must be a boolean tensor .* \"masks\" or \"all\", got 'x'"):
        attention(PlainAttention(), rows="x").__enter__()  # type: ignore[arg-type]


def test_bad_arguments_are_named() -> None:
    model = CausalBlock(bound_at_import)
    with pytest.raises(InputError, match="`reduce` must be one of mean, batch, none, got 'meen'"):
        attention(model, reduce="meen").__enter__()
    with pytest.raises(InputError, match="`precision` must be one of highest, high"):
        attention(model, precision="low").__enter__()
    shape = r"`rows` must be of shape \(1, 4\).*got \(1, 5\)"
    with pytest.raises(InputError, match=shape), attention(model, rows=torch.ones(1, 5)):
        model(random_normal(1, 4, 8))
    assert hook_counts(model) == [(0, 0, 0, 0)] * 2


def test_a_recording_keeps_no_reference_to_the_model() -> None:
    model = CausalBlock(bound_at_import)
    with attention(model) as recording:
        model(random_normal(1, 4, 8))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert recording.passes
