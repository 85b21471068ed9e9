"""`icehouse demo`: the whole thing once, for people who just arrived.

Makes the model, starts `icehouse serve` as a process of its own on a free loopback port, waits for
health, streams a continuation as it is generated, and stops the server.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from service.cli.console import build_progress, err, out
from service.cli.generate import print_text, summary_text
from service.demo.build import ensure_demo_model
from service.errors import EngineFailed, Reason, StartError
from service.rpc.dial import CallFailed, Connection, Prompt

_STOP_TIMEOUT_S = 60.0
"""The server's own grace is shorter; past this it is stuck and is killed."""

_CALL_TIMEOUT_S = 300.0


def run_demo(*, prompt: str, max_output_tokens: int) -> None:
    """Run the demo. Raises IcehouseError when a part of it does not work."""
    with build_progress() as on_progress:
        folder = ensure_demo_model(on_progress=on_progress)
    with tempfile.TemporaryDirectory(prefix="icehouse-demo-") as scratch:
        address = f"127.0.0.1:{free_port()}"
        with (
            running_server(address=address, scratch=Path(scratch)) as server,
            Connection(address) as connection,
        ):
            with err.status(f"starting a server for {folder.name}"):
                serving = connection.wait_until_serving(is_alive=lambda: server.poll() is None)
            if serving:
                err.print(f"[dim]serving {folder.name} at {address}[/]")
                _show_stream(connection, Prompt(text=prompt, max_output_tokens=max_output_tokens))
    err.print("[dim]the server has stopped; start your own with[/] icehouse serve")


def _show_stream(connection: Connection, prompt: Prompt) -> None:
    out.print()
    out.print(prompt.text, style="bold", end="", markup=False)
    try:
        summary = connection.stream(prompt, on_text=print_text, timeout_s=_CALL_TIMEOUT_S)
    except CallFailed as error:
        raise EngineFailed(Reason.ENGINE_FAILED, f"the demo's call failed: {error}") from error
    out.print("\n")
    out.print(summary_text(summary), style="green")


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(*, address: str, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `icehouse serve --model demo` at `address` with its blocks in `scratch`; at the end stop it.

    Raises StartError with the server's log when it did not end with code 0.
    """
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "service.cli.main", "serve", "--model", "demo", "--uds", ""]
    command += ["--host", host, "--port", port, "--cache-directory", str(scratch / "blocks")]
    log_file = scratch / "server.log"
    with log_file.open("ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then stops the server in order.
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            yield server
        finally:
            _stop(server)
    if server.returncode != 0:
        out.print(log_file.read_text(encoding="utf-8", errors="replace"), markup=False, style="dim")
        raise StartError(
            Reason.ENGINE_FAILED, f"the server ended with code {server.returncode}; its log stands above"
        )


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
