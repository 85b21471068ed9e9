"""Commands to the prefix cache from outside a request: explain, pin, evict, verify, list, count.

Inference thread only. A command that needs the storage thread is answered when its outcome comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader
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
    Explanation,
    KnownBlocks,
    KnownTokens,
    ListExport,
    Listing,
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
from icehouse_server.engine.prefix_cache.exchange import CacheExchange, Reply
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason, StorageError
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import Failure, Names, Purged, Ticket, Trouble, Verified

_Result = TypeVar("_Result")
_BUSY_RETRY_S = 1.0
_EARLY_LIMIT = 256
"""Commands that wait for the first inventory."""
_SLICE_COUNT = 256
"""Blocks in a slice of a listing; the log has space for so many changes."""
_STATS_S = 1.0
"""How long to wait for the storage thread's counters; then its last ones are used."""
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
        """Why the engine ends, once it does."""
        self.listing_slice_count = _SLICE_COUNT
        self._listing: Iterator[int] = iter(())
        """Continues when the listener has taken the last slice, so that a step writes one at most."""
        self._last_stats: CacheStats | None = None
        """The storage thread's part, as last reported."""

    def submit(self, message: Command) -> None:
        """Carry out a command, once the content of the SSD is known: to evict all, say, includes that."""
        if not self._cache.is_inventory_due:
            self._carry_out(message)
        elif self._early_count < _EARLY_LIMIT:
            self._early_count += 1
            self._waits.add(self._waits.inventory, partial(self._inventory_came, message), token_count=0)
        else:
            message.reply(_storage_busy())

    def fail_early(self, error: IcehouseError) -> None:
        """The engine ends before the inventory came: answer the commands that wait for it."""
        self._end = error
        self._waits.complete_inventory()

    def _inventory_came(self, message: Command, outcome: Failure | None) -> None:
        self._early_count -= 1
        if self._end is not None:
            message.reply(self._end)
        elif outcome is None:
            self._carry_out(message)
        elif isinstance(message.command, Explain):
            message.reply(self._cache.explain(message.command))
        else:
            message.reply(_unanswered())

    def _carry_out(self, message: Command) -> None:
        """Answer a command now, or when the storage thread has done its part."""
        if not self._cache.is_supported:
            message.reply(IcehouseError(Reason.CACHE_UNSUPPORTED, self._cache.facts.unsupported_detail))
            return
        answer: CacheAnswer | IcehouseError | None
        try:
            answer = self._answer(message.command, message.reply)
        except IcehouseError as error:
            answer = error
        if answer is not None:
            message.reply(answer)

    def query(self, reply: Callable[[CacheStats], None]) -> None:
        """Call `reply` with all counters, the storage thread's last ones where it does not answer."""
        storage = self._cache.storage
        ticket = None if storage is None or self._waits.is_stalled else storage.stats()

        def report(outcome: CacheStats | Failure) -> None:
            if isinstance(outcome, CacheStats):
                self._last_stats = outcome
            reply(self._cache.stats(self._last_stats if self._cache.storage is not None else None))

        if ticket is None:
            report(Failure(Trouble.UNUSABLE))
        else:
            self._waits.add(ticket, report, limit_s=_STATS_S)

    def _answer(self, command: CacheCommand, reply: Reply) -> CacheAnswer | None:
        if self._waits.is_stalled and isinstance(command, _STORAGE_ORDERS):
            raise _unanswered()
        match command:
            case Explain():
                return self._explain(command, reply)
            case Pin(ttl_s=ttl_s):
                end_time = UNTIL_UNPINNED if ttl_s is None else self._clock.wall() + ttl_s
                return self._pin(self._known(command), end_time, reply)
            case Unpin():
                return self._pin(self._known(command), NOT_PINNED, reply)
            case EvictBlocks():
                nodes = [self._cache.tree.get(name) for name in command.block_hashes]
                return self._evict([node for node in nodes if node is not None], reply)
            case EndSession():
                return self._cache.end_session(command.tenant, command.session_id)
            case ListKnown():
                return KnownBlocks(tuple(node.hash for node in reversed(self._known(command))))
            case ListRecent():
                recent = self._cache.tree.recent(command.block_limit)
                return RecentBlocks(tuple(_recent(n, with_tokens=command.with_tokens) for n in recent))
            case BeginListing():
                for tenant in command.tenants:
                    self._cache.quotas.root(CacheScope(tenant))
                self._listing = self._cache.tree.listing(slice_count=self.listing_slice_count)
                return Listing(next(self._listing, 0))
            case ContinueListing():
                return Listing(next(self._listing, 0))
            case ReadTokens():
                return self._read_tokens(command, reply)
            case ListExport() | ReadBlock() | BeginImport() | AdoptBlock():
                return self._exchange.answer(command, reply)
        if self._cache.storage is None:
            raise IcehouseError(Reason.CACHE_UNSUPPORTED, "this server has no SSD tier to verify")
        if isinstance(command, ListStored):
            listed = self._cache.storage.names(block_limit=command.block_limit)
            self._await(listed, reply, StoredBlocks)
        else:
            began = self._clock.monotonic()
            verified = self._cache.storage.verify(command.block_hashes)
            self._await(verified, reply, lambda outcome: self._verified(outcome, began))
        return None

    def _await(
        self, ticket: Ticket[_Result] | None, reply: Reply, answer: Callable[[_Result], CacheAnswer]
    ) -> None:
        """Have an order answered when the storage thread has carried it out; only the caller's deadline
        bounds the wait. Raises `Overloaded` without a ticket: the queue is full."""
        if ticket is None:
            raise _storage_busy()
        self._waits.add(
            ticket,
            lambda outcome: reply(_refusal(outcome) if isinstance(outcome, Failure) else answer(outcome)),
        )

    def _verified(self, verified: Verified, began: float) -> VerifyReport:
        return VerifyReport(
            verified_block_count=verified.checked_count,
            verified_bytes=verified.checked_bytes,
            damaged_hashes=tuple(failure.hash for failure in verified.damaged if failure.hash is not None),
            duration_s=self._clock.monotonic() - began,
        )

    def _explain(self, command: Explain, reply: Reply) -> Explanation | None:
        """Answer now, or when the headers of blocks with unknown tokens are read."""
        keys, cache = command.prompt_token_ids, self._cache
        prompt = cache.prompt(keys, scope=command.scope, shared_scope=command.shared_scope)
        is_waiting = cache.fetch_headers(prompt, lambda: reply(cache.explain(command)), token_count=0)
        return None if is_waiting else cache.explain(command)

    def _read_tokens(self, command: ReadTokens, reply: Reply) -> BlockTokens | None:
        if self._cache.storage is None or not command.block_hashes:
            return BlockTokens(())
        if self._cache.rates.reads_hang:
            raise _storage_busy()
        ticket = self._cache.storage.heads(command.block_hashes)
        if ticket is None:
            raise _storage_busy()

        def read(outcome: tuple[BlockHeader, ...] | Failure) -> None:
            if isinstance(outcome, Failure):
                reply(BlockTokens(()) if outcome.cause is Trouble.LOST else _storage_busy())
            else:
                reply(BlockTokens(tuple(KnownTokens(h.hash, h.token_ids, h.extra) for h in outcome)))

        self._waits.add(ticket, read, token_count=0)
        return None

    def _pin(self, nodes: list[Node], end_time: float, reply: Reply) -> PinReport | None:
        """Answer now where all is in RAM alone, else when the storage thread reports what is there."""
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

        def report(outcome: Names | Failure) -> None:
            if isinstance(outcome, Failure):
                if outcome.cause is not Trouble.LOST:
                    # The pins here and on SSD must agree. Another order may have changed them meanwhile.
                    restored = min if is_pin else max
                    for node, before_time in before:
                        cache.tree.set_pin(node, restored(before_time, node.pin_end_time))
                reply(_refusal(outcome))
                return
            # A block that was there when it was pinned may have been found damaged since.
            there = [n for n in nodes if not is_pin or n.ram or (n.ssd and n.hash not in outcome)]
            cache.pin([node for node in nodes if node not in there], NOT_PINNED)
            reply(_pin_report(there) if there or not is_pin else _nothing_to_pin())

        ticket = cache.spills.pin(stored, end_time)
        if ticket is None:
            raise _storage_busy()
        cache.pin(nodes, end_time)
        self._waits.add(ticket, report)
        return None

    def _check_pin(self, nodes: list[Node]) -> None:
        """Raise the reason why these blocks may not be pinned, if there is one."""
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
        """Return the blocks that a command is about: all as they became known, or the prompt's in order."""
        if command.prompt_token_ids is None:
            return list(self._cache.tree)
        return self._cache.known_chain(command.prompt_token_ids, command.scope)

    def _evict(self, nodes: list[Node], reply: Reply) -> EvictReport | None:
        cache = self._cache
        in_ram = [node for node in nodes if node.ram]
        # A block on its way to SSD is there before this command is carried out.
        stored = tuple(node.hash for node in nodes if node.ssd or node.is_spilling)
        report = EvictReport(len(in_ram), sum(node.ram_bytes for node in in_ram))

        def removed(purged: Purged) -> EvictReport:
            return dataclasses.replace(
                report, ssd_block_count=purged.block_count, ssd_bytes=purged.size_bytes
            )

        # Blocks that an earlier order or a quota removes are not gone before the storage thread gets there.
        asks_ssd = cache.storage is not None and (bool(stored) or cache.spills.removal_count > 0)
        names = tuple(node.hash for node in nodes)
        if asks_ssd:
            self._await(cache.spills.remove(names, is_final=True), reply, removed)
        elif cache.storage is not None and names:
            # Other servers may still have stored what is in RAM alone here; nobody waits for that.
            cache.storage.delete(names, is_final=True)
        cache.purge(nodes, with_ssd=asks_ssd)
        return None if asks_ssd else report


def _pin_report(nodes: list[Node]) -> PinReport:
    return PinReport(
        block_count=len(nodes),
        token_count=sum(node.token_count for node in nodes),
        size_bytes=sum(node.size_bytes for node in nodes),
    )


def _recent(node: Node, *, with_tokens: bool) -> RecentBlock:
    """Return what an operator is shown of a block, with its tokens only on request.

    They are the node's own tuple, which nobody changes, so that they cost no copy.
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
    """Return the refusal of a command that needs the storage thread while it hangs."""
    return StorageError(
        Reason.STORE_UNUSABLE, "the SSD tier does not answer, since its disk hangs; try again later"
    )


def _refusal(failure: Failure) -> StorageError:
    """Return the error that answers an order which failed."""
    if failure.cause is Trouble.LOST:
        return StorageError(Reason.STORE_UNUSABLE, "the SSD tier has stopped; see the server's log")
    return StorageError(
        Reason.STORE_UNUSABLE, f"the SSD tier cannot do this now: {failure.detail}; try again later"
    )


def _storage_busy() -> Overloaded:
    """Return the refusal of a command that the SSD tier's queue has no space for."""
    return Overloaded(
        Reason.QUEUE_FULL,
        "too many orders wait for the storage thread; try again later",
        retry_after_s=_BUSY_RETRY_S,
    )
