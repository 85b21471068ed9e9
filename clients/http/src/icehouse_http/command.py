"""Command `icehouse-http`: the HTTP front as a process."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from icehouse_client.channel import address_problem

from icehouse_http.bounds.connection import BoundedConnection
from icehouse_http.serving.certificate import TlsFiles
from icehouse_http.serving.logs import setup_logging
from icehouse_http.serving.server import Listening, run
from icehouse_http.settings import Settings

_OWN_FILE_COUNT = 64
_MOST = 1 << 62


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if problem := _problem(given):
        parser.error(problem)
    is_shown = given.ends_with_stdin and given.log_format == "text" and sys.stderr.isatty()
    setup_logging(is_json=given.log_format == "json", level=given.log_level, tells_course=not is_shown)
    if given.ends_with_stdin:
        _end_with_stdin()
    allow_open_files(BoundedConnection.connection_limit + _OWN_FILE_COUNT)
    run(settings_from(given), listening_from(given))


def allow_open_files(wanted_count: int) -> None:
    """Raise this process's limit of open files and sockets as far as it may: on macOS it is often 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted_count:
        return
    allowed = wanted_count if hard == resource.RLIM_INFINITY else min(wanted_count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def settings_from(given: argparse.Namespace) -> Settings:
    """Return the settings that the command line gives."""
    return Settings(
        address=given.address,
        ca_pem=given.ca_file.read_bytes() if given.ca_file else None,
        watches_health=not given.no_health_watch,
        aliases=dict(given.alias),
        strict_models=given.strict_models,
        temperature=given.temperature,
        exact_prompts=given.exact_prompts,
        allow_origins=tuple(given.allow_origin),
        names=(given.host, *given.name),
        max_body_bytes=given.max_body_bytes,
        body_memory_bytes=given.body_memory_bytes,
        has_access_log=not given.no_access_log,
    )


def listening_from(given: argparse.Namespace) -> Listening:
    """Return where the command line has the front listen."""
    tls = TlsFiles(given.tls_certificate, given.tls_key) if given.tls_certificate else None
    return Listening(
        host=given.host,
        port=given.port,
        descriptor=given.fd,
        tls=tls,
        grace_s=given.grace_s,
        is_supervised=given.ends_with_stdin,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="icehouse-http", description="OpenAI's and Anthropic's HTTP APIs in front of an Icehouse server."
    )
    _add_server(parser.add_argument_group("the server"))
    _add_listening(parser.add_argument_group("where it listens"))
    _add_requests(parser.add_argument_group("requests"))
    _add_log(parser.add_argument_group("log"))
    return parser


def _problem(given: argparse.Namespace) -> str:
    """Return what options say together that cannot be, "" for nothing."""
    certificate, key = given.tls_certificate, given.tls_key
    if (certificate is None) != (key is None):
        return "--tls-certificate and --tls-key go together"
    try:
        if certificate is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError:
        return f"{certificate} and {key} are not PEM files of a certificate and its private key"
    return ""


def _address(text: str) -> str:
    if problem := address_problem(text):
        wanted = "use host:port, such as localhost:50051, or unix:/path"
        raise argparse.ArgumentTypeError(f"the address {text!r} {problem}; {wanted}")
    return text


def _file(text: str) -> Path:
    path = Path(os.path.expanduser(text))
    try:
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read ({error.strerror})") from error
    return path


def _socket(text: str) -> int:
    try:
        with socket.socket(fileno=os.dup(int(text))):
            return int(text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an inherited socket") from error


def _number(kind: Callable[[str], float], *, least: float, most: float) -> Callable[[str], Any]:
    """Return what reads a number of a range, which NaN is not in."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (number := kind(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")

    return read


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--address",
        type=_address,
        default=Settings().address,
        help="host:port or unix:/path (default: %(default)s)",
    )
    add(
        "--ca-file", type=_file, metavar="PEM", help="use TLS to the server; the authority of its certificate"
    )
    add(
        "--no-health-watch",
        action="store_true",
        help="do not watch the server's health: it needs credentials even for that",
    )


def _add_listening(group: argparse._ArgumentGroup) -> None:
    add, defaults = group.add_argument, Listening()
    add("--host", default=defaults.host, help="(default: %(default)s)")
    port = _number(int, least=0, most=(1 << 16) - 1)
    add("--port", type=port, default=defaults.port, help="(default: %(default)s)")
    add("--fd", type=_socket, metavar="N", help="an inherited listening socket, instead of host and port")
    add(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name to answer to, besides addresses, localhost and --host; * is any; may be repeated",
    )
    add("--tls-certificate", type=_file, metavar="PEM", help="serve HTTPS with this certificate chain")
    add("--tls-key", type=_file, metavar="PEM", help="the certificate's private key")
    add(
        "--grace-s",
        type=_number(float, least=0, most=_MOST),
        default=defaults.grace_s,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default: %(default)s)",
    )
    add(
        "--ends-with-stdin",
        action="store_true",
        help="end at once when standard input closes, not on a second signal",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add, defaults = group.add_argument, Settings()
    add(
        *("--alias", "-a"),
        action="append",
        default=[],
        type=_alias,
        metavar="NAME=MODEL",
        help="another name of a model or adapter; may be repeated",
    )
    add("--strict-models", action="store_true", help="refuse names of models that are not served")
    temperature = _number(float, least=0, most=_MOST)
    add("--temperature", type=temperature, help="of requests that set none (default: the server's, greedy)")
    add(
        "--exact-prompts",
        action="store_true",
        help="leave prompts as sent: keep billing lines, sort no tools, keep no earlier replies as generated",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin to call, * for all; may be repeated",
    )
    add(
        "--max-body-bytes",
        type=_number(int, least=1, most=_MOST),
        default=defaults.max_body_bytes,
        metavar="BYTES",
        help="largest request (default: %(default)s)",
    )
    add(
        "--body-memory-bytes",
        type=_number(int, least=1, most=_MOST),
        default=defaults.body_memory_bytes,
        metavar="BYTES",
        help="memory for the bodies of all requests until they are answered (default: %(default)s)",
    )


def _add_log(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add("--log-format", default="text", choices=["text", "json"])
    add("--no-access-log", action="store_true", help="do not log every request")


def _alias(text: str) -> tuple[str, str]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MODEL")
    return name, model


def _end_with_stdin() -> None:
    """Have the process end at once with its standard input: whoever holds the other end is gone then."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    # A thread of its own notices also while the event loop is busy.
    threading.Thread(target=wait, name="stdin", daemon=True).start()


if __name__ == "__main__":
    main()
