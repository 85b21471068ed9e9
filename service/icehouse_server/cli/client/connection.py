"""Connection of a command to a server: the Python client, and its errors as one line and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from icehouse_client import Client, IcehouseClientError, Security
from icehouse_client.proxies import proxy_variable

from icehouse_server.cli.terminal.client_options import Target
from icehouse_server.cli.terminal.console import complain

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""As shells have it for what Ctrl-C ended."""


@contextlib.contextmanager
def connected(target: Target) -> Iterator[Client]:
    """Yield a client; a call that fails in the block ends the command with a line that says why."""
    with open_client(target) as client, failing_call_ends(target.address):
        yield client


@contextlib.contextmanager
def failing_call_ends(address: str) -> Iterator[None]:
    """End the command with a line that says why where a call of the block fails, quietly on Ctrl-C."""
    try:
        yield
    except IcehouseClientError as error:
        complain(failure_text(error, address))
        raise typer.Exit(EXIT_FAILURE) from error
    except ValueError as error:
        # What the client says of such a text names its own arguments, and not this command's.
        if not isinstance(error.__cause__, UnicodeEncodeError):
            raise
        complain("the text has bytes that are no UTF-8; convert it first, as with `iconv -t utf-8`")
        raise typer.Exit(EXIT_USAGE) from error
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
    if error.code.name == error.reason == "DEADLINE_EXCEEDED":
        return f"the server at {address} did not answer in the time given; allow more with --timeout-s"
    if error.code.name == error.reason == "UNIMPLEMENTED":
        return f"the server at {address} does not know this call; it is older than this command"
    return f"{error.code.name}: {error.message}"


def not_reached_text(details: str, address: str) -> str:
    """Return why there was no answer and what to do, from gRPC's own words."""
    if "handshake failed" in details:
        why = details.rpartition("handshake failed")[2].strip(" :").removesuffix(": OK")
        return (
            f"the server at {address} and this command do not agree on TLS {why}; name its authority with "
            "--ca, or say neither --ca nor --tls to a server without TLS"
        )
    if "security handshaker" in details:
        return "what --ca, --certificate or --key names is no PEM file of such a kind; name another one"
    if "resolving" in details or "resolution" in details:
        return f"the name in {address} cannot be resolved; an --address is host:port or unix:/path"
    if "Socket closed" in details or "reset" in details:
        return (
            f"the server at {address} closed the connection; one with TLS wants --ca (or --tls), one that "
            "asks for certificates --certificate and --key too"
        )
    if variable := proxy_variable(address):
        return (
            f"the proxy that {variable} names does not reach a server at {address}; where none is needed, "
            f"list the server's host in no_proxy"
        )
    return f"no server answers at {address}; start one with `icehouse serve`, or say --address"
