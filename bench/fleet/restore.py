"""Rate at which a worker takes prompts from SSD, as it measures it itself after a stop and a new start."""

from __future__ import annotations

import dataclasses

from icehouse.v1 import inference_service_pb2, prompt_pb2

from bench.fleet.fleet import Fleet, until
from bench.fleet.sessions import Shape
from bench.fleet.workload import Texts
from bench.grpc_clients import READ_WRITE, Client


@dataclasses.dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a worker says of its store."""

    restore_tokens_per_s: float
    kv_bytes_per_token: int


async def measure_restore(fleet: Fleet, texts: Texts, shape: Shape) -> StoreFacts:
    """Stop the fleet's only worker, start it again, and ask it for its agents' instructions."""
    (worker,) = fleet.workers
    worker.terminate()
    await until(lambda: not worker.is_alive, "the worker does not stop")
    await fleet.restart(worker)
    client = Client(worker.address)
    try:
        for agent in range(shape.agent_count):
            text = texts.text(shape.agent_token_count, key=agent)
            prompt = prompt_pb2.ChatPrompt(
                messages=[prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_SYSTEM, content=text)]
            )
            await client.stream(
                inference_service_pb2.GenerateRequest(
                    prompt={"chat": prompt}, max_output_tokens=1, cache=READ_WRITE
                )
            )
        promote = (await client.stats()).cache.promote
        return StoreFacts(promote.restore_tokens_per_second, (await client.model()).kv_bytes_per_token)
    finally:
        await client.close()
