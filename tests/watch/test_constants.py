"""A softmax that averages parameters or buffers looks them up; what a cache, also a buffer, holds is attended to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from joma.watch import attention
from tiny_models import random_normal, textbook_entropy
from watch.test_softmaxes import BATCH, HEADS, LENGTH, WIDTH, Layer, expected_entropy, inputs, method


class WithBuffer(nn.Module):
    """A layer that gives its buffer to `compute`, beside its inputs."""

    store: Tensor

    def __init__(self, compute: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("store", random_normal(*shape, seed=7))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.compute(query, key, value, self.store)


def lookup(query: Tensor, key: Tensor, _: Tensor, store: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ store


def lookup_in_a_view(query: Tensor, key: Tensor, _: Tensor, store: Tensor) -> Tensor:
    return store.T @ (query @ key.mT).softmax(-1).mT


def lookup_by_einsum(query: Tensor, key: Tensor, _: Tensor, store: Tensor) -> Tensor:
    return torch.einsum("bhij,jd->bhid", (query @ key.mT).softmax(-1), store)


def lookup_in_every_batch(query: Tensor, key: Tensor, _: Tensor, store: Tensor) -> Tensor:
    return torch.bmm((query @ key.mT).softmax(-1).flatten(0, 1), store.expand(BATCH * HEADS, -1, -1))


LOOKUPS = [lookup, lookup_in_a_view, lookup_by_einsum, lookup_in_every_batch]


@pytest.mark.parametrize("compute", LOOKUPS, ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_softmax_that_averages_a_buffer_is_no_attention(compute: Callable, mode: Callable) -> None:
    model = nn.ModuleList([Layer(method), WithBuffer(compute, LENGTH, WIDTH)])
    with mode(), attention(model) as seen:
        for layer in model:
            layer(*inputs())
    assert [list(layers) for layers in seen.passes] == [["0"]]


def test_a_buffer_of_another_module_is_known_too() -> None:
    codebook = WithBuffer(lookup, LENGTH, WIDTH)
    model = nn.Sequential(Layer(lambda q, k, v: method(q, k, v) + lookup(q, k, v, codebook.store)), codebook)
    with attention(model) as seen:
        model[0](*inputs())
    assert [list(layers) for layers in seen.passes] == [["0"]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_a_pass_writes_is_attended_to(mode: Callable) -> None:
    def with_cache(query: Tensor, key: Tensor, value: Tensor, store: Tensor) -> Tensor:
        store[:BATCH] = value
        return (query @ key.mT).softmax(-1) @ store[:BATCH]

    layer = WithBuffer(with_cache, BATCH + 1, HEADS, LENGTH, WIDTH)
    with mode(), attention(layer, reduce="none") as seen:
        layer(*inputs())
        layer(*inputs())
    for values in seen.passes:
        torch.testing.assert_close(values["WithBuffer"], expected_entropy(), atol=2e-6, rtol=0)
    assert len(seen.passes) == 2


def test_a_projected_buffer_is_attended_to() -> None:
    """Learned slots become values by a projection: attention of the slots' positions, as far as anyone can see."""
    project = nn.Linear(WIDTH, WIDTH)
    layer = WithBuffer(lambda q, k, _, store: (q @ k.mT).softmax(-1) @ project(store), LENGTH, WIDTH)
    with attention(layer, reduce="none") as seen:
        layer(*inputs())
    query, key, _ = inputs()
    expected = textbook_entropy((query @ key.mT).softmax(-1))
    torch.testing.assert_close(seen.passes[0]["WithBuffer"], expected, atol=2e-6, rtol=0)
