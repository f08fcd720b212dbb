"""Which tokens a mask marks as real, whatever its kind, and which arguments of a module are masks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from joma.watch.masks import ModuleCall, Parameters, labelled, not_padding, real_tokens, seen_tokens, shows_all
from tiny_models import random_normal


def causal(keys: Tensor) -> Tensor:
    """Return a causal mask [batch, 1, query, key] that hides padded keys."""
    length = keys.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril() & keys.bool()[:, None, None]


@given(st.lists(st.integers(0, 6), min_size=2, max_size=4), st.booleans())
def test_every_kind_of_mask_tells_the_same_tokens(lengths: list[int], left: bool) -> None:
    tokens = torch.arange(6) < torch.tensor(lengths)[:, None]
    real = tokens.flip(-1) if left else tokens
    hidden = torch.where(real, 0.0, -torch.inf)
    for mask in (real, real.long(), real.int() * 3):
        assert torch.equal(real_tokens(mask), real)
    if real.any():
        assert torch.equal(real_tokens(real.double()), real)
        assert torch.equal(real_tokens(hidden), real)
        assert torch.equal(real_tokens(hidden.clamp_min(torch.finfo(torch.float32).min)), real)
    for padding in (~real, (~real).to(torch.uint8), hidden):
        assert torch.equal(not_padding(padding), real)
    assert torch.equal(labelled(torch.where(real, 3, -100)), real)
    full = causal(real)
    for mask in (full, full.long(), torch.where(full, 0.0, -torch.inf), torch.where(full, 0.0, -1e30), full[:, 0]):
        assert torch.equal(seen_tokens(mask), real)
    for mask in (real[:, None, None], hidden[:, None, None]):
        assert torch.equal(seen_tokens(mask), real)


def test_a_global_token_of_longformer_is_not_the_only_real_one() -> None:
    assert real_tokens(torch.tensor([[1e4, 0.0, 0.0]])).all()
    assert real_tokens(torch.zeros(1, 3)).all()


def test_a_mask_that_hides_each_token_from_itself_does_not_hide_the_last() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)
    assert seen_tokens(mask).tolist() == [[False, True, True, True]]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans(), st.booleans(), st.floats(0.1, 100.0))
def test_logits_show_all_tokens_where_their_mask_does(lengths: list[int], left: bool, both: bool, scale: float) -> None:
    tokens = torch.arange(6) < torch.tensor(lengths)[:, None]
    real = tokens.flip(-1) if left else tokens
    mask = real[:, None, None].expand(-1, 1, 6, 6) if both else causal(real)
    scores = scale * random_normal(len(lengths), 3, 6, 6)
    shown = bool(seen_tokens(mask).all())
    for hidden in (-torch.inf, torch.finfo(torch.float32).min, -1e4, -1e9):
        assert bool(shows_all(scores + torch.where(mask, 0.0, hidden))) == shown
    assert bool(shows_all(scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(), -torch.inf)))
    assert bool(shows_all(scores * torch.nan))


def masks(parameters: str, **arguments: Tensor) -> dict[str, list[list[bool]]]:
    """Return the masks of a module with these parameters by name, as real tokens."""
    call = ModuleCall("", Parameters(dict.fromkeys(parameters.split(), True)), (), arguments)
    return {mask.name: mask.read(mask.values).tolist() for mask in call.queries("layer")}


def test_lengths_are_those_of_the_input() -> None:
    tokens, lengths = torch.zeros(2, 3, dtype=torch.long), torch.tensor([1, 3])
    expected = {"lengths": [[True, False, False], [True, True, True]]}
    assert masks("input_ids lengths", input_ids=tokens, lengths=lengths) == expected
    assert masks("x lengths", x=random_normal(2, 3, 4), lengths=lengths) == expected
    assert masks("x lengths", x=random_normal(3, 2, 4), lengths=lengths) == {}  # of another batch
    assert masks("x lengths", x=random_normal(2, 3, 4), lengths=lengths.float()) == {}  # relative ones
    both = masks("input_ids attention_mask lengths", input_ids=tokens, attention_mask=tokens + 1, lengths=lengths)
    assert list(both) == ["attention_mask", "lengths"]  # the first that fits counts, as in XLM


def test_the_input_mask_is_of_padding_in_xlnet_alone() -> None:
    tokens, padding = torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1.0, 0.0, 0.0]])
    xlnet = masks("input_ids perm_mask input_mask", input_ids=tokens, input_mask=padding)
    assert xlnet == {"input_mask": [[False, True, True]]}
    assert masks("input_ids input_mask", input_ids=tokens, input_mask=padding) == {}
