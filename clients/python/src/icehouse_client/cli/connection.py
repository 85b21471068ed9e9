"""Connection of a command to a server: the options that say where it is and who asks, and failures in a line.

Each option has an environment variable, which the library of the command line reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from icehouse_client.channel import address_problem
from icehouse_client.cli.console import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    UsageError,
    complain,
    expanded,
)
from icehouse_client.client import Client
from icehouse_client.errors import IcehouseClientError
from icehouse_client.proxies import proxy_variable
from icehouse_client.security import NO_SECURITY, Security

DEFAULT_ADDRESS = "localhost:50051"
"""Where a server is looked for that nobody named, unless a callable in the context's `obj` says another."""


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server to ask, and what it is called to people."""

    client: Client
    address: str


def _option(variable: str, help: str, *flags: str) -> Any:
    return typer.Option(*flags, envvar=f"ICEHOUSE_CLIENT_{variable}", help=help, rich_help_panel="Server")


@contextlib.contextmanager
def server_of(
    context: typer.Context,
    address: Annotated[
        str | None, _option("ADDRESS", "host:port or unix:/path; by default where `serve` listens.")
    ] = None,
    token: Annotated[
        Path | None,
        _option("TOKEN_FILE", "File with the bearer token; an operator's token may do everything."),
    ] = None,
    tls: Annotated[
        bool,
        _option(
            "TLS",
            "Use TLS and trust public authorities; --ca and --certificate imply --tls.",
            "--tls",
        ),
    ] = False,
    ca: Annotated[
        Path | None, _option("CA", "PEM file with the authorities that signed the server's certificate.")
    ] = None,
    certificate: Annotated[
        Path | None,
        _option(
            "CERTIFICATE", "PEM file with your own certificate chain, for a server that asks for one (mTLS)."
        ),
    ] = None,
    key: Annotated[Path | None, _option("KEY", "PEM file with your certificate's private key.")] = None,
) -> Iterator[Server]:
    """Yield the server that the options name: the group of every command that asks one.

    Raises UsageError where they name none or a file that cannot be read. A call that fails ends the command
    with a line that says why.
    """
    if (certificate is None) != (key is None):
        missing = "--key" if key is None else "--certificate"
        raise UsageError(f"{missing} is missing: mTLS needs your certificate and its key")
    security = Security(
        token="" if token is None else _token_in(token),
        is_tls=tls,
        ca_pem=_content("--ca", ca),
        certificate_pem=_content("--certificate", certificate),
        key_pem=_content("--key", key),
    )
    where = _checked(address) if address else context.obj() if context.obj else DEFAULT_ADDRESS
    with open_client(where, security) as client, failing_call_ends(where):
        yield Server(client, where)


def open_client(address: str, security: Security = NO_SECURITY) -> Client:
    """Return a client without deadlines of its own: whoever waits at a terminal ends a call with Ctrl-C."""
    # One that loads or drains is to say so itself.
    return Client(address, timeout_s=None, security=security, watches_health=False)


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
        complain("the text is not valid UTF-8; convert it first, for example with `iconv -t utf-8`")
        raise typer.Exit(EXIT_USAGE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error


def failure_text(error: IcehouseClientError, address: str) -> str:
    """Return what went wrong and what to do, in a line."""
    # Where the network failed, and not the server, the reason is the code's name.
    match error.reason if error.reason == error.code.name else None:
        case "UNAVAILABLE":
            return _not_reached_text(error.message, address)
        case "DEADLINE_EXCEEDED":
            return f"the server at {address} did not answer in time; raise --timeout-s"
        case "UNIMPLEMENTED":
            return f"the server at {address} does not have this call; it is older than this command"
    return f"{error.code.name}: {error.message}"


def _not_reached_text(details: str, address: str) -> str:
    """Return why there was no answer and what to do, from gRPC's own words."""
    if "handshake failed" in details:
        why = details.rpartition("handshake failed")[2].strip(" :").removesuffix(": OK")
        return (
            f"the server at {address} and this command do not agree on TLS {why}; name its authority with "
            "--ca, or leave out --ca and --tls if the server has no TLS"
        )
    if "security handshaker" in details:
        return "a file given by --ca, --certificate or --key is not a PEM file of that kind; use another"
    if "resolving" in details or "resolution" in details:
        return f"the name in {address} cannot be resolved; an --address is host:port or unix:/path"
    if "Socket closed" in details or "reset" in details:
        return (
            f"the server at {address} closed the connection; with TLS it needs --ca (or --tls), and with "
            "client certificates --certificate and --key too"
        )
    if variable := proxy_variable(address):
        return (
            f"the proxy that {variable} names cannot reach a server at {address}; if none is needed, "
            f"list the server's host in no_proxy"
        )
    return f"no server answers at {address}; start one with `icehouse serve`, or pass --address"


def _checked(address: str) -> str:
    if problem := address_problem(address):
        raise UsageError(
            f"the address {address!r} {problem}; use host:port, such as localhost:50051, or unix:/path"
        )
    return address


def _token_in(path: Path) -> str:
    text = (_content("--token", path) or b"").decode("ascii", "replace").strip()
    if not text or not all("!" <= char <= "~" for char in text):
        raise UsageError(
            f"--token names {path}, which has no bearer token; it must contain the one word that "
            "`icehouse token new` printed (its other line is for the server)"
        )
    return text


def _content(flag: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else expanded(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{flag} names {path}, which cannot be read ({error.strerror}); name a readable file"
        ) from error
