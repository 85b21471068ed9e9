"""What a service manager hears of the server: datagrams as sd_notify(3) has them, on a real socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_server.cli.serve import ServiceManager, manager_of

from tests.fixtures.patience import BOUND_S

SHORT_S = 0.004


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Return a manager's socket; what is not there yet is an error, not waited for."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


def heard(listener: socket.socket) -> list[str]:
    """Return every datagram that has come."""
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def manager(listener: socket.socket, **environ: str) -> ServiceManager:
    return manager_of({"NOTIFY_SOCKET": listener.getsockname(), **environ}, pid=7)


def test_it_says_that_the_server_serves_and_that_it_ends(listener: socket.socket) -> None:
    told = manager(listener)
    told.ready("serving a\nREADY=0\nmodel \udc80")
    told.stopping()
    ready, stopping = heard(listener)
    assert ready.split("\n") == ["READY=1", "STATUS=serving a READY=0 model ?"]
    assert stopping.split("\n")[0] == "STOPPING=1"


def test_a_name_that_begins_with_an_at_sign_has_no_file() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind("")  # The kernel makes a name of its own.
        bound.setblocking(False)
        name = bound.getsockname()
        assert isinstance(name, bytes) and name.startswith(b"\0")
        manager_of({"NOTIFY_SOCKET": f"@{name[1:].decode()}"}, pid=7).ready("up")
        assert heard(bound) == ["READY=1\nSTATUS=up"]


def test_it_pings_only_while_the_server_answers(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    told = manager(listener, WATCHDOG_USEC="1000000")
    told.ping(lambda: True)
    assert heard(listener) == ["WATCHDOG=1"] and not caplog.records
    told.ping(lambda: False)
    assert heard(listener) == []
    assert [record.getMessage() for record in caplog.records] == ["watchdog_ping_withheld"]


async def test_it_pings_again_and_again_until_the_block_ends(listener: socket.socket) -> None:
    told, looks = manager(listener, WATCHDOG_USEC=str(round(SHORT_S * 1e6))), asyncio.Event()
    answers = iter([True, False, True])

    def is_alive() -> bool:
        answer = next(answers, None)
        if answer is None:
            looks.set()
        return answer is True

    async with asyncio.timeout(BOUND_S), told.watched(is_alive):
        await looks.wait()
    assert heard(listener) == ["WATCHDOG=1", "WATCHDOG=1"]
    assert len(asyncio.all_tasks()) == 2  # This one, and the pings' on its way out.


@pytest.mark.parametrize(
    ("environ", "is_watched"),
    [
        ({"WATCHDOG_USEC": "4000"}, True),
        ({"WATCHDOG_USEC": "4000", "WATCHDOG_PID": "7"}, True),
        ({"WATCHDOG_USEC": "4000", "WATCHDOG_PID": "8"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({"WATCHDOG_USEC": "9" * 5000}, False),
        ({}, False),
    ],
)
async def test_a_watchdog_is_one_that_waits_for_this_process(
    environ: dict[str, str], is_watched: bool, listener: socket.socket
) -> None:
    async with manager(listener, **environ).watched(lambda: True):
        await asyncio.sleep(0)
    assert heard(listener) == ["WATCHDOG=1"] * is_watched


async def test_nobody_hears_anything_where_nobody_asked() -> None:
    told = manager_of({"WATCHDOG_USEC": "4000"}, pid=7)
    told.ready("up")
    told.stopping()
    async with told.watched(lambda: pytest.fail("looked at")):
        await asyncio.sleep(0)


@pytest.mark.parametrize("address", ["/nowhere/notify", "vsock:2:1234", "/" + "x" * 500])
def test_a_manager_that_cannot_be_reached_costs_a_line(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        manager_of({"NOTIFY_SOCKET": address}, pid=7).ready("up")
    assert [record.getMessage() for record in caplog.records] == ["service_manager_unreachable"]
