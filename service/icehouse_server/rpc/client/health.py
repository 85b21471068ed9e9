"""Health client of the command line: one question, one answer. Blocking."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from icehouse_server.rpc.client.access import OPEN, Access
from icehouse_server.rpc.client.generate import failure_of

INFERENCE_SERVICE = "icehouse.v1.InferenceService"
"""What is asked for where nobody says otherwise: it serves when the server does."""


def health_status(
    address: str, access: Access = OPEN, *, service: str = INFERENCE_SERVICE, timeout_s: float = 5.0
) -> str:
    """Return what the server says of a service: SERVING, NOT_SERVING. Raises CallFailed."""
    with access.open_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, metadata=access.metadata
            )
        except grpc.RpcError as error:
            raise failure_of(error, address) from error
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
