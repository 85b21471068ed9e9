"""Servers that are waited for: one whose first connections come to nothing, one that never has its model."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from icehouse.v1 import server_service_pb2, server_service_pb2_grpc

LOST_CONNECTION_COUNT = 2
"""How many connections come to nothing before one reaches the server; then it begins anew, so that every
language meets the same."""

_CHUNK_BYTES = 1 << 16


class _Coming(socketserver.ThreadingTCPServer):
    """Closes connections at once, but each third one, which it joins to `target`."""

    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = target
        self._lock = threading.Lock()
        self._count = 0

    def is_next_lost(self) -> bool:
        with self._lock:
            self._count += 1
            return self._count % (LOST_CONNECTION_COUNT + 1) != 0


class _Connection(socketserver.BaseRequestHandler):
    server: _Coming

    def handle(self) -> None:
        if self.server.is_next_lost():
            return
        with socket.create_connection(self.server.target) as other:
            back = threading.Thread(target=_pump, args=(other, self.request), daemon=True)
            back.start()
            _pump(self.request, other)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until either side has enough, and tell both."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def coming_front(address: str) -> Iterator[str]:
    """Stand in front of the server at `address` ("host:port") on a port of loopback, which is returned."""
    host, _, port = address.rpartition(":")
    with _Coming((host, int(port))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Loading(server_service_pb2_grpc.ServerServiceServicer):
    def GetServer(self, request: Any, context: Any) -> server_service_pb2.GetServerResponse:
        server = server_service_pb2.Server(state=server_service_pb2.SERVER_STATE_LOADING)
        return server_service_pb2.GetServerResponse(server=server)

    def GetStats(self, request: Any, context: Any) -> server_service_pb2.GetStatsResponse:
        return server_service_pb2.GetStatsResponse()

    def WatchStats(self, request: Any, context: Any) -> Iterator[server_service_pb2.WatchStatsResponse]:
        yield server_service_pb2.WatchStatsResponse()

    def ListRequests(self, request: Any, context: Any) -> server_service_pb2.ListRequestsResponse:
        return server_service_pb2.ListRequestsResponse()

    def CancelRequest(self, request: Any, context: Any) -> server_service_pb2.CancelRequestResponse:
        return server_service_pb2.CancelRequestResponse()


@contextlib.contextmanager
def loading_server() -> Iterator[str]:
    """Serve what a server says of itself while its model loads, on a port of loopback, which is returned."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    server_service_pb2_grpc.add_ServerServiceServicer_to_server(_Loading(), server)
    told = health.HealthServicer()
    told.set("icehouse.v1.InferenceService", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
