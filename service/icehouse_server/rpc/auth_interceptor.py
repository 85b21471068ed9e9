"""Authentication interceptor before every method: who calls, may they, and does their message arrive.

A method's row in the method table says what it allows.

Unary methods are served as if request and response were streams. This is invisible on the wire, and the
server gains four things. The caller is known before any of its message is read. A message that trickles in
holds nothing for longer than its timeout. Malformed bytes get one of our statuses. An unread answer still
holds its caller's slot, so leaving answers unread is not free.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from itertools import chain, islice
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from icehouse.v1 import prompt_pb2

from icehouse_server.config import Config
from icehouse_server.errors import CannotFit, DeadlineExceeded, InvalidRequest, Overloaded, Reason
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.caller import UNPROVED, Caller
from icehouse_server.rpc.access.credentials import ServerSecurity
from icehouse_server.rpc.access.shares import RETRY_S, FairQueue, FairShare, QueueHold
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCalls, end, stopping
from icehouse_server.rpc.calls.methods import (
    LONG_MESSAGE_BYTES,
    METHODS,
    CallPool,
    Method,
    MethodAccess,
    WorkThread,
    caller_shares,
    shares_of,
)
from icehouse_server.rpc.calls.status import status_of
from icehouse_server.rpc.calls.wire import EncodedResponse, Limit, current_limit, received_bytes
from icehouse_server.rpc.engine_client import answers

_TURN_COUNT = 16
"""Commands and counters in progress at once; one caller may have half of them."""


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Runs before all methods, including gRPC's own. Owned by the event loop."""

    def __init__(
        self,
        config: Config,
        *,
        security: ServerSecurity,
        calls: RpcCalls,
        run_long: Callable[..., Awaitable[Any]],
    ) -> None:
        """`run_long` runs work off the event loop: it takes a function and `size_bytes`."""
        self._security = security
        self._calls = calls
        self._health_is_open = config.security.health_open
        self._shares = shares_of(
            concurrent_call_limit=config.server.max_concurrent_calls,
            connection_limit=config.connection.connection_limit,
        )
        self._caller_shares = caller_shares()
        self._message_timeout_s = config.connection.message_timeout_s
        self._message_byte_limit = config.server.max_message_bytes
        self._run_long = run_long
        # One caller may hold half of each memory.
        self._memory = FairQueue(capacity=config.server.request_memory_bytes, factor=1.0)
        self._answer_memory = FairShare(
            limit=config.server.answer_memory_bytes, factor=1.0, what="bytes of unread answers"
        )
        self._turns = FairQueue(capacity=_TURN_COUNT, factor=1.0)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's own handler, authenticated; None if there is no such method."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        return None if handler is None else self._guarded(handler, method)

    def _guarded(self, handler: Any, method: str) -> Any:
        behaviours = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
        behaviour = next(each for each in behaviours if each is not None)

        async def parsed(requests: Any) -> AsyncIterator[Any]:
            async for data in requests:
                yield self._parse(handler, data, method)

        async def serve(requests: Any, context: Context) -> None:
            with contextlib.ExitStack() as held:
                async with self._limited(method, context):
                    try:
                        self._let_in(method, context, held)
                    except Exception as error:
                        held.close()  # its status may wait long to be read
                        await self._refuse(context, error)
                    if handler.request_streaming:
                        request = parsed(requests)
                    else:
                        request = await self._admit(handler, method, context, held)
                    try:
                        await self._respond(handler, behaviour(request, context), method, context)
                    except InvalidRequest as error:  # a later message of a stream
                        await self._refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(
            serve, request_deserializer=None, response_serializer=handler.response_serializer
        )

    async def _respond(self, handler: Any, responses: Any, method: str, context: Context) -> None:
        """Send what a handler returns: one answer or several."""
        if not inspect.isawaitable(responses):
            async for response in responses:
                await self._answer(context, response)
            return
        async with self._turn(METHODS[method]):
            response = await responses
        # None: a stream that has written its messages itself, or channelz, which only sets a status.
        if response is not None:
            # Encoded now, so that the message is not kept while it is sent.
            if not isinstance(response, EncodedResponse):
                response = EncodedResponse(handler.response_serializer(response))
            await self._answer(context, response)

    async def _admit(self, handler: Any, method: str, context: Context, held: contextlib.ExitStack) -> Any:
        """Return the call's request, or end the call with a status; `held` gets what the request holds."""
        row = METHODS[method]
        timeout_s = self._message_timeout_s
        if row.message_timeout_s is not None:
            timeout_s = min(timeout_s, row.message_timeout_s)
        memory: QueueHold | None = None
        try:
            async with loop_timeout(timeout_s) as timer, self._admission(row, timer):
                if row.message_byte_limit is None:
                    # The length of the message is unknown before it arrives.
                    memory = await self._memory.take(callers.origin.get(), self._message_byte_limit)
                    held.callback(memory.release)
                data = await context.read()
        except TimeoutError:
            waits = row.message_byte_limit is None and memory is None
            return await self._refuse(context, self._full() if waits else _late(timeout_s))
        if memory is not None and data is not grpc.aio.EOF:
            memory.shrink(len(data))
        try:
            if data is grpc.aio.EOF:
                what = "the call ended without a request message; send one"
                raise InvalidRequest(Reason.MESSAGE_MISSING, what)
            received_bytes.set(len(data))
            if len(data) <= LONG_MESSAGE_BYTES:
                return self._parse(handler, data, method)
            return await self._run_long(lambda: self._parse(handler, data, method), size_bytes=len(data))
        except Exception as error:
            await self._refuse(context, error)

    def _admission(self, row: Method, timer: asyncio.Timeout) -> contextlib.AbstractAsyncContextManager[None]:
        # Health checks are answered until the very end.
        if row.pool is CallPool.HEALTH:
            return contextlib.nullcontext()
        return self._calls.admission(timer)

    def _parse(self, handler: Any, data: bytes, method: str) -> Any:
        """Return the message; raises InvalidRequest. Any thread."""
        row = METHODS[method]
        if row.message_byte_limit is not None and len(data) > row.message_byte_limit:
            raise InvalidRequest(
                Reason.MESSAGE_MALFORMED,
                f"the request has {len(data)} bytes; the limit for this method is "
                f"{row.message_byte_limit}; check the client's protos",
                metadata={"size_bytes": len(data), "limit_bytes": row.message_byte_limit},
            )
        check_fields(data, input_of(method))
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            raise InvalidRequest(
                Reason.MESSAGE_MALFORMED,
                f"the {len(data)} bytes of the request are not a message of this method; check the client's "
                "protos",
                metadata={"size_bytes": len(data)},
            ) from None

    def _turn(self, row: Method) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait until the caller may run one more command: too many answers at once would keep the event loop
        busy."""
        if row.pool is CallPool.COMMANDS and row.thread is WorkThread.INFERENCE:
            return self._turns.turn(callers.origin.get())
        return contextlib.nullcontext()

    def _full(self) -> Overloaded:
        return Overloaded(
            Reason.QUEUE_FULL,
            f"requests in flight take up all {self._memory.capacity} bytes reserved for them, or your share "
            "of that; try again later",
            retry_after_s=RETRY_S,
            metadata={"request_memory_bytes": self._memory.capacity},
        )

    @contextlib.asynccontextmanager
    async def _limited(self, method: str, context: Context) -> AsyncIterator[None]:
        """End a call without a deadline after its method's deadline, and any call when the server stops."""
        deadline_s = METHODS[method].deadline_s
        limit = Limit(deadline_s if context.time_remaining() is None else None)
        current_limit.set(limit)
        with self._calls.open(limit, is_endless=deadline_s is None):
            try:
                async with limit.timer:
                    yield
            except TimeoutError:
                if limit.code is None:
                    raise
                has_ended = bool(context.code())
                if has_ended:
                    # Its status already waits for the reader.
                    raise asyncio.CancelledError from None
                await end(context, status_of(stopping() if limit.is_cut else _endless(deadline_s)))

    async def _answer(self, context: Context, response: answers.AnswerMessage) -> None:
        """Write an answer, or end the call with a status if its caller leaves too much unread."""
        try:
            await answers.write(context, response)
        except (Overloaded, CannotFit) as error:
            await self._refuse(context, error)

    async def _refuse(self, context: Context, error: Exception) -> None:
        async with self._calls.call(context):
            raise error

    def _let_in(self, method: str, context: Context, held: contextlib.ExitStack) -> None:
        """Identify the caller and have `held` keep the call's slots until it ends; raises what refuses it."""
        row = METHODS[method]
        caller = self._caller_of(row, context)
        if row.access is MethodAccess.OPERATOR:
            caller.require_operator(method.rpartition("/")[2])
        is_proved = caller.tenant is not None
        origin = f"tenant:{caller.tenant}" if is_proved else f"peer:{context.peer() or ''}"
        # Before the slot is taken, so that a refusal counts against this caller.
        callers.origin.set(origin)
        if (own := self._caller_shares.get(method)) is not None:
            held.enter_context(own.hold(origin))
        held.enter_context(self._shares[row.pool].hold(origin))
        unread = answers.CallAnswers(self._answer_memory, origin=origin)
        held.callback(unread.close)
        answers.current.set(unread)
        callers.current.set(caller)

    def _caller_of(self, row: Method, context: Context) -> Caller:
        if self._health_is_open and row.access is MethodAccess.OPEN:
            return UNPROVED
        return self._security.identify(context.invocation_metadata() or (), context.auth_context())


def _endless(deadline_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        Reason.DEADLINE_EXCEEDED,
        f"the call had no deadline and took longer than this method's {deadline_s:g} s; set one, or "
        "ask for less",
        metadata={"deadline_s": f"{deadline_s:g}"},
    )


def _late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        Reason.MESSAGE_LATE,
        f"the request's message did not arrive within {timeout_s:g} s; send it faster",
        metadata={"message_timeout_s": f"{timeout_s:g}"},
    )


_PART_COUNT = 8


@contextlib.asynccontextmanager
async def loop_timeout(timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError out of the block after `timeout_s`; the timer may be rescheduled.

    With asyncio.timeout, an event loop that was blocked finds the timer and the message due in the same turn,
    and the timer wins. This one runs in short parts: a blocked loop, however long, uses up one of them, and
    the others leave time to read the message.
    """
    loop = asyncio.get_running_loop()
    part: asyncio.TimerHandle | None = None

    def begin(left_count: int) -> None:
        nonlocal part
        if left_count:
            part = loop.call_later(timeout_s / _PART_COUNT, begin, left_count - 1)
        elif not timer.expired():
            timer.reschedule(loop.time())

    async with asyncio.timeout(None) as timer:
        begin(_PART_COUNT)
        try:
            yield timer
        finally:
            if part is not None:
                part.cancel()


FIELD_LIMIT = 1 << 16
"""Fields in one request, such as 4,096 chat messages with sixteen each. They are parsed in 2 ms."""
SCANNED_FIELD_LIMIT = 1000
"""A message with more top-level fields has too many stop strings, and a prompt with more has too many tools;
both are refused for that reason."""

_PROMPT = prompt_pb2.Prompt.DESCRIPTOR


@functools.cache
def input_of(method: str) -> Descriptor:
    """Return the type of a method's request."""
    service, _, name = method.partition("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type


def check_fields(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message that sets two fields of one oneof, or a long one with too many fields.

    A parser silently uses the last field of a oneof, so a prompt could get lost. It makes an object of each
    field and holds Python's global lock meanwhile: ten megabytes of short messages take a quarter of a
    second. Raises InvalidRequest. Malformed bytes are left to the parser.
    """
    if len(data) > LONG_MESSAGE_BYTES and has_more_fields(data, descriptor, limit=FIELD_LIMIT):
        raise InvalidRequest(
            Reason.MESSAGE_MALFORMED,
            f"the {len(data)} bytes of the request have more than {FIELD_LIMIT} fields, counting those "
            "of the messages in it; send fewer, or shorter lists",
            metadata={"size_bytes": len(data), "field_limit": FIELD_LIMIT},
        )
    if clash := clashing_fields(data, descriptor):
        listed = " and ".join(f"`{name}`" for name in clash)
        raise InvalidRequest(
            Reason.PROMPT_AMBIGUOUS,
            f"{listed} are set; set one of them",
            field=clash[-1],
            metadata={"fields": ",".join(clash)},
        )


def clashing_fields(data: bytes, descriptor: Descriptor) -> tuple[str, ...]:
    """Return the names of fields that share a oneof, in `data` or its `prompt`; empty if none do.

    A parser merges a prompt that is sent in several pieces, so the fields of all pieces count.
    """
    top = list(islice(fields(data, 0, len(data)), SCANNED_FIELD_LIMIT))
    if clash := _clash({field.number for field in top}, descriptor):
        return clash
    prompt = descriptor.fields_by_name.get("prompt")
    if prompt is None or prompt.message_type is not _PROMPT:
        return ()
    inner = (fields(data, each.start, each.stop) for each in top if each.number == prompt.number)
    present = {field.number for field in islice(chain.from_iterable(inner), SCANNED_FIELD_LIMIT)}
    return tuple(f"prompt.{name}" for name in _clash(present, _PROMPT))


def _clash(present: Set[int], descriptor: Descriptor) -> tuple[str, ...]:
    for oneof in descriptor.oneofs:
        names = tuple(field.name for field in oneof.fields if field.number in present)
        if len(names) > 1:
            return names
    return ()


_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10
_WIDTHS = {_FIXED64: 8, _FIXED32: 4, 3: 0, 4: 0}
"""Sizes of fixed-length values; the start and end of a group have none."""


class Field(NamedTuple):
    """One field: its number, and where its value begins and ends."""

    number: int
    start: int
    stop: int
    is_delimited: bool
    """Whether it is a string, bytes, a message or packed numbers."""


def fields(data: bytes, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in data[start:stop], as far as it is well formed.

    The fields of a group, which proto3 never writes, count as if they were outside of it.
    """
    position = start
    try:
        while position < stop:
            tag, position = _varint(data, position)
            kind = tag & 7
            if kind == _LENGTH:
                size_bytes, position = _varint(data, position)
            elif kind == _VARINT:
                begin = position
                _, position = _varint(data, position)
                size_bytes, position = position - begin, begin
            elif kind in _WIDTHS:
                size_bytes = _WIDTHS[kind]
            else:
                return
            if position + size_bytes > stop:
                return
            yield Field(tag >> 3, position, position + size_bytes, kind == _LENGTH)
            position += size_bytes
    except IndexError:
        # Inside a number: the parser will complain.
        return


def has_more_fields(data: bytes, descriptor: Descriptor, *, limit: int) -> bool:
    """Return whether a message has more fields than `limit`, including those of nested messages.

    Level by level, so that a long list is noticed before its messages are read. Counting stops at the limit.
    """
    count = 0
    waiting = deque([(descriptor, 0, len(data))])
    while waiting:
        message, start, stop = waiting.popleft()
        parts = _messages_in(message)
        for field in fields(data, start, stop):
            count += 1
            if count > limit:
                return True
            if field.is_delimited and field.number in parts:
                waiting.append((parts[field.number], field.start, field.stop))
    return False


@functools.cache
def _messages_in(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the type of each message field, by field number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it; raises IndexError if it is cut off or too long."""
    value = 0
    # A 64-bit number is never longer, and adding up one as long as a message would take hours.
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError(position)
