"""Commands of the prefix cache: explain, pin, evict, verify, count; from outside a request.

Inference thread only. What needs the storage thread is answered when its outcome comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader
from icehouse_server.domain.cache_commands import (
    BeginListing,
    BlockTokens,
    CacheAnswer,
    CacheCommand,
    ContinueListing,
    Evict,
    EvictBlocks,
    EvictReport,
    Explain,
    Explanation,
    KnownBlocks,
    KnownTokens,
    Listing,
    ListKnown,
    ListRecent,
    ListStored,
    Pin,
    PinReport,
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
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason, StorageError
from icehouse_server.storage.api import Failure, Names, Purged, Ticket, Trouble, Verified

_Result = TypeVar("_Result")
_Reply = Callable[[CacheAnswer | IcehouseError], None]
_BUSY_RETRY_S = 1.0
_PINNED_RETRY_S = 60.0
"""Pins stay until somebody takes them away."""
_EARLY_LIMIT = 256
"""Commands that wait for the first inventory."""
_SLICE_COUNT = 256
"""Blocks told at once in a listing of all; what they make of changes has room in the log."""
_STATS_S = 1.0
"""How long the storage thread's counters are waited for; then those it told last stand for them."""
_STORAGE_ORDERS = (Pin, Unpin, Evict, EvictBlocks, ListStored, Verify)


class CacheCommands:
    """Carries out commands on one prefix cache."""

    def __init__(self, cache: PrefixCache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._waits = cache.waits
        self._early_count = 0
        """Commands that wait for the first inventory."""
        self._end: IcehouseError | None = None
        """Why the engine ends."""
        self.listing_slice_count = _SLICE_COUNT
        self._listing: Iterator[int] = iter(())
        """Goes on when who listens has taken the last slice, so that a step pays for one at most."""
        self._last_stats: CacheStats | None = None
        """The storage thread's part, as it was last told."""

    def submit(self, message: Command) -> None:
        """Carry out a command, once it is known what the SSD holds: to evict all, say, means that too."""
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
        self._waits.settle_inventory()

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
        """Call `reply` with all counters, the storage thread's included, as they were last told where it does
        not answer."""
        storage = self._cache.storage
        ticket = None if storage is None or self._waits.is_stalled else storage.stats()

        def told(outcome: CacheStats | Failure) -> None:
            if isinstance(outcome, CacheStats):
                self._last_stats = outcome
            reply(self._cache.stats(self._last_stats if self._cache.storage is not None else None))

        if ticket is None:
            told(Failure(Trouble.UNUSABLE))
        else:
            self._waits.add(ticket, told, limit_s=_STATS_S)

    def _answer(self, command: CacheCommand, reply: _Reply) -> CacheAnswer | None:
        if self._waits.is_stalled and isinstance(command, _STORAGE_ORDERS):
            raise _unanswered()
        match command:
            case Explain():
                return self._explain(command, reply)
            case Pin() | Unpin():
                nodes = self._cache.known_chain(command.prompt_token_ids, command.scope)
                return self._pin(nodes, pinned=isinstance(command, Pin), reply=reply)
            case Evict():
                return self._evict(self._known(command), reply)
            case EvictBlocks():
                found = (self._cache.tree.get(name) for name in command.block_hashes)
                return self._evict([node for node in found if node is not None], reply)
            case ListKnown():
                return KnownBlocks(tuple(node.hash for node in reversed(self._known(command))))
            case ListRecent():
                recent = self._cache.tree.recent(command.block_limit)
                return RecentBlocks(tuple(_recent(n, with_tokens=command.with_tokens) for n in recent))
            case BeginListing():
                for tenant in command.tenants:
                    self._cache.root(CacheScope(tenant))
                self._listing = self._cache.tree.listing(slice_count=self.listing_slice_count)
                return Listing(next(self._listing, 0))
            case ContinueListing():
                return Listing(next(self._listing, 0))
            case ReadTokens():
                return self._read_tokens(command, reply)
        if self._cache.storage is None:
            raise IcehouseError(Reason.CACHE_UNSUPPORTED, "this server has no SSD tier to verify")
        if isinstance(command, ListStored):
            listed = self._cache.storage.names(block_limit=command.block_limit)
            self._await(listed, reply, StoredBlocks)
        else:
            began = self._clock.monotonic()
            verified = self._cache.storage.verify(command.block_hashes)
            self._await(verified, reply, lambda found: self._verified(found, began))
        return None

    def _await(
        self, ticket: Ticket[_Result] | None, reply: _Reply, answer: Callable[[_Result], CacheAnswer]
    ) -> None:
        """Have an order answered when the storage thread has carried it out. It is its own to end, and the
        caller's deadline bounds the wait. Raises `Overloaded` where there is none: too much waits."""
        if ticket is None:
            raise _storage_busy()
        self._waits.add(
            ticket, lambda found: reply(_refusal(found) if isinstance(found, Failure) else answer(found))
        )

    def _verified(self, found: Verified, began: float) -> VerifyReport:
        return VerifyReport(
            verified_block_count=found.checked_count,
            verified_bytes=found.checked_bytes,
            damaged_hashes=tuple(failure.hash for failure in found.damaged if failure.hash is not None),
            duration_s=self._clock.monotonic() - began,
        )

    def _explain(self, command: Explain, reply: _Reply) -> Explanation | None:
        """Answer now, or when the headers of blocks that this process never saw whole are read."""
        ticket = self._cache.ask_headers(
            command.prompt_token_ids, scope=command.scope, shared_scope=command.shared_scope
        )
        if ticket is None:
            return self._cache.explain(command)

        def met(outcome: tuple[BlockHeader, ...] | Failure) -> None:
            if not isinstance(outcome, Failure):
                self._cache.learn_headers(outcome)
            reply(self._cache.explain(command))

        self._waits.add(ticket, met, token_count=0)
        return None

    def _read_tokens(self, command: ReadTokens, reply: _Reply) -> BlockTokens | None:
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
                # They are not kept.
                reply(BlockTokens(tuple(KnownTokens(h.hash, h.token_ids, h.extra) for h in outcome)))

        self._waits.add(ticket, read, token_count=0)
        return None

    def _pin(self, nodes: list[Node], *, pinned: bool, reply: _Reply) -> PinReport | None:
        """Answer now where all is in RAM alone, else when the storage thread says what is there."""
        cache = self._cache
        nodes = [node for node in nodes if node.ram or node.ssd]
        if pinned:
            self._refuse_pin(nodes)
        nodes = [node for node in nodes if pinned or node.is_pinned]
        changed = [node for node in nodes if node.is_pinned is not pinned]
        stored = tuple(node.hash for node in nodes if node.ssd or node.is_spilling)
        if not stored or cache.storage is None:
            cache.pin(nodes, pinned=pinned)
            return _pin_report(nodes)

        def told(outcome: Names | Failure) -> None:
            if isinstance(outcome, Failure):
                if outcome.cause is not Trouble.LOST:
                    # Nothing may be pinned here that is not on SSD, nor the other way round.
                    cache.pin(changed, pinned=not pinned)
                reply(_refusal(outcome))
                return
            # What was there when it was pinned may have been found damaged by now.
            kept = [n for n in nodes if not pinned or n.ram or (n.ssd and n.hash not in outcome)]
            cache.pin([node for node in nodes if node not in kept], pinned=False)
            reply(_pin_report(kept) if kept or not pinned else _nothing_to_pin())

        ticket = cache.spills.pin(stored, pinned=pinned)
        if ticket is None:
            raise _storage_busy()
        cache.pin(nodes, pinned=pinned)
        self._waits.add(ticket, told)
        return None

    def _refuse_pin(self, nodes: list[Node]) -> None:
        """Raise what stands against pinning these blocks."""
        if not nodes:
            raise _nothing_to_pin()
        excess = self._cache.quotas.pin_excess(nodes)
        if excess is not None:
            whose = "all tenants" if excess.is_everybodys else "this tenant"
            raise Overloaded(
                Reason.MEMORY_SHORT,
                f"pinned blocks of {whose} would take {excess.wanted_bytes} bytes of the {excess.tier} there "
                f"is for {whose}, of which {excess.limit_bytes} may be pinned; unpin others first",
                retry_after_s=_PINNED_RETRY_S,
            )
        leaving = self._cache.ram.keep(nodes, None)
        if leaving:
            raise Overloaded(
                Reason.MEMORY_SHORT,
                f"{len(leaving)} of {len(nodes)} blocks, {sum(e.ram_bytes for e in leaving)} bytes leave a "
                "full RAM tier and are not on SSD yet; try again when they are written",
                retry_after_s=_BUSY_RETRY_S,
            )

    def _known(self, command: Evict | ListKnown) -> list[Node]:
        """Return the blocks that a command means, in the order in which they were made or of the prompt."""
        if command.prompt_token_ids is None:
            return list(self._cache.tree)
        return self._cache.known_chain(command.prompt_token_ids, command.scope)

    def _evict(self, nodes: list[Node], reply: _Reply) -> EvictReport | None:
        cache = self._cache
        in_ram = [node for node in nodes if node.ram]
        # A block on its way to SSD is there before this command is carried out.
        stored = tuple(node.hash for node in nodes if node.ssd or node.is_spilling)
        report = EvictReport(len(in_ram), sum(node.ram_bytes for node in in_ram))

        def removed(purged: Purged) -> EvictReport:
            return dataclasses.replace(
                report, ssd_block_count=purged.block_count, ssd_bytes=purged.size_bytes
            )

        # Nor is one gone that a quota or an order before has made go, until the storage thread gets there.
        asks_ssd = cache.storage is not None and (bool(stored) or cache.spills.removal_count > 0)
        if asks_ssd:
            self._await(cache.spills.remove(stored), reply, removed)
        cache.purge(nodes, with_ssd=asks_ssd)
        return None if asks_ssd else report


def _pin_report(nodes: list[Node]) -> PinReport:
    return PinReport(
        block_count=len(nodes),
        token_count=sum(node.token_count for node in nodes),
        size_bytes=sum(node.size_bytes for node in nodes),
    )


def _recent(node: Node, *, with_tokens: bool) -> RecentBlock:
    """Return what an operator is shown of a block: without tokens nothing that they could be read from.

    With them it has the node's own tuple, which nobody changes, so that they cost no copy.
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
        Reason.BLOCK_NOT_FOUND,
        "no block of this prompt is cached; send it through Warm or Generate first",
    )


def _unanswered() -> StorageError:
    """Return the refusal of a command that needs a storage thread which hangs."""
    return StorageError(
        Reason.STORE_UNUSABLE, "the SSD tier does not answer, since its disk hangs; try again later"
    )


def _refusal(failure: Failure) -> StorageError:
    """Return what whoever gave an order is told of its failure."""
    if failure.cause is Trouble.LOST:
        return StorageError(Reason.STORE_UNUSABLE, "the SSD tier has stopped; see the server's log")
    return StorageError(
        Reason.STORE_UNUSABLE, f"the SSD tier cannot do this now: {failure.detail}; try again later"
    )


def _storage_busy() -> Overloaded:
    """Return the refusal of a command that the SSD tier has no place for now."""
    return Overloaded(
        Reason.QUEUE_FULL,
        "too many orders wait for the storage thread; try again later",
        retry_after_s=_BUSY_RETRY_S,
    )
