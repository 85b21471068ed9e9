"""Gemma 3 from GGUF: the names and conventions of mlx-lm's `gemma3_text`, and its tokenizer.

GGUF lists pieces and their kinds but no merges. Gemma's pieces stand in the order in which they were
merged, so every way to cut a piece into two known pieces is a merge with that piece's rank
(SentencePiece's BPE, https://github.com/google/sentencepiece).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from icehouse_server.demo.gguf_file import Array, GgufVocabulary, Metadata, PieceKind
from icehouse_server.demo.mlx_folder import TOOL_CALLS_TEMPLATE, expect_architecture, mlx_name

SPACE = "\u2581"
"""How a piece spells a space."""

_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Not in the file: llama.cpp hard-codes both for Gemma 3, as the published config.json has them.
_SLIDING_WINDOW_PATTERN = 6
_LOCAL_ROPE_BASE = 10_000.0

CHAT_TEMPLATE = (
    """\
{{- bos_token -}}
{%- set first = 0 -%}
{%- set preface = namespace(text='') -%}
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set first = 1 -%}
{%- set preface.text = messages[0]['content'] | trim + '\\n\\n' -%}
{%- endif -%}
{%- if tools -%}
{%- set preface.text = preface.text + 'Functions:\\n' -%}
{%- for tool in tools -%}
{%- set preface.text = preface.text + (tool['function'] | tojson) + '\\n' -%}
{%- endfor -%}
{%- set form = '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -%}
{%- set preface.text = preface.text + 'To call one, write\\n' + form + '\\n\\n' -%}
{%- endif -%}
{%- for message in messages[first:] -%}
{%- if message['role'] not in ('user', 'assistant', 'model', 'tool') -%}
{{- raise_exception('the roles are system (first only), user, assistant and tool, not ' + message['role']) -}}
{%- endif -%}
{{- '<start_of_turn>' + ('user' if message['role'] in ('user', 'tool') else 'model') + '\\n' -}}
{%- if loop.first -%}{{- preface.text -}}{%- endif -%}
{%- if message['role'] == 'tool' -%}
{{- '<tool_response>\\n' + message['content'] | trim + '\\n</tool_response>' -}}
{%- else -%}
{{- message['content'] | trim -}}
{%- endif -%}
"""
    + TOOL_CALLS_TEMPLATE
    + """\
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
)
"""Gemma's public turn format, with tools in the manner of other families.

The base model was trained on neither, but chat requests work.
"""


def model_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json for mlx-lm from the file's metadata (`gemma3.*` and `tokenizer.ggml.*` keys)."""
    expect_architecture(metadata, "gemma3")
    pieces = metadata["tokenizer.ggml.tokens"]
    eos_id = int(metadata["tokenizer.ggml.eos_token_id"])
    head_width = int(metadata["gemma3.attention.key_length"])
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": int(metadata["gemma3.embedding_length"]),
        "num_hidden_layers": int(metadata["gemma3.block_count"]),
        "intermediate_size": int(metadata["gemma3.feed_forward_length"]),
        "num_attention_heads": int(metadata["gemma3.attention.head_count"]),
        "num_key_value_heads": int(metadata["gemma3.attention.head_count_kv"]),
        "head_dim": head_width,
        "query_pre_attn_scalar": head_width,
        "rms_norm_eps": float(np.float32(metadata["gemma3.attention.layer_norm_rms_epsilon"])),
        "rope_theta": float(metadata["gemma3.rope.freq_base"]),
        "rope_local_base_freq": _LOCAL_ROPE_BASE,
        "sliding_window": int(metadata["gemma3.attention.sliding_window"]),
        "sliding_window_pattern": _SLIDING_WINDOW_PATTERN,
        "max_position_embeddings": int(metadata["gemma3.context_length"]),
        "vocab_size": len(pieces),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
        # A turn ends with its own token, so chat replies stop there too.
        "eos_token_id": [eos_id, list(pieces).index("<end_of_turn>")],
    }


def convert_tensor(name: str, values: Array, metadata: Metadata) -> tuple[str, Array]:
    """Return mlx-lm's name and values of a tensor. Raises KeyError for one that Gemma 3 does not have."""
    if name.endswith("_norm.weight"):
        # llama.cpp stores 1 + w and multiplies; mlx-lm stores w and adds the 1 itself.
        values = values - np.float32(1)
    return mlx_name(name, outer=_OUTER, inner=_INNER), values


def make_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return a byte-fallback BPE tokenizer that puts `<bos>` before every text."""
    pieces = [_respell(piece, kind) for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)]
    ids = {piece: index for index, piece in enumerate(pieces)}
    unknown = pieces[vocabulary.unknown_id]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=find_merges(pieces, vocabulary.kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = pieces[vocabulary.bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary.bos_id)]
    )
    kinds = list(zip(pieces, vocabulary.kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(p, special=True, normalized=False) for p, k in kinds if k == PieceKind.CONTROL]
    )
    # User-defined pieces win over merges. Normalized, because runs of spaces are matched as runs of SPACE.
    tokenizer.add_tokens([AddedToken(p, normalized=True) for p, k in kinds if k == PieceKind.USER_DEFINED])
    return tokenizer


def find_merges(pieces: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges in rank order: for each normal piece, each cut into two normal pieces."""
    normal = {
        piece: i
        for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind == PieceKind.NORMAL
    }
    merges: list[tuple[str, str]] = []
    for piece in normal:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [cut for cut in cuts if cut[0] in normal and cut[1] in normal]
        merges.extend(sorted(known, key=lambda cut: (normal[cut[0]], normal[cut[1]])))
    return merges


def _respell(piece: str, kind: int) -> str:
    """Spell runs of spaces as the normalizer does; GGUF stores them plain."""
    return piece.replace(" ", SPACE) if kind == PieceKind.USER_DEFINED else piece
