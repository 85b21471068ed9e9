"""Python program as a child process: started by `with`, asked to end behind it, killed if it does not.

It has a session of its own, so that Ctrl-C does not reach it: whoever started it stops it, in order. Where
that one is gone without having done so, it is killed (`watched`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.server_process import ROOT, child_environment

_LOG_TAIL_CHARACTERS = 3000


class ChildProcess:
    """One process: a module, run with arguments."""

    def __init__(self, module: str, arguments: Sequence[str], *, log: Path, stop_bound_s: float) -> None:
        self.log = log
        self._command = [sys.executable, "-m", "bench.fleet.watched", module, *arguments]
        self._stop_bound_s = stop_bound_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        settings = {name for name in os.environ if name.startswith("ICEHOUSE_")}
        environment = {k: v for k, v in child_environment().items() if k not in settings}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                # What is shown and measured must not depend on settings that somebody happens to have.
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running.wait(self._stop_bound_s)
        self.kill()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._running.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """Ask it to end, if it has not."""
        self._running.terminate()

    def kill(self) -> None:
        """End it at once with SIGKILL, as a crash would, if it has not ended."""
        self._running.kill()
        self._running.communicate()

    def log_tail(self) -> str:
        """Return the end of what it wrote."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARACTERS:]

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the process was never started"
        return self._process
