"""LoRA adapters, each a module tree of its own over the arrays of the one model (inference thread).

A second tree of the same class is made from the folder, lazily, and given the loaded model's own arrays
before the adapter's layers are put in: what was not loaded twice is not held twice.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import mlx.core as mx

from icehouse_server.domain.model import AdapterInfo
from icehouse_server.engine.runner import mlx_lm
from icehouse_server.engine.runner.model_loader import (
    AdapterSource,
    LoadedModel,
    ModelSource,
    convert,
    one_line,
    parameters_of,
)
from icehouse_server.errors import ModelError, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptedModel:
    """The model with one adapter."""

    tree: Any
    info: AdapterInfo


def attach(adapter: AdapterSource, base: LoadedModel, source: ModelSource) -> AdaptedModel:
    """Load an adapter beside the model; raises ModelError where it does not fit it."""
    try:
        tree = _tree_of(adapter, base, source)
        kind = _kind_of(adapter)
        missing = _own(tree, base).keys() - mlx_lm.adapter_tensor_names(adapter.path)
        if missing:
            raise ValueError(f"adapters.safetensors lacks {len(missing)} tensors, one is {min(missing)}")
        if source.dtype:
            convert(tree, source.dtype)
        tree.eval()
        own = _own(tree, base)
        mx.eval(list(own.values()))
    except Exception as error:  # mlx-lm raises whatever a folder makes it raise
        raise ModelError(
            Reason.MODEL_INVALID,
            f"adapter {adapter.name!r} in {adapter.path} cannot be applied to the model: {one_line(error)}; "
            "was it trained on this one?",
        ) from error
    info = AdapterInfo(
        name=adapter.name,
        kind=kind,
        digest=adapter.digest,
        parameter_count=sum(array.size for array in own.values()),
        weight_bytes=sum(array.nbytes for array in own.values()),
    )
    return AdaptedModel(tree, info)


def _tree_of(adapter: AdapterSource, base: LoadedModel, source: ModelSource) -> Any:
    tree, _ = mlx_lm.read_model(source.path, lazy=True, trust_remote_code=source.trust_remote_code)
    tree.update(base.model.parameters())
    return mlx_lm.read_adapter(tree, str(adapter.path))


def _own(tree: Any, base: LoadedModel) -> dict[str, mx.array]:
    """Return the arrays of a tree that are not the model's."""
    shared = {id(array) for _, array in parameters_of(base.model)}
    return {name: array for name, array in parameters_of(tree) if id(array) not in shared}


def _kind_of(adapter: AdapterSource) -> str:
    config = json.loads((adapter.path / "adapter_config.json").read_text(encoding="utf-8"))
    return str(config.get("fine_tune_type", "lora"))
