"""Where the server listens, and a clear error when it cannot."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import grpc

from service.config import ServerConfig
from service.errors import Reason, StartError

UDS_PATH_BYTE_LIMIT = 103
"""sockaddr_un.sun_path of macOS without its final zero; Linux allows four bytes more."""


def bind(server: grpc.aio.Server, config: ServerConfig) -> str:
    """Bind the configured address and return it as clients write it; raises StartError."""
    if config.uds is not None:
        return _bind_uds(server, Path(config.uds).expanduser())
    return _bind_tcp(server, host=config.host, port=config.port)


def secure_uds(config: ServerConfig) -> None:
    """Let only the owner connect. After start, when the socket exists."""
    if config.uds is not None:
        os.chmod(Path(config.uds).expanduser(), stat.S_IRUSR | stat.S_IWUSR)


def remove_uds(config: ServerConfig) -> None:
    """Remove the socket that a stopped server leaves behind."""
    if config.uds is not None:
        Path(config.uds).expanduser().unlink(missing_ok=True)


def _bind_tcp(server: grpc.aio.Server, *, host: str, port: int) -> str:
    shown_host = f"[{host}]" if ":" in host else host
    try:
        bound_port = server.add_insecure_port(f"{shown_host}:{port}")
    except RuntimeError as error:
        raise _tcp_error(host=host, port=port) from error
    return f"{shown_host}:{bound_port}"


def _tcp_error(*, host: str, port: int) -> StartError:
    # gRPC says only that it failed; the system says why.
    cause = _try_to_listen(host=host, port=port)
    metadata = {"host": host, "port": port}
    if cause is not None and cause.errno == errno.EACCES:
        return StartError(
            Reason.ADDRESS_IN_USE,
            f"port {port} needs privileges that this process lacks; choose one above 1023 with --port",
            metadata=metadata,
        )
    if cause is None or cause.errno == errno.EADDRINUSE:
        return StartError(
            Reason.ADDRESS_IN_USE,
            f"port {port} on {host} is taken by another process; stop it, or choose another port with "
            "--port (0 picks a free one)",
            metadata=metadata,
        )
    return StartError(
        Reason.ADDRESS_IN_USE,
        f"cannot listen on {host} port {port}: {cause.strerror or cause}; choose another address with --host",
        metadata=metadata,
    )


def _try_to_listen(*, host: str, port: int) -> OSError | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None


def _bind_uds(server: grpc.aio.Server, path: Path) -> str:
    address = f"unix:{path}"
    size_bytes = len(os.fsencode(path))
    if size_bytes > UDS_PATH_BYTE_LIMIT:
        raise _uds_error(path, f"its path has {size_bytes} bytes, the limit is {UDS_PATH_BYTE_LIMIT}")
    if not path.parent.is_dir():
        raise _uds_error(path, f"the folder {path.parent} does not exist")
    if path.exists():
        # gRPC would replace the socket of a running server without a word.
        if not path.is_socket():
            raise _uds_error(path, "a file that is no socket is there")
        if _somebody_listens(path):
            raise _uds_error(path, "another server listens there")
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise _uds_error(path, "the system refused it; is the folder writable?") from error
    return address


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            # Refused: a socket file that a killed server left behind.
            return False
    return True


def _uds_error(path: Path, what: str) -> StartError:
    return StartError(
        Reason.ADDRESS_IN_USE,
        f"cannot listen on the socket {path}: {what}; choose another path with --uds",
        metadata={"uds": path},
    )
