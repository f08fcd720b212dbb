"""Frequencies of tokens against their definition, class by class, and contexts against their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from joma.arguments import InputError
from joma.data.tokens import KINDS, contexts, log_normal_classes, sequence_classes, stream_contexts, token_classes
from joma.noise import key


def streams(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


sizes = st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(1, 6))


@given(size=sizes, seed=st.integers(0, 2**31))
def test_gaussian_classes_are_those_of_the_paper(size, seed):
    classes, distinct, common = size
    x = token_classes("gaussian", classes=classes, distinct=distinct, common=common, generators=streams(seed))
    weight = torch.rand(distinct + common, classes, generator=streams(seed)[0], dtype=torch.float64).numpy() / 2
    for i in range(classes):
        for token in range(distinct):
            weight[token, i] = math.exp(-((token - distinct * i / classes) ** 2) / 30)
    np.testing.assert_allclose(x.frequency[0].numpy(), (weight / weight.sum(0)).T, rtol=1e-13)
    assert x.distinct.tolist() == [True] * distinct + [False] * common
    assert x.label.tolist() == list(range(classes))


@given(size=sizes, kind=st.sampled_from(sorted(KINDS)), seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4))
def test_classes_are_distributions_that_do_not_depend_on_the_other_seeds(size, kind, seeds):
    options = dict(zip(("classes", "distinct", "common"), size, strict=True))
    all_seeds = token_classes(kind, generators=streams(*seeds), **options).frequency
    assert all_seeds.shape == (len(seeds), size[0], size[1] + size[2])
    torch.testing.assert_close(
        all_seeds.sum(-1), torch.ones(len(seeds), size[0], dtype=torch.float64), rtol=0, atol=1e-14
    )
    for position, seed in enumerate(seeds):
        assert torch.equal(all_seeds[position], token_classes(kind, generators=streams(seed), **options).frequency[0])


@given(seed=st.integers(0, 2**31))
def test_both_kinds_share_their_common_tokens(seed):
    gaussian, random = (token_classes(kind, generators=streams(seed)).frequency[0, :, 10:] for kind in sorted(KINDS))
    torch.testing.assert_close(
        gaussian / gaussian.sum(-1, keepdim=True), random / random.sum(-1, keepdim=True), rtol=1e-12, atol=0
    )


def test_random_weights_are_uniform_before_normalising():
    x = token_classes("random", classes=1, distinct=2, common=0, generators=streams(*range(4000))).frequency[:, 0]
    share = x[:, 0] / (1 - x[:, 0])  # the ratio of two uniform numbers: P[ratio ≤ r] = r/2 up to 1, then 1 − 1/2r
    law = torch.where(share <= 1, share / 2, 1 - 1 / (2 * share))
    counts = np.histogram(law.numpy(), bins=10, range=(0, 1))[0]
    assert chisquare(counts).pvalue > 1e-3


@given(samples=st.integers(1, 6), length=st.integers(1, 8), seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3))
def test_contexts_count_their_tokens(samples, length, seeds):
    x = token_classes("gaussian", classes=3, distinct=4, common=2, generators=streams(*seeds)).frequency
    drawn = contexts(x, samples=samples, length=length, generators=streams(*seeds))
    assert drawn.token.shape == (len(seeds), samples, length)
    for s in range(len(seeds)):
        alone = contexts(x[s : s + 1], samples=samples, length=length, generators=streams(seeds[s]))
        assert torch.equal(alone.token[0], drawn.token[s])
        assert torch.equal(alone.label[0], drawn.label[s])
        for i in range(samples):
            counts = np.bincount(drawn.token[s, i].numpy(), minlength=6)
            np.testing.assert_array_equal(drawn.frequency[s, i].numpy(), counts / length)


def test_contexts_follow_their_class():
    x = token_classes("gaussian", classes=4, distinct=5, common=3, generators=streams(1)).frequency
    drawn = contexts(x, samples=6000, length=10, generators=streams(2))
    label = drawn.label[0].numpy()
    assert chisquare(np.bincount(label, minlength=4)).pvalue > 1e-3
    for i in range(4):
        counts = np.bincount(drawn.token[0].numpy()[label == i].ravel(), minlength=8)
        assert chisquare(counts, counts.sum() * x[0, i].numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kind": "gausian"}, "kind"),
        ({"classes": 0}, "classes"),
        ({"distinct": -1}, "distinct"),
        ({"common": -2}, "common"),
        ({"distinct": 0, "common": 0}, "distinct"),
        ({"generators": []}, "generators"),
    ],
)
def test_bad_classes_are_named(options, names):
    options = {"kind": "gaussian", "generators": streams(0), **options}
    with pytest.raises(InputError, match=f"`{names}"):
        token_classes(options.pop("kind"), **options)


@pytest.mark.parametrize(
    ("frequency", "options", "names"),
    [
        (torch.full((1, 2, 2), 0.6), {}, "frequency"),
        (torch.full((1, 2, 2), float("nan")), {}, "frequency"),
        (torch.tensor([[[1.5, -0.5]]]), {}, "frequency"),
        (torch.zeros(1, 0, 2), {}, "frequency"),
        (torch.full((2, 2, 2), 0.5), {}, "frequency"),
        (torch.full((1, 2, 2), 0.5), {"samples": 0}, "samples"),
        (torch.full((1, 2, 2), 0.5), {"length": -3}, "length"),
    ],
)
def test_bad_contexts_are_named(frequency, options, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        contexts(frequency, generators=streams(0), **{"samples": 2, "length": 3, **options})


sequence_sizes = st.fixed_dictionaries(
    {name: st.integers(1, 4) for name in ("queries", "classes", "distinct", "common")}
)


@given(size=sequence_sizes, share=st.floats(0, 1), variation=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_sequence_classes_share_only_their_common_tokens(size, share, variation, seed):
    data = sequence_classes(generators=streams(seed), share=share, variation=variation, **size)
    x, labels, distinct = data.frequency[0].numpy(), size["queries"] * size["classes"], size["distinct"]
    assert x.shape == data.distinct.shape == (labels, labels * distinct + size["common"])
    assert data.query.tolist() == [label // size["classes"] for label in range(labels)]
    for label in range(labels):
        tokens = list(range(label * distinct, (label + 1) * distinct))
        assert data.distinct[label].nonzero().flatten().tolist() == tokens
        np.testing.assert_allclose(x[label, tokens].sum(), 1 - share, atol=1e-14)
        np.testing.assert_allclose(x[label, labels * distinct :].sum(), share, atol=1e-14)
        np.testing.assert_allclose(x[label].sum(), 1, atol=1e-14)


def test_without_variation_common_tokens_have_one_frequency_in_all_classes():
    common = sequence_classes(generators=streams(1), variation=0.0).frequency[0, :, -5:]
    torch.testing.assert_close(common, common[:1].expand_as(common), rtol=1e-14, atol=0)
    varied = sequence_classes(generators=streams(1), variation=1.0).frequency[0, :, -5:]
    assert float((varied / common).std()) > 0.3


@given(seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4))
def test_sequence_classes_do_not_depend_on_the_other_seeds(seeds):
    all_seeds = sequence_classes(generators=streams(*seeds)).frequency
    for frequency, seed in zip(all_seeds, seeds, strict=True):
        assert torch.equal(frequency, sequence_classes(generators=streams(seed)).frequency[0])


@pytest.mark.parametrize(
    "change",
    [
        {"queries": 0},
        {"classes": 0},
        {"distinct": 0},
        {"common": 0},
        {"share": 1.1},
        {"variation": float("nan")},
        {"generators": []},
    ],
)
def test_bad_sequence_classes(change):
    with pytest.raises(InputError):
        sequence_classes(**{"generators": streams(0), **change})


@given(
    seed=st.integers(0, 2**31), classes=st.integers(1, 4), extra=st.integers(0, 3), common=st.integers(0, 4),
    scale=st.floats(0, 2),
)  # fmt: skip
def test_log_normal_classes_are_the_normals_of_their_stream(seed, classes, extra, common, scale):
    distinct = classes + extra
    sizes = {"classes": classes, "distinct": distinct, "common": common, "scale": scale}
    (generator,) = streams(seed)
    of_class = torch.randn(classes, distinct, generator=generator, dtype=torch.float64).numpy()
    shared = torch.randn(common, generator=generator, dtype=torch.float64).numpy()
    weight = np.exp(scale * np.concatenate([of_class, np.tile(shared, (classes, 1))], axis=1))
    overlap = log_normal_classes(generators=streams(seed), **sizes)
    np.testing.assert_allclose(overlap.frequency[0], weight / weight.sum(1, keepdims=True), rtol=1e-12)
    assert overlap.distinct.tolist() == [True] * distinct + [False] * common
    for token in range(distinct):
        weight[[label for label in range(classes) if label != token % classes], token] = 0.0
    separable = log_normal_classes(generators=streams(seed), separable=True, **sizes).frequency[0]
    np.testing.assert_allclose(separable, weight / weight.sum(1, keepdims=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"classes": 0}, "classes"),
        ({"scale": -1.0}, "scale"),
        ({"distinct": 0, "common": 0}, r"distinct \+ common"),
        ({"distinct": 7, "separable": True}, "distinct"),
        ({"scale": 1e308}, "scale"),
        ({"generators": []}, "generators"),
    ],
)
def test_bad_log_normal_classes(change, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        log_normal_classes(**{"generators": streams(0), **change})


def test_streamed_contexts_are_drawn_with_the_probabilities_of_their_class():
    frequency = log_normal_classes(generators=streams(0, 1), classes=3, distinct=3, common=2, separable=True).frequency
    drawn = stream_contexts(frequency, samples=40_000, length=2, key=key(torch.tensor([5, 6]), 9))
    for seed, label in np.ndindex(2, 3):
        chosen = drawn.label[seed] == label
        assert float(chosen.double().mean()) == pytest.approx(1 / 3, abs=0.01)  # four standard errors
        pairs = drawn.token[seed, chosen]
        counts = torch.zeros(5, 5, dtype=torch.float64)
        counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs), dtype=torch.float64), accumulate=True)
        p = frequency[seed, label]
        assert bool((counts[(p[:, None] * p) == 0] == 0).all())
        torch.testing.assert_close(counts / len(pairs), p[:, None] * p, rtol=0, atol=0.018)  # four standard errors


@given(seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4), step=st.integers(-5, 10**6))
def test_streamed_contexts_are_a_function_of_seed_and_step(seeds, step):
    frequency = log_normal_classes(generators=streams(3)).frequency
    together = stream_contexts(
        frequency.expand(len(seeds), -1, -1), samples=4, length=6, key=key(torch.tensor(seeds), step)
    )
    counts = np.stack([[np.bincount(tokens, minlength=20) for tokens in sample] for sample in together.token.numpy()])
    np.testing.assert_allclose(together.frequency, counts / 6, rtol=1e-15)
    for position, seed in enumerate(seeds):
        alone = stream_contexts(frequency, samples=4, length=6, key=key(torch.tensor([seed]), torch.tensor(step)))
        assert torch.equal(alone.token[0], together.token[position])
        assert torch.equal(alone.label[0], together.label[position])
    later = stream_contexts(frequency, samples=4, length=6, key=key(torch.tensor(seeds[:1]), step + 1))
    assert not torch.equal(later.token[0], together.token[0])


@pytest.mark.parametrize(
    ("shape", "options", "names"),
    [
        ((2, 2), {}, "frequency"),
        ((2, 2, 2), {}, "frequency"),
        ((1, 2, 2), {"samples": 0}, "samples"),
        ((1, 2, 2), {"length": -3}, "length"),
        ((1, 2, 2), {"samples": 2**62}, "samples`, `length"),
        ((1, 2, 2), {"length": 2**40}, "samples`, `length"),
        ((1, 0, 2), {}, "frequency"),
    ],
)
def test_bad_streamed_contexts_are_named(shape, options, names):
    with pytest.raises(InputError, match=f"`{names}`"):
        stream_contexts(torch.full(shape, 0.5), key=key(torch.tensor([0]), 1), **{"samples": 2, "length": 3, **options})
