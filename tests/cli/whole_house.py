"""The server as `icehouse serve` composes it, in this process, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from icehouse_server.bootstrap.model_source import LocalModel
from icehouse_server.bootstrap.server import Server, build_server
from icehouse_server.cli import serve as command
from icehouse_server.clock import SystemClock
from icehouse_server.config import load_config
from icehouse_server.domain.model import EngineState
from icehouse_server.rpc.engine_client.router import Router

from tests.rpc.stubs import Stubs

BOUND_S = 60.0
"""Longest a test waits for the house before it fails."""


@dataclasses.dataclass
class WholeHouse(Stubs):
    """A house whose engine was started, and a channel to it."""

    house: Server
    channel: Any


@contextlib.asynccontextmanager
async def whole_house(
    model: Path, directory: Path, *, until: EngineState = EngineState.READY, **settings: Any
) -> AsyncIterator[WholeHouse]:
    """Start everything, wait for `until`, and stop everything in order.

    `settings` are `section__name=value`.
    """
    flags = {key.replace("__", "."): value for key, value in settings.items()}
    loaded = load_config(
        flags={
            "server.port": 0,
            "server.drain_grace_s": 0.0,
            "cache.directory": str(directory),
            "cache.free_space_floor_bytes": 0,
            **flags,
        },
        environ={},
    )
    narrator = command.Narrator(SystemClock())
    router = Router(asyncio.get_running_loop())
    local = LocalModel(model, "tiny")
    house = build_server(loaded.config, model=local, router=router, clock=SystemClock())
    address = await house.rpc.start()
    try:
        house.telemetry.start(house.rpc.poller)
        command._open_storage(house, loaded.config, narrator)
        house.engine.start()
        async with asyncio.timeout(BOUND_S):
            await command._until(house, until, asyncio.Event())
        async with grpc.aio.insecure_channel(address) as channel:
            yield WholeHouse(house, channel)
    finally:
        await command._drain(house, grace_s=0.0, narrator=narrator)
