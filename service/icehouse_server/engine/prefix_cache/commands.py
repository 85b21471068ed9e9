"""Commands of the prefix cache: explain, pin, evict, verify, count; from outside a request.

Inference thread only. What needs the storage thread is answered when its outcome comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_commands import (
    BlockMatch,
    CacheAnswer,
    CacheCommand,
    Evict,
    EvictReport,
    Explain,
    Explanation,
    Pin,
    PinReport,
    Tier,
    Unpin,
    VerifyReport,
)
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import CacheScope
from icehouse_server.engine.core.mailbox import Command
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.stats import cache_stats
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason, StorageError
from icehouse_server.storage.loads import HeadRequest, HeadsRead, LoadId
from icehouse_server.storage.messages import (
    Outcome,
    Purged,
    StatsAnswer,
    StorageClosed,
    StorageFailed,
    StorageStats,
    TaskGivenUp,
    TaskId,
    Verified,
)

_Reply = Callable[[CacheAnswer | IcehouseError], None]
_BUSY_RETRY_S = 1.0


class CacheCommands:
    """Carries out orders on one prefix cache."""

    def __init__(self, cache: PrefixCache, clock: Clock, *, load_ids: Iterator[int]) -> None:
        self._cache = cache
        self._clock = clock
        self._load_ids = load_ids
        self._explanations: dict[LoadId, tuple[Explain, _Reply]] = {}
        self._queries: dict[TaskId, Callable[[CacheStats], None]] = {}
        self._evictions: dict[TaskId, tuple[EvictReport, _Reply]] = {}
        self._verifications: dict[TaskId, tuple[float, _Reply]] = {}

    def carry_out(self, message: Command) -> None:
        """Answer an order now, or when the storage thread has done its part."""
        if not self._cache.is_supported:
            message.reply(IcehouseError(Reason.CACHE_UNSUPPORTED, self._cache.facts.unsupported_detail))
            return
        answer: CacheAnswer | IcehouseError | None
        try:
            answer = self._answer(message.order, message.reply)
        except IcehouseError as error:
            answer = error
        if answer is not None:
            message.reply(answer)

    def query(self, reply: Callable[[CacheStats], None]) -> None:
        """Call `reply` with all counters, the storage thread's included."""
        task_id = self._cache.storage.request_stats() if self._cache.storage is not None else None
        if task_id is None:
            reply(self.stats(None))
        else:
            self._queries[task_id] = reply

    def stats(self, storage: StorageStats | None) -> CacheStats:
        """Return the counters, with the SSD tier's when they are given."""
        return cache_stats(self._cache, storage, now=self._clock.monotonic())

    def met(self, outcome: HeadsRead) -> None:
        """Explain what waited for these headers; their tokens are known by now."""
        waiting = self._explanations.pop(outcome.load_id, None)
        if waiting is not None:
            order, answer = waiting
            answer(self._explained(order))

    def receive(self, outcome: Outcome) -> None:
        """Take an outcome that answers an order, or that says something of the tier as a whole."""
        if isinstance(outcome, StatsAnswer):
            reply = self._queries.pop(outcome.task_id, None)
            if reply is not None:
                reply(self.stats(outcome.stats))
        elif isinstance(outcome, Purged):
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
        elif isinstance(outcome, TaskGivenUp):
            self._give_up(outcome)
        elif isinstance(outcome, StorageFailed | StorageClosed):
            self._end_storage()

    def _give_up(self, outcome: TaskGivenUp) -> None:
        waiting = self._evictions.pop(outcome.task_id, None) or self._verifications.pop(outcome.task_id, None)
        if waiting is not None:
            _, answer = waiting
            answer(
                StorageError(
                    Reason.STORE_UNUSABLE,
                    f"the SSD tier cannot do this now: {outcome.detail}; try again later",
                )
            )

    def _end_storage(self) -> None:
        """The SSD tier is gone: serve on from RAM, and answer whoever waits for it."""
        self._cache.lose_storage()
        error = StorageError(Reason.STORE_UNUSABLE, "the SSD tier has stopped; see the server's log")
        for reply in self._queries.values():
            reply(self.stats(None))
        for order, answer in self._explanations.values():
            answer(self._explained(order))
        self._explanations.clear()
        waiting = [answer for _, answer in self._evictions.values()]
        waiting += [answer for _, answer in self._verifications.values()]
        self._queries.clear()
        self._evictions.clear()
        self._verifications.clear()
        for answer in waiting:
            answer(error)

    def _answer(self, order: CacheCommand, reply: _Reply) -> CacheAnswer | None:
        if isinstance(order, Explain):
            return self._explain(order, reply)
        if isinstance(order, Pin):
            return self._pin(order.prompt_token_ids, order.scope, pinned=True)
        if isinstance(order, Unpin):
            return self._pin(order.prompt_token_ids, order.scope, pinned=False)
        if isinstance(order, Evict):
            return self._evict(order, reply)
        if self._cache.storage is None:
            raise IcehouseError(Reason.CACHE_UNSUPPORTED, "this server has no SSD tier to verify")
        hashes = [entry.hash for entry in self._cache.index if entry.ssd]
        chosen = hashes[: order.block_limit] if order.block_limit else None
        task_id = self._cache.storage.verify(chosen)
        if task_id is None:
            raise storage_busy()
        self._verifications[task_id] = (self._clock.monotonic(), reply)
        return None

    def _explain(self, order: Explain, reply: _Reply) -> Explanation | None:
        """Answer now, or when the headers of blocks that this process never saw whole are read."""
        cache, storage = self._cache, self._cache.storage
        unread_blocks = cache.index.unread_blocks(
            root=cache.root(order.scope),
            token_ids=order.prompt_token_ids,
            token_limit=len(order.prompt_token_ids) - 1,
            shared_root=cache.shared_root(order.shared_scope),
        )
        if storage is None or not unread_blocks:
            return self._explained(order)
        load_id = LoadId(next(self._load_ids))
        if not storage.read_heads(HeadRequest(load_id, tuple(entry.hash for entry in unread_blocks))):
            return self._explained(order)
        self._explanations[load_id] = (order, reply)
        return None

    def _explained(self, order: Explain) -> Explanation:
        cache = self._cache
        plan = cache.planner.plan(
            root=cache.root(order.scope),
            token_ids=order.prompt_token_ids,
            with_ssd=cache.storage is not None,
            shared_root=cache.shared_root(order.shared_scope),
        )
        ssd_bytes = cache.planner.ssd_bytes(plan)
        restore_s = cache.rates.restore_s(ssd_bytes=ssd_bytes, token_count=plan.token_count)
        rest_s = cache.rates.prefill_s(len(order.prompt_token_ids) - plan.token_count)
        cold_s = cache.rates.prefill_s(len(order.prompt_token_ids))
        return Explanation(
            cache=dataclasses.replace(plan.report, restore_s=restore_s),
            blocks=tuple(_block_match(entry) for entry in plan.entries),
            predicted_ttft_s=restore_s + rest_s if cold_s else None,
            predicted_cold_ttft_s=cold_s or None,
        )

    def _pin(self, token_ids: tuple[int, ...], scope: CacheScope, *, pinned: bool) -> PinReport:
        entries = [entry for entry in self._known(token_ids, scope) if entry.ram or entry.ssd]
        if pinned and not entries:
            raise NotFound(
                Reason.BLOCK_NOT_FOUND,
                "no block of this prompt is cached; send it through Warm or Generate first",
            )
        changed = [entry for entry in entries if pinned or entry.is_pinned]
        stored = [entry.hash for entry in changed if entry.ssd]
        storage = self._cache.storage
        if stored and storage is not None:
            done = storage.pin(stored) if pinned else storage.unpin(stored)
            if not done:
                raise storage_busy()
        for entry in changed:
            entry.is_pinned = pinned
        return PinReport(
            block_count=len(changed),
            token_count=sum(entry.token_count for entry in changed),
            size_bytes=sum(entry.ram_bytes or sum(entry.ssd.values()) for entry in changed),
        )

    def _evict(self, order: Evict, reply: _Reply) -> EvictReport | None:
        cache = self._cache
        if order.prompt_token_ids is None:
            entries = list(cache.index)
        else:
            entries = self._known(order.prompt_token_ids, order.scope)
        in_ram = [entry for entry in entries if entry.ram]
        # A block on its way to SSD is there before this order is carried out.
        stored = [entry.hash for entry in entries if entry.ssd or entry.is_spilling]
        report = EvictReport(len(in_ram), sum(entry.ram_bytes for entry in in_ram))
        task_id = None
        if stored and cache.storage is not None:
            task_id = cache.storage.evict(stored)
            if task_id is None:
                raise storage_busy()
            self._evictions[task_id] = (report, reply)
        for entry in entries:
            entry.is_pinned = False
            cache.drop(entry)
            if task_id is not None:
                # Gone for whoever asks from now on: what pins or plans next must not count on it.
                cache.forget_stored(entry.hash)
        return report if task_id is None else None

    def _known(self, token_ids: tuple[int, ...], scope: CacheScope) -> list[Entry]:
        cache = self._cache
        return list(cache.index.known_chain(root=cache.root(scope), token_ids=token_ids))


def _block_match(entry: Entry) -> BlockMatch:
    return BlockMatch(
        hash=entry.hash,
        start_token_index=entry.start_token_index,
        token_count=entry.token_count,
        size_bytes=entry.ram_bytes or sum(entry.ssd.values()),
        tier=Tier.RAM if entry.ram else Tier.SSD,
        has_checkpoint=entry.has(RegionKind.CHECKPOINT, with_ssd=True),
        pinned=entry.is_pinned,
    )


def storage_busy() -> Overloaded:
    """Return the refusal of an order that the SSD tier has no room for now."""
    return Overloaded(
        Reason.QUEUE_FULL,
        "too many orders wait for the storage thread; try again later",
        retry_after_s=_BUSY_RETRY_S,
    )
