"""Cache layout: how one model's caches are cut into regions of blocks and rebuilt from them, class by class.

Each layer's cache, or each member of a CacheList, is one of three things: K/V of unlimited context, which can
be cut at any token (kv); K/V of a sliding window, which can be cut at any token still inside it (window); or
a state, known only at the sequence's current token (checkpoint). `cache_classes` says which. Any other class
is refused with `CacheUnsupported`.

A rebuilt cache continues exactly as an uninterrupted one would, bit for bit: K/V layers get one array,
windows their last tokens in temporal order (as a prefill leaves them), and states their old values.

Inference thread only. Regions are lazy until `regions.compute`; cutting never changes a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import mlx.core as mx

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import Cache, CachePart, class_of, leaf, parts_of, put
from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS, ArrayRegion, TokenArrays
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, PlacedBlock
from icehouse_server.errors import Reason, StorageError


@dataclasses.dataclass(frozen=True, slots=True)
class TokenShape:
    """One tensor of a region, [1, heads, tokens, width], for blocks of any length."""

    name: str
    dtype: mx.Dtype
    head_count: int
    width: int
    window_token_count: int
    """0 for kv."""

    def of(self, token_count: int) -> tuple[int, ...]:
        """Return its shape in a block of this many tokens."""
        kept_count = min(token_count, self.window_token_count or token_count)
        return 1, self.head_count, kept_count, self.width


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """The parts of one model's caches, layer by layer."""

    parts: tuple[CachePart, ...]
    block_token_count: int

    @classmethod
    def of(cls, caches: Sequence[Cache], *, block_token_count: int) -> CacheLayout:
        """Read the layout from a sequence's caches, fresh or used.

        Raises CacheUnsupported, naming the class that can be neither cut nor copied whole.
        """
        assert block_token_count >= 1, block_token_count
        return cls(tuple(parts_of(caches)), block_token_count)

    @property
    def facts(self) -> CacheFacts:
        """What these caches allow. A match may end anywhere inside a block if no state needs a checkpoint and
        no window is shorter than a block."""
        kinds = {part.kind for part in self.parts}
        windows = [part.window_token_count for part in self.parts if part.kind is RegionKind.WINDOW]
        needs_checkpoint = RegionKind.CHECKPOINT in kinds
        return CacheFacts(
            has_kv=RegionKind.KV in kinds,
            cuttable_inside=not needs_checkpoint and all(w >= self.block_token_count for w in windows),
            needs_checkpoint=needs_checkpoint,
            window_token_count=max(windows, default=0),
            shortest_window_token_count=min(windows, default=0),
        )

    @property
    def kv_names(self) -> tuple[str, ...]:
        """Names of the tensors of the kv region, ascending."""
        return tuple(
            f"{part.name}.{suffix}"
            for part in self.parts
            if part.kind is RegionKind.KV
            for suffix in part.cache_class.suffixes
        )

    def kv_bytes_per_token(self, caches: Sequence[Cache]) -> int:
        """Bytes that one more token takes in the kv region; 0 if the caches are empty or have no kv."""
        return sum(
            array.nbytes // (array.shape[0] * array.shape[2])
            for _, tokens in self._tokens(caches, RegionKind.KV)
            for _, array in tokens.tensors
        )

    def token_shapes(self, kind: RegionKind, caches: Sequence[Cache]) -> tuple[TokenShape, ...]:
        """Return what the tensors of a kind are like, in the order of their names, read from used caches."""
        return tuple(
            TokenShape(
                f"{part.name}.{suffix}", array.dtype, array.shape[1], array.shape[3], part.window_token_count
            )
            for part, tokens in self._tokens(caches, kind)
            for suffix, array in tokens.tensors
        )

    def cut_tokens(self, kind: RegionKind, caches: Sequence[Cache], *, start: int, stop: int) -> ArrayRegion:
        """Cut tokens [start, stop) out of every layer of a kind; of a window, at most its last tokens before
        `stop`, in temporal order. The caches must still hold them, so cut windows soon after `stop`."""
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part, tokens in self._tokens(caches, kind)
            for suffix, array in tokens.cut(max(start, stop - (part.window_token_count or stop)), stop)
        ]
        return ArrayRegion.of(kind, arrays)

    def cut_checkpoint(self, caches: Sequence[Cache]) -> ArrayRegion:
        """Copy the whole current state of the parts that cannot be cut."""
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part in self.parts
            if part.kind is RegionKind.CHECKPOINT
            for suffix, array in part.cache_class.whole(_cache_of(caches, part))
        ]
        return ArrayRegion.of(RegionKind.CHECKPOINT, arrays)

    def _tokens(self, caches: Sequence[Cache], kind: RegionKind) -> Iterator[tuple[CachePart, TokenArrays]]:
        for part in self.parts:
            if part.kind is kind:
                cache = _cache_of(caches, part)
                yield part, class_of(cache).tokens(cache)


class CacheRebuild:
    """A rebuild in progress. `caches` is complete once `is_done`."""

    def __init__(
        self,
        parts: Sequence[CachePart],
        caches: list[Cache],
        blocks: Sequence[PlacedBlock],
        *,
        token_count: int,
    ) -> None:
        """Rebuild these `parts` of a new sequence's caches. Raises StorageError if the blocks do not cover
        its kv."""
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
            check_cover([block for block, _ in self._kv_blocks], token_count=token_count)

    @property
    def is_done(self) -> bool:
        return self._done_count == len(self._parts)

    @property
    def caches(self) -> list[Cache]:
        """The rebuilt caches, one per layer, computed or dispatched."""
        assert self.is_done, "The rebuild is not finished"
        return self._caches

    def next_part(self) -> list[mx.array]:
        """Assemble the next part, lazily; return the arrays that the caller must evaluate.

        Raises StorageError if a region lacks this part's tensors or they do not fit together.
        """
        part = self._parts[self._done_count]
        empty = leaf(self._caches, part.path)
        try:
            arrays = self._arrays_of(part)
            rebuilt = class_of(empty).rebuild(empty, arrays, token_count=self.token_count)
        except (KeyError, IndexError, ValueError) as error:
            raise _unusable(f"cannot rebuild {part.name} ({part.cache_class.name}): {error}") from error
        put(self._caches, part.path, rebuilt)
        self._done_count += 1
        return list(arrays.values())

    def _arrays_of(self, part: CachePart) -> dict[str, mx.array]:
        suffixes = part.cache_class.suffixes
        if part.kind is RegionKind.KV:
            return {suffix: self._join_kv(f"{part.name}.{suffix}") for suffix in suffixes}
        if part.kind is RegionKind.WINDOW:
            count = min(self.token_count, part.window_token_count)
            return {suffix: self._join_window(f"{part.name}.{suffix}", count) for suffix in suffixes}
        last = [block for block in self._blocks if block.end_token_index == self.token_count]
        checkpoints = _blocks_with(last, RegionKind.CHECKPOINT)
        if not checkpoints:
            raise _unusable(f"there is no checkpoint at token {self.token_count}")
        prefix = f"{part.name}."
        # New array objects: assigning into a cache must never reach a block's own array.
        return {
            name.removeprefix(prefix): mx.contiguous(array)
            for name, array in checkpoints[0][1].items()
            if name.startswith(prefix)
        }

    def _join_kv(self, name: str) -> mx.array:
        """Return [1, heads, tokens, width]."""
        pieces: list[mx.array] = []
        for block, arrays in self._kv_blocks:
            wanted = min(block.end_token_index, self.token_count) - block.start_token_index
            if wanted <= 0:
                break
            array = arrays[name]
            if array.shape[TOKEN_AXIS] != block.token_count:
                raise ValueError(
                    f"{name} holds {array.shape[TOKEN_AXIS]} tokens of a block of {block.token_count}"
                )
            pieces.append(array[:, :, :wanted])
        return _concatenate(name, pieces)

    def _join_window(self, name: str, count: int) -> mx.array:
        """Return the last `count` tokens, [1, heads, count, width], in temporal order."""
        pieces: list[mx.array] = []
        start, stop = self.token_count - count, self.token_count
        for block, arrays in reversed(self._window_blocks):
            if stop == start:
                break
            array = arrays[name]
            array_start = block.end_token_index - array.shape[TOKEN_AXIS]
            if block.end_token_index < stop or array_start >= stop:
                continue
            low = max(array_start, start)
            pieces.append(array[:, :, low - array_start : stop - array_start])
            stop = low
        if stop != start:
            raise ValueError(f"{name} lacks tokens [{start}, {stop}) of its window")
        return _concatenate(name, pieces[::-1])


def check_cover(blocks: Sequence[PlacedBlock], *, token_count: int) -> None:
    """Raise StorageError unless these blocks are contiguous from token 0 to `token_count`."""
    covered = 0
    for block in blocks:
        if block.start_token_index != covered:
            raise _unusable(f"kv starts at token {block.start_token_index} where {covered} is next")
        covered = block.end_token_index
    if covered < token_count:
        raise _unusable(f"kv ends at token {covered} of {token_count}")


def _unusable(message: str) -> StorageError:
    """Return the error for blocks from which no caches can be rebuilt."""
    return StorageError(Reason.STORE_UNUSABLE, f"The cached prefix is not usable: {message}")


def _blocks_with(
    blocks: Sequence[PlacedBlock], kind: RegionKind
) -> list[tuple[PlacedBlock, dict[str, mx.array]]]:
    """Return the blocks that have arrays of this kind, with the arrays by name; kv in pages has none."""
    regions = ((block, block.regions.get(kind)) for block in blocks)
    return [(block, dict(region.arrays)) for block, region in regions if isinstance(region, ArrayRegion)]


def _concatenate(name: str, pieces: Sequence[mx.array]) -> mx.array:
    """Join along the token axis without ever promoting a dtype; the result is a new, compact array."""
    shapes = {(str(piece.dtype), *piece.shape[:TOKEN_AXIS], piece.shape[-1]) for piece in pieces}
    if len(shapes) > 1 or pieces[0].ndim != 4:
        raise ValueError(f"{name} does not fit together: {sorted(map(str, shapes))}")
    return mx.concatenate(list(pieces), axis=TOKEN_AXIS) if len(pieces) > 1 else mx.contiguous(pieces[0])


def _cache_of(caches: Sequence[Cache], part: CachePart) -> Cache:
    """Return the cache of this part: of its class, or a paged one in its place."""
    cache = leaf(caches, part.path)
    entry, expected = class_of(cache), part.cache_class
    is_paged = hasattr(cache, "cache_class") and entry.kind is part.kind
    is_alike = entry == expected or (entry.is_plain and expected.is_plain)
    assert is_paged or is_alike, (part.name, expected.name, type(cache))
    return cache
