"""Adapter folders as mlx-lm's training writes them, with random weights that change the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from icehouse_server.domain.ids import AdapterName
from icehouse_server.engine.runner.fingerprint import adapter_digest
from icehouse_server.engine.runner.model_loader import AdapterSource
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

RANK = 4


def adapter_source(name: str, path: Path) -> AdapterSource:
    """Return an adapter as the server finds it at its start."""
    return AdapterSource(AdapterName(name), path, adapter_digest(path))


def tiny_adapter_dir(
    parent: Path, model_dir: Path, *, seed: int, kind: str = "lora", name: str = "", scale: float = 4.0
) -> Path:
    """Write an adapter of a model folder below `parent` and return its path."""
    model, _ = load_model(model_dir)
    if kind == "full":
        weights = {
            name: _noise(name, value, seed)
            for name, value in _parameters_of(model)
            if "layers.1." in name and name.endswith("proj.weight")
        }
    else:
        linear_to_lora_layers(model, 3, _parameters(scale), use_dora=kind == "dora")
        weights = {
            name: value + _noise(name, value, seed) if name.endswith(".m") else _noise(name, value, seed)
            for name, value in _parameters_of(model)
            if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
        }
    folder = parent / (name or f"{kind}-{seed}")
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 3, "lora_parameters": _parameters(scale), "iters": seed}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _parameters_of(model: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(model.parameters())
    return flat


def _parameters(scale: float) -> dict[str, float]:
    return {"rank": RANK, "scale": scale, "dropout": 0.0}


def _noise(name: str, like: mx.array, seed: int) -> mx.array:
    random = np.random.default_rng([seed, *name.encode()])
    noise = random.standard_normal(like.shape).astype(np.float32) / np.sqrt(like.shape[-1])
    return mx.array(noise).astype(like.dtype)
