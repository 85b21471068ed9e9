"""Images that a conversation names: read once each, in turns, within a time, and only where allowed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.config import ServerConfig
from icehouse_server.domain.chat import ChatMessage, Conversation, ImageSource, PlacedImage
from icehouse_server.errors import InvalidRequest, Reason, SourceUnreachable
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.image_sources import image_fetcher as fetchers
from icehouse_server.rpc.image_sources.image_fetcher import ImageFetcher, read_file

from tests.fixtures.patience import BOUND_S
from tests.fixtures.web_host import WebHost, answer, web_host

INLINE = ImageSource(b"inline", "image/png", "parts[0]")


def named(*uris: str) -> Conversation:
    """Return a conversation of two turns with these images and one of its own between them."""
    images = [PlacedImage(0, ImageSource(b"", "", f"parts[{i}]", uri)) for i, uri in enumerate(uris)]
    second = ChatMessage("user", "?", images=(PlacedImage(0, INLINE), *images[1:]))
    return Conversation((ChatMessage("user", "?", images=tuple(images[:1])), second))


async def data_of(fetcher: ImageFetcher, conversation: Conversation) -> list[bytes]:
    async with fetcher.fetched(conversation) as whole:
        assert dataclasses.replace(whole, messages=()) == dataclasses.replace(conversation, messages=())
        return [source.data for source in whole.images]


@pytest.fixture
async def host() -> AsyncIterator[WebHost]:
    async with web_host() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cat.png").write_bytes(b"cat")
    (tmp_path / "dog.png").write_bytes(b"dog")
    return tmp_path


def config_of(host: WebHost | None, folder: Path | None, **more: Any) -> ServerConfig:
    return ServerConfig(
        image_hosts=None if host is None else f"127.0.0.1:{host.port}",
        image_folders=None if folder is None else str(folder),
        **more,
    )


async def test_each_is_read_once_and_stands_where_it_was_named(host: WebHost, folder: Path) -> None:
    host.answers["/bird"] = answer(200, b"bird")
    bird, cat = f"http://127.0.0.1:{host.port}/bird", f"file://{folder}/cat.png"
    fetcher = ImageFetcher(config_of(host, folder))
    assert await data_of(fetcher, named(bird, cat, bird)) == [b"bird", b"inline", b"cat", b"bird"]
    assert len(host.requests) == 1
    conversation = named()
    async with fetcher.fetched(conversation) as whole:
        assert whole is conversation


async def test_what_is_not_allowed_is_refused_before_anything_is_read(host: WebHost, folder: Path) -> None:
    bird, cat = f"http://127.0.0.1:{host.port}/bird", f"file://{folder}/cat.png"
    for config, uri in ((config_of(None, folder), bird), (config_of(host, None), cat)):
        with pytest.raises(InvalidRequest) as caught:
            await data_of(ImageFetcher(config), named(cat if uri is bird else bird, uri))
        assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, "parts[1].uri")
    assert not host.requests


async def test_too_many_are_left_to_who_counts_all(host: WebHost) -> None:
    uris = [f"http://127.0.0.1:{host.port}/{i}" for i in range(3)]
    assert await data_of(ImageFetcher(config_of(host, None, max_images=3)), named(*uris)) == [
        *(b"", b"inline", b"", b"")
    ]
    assert not host.requests


async def test_one_at_fault_ends_the_reading_of_the_others(host: WebHost) -> None:
    host.answers["/gone"] = answer(404, b"")
    uris = [f"http://127.0.0.1:{host.port}/{name}" for name in ("slow", "gone")]
    with pytest.raises(InvalidRequest) as caught:
        await data_of(ImageFetcher(config_of(host, None)), named(*uris))
    assert caught.value.field == "parts[1].uri"
    await host.closed()


async def test_a_host_that_says_nothing_is_waited_for_so_long(host: WebHost) -> None:
    fetcher = ImageFetcher(config_of(host, None, image_fetch_timeout_s=0.1))
    with pytest.raises(SourceUnreachable) as caught:
        await data_of(fetcher, named(f"http://127.0.0.1:{host.port}/slow"))
    assert caught.value.reason is Reason.IMAGE_UNREACHABLE and "0.1 s" in caught.value.message
    await host.closed()


@pytest.mark.parametrize(
    ("begun", "endless"),
    [
        (b"", b"x"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (answer(200, b"", length=None), b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
async def test_a_host_that_says_little_by_little_is_waited_for_as_long(
    host: WebHost, begun: bytes, endless: bytes
) -> None:
    """Each byte comes in time; all of them do not."""
    host.answers["/slow"], host.endless["/slow"] = begun, endless
    fetcher = ImageFetcher(config_of(host, None, image_fetch_timeout_s=0.1))
    with pytest.raises(SourceUnreachable, match=r"not read within 0\.1 s"):
        await data_of(fetcher, named(f"http://127.0.0.1:{host.port}/slow"))
    await host.closed()


async def test_a_caller_that_leaves_takes_its_connection_along(host: WebHost, folder: Path) -> None:
    fetcher = ImageFetcher(config_of(host, folder, image_fetch_timeout_s=300.0))
    asking = asyncio.ensure_future(data_of(fetcher, named(f"http://127.0.0.1:{host.port}/slow")))
    await host.asked()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await host.closed()
    assert await data_of(fetcher, named(f"file://{folder}/cat.png")) == [b"cat", b"inline"]


async def test_one_callers_slow_hosts_leave_memory_to_others(host: WebHost, folder: Path) -> None:
    size = 1024
    config = config_of(host, folder, max_image_bytes=size, request_memory_bytes=64 * size)
    fetcher = ImageFetcher(config)

    async def ask(origin: str, *uris: str) -> list[bytes]:
        callers.origin.set(origin)
        return await data_of(fetcher, named(*uris))

    uris = [f"http://127.0.0.1:{host.port}/slow{i}" for i in range(15)]
    slow = [asyncio.ensure_future(ask("a", *uris)) for _ in range(8)]
    await host.asked(30)
    assert await ask("b", f"file://{folder}/cat.png") == [b"cat", b"inline"]
    assert len(host.requests) <= 32, "half of the memory"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert fetcher._memory.waiting_count == 0 and fetcher._turns.waiting_count == 0
    assert await ask("a", f"file://{folder}/dog.png") == [b"dog", b"inline"]


async def test_a_disk_that_hangs_holds_its_thread_and_nobody_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetchers, "_THREAD_COUNT", 4)
    go, begun = threading.Event(), threading.Semaphore(0)
    read = read_file

    def hanging(address: Any, **limits: Any) -> bytes:
        if address.names == ("hangs",):
            begun.release()
            go.wait(BOUND_S)
        return read(address, **limits)

    monkeypatch.setattr(fetchers, "read_file", hanging)
    fetcher = ImageFetcher(config_of(None, folder, image_fetch_timeout_s=0.1))
    callers.origin.set("a")
    for _ in range(4):
        with pytest.raises(SourceUnreachable):
            await data_of(fetcher, named(f"file://{folder}/hangs"))
    assert begun.acquire() and begun.acquire() and not begun.acquire(blocking=False), "half of the threads"
    callers.origin.set("b")
    fetcher._config = dataclasses.replace(fetcher._config, image_fetch_timeout_s=BOUND_S)
    assert await data_of(fetcher, named(f"file://{folder}/cat.png")) == [b"cat", b"inline"]
    go.set()
