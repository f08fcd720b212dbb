"""Attention of modules that compute their own weights: which softmaxes are attention, and what their axes are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joma.arguments import InputError
from joma.watch import AttentionNotSeen, attention, interception
from tiny_models import random_normal, textbook_entropy

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 4
EMBEDDING = nn.Parameter(random_normal(LENGTH, WIDTH, seed=9))


class Layer(nn.Module):
    """A layer whose class name says nothing, and whose forward is `compute`, with queries, keys and values."""

    def __init__(self, compute: Callable[..., Tensor], **attributes: object) -> None:
        super().__init__()
        self.compute = compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(*inputs)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    shape = BATCH, HEADS, LENGTH, WIDTH
    return random_normal(*shape), 3 * random_normal(*shape, seed=1), random_normal(*shape, seed=2)


def expected_entropy() -> Tensor:
    query, key, _ = inputs()
    return textbook_entropy((query @ key.mT).softmax(-1))


def method(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def cast_dropped_and_masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = F.softmax(query @ key.mT, dim=-1, dtype=torch.float64).to(value.dtype)
    weights = nn.Dropout(0.5)(weights) * torch.ones(1, HEADS, 1, 1)
    return torch.matmul(weights.contiguous(), value)


def flattened(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax((query @ key.mT).flatten(0, 1), dim=2)
    return torch.bmm(weights, value.flatten(0, 1)).unflatten(0, (BATCH, HEADS))


def viewed_after(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = nn.Softmax(dim=-1)(query @ key.mT).view(-1, LENGTH, LENGTH)
    return torch.baddbmm(torch.zeros(1, 1, 1), weights, value.flatten(0, 1))


def einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", query, key).softmax(-1), value)


def einsum_with_ellipsis(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("...jd, ...ij -> ...id", value, (query @ key.mT).softmax(-1))


def heads_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bijh", query, key).softmax(2)
    return torch.einsum("bijh,bhjd->bihd", weights, value)


def queries_before_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bihj", query, key).softmax(-1)
    return weights.transpose(1, 2) @ value


def transposed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value.mT @ (query @ key.mT).softmax(-1).transpose(-2, -1)


def shifted_by_the_maximum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = query @ key.mT
    return (logits - logits.max(dim=-1, keepdim=True).values).softmax(-1) @ value


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute all heads as one group of a key, in five axes."""
    weights = (query[:, None] @ key[:, None].mT).softmax(-1)
    return weights @ value[:, None]


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = torch.exp(query @ key.mT)
    return (exponentials / exponentials.sum(dim=-1, keepdim=True)) @ value


def written_out_and_shifted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logits = query @ key.mT
    exponentials = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = torch.div(exponentials, torch.sum(exponentials, -1, True))
    return F.dropout(weights, 0.5, training=False) @ value


def logarithm_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.log_softmax(query @ key.mT, dim=-1).exp() @ value


def softmin(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.softmin(-(query @ key.mT), dim=-1) @ value


def linalg(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.linalg.matmul((query @ key.mT).softmax(-1), value)


ATTENTIONS = [
    method,
    linalg,
    cast_dropped_and_masked,
    flattened,
    viewed_after,
    einsum,
    einsum_with_ellipsis,
    heads_last,
    queries_before_heads,
    transposed,
    shifted_by_the_maximum,
    grouped,
    written_out,
    written_out_and_shifted,
    logarithm_first,
    softmin,
]


@pytest.mark.parametrize("compute", ATTENTIONS, ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("grad", [False, True])
def test_attention_is_found_by_its_use_and_has_the_entropy_of_its_weights(compute: Callable, grad: bool) -> None:
    layer = Layer(compute, num_heads=HEADS).eval()
    plain = layer(*inputs()) if compute is not cast_dropped_and_masked else None
    with torch.set_grad_enabled(grad), attention(layer, measures=("entropy", "largest_logit"), reduce="none") as seen:
        inside = layer(*(tensor.requires_grad_(grad) for tensor in inputs()))
    assert plain is None or torch.equal(inside, plain)
    torch.testing.assert_close(seen.passes[0]["Layer"], expected_entropy(), atol=2e-6, rtol=0)
    query, key, _ = inputs()
    largest = torch.as_tensor(seen.dataset().largest_logit.values[0, 0]).float()
    torch.testing.assert_close(largest, (query @ key.mT).amax(-1))


@pytest.mark.parametrize("weights_first", [True, False])
def test_a_linear_map_by_the_values_is_attention(weights_first: bool) -> None:
    """The weights may be its input, or its matrix."""

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT).softmax(-1)
        return F.linear(weights, value[0].mT) if weights_first else F.linear(value.mT, weights[0])

    layer, (query, key, value) = Layer(compute), (tensor[:1, 0] for tensor in inputs())
    with attention(layer, reduce="none") as seen:
        layer(query, key, value)
    torch.testing.assert_close(seen.passes[0]["Layer"], expected_entropy()[:1, :1], atol=2e-6, rtol=0)


def exponentials_changed_in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = torch.exp(query @ key.mT)
    total = exponentials.sum(-1, keepdim=True)
    exponentials[..., 0] = 0.0
    return (exponentials / total) @ value


def another_sum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = torch.exp(query @ key.mT)
    total = torch.exp(query @ key.mT).sum(-1, keepdim=True)
    return (exponentials / total) @ value


def without_a_sum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = torch.exp(query @ key.mT)
    return (exponentials / LENGTH) @ value + exponentials.sum(-1, keepdim=True) / exponentials.sum()


def logarithm_changed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (2 * F.log_softmax(query @ key.mT, dim=-1)).exp() @ value


@pytest.mark.parametrize(
    "compute",
    [exponentials_changed_in_place, another_sum, without_a_sum, logarithm_changed],
    ids=lambda compute: compute.__name__,
)
def test_what_is_nearly_a_softmax_is_measured_as_none(compute: Callable) -> None:
    model = nn.ModuleList([Layer(method), Layer(compute)])
    with attention(model) as seen:
        for layer in model:
            layer(*inputs())
    assert [list(layers) for layers in seen.passes] == [["0"]]


def test_written_softmaxes_work_in_inference_mode_without_being_seen() -> None:
    layer = Layer(written_out)
    with torch.inference_mode(), pytest.raises(InputError, match="attention"), attention(layer):
        layer(*inputs())


def router(query: Tensor, _: Tensor, value: Tensor) -> Tensor:
    """Weigh what experts return, token by token."""
    gates = query[:, 0].softmax(-1)
    experts = torch.stack([value[:, 0]] * WIDTH)
    mixed = (gates[..., None] * experts.movedim(0, 2)).sum(-2)
    return (
        mixed + torch.einsum("bte,ebtd->btd", gates, experts) + (gates[..., None, :] @ experts.movedim(0, 2))[..., 0, :]
    )


def soft_lookup(query: Tensor, key: Tensor, _: Tensor) -> Tensor:
    """Mix the rows of an embedding."""
    weights = (query @ key.mT).softmax(-1)
    return weights @ EMBEDDING + torch.einsum("bhij,jd->bhid", weights, EMBEDDING)


def output(query: Tensor, *_: Tensor) -> Tensor:
    return F.softmax(query, dim=-1).sum()


@pytest.mark.parametrize("compute", [router, soft_lookup, output], ids=lambda compute: compute.__name__)
def test_routers_lookups_and_outputs_are_no_attention(compute: Callable) -> None:
    model = nn.ModuleList([Layer(method), Layer(compute)])
    with attention(model) as seen:
        for layer in model:
            layer(*inputs())
    assert [list(layers) for layers in seen.passes] == [["0"]]


@pytest.mark.parametrize("columns", [slice(None, -1), slice(1, None)])
def test_a_column_that_is_dropped_after_the_softmax_is_a_sink(columns: slice) -> None:
    sinks = torch.tensor([0.5, 3.0, -1.0])

    def with_sinks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        column = sinks.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)
        parts = [query @ key.mT, column]
        logits = torch.cat(parts if columns.start is None else parts[::-1], dim=-1)
        weights = (logits - logits.max(-1, keepdim=True).values).softmax(-1)
        return weights[..., columns] @ value

    layer = Layer(with_sinks)
    query, key, value = inputs()
    with attention(layer, measures=("entropy", "sink_mass", "largest_logit"), reduce="none") as seen:
        layer(query, key, value)
    logits = query @ key.mT
    weights = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)], -1).softmax(-1)
    torch.testing.assert_close(seen.passes[0]["Layer"], textbook_entropy(weights), atol=2e-6, rtol=0)
    dataset = seen.dataset()
    torch.testing.assert_close(torch.as_tensor(dataset.sink_mass.values[0, 0]).float(), weights[..., 0])
    torch.testing.assert_close(torch.as_tensor(dataset.largest_logit.values[0, 0]).float(), logits.amax(-1))


def test_a_softmax_in_a_submodule_belongs_to_the_module_that_uses_it() -> None:
    class Normalise(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits.softmax(-1)

    normalise = Normalise()
    model = nn.Sequential(Layer(lambda query, key, value: normalise(query @ key.mT) @ value, normalise=normalise))
    with attention(model) as seen:
        model[0](*inputs())
    assert list(seen.passes[0]) == ["0"]


def test_no_logits_are_kept_after_a_pass() -> None:
    """A model that returns its weights, as with `output_attentions`, keeps no logits alive."""
    layer = Layer(lambda query, key, _: (query @ key.mT).softmax(-1))
    model = nn.ModuleList([Layer(method), layer])
    tensors = []
    with attention(model):
        model[0](*inputs())
        tensors.append(model[1](*inputs()))
        assert not interception._local.interceptor.softmaxes


def test_gradient_transforms_and_inference_mode_are_recorded() -> None:
    layer = Layer(method)
    query, key, value = inputs()
    with attention(layer, reduce="none") as seen:
        torch.func.grad(lambda value: layer(query, key, value).sum())(value)
        torch.func.grad(lambda query: layer(query, key, value).sum())(query)
        with torch.inference_mode():
            layer(query, key, value)
    for layers in seen.passes:
        torch.testing.assert_close(layers["Layer"], expected_entropy(), atol=2e-6, rtol=0)
    assert len(seen.passes) == 3


@pytest.mark.parametrize("columns", [slice(None, -1), slice(None)])
def test_a_column_that_differs_from_row_to_row_is_a_key(columns: slice) -> None:
    """A column that is computed from the queries is no sink of its head."""

    def with_null_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.cat([query @ key.mT, query.sum(-1, keepdim=True)], -1).softmax(-1)
        return weights[..., columns][..., :LENGTH] @ value

    layer, (query, key, value) = Layer(with_null_key), inputs()
    with attention(layer, reduce="none") as seen:
        layer(query, key, value)
    weights = torch.cat([query @ key.mT, query.sum(-1, keepdim=True)], -1).softmax(-1)
    torch.testing.assert_close(seen.passes[0]["Layer"], textbook_entropy(weights), atol=2e-6, rtol=0)


def renormalised_top(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights = weights.masked_fill(weights < weights.topk(2).values[..., -1:], 0.0)
    return (weights / weights.sum(-1, keepdim=True)) @ value


def top_without_the_rest(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    return torch.where(weights >= weights.topk(2).values[..., -1:], weights, 0.0) @ value


def scattered_top(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    top, index = (query @ key.mT).softmax(-1).topk(2)
    return torch.zeros(BATCH, HEADS, LENGTH, LENGTH).scatter_(-1, index, top) @ value


def masked_by_an_index(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    mask = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, weights.topk(2).indices, True)
    return weights.masked_fill(~mask, 0.0) @ value


MIXER = nn.Linear(HEADS, HEADS)
MIXING = nn.Parameter(random_normal(HEADS, HEADS, seed=8))


def talking_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    return MIXER(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ value


def talking_heads_by_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhij,hg->bgij", (query @ key.mT).softmax(-1), MIXING)
    return torch.einsum("bhij,bhjd->bhid", weights, value)


def sharpened(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1).pow(2) @ value


def scaled_by_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT).softmax(-1) * torch.arange(1.0, 1 + LENGTH)) @ value


def changed_in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights.sqrt_()
    return weights @ value


def changed_in_a_view(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights[..., :2] *= 0.5
    return weights @ value


def set_to_a_number(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    weights[..., 0] = 0.25
    return weights @ value


CHANGES = [
    renormalised_top,
    top_without_the_rest,
    scattered_top,
    masked_by_an_index,
    talking_heads,
    talking_heads_by_einsum,
    sharpened,
    scaled_by_key,
    changed_in_place,
    changed_in_a_view,
    set_to_a_number,
]


def check_not_seen(compute: Callable, reason: str) -> None:
    """A layer is listed with the reason and not recorded, beside one that is; the outputs are the same bits."""
    model = nn.ModuleList([Layer(method), Layer(compute)])
    plain = model[1](*inputs())
    context = attention(model, maps=True)
    seen = context.__enter__()
    outputs = [layer(*inputs()) for layer in model]
    with pytest.warns(AttentionNotSeen, match=reason):
        context.__exit__(None, None, None)
    assert torch.equal(outputs[1], plain)
    assert seen.not_seen == {"1": f"Layer {reason}"}
    assert [list(layers) for layers in seen.passes] == [["0"]]
    with pytest.raises(InputError, match="`layer` must be one of 0"):
        seen.maps("1")


@torch.no_grad()
@pytest.mark.parametrize("compute", CHANGES, ids=lambda compute: compute.__name__)
def test_weights_that_are_changed_after_the_softmax_are_listed(compute: Callable) -> None:
    check_not_seen(compute, "changes its weights after the softmax")


def test_changes_in_place_are_seen_in_inference_mode() -> None:
    for compute in (changed_in_place, set_to_a_number):
        with torch.inference_mode():
            check_not_seen(compute, "changes its weights after the softmax")


MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool)


def difference_of_softmaxes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT).softmax(-1) - 0.5 * (key @ query.mT).softmax(-1)) @ value


def multiplied_and_added_up(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    return (weights[..., None] * value[:, :, None]).sum(-2)


def multiplied_from_the_right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    return torch.sum(value.unsqueeze(2) * weights.unsqueeze(4), dim=(3,))


@pytest.mark.parametrize(
    "compute", [multiplied_and_added_up, multiplied_from_the_right], ids=lambda compute: compute.__name__
)
def test_products_that_are_added_up_are_listed(compute: Callable) -> None:
    check_not_seen(compute, "adds up products of weights and values without a matrix product")


def test_weights_of_several_softmaxes_are_listed() -> None:
    check_not_seen(difference_of_softmaxes, "weighs values by several softmaxes")


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.softmax(-1) @ (key.softmax(-2).mT @ value)


def linear_attention_by_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = torch.einsum("bhjd,bhje->bhed", key.softmax(2), value)
    return torch.einsum("bhed,bhid->bhie", context, query.softmax(-1) * 0.5)


@pytest.mark.parametrize(
    "compute", [linear_attention, linear_attention_by_einsum], ids=lambda compute: compute.__name__
)
def test_linear_attention_is_no_attention(compute: Callable) -> None:
    check_not_seen(compute, "averages values that a softmax has averaged already: linear attention")


def with_harmless_functions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Apply again what leaves the weights: head masks, a mask of what is hidden already, scales, and copies."""
    logits = (query @ key.mT).masked_fill(~MASK, -torch.inf)
    weights = logits.softmax(-1).clone() * torch.tensor([1.0, 0.0, 2.0])[:, None, None]
    weights = weights * torch.tensor([False, True, True])[:, None, None]
    weights = weights.masked_fill(weights.isnan(), 0.0).nan_to_num().masked_fill_(~MASK, 0.0)
    weights = torch.where(MASK, weights, torch.zeros_like(weights)) * MASK
    weights[~MASK.expand_as(weights)] = 0.0
    return (2 * weights / 3.0).reshape(BATCH, HEADS, LENGTH, LENGTH) @ value


def test_functions_that_leave_the_weights_leave_them_recorded() -> None:
    layer = Layer(with_harmless_functions)
    with attention(layer, reduce="none") as seen:
        layer(*inputs())
    torch.testing.assert_close(seen.passes[0]["Layer"], expected_entropy(), atol=2e-6, rtol=0)
