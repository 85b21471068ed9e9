"""Model objects and model folders with random weights of one seed.

Weights are drawn so that greedy decoding has no near-ties (logits of standard deviation
about 4 over 320 tokens) and the special tokens are practically never sampled, so that a
run ends by length unless a test wants otherwise.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path

from tests.models.configs import CONTEXT_TOKEN_LIMIT, tiny_config
from tests.models.vocabulary import SPECIAL_TOKENS, write_tokenizer

_LOGIT_STD: Final = 4.0
_QUERY_GAIN: Final = 3.0
"""Makes attention pick few tokens, so that a wrong prefix changes the text."""
_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def build(architecture: str, *, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Any:
    """Return an evaluated model; equal arguments give bit-equal weights in any process."""
    return _build(tiny_config(architecture, **overrides), dtype=dtype, seed=seed)


def tiny_model_dir(
    parent: Path,
    architecture: str,
    dtype: str = "float32",
    *,
    seed: int = 0,
    name: str | None = None,
    chat_template: bool = True,
    quantize_bits: int | None = None,
    shard_count: int = 1,
    **overrides: Any,
) -> Path:
    """Write a model folder below `parent` (as `name` or the architecture) and return its path.

    `quantize_bits` quantizes the linear layers in groups of 32; `overrides` replace keys of
    config.json. `mlx_lm.load` and `mlx_lm.utils.load_model` take the folder as it is.
    """
    config = tiny_config(architecture, **overrides)
    config["torch_dtype"] = dtype
    model = _build(config, dtype=dtype, seed=seed)
    if quantize_bits is not None:
        quantize(model, group_size=32, bits=quantize_bits)
        config["quantization"] = {"group_size": 32, "bits": quantize_bits}
    folder = parent / (name or architecture)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, model, config, shard_count=shard_count)
    limit = config.get("max_position_embeddings", CONTEXT_TOKEN_LIMIT)
    write_tokenizer(folder, context_token_limit=limit, chat_template=chat_template)
    return folder


def write_model(folder: Path, model: Any, config: dict[str, Any], *, shard_count: int = 1) -> None:
    """Write weights and configuration into a folder that has, or will get, a tokenizer."""
    _write_weights(folder, model, shard_count=shard_count)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")


def _build(config: dict[str, Any], *, dtype: str, seed: int) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(lambda name, value: _draw(name, value, seed=seed), model.parameters()))
    keep_float32 = getattr(model, "cast_predicate", None)

    def cast(name: str, value: mx.array) -> mx.array:
        return value.astype(_DTYPES[dtype]) if keep_float32 is None or keep_float32(name) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _draw(name: str, value: mx.array, *, seed: int) -> mx.array:
    """Return random weights of this parameter's shape; norms stay near their initial constants."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = random.standard_normal(value.shape).astype(np.float32)
    if name.endswith("embedding_norm.weight"):
        # LFM2 ties its output to its embedding: random signs keep it from echoing its input for ever.
        return mx.array(np.sign(noise))
    if name.endswith("A_log"):
        # Slow decay, so that a recurrent state remembers the whole prompt of a test.
        return mx.array(np.log(0.05 + 0.1 * np.abs(noise)))
    if name.endswith(("bias", "sinks")):
        return mx.array(0.1 * noise)
    if value.ndim < 2:
        return value + mx.array(0.1 * noise)
    if name.endswith(("embed_tokens.weight", "embeddings.weight")):
        return mx.array(noise)
    if name.endswith(("lm_head.weight", "output.weight")):
        noise[: len(SPECIAL_TOKENS)] = 0.0
        return mx.array(noise * (_LOGIT_STD / math.sqrt(value.shape[-1])))
    fan_in = value.shape[1] if "conv" in name else value.shape[-1]
    gain = _QUERY_GAIN if "q_proj" in name or "q_b_proj" in name else 1.0
    return mx.array(noise * (gain / math.sqrt(fan_in)))


def _write_weights(folder: Path, model: Any, *, shard_count: int) -> None:
    flat: Any = tree_flatten(model.parameters())
    weights: list[tuple[str, mx.array]] = sorted(flat)
    if shard_count == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
        return
    for index in range(shard_count):
        shard = dict(weights[index::shard_count])
        file = folder / f"model-{index + 1:05d}-of-{shard_count:05d}.safetensors"
        mx.save_safetensors(str(file), shard, metadata={"format": "mlx"})
