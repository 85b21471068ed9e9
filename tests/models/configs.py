"""config.json of one tiny model per architecture: four layers or so, every cache class of mlx-lm.

Which cache classes they give: llama, qwen3, deepseek_v3, llama4_text: KVCache. gemma3_text,
gpt_oss: RotatingKVCache beside KVCache. llama4: ChunkedKVCache beside KVCache. mamba2:
ArraysCache. lfm2, qwen3_next: ArraysCache beside KVCache. falcon_h1: CacheList of both.
deepseek_v32 and minimax_m3_vl style lists of two KVCaches are made in the tests themselves.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from tests.models.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE

CONTEXT_TOKEN_LIMIT: Final = 4096

_TOKENS: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT_TOKEN_LIMIT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA4_TEXT: Final[dict[str, Any]] = {
    **_SIZES,
    "vocab_size": VOCABULARY_SIZE,
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 32,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
    "floor_scale": 64,
}

_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {**_SIZES},
    "qwen3": {**_SIZES},
    "gemma3_text": {
        **_SIZES,
        "query_pre_attn_scalar": 32,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_scaling": None,
    },
    "llama4_text": {
        **_SIZES,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "llama4": {"text_config": _LLAMA4_TEXT},
    "qwen3_next": {
        **_SIZES,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "full_attention_interval": 2,
    },
    "lfm2": {
        **_SIZES,
        "norm_eps": 1e-5,
        "conv_bias": True,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "mamba2": {
        **_SIZES,
        "num_heads": 4,
        "intermediate_size": 128,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "falcon_h1": {
        **_SIZES,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "ssm_out_multiplier": 1.0,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    },
    "deepseek_v3": {
        **_SIZES,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}

ARCHITECTURES: Final = tuple(_CONFIGS)
FLOAT32_ONLY: Final = frozenset({"gpt_oss", "llama4", "qwen3_next", "deepseek_v3"})
"""Mixtures of experts: MLX's CPU build gathers matrices in float32 only."""


def tiny_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """Return a fresh config; overrides of llama4 go into its `text_config` where that has the key."""
    config = {"model_type": architecture, **_TOKENS, **copy.deepcopy(_CONFIGS[architecture])}
    text_config = config.get("text_config", {})
    for key, value in overrides.items():
        (text_config if key in text_config else config)[key] = value
    return config
