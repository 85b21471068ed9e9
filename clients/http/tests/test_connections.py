"""Connections of the front: what each may hold and for how long, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from icehouse_http.bounds.connection import KEPT_BACK_S, BoundedConnection
from icehouse_http.bounds.pace import Pace
from icehouse_http.serving.server import Listening, server_of
from icehouse_http.settings import Settings

from clients.http.tests.fronts import HttpFront
from clients.http.tests.test_hostile import answer_to, port_of
from tests.fixtures.patience import BOUND_S

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LONG = b"a" * (1 << 20)


class Endless:
    """An app that writes for as long as its caller is there, and says when that one is gone."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.begun.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writing = asyncio.ensure_future(self._write(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        self.gone.set()

    async def _write(self, send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": LONG, "more_body": True})
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an app on connections of the front's kind."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = uvicorn.Config(app, http=BoundedConnection, ws="none", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


def deaf(writer: asyncio.StreamWriter) -> None:
    """Read nothing any more."""
    transport: Any = writer.transport
    transport.pause_reading()


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection ends, however it does."""
    read = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(BOUND_S):
            while piece := await reader.read(1 << 16):
                read += piece
    return read


async def test_a_caller_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "read_timeout_s", 0.05)
    app = Endless()
    async with serving(app) as url, connected(url) as (_, writer):
        deaf(writer)
        writer.write(GET)
        async with asyncio.timeout(BOUND_S):
            await app.gone.wait()


async def test_one_that_reads_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "read_timeout_s", BOUND_S)
    app = Endless()
    async with serving(app) as url:
        async with connected(url) as (reader, writer):
            writer.write(GET)
            for _ in range(50):
                await reader.readexactly(len(LONG))
            assert not app.gone.is_set()
        await app.gone.wait()


async def test_requests_far_ahead_of_their_answers_end_the_connection() -> None:
    app = Endless()
    async with serving(app) as url, connected(url) as (_, writer):
        writer.write(GET)
        await app.begun.wait()
        deaf(writer)
        writer.write(GET * (1 + BoundedConnection.pipeline_bytes // len(GET)))
        async with asyncio.timeout(BOUND_S):
            await app.gone.wait()


async def test_a_few_requests_ahead_are_answered(front: HttpFront) -> None:
    assert (await answer_to(front.url, GET * 9 + LAST_GET)).count(b"HTTP/1.1 200 ") == 10


async def test_a_refused_body_that_does_not_end_is_not_taken(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "unread_bytes", 1 << 20)
    async with connected(front.url) as (reader, writer):
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(BOUND_S):
                while True:
                    writer.write(b" " * (1 << 16))
                    await writer.drain()


async def test_one_connection_too_many_ends_the_one_that_waits_longest(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "connection_limit", 2)
    async with connected(front.url) as (oldest, _), connected(front.url) as (served, writer):
        writer.write(GET)
        await served.readuntil(b"}")
        assert (await answer_to(front.url, LAST_GET)).startswith(b"HTTP/1.1 200 ")
        assert await end_of(oldest) == b""
        writer.write(GET)
        assert (await served.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("allowed", "wanted", "found"), [(256, 400, 400), (500, 400, 500), (256, 9999, 600)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(allowed: int, wanted: int, found: int) -> None:
    program = (
        "import resource\nfrom icehouse_http.command import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({allowed}, 600))\n"
        f"allow_open_files({wanted})\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(found), "600"]


async def test_one_with_a_request_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "connection_limit", 1)
    app = Endless()
    async with serving(app) as url, connected(url) as (reader, writer):
        writer.write(GET)
        await app.begun.wait()
        async with connected(url) as (refused, _):
            assert await end_of(refused) == b""
        await reader.readexactly(len(LONG))
        assert not app.gone.is_set()


@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_a_body_of_two_lengths_is_refused(front: HttpFront, lines: str) -> None:
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}"
    answer = await answer_to(front.url, head.encode())
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 501"), answer


class Refusing:
    """An app that refuses, and has that kept back for a time."""

    def __init__(self, kept_back_s: float) -> None:
        self._kept_back_s = kept_back_s
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        scope[KEPT_BACK_S] = self._kept_back_s
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body"})
        self.ended.set()


async def test_a_refusal_that_is_kept_back_comes_and_the_connection_goes_on() -> None:
    async with serving(Refusing(0.01)) as url, connected(url) as (reader, writer):
        for _ in range(2):
            writer.write(GET)
            async with asyncio.timeout(BOUND_S):
                assert b" 429 " in await reader.readuntil(b"\r\n\r\n")


async def test_one_whose_refusal_is_kept_back_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "connection_limit", 1)
    app = Refusing(1e6)
    async with serving(app) as url, connected(url) as (refused, writer):
        writer.write(GET)
        await app.begun.wait()
        async with connected(url):
            assert await end_of(refused) == b""
            async with asyncio.timeout(BOUND_S):
                await app.ended.wait()


async def test_a_stop_does_not_wait_for_refusals_that_are_kept_back() -> None:
    app = Refusing(1e6)
    async with contextlib.AsyncExitStack() as open_connections, asyncio.timeout(BOUND_S):
        async with serving(app) as url:
            reader, writer = await open_connections.enter_async_context(connected(url))
            writer.write(GET)
            await app.begun.wait()
        assert b" 429 " in await reader.read()


@pytest.mark.parametrize("closing", ["", "Connection: close\r\n"])
async def test_an_answer_reaches_a_caller_who_is_still_sending(front: HttpFront, closing: str) -> None:
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n{closing}Content-Length: {1 << 40}\r\n\r\n"
    async with connected(front.url) as (reader, writer), asyncio.timeout(BOUND_S):
        writer.write(head.encode() + b" " * (8 << 20))
        await writer.drain()
        writer.write(GET)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()


async def test_what_nobody_reads_is_thrown_away_slowly(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = asyncio.Event()
    throw_away = BoundedConnection._throw_away

    def thrown_away(connection: BoundedConnection, size_bytes: int) -> None:
        throw_away(connection, size_bytes)
        assert not connection.transport.is_reading()
        paused.set()

    monkeypatch.setattr(BoundedConnection, "discarding", Pace(per_s=1.0, at_once=1.0, longest_s=1e6))
    monkeypatch.setattr(BoundedConnection, "_throw_away", thrown_away)
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    async with connected(front.url) as (reader, writer), asyncio.timeout(BOUND_S):
        writer.write(head)
        assert b" 413 " in await reader.read()
        writer.write(LONG)
        await paused.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on loopback")
async def test_a_machine_that_opens_many_connections_waits_and_others_do_not(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(source: str) -> bytes:
        port = port_of(front.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(LAST_GET)
        found = await end_of(reader)
        writer.close()
        return found

    monkeypatch.setattr(BoundedConnection, "arrivals", Pace(per_s=50.0, at_once=1.0, longest_s=1.0))
    for _ in range(3):
        assert b" 200 " in await answer("127.0.0.2")
    monkeypatch.setattr(BoundedConnection, "arrivals", Pace(per_s=1e-6, at_once=1.0, longest_s=1.0))
    assert b" 200 " in await answer("127.0.0.2")
    assert await answer("127.0.0.2") == b""
    for source in ("127.0.0.1", "127.0.0.1", "127.0.0.3"):
        assert b" 200 " in await answer(source)


async def test_no_part_of_an_answer_waits_until_the_caller_has_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio sees to it only where a socket says that it is TCP, which this one does not, nor one that is
    inherited on a Mac."""
    opened = []
    connection_made = BoundedConnection.connection_made

    def made(connection: BoundedConnection, transport: Any) -> None:
        connection_made(connection, transport)
        opened.append(transport.get_extra_info("socket"))

    monkeypatch.setattr(BoundedConnection, "connection_made", made)
    async with serving(Refusing(0.0)) as url, connected(url) as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        assert [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0 for each in opened] == [True]


def test_uvicorn_refuses_nothing_by_itself() -> None:
    assert server_of(Settings(), Listening()).config.limit_concurrency is None
