"""Which models the loop may compile, and which of their weights it may halve."""

import torch
from torch import nn

from joma.kernels.head import MIN_COMPILED_VOCABULARY
from joma.models import Block, BlockConfig, Decoder, DecoderConfig, FrozenAttentionDecoder
from joma.train import CompiledModel
from joma.train.packed import leading_part


def generators():
    return [torch.Generator().manual_seed(0)]


def test_decoders_offer_their_layers_and_a_block_offers_nothing():
    config = DecoderConfig(vocabulary=5, width=8, layers=2)
    assert isinstance(Decoder(config, generators=generators()), CompiledModel)
    frozen = FrozenAttentionDecoder(config, generators=generators(), freeze_steps=torch.tensor([3]))
    assert isinstance(frozen, CompiledModel)
    assert not isinstance(Block(BlockConfig(tokens=3, hidden=2), generators=generators()), CompiledModel)
    assert not isinstance(nn.Linear(2, 2), CompiledModel)


def test_product_weights_are_parameters_of_the_model_under_their_names():
    model = Decoder(DecoderConfig(vocabulary=5, width=8, layers=2), generators=generators())
    parameters = dict(model.named_parameters())
    weights = model.product_weights()
    assert len(weights) == 2 * 6  # W_Q, W_K, W_V, W_O and the two matrices of the MLP in each layer
    assert all(getattr(module, attribute) is parameters[name] for name, (module, attribute, _) in weights.items())
    assert "head.weight" not in weights


def test_a_large_head_is_copied_together_with_its_bias():
    model = Decoder(DecoderConfig(vocabulary=MIN_COMPILED_VOCABULARY, width=8), generators=generators())
    module, attribute, copy = model.product_weights()["head.weight"]
    weight = model.get_parameter("head.weight")
    assert getattr(module, attribute) is weight
    assert leading_part(copy(weight), weight).equal(weight.bfloat16())
    assert copy(weight).shape[1] > weight.shape[1]
