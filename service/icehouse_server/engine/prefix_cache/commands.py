"""Commands of the prefix cache: explain, pin, evict, verify, count; from outside a request.

Inference thread only. What needs the storage thread is answered when its outcome comes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from icehouse_server.clock import Clock
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
    ListKnown,
    ListRecent,
    ListStored,
    Pin,
    PinReport,
    ReadTokens,
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
from icehouse_server.engine.prefix_cache.listing import BlockListing
from icehouse_server.engine.prefix_cache.tiers.entry import Entry, recent_block
from icehouse_server.engine.prefix_cache.timeouts import StorageTimeouts
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason, StorageError
from icehouse_server.storage.loads import HeadRequest, HeadsRead, LoadId
from icehouse_server.storage.messages import (
    Listed,
    Outcome,
    PinsChanged,
    Purged,
    StatsAnswer,
    TaskGivenUp,
    TaskId,
    Verified,
)

_Reply = Callable[[CacheAnswer | IcehouseError], None]
_BUSY_RETRY_S = 1.0
_PINNED_RETRY_S = 60.0
"""Pins stay until somebody takes them away."""
_EARLY_LIMIT = 256
"""Commands that wait for the first inventory."""
_STATS_S = 1.0
"""How long the storage thread's counters are waited for; then those it told last stand for them."""
_STORAGE_ORDERS = (Pin, Unpin, Evict, EvictBlocks, ListStored, Verify)


@dataclasses.dataclass(frozen=True, slots=True)
class _PinChange:
    """An order to pin or unpin that the storage thread is asked to carry out."""

    pinned: bool
    entries: tuple[Entry, ...]
    were_pinned: tuple[bool, ...]

    def report(self) -> PinReport:
        return PinReport(
            block_count=len(self.entries),
            token_count=sum(entry.token_count for entry in self.entries),
            size_bytes=sum(entry.ram_bytes or sum(entry.ssd.values()) for entry in self.entries),
        )


class CacheCommands:
    """Carries out commands on one prefix cache."""

    def __init__(
        self, cache: PrefixCache, clock: Clock, *, load_ids: Iterator[int], timeouts: StorageTimeouts
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._load_ids = load_ids
        self._timeouts = timeouts
        self._early: list[tuple[float, Command]] = []
        """Since when each waits."""
        self._listing = BlockListing(cache)
        self._readings: dict[LoadId, tuple[float, _Reply]] = {}
        self._explanations: dict[LoadId, tuple[float, Explain, _Reply]] = {}
        self._queries: dict[TaskId, tuple[float, Callable[[CacheStats], None]]] = {}
        self._last_stats: CacheStats | None = None
        """The storage thread's part, as it was last told."""
        self._evictions: dict[TaskId, tuple[EvictReport, _Reply]] = {}
        self._verifications: dict[TaskId, tuple[float, _Reply]] = {}
        self._pin_changes: dict[TaskId, tuple[_PinChange, _Reply]] = {}

    def submit(self, message: Command) -> None:
        """Carry out a command, once it is known what the SSD holds: to evict all, say, means that too."""
        if not self._cache.is_inventory_due:
            self._carry_out(message)
        elif len(self._early) < _EARLY_LIMIT:
            self._early.append((self._clock.monotonic(), message))
        else:
            message.reply(_storage_busy())

    def carry_out_early(self) -> None:
        """What the SSD holds is known: carry out what waited for that."""
        early, self._early = self._early, []
        for _, message in early:
            self._carry_out(message)

    def fail_early(self, error: IcehouseError) -> None:
        """The engine ends before the inventory came: answer the commands that wait for it."""
        early, self._early = self._early, []
        for _, message in early:
            message.reply(error)

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
        """Call `reply` with all counters, the storage thread's included."""
        may_ask = self._cache.storage is not None and not self._timeouts.is_stalled
        task_id = self._cache.storage.request_stats() if self._cache.storage and may_ask else None
        if task_id is None:
            reply(self._cache.stats(self._last_stats))
        else:
            self._queries[task_id] = (self._clock.monotonic(), reply)

    def give_up_waits(self) -> None:
        """Answer whoever has waited too long for an SSD tier that does not answer, as far as can be without.
        An order that the storage thread has is its own to end, and the caller's deadline bounds the wait."""
        now, timeouts = self._clock.monotonic(), self._timeouts
        for task_id, (since, reply) in list(self._queries.items()):
            if now - since >= _STATS_S:
                del self._queries[task_id]
                reply(self._cache.stats(self._last_stats))
        for load_id, (since, tell) in list(self._readings.items()):
            if timeouts.has_expired(since=since, load_id=load_id):
                del self._readings[load_id]
                self._timeouts.abandon(load_id)
                tell(_storage_busy())
        for load_id, (since, command, answer) in list(self._explanations.items()):
            if timeouts.has_expired(since=since, load_id=load_id):
                del self._explanations[load_id]
                self._timeouts.abandon(load_id)
                answer(self._cache.explain(command))
        if any(timeouts.has_expired(since=since) for since, _ in self._early):
            early, self._early = self._early, []
            for _, message in early:
                if isinstance(message.command, Explain):
                    message.reply(self._cache.explain(message.command))
                else:
                    message.reply(_unanswered())

    def take_tokens(self, outcome: HeadsRead) -> bool:
        """Answer who asked for the token ids of these blocks; they are not kept. False: nobody did."""
        waiting = self._readings.pop(outcome.load_id, None)
        if waiting is None:
            return False
        _, answer = waiting
        answer(BlockTokens(tuple(KnownTokens(h.hash, h.token_ids, h.extra) for h in outcome.headers)))
        return True

    def met(self, outcome: HeadsRead) -> None:
        """Explain what waited for these headers; their tokens are known by now."""
        waiting = self._explanations.pop(outcome.load_id, None)
        if waiting is not None:
            _, command, answer = waiting
            answer(self._cache.explain(command))

    def receive(self, outcome: Outcome) -> None:
        """Take an outcome that answers a command."""
        if isinstance(outcome, StatsAnswer):
            self._last_stats = outcome.stats
            query = self._queries.pop(outcome.task_id, None)
            if query is not None:
                _, reply = query
                reply(self._cache.stats(outcome.stats))
        elif isinstance(outcome, PinsChanged):
            self._pins_changed(outcome)
        elif isinstance(outcome, Purged):
            self._cache.removal_ended(outcome.task_id)
            eviction = self._evictions.pop(outcome.task_id, None)
            if eviction is not None:
                report, answer = eviction
                answer(
                    dataclasses.replace(
                        report, ssd_block_count=outcome.block_count, ssd_bytes=outcome.size_bytes
                    )
                )
        elif isinstance(outcome, Verified):
            verification = self._verifications.pop(outcome.task_id, None)
            if verification is not None:
                began, answer = verification
                answer(
                    VerifyReport(
                        verified_block_count=outcome.checked_count,
                        verified_bytes=outcome.checked_bytes,
                        damaged_hashes=tuple(failure.hash for failure in outcome.damaged),
                        duration_s=self._clock.monotonic() - began,
                    )
                )
        elif isinstance(outcome, Listed):
            listing = self._verifications.pop(outcome.task_id, None)
            if listing is not None:
                _, answer = listing
                answer(StoredBlocks(outcome.hashes))
        elif isinstance(outcome, TaskGivenUp):
            self._give_up(outcome)

    def _give_up(self, outcome: TaskGivenUp) -> None:
        self._cache.removal_ended(outcome.task_id)
        waiting = (
            self._evictions.pop(outcome.task_id, None)
            or self._verifications.pop(outcome.task_id, None)
            or self._pin_changes.pop(outcome.task_id, None)
        )
        if waiting is not None and isinstance(waiting[0], _PinChange):
            # Nothing may be pinned here that is not on SSD, nor the other way round.
            change = waiting[0]
            changed = [
                e
                for e, was in zip(change.entries, change.were_pinned, strict=True)
                if was is not change.pinned
            ]
            self._cache.pin(changed, pinned=not change.pinned)
        if waiting is not None:
            _, answer = waiting
            answer(
                StorageError(
                    Reason.STORE_UNUSABLE,
                    f"the SSD tier cannot do this now: {outcome.detail}; try again later",
                )
            )

    def lose_storage(self) -> None:
        """The SSD tier is gone: answer whoever waits for it."""
        error = StorageError(Reason.STORE_UNUSABLE, "the SSD tier has stopped; see the server's log")
        self._last_stats = None
        for _, reply in self._queries.values():
            reply(self._cache.stats(None))
        for _, command, explained in self._explanations.values():
            explained(self._cache.explain(command))
        self._explanations.clear()
        for _, told in self._readings.values():
            told(BlockTokens(()))
        self._readings.clear()
        waiting = [answer for _, answer in self._evictions.values()]
        waiting += [answer for _, answer in self._verifications.values()]
        waiting += [answer for _, answer in self._pin_changes.values()]
        self._queries.clear()
        self._evictions.clear()
        self._verifications.clear()
        self._pin_changes.clear()
        for answer in waiting:
            answer(error)

    def _answer(self, command: CacheCommand, reply: _Reply) -> CacheAnswer | None:
        if isinstance(command, Explain):
            return self._explain(command, reply)
        if self._timeouts.is_stalled and isinstance(command, _STORAGE_ORDERS):
            raise _unanswered()
        if isinstance(command, Pin):
            return self._pin(command.prompt_token_ids, command.scope, pinned=True, reply=reply)
        if isinstance(command, Unpin):
            return self._pin(command.prompt_token_ids, command.scope, pinned=False, reply=reply)
        if isinstance(command, Evict):
            return self._evict(self._known(command), reply)
        if isinstance(command, ListKnown):
            return KnownBlocks(tuple(entry.hash for entry in reversed(self._known(command))))
        if isinstance(command, ListRecent):
            return self._recent(command)
        if isinstance(command, EvictBlocks):
            found = (self._cache.find(name) for name in command.block_hashes)
            return self._evict([entry for entry in found if entry is not None], reply)
        if isinstance(command, BeginListing):
            return self._listing.begin(command.tenants)
        if isinstance(command, ContinueListing):
            return self._listing.proceed()
        if isinstance(command, ReadTokens):
            return self._read_tokens(command, reply)
        if self._cache.storage is None:
            raise IcehouseError(Reason.CACHE_UNSUPPORTED, "this server has no SSD tier to verify")
        if isinstance(command, ListStored):
            task_id = self._cache.storage.list_stored(block_limit=command.block_limit)
        else:
            task_id = self._cache.storage.verify(command.block_hashes)
        if task_id is None:
            raise _storage_busy()
        self._verifications[task_id] = (self._clock.monotonic(), reply)
        return None

    def _recent(self, command: ListRecent) -> RecentBlocks:
        found = {entry.hash: entry for entry in self._cache.blocks(limit=command.block_limit)}
        entries = itertools.islice(found.values(), command.block_limit)
        return RecentBlocks(tuple(recent_block(e, with_tokens=command.with_tokens) for e in entries))

    def _explain(self, command: Explain, reply: _Reply) -> Explanation | None:
        """Answer now, or when the headers of blocks that this process never saw whole are read."""
        load_id = LoadId(next(self._load_ids))
        if not self._cache.ask_headers(
            load_id, command.prompt_token_ids, scope=command.scope, shared_scope=command.shared_scope
        ):
            return self._cache.explain(command)
        self._explanations[load_id] = (self._clock.monotonic(), command, reply)
        return None

    def _read_tokens(self, command: ReadTokens, reply: _Reply) -> BlockTokens | None:
        if self._cache.storage is None or not command.block_hashes:
            return BlockTokens(())
        if self._cache.rates.reads_hang:
            raise _storage_busy()
        load_id = LoadId(next(self._load_ids))
        if not self._cache.storage.read_heads(HeadRequest(load_id, command.block_hashes)):
            raise _storage_busy()
        self._readings[load_id] = (self._clock.monotonic(), reply)
        return None

    def _pin(
        self, token_ids: tuple[int, ...], scope: CacheScope, *, pinned: bool, reply: _Reply
    ) -> PinReport | None:
        """Answer now where all is in RAM alone, else when the storage thread says what is there."""
        entries = [entry for entry in self._cache.known_chain(token_ids, scope) if entry.ram or entry.ssd]
        if pinned:
            self._refuse_pin(entries)
        changed = tuple(entry for entry in entries if pinned or entry.is_pinned)
        change = _PinChange(pinned, changed, tuple(entry.is_pinned for entry in changed))
        stored = [entry.hash for entry in change.entries if entry.ssd or entry.is_spilling]
        if not stored or self._cache.storage is None:
            self._cache.pin(change.entries, pinned=pinned)
            return change.report()
        task_id = self._cache.pin_stored(stored, pinned=pinned)
        if task_id is None:
            raise _storage_busy()
        self._cache.pin(change.entries, pinned=pinned)
        self._pin_changes[task_id] = (change, reply)
        return None

    def _refuse_pin(self, entries: list[Entry]) -> None:
        """Raise what stands against pinning these blocks."""
        if not entries:
            raise _nothing_to_pin()
        excess = self._cache.pin_excess(entries)
        if excess is not None:
            whose = "all tenants" if excess.is_everybodys else "this tenant"
            raise Overloaded(
                Reason.MEMORY_SHORT,
                f"pinned blocks of {whose} would take {excess.wanted_bytes} bytes of the {excess.tier} there "
                f"is for {whose}, of which {excess.limit_bytes} may be pinned; unpin others first",
                retry_after_s=_PINNED_RETRY_S,
            )
        leaving = self._cache.keep(entries)
        if leaving:
            raise Overloaded(
                Reason.MEMORY_SHORT,
                f"{len(leaving)} of {len(entries)} blocks, {sum(e.ram_bytes for e in leaving)} bytes leave a "
                "full RAM tier and are not on SSD yet; try again when they are written",
                retry_after_s=_BUSY_RETRY_S,
            )

    def _pins_changed(self, outcome: PinsChanged) -> None:
        waiting = self._pin_changes.pop(outcome.task_id, None)
        if waiting is None:
            return  # the tier was lost meanwhile, by a reader, and the caller was told
        change, answer = waiting
        if not change.pinned:
            answer(change.report())
            return
        missing = frozenset(outcome.missing)
        # What was there when it was pinned may have been found damaged by now.
        kept = tuple(e for e in change.entries if e.ram or (e.ssd and e.hash not in missing))
        self._cache.pin([entry for entry in change.entries if entry not in kept], pinned=False)
        answer(dataclasses.replace(change, entries=kept).report() if kept else _nothing_to_pin())

    def _known(self, command: Evict | ListKnown) -> list[Entry]:
        """Return the blocks that a command means, in the order in which they were made or of the prompt."""
        if command.prompt_token_ids is None:
            return self._cache.blocks()
        return self._cache.known_chain(command.prompt_token_ids, command.scope)

    def _evict(self, entries: list[Entry], reply: _Reply) -> EvictReport | None:
        cache = self._cache
        in_ram = [entry for entry in entries if entry.ram]
        # A block on its way to SSD is there before this command is carried out.
        stored = [entry.hash for entry in entries if entry.ssd or entry.is_spilling]
        report = EvictReport(len(in_ram), sum(entry.ram_bytes for entry in in_ram))
        task_id = None
        # Nor is one gone that a quota or an order before has made go, until the storage thread gets there.
        if cache.storage is not None and (stored or cache.is_removing):
            task_id = cache.remove_stored(stored)
            if task_id is None:
                raise _storage_busy()
            self._evictions[task_id] = (report, reply)
        cache.purge(entries, with_ssd=task_id is not None)
        return report if task_id is None else None


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


def _storage_busy() -> Overloaded:
    """Return the refusal of a command that the SSD tier has no place for now."""
    return Overloaded(
        Reason.QUEUE_FULL,
        "too many orders wait for the storage thread; try again later",
        retry_after_s=_BUSY_RETRY_S,
    )
