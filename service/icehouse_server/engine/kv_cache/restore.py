"""Restore: caches put back together from regions, a part a step, in the class the model made.

The result continues as an uninterrupted cache would, bit for bit: K/V layers get one array, windows
get their last tokens in temporal order (which is what a prefill leaves behind), states come back as
they were. Inference thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import Part, class_of, leaf, put
from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS, ArrayRegion
from icehouse_server.engine.prefix_cache.tiers.ports import PlacedBlock
from icehouse_server.errors import Reason, StorageError


class Restoring:
    """A restore under way. `caches` is complete once `step`, or `dispatch`, has returned False."""

    def __init__(
        self, parts: Sequence[Part], caches: list[Any], blocks: Sequence[PlacedBlock], *, token_count: int
    ) -> None:
        assert token_count >= 1, token_count
        self._parts = parts
        self._caches = caches
        self._blocks = blocks
        self.token_count = token_count
        """Tokens that the caches will hold."""
        self._done_count = 0
        self._kv_blocks = _blocks_with(blocks, RegionKind.KV)
        self._window_blocks = _blocks_with(blocks, RegionKind.WINDOW)
        if any(part.kind is RegionKind.KV for part in parts):
            self._check_kv_cover()

    @property
    def caches(self) -> list[Any]:
        """The restored caches, one a layer, computed or on their way."""
        assert self._is_done, "The restore is not finished"
        return self._caches

    def step(self) -> bool:
        """Rebuild and evaluate the next part; tell whether more are left.

        Raises StorageError when a region lacks this part's tensors or they do not fit together.
        """
        if not self._is_done:
            mx.eval(self._rebuild_next())
        return not self._is_done

    def dispatch(self, *, limit_bytes: int) -> bool:
        """Rebuild parts until they hold so many bytes, one at least, and have all computed behind what the
        device is at; wait for nothing. Returns and raises what `step` does."""
        arrays: list[mx.array] = []
        size_bytes = 0
        while not self._is_done and (not arrays or size_bytes < limit_bytes):
            arrays += (rebuilt := self._rebuild_next())
            size_bytes += sum(array.nbytes for array in rebuilt)
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        return not self._is_done

    @property
    def _is_done(self) -> bool:
        return self._done_count == len(self._parts)

    def _rebuild_next(self) -> list[mx.array]:
        """Put the next part together, lazily; return what is to be computed."""
        part = self._parts[self._done_count]
        empty = leaf(self._caches, part.path)
        try:
            found = self._arrays_of(part)
            rebuilt = class_of(empty).rebuild(empty, found, token_count=self.token_count)
        except (KeyError, IndexError, ValueError) as error:
            raise _unusable(f"cannot rebuild {part.name} ({part.cache_class.name}): {error}") from error
        put(self._caches, part.path, rebuilt)
        self._done_count += 1
        return list(found.values())

    def _arrays_of(self, part: Part) -> dict[str, mx.array]:
        suffixes = part.cache_class.suffixes
        if part.kind is RegionKind.KV:
            return {suffix: self._join_kv(f"{part.name}.{suffix}") for suffix in suffixes}
        if part.kind is RegionKind.WINDOW:
            kept = min(self.token_count, part.window_token_count)
            return {suffix: self._join_window(f"{part.name}.{suffix}", kept) for suffix in suffixes}
        ends = [block for block in self._blocks if block.end_token_index == self.token_count]
        found = _blocks_with(ends, RegionKind.CHECKPOINT)
        if not found:
            raise _unusable(f"there is no checkpoint at token {self.token_count}")
        prefix = f"{part.name}."
        # New array objects: assigning into a cache must never reach a block's own array.
        return {
            name.removeprefix(prefix): mx.contiguous(array)
            for name, array in found[0][1].items()
            if name.startswith(prefix)
        }

    def _check_kv_cover(self) -> None:
        """Raise StorageError unless blocks from token 0 on reach the end."""
        covered = 0
        for block, _ in self._kv_blocks:
            if block.start_token_index != covered:
                raise _unusable(f"kv starts at token {block.start_token_index} where {covered} is next")
            covered = block.end_token_index
        if covered < self.token_count:
            raise _unusable(f"kv ends at token {covered} of {self.token_count}")

    def _join_kv(self, name: str) -> mx.array:
        """Return [1, heads, tokens, width]."""
        pieces: list[mx.array] = []
        for block, arrays in self._kv_blocks:
            wanted = min(block.end_token_index, self.token_count) - block.start_token_index
            if wanted <= 0:
                break
            pieces.append(_of_length(name, arrays[name], block.token_count)[:, :, :wanted])
        return _concatenate(name, pieces)

    def _join_window(self, name: str, kept: int) -> mx.array:
        """Return the last `kept` tokens, [1, heads, kept, width], in temporal order."""
        pieces: list[mx.array] = []
        stop = self.token_count
        for block, arrays in reversed(self._window_blocks):
            if stop == self.token_count - kept:
                break
            array = arrays[name]
            held_from = block.end_token_index - array.shape[TOKEN_AXIS]
            if block.end_token_index < stop or held_from >= stop:
                continue
            low = max(held_from, self.token_count - kept)
            pieces.append(array[:, :, low - held_from : stop - held_from])
            stop = low
        if stop != self.token_count - kept:
            raise ValueError(f"{name} lacks tokens [{self.token_count - kept}, {stop}) of its window")
        return _concatenate(name, pieces[::-1])


def _blocks_with(
    blocks: Sequence[PlacedBlock], kind: RegionKind
) -> list[tuple[PlacedBlock, dict[str, mx.array]]]:
    """Return the blocks that have such arrays, and these by name. KV may lie in pages: then they are none."""
    found = ((block, block.regions.get(kind)) for block in blocks)
    return [(block, dict(region.arrays)) for block, region in found if isinstance(region, ArrayRegion)]


def _concatenate(name: str, pieces: Sequence[mx.array]) -> mx.array:
    """Join along the token axis without ever promoting a dtype; the result is a new, compact array."""
    _check_alike(name, pieces)
    return mx.concatenate(list(pieces), axis=TOKEN_AXIS) if len(pieces) > 1 else mx.contiguous(pieces[0])


def _check_alike(name: str, pieces: Sequence[mx.array]) -> None:
    shapes = {(str(piece.dtype), *piece.shape[:TOKEN_AXIS], piece.shape[-1]) for piece in pieces}
    if len(shapes) > 1 or pieces[0].ndim != 4:
        raise ValueError(f"{name} does not fit together: {sorted(map(str, shapes))}")


def _of_length(name: str, array: mx.array, token_count: int) -> mx.array:
    if array.shape[TOKEN_AXIS] != token_count:
        raise ValueError(f"{name} holds {array.shape[TOKEN_AXIS]} tokens of a block of {token_count}")
    return array


def _unusable(message: str) -> StorageError:
    return StorageError(Reason.STORE_UNUSABLE, f"The cached prefix is not usable: {message}")
