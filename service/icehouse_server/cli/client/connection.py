"""Connection of a command to a server: the Python client, and its errors as one line and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from icehouse_client import Client, IcehouseClientError, Security

from icehouse_server.cli.terminal.client_options import Target
from icehouse_server.cli.terminal.console import complain
from icehouse_server.rpc.client.generate import not_reached_text

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""As shells have it for what Ctrl-C ended."""


@contextlib.contextmanager
def connected(target: Target) -> Iterator[Client]:
    """Yield a client; a call that fails in the block ends the command with a line that says why."""
    with open_client(target) as client:
        try:
            yield client
        except IcehouseClientError as error:
            complain(failure_text(error, target.address))
            raise typer.Exit(EXIT_FAILURE) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error


def open_client(target: Target) -> Client:
    """Return a client without deadlines of its own: whoever waits at a terminal ends a call with Ctrl-C."""
    access = target.access
    security = Security(
        token=access.token,
        is_tls=access.is_tls,
        ca_pem=access.root_certificates,
        certificate_pem=access.certificate,
        key_pem=access.key,
    )
    # One that loads or drains is to say so itself.
    return Client(target.address, timeout_s=None, security=security, watches_health=False)


def failure_text(error: IcehouseClientError, address: str) -> str:
    """Return what went wrong and what to do, in a line."""
    # Where the network failed, and not the server, the reason is the code's name.
    if error.code.name == error.reason == "UNAVAILABLE":
        return not_reached_text(error.message, address)
    if error.code.name == error.reason == "UNIMPLEMENTED":
        return f"the server at {address} does not know this call; it is older than this command"
    return f"{error.code.name}: {error.message}"
