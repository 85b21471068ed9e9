"""Server reflection, v1 and v1alpha.

`grpcio-reflection` brings v1alpha only. Version 1 has the same messages under another package
name, field for field, so the same servicer answers both; its descriptor is derived here so that
v1 can describe itself too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_NAME = "grpc.reflection.v1.ServerReflection"
V1ALPHA_NAME = "grpc.reflection.v1alpha.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve both versions for `service_names` and for reflection itself."""
    names = (*service_names, V1_NAME, V1ALPHA_NAME)
    servicer = reflection.aio.ReflectionServicer(names, pool=_Pool(pool_with_v1()))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1_NAME, methods),))


class _Pool:
    """A descriptor pool that also finds methods; protobuf's own does not."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file of a message, enum, service, field or method; raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service_name, _, method_name = symbol.rpartition(".")
            service = self._pool.FindServiceByName(service_name)
            return service.methods_by_name[method_name].containing_service.file


def pool_with_v1() -> descriptor_pool.DescriptorPool:
    """Return the pool of all descriptors, version 1 of reflection among them."""
    pool = descriptor_pool.Default()
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = "grpc.reflection.v1"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _renamed(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type = _renamed(method.input_type)
            method.output_type = _renamed(method.output_type)
    pool.Add(file)
    return pool


def _renamed(name: str) -> str:
    return name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")
