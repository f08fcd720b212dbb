"""Whether the seeds of each study can be split: a seed's bits on the CPU do not depend on the seeds beside it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from joma import open_run
from joma.arguments import InputError
from joma.studies import STUDIES, load
from joma.study import execute
from joma.study.shards import join_shards, train_shard

SPLIT = ((0,), (1, 2))
# The quick preset's sizes, which decide how products and sums are computed, with fewer steps or repetitions.
CHANGES = {
    "invariance": {"steps": 10},
    "winner": {"samples": 8, "steps": 300, "figure_3_steps": 20},
    "cooccurrence": {"samples": 5000, "trees": 2},
    "rank-collapse": {"layers": 4, "draws": 4},
}
# Compared once at the quick preset's full size (`pretrained` for 20 of its steps), which takes too long for a test.
COMPARED_ONCE = {"critical-points", "scan-snap", "permutation", "pretrained"}
# Training these, PyTorch sums the gradients of biases, updates by Adam, or multiplies matrices by other kernels, or by
# other parts of a kernel, if the number of seeds changes.
INEXACT = {
    "value-invariant", "sparse-dense", "ladder", "alignment", "hierarchy-order", "entropy-text", "learning-rates",
    "activation-control", "bounce-control", "bounce-cause", "invariant-text", "addition", "position-emergence",
    "polarise", "icl-regression", "max-margin", "entropy-floor", "even-pairs", "markov-unigram", "icl-autoregression",
    "induction-phases", "panorama",
}  # fmt: skip


def test_every_study_says_whether_its_shards_are_exact():
    assert {name for name in STUDIES if not load(name).exact_shards} == INEXACT
    assert {*STUDIES} == INEXACT | {*CHANGES} | COMPARED_ONCE


@pytest.mark.parametrize("name", CHANGES)
def test_joined_shards_have_the_bits_of_the_run_that_was_never_split(name, tmp_path):
    study = replace(load(name), claims=(), figures={}, highlight=None, outcome=None)  # what is drawn is the same run
    config = replace(study.presets["quick"].config, **CHANGES[name])
    whole = open_run(execute(study, out=tmp_path / "whole", seeds=3, config=config).path)
    for seeds in SPLIT:
        train_shard(study, seeds, seed_count=3, out=tmp_path, config=config)
    joined = open_run(join_shards(study, SPLIT, out=tmp_path, config=config).path)
    assert list(joined.variables) == list(whole.variables)
    for variable, expected in whole.variables.items():
        values = joined.variables[variable]
        assert (values.dims, values.dtype, values.shape) == (expected.dims, expected.dtype, expected.shape)
        if values.dtype == object:
            assert values.values.tolist() == expected.values.tolist()
        else:
            different = np.frombuffer(values.values.tobytes(), "u1") != np.frombuffer(expected.values.tobytes(), "u1")
            assert not different.any(), f"{variable} differs"


@pytest.mark.parametrize("name", sorted(INEXACT))
def test_other_studies_are_not_split_on_the_cpu(name, tmp_path):
    with pytest.raises(InputError, match=f"{name} on cpu"):
        train_shard(load(name), (0,), seed_count=3, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_fused_update_of_adam_depends_on_the_number_of_seeds():
    """Why `alignment` is not split: the last elements of a tensor are updated by another part of PyTorch's kernel."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(3, 20, generator=generator) for _ in range(4)]

    def updated(seeds: slice) -> torch.Tensor:
        parameter, gradient, mean, square = (tensor[seeds].clone() for tensor in tensors)
        for step in range(1, 200):
            torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
                *([parameter], [gradient], [mean], [square], [], [torch.tensor(float(step))]),
                lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-4, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        return parameter

    whole, alone = updated(slice(0, 3)), updated(slice(0, 1))
    torch.testing.assert_close(whole[:1], alone)
    assert not torch.equal(whole[:1], alone)
