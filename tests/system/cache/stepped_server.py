"""The whole house but mlx and sockets, stepped by hand on the test's own thread.

The real loop, scheduler, prefix cache and SSD tier; a runner that computes with token ids and a
clock that stands still. Nothing waits, so every interleaving a test asks for is the one it gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.events import CacheReport, Failed, Finished, Started, Usage
from icehouse_server.domain.ids import (
    DEFAULT_TENANT,
    NO_ADAPTER,
    AdapterDigest,
    AdapterName,
    Fingerprint,
    RequestId,
    Tenant,
)
from icehouse_server.domain.request import CacheUse, GenerationRequest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.mailbox import (
    Cancel,
    Command,
    DrainEngine,
    Mailbox,
    Message,
    QueryStats,
    Submit,
)
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.core.refusals import cancelled_by_client
from icehouse_server.engine.engine_loop import EngineLoop
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings, QuotaLimits
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.write_behind import QUIET_S
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.preemption import SchedulingParts
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.errors import IcehouseError
from icehouse_server.storage.api import Outcome, StorageClosed
from icehouse_server.storage.files import Files
from icehouse_server.storage.storage_settings import StorageSettings

from tests.fixtures.engine import FakeClock, FakeDecoder, Recorder, memory_model, model_info
from tests.fixtures.storage.sole_tier import SoleTier
from tests.fixtures.tree_check import check_tree
from tests.system.cache.token_runner import TOKEN_BYTES, TokenRunner

BLOCK = 4
BLOCK_BYTES = BLOCK * TOKEN_BYTES
FINGERPRINT = Fingerprint(b"f" * 32)
KV = CacheFacts()
WINDOWS = CacheFacts(window_token_count=6)
SHORT_WINDOWS = CacheFacts(window_token_count=3, cuttable_inside=False)
HYBRID = CacheFacts(needs_checkpoint=True, cuttable_inside=False)
STATE_ONLY = CacheFacts(has_kv=False, needs_checkpoint=True, cuttable_inside=False)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one request came to."""

    tokens: list[int]
    cache: CacheReport


class SteppedServer:
    """`directory` None goes without an SSD tier, or with another `tier`; `ram_blocks` is the RAM budget in
    plain kv blocks."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        facts: CacheFacts = KV,
        ram_blocks: float = 1000,
        spill_policy: str = "on_evict",
        chunk: int = BLOCK,
        block: int = BLOCK,
        fingerprint: Fingerprint = FINGERPRINT,
        min_prefix_token_count: int = 0,
        spill_queue_limit_bytes: int = 1 << 30,
        load_queue_limit_count: int = 16,
        checkpoint_interval_tokens: int = 2 * BLOCK,
        checkpoint_padding_bytes: int = 0,
        session_checkpoint_limit: int = 0,
        may_recompute: bool = False,
        measured_on: str = "",
        quotas: QuotaLimits | None = None,
        adapters: Mapping[AdapterName, AdapterDigest] | None = None,
        files=None,
        clock=None,
        tier: Callable[[Callable[[Outcome], None]], Any] | None = None,
        **storage_changes,
    ) -> None:
        self.clock = clock or FakeClock()
        self.runner = TokenRunner(facts, checkpoint_padding_bytes=checkpoint_padding_bytes)
        self.recorder = Recorder()
        self.mailbox: Mailbox[Message] = Mailbox(limit=1000)
        self.is_storage_alive = directory is not None or tier is not None
        self.holds_storage = False
        """Set by a test to let the storage thread's work wait until `settle_storage`."""
        self.storage: Any = None if tier is None else tier(self._take)
        self.closed: StorageClosed | None = None
        if directory is not None:
            settings = StorageSettings(
                directory=str(directory),
                limit_bytes=1 << 30,
                free_floor_bytes=0,
                daily_write_limit_bytes=0,
                spill_queue_limit_bytes=spill_queue_limit_bytes,
                load_queue_limit_count=load_queue_limit_count,
                task_queue_limit_count=64,
                reader_thread_count=1,
            )
            self.storage = SoleTier(
                dataclasses.replace(settings, **storage_changes),
                files=files or Files(),
                clock=self.clock,
                post=self._take,
                fingerprint=fingerprint,
            )
        self.cache = PrefixCache(
            settings=PrefixSettings(
                fingerprint=fingerprint,
                block_token_count=block,
                is_enabled=True,
                ram_limit_bytes=int(ram_blocks * BLOCK_BYTES),
                checkpoint_interval_tokens=checkpoint_interval_tokens,
                session_checkpoint_limit=session_checkpoint_limit,
                spill_policy=spill_policy,
                min_prefix_token_count=min_prefix_token_count,
                may_recompute=may_recompute,
                measured_on=measured_on,
                quotas=quotas or QuotaLimits(),
                adapters=adapters or {},
            ),
            facts=facts,
            runner=self.runner,
            storage=self.storage,
            clock=self.clock,
        )
        self.controller = CacheController(
            cache=self.cache, runner=self.runner, clock=self.clock, adopt_budget_s=1.0
        )
        self.room = WaitingQueue(WaitingLimits(request_limit=100))
        self.scheduler = Scheduler(
            SchedulerLimits(
                running_limit=8,
                prefilling_limit=4,
                prefill_chunk_token_count=chunk,
                cuts_before_last_token=self.controller.cuts_before_last_token,
                chunk_ends_at_last_block=self.cache.checkpoint_block_token_count,
            ),
            self.room,
        )
        self.budget = MemoryBudget()
        self.loop = EngineLoop(
            runner=self.runner,
            prefix=self.controller,
            scheduling=SchedulingParts(
                self.scheduler,
                MemoryGuard(
                    memory_model(), share=self.budget.enter(), weight_bytes=0, chunk_token_count=chunk
                ),
            ),
            model=model_info(),
            tokenizer=FakeDecoder(lambda ids: "".join(chr(i % 26 + 97) for i in ids)),
            mailbox=self.mailbox,
            listener=self.recorder,
            clock=self.clock,
        )

    def __enter__(self) -> SteppedServer:
        if self.storage is not None:
            self.storage.lock()
            self.storage.open()
            self.step_until_idle()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None and self.is_storage_alive:
            self.stop()

    def stop(self) -> None:
        """Drain, flush RAM to SSD and close the directory."""
        self.mailbox.post(DrainEngine(self.clock.now))
        self.holds_storage = False
        self.step_until_idle()
        for _ in self.loop.flush(deadline_time=self.clock.now + 60):
            self.settle_storage()
        if self.storage is not None:
            self.storage.close(deadline_time=self.clock.now + 60)
            self.settle_storage()
            self.is_storage_alive = False

    def settle_storage(self) -> None:
        """Let the storage thread and the readers do all they have to do."""
        if self.storage is None or not self.is_storage_alive:
            return
        for _ in range(100_000):
            if not self.storage.step():
                return
        raise AssertionError("the tier never comes to rest")

    def step_until_idle(self) -> None:
        """Step engine and storage until both have nothing left to do."""
        for _ in range(10_000):
            if not self.holds_storage:
                self.settle_storage()
            if self.loop.is_idle and len(self.mailbox) == 0:
                return
            self.loop.step()
        raise AssertionError("the house never comes to rest")

    def write_behind(self) -> None:
        """Let the disk be idle for so long that blocks are written behind; the storage thread works if it
        is not held."""
        self.clock.now += QUIET_S
        self.mailbox.post(QueryStats(lambda engine, cache: None))  # a message saves the engine its wait
        self.loop.step()
        self.step_until_idle()

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_output_tokens: int = 2,
        tenant: Tenant = DEFAULT_TENANT,
        adapter: AdapterName = NO_ADAPTER,
        shared_tenant: Tenant | None = None,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        session_id: str = "",
        ends_session: bool = False,
        is_prefetch: bool = False,
        borders: Sequence[int] = (),
    ) -> None:
        """Put a request into the mailbox. A name may be used again when its last request has ended."""
        self.recorder.events.pop(name, None)
        request = GenerationRequest(
            request_id=RequestId(name),
            prompt_token_ids=tuple(prompt),
            max_output_tokens=max_output_tokens,
            sampling=SamplingParams(),
            stop=(),
            arrival_time=self.clock.now,
            tenant=tenant,
            adapter=adapter,
            shared_tenant=shared_tenant,
            cache_use=cache_use,
            session_id=session_id,
            ends_session=ends_session,
            is_prefetch=is_prefetch,
            border_token_indices=tuple(borders),
        )
        assert self.mailbox.offer(Submit(request))

    def ask(self, name: str, prompt: Sequence[int], **how) -> Answer:
        """Run a request to its end and compare its text with what a run without a cache says."""
        self.submit(name, prompt, **how)
        self.step_until_idle()
        answer = self.answer(name)
        assert answer.tokens == expected_tokens(prompt, len(answer.tokens)), "a wrong text"
        return answer

    def answer(self, name: str) -> Answer:
        """Return what a finished request came to."""
        end = self.recorder.end_of(name)
        assert isinstance(end, Finished), end
        started = self.recorder.events[name][0]
        assert isinstance(started, Started) and started.cache == end.usage.cache
        return Answer(self.recorder.tokens_of(name), end.usage.cache)

    def usage(self, name: str) -> Usage:
        """Return what a finished request cost."""
        end = self.recorder.end_of(name)
        assert isinstance(end, Finished), end
        return end.usage

    def cancel(self, name: str) -> Failed:
        """Cancel a request and return its end."""
        self.mailbox.post(Cancel(RequestId(name), cancelled_by_client()))
        self.loop.step()
        end = self.recorder.end_of(name)
        assert isinstance(end, Failed), end
        return end

    def order(self, order: CacheCommand) -> CacheAnswer | IcehouseError:
        """Give an order and return its answer."""
        answers = self.give(order)
        self.step_until_idle()
        (answer,) = answers
        return answer

    def give(self, order: CacheCommand) -> list[CacheAnswer | IcehouseError]:
        """Give an order; the answer appears in the list that is returned."""
        answers: list[CacheAnswer | IcehouseError] = []
        self.mailbox.post(Command(order, answers.append))
        return answers

    def stats(self) -> CacheStats:
        """Return the cache's counters, the SSD tier's among them."""
        answers: list[CacheStats | None] = []
        self.mailbox.post(QueryStats(lambda engine, cache: answers.append(cache)))
        self.step_until_idle()
        (cache,) = answers
        assert cache is not None
        return cache

    def check(self) -> None:
        """Assert what always holds of the prefix tree."""
        check_tree(self.cache.tree)

    def ram_starts(self) -> list[int]:
        """Return where the blocks in RAM start, the next to be evicted first."""
        return [entry.start_token_index for entry in self.cache.tree.in_ram()]

    def _take(self, outcome) -> None:
        if isinstance(outcome, StorageClosed):
            self.closed = outcome
        self.mailbox.post(outcome)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Return what the token runner says after this prompt."""
    history = list(prompt)
    for _ in range(count):
        history.append(97 + sum(history) % 26)
    return history[len(prompt) :]


def prompt(count: int, *, salt: int = 0) -> list[int]:
    """Return a prompt that differs from those of other salts in its first token already."""
    return [1 + (i * 7 + i * i + 31 * salt) % 96 for i in range(count)]
