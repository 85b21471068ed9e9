"""A real server under a service manager: it says when it serves, that it answers, and that it stops."""

from __future__ import annotations

import functools
import logging
import os
import socket
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse_server.engine.loop import EngineLoop

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.system.crash.server_process import ServerProcess

_STEP = EngineLoop.step
_PING, _WITHHELD = b"WATCHDOG=1", b"watchdog_ping_withheld"


class Forwarder(logging.Handler):
    """Sends each line of the log to the manager's socket too, so that all comes in one order."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def emit(self, record: logging.LogRecord) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(record.getMessage().encode(), self._address)


def notify_and_stick(folder: str) -> None:
    """Runs in the server's process: a manager listens; while `stuck` is there a step waits for `go_on`."""
    os.environ["NOTIFY_SOCKET"] = f"{folder}/notify"
    os.environ["WATCHDOG_USEC"] = "200000"
    logging.getLogger("icehouse.service_manager").addHandler(Forwarder(f"{folder}/notify"))
    stuck, go_on = Path(folder, "stuck"), Path(folder, "go_on")

    def step(self: EngineLoop) -> None:
        if stuck.exists():
            go_on.read_bytes()
        _STEP(self)

    EngineLoop.step = step  # type: ignore[method-assign]


def test_the_manager_hears_of_start_stop_and_a_stuck_inference_thread(tmp_path: Path) -> None:
    stuck, go_on = tmp_path / "stuck", tmp_path / "go_on"
    os.mkfifo(go_on)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(BOUND_S)
        with ServerProcess(
            model=tiny_model_dir(tmp_path, "llama"),
            directory=tmp_path / "blocks",
            log=tmp_path / "log",
            options=("--stuck-timeout-s", "0.5"),
            break_it=functools.partial(notify_and_stick, str(tmp_path)),
        ) as server:
            assert manager.recv(4096).startswith(b"READY=1\nSTATUS=serving ")
            with grpc.insecure_channel(server.address) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
                told = check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
            assert told.status == health_pb2.HealthCheckResponse.SERVING
            assert _PING in (manager.recv(4096), manager.recv(4096))

            stuck.touch()
            # The heartbeat turns stale a moment after the thread hangs; from then on there is no ping.
            heard = [manager.recv(4096)]
            while heard[-1] == _PING or heard.count(_WITHHELD) < 2:
                heard.append(manager.recv(4096))
            stuck.unlink()
            assert [manager.recv(4096) for _ in range(4)] == [_WITHHELD] * 4

            go_on.write_bytes(b"")
            while (last := manager.recv(4096)) != _PING:
                assert last == _WITHHELD
            server.terminate()
            while not (last := manager.recv(4096)).startswith(b"STOPPING=1"):
                assert last in (_PING, _WITHHELD)
            assert server.wait() == 0
