"""Every measure against the whole matrix in float64, for whatever attention takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.kernels import entropy_blocks
from joma.probes.summary import (
    MEASURES,
    attention_summary,
)

TINY = entropy_blocks.BlockSize(60, 3, 5)  # so that a short input has many blocks
SLOPES = torch.tensor([0.5, -0.2, 0.1, 0.3, -0.4, 0.05], dtype=torch.float64)


def by_matrix(query, key, *, top=8, sinks=0, **options: Any) -> dict[str, torch.Tensor]:
    """Return all measures from the whole matrix, [batch, head, query, key], in float64."""
    (_, heads, queries, dim), keys = query.shape, key.shape[2]
    scale = options.get("scale")
    logits = query.double() @ key.double().repeat_interleave(heads // key.shape[1], dim=1).mT
    logits = logits * (dim**-0.5 if scale is None else scale)
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    if options.get("score_mod"):  # broadcast, where the function under test is mapped over single scores
        axes = torch.meshgrid(*(torch.arange(size) for size in logits.shape), indexing="ij")
        logits = options["score_mod"](logits, *axes)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = (logits + mask.double()).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    causal = options.get("is_causal", False)
    if causal:
        logits = logits.masked_fill(torch.arange(keys) > torch.arange(queries)[:, None], -torch.inf)
    return of_logits(logits, top, sinks, options.get("sink_logits"), causal)


def of_logits(logits, top, sinks, sink_logits, causal):
    (_, heads, queries, keys), visible = logits.shape, (logits > -torch.inf).sum(-1)
    everything = logits
    if sink_logits is not None:
        everything = torch.cat([logits, sink_logits.double().view(heads, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    all_weights = everything.softmax(-1).masked_fill((visible == 0)[..., None], torch.nan)
    p = all_weights[..., :keys]
    entropy = torch.special.entr(all_weights).sum(-1)
    count = (visible + (sink_logits is not None)).double()
    position = torch.arange(queries) + (0 if causal else max(0, keys - queries))
    if isinstance(sinks, torch.Tensor):
        sink_mass = p.gather(-1, (sinks % keys).expand(p.shape[:-1])[..., None])[..., 0]
    else:
        numbers = {number % keys for number in ((sinks,) if isinstance(sinks, int) else sinks)}
        sink_mass = p[..., sorted(numbers)].sum(-1)
    return {
        "entropy": entropy,
        "effective_tokens": entropy.exp(),
        "relative_entropy": (entropy / count.log()).masked_fill(count == 1, torch.nan),
        "largest_weight": p.amax(-1),
        "top_mass": p.sort(dim=-1, descending=True).values[..., :top].sum(-1),
        "sink_mass": sink_mass,
        "distance": (p * (position[:, None] - torch.arange(keys)).abs()).sum(-1),
        "largest_logit": logits.amax(-1).masked_fill(visible == 0, torch.nan),
    }


def decay(score, batch, head, query, key):
    """Bias by head and distance, and hide keys that are far away."""
    score = score + SLOPES[head].to(score.dtype) * (query - key) + 0.1 * batch
    return torch.where((query - key).abs() < 6, score, -torch.inf)


def drawn_mask(draw, generator, shape, kind, dtype):
    seen = torch.rand([draw(st.sampled_from([1, size])) for size in shape], generator=generator) < 0.6
    if kind == "boolean":
        return seen
    bias = torch.randn(seen.shape, generator=generator, dtype=dtype)
    low = {"infinite": -torch.inf, "least": torch.finfo(dtype).min, "bias": 0.0}[kind]
    return bias if kind == "bias" else bias.masked_fill(~seen, low)


@st.composite
def attentions(draw, dtype=torch.float64):
    """Queries, keys and options of attention, of every kind."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, shared, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys, dim = draw(st.integers(1, 13)), draw(st.integers(1, 13)), draw(st.integers(1, 5))
    heads = shared * group
    size = draw(st.sampled_from([0.0, 1.0, 4.0]))  # equal scores, all of them ties; usual ones; peaked ones
    query = (size * torch.randn(batch, heads, queries, dim, generator=generator, dtype=torch.float64)).to(dtype)
    key = torch.randn(batch, shared, keys, dim, generator=generator, dtype=torch.float64).to(dtype)
    options: dict[str, Any] = {"enable_gqa": group > 1, "is_causal": draw(st.booleans())}
    options["scale"] = draw(st.sampled_from([None, 0.3, -2.0, 0.0]))
    options["softcap"] = draw(st.sampled_from([None, 2.0]))
    options["score_mod"] = draw(st.sampled_from([None, None, decay]))
    kind = draw(st.sampled_from(["none", "boolean", "infinite", "least", "bias"]))
    if kind != "none":
        options["attn_mask"] = drawn_mask(draw, generator, (batch, heads, queries, keys), kind, dtype)
    if draw(st.booleans()):
        options["sink_logits"] = torch.randn(heads, generator=generator, dtype=torch.float64).to(dtype)
    options["top"] = draw(st.integers(1, 16))
    rows = torch.randint(-keys, keys, (heads, queries), generator=generator)
    numbers = draw(st.lists(st.integers(-keys, keys - 1), min_size=1, max_size=3))
    options["sinks"] = draw(st.sampled_from([0, -1, tuple(numbers), rows]))
    return query, key, options


def assert_as_matrix(ours, expected, tolerance):
    assert list(ours) == list(MEASURES)
    for name, values in expected.items():
        torch.testing.assert_close(
            ours[name].double(), values, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
        )


@settings(max_examples=100)
@given(attentions(), st.booleans())
def test_every_measure_agrees_with_the_matrix(case, tiny):
    query, key, options = case
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setitem(entropy_blocks._TILES, "cpu", TINY)
        ours = attention_summary(query, key, **options)
    assert_as_matrix(ours, by_matrix(query, key, **options), 1e-12)


@settings(max_examples=40)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]).flatmap(attentions), st.booleans())
def test_lower_precision_is_summed_in_float32(case, tiny):
    query, key, options = case
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setitem(entropy_blocks._TILES, "cpu", TINY)
        ours = attention_summary(query, key, **options)
    assert {values.dtype for values in ours.values()} == {torch.float32}
    assert_as_matrix(ours, by_matrix(query, key, **options), 2e-5)
