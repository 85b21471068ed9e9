"""Client of the command line: wait for a server, stream one continuation. Blocking.

Programs use the package in clients/python; this one exists so that `icehouse generate` and
`icehouse demo` need nothing beside the server's own distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2
from icehouse.v1 import inference_service_pb2, inference_service_pb2_grpc, usage_pb2

from icehouse_server.rpc.client.access import OPEN, Access

_WATCH_SLICE_S = 1.0
"""How long one look at the server's health may take before its process is looked at again."""


class CallFailed(Exception):
    """A call ended with a status other than OK. `unreachable` when there was no server to ask."""

    def __init__(self, message: str, *, code: str, unreachable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.unreachable = unreachable


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue, and how. None leaves the choice to the server."""

    text: str
    is_chat: bool = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    adapter: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a finished call cost. Durations in seconds."""

    finish_reason: str
    prompt_token_count: int
    ram_token_count: int
    ssd_token_count: int
    output_token_count: int
    ttft_s: float
    prefill_s: float
    decode_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate after the first token; 0 when there was only one."""
        return (self.output_token_count - 1) / self.decode_s if self.decode_s > 0 else 0.0


class Connection:
    """One channel to one server."""

    def __init__(self, address: str, access: Access = OPEN) -> None:
        self.address = address
        self._metadata = access.metadata
        self._channel = access.open_channel(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def wait_until_serving(self, *, is_alive: Callable[[], bool]) -> bool:
        """Block until health says SERVING; False when `is_alive` says that the server is gone."""
        health = self._channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        while is_alive():
            watch = health(health_pb2.HealthCheckRequest(), timeout=_WATCH_SLICE_S, wait_for_ready=True)
            try:
                for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        watch.cancel()
                        return True
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise failure_of(error, self.address) from error
        return False

    def stream(self, prompt: Prompt, *, on_text: Callable[[str], None], timeout_s: float | None) -> Summary:
        """Call Stream and hand over text as it comes. Raises CallFailed."""
        stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        finished: inference_service_pb2.Finished | None = None
        try:
            for answer in stub.Stream(_request(prompt), timeout=timeout_s, metadata=self._metadata):
                if answer.WhichOneof("event") == "delta" and answer.delta.text:
                    on_text(answer.delta.text)
                elif answer.WhichOneof("event") == "finished":
                    finished = answer.finished
        except grpc.RpcError as error:
            raise failure_of(error, self.address) from error
        if finished is None:
            raise CallFailed("the stream ended without `finished`", code="INTERNAL", unreachable=False)
        return _summary(finished)


def _request(prompt: Prompt) -> inference_service_pb2.GenerateRequest:
    request = inference_service_pb2.GenerateRequest(
        max_output_tokens=prompt.max_output_tokens or 0, stop=list(prompt.stop), adapter=prompt.adapter
    )
    if prompt.is_chat:
        request.chat.messages.add(role="user", content=prompt.text)
    else:
        request.text = prompt.text
    for name in ("temperature", "top_p", "seed"):
        value = getattr(prompt, name)
        if value is not None:
            setattr(request.sampling, name, value)
    return request


def _summary(finished: inference_service_pb2.Finished) -> Summary:
    usage = finished.usage
    return Summary(
        finish_reason=usage_pb2.FinishReason.Name(finished.finish_reason)
        .removeprefix("FINISH_REASON_")
        .lower(),
        prompt_token_count=usage.prompt_tokens,
        ram_token_count=usage.ram_tokens,
        ssd_token_count=usage.ssd_tokens,
        output_token_count=usage.output_tokens,
        ttft_s=usage.time_to_first_token.ToTimedelta().total_seconds(),
        prefill_s=usage.prefill_duration.ToTimedelta().total_seconds(),
        decode_s=usage.decode_duration.ToTimedelta().total_seconds(),
    )


def failure_of(error: Any, address: str) -> CallFailed:
    """Read the status of a failed call: such an error is a grpc.RpcError and a grpc.Call in one."""
    code = error.code()
    # gRPC's own status for a refused connection carries no details of ours.
    has_details = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not has_details:
        return CallFailed(not_reached_text(str(error.details()), address), code=code.name, unreachable=True)
    return CallFailed(f"{code.name}: {error.details()}", code=code.name, unreachable=False)


def not_reached_text(details: str, address: str) -> str:
    """Return why there was no answer and what to do, from gRPC's own words."""
    if "handshake failed" in details:
        why = details.rpartition("handshake failed")[2].strip(" :").removesuffix(": OK")
        return (
            f"the server at {address} and this command do not agree on TLS {why}; name its authority with "
            "--ca, or say neither --ca nor --tls to a server without TLS"
        )
    if "resolving" in details or "resolution" in details:
        return f"the name in {address} cannot be resolved; say another --address"
    if "Socket closed" in details or "reset" in details:
        return (
            f"the server at {address} closed the connection; one with TLS wants --ca (or --tls), one that "
            "asks for certificates --certificate and --key too"
        )
    return f"no server answers at {address}; start one with `icehouse serve`, or say --address"
