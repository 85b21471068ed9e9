"""Small models of every architecture that mlx-lm has, with configurations made from their fields' names.

An architecture's `ModelArgs` says which fields there are; sizes are given small values by name, what has a
default keeps it, and what neither covers is written down in `_EXTRA`, architecture by architecture.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
import zlib
from typing import Any, Final

import mlx.core as mx
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

VOCABULARY_SIZE: Final = 64
WINDOW: Final = 8
SCHEDULE: Final = (
    (5, 3, 0),
    (1, 14, 2),
    (9, 1, 11),
    (1, 3, 1),
    (1, 1, 1),
)
"""Passes in which the windows of these models fill up and go round, in chunks and by single tokens."""
_LAYERS: Final = 4

_BY_NAME: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "embedding_size": VOCABULARY_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden_dim", "dim_model_base", "block_dim"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"), _LAYERS
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "swa_num_attention_heads",
            "num_query_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_kv_heads",
            "n_kv_heads",
            "swa_num_key_value_heads",
            "num_attention_groups",
        ),
        2,
    ),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim", "attention_head_dim"), 16
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "mlp_hidden_size",
            "ffn_hidden_size",
            "block_ff_dim",
            "n_inner",
            "intermediate_size_mlp",
            "dense_intermediate_size",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "moe_hidden_size",
            "shared_intermediate_size",
            "share_expert_dim",
            "shared_expert_dim",
            "block_multiple_of",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "moe_num_experts",
            "ffn_num_experts",
        ),
        4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "num_shared_experts",
            "num_shared_expert",
            "first_k_dense_replace",
            "moe_layer_freq",
        ),
        1,
    ),
    **dict.fromkeys(("num_dense_layers", "n_dense_layers", "decoder_sparse_step"), 1),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "limited_expert_group", "moe_group_num"), 1
    ),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_num_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(
        ("conv_kernel", "conv_L_cache", "mamba_d_conv", "conv1d_width", "linear_conv_kernel_dim"), 4
    ),
    **dict.fromkeys(("rope_theta", "swa_rope_theta", "rotary_emb_base", "rope_local_base_freq"), 10000.0),
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    "mamba_expand": 2,
    "sliding_window_pattern": 2,
    "index_topk": 4,
    "time_step_rank": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
    "hidden_size_per_layer_input": 16,
    "attention_chunk_size": WINDOW,
    "full_attention_interval": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_REQUIRED_BY_TYPE: Final[dict[Any, Any]] = {int: 2, float: 1.0, bool: False, str: "", dict: {}, list: []}

_SLIDING: Final = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
_KDA: Final[dict[str, Any]] = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_ROPES: Final[dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_YARN: Final[dict[str, Any]] = {
    "type": "yarn",
    "factor": 2.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}
_SCALED: Final[dict[str, Any]] = {
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.1,
}
_MLA: Final[dict[str, Any]] = {"num_key_value_heads": 4}

_EXTRA: Final[dict[str, dict[str, Any]]] = {
    "afmoe": {"layer_types": _SLIDING},
    "baichuan_m1": {"sliding_window_layers": [1, 3]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {**_MLA, "rope_scaling": _YARN},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, False, True]},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
    },
    "gear": {"layer_types": ["full_attention", "sliding_attention", "conv_mixer", "conv_mixer"]},
    "glm_moe_dsa": {**_MLA, "rope_parameters": {"rope_theta": 10000.0}},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    "hunyuan": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "use_qk_norm": True},
    "gemma3n": {
        "text_config": {
            "layer_types": _SLIDING,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 8,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 30.0,
            "num_key_value_heads": 2,
        }
    },
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {"layers_block_type": ["mamba", "attention"] * 2},
    "kimi_linear": {"linear_attn_config": _KDA},
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": _KDA,
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            **_MLA,
        }
    },
    "lfm2": {"block_dim": 64, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2-vl": {"text_config": {"layer_types": ["conv", "full_attention"] * 2}},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "llama4": {"text_config": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2}},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
        "attention_method": "MLA",
    },
    "longcat_flash_ngram": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "intermediate_size": 128,
        "time_step_rank": "auto",
        "time_step_limit": [0.0, 100.0],
    },
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 0, 1],
            "index_block_size": 4,
            "index_topk_blocks": 2,
        }
    },
    "mistral4": {
        **_MLA,
        "rope_parameters": {**_YARN, "rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
    },
    "mellum": {"layer_types": _SLIDING, "rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
    },
    "muse_spark": {
        "text_config": {
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0] * _LAYERS,
            "layer_types": _SLIDING,
            "mlp_layer_types": None,
            "num_shared_experts": 0,
        }
    },
    "muse_glimmer": {"layer_types": _SLIDING, "layer_rope_theta": [10000.0] * _LAYERS},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    "nemotron": {"hidden_act": "relu2"},
    "minicpm3": {
        **_MLA,
        "rope_scaling": {
            "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
        },
    },
    "ministral3": {"rope_parameters": _SCALED, "layer_types": _SLIDING},
    "mistral3": {"text_config": {"rope_parameters": _SCALED, "model_type": "ministral3"}},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * _LAYERS
    },
    "openelm": {
        "num_transformer_layers": _LAYERS,
        "model_dim": 64,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    # It writes to the logits of ids that only its own tokenizer has.
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "phixtral": {"num_vocab": VOCABULARY_SIZE, "model_dim": 64, "rotary_dim": 8},
    "plamo2": {"hidden_size_per_head": 16, "full_attention_idx": [1, 3]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "head_dim": 32,
    },
    "spark2_5": {"layer_types": _SLIDING, "rope_parameters": _ROPES},
}
"""What an architecture needs beside that, or other values than those."""
_TEXT_CLASSES: Final[dict[str, tuple[str, str]]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
"""The class that reads a text part's configuration, where it is another module's."""
_PARAMETER_LIMIT: Final = 16_000_000


def architectures() -> list[str]:
    """Return the names of all modules that define a model."""
    found = []
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            module = importlib.import_module(f"mlx_lm.models.{info.name}")
        except (ImportError, SystemExit):  # it wants a package that is not here
            continue
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            found.append(info.name)
    return sorted(found)


def small_model(architecture: str, **overrides: Any) -> Any:
    """Return a model with random weights; raises what the architecture raises on its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = {**small_config(module, architecture), **overrides}
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    count = sum(value.size for _, value in parameters)
    if count > _PARAMETER_LIMIT:
        raise ValueError(f"{count} parameters are not small: some size is not covered by a field's name")
    model.update(tree_map_with_path(_draw, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def small_config(module: Any, architecture: str) -> dict[str, Any]:
    """Return a configuration for an architecture's module."""
    config = _config_of(module.ModelArgs, architecture)
    extra = dict(_EXTRA.get(architecture, {}))
    if any(field.name == "text_config" for field in dataclasses.fields(module.ModelArgs)):
        config["text_config"] = {**_text_config(module, architecture), **extra.pop("text_config", {})}
    return {**config, **extra}


def _text_config(module: Any, architecture: str) -> dict[str, Any]:
    """Return the text part's configuration, made for the class that this module reads it with."""
    name, kind = _TEXT_CLASSES.get(architecture, (architecture, ""))
    other = importlib.import_module(f"mlx_lm.models.{name}")
    names = (kind,) if kind else ("TextConfig", "TextArgs", "TextModelArgs")
    found = next(getattr(other, each) for each in names if hasattr(other, each))
    return _config_of(found, name)


def _config_of(kind: Any, architecture: str) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    config: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        if field.name == "model_type":
            config["model_type"] = architecture
        elif field.name in _BY_NAME:
            config[field.name] = _BY_NAME[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            config[field.name] = _required(hints[field.name])
    return config


def _required(hint: Any) -> Any:
    kind = typing.get_origin(hint) or hint
    if kind is typing.Union:
        return _required(typing.get_args(hint)[0])
    return _REQUIRED_BY_TYPE.get(kind)


def _draw(name: str, value: mx.array) -> mx.array:
    """Return random weights; what decides how long a state remembers stays as it is."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    random = np.random.default_rng([zlib.crc32(name.encode())])
    noise = random.standard_normal(value.shape).astype(np.float32)
    if name.endswith(("A_log", "dt_bias", "D")) or value.ndim < 2:
        return (value.astype(mx.float32) + mx.array(0.1 * noise)).astype(value.dtype)
    if "embed" in name or "wte" in name:
        return mx.array(noise).astype(value.dtype)
    return mx.array(1.5 * noise / np.sqrt(value.shape[-1])).astype(value.dtype)
