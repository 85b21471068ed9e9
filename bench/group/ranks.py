"""Ranks of a group as child processes on loopback; rank 0 serves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.server_process import ROOT, child_environment, free_ports, wait_until_serving

_BOOT_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 60.0


class RankProcesses:
    """Every rank of a group. Its directories are the caller's, so a group can be started again. `with` stops
    what runs."""

    def __init__(self, *, model: str, folder: Path, world: int, flags: Sequence[str] = ()) -> None:
        self._model = model
        self._folder = folder
        self._world = world
        self._flags = flags
        self.processes: list[subprocess.Popen[bytes]] = []
        self.address = ""

    def __enter__(self) -> RankProcesses:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> float:
        """Start all ranks; return after how many seconds rank 0 serves. Raises RuntimeError."""
        port, control, *ring = free_ports(2 + self._world)
        hosts = self._folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{each}"] for each in ring]))
        began = time.monotonic()
        self.processes = []
        for rank in range(self._world):
            command = [sys.executable, "-m", "icehouse_server.cli.main", "serve", "--model", self._model]
            command += ["--port", str(port), "--cache-directory", str(self._folder / f"rank-{rank}")]
            command += ["--group", str(hosts), "--group-rank", str(rank)]
            command += ["--group-control", f"127.0.0.1:{control}", *self._flags]
            with (self._folder / f"rank-{rank}.log").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=child_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        process_group=0,
                    )
                )
        self.address = f"127.0.0.1:{port}"
        log_file = self._folder / "rank-0.log"
        try:
            wait_until_serving(self.processes[0], port, deadline=began + _BOOT_TIMEOUT_S, log_file=log_file)
        except BaseException:
            self.stop()
            raise
        return time.monotonic() - began

    def wait(self) -> list[int]:
        """Wait until all ranks have ended; return their exit statuses."""
        return [process.wait(_END_TIMEOUT_S) for process in self.processes]

    def stop(self) -> None:
        """End the group in order, and what does not end so."""
        if self.processes and self.processes[0].poll() is None:
            self.processes[0].terminate()
        for process in self.processes:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
