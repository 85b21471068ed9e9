"""A stop while a model is being loaded: what was begun for it ends in order."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse_server.domain.model import EngineState
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.system.models.pool_server import entry, pool_server, question
from tests.system.models.test_models import PROMPTS


async def test_a_stop_while_a_model_is_loaded_leaves_none_of_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would wait for them, and then be ended as one that is stuck."""
    before = set(threading.enumerate())
    begun, stopping, load_steps = threading.Event(), threading.Event(), ModelRunner.load_steps

    def load_at_the_stop(self: ModelRunner, **how: Any) -> Steps[Any]:
        begun.set()
        while not stopping.is_set():
            yield None
        return (yield from load_steps(self, **how))

    entries = [entry(tiny_model_dir(tmp_path, name)) for name in ("llama", "qwen3")]
    async with pool_server(tmp_path / "blocks", entries) as served:
        pool = served.pool
        pool.add_listener(lambda: pool.state is EngineState.DRAINING and stopping.set())
        monkeypatch.setattr(ModelRunner, "load_steps", load_at_the_stop)
        asking = asyncio.create_task(refused(served.inference.Generate(question("qwen3", PROMPTS[0]))))
        assert await asyncio.to_thread(begun.wait, BOUND_S)
        pool.begin_stop()
        assert (await asking).code is grpc.StatusCode.UNAVAILABLE
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("grammar"):
            await asyncio.to_thread(thread.join, BOUND_S)
            assert not thread.is_alive(), f"{thread.name} waits for work for ever"
