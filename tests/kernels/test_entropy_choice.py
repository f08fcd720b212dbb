"""Which implementation of the row entropies is chosen, and that every one agrees with the plain version."""

from __future__ import annotations

import warnings

import pytest
import torch

from joma.kernels import entropy_choice
from joma.kernels.entropy_choice import IMPLEMENTATIONS, PRECISIONS, Implementation, entropy_rows
from joma.kernels.entropy_scores import Rows, Scores, from_matrix


def test_every_precision_names_known_implementations_and_ends_with_one_that_takes_anything():
    for order in PRECISIONS.values():
        assert set(order) <= set(IMPLEMENTATIONS)
        assert order[-1] == "blocked"
        assert IMPLEMENTATIONS["blocked"].largest


def test_the_first_that_fits_and_returns_what_is_needed_is_chosen(monkeypatch):
    x = torch.ones(1, 1, 2, 4)
    scores = Scores(x, x, None, False, 1.0)
    ways = {
        name: Implementation(lambda _, value=value: Rows(torch.full((1, 1, 2), value), None), lambda _, f=fits: f, many)
        for name, value, fits, many in (("a", 1.0, False, True), ("b", 2.0, True, False), ("c", 3.0, True, True))
    }
    monkeypatch.setattr(entropy_choice, "IMPLEMENTATIONS", ways)
    assert entropy_rows(scores, ("a", "b", "c")).entropy.unique().tolist() == [2.0]
    assert entropy_rows(scores, ("a", "b", "c"), largest=True).entropy.unique().tolist() == [3.0]
    assert entropy_rows(scores, ("c", "b")).entropy.unique().tolist() == [3.0]


def test_on_the_cpu_small_scores_are_bounded_and_all_others_blocked():
    x = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    for size, expected in ((1.0, "bounded"), (100.0, "blocked")):
        scores = Scores(size * x, x, None, True, 1.0)
        for order in PRECISIONS.values():
            assert next(name for name in order if IMPLEMENTATIONS[name].fits(scores)) == expected
            ours = entropy_rows(scores, order).entropy
            torch.testing.assert_close(ours.double(), from_matrix(scores).entropy, rtol=0, atol=2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["plain", "causal", "boolean", "bias"])
def test_every_implementation_on_a_gpu_agrees_with_float64(name, dtype, kind):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 700, 72, generator=generator), torch.randn(2, 3, 700, 72, generator=generator)
    seen = torch.rand(2, 1, 700, 700, generator=generator) < 0.5
    mask = {"boolean": seen, "bias": 5 * torch.randn(700, 700, generator=generator)}.get(kind)
    query, key, mask = (None if tensor is None else tensor.cuda() for tensor in (query.to(dtype), key.to(dtype), mask))
    expanded = None if mask is None else mask.expand(2, 6, 700, 700)
    scores = Scores(query, key, expanded, kind == "causal", 72**-0.5)
    implementation = IMPLEMENTATIONS[name]
    if not implementation.fits(scores):
        pytest.skip(f"{name} does not take these scores")
    error = {"flash": 0.1, "rounded": 2e-5 if dtype != torch.float32 else 0.01}.get(name, 2e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ours = implementation.rows(scores)
    exact = from_matrix(scores)
    torch.testing.assert_close(ours.entropy.double(), exact.entropy, rtol=0, atol=error, equal_nan=True)
    if implementation.largest:
        assert ours.largest is not None
        torch.testing.assert_close(ours.largest.double(), exact.largest, rtol=0, atol=error, equal_nan=True)
