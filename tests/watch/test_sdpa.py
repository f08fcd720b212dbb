"""`joma.watch.attention` against the eager attention matrices of each family, and what it leaves behind: nothing."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as bound_at_import
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from joma.arguments import InputError
from joma.watch import AttentionSwitched, attention, sdpa

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = torch.tensor([[5, 3, 8, 1, 9, 2, 7], [4, 4, 6, 0, 2, 8, 5]])
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
RIGHT = LEFT.flip(1)


def llama() -> tuple[nn.Module, str]:
    config = LlamaConfig(vocab_size=10, num_key_value_heads=2, max_position_embeddings=16, **SIZE)
    return LlamaForCausalLM(config), "model.layers.{}.self_attn"


def neox() -> tuple[nn.Module, str]:
    config = GPTNeoXConfig(vocab_size=10, max_position_embeddings=16, **SIZE)
    return GPTNeoXForCausalLM(config), "gpt_neox.layers.{}.attention"


def opt() -> tuple[nn.Module, str]:
    config = OPTConfig(
        vocab_size=10,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    return OPTForCausalLM(config), "model.decoder.layers.{}.self_attn"


def gpt2() -> tuple[nn.Module, str]:
    config = GPT2Config(vocab_size=10, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config), "transformer.h.{}.attn"


FAMILIES = {"llama": llama, "neox": neox, "opt": opt, "gpt2": gpt2}


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_said", {"fast path", "compiled", "from eager"})


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_said", set())


def spread(model: nn.Module) -> nn.Module:
    """Weights large enough for attention that is far from uniform: a uniform one would hide errors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for own in model.parameters():
            own.copy_(torch.randn(own.shape, generator=generator) * (0.35 if own.ndim > 1 else 0.5))
    return model.eval()


def entropy(p: Tensor) -> Tensor:
    """The textbook sum, with 0 ln 0 = 0."""
    return -(p * p.clamp_min(1e-30).log()).sum(-1)


def expected(model: nn.Module, names: str, **inputs: Tensor) -> dict[str, Tensor]:
    """[batch, head, query] by layer, from the matrices that eager attention returns."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return {names.format(index): entropy(each) for index, each in enumerate(weights)}


def state(model: nn.Module) -> list[tuple[int, ...]]:
    """How many hooks of each kind each module bears."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return [tuple(len(getattr(module, kind)) for kind in kinds) for module in model.modules()]


def interrupt(model: nn.Module, *inputs: Tensor) -> None:
    """Leave the context by an error, which comes out as it is."""

    def stop() -> None:
        with attention(model):
            assert any(any(kinds) for kinds in state(model))
            if inputs:
                model(*inputs)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_hugging_face_decoders_give_the_entropies_of_their_eager_matrices(family: str, mask: Tensor | None) -> None:
    model, names = FAMILIES[family]()
    spread(model)
    inputs = {"input_ids": TOKENS} if mask is None else {"input_ids": TOKENS, "attention_mask": mask}
    plain = model(**inputs).logits
    with attention(model, reduce="none") as seen:
        inside = model(**inputs).logits
    assert torch.equal(inside, plain)
    assert torch.equal(model(**inputs).logits, plain)
    (found,) = seen.passes
    wanted = expected(model, names, **inputs)
    assert list(found) == list(wanted)
    real = torch.ones_like(TOKENS) if mask is None else mask
    for layer, values in wanted.items():
        torch.testing.assert_close(
            found[layer].transpose(1, 2)[real.bool()], values.transpose(1, 2)[real.bool()], atol=2e-5, rtol=0
        )
    assert min(values.std() for values in wanted.values()) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_means_are_over_the_rows_that_count(family: str) -> None:
    model, names = FAMILIES[family]()
    spread(model)
    inputs = {"input_ids": TOKENS, "attention_mask": RIGHT}
    with attention(model, rows=RIGHT) as seen, torch.no_grad():
        model(**inputs)
    for layer, values in expected(model, names, **inputs).items():
        rows = values.transpose(1, 2)[RIGHT.bool()]
        mean = torch.as_tensor(seen.entropy.sel(layer=layer).values[0])
        torch.testing.assert_close(mean, rows.double().mean(0), atol=2e-5, rtol=0)
        tokens = torch.as_tensor(seen.effective_tokens.sel(layer=layer).values[0])
        torch.testing.assert_close(tokens, rows.double().exp().mean(0), atol=1e-4, rtol=0)


def test_a_vision_transformer_and_an_encoder_attend_to_all() -> None:
    vit = ViTModel(ViTConfig(image_size=8, patch_size=4, num_channels=1, **SIZE), add_pooling_layer=False)
    bert = BertModel(BertConfig(vocab_size=10, max_position_embeddings=16, **SIZE), add_pooling_layer=False)
    image = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for model, inputs in ((vit, {"pixel_values": image}), (bert, {"input_ids": TOKENS, "attention_mask": LEFT})):
        spread(model)
        plain = model(**inputs).last_hidden_state
        with attention(model, reduce="none") as seen:
            assert torch.equal(model(**inputs).last_hidden_state, plain)
        wanted = expected(model, "{}", **inputs)
        for found, values in zip(seen.passes[0].values(), wanted.values(), strict=True):
            torch.testing.assert_close(found, values, atol=2e-5, rtol=0)


def test_each_pass_is_kept_and_decoding_with_a_cache_is_one_pass_a_token() -> None:
    model, names = llama()
    spread(model)
    with attention(model, reduce="none") as seen, torch.no_grad():
        past = model(input_ids=TOKENS[:, :5], use_cache=True).past_key_values
        model(input_ids=TOKENS[:, 5:6], past_key_values=past)
    wanted = expected(model, names, input_ids=TOKENS[:, :6])
    assert len(seen.passes) == 2
    for layer, values in wanted.items():
        torch.testing.assert_close(seen.passes[0][layer], values[:, :, :5], atol=2e-5, rtol=0)
        torch.testing.assert_close(seen.passes[1][layer], values[:, :, 5:], atol=2e-5, rtol=0)
    assert dict(seen.dataset().sizes) == {"pass": 2, "layer": 2, "batch": 2, "head": 4, "query": 5}
    assert seen.entropy[1, :, :, :, 1:].isnull().all()
    assert seen.longest == 6


@pytest.mark.usefixtures("fresh")
def test_an_eager_model_is_switched_and_back_and_that_is_said_once() -> None:
    model, names = neox()
    spread(model)
    model.set_attn_implementation("eager")
    plain = model(input_ids=TOKENS).logits
    context = attention(model)
    with pytest.warns(AttentionSwitched, match="'eager' is replaced by 'sdpa'"):
        seen = context.__enter__()
    assert model.config._attn_implementation == "sdpa"
    inside = model(input_ids=TOKENS).logits
    context.__exit__(None, None, None)
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(inside, plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(model(input_ids=TOKENS).logits, plain)
    wanted = expected(model, names, input_ids=TOKENS)
    for layer, values in wanted.items():
        mean = torch.as_tensor(seen.entropy.sel(layer=layer).values[0])
        torch.testing.assert_close(mean, values.double().mean((0, 2)), atol=2e-5, rtol=0)
    with attention(model):  # said already: a second warning would be an error
        model(input_ids=TOKENS)
    interrupt(model)
    assert model.config._attn_implementation == "eager"


def test_a_model_without_sdpa_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = llama()
    model.set_attn_implementation("eager")
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    with pytest.raises(InputError, match=r"LlamaForCausalLM with 'eager' attention .*attn_implementation='sdpa'"):
        attention(model).__enter__()
    assert model.config._attn_implementation == "eager"
    old = nn.Linear(2, 2)
    old.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    with pytest.raises(InputError, match="no `set_attn_implementation`"):
        attention(old).__enter__()


def test_encoder_and_decoder_lengths_differ_and_cross_attention_is_named() -> None:
    config = T5Config(
        vocab_size=10,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    if model.config._attn_implementation != "sdpa":
        pytest.skip("this version of transformers has no SDPA for T5")
    spread(model)
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :3]}
    with attention(model, reduce="none") as seen, torch.no_grad():
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    wanted = [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    assert [name.split(".")[-1] for name in seen.passes[0]] == ["SelfAttention", "SelfAttention", "EncDecAttention"]
    for found, weights in zip(seen.passes[0].values(), wanted, strict=True):
        torch.testing.assert_close(found, entropy(weights), atol=2e-5, rtol=0)


class Causal(nn.Module):
    """A block in the manner of nanoGPT; `attend` is the name under which it knows SDPA."""

    def __init__(self, attend: Callable[..., Tensor], *, heads: int = 2, times: int = 1) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.attend, self.heads, self.times = attend, heads, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).split(8, dim=-1)
            )
            x = x + self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).split(8, dim=-1))
        logits = q @ k.transpose(-1, -2) / (8 / self.heads) ** 0.5
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "attend", [bound_at_import, F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention]
)
def test_the_call_is_seen_under_any_name(attend: Callable[..., Tensor]) -> None:
    block = spread(Causal(attend))
    x = draw(3, 6, 8)
    with attention(block, reduce="none") as seen:
        inside = block(x)
    assert torch.equal(inside, block(x))
    torch.testing.assert_close(seen.passes[0]["Causal"], entropy(block.matrix(x)), atol=2e-5, rtol=0)


def test_calls_are_numbered_within_a_pass_and_heads_may_differ() -> None:
    twice, wide = spread(Causal(bound_at_import, times=2)), spread(Causal(bound_at_import, heads=4))
    model = nn.Sequential(twice, wide, twice)
    with attention(model) as seen:
        model(draw(1, 4, 8))
        model(draw(1, 4, 8))
    assert seen.entropy.layer.values.tolist() == ["0", "0[1]", "1", "0[2]", "0[3]"]
    assert seen.entropy.sizes == {"pass": 2, "layer": 5, "head": 4}
    assert seen.entropy.notnull().sum("head").values.tolist() == [[2, 2, 4, 2, 2]] * 2
    assert seen.entropy.identical(seen.dataset().entropy)


def test_parts_called_one_by_one_make_one_pass() -> None:
    model = nn.ModuleDict({"a": Causal(bound_at_import), "b": Causal(bound_at_import)})
    with attention(model) as seen:
        for seed in (0, 1):
            model["b"](model["a"](draw(1, 4, 8, seed=seed)))
    assert [list(each) for each in seen.passes] == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 2, 5, 4)])
def test_other_numbers_of_axes(shape: tuple[int, ...]) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, 2 * x, x, attn_mask=mask)

    x, mask = draw(*shape), draw(*shape[:-2], 5, 5, seed=1)
    with attention(Bare(), reduce="none") as seen:
        Bare()(x, mask)  # another object: not watched
        assert not seen.passes
    model = Bare()
    with attention(model, reduce="none") as seen:
        model(x, mask)
    wanted = entropy((x @ (2 * x).transpose(-1, -2) / 2 + mask).softmax(-1))
    heads = shape[-3] if len(shape) > 4 else 1
    torch.testing.assert_close(seen.passes[0]["Bare"], wanted.reshape(-1, heads, 5), atol=2e-5, rtol=0)


@given(seed=st.integers(0, 2**31), heads=st.sampled_from([1, 2, 4]), weights=st.booleans(), padded=st.booleans())
def test_multihead_attention_with_and_without_weights(seed: int, heads: int, weights: bool, padded: bool) -> None:
    module = nn.MultiheadAttention(8, heads, batch_first=True, add_zero_attn=bool(seed % 2))
    spread(module).train()
    x, y = draw(2, 5, 8, seed=seed), draw(2, 7, 8, seed=seed + 1)
    hidden = torch.arange(7) >= torch.tensor([[4], [7]]) if padded else None
    plain, matrix = module(x, y, y, key_padding_mask=hidden, average_attn_weights=False)
    lean, _ = module(x, y, y, key_padding_mask=hidden, need_weights=False)
    with attention(module, reduce="none") as seen:
        inside, returned = module(x, y, y, key_padding_mask=hidden, need_weights=weights)
    assert torch.equal(inside, plain if weights else lean)
    assert (returned is not None) == weights
    torch.testing.assert_close(seen.passes[0]["MultiheadAttention"], entropy(matrix), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("padded", [False, True])
def test_the_encoder_leaves_its_fast_path_and_says_so_once(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = spread(nn.TransformerEncoder(layer, 2))
    x = draw(2, 5, 8)
    hidden = torch.arange(5) >= torch.tensor([[3], [5]]) if padded else None
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=hidden)
        said = "fast path.* equal to rounding but for padded rows, which it may leave at 0, and as before"
        with pytest.warns(AttentionSwitched, match=said), attention(encoder, reduce="none") as seen:
            inside = encoder(x, src_key_padding_mask=hidden)
        with attention(encoder):
            encoder(x, src_key_padding_mask=hidden)
        assert torch.equal(encoder(x, src_key_padding_mask=hidden), plain)
    real = torch.ones(2, 5, dtype=torch.bool) if hidden is None else ~hidden
    torch.testing.assert_close(inside[real], plain[real], atol=1e-5, rtol=1e-5)
    assert bool((plain[~real] == 0).all())
    assert bool((inside[~real] != 0).any()) == padded
    assert torch.backends.mha.get_fastpath_enabled()
    _, matrix = encoder.layers[0].self_attn(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
    assert list(seen.passes[0]) == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(seen.passes[0]["layers.0.self_attn"], entropy(matrix), atol=2e-5, rtol=0)


def test_training_steps_are_the_same_bits_and_checkpointed_layers_count_once() -> None:
    model = spread(Causal(bound_at_import))
    x = draw(2, 6, 8)
    model(x).square().sum().backward()
    plain = [own.grad.clone() for own in model.parameters()]
    for reentrant, backward in product((False, True), (Tensor.backward, torch.autograd.backward)):
        model.zero_grad()
        with attention(model) as seen:
            start = x.clone().requires_grad_()
            backward(checkpoint(model, start, use_reentrant=reentrant).square().sum())
        assert len(seen.passes) == 1
        assert not seen.passes[0]["Causal"].requires_grad
        assert all(torch.equal(own.grad, kept) for own, kept in zip(model.parameters(), plain, strict=True))


def test_dropout_draws_the_same_numbers_inside() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    model, x = Dropped(), draw(1, 2, 6, 4)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with attention(model, reduce="none") as seen:
        assert torch.equal(model(x), plain)
    wanted = entropy((x @ x.transpose(-1, -2) / 2).softmax(-1))
    torch.testing.assert_close(seen.passes[0]["Dropped"], wanted, atol=2e-5, rtol=0)


def test_nothing_is_left_behind_even_by_an_error() -> None:
    model, _ = opt()
    before = state(model)
    for raised in (RuntimeError, KeyboardInterrupt):

        def fail(*_: object, raised: type[BaseException] = raised) -> None:
            raise raised("in the midst")

        with attention(model) as seen:
            handle = model.model.decoder.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(raised):
                model(input_ids=TOKENS)
            handle.remove()
            model(input_ids=TOKENS)
        assert list(seen.passes[-1]) == [f"model.decoder.layers.{index}.self_attn" for index in (0, 1)]
        assert state(model) == before
    interrupt(model)
    assert state(model) == before
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch._C._is_torch_function_mode_enabled()


def test_contexts_nest_on_one_model_and_on_its_part() -> None:
    model = nn.Sequential(Causal(bound_at_import), nn.MultiheadAttention(8, 2, batch_first=True))
    spread(model).train()

    def call() -> None:
        x = model[0](draw(1, 4, 8))
        model[1](x, x, x)

    with attention(model) as outer:
        with attention(model) as inner, attention(model[1], reduce="none") as part:
            call()
        call()
    assert len(outer.passes) == 2
    assert len(inner.passes) == len(part.passes) == 1
    for layer, values in inner.passes[0].items():
        assert torch.equal(values, outer.passes[0][layer])
    torch.testing.assert_close(part.passes[0]["MultiheadAttention"].mean((0, 2)), outer.passes[0]["1"])
    assert not torch._C._is_torch_function_mode_enabled()


def test_another_thread_is_not_recorded() -> None:
    model, x = spread(Causal(bound_at_import)), draw(1, 4, 8)
    with attention(model) as seen:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        assert not seen.passes
        model(x)
    assert len(seen.passes) == 1


@pytest.mark.usefixtures("fresh")
def test_a_compiled_model_runs_eagerly_inside() -> None:
    model = nn.Sequential(spread(Causal(bound_at_import)))
    compiled = torch.compile(model, backend="eager")
    x = draw(1, 4, 8)
    plain = compiled(x)
    context = attention(compiled)
    with pytest.warns(AttentionSwitched, match="compiled"):
        seen = context.__enter__()
    inside = compiled(x)
    context.__exit__(None, None, None)
    torch.testing.assert_close(inside, plain)
    assert list(seen.passes[0]) == ["0"]
    torch.testing.assert_close(compiled(x), plain)


def test_no_attention_is_an_error_on_leaving() -> None:
    model = nn.Linear(2, 2)
    none = "`model` must be one that calls scaled-dot-product attention, got Linear, none"
    with pytest.raises(InputError, match=none), attention(model):
        model(torch.zeros(1, 2))
    interrupt(model, torch.zeros(1, 2))  # the error on leaving does not hide another
    with attention(model) as seen:
        pass
    with pytest.raises(InputError, match="no forward pass"):
        seen.dataset()


class Plain(nn.Module):
    """Attention as it is called, with whatever mask."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_type_is_no_obstacle(dtype: torch.dtype) -> None:
    model, query = Plain(), draw(2, 3, 6, 4)
    with attention(model) as seen:
        model(query, query)
        torch.set_default_dtype(dtype)
        try:
            model(query, query)
        finally:
            torch.set_default_dtype(torch.float32)
    first, second = seen.entropy.values
    assert (first == second).all()


@pytest.mark.parametrize("lengths", [(4, 9), (6, 6)])
def test_a_causal_bias_is_recorded_as_what_it_is(lengths: tuple[int, int]) -> None:
    model, query, key = Plain(), draw(2, 3, lengths[0], 4), draw(2, 3, lengths[1], 4)
    for bias in (causal_lower_right(*lengths), causal_upper_left(*lengths)):
        with attention(model, reduce="none") as seen:
            inside = model(query, key, bias)
            model(query, key, bias._materialize())
        assert torch.equal(inside, model(query, key, bias))
        found, wanted = (each["Plain"] for each in seen.passes)
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("shapes", [((1, 3), (2, 3)), ((2, 1), (2, 3)), ((3,), (2, 3))])
def test_queries_that_broadcast_are_recorded(shapes: tuple[tuple[int, ...], ...]) -> None:
    model, query, key = Plain(), draw(*shapes[0], 4, 5), draw(*shapes[1], 6, 5)
    with attention(model, reduce="none") as seen:
        model(query, key)
    p = (query @ key.mT / 5**0.5).softmax(-1)
    torch.testing.assert_close(seen.passes[0]["Plain"], entropy(p), atol=2e-5, rtol=0)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8)])
def test_an_empty_batch_is_no_error(shape: tuple[int, ...]) -> None:
    model, query = Plain(), torch.zeros(shape)
    with attention(model) as seen, attention(model, reduce="none") as rows:
        assert model(query, query).shape == shape
    assert seen.entropy.isnull().all()
    assert rows.passes[0]["Plain"].shape == shape[:-1]


def test_what_cannot_be_measured_goes_on_and_is_said_once() -> None:
    model, query = Plain(), draw(3, 2, 5, 4)
    plain = torch.vmap(model)(query, query)
    ragged = torch.nested.nested_tensor([draw(5, 2, 4), draw(3, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with attention(model) as none:
            insides = [torch.vmap(model)(query, query) for _ in range(2)]
        with attention(model) as seen:
            assert model(ragged, ragged).is_nested
            model(query, query)
    assert all(torch.equal(inside, plain) for inside in insides)
    ours = [one for one in said if issubclass(one.category, UserWarning)]  # not what another test left unclosed
    first, second = (str(one.message) for one in ours)
    assert first.startswith("attention that cannot be measured is not recorded: `query` must be a plain tensor")
    assert ("one inside vmap" in first, "a nested one; pad it" in second) == (True, True)
    with pytest.raises(InputError, match="one inside vmap"):
        none.dataset()
    assert seen.entropy.notnull().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_is_no_model_or_no_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))
    with pytest.raises(InputError, match="`model` must be free of TorchScript, got Sequential; watch the module"):
        attention(scripted).__enter__()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside the tests
    with pytest.raises(InputError, match=r"`model` must be a `torch.nn.Module`, got str 'gpt2'; load it first"):
        attention("gpt2").__enter__()  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"`rows` must be a boolean tensor .* got str"):
        attention(Plain(), rows="x").__enter__()  # type: ignore[arg-type]


def test_bad_arguments_are_named() -> None:
    model = Causal(bound_at_import)
    with pytest.raises(InputError, match="`reduce` must be one of mean, none, got 'meen'"):
        attention(model, reduce="meen").__enter__()
    with pytest.raises(InputError, match="`precision` must be one of highest, high"):
        attention(model, precision="low").__enter__()
    shape = r"`rows` must be of shape \(1, 4\).*got \(1, 5\)"
    with pytest.raises(InputError, match=shape), attention(model, rows=torch.ones(1, 5)):
        model(draw(1, 4, 8))
    assert state(model) == [(0, 0, 0, 0)] * 2


def test_a_recording_holds_no_model_alive() -> None:
    model = Causal(bound_at_import)
    with attention(model) as seen:
        model(draw(1, 4, 8))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert seen.passes
