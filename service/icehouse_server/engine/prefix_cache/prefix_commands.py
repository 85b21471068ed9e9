"""Commands to the prefix cache from outside a request: explain, pin, evict, verify, list, count.

Inference thread only. A command that needs the storage thread is answered when that thread has reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_commands import (
    AdoptBlock,
    BeginImport,
    BeginListing,
    BlockTokens,
    CacheAnswer,
    CacheCommand,
    ContinueListing,
    EndSession,
    EvictBlocks,
    EvictReport,
    Explain,
    ExportListing,
    KnownBlocks,
    KnownTokens,
    ListExport,
    ListKnown,
    ListRecent,
    ListStored,
    Pin,
    PinReport,
    ReadBlock,
    ReadTokens,
    RecentBlock,
    RecentBlocks,
    StoredBlocks,
    Unpin,
    Verify,
    VerifyReport,
)
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import CacheScope
from icehouse_server.engine.core.mailbox import Command
from icehouse_server.engine.prefix_cache.exchange import CacheExchange
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Awaited, Steps
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason, StorageError
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import ColdTier, StorageFailure, StorageTrouble, Ticket

_Result = TypeVar("_Result")
_BUSY_RETRY_S = 1.0
_EARLY_LIMIT = 256
"""Commands that may wait for the first inventory."""
_SLICE_COUNT = 256
"""Blocks in a slice of a listing; the log has space for that many changes."""
_STATS_S = 1.0
"""How long to wait for the storage thread's counters; after that its last report is used."""
_STORAGE_ORDERS = (Pin, Unpin, EvictBlocks, ListStored, Verify, ReadBlock, AdoptBlock)


class CacheCommands:
    """Carries out commands on one prefix cache."""

    def __init__(self, cache: PrefixCache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._waits = cache.waits
        self._exchange = CacheExchange(cache)
        self._early_count = 0
        """Commands that wait for the first inventory."""
        self._end: IcehouseError | None = None
        """Why the engine is ending; None until then."""
        self.listing_slice_count = _SLICE_COUNT
        self._listing: Iterator[int] = iter(())
        """Advanced when the listener has taken the last slice, so that a step writes at most one."""
        self._last_stats: CacheStats | None = None
        """The storage thread's counters, as last reported."""

    def submit(self, message: Command) -> None:
        """Carry out a command once the content of the SSD is known: "evict all", say, must include it."""
        self._waits.follow(self._carried_out(message.command), message.reply)

    def fail_early(self, error: IcehouseError) -> None:
        """Answer the commands that wait for the inventory: the engine ends before it came."""
        self._end = error
        self._waits.give_up_inventory()

    def query(self, reply: Callable[[CacheStats], None]) -> None:
        """Call `reply` with all counters; if the storage thread does not answer, with its last report."""
        self._waits.follow(self._stats(), reply)

    def _stats(self) -> Steps[CacheStats]:
        storage = self._cache.storage
        ticket = None if storage is None or self._waits.is_stalled else storage.stats()
        outcome = None if ticket is None else (yield Awaited(ticket, limit_s=_STATS_S))
        if isinstance(outcome, CacheStats):
            self._last_stats = outcome
        return self._cache.stats(None if self._cache.storage is None else self._last_stats)

    def _carried_out(self, command: CacheCommand) -> Steps[CacheAnswer | IcehouseError]:
        try:
            if self._cache.is_inventory_due:
                has_come = yield from self._inventory_comes()
                if self._end is not None:
                    return self._end
                if not has_come:
                    if isinstance(command, Explain):
                        return self._cache.explain(command)
                    raise _unanswered()
            if not self._cache.is_supported:
                raise IcehouseError(Reason.CACHE_UNSUPPORTED, self._cache.facts.unsupported_detail)
            return (yield from self._answer(command))
        except IcehouseError as error:
            return error

    def _inventory_comes(self) -> Steps[bool]:
        """Wait for the first inventory; return whether it came."""
        if self._early_count >= _EARLY_LIMIT:
            raise _storage_busy()
        self._early_count += 1
        outcome = yield Awaited(self._waits.inventory, token_count=0)
        self._early_count -= 1
        return outcome is None

    def _answer(self, command: CacheCommand) -> Steps[CacheAnswer]:
        cache = self._cache
        if self._waits.is_stalled and isinstance(command, _STORAGE_ORDERS):
            raise _unanswered()
        match command:
            case Explain():
                prompt = cache.prompt(
                    command.prompt_token_ids, scope=command.scope, shared_scope=command.shared_scope
                )
                yield from cache.read_headers(prompt, token_count=0)
                return cache.explain(command)
            case Pin(ttl_s=ttl_s):
                end_time = UNTIL_UNPINNED if ttl_s is None else self._clock.wall() + ttl_s
                return (yield from self._pin(self._known(command), end_time))
            case Unpin():
                return (yield from self._pin(self._known(command), NOT_PINNED))
            case EvictBlocks():
                nodes = [cache.tree.get(name) for name in command.block_hashes]
                return (yield from self._evict([node for node in nodes if node is not None]))
            case EndSession():
                return cache.end_session(command.tenant, command.session_id)
            case ListKnown():
                return KnownBlocks(tuple(node.hash for node in reversed(self._known(command))))
            case ListRecent():
                recent = cache.tree.recent(command.block_limit)
                return RecentBlocks(tuple(_recent(n, with_tokens=command.with_tokens) for n in recent))
            case BeginListing():
                for tenant in command.tenants:
                    cache.quotas.root(CacheScope(tenant))
                self._listing = cache.tree.listing(slice_count=self.listing_slice_count)
                return ExportListing(next(self._listing, 0))
            case ContinueListing():
                return ExportListing(next(self._listing, 0))
            case ReadTokens():
                return (yield from self._read_tokens(command))
            case ListExport() | ReadBlock() | BeginImport() | AdoptBlock():
                return (yield from self._exchange.answer(command))
        if cache.storage is None:
            raise IcehouseError(Reason.CACHE_UNSUPPORTED, "this server has no SSD tier to verify")
        if isinstance(command, ListStored):
            return StoredBlocks((yield from _done(cache.storage.names(block_limit=command.block_limit))))
        return (yield from self._verify(cache.storage, command))

    def _verify(self, storage: ColdTier, command: Verify) -> Steps[VerifyReport]:
        began = self._clock.monotonic()
        verified = yield from _done(storage.verify(command.block_hashes))
        return VerifyReport(
            verified_block_count=verified.checked_count,
            verified_bytes=verified.checked_bytes,
            damaged_hashes=tuple(failure.hash for failure in verified.damaged if failure.hash is not None),
            duration_s=self._clock.monotonic() - began,
        )

    def _read_tokens(self, command: ReadTokens) -> Steps[BlockTokens]:
        if self._cache.storage is None or not command.block_hashes:
            return BlockTokens(())
        ticket = None if self._cache.rates.reads_hang else self._cache.storage.heads(command.block_hashes)
        if ticket is None:
            raise _storage_busy()
        outcome = yield Awaited(ticket, token_count=0)
        if isinstance(outcome, StorageFailure):
            if outcome.cause is not StorageTrouble.LOST:
                raise _storage_busy()
            return BlockTokens(())
        return BlockTokens(tuple(KnownTokens(h.hash, h.token_ids, h.extra) for h in outcome))

    def _pin(self, nodes: list[Node], end_time: float) -> Steps[PinReport]:
        """Pin or unpin blocks: at once if all are in RAM alone, else once the storage thread has reported
        which are there."""
        cache, is_pin = self._cache, end_time != NOT_PINNED
        nodes = [node for node in nodes if node.ram or node.ssd]
        if is_pin:
            self._check_pin(nodes)
        nodes = [node for node in nodes if is_pin or node.is_pinned]
        before = [(node, node.pin_end_time) for node in reversed(nodes)]
        stored = tuple(node.hash for node in nodes if node.ssd or node.is_spilling)
        if not stored or cache.storage is None:
            cache.pin(nodes, end_time)
            return _pin_report(nodes)
        ticket = cache.spills.pin(stored, end_time)
        if ticket is None:
            raise _storage_busy()
        cache.pin(nodes, end_time)
        outcome = yield Awaited(ticket)
        if isinstance(outcome, StorageFailure):
            if outcome.cause is not StorageTrouble.LOST:
                # The pins here and on SSD must agree. Another command may have changed them meanwhile.
                restored = min if is_pin else max
                for node, before_time in before:
                    cache.tree.set_pin(node, restored(before_time, node.pin_end_time))
            raise _refusal(outcome)
        # A block that existed when it was pinned may have been found damaged since.
        there = [n for n in nodes if not is_pin or n.ram or (n.ssd and n.hash not in outcome)]
        cache.pin([node for node in nodes if node not in there], NOT_PINNED)
        if is_pin and not there:
            raise _nothing_to_pin()
        return _pin_report(there)

    def _check_pin(self, nodes: list[Node]) -> None:
        """Raise NotFound or Overloaded if these blocks may not be pinned."""
        if not nodes:
            raise _nothing_to_pin()
        self._cache.quotas.check_pins(nodes)
        leaving = self._cache.ram.retain(nodes, None)
        if leaving:
            raise Overloaded(
                Reason.MEMORY_SHORT,
                f"{len(leaving)} of {len(nodes)} blocks, {sum(e.ram_bytes for e in leaving)} bytes leave a "
                "full RAM tier and are not on SSD yet; try again when they are written",
                retry_after_s=_BUSY_RETRY_S,
            )

    def _known(self, command: Pin | Unpin | ListKnown) -> list[Node]:
        """Return the blocks that a command names: the prompt's in order, or all in the order of arrival."""
        if command.prompt_token_ids is None:
            return list(self._cache.tree)
        return self._cache.known_chain(command.prompt_token_ids, command.scope)

    def _evict(self, nodes: list[Node]) -> Steps[EvictReport]:
        cache = self._cache
        in_ram = [node for node in nodes if node.ram]
        # A block on its way to SSD will be there before the storage thread gets to this removal.
        stored = tuple(node.hash for node in nodes if node.ssd or node.is_spilling)
        report = EvictReport(len(in_ram), sum(node.ram_bytes for node in in_ram))
        names = tuple(node.hash for node in nodes)
        # Blocks removed by an earlier order or a quota stay on SSD until the storage thread gets to it.
        if cache.storage is not None and (stored or cache.spills.removal_count):
            ticket = cache.spills.remove(names, is_final=True)
            if ticket is None:
                raise _storage_busy()
            cache.purge(nodes, with_ssd=True)
            purged = yield from _done(ticket)
            return dataclasses.replace(
                report, ssd_block_count=purged.block_count, ssd_bytes=purged.size_bytes
            )
        if cache.storage is not None and names:
            # Blocks in RAM alone here may still be in the shared store; nobody waits for their removal.
            cache.storage.delete(names, is_final=True)
        cache.purge(nodes, with_ssd=False)
        return report


def _done(ticket: Ticket[_Result] | None) -> Steps[_Result]:
    """Wait for an order to the storage thread and return its result; only the caller's deadline bounds the
    wait. Raises StorageError if it failed, and Overloaded without a ticket: the queue is full."""
    if ticket is None:
        raise _storage_busy()
    outcome: Any = yield Awaited(ticket)
    if isinstance(outcome, StorageFailure):
        raise _refusal(outcome)
    result: _Result = outcome
    return result


def _pin_report(nodes: list[Node]) -> PinReport:
    return PinReport(
        block_count=len(nodes),
        token_count=sum(node.token_count for node in nodes),
        size_bytes=sum(node.size_bytes for node in nodes),
    )


def _recent(node: Node, *, with_tokens: bool) -> RecentBlock:
    """Return what an operator sees of a block; its tokens only on request.

    The tokens are the node's own immutable tuple, not a copy.
    """
    return RecentBlock(
        hash=node.hash,
        parent=node.parent,
        start_token_index=node.start_token_index,
        token_count=node.token_count,
        hit_count=node.hit_count,
        is_in_ram=bool(node.ram),
        is_on_ssd=bool(node.ssd),
        token_keys=node.token_ids if with_tokens else None,
    )


def _nothing_to_pin() -> NotFound:
    return NotFound(
        Reason.BLOCK_NOT_FOUND, "no block of this prompt is cached; send it through Warm or Generate first"
    )


def _unanswered() -> StorageError:
    """Return the error for a command that needs the storage thread while that hangs."""
    return StorageError(
        Reason.STORE_UNUSABLE, "the SSD tier does not answer because its disk hangs; try again later"
    )


def _refusal(failure: StorageFailure) -> StorageError:
    """Return the error for an order that failed."""
    if failure.cause is StorageTrouble.LOST:
        return StorageError(Reason.STORE_UNUSABLE, "the SSD tier has stopped; see the server's log")
    return StorageError(
        Reason.STORE_UNUSABLE, f"the SSD tier cannot do this now: {failure.detail}; try again later"
    )


def _storage_busy() -> Overloaded:
    """Return the error for a command that does not fit into the SSD tier's queue."""
    return Overloaded(
        Reason.QUEUE_FULL,
        "too many commands are waiting for the storage thread; try again later",
        retry_after_s=_BUSY_RETRY_S,
    )
