"""Probe process: compiles a form within limits before this process compiles it.

llguidance can be neither interrupted nor limited in memory, and the cost of a form does not show in its text:
130 bytes of JSON schema took 25 s and 600 MB. So each form that is not cached is first compiled by a process
with limits on its time and memory; what passes there costs no more here. The process is started when it is
first needed, exits when it has been idle for a while, and is replaced when it was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle
import struct
import subprocess
import sys
import threading
from typing import IO

from icehouse_server.domain.response_format import ResponseFormat
from icehouse_server.errors import InvalidRequest, Reason

_log = logging.getLogger("icehouse.grammar")

_MAIN = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from icehouse_server.structured_output.probe_worker import main; main()"
)
MEMORY_BYTES = 384 << 20
"""Most that compiling one form may take; llguidance's own limits come to some 100 MB."""
_START_TIMEOUT_S = 60.0
"""Reading a vocabulary of 262,144 tokens takes two seconds on one x86 core."""
_WALL_FACTOR = 4
"""Seconds that one second of processor time may take on a busy machine."""
_HEAD = struct.Struct(">I")


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeSetup:
    """The vocabulary, which the process is sent first."""

    text: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]

    def vocabulary_json(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeLimits:
    """What one form may take."""

    cpu_s: int
    """Seconds of processor time."""
    stack_bytes: int
    memory_bytes: int = MEMORY_BYTES


class ProbeProcess:
    """Compiles forms in a process with limits. One thread at a time uses it; any may call `close`."""

    def __init__(self, setup: ProbeSetup, limits: ProbeLimits) -> None:
        self._setup = setup
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def check(self, form: ResponseFormat, *, field: str) -> None:
        """Have the form compiled; raises InvalidRequest when that fails or takes too much.

        If no process can be started, the form is accepted without a probe, and the log says so.
        """
        process = self._running()
        if process is None:
            return
        timeout_s = _WALL_FACTOR * self._limits.cpu_s
        answer = self._ask(process, pickle.dumps(form), timeout_s=timeout_s)
        if answer is None:
            self._end()
            if not self._is_closed:
                # Start the next process now, so that the next caller need not wait for it.
                self._running()
            raise InvalidRequest(
                Reason.GRAMMAR_TOO_COMPLEX,
                f"{field} takes more than {self._limits.cpu_s} s or {self._limits.memory_bytes >> 20} MiB to "
                "compile; simplify it",
                field=field,
                metadata={"cpu_s": self._limits.cpu_s, "memory_bytes": self._limits.memory_bytes},
            )
        refusal = json.loads(answer)
        if refusal:
            raise InvalidRequest(
                Reason(refusal["reason"]),
                refusal["message"],
                field=refusal["field"],
                metadata=refusal["metadata"],
            )

    def close(self) -> None:
        """End the process for good."""
        self._is_closed = True
        self._end()

    def _running(self) -> subprocess.Popen[bytes] | None:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        try:
            process = subprocess.Popen(command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            _log.warning("forms_compiled_untried", extra={"detail": error.strerror or str(error)})
            return None
        self._process = process
        if self._ask(process, pickle.dumps((self._setup, self._limits)), timeout_s=_START_TIMEOUT_S) is None:
            self._end()
            if not self._is_closed:
                _log.warning("forms_compiled_untried", extra={"detail": "the process ended at its start"})
            return None
        return process

    def _ask(self, process: subprocess.Popen[bytes], data: bytes, *, timeout_s: float) -> bytes | None:
        """Return the answer; None when the process ended, which it does by force after `timeout_s`."""
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        timer = threading.Timer(timeout_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            send(process.stdin, data)
            return receive(process.stdout)
        except OSError:
            return None
        finally:
            timer.cancel()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # Closing flushes what the process has not read.
                with contextlib.suppress(OSError):
                    pipe.close()


def command() -> list[str]:
    """Return the command of a process with the same import path as this one, without the working directory
    (-P)."""
    return [sys.executable, "-P", "-c", _MAIN, *filter(None, sys.path)]


def send(pipe: IO[bytes], data: bytes) -> None:
    """Write one message: its length, then itself."""
    pipe.write(_HEAD.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Return one message; None at the end."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    (size,) = _HEAD.unpack(head)
    data = pipe.read(size)
    return data if len(data) == size else None
