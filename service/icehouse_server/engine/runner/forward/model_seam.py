"""Seam in mlx-lm's models: the only place that changes what they do, and only for caches of a forward pass.

There are seven changes, each made once. Each falls through to upstream for any cache that is not a view of
`layer_view`, so the same model still works as usual in the same process:
- `scaled_dot_product_attention`, which models import by name from `mlx_lm.models.base`, in their modules;
- `mx.fast.rope`, where the device has no kernel for it: the angles of a pass are shared (`rope`);
- `__call__` of modules that take a cache, by a subclass that replaces the instance's class;
- `__call__` of the trunk, the module whose hidden states the head reads, likewise;
- `__call__` of the embedding, if images replace tokens, likewise;
- `__call__` of the first layers, if a tower makes vectors for each of them (DeepStack), likewise;
- `__call__` of every layer, if a chunk goes through some of them at a time (`LayerWindow`), likewise.

mlx-vlm's models are built alike, around a function of the same name and arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.cpu.rope import rope_over
from icehouse_server.engine.runner.forward.layer_view import HANDED, FlatLayer, SplitLayer, attend
from icehouse_server.engine.runner.forward.masks import RowMasks
from icehouse_server.engine.runner.forward.row import Features
from icehouse_server.engine.runner.forward.splits import NotSplittable

Call = Callable[..., Any]
"""What a module does when called, without the changes made here."""
_NAME = "scaled_dot_product_attention"
_BASES = ("mlx_lm.models.base", "mlx_vlm.models.base")
_BODIES = ("model", "transformer", "backbone")
_EMBEDDINGS = ("embed_tokens", "wte", "embeddings", "tok_embeddings", "word_embeddings")


@functools.cache
def attention_over(upstream: Callable[..., Any]) -> Callable[..., mx.array]:
    """Return an attention that works row by row if the cache is one of our views, and else calls upstream."""

    def attention(
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: Any = None,
    ) -> mx.array:
        layer = HANDED.get(id(keys)) if HANDED else None
        if layer is None:
            if isinstance(cache, FlatLayer) or isinstance(mask, RowMasks):
                raise NotSplittable("attention got other keys than those that went into the cache")
            output: mx.array = upstream(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
            return output
        return attend(layer, queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    return attention


def modules_of(module: Any) -> list[Any]:
    """Return a module and all modules inside it."""
    return [inner for _, inner in module.named_modules()]


def patch_attention(model: Any) -> None:
    """Replace upstream's attention in every Python module that defines a class of the model."""
    names = {base.__module__ for module in modules_of(model) for base in type(module).__mro__}
    for name in names:
        namespace = sys.modules.get(name)
        upstream = getattr(namespace, _NAME, None)
        if getattr(upstream, "__module__", None) in _BASES:
            setattr(namespace, _NAME, attention_over(upstream))


@functools.cache
def share_angles() -> None:
    """Replace upstream's RoPE by `rope_over` it on a CPU; other devices have a kernel."""
    if find_backend() is Backend.CPU:
        mx.fast.rope = rope_over(mx.fast.rope)


class Trunk:
    """The module whose hidden states the model's head reads; with `indices` set, it reads only those.

    mlx-lm's models are a body, called with tokens and caches, and then a head with any scaling and capping of
    the architecture. Only the body's output is intercepted, so the head is the model's own.
    """

    def __init__(self, model: Any) -> None:
        """Raises LookupError if a model is not built this way."""
        whole = getattr(model, "language_model", model)
        body = _body_of(whole)
        if body is None and whole is not model:
            # Some of mlx-vlm's are body and head in one: their head reads the last norm's output.
            body = getattr(whole, "norm", None)
        elif body is not None and not _takes_cache(body):
            body = None
        if not isinstance(body, Module):
            raise LookupError(f"{type(whole).__name__} has no {', '.join(_BODIES)} that takes a cache")
        self.module: Any = body
        self.is_on = False
        """Set while a forward pass calls the model."""
        self.indices: mx.array | None = None
        self.hidden: mx.array | None = None
        """Of all tokens of the latest call."""
        become(body, "trunk", self._through)

    def _through(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Store the hidden states, and return those that the head should read."""
        output = call(*args, **kwargs)
        if not self.is_on:
            return output
        if not isinstance(output, mx.array) or output.ndim != 3:
            raise NotSplittable(f"{type(self.module).__name__} gives no hidden states")
        self.hidden = output
        return output if self.indices is None else picked(output, self.indices)


class Embedding:
    """The module that embeds token ids; `features` replace some of its vectors while they are set."""

    def __init__(self, model: Any) -> None:
        """Raises LookupError if a model is not built this way."""
        whole = getattr(model, "language_model", model)
        owners = [module for module in (_body_of(whole), whole) if module is not None]
        modules = [m for owner in owners for name in _EMBEDDINGS if (m := getattr(owner, name, None))]
        if not modules:
            raise LookupError(f"{type(whole).__name__} has none of {', '.join(_EMBEDDINGS)}")
        self.features: Sequence[Features] = ()
        """By their tokens' indices in the pass."""
        self._layers = model.layers
        become(modules[0], "embedding", self._put)

    def _put(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Return [tokens, 1, width] or [1, tokens, width] with the features put in."""
        output = call(*args, **kwargs)
        if not self.features:
            return output
        width = output.shape[-1]
        for number in range(self.features[0].vectors.shape[1] // width - 1):
            become(self._layers[number], "deepstack", functools.partial(self._add, number + 1))
        return self._changed(output, lambda flat, each: each.vectors[:, :width].astype(flat.dtype))

    def _add(self, number: int, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Return a layer's output plus the features' part for it. Vectors may be longer than the width: what
        follows is for the first layer, then for the second."""
        output = call(*args, **kwargs)
        if not self.features:
            return output
        part = slice(number * output.shape[-1], (number + 1) * output.shape[-1])
        return self._changed(output, lambda flat, each: flat + each.vectors[:, part].astype(flat.dtype))

    def _changed(self, output: mx.array, change: Callable[[mx.array, Features], mx.array]) -> mx.array:
        axis = 1 if output.shape[1] > 1 else 0
        flat = output.reshape(-1, output.shape[-1])
        parts: list[mx.array] = []
        end = 0
        for each in sorted(self.features, key=lambda each: each.start):
            stop = each.start + each.vectors.shape[0]
            parts += [flat[end : each.start], change(flat[each.start : stop], each)]
            end = stop
        return mx.expand_dims(mx.concatenate([*parts, flat[end:]]), axis=1 - axis)


def _body_of(whole: Any) -> Any:
    return next((body for name in _BODIES if (body := getattr(whole, name, None)) is not None), None)


class LayerWindow:
    """Lets a model's call run only some of its layers: the others return their input.

    What comes before the first and after the last of them is built but never computed.
    """

    def __init__(self, model: Any) -> None:
        """Raises NotSplittable if a layer is used twice."""
        layers = list(model.layers)
        if len({id(layer) for layer in layers}) < len(layers):
            raise NotSplittable("a layer comes twice")
        self.count = len(layers)
        self._is_open = False
        self._first = self._last = 0
        self._given: mx.array | None = None
        self._output: mx.array | None = None
        for number, layer in enumerate(layers):
            become(layer, "window", functools.partial(self._through, number))

    def run(self, call: Callable[[], Any], *, first: int, last: int, hidden: mx.array | None) -> mx.array:
        """Call the model with layers [first, last), the first of which gets `hidden`; return the last one's
        output."""
        assert 0 <= first < last <= self.count, (first, last, self.count)
        self._first, self._last, self._given = first, last, hidden
        self._is_open = True
        try:
            call()
        finally:
            output, self._output = self._output, None
            self._is_open, self._given = False, None
        if output is None:
            raise NotSplittable(f"layer {last - 1} was not called")
        return output

    def _through(self, number: int, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a layer, whose first argument must be the hidden states."""
        if not self._is_open:
            return call(*args, **kwargs)
        if not args or not isinstance(args[0], mx.array):
            raise NotSplittable("a layer is not called with hidden states first")
        if not self._first <= number < self._last:
            return args[0]
        given = self._given if number == self._first and self._given is not None else args[0]
        output = call(given, *args[1:], **kwargs)
        if not isinstance(output, mx.array) or output.shape != given.shape:
            raise NotSplittable("a layer gives more than hidden states")
        if number == self._last - 1:
            self._output = output
        return output


def picked(output: mx.array, indices: mx.array) -> mx.array:
    """Return the entries of some tokens in [tokens, 1, width] or [1, tokens, width]."""
    return mx.take(output, indices, axis=1 if output.shape[1] > 1 else 0)


def open_doors(model: Any) -> None:
    """Let the modules that take a layer's cache split the rows: those inside the layers (attention, mixer,
    convolution), or the layer itself if it has none. Done once per model."""
    for module in _cache_takers(model):
        kind: Any = type(module)
        become(module, "split", functools.partial(_split, _parameters_of(kind)))


def _cache_takers(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        if not isinstance(layer, Module):
            continue
        inner = [m for m in modules_of(layer) if m is not layer and _takes_cache(m)]
        if inner:
            yield from inner
        elif _takes_cache(layer):
            yield layer


def _takes_cache(module: Any) -> bool:
    kind: Any = type(module)
    return "cache" in _parameters_of(kind)


@functools.cache
def _parameters_of(kind: Any) -> tuple[str, ...]:
    """Return the parameter names of a class's `__call__`."""
    try:
        return tuple(inspect.signature(kind.__call__).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def become(module: Any, purpose: str, handle: Callable[..., Any]) -> None:
    """Handle an instance's calls: its class becomes a subclass whose `__call__` returns `handle(call, *args,
    **kwargs)`, where `call` does what the instance did before."""
    object.__setattr__(module, f"_forward_{purpose}", handle)
    kind: Any = type(module)
    if purpose not in getattr(kind, "_forward_purposes", ()):
        module.__class__ = _subclass(kind, purpose)


@functools.cache
def _subclass(kind: Any, purpose: str) -> type:
    call, name = kind.__call__, f"_forward_{purpose}"

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(functools.partial(call, self), *args, **kwargs)

    purposes = (*getattr(kind, "_forward_purposes", ()), purpose)
    body = {"__call__": run, "_forward_purposes": purposes, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def _split(names: Sequence[str], call: Call, *args: Any, **kwargs: Any) -> Any:
    """Call a module for several rows: those with stacked states together, then each other row.

    `names` are its parameters.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    layer = given.get("cache")
    if not isinstance(layer, SplitLayer):
        return call(*args, **kwargs)
    layer.note_used()
    mask_names = [name for name in given if "mask" in name]
    if layer.flat is not None:
        # Called once, with the positions that the body was not shown.
        return call(**{**given, "cache": layer.flat, **dict.fromkeys(mask_names)})
    masks = layer.masks_for(next((given[name] for name in mask_names if given[name] is not None), None))
    spans = layer.spans

    def part(start: int, stop: int, *, cache: Any, mask: Any, is_row: bool) -> Any:
        own = {name: _part(value, start, stop, spans.token_count, is_row) for name, value in given.items()}
        return _parts_back(call(**{**own, "cache": cache, **dict.fromkeys(mask_names, mask)}), is_row)

    outputs, first = [], 0
    if layer.stacked is not None:
        first = spans.single_count
        outputs.append(part(0, first, cache=layer.stacked, mask=None, is_row=False))
    for i in range(first, len(layer.caches)):
        start = spans.starts[i]
        stop = start + spans.counts[i]
        outputs.append(part(start, stop, cache=layer.caches[i], mask=masks[i], is_row=True))
    return _joined(outputs)


def _part(value: Any, start: int, stop: int, total: int, is_row: bool) -> Any:
    """Return the part for tokens [start, stop) of an argument that has one entry per token."""
    if isinstance(value, mx.array) and value.shape == (total,) and mx.issubdtype(value.dtype, mx.integer):
        return value[start : start + 1] if is_row else value[start:stop]  # positions: the first one
    if not isinstance(value, mx.array) or value.ndim < 2 or value.shape[:2] != (total, 1):
        return value
    cut = value if (start, stop) == (0, total) else value[start:stop]
    if not is_row or stop - start == 1:
        return cut
    # [tokens, 1, 1, x] is [batch, heads, tokens, x], a factor for queries; else [batch, tokens, ...].
    return cut.swapaxes(0, 2) if value.ndim == 4 and value.shape[2] == 1 else cut.swapaxes(0, 1)


def _parts_back(output: Any, is_row: bool) -> Any:
    if isinstance(output, mx.array):
        return output.swapaxes(0, 1) if is_row and output.shape[1] > 1 else output
    if isinstance(output, (tuple, list)):
        return [_parts_back(part, is_row) for part in output]
    return output


def _joined(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, mx.array):
        return mx.concatenate(list(outputs), axis=0)
    if isinstance(first, list):
        return [_joined(parts) for parts in zip(*outputs, strict=True)]
    return first
