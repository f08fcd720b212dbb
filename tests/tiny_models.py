"""Tiny models for the tests of `joma.watch`, with attention that is far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = torch.tensor([[5, 3, 8, 1, 9, 2, 7], [4, 4, 6, 0, 2, 8, 5]])


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def textbook_entropy(p: Tensor) -> Tensor:
    """Return −Σ p ln p over the last axis, with 0 ln 0 = 0."""
    return -(p * p.clamp_min(1e-30).log()).sum(-1)


def with_large_weights(model: nn.Module) -> nn.Module:
    """Give the model weights so large that attention is far from uniform: uniform attention would hide errors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.35 if parameter.ndim > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


class CausalBlock(nn.Module):
    """Causal self-attention in the manner of nanoGPT; `attend` is the SDPA function that it calls `times` times."""

    def __init__(self, attend: Callable[..., Tensor], *, heads: int = 2, times: int = 1) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.attend, self.heads, self.times = attend, heads, times

    def _projections(self, x: Tensor) -> list[Tensor]:
        parts = self.project(x).split(8, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            query, key, value = self._projections(x)
            x = x + self.attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return x

    def matrix(self, x: Tensor) -> Tensor:
        """Return the attention matrix of the first call, [batch, head, query, key]."""
        query, key, _ = self._projections(x)
        logits = query @ key.transpose(-1, -2) / (8 / self.heads) ** 0.5
        masked = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill(masked, -torch.inf).softmax(-1)


class PlainAttention(nn.Module):
    """A call of SDPA with any mask, and nothing else."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)


def neox(seed: int = 0, **changes: Any) -> Any:
    """Return a GPT-NeoX of two layers with two heads each, over bytes."""
    import transformers

    options = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 256,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**options)).eval()


def llama_decoder() -> tuple[Any, str]:
    """Return a Llama with grouped-query attention, and the pattern of its layers' names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=10, num_key_value_heads=2, max_position_embeddings=16, **SIZES)
    return LlamaForCausalLM(config), "model.layers.{}.self_attn"


def neox_decoder() -> tuple[Any, str]:
    """Return a GPT-NeoX, and the pattern of its layers' names."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(vocab_size=10, max_position_embeddings=16, **SIZES)
    return GPTNeoXForCausalLM(config), "gpt_neox.layers.{}.attention"


def opt_decoder() -> tuple[Any, str]:
    """Return an OPT, and the pattern of its layers' names."""
    from transformers import OPTConfig, OPTForCausalLM

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


def gpt2_decoder() -> tuple[Any, str]:
    """Return a GPT-2, and the pattern of its layers' names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=10, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config), "transformer.h.{}.attn"


DECODERS = {"llama": llama_decoder, "neox": neox_decoder, "opt": opt_decoder, "gpt2": gpt2_decoder}


def eager_entropies(model: Any, layer_names: str, **inputs: Any) -> dict[str, Tensor]:
    """Return the entropies [batch, head, query] by layer, from the matrices that eager attention returns."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return {layer_names.format(index): textbook_entropy(matrix) for index, matrix in enumerate(matrices)}
