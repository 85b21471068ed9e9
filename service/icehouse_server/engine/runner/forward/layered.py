"""Layered chunk: prompt tokens that go through some of the layers in one pass, through the next ones in the
pass after it ("layered prefill", arXiv:2510.08055).

A short chunk through all layers reads all that its prompt holds for a few tokens; so much time, spent on one
or two layers, takes many tokens through them and reads that once for all. Until the last layer the row stays
what it was: the chunk's layers write into caches forked from the row's, which become the row's with the last
one, so that whoever looks at it meanwhile, parks it or lets it go sees no half of a chunk. Inference thread
only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.engine.kv_cache.cache_classes import Cache
from icehouse_server.engine.kv_cache.rewind import forked
from icehouse_server.engine.runner.forward.model_seam import become
from icehouse_server.engine.runner.forward.row import Row
from icehouse_server.engine.runner.forward.ways import NotSplittable


class LayeredChunk:
    """Tokens of one row on their way through the layers. Dropped before the last one it leaves no trace."""

    def __init__(self, row: Row, token_ids: Sequence[int]) -> None:
        """At least two tokens: of one, some caches are written in place, the row's own among them."""
        assert len(token_ids) >= 2, "A chunk of one token goes through all layers"
        self.row = row
        self.token_ids = token_ids
        self.layer = 0
        """The next one."""
        self.hidden: mx.array | None = None
        """[tokens, 1, width], what the next layer is given; none before the first one."""
        self._begin = row.token_count
        self._forks = forked(row.raw_caches)
        self._written: set[int] = set()
        """Places of the caches whose layers are behind it."""

    @property
    def caches(self) -> list[Cache]:
        """What is shown to the model: of layers that ran, forks that stand where those of the others do.
        Masks are made of them, nothing is written."""
        shown = list(self._forks)
        for place in self._written:
            (shown[place],) = forked([self.row.raw_caches[place]])
        return shown

    def note_written(self, place: int) -> None:
        """Note that a cache's layer ran."""
        self._written.add(place)

    def fork(self, place: int) -> Cache:
        return self._forks[place]

    def end(self) -> None:
        """Make the caches the row's, behind the last layer."""
        assert self.row.token_count == self._begin, "The row went on while a chunk was on its way"
        self.row.take_over(self._forks, count=len(self.token_ids))


class LayerWindow:
    """Lets a model's call run some of its layers: the others hand on what they are given.

    What comes before the first of them and behind the last one is built and never computed.
    """

    def __init__(self, model: Any) -> None:
        """Raises NotSplittable where layers are not to be told apart."""
        layers = list(model.layers)
        if len({id(layer) for layer in layers}) < len(layers):
            raise NotSplittable("a layer comes twice")
        self.count = len(layers)
        self._first = self._last = 0
        self._is_open = False
        self._given: mx.array | None = None
        self._told: mx.array | None = None
        for number, layer in enumerate(layers):
            become(layer, "window", _window_call)
            object.__setattr__(layer, "_forward_window", (self, number))

    def run(self, call: Callable[[], Any], *, first: int, last: int, hidden: mx.array | None) -> mx.array:
        """Call the model with layers [first, last), the first of which is given `hidden`; return what the
        last one gives."""
        assert 0 <= first < last <= self.count, (first, last, self.count)
        self._first, self._last, self._given = first, last, hidden
        self._is_open = True
        try:
            call()
        finally:
            told, self._told = self._told, None
            self._is_open, self._given = False, None
        if told is None:
            raise NotSplittable(f"layer {last - 1} was not called")
        return told

    def through(self, number: int, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return what a layer gives, which is called with hidden states first."""
        if not args or not isinstance(args[0], mx.array):
            raise NotSplittable("a layer is not called with hidden states first")
        if not self._first <= number < self._last:
            return args[0]
        given = self._given if number == self._first and self._given is not None else args[0]
        output = call(given, *args[1:])
        if not isinstance(output, mx.array) or output.shape != given.shape:
            raise NotSplittable("a layer gives more than hidden states")
        if number == self._last - 1:
            self._told = output
        return output

    @property
    def is_open(self) -> bool:
        return self._is_open


def _window_call(call: Callable[..., Any], purpose: str) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        window, number = self._forward_window
        if not window.is_open:
            return call(self, *args, **kwargs)
        return window.through(number, functools.partial(call, self, **kwargs), args)

    return run
