"""A served model tells of its blocks over ZeroMQ; a restarted one of what is on its SSD, tokens included."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_server.domain.blocks import block_hash, root_hash
from icehouse_server.domain.ids import DEFAULT_TENANT, Fingerprint

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.whole_server import WholeServer, whole_server

zmq = pytest.importorskip("zmq", reason="pyzmq comes with the extra fleet")
msgpack = pytest.importorskip("msgpack", reason="msgpack comes with the extra fleet")

BLOCK = 16
TOKENS = tuple(range(5, 5 + 2 * BLOCK + 3))


class Subscriber:
    """Listens, as llm-d's picker may; whoever serves connects to it."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.topics: set[bytes] = set()

    async def read_until_told(self, *wanted: list[Any]) -> None:
        """Return when these events have come in this order, among others.

        A subscription may reach the publisher between two messages: then the second one comes before all is
        told again, it too, which is in order.
        """
        left = list(wanted)
        async with asyncio.timeout(BOUND_S):
            while left:
                if not self._socket.poll(0):
                    await asyncio.sleep(0)
                    continue
                topic, _, packed = self._socket.recv_multipart()
                self.topics.add(topic)
                for event in msgpack.unpackb(packed)[1]:
                    if left and event == left[0]:
                        left.pop(0)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@contextlib.asynccontextmanager
async def served_for(subscriber: Subscriber, folder: Path) -> AsyncIterator[WholeServer]:
    async with whole_server(
        folder / "model",
        folder / "ssd",
        cache__block_token_count=BLOCK,
        cache__min_prefix_token_count=0,
        kv_events__zmq_endpoint=f"connect:tcp://127.0.0.1:{subscriber.port}",
        kv_events__interval_ms=1.0,
    ) as served:
        yield served


def names(fingerprint: Fingerprint) -> list[int]:
    """Return the two whole blocks' names as messages have them."""
    made, parent = [], root_hash(fingerprint=fingerprint, tenant=DEFAULT_TENANT)
    for start in range(0, 2 * BLOCK, BLOCK):
        parent = block_hash(parent=parent, token_ids=TOKENS[start : start + BLOCK])
        made.append(int.from_bytes(parent[:8], "big"))
    return made


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    made = Subscriber()
    yield made
    made.close()


async def test_blocks_are_told_as_they_come_and_again_after_a_restart(
    subscriber: Subscriber, tmp_path: Path
) -> None:
    tiny_model_dir(tmp_path, "llama", name="model")
    async with served_for(subscriber, tmp_path) as served:
        request = pb.GenerateRequest(max_output_tokens=1)
        request.prompt.tokens.ids.extend(TOKENS)
        await served.inference.Generate(request)
        model = served.served.only.router.require_model().info
        one, two = names(Fingerprint(bytes.fromhex(model.fingerprint_hex)))
        tokens = [list(TOKENS[:BLOCK]), list(TOKENS[BLOCK : 2 * BLOCK])]
        in_ram: list[list[Any]] = [
            ["BlockStored", [one], None, tokens[0], BLOCK, None, "GPU", None],
            ["BlockStored", [two], one, tokens[1], BLOCK, None, "GPU", None],
        ]
        await subscriber.read_until_told(*in_ram)
    (topic,) = subscriber.topics
    assert topic.startswith(b"kv@127.0.0.1:") and topic.endswith(b"@tiny")
    async with served_for(subscriber, tmp_path):
        await subscriber.read_until_told(*([*event[:6], "CPU", None] for event in in_ram))
