"""What a recording returns: a variable per measure, reduced over the rows that count."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from joma.arguments import InputError
from joma.probes.summary import MEASURES, AttentionCall
from joma.watch import attention
from tiny_models import PlainAttention, random_normal, textbook_entropy


def textbook_measures(weights: Tensor, logits: Tensor, top: int, sink: int) -> dict[str, Tensor]:
    """Return each measure [batch, head, query] from the whole matrix of causal attention."""
    queries, keys = weights.shape[-2:]
    entropy = textbook_entropy(weights)
    visible = torch.arange(1, queries + 1, dtype=weights.dtype).log()
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    return {
        "entropy": entropy,
        "effective_tokens": entropy.exp(),
        "relative_entropy": torch.where(visible > 0, entropy / visible, torch.nan),
        "largest_weight": weights.amax(-1),
        "top_mass": weights.topk(top).values.sum(-1),
        "sink_mass": weights[..., sink],
        "distance": (weights * distance).sum(-1),
        "largest_logit": logits.amax(-1),
    }


def causal_weights(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    logits = query @ key.mT / query.shape[-1] ** 0.5
    logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1), logits


class Causal(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)


@pytest.mark.parametrize("reduce", ["mean", "batch", "none"])
@pytest.mark.parametrize("with_rows", [False, True])
def test_each_measure_is_reduced_over_the_rows_that_count(reduce: str, with_rows: bool) -> None:
    query, key = 3 * random_normal(2, 3, 6, 4), random_normal(2, 3, 6, 4, seed=1)
    rows = torch.arange(6) < torch.tensor([[4], [6]]) if with_rows else "all"
    model = Causal()
    with attention(model, measures=list(MEASURES), top=2, sinks=1, reduce=reduce, rows=rows) as seen:
        model(query, key)
    dataset = seen.dataset()
    assert list(dataset) == list(MEASURES)
    for name, values in textbook_measures(*causal_weights(query, key), top=2, sink=1).items():
        counted = values if isinstance(rows, str) else values.where(rows[:, None], torch.nan)
        counted = counted.double().numpy()
        axes = {"mean": (0, 2), "batch": (0,), "none": ()}[reduce]
        combine = np.nanmax if name == "largest_logit" else np.nanmean
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows in which nothing is defined: NaN
            expected = combine(counted, axis=axes) if axes else counted
        np.testing.assert_allclose(dataset[name].values[0, 0], expected, atol=2e-5, err_msg=name)
    dims = {"mean": ("head",), "batch": ("head", "query"), "none": ("batch", "head", "query")}[reduce]
    assert dataset.entropy.dims == ("pass", "layer", *dims)
    assert dataset.entropy.attrs["units"] == "nat"


@pytest.mark.parametrize("measures", ["sink_mass", ("largest_logit",), ("effective_tokens",), ("distance", "entropy")])
def test_any_measures_may_be_asked_for_in_any_order(measures: str | tuple[str, ...]) -> None:
    query = random_normal(2, 3, 6, 4)
    model = Causal()
    with attention(model, measures=measures) as seen, attention(model, measures=list(MEASURES)) as every:
        model(query, query)
    names = [measures] if isinstance(measures, str) else list(measures)
    assert list(seen.dataset()) == names
    for name in names:
        np.testing.assert_allclose(seen.dataset()[name].values, every.dataset()[name].values, atol=1e-6)
    first = torch.as_tensor(seen.dataset()[names[0]].values[0, 0])
    torch.testing.assert_close(seen.passes[0]["Causal"].double(), first)


def test_bad_measures_are_named() -> None:
    model = PlainAttention()
    with pytest.raises(InputError, match=r"`measures` must be one of entropy, .*got 'entropi'; did you mean 'entropy'"):
        attention(model, measures=("entropi",)).__enter__()
    with pytest.raises(InputError, match="`top` must be"):
        attention(model, top=17).__enter__()


def test_sinks_may_be_a_list_or_a_tensor() -> None:
    query, model = random_normal(2, 3, 6, 4), PlainAttention()
    tensor = torch.tensor([[[1]], [[5]]])
    weights = (query @ query.mT / 2).softmax(-1)
    options = {"measures": "sink_mass", "reduce": "none"}
    with (
        attention(model, sinks=[0, 2], **options) as listed,
        attention(model, sinks=tensor, **options) as each,
        attention(model, sinks=tensor.clone(), **options) as again,
    ):
        model(query, query)
    torch.testing.assert_close(listed.passes[0]["PlainAttention"], weights[..., [0, 2]].sum(-1))
    expected = torch.stack([weights[0, ..., 1], weights[1, ..., 5]])
    torch.testing.assert_close(each.passes[0]["PlainAttention"], expected)
    torch.testing.assert_close(again.passes[0]["PlainAttention"], expected)


def test_an_error_of_torch_while_measuring_does_not_end_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("joma.watch.interception.summary_rows", fail)
    model, query = PlainAttention(), random_normal(1, 2, 4, 3)
    plain = model(query, query)
    message = "`attention` must be measured, got CUDA out of memory"
    with pytest.warns(UserWarning, match=message), attention(model) as seen:
        assert torch.equal(model(query, query), plain)
    assert list(seen.not_seen) == ["PlainAttention"]


def test_listeners_hear_of_each_pass_and_each_call() -> None:
    model, query = PlainAttention(), random_normal(1, 2, 4, 3)
    heard: list[object] = []
    with attention(model) as seen:
        seen.pass_started.append(lambda: heard.append("pass"))
        seen.listeners.append(lambda layer, call: heard.append((layer, call)))
        model(query, 2 * query)
        model(query, query)
    assert [event if event == "pass" else event[0] for event in heard] == ["pass", "PlainAttention"] * 2
    call = heard[1][1]
    assert isinstance(call, AttentionCall)
    assert torch.equal(call.key, 2 * query)
