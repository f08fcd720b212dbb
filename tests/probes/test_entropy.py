"""Entropy against SciPy; attention's entropy against the whole matrix in float64, and against PyTorch's own attention.

PyTorch's attention with an identity matrix as values returns the weights themselves. It defines what masks, causality,
scale and shared heads must mean to our functions.
"""

from __future__ import annotations

import warnings

import jaxtyping
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

import joma
from joma.arguments import InputError
from joma.kernels import entropy_blocks
from joma.probes.entropy import attention_entropy, attention_rows, effective_tokens, mean_entropy, shannon_entropy
from largest_tensor import LargestTensor

TINY = entropy_blocks.BlockSize(60, 3, 5)  # so that a short input has many blocks


@given(st.integers(1, 9), st.floats(0, 60), st.integers(0, 1000))
def test_entropy_agrees_with_scipy(tokens, sharpness, seed):
    logits = sharpness * torch.randn(4, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = logits.softmax(-1)
    expected = torch.as_tensor(scipy.stats.entropy(p.numpy(), axis=-1))
    torch.testing.assert_close(shannon_entropy(p), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(shannon_entropy(p.mT, dim=-2), shannon_entropy(p))


@given(st.integers(0, 1000), st.integers(0, 2), st.booleans())
def test_the_entropy_of_a_diverged_seed_is_nan_and_changes_no_other(seed, which, all_weights):
    p = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    expected = shannon_entropy(p)
    p[slice(None) if all_weights else which] = torch.nan
    ours = shannon_entropy(p)
    diverged = torch.tensor([all_weights or number == which for number in range(3)])
    assert bool(ours[diverged].isnan().all())
    assert torch.equal(ours[~diverged], expected[~diverged])
    assert torch.equal(shannon_entropy(p.movedim(-1, 0), dim=0)[~diverged], ours[~diverged])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "p", [[0.5, 0.6], [1.5, -0.5], [INF, 0.0], [[0.5, 0.6], [NAN, 1.0]], [[1.5, -0.5], [NAN, 1.0]]]
)
def test_what_is_no_distribution_is_refused(p):
    with pytest.raises(InputError, match=r"`p` must be distributions that sum to 1, got sums in .*softmax"):
        shannon_entropy(torch.tensor(p))


def test_without_the_check_no_value_is_read():
    """A fake tensor has no values: a captured step, which cannot wait for the device, may call it."""
    with FakeTensorMode():
        assert shannon_entropy(torch.ones(3, 4), check=False).shape == (3,)
        with pytest.raises(DataDependentOutputException):
            shannon_entropy(torch.ones(3, 4))
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert shannon_entropy(p, check=False).equal(shannon_entropy(p))


def of_matrix(query, key, *, causal=False, scale=None):
    """Entropy, largest weight and log-sum-exp from the whole matrix in float64."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * query.double() @ key.double().mT
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    p = scores.softmax(-1)
    return torch.special.entr(p).sum(-1), p.amax(-1), scores.logsumexp(-1)


def by_torch(query, key, **options):
    """Entropy and largest weight from the weights that PyTorch's attention applies to an identity."""
    heads = query.shape[:-2] if not options.get("enable_gqa") else (*query.shape[:-2][:-1], key.shape[-3])
    identity = torch.eye(key.shape[-2], dtype=torch.float64).expand(*heads, -1, -1)
    key = key.double().expand(*heads, *key.shape[-2:])
    p = scaled_dot_product_attention(query.double(), key, identity, **options)
    return torch.special.entr(p).sum(-1), p.amax(-1)


KINDS = ("random", "peaked", "constant", "one-hot", "offset")


@st.composite
def inputs(draw, dtype=torch.float32):
    """Queries and keys of each kind, long enough for several blocks."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kind, dim = draw(st.sampled_from(KINDS)), draw(st.sampled_from([1, 8, 33, 64]))
    queries, keys = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    query = torch.randn(2, queries, dim, generator=generator)
    key = torch.randn(2, keys, dim, generator=generator)
    if kind == "peaked":
        query = 30 * query
    if kind == "constant":
        key = key[:, :1].expand(-1, keys, -1) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    if kind == "one-hot":
        query = 50 * dim**0.5 * torch.nn.functional.one_hot(torch.arange(queries) % dim, dim).float().expand(2, -1, -1)
        key = torch.nn.functional.one_hot(torch.arange(keys) % dim, dim).float().expand(2, -1, -1)
    if kind == "offset":
        key = key + draw(st.sampled_from([-30.0, 30.0]))
    return query.to(dtype), key.to(dtype)


def assert_within_promised_error(ours, query, key, causal):
    true, largest, lse = of_matrix(query, key, causal=causal)
    allowed = 2e-5 * (lse / 30).clamp(min=1)
    assert bool(((ours.entropy - true).abs() <= allowed).all())
    assert bool(((ours.largest - largest).abs() <= allowed).all())


@settings(max_examples=60)
@given(inputs(), st.booleans())
def test_float32_is_within_the_promised_error(case, causal):
    assert_within_promised_error(attention_rows(*case, causal=causal), *case, causal)
    true, _, lse = of_matrix(*case, causal=causal)
    assert bool(((attention_entropy(*case, causal=causal) - true).abs() <= 2e-5 * (lse / 30).clamp(min=1)).all())


@settings(max_examples=30)
@given(st.sampled_from([torch.bfloat16, torch.float16]).flatmap(inputs), st.booleans())
def test_half_precision_is_as_good_as_float32(case, causal):
    ours = attention_rows(*case, causal=causal)
    assert ours.entropy.dtype == torch.float32
    assert_within_promised_error(ours, *case, causal)


@settings(max_examples=20)
@given(inputs(torch.float64), st.booleans())
def test_entropy_is_the_log_sum_exp_minus_the_mean_score(case, causal):
    """The identity H = lse − scale · q·o with o = attention(q, k, k), from the fused kernel in float64."""
    query, key = (tensor[None] for tensor in case)
    scale = query.shape[-1] ** -0.5
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(query, key, key, 0.0, causal, scale=scale)
    expected = lse - scale * (query * output).sum(-1)
    ours = attention_entropy(query, key, causal=causal)
    assert ours.dtype == torch.float64
    assert bool(((ours - expected).abs() <= 1e-13 * (10 + lse.abs())).all())


@st.composite
def attentions(draw):
    """Whatever PyTorch's attention accepts: leading axes, masks of all kinds, shared heads, lengths, scale."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    grouped = draw(st.booleans())
    lead = tuple(draw(st.lists(st.integers(1, 3), min_size=1 if grouped else 0, max_size=3)))
    queries, keys, dim = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 9))
    group = draw(st.integers(1, 3)) if grouped else 1
    query_lead = (*lead[:-1], lead[-1] * group) if grouped else lead
    query = torch.randn(*query_lead, queries, dim, generator=generator, dtype=torch.float64)
    key = torch.randn(*lead, keys, dim, generator=generator, dtype=torch.float64)
    options = {"scale": draw(st.sampled_from([None, 0.3, 3.0])), "enable_gqa": grouped}
    kind = draw(st.sampled_from(["none", "causal", "boolean", "infinite", "least", "bias"]))
    if kind == "causal":
        return query, key, {**options, "is_causal": True}
    if kind == "none":
        return query, key, options
    shape = [draw(st.sampled_from([1, size])) for size in (*query_lead, queries, keys)]
    shape = shape[draw(st.integers(0, len(shape) - 2)) :]
    seen = torch.rand(shape, generator=generator) < 0.7
    seen[..., 0] = True
    low = {"infinite": -torch.inf, "least": torch.finfo(torch.float64).min}.get(kind, 0.0)
    bias = 5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    masks = {"boolean": seen, "bias": bias}
    return (
        query,
        key,
        {**options, "attn_mask": masks.get(kind, torch.zeros(shape, dtype=torch.float64).masked_fill(~seen, low))},
    )


@settings(max_examples=200)
@given(attentions(), st.booleans())
def test_arguments_mean_what_they_mean_to_torch(case, tiny):
    query, key, options = case
    entropies, largest = by_torch(query, key, **options)
    options["causal"], options["mask"] = options.pop("is_causal", False), options.pop("attn_mask", None)
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setitem(entropy_blocks._TILES, "cpu", TINY)
        ours = attention_rows(query, key, **options)
    torch.testing.assert_close(ours.entropy, entropies, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.largest, largest, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.effective, entropies.exp(), rtol=0, atol=1e-10)
    torch.testing.assert_close(attention_entropy(query, key, **options), entropies, rtol=0, atol=1e-12)
    names = {"causal": "is_causal", "mask": "attn_mask"}
    renamed = {names.get(name, name): value for name, value in options.items()}
    torch.testing.assert_close(attention_entropy(query, key, **renamed), entropies, rtol=0, atol=1e-12)


@settings(max_examples=50)
@given(st.integers(0, 999), st.booleans(), st.booleans(), st.booleans())
def test_hidden_rows_are_nan_and_left_out_of_means(seed, causal, boolean, tiny):
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(2, 3, 8, 4, generator=generator) for _ in range(2))
    seen = torch.rand(2, 1, 8, 8, generator=generator) < 0.3
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setitem(entropy_blocks._TILES, "cpu", TINY)
        mask = seen if boolean else torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        ours = attention_rows(query, key, mask=mask, causal=causal)
    visible = seen & torch.ones(8, 8, dtype=torch.bool).tril() if causal else seen
    count = visible.sum(-1).expand(2, 3, 8)
    assert torch.equal(ours.entropy.isnan(), count == 0)
    assert torch.equal(ours.relative.isnan(), count <= 1)
    scores = (query @ key.mT / 2).masked_fill(~visible, -torch.inf)[count > 0]
    expected = torch.special.entr(scores.double().softmax(-1)).sum(-1)
    torch.testing.assert_close(ours.entropy[count > 0].double(), expected, rtol=0, atol=2e-6)
    limit = count[count > 1].double().log()
    torch.testing.assert_close(
        ours.relative[count > 1].double(), expected[count[count > 0] > 1] / limit, atol=5e-6, rtol=0
    )
    if bool((count > 0).any()):
        torch.testing.assert_close(mean_entropy(ours.entropy, (0, 1, 2)).double(), expected.mean(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_may_be_zero_or_negative_though_torch_returns_nan(scale):
    query = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = of_matrix(query, query, causal=True, scale=scale)[0]
    torch.testing.assert_close(attention_entropy(query, query, causal=True, scale=scale), expected, rtol=0, atol=1e-12)


def test_uniform_causal_attention_has_the_known_mean():
    rows = attention_rows(
        torch.zeros(35, 4), torch.randn(35, 4, generator=torch.Generator().manual_seed(0)), causal=True
    )
    assert mean_entropy(rows.entropy).item() == pytest.approx(2.63246, abs=5e-6)  # ln(35!)/35
    torch.testing.assert_close(rows.relative[1:], torch.ones(34))
    torch.testing.assert_close(effective_tokens(rows.entropy), torch.arange(1.0, 36.0))


@pytest.mark.parametrize("masked", [False, True])
def test_no_matrix_of_queries_by_keys_is_held(masked):
    query = torch.randn(1, 2, 6000, 2, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 6000, dtype=torch.bool).expand(6000, 6000) if masked else None
    with LargestTensor() as largest:
        attention_rows(query, query, causal=not masked, mask=mask)
    assert largest.numbers < 6000**2 / 15


def test_products_are_exact_whatever_is_allowed_elsewhere():
    query = 30 * torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_within_promised_error(attention_rows(query, query / 30), query, query / 30, causal=False)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_no_gradient_flows_and_inputs_are_left_alone():
    query = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    copy = query.detach().clone()
    assert not attention_entropy(query, query).requires_grad
    torch.testing.assert_close(query.detach(), copy, rtol=0, atol=0)
    assert joma.attention_entropy is attention_entropy


Q = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        ({"query": Q.long()}, "query", "int64"),
        ({"key": Q[0, 0, 0]}, "key", r"\(8,\)"),
        (
            {"query": torch.nested.nested_tensor([Q[0, 0], Q[0, 0, :2]], layout=torch.jagged)},
            "query",
            "a nested one; pad it",
        ),
        ({"query": Q[..., :0], "key": Q[..., :0]}, "query", "dim at least 1"),
        ({"key": Q.double()}, "key", "float64"),
        ({"key": Q[..., :4]}, "key", "width 4"),
        ({"key": Q[:, :2]}, "key", "enable_gqa"),
        ({"key": Q[:, :3], "enable_gqa": True}, "key", "divides the 4"),
        ({"key": Q[None, :, :3]}, "key", "leading axes"),
        ({"mask": causal_lower_right(6, 7)}, "mask", r"for 6 queries and 6 keys, got one for \(6, 7\)"),
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, "mask", r"\(5, 6\)"),
        ({"mask": torch.ones(6, 6, dtype=torch.int64)}, "mask", "int64"),
        ({"scale": float("nan")}, "scale", "NaN"),
        ({"precision": "hihgest"}, "precision", "did you mean 'highest'"),
        ({"causal": False, "is_causal": True}, "is_causal", "left out where `causal` is given, got both"),
        ({"mask": Q[0, 0], "attn_mask": Q[0, 0]}, "attn_mask", "left out where `mask` is given, got both"),
    ],
)
@pytest.mark.parametrize("function", [attention_entropy, attention_rows])
def test_bad_input_is_named(function, change, name, word):
    options = {"query": Q, "key": Q, **change}
    with pytest.raises(InputError, match=f"`{name}` must .*{word}"):
        function(options.pop("query"), options.pop("key"), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_the_default_type_changes_nothing(dtype, causal):
    expected = attention_rows(Q, Q, causal=causal), attention_entropy(Q, Q, causal=causal)
    torch.set_default_dtype(dtype)
    try:
        ours = attention_rows(Q, Q, causal=causal), attention_entropy(Q, Q, causal=causal)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60)
@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 30), st.booleans(), st.booleans())
def test_a_causal_bias_means_what_it_means_to_torch(seed, queries, keys, lower, tiny):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 3, queries, 4, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 3, keys, 4, generator=generator, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that there are rows without a key
        bias = (causal_lower_right if lower else causal_upper_left)(queries, keys)
    seen = bias._materialize()
    expected = attention_rows(query, key, mask=seen)
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setitem(entropy_blocks._TILES, "cpu", TINY)
        rows = attention_rows(query, key, mask=bias)
        both = attention_entropy(query, key, mask=bias, causal=True)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(attention_entropy(query, key, mask=bias), rows.entropy, equal_nan=True)
    torch.testing.assert_close(both, attention_entropy(query, key, mask=seen, causal=True), equal_nan=True)
    defined = seen.any(-1)
    entropies, largest = by_torch(query, key, attn_mask=bias)
    torch.testing.assert_close(rows.entropy[..., defined], entropies[..., defined], rtol=0, atol=1e-12)
    torch.testing.assert_close(rows.largest[..., defined], largest[..., defined], rtol=0, atol=1e-12)


def test_a_causal_bias_is_never_a_matrix():
    query = torch.randn(1, 2, 6000, 2, generator=torch.Generator().manual_seed(0))
    bias = causal_lower_right(5000, 6000)
    with LargestTensor() as largest:
        attention_entropy(query[:, :, :5000], query, mask=bias)
    assert largest.numbers < 6000**2 / 15


@pytest.mark.parametrize(
    ("lead", "other", "grouped"),
    [
        ((1, 2), (3, 2), False),
        ((3, 1), (3, 2), False),
        ((2,), (3, 2), False),
        ((), (3,), False),
        ((1, 4), (3, 2), True),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_queries_broadcast_against_keys_as_to_torch(lead, other, grouped, causal):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(*lead, 5, 4, generator=generator, dtype=torch.float64)
    key = torch.randn(*other, 6, 4, generator=generator, dtype=torch.float64)
    identity = torch.eye(6, dtype=torch.float64).expand(*other, 6, 6)
    p = scaled_dot_product_attention(query, key, identity, is_causal=causal, enable_gqa=grouped)
    rows = attention_rows(query, key, causal=causal, enable_gqa=grouped)
    torch.testing.assert_close(rows.entropy, torch.special.entr(p).sum(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(rows.largest, p.amax(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(attention_entropy(query, key, causal=causal, enable_gqa=grouped), rows.entropy)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, dtype=torch.bool), "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_queries_give_empty_rows_and_no_key_gives_nan(mask, dtype):
    for queries, keys, batch in ((0, 6, 2), (6, 6, 0), (6, 0, 2)):
        query, key = torch.ones(batch, 4, queries, 8, dtype=dtype), torch.ones(batch, 4, keys, 8, dtype=dtype)
        given_mask = causal_upper_left(queries, keys) if mask == "bias" else mask
        rows = attention_rows(query, key, mask=given_mask)
        for values in (*rows, attention_entropy(query, key, mask=given_mask)):
            assert (values.shape, values.dtype) == (query.shape[:-1], dtype)
            assert bool(values.isnan().all())


def test_tensors_inside_vmap_are_refused():
    with pytest.raises(InputError, match="`query` must be a plain tensor, got one inside vmap; pass the mapped axis"):
        torch.vmap(attention_entropy)(Q, Q)
    with pytest.raises(InputError, match="one inside vmap"):
        torch.vmap(lambda key: torch.func.grad(lambda q: q.sum() + attention_entropy(q, key).sum())(Q))(Q)


@pytest.mark.parametrize("name", ["query", "key", "mask"])
def test_an_argument_that_is_no_tensor_is_named(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside the tests
    with pytest.raises(InputError, match=f"`{name}` must be a tensor, got a dict .*; pass what you pass to attention"):
        attention_entropy(**{"query": Q, "key": Q, name: {}})


def test_arrays_are_measured_like_tensors():
    mask = np.tri(Q.shape[-2], dtype=bool)
    expected = attention_entropy(Q, Q, mask=torch.from_numpy(mask))
    assert torch.equal(attention_entropy(Q.numpy(), Q.numpy(), mask=mask), expected)


@settings(max_examples=20)
@given(st.integers(0, 999), st.booleans(), st.sampled_from(["query", "key"]), st.sampled_from([NAN, INF]))
def test_attention_of_a_diverged_seed_is_nan_and_changes_no_other(seed, causal, which, value):
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(3, 2, 9, 4, generator=generator) for _ in range(2))
    expected = attention_rows(query, key, causal=causal)
    (query if which == "query" else key)[1] = value
    ours = attention_rows(query, key, causal=causal)
    for values, right in zip(ours, expected, strict=True):
        assert bool(values[1].isnan().all())
        torch.testing.assert_close(values[::2], right[::2], rtol=0, atol=0, equal_nan=True)
    short = attention_entropy(query, key, causal=causal)
    assert bool(short[1].isnan().all())
    torch.testing.assert_close(short[::2], expected.entropy[::2], rtol=0, atol=2e-6)


def test_a_mean_of_no_rows_is_refused():
    with pytest.raises(InputError, match="`entropy`"):
        mean_entropy(torch.ones(3, dtype=torch.int64))
