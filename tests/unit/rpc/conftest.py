"""A real grpc.aio server on loopback around a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse_server.config import Config, ConnectionConfig, SecurityConfig, ServerConfig, TenantConfig
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.rpc.calls.watchers import Telemetry
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.rpc_server import RpcServer

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import MODEL_INFO, FakeEngine, FakeTokenizer
from tests.fixtures.rpc.fake_grammars import FakeGrammars
from tests.fixtures.rpc.seats import one_seat
from tests.fixtures.rpc.stubs import Stubs
from tests.fixtures.rpc.worker import only

SEED = 12345
_ITS_OWN = FakeGrammars()


class FakeClock:
    """Stands still until moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


@dataclasses.dataclass
class RunningServer(Stubs):
    """A started server with everything a test looks at."""

    server: RpcServer
    engine: FakeEngine
    router: Router
    clock: FakeClock
    tokenizer: FakeTokenizer
    grammars: FakeGrammars
    channel: grpc.aio.Channel

    async def cancelled(self) -> str:
        """Wait for the next cancel that reaches the engine."""
        return await asyncio.get_running_loop().run_in_executor(
            None, lambda: self.engine.cancelled.get(timeout=BOUND_S)
        )

    async def settle(self) -> None:
        """Return when the engine's thread has done all it was given, and the loop has heard of it."""
        done = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self.engine.call_on_thread(lambda: loop.call_soon_threadsafe(done.set_result, None))
        await done


def channel_options() -> list[tuple[str, Any]]:
    """Return options of a channel with a connection of its own, so that no test meets another's."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        # A window that does not grow, so that a reader who stops is felt soon.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.primary_user_agent", uuid.uuid4().hex),
    ]


@contextlib.asynccontextmanager
async def running(
    *,
    ready: bool = True,
    info: ModelInfo = MODEL_INFO,
    images: Any | None = None,
    connection: ConnectionConfig | None = None,
    security: SecurityConfig | None = None,
    tenants: TenantConfig | None = None,
    grammars: FakeGrammars | None = _ITS_OWN,
    telemetry: Telemetry | None = None,
    worker: Any = None,
    private_socket: Path | None = None,
    **settings: Any,
) -> AsyncIterator[RunningServer]:
    """Start a server with these settings of ServerConfig on a free loopback port.

    With TLS the house's own channel is of no use; see `secured` for channels that are. `worker` is what
    `worker_parts` returns, for a gateway's worker.
    """
    clock = FakeClock()
    router = Router(asyncio.get_running_loop())
    engine = FakeEngine(router)
    engine.heartbeat_time = clock.now
    tokenizer = FakeTokenizer()
    if grammars is _ITS_OWN:
        grammars = FakeGrammars()
    config = ServerConfig(**{"port": 0, "stuck_timeout_s": 30.0, **settings})
    server = RpcServer(
        config=Config(
            server=config,
            connection=connection or ConnectionConfig(),
            security=security or SecurityConfig(),
            tenant=tenants or TenantConfig(),
        ),
        seats=one_seat(engine, router, clock, grammars=grammars, config=config),
        clock=clock,
        telemetry=telemetry,
        worker=None if worker is None else only(worker),
        draw_seed=lambda: SEED,
    )
    try:
        address = await server.start(private_socket=private_socket)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            served = RunningServer(
                server, engine, router, clock, tokenizer, grammars or FakeGrammars(), channel
            )
            if ready:
                router.model_loaded(ServedModel(info, tokenizer, images))
                router.state_changed(EngineState.READY, None)
                await served.settle()
            yield served
    finally:
        await server.stop(grace_s=0)
        engine.close()


@pytest.fixture
async def served() -> AsyncIterator[RunningServer]:
    async with running() as started:
        yield started
