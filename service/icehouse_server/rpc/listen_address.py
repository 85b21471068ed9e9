"""Listening addresses: binding them, checking that they are safe, and gRPC's connection options."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import logging
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc

from icehouse_server.config import ConnectionConfig, HttpConfig, SecurityConfig, ServerConfig, TelemetryConfig
from icehouse_server.errors import Reason, StartError

_logger = logging.getLogger("icehouse_server.rpc.address")

UDS_PATH_BYTE_LIMIT = 103
"""sockaddr_un.sun_path of macOS without its final zero; Linux allows four bytes more."""
_BACKLOG = 1024
"""Connections that may wait to be accepted."""


@dataclasses.dataclass(frozen=True, slots=True)
class SocketFile:
    """A Unix socket in the file system, distinguishable from another one with the same name."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> SocketFile:
        found = path.lstat()
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Remove it unless another server now has a socket with this name."""
        with contextlib.suppress(FileNotFoundError):
            if SocketFile.at(self.path) == self:
                self.path.unlink()


@dataclasses.dataclass(frozen=True, slots=True)
class BoundAddress:
    """Where a server listens."""

    address: str
    """As clients write it."""
    socket_file: SocketFile | None = None
    """Must be removed after the stop."""


def bind(
    server: grpc.aio.Server,
    config: ServerConfig,
    security: SecurityConfig,
    *,
    credentials: grpc.ServerCredentials | None,
) -> BoundAddress:
    """Bind the configured address; raises StartError.

    `credentials` are the server's TLS; None for plain text. A Unix socket never needs them.
    """
    if config.uds is not None:
        return bind_uds(server, Path(config.uds))
    address = bind_tcp(server, host=config.host, port=config.port, security=security, credentials=credentials)
    return BoundAddress(address)


def bind_tcp(
    server: grpc.aio.Server,
    *,
    host: str,
    port: int,
    security: SecurityConfig,
    credentials: grpc.ServerCredentials | None,
    flags: str = "--",
) -> str:
    """Bind a port and return the address; raises StartError as `bind` does. `flags` is as in `_tcp_error`."""
    _check_host(host, security)
    _warn_of_open_door(host, security)
    shown_host = f"[{host}]" if ":" in host else host
    address = f"{shown_host}:{port}"
    try:
        if credentials is None:
            bound_port = server.add_insecure_port(address)
        else:
            bound_port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # gRPC says only that it failed, so ask the system why.
        cause = _try_to_listen(host=host, port=port)
        raise _tcp_error(cause, host=host, port=port, flags=flags) from error
    return f"{shown_host}:{bound_port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; an unknown name counts as reachable from others."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def check_address(config: ServerConfig, security: SecurityConfig) -> None:
    """Raise StartError if others can reach the address without TLS or credentials, unless that is allowed."""
    if config.uds is None:
        _check_host(config.host, security)


def check_control_address(address: str, security: SecurityConfig) -> None:
    """Raise StartError for a group's channel that others could read or join."""
    host = address.rpartition(":")[0].strip("[]")
    has_both = security.tls_certificate is not None and security.tls_client_ca is not None
    if has_both or is_loopback(host) or security.allow_insecure_public:
        return
    raise StartError(
        Reason.ADDRESS_INSECURE,
        f"the group's channel at {address} carries prompts, and others could read or join it; set "
        "security.tls_certificate, tls_key and tls_client_ca on all ranks, or, where only these machines "
        "reach each other there, security.allow_insecure_public",
        metadata={"host": host},
    )


def listen_for_http(config: HttpConfig, security: SecurityConfig) -> socket.socket:
    """Return a socket that listens at the configured address.

    Raises StartError if `check_address` refuses the address, if it is not available, or if HTTP callers would
    have no way to prove who they are.
    """
    assert config.port is not None, "there is no port for HTTP"
    _check_host(config.host, security)
    if security.tls_client_ca is not None and security.token_file is None:
        raise StartError(
            Reason.ADDRESS_INSECURE,
            "callers authenticate with certificates (security.tls_client_ca), which cannot be done over "
            "HTTP; add tokens with --token-file, or leave --http-port out",
            metadata={"host": config.host},
        )
    _warn_of_open_door(config.host, security)
    try:
        return _listening(host=config.host, port=config.port)
    except OSError as error:
        raise _tcp_error(error, host=config.host, port=config.port, flags="--http-") from error


def speaks_tls(config: HttpConfig, security: SecurityConfig) -> bool:
    """Whether HTTP callers speak TLS: if the server has a certificate and other machines can reach it."""
    return security.tls_certificate is not None and not is_loopback(config.host)


def _warn_of_open_door(host: str, security: SecurityConfig) -> None:
    if missing := _missing_at(host, security):
        _logger.warning("door_left_open", extra={"host": host, "missing": missing})


def _check_host(host: str, security: SecurityConfig) -> None:
    missing = _missing_at(host, security)
    if not missing or security.allow_insecure_public:
        return
    raise StartError(
        Reason.ADDRESS_INSECURE,
        f"{host} can be reached from other machines, and this server lacks {missing}; "
        "set that up, listen on 127.0.0.1, or pass --allow-insecure-public if something else protects it",
        metadata={"host": host},
    )


def check_free(config: ServerConfig) -> None:
    """Raise StartError if the address cannot be bound: it is in use, or the system refuses.

    This binds nothing, so the address may be taken before the server binds it.
    """
    if config.uds is not None:
        _check_socket(Path(config.uds))
    else:
        check_port_free(config.host, config.port)


def check_port_free(host: str, port: int, *, flags: str = "--") -> None:
    """Raise StartError for a port that cannot be bound, as `check_free` does; `flags` as in `_tcp_error`."""
    if (cause := _try_to_listen(host=host, port=port)) is not None:
        raise _tcp_error(cause, host=host, port=port, flags=flags)


def check_rank_free(address: str) -> None:
    """Raise StartError if a rank cannot listen at "host:port", as `check_free` does."""
    host, _, port = address.rpartition(":")
    if (cause := _try_to_listen(host=host.strip("[]"), port=int(port))) is not None:
        raise StartError(
            Reason.ADDRESS_IN_USE,
            f"this rank cannot listen at {address}: {cause.strerror or cause}; stop what listens there, or "
            "correct the file of hosts, --group-rank or --group-control on all ranks",
            metadata={"address": address},
        )


def check_metrics_free(config: TelemetryConfig) -> None:
    """Raise StartError if the Prometheus endpoint cannot listen, as `check_free` does."""
    if config.metrics_port is None:
        return
    check_port_free(config.metrics_host, config.metrics_port, flags="--metrics-")


def _missing_at(host: str, security: SecurityConfig) -> str:
    """Return what the address lacks; "" if only this machine can reach it."""
    if is_loopback(host):
        return ""
    missing = []
    if security.tls_certificate is None:
        missing.append("TLS (--tls-certificate, --tls-key)")
    if not security.authenticates:
        missing.append("callers that prove who they are (--token-file or --tls-client-ca)")
    return " and ".join(missing)


def _tcp_error(cause: OSError | None, *, host: str, port: int, flags: str = "--") -> StartError:
    """Return the error of an address; `flags` is the prefix of the options that choose another one."""
    if cause is not None and cause.errno == errno.EACCES:
        what = f"port {port} needs privileges that this process lacks; choose one above 1023 with {flags}port"
    elif cause is None or cause.errno == errno.EADDRINUSE:
        what = (
            f"port {port} on {host} is taken by another process; stop it, or choose another port with "
            f"{flags}port (0 picks a free one)"
        )
    else:
        why = cause.strerror or cause
        what = f"cannot listen on {host} port {port}: {why}; choose another address with {flags}host"
    return StartError(Reason.ADDRESS_IN_USE, what, metadata={"host": host, "port": port})


def _try_to_listen(*, host: str, port: int) -> OSError | None:
    try:
        _listening(host=host, port=port).close()
    except OSError as error:
        return error
    return None


def _listening(*, host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def bind_uds(server: grpc.aio.Server, path: Path) -> BoundAddress:
    """Bind a Unix socket that only this account may connect to; raises StartError."""
    # At its stop gRPC removes whatever has the name that it bound, even another server's socket. So it binds
    # a private name, never the one that clients know.
    own_path = path.with_name(f".{secrets.token_hex(2)}")
    size_bytes = max(len(os.fsencode(path)), len(os.fsencode(own_path)))
    if size_bytes > UDS_PATH_BYTE_LIMIT:
        raise _uds_error(path, f"its path has {size_bytes} bytes, the limit is {UDS_PATH_BYTE_LIMIT}")
    _prepare_folder(path)
    _check_socket(path)
    # The socket's permissions act as credentials: only its owner may connect, and the mask ensures that from
    # the first moment. gRPC tells nothing more about such a peer: its auth context has no user id.
    old_mask = os.umask(stat.S_IRWXG | stat.S_IRWXO | stat.S_IXUSR)
    try:
        server.add_insecure_port(f"unix:{own_path}")
        own_path.replace(path)
    except (RuntimeError, OSError) as error:
        raise _uds_error(path, "the system refused it; is the folder writable?") from error
    finally:
        os.umask(old_mask)
    return BoundAddress(f"unix:{path}", SocketFile.at(path))


def _check_socket(path: Path) -> None:
    if not path.exists():
        return
    # gRPC would silently replace the socket of a running server.
    if not path.is_socket():
        raise _uds_error(path, "a file that is not a socket is there")
    if _somebody_listens(path):
        raise _uds_error(path, "another server is listening there")


def _prepare_folder(path: Path) -> None:
    """Create the socket's folder if it is missing; refuse one in which others could replace the socket."""
    folder = path.parent
    if not os.path.lexists(folder) and folder.parent.is_dir():
        folder.mkdir(mode=stat.S_IRWXU)
    if not folder.is_dir():
        raise _uds_error(path, f"the folder {folder} does not exist")
    for passed in _path_folders(folder.absolute()):
        found = passed.stat()
        if found.st_uid not in (os.getuid(), 0):
            raise _uds_error(
                path, f"the folder {passed} belongs to user {found.st_uid}, who could swap the socket"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            raise _uds_error(path, f"others may write the folder {passed} and so could swap the socket")


def _path_folders(folder: Path) -> Iterator[Path]:
    """Yield each folder on the way to an existing one, including those of links, and the folder itself:
    whoever may write to one of them decides where the path leads."""
    for place in (*reversed(folder.parents), folder):
        if place.is_symlink():
            yield from _path_folders(place.parent / os.readlink(place))
        else:
            yield place


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            # Refused: a killed server left its socket file behind.
            return False
    return True


def _uds_error(path: Path, what: str) -> StartError:
    return StartError(
        Reason.ADDRESS_IN_USE,
        f"cannot listen on the socket {path}: {what}; choose another path with --uds",
        metadata={"uds": path},
    )


_PENDING_CALL_LIMIT = 1 << 14
"""That of 32 connections at their stream limit; refusing 1,170 calls took 0.4 s (2-core x86)."""

_UNLIMITED_MS = 2**31 - 1
"""gRPC's value for "never"."""
_UNLIMITED_S = 2**31 - 1
"""The same for an argument in seconds."""


def server_options(server: ServerConfig, connection: ConnectionConfig) -> list[tuple[str, int]]:
    """Return the arguments of the gRPC server."""
    return [
        ("grpc.max_receive_message_length", server.max_message_bytes),
        # Answers are as long as the request allowed: the tokens of a long prompt, a long output.
        ("grpc.max_send_message_length", -1),
        # Otherwise Linux lets two servers share a port, and each gets half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", int(server.channelz_enabled)),
        ("grpc.max_allowed_incoming_connections", connection.connection_limit),
        ("grpc.max_concurrent_streams", connection.stream_limit),
        # Calls of all callers that have arrived and were not accepted yet. Above the first limit gRPC ends
        # some at random, above the second all. One caller's burst must not cause that; such calls are refused
        # in order.
        ("grpc.server.max_pending_requests", _PENDING_CALL_LIMIT),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALL_LIMIT),
        # From half of the hard limit on, the soft limit refuses calls at random. One limit is enough.
        # By default calls that waited for 30 s are cancelled, even if the machine was just busy or asleep.
        ("grpc.server_max_unrequested_time_in_server", _UNLIMITED_S),
        ("grpc.max_metadata_size", connection.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", connection.max_metadata_bytes),
        ("grpc.server_handshake_timeout_ms", _ms(connection.handshake_timeout_s)),
        # Notice a caller whose machine has vanished: its request takes memory.
        ("grpc.keepalive_time_ms", _ms(connection.keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(connection.keepalive_timeout_s)),
        # Gateways ping every 10 s, with or without calls, and gRPC's own limit of 5 minutes would disconnect
        # them. The third ping that comes too early ends the connection with too_many_pings.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(connection.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.max_connection_idle_ms", _ms(connection.idle_s) or _UNLIMITED_MS),
        ("grpc.max_connection_age_ms", _ms(connection.max_age_s) or _UNLIMITED_MS),
        ("grpc.max_connection_age_grace_ms", _ms(connection.max_age_grace_s)),
    ]


def _ms(seconds: float) -> int:
    return min(round(seconds * 1000), _UNLIMITED_MS)
