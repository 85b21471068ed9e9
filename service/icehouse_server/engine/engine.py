"""Engine as other rooms see it (submit, cancel, query, drain), and its life on the inference thread.

`start` begins that life: load the model, step until drained, then drop everything. An exception is logged
once, fails every request and leaves the engine FAILED; other engines go on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import cast

from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.mailbox import (
    Cancel,
    Command,
    DrainEngine,
    Mailbox,
    Message,
    QueryStats,
    Submit,
)
from icehouse_server.engine.core.memory_budget import BudgetShare, MemoryBudget
from icehouse_server.engine.core.ports import Decoder, Listener, LoadCalledOff, Pages, Runner
from icehouse_server.engine.core.refusals import cancelled_by_client, engine_failed, shutting_down
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.engine_loop import EngineLoop
from icehouse_server.engine.inference_thread import InferenceThread, Turns
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.preemption import SchedulingParts
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.errors import EngineFailed, IcehouseError, Overloaded, Reason, Unavailable, size_text

_log = logging.getLogger("icehouse.engine")

_MEASURED_BYTES = 256 << 20
"""Logits held at once for the log probabilities of a prompt: 32 tokens of a vocabulary of 262,144."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """The limits of an engine. After a drain, writing RAM to SSD takes at most `flush_timeout_s`."""

    limits: SchedulerLimits
    waiting: WaitingLimits
    flush_timeout_s: float = 0.0
    expected_bytes: int = 0
    """What the model is expected to take beside other models; 0 if unknown, or if there are no others."""


class Engine:
    """The engine of one model. Public methods may be called from any thread and, except for `join`, never
    block. Only the inference thread writes the public attributes.

    `runner` and `make_prefix` are called on the inference thread alone. Everything reaches the engine through
    `mailbox`: the SSD tier, too, posts its outcomes there.
    """

    def __init__(
        self,
        *,
        settings: EngineSettings,
        runner: Runner,
        make_prefix: Callable[[], CacheController],
        tokenizer: Decoder,
        mailbox: Mailbox[Message],
        listener: Listener,
        thread: InferenceThread,
        budget: MemoryBudget,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._make_prefix = make_prefix
        self._tokenizer = tokenizer
        self._mailbox = mailbox
        self._listener = listener
        self._thread = thread
        self._clock = thread.clock
        self._budget = budget
        self._ended = threading.Event()
        self.state = EngineState.LOADING
        self.flush_timeout_s = settings.flush_timeout_s
        """How long writing RAM's blocks to SSD may take at the end."""
        self.error: IcehouseError | None = None
        """Why the engine is FAILED, for the code that started it; callers get `engine_failed` instead."""

    def start(self) -> None:
        """Begin loading the model on the inference thread; the listener is told of READY or FAILED."""
        self._thread.add(self._turns(), self._mailbox, is_loading=lambda: self.state is EngineState.LOADING)

    @property
    def heartbeat_time(self) -> float:
        """`Clock.monotonic` of the inference thread's last turn; if stale, the thread is stuck or dead."""
        return self._thread.heartbeat_time

    @property
    def step_allowance_s(self) -> float:
        """How long a turn may take before the thread looks stuck: a few times the longest recent one."""
        return self._thread.step_allowance_s

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        """Submit a request, and others for the same prompt. Their events come through the listener.

        They are accepted together or not at all.

        Raises Unavailable while loading, draining or failed, and Overloaded if the mailbox is full.
        """
        if self.state is not EngineState.READY:
            raise self._not_ready()
        if not self._mailbox.offer(Submit(request, siblings), work_count=1 + len(siblings)):
            raise Overloaded(
                Reason.QUEUE_FULL,
                f"{self._mailbox.limit} requests arrived in one step, the most allowed; try again later",
                retry_after_s=1.0,
                metadata={"mailbox_limit": self._mailbox.limit},
            )

    def cancel(self, request_id: RequestId, error: IcehouseError | None = None) -> None:
        """End a request within one step. Unknown ids are ignored: the request may just have ended."""
        self._mailbox.post(Cancel(request_id, error or cancelled_by_client()))

    def request_stats(self, reply: Callable[[EngineStats, CacheStats | None], None]) -> None:
        """Have `reply` called on the inference thread between steps, or at once if that thread is gone."""
        if not self._mailbox.post(QueryStats(reply)):
            reply(EngineStats(), None)

    def submit_command(
        self, command: CacheCommand, reply: Callable[[CacheAnswer | IcehouseError], None]
    ) -> None:
        """Run a command on the prefix cache. `reply` is called once, on some thread, unless the engine ends
        while the storage thread is working on the command: then the engine's state is the answer."""
        if not self._mailbox.post(Command(command, reply)):
            reply(self._not_ready())

    def drain(self, *, grace_s: float) -> None:
        """Refuse new work, finish running requests within `grace_s`, write RAM to SSD and drop everything."""
        self._mailbox.post(DrainEngine(self._clock.monotonic() + grace_s))

    def join(self, *, timeout_s: float | None = None) -> bool:
        """Wait until the engine is STOPPED or FAILED; return False if it still runs after `timeout_s`."""
        return self._ended.wait(timeout_s)

    def _turns(self) -> Turns:
        """Run the engine from load to end, a turn per `next` (inference thread)."""
        loop: EngineLoop | None = None
        prefix: CacheController | None = None
        share = self._budget.enter()
        try:
            model = yield from self._load(share)
            prefix = self._make_prefix()
            scheduling = self._scheduling(model, prefix, share)
            loop = EngineLoop(
                runner=self._runner,
                prefix=prefix,
                scheduling=scheduling,
                model=model,
                tokenizer=self._tokenizer,
                mailbox=self._mailbox,
                listener=self._listener,
                clock=self._clock,
            )
            self._take_share(share, model, scheduling, loop=loop, prefix=prefix)
            self._listener.model_loaded(model)
            self._change_state(EngineState.READY)
            while not loop.is_done:
                yield loop.wait_s
                loop.is_hurried = self._thread.is_contended
                loop.step()
                if loop.is_draining and self.state is EngineState.READY:
                    self._change_state(EngineState.DRAINING)
            yield from loop.flush(deadline_time=self._clock.monotonic() + self.flush_timeout_s)
            loop.fail_all(shutting_down())
            prefix.cache.close()
            self._runner.close()
            self._thread.release = self._runner.end_thread
            self._change_state(EngineState.STOPPED)
        except LoadCalledOff:
            self._refuse_all(shutting_down())
            self._runner.close()
            self._change_state(EngineState.STOPPED)
        except Exception as error:  # the top of the engine's life: nothing above would see it
            self._fail(error, loop)
        # Only now does nothing refer to the arrays. If a loop failed the device may be gone, and then freeing
        # anything can end the process: so do it only for the sake of other models, loaded or to come.
        if self.state is EngineState.FAILED and (loop is None or self._settings.expected_bytes):
            self._free(prefix)
        self._budget.leave(share)
        self._ended.set()

    def _load(self, share: BudgetShare) -> Steps[ModelInfo]:
        """Load the model and count its memory as it grows. Raises Overloaded if memory is short."""
        expected_bytes = self._settings.expected_bytes
        self._check_room(share, self._runner.memory().active_bytes, missing_bytes=expected_bytes)
        share.reserved_bytes = expected_bytes
        steps = self._runner.load_steps(is_hurried=lambda: self._thread.is_contended)
        while True:
            before_bytes = self._runner.memory().active_bytes
            try:
                wait_s = next(steps)
            except StopIteration as end:
                share.reserved_bytes = 0
                return cast("ModelInfo", end.value)
            finally:
                self._thread.device_clock.note_other(self._clock.monotonic())
            active_bytes = self._runner.memory().active_bytes
            share.fixed_bytes += active_bytes - before_bytes
            share.reserved_bytes = max(0, expected_bytes - share.fixed_bytes)
            if share.fixed_bytes > expected_bytes:
                self._check_room(share, active_bytes)
            yield wait_s

    def _check_room(self, share: BudgetShare, active_bytes: int, *, missing_bytes: int = 0) -> None:
        """Raise Overloaded if other models leave too little memory for what this one still needs or has taken
        beyond its estimate."""
        if not self._settings.expected_bytes:
            return
        if excess := share.excess_bytes(active_bytes + missing_bytes):
            needed_bytes = share.fixed_bytes + missing_bytes
            raise Overloaded(
                Reason.MEMORY_SHORT,
                f"the model takes {size_text(needed_bytes)}, {size_text(excess)} more than other models "
                f"leave of {size_text(self._budget.limit_bytes)}; unload one of them, or raise "
                "memory_limit_bytes",
                retry_after_s=1.0,
                metadata={"needed_bytes": needed_bytes, "limit_bytes": self._budget.limit_bytes},
            )

    def _take_share(
        self,
        share: BudgetShare,
        model: ModelInfo,
        scheduling: SchedulingParts,
        *,
        loop: EngineLoop,
        prefix: CacheController,
    ) -> None:
        """Tell the other engines what this one holds. A pool of a fixed size is all its own: none of it is
        free for others until the model goes."""
        memory_model, (scheduler, guard) = self._runner.memory_model(), scheduling
        share.fixed_bytes = model.resident_bytes + memory_model.draft.weight_bytes + memory_model.pool_bytes
        share.is_idle = lambda: loop.is_idle
        if memory_model.pool_bytes:
            share.varying_bytes = lambda: self._runner.image_use().size_bytes
            return
        pages, ram = self._runner.pages, prefix.cache.tree.ram

        def varying_bytes() -> int:
            held_bytes, image_bytes = guard.held_bytes(scheduler.running), self._runner.image_use().size_bytes
            if not pages.held_bytes:
                return held_bytes + ram.used_bytes + image_bytes
            # Rows and blocks share pages; anything beyond the pages in use is stored elsewhere.
            besides_bytes = max(0, max(held_bytes, ram.used_bytes) - pages.used_bytes)
            return pages.held_bytes + besides_bytes + image_bytes

        def room_bytes() -> int:
            memory = self._runner.memory()
            return share.room_bytes(memory.active_bytes + memory.spare_bytes)

        share.varying_bytes = varying_bytes
        share.promised_bytes = lambda: guard.growth_bytes(scheduler.running)
        share.yield_pages = pages.give_back
        share.yield_ram = lambda size_bytes: _yield_ram(prefix, pages, size_bytes, room_bytes=room_bytes())
        if self._budget.limit_bytes:
            pages.bound(room_bytes)

    def _free(self, prefix: CacheController | None) -> None:
        """Free the arrays of a failed engine."""
        try:
            if prefix is not None:
                prefix.cache.close()
            self._runner.close()
        except Exception as error:  # it has failed already, and others go on
            _log.error("arrays_not_freed", exc_info=error)

    def _scheduling(self, model: ModelInfo, prefix: CacheController, share: BudgetShare) -> SchedulingParts:
        """Return the scheduler and the memory guard, with the limits that depend on the loaded model."""
        memory_model = self._runner.memory_model()
        measured = memory_model.measured_token_count(
            budget_bytes=_MEASURED_BYTES, block_token_count=prefix.cache.settings.block_token_count
        )
        given = self._settings.limits
        limits = dataclasses.replace(
            given.whole(model.context_token_limit) if model.runs_whole else given,
            cuts_before_last_token=prefix.cuts_before_last_token,
            chunk_ends_at_last_block=prefix.cache.checkpoint_block_token_count,
            measured_chunk_token_count=measured,
            layer_count=self._runner.layer_count(),
        )
        if share.most_bytes:
            limits = limits.within(memory_model, free_bytes=share.most_bytes - model.resident_bytes)
        guard = MemoryGuard(
            memory_model,
            share=share,
            weight_bytes=model.resident_bytes,
            chunk_token_count=limits.prefill_chunk_token_count,
            measured_chunk_token_count=min(measured, limits.prefill_chunk_token_count),
        )
        return SchedulingParts(Scheduler(limits, WaitingQueue(self._settings.waiting)), guard)

    def _fail(self, error: Exception, loop: EngineLoop | None) -> None:
        if isinstance(error, IcehouseError):
            # An operating error says what failed and what to do. A traceback would help nobody.
            _log.error("inference_loop_failed", extra={"reason": error.reason, "detail": error.message})
            self.error = error.with_traceback(None)  # a traceback would keep arrays alive
            self.error.__cause__ = self.error.__context__ = None
        else:
            _log.error("inference_loop_failed", exc_info=error)
            self.error = EngineFailed(
                Reason.ENGINE_FAILED,
                f"the inference loop failed: {type(error).__name__}; the server is stopping",
            )
        self.state = EngineState.FAILED
        told = error if isinstance(error, Unavailable) else engine_failed()
        if loop is not None:
            loop.fail_all(told)
        else:
            self._refuse_all(told)
        self._listener.state_changed(EngineState.FAILED, told)

    def _refuse_all(self, error: IcehouseError) -> None:
        """Answer messages that came while the model was loading; requests never get this far."""
        for message in self._mailbox.close():
            if isinstance(message, QueryStats):
                message.reply(EngineStats(), None)
            elif isinstance(message, Command):
                message.reply(error)

    def _change_state(self, state: EngineState) -> None:
        self.state = state
        self._listener.state_changed(state, None)

    def _not_ready(self) -> IcehouseError:
        if self.state is EngineState.LOADING:
            return Unavailable(Reason.LOADING, "the model is loading; try again shortly", retry_after_s=1.0)
        if self.state is EngineState.FAILED:
            return engine_failed()
        return shutting_down()


def _yield_ram(prefix: CacheController, pages: Pages, size_bytes: int, *, room_bytes: int) -> int:
    """Drop blocks in RAM to free this much memory for others, if possible; return how much was freed.

    If blocks are in pages, those pages are given back too, which takes room for a copy of the pages that
    stay. So at least a quarter of the pages in use goes, or every small need would make a copy.
    """
    if not pages.held_bytes:
        return prefix.yield_ram(size_bytes)
    if not pages.can_move:
        return 0
    used_bytes = pages.used_bytes
    freed_bytes = prefix.yield_ram(max(size_bytes, used_bytes // 4, used_bytes - room_bytes))
    return freed_bytes - (used_bytes - pages.used_bytes) + pages.give_back(size_bytes)
