"""Own server: whether an Icehouse with these settings listens at the configured address.

For commands that run beside the server, which has the port and the cache directory. Takes a few seconds at
most and needs no credentials: over TLS the server is recognised by its certificate, in plain text by its
answer to a health check.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
import ssl
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from icehouse_server.config import HttpConfig, SecurityConfig, ServerConfig
from icehouse_server.rpc.calls.status import ERROR_DOMAIN
from icehouse_server.rpc.listen_address import speaks_tls
from icehouse_server.small_file import read_small_file

_TIMEOUT_S: Final = 3.0
_ANSWER_LIMIT_BYTES: Final = 64 << 10
_SERVICE: Final = "icehouse.v1.InferenceService"
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class OwnServer(enum.Enum):
    """What listens at the address."""

    ABSENT = enum.auto()
    """Nothing, or somebody else's server."""
    NOT_SERVING = enum.auto()
    """Our server, loading its model or about to stop."""
    RUNNING = enum.auto()


def find_own_server(server: ServerConfig, security: SecurityConfig) -> OwnServer:
    """Find out what listens at the configured address."""
    if server.uds is None and security.tls_certificate is not None:
        host, _, port = server.local_address.rpartition(":")
        is_own = _shows_certificate(host.strip("[]"), int(port), Path(security.tls_certificate))
        return OwnServer.RUNNING if is_own else OwnServer.ABSENT
    return _ask_for_health(server.local_address)


def is_own_http(http: HttpConfig, security: SecurityConfig) -> bool:
    """Whether the HTTP front of our server answers at the configured address."""
    assert http.port is not None, "there is no port for HTTP"
    host = http.host if http.host not in ("0.0.0.0", "::") else "localhost"
    if speaks_tls(http, security) and security.tls_certificate is not None:
        return _shows_certificate(host, http.port, Path(security.tls_certificate))
    connection = HTTPConnection(host, http.port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException, ValueError):
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read(_ANSWER_LIMIT_BYTES))
        # These keys are also in its answers while the server loads or refuses access.
        return isinstance(answer, dict) and bool(answer.keys() & {"status", "error"})
    return False


def _ask_for_health(target: str) -> OwnServer:
    # No proxy can reach this address, and an earlier failure to connect means nothing.
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            # If the error is ours, health checks need credentials here.
            is_own = ERROR_DOMAIN in str(cast(Any, error).trailing_metadata())
            return OwnServer.RUNNING if is_own else OwnServer.ABSENT
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return OwnServer.RUNNING if is_serving else OwnServer.NOT_SERVING


def _shows_certificate(host: str, port: int, path: Path) -> bool:
    """Return whether the port shows the certificate in a file; only our server should have its key."""
    with contextlib.suppress(OSError, ValueError):
        found = _CERTIFICATE.search(read_small_file(path).content.decode("ascii", "ignore"))
        shown = ssl.get_server_certificate((host, port), timeout=_TIMEOUT_S)
        return found is not None and ssl.PEM_cert_to_DER_cert(found[0]) == ssl.PEM_cert_to_DER_cert(shown)
    return False
