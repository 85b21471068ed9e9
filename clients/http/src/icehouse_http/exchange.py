"""Exchange of one request with the server: the output as a whole, or as server-sent events.

A caller who has gone ends the call on the server. A wish that the model cannot be held to is dropped, and the
rest asked again. A stream is never silent for longer than the ping interval: its protocol's ping is written
while the request waits, while its prompt is computed and while a call is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from icehouse_client import AsyncClient, AsyncStream, IcehouseClientError, Options, Prompt, Reply, StreamEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from icehouse_http.errors import ApiError, CallerGone, api_error, bad_request
from icehouse_http.field_names import NO_NAMES, FieldNames
from icehouse_http.serving.request_ids import IN_USE, distinct

Result = TypeVar("Result")

_to_json = json.JSONEncoder(ensure_ascii=False).encode


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the server is asked for, and how the caller wants the answer."""

    prompt: Prompt
    options: Options
    is_streamed: bool
    names: FieldNames = NO_NAMES
    """What the caller calls the fields of prompt and options."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event. Data is JSON, or a text as it is."""

    data: Mapping[str, Any] | str
    event: str = ""

    def encode(self) -> bytes:
        """Return its bytes on the wire."""
        data = self.data if isinstance(self.data, str) else _to_json(self.data)
        head = f"event: {self.event}\n" if self.event else ""
        return f"{head}data: {data}\n\n".encode()


Wishes = Mapping[tuple[str, str], str]
"""Options that are done without where the model cannot keep to them, by the refusal's reason and field."""

COMMENT = b": ping\n\n"
"""A ping that no client sees as an event."""


class Answer(Protocol):
    """Writes one answer in a protocol's form, whole or event by event."""

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""

    def ping(self) -> bytes:
        """Return what keeps a silent stream alive."""

    def feed(self, event: StreamEvent) -> Iterable[Frame]:
        """Return what to write for something that happened."""

    def end(self, reply: Reply) -> Iterable[Frame]:
        """Return what to write after the last event."""

    def fail(self, error: ApiError) -> Iterable[Frame]:
        """Return what to write when the request fails after the stream began."""


class LenientStream:
    """A stream of the server, begun again without a wish that it was refused for.

    That refusal may be late, since a model is loaded first, but nothing of the output comes before it.
    """

    def __init__(self, client: AsyncClient, asked: Asked, wishes: Wishes) -> None:
        """Raises ApiError for what cannot be sent."""
        self._client = client
        self._prompt, self._names = asked.prompt, asked.names
        self._options: Any = {**asked.options}
        self._request_id = asked.options.get("request_id", "")
        self._wishes = wishes
        try:
            self._stream = self._begin()
        except (TypeError, ValueError) as error:
            # What no message can hold, such as half of a surrogate pair.
            raise bad_request(str(error)) from error

    @property
    def reply(self) -> Reply:
        """The whole output, after the last event."""
        return self._stream.reply

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Iterate over what happens from the request's start; leaving the iteration ends the call too.

        Raises ApiError where the call fails.
        """
        while True:
            try:
                async with contextlib.aclosing(self._stream.events()) as events:
                    async for event in events:
                        if not event.HasField("loading_model"):
                            yield event
                return
            except IcehouseClientError as error:
                if not self._does_without(error.reason, error.field or ""):
                    raise api_error(error, self._names) from error
            self._stream = self._begin()

    def cancel(self) -> None:
        """End it on the server too. Harmless after the end."""
        self._stream.cancel()

    def _does_without(self, reason: str, field: str) -> bool:
        """Give up what a refusal names; False where that was no mere wish, or is given up already."""
        if reason == IN_USE:
            named, self._options["request_id"] = self._options["request_id"], distinct(self._request_id)
            return bool(named == self._request_id)
        if reason == "TOOLS_UNSUPPORTED" and field.endswith(".strict"):
            # OpenAI's Agents SDK has it on each tool, whatever the model. Arguments are checked when they are
            # read, so no call comes of any that do not fit.
            tools = self._options["tools"]
            self._options["tools"] = [dataclasses.replace(tool, strict=False) for tool in tools]
            return any(tool.strict for tool in tools)
        wish = self._wishes.get((reason, field))
        return wish is not None and self._options.pop(wish, None) is not None

    def _begin(self) -> AsyncStream:
        return self._client.stream(self._prompt, **self._options)


async def respond(
    request: Request,
    client: AsyncClient,
    asked: Asked,
    answer: Answer,
    *,
    wishes: Wishes,
    ping_interval_s: float,
) -> Response:
    """Ask the server and answer the caller; raises ApiError for what cannot be sent, and what the call raises
    before its first event or ping."""
    stream = LenientStream(client, asked, wishes)
    if not asked.is_streamed:
        reply = await until_gone(request.receive, _whole(stream))
        return JSONResponse(answer.whole(reply))
    events = EventStream(stream, answer, ping_interval_s=ping_interval_s)
    await until_gone(request.receive, events.begin())
    return events


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` returns; cancels it and raises CallerGone when the caller goes first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        return task.result()
    finally:
        await _cancelled(task, gone)


async def _whole(stream: LenientStream) -> Reply:
    async with contextlib.aclosing(stream.events()) as events:
        async for _ in events:
            pass
    return stream.reply


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """The response of a stream. `begin` waits for its request to run: a refusal has its own status."""

    media_type = "text/event-stream"

    def __init__(self, stream: LenientStream, answer: Answer, *, ping_interval_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # It is not known, and the empty body that it tells of is not this one's.
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._ping_interval_s = ping_interval_s
        self._events = stream.events()
        self._first: asyncio.Future[StreamEvent] | None = None
        self._loop = asyncio.get_running_loop()
        self._written_time = self._loop.time()
        self._is_writing = False

    async def begin(self) -> None:
        """Wait until the request runs, or until a ping is due; raises what the call raises."""
        self._first = asyncio.ensure_future(anext(self._events))
        try:
            await asyncio.wait({self._first}, timeout=self._ping_interval_s)
            if self._first.done() and (error := self._first.exception()) is not None:
                raise error
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            await until_gone(receive, self._write(send))
        finally:
            await self._close()

    async def _write(self, send: Send) -> None:
        """Write all events, each as it comes: a caller that does not read holds back the call itself."""
        assert self._first is not None, "the stream was not begun"
        pinging = asyncio.create_task(self._ping(send))
        try:
            await self._put(send, _encoded(self._answer.feed(await self._first)))
            async for event in self._events:
                await self._put(send, _encoded(self._answer.feed(event)))
            last = _encoded(self._answer.end(self._stream.reply))
        except ApiError as error:
            last = _encoded(self._answer.fail(error))
        finally:
            await _cancelled(pinging)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Write a ping wherever nothing was written for the interval."""
        while True:
            silent_s = self._loop.time() - self._written_time
            if silent_s < self._ping_interval_s or self._is_writing:
                await asyncio.sleep(max(self._ping_interval_s - silent_s, self._ping_interval_s / 10))
            else:
                await self._put(send, self._answer.ping())

    async def _put(self, send: Send, piece: bytes) -> None:
        if not piece:
            return
        self._is_writing = True
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._is_writing = False
        self._written_time = self._loop.time()

    async def _close(self) -> None:
        """End the call on the server too, first of all: what follows may be broken off."""
        self._stream.cancel()
        if self._first is not None:
            await _cancelled(self._first)
        await self._events.aclose()


def _encoded(frames: Iterable[Frame]) -> bytes:
    return b"".join(frame.encode() for frame in frames)
