"""Time to first token that the gateway adds: the same warm prompt through it and directly, in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse.v1 import inference_service_pb2, prompt_pb2

from bench.fleet.chat import Message, chat
from bench.fleet.fleet import Fleet
from bench.grpc_clients import READ_WRITE, Client

_OUTPUT_TOKEN_COUNT = 4
_WARM_UP_COUNT = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Time to first token of one prompt, both ways, in seconds."""

    gateway_s: float
    direct_s: float

    @property
    def added_s(self) -> float:
        """What the way through the gateway took longer."""
        return self.gateway_s - self.direct_s


async def measure_overhead(fleet: Fleet, messages: Sequence[Message], *, count: int) -> list[Pair]:
    """Ask the fleet's only worker both ways, the order changing from pair to pair.

    Through the gateway it is OpenAI's HTTP on a connection of its own, directly it is Stream over gRPC on an
    open one; either way the template is rendered and the text is tokenized in it.
    """
    (worker,) = fleet.workers
    client = Client(worker.address)
    await client.ready()
    pairs = []
    try:
        for index in range(_WARM_UP_COUNT + count):
            if index % 2:
                direct_s = await _direct_s(client, messages)
                gateway_s = await _gateway_s(fleet, messages)
            else:
                gateway_s = await _gateway_s(fleet, messages)
                direct_s = await _direct_s(client, messages)
            pairs.append(Pair(gateway_s, direct_s))
    finally:
        await client.close()
    return pairs[_WARM_UP_COUNT:]


async def _gateway_s(fleet: Fleet, messages: Sequence[Message]) -> float:
    answer = await chat(
        fleet.gateway.url, model=fleet.model_id, messages=messages, max_output_tokens=_OUTPUT_TOKEN_COUNT
    )
    return answer.ttft_s


async def _direct_s(client: Client, messages: Sequence[Message]) -> float:
    prompt = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(**message) for message in messages])
    request = inference_service_pb2.GenerateRequest(
        prompt={"chat": prompt}, max_output_tokens=_OUTPUT_TOKEN_COUNT, cache=READ_WRITE
    )
    reply, _, _ = await client.stream(request)
    return reply.ttft_s
