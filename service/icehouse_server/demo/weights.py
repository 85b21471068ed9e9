"""Gemma 3 weights from GGUF to the names and conventions of mlx-lm's `gemma3_text`.

Dequantized values are rounded to bfloat16, the type the model was published in: the folder is half as
large as float32 would make it, and loading it as float32 adds no further rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

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


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it lies in the file; `quantized` holds encoded rows, `shape` is the decoded shape."""

    name: str
    shape: tuple[int, ...]
    encoding: int
    quantized: np.ndarray[Any, Any]


def mlx_name(gguf_name: str) -> str:
    """Return mlx-lm's name of a tensor. Raises KeyError for one that Gemma 3 does not have."""
    if gguf_name in _OUTER:
        return _OUTER[gguf_name]
    block, index, kind = gguf_name.removesuffix(".weight").split(".")
    if block != "blk":
        raise KeyError(gguf_name)
    return f"model.layers.{int(index)}.{_INNER[kind]}.weight"


def to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round finite float32 to bfloat16, nearest with ties to even; the bits come back as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def write_weights(
    tensors: list[Tensor],
    file: Path,
    *,
    dequantize: Callable[[np.ndarray[Any, Any], int], np.ndarray[Any, np.dtype[np.float32]]],
    on_progress: Callable[[float], None],
) -> None:
    """Decode every tensor and write them as one safetensors file. `on_progress` gets 0 to 1."""
    total = sum(t.quantized.nbytes for t in tensors)
    done = 0
    arrays: dict[str, np.ndarray[Any, np.dtype[np.uint16]]] = {}
    specs: dict[str, safetensors.TensorSpec] = {}
    for tensor in tensors:
        values = dequantize(tensor.quantized, tensor.encoding).reshape(tensor.shape)
        if tensor.name.endswith("_norm.weight"):
            # llama.cpp stores 1 + w and multiplies; mlx-lm stores w and adds the 1 itself.
            values = values - np.float32(1)
        name = mlx_name(tensor.name)
        arrays[name] = to_bfloat16(values)
        # `arrays` keeps every buffer alive until serialize_file has read it.
        specs[name] = safetensors.TensorSpec(
            dtype="bfloat16",
            shape=list(tensor.shape),
            data_ptr=arrays[name].ctypes.data,
            data_len=arrays[name].nbytes,
        )
        done += tensor.quantized.nbytes
        on_progress(done / total)
    safetensors.serialize_file(specs, str(file), metadata={"format": "mlx"})


def model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json for mlx-lm from the file's metadata (`gemma3.*` and `tokenizer.ggml.*` keys)."""
    architecture = metadata["general.architecture"]
    if architecture != "gemma3":
        raise ValueError(f"architecture is {architecture!r}, not 'gemma3'")
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
