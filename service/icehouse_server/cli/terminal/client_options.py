"""Options of commands that call a running server: where it is, and what it asks of its callers.

Each has an environment variable, which the library of the command line reads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from icehouse_server.cli.terminal.console import address_of
from icehouse_server.config import load_config
from icehouse_server.config.load import ClientVariable
from icehouse_server.errors import ConfigError, Reason

_PANEL = "Server"

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar=ClientVariable.ADDRESS,
        help="host:port or unix:/path; by default where `serve` would listen.",
        rich_help_panel=_PANEL,
    ),
]
Token = Annotated[
    Path | None,
    typer.Option(
        "--token",
        envvar=ClientVariable.TOKEN_FILE,
        help="File with the bearer token; an operator's may do everything.",
        rich_help_panel=_PANEL,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        envvar=ClientVariable.TLS,
        help="The server has TLS with a certificate of a public authority; --ca and --certificate imply it.",
        rich_help_panel=_PANEL,
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar=ClientVariable.CA,
        help="PEM file with the authorities that signed the server's certificate.",
        rich_help_panel=_PANEL,
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        envvar=ClientVariable.CERTIFICATE,
        help="PEM file with your own certificate chain, for a server that asks for one (mTLS).",
        rich_help_panel=_PANEL,
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        envvar=ClientVariable.KEY,
        help="PEM file with your certificate's private key.",
        rich_help_panel=_PANEL,
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What a secured server asks of its callers. PEM contents, not paths; empty for an open server.

    `is_tls` alone trusts the authorities that gRPC brings, `root_certificates` others. `certificate` and
    `key` are the caller's own, for mTLS.
    """

    is_tls: bool = False
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)
    token: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A server to call, and what is shown to it."""

    address: str
    access: Access = Access()


def target_of(
    address: Address = None,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
) -> Target:
    """Return the server that the options name: the group that every command which calls one has."""
    access = access_of(token=token, tls=tls, ca=ca, certificate=certificate, key=key)
    return Target(resolved(address), access)


def resolved(address: str | None) -> str:
    """Return the address, or where the configured server listens; raises ConfigError for what is none."""
    if not address:
        return address_of(load_config().config.server)
    is_url = address.startswith(("http://", "https://"))
    if is_url or ":" not in address:
        problem = "is a URL" if is_url else "has no port"
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"the address {address!r} {problem}; say host:port, as in localhost:50051, or unix:/path",
            field="address",
        )
    return address


def access_of(
    *, token: Path | None, tls: bool, ca: Path | None, certificate: Path | None, key: Path | None
) -> Access:
    """Return the contents of the named files; raises ConfigError where one lacks or cannot be read."""
    if (certificate is None) != (key is None):
        missing = "--key" if key is None else "--certificate"
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"{missing} is missing: mTLS needs your certificate and its key",
            field=missing.removeprefix("--"),
        )
    return Access(
        is_tls=tls,
        root_certificates=_content("--ca", ca),
        certificate=_content("--certificate", certificate),
        key=_content("--key", key),
        token="" if token is None else _token_in(token),
    )


def _token_in(path: Path) -> str:
    text = (_content("--token", path) or b"").decode("ascii", "replace").strip()
    if not text or not all("!" <= char <= "~" for char in text):
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"--token names {path}, which holds no bearer token; there must be the one word that "
            "`icehouse token new` has printed (its other line is for the server)",
            field="token",
        )
    return text


def _content(flag: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            Reason.CONFIG_INVALID,
            f"{flag} names {path}, which cannot be read ({error.strerror}); name a readable file",
            field=flag.removeprefix("--"),
        ) from error
