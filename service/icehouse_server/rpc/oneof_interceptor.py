"""Oneof interceptor: refuses a request that sets two fields of one oneof.

A protobuf parser keeps the last of them without a word, so a prompt could vanish unseen. Most senders
cannot do it: their own message keeps one. What does arrive twice is found in the bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from icehouse.v1 import cache_service_pb2, inference_service_pb2, rerank_service_pb2

from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.calls.calls import Calls, Context

SCANNED_FIELD_LIMIT = 1000
"""A message with more fields has too many stop strings, and is refused for that."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class OneofInterceptor(grpc.aio.ServerInterceptor):
    """Looks at the bytes of every request whose message has a oneof; `services` are served beside the API."""

    def __init__(self, calls: Calls, services: Sequence[ServiceDescriptor] = ()) -> None:
        self._calls = calls
        self._inputs = {
            f"/{service.full_name}/{method.name}": method.input_type
            for service in (*_services(), *services)
            for method in service.methods
            if _oneofs(method.input_type)
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's own handler, behind the check where there is something to check."""
        handler = await continuation(handler_call_details)
        descriptor = self._inputs.get(handler_call_details.method)
        return handler if descriptor is None else self._checked(handler, descriptor)

    def _checked(self, handler: Any, descriptor: Descriptor) -> Any:
        parse = handler.request_deserializer

        def read(data: bytes) -> tuple[Any, tuple[str, ...]]:
            return parse(data), clashing_fields(data, descriptor)

        async def serve(request: tuple[Any, tuple[str, ...]], context: Context) -> Any:
            message, clash = request
            if not clash:
                return await (handler.unary_stream or handler.unary_unary)(message, context)
            async with self._calls.call(descriptor.name, context):
                raise _clash(clash)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(serve, request_deserializer=read, response_serializer=handler.response_serializer)


def clashing_fields(data: bytes, descriptor: Descriptor) -> tuple[str, ...]:
    """Return the names of fields in `data` that share a oneof; empty when there is no clash."""
    present = set(field_numbers(data))
    for names_by_number in _oneofs(descriptor):
        clash = tuple(name for number, name in names_by_number.items() if number in present)
        if len(clash) > 1:
            return clash
    return ()


def field_numbers(data: bytes) -> Iterator[int]:
    """Yield the numbers of the first top-level fields. `data` has been parsed: it is well formed."""
    position = 0
    for _ in range(SCANNED_FIELD_LIMIT):
        if position >= len(data):
            return
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _LENGTH:
            size_bytes, position = _varint(data, position)
            position += size_bytes
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            # A group, which proto3 does not write: an unknown field, and the end of what can be skipped.
            return
        yield tag >> 3


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _services() -> list[ServiceDescriptor]:
    modules = (inference_service_pb2, cache_service_pb2, rerank_service_pb2)
    return [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]


def _oneofs(descriptor: Descriptor) -> list[dict[int, str]]:
    """Return name by number for each oneof; the one-field oneofs of `optional` are not among them."""
    return [
        {field.number: field.name for field in oneof.fields}
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1
    ]


def _clash(names: tuple[str, ...]) -> InvalidRequest:
    listed = " and ".join(f"`{name}`" for name in names)
    return InvalidRequest(
        Reason.PROMPT_AMBIGUOUS,
        f"{listed} are set; set one of them",
        field=names[-1],
        metadata={"fields": ",".join(names)},
    )
