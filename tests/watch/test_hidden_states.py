"""Norms and ranks by block against hidden states that hooks of the test keep, and everything that may disturb them."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiny_models
from joma.arguments import InputError, StateError
from joma.watch import activations, attention
from joma.watch.rows import RowsUnknown
from watch.families import EXACT
from watch.tiny_configs import tiny_model

BLOCKS = ["gpt_neox.layers.0", "gpt_neox.layers.1"]
X = tiny_models.random_normal(2, 5, 8)


def expected(states: Tensor, rows: Tensor | None = None) -> list[float]:
    """Return RMS, mean norm, stable rank and participation ratio from singular values in float64."""
    x = states.detach().double()
    x = x.flatten(0, -2) if rows is None else x[rows]
    values, spread = torch.linalg.svdvals(x).square(), torch.linalg.svdvals(x - x.mean(0)).square()
    norms = [x.square().mean().sqrt(), x.norm(dim=-1).mean()]
    ranks = [values.sum() / values[0], spread.sum().square() / spread.square().sum()]
    return [value.item() for value in norms + ranks]


def numbers(recording, block, stream="hidden", index=0) -> list[float]:
    chosen = recording.dataset().isel({"pass": index}).sel(block=block)
    return [
        *(float(chosen[name]) for name in ("residual_rms", "residual_norm")),
        *(float(chosen[name].sel(stream=stream)) for name in ("stable_rank", "participation_ratio")),
    ]


def kept_outputs(modules):
    """Return the list that the outputs of the modules are appended to."""
    outputs = []
    for module in modules:
        module.register_forward_hook(lambda _m, _a, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
    return outputs


@dataclass
class Output:
    states: Tensor
    extra: int = 0


class Layer(nn.Module):
    """A block with attention whose output is what `wrap` makes of it."""

    def __init__(self, wrap=lambda x: x) -> None:
        super().__init__()
        self.attn, self.wrap = nn.MultiheadAttention(8, 2, batch_first=True), wrap

    def forward(self, x: Tensor):
        return self.wrap(x + self.attn(x, x, x)[0])


class Model(nn.Module):
    """Blocks one after the other; `call` says how each is called."""

    def __init__(self, *blocks: nn.Module, call=lambda block, x: block(x)) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(blocks), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            out = self.call(block, x)
            x = (
                out
                if isinstance(out, Tensor)
                else next(iter(vars(out).values()))
                if hasattr(out, "__dict__")
                else out[0]
            )
        return x


@pytest.mark.parametrize("kind", tiny_models.DECODERS)
def test_numbers_are_those_of_the_states_that_each_block_returns(kind):
    model, names = tiny_models.DECODERS[kind]()
    model = tiny_models.with_large_weights(model)
    names = [names.format(index) for index in range(2)]
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    hidden, attended = kept_outputs(layers), kept_outputs([model.get_submodule(name) for name in names])
    with torch.no_grad(), activations(model) as recording:
        model(input_ids=tiny_models.TOKENS)
    assert recording.blocks == tuple(name.rpartition(".")[0] for name in names)
    for index, block in enumerate(recording.blocks):
        assert numbers(recording, block) == pytest.approx(expected(hidden[index]), rel=1e-5)
        assert numbers(recording, block, "attention")[2:] == pytest.approx(expected(attended[index])[2:], rel=1e-5)


FAMILIES = (
    "llama gpt2 gptj bloom mpt opt falcon codegen gemma2 deepseek_v3 xlnet bert distilbert electra deberta-v2 "
    "longformer mobilebert vit beit t5 bart fsmt whisper"
)


@pytest.mark.parametrize("name", FAMILIES.split())
def test_the_residual_stream_is_what_transformers_returns_as_hidden_states(name):
    """The last state of a model may be normalised, and is left out."""
    family = EXACT[name]
    model = tiny_model(name, family.model_class, **family.changes)
    with torch.no_grad(), activations(model) as recording:
        output = model(**family.inputs, output_hidden_states=True)
    assert recording.refused is None
    assert not recording.rows_unknown
    sides = {"hidden_states": "attention_mask", "encoder_hidden_states": "attention_mask"}
    sides["decoder_hidden_states"] = "decoder_attention_mask"
    states = {field: output.get(field) for field in sides if output.get(field) is not None}
    assert states
    for field, depths in states.items():
        mask = family.inputs.get(sides[field])
        rows = None if mask is None or mask.shape != depths[0].shape[:2] else mask.bool()
        blocks = [block for block in recording.blocks if field == "hidden_states" or field.split("_")[0] in block]
        assert len(blocks) == len(depths) - 1 > 1
        for block, expected_states in zip(blocks[:-1], depths[1:-1], strict=True):
            assert numbers(recording, block) == pytest.approx(expected(expected_states, rows), rel=1e-4)


def test_dims_names_and_options():
    model = tiny_models.neox()
    with activations(model, residual=False) as ranks, activations(model, ranks=False, blocks=r"layers\.1$") as norms:
        model(tiny_models.TOKENS)
        model(tiny_models.TOKENS[:1])
    assert dict(ranks.dataset().sizes) == {"pass": 2, "block": 2, "stream": 2}
    assert set(ranks.dataset()) == {"stable_rank", "participation_ratio"}
    assert dict(norms.dataset().sizes) == {"pass": 2, "block": 1}
    assert set(norms.dataset()) == {"residual_rms", "residual_norm"}
    assert list(norms.dataset().block) == ["gpt_neox.layers.1"]
    assert repr(norms) == "<HiddenStates of 1 blocks, 2 passes>"
    with pytest.raises(InputError, match="at least one of them"), activations(model, residual=False, ranks=False):
        pass


def test_rows_come_from_the_masks_or_are_given():
    model = tiny_models.with_large_weights(tiny_models.neox())
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])
    hidden = kept_outputs(model.gpt_neox.layers)
    model.requires_grad_(False)
    with activations(model) as by_mask, activations(model, rows=mask) as given, activations(model, rows="all") as every:
        model(tiny_models.TOKENS, attention_mask=mask)
    for states, block in zip(hidden, BLOCKS, strict=True):
        assert numbers(by_mask, block) == pytest.approx(expected(states, mask.bool()), rel=1e-5)
        assert numbers(every, block) == pytest.approx(expected(states), rel=1e-5)
    assert by_mask.dataset().equals(given.dataset())
    assert by_mask.row_masks.rows == "masks"


def test_each_side_of_an_encoder_decoder_has_its_own_rows():
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0)
    model = tiny_models.with_large_weights(T5Model(config))
    masks = torch.tensor([[1] * 4 + [0] * 3, [1] * 7]), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    hidden = kept_outputs([model.encoder.block[0], model.decoder.block[0]])
    inputs = {"input_ids": tiny_models.TOKENS, "decoder_input_ids": tiny_models.TOKENS[:, :5]}
    with torch.no_grad(), activations(model) as recording:
        model(**inputs, attention_mask=masks[0], decoder_attention_mask=masks[1])
    for side, states, mask in zip(("encoder", "decoder"), hidden, masks, strict=True):
        assert numbers(recording, f"{side}.block.0") == pytest.approx(expected(states, mask.bool()), rel=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_masks_of_torch_with_sequences_first_or_batches(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=batch_first)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), X[:, :2]  # as many tokens as sequences
    padding = torch.tensor([[False, False], [False, True]])
    hidden = kept_outputs(model.layers)
    with activations(model) as recording:
        model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
    states = hidden[1] if batch_first else hidden[1].transpose(0, 1)
    assert numbers(recording, "layers.1") == pytest.approx(expected(states, ~padding), rel=1e-5)


@pytest.mark.filterwarnings("ignore::joma.watch.AttentionSwitched", "ignore:`torch.jit:DeprecationWarning")
def test_masks_are_seen_through_wrappers():
    model = tiny_models.neox()
    inputs = {"input_ids": tiny_models.TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])}
    with activations(model) as plain:
        model(**inputs)
    with activations(torch.compile(model, backend="eager")) as recording:
        torch.compile(model, backend="eager")(**inputs)
    assert recording.dataset().equals(plain.dataset())


@pytest.mark.parametrize("channels_first", [True, False])
def test_images_are_understood_with_channels_first_and_last(channels_first):
    class Image(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = x.movedim(1, -1) if channels_first else x
            y = super().forward(y.flatten(1, 2)).view(y.shape)
            return y.movedim(-1, 1) if channels_first else y

    torch.manual_seed(0)
    model = Model(Image(), Image())
    hidden, x = kept_outputs(model.layers), tiny_models.random_normal(2, 3, 3, 8)
    with activations(model) as recording:
        model(x.movedim(-1, 1) if channels_first else x)
    states = hidden[1].movedim(1, -1) if channels_first else hidden[1]
    assert numbers(recording, "layers.1") == pytest.approx(expected(states), rel=1e-5)


def test_masks_that_do_not_fit_are_one_warning():
    class Shortening(Layer):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            del attention_mask
            return super().forward(x)[:, ::2]

    model = Model(Shortening(), Shortening(), call=lambda block, x: block(x, torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])))
    warned = pytest.warns(RowsUnknown, match=r"all rows of layers.0, layers.1 count, padded ones too.*give `rows`")
    with warned as caught, activations(model) as recording:
        model(X)
    assert len(caught) == 1
    assert list(recording.rows_unknown) == ["layers.0", "layers.1"]


def test_rows_of_another_shape_are_named_and_the_model_runs():
    model = tiny_models.neox()
    with (
        pytest.warns(UserWarning, match="`rows` must be of shape"),
        activations(model, rows=torch.ones(3, 3)) as recording,
    ):
        assert model(tiny_models.TOKENS).logits.isfinite().all()
    with pytest.raises(InputError, match="`rows` must be of shape"):
        recording.dataset()


@pytest.mark.parametrize("wrap", [lambda x: (x, 3), lambda x: [x], Output], ids=["pair", "list", "dataclass"])
def test_blocks_may_return_tuples_lists_and_dataclasses(wrap):
    torch.manual_seed(0)
    model = Model(Layer(wrap), Layer(wrap))
    plain = Model(*(Layer() for _ in range(2)))
    plain.load_state_dict(model.state_dict())
    with activations(model) as recording, activations(plain) as reference:
        model(X)
        plain(X)
    assert recording.dataset().equals(reference.dataset())


def test_a_block_called_twice_is_two_blocks():
    torch.manual_seed(0)
    layer = Layer()
    model = Model(layer, call=lambda block, x: block(block(x)))
    with activations(model) as recording:
        model(X)
        model(X)
    assert list(recording.dataset().block) == ["layers.0", "layers.0[1]"]
    assert recording.dataset().sizes["pass"] == 2
    assert numbers(recording, "layers.0[1]") == pytest.approx(expected(layer(layer(X))), rel=1e-5)


def test_cross_attention_is_a_stream_of_its_own():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0.0)
    outputs = kept_outputs([model.decoder.layers[0].self_attn, model.decoder.layers[0].multihead_attn])
    with activations(model) as recording:
        model(X, X[:, :3])
    assert list(recording.dataset().stream) == ["hidden", "attention", "attention[1]"]
    for states, stream in zip(outputs, ["attention", "attention[1]"], strict=True):
        assert numbers(recording, "decoder.layers.0", stream)[2:] == pytest.approx(expected(states)[2:], rel=1e-5)
    assert np.isnan(numbers(recording, "encoder.layers.0", "attention[1]")[2:]).all()


def trained(model, watch):
    """Return losses, gradients and weights of three steps."""
    optimiser, losses = torch.optim.SGD(model.parameters(), 0.1), []
    torch.manual_seed(1)
    for _ in range(3):
        with watch(model):
            loss = model(input_ids=tiny_models.TOKENS, labels=tiny_models.TOKENS).loss
            loss.backward()
        losses.append(loss.detach())
        optimiser.step()
    return [*losses, *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]


def test_training_is_the_same_bits():
    models = [tiny_models.neox(hidden_dropout=0.1).train() for _ in range(2)]
    plain = trained(models[0], lambda _: warnings.catch_warnings())
    watched = trained(models[1], activations)
    assert all(first.equal(second) for first, second in zip(plain, watched, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_not_recorded(reentrant):
    model = tiny_models.neox().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with activations(model) as recording:
        model(input_ids=tiny_models.TOKENS, labels=tiny_models.TOKENS).loss.backward()
    assert dict(recording.dataset().sizes) == {"pass": 1, "block": 2, "stream": 2}
    assert list(recording.dataset().block) == BLOCKS


def test_selective_checkpointing_keeps_its_count_of_operations():
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_context, operation, *_args, **_kwargs):
        saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    torch.manual_seed(0)
    plain = Model(
        Layer(), Layer(), call=lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    )
    watched = copy.deepcopy(plain)
    plain(X).square().sum().backward()
    with activations(watched) as recording:
        watched(X).square().sum().backward()
    assert recording.dataset().sizes["block"] == 2
    for first, second in zip(plain.parameters(), watched.parameters(), strict=True):
        assert first.grad.equal(second.grad)


def test_a_pass_that_fails_is_dropped_and_the_next_one_is_recorded():
    class Failing(Layer):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("out of luck")
            return super().forward(x)

    torch.manual_seed(0)
    model = Model(Layer(), Failing())
    with activations(model) as recording:
        model_fails = model.layers[1]
        with pytest.raises(RuntimeError, match="out of luck"):
            model(X)
        with pytest.raises(StateError, match="has no forward pass"):
            recording.dataset()
        model_fails.fails = False
        model(X)
    assert dict(recording.dataset().sizes) == {"pass": 1, "block": 2, "stream": 2}
    assert list(recording.dataset().block) == ["layers.0", "layers.1"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_blocks_that_are_not_called_are_named():
    model = Model(Layer(), Layer(), call=lambda block, x: block.forward(x))  # hooks do not see it
    with activations(model) as recording:
        model(X)
    with pytest.raises(InputError, match=r"must be called by the model, got layers.0, layers.1 …, of which none"):
        recording.dataset()


def test_an_interrupted_pass_leaves_nothing_behind():
    def interrupt(_block, _x):
        raise KeyboardInterrupt

    torch.manual_seed(0)
    inner = Model(Layer(), Layer())
    outer = nn.Sequential(inner)
    with activations(outer) as recording:
        call, inner.call = inner.call, interrupt
        with pytest.raises(KeyboardInterrupt):
            inner(X)
        inner.call = call
        inner(X)
    assert list(recording.dataset().block) == ["0.layers.0", "0.layers.1"]


def test_contexts_may_be_nested_also_with_that_of_attention():
    model = tiny_models.neox()
    with activations(model) as first, attention(model) as entropies, activations(model) as second:
        model(tiny_models.TOKENS)
    assert first.dataset().equals(second.dataset())
    with attention(model) as alone:
        model(tiny_models.TOKENS)
    assert entropies.dataset().equals(alone.dataset())


def test_parts_that_are_called_alone_are_passes():
    torch.manual_seed(0)
    inner = Model(Layer(), Layer())
    with activations(nn.Sequential(inner)) as recording:  # as in a Lightning module without `forward`
        inner(X)
        inner(2 * X)
    assert dict(recording.dataset().sizes) == {"pass": 2, "block": 2, "stream": 2}


def test_generation_is_a_pass_for_each_call():
    model = tiny_models.neox()
    with activations(model) as recording:
        model.generate(tiny_models.TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert recording.dataset().sizes["pass"] == 3
    np.testing.assert_allclose(recording.dataset().residual_rms, recording.dataset().residual_rms, equal_nan=False)


def test_bfloat16_and_autocast():
    model = tiny_models.with_large_weights(tiny_models.neox())
    hidden = kept_outputs(model.gpt_neox.layers)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), activations(model) as recording:
        model(tiny_models.TOKENS)
    assert numbers(recording, BLOCKS[1]) == pytest.approx(expected(hidden[1]), rel=1e-5)
    hidden.clear()
    with torch.inference_mode(), activations(model.bfloat16()) as recording:
        model(tiny_models.TOKENS)
    assert hidden[0].dtype == torch.bfloat16
    assert numbers(recording, BLOCKS[0]) == pytest.approx(expected(hidden[0]), rel=1e-5)


@pytest.mark.filterwarnings("ignore::joma.watch.AttentionSwitched", "ignore:`torch.jit:DeprecationWarning")
def test_compiled_models_run_eagerly_inside_and_compiled_afterwards():
    torch.manual_seed(0)
    model = Model(Layer(), Layer())
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    with activations(compiled) as recording, activations(model) as reference:
        compiled(X)
    assert recording.dataset().equals(reference.dataset())
    assert list(recording.dataset().block) == ["layers.0", "layers.1"]
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with activations(model) as recording:
        model(X)
    assert recording.dataset().equals(reference.dataset())


def test_other_threads_are_not_recorded():
    model = tiny_models.neox()
    with activations(model) as recording:
        thread = threading.Thread(target=model, args=(tiny_models.TOKENS,))
        thread.start()
        thread.join()
        with pytest.raises(StateError, match="has no forward pass"):
            recording.dataset()
        model(tiny_models.TOKENS)
    assert recording.dataset().sizes["pass"] == 1


def test_tensors_without_numbers_are_refused_once_by_name():
    model = tiny_models.neox().to("meta")
    warned = pytest.warns(UserWarning, match="must return an ordinary tensor, got a meta one")
    with warned as caught, activations(model) as recording:
        model(tiny_models.TOKENS.to("meta"))
    assert len(caught) == 1
    with pytest.raises(InputError, match="must return an ordinary tensor"):
        recording.dataset()


def test_nothing_is_transferred_before_the_dataset(monkeypatch):
    model, transfers = Model(Layer(), Layer()), []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__"):  # on the CPU `spectral_norm` may branch
        original = getattr(Tensor, name)

        def counted(self, *args, name=name, original=original, **kwargs):
            transfers.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)
    with activations(model) as recording:
        model(X)
    assert transfers == []
    recording.dataset()
    assert transfers == ["tolist"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("width", [64, 512])
def test_nothing_waits_for_the_gpu(width):
    layer = nn.TransformerEncoderLayer(width, 2, dim_feedforward=64, batch_first=True, device="cuda")
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 300, width, device="cuda")
    rows = torch.rand(4, 300, device="cuda") < 0.7
    for _ in range(2):  # the first pass may set libraries up
        with activations(model, rows=rows) as recording:
            model(x)
            torch.cuda.set_sync_debug_mode("error")
            try:
                model(x)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert recording.dataset().to_array().notnull().all()
