"""Tiny random models of every family that transformers has a causal language model for.

A configuration is the family's default with small sizes, and as many layers as show every kind of layer.
``SETTINGS`` has what a family needs beyond that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_dim", "backbone_hidden_size"), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "dim_ff", "d_inner", "n_inner"), 64),
    **dict.fromkeys(
        ("ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"), 64
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "dense_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "feed_forward_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "v_head_dim", "d_head", "dim_head", "attention_head_dim"), 8
    ),
    **dict.fromkeys(("qk_nope_head_dim", "kv_channels", "attention_head_size", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    "qk_rope_head_dim": 4,
    "rotary_dim": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("index_topk", "index_topk_blocks"), 64),
    "index_head_dim": 8,
    "index_n_heads": 4,
    "query_pre_attn_scalar": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    "zero_expert_num": 2,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    "mamba_d_ssm": 64,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    "hidden_size_per_layer_input": 8,
    "hidden_size_global": 32,
    "encoder_hash_byte_group_vocab": 128,
    "attn_logit_softcapping": 1.0,
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 2.0),
    **dict.fromkeys(("router_jitter_noise", "router_aux_loss_coef", "attention_dropout"), 0.3),
    **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop", "hidden_dropout", "dropout"), 0.3),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.3),
    "is_decoder": True,
    "use_cache": True,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_DOUBLED = {"attention_hidden_size": 64, "attention_head_dim": 16}
_MAMBA = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 5, "<image>": 6, "<|visual token 000000|>": 7}},
    # The class for text and images ignores the cap, and released models have none.
    "gemma3": {"text_config": {"final_logit_softcapping": None}},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "hyperclovax": {"logits_scaling": 0.5},
    "gemma3n_text": {"laurel_rank": 4},
    "git": {"num_image_with_embedding": 0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3},
    "llama4_text": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": [*["chunked_attention"] * 3, "full_attention"],
        "moe_layers": [1, 3],
        "attention_chunk_size": 4,
    },
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4},
    },
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        **dict.fromkeys(("hidden_dropout_prob", "lsh_attention_probs_dropout_prob"), 0.0),
        "local_attention_probs_dropout_prob": 0.0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _MAMBA, "num_hidden_layers": 4, **_DOUBLED},
    "zamba2": {"layers_block_type": _MAMBA, "num_hidden_layers": 4, **_DOUBLED},
    "zaya": {"num_experts_per_tok": 1},
}
SETTINGS |= {name: {"text_config": SETTINGS[f"{name}_text"]} for name in ("llama4", "qwen4_exp")}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, bidirectional": ("bert", {"is_decoder": False}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, as 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode, many keys": ("gpt_bigcode", {"multi_query": False}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
}
"""Settings that change what a family computes: model type and settings by name."""


def families() -> list[str]:
    """Return every model type that transformers maps to a causal language model, and the variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def model_type_of(family: str) -> str:
    """Return the model type of a family or variant."""
    return VARIANTS.get(family, (family, {}))[0]


def tiny_config(family: str, **extra: Any) -> PreTrainedConfig:
    """Return a small configuration of a family or variant."""
    model_type, own = VARIANTS.get(family, (family, {}))
    kind = CONFIG_MAPPING[model_type]
    return kind(**_small(kind, SETTINGS.get(model_type, {}) | own | extra))


def _small(kind: type[PreTrainedConfig], own: Mapping[str, Any]) -> dict[str, Any]:
    defaults = kind()
    entries = defaults.to_dict()
    names = set(entries) | set(kind.attribute_map)
    settings = {name: value for name, value in (SIZES | SPECIAL).items() if name in names}
    if "kv_lora_rank" in names:  # latent attention: every head has its keys, rotary dimensions are a head's
        settings |= {"num_key_value_heads": 4, "head_dim": settings["qk_rope_head_dim"]}
    by_layer = {
        name: value
        for name, value in entries.items()
        if isinstance(value, list) and len(value) == getattr(defaults, "num_hidden_layers", None)
    }
    layers = max([2, *(1 + max(map(value.index, value)) for value in by_layer.values())])
    settings |= {name: layers for name in LAYERS if name in names}
    settings |= {name: value[:layers] for name, value in by_layer.items()}
    for name in defaults.sub_configs:
        part = type(getattr(defaults, name, None))
        if issubclass(part, PreTrainedConfig):
            settings[name] = _small(part, own.get(name, {}))
    return settings | {name: value for name, value in own.items() if name not in defaults.sub_configs}


def save_tiny(family: str, folder: Path, **extra: Any) -> PreTrainedModel:
    """Write a random model of a family to ``folder``; return it as transformers loads it, eager."""
    config = tiny_config(family, **extra)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if type(model.config) is not type(config):  # a text model, but files hold the whole model
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # nothing stays at 0 or 1, where an error would not show
        for weight in model.parameters():
            weight.add_(0.08 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
