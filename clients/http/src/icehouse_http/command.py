"""Command `icehouse-http`: the HTTP front as a process."""

from __future__ import annotations

import argparse
import contextlib
import resource
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from icehouse_http.app import create_app
from icehouse_http.bounds.connection import BoundedConnection
from icehouse_http.settings import MIB, Settings

_OWN_FILE_COUNT = 64
_KEEP_ALIVE_S = 75
_STOP_GRACE_S = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    given = _parser().parse_args(arguments)
    allow_open_files(BoundedConnection.connection_limit + _OWN_FILE_COUNT)
    server_of(settings_from(given), host=given.host, port=given.port, log_level=given.log_level).run()


def allow_open_files(wanted_count: int) -> None:
    """Raise this process's limit of open files and sockets as far as it may: on macOS it is often 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted_count:
        return
    allowed = wanted_count if hard == resource.RLIM_INFINITY else min(wanted_count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def server_of(settings: Settings, *, host: str, port: int, log_level: str) -> uvicorn.Server:
    """Return the server, with bounds on all that a caller decides: headers, connections, idle time."""
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        log_level=log_level,
        http=BoundedConnection,
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOP_GRACE_S,
    )
    return uvicorn.Server(config)


def settings_from(given: argparse.Namespace) -> Settings:
    """Return the settings that the command line gives."""
    return Settings(
        address=given.address,
        ca_pem=given.ca_file.read_bytes() if given.ca_file else None,
        aliases=dict(given.alias),
        strict_models=given.strict_models,
        temperature=given.temperature,
        allow_origins=tuple(given.allow_origin),
        max_body_bytes=given.max_body_mib * MIB,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="icehouse-http", description="OpenAI's and Anthropic's HTTP APIs in front of an Icehouse server."
    )
    defaults = Settings()
    add = parser.add_argument
    add("--address", default=defaults.address, help="the Icehouse server (default: %(default)s)")
    add("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    add("--ca-file", type=Path, metavar="PEM", help="speak TLS to the server, whose authority this is")
    add(
        *("--alias", "-a"),
        action="append",
        default=[],
        type=_alias,
        metavar="NAME=MODEL",
        help="another name of a model or adapter; may be repeated",
    )
    add("--strict-models", action="store_true", help="refuse names of models that are not served")
    add("--temperature", type=float, help="for requests that name none (default: the server's, greedy)")
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call, * for all; may be repeated",
    )
    add(
        "--max-body-mib",
        type=int,
        default=defaults.max_body_bytes // MIB,
        metavar="MIB",
        help="largest request (default: %(default)s)",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _alias(text: str) -> tuple[str, str]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MODEL")
    return name, model


if __name__ == "__main__":
    main()
