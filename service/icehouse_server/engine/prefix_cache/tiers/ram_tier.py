"""RAM tier: blocks on the device within a byte budget, least recently used first out.

Inference thread only. A chain is touched from its end to its beginning, so that a block is never
older than one that follows it and tails of chains go before heads without a tree walk. Pinned blocks
stand beside that order, so that whoever looks for victims does not pass them each time.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.domain.cache_stats import TierStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.block_log import BlockLog, KvTier, Left
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.storage.tier_counts import TierCounts

_Owner = BlockHash | None
_Order = collections.OrderedDict[BlockHash, Entry]


def add_bytes(account: collections.Counter[_Owner], owner: _Owner, change_bytes: int) -> None:
    """Change what an account says of an owner; one with nothing is not kept."""
    account[owner] += change_bytes
    if not account[owner]:
        del account[owner]


class RamTier:
    """Keeps account of which entries hold arrays. Eviction is decided by the caller, who may spill."""

    def __init__(self, *, limit_bytes: int, block_token_count: int, log: BlockLog) -> None:
        self.limit_bytes = limit_bytes
        self._log = log
        self.used_bytes = 0
        self.stats = TierStats()
        """What left the tier since start."""
        self.used_by: collections.Counter[_Owner] = collections.Counter()
        """Bytes by the root that owns them."""
        self.pinned_by: collections.Counter[_Owner] = collections.Counter()
        """Of these, the bytes of pinned blocks."""
        self._block_token_count = block_token_count
        self._order: _Order = collections.OrderedDict()
        """What may go, least recently used first."""
        self._orders: dict[_Owner, _Order] = {}
        """The same by the root that owns it."""
        self._pinned: dict[BlockHash, Entry] = {}
        self._counts = TierCounts(lambda: chain(self._order, self._pinned))

    def __len__(self) -> int:
        return len(self._order) + len(self._pinned)

    def __iter__(self) -> Iterator[Entry]:
        """Yield all blocks: least recently used first, pinned ones behind them."""
        return chain(self._order.values(), self._pinned.values())

    def latest(self, limit: int) -> Iterator[Entry]:
        """Yield at most so many blocks: pinned ones, then the most recently used."""
        return islice(chain(self._pinned.values(), reversed(self._order.values())), limit)

    @property
    def pinned(self) -> Collection[Entry]:
        """The pinned blocks."""
        return self._pinned.values()

    def put(self, entry: Entry, regions: Mapping[RegionKind, Region]) -> None:
        """Add regions to an entry; the caller has made space."""
        before = entry.ram_bytes
        is_new = entry.hash not in self._order and entry.hash not in self._pinned
        had_none = not entry.ram
        entry.ram.update(regions)
        if had_none and self._log.is_on:
            self._log.note(entry.came_to(KvTier.RAM))
        self._account(entry, entry.ram_bytes - before)
        if is_new:
            self._counts.add(
                (entry.hash,),
                token_count=entry.token_count,
                tail_count=self._is_tail(entry),
                pinned_count=entry.is_pinned,
            )
        self._take_out(entry)
        self._take_in(entry)

    def touch(self, chain: Sequence[Entry], now: float) -> None:
        """Note that a chain was used, its first block last."""
        for entry in reversed(chain):
            entry.last_used_time = now
            if entry.hash in self._order:
                self._order.move_to_end(entry.hash)
                self._orders[entry.owner].move_to_end(entry.hash)

    def set_pinned(self, entry: Entry, *, pinned: bool) -> None:
        """Pin a block, or have it go again; then it is the most recently used one."""
        if entry.is_pinned is pinned:
            return
        is_here = self._take_out(entry)
        entry.is_pinned = pinned
        if is_here:
            self._counts.note_pinned(is_pinned=pinned)
            add_bytes(self.pinned_by, entry.owner, entry.ram_bytes if pinned else -entry.ram_bytes)
            self._take_in(entry)

    def set_owner(self, entry: Entry, owner: BlockHash) -> None:
        """Have a block belong to another root."""
        is_here = self._take_out(entry)
        self._account(entry, -entry.ram_bytes)
        entry.owner = owner
        self._account(entry, entry.ram_bytes)
        if is_here:
            self._take_in(entry)

    def oldest(self, owners: Iterable[_Owner]) -> Iterator[Entry]:
        """Yield what may go of these owners, least recently used first."""
        orders = (self._orders[owner].values() for owner in owners if owner in self._orders)
        return heapq.merge(*orders, key=attrgetter("last_used_time"))

    def candidates(self) -> Iterator[Entry]:
        """Yield what may go, least recently used first."""
        return iter(self._order.values())

    def victims(self, needed_bytes: int, *, spared: Collection[BlockHash] = ()) -> list[Entry] | None:
        """Return the entries to evict so that `needed_bytes` fit, oldest first.

        None when even all that are neither pinned nor spared would not make that space.
        """
        excess = self.used_bytes + needed_bytes - self.limit_bytes
        chosen: list[Entry] = []
        for entry in self.candidates():
            if excess <= 0:
                break
            if entry.hash not in spared:
                chosen.append(entry)
                excess -= entry.ram_bytes
        return chosen if excess <= 0 else None

    def drop(self, entry: Entry, *, is_purge: bool = False) -> None:
        """Let go of an entry's arrays and count it as evicted, or as purged."""
        size_bytes = entry.ram_bytes
        if not self.forget(entry):
            return
        if is_purge:
            self.stats.purged_block_total += 1
        else:
            self.stats.evicted_block_total += 1
            self.stats.evicted_byte_total += size_bytes

    def forget(self, entry: Entry) -> bool:
        """Let go of an entry's arrays, which another block stands for; False when it had none here."""
        if not self._take_out(entry):
            return False
        self._account(entry, -entry.ram_bytes)
        self._counts.remove(
            entry.hash,
            token_count=entry.token_count,
            is_tail=self._is_tail(entry),
            is_pinned=entry.is_pinned,
        )
        entry.ram.clear()
        if self._log.is_on:
            self._log.note(Left(KvTier.RAM, entry.hash))
        return True

    def snapshot(self, *, now: float) -> TierStats:
        """Return the tier's statistics."""
        counted = self._counts.fill(self.stats, used_time=self._used_time, now=now)
        counted.size_bytes, counted.limit_bytes = self.used_bytes, self.limit_bytes
        return counted

    def _used_time(self, name: BlockHash) -> float:
        return (self._order.get(name) or self._pinned[name]).last_used_time

    def _is_tail(self, entry: Entry) -> bool:
        return entry.token_count < self._block_token_count

    def _account(self, entry: Entry, change_bytes: int) -> None:
        self.used_bytes += change_bytes
        add_bytes(self.used_by, entry.owner, change_bytes)
        if entry.is_pinned:
            add_bytes(self.pinned_by, entry.owner, change_bytes)

    def _take_in(self, entry: Entry) -> None:
        if entry.is_pinned:
            self._pinned[entry.hash] = entry
        else:
            self._order[entry.hash] = entry
            self._orders.setdefault(entry.owner, collections.OrderedDict())[entry.hash] = entry

    def _take_out(self, entry: Entry) -> bool:
        if self._pinned.pop(entry.hash, None) is not None:
            return True
        if self._order.pop(entry.hash, None) is None:
            return False
        own = self._orders[entry.owner]
        del own[entry.hash]
        if not own:
            del self._orders[entry.owner]
        return True
