"""Fronts of a server that refuse calls for now, as the server itself does where a test cannot bring it to.

The one that drains refuses the first attempt of every call: gRPC tells which attempt it is. The busy one
refuses every call twice, and knows calls by their bytes: send such with an id of their own.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, cast

import grpc
from icehouse_server.errors import IcehouseError, Overloaded, Reason, Unavailable
from icehouse_server.rpc.calls.status import status_of

ATTEMPTS_HEADER = "grpc-previous-rpc-attempts"
"""How often gRPC has tried a call before (its proposal A6); absent from the first attempt."""

BUSY_REFUSAL_COUNT = 2
"""How often the busy front refuses a call."""

BUSY_DELAY_S = 0.01
"""When it says to come back."""

RefusalOf = Callable[[grpc.HandlerCallDetails, bytes], IcehouseError | None]
"""Returns what a call is refused with; None for one that is passed on."""


class _Front(grpc.GenericRpcHandler):
    """Refuses some calls; the others, with one answer, go on to `channel`."""

    def __init__(self, channel: grpc.Channel, refusal_of: RefusalOf) -> None:
        self._channel = channel
        self._refusal_of = refusal_of

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if not details.method.startswith("/icehouse."):
            # Without a health service it counts as well, so that calls come here.
            return None
        forward: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(details.method)

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if refusal := self._refusal_of(details, request):
                context.abort_with_status(status_of(refusal))
            return forward(request)

        return grpc.unary_unary_rpc_method_handler(answer)


def _drain(details: grpc.HandlerCallDetails, request: bytes) -> IcehouseError | None:
    if any(name == ATTEMPTS_HEADER for name, _ in details.invocation_metadata):
        return None
    return Unavailable(Reason.DRAINING, "the server is stopping")


class _Budget:
    """Counts calls that are equal to the byte.

    The reason is one of which gRPC's libraries are told no delay: Java's would send the call again itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[str, bytes]] = collections.Counter()

    def __call__(self, details: grpc.HandlerCallDetails, request: bytes) -> IcehouseError | None:
        key = (details.method, request)
        with self._lock:
            self._counts[key] += 1
            if self._counts[key] > BUSY_REFUSAL_COUNT:
                return None
        return Overloaded(Reason.TOKEN_RATE_EXCEEDED, "the budget is used", retry_after_s=BUSY_DELAY_S)


def draining_front(address: str) -> contextlib.AbstractContextManager[str]:
    """Serve a server that is stopping in front of the one at `address`; see `_front`."""
    return _front(address, _drain)


def busy_front(address: str) -> contextlib.AbstractContextManager[str]:
    """Serve a server that refuses for now in front of the one at `address`; see `_front`."""
    return _front(address, _Budget())


@contextlib.contextmanager
def _front(address: str, refusal_of: RefusalOf) -> Iterator[str]:
    """Serve on a port of loopback, which is returned with its host."""
    with grpc.insecure_channel(address) as channel:
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        server.add_generic_rpc_handlers((cast(Any, _Front(channel, refusal_of)),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
