"""Worker parts: what the worker protocol needs beside the API's own services."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from google.protobuf.descriptor import ServiceDescriptor
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.calls.wire import Encoded
from icehouse_server.text.tokenizer_archive import TokenizerArchive


@dataclasses.dataclass(frozen=True, slots=True)
class ServedFolder:
    """What gateways are told of the model's folder, beside what the engine knows."""

    path: str
    architectures: tuple[str, ...]
    bos_token_id: int
    pad_token_id: int
    block_token_count: int
    running_limit: int
    """Sequences that decode at once."""
    default_sampling: Mapping[str, float]
    """What the model's authors recommend, by this protocol's field names."""
    read_archive: Callable[[], TokenizerArchive]
    """Any thread; may take a second."""


class KvEventSource(Protocol):
    """What the block store tells of itself, as this protocol has it. Event loop."""

    def subscribe(
        self,
        request: common_pb2.SubscribeKvEventsRequest,
        caller: Caller,
        load: Callable[[], vllm_engine_pb2.SchedulerLoad],
    ) -> AsyncGenerator[Encoded, None]:
        """Return the batches until the engine is READY no longer; closing them ends the subscription.

        They tell of the caller's tenant alone, unless it is an operator, and beside it of the `load`. Raises
        an IcehouseError at once when the number to go on from is no longer known.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerParts:
    """Made by the composition root where the protocol is switched on."""

    folder: ServedFolder
    kv_events: KvEventSource | None = None
    """None where none are told: gateways then keep an approximate tree of their own."""

    @property
    def services(self) -> tuple[ServiceDescriptor, ...]:
        """What is served beside the API."""
        return (vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],)
