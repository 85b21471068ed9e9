"""HTTP front as a child process: started by `with`, with its processor time and its memory (Linux only)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.server_process import ROOT, child_environment, free_port

MIB = 1 << 20
_BOOT_TIMEOUT_S = 30.0
_POLL_S = 0.02
_STOP_BOUND_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds, in MiB: its own pages, those of them that no file backs, and all it touches."""

    private_mib: float
    anonymous_mib: float
    resident_mib: float


@contextlib.contextmanager
def running_front(address: str, *, log: Path, flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Run `icehouse-http` in front of a server; give its URL and its process id."""
    port = free_port()
    command = [sys.executable, "-m", "icehouse_http.command", "--address", address, "--port", str(port)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--log-level", "warning", *flags],
            cwd=ROOT,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # A group of its own in the same session, as `ServerProcess` has it: Linux gives a core to each
            # session as a whole, and this one would wait for it where server and callers do not.
            process_group=0,
        )
    try:
        deadline = time.monotonic() + _BOOT_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the front did not come to listen; see {log}")
            time.sleep(_POLL_S)
        yield f"http://127.0.0.1:{port}", process.pid
        process.terminate()
        process.wait(_STOP_BOUND_S)
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def bare_python_memory() -> Memory:
    """Return what an interpreter that does nothing holds."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        memory = memory_of(process.pid)
        process.stdin.close()
    return memory


def memory_of(pid: int) -> Memory:
    """Return what a process holds just now."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in text.splitlines()[1:])
    }
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return Memory(private / 1024, kib["Anonymous"] / 1024, kib["Rss"] / 1024)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_s(pid: int) -> float:
    """Return how long a process's main thread could have run and had no processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
