"""MLX folder of a demo model: its config, tokenizer, chat template and weights, made from a GGUF file.

Dequantized values are rounded to bfloat16, the type in which the models were published. The folder is half as
large as with float32, and loading it as float32 adds no further rounding.
"""

from __future__ import annotations

import importlib.resources
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
from tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[np.float32]]
Metadata = Mapping[str, Any]
"""A GGUF file's metadata by key, such as `llama.block_count` and `tokenizer.ggml.tokens`
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""


class ModelConversion(Protocol):
    """The module that holds what is specific to one family of models."""

    CHAT_TEMPLATE: str
    """A Jinja template, as transformers renders it."""

    def model_config(self, metadata: Metadata) -> dict[str, Any]:
        """Return config.json for mlx-lm; raises ValueError for a file of another architecture."""
        ...

    def convert_tensor(self, name: str, values: Array, metadata: Metadata) -> tuple[str, Array]:
        """Return mlx-lm's name and values of a tensor; raises KeyError for one that the family lacks."""
        ...

    def make_tokenizer(self, metadata: Metadata) -> Tokenizer: ...


_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def common_config(metadata: Metadata, architecture: str, *, head_size: str, end_piece: str) -> dict[str, Any]:
    """Return the part of config.json that all families share, from `ARCHITECTURE.*` and `tokenizer.ggml.*`.

    `head_size` is the metadata key of a head's size, `end_piece` a second token that ends an output. Raises
    ValueError for a file of another architecture.
    """
    if metadata["general.architecture"] != architecture:
        raise ValueError(f"architecture is {metadata['general.architecture']!r}, not {architecture!r}")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    pieces = list(metadata["tokenizer.ggml.tokens"])
    return {
        "hidden_size": int(own["embedding_length"]),
        "num_hidden_layers": int(own["block_count"]),
        "intermediate_size": int(own["feed_forward_length"]),
        "num_attention_heads": int(own["attention.head_count"]),
        "num_key_value_heads": int(own["attention.head_count_kv"]),
        "head_dim": int(own[head_size]),
        "rms_norm_eps": float(np.float32(own["attention.layer_norm_rms_epsilon"])),
        "rope_theta": float(own["rope.freq_base"]),
        "max_position_embeddings": int(own["context_length"]),
        "vocab_size": len(pieces),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
        "eos_token_id": [int(metadata["tokenizer.ggml.eos_token_id"]), pieces.index(end_piece)],
    }


def mlx_name(gguf_name: str, *, layer_names: Mapping[str, str]) -> str:
    """Return mlx-lm's name of a tensor; `layer_names` adds the family's own names of a layer's parts.

    Raises KeyError for a tensor that the family does not have.
    """
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    block, _, rest = gguf_name.removesuffix(".weight").partition(".")
    index, _, part = rest.partition(".")
    if block != "blk":
        raise KeyError(gguf_name)
    names = {**_LAYER_NAMES, **layer_names}
    return f"model.layers.{int(index)}.{names[part]}.weight"


def write_tokenizer(tokenizer: Tokenizer, metadata: Metadata, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    pieces = metadata["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{name}_token": pieces[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in special.items()
        },
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_template(name: str) -> str:
    """Return a chat template from the folder of this module."""
    return importlib.resources.files("icehouse_server.demo").joinpath(name).read_text(encoding="utf-8")


def renew_template(folder: Path, template: str) -> None:
    """Write the chat template if it is missing or out of date, without building the model again."""
    file = folder / "chat_template.jinja"
    if not file.exists() or file.read_text(encoding="utf-8") != template:
        # In a folder of its own, because another server may be doing the same right now.
        with tempfile.TemporaryDirectory(dir=folder) as name:
            fresh = Path(name) / file.name
            fresh.write_text(template, encoding="utf-8")
            fresh.replace(file)


def to_bfloat16(values: Array) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round finite float32 to bfloat16, to nearest with ties to even; return the bits as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def write_weights(
    tensors: Sequence[Any],
    file: Path,
    *,
    convert: Callable[[str, Array], tuple[str, Array]],
    on_progress: Callable[[float], None],
) -> None:
    """Write all tensors of a GGUFReader as one safetensors file, with the names and values that `convert`
    returns. `on_progress` gets 0 to 1."""
    from gguf import dequantize

    total = sum(tensor.n_bytes for tensor in tensors)
    done = 0
    arrays: dict[str, np.ndarray[Any, np.dtype[np.uint16]]] = {}
    specs: dict[str, safetensors.TensorSpec] = {}
    for tensor in tensors:
        decoded = dequantize(tensor.data, tensor.tensor_type)
        # GGUF counts dimensions from the innermost one.
        name, values = convert(tensor.name, decoded.reshape(tensor.shape[::-1]))
        arrays[name] = to_bfloat16(values)
        # `arrays` keeps every buffer alive until serialize_file has read it.
        specs[name] = safetensors.TensorSpec(
            dtype="bfloat16",
            shape=list(values.shape),
            data_ptr=arrays[name].ctypes.data,
            data_len=arrays[name].nbytes,
        )
        done += tensor.n_bytes
        on_progress(done / total)
    safetensors.serialize_file(specs, str(file), metadata={"format": "mlx"})
