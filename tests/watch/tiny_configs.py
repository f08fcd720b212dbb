"""Tiny configs and models of transformers' families, built from their config classes without the network."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
SIZES = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_key_value_heads n_head_kv "
    "num_kv_heads num_experts_per_tok encoder_num_key_value_heads decoder_num_key_value_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_experts encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads num_local_experts n_routed_experts sliding_window qk_rope_head_dim "
    "patch_size rotary_dim window_size",
    6: "v_head_dim",
    8: "head_dim d_kv kv_lora_rank q_lora_rank qk_nope_head_dim attention_head_dim d_head index_head_dim "
    "pronunciation_embed_dim shape_embed_dim key_value_channels linear_key_head_dim linear_value_head_dim "
    "attention_window entity_emb_size head_size",
    16: "image_size",
    32: "hidden_size d_model n_embd dim embed_dim encoder_hidden_size decoder_hidden_size embedding_size "
    "model_dim emb_dim hidden_dim projection_dim projection_size word_embed_proj_dim",
    48: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
    "ffn_hidden_size shared_expert_intermediate_size mlp_hidden_size shared_intermediate_size "
    "encoder_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
    "ffn_intermediate_size",
    VOCABULARY: "vocab_size max_position_embeddings n_positions max_seq_len n_ctx max_source_positions "
    "max_target_positions max_encoder_position_embeddings max_decoder_position_embeddings "
    "entity_vocab_size max_sequence_length src_vocab_size tgt_vocab_size",
}
SIZE = {name: size for size, names in SIZES.items() for name in names.split()}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_options(config_class: type, **changes: Any) -> dict[str, Any]:
    """Return arguments of a config class that make its model tiny: the usual names of sizes, then `changes`."""
    defaults = {name: field.default for name, field in inspect.signature(config_class).parameters.items()}
    options: dict[str, Any] = {}
    for name, default in defaults.items():
        if name in SIZE and not isinstance(default, list | tuple | str):
            options[name] = SIZE[name]
        elif name in SPECIAL_TOKENS:
            options[name] = SPECIAL_TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int) and default >= VOCABULARY:
            options[name] = VOCABULARY - 1
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in defaults and part.__name__ != "AutoConfig":
            options[name] = tiny_options(part)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(options.get(name), dict)
        options[name] = {**options[name], **value} if nested else value
    return options


def tiny_model(model_type: str, model_class: str = "", **changes: Any) -> Any:
    """Return a tiny model with eager attention: the base model of the type, or the named class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**tiny_options(config_class, **changes))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)  # in modules of transformers
        torch.manual_seed(0)
        if not model_class:
            model = transformers.AutoModel.from_config(config, attn_implementation="eager")
        else:
            package = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
            model = getattr(package, model_class)._from_config(config, attn_implementation="eager")
    return with_spread_weights(model).eval()


def with_spread_weights(model: nn.Module) -> nn.Module:
    """Give the matrices weights so large that attention is far from uniform: uniform attention would hide errors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(length: int, seed: int = 0) -> Tensor:
    """Return two sequences of tokens, none of them special."""
    return torch.randint(5, 40, (2, length), generator=torch.Generator().manual_seed(seed))
