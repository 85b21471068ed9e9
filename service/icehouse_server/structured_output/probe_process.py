"""Probe process: compiles a form within limits before this process compiles it.

llguidance can be neither interrupted nor limited in memory, and a form's text does not show its cost: 130
bytes of JSON schema took 25 s and 600 MB. So each form that is not cached is first compiled by a process with
limits on time and memory; a form that passes there costs no more here. The process is started when it is
first needed, exits after a while without work, and is replaced if it is killed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from icehouse_server.domain.response_format import ResponseFormat
from icehouse_server.errors import InvalidRequest, Reason

_log = logging.getLogger("icehouse.grammar")

_MAIN = (
    "import sys; descriptor = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from icehouse_server.structured_output.probe_worker import main; main(descriptor)"
)
MEMORY_BYTES = 384 << 20
"""Most that compiling one form may take; llguidance's own limits come to some 100 MB."""
_START_TIMEOUT_S = 60.0
"""Reading a vocabulary of 262,144 tokens takes two seconds on one x86 core."""
_WALL_FACTOR = 4
"""How many times its processor time a form may take by the clock, on a busy machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeSetup:
    """The vocabulary, the first thing that the process is sent."""

    text: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]

    def vocabulary_json(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Limits of compiling one form."""

    cpu_s: int
    """Seconds of processor time."""
    stack_bytes: int
    memory_bytes: int = MEMORY_BYTES


class ProbeProcess:
    """Compiles forms in a process with limits. Used by one thread at a time; any thread may call `close`."""

    def __init__(self, setup: ProbeSetup, limits: ProbeLimits) -> None:
        self._setup = setup
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_closed = False

    def check(self, form: ResponseFormat, *, field: str) -> None:
        """Have the form compiled; raises InvalidRequest if that fails or exceeds the limits.

        If no process can be started, the form is accepted without a probe and a warning is logged.
        """
        if not self._is_running():
            return
        answer = self._ask(form, timeout_s=_WALL_FACTOR * self._limits.cpu_s)
        if answer is None:
            self._end()
            if not self._is_closed:
                # Start the next process now, so that the next caller does not wait for it.
                self._is_running()
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

    def _is_running(self) -> bool:
        """Start the process unless it is running; return whether it is now."""
        if self._process is not None and self._process.poll() is None:
            return True
        self._end()
        self._pipe, child_end = multiprocessing.Pipe()
        with child_end:
            descriptor = child_end.fileno()
            try:
                self._process = subprocess.Popen(
                    command(descriptor),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[descriptor],
                )
            except OSError as error:
                _log.warning("forms_compiled_untried", extra={"detail": error.strerror or str(error)})
                return False
        if self._ask((self._setup, self._limits), timeout_s=_START_TIMEOUT_S) is None:
            self._end()
            if not self._is_closed:
                _log.warning("forms_compiled_untried", extra={"detail": "the process ended at its start"})
            return False
        return True

    def _ask(self, message: object, *, timeout_s: float) -> bytes | None:
        """Return the answer to a message; None if the process ended. It is killed after `timeout_s`."""
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return None  # closed meanwhile
        timer = threading.Timer(timeout_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            pipe.send(message)
            return pipe.recv_bytes()
        except (OSError, EOFError):
            return None
        finally:
            timer.cancel()

    def _end(self) -> None:
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()


def command(descriptor: int) -> list[str]:
    """Return the command of a process that serves the connection with this descriptor. It has the same import
    path as this process, without the working directory (-P)."""
    return [sys.executable, "-P", "-c", _MAIN, str(descriptor), *filter(None, sys.path)]
