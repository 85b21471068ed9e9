"""Cache layout: how one model's caches are cut into regions of blocks and put back, class by class.

Each layer's cache, or each part of a CacheList, is one of three things: K/V of unlimited context,
cut at any token (kv); K/V of a sliding window, cut at any token still inside it (window); or a
state that is only known where the sequence stands (checkpoint); `cache_classes` says which. What is none
of the three is refused with `CacheUnsupported`.

Inference thread only. Regions are lazy until `evaluate`; cutting never changes a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import CacheClass, Part, class_of, leaf, parts_of
from icehouse_server.engine.kv_cache.held import Held
from icehouse_server.engine.kv_cache.opaque_state import CacheUnsupported
from icehouse_server.engine.kv_cache.regions import ArrayRegion
from icehouse_server.engine.kv_cache.restore import Restoring
from icehouse_server.engine.prefix_cache.tiers.ports import PlacedBlock

__all__ = ["CacheLayout", "CacheUnsupported", "Part"]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLayout:
    """The parts of one model's caches, layer by layer."""

    parts: tuple[Part, ...]
    block_token_count: int

    @classmethod
    def of(cls, caches: Sequence[Any], *, block_token_count: int) -> CacheLayout:
        """Read the layout off fresh or used single-sequence caches.

        Raises CacheUnsupported naming the class that can neither be cut nor held.
        """
        assert block_token_count >= 1, block_token_count
        return cls(tuple(parts_of(caches)), block_token_count)

    @property
    def needs_checkpoint(self) -> bool:
        """Some part cannot be cut: a sequence resumes only where a checkpoint was taken."""
        return any(part.kind is RegionKind.CHECKPOINT for part in self.parts)

    @property
    def window_token_count(self) -> int:
        """The longest sliding window in tokens, 0 if there is none."""
        return max((part.window_token_count for part in self.parts), default=0)

    @property
    def cuttable_inside(self) -> bool:
        """A match may end anywhere inside a block: no checkpoints, and no window shorter than a block."""
        windows = [part.window_token_count for part in self.parts if part.kind is RegionKind.WINDOW]
        return not self.needs_checkpoint and all(window >= self.block_token_count for window in windows)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Distinct cache class names in order of first appearance, parts of lists by their own name."""
        return tuple(dict.fromkeys(part.cache_class.name for part in self.parts))

    @property
    def signature(self) -> str:
        """Every part's name, class, kind, window and facts: part of the fingerprint, never parsed."""
        return ";".join(
            f"{p.name}:{p.cache_class.name}:{p.kind}:{p.window_token_count}:{','.join(map(str, p.facts))}"
            for p in self.parts
        )

    def window_start(self, token_count: int) -> int:
        """First token any window still holds at this length; blocks that end after it are needed."""
        return max(0, token_count - self.window_token_count)

    def token_count(self, caches: Sequence[Any]) -> int | None:
        """Return how many tokens the caches have seen; None when only checkpoints could tell."""
        ends = {store.end for _, store in self._held(caches, RegionKind.KV, RegionKind.WINDOW)}
        assert len(ends) <= 1, f"Layers disagree about the sequence's length: {sorted(ends)}"
        return ends.pop() if ends else None

    @property
    def kv_names(self) -> tuple[str, ...]:
        """Names of the tensors of the kv region, ascending."""
        return tuple(
            f"{part.name}.{suffix}"
            for part in self.parts
            if part.kind is RegionKind.KV
            for suffix in part.cache_class.suffixes
        )

    def kv_bytes_per_token(self, caches: Sequence[Any]) -> int:
        """Bytes one more token takes in the kv region; 0 while the caches are empty or have none."""
        return sum(
            array.nbytes // (array.shape[0] * array.shape[2])
            for _, store in self._held(caches, RegionKind.KV)
            for _, array in store.tensors
        )

    def cut_kv(self, caches: Sequence[Any], *, start: int, stop: int) -> ArrayRegion:
        """Cut tokens [start, stop) out of every layer of unlimited context."""
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part, store in self._held(caches, RegionKind.KV)
            for suffix, array in store.cut(start, stop)
        ]
        return ArrayRegion.of(RegionKind.KV, arrays)

    def cut_window(self, caches: Sequence[Any], *, start: int, stop: int) -> ArrayRegion:
        """Cut each window's last min(stop - start, window) tokens before `stop`, in temporal order.

        The caches must still hold them: a window passes by, so this is called soon after `stop`.
        """
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part, store in self._held(caches, RegionKind.WINDOW)
            for suffix, array in store.cut(max(start, stop - part.window_token_count), stop)
        ]
        return ArrayRegion.of(RegionKind.WINDOW, arrays)

    def cut_checkpoint(self, caches: Sequence[Any]) -> ArrayRegion:
        """Copy the whole state of the parts that cannot be cut, as it is at this very token.

        Raises CacheUnsupported when an unknown class keeps more than its state says.
        """
        arrays = [
            (f"{part.name}.{suffix}", array)
            for part in self.parts
            if part.kind is RegionKind.CHECKPOINT
            for suffix, array in part.cache_class.whole(_found(caches, part))
        ]
        return ArrayRegion.of(RegionKind.CHECKPOINT, arrays)

    def begin_restore(
        self,
        blocks: Sequence[PlacedBlock],
        *,
        token_count: int,
        make_caches: Callable[[], Sequence[Any]],
    ) -> Restoring:
        """Prepare caches that have seen `token_count` tokens.

        `Restoring.step` rebuilds one part per call, so that decoding sequences need not wait.
        Raises StorageError when the blocks do not cover the tokens or do not fit this model.
        """
        caches = list(make_caches())
        assert tuple(parts_of(caches)) == self.parts, "Caches of another model than the layout's"
        return Restoring(self.parts, caches, blocks, token_count=token_count)

    def restore(
        self,
        blocks: Sequence[PlacedBlock],
        *,
        token_count: int,
        make_caches: Callable[[], Sequence[Any]],
    ) -> list[Any]:
        """Do all of `begin_restore` at once and return evaluated caches."""
        restoring = self.begin_restore(blocks, token_count=token_count, make_caches=make_caches)
        while restoring.step():
            pass
        return restoring.caches

    def _held(self, caches: Sequence[Any], *kinds: RegionKind) -> Iterator[tuple[Part, Held]]:
        for part in self.parts:
            if part.kind in kinds:
                yield part, _held_of(caches, part)


def _found(caches: Sequence[Any], part: Part) -> Any:
    cache = leaf(caches, part.path)
    entry = class_of(cache)
    is_own = hasattr(cache, "cache_class") and entry.kind is part.kind
    assert is_own or _is_like(entry, part.cache_class), (part.name, part.cache_class.name, type(cache))
    return cache


def _is_like(entry: CacheClass, other: CacheClass) -> bool:
    return entry == other or (entry.is_plain and other.is_plain)


def _held_of(caches: Sequence[Any], part: Part) -> Held:
    cache = _found(caches, part)
    return class_of(cache).held(cache)
