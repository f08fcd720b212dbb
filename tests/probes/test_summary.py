"""Every measure against the whole matrix in float64, for whatever attention takes."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention

import joma
from joma.arguments import InputError
from joma.kernels import entropy_blocks
from joma.kernels.entropy_choice import PRECISIONS, entropy_rows
from joma.kernels.entropy_scores import Scores
from joma.probes.summary import (
    MEASURES,
    AttentionCall,
    AttentionSummary,
    attention_summary,
    check_measures,
    reduce_rows,
    summary_rows,
)
from largest_tensor import LargestTensor

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
    all_logits = logits
    if sink_logits is not None:
        all_logits = torch.cat([logits, sink_logits.double().view(heads, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    all_weights = all_logits.softmax(-1).masked_fill((visible == 0)[..., None], torch.nan)
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


def inputs(queries=7, keys=9, *, dtype=torch.float64, heads=2, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, n, dim, generator=generator, dtype=dtype) for n in (queries, keys))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (1, 2, 2, 3)])
def test_any_number_of_leading_axes(lead):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(*lead, n, 4, generator=generator, dtype=torch.float64) for n in (5, 6))
    sink_logits = torch.randn(lead[-1:], generator=generator, dtype=torch.float64)
    sinks = torch.randint(0, 6, (*lead, 5), generator=generator)
    summary = attention_summary(query, key, sink_logits=sink_logits, sinks=sinks)
    heads = lead[-1] if lead else 1
    flat = (tensor.reshape(-1, heads, *tensor.shape[-2:]) for tensor in (query, key))
    options = {"sink_logits": sink_logits.reshape(-1), "sinks": sinks.reshape(-1, heads, 5)}
    expected = by_matrix(*flat, **options)
    assert_as_matrix(summary, {name: rows.reshape(*lead, 5) for name, rows in expected.items()}, 1e-12)
    dims = ["batch_3", "batch_2", "batch", "head", "query"][5 - len(lead) - 1 :]
    assert list(summary.dataset().entropy.dims) == dims


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_logits_are_measured_as_they_are(seed, queries, keys, causal):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 3, queries, keys, generator=generator, dtype=torch.float64)
    logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.3, -torch.inf)
    ours = summary_rows(AttentionCall(logits=logits, causal=causal), tuple(MEASURES), top=3, sinks=(0, -1))
    later = torch.arange(keys) > torch.arange(queries)[:, None]
    seen = logits.masked_fill(later, -torch.inf) if causal else logits
    assert_as_matrix(ours, of_logits(seen, 3, (0, -1), None, causal), 1e-12)


def test_score_mod_and_shared_heads_mean_what_they_mean_to_flex_attention():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 8, 16, generator=generator)
    key = torch.randn(2, 3, 8, 16, generator=generator)
    identity = torch.eye(8).expand(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs uncompiled
        p = flex_attention(query, key, identity, score_mod=decay, enable_gqa=True)
    summary = attention_summary(query, key, score_mod=decay, enable_gqa=True)
    torch.testing.assert_close(summary.entropy, torch.special.entr(p).sum(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(summary.sink_mass, p[..., 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("queries", [3, 9, 12])
def test_a_lower_right_causal_bias_means_what_its_matrix_means(queries):
    query, key = inputs(queries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are rows without a key
        bias = causal_lower_right(queries, 9)
    sinks = torch.arange(queries) % 9
    options: dict[str, Any] = {"score_mod": decay, "sinks": sinks, "sink_logits": SLOPES[:2]}
    ours = attention_summary(query, key, attn_mask=bias, **options)
    matrix = attention_summary(query, key, attn_mask=bias._materialize(), **options)
    if queries != 9:  # a square one counts as causal
        assert_as_matrix(ours, matrix, 1e-12)
    torch.testing.assert_close(ours.entropy, matrix.entropy, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("low", [-torch.inf, "least"])
def test_a_bias_may_have_any_precision(dtype, low):
    query, key = inputs(dtype=torch.float32)
    bias = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias[:, 2] = bias[3] = torch.finfo(dtype).min if low == "least" else low
    assert_as_matrix(attention_summary(query, key, attn_mask=bias), by_matrix(query, key, attn_mask=bias), 2e-5)


def test_the_top_keys_hold_everything_where_there_are_no_more():
    query, key = inputs(dtype=torch.float32)
    summary = attention_summary(query, key, top=16, causal=True)
    assert bool((summary.top_mass <= 1).all())
    torch.testing.assert_close(summary.top_mass, torch.ones(2, 2, 7))
    assert torch.equal(attention_summary(query, key, top=1).top_mass, attention_summary(query, key).largest_weight)


def test_ties_count_as_often_as_top_says():
    key = torch.zeros(1, 1, 100, 4)
    for top in (1, 8, 16):
        torch.testing.assert_close(attention_summary(key, key, top=top).top_mass, torch.full((1, 1, 100), top / 100))


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_huge_scores_stay_within_rounding_of_the_scores(size):
    query, key = inputs(40, 50, dtype=torch.float32, dim=16)
    summary, expected = attention_summary(size * query, key), by_matrix(size * query, key)
    error = 16 * torch.finfo(torch.float32).eps * (size * query).norm(dim=-1).amax() * key.norm(dim=-1).amax()
    for name, rows in summary.items():
        largest = {"distance": 50, "effective_tokens": 50, "relative_entropy": 1}.get(name, 1)
        assert bool(((rows - expected[name]).abs() <= largest * max(1e-5, error)).all()), name
    assert bool((summary.largest_weight <= 1).all())
    assert bool((summary.sink_mass <= summary.largest_weight).all())
    assert bool((summary.top_mass >= summary.largest_weight - 1e-6).all())


@pytest.mark.parametrize("shape", [(2, 2, 0, 9), (2, 2, 7, 0), (0, 2, 7, 9)])
def test_nothing_to_measure_gives_empty_rows_or_nan(shape):
    batch, heads, queries, keys = shape
    query, key = torch.ones(batch, heads, queries, 4), torch.ones(batch, heads, keys, 4)
    calls = (AttentionCall(query, key, sink_logits=torch.zeros(2)), AttentionCall(logits=torch.ones(shape)))
    for call in calls:
        for rows in summary_rows(call, tuple(MEASURES), sinks=(0, 5)).values():
            assert rows.shape == shape[:3]
            assert bool(rows.isnan().all())


@settings(max_examples=20)
@given(st.integers(0, 999), st.sampled_from(["query", "key"]), st.sampled_from([torch.nan, torch.inf]))
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, which, value):
    query, key = inputs(dtype=torch.float32, seed=seed)
    expected = attention_summary(query, key, causal=True)
    (query if which == "query" else key)[1] = value
    for name, rows in attention_summary(query, key, causal=True).items():
        assert bool(rows[1].isnan().all()), name
        torch.testing.assert_close(rows[0], expected[name][0], rtol=0, atol=0, equal_nan=True)


def test_entropy_alone_is_computed_as_ever():
    query, key = inputs(40, 40, dtype=torch.float32)
    options: dict[str, Any] = {"causal": True, "measures": ["entropy"]}
    alone = attention_summary(query, key, **options).entropy
    assert torch.equal(alone, joma.attention_entropy(query, key, is_causal=True))
    scores = Scores(query, key, None, True, 0.5)
    assert torch.equal(alone, entropy_rows(scores, PRECISIONS["highest"]).entropy)


@given(st.lists(st.sampled_from(list(MEASURES)), min_size=1, unique=True), st.booleans(), st.booleans())
def test_each_measure_is_the_same_whatever_else_is_asked_for(names, causal, hidden):
    query, key = inputs(dtype=torch.float64)
    mask = torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) < 0.5 if hidden else None
    summary = attention_summary(query, key, causal=causal, mask=mask)
    some = attention_summary(query, key, causal=causal, mask=mask, measures=names)
    assert list(some) == names
    for name in names:
        torch.testing.assert_close(some[name], summary[name], rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("kind", ["causal", "masked", "modified", "sinks by row"])
def test_no_matrix_of_queries_by_keys_is_held(kind):
    query = torch.randn(1, 2, 4000, 2, generator=torch.Generator().manual_seed(0))
    row = torch.ones(1, 4000, dtype=torch.bool)
    options: dict[str, Any] = {
        "causal": {"is_causal": True, "softcap": 5.0},
        "masked": {"attn_mask": row.expand(4000, 4000)},
        "modified": {"score_mod": decay},
        "sinks by row": {"sinks": torch.arange(4000), "sink_logits": torch.zeros(2)},
    }[kind]
    with LargestTensor() as largest:
        attention_summary(query, query, **options)
    assert largest.numbers < 4000**2 / 15


def test_the_summary_is_a_mapping_with_attributes_and_labels():
    query, key = inputs()
    summary = attention_summary(query, key, measures=["largest_logit", "entropy"])
    assert isinstance(summary, AttentionSummary)
    assert (list(summary), len(summary)) == (["largest_logit", "entropy"], 2)
    assert summary["entropy"] is summary.entropy
    dataset = summary.dataset()
    assert dict(dataset.sizes) == {"batch": 2, "head": 2, "query": 7}
    assert {name: values.attrs["units"] for name, values in dataset.items()} == {"largest_logit": "1", "entropy": "nat"}
    np.testing.assert_array_equal(dataset.entropy, summary.entropy)
    lines = repr(summary).splitlines()
    assert lines[0] == "AttentionSummary of 2 x 2 x 7 rows"
    assert float(lines[1].split()[1]) == pytest.approx(float(summary.largest_logit.max()), rel=1e-3)
    with pytest.raises(AttributeError, match="has no 'sink_mass'; it has largest_logit, entropy"):
        _ = summary.sink_mass
    assert torch.equal(pickle.loads(pickle.dumps(summary)).entropy, summary.entropy)


def test_rows_are_combined_over_those_that_are_defined():
    rows = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan] * 3])
    torch.testing.assert_close(reduce_rows("entropy", rows), torch.tensor([2.0, torch.nan]), equal_nan=True)
    torch.testing.assert_close(reduce_rows("largest_logit", rows), torch.tensor([3.0, torch.nan]), equal_nan=True)
    assert reduce_rows("largest_logit", rows, dim=(0, 1)).item() == 3.0
    assert {measure.reduction for measure in MEASURES.values()} == {"mean", "maximum"}


def test_names_of_measures_are_checked():
    assert check_measures(None) == tuple(MEASURES)
    assert check_measures("distance") == ("distance",)
    with pytest.raises(InputError, match=r"`measures` must be one of entropy, .* did you mean 'distance'"):
        check_measures(["distnace"])
    with pytest.raises(InputError, match="`measures` must be at least 1 value, each once"):
        check_measures(["entropy", "entropy"])
    with pytest.raises(InputError, match="`measures` must be at least one name, got none; choose from entropy, "):
        check_measures([])


Q = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ({"sinks": 6}, "sinks", r"in \[-6, 5\], got 6"),
        ({"sinks": (0, -7)}, "sinks", r"in \[-6, 5\], got -7"),
        ({"sinks": ()}, "sinks", "at least one key number"),
        ({"sinks": 0.5}, "sinks", "got 0.5"),
        ({"sinks": torch.full((6,), 6)}, "sinks", r"in \[-6, 5\], got 6"),
        ({"sinks": torch.zeros(6)}, "sinks", "whole numbers, got torch.float32"),
        ({"sinks": torch.zeros(5, dtype=torch.int64)}, "sinks", r"broadcasts to \(2, 4, 6\)"),
        ({"top": 0}, "top", r"in \[1, 16\], got 0"),
        ({"top": 17}, "top", r"in \[1, 16\], got 17"),
        ({"softcap": 0.0}, "softcap", "above 0"),
        ({"softcap": "2"}, "softcap", "real numbers"),
        ({"sink_logits": torch.zeros(3)}, "sink_logits", r"4 floating numbers, one a head, got .* \(3,\)"),
        ({"sink_logits": torch.zeros(4, dtype=torch.int64)}, "sink_logits", "int64"),
        ({"score_mod": 3}, "score_mod", "got 3"),
        ({"score_mod": lambda score: score}, "score_mod", "takes 1 positional argument"),
        ({"score_mod": lambda *_: 1.0}, "score_mod", "a function of a score"),
        ({"precision": "low"}, "precision", "one of highest, high"),
        ({"causal": True, "is_causal": True}, "is_causal", "left out where `causal` is given, got both"),
        ({"is_causal": "no"}, "is_causal", "True or False"),
        ({"causal": "no"}, "causal", "True or False"),
        ({"attn_mask": Q[0, 0, :5]}, "attn_mask", r"broadcasts to \(2, 4, 6, 6\)"),
        ({"mask": Q[0, 0], "attn_mask": Q[0, 0]}, "attn_mask", "left out where `mask` is given, got both"),
    ],
)
def test_bad_input_is_named(change, name, word, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside the tests
    with pytest.raises(InputError, match=f"`{name}` must .*{word}"):
        attention_summary(Q, Q, **change)
