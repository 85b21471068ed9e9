"""Engine as other rooms see it: submit, cancel, query, drain; and the thread behind it.

`start` begins the inference thread, which loads the model, steps until drained, and drops
everything it made. An exception out of the loop is logged once, fails every request, and
leaves the engine FAILED; the process is expected to end.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.mailbox import Cancel, Command, Drain, Mailbox, Message, QueryStats, Submit
from icehouse_server.engine.core.ports import Decoder, Listener, Runner
from icehouse_server.engine.core.refusals import cancelled_by_client, engine_failed, shutting_down
from icehouse_server.engine.engine_loop import EngineLoop
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.preemption import SchedulingParts
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.engine.scheduling.waiting_queue import WaitingLimits, WaitingQueue
from icehouse_server.errors import EngineFailed, IcehouseError, Overloaded, Reason, Unavailable

_log = logging.getLogger("icehouse.engine")

_STUCK_FACTOR = 4.0
_FADING = 0.99
_MEASURED_BYTES = 256 << 20
"""Logits held at once for the log probabilities of a prompt: 32 tokens of a vocabulary of 262,144."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is bounded by. After a drain RAM is written to SSD for at most `flush_timeout_s`."""

    limits: SchedulerLimits
    waiting: WaitingLimits
    flush_timeout_s: float = 0.0


class Engine:
    """Owns the inference thread. Its public methods may be called from any thread and never block; only the
    inference thread writes its public attributes.

    `runner` and `make_prefix` are called on the inference thread alone. A `memory_limit_bytes` of 0 is no
    limit. `mailbox` is its only ear: the SSD tier posts its outcomes there.
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
        clock: Clock,
        memory_limit_bytes: int = 0,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._make_prefix = make_prefix
        self._tokenizer = tokenizer
        self._mailbox = mailbox
        self._listener = listener
        self._clock = clock
        self._memory_limit_bytes = memory_limit_bytes
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self.state = EngineState.LOADING
        self.heartbeat_time = clock.monotonic()
        """`Clock.monotonic` of the last step's start; stale means stuck or dead."""
        self.step_allowance_s = 0.0
        """How long a step may take before it looks stuck: a few times the longest of late."""
        self.flush_timeout_s = settings.flush_timeout_s
        """How long the thread may take at its end to write RAM's blocks to SSD."""
        self.error: IcehouseError | None = None
        """Why the engine is FAILED, for whoever started it; callers get `engine_failed` instead."""

    def start(self) -> None:
        """Begin loading the model on the inference thread; the listener hears of READY or FAILED."""
        self._thread.start()

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        """Hand in a request, and others for the same prompt; their events come through the listener.

        They are taken in together or not at all.

        Raises Unavailable while loading, draining or failed, and Overloaded when the mailbox is full.
        """
        if self.state is not EngineState.READY:
            raise self._not_ready()
        if not self._mailbox.offer(Submit(request, siblings), work_count=1 + len(siblings)):
            raise Overloaded(
                Reason.QUEUE_FULL,
                f"{self._mailbox.limit} requests arrived in one step, which is the limit; try again later",
                retry_after_s=1.0,
                metadata={"mailbox_limit": self._mailbox.limit},
            )

    def cancel(self, request_id: RequestId, error: IcehouseError | None = None) -> None:
        """End a request within one step; unknown ids are ignored, since a cancel may cross an end."""
        self._mailbox.post(Cancel(request_id, error or cancelled_by_client()))

    def request_stats(self, reply: Callable[[EngineStats, CacheStats | None], None]) -> None:
        """Have `reply` called on the inference thread between steps; at once when that thread is gone."""
        if not self._mailbox.post(QueryStats(reply)):
            reply(EngineStats(), None)

    def submit_command(
        self, command: CacheCommand, reply: Callable[[CacheAnswer | IcehouseError], None]
    ) -> None:
        """Have a command to the prefix cache carried out; `reply` is called once, on some thread, unless the
        engine ends while the storage thread is at it: then its state is the answer."""
        if not self._mailbox.post(Command(command, reply)):
            reply(self._not_ready())

    def drain(self, *, grace_s: float) -> None:
        """Refuse new work, finish what runs within `grace_s`, then stop the thread."""
        self._mailbox.post(Drain(self._clock.monotonic() + grace_s))

    def join(self, *, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; False when it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        loop: EngineLoop | None = None
        try:
            model = self._runner.load()
            prefix = self._make_prefix()
            loop = EngineLoop(
                runner=self._runner,
                prefix=prefix,
                scheduling=self._scheduling(model, prefix),
                model=model,
                tokenizer=self._tokenizer,
                mailbox=self._mailbox,
                listener=self._listener,
                clock=self._clock,
            )
            self._listener.model_loaded(model)
            self._change_state(EngineState.READY)
            while not loop.is_done:
                self.heartbeat_time = self._clock.monotonic()
                loop.step()
                self._note_step(self._clock.monotonic() - self.heartbeat_time)
                if loop.is_draining and self.state is EngineState.READY:
                    self._change_state(EngineState.DRAINING)
            loop.flush(deadline_time=self._clock.monotonic() + self.flush_timeout_s)
            loop.fail_all(shutting_down())
            self._runner.close()
            self._runner.end_thread()
            self._change_state(EngineState.STOPPED)
        except Exception as error:  # the thread's top: nothing above would see it
            self._fail(error, loop)

    def _scheduling(self, model: ModelInfo, prefix: CacheController) -> SchedulingParts:
        """Return what decides who runs, with the bounds that depend on the loaded model."""
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
        if self._memory_limit_bytes:
            limits = limits.within(memory_model, free_bytes=self._memory_limit_bytes - model.resident_bytes)
        guard = MemoryGuard(
            memory_model,
            limit_bytes=self._memory_limit_bytes,
            weight_bytes=model.resident_bytes,
            chunk_token_count=limits.prefill_chunk_token_count,
            measured_chunk_token_count=min(measured, limits.prefill_chunk_token_count),
        )
        return SchedulingParts(Scheduler(limits, WaitingQueue(self._settings.waiting)), guard)

    def _note_step(self, elapsed_s: float) -> None:
        # The longest step fades, so that one slow chunk long ago does not hide a stuck step for ever.
        self.step_allowance_s = max(_STUCK_FACTOR * elapsed_s, self.step_allowance_s * _FADING)

    def _fail(self, error: Exception, loop: EngineLoop | None) -> None:
        if isinstance(error, IcehouseError):
            # An operating error says what failed and what to do; where it was raised helps nobody.
            _log.error("inference_loop_failed", extra={"reason": error.reason, "detail": error.message})
            self.error = error
        else:
            _log.error("inference_loop_failed", exc_info=error)
            self.error = EngineFailed(
                Reason.ENGINE_FAILED,
                f"the inference loop failed: {type(error).__name__}; the server is ending",
            )
        self.state = EngineState.FAILED
        if loop is not None:
            loop.fail_all(engine_failed())
        else:
            self._refuse_all(engine_failed())
        self._listener.state_changed(EngineState.FAILED, engine_failed())

    def _refuse_all(self, error: IcehouseError) -> None:
        """Answer what came while the model was loading; requests were refused before they came here."""
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
