"""An engine with its prefix cache and SSD tier, in this process, on a tiny real model."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from icehouse_server.clock import Clock, SystemClock
from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.events import CacheReport, Event, Finished, PrefillProgress, Started
from icehouse_server.domain.ids import DEFAULT_TENANT, NO_ADAPTER, AdapterName, RequestId, Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.request import CacheUse, GenerationRequest, ImageSpan, LogprobsWanted, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.mailbox import Mailbox, Message
from icehouse_server.engine.core.memory_budget import MemoryBudget
from icehouse_server.engine.engine import Engine, EngineSettings
from icehouse_server.engine.inference_thread import InferenceThread
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import PrefixSettings
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.identity.fingerprint import model_fingerprint
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits
from icehouse_server.errors import IcehouseError
from icehouse_server.storage.api import Inventory, Outcome
from icehouse_server.storage.files import Files
from icehouse_server.storage.storage_settings import StorageSettings

from tests.fixtures.engine import Recorder
from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.sole_tier import SoleTier

BLOCK = 16


class WatchingRecorder(Recorder):
    """Calls back, on the inference thread, as a prompt's progress is told."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: dict[str, tuple[bool, Callable[[], None]]] = {}

    def on_first_progress(self, name: str, action: Callable[[], None]) -> None:
        """Call back when the first chunk is done."""
        self._watches[name] = (False, action)

    def on_last_progress(self, name: str, action: Callable[[], None]) -> None:
        """Call back when the whole prompt but its last token is done."""
        self._watches[name] = (True, action)

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        super().publish(events)
        for name, event in events:
            if name in self._watches and isinstance(event, PrefillProgress):
                waits_for_last, action = self._watches[name]
                if not waits_for_last or event.processed_token_count >= event.prompt_token_count - 1:
                    del self._watches[name]
                    action()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one request came to."""

    tokens: list[int]
    cache: CacheReport
    usage_cache: CacheReport


class CacheServer:
    """Started by `with`; leaving drains, flushes RAM to SSD and closes the directory. `storage_clock` is the
    storage thread's."""

    def __init__(
        self,
        folder: Path,
        directory: Path | None,
        *,
        chunk: int = BLOCK,
        grid: int = 1,
        chunk_s: float = 0.0,
        ram_bytes: int = 1 << 30,
        spill_policy: str = "on_evict",
        kv_bits: int = 0,
        kv_group_size: int = 32,
        checkpoint_interval_tokens: int = 64,
        is_enabled: bool = True,
        is_pipelined: bool = False,
        attention: Attention = Attention.AUTO,
        files: Files | None = None,
        adapters: Sequence[model_loader.AdapterSource] = (),
        draft: Path | None = None,
        storage_clock: Clock | None = None,
        thread: InferenceThread | None = None,
        budget: MemoryBudget | None = None,
        **storage_changes,
    ) -> None:
        """`thread` is one that others use too, and who made it starts and ends it."""
        clock = SystemClock()
        self._has_inventory = threading.Event()
        self._has_outcome = threading.Event()
        source = model_loader.ModelSource(path=folder, model_id="tiny", adapters=tuple(adapters))
        tokenizer = model_loader.load_tokenizer(source)
        fingerprint = model_fingerprint(
            folder, dtype="stored", kv_format=f"{kv_bits}", block_token_count=BLOCK
        )
        runner = ModelRunner(
            source=source,
            tokenizer=tokenizer,
            settings=RunnerSettings(BLOCK, kv_bits, kv_group_size, is_pipelined, attention),
            clock=clock,
            draft_source=None if draft is None else model_loader.ModelSource(path=draft, model_id="draft"),
        )
        self.recorder = WatchingRecorder()
        self._has_own_thread = thread is None
        self.thread = thread or InferenceThread(clock)
        self.mailbox: Mailbox[Message] = Mailbox(limit=100, changed=self.thread.changed)
        self.storage: SoleTier | None = None
        filed_as = storage_changes.pop("fingerprint", fingerprint.value)
        if directory is not None:
            storage_settings = StorageSettings(
                directory=str(directory),
                limit_bytes=1 << 30,
                free_floor_bytes=0,
                daily_write_limit_bytes=0,
                spill_queue_limit_bytes=1 << 26,
                load_queue_limit_count=16,
                task_queue_limit_count=64,
                reader_thread_count=2,
            )
            self.storage = SoleTier(
                dataclasses.replace(storage_settings, **storage_changes),
                files=files or Files(),
                clock=storage_clock or clock,
                post=self._take,
                fingerprint=filed_as,
                details=fingerprint.details,
            )
        settings = PrefixSettings(
            fingerprint=filed_as,
            block_token_count=BLOCK,
            is_enabled=is_enabled,
            ram_limit_bytes=ram_bytes,
            checkpoint_interval_tokens=checkpoint_interval_tokens,
            session_checkpoint_limit=2,
            spill_policy=spill_policy,
            may_recompute=False,
            adapters={adapter.name: adapter.digest for adapter in adapters},
        )

        def make_prefix() -> CacheController:
            self.cache = PrefixCache(
                settings=settings,
                facts=runner.blocks.facts,
                runner=runner.blocks,
                storage=self.storage,
                clock=clock,
            )
            return CacheController(cache=self.cache, runner=runner.blocks, clock=clock, adopt_budget_s=0.005)

        self.engine = Engine(
            runner=runner,
            settings=EngineSettings(
                limits=SchedulerLimits(
                    running_limit=20,
                    prefilling_limit=4,
                    prefill_chunk_token_count=chunk,
                    prefill_grid_token_count=grid,
                    prefill_chunk_s=chunk_s,
                ),
                waiting=WaitingLimits(request_limit=100),
                flush_timeout_s=BOUND_S,
            ),
            make_prefix=make_prefix,
            tokenizer=tokenizer,
            mailbox=self.mailbox,
            listener=self.recorder,
            thread=self.thread,
            budget=budget or MemoryBudget(),
        )

    def __enter__(self) -> CacheServer:
        if self.storage is not None:
            self.storage.start()
            # Requests come after the inventory, as they do where a model takes longer to load.
            assert self._has_inventory.wait(BOUND_S)
        if self._has_own_thread:
            self.thread.start()
        self.engine.start()
        self.recorder.wait_for_state(EngineState.READY)
        if self.storage is not None:
            self.stats()  # answered behind the inventory, which the engine has taken in by then
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.drain(grace_s=BOUND_S)
        assert self.engine.join(timeout_s=BOUND_S)
        if self._has_own_thread:
            self.thread.end()
            assert self.thread.join(timeout_s=BOUND_S)
        if self.storage is not None:
            self.storage.close(deadline_time=SystemClock().monotonic() + BOUND_S)
            assert self.storage.join(timeout_s=BOUND_S)

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_output_tokens: int = 8,
        sampling: SamplingParams | None = None,
        tenant: Tenant = DEFAULT_TENANT,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        adapter: AdapterName = NO_ADAPTER,
        speculation: Speculation | None = None,
        logprobs: LogprobsWanted | None = None,
        images: Sequence[ImageSpan] = (),
        session_id: str = "",
        ends_session: bool = False,
        borders: Sequence[int] = (),
    ) -> None:
        """Hand in a request without waiting for it."""
        self.engine.submit(
            GenerationRequest(
                request_id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                max_output_tokens=max_output_tokens,
                sampling=sampling or SamplingParams(),
                stop=(),
                arrival_time=0.0,
                tenant=tenant,
                adapter=adapter,
                speculation=speculation,
                cache_use=cache_use,
                logprobs=logprobs,
                images=tuple(images),
                session_id=session_id,
                ends_session=ends_session,
                border_token_indices=tuple(borders),
            )
        )

    def answer(self, name: str) -> Answer:
        """Wait for a request's end and return what came of it."""
        end = self.recorder.wait_for_end(name)
        assert isinstance(end, Finished), end
        started = self.recorder.events[name][0]
        assert isinstance(started, Started)
        return Answer(self.recorder.tokens_of(name), started.cache, end.usage.cache)

    def ask(self, name: str, prompt: Sequence[int], **kwargs) -> Answer:
        """Hand in a request and wait for its end."""
        self.submit(name, prompt, **kwargs)
        return self.answer(name)

    def stats(self) -> tuple[EngineStats, CacheStats]:
        """Ask the engine for all its counters."""
        answers: list[tuple[EngineStats, CacheStats | None]] = []
        came = threading.Event()

        def take(engine: EngineStats, cache: CacheStats | None) -> None:
            answers.append((engine, cache))
            came.set()

        self.engine.request_stats(take)
        assert came.wait(BOUND_S)
        ((engine, cache),) = answers
        assert cache is not None
        return engine, cache

    def settle(self) -> CacheStats:
        """Wait until each spill is written or dropped and nothing waits for an idle disk; return what is
        counted then."""
        while True:
            self._has_outcome.clear()
            _, cache = self.stats()
            if cache.spill.queue_count == cache.spill.behind_waiting_count == 0:
                return cache
            assert self._has_outcome.wait(BOUND_S), "the write queue never empties"

    def order(self, order: CacheCommand) -> CacheAnswer | IcehouseError:
        """Give an order to the cache and wait for its answer."""
        answers: list[CacheAnswer | IcehouseError] = []
        came = threading.Event()

        def take(answer: CacheAnswer | IcehouseError) -> None:
            answers.append(answer)
            came.set()

        self.engine.submit_command(order, take)
        assert came.wait(BOUND_S)
        (answer,) = answers
        return answer

    def _take(self, outcome: Outcome) -> None:
        self.mailbox.post(outcome)
        self._has_outcome.set()
        if isinstance(outcome, Inventory):
            self._has_inventory.set()
