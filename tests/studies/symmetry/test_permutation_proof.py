"""The page `docs/permutation.md`: every step of its proof on decoders, and its table against the stored run."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.permutation import permutation_gap
from joma.runs import open_run
from joma.studies.symmetry.permutation import MAX_INVARIANT, MIN_BROKEN, STUDY, TABLE

PAGE = Path(__file__).parents[3] / "docs" / "permutation.md"
TOKENS = torch.tensor([3, 0, 4, 1, 2])
ORDERS = torch.tensor([[*order, 4] for order in itertools.permutations(range(4))])  # the last token stays


def decoder(seeds: int = 2, **parts) -> Decoder:
    """Return decoders with random weights in float64."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    return Decoder(DecoderConfig(6, 8, heads=2, **parts), generators=generators, dtype=torch.float64)


@torch.no_grad()
def states(model: Decoder, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the hidden states [seed, sample, position, width] of every level, the embeddings first."""
    return list(model.activations(tokens, ["residual"])["residual"])


@pytest.mark.parametrize("norm", TABLE["norm"])
@pytest.mark.parametrize("residual", [True, False])
def test_under_a_full_mask_every_layer_permutes_its_states_as_the_tokens_are_permuted(norm, residual):
    model = decoder(layers=3, mask="full", norm=norm, residual=residual)
    orders = torch.tensor(list(itertools.permutations(range(5))))  # of all positions, the last one too
    for level in states(model, TOKENS[orders]):
        plain = level[:, :1]  # of the first order, the identity
        torch.testing.assert_close(level, plain[:, 0][:, orders], rtol=1e-11, atol=1e-13)


def test_one_causal_layer_sees_at_each_position_the_token_and_the_multiset_of_tokens_up_to_it():
    model = decoder(layers=1)
    tokens = TOKENS[ORDERS]
    level = states(model, tokens)[1]
    for position in range(5):
        read = {}
        for sample, row in enumerate(tokens.tolist()):
            seen = (row[position], tuple(sorted(row[: position + 1])))
            expected = read.setdefault(seen, level[:, sample, position])
            torch.testing.assert_close(level[:, sample, position], expected, rtol=1e-11, atol=1e-13)
        values = torch.stack([value.flatten() for value in read.values()])
        assert len(values) == 1 or bool((torch.pdist(values) > 1e-3).all())  # and nothing less


def test_two_causal_layers_with_uniform_attention_weight_positions_by_harmonic_sums():
    """The example of the page: W_V = 1, no MLP, residual connections; the order enters as Σ_k w_k x_k / n."""
    model = Decoder(
        DecoderConfig(5, 5, 2, attention="uniform", projection=False, norm="none"),
        generators=[torch.Generator().manual_seed(0)],
        dtype=torch.float64,
    )
    with torch.no_grad():
        model.embedding.copy_(torch.eye(5)[None])
        for layer in model.layers:
            layer.attention.value.weight.copy_(torch.eye(5)[None])
            for silent in (layer.attention.value.bias, layer.upper.weight, layer.upper.bias):
                silent.zero_()
    last = states(model, TOKENS[ORDERS])[2][0, :, -1]
    n = len(TOKENS)
    weights = torch.tensor([sum(1 / j for j in range(k, n + 1)) for k in range(1, n + 1)], dtype=torch.float64)
    assert bool((weights.diff() < 0).all())
    x = torch.eye(5, dtype=torch.float64)[TOKENS[ORDERS]]
    order_part = torch.einsum("k,ske->se", weights, x) / n
    torch.testing.assert_close(last, x[:, -1] + 2 * x.mean(1) + order_part)
    assert bool((torch.pdist(last) > 1e-3).all())  # no two orders agree


@pytest.mark.parametrize("norm", TABLE["norm"])
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_with_two_causal_layers_every_order_but_the_same_one_changes_the_prediction(layers, norm, activation):
    model = decoder(5, layers=layers, norm=norm, activation=activation)
    spread = permutation_gap(model, TOKENS[None]).spread
    with torch.no_grad():
        logits = model(TOKENS[ORDERS])[:, :, -1]
    changes = (logits[:, 1:] - logits[:, :1]).norm(dim=-1) / spread[:, None]
    assert changes.shape == (5, 23)
    assert float(changes.min()) > MAX_INVARIANT


def test_the_last_position_has_lost_no_symmetry_after_the_first_of_several_causal_layers():
    embeddings, first, second, _ = states(decoder(layers=3), TOKENS[ORDERS])
    for level in (embeddings, first):
        torch.testing.assert_close(level[:, :, -1], level[:, :1, -1].expand_as(level[:, :, -1]))
    assert bool(((second[:, 1:, -1] - second[:, :1, -1]).norm(dim=-1) > 1e-3).all())


@pytest.mark.parametrize("mask", TABLE["mask"])
def test_at_any_depth_all_positions_of_a_constant_sequence_have_the_same_states(mask):
    model = decoder(layers=4, mask=mask)
    for level in states(model, torch.full((1, 7), 3)):
        torch.testing.assert_close(level, level[:, :, :1].expand_as(level), rtol=1e-11, atol=1e-13)


def test_dead_units_without_residual_connections_see_nothing_for_a_whole_region_of_weights():
    """Why the page claims "almost all weights" of smooth activations only."""
    model = decoder(layers=2, residual=False, norm="none")
    assert float(permutation_gap(model, TOKENS[None]).spread.min()) > 1e-4
    with torch.no_grad():
        for layer in model.layers:
            layer.lower.bias.fill_(-10.0)
    assert float(permutation_gap(model, TOKENS[None]).spread.max()) < 1e-15


@pytest.fixture(scope="module")
def stored_run():
    (claims,) = (PAGE.parent / "runs" / "permutation").glob("*/claims.json")
    return open_run(claims.parent)


def test_the_page_names_the_size_of_the_stored_run(stored_run):
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    config = json.loads(stored_run.attrs["config"])
    orders = math.factorial(config["length"] - 1)
    assert (
        f"(ReLU, width {config['width']}, {config['length']} distinct tokens, float64), tries all {orders} orders"
        in text
    )
    assert stored_run.sizes["seed"] == 10
    assert "and ten seeds (the stored run, preset `paper`)" in text


def test_the_table_of_the_page_has_the_numbers_of_the_stored_run(stored_run):
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## What is measured")
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    rows = {(encoding, mask): changes for encoding, mask, *changes in table}
    assert rows.pop(("encoding", "mask")) == ["1 layer", "2 layers", "4 layers"]
    assert list(rows) == list(itertools.product(TABLE["positions"], TABLE["mask"]))
    for (positions, mask), texts in rows.items():
        for layers, text in zip(TABLE["layers"], texts, strict=True):
            changes = stored_run.largest.sel(positions=positions, mask=mask, layers=layers)
            if text == "rounding":
                assert float(changes.max()) <= MAX_INVARIANT
            else:
                low, high = float(changes.min()), float(changes.max())
                assert low >= MIN_BROKEN
                assert text == f"{low:.2f} to {high:.2f}"


def test_the_page_names_the_outcome_of_every_claim(stored_run):
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for claim in STUDY.claims:
        assert f"`{claim.name}`" in text
        assert claim.judge(stored_run, "paper")["verdict"] == "holds"


def test_the_page_states_where_rounding_is_large(stored_run):
    largest = stored_run.largest.sel(positions="none", mask="full")
    assert float((largest < 1e-14).mean()) > 0.8
    amplified = largest.sel(layers=4, residual="off", norm="none")
    assert float(amplified.median()) == pytest.approx(1e-11, rel=0.5)
    assert float(amplified.min()) > 10 * float(largest.where(largest != amplified).max())
    spread = stored_run.spread.sel(positions="none", mask="full", layers=4, residual="off").mean("seed")
    fall = math.log10(float(spread.sel(norm="pre") / spread.sel(norm="none")))
    assert round(fall) == 4
