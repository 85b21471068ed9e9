"""A server of several tiny models, as `icehouse serve` composes it, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import model_service_pb2, prompt_pb2
from icehouse_server.bootstrap.composition import OpenedEngine, Server
from icehouse_server.bootstrap.pool_parts import build_pool
from icehouse_server.cli import serve as command
from icehouse_server.clock import SystemClock
from icehouse_server.config import Config, load_config
from icehouse_server.config.sections import PooledModelConfig
from icehouse_server.device import find_device
from icehouse_server.pool.model_pool import ModelPool
from icehouse_server.pool.places import ModelNeeds

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.stubs import Stubs


@dataclasses.dataclass
class PoolServer(Stubs):
    """A started server, and a channel to it."""

    served: Server
    channel: Any

    @property
    def address(self) -> str:
        return self.served.rpc.address

    async def last_model(self) -> str:
        """Return the model that was used last."""
        places = self.pool._models.items()
        _, name = max((model.place.use_time, name) for name, model in places if model.place is not None)
        return name

    @property
    def pool(self) -> ModelPool[OpenedEngine]:
        assert self.served.pool is not None, "several are served"
        return self.served.pool

    def hold(self, held: str) -> threading.Event:
        """Have a model's files not be found before the event is set."""
        found, opener = threading.Event(), self.pool._opener
        locate = opener.locate

        def locate_later(name: str) -> ModelNeeds:
            assert name != held or found.wait(BOUND_S), "it was never let go"
            return locate(name)

        opener.locate = locate_later  # type: ignore[method-assign]
        return found

    async def states(self) -> dict[str, str]:
        """Return each model's state."""
        listed = await self.models.ListModels(model_service_pb2.ListModelsRequest())
        return {model.id: model_service_pb2.ModelState.Name(model.state) for model in listed.models}


def pool_config(directory: Path, models: Sequence[PooledModelConfig], **settings: Any) -> Config:
    """Return a configuration of these models; `settings` are `section__name=value`."""
    flags = {key.replace("__", "."): value for key, value in settings.items()}
    loaded = load_config(
        flags={
            "server.port": 0,
            "server.drain_grace_s": 0.0,
            "cache.directory": str(directory),
            "cache.free_space_floor_bytes": 0,
            "cache.block_token_count": 16,
            "cache.min_prefix_token_count": 0,
            **flags,
        },
        environ={},
    )
    return dataclasses.replace(loaded.config, models=tuple(models))


def entry(folder: Path, **settings: Any) -> PooledModelConfig:
    """Return a folder's model as a table of the settings."""
    return PooledModelConfig(model=str(folder), **settings)


@contextlib.asynccontextmanager
async def pool_server(
    directory: Path, models: Sequence[PooledModelConfig], **settings: Any
) -> AsyncIterator[PoolServer]:
    """Serve until the block ends; then stop everything in order."""
    config = pool_config(directory, models, **settings)
    narrator = command.Narrator(SystemClock())
    served = build_pool(config, device=find_device(), clock=SystemClock())
    address = await served.rpc.start()
    served.kv_events.start(lambda model: served.rpc.worker_addresses.get(model, address))
    command._open_storage(served, config, narrator)
    served.inference.start()
    try:
        assert served.pool is not None, "several are served"
        async with asyncio.timeout(BOUND_S):
            await served.pool.start()
        async with grpc.aio.insecure_channel(address) as channel:
            yield PoolServer(served, channel)
    finally:
        await command._drain(served, grace_s=0.0, narrator=narrator)


def question(model: str, tokens: Sequence[int], *, output_count: int = 8) -> messages.GenerateRequest:
    """Return a request for a model's continuation of tokens."""
    prompt = prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(ids=tokens))
    return messages.GenerateRequest(model=model, prompt=prompt, max_output_tokens=output_count)
