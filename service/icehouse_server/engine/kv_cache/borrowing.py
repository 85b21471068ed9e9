"""Keys and values that are read where the prefix cache keeps them, by every row that begins with them.

A restore that copies takes 100 ms for 200 MB on a CPU, mostly for fresh pages, and eight rows on one system
prompt then read 1.6 GB in each pass instead of 0.2. So there a restored row borrows: its first tokens are
arrays of blocks in RAM, and only what it adds is its own. Blocks that are dropped meanwhile stay until the
last row that borrows them ends. Inference thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.engine.kv_cache.held import Held, HeldSegments, keys_and_values, none_held
from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS


class Segments:
    """An array that lies in pieces along the token axis, [1, heads, tokens, size] each. Never written."""

    __slots__ = ("pieces", "shape")

    def __init__(self, pieces: Sequence[mx.array]) -> None:
        first = pieces[0]
        self.pieces = tuple(pieces)
        self.shape = (*first.shape[:TOKEN_AXIS], sum(p.shape[TOKEN_AXIS] for p in pieces), first.shape[-1])

    @property
    def dtype(self) -> mx.Dtype:
        return self.pieces[0].dtype


class BorrowingCache:
    """Does what a plain cache does; its first tokens are somebody else's.

    Only `append` leaves them there. Whoever knows nothing of it and asks for keys or values has all copied
    into arrays of its own, from then on.
    """

    def __init__(self, lent: Sequence[tuple[mx.array, mx.array]], own: Any) -> None:
        """`lent`: keys and values of consecutive tokens from the first one on, evaluated. `own`: an empty
        plain cache, for those to come."""
        self._lent = tuple(lent)
        self._own = own
        self.lent_token_count = sum(keys.shape[TOKEN_AXIS] for keys, _ in lent)

    def __copy__(self) -> BorrowingCache:
        return BorrowingCache(self._lent, copy.copy(self._own))

    @property
    def offset(self) -> int:
        return self.lent_token_count + int(self._own.offset)

    @offset.setter
    def offset(self, token_count: int) -> None:
        assert token_count >= self.lent_token_count, "What is lent is not taken back"
        self._own.offset = token_count - self.lent_token_count

    def go_on(self, keys: mx.array, values: mx.array, *, token_count: int) -> None:
        """Take arrays, [1, heads, room, size], that hold the next so many tokens, for its own."""
        assert self._own.empty(), "It has arrays of its own already"
        self._own.keys, self._own.values, self._own.offset = keys, values, token_count

    def append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add tokens, [1, heads, tokens, size]; return all keys and all values, in `Segments`."""
        own_keys, own_values = self._own.update_and_fetch(keys, values)
        if not self._lent:
            return own_keys, own_values
        lent_keys, lent_values = zip(*self._lent, strict=True)
        return Segments((*lent_keys, own_keys)), Segments((*lent_values, own_values))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        fetched: tuple[Any, Any] = self._whole().update_and_fetch(keys, values)
        return fetched

    def keys_and_values(self) -> tuple[Any, Any]:
        fetched: tuple[Any, Any] = self._whole().keys_and_values()
        return fetched

    @property
    def keys(self) -> mx.array:
        array: mx.array = self._whole().keys
        return array

    @keys.setter
    def keys(self, array: mx.array | None) -> None:
        self._let_go().keys = array

    @property
    def values(self) -> mx.array:
        array: mx.array = self._whole().values
        return array

    @values.setter
    def values(self, array: mx.array | None) -> None:
        self._let_go().values = array

    @property
    def state(self) -> Any:
        """What passes write to."""
        return () if self._own.empty() else self._own.state

    @property
    def nbytes(self) -> int:
        """Of what is its own."""
        return int(self._own.nbytes)

    def empty(self) -> bool:
        return not self.offset

    def trim(self, count: int) -> int:
        return int(self._own.trim(count))

    def make_mask(self, N: int, **asked: Any) -> Any:
        whole = copy.copy(self._own)
        whole.offset = self.offset
        return whole.make_mask(N, **asked)

    def make_room(self, token_count: int) -> None:
        """Have the arrays of its own grow, when they do, to hold the rest of so many tokens."""
        self._own.step = max(1, token_count - self.offset)

    @property
    def room_token_count(self) -> int:
        own = 0 if self._own.empty() else int(self._own.keys.shape[TOKEN_AXIS])
        return self.lent_token_count + own

    def held(self) -> Held | HeldSegments:
        """Describe where its tokens lie."""
        segments, end = [], 0
        for keys, values in self._lent:
            end += keys.shape[TOKEN_AXIS]
            segments.append(Held((("k", keys), ("v", values)), 0, keys.shape[TOKEN_AXIS], end))
        if self._own.offset:
            segments.append(Held(keys_and_values(self._own), 0, self._own.offset, self.offset))
        return HeldSegments(tuple(segments)) if segments else none_held()

    def _whole(self) -> Any:
        """Return a cache of its own with everything in it, copied the first time."""
        if self._lent:
            own, pieces = self._own, list(self._lent)
            if own.offset:
                pieces.append(own.keys_and_values())
            keys, values = zip(*pieces, strict=True)
            own.keys = mx.concatenate(list(keys), axis=TOKEN_AXIS)
            own.values = mx.concatenate(list(values), axis=TOKEN_AXIS)
        return self._let_go()

    def _let_go(self) -> Any:
        """Return a cache of its own that has all tokens, or is about to be given them."""
        self._own.offset = self.offset
        self._lent, self.lent_token_count = (), 0
        return self._own
