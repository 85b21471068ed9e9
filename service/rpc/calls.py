"""What every call shares: admission by number, the deadline, errors to statuses, one log line at its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from service.clock import Clock
from service.domain.events import Finished, Usage
from service.errors import IcehouseError, Overloaded, Reason, Unavailable
from service.rpc import caller as callers
from service.rpc.caller import Caller
from service.rpc.status import code_of, internal_error, status_of

Context = grpc.aio.ServicerContext[Any, Any]

CALL_RETRY_S = 1.0
"""When to come back after being refused for the number of calls; calls last seconds."""

DEADLINE_TOLERANCE_S = 0.05
"""A call cancelled this shortly before its deadline was cancelled by it."""

_logger = logging.getLogger("service.rpc.calls")


@dataclasses.dataclass(slots=True)
class Call:
    """One call, and what its log line will say. Never holds prompt or output text."""

    method: str
    arrival_time: float
    """`Clock.monotonic`."""
    deadline_time: float | None
    caller: Caller
    request_id: str = ""
    prompt_token_count: int = 0
    usage: Usage | None = None

    def finish(self, event: Finished) -> None:
        """Note what the request cost."""
        self.usage = event.usage


class CallDesk:
    """Lets calls in and sees them out. Owned by the event loop."""

    def __init__(self, *, clock: Clock, concurrent_call_limit: int) -> None:
        self._clock = clock
        self._concurrent_call_limit = concurrent_call_limit
        self._running_count = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True

    async def wait_idle(self) -> None:
        """Return when no call runs."""
        await self._idle.wait()

    @contextlib.asynccontextmanager
    async def call(self, method: str, context: Context) -> AsyncIterator[Call]:
        """Wrap one servicer method; whatever leaves the block becomes a status and a log line."""
        call = Call(method, self._clock.monotonic(), self._deadline_time(context), callers.current.get())
        self._running_count += 1
        self._idle.clear()
        try:
            self._check_room()
            yield call
            self._log(call, grpc.StatusCode.OK)
        except IcehouseError as error:
            self._log(call, code_of(error), error)
            await context.abort_with_status(status_of(error))
        except asyncio.CancelledError:
            self._log(call, self._cancel_code(call))
            raise
        except Exception:
            # The edge of the house: the caller learns that it broke, the log learns why.
            _logger.exception("call broke method=%s request_id=%s", call.method, call.request_id)
            self._log(call, grpc.StatusCode.INTERNAL)
            await context.abort_with_status(status_of(internal_error()))
        finally:
            self._running_count -= 1
            if not self._running_count:
                self._idle.set()

    def _check_room(self) -> None:
        if self._closed:
            raise Unavailable(Reason.DRAINING, "the server is stopping; send the request to another one")
        if self._running_count <= self._concurrent_call_limit:
            return
        raise Overloaded(
            Reason.QUEUE_FULL,
            f"{self._concurrent_call_limit} calls are running, which is the limit; try again later",
            retry_after_s=CALL_RETRY_S,
            metadata={"concurrent_call_limit": self._concurrent_call_limit},
        )

    def _deadline_time(self, context: Context) -> float | None:
        remaining_s = context.time_remaining()
        return None if remaining_s is None else self._clock.monotonic() + remaining_s

    def _cancel_code(self, call: Call) -> grpc.StatusCode:
        # gRPC cancels a call whose deadline passed just as one whose caller left, and the caller's own
        # deadline passes a little earlier: its message was on the way.
        now = self._clock.monotonic() + DEADLINE_TOLERANCE_S
        if call.deadline_time is not None and now >= call.deadline_time:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return grpc.StatusCode.CANCELLED

    def _log(self, call: Call, code: grpc.StatusCode, error: IcehouseError | None = None) -> None:
        facts: dict[str, object] = {
            "method": call.method,
            "code": code.name,
            "duration_s": round(self._clock.monotonic() - call.arrival_time, 6),
        }
        if call.caller.tenant is not None:
            facts["tenant"] = call.caller.tenant
        if call.request_id:
            facts["request_id"] = call.request_id
        if call.prompt_token_count:
            facts["prompt_tokens"] = call.prompt_token_count
        if error is not None:
            facts["reason"] = error.reason.value
        if call.usage is not None:
            facts["cached_tokens"] = call.usage.cache.cached_token_count
            facts["output_tokens"] = call.usage.output_token_count
            facts["queue_s"] = round(call.usage.queue_s, 6)
            facts["ttft_s"] = round(call.usage.ttft_s, 6)
        line = " ".join(f"{name}={value}" for name, value in facts.items())
        _logger.info("call finished %s", line, extra={"facts": facts})
