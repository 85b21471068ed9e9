"""Calls of one connection: what goes with each of them, and another try with a new token.

A call that is refused as UNAUTHENTICATED has not run. Where the token has a source it is asked anew, and the
call is made again, once; of a stream that is so before its first response.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import Message
from icehouse.v1 import cache_service_pb2 as cache
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import rerank_service_pb2 as reranking

from icehouse_client.affinity import prefix_metadata
from icehouse_client.security import Metadata
from icehouse_client.tokens import BearerToken

_AUTHORIZATION = "authorization"
_KEYED = (
    inference.GenerateRequest,
    cache.WarmRequest,
    cache.ExplainRequest,
    cache.PinRequest,
    cache.UnpinRequest,
    cache.EvictRequest,
    cache.ExportRequest,
    reranking.RerankRequest,
)

Response = TypeVar("Response")
Cancelled = TypeVar("Cancelled", bound="ResponseCall[Any] | AsyncResponseCall[Any]")


@dataclasses.dataclass(frozen=True, slots=True)
class _Headers:
    """The caller's own metadata, the prompt's key, and the token unless the caller's own say who calls."""

    token: BearerToken
    metadata: Metadata

    @property
    def has_own_token(self) -> bool:
        return any(name == _AUTHORIZATION for name, _ in self.metadata)

    def of(self, request: Message, token: str) -> Metadata:
        key = prefix_metadata(request) if isinstance(request, _KEYED) else ()
        return (*self.of_upload(token), *key)

    def of_upload(self, token: str) -> Metadata:
        """Return what goes with a stream of messages, which has no prompt."""
        proof = ((_AUTHORIZATION, f"Bearer {token}"),) if token else ()
        return (*self.metadata, *proof)

    def beginning(
        self, method: Callable[..., Any], request: Message, timeout_s: float | None, *, waits: bool | None
    ) -> Callable[[str], Any]:
        """Return what begins a call with many answers, given a token, in the time that is left then."""
        end_time = _end_time(timeout_s)

        def begin(token: str) -> Any:
            metadata = self.of(request, token)
            return method(request, timeout=_left_s(end_time), metadata=metadata, wait_for_ready=waits)

        return begin

    def is_renewed(self, error: grpc.RpcError, token: str) -> bool:
        # What gRPC raises is the call too, which its types do not say.
        call: Any = error
        is_refused = call.code() is grpc.StatusCode.UNAUTHENTICATED
        return is_refused and not self.has_own_token and self.token.is_renewed(token)


class Calls:
    """Makes the calls of a channel; they raise what gRPC raises."""

    def __init__(self, token: BearerToken, metadata: Metadata = ()) -> None:
        self._headers = _Headers(token, metadata)

    def with_metadata(self, metadata: Metadata) -> Self:
        """Return what makes calls that carry this too."""
        return type(self)(self._headers.token, (*self._headers.metadata, *metadata))

    def unary(self, method: Callable[..., Response], request: Message, timeout_s: float | None) -> Response:
        """Return the one answer of a call."""
        end_time = _end_time(timeout_s)
        token = self._token()
        try:
            return method(request, timeout=timeout_s, metadata=self._headers.of(request, token))
        except grpc.RpcError as error:
            if not self._headers.is_renewed(error, token):
                raise
        metadata = self._headers.of(request, self._token())
        return method(request, timeout=_left_s(end_time), metadata=metadata)

    def stream(
        self,
        method: Callable[..., Iterable[Response]],
        request: Message,
        timeout_s: float | None,
        *,
        waits: bool | None = None,
    ) -> ResponseCall[Response]:
        """Begin a call with many answers; with `waits` a server that is not there is waited for."""
        begin = self._headers.beginning(method, request, timeout_s, waits=waits)
        return ResponseCall(begin, self._token, self._headers)

    def upload(
        self,
        method: Callable[..., Response],
        requests: Iterable[Message],
        timeout_s: float | None,
    ) -> Response:
        """Return the one answer to a stream of messages, which cannot be sent a second time."""
        metadata = self._headers.of_upload(self._token())
        return method(iter(requests), timeout=timeout_s, metadata=metadata)

    def _token(self) -> str:
        return "" if self._headers.has_own_token else self._headers.token.current()


class ResponseCall(Generic[Response]):
    """The answers of a running call, to be iterated over once."""

    def __init__(self, begin: Callable[[str], Any], token: Callable[[], str], headers: _Headers) -> None:
        self._begin = begin
        self._token = token
        self._headers = headers
        self._sent_token = token()
        self._call = begin(self._sent_token)
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Response]:
        is_answered = False
        try:
            for response in self._call:
                is_answered = True
                yield response
            return
        except grpc.RpcError as error:
            if is_answered or self._is_cancelled or not self._headers.is_renewed(error, self._sent_token):
                raise
        self._begin_anew()
        yield from self._call

    def _begin_anew(self) -> None:
        self._sent_token = self._token()
        self._call = self._begin(self._sent_token)
        if self._is_cancelled:
            self._call.cancel()

    def cancel(self) -> None:
        """End it on the server too. Harmless after the end."""
        self._is_cancelled = True
        self._call.cancel()


class AsyncCalls:
    """As `Calls`, awaited."""

    def __init__(self, token: BearerToken, metadata: Metadata = ()) -> None:
        self._headers = _Headers(token, metadata)

    def with_metadata(self, metadata: Metadata) -> Self:
        """Return what makes calls that carry this too."""
        return type(self)(self._headers.token, (*self._headers.metadata, *metadata))

    async def unary(
        self, method: Callable[..., Awaitable[Response]], request: Message, timeout_s: float | None
    ) -> Response:
        """Return the one answer of a call."""
        end_time = _end_time(timeout_s)
        token = await self._token()
        try:
            return await method(request, timeout=timeout_s, metadata=self._headers.of(request, token))
        except grpc.RpcError as error:
            if not self._headers.is_renewed(error, token):
                raise
        metadata = self._headers.of(request, await self._token())
        return await method(request, timeout=_left_s(end_time), metadata=metadata)

    def stream(
        self,
        method: Callable[..., AsyncIterable[Response]],
        request: Message,
        timeout_s: float | None,
        *,
        waits: bool | None = None,
    ) -> AsyncResponseCall[Response]:
        """Begin a call with many answers; one whose token is not known yet begins with its iteration."""
        begin = self._headers.beginning(method, request, timeout_s, waits=waits)
        known = "" if self._headers.has_own_token else self._headers.token.known
        return AsyncResponseCall(begin, known, self._headers)

    async def upload(
        self,
        method: Callable[..., Awaitable[Response]],
        requests: AsyncIterable[Message],
        timeout_s: float | None,
    ) -> Response:
        """Return the one answer to a stream of messages, which cannot be sent a second time."""
        metadata = self._headers.of_upload(await self._token())
        return await method(requests, timeout=timeout_s, metadata=metadata)

    async def _token(self) -> str:
        return "" if self._headers.has_own_token else await self._headers.token.current_async()


class AsyncResponseCall(Generic[Response]):
    """As `ResponseCall`, iterated over with `async for`."""

    def __init__(self, begin: Callable[[str], Any], token: str | None, headers: _Headers) -> None:
        self._begin = begin
        self._headers = headers
        self._sent_token = token or ""
        self._call: Any = None if token is None else begin(token)
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Response]:
        is_answered = False
        if self._call is None:
            await self._begin_anew()
        try:
            async for response in self._call:
                is_answered = True
                yield response
            return
        except grpc.RpcError as error:
            if is_answered or self._is_cancelled or not self._headers.is_renewed(error, self._sent_token):
                raise
        await self._begin_anew()
        async for response in self._call:
            yield response

    async def _begin_anew(self) -> None:
        self._sent_token = await self._headers.token.current_async()
        self._call = self._begin(self._sent_token)
        if self._is_cancelled:
            self._call.cancel()

    def cancel(self) -> None:
        """End it on the server too. Harmless after the end."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()


@contextlib.contextmanager
def ending(call: Cancelled) -> Iterator[Cancelled]:
    """End the call on the server too, however the block is left."""
    try:
        yield call
    finally:
        call.cancel()


def _end_time(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left_s(end_time: float | None) -> float | None:
    return None if end_time is None else max(0.0, end_time - time.monotonic())
