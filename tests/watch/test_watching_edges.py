"""Models at the edges of what is followed: heads one by one, shared heads in an einsum, logits that are overwritten."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from joma.arguments import InputError
from joma.watch import AttentionNotSeen, HeadsUnknown, Recorder, attention
from joma.watch.recording import check_sinks
from tiny_models import random_normal, textbook_entropy


class Head(nn.Module):
    """One head, a module of its own."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, dim, bias=False) for _ in range(3))

    def logits(self, x: Tensor) -> Tensor:
        return 3 * self.query(x) @ self.key(x).mT

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    """Four heads, each called by itself: as modules, or in a loop of one module."""

    def __init__(self, in_a_loop: bool) -> None:
        super().__init__()
        self.num_heads, self.in_a_loop = 4, in_a_loop
        self.heads = nn.ModuleList(Head(8, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_a_loop:
            return torch.cat([head(x) for head in self.heads], dim=-1)
        weights = [head.logits(x).softmax(-1) for head in self.heads]
        return torch.cat([p @ head.value(x) for p, head in zip(weights, self.heads, strict=True)], dim=-1)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_heads_that_are_called_one_by_one_are_not_read_from_the_batch(in_a_loop):
    torch.manual_seed(0)
    model, x = Heads(in_a_loop), random_normal(8, 6, 8)  # the number of heads divides the batch
    warned = pytest.warns(HeadsUnknown, match="may be recorded in parts") if in_a_loop else nullcontext()
    with torch.no_grad(), warned, attention(model) as seen:
        model(x)
    with torch.no_grad():
        expected = [float(textbook_entropy(head.logits(x).softmax(-1)).mean()) for head in model.heads]
    assert seen.entropy.sizes == {"pass": 1, "layer": 4, "head": 1}
    np.testing.assert_allclose(seen.entropy.values.ravel(), expected, atol=1e-6)


def test_heads_that_share_keys_in_an_einsum_are_heads_not_queries():
    class Grouped(nn.Module):
        num_heads = 4

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            weights = torch.einsum("bqghd,bkgd->bghqk", query, key).softmax(-1)
            return torch.einsum("bghqk,bkgd->bqghd", weights, key)

    query, key = random_normal(3, 6, 2, 2, 5), random_normal(3, 6, 2, 5, seed=1)
    model = Grouped()
    with attention(model, measures=["entropy", "distance"], reduce="none") as seen:
        model(query, key)
    weights = torch.einsum("bqghd,bkgd->bghqk", query, key).softmax(-1).flatten(1, 2)
    away = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    assert seen.entropy.sizes["head"] == 4
    np.testing.assert_allclose(seen.entropy.values[0, 0], textbook_entropy(weights), atol=1e-6)
    np.testing.assert_allclose(seen.dataset().distance.values[0, 0], (weights * away).sum(-1), atol=1e-5)


@pytest.mark.parametrize("kind", ["zeroed", "out"])
def test_logits_that_are_overwritten_are_listed_not_measured(kind):
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits = x @ x.mT
            if kind == "out":
                return torch.softmax(logits, -1, out=logits) @ x
            weights = logits.softmax(-1)
            logits.zero_()
            return weights @ x

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Head(4, 4), Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Two()
    with torch.no_grad(), pytest.warns(AttentionNotSeen), attention(model) as seen:
        model(random_normal(2, 5, 4))
    assert list(seen.passes[0]) == ["first"]
    assert list(seen.not_seen) == ["second"]


def test_a_pass_that_ends_with_an_error_is_forgotten():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.fails = Head(4, 4), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if self.fails:
                raise ArithmeticError
            return x

    model = Fails()
    with torch.no_grad(), attention(model) as seen:
        model(random_normal(2, 5, 4))
        model.fails = True
        with pytest.raises(ArithmeticError):
            model(random_normal(2, 5, 4, seed=1))
        model.fails = False
        model(random_normal(2, 5, 4))
    assert seen.entropy.sizes["pass"] == 2
    np.testing.assert_array_equal(seen.entropy.values[0], seen.entropy.values[1])


def test_a_probe_leaves_the_generators_as_they_were():
    class Noisy(Head):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x) + float(np.random.rand()))  # noqa: NPY002

    recorder = Recorder(Noisy(4, 4), random_normal(2, 5, 4), ranks=False)
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(3), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    recorder.probe(0)
    assert torch.equal(torch.rand(3), expected[0])
    assert np.random.rand() == expected[1]  # noqa: NPY002


@pytest.mark.parametrize("sinks", [(0, 1), range(2), [0, 1]])
def test_sinks_come_in_any_sequence(sinks, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside the tests
    model, x = Head(4, 4), random_normal(2, 5, 4)
    with torch.no_grad(), attention(model, measures="sink_mass", sinks=sinks) as seen:
        model(x)
    with torch.no_grad():
        expected = model.logits(x).softmax(-1)[..., :2].sum(-1).mean()
    assert float(seen.dataset().sink_mass.squeeze()) == pytest.approx(float(expected), abs=1e-6)
    assert check_sinks(np.array([0, 1])) == check_sinks(sinks) == (0, 1)
    options: dict[str, Any] = {"measures": "sink_mass", "sinks": np.array(sinks), "ranks": False, "strict": True}
    (scalar,) = Recorder(model, x, **options)(0).values()
    assert scalar == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("sinks", [[[0]], "first", 0.5, None, np.array([[0]])])
def test_sinks_that_are_no_key_numbers_are_refused(sinks, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match="`sinks` must be a whole number"), attention(Head(4, 4), sinks=sinks):
        pass
