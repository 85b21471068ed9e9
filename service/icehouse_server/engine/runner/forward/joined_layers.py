"""Joined layers: linear layers that read the same input, computed as one product (inference thread).

A layer's queries, keys and values, and the two halves of its MLP, are five of its seven products. If each
product of several rows costs the host time, joining them saves it: MLX's CUDA backend asks cuBLAS for an
algorithm and captures a graph each time. A pass of four rows took 3.5 ms longer than one of a single row,
whose products take another path: 14 us per product (Qwen3-4B's shape, H100, mlx 0.32.4).

The weights of joined layers are contiguous in one array, and each layer's own weights are a view of it. So a
layer that gets another input than the others, or a single token, still computes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from icehouse_server.engine.runner.forward.model_seam import become, modules_of

_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same input, if a module has all of them."""
_KINDS = {Linear, QuantizedLinear}


class JoinedLayers:
    """The layers of one model that are computed together, until `separate`."""

    def __init__(self) -> None:
        self._products: list[_Product] = []

    @classmethod
    def steps(cls, model: Any) -> Generator[None, None, JoinedLayers]:
        """Join what can be joined. Yields after each product, so that other models can run their passes. A
        layer's weights are in memory twice only during its turn."""
        joined = cls()
        for layers in list(_joinable(model)):
            joined._products.append(_Product(layers))
            yield
        return joined

    def __len__(self) -> int:
        return len(self._products)

    def separate(self) -> None:
        """Let every layer compute alone again."""
        for product in self._products:
            product.is_on = False


class _Product:
    """One product that replaces those of several layers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        first = layers[0]
        self.is_on = True
        kind: Any = type(first)
        self._whole = kind.__new__(kind)
        Module.__init__(self._whole)  # type: ignore[no-untyped-call]
        vars(self._whole).update(vars(first))
        sizes = [layer.weight.shape[0] for layer in layers]
        self._cuts = [sum(sizes[: number + 1]) for number in range(len(sizes) - 1)]
        for key in _arrays_of(first):
            whole = self._whole[key] = mx.concatenate([layer[key] for layer in layers])
            for layer, part in zip(layers, mx.split(whole, self._cuts), strict=True):
                layer[key] = part
        mx.eval(self._whole.parameters(), [layer.parameters() for layer in layers])
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}
        """Outputs that were not asked for yet."""
        for number, layer in enumerate(layers):
            become(layer, "joined", functools.partial(self._output, number))

    def _output(self, number: int, call: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """Return a layer's output for `x`; the first layer called with it computes it for all."""
        if x is not self._input or number not in self._outputs:
            if not self.is_on or x.size == x.shape[-1]:
                return call(x)
            self._input = x
            self._outputs = dict(enumerate(mx.split(self._whole(x), self._cuts, axis=-1)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output


def _joinable(model: Any) -> Iterator[list[Any]]:
    for module in modules_of(model):
        for names in _NAMES:
            layers = [getattr(module, name, None) for name in names]
            kinds = {type(layer) for layer in layers}
            if kinds <= _KINDS and len({*map(_form, layers)}) == 1:
                yield layers


def _form(layer: Any) -> tuple[Any, ...]:
    """Return what layers must have in common to be joined."""
    arrays = tuple((key, array.shape[1:], array.dtype) for key, array in _arrays_of(layer).items())
    settings = tuple(getattr(layer, name, None) for name in ("group_size", "bits", "mode"))
    return type(layer), arrays, settings


def _arrays_of(layer: Any) -> dict[str, mx.array]:
    return {key: value for key, value in layer.items() if isinstance(value, mx.array)}
