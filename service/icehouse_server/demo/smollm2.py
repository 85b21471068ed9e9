"""SmolLM2 from GGUF, with the names and conventions of mlx-lm's `llama`, and its tokenizer.

The file lists pieces and merges of a byte-level BPE. The rule that splits text before the BPE is only named
("smollm"): each digit by itself, then as GPT-2 does.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from icehouse_server.demo.mlx_folder import Array, Metadata, common_config, mlx_name, read_template

_LAYER_NAMES = {"ffn_norm": "post_attention_layernorm"}
_ROTATED = {
    ".attn_q.weight": "llama.attention.head_count",
    ".attn_k.weight": "llama.attention.head_count_kv",
}
"""Projections whose rows RoPE rotates, and the metadata key of their number of heads."""

CHAT_TEMPLATE = read_template("smollm2.jinja")
"""The turns of the file's own template, with tools in the style of other families.

The model was not trained on tools, but requests with tools work.
"""


def model_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json for mlx-lm, made from the file's metadata."""
    # A chat turn ends with the file's own end token, a continued text with this one.
    config = common_config(metadata, "llama", head_size="rope.dimension_count", end_piece="<|endoftext|>")
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def convert_tensor(name: str, values: Array, metadata: Metadata) -> tuple[str, Array]:
    """Return mlx-lm's name and values of a tensor. Raises KeyError for one that SmolLM2 does not have."""
    for ending, head_count_key in _ROTATED.items():
        if name.endswith(ending):
            values = _halves(values, head_count=int(metadata[head_count_key]))
    return mlx_name(name, layer_names=_LAYER_NAMES), values


def _halves(values: Array, *, head_count: int) -> Array:
    """Return the rows with each head's pairs split in halves: llama.cpp rotates neighbours, mlx-lm halves."""
    row_count, width = values.shape
    pairs = values.reshape(head_count, row_count // head_count // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(row_count, width)


def make_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return a byte-level BPE tokenizer that adds nothing to a text."""
    from gguf import TokenType

    pieces, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[
                (left, right)
                for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
            ],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer
