"""The models that `panorama` trains, against the studies that they come from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from joma.arguments import InputError
from joma.models.block import Block, BlockConfig
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes.rank import stable_rank
from joma.studies.related import panorama_training
from joma.studies.related.panorama_curves import split
from joma.studies.related.panorama_sources import TRAINED
from joma.studies.related.panorama_training import MixedUnits, TrainedConfig, check, decoder_axes, train
from joma.studies.theorems import ladder_flows
from joma.study import Context

SMALL = TrainedConfig(
    records=10, block_steps=20, overlap_steps=20, scan_steps=20, text_steps=10, text_width=4, addition_width=8,
    addition_batch=4, addition_steps=10,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    return train(SMALL, Context((0, 1)))


def test_every_source_is_trained(trained):
    curves = split(trained, "trained", member="seed")
    assert list(curves) == list(TRAINED)
    for name, curve in curves.items():
        assert curve.sizes["seed"] == 2
        assert bool(((curve.axes_entropy > 0.3) & (curve.axes_entropy <= 1 + 1e-6)).all()), name


def test_names_choose_what_is_trained(trained):
    part = train(replace(SMALL, trained=("block-gelu",)), Context((0, 1)))
    assert part.trained_source.values.tolist() == ["block-gelu"]
    curves = (split(run, "trained", member="seed")["block-gelu"] for run in (part, trained))
    xr.testing.assert_allclose(*curves, rtol=0, atol=1e-12)


def test_overlapping_classes_are_those_of_the_ladder():
    """The study `ladder` trains the same block from the same start."""
    seeds, config = Context((0, 1)), replace(SMALL, overlap_steps=40, trained=("overlap",))
    ladder = ladder_flows.train(ladder_flows.FlowConfig(sgd_worlds=("overlap",), sgd_steps=40), seeds).sgd_entropy
    curve = split(train(config, seeds), "trained", member="seed")["overlap"]
    np.testing.assert_allclose(curve.axes_entropy[:, -1], ladder.isel(sgd_world=0, sgd_time=-1), rtol=0, atol=1e-12)


def test_mixed_units_are_the_blocks_of_each_kind():
    config, generators = BlockConfig(tokens=3, hidden=2, scale=1.0), [torch.Generator().manual_seed(s) for s in (0, 1)]
    mixed = MixedUnits(config, ("linear", "gelu"), generators=generators)
    x = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    for row, units in enumerate(("linear", "gelu")):
        alone = Block(replace(config, activation=units), generators=[torch.Generator().manual_seed(row)])
        torch.testing.assert_close(mixed(x)[row], alone(x)[0])


def test_the_axes_of_a_decoder_are_means_over_its_parts():
    """Against a loop over seeds, layers, sequences, heads and rows."""
    config = DecoderConfig(vocabulary=7, width=8, layers=2, heads=2, length=5)
    model = Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in (0, 1)])
    tokens = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(2))
    axes = decoder_axes(model, tokens)
    maps = model.activations(tokens, ["attention"])["attention"]
    for seed in range(2):
        heads = [layer[seed, sample, head].double() for layer in maps for sample in range(3) for head in range(2)]
        entropy = [
            -(row[: n + 1] * row[: n + 1].log()).sum() / np.log(n + 1) for w in heads for n, row in enumerate(w) if n
        ]
        sinks = [weights[1:].mean(dim=0).max() for weights in heads]
        ranks = [stable_rank(model.get_parameter(f"layers.{n}.lower.weight")[seed]).double() for n in range(2)]
        for name, values in (("axes_entropy", entropy), ("axes_sink", sinks), ("axes_rank", ranks)):
            torch.testing.assert_close(
                axes[name][seed].detach(), torch.stack(values).mean().detach(), atol=1e-5, rtol=1e-5
            )


def test_addition_has_no_weight_decay():
    assert panorama_training._addition_setting(SMALL).weight_decay == 0.0


@pytest.mark.parametrize(
    "change",
    [{"trained": ()}, {"trained": ("blok",)}, {"trained": ("text", "text")}, {"records": 2}, {"block_steps": 0}],
)
def test_a_bad_config_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"`{next(iter(change))}` must"):
        check(replace(SMALL, **change))
