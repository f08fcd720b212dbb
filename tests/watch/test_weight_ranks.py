"""Which weights are measured, and that measuring several at once gives the ranks of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from joma.arguments import InputError
from joma.probes.rank import stable_rank
from joma.watch import weight_ranks
from joma.watch.weight_ranks import copied_together, select_weights, stable_ranks


def test_weights_are_chosen_by_name_and_embeddings_only_when_named() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 8), "mlp": nn.Linear(8, 12)})
    assert select_weights(model, True) == ("mlp.weight",)  # no matrix has a usual name
    assert select_weights(nn.TransformerEncoderLayer(8, 2, 16), True) == ("linear1.weight",)
    assert select_weights(model, "embed|mlp") == ("embed.weight", "mlp.weight")
    assert select_weights(model, False) == ()
    expected = r"`ranks` must be a pattern .* got 'atention'; the matrices are embed.weight, mlp"
    with pytest.raises(InputError, match=expected):
        select_weights(model, "atention")
    tied = nn.ModuleDict({"head": nn.Linear(8, 6, bias=False), "embed": nn.Embedding(6, 8)})
    tied["head"].weight = tied["embed"].weight
    assert select_weights(tied, True) == ()


@pytest.mark.parametrize("limit", [1, 2**24])
def test_weights_of_one_shape_are_measured_together_and_in_their_order(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_ranks, "MAX_STACKED", limit)
    torch.manual_seed(0)
    shapes = [(4, 6), (5, 3), (6, 4), (4, 6), (3, 5)]
    model = nn.ParameterDict({f"w{index}": nn.Parameter(torch.randn(shape)) for index, shape in enumerate(shapes)})
    model["w5"] = nn.Parameter(torch.randn(4, 6).half())
    names = tuple(f"w{index}" for index in range(6))
    expected = []
    for name in names:
        squares = torch.linalg.svdvals(model[name].detach().double()).square()
        expected.append(float(squares.sum() / squares.max()))
    np.testing.assert_allclose(stable_ranks(model, names), expected, rtol=2e-3)
    assert stable_ranks(model, ()).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_weights_on_a_gpu_are_measured_from_their_gram_matrices(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = [(4, 6), (5, 3), (6, 4), (5, 5)]
    weights = {f"w{index}": nn.Parameter(torch.randn(shape, dtype=dtype)) for index, shape in enumerate(shapes)}
    weights["w1"].data[0, 0] = torch.nan
    model, names = nn.ParameterDict(weights), tuple(weights)
    expected = [float(stable_rank(model[name])) for name in names]
    monkeypatch.setattr(weight_ranks, "_is_small_on_gpu", lambda _: True)
    np.testing.assert_allclose(stable_ranks(model, names), expected, rtol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_weights_have_the_same_stable_rank_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(64, 256), (256, 64), (8, 8)]
    weights = {f"w{index}": nn.Parameter(torch.randn(shape, dtype=dtype)) for index, shape in enumerate(shapes)}
    expected = stable_ranks(nn.ParameterDict(weights), tuple(weights))
    np.testing.assert_allclose(stable_ranks(nn.ParameterDict(weights).cuda(), tuple(weights)), expected, rtol=1e-12)


def test_the_parts_of_names_that_wrappers_add_are_left_out() -> None:
    model = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"layer": nn.Linear(3, 4)})})
    assert select_weights(model, True) == ("layer.weight",)
    assert stable_ranks(model, ("layer.weight",)).shape == (1,)


def test_flat_parameters_are_not_measured_and_this_is_said() -> None:
    class FullyShardedDataParallel(nn.Module):
        """A module of the wrapper's name."""

    with pytest.warns(UserWarning, match=r"stable ranks are not measured: FSDP1 .*; use `fully_shard`"):
        assert select_weights(nn.Sequential(FullyShardedDataParallel(), nn.Linear(2, 2)), True) == ()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans()), max_size=5))
def test_weights_that_are_copied_together_stay_what_they_are(kinds):
    tensors = []
    for number, (rows, columns, half, transposed) in enumerate(kinds):
        tensor = torch.arange(rows * columns, dtype=torch.float16 if half else torch.float32).view(rows, columns)
        tensors.append((tensor + number).T if transposed else tensor + number)
    copies = copied_together(tensors)
    assert [copy.dtype for copy in copies] == [tensor.dtype for tensor in tensors]
    assert all(copy.equal(tensor) for copy, tensor in zip(copies, tensors, strict=True))
