"""Norms of gradients by block, against each parameter's gradient in float64; sharded over two processes too."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import xarray as xr
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import tiny_models
from joma.arguments import StateError
from joma.watch import activations, gradient_norms


def train_step(model):
    model.train()
    tokens = tiny_models.TOKENS
    model(input_ids=tokens, labels=tokens).loss.backward()
    return model


def by_parameter(model, part):
    """Return the norm over the parameters whose names contain `part`."""
    squares = [
        p.grad.double().square().sum() for name, p in model.named_parameters() if part in name and p.grad is not None
    ]
    return math.sqrt(sum(square.item() for square in squares))


def test_norms_are_those_of_all_parameters_of_a_block():
    model = train_step(tiny_models.neox())
    norms = gradient_norms(model)
    assert list(norms) == ["gpt_neox.layers.0", "gpt_neox.layers.1", "embedding", "other"]
    assert norms["gpt_neox.layers.0"] == pytest.approx(by_parameter(model, "layers.0."), rel=1e-6)
    assert norms["gpt_neox.layers.1"] == pytest.approx(by_parameter(model, "layers.1."), rel=1e-6)
    assert norms["embedding"] == pytest.approx(by_parameter(model, "embed_in"), rel=1e-6)
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    assert math.hypot(*norms.values()) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_of_other_dtypes_do_not_overflow(dtype):
    block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16).to(dtype)
    for parameter in block.parameters():
        parameter.grad = torch.full_like(parameter, 300.0)  # in float16 the sum of squares is infinite
    count = sum(parameter.numel() for parameter in block.parameters())
    assert gradient_norms(block) == {"TransformerEncoderLayer": pytest.approx(300 * math.sqrt(count), rel=1e-6)}


def test_frozen_blocks_are_nan_and_tied_weights_count_once():
    model = tiny_models.neox(tie_word_embeddings=True)
    model.gpt_neox.layers[0].requires_grad_(False)
    norms = gradient_norms(train_step(model))
    assert math.isnan(norms["gpt_neox.layers.0"])
    assert norms["embedding"] == pytest.approx(by_parameter(model, "embed_in"), rel=1e-6)
    others = {name: norm for name, norm in norms.items() if not math.isnan(norm)}
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    assert math.hypot(*others.values()) == pytest.approx(whole, rel=1e-6)


def test_sparse_gradients_count_each_row_once():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(5, 8, sparse=True), nn.TransformerEncoderLayer(8, 2, batch_first=True)

        def forward(self, tokens):
            return self.block(self.embed(tokens))

    model = Model()
    model(torch.tensor([[1, 1, 3]])).sum().backward()
    expected = model.embed.weight.grad.to_dense().norm().item()
    assert gradient_norms(model)["embedding"] == pytest.approx(expected, rel=1e-5)


def test_without_gradients_it_says_when_to_call():
    with pytest.raises(StateError, match=r"after `loss.backward\(\)`"):
        gradient_norms(tiny_models.neox())


def test_wrapped_models_have_the_same_names_and_a_pattern_chooses_blocks():
    model = train_step(tiny_models.neox())
    assert gradient_norms(nn.DataParallel(model)) == gradient_norms(model)
    assert list(gradient_norms(model, blocks=r"layers\.1$")) == ["gpt_neox.layers.1", "embedding", "other"]


def compare_sharded_with_whole(rank, meeting):
    """Watch a whole model and a sharded copy of it, in a process of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=9, dropout=0.0, batch_first=True, dtype=torch.float64)
    whole = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8, dtype=torch.float64), enable_nested_tensor=False)
    sharded, mesh = copy.deepcopy(whole), init_device_mesh("cpu", (2,))
    for block in sharded.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x, results = torch.randn(2, 5, 8, dtype=torch.float64), []
    for model in (whole, sharded):
        with activations(model) as recording:
            model(x).square().mean().backward()
        results.append((recording.dataset(), gradient_norms(model)))
    (expected, expected_norms), (dataset, norms) = results
    assert list(norms) == ["layers.0", "layers.1", "other"]
    assert norms == pytest.approx(expected_norms, rel=1e-9)
    xr.testing.assert_allclose(dataset, expected, rtol=1e-9, atol=0)
    torch.distributed.destroy_process_group()


def test_sharded_models_have_the_norms_and_activations_of_whole_ones(tmp_path):
    # Forked processes have torch imported already; it takes longer than the test.
    start_processes(compare_sharded_with_whole, (tmp_path / "meeting",), nprocs=2, start_method="fork")
