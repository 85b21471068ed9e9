"""Shapes of real models with random weights, and a tokenizer in which every id has a text of its own.

A server tells nothing of a token without text, and its arrival could not be timed. A shape of four billion
weights is made in seconds on a GPU; `python -m bench.gpu.shapes FOLDER SHAPE TYPE` makes one by itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.server_process import ROOT, child_environment

_SPREAD = 0.7
"""Of a weight, times the root of its row's length: greedy text that does not repeat one token for ever."""
_SPECIAL = {"unk_token": "<unk>", "bos_token": "w1", "eos_token": "w2"}


def _qwen3(hidden: int, layers: int, wide: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _qwen3(2560, 36, 9728, 32, 8, 151_936),
    "qwen3-06b": _qwen3(1024, 28, 3072, 16, 8, 151_936),
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": 49_000,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "gpt-oss-mini": {
        "model_type": "gpt_oss",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "intermediate_size": 768,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49_000,
        "max_position_embeddings": 32_768,
        "rope_theta": 150_000,
        "sliding_window": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
    },
    "tiny": _qwen3(64, 4, 128, 4, 2, 4000),
}


def make_shape(parent: Path, shape: str, *, dtype: str) -> Path:
    """Return the model's folder below `parent`, made first if it is not there.

    A child process makes it, so that this one holds no weights.
    """
    folder = parent / f"{shape}-{dtype}"
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "bench.gpu.shapes", str(folder), shape, dtype]
        subprocess.run(command, cwd=ROOT, env=child_environment(), check=True)
    return folder


def main() -> None:
    """Write the folder; its configuration comes last, so that half a folder is made again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("dtype", choices=("bfloat16", "float16", "float32"))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **SHAPES[arguments.shape],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": arguments.dtype,
    }
    _write_weights(folder, config)
    _write_tokenizer(folder, config)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _write_weights(folder: Path, config: dict[str, Any]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    dtype = getattr(mx, config["torch_dtype"])
    mx.random.seed(7)
    weights: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        if value.ndim > 1:
            value = mx.random.normal(value.shape) * (_SPREAD / value.shape[-1] ** 0.5)
        weights[name] = value.astype(dtype)
        mx.eval(weights[name])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _write_tokenizer(folder: Path, model: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<unk>": 0, **{f"w{number}": number for number in range(1, model["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **_SPECIAL,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model["max_position_embeddings"],
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
