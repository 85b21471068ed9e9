"""Authentication interceptor before every method: who calls, may they, and does their message come.

A method of one request is served as if it took a stream of them. Nobody on the wire can tell, and the
server gains three things: a caller is known before any of its message is read; a message that trickles
in holds nothing for longer than its timeout; bytes that are no message get a status of ours.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from icehouse_server.errors import DeadlineExceeded, InvalidRequest, Overloaded, Reason
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.authentication import Authenticator
from icehouse_server.rpc.access.caller import UNPROVED, Caller
from icehouse_server.rpc.calls.calls import CALL_RETRY_S, Calls, Context

HEALTH_PREFIX = "/grpc.health.v1.Health/"
CHANNELZ_PREFIX = "/grpc.channelz."


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Stands before all methods, ours and gRPC's own. Owned by the event loop."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        calls: Calls,
        health_is_open: bool,
        message_timeout_s: float,
        unread_call_limit: int,
    ) -> None:
        self._authenticator = authenticator
        self._calls = calls
        self._health_is_open = health_is_open
        self._message_timeout_s = message_timeout_s
        self._unread_call_limit = unread_call_limit
        self._unread_count = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's own handler, authenticated; None for a method that is not there."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        return None if handler is None else self._guarded(handler, method)

    def _guarded(self, handler: Any, method: str) -> Any:
        if handler.request_streaming:
            return self._guarded_stream(handler, method)
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def serve(_: object, context: Context) -> Any:
            request = await self._admit(handler, method, context)
            if inspect.isasyncgenfunction(behaviour):
                async for response in behaviour(request, context):
                    await context.write(response)
                return None
            return await behaviour(request, context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(serve, request_deserializer=None, response_serializer=handler.response_serializer)

    def _guarded_stream(self, handler: Any, method: str) -> Any:
        assert handler.stream_stream is not None, f"{method} takes a stream and answers once; none does yet"

        async def serve(requests: Any, context: Context) -> None:
            await self._refusing(method, context, lambda: self._let_in(method, context))
            async for response in handler.stream_stream(requests, context):
                await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _admit(self, handler: Any, method: str, context: Context) -> Any:
        """Return the call's request, or end the call with a status."""
        await self._refusing(method, context, lambda: self._let_in(method, context))
        try:
            async with asyncio.timeout(self._message_timeout_s):
                data = await self._read(context)
        except TimeoutError:
            return await self._refusing(method, context, self._late)
        return await self._refusing(method, context, lambda: _parsed(handler, data))

    async def _refusing(self, method: str, context: Context, step: Callable[[], Any]) -> Any:
        """Return what `step` does; what it raises becomes the call's status and log line."""
        try:
            return step()
        except Exception as error:
            async with self._calls.call(method.rpartition("/")[2], context):
                raise error

    def _let_in(self, method: str, context: Context) -> None:
        caller = self._caller_of(method, context)
        if method.startswith(CHANNELZ_PREFIX):
            caller.require_operator("channelz")
        if self._unread_count >= self._unread_call_limit:
            raise Overloaded(
                Reason.QUEUE_FULL,
                f"{self._unread_count} calls wait for their messages, which is the limit; try again later",
                retry_after_s=CALL_RETRY_S,
                metadata={"unread_call_limit": self._unread_call_limit},
            )
        callers.current.set(caller)

    def _caller_of(self, method: str, context: Context) -> Caller:
        if not self._authenticator.is_on:
            return UNPROVED
        if self._health_is_open and method.startswith(HEALTH_PREFIX):
            return UNPROVED
        return self._authenticator.identify(context.invocation_metadata() or (), context.auth_context())

    async def _read(self, context: Context) -> bytes | None:
        self._unread_count += 1
        try:
            data = await context.read()
        finally:
            self._unread_count -= 1
        return None if data is grpc.aio.EOF else data

    def _late(self) -> None:
        raise DeadlineExceeded(
            Reason.MESSAGE_LATE,
            f"the request's message did not arrive within {self._message_timeout_s:g} s; send it faster",
            metadata={"message_timeout_s": f"{self._message_timeout_s:g}"},
        )


def _parsed(handler: Any, data: bytes | None) -> Any:
    if data is None:
        raise InvalidRequest(Reason.MESSAGE_MISSING, "the call ended without a request message; send one")
    try:
        return handler.request_deserializer(data)
    except DecodeError:
        raise InvalidRequest(
            Reason.MESSAGE_MALFORMED,
            f"the {len(data)} bytes of the request are no message of this method; check the client's protos",
            metadata={"size_bytes": len(data)},
        ) from None
