"""Caller of the fuzzer: sends one request as a real client, reads the answer, and judges the status."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from icehouse_server.errors import Reason

from docs.reasons import REASONS
from tests.system.fuzz.frames import LONG_S, send_frame
from tests.system.fuzz.requests import INVENTED, METHODS, OURS, FuzzRequest

_HUNG_S = LONG_S + 30.0
_READ_LIMIT = 500
"""Answers of a stream; more than any request here may lead to within its deadline."""

_CUT = "Internal error from Core"
"""What Python's client says of a stream that the server has ended before all of its messages were written."""

_NAMES: Mapping[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended. `problem` says what must not be; None where all is well."""

    code: str
    reason: str
    problem: str | None = None


class Caller:
    """A few connections, used in turn."""

    def __init__(self, address: str, tokens: Mapping[str, str], *, connection_count: int = 4) -> None:
        self._address = address
        self._tokens = tokens
        # Of its own pool: channels with equal arguments share one connection otherwise.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        options += [("grpc.max_receive_message_length", -1), ("grpc.initial_reconnect_backoff_ms", 50)]
        self._channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(connection_count)
        ]
        self._sent = 0
        self._calls: dict[tuple[int, str], Any] = {}

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def send(self, request: FuzzRequest) -> Outcome:
        """Send a request; whatever comes back is an outcome."""
        try:
            async with asyncio.timeout(_HUNG_S):
                if request.frame is not None:
                    return await self._send_frame(request, request.frame)
                return await self._send(request)
        except TimeoutError:
            return Outcome("HUNG", "", f"no end after {_HUNG_S:g} s")

    async def _send_frame(self, request: FuzzRequest, fault: str) -> Outcome:
        token = self._tokens.get(request.credentials, "")
        code, words = await send_frame(
            self._address, request.path, request.messages[0], fault=fault, token=token
        )
        if code is None:
            return Outcome("RESET", "")
        name = _NAMES[code]
        problem = f"{name}: {words}" if name in {code.name for code in _NEVER} else None
        return Outcome(name, "", problem)

    async def _send(self, request: FuzzRequest) -> Outcome:
        call = self._begin(request)
        count = 0
        try:
            if request.leave_after == 0:
                await asyncio.sleep(0)
                call.cancel()
            async for _ in _answers(call):
                count += 1
                if count in (request.leave_after, _READ_LIMIT):
                    call.cancel()
                    return Outcome("LEFT", "")
        except grpc.aio.AioRpcError as error:
            return judged(request, error)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            return Outcome("LEFT", "")
        finally:
            call.cancel()
        return Outcome("OK", "")

    def _begin(self, request: FuzzRequest) -> Any:
        self._sent += 1
        index = self._sent % len(self._channels)
        begin = self._calls.get((index, request.path)) or self._kind(index, request.path)
        metadata = request.metadata
        if request.credentials != "none":
            metadata = (
                ("authorization", f"Bearer {self._tokens.get(request.credentials, 'wrong')}"),
                *metadata,
            )
        method = METHODS.get(request.path)
        streams = method is not None and method.client_streaming
        sent: Any = iter(request.messages) if streams else request.messages[0]
        compression = grpc.Compression.Gzip if request.is_compressed else None
        return begin(sent, metadata=metadata, timeout=request.timeout_s, compression=compression)

    def _kind(self, index: int, path: str) -> Any:
        channel, method = self._channels[index], METHODS.get(path)
        if method is None:
            made: Any = channel.unary_unary(path)
        else:
            kinds: dict[tuple[bool, bool], Any] = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, True): channel.stream_stream,
                (True, False): channel.stream_unary,
            }
            parse = GetMessageClass(method.output_type).FromString
            made = kinds[method.client_streaming, method.server_streaming](path, response_deserializer=parse)
        self._calls[index, path] = made
        return made


async def _answers(call: Any) -> AsyncIterator[Any]:
    if hasattr(call, "__await__"):
        yield await call
        return
    async for answer in call:
        yield answer


def judged(request: FuzzRequest, error: grpc.aio.AioRpcError) -> Outcome:
    """Return what a status says, and what is wrong with it."""
    code, words = error.code(), error.details() or ""
    if _is_callers_own(request, code):
        return Outcome(code.name, "")
    if METHODS.get(request.path) is not None and METHODS[request.path].client_streaming and words == _CUT:
        return Outcome("CUT", "")
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if details is not None:
        reason, problem = _documented(code, details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and reason != Reason.MESSAGE_LATE:
            problem = f"not answered within {request.timeout_s:g} s: {words}"
        return Outcome(code.name, reason, problem)
    is_known = code not in _NEVER if not request.path.startswith(OURS) else _is_of_grpc(request, code, words)
    return Outcome(
        code.name,
        "",
        None if is_known else f"{code.name} without a reason: {words} ({error.debug_error_string()})",
    )


def _documented(code: grpc.StatusCode, details: bytes) -> tuple[str, str | None]:
    """Return the reason, and what is wrong with it."""
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    if not status.details or not status.details[0].Unpack(info):
        return "", f"{code.name} without an ErrorInfo: {status.message}"
    if info.reason not in set(Reason):
        return info.reason, f"{info.reason} is no reason of docs/errors.md"
    if REASONS[Reason(info.reason)].code is not code:
        return info.reason, f"{info.reason} with {code.name}"
    if code in _NEVER:
        return info.reason, f"{code.name}: {status.message}"
    if not status.message or "Traceback" in status.message or ".py" in status.message:
        return info.reason, f"it says {status.message!r}"
    return info.reason, None


def _is_callers_own(request: FuzzRequest, code: grpc.StatusCode) -> bool:
    """Whether the caller ended it, and its own side says so, whatever the server was about to say."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return request.timeout_s < LONG_S
    return code is grpc.StatusCode.CANCELLED and request.leave_after is not None


def _is_of_grpc(request: FuzzRequest, code: grpc.StatusCode, words: str) -> bool:
    """Whether the transport refused it: no such method, or more bytes than its limits."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return request.path in INVENTED
    too_long = "message larger than max" in words or "metadata size exceeds" in words
    return code is grpc.StatusCode.RESOURCE_EXHAUSTED and too_long


@contextlib.asynccontextmanager
async def calling(address: str, tokens: Mapping[str, str]) -> AsyncIterator[Caller]:
    """Open connections and close them."""
    caller = Caller(address, tokens)
    try:
        yield caller
    finally:
        await caller.close()
