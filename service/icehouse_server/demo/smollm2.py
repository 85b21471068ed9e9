"""SmolLM2 from GGUF: the names and conventions of mlx-lm's `llama`, and its tokenizer.

The file lists pieces and merges of a byte-level BPE and only names the rule by which text is cut before it
("smollm"): each digit by itself, then as GPT-2 does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from icehouse_server.demo.gguf_file import Array, GgufVocabulary, Metadata, PieceKind
from icehouse_server.demo.mlx_folder import TOOL_CALLS_TEMPLATE, expect_architecture, mlx_name

_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = {
    ".attn_q.weight": "llama.attention.head_count",
    ".attn_k.weight": "llama.attention.head_count_kv",
}
"""Projections whose rows RoPE turns, and where the file says how many heads they have."""

CHAT_TEMPLATE = (
    """\
{%- set first = 1 if messages and messages[0]['role'] == 'system' else 0 -%}
{{- '<|im_start|>system\\n' -}}
{%- if first -%}
{{- messages[0]['content'] -}}
{%- else -%}
{{- 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -}}
{%- endif -%}
{%- if tools -%}
{{- '\\n\\nFunctions:\\n' -}}
{%- for tool in tools -%}
{{- (tool['function'] | tojson) + '\\n' -}}
{%- endfor -%}
{{- 'To call one, write\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages[first:] -%}
{%- if message['role'] == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
{%- endif -%}
"""
    + TOOL_CALLS_TEMPLATE
    + """\
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
)
"""The turns that the file's own template writes, with tools in the manner of other families.

The model was not trained on tools, but requests with tools work.
"""


def model_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json for mlx-lm from the file's metadata (`llama.*` and `tokenizer.ggml.*` keys)."""
    expect_architecture(metadata, "llama")
    eos_id = int(metadata["tokenizer.ggml.eos_token_id"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(metadata["llama.embedding_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_attention_heads": int(metadata["llama.attention.head_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": int(metadata["llama.rope.dimension_count"]),
        "rms_norm_eps": float(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"])),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "vocab_size": int(metadata["llama.vocab_size"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
        # A chat's turn ends with the first; a text that is merely continued ends with the second.
        "eos_token_id": [eos_id, list(metadata["tokenizer.ggml.tokens"]).index("<|endoftext|>")],
    }


def convert_tensor(name: str, values: Array, metadata: Metadata) -> tuple[str, Array]:
    """Return mlx-lm's name and values of a tensor. Raises KeyError for one that SmolLM2 does not have."""
    for ending, head_count_key in _ROTATED.items():
        if name.endswith(ending):
            values = _halves(values, head_count=int(metadata[head_count_key]))
    return mlx_name(name, outer=_OUTER, inner=_INNER), values


def _halves(values: Array, *, head_count: int) -> Array:
    """Return the rows with each head's pairs taken apart: llama.cpp rotates neighbours, mlx-lm halves."""
    row_count, width = values.shape
    pairs = values.reshape(head_count, row_count // head_count // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(row_count, width)


def make_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return a byte-level BPE tokenizer that adds nothing to a text."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary.pieces)},
            merges=[_pair(merge) for merge in vocabulary.merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary.pieces, vocabulary.kinds, strict=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, kind in kinds
            if kind == PieceKind.CONTROL
        ]
    )
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
