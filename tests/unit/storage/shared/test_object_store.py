"""The object store through obstore: against a real S3 server, and in a folder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_server.storage.shared.object_store import ObstoreStore, StoreError, make_store

from tests.fixtures.storage.s3_server import S3Server

pytest.importorskip("obstore", reason="obstore comes with the extra shared")

DATA = bytes(range(256)) * 40_000


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["S3", "folder"])
def store(request, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObstoreStore:
    if request.param == "folder":
        return make_store(f"file://{tmp_path}")
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    # A path of its own: tests share the server.
    return make_store(f"{s3.url}/{tmp_path.name}")


async def read(store: ObstoreStore, name: str) -> bytes:
    return b"".join([bytes(chunk) async for chunk in store.read(name)])


async def test_what_was_put_is_there_whole(store: ObstoreStore) -> None:
    assert await store.size_bytes("model/block") is None
    assert await read(store, "model/block") == b""
    assert await store.put("model/block", DATA, replaces=False)
    assert await store.size_bytes("model/block") == len(DATA)
    assert await read(store, "model/block") == DATA


async def test_an_object_is_replaced_by_a_whole_one_or_deleted(store: ObstoreStore) -> None:
    await store.put("model/block", b"old", replaces=False)
    assert await store.put("model/block", b"new", replaces=True)
    assert await read(store, "model/block") == b"new"
    await store.delete("model/block")
    assert await store.size_bytes("model/block") is None
    await store.delete("model/block")


async def test_in_a_folder_the_first_of_two_writers_stays(tmp_path: Path) -> None:
    store = make_store(f"file://{tmp_path}")
    assert await store.put("model/block", b"first", replaces=False)
    assert not await store.put("model/block", b"second", replaces=False)
    assert await read(store, "model/block") == b"first"


async def test_wrong_credentials_are_refused_in_words_without_them(s3, monkeypatch) -> None:
    for name, value in {**s3.environment, "AWS_SECRET_ACCESS_KEY": "of-somebody-else"}.items():
        monkeypatch.setenv(name, value)
    store = make_store(s3.url)
    for request in (store.size_bytes("a"), read(store, "a"), store.put("a", b"", replaces=False)):
        with pytest.raises(StoreError, match="the object store refuses these credentials"):
            await request


async def test_a_server_that_is_gone_cannot_be_reached(monkeypatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{probe.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        with pytest.raises(StoreError, match="the object store cannot be reached"):
            await make_store("s3://bucket/path").size_bytes("a")


async def test_a_server_that_never_answers_is_given_up_by_whoever_waits(monkeypatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await make_store("s3://bucket/path").size_bytes("a")


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("500 Internal Server Error", "the object store answers with status 500"),
        ("429 Too Many Requests", "the object store answers with status 429"),
        ("507 Insufficient Storage", "the object store is full"),
        ("403 Forbidden", "the object store refuses these credentials"),
    ],
)
async def test_what_a_server_answers_is_told_whatever_a_block_is_called(monkeypatch, status, told) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        store = make_store("s3://bucket/path")
        name = "507" * 21 + "a"
        for request in (store.size_bytes(name), read(store, name), store.put(name, b"1", replaces=False)):
            with pytest.raises(StoreError) as refused:
                await request
            assert str(refused.value) == told


async def test_a_folder_that_is_missing_is_not_made(tmp_path: Path) -> None:
    """It may be a disk that is not mounted yet."""
    store = make_store(f"file://{tmp_path}/missing")
    with pytest.raises(StoreError):
        await store.put("a", b"1", replaces=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "missing").mkdir()
    assert await store.put("a", b"1", replaces=False)


@pytest.mark.parametrize("url", ["ftp://host/path", "file://relative", "bucket"])
def test_what_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        make_store(url)
