"""Message interceptor: refuses what a request's bytes show and its parsed message hides, or costs too much.

- Two fields of one oneof: a parser keeps the last of them without a word, so a prompt could vanish unseen.
  Most senders cannot do it: their own message keeps one.
- More fields than any request needs: parsing them would stop everybody else's calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from icehouse.v1 import (
    cache_service_pb2,
    embedding_service_pb2,
    inference_service_pb2,
    rerank_service_pb2,
)

from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.calls.methods import LONG_MESSAGE_BYTES
from icehouse_server.rpc.messages.wire_fields import fields, has_more_fields

FIELD_LIMIT = 1 << 16
"""Fields of one request: of 4,096 messages of a chat, sixteen each. So many are parsed in 2 ms."""
SCANNED_FIELD_LIMIT = 1000
"""A message with more fields at its top has too many stop strings, and is refused for that."""


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Looks at the bytes of every request with a prompt; `services` are served beside the API.

    The bytes are read where the interceptor outside has them parsed: in any thread.
    """

    def __init__(self, services: Sequence[ServiceDescriptor] = ()) -> None:
        self._inputs = {
            f"/{service.full_name}/{method.name}": method.input_type
            for service in (*_services(), *services)
            for method in service.methods
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's own handler, behind the check where there is something to check."""
        handler = await continuation(handler_call_details)
        descriptor = self._inputs.get(handler_call_details.method)
        if handler is None or descriptor is None:
            return handler
        parse = handler.request_deserializer

        def read(data: bytes) -> Any:
            check_fields(data, descriptor)
            return parse(data)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            handler.unary_stream or handler.unary_unary,
            request_deserializer=read,
            response_serializer=handler.response_serializer,
        )


def check_fields(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message that sets two fields of one oneof, or a long one that has too many fields.

    Raises InvalidRequest. What is no message at all is left to the parser.
    """
    if len(data) > LONG_MESSAGE_BYTES and has_more_fields(data, descriptor, limit=FIELD_LIMIT):
        raise InvalidRequest(
            Reason.MESSAGE_MALFORMED,
            f"the {len(data)} bytes of the request have more than {FIELD_LIMIT} fields, those of the "
            "messages in it included; send fewer, or shorter lists",
            metadata={"size_bytes": len(data), "field_limit": FIELD_LIMIT},
        )
    if clash := clashing_fields(data, descriptor):
        listed = " and ".join(f"`{name}`" for name in clash)
        raise InvalidRequest(
            Reason.PROMPT_AMBIGUOUS,
            f"{listed} are set; set one of them",
            field=clash[-1],
            metadata={"fields": ",".join(clash)},
        )


def clashing_fields(data: bytes, descriptor: Descriptor) -> tuple[str, ...]:
    """Return the names of fields in `data` that share a oneof; empty when there is no clash."""
    oneofs = _oneofs(descriptor)
    if not oneofs:
        return ()
    present = {field.number for field in islice(fields(data, 0, len(data)), SCANNED_FIELD_LIMIT)}
    for names_by_number in oneofs:
        clash = tuple(name for number, name in names_by_number.items() if number in present)
        if len(clash) > 1:
            return clash
    return ()


def _services() -> list[ServiceDescriptor]:
    modules = (inference_service_pb2, cache_service_pb2, embedding_service_pb2, rerank_service_pb2)
    return [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]


def _oneofs(descriptor: Descriptor) -> list[dict[int, str]]:
    """Return name by number for each oneof; the one-field oneofs of `optional` are not among them."""
    return [
        {field.number: field.name for field in oneof.fields}
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1
    ]
