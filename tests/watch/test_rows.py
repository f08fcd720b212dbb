"""Which rows of an attention count, by the masks that modules are called with: names, shapes, and what is unknown."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from joma.arguments import InputError
from joma.watch import attention
from joma.watch.rows import (
    RowMasks,
    RowsUnknown,
    check_rows,
)
from tiny_models import random_normal

REAL = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
ALL = torch.ones(2, 5, dtype=torch.bool)


def causal(keys: Tensor) -> Tensor:
    """Return a causal mask [batch, 1, query, key] that hides padded keys."""
    length = keys.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril() & keys.bool()[:, None, None]


class Attention(nn.Module):
    """Attention of `x` to itself or to another sequence; the masks say something to the watcher alone."""

    def forward(self, x: Tensor, context: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        return F.scaled_dot_product_attention(x[:, None], y := (x if context is None else context)[:, None], y)[:, 0]


class Model(nn.Module):
    """A module with an attention inside, which gets a part of its input."""

    def __init__(self, inner: nn.Module | None = None, *, take: Any = None) -> None:
        super().__init__()
        self.inner, self.take = inner or Attention(), take or (lambda x: x)

    def forward(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        return self.inner(self.take(x))


def counted_rows(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Return which rows [batch, query] of the only attention count."""
    with attention(model, reduce="none") as recording:
        model(*args, **kwargs)
    (entropy,) = recording.passes[0].values()
    return ~entropy.isnan().all(1)


def test_masks_count_by_keyword_and_position_and_the_inner_one_first() -> None:
    x = random_normal(2, 5, 4)
    assert torch.equal(counted_rows(Model(), x, attention_mask=REAL), REAL.bool())
    assert torch.equal(counted_rows(Attention(), x, None, REAL), REAL.bool())
    assert torch.equal(counted_rows(Model(), x, attention_mask=None), ALL)
    assert torch.equal(counted_rows(Model(), x, attention_mask=REAL[:1]), REAL[:1].bool().expand(2, 5))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x: Tensor, attention_mask: Tensor, inner: Tensor | None) -> Tensor:
            del attention_mask
            return self.inner(x, attention_mask=inner)

    assert torch.equal(counted_rows(Outer(), x, REAL, None), REAL.bool())
    assert torch.equal(counted_rows(Outer(), x, REAL, REAL.flip(0)), REAL.flip(0).bool())
    assert torch.equal(counted_rows(Outer(), x, REAL, causal(REAL.flip(0))), REAL.bool())  # tokens before visible keys
    assert torch.equal(counted_rows(Outer(), x, causal(REAL), None), REAL.bool())


def test_a_mask_given_by_name_is_not_taken_for_a_positional_argument() -> None:
    class Variable(nn.Module):
        def forward(self, *inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            del attention_mask
            x = inputs[0][:, None]
            return F.scaled_dot_product_attention(x, x, x)

    x = random_normal(2, 5, 4)
    assert torch.equal(counted_rows(Variable(), x, REAL), ALL)
    assert torch.equal(counted_rows(Variable(), x, attention_mask=REAL), REAL.bool())


def test_rows_that_the_masks_leave_open_are_listed_with_one_warning() -> None:
    model = Model(take=lambda x: x[:, ::2])
    x = random_normal(2, 5, 4)
    reason = r"`attention_mask` \(2, 5\) does not fit its attention \[batch, query\] = \(2, 3\)"
    context = attention(model, reduce="none")
    recording = context.__enter__()
    model(x, attention_mask=REAL)
    model(x, attention_mask=REAL)
    with pytest.warns(RowsUnknown, match=f"all rows of inner count, padded ones too: {reason}") as caught:
        context.__exit__(None, None, None)
    assert len(caught) == 1
    assert list(recording.rows_unknown) == ["inner"]
    assert not recording.passes[0]["inner"].isnan().any()
    with attention(model) as recording:  # there is no padding: nothing to warn of
        model(x, attention_mask=torch.ones_like(REAL))
    assert recording.rows_unknown == {}


@given(st.integers(1, 4), st.integers(5, 9))
def test_blocks_of_a_sequence_are_cut_from_its_mask(size: int, length: int) -> None:
    class Blocks(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            del attention_mask
            x = F.pad(x, (0, 0, 0, -length % size)).reshape(-1, 1, size, 4)
            return F.scaled_dot_product_attention(x, x, x)

    real = torch.arange(length) < torch.tensor([[length], [length // 2]])  # one block is not enough to be sure
    rows = counted_rows(Blocks(), random_normal(2, length, 4), real)
    assert torch.equal(rows.reshape(2, -1)[:, :length], real)
    assert not rows.reshape(2, -1)[:, length:].any()


def test_padding_under_an_unknown_name_is_listed() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, visible: Tensor) -> Tensor:
            x = x[:, None]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=visible)

    x = random_normal(2, 5, 4)
    with pytest.warns(RowsUnknown, match="all rows of Named count, padded ones too: its mask hides tokens from all"):
        assert torch.equal(counted_rows(Named(), x, causal(REAL)), ALL)
    for visible in (causal(ALL), causal(ALL)[:1], torch.where(causal(ALL), 0.0, -torch.inf)):
        assert torch.equal(counted_rows(Named(), x, visible), ALL)
    with pytest.warns(RowsUnknown, match="its mask hides tokens from all"):
        counted_rows(Named(), x[:1], causal(REAL[:1]))
    with attention(model := Named(), rows="all") as recording:
        model(x, causal(REAL))
    assert recording.rows_unknown == {}


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
def test_padding_that_a_module_hides_in_its_own_logits_is_listed(hidden: float) -> None:
    class ScaledProduct(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            logits = x @ x.mT + torch.where(mask, 0.0, hidden)
            return (logits.softmax(-1) @ x)[:, 0]

    x = random_normal(2, 1, 5, 4)
    for rows in (slice(None), slice(0, 1)):
        with pytest.warns(
            RowsUnknown, match="all rows of ScaledProduct count, padded ones too: its mask hides tokens from all"
        ):
            assert torch.equal(counted_rows(ScaledProduct(), x[rows], causal(REAL)[rows]), ALL[rows])
    for mask in (causal(ALL), causal(ALL)[:1], torch.tensor(True)):
        assert torch.equal(counted_rows(ScaledProduct(), 30 * x, mask), ALL)


def test_the_mask_of_another_sequence_says_nothing_of_the_queries() -> None:
    x, context = random_normal(2, 5, 4), random_normal(2, 5, 4, seed=1)
    with pytest.warns(RowsUnknown, match="`attention_mask` \\(2, 5\\) may hold for its keys alone"):
        assert torch.equal(counted_rows(Attention(), x, context, REAL), ALL)
    assert torch.equal(counted_rows(Attention(), x[:, :4], context, REAL), ALL[:, :4])

    model = nn.MultiheadAttention(4, 2, batch_first=True)
    assert torch.equal(counted_rows(model, x, x, x, REAL == 0), REAL.bool())
    with pytest.warns(RowsUnknown, match="`key_padding_mask`"):
        assert torch.equal(counted_rows(model, x, context, context, REAL == 0), ALL)


def test_no_mask_of_a_text_holds_for_images() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.attention(pixel_values)

    assert torch.equal(counted_rows(Model(Vision()), random_normal(2, 5, 4), attention_mask=REAL), ALL)


def test_all_rows_and_given_rows() -> None:
    model, x = Model(), random_normal(2, 5, 4)
    with attention(model, reduce="none", rows="all") as recording:
        model(x, attention_mask=REAL)
        recording.rows = REAL.flip(0)
        model(x, attention_mask=REAL)
        recording.rows = "masks"
        model(x, attention_mask=REAL)
    counted_rows = [~layers["inner"].isnan().all(1) for layers in recording.passes]
    assert [rows.tolist() for rows in counted_rows] == [rows.bool().tolist() for rows in (ALL, REAL.flip(0), REAL)]
    with pytest.raises(InputError, match=r"`rows` must be .* got 'mask'; use \"masks\""), attention(model) as recording:
        recording.rows = "mask"
    with pytest.raises(InputError, match=r'`rows` must be .*"masks" or "all", got ndarray'):
        check_rows(np.ones((2, 3)))


def test_an_exception_leaves_no_mask_behind() -> None:
    class Fails(nn.Module):
        def forward(self, *_: Tensor) -> Tensor:
            raise RuntimeError("stop")

    model, x = Model(), random_normal(2, 5, 4)
    whole = nn.Sequential(model)
    with attention(whole, reduce="none") as recording:
        inner, model.inner = model.inner, Fails()
        with pytest.raises(RuntimeError, match="stop"):
            model(x, attention_mask=REAL)
        model.inner = inner
        whole(x)
    assert not recording.passes[-1]["0.inner"].isnan().any()
    assert not any(module._forward_pre_hooks for module in whole.modules())


def starts(masks: RowMasks, model: nn.Module, queries: int, keys: int, *args: Any, **kwargs: Any) -> Any:
    """Return the first tokens that are known inside the innermost call."""
    result: list[Tensor | None] = []
    innermost = [module for module in model.modules() if isinstance(module, Attention)][-1]
    name = next(name for name, module in model.named_modules() if module is innermost)

    def ask(*_: Any) -> None:
        result.append(masks.first_tokens(name, 2, queries, keys))

    with masks.hooks(dict(model.named_modules())):
        handle = innermost.register_forward_pre_hook(ask)
        model(*args, **kwargs)
        handle.remove()
    return None if result[0] is None else result[0].tolist()


def test_first_tokens_of_padded_and_numbered_sequences() -> None:
    model, x = Model(), random_normal(2, 5, 4)
    masks = RowMasks()
    assert starts(masks, model, 5, 5, x) is None
    assert starts(masks, model, 5, 5, x, attention_mask=REAL) is None  # on the right: key 0
    left = starts(masks, model, 5, 5, x, attention_mask=REAL.flip(-1))
    assert [row[-1] for row in left] == [2, 0]
    assert left[0][2:] == [2, 2, 2]
    numbers = torch.tensor([[1, 1, 2, 2, 0], [0, 1, 2, 3, 3]])
    numbered = starts(masks, model, 5, 5, x, attention_mask=numbers)
    assert (numbered[0][:4], numbered[1][1:]) == ([0, 0, 2, 2], [1, 2, 3, 3])
    cached = starts(masks, model, 1, 5, x[:, :1], attention_mask=REAL.flip(-1))
    assert cached == [[2], [0]]
    assert starts(masks, model, 1, 3, x[:, :1], attention_mask=REAL.flip(-1)) == [[0], [-2]]  # a window of the cache
    assert starts(masks, model, 1, 3, x[:, :1], attention_mask=torch.ones(2, 5)) == [[-2], [-2]]
    assert starts(masks, model, 5, 3, x, attention_mask=REAL.flip(-1)) is None  # keys that are no longer tokens
    causal = REAL.flip(-1).bool()[:, None, None] & torch.ones(5, 5, dtype=torch.bool).tril()
    assert starts(masks, model, 5, 5, x, attention_mask=causal) == [[2] * 5, [0] * 5]


def test_first_tokens_of_packed_and_other_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(
            self,
            x: Tensor,
            position_ids: Tensor | None = None,
            attention_mask: Tensor | None = None,
            encoder_attention_mask: Tensor | None = None,
            context: Tensor | None = None,
        ) -> Tensor:
            del position_ids, attention_mask, encoder_attention_mask
            return self.inner(x, context)

    masks, model, x = RowMasks(), Packed(), random_normal(2, 5, 4)
    assert starts(masks, model, 5, 5, x, torch.tensor([[0, 1, 2, 0, 1]])) == [[0, 0, 0, 3, 3]] * 2
    assert starts(masks, model, 5, 5, x, torch.arange(5)[None]) is None
    other = starts(masks, model, 5, 5, x, None, REAL, REAL.flip(-1), random_normal(2, 5, 4, seed=1))
    assert other == [[2] * 5, [0] * 5]


def test_sinks_are_the_first_tokens_of_sequences_padded_on_the_left() -> None:
    model, x = Model(), random_normal(2, 5, 4)
    with attention(model, measures="sink_mass", reduce="none") as recording:
        model(x, attention_mask=REAL.flip(-1))
    weights = (x @ x.transpose(1, 2) / 2).softmax(-1)
    expected = torch.stack([weights[0, 2:, 2].mean(), weights[1, :, 0].mean()])
    torch.testing.assert_close(recording.passes[0]["inner"].nanmean((1, 2)), expected, atol=1e-6, rtol=0)
    with attention(model, measures="sink_mass", sinks=1, reduce="none") as recording, warnings.catch_warnings():
        model(x, attention_mask=REAL.flip(-1))
    torch.testing.assert_close(recording.passes[0]["inner"][1, 0], weights[1, :, 1], atol=1e-6, rtol=0)
