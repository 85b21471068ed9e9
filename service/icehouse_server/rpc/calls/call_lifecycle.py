"""Calls: one call from beginning to status, with deadline, errors, log records and draining."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from icehouse_server.clock import Clock
from icehouse_server.domain.call import CallRecord, Operation
from icehouse_server.domain.events import Event, Finished, Started
from icehouse_server.domain.ids import CALLER_NAME_PATTERN, AdapterName, Tenant
from icehouse_server.domain.request import GenerationRequest, request_id_of
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import (
    EngineFailed,
    Forbidden,
    IcehouseError,
    Overloaded,
    Reason,
    Unauthenticated,
    Unavailable,
)
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.caller import Caller, peer_kind
from icehouse_server.rpc.access.shares import RateLimit
from icehouse_server.rpc.calls.methods import METHODS
from icehouse_server.rpc.calls.status import code_of, status_of, with_trailers
from icehouse_server.rpc.calls.wire import Limit, cancel_code, current_method, received_bytes
from icehouse_server.rpc.engine_client.answers import disconnect_as_cancel
from icehouse_server.rpc.engine_client.seat import Seat

Context = grpc.aio.ServicerContext[Any, Any]
Trailers = tuple[tuple[str, str | bytes], ...]

REFUSALS_PER_S = 20.0
REFUSAL_BURST_COUNT = 64
_REFUSED_BYTES_PER_TURN = 256 << 10
"""A refused request of this many bytes counts as one more refusal."""
_LONGEST_S = 1.0
"""A balancer should soon learn that it must try another server."""
_LONGEST_UNPROVED_S = 5.0
"""For callers without credentials; others never wait this long."""

_logger = logging.getLogger("icehouse_server.rpc.calls.calls")


@dataclasses.dataclass(slots=True, kw_only=True)
class RpcCall(CallRecord):
    """One running call. Its request id is generated until the request brings its own."""

    caller: Caller
    arrival_time: float
    """`Clock.monotonic`."""
    deadline_time: float | None
    holds: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Released when the call ends, however it ends."""
    load_s: float = 0.0
    """How long the call waited for its model to load."""
    used: Seat | None = None
    """The seat of the model that it names, once loaded."""

    @property
    def seat(self) -> Seat:
        """The seat of the call, which must have named its model."""
        assert self.used is not None, "a call names its model first"
        return self.used

    @property
    def own_session_id(self) -> str:
        """The session whose blocks the call uses. An agent within a session has its own session, with a slash
        in its name, which no caller's name has."""
        return f"{self.session_id}/{self.agent_id}" if self._is_agents else self.session_id

    @property
    def own_parent_id(self) -> str:
        """The session that started this one; empty if there is none."""
        return self.session_id if self._is_agents else self.parent_session_id

    @property
    def _is_agents(self) -> bool:
        """Whether an agent within a session calls; some programs give the first agent the session's name."""
        return bool(self.session_id and self.agent_id) and self.agent_id != self.session_id

    def request(self, tenant: Tenant, *, adapter: str) -> GenerationRequest:
        """Return the call's request, as far as it is known without the model and the prompt."""
        return GenerationRequest(
            request_id=request_id_of(self.request_id, tenant),
            prompt_token_ids=(),
            max_output_tokens=0,
            sampling=SamplingParams(),
            stop=(),
            arrival_time=self.arrival_time,
            deadline_time=self.deadline_time,
            tenant=tenant,
            adapter=AdapterName(adapter),
            session_id=self.own_session_id,
            parent_session_id=self.own_parent_id,
        )

    def note(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = self.started or event
        elif isinstance(event, Finished):
            # Of several completions: the usage of the first, with the output of all.
            usage = self.usage or dataclasses.replace(event.usage, output_token_count=0)
            output_token_count = usage.output_token_count + event.usage.output_token_count
            self.usage = dataclasses.replace(usage, output_token_count=output_token_count)


class RpcCalls:
    """Tracks calls from beginning to end, and refuses new ones during a stop. Owned by the event loop."""

    def __init__(
        self,
        *,
        clock: Clock,
        on_end: Callable[[CallRecord], Trailers],
        session_keys: Sequence[str] = (),
        agent_keys: Sequence[str] = (),
        parent_keys: Sequence[str] = (),
    ) -> None:
        self._clock = clock
        self._session_keys = session_keys
        self._agent_keys = agent_keys
        self._parent_keys = parent_keys
        self._on_end = on_end
        self._rate_limit = RateLimit(rate_per_s=REFUSALS_PER_S, burst_count=REFUSAL_BURST_COUNT)
        self._running_count = 0
        self._closed = False
        self.idle = asyncio.Event()
        """Set while no call runs."""
        self.idle.set()
        self._open: dict[Limit, bool] = {}
        """Whether each may be endless."""
        self._admissions: set[asyncio.Timeout] = set()
        self.refused_count = 0
        """Calls that arrived after the stop."""

    @property
    def open_count(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Refuse new calls, and calls whose message has not arrived yet."""
        self._closed = True
        for timer in self._admissions:
            _end_now(timer)

    def cut(self, *, endless_only: bool = False) -> None:
        """End open calls as UNAVAILABLE; with `endless_only` just those that never end by themselves."""
        for limit, is_endless in self._open.items():
            if is_endless or not endless_only:
                limit.cut()

    @contextlib.contextmanager
    def open(self, limit: Limit, *, is_endless: bool) -> Iterator[None]:
        self._open[limit] = is_endless
        try:
            yield
        finally:
            del self._open[limit]

    @contextlib.asynccontextmanager
    async def admission(self, timer: asyncio.Timeout) -> AsyncIterator[None]:
        """The block waits for a call's message; a stop expires its timer."""
        if self._closed:
            _end_now(timer)
        self._admissions.add(timer)
        try:
            yield
        finally:
            self._admissions.discard(timer)

    @contextlib.asynccontextmanager
    async def call(self, context: Context, operation: Operation | None = None) -> AsyncIterator[RpcCall]:
        """Wrap one servicer method: an error in the block becomes a status, and all watchers are notified."""
        given = context.invocation_metadata() or ()
        metadata = {key: value for key, value in given if isinstance(value, str)}
        call = RpcCall(
            method=current_method.get(),
            peer=peer_kind(context.peer()),
            start_time=self._clock.wall(),
            request_id=uuid.uuid4().hex,
            operation=operation,
            traceparent=metadata.get("traceparent", ""),
            tracestate=metadata.get("tracestate", ""),
            session_id=_caller_name(metadata, self._session_keys),
            agent_id=_caller_name(metadata, self._agent_keys),
            parent_session_id=_caller_name(metadata, self._parent_keys),
            caller=callers.current.get(),
            arrival_time=self._clock.monotonic(),
            deadline_time=self._deadline_time(context),
        )
        self._running_count += 1
        self.idle.clear()
        try:
            if self._closed:
                self.refused_count += 1
                raise stopping()
            yield call
            if trailers := self._end_call(call, grpc.StatusCode.OK):
                context.set_trailing_metadata((*(context.trailing_metadata() or ()), *trailers))
        except IcehouseError as error:
            trailers = self._end_call(call, code_of(error), reason=error.reason.value)
            await self._delay_refusal(error)
            await end(context, with_trailers(status_of(error), trailers))
        except asyncio.CancelledError:
            self._end_call(call, cancel_code(context))
            raise
        except Exception:
            # The caller learns that something broke; the log says what.
            _logger.exception("call_broke", extra={"method": call.method, "request_id": call.request_id})
            what = "an internal error; the server's log has the details under this request_id"
            broken = EngineFailed(Reason.ENGINE_FAILED, what)
            trailers = self._end_call(call, code_of(broken), reason=broken.reason.value)
            await end(context, with_trailers(status_of(broken), trailers))

    async def _delay_refusal(self, error: IcehouseError) -> None:
        """Delay a refusal if its caller has had many: it may retry at once."""
        turn_count = received_bytes.get() // _REFUSED_BYTES_PER_TURN
        if isinstance(error, Overloaded | Unauthenticated | Forbidden):
            turn_count += 1
        if self._closed or not turn_count:
            return
        delay_s = self._rate_limit.delay_s(
            callers.origin.get(),
            now=asyncio.get_running_loop().time(),
            longest_s=_LONGEST_UNPROVED_S if isinstance(error, Unauthenticated) else _LONGEST_S,
            turn_count=turn_count,
        )
        if delay_s:
            await asyncio.sleep(delay_s)

    def _deadline_time(self, context: Context) -> float | None:
        """Return when the call must have ended, by its own deadline or its method's."""
        row = METHODS.get(current_method.get())
        default_s = None if row is None else row.deadline_s
        remaining_s = context.time_remaining()
        limit_s = default_s if remaining_s is None else remaining_s
        return None if limit_s is None else self._clock.monotonic() + limit_s

    def _end_call(self, call: RpcCall, code: grpc.StatusCode, *, reason: str = "") -> Trailers:
        call.code, call.reason = code.name, reason
        call.tenant = call.tenant or call.caller.tenant or ""
        call.duration_s = self._clock.monotonic() - call.arrival_time
        # Before the status is sent: a stop does not wait for callers that do not read their status.
        call.holds.close()
        self._running_count -= 1
        if not self._running_count:
            self.idle.set()
        return self._on_end(call)


def stopping() -> Unavailable:
    """Return the error of calls that arrive while the server stops."""
    return Unavailable(Reason.DRAINING, "the server is stopping; send the request to another one")


def _end_now(timer: asyncio.Timeout) -> None:
    if not timer.expired():
        timer.reschedule(asyncio.get_running_loop().time())


async def end(context: Context, status: grpc.Status) -> None:
    """End a call with a status, which is sent after the messages that the caller has not read yet.

    A caller that never reads them keeps the call open and its slot taken until the connection ends: gRPC's
    Python cannot reset a single call.
    """
    with disconnect_as_cancel():
        await context.abort_with_status(status)


def _caller_name(metadata: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return the value of the first of these keys. A value that is unfit for a log counts as absent."""
    values = (metadata.get(key, "") for key in keys)
    return next((value for value in values if CALLER_NAME_PATTERN.fullmatch(value)), "")
