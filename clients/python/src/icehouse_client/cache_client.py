"""The prefix cache of a server: `Client.cache` and `AsyncClient.cache`. Answers are the API's own messages.

Each prompt carries its prefix key, so that behind a load balancer a command reaches the server that a
Generate of the same prompt reaches.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypedDict, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from icehouse.v1 import cache_service_pb2 as messages
from icehouse.v1 import cache_service_pb2_grpc

from icehouse_client.affinity import PromptRequest
from icehouse_client.archive_files import ArchiveFile, import_requests, opened, written
from icehouse_client.cache import CacheOptions, cache_policy
from icehouse_client.calls import AsyncCalls, Calls, ending
from icehouse_client.errors import error_from, translated
from icehouse_client.options import refuse_unknown
from icehouse_client.requests import Prompt, PromptOptions, set_prompt
from icehouse_client.texts import names_bad_texts

Request = TypeVar("Request", bound=PromptRequest)


class WarmOptions(PromptOptions, total=False):
    """What may be said about a prompt to compute. Left out: the server's default."""

    request_id: str
    priority: int


class PinOptions(PromptOptions, total=False):
    """What may be said about a pin. Left out: the server's default."""

    ttl_s: float
    """How long it lasts; by default until `unpin`."""


class VerifyOptions(TypedDict, total=False):
    """What may be said about a check of the SSD tier."""

    model: str
    """Its blocks are checked, and those of models that are not loaded."""
    block_limit: int
    """Maximum blocks to read; the next check continues from there."""
    timeout_s: float | None


class SessionOptions(CacheOptions, total=False):
    """What may be said about a session that has ended."""

    model: str
    timeout_s: float | None


class EvictAllOptions(TypedDict, total=False):
    """What may be said about a removal of everything."""

    model: str
    timeout_s: float | None


class ImportOptions(TypedDict, total=False):
    """What may be said about an archive to adopt. Left out: the server's default."""

    model: str
    tenant: str
    timeout_s: float | None


TimedOptions = PromptOptions | VerifyOptions | SessionOptions | EvictAllOptions | ImportOptions
OnWarmProgress = Callable[[messages.WarmProgress], object]
OnEvictProgress = Callable[[messages.EvictProgress], object]
OnVerifyProgress = Callable[[messages.VerifyProgress], object]
OnBytes = Callable[[int], object]
"""Called with the bytes that went through so far."""


class CacheClient:
    """Inspects and manages the prefix cache. Every method raises IcehouseClientError.

    `on_progress` is called with the progress of a method as it goes; the method returns the result.
    """

    def __init__(self, channel: grpc.Channel, calls: Calls, times: CacheTimeouts) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._calls = calls
        self._times = times

    def warm(
        self, prompt: Prompt, *, on_progress: OnWarmProgress | None = None, **options: Unpack[WarmOptions]
    ) -> messages.WarmResult:
        """Bring a prompt into the RAM tier, from SSD or by computing it, without generating."""
        result: messages.WarmResult = self._result(
            self._stub.Warm, warm_request(prompt, options), options, on_progress
        )
        return result

    def verify(
        self, *, on_progress: OnVerifyProgress | None = None, **options: Unpack[VerifyOptions]
    ) -> messages.VerifyResult:
        """Have blocks on SSD read and compared, for operators."""
        result: messages.VerifyResult = self._result(
            self._stub.Verify, verify_request(options), options, on_progress
        )
        return result

    def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.ExplainResponse:
        """Return what `generate` would reuse of a prompt."""
        request = command_request(messages.ExplainRequest(), prompt, options)
        with translated():
            return self._calls.unary(self._stub.Explain, request, self._times.soon(options))

    def pin(self, prompt: Prompt, **options: Unpack[PinOptions]) -> messages.PinResponse:
        """Keep a prompt's known blocks from being evicted by policy; pinning again prolongs it."""
        request = pin_request(prompt, options)
        with translated():
            return self._calls.unary(self._stub.Pin, request, self._times.soon(options))

    def unpin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        request = command_request(messages.UnpinRequest(), prompt, options)
        with translated():
            return self._calls.unary(self._stub.Unpin, request, self._times.soon(options))

    def end_session(self, session_id: str, **options: Unpack[SessionOptions]) -> messages.EndSessionResponse:
        """Have what only this conversation has used evicted first: it is over."""
        request = end_session_request(session_id, options)
        with translated():
            return self._calls.unary(self._stub.EndSession, request, self._times.soon(options))

    def evict(
        self, prompt: Prompt, *, on_progress: OnEvictProgress | None = None, **options: Unpack[PromptOptions]
    ) -> messages.EvictResult:
        """Remove a prompt's cached blocks, pinned ones too; no further once the call ends."""
        request = command_request(messages.EvictRequest(), prompt, options)
        result: messages.EvictResult = self._result(self._stub.Evict, request, options, on_progress)
        return result

    def evict_all(
        self, *, on_progress: OnEvictProgress | None = None, **options: Unpack[EvictAllOptions]
    ) -> messages.EvictResult:
        """Remove every block of the model, for operators; as `evict` otherwise."""
        result: messages.EvictResult = self._result(
            self._stub.EvictAll, evict_all_request(options), options, on_progress
        )
        return result

    def export_archive(
        self,
        file: ArchiveFile,
        prompt: Prompt | None = None,
        *,
        on_progress: OnBytes | None = None,
        **options: Unpack[PromptOptions],
    ) -> messages.ExportResult:
        """Write the cached blocks of a prompt, by default all of the tenant, to an archive, tokens included.
        Raises OSError as well."""
        call = self._calls.stream(
            self._stub.Export, export_request(prompt, options), self._times.long(options)
        )
        result, size_bytes = None, 0
        with translated(), ending(call), written(file) as write:
            for response in call:
                if response.HasField("done"):
                    result = response.done
                elif response.chunk:
                    write(response.chunk)
                    size_bytes += len(response.chunk)
                    (on_progress or _ignore)(size_bytes)
            return _complete(result)

    def import_archive(
        self, file: ArchiveFile, *, on_progress: OnBytes | None = None, **options: Unpack[ImportOptions]
    ) -> messages.ImportResponse:
        """Have an archive's blocks adopted as the tenant's; the answer counts them, and what was refused.
        Raises OSError as well."""
        target = import_target(options)
        with opened(file) as source, translated():
            requests = _counted(import_requests(target, source), on_progress or _ignore)
            return self._calls.upload(self._stub.Import, requests, self._times.long(options))

    def _result(
        self,
        method: Callable[..., Any],
        request: Message,
        options: TimedOptions,
        on_progress: Callable[[Any], object] | None,
    ) -> Any:
        """Return what a stream of progress ends with."""
        timeout_s = self._times.long(options)
        call = self._calls.stream(method, request, timeout_s)
        result = None
        with translated(), ending(call):
            for response in call:
                if response.HasField("done"):
                    result = response.done
                elif on_progress is not None and response.HasField("progress"):
                    on_progress(response.progress)
        if result is None:
            raise error_from(grpc.StatusCode.DATA_LOSS, "the call ended without a result", None)
        return result


class AsyncCacheClient:
    """As `CacheClient`, with awaitable methods."""

    def __init__(self, channel: grpc.aio.Channel, calls: AsyncCalls, times: CacheTimeouts) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._calls = calls
        self._times = times

    async def warm(
        self, prompt: Prompt, *, on_progress: OnWarmProgress | None = None, **options: Unpack[WarmOptions]
    ) -> messages.WarmResult:
        """Bring a prompt into the RAM tier, from SSD or by computing it, without generating."""
        result: messages.WarmResult = await self._result(
            self._stub.Warm, warm_request(prompt, options), options, on_progress
        )
        return result

    async def verify(
        self, *, on_progress: OnVerifyProgress | None = None, **options: Unpack[VerifyOptions]
    ) -> messages.VerifyResult:
        """Have blocks on SSD read and compared, for operators."""
        result: messages.VerifyResult = await self._result(
            self._stub.Verify, verify_request(options), options, on_progress
        )
        return result

    async def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.ExplainResponse:
        """Return what `generate` would reuse of a prompt."""
        request = command_request(messages.ExplainRequest(), prompt, options)
        with translated():
            return await self._calls.unary(self._stub.Explain, request, self._times.soon(options))

    async def pin(self, prompt: Prompt, **options: Unpack[PinOptions]) -> messages.PinResponse:
        """Keep a prompt's known blocks from being evicted by policy; pinning again prolongs it."""
        request = pin_request(prompt, options)
        with translated():
            return await self._calls.unary(self._stub.Pin, request, self._times.soon(options))

    async def unpin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        request = command_request(messages.UnpinRequest(), prompt, options)
        with translated():
            return await self._calls.unary(self._stub.Unpin, request, self._times.soon(options))

    async def end_session(
        self, session_id: str, **options: Unpack[SessionOptions]
    ) -> messages.EndSessionResponse:
        """Have what only this conversation has used evicted first: it is over."""
        request = end_session_request(session_id, options)
        with translated():
            return await self._calls.unary(self._stub.EndSession, request, self._times.soon(options))

    async def evict(
        self, prompt: Prompt, *, on_progress: OnEvictProgress | None = None, **options: Unpack[PromptOptions]
    ) -> messages.EvictResult:
        """Remove a prompt's cached blocks, pinned ones too; no further once the call ends."""
        request = command_request(messages.EvictRequest(), prompt, options)
        result: messages.EvictResult = await self._result(self._stub.Evict, request, options, on_progress)
        return result

    async def evict_all(
        self, *, on_progress: OnEvictProgress | None = None, **options: Unpack[EvictAllOptions]
    ) -> messages.EvictResult:
        """Remove every block of the model, for operators; as `evict` otherwise."""
        result: messages.EvictResult = await self._result(
            self._stub.EvictAll, evict_all_request(options), options, on_progress
        )
        return result

    async def export_archive(
        self,
        file: ArchiveFile,
        prompt: Prompt | None = None,
        *,
        on_progress: OnBytes | None = None,
        **options: Unpack[PromptOptions],
    ) -> messages.ExportResult:
        """Write the cached blocks of a prompt, by default all of the tenant, to an archive, tokens included.
        Raises OSError as well."""
        call = self._calls.stream(
            self._stub.Export, export_request(prompt, options), self._times.long(options)
        )
        result, size_bytes = None, 0
        with translated(), ending(call), written(file) as write:
            async for response in call:
                if response.HasField("done"):
                    result = response.done
                elif response.chunk:
                    await asyncio.to_thread(write, response.chunk)
                    size_bytes += len(response.chunk)
                    (on_progress or _ignore)(size_bytes)
            return _complete(result)

    async def import_archive(
        self, file: ArchiveFile, *, on_progress: OnBytes | None = None, **options: Unpack[ImportOptions]
    ) -> messages.ImportResponse:
        """Have an archive's blocks adopted as the tenant's; the answer counts them, and what was refused.
        Raises OSError as well."""
        target = import_target(options)
        with opened(file) as source, translated():
            requests = _counted(import_requests(target, source), on_progress or _ignore)
            return await self._calls.upload(
                self._stub.Import, _in_thread(requests), self._times.long(options)
            )

    async def _result(
        self,
        method: Callable[..., Any],
        request: Message,
        options: TimedOptions,
        on_progress: Callable[[Any], object] | None,
    ) -> Any:
        """Return what a stream of progress ends with."""
        timeout_s = self._times.long(options)
        call = self._calls.stream(method, request, timeout_s)
        result = None
        with translated(), ending(call):
            async for response in call:
                if response.HasField("done"):
                    result = response.done
                elif on_progress is not None and response.HasField("progress"):
                    on_progress(response.progress)
        if result is None:
            raise error_from(grpc.StatusCode.DATA_LOSS, "the call ended without a result", None)
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTimeouts:
    """The deadlines of one connection's calls; those that may be long have `command_timeout_s`."""

    timeout_s: float | None
    command_timeout_s: float | None

    def soon(self, options: PromptOptions | SessionOptions) -> float | None:
        """Return the deadline of a call that is answered soon."""
        return options.get("timeout_s", self.timeout_s)

    def long(self, options: TimedOptions) -> float | None:
        """Return that of a call that may be long."""
        return options.get("timeout_s", None if self.timeout_s is None else self.command_timeout_s)


@names_bad_texts
def warm_request(prompt: Prompt, options: WarmOptions) -> messages.WarmRequest:
    """Return the message of Warm."""
    refuse_unknown(options, WarmOptions)
    request = messages.WarmRequest(
        request_id=options.get("request_id", ""),
        priority=options.get("priority", 0),
        cache=cache_policy(options),
    )
    set_prompt(request, prompt, options)
    return request


@names_bad_texts
def pin_request(prompt: Prompt, options: PinOptions) -> messages.PinRequest:
    """Return the message of Pin."""
    refuse_unknown(options, PinOptions)
    request = messages.PinRequest(cache=cache_policy(options))
    if "ttl_s" in options:
        request.ttl.FromNanoseconds(round(options["ttl_s"] * 1e9))
    set_prompt(request, prompt, options)
    return request


def verify_request(options: VerifyOptions) -> messages.VerifyRequest:
    """Return the message of Verify."""
    refuse_unknown(options, VerifyOptions)
    return messages.VerifyRequest(model=options.get("model", ""), block_limit=options.get("block_limit", 0))


@names_bad_texts
def end_session_request(session_id: str, options: SessionOptions) -> messages.EndSessionRequest:
    """Return the message of EndSession."""
    refuse_unknown(options, SessionOptions)
    return messages.EndSessionRequest(
        model=options.get("model", ""), session_id=session_id, cache=cache_policy(options)
    )


@names_bad_texts
def evict_all_request(options: EvictAllOptions) -> messages.EvictAllRequest:
    """Return the message of EvictAll."""
    refuse_unknown(options, EvictAllOptions)
    return messages.EvictAllRequest(model=options.get("model", ""))


@names_bad_texts
def export_request(prompt: Prompt | None, options: PromptOptions) -> messages.ExportRequest:
    """Return the message of Export; without a prompt it asks for all of the tenant."""
    request = messages.ExportRequest(model=options.get("model", ""), cache=cache_policy(options))
    return request if prompt is None else command_request(request, prompt, options)


@names_bad_texts
def import_target(options: ImportOptions) -> messages.ImportTarget:
    """Return the first message's content of Import."""
    refuse_unknown(options, ImportOptions)
    target = messages.ImportTarget(model=options.get("model", ""))
    target.cache.tenant = options.get("tenant", "")
    return target


def _counted(
    requests: Iterator[messages.ImportRequest], on_progress: OnBytes
) -> Iterator[messages.ImportRequest]:
    """Yield messages, and say how many bytes of the archive are on their way."""
    size_bytes = 0
    for request in requests:
        yield request
        size_bytes += len(request.chunk)
        on_progress(size_bytes)


async def _in_thread(requests: Iterator[messages.ImportRequest]) -> AsyncIterator[messages.ImportRequest]:
    """Yield messages that are read from a file in another thread."""
    while (request := await asyncio.to_thread(next, requests, None)) is not None:
        yield request


def _complete(result: messages.ExportResult | None) -> messages.ExportResult:
    """Return what a complete archive ends with. Raises where a call ended without it."""
    if result is None:
        raise error_from(grpc.StatusCode.DATA_LOSS, "the call ended without a result", None)
    return result


def _ignore(size_bytes: int) -> None:
    """Nobody wants to know."""


@names_bad_texts
def command_request(request: Request, prompt: Prompt, options: PromptOptions) -> Request:
    """Return the message of a command about a prompt, filled in."""
    refuse_unknown(options, PromptOptions)
    policy = cache_policy(options)
    if policy is not None:
        request.cache.CopyFrom(policy)
    set_prompt(request, prompt, options)
    return request
