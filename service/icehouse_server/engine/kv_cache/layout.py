"""Cache layout: how one model's caches are cut into regions of blocks, class by class.

Each layer's cache, or each member of a CacheList, is one of three things: K/V of unlimited context, cut at
any token (kv); K/V of a sliding window, cut at any token still inside it (window); or a state that is known
only at the sequence's current token (checkpoint). `cache_classes` says which. Any other class is refused
with `CacheUnsupported`.

Inference thread only. Regions are lazy until `regions.compute`; cutting never changes a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import Cache, CachePart, class_of, leaf, parts_of
from icehouse_server.engine.kv_cache.rebuild import CacheRebuild
from icehouse_server.engine.kv_cache.regions import ArrayRegion, TokenArrays
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """The parts of one model's caches, layer by layer."""

    parts: tuple[CachePart, ...]
    block_token_count: int

    @classmethod
    def of(cls, caches: Sequence[Cache], *, block_token_count: int) -> CacheLayout:
        """Read the layout from a sequence's caches, fresh or used.

        Raises CacheUnsupported naming the class that can be neither cut nor copied whole.
        """
        assert block_token_count >= 1, block_token_count
        return cls(tuple(parts_of(caches)), block_token_count)

    @property
    def has_kv(self) -> bool:
        return any(part.kind is RegionKind.KV for part in self.parts)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether some part cannot be cut: a sequence resumes only where a checkpoint was taken."""
        return any(part.kind is RegionKind.CHECKPOINT for part in self.parts)

    @property
    def window_token_counts(self) -> list[int]:
        """Lengths of the sliding windows, one for each layer that has one."""
        return [part.window_token_count for part in self.parts if part.kind is RegionKind.WINDOW]

    @property
    def cuttable_inside(self) -> bool:
        """Whether a match may end anywhere inside a block: no checkpoints, no window shorter than a block."""
        is_long = all(window >= self.block_token_count for window in self.window_token_counts)
        return is_long and not self.needs_checkpoint

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
        """Bytes one more token takes in the kv region; 0 while the caches are empty or have none."""
        return sum(
            array.nbytes // (array.shape[0] * array.shape[2])
            for _, tokens in self._tokens(caches, RegionKind.KV)
            for _, array in tokens.tensors
        )

    def cut_tokens(self, kind: RegionKind, caches: Sequence[Cache], *, start: int, stop: int) -> ArrayRegion:
        """Cut tokens [start, stop) out of every layer of a kind; of a window at most its last ones before
        `stop`, in temporal order. The caches must still have them, so cut windows soon after `stop`."""
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part, tokens in self._tokens(caches, kind)
            for suffix, array in tokens.cut(max(start, stop - (part.window_token_count or stop)), stop)
        ]
        return ArrayRegion.of(kind, arrays)

    def cut_checkpoint(self, caches: Sequence[Cache]) -> ArrayRegion:
        """Copy the whole state of the parts that cannot be cut, as it is now. Raises CacheUnsupported."""
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part in self.parts
            if part.kind is RegionKind.CHECKPOINT
            for suffix, array in part.cache_class.whole(_cache_of(caches, part))
        ]
        return ArrayRegion.of(RegionKind.CHECKPOINT, arrays)

    def begin_rebuild(
        self, blocks: Sequence[PlacedBlock], caches: list[Cache], *, token_count: int
    ) -> CacheRebuild:
        """Prepare to fill fresh caches of this model with their first `token_count` tokens.

        Raises StorageError when the blocks do not cover the tokens.
        """
        assert tuple(parts_of(caches)) == self.parts, "Caches of another model than the layout's"
        return CacheRebuild(self.parts, caches, blocks, token_count=token_count)

    def _tokens(self, caches: Sequence[Cache], kind: RegionKind) -> Iterator[tuple[CachePart, TokenArrays]]:
        for part in self.parts:
            if part.kind is kind:
                cache = _cache_of(caches, part)
                yield part, class_of(cache).tokens(cache)


def _cache_of(caches: Sequence[Cache], part: CachePart) -> Cache:
    """Return the cache of this part, of its class or of a paged one that stands for it."""
    cache = leaf(caches, part.path)
    entry, expected = class_of(cache), part.cache_class
    is_paged = hasattr(cache, "cache_class") and entry.kind is part.kind
    is_alike = entry == expected or (entry.is_plain and expected.is_plain)
    assert is_paged or is_alike, (part.name, expected.name, type(cache))
    return cache
