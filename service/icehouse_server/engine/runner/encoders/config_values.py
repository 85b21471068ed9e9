"""Values of config.json that an encoder is built from. Each refusal is a ValueError that names the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu

Config = Mapping[str, Any]

_ACTIVATIONS: Final[Mapping[str, Callable[[mx.array], mx.array]]] = {
    "gelu": gelu,
    "gelu_new": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
    "identity": lambda x: x,
    "tanh": mx.tanh,
}


def size_of(config: Config, *names: str) -> int:
    """Return the value of the first of these keys that exists; it must be a whole number above 0."""
    found = next((config[name] for name in names if name in config), None)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"config.json has {found!r} for {names[0]}, which must be a whole number above 0")
    return found


def activation_of(name: str) -> Callable[[mx.array], mx.array]:
    """Return the activation function with this name in transformers or PyTorch."""
    found = _ACTIVATIONS.get(name.rpartition(".")[2].lower())
    if found is None:
        raise ValueError(f"its activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return found


def rope_base(config: Config, layers: str, *, key: str, default: float) -> float:
    """Return the base of RoPE for one kind of layer, wherever this release of transformers puts it."""
    own = (config.get("rope_parameters") or {}).get(layers) or {}
    scaling = config.get("rope_scaling")
    if own.get("rope_type", "default") != "default" or scaling:
        raise ValueError(f"its RoPE is scaled ({scaling or own}), which is not supported for encoders")
    found: float = own.get("rope_theta") or config.get(key) or default
    return float(found)
