"""Server of a command's own: `icehouse serve` as a process on a free loopback port, while a block runs."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from icehouse_client import Client, IcehouseClientError
from icehouse_client.cli.connection import open_client
from icehouse_client.cli.console import err, out

from icehouse_server.cli.terminal.raised_signals import signals_raised
from icehouse_server.errors import Reason, StartError

_STOP_TIMEOUT_S = 60.0
"""The server's own grace is shorter; after this time it is stuck and is killed."""

_WATCH_SLICE_S = 1.0
"""How long one check of the server's health may take before its process is checked again."""


@contextlib.contextmanager
def serving(
    status: str, *, scratch: Path, model: str, options: Sequence[str] = ()
) -> Iterator[tuple[Client, str]]:
    """Run a server and yield a client and its address once it serves; stop it cleanly at the end.

    Raises StartError if it ends before that, or with a code other than 0.
    """
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stopping, contextlib.ExitStack() as stack:
        with err.status(status):
            server = stack.enter_context(
                running_server(address=address, scratch=scratch, model=model, options=options)
            )
            client = stack.enter_context(open_client(address))
            is_serving = wait_until_serving(client, is_alive=lambda: server.poll() is None)
        if not is_serving:
            # Closing reports the server's code and log; what remains is code 0 without having served.
            stack.close()
            raise StartError(Reason.ENGINE_FAILED, "the server exited before it was ready")
        yield client, address
        stopping.enter_context(err.status("stopping the server, which first writes its blocks to SSD"))


def wait_until_serving(client: Client, *, is_alive: Callable[[], bool]) -> bool:
    """Return True once the server accepts requests, False if `is_alive` says that it is gone."""
    while is_alive():
        try:
            client.wait_until_serving(timeout_s=_WATCH_SLICE_S)
        except IcehouseClientError as error:
            # A server that ends takes its connections along; its exit code says why.
            if error.code.name not in ("DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED"):
                raise
        else:
            return True
    return False


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(
    *, address: str, scratch: Path, model: str, options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `icehouse serve` with a model at `address`, with its blocks in `scratch`; stop it at the end.

    Raises StartError, after printing the server's log, if it did not end with code 0.
    """
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "icehouse_server.cli.main", "serve", "--model", model, "--uds", ""]
    command += ["--host", host, "--port", port, "--cache-directory", str(scratch / "blocks")]
    # The output must not depend on settings that happen to be in the environment.
    command += ["--http-port", "", "--cache", "--ssd", "--spill-policy", "on_evict", *options]
    log_file = scratch / "server.log"
    with signals_raised(signal.SIGTERM, signal.SIGHUP), log_file.open("ab") as log:
        # Its own session: Ctrl-C reaches only this process, which then stops the server cleanly.
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            yield server
        finally:
            _stop(server)
    if server.returncode != 0:
        out.print(log_file.read_text(encoding="utf-8", errors="replace"), markup=False, style="dim")
        raise StartError(
            Reason.ENGINE_FAILED, f"the server exited with code {server.returncode}; see its log above"
        )


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
