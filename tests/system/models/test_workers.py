"""Several models as workers of gateways: each at a port of its own, with its name, events and health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import model_service_pb2 as models
from icehouse_server.rpc.health import MODEL_PREFIX

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.worker import needs_protocol
from tests.system.models.pool_server import PoolServer, entry, pool_server, question

pytestmark = needs_protocol

NAMES = ("llama", "qwen3")
BLOCK = 16
PROMPT = tuple(range(5, 5 + 2 * BLOCK + 3))
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: tiny_model_dir(parent, name) for name in NAMES}


@contextlib.asynccontextmanager
async def worker_at(address: str) -> AsyncIterator[Any]:
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


@contextlib.asynccontextmanager
async def workers(folders: dict[str, Path], directory: Path) -> AsyncIterator[tuple[PoolServer, Any, Any]]:
    """Serve both models; yield the server, and what gateways find at its own port and at the second one's."""
    entries = [entry(folders["llama"]), entry(folders["qwen3"], worker_port=0)]
    async with (
        pool_server(directory, entries, fleet__worker_enabled=True, server__drain_grace_s=BOUND_S) as served,
        worker_at(served.address) as first,
        worker_at(served.served.rpc.worker_addresses["qwen3"]) as second,
    ):
        yield served, first, second


async def generated(worker: Any, token_ids: Sequence[int]) -> list[int]:
    """Return what a worker's model writes after a prompt."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as worker_messages

    request = worker_messages.GenerateRequest(
        tokenized={"input_ids": token_ids}, sampling_params={"temperature": 0.0, "max_tokens": 8}
    )
    [response] = [each async for each in worker.Generate(request)]
    return list(response.complete.output_ids)


async def test_each_model_is_a_worker_of_its_own_that_says_which_it_is(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from smg_grpc_proto.generated import common_pb2
    from smg_grpc_proto.generated import vllm_engine_pb2 as worker_messages

    async with workers(folders, tmp_path) as (served, first, second):
        for name, worker in zip(NAMES, (first, second), strict=True):
            # As a gateway finds out what a worker is. That loads a model that never was.
            healthy = await worker.HealthCheck(worker_messages.HealthCheckRequest(), timeout=BOUND_S)
            info = await worker.GetModelInfo(worker_messages.GetModelInfoRequest())
            await worker.GetServerInfo(worker_messages.GetServerInfoRequest())
            chunks = [each async for each in worker.GetTokenizer(common_pb2.GetTokenizerRequest())]
            assert healthy.healthy and chunks[-1].sha256
            assert (info.served_model_name, info.model_path) == (name, str(folders[name]))
            alone = await served.inference.Generate(question(name, PROMPT))
            assert await generated(worker, PROMPT) == list(alone.token_ids)


async def test_a_worker_keeps_no_model_in_memory_and_is_healthy_without_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    from smg_grpc_proto.generated import common_pb2
    from smg_grpc_proto.generated import vllm_engine_pb2 as worker_messages

    async with workers(folders, tmp_path) as (served, _, second):
        wanted = await generated(second, PROMPT)
        stream = second.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        number, told = 0, 0
        async with asyncio.timeout(BOUND_S):
            while told < 2:
                batch = await stream.read()
                number = batch.sequence_number
                told += sum(len(event.stored.blocks) for event in batch.events)
        await served.models.UnloadModel(models.UnloadModelRequest(model="qwen3"))
        async with asyncio.timeout(BOUND_S):
            # It ends well, so a gateway comes back with the number that it had.
            while await stream.read() is not grpc.aio.EOF:
                pass
        again = common_pb2.SubscribeKvEventsRequest(start_sequence_number=number)
        gone = await refused(_first_of(second.SubscribeKvEvents(again)))
        assert (gone.code, gone.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_LOADED")
        healthy = await second.HealthCheck(worker_messages.HealthCheckRequest())
        info = await second.GetModelInfo(worker_messages.GetModelInfoRequest())
        await second.GetLoads(worker_messages.GetLoadsRequest())
        assert healthy.healthy and info.served_model_name == "qwen3"
        assert (await served.states())["qwen3"] == "MODEL_STATE_ABSENT", "it was loaded to be looked at"
        assert await generated(second, PROMPT) == wanted
        expired = await refused(_first_of(second.SubscribeKvEvents(again)))
        assert expired.code == grpc.StatusCode.OUT_OF_RANGE, "it must begin anew"
        fresh = second.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        async with asyncio.timeout(BOUND_S):
            while not (await fresh.read()).events[1:]:
                pass
        fresh.cancel()


async def _first_of(stream: Any) -> Any:
    return await anext(aiter(stream))


def health_at(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def status_of(served: PoolServer, name: str) -> int:
    try:
        request = health_pb2.HealthCheckRequest(service=name)
        return int((await health_at(served.channel).Check(request)).status)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
        return UNKNOWN


async def test_each_model_has_its_health(folders: dict[str, Path], tmp_path: Path) -> None:
    damaged = tiny_model_dir(tmp_path, "llama", name="damaged")
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    entries = [entry(folders["llama"]), entry(folders["qwen3"], aliases=("small",)), entry(damaged)]
    async with pool_server(tmp_path / "blocks", entries) as served:
        watched = MODEL_PREFIX + "damaged"
        watch = health_at(served.channel).Watch(health_pb2.HealthCheckRequest(service=watched))
        # What is not loaded is loaded for whoever asks.
        assert (await watch.read()).status == SERVING
        for name in ("llama", "qwen3", "small", ""):
            assert await status_of(served, MODEL_PREFIX + name) == SERVING, name
        assert await status_of(served, MODEL_PREFIX + "gpt") == UNKNOWN
        assert (await served.states())["qwen3"] == "MODEL_STATE_ABSENT", "it was loaded to be looked at"
        assert (await refused(served.inference.Generate(question("damaged", PROMPT)))).reason
        assert (await watch.read()).status == NOT_SERVING
        assert [await status_of(served, name) for name in (watched, "", MODEL_PREFIX + "llama")] == [
            NOT_SERVING,
            SERVING,
            SERVING,
        ]
        any_messages: Any = health_pb2
        listed = await health_at(served.channel).List(any_messages.HealthListRequest())
        found = {name: each.status for name, each in listed.statuses.items() if "/" in name}
        assert found == {"models/llama": SERVING, "models/qwen3": SERVING, watched: NOT_SERVING}
        watch.cancel()


async def test_blocks_of_each_model_are_published_under_its_topic(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq comes with the extra fleet")
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    entries = [entry(folders["llama"]), entry(folders["qwen3"], worker_port=0)]
    settings = {
        "fleet__worker_enabled": True,
        "kv_events__zmq_endpoint": f"connect:tcp://127.0.0.1:{port}",
        "kv_events__interval_ms": 1.0,
    }
    async with pool_server(tmp_path, entries, **settings) as served:
        address = served.served.rpc.worker_addresses["qwen3"]
        wanted = {f"kv@{served.address}@llama", f"kv@{address}@qwen3"}
        for life in range(2):
            for name in NAMES:
                await served.inference.Generate(question(name, PROMPT))
            async with asyncio.timeout(BOUND_S):
                topics: set[str] = set()
                while topics < wanted:
                    while not socket.poll(0):
                        await asyncio.sleep(0)
                    topics.add(socket.recv_multipart()[0].decode())
            assert topics == wanted, life
            for name in NAMES:
                await served.models.UnloadModel(models.UnloadModelRequest(model=name))
    socket.close(linger=0)
    context.term()
