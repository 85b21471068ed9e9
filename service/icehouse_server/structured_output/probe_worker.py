"""Probe worker: the process that `probe_process` starts to compile forms within limits.

Its input comes from the server that started it; callers' forms are only data in that. It exits when its input
ends, when a form exceeds the limits, or after _IDLE_S without work.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from icehouse_server.domain.response_format import ResponseFormat
from icehouse_server.errors import InvalidRequest
from icehouse_server.structured_output.compiler import GrammarCompiler
from icehouse_server.structured_output.probe_process import ProbeLimits, ProbeSetup

_IDLE_S = 300
_NICENESS = 5


def main(descriptor: int) -> None:
    """Serve a connection until its other end is closed."""
    # Ctrl-C reaches the server too, which ends this process by closing the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    pipe = Connection(descriptor)
    setup: ProbeSetup
    limits: ProbeLimits
    try:
        setup, limits = pipe.recv()
    except EOFError:
        return
    compiler = GrammarCompiler(setup, vocabulary_size=setup.vocabulary_size, cache_limit=1)
    compiler.prepare()
    # llguidance recurses, so the thread that compiles needs a large stack.
    threading.stack_size(limits.stack_bytes)
    thread = threading.Thread(target=_serve, args=(pipe, compiler, limits))
    thread.start()
    thread.join()


def _serve(pipe: Connection, compiler: GrammarCompiler, limits: ProbeLimits) -> None:
    _bound_memory(limits.memory_bytes)
    pipe.send_bytes(b"{}")
    with contextlib.suppress(EOFError):
        while True:
            signal.alarm(_IDLE_S)
            form: ResponseFormat = pipe.recv()
            signal.alarm(0)
            _bound_time(limits.cpu_s)
            pipe.send_bytes(json.dumps(_answer(compiler, form)).encode("ascii"))


def _answer(compiler: GrammarCompiler, form: ResponseFormat) -> dict[str, object]:
    try:
        compiler.compile(form)
    except InvalidRequest as error:
        return {
            "reason": error.reason.value,
            "message": error.message,
            "field": error.field,
            "metadata": error.metadata,
        }
    return {}


def _bound_time(cpu_s: int) -> None:
    """Have the system end this process after `cpu_s` more seconds of processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + 1 + cpu_s, hard))


def _bound_memory(memory_bytes: int) -> None:
    """Limit what is allocated from now on, on systems that tell how much is allocated already."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        # macOS does not enforce such a limit; there the time limit bounds what can be filled.
        return
    held_bytes = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + memory_bytes, hard))
