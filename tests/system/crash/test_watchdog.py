"""A real server under a service manager: it says when it serves, that it answers, and that it stops."""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse_server.engine.engine_loop import EngineLoop

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.crashing_server import ServerProcess

_STEP = EngineLoop.step
_PING, _WITHHELD, _HANGS = b"WATCHDOG=1", b"watchdog_ping_withheld", b"the step hangs"


def tell(folder: str, word: bytes) -> None:
    """Send a word to the manager, so that all comes in one order."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(word, f"{folder}/notify")


class Forwarder(logging.Handler):
    """Sends each line of the log to the manager too."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        tell(self._folder, record.getMessage().encode())


class Manager:
    """The manager's ear."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening

    def hear(self, wanted: bytes) -> list[bytes]:
        """Return what was said until a word that begins like this."""
        words: list[bytes] = []
        ending_time = time.monotonic() + BOUND_S
        while time.monotonic() < ending_time:
            word = self._listening.recv(4096)
            if word.startswith(wanted):
                return words
            words.append(word)
        raise AssertionError(f"{wanted!r} was not said, but {set(words)}")

    def next(self) -> bytes:
        """Return the next word about the watchdog; what a slow test missed is told of, and is none."""
        while (word := self._listening.recv(4096)) not in (_PING, _WITHHELD):
            assert word == b"service_manager_unreachable"
        return word


def notify_and_stick(folder: str) -> None:
    """Runs in the server's process: a manager listens; at `stuck` a step hangs until `go_on`."""
    os.environ["NOTIFY_SOCKET"] = f"{folder}/notify"
    os.environ["WATCHDOG_USEC"] = "200000"
    logging.getLogger("icehouse.service_manager").addHandler(Forwarder(folder))
    stuck, go_on = Path(folder, "stuck"), Path(folder, "go_on")

    def step(self: EngineLoop) -> None:
        if stuck.exists():
            stuck.unlink()
            tell(folder, _HANGS)
            go_on.read_bytes()
        _STEP(self)

    EngineLoop.step = step  # type: ignore[method-assign]


def test_the_manager_hears_of_start_stop_and_a_stuck_inference_thread(tmp_path: Path) -> None:
    stuck, go_on = tmp_path / "stuck", tmp_path / "go_on"
    os.mkfifo(go_on)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(BOUND_S)
        manager = Manager(listening)
        with ServerProcess(
            model=tiny_model_dir(tmp_path, "llama"),
            directory=tmp_path / "blocks",
            log=tmp_path / "log",
            options=("--stuck-timeout-s", "0.5"),
            break_it=functools.partial(notify_and_stick, str(tmp_path)),
        ) as server:
            assert manager.hear(b"READY=1\nSTATUS=serving ") == []
            with grpc.insecure_channel(server.address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch  # type: ignore[attr-defined]
                # On a busy machine the heartbeat may be old for a moment.
                told = watch(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
                assert any(each.status == health_pb2.HealthCheckResponse.SERVING for each in told)
            manager.hear(_PING)

            stuck.touch()
            manager.hear(_HANGS)
            # One word may have been on its way. The heartbeat turns old a moment after the step hangs; from
            # then on there is no ping.
            manager.next()
            manager.hear(_WITHHELD)
            assert [manager.next() for _ in range(4)] == [_WITHHELD] * 4

            go_on.write_bytes(b"")
            manager.hear(_PING)
            server.terminate()
            manager.hear(b"STOPPING=1")
            assert server.wait() == 0
