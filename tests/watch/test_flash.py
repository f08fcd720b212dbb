# ruff: noqa: ARG001, PLR0917 - the signatures are those of the package
"""Calls of the `flash_attn` package, by a stand-in of its signatures that computes the whole matrix."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.watch import attention
from joma.watch.flash import flash_call, packed_places, places_of_positions
from tiny_models import random_normal, textbook_entropy

STARTS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)


def reference(
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the weights [batch, head, query, key] of queries and keys [batch, position, head, dim]."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[-2:]
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * ahead.abs()
    visible = torch.ones(queries, keys, dtype=torch.bool)
    visible &= ahead <= (0 if causal else window[1] if window[1] >= 0 else keys)
    visible &= ahead >= (-window[0] if window[0] >= 0 else -keys)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    options = {"window": window_size, "softcap": softcap, "slopes": alibi_slopes, "scale": softmax_scale}
    weights = reference(q, k, causal=causal, **options)
    value = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    return (weights @ value).transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    return flash_attn_func(*qkv.unbind(2), causal=causal)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:
    parts = []
    for n in range(len(cu_seqlens_q) - 1):
        rows, columns = slice(*cu_seqlens_q[n : n + 2].tolist()), slice(*cu_seqlens_k[n : n + 2].tolist())
        parts.append(flash_attn_func(q[None, rows], k[None, columns], v[None, columns], causal=causal)[0])
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install the stand-in, as if it were the package, bound by name in this module."""
    module = ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


class Flash(nn.Module):
    """A module that calls the functions by the names that its Python module has bound."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options

    def forward(self, *inputs: Any) -> Tensor:
        return globals()[self.name](*inputs, **self.options)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 2)},
    {"window_size": (1, 2), "softmax_scale": 0.7},
    {"causal": True, "softcap": 1.5},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])},
]
NAMES = {"window_size": "window", "softmax_scale": "scale", "alibi_slopes": "slopes"}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("queries", [6, 4, 1])
def test_windows_caps_slopes_and_shared_heads(options: dict[str, Any], queries: int) -> None:
    query, key = 3 * random_normal(2, queries, 4, 8), random_normal(2, 6, 2, 8, seed=1)
    model = Flash("flash_attn_func", **options)
    plain = model(query, key, key)
    with attention(model, reduce="none") as seen:
        assert torch.equal(model(query, key, key), plain)
    settings = {"causal": False} | {NAMES.get(name, name): value for name, value in options.items()}
    expected = textbook_entropy(reference(query, key, **settings))
    assert list(seen.passes[0]) == ["Flash"]  # the matrix inside the stand-in is not counted again
    torch.testing.assert_close(seen.passes[0]["Flash"], expected, atol=2e-6, rtol=0)
    assert globals()["flash_attn_func"] is sys.modules["flash_attn"].flash_attn_func


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors_and_packed_sequences(causal: bool) -> None:
    qkv = 2 * random_normal(2, 6, 3, 4, 8)
    packed, varlen = Flash("flash_attn_qkvpacked_func", causal=causal), Flash("flash_attn_varlen_func", causal=causal)
    rows = 2 * random_normal(9, 4, 8)
    with attention(packed, reduce="none") as seen:
        packed(qkv)
    expected = textbook_entropy(reference(qkv[:, :, 0], qkv[:, :, 1], causal=causal))
    torch.testing.assert_close(seen.passes[0]["Flash"], expected, atol=2e-6, rtol=0)
    with attention(varlen, reduce="none") as seen:
        varlen(rows, rows, rows, STARTS, STARTS, 5, 5)
    bounds = zip(STARTS.tolist(), STARTS.tolist()[1:], strict=False)
    parts = [textbook_entropy(reference(rows[None, a:b], rows[None, a:b], causal=causal)) for a, b in bounds]
    torch.testing.assert_close(seen.passes[0]["Flash"], torch.cat(parts, -1), atol=2e-6, rtol=0)


def test_queries_of_packed_sequences_are_the_last_of_their_keys() -> None:
    queries, keys = packed_places(torch.tensor([0, 1, 3]), STARTS[[0, 1, 3]])
    assert queries.position.tolist() == [[2, 4, 5]]
    assert keys.position.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert queries.sequence.tolist() == [[0, 1, 1]]
    sequence, position = places_of_positions(torch.tensor([[0, 1, 2, 0, 0, 1]]))[0]
    assert sequence.diff().tolist() == [[0, 0, 1, 1, 0]]
    assert position.tolist() == [[0, 1, 2, 0, 0, 1]]


def test_a_cache_that_is_not_full_yet_hides_its_end() -> None:
    query, key = random_normal(1, 2, 1, 4), random_normal(1, 2, 6, 4, seed=1)
    call = flash_call(query, key, causal=True, padding=torch.ones(1, 4))
    assert call.mask.flatten().tolist() == [True] * 4 + [False] * 2


def test_a_call_with_unknown_arguments_goes_on_with_one_warning(package: ModuleType, monkeypatch: Any) -> None:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, starts: int) -> Tensor:
        return q.clone()

    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(globals(), "flash_attn_func", flash_attn_func)
    monkeypatch.setattr("joma.watch.flash.FUNCTIONS", {"flash_attn_func": ("query", "key")})
    model, query = nn.Sequential(Flash("flash_attn_func", starts=1)), random_normal(1, 4, 2, 3)
    message = "attention that cannot be measured is not recorded: `flash_attn_func` must be called with known arguments"
    with pytest.warns(UserWarning, match=message), attention(model) as seen:
        assert torch.equal(model[0](query, query, query), query)
    assert list(seen.not_seen) == ["0"]
