"""Files of secrets that are read again: what is no file, or cannot be had, holds nothing else up."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.config import SecurityConfig
from icehouse_server.rpc.access import credentials, tokens
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.credentials import ServerSecurity
from icehouse_server.rpc.access.tokens import line_of, new_token
from icehouse_server.small_file import SmallFile, read_small_file

from tests.fixtures.rpc.authority import Authority
from tests.fixtures.storage.storage_thread import ManualClock

OLD, NEW = new_token(), new_token()


class Place:
    """The four files, and what a server makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.put_pair("first")
        (folder / "ca.pem").write_bytes(self.authority.pem)
        self.put_token(OLD)

    def put_pair(self, name: str) -> None:
        """Put a certificate of this name there, by replacing what is there."""
        certificate, key = self.authority.issue(name)
        self.replace("server.pem", certificate)
        self.replace("server.key", key)

    def put_token(self, token: str) -> None:
        line = line_of(token, tenant="search", role=CallerRole.TENANT, expire_date=None)
        self.replace("tokens", line.encode())

    def replace(self, name: str, content: bytes) -> None:
        beside = self.folder / f"{name}.new"
        beside.write_bytes(content)
        beside.chmod(0o600)
        beside.replace(self.folder / name)

    def security(self, *, reload_s: float = 3600.0) -> ServerSecurity:
        config = SecurityConfig(
            tls_certificate=str(self.folder / "server.pem"),
            tls_key=str(self.folder / "server.key"),
            tls_client_ca=str(self.folder / "ca.pem"),
            token_file=str(self.folder / "tokens"),
            reload_s=reload_s,
        )
        loaded = ServerSecurity(config, clock=ManualClock())
        loaded.load()
        return loaded


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def taken(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the kinds that were taken into use since the start, in order."""
    return [vars(r)["kind"] for r in caplog.records if r.getMessage() == "new_secrets_taken"]


CHANGES: dict[str, Callable[[Place], None]] = {
    "tokens": lambda place: place.put_token(NEW),
    "certificate": lambda place: place.put_pair("second"),
    "authorities": lambda place: place.replace("ca.pem", Authority("successor").pem),
}
FILES = {
    "tokens": "tokens",
    "server.pem": "certificate",
    "server.key": "certificate",
    "ca.pem": "authorities",
}


@pytest.mark.parametrize("trap", [os.mkfifo, Path.mkdir], ids=["a pipe", "a folder"])
@pytest.mark.parametrize("name", list(FILES))
async def test_what_is_no_file_is_told_once_and_keeps_nothing_else_from_being_read(
    place: Place, name: str, trap: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    security = place.security()
    (place.folder / name).unlink()
    trap(place.folder / name)
    others = [kind for kind in CHANGES if kind != FILES[name]]
    for kind in others:
        CHANGES[kind](place)
    async with asyncio.timeout(60):
        await security.refresh()
        await security.refresh()
    assert sorted(taken(caplog)) == sorted(others)
    told = [vars(r)["detail"] for r in caplog.records if r.getMessage() == "old_secrets_kept"]
    assert len(told) == 1 and "it is not a plain file" in told[0]

    path = place.folder / name
    path.rmdir() if path.is_dir() else path.unlink()
    CHANGES[FILES[name]](place)
    async with asyncio.timeout(60):
        await security.refresh()
    assert taken(caplog)[-1] == FILES[name]


@pytest.mark.parametrize("name", list(FILES))
async def test_a_path_that_hangs_holds_up_its_own_kind_only(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a network's does whose server is gone: nothing that is asked of it comes back."""
    caplog.set_level(logging.INFO)
    security = place.security(reload_s=0.001)
    answers = threading.Event()
    logged = asyncio.Queue[str]()
    loop = asyncio.get_running_loop()

    def read(path: Path, **how: int) -> SmallFile:
        if path.name == name:
            answers.wait(60)
        return read_small_file(path, **how)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kind = vars(record).get("kind")
            loop.call_soon_threadsafe(logged.put_nowait, f"{record.getMessage()} {kind}")

    listener = Listener()
    credentials._logger.addHandler(listener)
    monkeypatch.setattr(credentials, "_SLOW_S", 0.001)
    for module in (credentials, tokens):
        monkeypatch.setattr(module, "read_small_file", read)
    running = asyncio.create_task(security.run())
    try:
        expected = {f"new_secrets_taken {kind}" for kind in CHANGES if kind != FILES[name]}
        expected.add(f"secrets_out_of_reach {FILES[name]}")
        for kind in CHANGES:
            CHANGES[kind](place)
        async with asyncio.timeout(60):
            while expected:
                expected.discard(await logged.get())
            answers.set()
            while await logged.get() != f"new_secrets_taken {FILES[name]}":
                pass
    finally:
        answers.set()
        running.cancel()
        credentials._logger.removeHandler(listener)
    told = [r for r in caplog.records if r.getMessage() == "secrets_out_of_reach"]
    assert [vars(r)["kind"] for r in told].count(FILES[name]) == 1
