"""Gemma 3 from GGUF, with the names and conventions of mlx-lm's `gemma3_text`, and its tokenizer.

GGUF lists pieces and their kinds but no merges. Gemma's pieces are in the order in which they were merged, so
every split of a piece into two known pieces is a merge with that piece's rank (SentencePiece's BPE,
https://github.com/google/sentencepiece).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from icehouse_server.demo.mlx_folder import Array, Metadata, common_config, mlx_name, read_template

SPACE = "\u2581"
"""How a piece spells a space."""

_LAYER_NAMES = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Not in the file: llama.cpp hard-codes both for Gemma 3, with the values of the published config.json.
_SLIDING_WINDOW_PATTERN = 6
_LOCAL_ROPE_BASE = 10_000.0

CHAT_TEMPLATE = read_template("gemma.jinja")
"""Gemma's public turn format, with tools in the style of other families.

The base model was trained on neither, but chat requests work.
"""


def model_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json for mlx-lm, made from the file's metadata."""
    # A turn ends with its own token, so chat replies stop there too.
    config = common_config(metadata, "gemma3", head_size="attention.key_length", end_piece="<end_of_turn>")
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": config["head_dim"],
        "rope_local_base_freq": _LOCAL_ROPE_BASE,
        "sliding_window": int(metadata["gemma3.attention.sliding_window"]),
        "sliding_window_pattern": _SLIDING_WINDOW_PATTERN,
    }


def convert_tensor(name: str, values: Array, metadata: Metadata) -> tuple[str, Array]:
    """Return mlx-lm's name and values of a tensor. Raises KeyError for one that Gemma 3 does not have."""
    if name.endswith("_norm.weight"):
        # llama.cpp stores 1 + w and multiplies; mlx-lm stores w and adds the 1 itself.
        values = values - np.float32(1)
    return mlx_name(name, layer_names=_LAYER_NAMES), values


def make_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return a byte-fallback BPE tokenizer that puts `<bos>` before every text."""
    from gguf import TokenType

    kinds = metadata["tokenizer.ggml.token_type"]
    # The normalizer spells runs of spaces with SPACE; GGUF stores plain spaces.
    pieces = [
        piece.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else piece
        for piece, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True)
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=find_merges([p for p, k in zip(pieces, kinds, strict=True) if k == TokenType.NORMAL]),
            unk_token=pieces[metadata["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos_id = int(metadata["tokenizer.ggml.bos_token_id"])
    bos = pieces[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
    by_kind = list(zip(pieces, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(p, special=True, normalized=False) for p, k in by_kind if k == TokenType.CONTROL]
    )
    # User-defined pieces win over merges. Normalized, because runs of spaces are matched as runs of SPACE.
    tokenizer.add_tokens([AddedToken(p, normalized=True) for p, k in by_kind if k == TokenType.USER_DEFINED])
    return tokenizer


def find_merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges of normal pieces in rank order: for each piece, every split into two others."""
    normal = {piece: rank for rank, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for piece in normal:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [cut for cut in cuts if cut[0] in normal and cut[1] in normal]
        merges.extend(sorted(known, key=lambda cut: (normal[cut[0]], normal[cut[1]])))
    return merges
