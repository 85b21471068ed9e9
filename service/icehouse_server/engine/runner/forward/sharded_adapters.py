"""Sharded adapters: LoRA layers of a model that is sharded over a group's ranks (inference thread).

mlx-lm shards layers without adapters. So LoRA layers are taken off the model and put back once it is sharded,
each with the part of its matrices that belongs to this rank's part of the layer.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear


class TakenAdapters:
    """The LoRA layers of one model, from when they are taken off until `put_back`."""

    def __init__(self, model: Any) -> None:
        """Leave the model with the layers below them. A linear layer gets a bias that numbers its rows: it is
        sharded as the rows are, however a model orders them."""
        kinds = (LoRALinear, LoRASwitchLinear)
        self._layers = {path: each for path, each in model.named_modules() if isinstance(each, kinds)}
        self._biases: dict[str, mx.array | None] = {}
        for path, lora in self._layers.items():
            if isinstance(lora, LoRALinear):
                self._biases[path] = lora.linear.get("bias")
                lora.linear["bias"] = mx.arange(lora.lora_b.shape[1])
        bare = [(path, lora.linear) for path, lora in self._layers.items()]
        model.update_modules(tree_unflatten(bare))

    def uncount(self, model: Any) -> dict[str, mx.array]:
        """Restore the own biases of the sharded model's layers; return which rows each layer has."""
        rows: dict[str, mx.array] = {}
        modules = dict(model.named_modules())
        for path, bias in self._biases.items():
            rows[path] = modules[path].pop("bias")
            if bias is not None:
                modules[path]["bias"] = bias[rows[path]]
        return rows

    def put_back(self, model: Any, rows: dict[str, mx.array], group: Any) -> None:
        """Put the LoRA layers over the sharded model's. Raises ValueError for one that cannot be divided."""
        modules = dict(model.named_modules())
        back: list[tuple[str, Any]] = []
        for path, lora in self._layers.items():
            layer = modules[path]
            try:
                if path in rows:
                    _divide(lora, layer, rows[path], group)
                else:
                    _divide_switch(lora, layer, group)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            back.append((path, _over(layer, lora, group)))
        model.update_modules(tree_unflatten(back))


class SummedLinear(Module):
    """A LoRA layer of which each rank has a part of the input: one sum for the layer and its adapter."""

    def __init__(self, lora: Any, bias: mx.array | None, group: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lora = lora
        self.group = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.lora(x), group=self.group)
        return y + self.bias if "bias" in self else y


def _divide(lora: Any, layer: Any, rows: mx.array, group: Any) -> None:
    if rows.shape != layer.weight.shape[:1]:
        raise ValueError("its rows are not sharded with its bias")
    lora.lora_b = lora.lora_b[:, rows]
    lora.lora_a = _part(lora.lora_a, 0, _input_size(layer), group)


def _divide_switch(lora: Any, layer: Any, group: Any) -> None:
    """Divide the layer of experts; each expert's rows are sharded in order."""
    if layer.weight.shape[0] != lora.num_experts:
        raise ValueError("its experts are divided, instead of each expert's matrix")
    lora.lora_b = _part(lora.lora_b, 1, layer.weight.shape[1], group)
    lora.lora_a = _part(lora.lora_a, 2, _input_size(layer), group)


def _input_size(layer: Any) -> int:
    packed: int = layer.weight.shape[-1]
    return packed * 32 // getattr(layer, "bits", 32)


def _part(array: mx.array, axis: int, count: int, group: Any) -> mx.array:
    """Return this rank's part of an array; `count` is the length of the layer's shard along an axis."""
    if count == array.shape[axis]:
        return array
    if count * group.size() != array.shape[axis]:
        raise ValueError(f"its shard has {count} of {array.shape[axis]}, no equal part for each rank")
    return mx.split(array, group.size(), axis=axis)[group.rank()]


def _over(layer: Any, lora: Any, group: Any) -> Any:
    if not isinstance(layer, ShardedToAllLinear | QuantizedShardedToAllLinear):
        lora.linear = layer
        return lora
    # The layer below must not sum by itself then.
    bias = layer.pop("bias", None)
    del lora.linear["bias"]
    lora.linear.update(layer.parameters())  # type: ignore[no-untyped-call]
    return SummedLinear(lora, bias, group)
