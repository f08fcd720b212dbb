"""The families of models on which `joma.watch.attention` is compared with their own attention weights.

A family is a model type of transformers. `EXACT` lists those whose attention is recorded completely; `PARTIAL` those
that also have layers without attention weights, which a recording names in `not_seen`; `WITHOUT_WEIGHTS` those that
have no attention weights at all, and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from watch.tiny_configs import normal, tokens

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
DECODER_MASK = MASK[:, 4:]
TEXT = {"input_ids": tokens(9), "attention_mask": MASK}
TARGETS = {"decoder_input_ids": tokens(5), "decoder_attention_mask": DECODER_MASK}
TEXT_TO_TEXT = {**TEXT, **TARGETS}
IMAGE = {"pixel_values": normal(2, 3, 16, 16)}
VIDEO = {"pixel_values": normal(2, 4, 3, 16, 16)}
SOUND = {"input_values": normal(2, 400)}
SPECTRUM = {"input_features": normal(2, 8, 20)}
IMAGE_AND_TEXT = {**IMAGE, **TEXT}
SERIES = {
    "past_values": normal(2, 8),
    "past_time_features": normal(2, 8, 0),
    "past_observed_mask": torch.ones(2, 8),
    "future_values": normal(2, 4),
    "future_time_features": normal(2, 4, 0),
}
DEFAULT_WEIGHTS = ("encoder_attentions", "decoder_attentions+cross_attentions", "attentions")


@dataclass(frozen=True)
class Family:
    """How a tiny model of a family is built and called, and where it returns its weights.

    `weights` names fields of the output, in the order of the calls; "a+b" takes them in turn, "a|b" joins their keys,
    "softmax(a)" is for a field that holds logits, and "softmaxes" stands for what the softmaxes of the model return.
    `axes` are those of the weights without queries and keys: b for sequences, h for heads, n for blocks of a sequence;
    "(bh)" is one axis of both.
    """

    inputs: Mapping[str, Tensor]
    changes: Mapping[str, Any] = field(default_factory=dict)
    model_class: str = ""
    weights: Sequence[str] = DEFAULT_WEIGHTS
    axes: str = "bh"
    learned_sinks: bool = False  # the weights of a row sum to less than one: the rest is on a learned sink
    not_seen: Sequence[str] = ()  # the layers that have no weights
    why: str = ""  # they have none


def families(names: str, inputs: Mapping[str, Tensor], **changes: Any) -> dict[str, Family]:
    """Return families that are built and called alike."""
    return {name: Family(inputs, changes) for name in names.split()}


SWIN = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2, "patch_size": 2}
PYRAMID = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2]}
PYRAMID |= {"strides": [2, 2], "mlp_ratios": [2, 2]}
CONVOLUTIONS = {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 4], "num_feat_extract_layers": 2}
CONVOLUTIONS |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
FORECAST = {"prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2]}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
VISION_THEN_TEXT = ("vision_model_output.attentions", "text_model_output.attentions")


DECODERS = families(
    "afmoe apertus arcee aria_text biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm doge ernie4_5 "
    "ernie4_5_moe exaone4 exaone_moe falcon flex_olmo gemma gemma2 gemma3_text gemma4_text gemma4_unified_text "
    "git glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite granite_swa granitemoe "
    "granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax imagegpt "
    "inkling_text jais2 jetmoe kolibri1 laguna llama llama4_text mellum minimax_m2 minimax_m3_vl_text ministral "
    "ministral3 mistral mixtral modernbert-decoder molmo2_text mpt muse_glimmer_text muse_spark_text nanochat nemotron "
    "olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_moe_text "
    "qwen3_vl_text seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlnet",
    TEXT,
)
DECODERS |= families(
    "axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 mistral4 mistral_large4_text youtu",
    TEXT,
    num_key_value_heads=4,
)
DECODERS |= families("glm4v_text qwen2_5_vl_text qwen2_vl_text", TEXT, **SECTIONS)
DECODERS |= {
    "dots1": Family(TEXT, {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "gemma4_text": Family(TEXT, {"vocab_size_per_layer_input": 64}),
    "cpmant": Family(TEXT, weights=("softmaxes",)),
    "diffllama": Family(TEXT, weights=("attentions+attentions",)),  # each layer attends twice, to different values
    "flint": Family(TEXT, learned_sinks=True),
    "gpt_neo": Family(TEXT, {"attention_types": [[["global", "local"], 1]]}),
    "gpt_oss": Family(TEXT, learned_sinks=True),
    "deepseek_v4": Family(TEXT, learned_sinks=True),
    "hy_v4": Family(TEXT, learned_sinks=True),
    "mimo_v2_flash": Family(TEXT, learned_sinks=True),
    "zaya": Family(TEXT, {"num_experts_per_tok": 1}),
}
ENCODERS = families(
    "albert beam bert bert-generation camembert canine clip_text_model convbert data2vec-text deberta deberta-v2 "
    "distilbert dpr electra embedding_gemma2_text ernie esm eurobert flaubert gte ibert jina_embeddings_v3 layoutlm "
    "luke markuplm megatron-bert mobilebert modernbert mpnet nomic_bert rembert roberta roberta-prelayernorm roformer "
    "splinter tapas tipsv2_text_model ultrabert visual_bert xlm xlm-roberta xlm-roberta-xl",
    TEXT,
)
ENCODERS |= {
    "big_bird": Family(TEXT, weights=("softmaxes",)),
    "squeezebert": Family(TEXT, weights=("softmaxes",)),
    "esmc": Family(TEXT, {"num_key_value_heads": 4}),
    "funnel": Family(TEXT, {"block_sizes": [1, 1], "block_repeats": [1, 1], "d_inner": 48}, "FunnelModel"),
    "layoutlmv3": Family(TEXT, {"coordinate_size": 6, "shape_size": 4, "visual_embed": False}),
    "lilt": Family(TEXT, {"hidden_size": 48, "max_2d_position_embeddings": 64}, weights=("softmaxes",)),
    "longformer": Family(TEXT, {"attention_window": 4}),
    "openai_privacy_filter": Family(TEXT, learned_sinks=True),
    "roc_bert": Family(TEXT, {"pronunciation_vocab_size": 64, "shape_vocab_size": 64}),
    "xmod": Family(TEXT, {"languages": ["en"], "default_language": "en"}),
}
TEXT_TO_TEXT_MODELS = families(
    "bart bigbird_pegasus blenderbot blenderbot-small fsmt m2m_100 marian mbart mt5 mvp nllb-moe pegasus plbart "
    "switch_transformers t5 t5gemma umt5",
    TEXT_TO_TEXT,
)
TEXT_TO_TEXT_MODELS |= {
    "led": Family(TEXT_TO_TEXT, {"attention_window": 4}),
    "longt5": Family(TEXT_TO_TEXT, {"local_radius": 2, "encoder_attention_type": "local"}, axes="bnh"),
    "prophetnet": Family(
        TEXT_TO_TEXT,
        weights=(
            "softmax(encoder_attentions)",
            "decoder_attentions+decoder_ngram_attentions+softmax(cross_attentions)",
        ),
        axes="bnh",
    ),
    "udop": Family({**TEXT_TO_TEXT, "bbox": torch.rand(2, 9, 4, generator=torch.Generator().manual_seed(0))}),
}
VISION = families(
    "beit chinese_clip_vision_model clip_vision_model data2vec-vision deit dinov2 dinov2_with_registers "
    "dinov3_vit dpt ijepa mlcd_vision_model pixio tipsv2_vision_model vit vit_msn vitdet",
    IMAGE,
)
VISION |= families("donut-swin swin swinv2", IMAGE, **SWIN)
VISION |= families("glpn segformer", IMAGE, **PYRAMID, patch_sizes=[3, 3], sr_ratios=[2, 1])
VISION |= {
    "aimv2_vision_model": Family(IMAGE, {"use_head": False}),
    "siglip_vision_model": Family(IMAGE, {"vision_use_head": False}),
    "cvt": Family(
        IMAGE,
        {
            **{"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "patch_sizes": [3, 3, 3]},
            **{"patch_stride": [2, 2, 2], "patch_padding": [1, 1, 1], "mlp_ratio": [2.0, 2.0, 2.0]},
        },
        weights=("softmaxes",),
    ),
    "hiera": Family(
        IMAGE,
        {
            **{"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1, "image_size": [16, 16]},
            **{"masked_unit_size": [2, 2], "query_stride": [2, 2], "patch_size": [4, 4], "patch_stride": [4, 4]},
            "patch_padding": [0, 0],
        },
        axes="bhn",
    ),
    "internvl_vision": Family(IMAGE, {"image_size": [16, 16], "patch_size": [4, 4]}),
    "pvt": Family(
        {"pixel_values": normal(2, 3, 32, 32)},
        {
            **PYRAMID,
            **{"image_size": 32, "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2]},
        },
    ),
    "pvt_v2": Family(
        {"pixel_values": normal(2, 3, 32, 32)},
        {**PYRAMID, "image_size": 32, "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2]},
        weights=("softmaxes",),
    ),
    "sam_vision_model": Family(
        IMAGE, {"output_channels": 8, "global_attn_indexes": [1], "window_size": 2}, axes="(bh)"
    ),
    "timesformer": Family(VIDEO, {"num_frames": 4}, weights=("softmaxes",)),
    "videomae": Family(VIDEO, {"num_frames": 4, "tubelet_size": 2}),
    "vit_mae": Family(IMAGE, {"mask_ratio": 0.0}),
    "vivit": Family(VIDEO, {"num_frames": 4, "tubelet_size": [2, 4, 4]}),
    "yolos": Family(IMAGE, {"image_size": [16, 16], "num_detection_tokens": 3}),
}
AUDIO = families("data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-conformer", SOUND, **CONVOLUTIONS)
AUDIO |= families("sew sew-d", SOUND, **CONVOLUTIONS, squeeze_factor=2)
AUDIO |= families("qwen2_audio_encoder voxtral_encoder", SPECTRUM, num_mel_bins=8, max_source_positions=10)
AUDIO |= {
    "audio-spectrogram-transformer": Family(
        {"input_values": normal(2, 24, 16)}, {"max_length": 24, "num_mel_bins": 16, "patch_size": 8}
    ),
    "lasr_encoder": Family({"input_features": normal(2, 40, 16)}, {"num_mel_bins": 16, "conv_kernel_size": 3}),
    "parakeet_encoder": Family(
        {"input_features": normal(2, 40, 16)}, {"num_mel_bins": 16, "subsampling_conv_channels": 8}
    ),
    "speech_to_text": Family(
        {"input_features": normal(2, 32, 8), **TARGETS},
        {"input_feat_per_channel": 8, "conv_channels": 16, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3]},
    ),
    "wav2vec2-bert": Family({"input_features": normal(2, 10, 16)}, {"feature_projection_input_dim": 16}),
    "wavlm": Family(SOUND, CONVOLUTIONS, weights=("softmaxes",), axes="(bh)"),
    "whisper": Family({**SPECTRUM, **TARGETS}, {"num_mel_bins": 8, "max_source_positions": 10}),
}
SEVERAL_INPUTS = {
    name: Family(IMAGE_AND_TEXT, weights=VISION_THEN_TEXT)
    for name in ("altclip", "blip", "chinese_clip", "clip", "clipseg", "metaclip_2", "owlvit")
}
SEVERAL_INPUTS |= {
    "blip_2_qformer": Family(
        {"query_embeds": normal(2, 6, 32), "encoder_hidden_states": normal(2, 11, 32)}, weights=("attentions",)
    ),
    "decision_transformer": Family(
        {
            **{"states": normal(2, 5, 17), "actions": normal(2, 5, 4), "rewards": normal(2, 5, 1)},
            **{"returns_to_go": normal(2, 5, 1), "timesteps": torch.arange(5)[None].repeat(2, 1)},
        }
    ),
    "flava": Family(IMAGE_AND_TEXT, weights=("softmaxes",)),
    "lxmert": Family(
        {**TEXT, "visual_feats": normal(2, 6, 8), "visual_pos": normal(2, 6, 4)},
        {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 8},
        weights=("softmaxes",),
    ),
    "patchtst": Family({"past_values": normal(2, 32, 1)}, {"context_length": 32, "patch_length": 4, "patch_stride": 4}),
    "perceiver": Family(
        {"inputs": normal(2, 11, 32)},
        {
            **{"num_latents": 6, "d_latents": 32, "num_self_attends_per_block": 2},
            **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        },
        weights=("cross_attentions", "attentions"),
    ),
    "time_series_transformer": Family(SERIES, FORECAST),
    "vilt": Family(IMAGE_AND_TEXT, {"max_image_length": -1}),
}
GROUPS = {
    "Decoders": DECODERS,
    "Encoders": ENCODERS,
    "Encoder-decoder models": TEXT_TO_TEXT_MODELS,
    "Vision": VISION,
    "Audio": AUDIO,
    "Several inputs": SEVERAL_INPUTS,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {**LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
SHARED_MAMBA = ("layers.0.mamba", "layers.1.mamba_decoder.mamba", "layers.2.mamba_decoder.mamba")
STATE_SPACE, RECURRENCE = "a state-space model", "a recurrence"


def partial(changes: Mapping[str, Any], not_seen: Sequence[str], why: str) -> Family:
    """Return a family with layers that have no attention weights."""
    return Family(TEXT, changes, not_seen=not_seen, why=why)


PIECES = "computed in several pieces"
ENCODER_ATTENTION = ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn")
PARTIAL = {
    "bigbird_pegasus (block sparse)": Family(
        {"input_ids": tokens(64), "decoder_input_ids": tokens(5)},
        {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        weights=("decoder_attentions+cross_attentions",),
        not_seen=[f"{layer}.self" for layer in ENCODER_ATTENTION],
        why=PIECES,
    ),
    "informer": Family(
        SERIES,
        {**FORECAST, "sampling_factor": 1},
        weights=("cross_attentions",),
        not_seen=[*ENCODER_ATTENTION, "decoder.layers.0.self_attn", "decoder.layers.1.self_attn"],
        why="attention from a choice of queries",
    ),
    "pegasus_x": Family(
        {"input_ids": tokens(8), "decoder_input_ids": tokens(5)},
        {"block_size": 4, "num_global_tokens": 2},
        weights=("decoder_attentions+cross_attentions",),
        not_seen=ENCODER_ATTENTION,
        why=PIECES,
    ),
    "bamba": partial({**MAMBA, "attn_layer_indices": [1]}, ["layers.0.mamba"], STATE_SPACE),
    "falcon_h1": partial({**MAMBA, "mamba_d_ssm": 64}, ["layers.0.mamba", "layers.1.mamba"], STATE_SPACE),
    "granitemoehybrid": partial({**MAMBA, "layer_types": ["mamba", "attention"]}, ["layers.0.mamba"], STATE_SPACE),
    "jamba": partial(
        {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
            "use_mamba_kernels": False,
        },
        ["layers.0.mamba"],
        STATE_SPACE,
    ),
    "kimi_linear": partial(
        {**LINEAR, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4},
        ["layers.0.self_attn"],
        "linear attention",
    ),
    "lfm2": partial({"layer_types": ["conv", "full_attention"]}, ["layers.0.conv"], "convolutions"),
    "minimax": Family(TEXT, weights=("softmaxes",), not_seen=["layers.1.self_attn"], why="linear attention"),
    "nemotron_h": partial({}, ["layers.0.mixer"], STATE_SPACE),
    "olmo_hybrid": partial({}, ["layers.0.linear_attn"], "linear attention"),
    "qwen3_5_text": partial(DELTA, ["layers.0.linear_attn"], "linear attention"),
    "qwen3_next": partial(DELTA, ["layers.0.linear_attn"], "linear attention"),
    "recurrent_gemma": partial(
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 4},
        ["layers.0.temporal_block.rg_lru"],
        RECURRENCE,
    ),
    "zamba": partial(
        {
            **ZAMBA,
            "attention_hidden_size": 64,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
            "attention_head_dim": 16,
        },
        SHARED_MAMBA,
        STATE_SPACE,
    ),
    "zamba2": partial({**ZAMBA, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1}, SHARED_MAMBA, STATE_SPACE),
}
REFORMER = {
    "axial_pos_embds": False,
    "attn_layers": ["local", "lsh"],
    "attention_head_size": 8,
    "feed_forward_size": 48,
}
REFORMER |= {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "num_buckets": 2}
LONG_TEXT = {"input_ids": tokens(64), "attention_mask": torch.ones(2, 64, dtype=torch.long)}
WITHOUT_WEIGHTS = {
    "big_bird (block sparse)": Family(
        LONG_TEXT,
        {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        why=PIECES,
    ),
    "falcon_mamba": Family(TEXT, why=STATE_SPACE),
    "fnet": Family(TEXT, why="a Fourier transform"),
    "longformer (global tokens)": Family(
        {**TEXT, "global_attention_mask": (torch.arange(9) == 2).long().expand(2, 9)},
        {"attention_window": 4},
        why="rows of global tokens are computed twice",
    ),
    "mamba": Family(TEXT, why=STATE_SPACE),
    "mamba2": Family(TEXT, {"num_heads": 8, "n_groups": 1}, why=STATE_SPACE),
    "mra": Family(TEXT, why="approximates attention"),
    "nystromformer": Family(
        {"input_ids": tokens(9)}, {"num_landmarks": 3, "segment_means_seq_len": 9}, why="approximates attention"
    ),
    "reformer": Family(TEXT, REFORMER, why="hashes or chunks the sequence"),
    "rwkv": Family(TEXT, why=RECURRENCE),
    "yoso": Family(TEXT, why="approximates attention"),
}
EXACT = {name: family for group in GROUPS.values() for name, family in sorted(group.items())}
# Families whose attention is the code of another one in the table: `make torture` tries them, `make check` does not.
COPIED_FAMILIES = """
afmoe apertus arcee aria_text bitnet cohere2_moe cwm doge ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo
gemma4_unified_text glm4 glm4_moe granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax inkling_text jais2 jetmoe kolibri1 laguna mellum minimax_m2
minimax_m3_vl_text ministral ministral3 molmo2_text muse_glimmer_text muse_spark_text nanochat olmoe phimoe qwen2_moe
qwen3_moe qwen3_vl_moe_text seed_oss solar_open axk2 glm4_moe_lite glm_moe_dsa mistral_large4_text mistral4 youtu
glm4v_text qwen2_5_vl_text dots1 zaya vaultgemma data2vec-vision chinese_clip_vision_model mlcd_vision_model pixio
dinov2_with_registers ijepa vit_msn tipsv2_vision_model donut-swin glpn unispeech unispeech-sat sew voxtral_encoder
lasr_encoder beam bert-generation camembert data2vec-text dpr ernie gte ibert jina_embeddings_v3 markuplm
megatron-bert nomic_bert roberta-prelayernorm roc_bert tipsv2_text_model ultrabert xlm-roberta-xl xmod esmc
embedding_gemma2_text bigbird_pegasus blenderbot-small plbart mvp mbart nllb-moe udop chinese_clip clipseg metaclip_2
altclip
"""
COPIES = frozenset(COPIED_FAMILIES.split())
FAMILIES_WITHOUT_SDPA = """
big_bird bigbird_pegasus blip bloom canine codegen convbert cpmant cvt deberta deberta-v2 deepseek_v4 donut-swin
flaubert flava flint fsmt funnel gemma2 git glpn gpt_neo gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa
hiera hy_v4 ibert imagegpt layoutlmv3 led lilt longformer longt5 luke lxmert markuplm megatron-bert mimo_v2_flash
mpnet mpt mvp nllb-moe openai-gpt openai_privacy_filter perceiver prophetnet pvt pvt_v2 rembert roformer sew-d
speech_to_text splinter squeezebert swinv2 switch_transformers t5gemma tapas time_series_transformer timesformer
vaultgemma vilt visual_bert vitdet wavlm xglm xlm xlnet
"""
WITHOUT_SDPA = frozenset(FAMILIES_WITHOUT_SDPA.split())
