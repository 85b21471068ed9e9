"""A drain that every call meets once: a front that refuses first attempts as a stopping server does.

gRPC tells a server which attempt of a call it sees, so the front keeps no state, and each test of each
language finds the same server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any, cast

import grpc
from icehouse_server.errors import Reason, Unavailable
from icehouse_server.rpc.calls.status import status_of

ATTEMPTS_HEADER = "grpc-previous-rpc-attempts"
"""How often gRPC has tried a call before (its proposal A6); absent from the first attempt."""


class _FirstRefused(grpc.GenericRpcHandler):
    """Refuses the first attempt of every call; what is tried again, with one answer, goes on to `channel`."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if not details.method.startswith("/icehouse."):
            # Without a health service it counts as well, so that calls come here.
            return None
        if any(name == ATTEMPTS_HEADER for name, _ in details.invocation_metadata):
            forward: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(details.method)
            return grpc.unary_unary_rpc_method_handler(lambda request, context: forward(request))
        return grpc.unary_unary_rpc_method_handler(_refuse)


def _refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort_with_status(status_of(Unavailable(Reason.DRAINING, "the server is stopping")))
    raise AssertionError("abort raises")


@contextlib.contextmanager
def draining_front(address: str) -> Iterator[str]:
    """Serve on a port of loopback, which is returned with its host, in front of the server at `address`."""
    with grpc.insecure_channel(address) as channel:
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        server.add_generic_rpc_handlers((cast(Any, _FirstRefused(channel)),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
