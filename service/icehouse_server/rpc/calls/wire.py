"""Wire watcher: observes every call from the outside: method, status, duration, bytes.

It is the outermost interceptor, so that it also sees refusals, health checks and reflection. Unknown method
names are reported as "other", so that nobody can fill the metrics with invented names.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from icehouse_server.clock import Clock
from icehouse_server.domain.call import WireRecord
from icehouse_server.telemetry.call_metrics import CallMetrics

OTHER_METHOD = "other"
"""The name in gRPC's own metrics for a method that is not registered (proposal A66)."""

DEADLINE_TOLERANCE_S = 0.05
"""A call cancelled within this time before its deadline counts as ended by the deadline."""

_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}

current_method: contextvars.ContextVar[str] = contextvars.ContextVar("method", default="")
"""Full name of the method that this task serves; empty outside of a call."""
current_limit: contextvars.ContextVar[Limit | None] = contextvars.ContextVar("limit", default=None)
"""What may end this task's call."""
received_bytes: contextvars.ContextVar[int] = contextvars.ContextVar("received_bytes", default=0)
"""Size of this task's request; 0 until it has arrived."""
_cancel_code: contextvars.ContextVar[grpc.StatusCode | None] = contextvars.ContextVar(
    "cancel_code", default=None
)


class Limit:
    """What ends a call from inside by cancelling its task: the method's deadline, or a stop."""

    def __init__(self, deadline_s: float | None) -> None:
        self.timer = asyncio.timeout(deadline_s)
        self.is_cut = False
        """Whether a stop ended it."""

    @property
    def code(self) -> grpc.StatusCode | None:
        """Why it ended the call; None if it did not."""
        if not self.timer.expired():
            return None
        return grpc.StatusCode.UNAVAILABLE if self.is_cut else grpc.StatusCode.DEADLINE_EXCEEDED

    def cut(self) -> None:
        # An expired timer cannot be rescheduled.
        with contextlib.suppress(RuntimeError):
            self.timer.reschedule(asyncio.get_running_loop().time())
            self.is_cut = True


def cancel_code(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    """Return what ended this task's cancelled call: a deadline, a stop or its caller.

    gRPC cancels in the same way for all three, and the caller's own deadline passes a little earlier than
    ours, because its message took time. The first answer is kept, so that later callers get the same one.
    """
    code = _cancel_code.get()
    if code is None:
        limit, remaining_s = current_limit.get(), context.time_remaining()
        is_late = remaining_s is not None and remaining_s <= DEADLINE_TOLERANCE_S
        code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
        code = (limit.code if limit is not None else None) or code
        _cancel_code.set(code)
    return code


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedResponse:
    """A response that is already encoded: large responses are encoded piece by piece."""

    data: bytes

    def ByteSize(self) -> int:
        return len(self.data)


class WireInterceptor(grpc.aio.ServerInterceptor):
    """Notifies the watchers when a call begins and ends."""

    def __init__(self, watchers: tuple[CallMetrics, ...], clock: Clock) -> None:
        self._watchers = watchers
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = OTHER_METHOD if handler is None else handler_call_details.method.removeprefix("/")
        call = _WatchedCall(method, self._watchers, self._clock)
        if handler is None:
            call.end("UNIMPLEMENTED")
            return None
        return call.wrap(handler)


class _WatchedCall:
    """One call between its first byte and its last."""

    def __init__(self, method: str, watchers: tuple[CallMetrics, ...], clock: Clock) -> None:
        self._method = method
        self._watchers = watchers
        self._clock = clock
        self._start_time = clock.monotonic()
        self._sent_bytes = 0
        self._received_bytes = 0
        for watcher in watchers:
            watcher.call_started(method)

    def wrap(self, handler: Any) -> Any:
        assert handler.stream_stream is not None, "the interceptor inside makes streams of all methods"
        assert handler.request_deserializer is None, "and parses their messages"
        return grpc.stream_stream_rpc_method_handler(
            functools.partial(self._serve, handler.stream_stream),
            request_deserializer=self._read,
            response_serializer=functools.partial(self._write, handler.response_serializer),
        )

    def end(self, code: str) -> None:
        record = WireRecord(
            method=self._method,
            code=code,
            duration_s=self._clock.monotonic() - self._start_time,
            sent_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
        )
        for watcher in self._watchers:
            watcher.wire_ended(record)

    async def _serve(self, behavior: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        current_method.set(self._method)
        code = "UNKNOWN"
        try:
            await behavior(request, context)
            code = _code_name(context, otherwise="OK")
        except asyncio.CancelledError:
            code = cancel_code(context).name
            raise
        except BaseException:
            code = _code_name(context, otherwise="UNKNOWN")
            raise
        finally:
            self.end(code)

    def _read(self, data: bytes) -> bytes:
        self._received_bytes += len(data)
        return data

    def _write(self, serialize: Any, message: Any) -> bytes:
        data: bytes = message.data if isinstance(message, EncodedResponse) else serialize(message)
        self._sent_bytes += len(data)
        return data


def _code_name(context: Any, *, otherwise: str) -> str:
    # gRPC returns the number or the enum, whichever was set; 0 if nothing was.
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODE_NAMES.get(code, "UNKNOWN") if code else otherwise
